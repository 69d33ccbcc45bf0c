//! The one integration binary: drives the real program and holds the house rules.

#![allow(clippy::unwrap_used)] // In a test a panic is the report.

#[cfg(unix)]
mod cache;
#[cfg(unix)]
mod caption;
mod chat;
mod clip_score;
#[cfg(unix)]
mod data;
mod decoding;
mod demo;
#[cfg(unix)]
mod docs;
mod doctor;
#[cfg(unix)]
mod editing;
mod errors;
mod evaluate;
mod flux;
mod flux2;
mod flux_files;
#[cfg(target_os = "linux")]
mod hostile;
#[cfg(unix)]
mod hub;
mod import;
mod kandinsky5;
mod language;
mod merge;
mod misuse;
mod models;
mod pipelines;
mod program;
mod quantised;
mod qwen_image;
mod recipes;
#[cfg(unix)]
mod teach_edit;
mod teach_motion;
mod tidy;
#[cfg(target_os = "linux")]
mod torture;
#[cfg(unix)]
mod train;
mod tree;
mod video_vae;
mod weights;
mod words;
mod workload;
mod z_image;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder of the package: where the test runner says, else where it was built. What is built here can be run elsewhere.
fn package() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or(env!("CARGO_MANIFEST_DIR").into()).into()
}

/// `hearth` with these arguments. They run on the CPU unless they say otherwise: tests expect its
/// numbers, also on a computer with a card.
fn command(arguments: &[&str]) -> Command {
    let built = || env!("CARGO_BIN_EXE_hearth").into();
    let mut command = Command::new(std::env::var_os("CARGO_BIN_EXE_hearth").unwrap_or_else(built));
    command.args(arguments);
    // Whatever models this computer's user has.
    command.env("HF_HUB_CACHE", "no-models");
    for name in ["HF_HOME", "HF_TOKEN", "HF_ENDPOINT"] {
        command.env_remove(name);
    }
    let computes = ["cache", "caption", "clip-score", "demo", "plan", "sample", "train", "verify"];
    let is_typed = ["--device", "--machine"].iter().any(|key| arguments.contains(key));
    if !is_typed && arguments.first().is_some_and(|verb| computes.contains(verb)) {
        command.args(["--device", "cpu"]);
    }
    command
}

/// Runs it.
fn hearth(arguments: &[&str]) -> Output {
    command(arguments).output().expect("hearth starts")
}

/// Standard output of a run that must end well.
fn printed(arguments: &[&str]) -> String {
    let output = hearth(arguments);
    assert!(output.status.success(), "hearth {arguments:?} failed: {}", said(&output));
    String::from_utf8(output.stdout).expect("output is UTF-8")
}

/// Standard error.
fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("test paths are UTF-8")
}
