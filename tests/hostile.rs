//! Model files made to do harm, as `hearth` meets them: each is refused in words, and takes neither the memory nor the
//! time of the run. On Linux, which enforces all limits.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;
use trainer::text::Tokenizer;
use trainer::text::chat::{ChatTemplate, Message, render_apart};

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

/// By the system, for memory that others hold, or by a user who looks for what is busy.
#[test]
fn a_template_goes_on_after_its_process_was_killed() {
    let ended = |source: &str| ChatTemplate::of_model(source, BTreeMap::new(), Path::new("x"));
    let message = |role: &str| Message::new(role, "Ofen");
    let messages = [message("user"), message("assistant")];
    render_apart(env!("CARGO_BIN_EXE_hearth").into());
    let template = ended("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}");
    let first = template.conversation(&messages).unwrap();
    assert_eq!(first.text, "user: Ofen;assistant: Ofen;");
    kill_renderers();
    assert_eq!(template.conversation(&messages).unwrap(), first);
    template.check().unwrap();
    let bomb = ended(DOUBLING);
    for _ in 0..2 {
        let said = bomb.conversation(&messages).unwrap_err();
        assert_eq!(said, "takes more than 512 MiB of memory");
        assert!(bomb.check().is_err());
    }
}

/// Those that this process has started by way of the library, which gives them ten seconds.
fn kill_renderers() {
    let of =
        |id: &str, file: &str| fs::read_to_string(format!("/proc/{id}/{file}")).unwrap_or_default();
    let parent = format!("PPid:\t{}\n", std::process::id());
    let ids = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let ids = ids.map(|id| id.into_string().unwrap());
    let ours: Vec<String> = ids
        .filter(|id| of(id, "status").contains(&parent))
        .filter(|id| of(id, "cmdline").contains("render-chat\0--seconds\x0010\0"))
        .collect();
    assert!(!ours.is_empty());
    assert!(Command::new("kill").arg("-9").args(ours).status().unwrap().success());
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

/// A copy of a safetensors file with another header and other values.
fn changed(from: &Path, to: &Path, header: impl Fn(&mut Value), values: impl Fn(&mut [u8])) {
    let bytes = fs::read(from).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (text, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let (mut json, mut data) = (serde_json::from_slice(text).unwrap(), data.to_vec());
    header(&mut json);
    values(&mut data);
    let text = json.to_string();
    let length = (text.len() as u64).to_le_bytes();
    fs::write(to, [&length[..], text.as_bytes(), &data].concat()).unwrap();
}

/// NaN in every format of floating-point numbers.
fn all_nan(values: &mut [u8]) {
    values.fill(0xff);
}

/// A black image would be written, and nobody would know why.
#[test]
fn an_adapter_that_makes_no_image_is_an_error() {
    let folder = TempDir::new().unwrap();
    let [adapter, image] = ["adapter.safetensors", "a.png"].map(|name| folder.path().join(name));
    let (base, from) = (golden("sd3/pipeline"), golden("sd3/adapters/diffusers.safetensors"));
    let sampled = |header: &dyn Fn(&mut Value), values: &dyn Fn(&mut [u8]), says: &[&str]| {
        changed(&from, &adapter, header, values);
        let what =
            ["sample", "--base", text(&base), "--adapter", text(&adapter), "--prompt", "fox"];
        let how = ["--size", "32x32", "--steps", "1", "--out", text(&image)];
        refused(&hearth(&[&what[..], &how].concat()), says);
        assert!(!image.exists());
    };
    let huge = |values: &mut [u8]| {
        values.as_chunks_mut::<4>().0.iter_mut().for_each(|value| *value = 1e30f32.to_le_bytes());
    };
    sampled(&|_| (), &all_nan, &["are not finite", "lora_A", "adapter.safetensors"]);
    sampled(&|_| (), &huge, &["image 1 is lost", "hint: "]);
    let i32s = |header: &mut Value| {
        for tensor in header.as_object_mut().unwrap().values_mut().filter(|it| it["dtype"] == "F32")
        {
            tensor["dtype"] = json!("I32");
        }
    };
    sampled(&i32s, &|_| (), &["cannot be converted from I32", "get the file in one of these"]);
    fs::write(&adapter, [&2u64.to_le_bytes()[..], b"{}"].concat()).unwrap();
    let what = ["sample", "--base", text(&base), "--adapter", text(&adapter), "--prompt", "fox"];
    refused(&hearth(&what), &["it has no tensors"]);
}

#[test]
fn a_language_model_that_says_nothing_is_an_error() {
    let folder = TempDir::new().unwrap();
    let base = with_template(&folder, "");
    let weights = "model.safetensors";
    changed(&golden("llama/llama").join(weights), &base.join(weights), |_| (), all_nan);
    let output = hearth(&["sample", "--base", text(&base), "--prompt", "Ofen"]);
    refused(&output, &["the text is lost", "hearth inspect --values"]);
}

#[test]
fn layers_that_are_not_there_are_refused_at_once() {
    let folder = TempDir::new().unwrap();
    let base = with_template(&folder, "");
    let path = base.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (n, says) in
        [(1u64 << 20, "ask for more than 148 tensors"), (1 << 40, "most is 4294967295")]
    {
        config["num_hidden_layers"] = json!(n);
        fs::write(&path, config.to_string()).unwrap();
        refused(&hearth(&["sample", "--base", text(&base), "--prompt", "Ofen"]), &[says]);
    }
}

/// Rust pads to 65,535 columns and no further.
#[test]
fn names_and_shapes_may_be_long() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("long.safetensors");
    let tensor = json!({ "dtype": "F32", "shape": vec![1; 70_000], "data_offsets": [0, 4] });
    let short = json!({ "dtype": "F32", "shape": [1], "data_offsets": [4, 8] });
    let header = json!({ "n".repeat(70_000): tensor, "m": short }).to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&path, [&length[..], header.as_bytes(), &[0; 8]].concat()).unwrap();
    for more in [&[][..], &["--all"], &["--values"], &["--json"]] {
        let output = hearth(&[&["inspect", text(&path)], more].concat());
        assert!(output.status.success(), "{}", said(&output));
    }
}
