//! Reports of a recorded run, of broken ones and of a very long one.

use std::fs;
use std::path::Path;

use super::live::LiveReport;
use super::write;
use crate::event::Event;
use crate::event::figures::RunFigures;
use crate::event::history::History;
use crate::event::lock::RunLock;

const RUN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/run");

/// A copy of the recorded run, its events changed.
fn run_with(change: impl Fn(String) -> String) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| fs::read_to_string(Path::new(RUN).join(name)).unwrap();
    fs::write(folder.path().join("events.jsonl"), change(read("events.jsonl"))).unwrap();
    fs::write(folder.path().join("config.toml"), read("config.toml")).unwrap();
    fs::create_dir(folder.path().join("samples")).unwrap();
    for entry in fs::read_dir(Path::new(RUN).join("samples")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join("samples").join(path.file_name().unwrap())).unwrap();
    }
    folder
}

fn page_of(folder: &Path) -> String {
    fs::read_to_string(write(folder).unwrap()).unwrap()
}

/// The only NaN that a page may have.
const NOT_FINITE_LABEL: &str = "NaN/Inf";

#[test]
fn the_later_of_two_parts_counts() {
    let folder = run_with(|events| events);
    let history = History::open(folder.path()).unwrap();
    let numbers: Vec<u64> = history.steps.iter().map(|step| step.step).collect();
    assert_eq!(numbers, (1..=120).collect::<Vec<_>>());
    // The first step of the later part, not the one that was lost.
    assert!(history.steps[60].secs > 3.0);
    assert!(history.steps[17].loss.is_nan() && history.steps[16].is_skipped);
    assert_eq!(history.parts.len(), 2);
    assert!(history.parts[0].ending.is_none() && history.parts[0].last_step == 70);

    let figures = RunFigures::of(&history).unwrap();
    assert_eq!((figures.steps, figures.planned_steps), (120, 120));
    assert_eq!(figures.best_validation.unwrap().0, 100);
    assert_eq!(figures.secs, history.parts[0].step_secs + 93.5);
    assert!((0.1..0.3).contains(&figures.final_loss.unwrap()), "{figures:?}");
}

#[test]
fn steps_after_the_checkpoint_that_a_run_resumed_from_are_dropped() {
    let cut = |events: String| {
        let lines: Vec<_> = events.lines().collect();
        let again = lines.iter().rposition(|line| line.contains("\"begin\"")).unwrap();
        lines[..=again].join("\n") + "\n"
    };
    let folder = run_with(cut);
    let history = History::open(folder.path()).unwrap();
    assert_eq!(history.steps.last().unwrap().step, 60);
    assert_eq!(history.validations.last().unwrap().0, 60);
    assert!(page_of(folder.path()).contains("steps lost: 10"));
}

#[test]
fn the_page_shows_every_series_and_nothing_as_markup() {
    let folder = run_with(|events| events);
    let page = page_of(folder.path());
    for shown in [
        ">finished<",
        "held out",
        "smoothed",
        "Learning rate",
        "Gradient norm",
        "waiting",
        "9.1 GiB of 9.6 GiB",
        "11.4 GiB of 11.4 GiB",
        "--planned:81.4%;--taken:81.3%",
        "a full bar is the limit, 14.0 GiB",
        "Memory of steps, GiB",
        "planned for the largest",
        "was killed at step 70 and resumed from step 60; steps lost: 10",
        "steps skipped because a gradient was not finite: 1",
        "steps whose loss was not finite: 1",
        "before training",
        "step 40",
        "adapter/fox-kohya.safetensors",
        "images = &quot;fox &lt;24&gt; images&quot;",
        "&amp; may &lt;rise&gt; on",
        "&lt;script&gt;alert(&quot;fox&quot;)&lt;/script&gt; &amp; &#39;sks&#39; fox",
    ] {
        assert!(page.contains(shown), "{shown} is not in the page");
    }
    assert_eq!(page.matches("src=\"data:image/png;base64,").count(), 8);
    assert_eq!(page.matches("<svg ").count(), 5);
    assert!(page.contains("<dt>NaN/Inf steps</dt><dd>2 "));
    let unlabelled = page.replace(NOT_FINITE_LABEL, "");
    for never in ["<script", "http", "NaN", "@import", "url("] {
        assert!(!unlabelled.contains(never), "{never} is in the page");
    }
}

#[test]
fn the_page_shows_what_a_policy_did_where_there_is_one() {
    let policy = |step: u64| {
        format!(
            "{{\"event\":\"policy\",\"step\":{step},\"entropy\":0.9,\"same_places\":0.3,\"word_ends\":0.2,\
             \"reward\":0.1,\"advantage_spread\":1.5}}\n"
        )
    };
    let with_policy =
        |events: String| format!("{}\n{}{}", events.trim_end(), policy(119), policy(120));
    let folder = run_with(with_policy);
    assert_eq!(History::open(folder.path()).unwrap().policy.len(), 2);
    let page = page_of(folder.path());
    for shown in ["<h2>Policy</h2>", "same places", "deviation of advantages"] {
        assert!(page.contains(shown), "{shown} is not in the page");
    }
    assert!(!page_of(run_with(|events| events).path()).contains("<h2>Policy</h2>"));
}

/// The recorded run as one of an editing model: its first prompt has a reference, its second one two.
fn editing_run(reference: &str) -> tempfile::TempDir {
    let folder = run_with(|events| {
        let with_references = |line: &str| {
            let names = match line {
                _ if !line.contains("\"sample\"") => return line.to_string(),
                _ if line.contains("-1.png") => format!("[\"{reference}\"]"),
                _ => "[\"samples/reference-2-1.png\", \"samples/reference-2-2.png\"]".into(),
            };
            format!("{}, \"references\": {names}}}", line.strip_suffix('}').unwrap())
        };
        events.split('\n').map(with_references).collect::<Vec<_>>().join("\n")
    });
    let samples = folder.path().join("samples");
    for name in ["reference-1-1.png", "reference-2-1.png", "reference-2-2.png"] {
        fs::copy(samples.join("step-000000-1.png"), samples.join(name)).unwrap();
    }
    folder
}

#[test]
fn edits_are_rows_from_the_reference_to_the_latest_image() {
    let folder = editing_run("samples/reference-1-1.png");
    let page = page_of(folder.path());
    let images = &page[page.find("<h2>Images</h2>").unwrap()..page.find("<h2>Files</h2>").unwrap()];
    // Each link and each heading in their order.
    let shown: Vec<&str> = images
        .split('<')
        .filter_map(|tag| tag.strip_prefix("a href=\"").or(tag.strip_prefix("h3>")))
        .map(|rest| rest.trim_end_matches("\">"))
        .collect();
    let expected = [
        "a photo of sks fox in the snow",
        "samples/reference-1-1.png",
        "samples/step-000000-1.png",
        "samples/step-000120-1.png",
        "a &lt;script&gt;alert(&quot;fox&quot;)&lt;/script&gt; &amp; &#39;sks&#39; fox, watercolour",
        "samples/reference-2-1.png",
        "samples/reference-2-2.png",
        "samples/step-000000-2.png",
        "samples/step-000120-2.png",
        "step 40",
        "samples/step-000040-1.png",
        "samples/step-000040-2.png",
        "step 80",
        "samples/step-000080-1.png",
        "samples/step-000080-2.png",
    ];
    assert_eq!(shown, expected);
    for (caption, n) in [("reference", 3), ("before training", 2), ("step 120", 2)] {
        let figures = images.matches(&format!("<figcaption>{caption}</figcaption>")).count();
        assert_eq!(figures, n, "{caption}");
    }
    assert_eq!(images.matches("src=\"data:image/png;base64,").count(), 11);
}

#[test]
fn references_outside_the_run_are_not_embedded() {
    let folder = editing_run("../secret.png");
    let page = page_of(folder.path());
    assert!(page.contains("<li>../secret.png is outside the run&#39;s folder</li>"), "{page}");
    assert!(!page.contains("href=\"../secret.png"));
    assert_eq!(page.matches("<figcaption>reference</figcaption>").count(), 2);
}

#[test]
fn the_report_of_a_running_run_refreshes() {
    let folder = run_with(|events| {
        let first: Vec<_> = events.lines().take(12).collect();
        first.join("\n") + "\n"
    });
    let report = folder.path().join("report.html");
    let lock = RunLock::take(folder.path()).unwrap();
    let live = LiveReport::begin(folder.path().into());
    live.observe(&Event::Phase { name: "encode".into() });
    live.observe(&Event::Checkpoint { step: 9, path: "checkpoints/step-000009".into() });
    // Waits for the report being written.
    drop(live);
    let page = fs::read_to_string(&report).unwrap();
    assert!(page.contains(">running<") && page.contains("http-equiv=\"refresh\""), "{page}");
    drop(lock);
    let page = page_of(folder.path());
    assert!(page.contains(">killed; it can be resumed") && !page.contains("refresh"), "{page}");
}

#[test]
fn events_without_figures_write_no_report() {
    let folder = run_with(|events| events);
    let live = LiveReport::begin(folder.path().into());
    live.observe(&Event::Phase { name: "encode".into() });
    drop(live);
    assert!(!folder.path().join("report.html").exists());
}

#[test]
fn short_and_broken_runs_have_charts_that_show_them() {
    let with = |n: usize, loss: Option<&str>| {
        run_with(|events| {
            let mut lines = events.lines().map(String::from);
            let begin = lines.next().unwrap().replace("\"steps\": 120", &format!("\"steps\": {n}"));
            let step = lines.find(|line| line.contains("\"step\": 9,")).unwrap();
            let steps = (1..=n).map(|n| {
                let step = step.replace("\"step\": 9,", &format!("\"step\": {n},"));
                let at = step.find("\"loss\"").unwrap();
                let end = at + step[at..].find(',').unwrap();
                let loss = loss.map_or_else(|| format!("0.{}", 10 + n), String::from);
                format!("{}\"loss\": {loss}{}", &step[..at], &step[end..])
            });
            [begin].into_iter().chain(steps).collect::<Vec<_>>().join("\n") + "\n"
        })
    };
    for (n, has_mean) in [(1, false), (4, false), (8, true), (40, true), (300, true)] {
        let page = page_of(with(n, None).path());
        assert_eq!(page.contains(">smoothed<"), has_mean, "{n}");
        assert_eq!(page.matches("<svg ").count(), 5, "{n}");
        assert!(!page.replace(NOT_FINITE_LABEL, "").contains("NaN"), "{n}");
    }
    let page = page_of(with(4, Some("null")).path());
    assert!(
        page.contains("No step had a finite loss") && page.contains("NaN/Inf steps</dt><dd>4 ")
    );
    assert!(!page.replace(NOT_FINITE_LABEL, "").contains("NaN"));
}

#[test]
fn phases_are_those_of_the_plan_and_of_earlier_parts() {
    let forget = |events: String| {
        let kept = |line: &&str| !(line.contains("\"memory\"") && line.contains("draw samples"));
        let events: Vec<&str> = events.lines().filter(kept).collect();
        let events = events.join("\n");
        // The later part found all in the cache, and was planned anew.
        let again = events.rfind("{\"event\": \"begin\"").unwrap();
        let planned =
            |name: &str, bytes: u64| format!("{{\"name\": \"{name}\", \"peak_bytes\": {bytes}}}, ");
        let later = events[again..].replacen(&planned("encode prompts", 10_307_921_510), "", 1);
        let later =
            later.replacen("\"peak_bytes\": 12219181957}", "\"peak_bytes\": 5368709120}", 1);
        let later = later.replace("12240656793", "6442450944");
        format!("{}{later}", &events[..again])
    };
    let folder = run_with(forget);
    let history = History::open(folder.path()).unwrap();
    let taken = |name: &str| history.phases.iter().find(|taken| taken.name.to_string() == name);
    assert_eq!(taken("train").map(|taken| taken.peak_bytes), Some(5 << 30));
    assert!(taken("draw samples").is_none());
    let page = page_of(folder.path());
    for shown in ["9.1 GiB of 9.6 GiB", "5.0 GiB of 6.0 GiB", "<em>8.9 GiB</em>"] {
        assert!(page.contains(shown), "{shown} is not in the page");
    }
}

#[test]
fn a_broken_line_is_left_out_and_named() {
    let folder = run_with(|events| events.replacen("\"step\": 9,", "\"step\": nine,", 1));
    let page = page_of(folder.path());
    assert!(page.contains("1 broken lines of events.jsonl are left out, the first is line 18"));

    for (events, what) in [("", "no beginning"), ("{\"event\":\"x\"}\n", "no beginning")] {
        let folder = run_with(|_| events.into());
        let error = write(folder.path()).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
        assert!(!folder.path().join("report.html").exists());
    }
}

#[test]
fn lost_images_are_named_and_a_run_without_steps_has_a_page() {
    let folder = run_with(|events| events.lines().next().unwrap().to_string() + "\n");
    let page = page_of(folder.path());
    assert!(page.contains(">killed; ") && !page.contains("<svg "));

    let folder = run_with(|events| events);
    fs::remove_file(folder.path().join("samples/step-000040-1.png")).unwrap();
    assert!(page_of(folder.path()).contains("samples/step-000040-1.png cannot be read"));
}

#[test]
fn a_run_of_100_000_steps_has_a_small_page() {
    let folder = run_with(|events| {
        let mut lines = events.lines().map(String::from);
        let begin = lines.next().unwrap();
        let step = lines.find(|line| line.contains("\"step\": 9,")).unwrap();
        let many = (1..=100_000).map(|n| {
            let loss = format!("\"loss\": 0.{:05}", n * 7919 % 100_000);
            let step = step.replace("\"step\": 9,", &format!("\"step\": {n},"));
            let at = step.find("\"loss\"").unwrap();
            let end = at + step[at..].find(',').unwrap();
            format!("{}{loss}{}", &step[..at], &step[end..])
        });
        [begin].into_iter().chain(many).collect::<Vec<_>>().join("\n") + "\n"
    });
    let page = page_of(folder.path());
    assert!(page.len() < 300_000, "{}", page.len());
    assert!(page.contains("100,000"));
}

#[test]
fn a_run_that_failed_says_why() {
    let failed =
        r#"{"event":"failed","step":70,"text":"no room <here>","hint":"a higher --limit"}"#;
    let folder = run_with(|events| {
        let first: Vec<_> = events.lines().take(12).chain([failed]).collect();
        first.join("\n") + "\n"
    });
    let page = page_of(folder.path());
    assert!(page.contains(">failed<") && !page.contains("killed"), "{page}");
    assert!(page.contains("After step 70: no room &lt;here&gt;<br>a higher --limit"), "{page}");
}
