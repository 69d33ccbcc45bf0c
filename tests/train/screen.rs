//! What people see of a run: the live line in terminals of several widths, the last lines, `--quiet`.

use std::fs;
use std::process::Command;

use super::{Job, events};
use crate::{said, text};
use trainer::event::Event;
use trainer::report::format::number;

const SAMPLES: [&str; 5] = [
    "sample.prompts=[\"it's a fox\"]",
    "sample.size=64",
    "sample.steps=2",
    "sample.guidance_scale=2.0",
    "data.trigger='zwx'",
];

/// Runs a job in a terminal of so many columns; gives all that was written to it.
#[cfg(target_os = "linux")]
fn in_terminal(job: &Job, columns: usize) -> String {
    let (binary, file) = (env!("CARGO_BIN_EXE_hearth"), text(&job.file));
    let out = job.path(&format!("run-{columns}"));
    let line = format!(
        "stty rows 24 cols {columns}; exec '{binary}' train '{file}' --out '{}' --device cpu \
         --plain --set train.steps=3",
        text(&out)
    );
    let output = Command::new("script").args(["-qec", &line, "/dev/null"]).output().unwrap();
    let written = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{written}");
    written
}

/// The `script` of util-linux gives a program a terminal.
#[cfg(target_os = "linux")]
#[test]
fn the_live_line_fits_the_terminal() {
    let job = Job::new();
    // Narrow, with room for the speed of a fast machine.
    for (columns, has_memory) in [(80, true), (46, false)] {
        let written = in_terminal(&job, columns);
        let is_live = |line: &&str| line.contains("/3  loss");
        let lines: Vec<String> = written
            .split(['\r', '\n'])
            .filter(is_live)
            .map(|line| line.trim_start_matches("\u{1b}[K").to_owned())
            .collect();
        assert!(!lines.is_empty(), "{written}");
        for line in &lines {
            // Bars and figures have one column each.
            assert!(line.chars().count() < columns, "{columns}: {line}");
            assert!(line.contains("step"), "{columns}: {line}");
            assert_eq!(line.contains("planned"), has_memory, "{columns}: {line}");
        }
    }
}

#[test]
fn the_last_lines_name_folder_report_and_a_command_that_works() {
    let job = Job::new();
    let output = job.run(&SAMPLES, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let (run, shown) = (job.path("run"), String::from_utf8_lossy(&output.stdout).into_owned());
    let report = run.join("report.html");
    for named in [text(&run), text(&report)] {
        assert!(shown.contains(named), "{named} is not in {shown}");
    }
    assert!(said(&output).contains("trainable parameters in 14 layers"), "{}", said(&output));
    let command = shown.lines().find_map(|line| line.trim().strip_prefix("hearth sample"));
    let command = command.unwrap_or_else(|| panic!("{shown}"));
    assert!(command.contains("sd3/pipeline") && command.contains("--guidance 2"), "{command}");
    let drawn = job.path("drawn.png");
    let line =
        format!("'{}' sample {command} --out '{}'", env!("CARGO_BIN_EXE_hearth"), text(&drawn));
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    assert!(output.status.success(), "{line}\n{}", said(&output));
    assert!(drawn.is_file());
}

#[test]
fn the_same_loss_is_shown_everywhere() {
    let job = Job::new();
    let output = job.run(&["train.steps=8"], &[]);
    assert!(output.status.success(), "{}", said(&output));
    // The second part is shorter than what the loss is a mean of.
    let output = job.run(&["train.steps=9"], &["--resume"]);
    assert!(output.status.success(), "{}", said(&output));
    let run = job.path("run");
    let events = events(&run);
    let Some(Event::End(end)) = events.last() else { panic!("{events:?}") };
    let losses = super::losses(&events);
    let loss = end.loss.unwrap();
    assert!((loss - losses[7].midpoint(losses[8])).abs() < 1e-12, "{loss} {losses:?}");
    let read = |name: &str| fs::read_to_string(run.join(name)).unwrap();
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = [
        (shown, format!("{}, mean of the last 2 steps", number(loss))),
        (read("report.html"), format!("<dd>{} <small>mean of the last 2 steps", number(loss))),
        (read("README.md"), format!("| loss, mean of the last 2 steps | {} |", number(loss))),
    ];
    for (text, loss) in said {
        assert!(text.contains(&loss), "{loss} is not in {text}");
    }
}

#[test]
fn a_quiet_run_shows_warnings_and_nothing_else() {
    let job = Job::new();
    job.finish("first", &["train.steps=1"], &[]);
    job.remove("draw = 'neon'\ndraw_count = 5\n");
    fs::write(job.path("images").join("broken.png"), "not an image").unwrap();
    for words in [&["train", "--set", "train.steps=1"][..], &["cache"]] {
        let mut command = crate::command(&[words, &[text(&job.file), "--quiet"]].concat());
        let output = command.output().unwrap();
        let (said, shown) = (said(&output), String::from_utf8_lossy(&output.stdout).into_owned());
        assert!(output.status.success(), "{said}");
        assert_eq!(shown, "", "{words:?}");
        assert!(said.starts_with("warning: "), "{words:?}: {said}");
        assert!(!said.contains("loss"), "{words:?}: {said}");
    }
}
