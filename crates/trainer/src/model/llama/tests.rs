//! Configs of all families, as in published files, and models against what transformers computed.

use std::path::{Path, PathBuf};

use compute::ops::IGNORE_INDEX;
use compute::{Device, Dtype, Gradients, Tape, Tensor};
use serde_json::{Value, json};
use weights::Catalog;
use weights::load::{LoadOptions, LoadRequest, load, load_f32};

use super::language_model::LanguageModel;
use super::preset::LlamaPreset;
use super::*;
use crate::model::adapter::Adapters;
use crate::model::build::Precision;
use crate::model::host::relative_error;
use crate::model::recompute::Recompute;

/// The settings of a file, with some keys of another value.
fn config(changes: &Value) -> Result<LlamaConfig, String> {
    let mut file = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu", "eos_token_id": 2
    });
    for (key, value) in changes.as_object().unwrap() {
        file[key] = value.clone();
    }
    let config: LlamaConfig = serde_json::from_value(file).map_err(|error| error.to_string())?;
    config.check().map_err(|Unsupported(problem)| problem)?;
    Ok(config)
}

#[test]
fn both_spellings_of_rope_settings_are_one() {
    let old = json!({"rope_theta": 5e5, "rope_scaling": {"factor": 8.0, "type": "llama3",
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}});
    let new = json!({"rope_theta": null, "rope_parameters": {"rope_theta": 5e5, "factor": 8.0,
        "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}});
    let (old, new) = (config(&old).unwrap(), config(&new).unwrap());
    assert_eq!(old, new);
    assert_eq!(old.rope.theta, 5e5);
    assert!(matches!(old.rope.scaling, RopeScaling::Llama3 { .. }));
    let linear = config(&json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
    assert_eq!(linear.rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn settings_that_are_written_read_the_same() {
    let qwen = json!({"model_type": "qwen3", "head_dim": 32, "eos_token_id": [3, 4],
        "tie_word_embeddings": true, "rope_scaling": {"rope_type": "linear", "factor": 4.0}});
    let long = json!({"type": "su", "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        "long_factor": [1.0, 2.5, 4.0, 5.5, 7.0, 8.5]});
    let phi = json!({"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 100,
        "original_max_position_embeddings": 64, "rope_scaling": long});
    let qwen2 = json!({"model_type": "qwen2", "eos_token_id": null});
    for changes in [json!({}), qwen, qwen2, phi] {
        let config = config(&changes).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<LlamaConfig>(&text).unwrap(), config, "{text}");
    }
}

/// The text model of a published Gemma 3 with a vision tower says little of itself.
#[test]
fn gemma_has_the_defaults_of_transformers() {
    let text = json!({"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}});
    let file = json!({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [1, 106], "text_config": text, "vision_config": {"hidden_size": 1152}});
    let config: LlamaConfig = serde_json::from_value(file).unwrap();
    config.check().unwrap_or_else(|problem| panic!("{problem:?}"));
    assert_eq!((config.vocab_size, config.head_dim, config.num_key_value_heads), (262_208, 256, 4));
    assert_eq!((config.window, config.local_rope_theta), (Some(1024), Some(1e4)));
    assert_eq!(config.full_attention, [5, 11, 17, 23, 29]);
    assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!((config.eos_token_ids.clone(), config.tie_word_embeddings), (vec![1, 106], true));
    // sqrt(2560) is 50.596; in bf16 the weights of transformers are scaled by 50.5.
    assert_eq!(config.embedding_scale(Dtype::Bf16), Some(50.5));
    let written = serde_json::to_value(&config).unwrap();
    assert_eq!(serde_json::from_value::<LlamaConfig>(written).unwrap(), config);
}

#[test]
fn experts_are_read_and_written() {
    let qwen = json!({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "norm_topk_prob": true, "decoder_sparse_step": 2});
    let mixtral = json!({"model_type": "mixtral", "num_local_experts": 4, "sliding_window": null});
    let expected = |n, k, intermediate_size, dense_layers: &[usize]| ExpertsConfig {
        num_experts: n,
        num_experts_per_tok: k,
        intermediate_size,
        norm_topk_prob: true,
        dense_layers: dense_layers.into(),
    };
    for (file, expected) in [(qwen, expected(8, 3, 24, &[0])), (mixtral, expected(4, 2, 96, &[]))] {
        let config = config(&file).unwrap();
        assert_eq!(config.experts.as_ref(), Some(&expected));
        let written = serde_json::to_value(&config).unwrap();
        assert_eq!(serde_json::from_value::<LlamaConfig>(written).unwrap(), config);
    }
}

/// As transformers: factors by the length of the text, the attention factor by how much longer the context became.
#[test]
fn long_texts_have_other_factors() {
    let rope_parameters = json!({"rope_type": "longrope", "rope_theta": 1e4,
        "original_max_position_embeddings": 64, "partial_rotary_factor": 0.25,
        "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]});
    let config = json!({"model_type": "phi3", "rope_parameters": rope_parameters});
    let LlamaConfig { rope, rotary_dim, .. } = self::config(&config).unwrap();
    assert_eq!(rotary_dim, 4);
    let frequencies = |length| rope.axis(rotary_dim, length).frequencies;
    assert_eq!(frequencies(64), [1.0, 0.01 / 2.0]);
    assert_eq!(frequencies(65), [0.25, 0.01 / 8.0]);
    let expected = (1.0 + 4f64.ln() / 64f64.ln()).sqrt();
    assert!((f64::from(rope.scaling.amplitude()) / expected - 1.0).abs() < 1e-6);
}

#[test]
fn unsupported_settings_are_refused() {
    let cases = [
        (json!({"model_type": "gemma"}), "unknown variant `gemma`, expected one of `llama`"),
        (json!({"hidden_act": "gelu"}), "hidden_act is gelu, expected silu"),
        (
            json!({"num_key_value_heads": 3}),
            "num_attention_heads 4 is no multiple of num_key_value_heads 3",
        ),
        (json!({"head_dim": 15}), "15 of head_dim 15 have rotary positions, which need pairs"),
        (json!({"num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json!({"vocab_size": 5_000_000_000_u64}), "vocab_size 5000000000 does not fit"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5, expected 1"),
        (
            json!({"model_type": "mixtral", "output_router_logits": true}),
            "output_router_logits is true, expected false",
        ),
        (json!({"model_type": "mixtral", "num_experts_per_tok": 9}), "num_experts_per_tok is 9"),
        (
            json!({"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh",
                "final_logit_softcapping": 30.0}),
            "final_logit_softcapping is 30, expected none",
        ),
        (
            json!({"model_type": "phi3", "partial_rotary_factor": 1.5}),
            "partial_rotary_factor is 1.5, expected 0 to 1",
        ),
        (
            json!({"rope_scaling": {"type": "longrope"}}),
            "of type longrope has no original_max_position_embeddings",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "of type yarn, expected default, linear, llama3 or longrope",
        ),
        (json!({"rope_scaling": {"type": "linear"}}), "of type linear has no factor"),
        (json!({"layer_types": ["chunked_attention"]}), "layer_types has chunked_attention"),
    ];
    for (changes, says) in cases {
        let error = config(&changes).unwrap_err();
        assert!(error.contains(says), "{changes}: {error}");
    }
}

#[test]
fn a_window_is_kept_to() {
    let window = |changes| config(&changes).unwrap().window;
    assert_eq!(window(json!({"model_type": "mistral", "sliding_window": 128})), Some(128));
    let used = json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"]});
    assert_eq!(window(used.clone()), Some(9));
    // One that reaches all of a text, or is not in use, is none.
    assert_eq!(window(json!({"model_type": "mistral", "sliding_window": 256})), None);
    assert_eq!(window(json!({"model_type": "qwen2", "sliding_window": 9})), None);
    assert_eq!(window(json!({"model_type": "mistral", "sliding_window": null})), None);

    let config = config(&used).unwrap();
    assert_eq!(config.full_attention, [0]);
    assert!(config.is_local(1) && !config.is_local(0));
    config.check_length(9).unwrap();
    let error = config.check_length(10).unwrap_err().to_string();
    assert_eq!(error, "a prompt of 10 tokens, the text encoder's sliding_window is 9");
    let written = serde_json::to_value(&config).unwrap();
    assert_eq!(serde_json::from_value::<LlamaConfig>(written).unwrap(), config);
}

/// Reference data of families whose blocks are others than Llama's.
pub const OTHER_BLOCKS: [&str; 7] =
    ["phi3", "phi4", "phi4_long", "gemma3", "qwen3_moe", "qwen3_moe_mixed", "mixtral"];

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama").join(name)
}

pub fn recorded(name: &str, tensor: &str) -> Vec<f32> {
    let catalog = Catalog::open(&golden(name).join("golden.safetensors")).unwrap();
    let tensor = catalog.find(tensor).unwrap();
    load_f32(&catalog, tensor, 0..tensor.numel()).unwrap()
}

/// Token ids of the reference data.
pub fn ids(name: &str, tensor: &str) -> Vec<u32> {
    let catalog = Catalog::open(&golden(name).join("golden.safetensors")).unwrap();
    let tensor = catalog.find(tensor).unwrap();
    let mut bytes = vec![0; tensor.numel() as usize * size_of::<i64>()];
    let wanted = vec![LoadRequest::whole(tensor, weights::FileDtype::I64, &mut bytes[..])];
    load(&catalog, wanted, LoadOptions::default(), &|_| true).unwrap();
    let (ids, _) = bytes.as_chunks::<8>();
    ids.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect()
}

/// The tokens of the reference data, and for each the one after it.
fn tokens(device: &Device, name: &str) -> [Tensor; 2] {
    let ids = ids(name, "in.input_ids");
    let after = |row: &[u32]| [&row[1..], &[IGNORE_INDEX]].concat();
    let targets: Vec<u32> = ids.chunks(24).flat_map(after).collect();
    [ids, targets].map(|all| device.upload([2, 24], &all).unwrap())
}

/// Settings in GGUF files are those of the folders they were made of.
#[test]
fn gguf_files_have_the_settings_of_their_folders() {
    for name in ["llama", "qwen3"] {
        let [file, folder] = [golden(&format!("{name}.gguf")), golden(name)]
            .map(|path| LanguageModel::open(&path).unwrap());
        let LlamaConfig { bos_token_id, eos_token_ids, .. } = folder.config.clone();
        assert_eq!(
            LlamaConfig { bos_token_id, eos_token_ids, ..file.config.clone() },
            folder.config
        );
        assert_ne!(file.fingerprint().unwrap(), folder.fingerprint().unwrap());
        assert_eq!(file.tokenizer(), Some(golden(&format!("{name}.gguf")).as_path()));
    }
}

/// A tied embedding has a gradient from both of its uses.
#[test]
fn gradients_of_the_whole_model_are_those_of_the_reference() {
    check_full_gradients(Dtype::F32, 1e-5);
    // Weights are rounded when they are loaded, and activations always; parameters are f32.
    check_full_gradients(Dtype::Bf16, 0.1);
}

fn check_full_gradients(dtype: Dtype, tolerance: f64) {
    let device = Device::cpu(2, 64 << 20).unwrap();
    let base = LanguageModel::open(&golden("llama3")).unwrap();
    let mut adapters = Adapters::full();
    let plain = Precision::plain(dtype);
    let model = base.load(&device, plain, &mut adapters, &|_| true).unwrap();
    let [ids, targets] = tokens(&device, "llama3");
    let names = [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
    ];
    for recompute in Recompute::ALL {
        let tape = Tape::training(&device, &adapters.params, 0)
            .keeping_attention(recompute.keeps_attention());
        let loss = model.loss(&tape, &ids, &targets, None, recompute).unwrap();
        let mut gradients = Gradients::default();
        tape.backward(&loss, &mut gradients).unwrap();
        for name in names {
            let (_, key) = adapters.full_params.iter().find(|(own, _)| own == name).unwrap();
            let expected = recorded("llama3", &format!("own_grad.{name}"));
            let apart = relative_error(&expected, &gradients.get(*key).unwrap().to_f32_vec());
            assert!(apart < tolerance, "{name} {dtype} {recompute:?}: {apart:e}");
        }
    }
    let trained: usize =
        adapters.params.values().iter().map(|value| value.shape().elements()).sum();
    let all: usize = base.tensor_specs().unwrap().iter().map(|want| want.shape.elements()).sum();
    assert_eq!(trained, all);
}

#[test]
fn a_presets_random_init_follows_from_its_seed() {
    let begun = |seed: u64, threads: usize| {
        let device = Device::cpu(threads, 64 << 20).unwrap();
        let base = LanguageModel::preset(LlamaPreset::Tiny, 300, seed).unwrap();
        let mut adapters = Adapters::full();
        let plain = Precision::plain(Dtype::F32);
        base.load(&device, plain, &mut adapters, &|_| true).unwrap();
        let numbers = |end: &str| {
            let (_, key) =
                adapters.full_params.iter().find(|(name, _)| name.ends_with(end)).unwrap();
            adapters.params.get(*key).to_f32_vec()
        };
        [numbers("embed_tokens.weight"), numbers("down_proj.weight"), numbers("norm.weight")]
    };
    let [table, adding, norm] = begun(7, 1);
    let deviation = |numbers: &[f32]| {
        (numbers.iter().map(|x| f64::from(x * x)).sum::<f64>() / numbers.len() as f64).sqrt()
    };
    assert!((deviation(&table) / 0.02 - 1.0).abs() < 0.02, "{}", deviation(&table));
    let expected = 0.02 / 8.0_f64.sqrt();
    assert!((deviation(&adding) / expected - 1.0).abs() < 0.02, "{}", deviation(&adding));
    assert!(norm.iter().all(|number| *number == 1.0));
    assert_eq!(begun(7, 2)[0], table);
    assert_ne!(begun(8, 1)[0], table);
    let of =
        |seed| LanguageModel::preset(LlamaPreset::Tiny, 300, seed).unwrap().fingerprint().unwrap();
    assert_eq!(of(7), of(7));
    assert_ne!(of(7), of(8));
}

/// Two documents in one sample have the loss, and the gradients, that they have apart.
#[test]
fn packed_documents_do_not_attend_to_each_other() {
    let device = Device::cpu(2, 64 << 20).unwrap();
    let base = LanguageModel::open(&golden("llama3")).unwrap();
    let mut adapters = Adapters::full();
    let plain = Precision::plain(Dtype::F32);
    let model = base.load(&device, plain, &mut adapters, &|_| true).unwrap();
    let ids = ids("llama3", "in.input_ids");
    let after = |document: &[u32]| [&document[1..], &[IGNORE_INDEX]].concat();
    let learn = |documents: &[&[u32]], first_keys: Option<&[u32]>| {
        let (all, after) = (documents.concat(), documents.iter().flat_map(|d| after(d)));
        let upload = |ids: &[u32]| device.upload([1, ids.len()], ids).unwrap();
        let (ids, targets) = (upload(&all), upload(&after.collect::<Vec<_>>()));
        let tape = Tape::training(&device, &adapters.params, 0);
        let loss = model.loss(&tape, &ids, &targets, first_keys, Recompute::Block).unwrap();
        let number = loss.tensor().to_f32_vec()[0];
        let mut gradients = Gradients::default();
        tape.backward(&loss, &mut gradients).unwrap();
        drop(loss);
        let all = gradients.all(adapters.params.values().len());
        (
            number,
            all.into_iter().flat_map(|gradient| gradient.unwrap().to_f32_vec()).collect::<Vec<_>>(),
        )
    };
    let (first, second) = (&ids[..10], &ids[10..24]);
    let [one, other] = [learn(&[first], None), learn(&[second], None)];
    let first_keys = [vec![0; 10], vec![10; 14]].concat();
    let packed = learn(&[first, second], Some(&first_keys));
    // The means are over 9 and 13 tokens.
    let mean = |a: f32, b: f32| (9.0 * a + 13.0 * b) / 22.0;
    assert!(
        (packed.0 / mean(one.0, other.0) - 1.0).abs() < 1e-6,
        "{} {} {}",
        packed.0,
        one.0,
        other.0
    );
    let apart: Vec<f32> = one.1.iter().zip(&other.1).map(|(a, b)| mean(*a, *b)).collect();
    assert!(relative_error(&apart, &packed.1) < 1e-5, "{:e}", relative_error(&apart, &packed.1));
    let seen = learn(&[first, second], None);
    assert!(relative_error(&apart, &seen.1) > 1e-2);
}
