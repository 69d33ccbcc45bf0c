//! What is answered to which request. Every path is spelled out here; ids and numbers are looked up, and nothing of a
//! request becomes part of a file's path.

use std::path::{Component, Path};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::json;
use trainer::TrainerError;
use trainer::event::request::{self, RunRequest};
use weights::plain_file::open_own;

use super::follow::FollowedRun;
use super::http::{HttpRequest, HttpResponse, HttpStatus};
use super::index::RunIndex;
use super::launch::RunLauncher;
use super::metrics::{self, MetricsFormat};

/// Files that the page is made of.
const ASSETS: [(&str, &str, &str); 5] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("/app.js", "text/javascript; charset=utf-8", include_str!("page/app.js")),
    ("/run.js", "text/javascript; charset=utf-8", include_str!("page/run.js")),
    ("/chart.js", "text/javascript; charset=utf-8", include_str!("page/chart.js")),
];

/// Samples that are served, by the end of their name.
const MEDIA: [(&str, &str); 6] = [
    ("png", "image/png"),
    ("jpg", "image/jpeg"),
    ("webp", "image/webp"),
    ("gif", "image/gif"),
    ("mp4", "video/mp4"),
    ("webm", "video/webm"),
];

/// What requests are answered from.
pub struct WebRoutes {
    pub index: Arc<RunIndex>,
    /// None where nothing may be asked of runs or started.
    pub launcher: Option<RunLauncher>,
}

/// An answer, whole or a stream.
pub enum WebAnswer {
    Whole(HttpResponse),
    Stream { run: Arc<FollowedRun>, after: u64, epoch: u64 },
}

impl WebRoutes {
    /// The answer to a request that was let in.
    pub fn answer(&self, request: &HttpRequest) -> WebAnswer {
        let parts: Vec<&str> = request.path.split('/').skip(1).collect();
        if request.is_post {
            return WebAnswer::Whole(self.change(&parts, request));
        }
        if let ["api", "runs", id, "events"] = parts[..]
            && let Some(run) = self.index.get(id)
        {
            let number = |text: Option<&str>| text.and_then(|text| text.parse().ok());
            let after = number(request.header("last-event-id")).or(number(request.query("after")));
            let epoch = number(request.query("epoch")).unwrap_or(0);
            return WebAnswer::Stream { run, after: after.unwrap_or(0), epoch };
        }
        WebAnswer::Whole(self.read(&parts, request))
    }

    fn read(&self, parts: &[&str], request: &HttpRequest) -> HttpResponse {
        if let Some((_, kind, text)) = ASSETS.iter().find(|(path, ..)| *path == request.path) {
            return HttpResponse::asset(kind, text).with("Cache-Control", "no-cache".into());
        }
        match *parts {
            ["healthz"] => HttpResponse::text("text/plain; charset=utf-8", "ok\n".into()),
            ["metrics"] => {
                let format = MetricsFormat::of(request.header("accept"));
                let runs = self.index.all();
                HttpResponse::text(
                    format.content_type(),
                    metrics::page(runs.iter().map(|it| &**it), format),
                )
            }
            ["api", "runs"] => self.list(),
            ["api", "jobs"] => match &self.launcher {
                Some(launcher) => HttpResponse::json(launcher.choices().to_string()),
                None => read_only(),
            },
            ["api", "runs", id] => {
                self.with_run(id, |run| HttpResponse::json(run.snapshot().to_string()))
            }
            ["api", "runs", id, "files", line] => self.with_run(id, |run| file(run, line, false)),
            ["api", "runs", id, "files", line, "clip"] => {
                self.with_run(id, |run| file(run, line, true))
            }
            _ => missing("there is no such page"),
        }
    }

    fn change(&self, parts: &[&str], request: &HttpRequest) -> HttpResponse {
        let Some(launcher) = &self.launcher else { return read_only() };
        match *parts {
            ["api", "runs", id, "requests"] => self.with_run(id, |run| ask(run, request)),
            ["api", "plan"] => typed(request, |form| launcher.plan(&form)),
            ["api", "start"] => typed(request, |ticket| launcher.start(&ticket)),
            _ => missing("nothing is changed there"),
        }
    }

    fn with_run(
        &self,
        id: &str,
        answer: impl FnOnce(&FollowedRun) -> HttpResponse,
    ) -> HttpResponse {
        self.index.get(id).map_or_else(|| missing("there is no such run"), |run| answer(&run))
    }

    fn list(&self) -> HttpResponse {
        let summaries = self.index.all().iter().map(|run| run.summary()).collect::<Vec<_>>();
        let is_changeable = self.launcher.is_some();
        HttpResponse::json(format!(
            r#"{{"version":"{}","is_changeable":{is_changeable},"runs":[{}]}}"#,
            env!("CARGO_PKG_VERSION"),
            summaries.join(",")
        ))
    }
}

/// The body as JSON of a type.
fn typed<T: DeserializeOwned>(
    request: &HttpRequest,
    answer: impl FnOnce(T) -> HttpResponse,
) -> HttpResponse {
    match serde_json::from_slice(&request.body) {
        Ok(value) => answer(value),
        Err(error) => {
            let problem = format!("the body is not the JSON that is expected: {error}");
            HttpResponse::refusal(HttpStatus::BadRequest, &problem, "docs/watching.md has examples")
        }
    }
}

/// Hands a request on to a run.
fn ask(run: &FollowedRun, request: &HttpRequest) -> HttpResponse {
    typed(request, |asked: RunRequest| match request::send(&run.folder, &asked) {
        Ok(id) => HttpResponse::json(json!({ "id": id }).to_string()),
        Err(error) => {
            let status = match error {
                TrainerError::Io { .. } => HttpStatus::Failed,
                _ => HttpStatus::Conflict,
            };
            HttpResponse::refusal(status, &error.to_string(), &error.hint())
        }
    })
}

/// A sample, by the line of the run's history that told of it. The path in that line is the run's word and may be
/// anything: it has to lead to a plain file of a known kind within the run's folder, through no link.
fn file(run: &FollowedRun, line: &str, is_clip: bool) -> HttpResponse {
    let path = run.look(|fold, _| {
        let image = fold.images.get(&line.parse().ok()?)?;
        if is_clip { image.clip.clone() } else { Some(image.path.clone()) }
    });
    let opened = path.and_then(|path| open_media(&run.folder, &path));
    opened.unwrap_or_else(|| missing("there is no such sample"))
}

fn open_media(folder: &Path, path: &Path) -> Option<HttpResponse> {
    let is_inner = path.components().all(|part| matches!(part, Component::Normal(_)));
    let end = path.extension()?.to_str()?.to_ascii_lowercase();
    let (_, kind) = MEDIA.iter().find(|(of, _)| *of == end).filter(|_| is_inner)?;
    let (folder, path) = (folder.canonicalize().ok()?, folder.join(path));
    if !path.parent()?.canonicalize().ok()?.starts_with(folder) {
        return None;
    }
    let file = open_own(&path, std::fs::OpenOptions::new().read(true)).ok()?;
    let bytes = file.metadata().ok()?.len();
    // The number of a line says the same for ever, but for a run that was begun anew.
    Some(HttpResponse::file(kind, file, bytes).with("Cache-Control", "private, max-age=60".into()))
}

fn missing(problem: &str) -> HttpResponse {
    HttpResponse::refusal(HttpStatus::NotFound, problem, "/ lists all runs")
}

fn read_only() -> HttpResponse {
    let hint = "start hearth serve without --read-only";
    HttpResponse::refusal(HttpStatus::Forbidden, "this server only shows runs", hint)
}
