//! Models of `tests/golden/gguf`, whose script checks such files with llama.cpp, written and read back.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use weights::Catalog;
use weights::load::load_f32;

use super::*;

/// What the `gguf` and `tokenizers` packages say of a model.
#[derive(Deserialize)]
struct ExpectedGguf {
    /// Names in GGUF by names of transformers.
    tensors: BTreeMap<String, String>,
    /// Tokens of [`TEXT`].
    ids: Vec<u32>,
}

/// Rotary factors, which no tensor of the folder is for.
const FACTORS: [&str; 3] = [ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS];

/// As in the script.
const TEXT: &str = "The fire in the hearth burnt low; it's 1234 o'clock!\n\n  Größe, naïve, 日本.";

fn golden(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/gguf")).join(name)
}

/// Writes a model in a format; gives what reads it again, and holds the file.
fn written(name: &str, mix: GgufMix) -> (tempfile::TempDir, LanguageModel, Tokenizer) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_folder(&golden(name), &path, mix, &|_| true).unwrap();
    let (base, tokenizer) = (LanguageModel::open(&path).unwrap(), Tokenizer::open(&path).unwrap());
    (folder, base, tokenizer)
}

fn check(name: &str, expected: &ExpectedGguf) {
    let (_folder, ours, tokenizer) = written(name, GgufMix::F32);
    let theirs = LanguageModel::open(&golden(name)).unwrap();
    let family = match theirs.config.family {
        LanguageFamily::Mistral => LanguageFamily::Llama,
        other => other,
    };
    assert_eq!(ours.config, LlamaConfig { family, ..theirs.config.clone() }, "{name}");
    let (ours, theirs) = (ours.catalog().unwrap(), theirs.catalog().unwrap());
    let is_own = |tensor: &&weights::TensorInfo| !FACTORS.contains(&tensor.name.as_str());
    assert_eq!(ours.tensors.iter().filter(is_own).count(), expected.tensors.len(), "{name}");
    for (theirs_name, ours_name) in &expected.tensors {
        let [mut ours, mut theirs] =
            [(ours, ours_name), (theirs, theirs_name)].map(|(catalog, name)| values(catalog, name));
        // Rows may be in another order, which the model's reader undoes, and llama.cpp has proven.
        for values in [&mut ours, &mut theirs] {
            values.sort_by(f32::total_cmp);
        }
        assert_eq!(ours, theirs, "{name} {ours_name}");
    }
    let ids = tokenizer.encode(TEXT).unwrap();
    let ids: Vec<u32> = tokenizer.bos().into_iter().chain(ids).collect();
    assert_eq!(ids, expected.ids, "{name}");
}

fn values(catalog: &Catalog, name: &str) -> Vec<f32> {
    let tensor = catalog.find(name).unwrap();
    load_f32(catalog, tensor, 0..tensor.numel()).unwrap()
}

#[test]
fn names_values_and_tokens_are_read_back() {
    let text = std::fs::read_to_string(golden("expected.json")).unwrap();
    let all: BTreeMap<String, ExpectedGguf> = serde_json::from_str(&text).unwrap();
    assert_eq!(all.len(), 7);
    for (name, expected) in &all {
        check(name, expected);
    }
}

/// Row r of a head of 8 lies where llama.cpp has it: those of both halves by turns.
#[test]
fn rows_of_queries_and_keys_are_permuted() {
    let theirs = component(&golden("llama"));
    for (name, format, is_permuted) in
        [("llama", GgufMix::F32, true), ("qwen2", GgufMix::F32, false)]
    {
        let (_folder, ours, _) = written(name, format);
        let theirs = if is_permuted { &theirs } else { &component(&golden(name)) };
        for (query, n_rows) in [("q", 32), ("k", 16)] {
            let to = values(ours.catalog().unwrap(), &format!("blk.1.attn_{query}.weight"));
            let from = values(theirs, &format!("model.layers.1.self_attn.{query}_proj.weight"));
            for row in 0..n_rows {
                let (head, at) = (row / 8 * 8, row % 8);
                let permuted = if is_permuted { head + at % 4 * 2 + at / 4 } else { row };
                assert_eq!(
                    from[row * 32..][..32],
                    to[permuted * 32..][..32],
                    "{name} {query} {row}"
                );
            }
        }
    }
}

fn component(folder: &Path) -> Catalog {
    Catalog::open(&folder.join("model.safetensors")).unwrap()
}

#[test]
fn matrices_have_the_format_and_vectors_are_f32() {
    for mix in [GgufMix::F16, GgufMix::Bf16, GgufMix::Q8_0] {
        let (_folder, ours, _) = written("llama3", mix);
        for tensor in &ours.catalog().unwrap().tensors {
            let is_matrix = tensor.shape.len() == 2;
            let expected = if is_matrix { mix.most() } else { GgufFormat::F32 };
            assert_eq!(tensor.encoding, expected.encoding(), "{}", tensor.name);
        }
    }
}

/// What llama.cpp made of a model by a mix: see `generate_mixes.py`.
#[derive(Deserialize)]
struct ExpectedMix {
    family: String,
    heads: [usize; 2],
    n_layers: usize,
    is_tied: bool,
    /// Shapes of tensors by name, but for the block's index.
    shapes: BTreeMap<String, Vec<u64>>,
    /// By mix and matrix, the formats of all layers, as `3 Q6_K, 5 Q4_K`.
    formats: BTreeMap<String, BTreeMap<String, String>>,
}

#[test]
fn mixes_are_those_of_llama_cpp() {
    let text = std::fs::read_to_string(golden("mixes.json")).unwrap();
    let all: BTreeMap<String, ExpectedMix> = serde_json::from_str(&text).unwrap();
    let plain = LanguageModel::open(&golden("llama")).unwrap().config;
    let mut n_checked = 0;
    for (name, case) in &all {
        let config = LlamaConfig {
            family: serde_json::from_value(case.family.clone().into()).unwrap(),
            num_attention_heads: case.heads[0],
            num_key_value_heads: case.heads[1],
            num_hidden_layers: case.n_layers,
            tie_word_embeddings: case.is_tied,
            ..plain.clone()
        };
        for (mix, expected) in &case.formats {
            let mix = match mix.as_str() {
                "q8_0" => GgufMix::Q8_0,
                "q6_k" => GgufMix::Q6K,
                "q5_k_m" => GgufMix::Q5KM,
                "q5_k_s" => GgufMix::Q5KS,
                "q4_k_m" => GgufMix::Q4KM,
                "q4_k_s" => GgufMix::Q4KS,
                other => panic!("{other}"),
            };
            for (tensor, formats) in expected {
                for (index, format) in layers(formats).into_iter().enumerate() {
                    let stored = tensor.replace('#', &index.to_string());
                    let found = mix.format(&config, &stored, &case.shapes[tensor]).format;
                    assert_eq!(found.encoding().to_string(), format, "{name} {mix:?} {stored}");
                    n_checked += 1;
                }
            }
        }
    }
    assert!(n_checked > 2000, "{n_checked}");
}

fn layers(runs: &str) -> Vec<&str> {
    runs.split(", ")
        .flat_map(|run| {
            let (n, format) = run.split_once(' ').unwrap();
            vec![format; n.parse().unwrap()]
        })
        .collect()
}

#[test]
fn narrow_matrices_fall_back_and_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let summary = write_folder(&golden("llama"), &path, GgufMix::Q4KM, &|_| true).unwrap();
    // Rows of 32 and 64: what would be Q4_K is Q5_0. Output, values and the last matmul of the second layer are Q8_0.
    let n_fallbacks: usize = summary.fallbacks.values().sum();
    let n_vectors = summary.formats["F32"];
    let counts = [&summary.formats["Q5_0"], &summary.formats["Q8_0"], &n_vectors].map(|n| *n);
    assert_eq!((counts, n_fallbacks), ([13, 3, 5], 15));
    let again = LanguageModel::open(&path).unwrap();
    assert_eq!(again.catalog().unwrap().metadata["general.file_type"], "15");
}

#[test]
fn special_tokens_and_templates_are_named() {
    let metadata = |name: &str| {
        let (_folder, ours, _) = written(name, GgufMix::F16);
        ours.catalog().unwrap().metadata.clone()
    };
    let qwen = metadata("qwen2");
    for (key, value) in [
        ("general.architecture", "qwen2"),
        ("general.file_type", "1"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "qwen2"),
        ("tokenizer.ggml.eos_token_id", "0"),
        ("tokenizer.ggml.add_bos_token", "false"),
        ("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"),
    ] {
        assert_eq!(qwen[key], value, "{key}");
    }
    let pre = |name: &str| metadata(name)["tokenizer.ggml.pre"].clone();
    assert_eq!(["llama", "smollm", "llama3"].map(pre), ["gpt-2", "smollm", "llama-bpe"]);
    let pieces = metadata("pieces");
    assert_eq!(pieces["tokenizer.ggml.model"], "llama");
    assert_eq!(pieces["tokenizer.ggml.add_bos_token"], "true");
}

#[test]
fn a_tokenizer_that_llama_cpp_does_not_know_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer_config.json"] {
        std::fs::copy(golden("llama").join(name), folder.path().join(name)).unwrap();
    }
    let json = std::fs::read_to_string(golden("llama").join("tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
    json["pre_tokenizer"] = serde_json::json!({ "type": "WhitespaceSplit" });
    let write = || {
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        let out = folder.path().join("model.gguf");
        let done = write_folder(folder.path(), &out, GgufMix::F16, &|_| true);
        assert!(!out.exists());
        done
    };
    let error = write().unwrap_err().to_string();
    assert_eq!(error, "llama.cpp has no pre-tokenizer like that of this model");
    // Cancelling leaves nothing behind either.
    let out = folder.path().join("model.gguf");
    let error = write_folder(&golden("llama"), &out, GgufMix::F16, &|_| false).unwrap_err();
    assert_eq!(error.to_string(), "interrupted");
    assert!(!out.exists());
}

/// Base and LoRA of GGUF files together are the merged model as a GGUF file, wherever its rows went.
#[test]
fn an_adapter_fits_the_base_that_was_written() {
    use crate::export::language::write_merged;
    use crate::model::adapter::LayerWeights;

    for (name, alphas) in [("llama", [2.0, 2.0]), ("qwen2", [2.0, 6.0])] {
        let mut base = LanguageModel::open(&golden(name)).unwrap();
        let layer = |module: &str, alpha: f32, rank: usize| {
            let weight = base.catalog().unwrap().find(&format!("{module}.weight")).unwrap();
            let [n_out, n_in] = [weight.shape[0] as usize, weight.shape[1] as usize];
            let some = |n: usize| (0..n).map(|at| (at as f32 * 0.37).sin()).collect();
            let (down, up) = (some(rank * n_in), some(n_out * rank));
            (module.to_owned(), LayerWeights::lora(rank, alpha, down, up))
        };
        let modules =
            ["self_attn.q_proj", "mlp.down_proj"].map(|it| format!("model.layers.1.{it}"));
        let layers = [layer(&modules[0], alphas[0], 3), layer(&modules[1], alphas[1], 2)];
        base.set_adapter(layers.into());
        let folder = tempfile::tempdir().unwrap();
        let [lora, merged, whole] =
            ["lora.gguf", "merged", "whole.gguf"].map(|it| folder.path().join(it));
        assert_eq!(write_adapter(&base, "test", &lora).unwrap(), 2);
        let tokenizer = Tokenizer::open(&golden(name)).unwrap();
        write_merged(&base, &tokenizer, weights::FileDtype::F32, &merged, &|_| true).unwrap();
        write_folder(&merged, &whole, GgufMix::F32, &|_| true).unwrap();
        let (_held, plain, _) = written(name, GgufMix::F32);
        let (lora, whole) = (Catalog::open(&lora).unwrap(), Catalog::open(&whole).unwrap());
        let alpha: f32 = lora.metadata["adapter.lora.alpha"].parse().unwrap();
        assert_eq!(alpha, if alphas[0] == alphas[1] { alphas[0] } else { 0.0 });
        for stored in ["blk.1.attn_q.weight", "blk.1.ffn_down.weight"] {
            let [a, b] = ["lora_a", "lora_b"].map(|end| values(&lora, &format!("{stored}.{end}")));
            let rank = lora.find(&format!("{stored}.lora_a")).unwrap().shape[0] as usize;
            let scale = if alpha == 0.0 { 1.0 } else { alpha / rank as f32 };
            let (old, new) = (values(plain.catalog().unwrap(), stored), values(&whole, stored));
            let width = a.len() / rank;
            for (at, (old, new)) in old.iter().zip(&new).enumerate() {
                let (row, column) = (at / width, at % width);
                let added =
                    (0..rank).map(|r| b[row * rank + r] * a[r * width + column]).sum::<f32>();
                assert!((old + scale * added - new).abs() < 1e-5, "{name} {stored} {at}");
            }
        }
    }
}

/// A file becomes a folder again, and a file in other formats.
#[test]
fn a_file_becomes_a_folder_with_its_values() {
    use crate::export::language::write_merged;

    for name in ["llama", "llama3", "pieces", "qwen2", "qwen3", "phi3"] {
        let (folder, ours, tokenizer) = written(name, GgufMix::F32);
        let out = folder.path().join("model");
        write_merged(&ours, &tokenizer, weights::FileDtype::F32, &out, &|_| true).unwrap();
        let [again, plain] = [&out, &golden(name)].map(|it| LanguageModel::open(it).unwrap());
        assert_eq!(again.config, ours.config, "{name}");
        let catalogs = [&again, &plain].map(|base| base.catalog().unwrap());
        for tensor in &catalogs[1].tensors {
            let [a, b] = catalogs.map(|catalog| values(catalog, &tensor.name));
            assert!(a == b, "{name} {}", tensor.name);
        }
        let ids = |path: &Path| Tokenizer::open(path).unwrap().encode(TEXT).unwrap();
        assert_eq!(ids(&out), ids(&golden(name)), "{name}");
        let small = folder.path().join("small.gguf");
        let summary = write_folder(&ours.path, &small, GgufMix::Q8_0, &|_| true).unwrap();
        let (_folder, direct, _) = written(name, GgufMix::Q8_0);
        let small = Catalog::open(&small).unwrap();
        for tensor in &direct.catalog().unwrap().tensors {
            assert_eq!(
                values(&small, &tensor.name),
                values(direct.catalog().unwrap(), &tensor.name)
            );
        }
        assert!(summary.formats["Q8_0"] >= 10 && summary.fallbacks.is_empty());
    }
}

/// What is merged on the way is what a merged folder holds.
#[test]
fn a_merged_file_is_that_of_the_merged_folder() {
    use crate::export::language::write_merged;
    use crate::model::adapter::LayerWeights;

    let some = |n: usize| (0..n).map(|at| (at as f32 * 0.37).sin()).collect();
    let layer = |n_out: usize| LayerWeights::lora(2, 4.0, some(2 * 32), some(n_out * 2));
    let modules = [("self_attn.q_proj", 32), ("mlp.up_proj", 64)];
    let layers = modules.map(|(it, n_out)| (format!("model.layers.1.{it}"), layer(n_out)));
    let folder = tempfile::tempdir().unwrap();
    let [plain, merged, expected] =
        ["plain.gguf", "merged", "expected.gguf"].map(|it| folder.path().join(it));
    write_folder(&golden("llama"), &plain, GgufMix::F32, &|_| true).unwrap();
    for path in [&golden("llama"), &plain] {
        let mut base = LanguageModel::open(path).unwrap();
        let tokenizer = Tokenizer::open(path).unwrap();
        base.set_adapter(layers.clone().into());
        let out = folder.path().join("out.gguf");
        write_model(&base, &tokenizer, GgufMix::F32, &out, &|_| true).unwrap();
        _ = std::fs::remove_dir_all(&merged);
        write_merged(&base, &tokenizer, weights::FileDtype::F32, &merged, &|_| true).unwrap();
        write_folder(&merged, &expected, GgufMix::F32, &|_| true).unwrap();
        let [out, expected] = [&out, &expected].map(|it| Catalog::open(it).unwrap());
        for tensor in &expected.tensors {
            assert!(
                values(&out, &tensor.name) == values(&expected, &tensor.name),
                "{}",
                tensor.name
            );
        }
    }
}
