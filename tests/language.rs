//! Language models against what transformers and PEFT computed (`tests/golden/llama`), and `verify`,
//! `sample` and `export` of them as they are run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use compute::{Device, Dtype, Tape};
use serde_json::Value;
use tempfile::TempDir;
use trainer::export::language::write_model;
use trainer::model::adapter::Adapters;
use trainer::model::build::Precision;
use trainer::model::llama::language_model::LanguageModel;
use trainer::model::llama::preset::LlamaPreset;
use trainer::model::recompute::Recompute;
use trainer::sample::text::{GenerationRequest, GenerativeBase};
use trainer::sample::token_sampler::TokenSampler;
use trainer::text::Tokenizer;
use trainer::verify::relative_error;

use crate::{hearth, printed, said, text};

fn of(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama").join(name);
    text(&path).to_owned()
}

#[test]
fn language_models_are_those_of_the_reference() {
    let others = ["phi3", "phi4", "phi4_long", "gemma3", "qwen3_moe", "qwen3_moe_mixed", "mixtral"];
    for folder in ["llama", "llama3", "qwen2", "qwen3"].into_iter().chain(others) {
        for dtype in ["f32", "bf16", "f16"] {
            let page = printed(&["verify", &of(folder), "--dtype", dtype]);
            assert!(page.contains("within tolerance"), "{page}");
        }
    }
    for folder in ["llama", "llama3", "qwen2", "qwen3", "phi4"] {
        printed(&["verify", &of(folder), "--quantise", "int8"]);
    }
    // The same text model with other names, beside a vision tower.
    let golden = of("gemma3/golden.safetensors");
    printed(&["verify", &of("gemma3_vision"), "--golden", &golden]);
    for name in ["qwen2", "phi3", "gemma3", "qwen3_moe"] {
        printed(&["verify", &of(name), "--adapter", &of(&format!("{name}/peft"))]);
    }
    // The rows of queries and keys lie in another order there, but for those of Qwen.
    for name in ["llama", "qwen3"] {
        let (weights, data) =
            (of(&format!("{name}.gguf")), of(&format!("{name}_gguf.safetensors")));
        printed(&["verify", &of(name), "--weights", &weights, "--golden", &data]);
    }
}

/// A model of 512 tokens, of which the first are bytes.
fn with_tokenizer(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("model");
    fs::create_dir(&path).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(of(&format!("llama/{file}")), path.join(file)).unwrap();
    }
    Tokenizer::bytes().save(&path).unwrap();
    path
}

fn sampled(base: &Path, more: &[&str]) -> String {
    let common = ["sample", "--base", text(base), "--prompt", "Ofen", "--dtype", "f32"];
    printed(&[&common, more].concat())
}

/// A compressed model, two steps old.
const COMPRESSED: &str = "
[base]
path = 'tiny'
random_init = true
[text]
path = 'text.txt'
length = 48
[compress]
keep_one_in = 4
[adapter]
kind = 'full'
[train]
steps = 2
[output]
folder = 'run'
";

#[test]
fn a_compressed_model_says_how_much_faster_it_is() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("text.txt"), "the quick brown fox. ".repeat(40)).unwrap();
    let job = folder.path().join("job.toml");
    fs::write(&job, COMPRESSED).unwrap();
    printed(&["train", text(&job), "--device", "cpu", "--quiet"]);
    let base = folder.path().join("run/model");
    let asked = ["--device", "cpu", "--max-tokens", "12", "--json"];
    let sample: Value = serde_json::from_str(&sampled(&base, &asked)).unwrap();
    assert!(sample["uncompressed_tokens_per_sec"].as_f64().unwrap() > 0.0, "{sample}");
}

#[test]
fn a_text_goes_to_standard_output() {
    let folder = TempDir::new().unwrap();
    let path = with_tokenizer(&folder);
    let asked = ["--temperature", "0", "--max-tokens", "12", "--json"];
    let likeliest: Value = serde_json::from_str(&sampled(&path, &asked)).unwrap();
    let base = LanguageModel::open(&path).unwrap();
    let tokenizer = Tokenizer::open(&path).unwrap();
    let request = GenerationRequest {
        prompt: tokenizer.encode("Ofen").unwrap(),
        max_tokens: 12,
        sampler: TokenSampler::greedy(),
    };
    let device = Device::cpu(2, 64 << 20).unwrap();
    let plain = Precision::plain(Dtype::F32);
    let (model, adapters) = base.load_adapted(&device, plain, &|_| true).unwrap();
    let mut ids = Vec::new();
    let is_end = |id: u32| tokenizer.is_eos(id) || base.config.eos_token_ids.contains(&id);
    base.generate(&device, &model, &adapters.params, &request, &is_end, &mut |id| {
        ids.push(id);
        true
    })
    .unwrap();
    assert_eq!(likeliest["texts"][0]["text"], tokenizer.decode(&ids));
    let drawn = |seed: &str| sampled(&path, &["--seed", seed, "--max-tokens", "30"]);
    assert_eq!(drawn("3"), drawn("3"));
    assert_ne!(drawn("3"), drawn("4"));
}

#[test]
fn a_text_has_figures_in_json() {
    let folder = TempDir::new().unwrap();
    let path = with_tokenizer(&folder);
    let two = ["--prompt", "Herd", "--max-tokens", "5", "--top-k", "9", "--top-p", "0.9", "--json"];
    let found: Value = serde_json::from_str(&sampled(&path, &two)).unwrap();
    let texts = found["texts"].as_array().unwrap();
    assert_eq!(texts.len(), 2);
    assert_eq!((&texts[1]["prompt"], &texts[1]["seed"]), (&"Herd".into(), &2.into()));
    assert_eq!(texts[0]["n_prompt_tokens"], 4);
    assert!(texts[0]["tokens_per_sec"].as_f64().unwrap() > 0.0, "{found}");
    let plan = sampled(&path, &["--plan"]);
    assert!(plan.starts_with("memory: "), "{plan}");
}

#[test]
fn image_options_are_refused_for_texts() {
    let folder = TempDir::new().unwrap();
    let path = with_tokenizer(&folder);
    let refused = |more: &[&str], says: &str| {
        let common = ["sample", "--base", text(&path), "--prompt", "Ofen"];
        let output = hearth(&[&common, more].concat());
        assert!(!output.status.success());
        assert!(said(&output).contains(says), "{}", said(&output));
    };
    refused(&["--out", "a.png"], "--out is for image models");
    refused(&["--max-tokens", "900"], "prompt and text are 904 tokens, the model is made for 256");
    refused(&["--temperature", "-1"], "temperature is -1");
    refused(&["--size", "64x64"], "--size is for image models");
    refused(&["--top-p", "2"], "top-p is 2");
    refused(&["--adapter", &of("../sd3/adapters/peft")], "adapter does not fit the base");
}

#[test]
fn an_adapter_is_exported_and_merged() {
    let folder = TempDir::new().unwrap();
    let [out, merged] = ["out", "merged"].map(|name| folder.path().join(name));
    let (adapter, base) = (of("qwen2/peft"), of("qwen2"));
    let common = ["export", &adapter, "--base", &base, "--json", "--out"];
    printed(&[&common[..], &[text(&out)]].concat());
    printed(&["verify", &base, "--adapter", text(&out.join("peft"))]);
    let settings = fs::read_to_string(out.join("peft/adapter_config.json")).unwrap();
    assert!(settings.contains(r#""task_type": "CAUSAL_LM""#), "{settings}");
    // As a run leaves it, and as people type it: the folder of the adapter, or that of the run.
    let run = folder.path().join("run");
    fs::create_dir(&run).unwrap();
    fs::rename(&out, run.join("adapter")).unwrap();
    for typed in [&run, &run.join("adapter"), &run.join("adapter/peft/adapter_model.safetensors")] {
        printed(&["verify", &base, "--adapter", text(typed)]);
    }
    let common = ["export", text(&run), "--base", &base, "--json", "--out"];
    let row = printed(&[&common[..], &[text(&merged), "--merge"]].concat());
    let row: Value = serde_json::from_str(&row).unwrap();
    assert_eq!(row["changed"], 8, "{row}");
    // What it gives alone is what the base gives with the adapter.
    let device = Device::cpu(2, 64 << 20).unwrap();
    let logits = |path: &Path, adapter: Option<&Path>| {
        let mut base = LanguageModel::open(path).unwrap();
        if let Some(adapter) = adapter {
            base.add_adapter(adapter).unwrap();
        }
        let plain = Precision::plain(Dtype::F32);
        let (model, adapters) = base.load_adapted(&device, plain, &|_| true).unwrap();
        let tape = Tape::inference(&device, &adapters.params, 0);
        let ids = device.upload([1, 6], &[3_u32, 1, 4, 1, 5, 9]).unwrap();
        let hidden = model.hidden_states(&tape, &ids, None, Recompute::None).unwrap();
        model.logits(&tape, &hidden).unwrap().tensor().to_f32_vec()
    };
    let expected = logits(Path::new(&base), Some(Path::new(&adapter)));
    assert!(relative_error(&expected, &logits(&merged, None)) < 1e-5);
    assert!(relative_error(&expected, &logits(Path::new(&base), None)) > 1e-2);
    // And as a file for llama.cpp, which is never written over another.
    let file = folder.path().join("notes.gguf");
    let row = printed(&[&common[..], &[text(&file)]].concat());
    assert!(row.contains(r#""format":"llama.cpp""#) && row.contains(r#""layers":8"#), "{row}");
    let again = hearth(&[&common[..], &[text(&file)]].concat());
    assert!(said(&again).contains("--out is there already"), "{}", said(&again));
    let other = hearth(&[&common[..], &[text(&out), "--format", "kohya"]].concat());
    assert!(said(&other).contains("--format kohya is for image models"), "{}", said(&other));
}

/// A model that was trained from scratch is a folder that can be opened again.
#[test]
fn an_exported_model_is_read_back() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("model");
    let tokenizer = Tokenizer::bytes();
    let base = LanguageModel::preset(LlamaPreset::Tiny, tokenizer.vocab_size(), 1).unwrap();
    let device = Device::cpu(2, 64 << 20).unwrap();
    let mut adapters = Adapters::full();
    base.load(&device, Precision::plain(Dtype::F32), &mut adapters, &|_| true).unwrap();
    let own: BTreeMap<_, _> =
        adapters.full_params.iter().map(|(name, key)| (name.as_str(), *key)).collect();
    let numbers = |name: &str| adapters.params.get(own[name]).to_f32_vec();
    for _ in 0..2 {
        write_model(&base, &tokenizer, weights::FileDtype::F32, u64::MAX, &out, &mut |_, want| {
            Ok(numbers(&want.name))
        })
        .unwrap();
    }
    let again = LanguageModel::open(&out).unwrap();
    assert_eq!(again.config, base.config);
    let files = again.files().unwrap().unwrap();
    for want in base.tensor_specs().unwrap() {
        assert_eq!(files.values(&want.name).unwrap(), numbers(&want.name), "{}", want.name);
    }
    assert_eq!(Tokenizer::open(&out).unwrap().fingerprint(), tokenizer.fingerprint());
    // And again of that folder, whose settings are kept.
    let second = folder.path().join("second");
    let mut same = |_: usize, want: &trainer::model::build::TensorSpec| files.values(&want.name);
    write_model(&again, &tokenizer, weights::FileDtype::Bf16, u64::MAX, &second, &mut same)
        .unwrap();
    let settings: Value =
        serde_json::from_slice(&fs::read(second.join("config.json")).unwrap()).unwrap();
    assert_eq!(settings["dtype"], "bfloat16");
    assert_eq!(LanguageModel::open(&second).unwrap().config, base.config);
}
