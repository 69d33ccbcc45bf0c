//! The program as a user meets it: help, exit codes, errors, pipes, signals.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::{command, hearth, printed, said, text};

const VERBS: [&str; 23] = [
    "demo",
    "fetch",
    "doctor",
    "inspect",
    "shard",
    "convert",
    "caption",
    "cache",
    "plan",
    "train",
    "watch",
    "runs",
    "sample",
    "chat",
    "evaluate",
    "clip-score",
    "export",
    "import",
    "serve",
    "verify",
    "bench",
    "completions",
    "man",
];

#[test]
fn help_has_examples_and_exit_codes() {
    let help = printed(&["--help"]);
    for part in ["Examples:", "Exit codes:", "doctor", "130"] {
        assert!(help.contains(part), "{part:?} is missing from {help}");
    }
    for verb in VERBS {
        assert!(printed(&["help", verb]).contains("Examples:"), "{verb} has no examples");
    }
}

#[test]
fn wrong_usage_exits_with_2_and_names_the_nearest() {
    let output = hearth(&["docter"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("'doctor'"), "{}", said(&output));
    assert_eq!(hearth(&["doctor", "--record", "a", "--machine", "b"]).status.code(), Some(2));
    assert_eq!(hearth(&[]).status.code(), Some(2));
}

#[test]
fn failures_exit_with_1_and_say_what_why_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |arguments: &[&str], parts: &[&str]| {
        let output = hearth(arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(output.stdout.is_empty(), "a failure printed data");
        assert!(said.starts_with("error: ") && said.contains("\nhint: "), "{said}");
        for part in parts {
            assert!(said.contains(part), "{part:?} is missing from {said}");
        }
    };
    let missing = folder.path().join("missing.toml");
    fails(
        &["doctor", "--machine", text(&missing)],
        &["cannot read machine file", "missing.toml", "No such file"],
    );

    let odd = folder.path().join("odd.toml");
    fs::write(&odd, "title = 'x'\norigin = 'guessed'\n").unwrap();
    fails(
        &["doctor", "--machine", text(&odd)],
        &["not a machine file", "guessed", "recorded", "documented"],
    );

    fs::write(&odd, [0xff, 0xfe, 0x00]).unwrap();
    fails(&["doctor", "--machine", text(&odd)], &["cannot read machine file", "UTF-8"]);

    fails(&["doctor", "--machine", text(folder.path())], &["cannot read machine file"]);

    let nowhere = folder.path().join("no/such/folder");
    fails(&["man", "--out", text(&nowhere)], &["cannot write", "No such file"]);
}

#[test]
fn a_recording_never_overwrites() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    fs::write(&path, "precious").unwrap();
    let output = hearth(&["doctor", "--record", text(&path)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("file exists already"), "{}", said(&output));
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["completions", "zsh"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", said(&output));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_a_failure() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_hearth")).arg("doctor").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("No space left"), "{}", said(&output));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_watching_with_130() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["doctor", "--watch", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(first.starts_with("{\"hearth\":") && first.ends_with('}'), "{first}");
    let line = format!("kill -INT {}", child.id());
    let killed = Command::new("sh").args(["-c", &line]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn completions_and_manual_pages_are_complete() {
    let folder = tempfile::tempdir().unwrap();
    let script = printed(&["completions", "bash"]);
    assert!(script.contains("--record"), "an option is missing");
    let path = folder.path().join("hearth.bash");
    fs::write(&path, script).unwrap();
    if let Ok(status) = Command::new("bash").arg("-n").arg(&path).status() {
        assert!(status.success(), "bash cannot read its completions");
    }

    let pages = printed(&["man", "--out", text(folder.path())]);
    let names: Vec<_> = pages.lines().map(|line| line.rsplit('/').next().unwrap()).collect();
    let expected: Vec<_> = VERBS.iter().map(|verb| format!("hearth-{verb}.1")).collect();
    assert_eq!(names[0], "hearth.1");
    assert_eq!(names[1..], expected);
    let page = fs::read_to_string(folder.path().join("hearth-doctor.1")).unwrap();
    assert!(page.contains("hearth doctor") || page.contains("hearth\\-doctor"), "{page}");
    assert!(printed(&["man"]).contains("Exit codes"));
}

/// Names in files of strangers do not reach the terminal as anything but letters.
#[test]
fn names_cannot_steer_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let name = "a\u{1b}]0;title\u{7}\u{1b}[2J\u{202e}b\nc";
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![1], &[0]).unwrap();
    safetensors::serialize_to_file([(name, view)], None, &path).unwrap();
    let odd = folder.path().join("odd\u{1b}[8m\u{202e}.bin");
    fs::write(&odd, "hello").unwrap();
    for (arguments, shown) in [
        (&["inspect", text(&path), "--all"][..], "\\u001b]0;title\\u0007\\u001b[2J\\u202eb\\nc"),
        (&["inspect", text(&path), "--json"], "a\\u001b]0;title\\u0007\\u001b[2J\\u202eb\\nc"),
        (&["inspect", text(&odd)], "odd\\u001b[8m\\u202e.bin"),
    ] {
        // As on a terminal, with styles.
        let output = command(arguments).env("CLICOLOR_FORCE", "1").output().unwrap();
        let printed = [output.stdout, output.stderr].concat();
        let printed = String::from_utf8(printed).unwrap();
        assert!(printed.contains(shown), "{arguments:?}: {printed:?}");
        for steering in ["\u{1b}]", "\u{1b}[2J", "\u{1b}[8m", "\u{7}", "\u{202e}"] {
            assert!(!printed.contains(steering), "{arguments:?}: {printed:?}");
        }
    }
}

/// What a shell allows counts as what the machine has.
#[cfg(target_os = "linux")]
#[test]
fn the_limit_of_address_space_counts() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/lm-tiny.toml");
    let limit = |shell: &str| {
        let script = format!("{shell} exec \"$0\" plan \"$1\" --device cpu --json");
        let program = env!("CARGO_BIN_EXE_hearth");
        let output = Command::new("sh").args(["-c", &script, program, recipe]).output().unwrap();
        let plan: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        plan["limit_bytes"].as_u64().unwrap()
    };
    let (most, free) = (1_500_000 * 1024, limit(""));
    let limited = limit("ulimit -v 1500000;");
    assert!(limited < most && limited < free, "{limited} of {free}");
}
