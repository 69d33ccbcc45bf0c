//! `hearth chat` through a pipe.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use trainer::text::Tokenizer;

use crate::{command, hearth, said, text};

/// A model of 512 tokens, of which the first are bytes, for conversations of 256.
fn model(folder: &TempDir) -> String {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama/llama");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(file), folder.path().join(file)).unwrap();
    }
    Tokenizer::bytes().save(folder.path()).unwrap();
    text(folder.path()).to_owned()
}

fn chat(base: &str, more: &[&str], typed: &str) -> Output {
    let common = ["chat", "--base", base, "--dtype", "f32", "--max-tokens", "8", "--device", "cpu"];
    let mut command = command(&[&common, more].concat());
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = piped.spawn().unwrap();
    process.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
    process.wait_with_output().unwrap()
}

fn rows(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", said(output));
    let lines = std::str::from_utf8(&output.stdout).unwrap().lines();
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn each_line_is_answered() {
    let folder = TempDir::new().unwrap();
    let base = model(&folder);
    let answered = rows(&chat(&base, &["--json"], "hello\n\nand again\n"));
    assert_eq!(answered.len(), 2);
    assert_ne!(answered[0]["text"], answered[1]["text"]);
    let tokens = |row: &Value| row["n_prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&answered[1]) > tokens(&answered[0]) + 10, "{answered:?}");
    // The first answer is that of `hearth sample`, and nothing but answers is printed.
    let asked = [
        "sample",
        "--base",
        &base,
        "--prompt",
        "hello",
        "--chat",
        "--dtype",
        "f32",
        "--max-tokens",
        "8",
    ];
    let plain = chat(&base, &[], "hello\n");
    assert_eq!(plain.stdout, hearth(&asked).stdout);
    assert_eq!(said(&plain), "");
}

#[test]
fn a_conversation_goes_on_where_it_was_saved() {
    let folder = TempDir::new().unwrap();
    let (base, file) = (model(&folder), folder.path().join("chats.jsonl"));
    let name = text(&file);
    let greedy = ["--json", "--temperature", "0"];
    let typed = format!("/system be brief\nhello\n/save {name}\nwhy\n");
    let whole = rows(&chat(&base, &greedy, &typed));
    let saved: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let roles: Vec<&str> = saved["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    assert_eq!(saved["messages"][2]["content"], whole[0]["text"]);
    let rest = rows(&chat(&base, &greedy, &format!("/load {name}\nwhy\n/retry\n")));
    assert_eq!(rest[0]["text"], whole[1]["text"]);
    assert_eq!(rest[1]["text"], whole[1]["text"], "greedy answers do not depend on the seed");
    let anew = rows(&chat(&base, &greedy, &format!("/load {name}\n/reset\nwhy\n")));
    assert_ne!(anew[0]["n_prompt_tokens"], rest[0]["n_prompt_tokens"]);
}

#[test]
fn a_full_context_forgets_the_oldest_questions() {
    let folder = TempDir::new().unwrap();
    let base = model(&folder);
    let answered = rows(&chat(&base, &["--json"], &"a question\n".repeat(5)));
    let forgotten = |row: &Value| row["n_forgotten"].as_u64().unwrap();
    assert_eq!(forgotten(&answered[0]), 0);
    assert!(answered.iter().any(|row| forgotten(row) == 2), "{answered:?}");
    assert!(
        answered.iter().all(|row| row["n_prompt_tokens"].as_u64().unwrap() <= 248),
        "{answered:?}"
    );
    let refused = chat(&base, &[], &"long ".repeat(60));
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        said(&refused).contains("there is room for 248\nhint: shorten it"),
        "{}",
        said(&refused)
    );
}

#[test]
fn what_cannot_be_talked_to_is_refused() {
    let folder = TempDir::new().unwrap();
    let base = model(&folder);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let image = golden.join("sd3/pipeline");
    let cases: [(&str, &[&str], &str, &str); 6] = [
        (text(&image), &[], "", "expected a Llama, Mistral, Mixtral"),
        (&base, &["--context", "257"], "", "257 tokens, the model is made for 256"),
        (&base, &["--temperature", "-1"], "hello", "temperature is -1"),
        (&base, &["--limit", "1MB"], "", "chat does not fit"),
        (&base, &[], "/retry", "there is no question"),
        (&base, &[], "/load nowhere.jsonl", "nowhere.jsonl"),
    ];
    for (base, more, typed, says) in cases {
        let output = chat(base, more, typed);
        assert_ne!(output.status.code(), Some(0), "{says}");
        let said = said(&output);
        assert!(said.contains(says) && said.contains("hint: "), "{said}");
        assert!(output.stdout.is_empty());
    }
    let planned = chat(&base, &["--plan"], "");
    assert!(String::from_utf8_lossy(&planned.stdout).starts_with("memory: "));
}
