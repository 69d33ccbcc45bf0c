//! Paths of another trainer, from where the job is. Trainers read them from the folder they were started in, which a
//! config does not say: it is the current one, unless the file is beside the config or above it.

use std::path::{Component, Path, PathBuf};

/// Where paths start.
pub(super) struct Places {
    /// The config's folder, and those above it.
    config: PathBuf,
    /// Where hearth was started.
    current: PathBuf,
    /// The job's folder.
    job: PathBuf,
}

/// Levels above a config in which files that it names are looked for: `config/examples/flux.yaml` is started two above.
const LEVELS: usize = 3;

impl Places {
    /// All three become absolute.
    pub fn new(config: &Path, current: &Path, job: &Path) -> Self {
        let folder = |path: &Path| normal(current.join(path).parent().unwrap_or(current));
        Self { config: folder(config), current: normal(current), job: folder(job) }
    }

    /// Where a path may lead, the likeliest first.
    pub fn candidates(&self, typed: &str) -> Vec<PathBuf> {
        let typed = Path::new(typed);
        let above = self.config.ancestors().take(LEVELS).map(Path::to_owned);
        let mut places = Vec::new();
        for folder in above.chain([self.current.clone()]) {
            let path = normal(&folder.join(typed));
            if !places.contains(&path) {
                places.push(path);
            }
        }
        places
    }

    /// The file or folder that a path means, if it is there.
    pub fn find(&self, typed: &str) -> Option<PathBuf> {
        self.candidates(typed).into_iter().find(|path| path.exists())
    }

    /// A path for the job: relative where it is below the job's folder, else absolute. One that is not there starts at
    /// the current folder, as in the other trainer.
    pub fn written(&self, typed: &str) -> String {
        let path = self.find(typed).unwrap_or_else(|| normal(&self.current.join(typed)));
        let below = path.strip_prefix(&self.job).ok().filter(|rest| !rest.as_os_str().is_empty());
        below.unwrap_or(&path).to_string_lossy().into_owned()
    }

    /// A model for the job. The hub's name of one that is not there stays a name.
    pub fn model(&self, typed: &str) -> String {
        if let Some(name) = hub_file(typed) {
            name
        } else if self.find(typed).is_none() && is_hub_name(typed) {
            typed.into()
        } else {
            self.written(typed)
        }
    }

    /// The same where `owner/name/file` is a file of the hub, if it is not there.
    pub fn model_file(&self, typed: &str) -> String {
        let is_file = typed.split('/').filter(|part| !part.is_empty()).count() == 3
            && FILES.iter().any(|end| typed.ends_with(end))
            && typed.starts_with(|c: char| c.is_ascii_alphanumeric());
        if is_file && self.find(typed).is_none() {
            format!("hf:{typed}")
        } else {
            self.model(typed)
        }
    }
}

/// Endings of models in one file.
const FILES: [&str; 5] = [".safetensors", ".gguf", ".ckpt", ".pt", ".sft"];

/// The name of a file of the hub whose address this is.
fn hub_file(typed: &str) -> Option<String> {
    let path = typed.strip_prefix("https://huggingface.co/")?;
    let path = path.split('?').next().unwrap_or(path);
    let parts: Vec<&str> = path.splitn(5, '/').collect();
    let [owner, name, "blob" | "resolve", revision, file] = parts[..] else { return None };
    let revision = if revision == "main" { String::new() } else { format!("@{revision}") };
    Some(format!("hf:{owner}/{name}{revision}/{file}"))
}

/// Whether it reads as `owner/name` on the hub.
pub(super) fn is_hub_name(typed: &str) -> bool {
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let is_file = FILES.iter().any(|end| typed.ends_with(end));
    let mut words = typed.split('/');
    let both = (words.next(), words.next(), words.next());
    matches!(both, (Some(owner), Some(name), None) if is_word(owner) && is_word(name)) && !is_file
}

/// Without `.` and, as far as that goes by name, without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lead_where_the_trainer_would_look() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir_all(root.join("trainer/config/data")).unwrap();
        std::fs::create_dir_all(root.join("trainer/images")).unwrap();
        std::fs::create_dir_all(root.join("jobs")).unwrap();
        let places =
            Places::new(Path::new("trainer/config/a.yaml"), root, Path::new("jobs/a.toml"));
        let at = |path: &str| root.join(path).to_string_lossy().into_owned();
        assert_eq!(places.written("data"), at("trainer/config/data"));
        assert_eq!(places.written("./images"), at("trainer/images"));
        assert_eq!(places.written("nowhere"), at("nowhere"));
        assert_eq!(places.written("jobs/out"), "out");
        assert_eq!(places.model("black-forest-labs/FLUX.1-dev"), "black-forest-labs/FLUX.1-dev");
        assert_eq!(
            places.model("models/flux1-dev.safetensors"),
            at("models/flux1-dev.safetensors")
        );
        assert_eq!(places.model("trainer/images"), at("trainer/images"));
        let file = |typed: &str| places.model_file(typed);
        assert_eq!(file("owner/name/a.safetensors"), "hf:owner/name/a.safetensors");
        assert_eq!(file("owner/name"), "owner/name");
        assert_eq!(file("/a/b/c.safetensors"), "/a/b/c.safetensors");
        let address = |rest: &str| places.model(&format!("https://huggingface.co/{rest}"));
        assert_eq!(address("a/b/blob/main/c.gguf"), "hf:a/b/c.gguf");
        assert_eq!(address("a/b/resolve/v2/d/c.gguf"), "hf:a/b@v2/d/c.gguf");
    }
}
