//! `hearth train` on texts: a tiny language model beside a plain loop of PyTorch's, recorded by
//! tests/golden/llama/learning/generate.py; going on after a stop; what comes of it.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use trainer::event::Event;
use trainer::text::Tokenizer;

use super::{check_memory, events, losses, warnings};
use crate::{hearth, printed, said, text};

/// Relative. Measured: 3.0e-6 after 50 steps.
const OF_LOSSES: f64 = 3e-5;

const JOB: &str = "
[base]
path = 'model'
dtype = 'f32'
[text]
path = 'texts.jsonl'
length = 64
[train]
steps = 50
batch_size = 4
[optimizer]
learning_rate = 3e-3
betas = [0.9, 0.95]
weight_decay = 0.1
[output]
folder = 'run'
save_every = 'off'
";

/// A folder with a model, its tokenizer, texts and a job.
pub struct Place(TempDir);

impl Place {
    pub fn new() -> Self {
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama/learning");
        let place = Self(tempfile::tempdir().unwrap());
        let model = place.path("model");
        fs::create_dir(&model).unwrap();
        for name in ["model/config.json", "model/model.safetensors", "texts.jsonl", "full.txt"] {
            fs::copy(golden.join(name), place.path(name)).unwrap();
        }
        Tokenizer::bytes().save(&model).unwrap();
        fs::write(place.path("job.toml"), JOB).unwrap();
        place
    }

    /// With the model of another family.
    fn with_model(family: &str) -> Self {
        let place = Self::new();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama");
        for name in ["config.json", "model.safetensors"] {
            fs::copy(golden.join(family).join(name), place.path("model").join(name)).unwrap();
        }
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Trains into a folder, with other values for some keys.
    pub fn train(&self, run: &str, set: &[&str], more: &[&str]) -> PathBuf {
        let (job, out) = (self.path("job.toml"), self.path(run));
        let set = set.iter().flat_map(|value| ["--set", value]);
        let words = ["train", text(&job), "--out", text(&out), "--quiet"];
        printed(&words.into_iter().chain(set).chain(more.iter().copied()).collect::<Vec<_>>());
        out
    }
}

#[test]
fn a_plain_loop_gives_the_same_losses() {
    let place = Place::new();
    let run = place.train("run", &["adapter.kind=full"], &[]);
    let recorded = fs::read_to_string(place.path("full.txt")).unwrap();
    let recorded: Vec<f64> =
        recorded.lines().map(|line| line.split_once(' ').unwrap().1.parse().unwrap()).collect();
    let events = events(&run);
    let found = losses(&events);
    assert_eq!(found.len(), recorded.len());
    let apart = found.iter().zip(&recorded).map(|(found, recorded)| (found / recorded - 1.0).abs());
    let apart = apart.fold(0.0, f64::max);
    assert!(apart < OF_LOSSES, "{apart:e}");
    let [taken, planned] = check_memory(&events);
    assert_eq!(taken, planned);
}

/// What comes of a run, byte for byte.
fn result(run: &Path, name: &str) -> Vec<u8> {
    fs::read(run.join(name)).unwrap()
}

#[test]
fn a_run_resumes_as_if_it_had_not_stopped() {
    let place = Place::new();
    let set = ["text.length=32", "train.batch_size=2", "adapter.dropout=0.1", "adapter.rank=2"];
    let both = |steps: &'static str| [&set[..], &[steps]].concat();
    let whole = place.train("whole", &both("train.steps=8"), &[]);
    place.train("parts", &both("train.steps=4"), &[]);
    let parts = place.train("parts", &both("train.steps=8"), &["--resume"]);
    let file = "adapter/peft/adapter_model.safetensors";
    assert!(result(&whole, file) == result(&parts, file), "other bytes than without a stop");
    let card = fs::read_to_string(whole.join("README.md")).unwrap();
    for said in ["library_name: peft", "PeftModel.from_pretrained", "trained on 8 sequences"] {
        assert!(card.contains(said), "{said} is not in {card}");
    }
}

/// Families whose layers are others than Llama's: plan, resume, and an adapter that is used.
#[test]
fn every_family_learns_as_planned_and_resumes() {
    for family in ["phi3", "gemma3", "qwen3_moe", "mixtral"] {
        let place = Place::with_model(family);
        let rate = "optimizer.learning_rate=0.01";
        let set = ["text.length=24", "train.batch_size=2", "adapter.rank=2", rate];
        let both = |steps: &'static str| [&set[..], &[steps]].concat();
        let whole = place.train("whole", &both("train.steps=8"), &[]);
        place.train("parts", &both("train.steps=4"), &[]);
        let parts = place.train("parts", &both("train.steps=8"), &["--resume"]);
        let file = "adapter/peft/adapter_model.safetensors";
        assert!(result(&whole, file) == result(&parts, file), "{family}: other bytes");
        let events = events(&whole);
        let [taken, planned] = check_memory(&events);
        assert_eq!(taken, planned, "{family}");
        let found = losses(&events);
        assert!(found[7] < found[0] - 0.2, "{family}: {found:?}");
        let short = both("train.steps=2");
        let full = ["text.length=24", "adapter.kind=full", "train.steps=2"];
        for (run, set) in [
            ("nf4", &[&short[..], &["base.quantise=nf4"]].concat()[..]),
            ("int8", &[&short[..], &["base.quantise=int8"]].concat()),
            ("all", &[&short[..], &["adapter.targets=all"]].concat()),
            ("full", &full),
        ] {
            let [taken, planned] = check_memory(&super::events(&place.train(run, set, &[])));
            assert_eq!(taken, planned, "{family} {run}");
        }
        let model = place.path("model");
        let asked = ["sample", "--base", text(&model), "--prompt", "fire", "--max-tokens", "20"];
        let adapted = [&asked[..], &["--adapter", text(&whole)]].concat();
        assert_ne!(printed(&adapted), printed(&asked), "{family}");
    }
}

#[test]
fn a_model_and_its_texts_are_written_and_measured() {
    let place = Place::new();
    let held_out = format!("text.validation={}", text(&place.path("texts.jsonl")));
    let set = [
        "adapter.kind=full",
        "train.steps=20",
        &held_out,
        "train.validate_every=10",
        "generate.prompts=['the fire ']",
        "generate.max_tokens=8",
        "generate.temperature=0",
    ];
    let run = place.train("run", &set, &[]);
    let events = events(&run);
    let measured: Vec<f64> = events
        .iter()
        .filter_map(|event| match event {
            Event::Validation { loss, .. } => Some(*loss),
            _ => None,
        })
        .collect();
    assert!(measured.len() == 3 && measured[2] < measured[0] - 1.0, "{measured:?}");
    let written = events.iter().filter(|event| matches!(event, Event::TextSample { .. })).count();
    assert_eq!(written, 2);
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.contains("<h2>Texts</h2>") && page.contains("the fire "));
    // What was written is a model like any other.
    let base = run.join("model");
    let again = place.train("again", &["train.steps=1"], &["--base", text(&base)]);
    let first = losses(&super::events(&again))[0];
    assert!((first - measured[2]).abs() < 1e-4, "{first} {}", measured[2]);
}

#[test]
fn unreadable_texts_are_named_with_their_line() {
    let place = Place::new();
    let mut lines = fs::read_to_string(place.path("texts.jsonl")).unwrap();
    lines.push_str("{\"text\": \n{\"words\": 1}\n");
    fs::write(place.path("texts.jsonl"), lines).unwrap();
    let run = place.train("run", &["train.steps=1", "text.length=256"], &[]);
    let events = events(&run);
    let warned = warnings(&events);
    let too_long = "sequences have 256 tokens, the model was made for 128";
    assert!(warned.iter().any(|text| text == too_long), "{warned:?}");
    let left_out = events.iter().find_map(|event| match event {
        Event::LeftOut(left_out) => Some(left_out.to_string()),
        _ => None,
    });
    let expected = "2 of 6 records left out: 1 not JSON (texts.jsonl line 5), 1 with unknown keys (texts.jsonl line 6)";
    assert_eq!(left_out.as_deref(), Some(expected));
    fs::write(place.path("texts.jsonl"), "{}\n").unwrap();
    let (job, out) = (place.path("job.toml"), place.path("none"));
    let output = hearth(&["train", text(&job), "--out", text(&out), "--quiet"]);
    let said = said(&output);
    assert!(said.contains("error: ") && said.contains("hint: "), "{said}");
}
