//! Model files made to do harm, as `hearth` meets them: each is refused in words, and takes neither the memory nor the
//! time of the run.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::json;
use tempfile::TempDir;
use trainer::text::Tokenizer;

use crate::{command, hearth, said, text};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// A small language model with this chat template.
fn with_template(folder: &TempDir, template: &str) -> PathBuf {
    let path = folder.path().to_owned();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden("llama/llama").join(file), path.join(file)).unwrap();
    }
    Tokenizer::bytes().save(&path).unwrap();
    fs::write(path.join("chat_template.jinja"), template).unwrap();
    path
}

fn refused(output: &Output, says: &[&str]) {
    let said = said(output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for part in says {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }
}

const DOUBLING: &str = "{% set all = namespace(x='x') %}{% for i in range(60) %}{% set all.x = all.x ~ all.x %}\
    {% endfor %}{{ all.x|length }}";
const ENDLESS: &str = "{% for i in range(99999) %}{% set x = range(99999)|list %}{% endfor %}{{ messages[0].content }}";

/// Fuel counts instructions: each of these takes its memory, or its stack, by a few.
#[test]
fn a_template_takes_no_more_than_its_limits() {
    let chain = format!("{{{{ 1{} }}}}", "+1".repeat(60_000));
    let memory = "takes more than 512 MiB";
    for (template, says) in [
        ("{{ [1]|batch(9999999999, 'x')|length }}", memory),
        ("{{ [1]|slice(9999999999)|list|length }}", memory),
        ("{{ 'a\\nb'|indent(9999999999)|length }}", memory),
        ("{{ '%9999999999d'|format(1)|length }}", memory),
        (DOUBLING, memory),
        (&chain, "has too many operators in a row"),
    ] {
        let folder = TempDir::new().unwrap();
        let base = with_template(&folder, template);
        let output = hearth(&["sample", "--base", text(&base), "--chat", "--prompt", "Ofen"]);
        refused(&output, &[says, "chat_template.jinja", "hint: ", "ChatML"]);
    }
}

/// What the program says to itself: a template, then a conversation for each line.
fn rendered(template: &str, lines: &[&str]) -> Output {
    let mut command = command(&["render-chat", "--seconds", "1", "--bytes", "536870912"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let first = json!({ "template": template, "tokens": { "eos_token": "</s>" } });
    let mut input = child.stdin.take().unwrap();
    writeln!(input, "{first}\n{}", lines.join("\n")).unwrap();
    drop(input);
    child.wait_with_output().unwrap()
}

#[test]
fn a_template_that_runs_on_is_ended() {
    let line =
        json!({ "messages": [{ "role": "user", "content": "a" }], "asks": true }).to_string();
    let output = rendered(ENDLESS, &[&line]);
    assert!(!output.status.success());
    assert!(said(&output).contains("runs longer than 1 s"), "{}", said(&output));
}

#[test]
fn conversations_are_answered_line_by_line() {
    let line = |asks: bool| {
        json!({ "messages": [{ "role": "user", "content": "a\nb" }], "asks": asks }).to_string()
    };
    let template = "{{ messages[0].content }}{{ eos_token }}{{ 1 // 0 if add_generation_prompt }}";
    let output = rendered(template, &[&line(false), &line(true), "no JSON"]);
    let lines: Vec<_> = std::str::from_utf8(&output.stdout).unwrap().lines().collect();
    assert_eq!(lines[0], r#"{"Ok":{"text":"","answers":[]}}"#);
    assert_eq!(lines[1], r#"{"Ok":{"text":"a\nb</s>","answers":[]}}"#);
    assert!(lines[2].starts_with(r#"{"Err":"#), "{lines:?}");
    assert_eq!(lines.len(), 3);
    assert!(!output.status.success());
}
