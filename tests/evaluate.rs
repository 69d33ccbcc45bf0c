//! `hearth evaluate` as it is run; `tests/newcomer.py` compares its figures with transformers.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::{hearth, printed, said, text};

fn base() -> String {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf/smollm");
    text(&golden).to_owned()
}

fn files(folder: &TempDir) -> [String; 2] {
    let [texts, questions] = ["texts.jsonl", "quiz.jsonl"].map(|name| folder.path().join(name));
    fs::write(&texts, "{\"text\": \"a plan is a plan is a plan\"}\n".repeat(4)).unwrap();
    let lines = "{\"prompt\": \"a plan is\", \"choices\": [\"a plan\", \"fire\", \"hearth\"], \"answer\": 0}\n\
                 \n{\"prompt\": \"a plan is\", \"answer\": \"a plan\"}\n";
    fs::write(&questions, lines).unwrap();
    [texts, questions].map(|path| text(&path).to_owned())
}

#[test]
fn an_adapter_is_measured_beside_its_base() {
    let folder = TempDir::new().unwrap();
    let [texts, questions] = files(&folder);
    let run = folder.path().join("run");
    let (base, run) = (base(), text(&run).to_owned());
    printed(&[
        "train",
        "--text",
        &texts,
        "--base",
        &base,
        "--out",
        &run,
        "--quiet",
        "--steps",
        "30",
        "--batch",
        "1",
        "--set",
        "text.length=32",
        "--set",
        "optimizer.learning_rate=0.02",
        "--device",
        "cpu",
    ]);
    let common =
        ["evaluate", "--base", &base, "--adapter", &run, "--dtype", "f32", "--device", "cpu"];
    let asked =
        [&common[..], &["--text", &texts, "--questions", &questions, "--length", "64"]].concat();
    let report: Value =
        serde_json::from_str(&printed(&[&asked[..], &["--json"]].concat())).unwrap();
    let loss = |of: &str| report[of]["texts"]["loss"].as_f64().unwrap();
    assert!(loss("adapter") < 0.8 * loss("base"), "{report}");
    let perplexity = report["base"]["texts"]["perplexity"].as_f64().unwrap();
    assert!((perplexity.ln() - loss("base")).abs() < 1e-9);
    assert_eq!(report["base"]["choices"]["accuracy"]["n"], 1);
    assert_eq!(report["adapter"]["exact_match"]["n"], 1);
    let page = printed(&asked);
    for part in
        ["perplexity", "1 question with choices", "1 question with one answer", "run", "smollm"]
    {
        assert!(page.contains(part), "{part} is missing from\n{page}");
    }
    let kept = fs::read(Path::new(&run).join("evaluation.json")).unwrap();
    let kept: Value = serde_json::from_slice(&kept).unwrap();
    for model in ["base", "adapter"] {
        for scores in ["texts", "choices", "exact_match"] {
            assert_eq!(kept[model][scores], report[model][scores]);
        }
    }
    let shown = fs::read_to_string(Path::new(&run).join("report.html")).unwrap();
    let [before, after] = ["base", "adapter"].map(|of| format!("{:.4}</td>", loss(of)));
    for part in ["<h2>Evaluation</h2>", "tokens of ", "2 questions of ", &before, &after] {
        assert!(shown.contains(part), "{part} is missing from the report");
    }
    // A copy of the adapter alone is no run.
    let alone = folder.path().join("alone");
    fs::create_dir(&alone).unwrap();
    for entry in fs::read_dir(Path::new(&run).join("adapter/peft")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), alone.join(entry.file_name())).unwrap();
    }
    let alone = text(&alone);
    printed(&[
        "evaluate",
        "--base",
        &base,
        "--adapter",
        alone,
        "--text",
        &texts,
        "--device",
        "cpu",
    ]);
    assert!(!Path::new(alone).join("evaluation.json").exists());
}

#[test]
fn what_cannot_be_evaluated_is_refused() {
    let folder = TempDir::new().unwrap();
    let [texts, questions] = files(&folder);
    let wrong = folder.path().join("wrong.jsonl");
    fs::write(&wrong, "{\"prompt\": \"a\", \"choices\": [\"b\"], \"answer\": 0}\n").unwrap();
    let long = folder.path().join("long.jsonl");
    let prompt = "a plan ".repeat(200);
    fs::write(&long, format!("{{\"prompt\": \"{prompt}\", \"answer\": \"b\"}}\n")).unwrap();
    let (base, image) = (base(), base().replace("gguf/smollm", "sd3/pipeline"));
    let cases: [(&str, &[&str], &str); 6] = [
        (&image, &["--text", &texts], "expected a Llama, Mistral, Mixtral"),
        (&base, &["--text", &texts, "--length", "257"], "257 tokens, the model is made for 256"),
        (&base, &["--questions", text(&wrong)], "line 1 is no question: 1 choices, least is 2"),
        (&base, &["--questions", text(&long)], "the model is made for 256"),
        (&base, &["--questions", "nowhere.jsonl"], "nowhere.jsonl"),
        (&base, &["--questions", &questions, "--limit", "1MB"], "evaluation does not fit"),
    ];
    for (base, more, says) in cases {
        let output = hearth(&[&["evaluate", "--base", base, "--device", "cpu"], more].concat());
        assert_eq!(output.status.code(), Some(1), "{says}");
        let said = said(&output);
        assert!(said.contains(says) && said.contains("hint: "), "{said}");
    }
    let nothing = hearth(&["evaluate", "--base", &base]);
    assert_eq!(nothing.status.code(), Some(2));
}
