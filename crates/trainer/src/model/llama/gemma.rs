//! What `config.json` of Gemma 3 leaves out, and what it calls otherwise: the settings of a text model alone, or of the one
//! inside a model with a vision tower, in old and new versions of transformers.

use serde_json::{Map, Value, json};

/// `model_type` of models with a vision tower, whose text model has settings of its own.
const WITH_VISION: &str = "gemma3";
pub(super) const TEXT: &str = "gemma3_text";

/// Keys outside the text model's settings that are meant for it.
const SHARED: [&str; 3] = ["bos_token_id", "eos_token_id", "architectures"];

/// The same as a text model's settings, complete, by the keys of other families.
pub(super) fn normalise(settings: Value) -> Value {
    let settings = match settings {
        Value::Object(outer) if outer.get("model_type").is_some_and(|kind| kind == WITH_VISION) => {
            inner(outer)
        }
        Value::Object(own) if own.get("model_type").is_some_and(|kind| kind == TEXT) => own,
        other => return other,
    };
    let mut all = defaults();
    all.extend(settings.into_iter().filter(|(_, value)| !value.is_null()));
    if let Some(activation) = all.remove("hidden_activation") {
        all.insert("hidden_act".into(), activation);
    }
    separate_rope(&mut all);
    Value::Object(all)
}

/// The settings of the text model inside another.
fn inner(mut outer: Map<String, Value>) -> Map<String, Value> {
    let mut own = match outer.remove("text_config") {
        Some(Value::Object(own)) => own,
        _ => Map::new(),
    };
    for key in SHARED {
        if let (Some(value), false) = (outer.remove(key), own.contains_key(key)) {
            own.insert(key.into(), value);
        }
    }
    own.insert("model_type".into(), TEXT.into());
    own
}

/// Taken: the defaults of transformers' `Gemma3TextConfig`, on which published files rely.
fn defaults() -> Map<String, Value> {
    let all = json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true, "query_pre_attn_scalar": 256.0, "sliding_window": 4096,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
    });
    match all {
        Value::Object(all) => all,
        _ => Map::new(),
    }
}

/// Since version 5, each kind of layer has rotary settings of its own.
fn separate_rope(all: &mut Map<String, Value>) {
    let Some(Value::Object(rope)) = all.get("rope_parameters").cloned() else { return };
    if let Some(full) = rope.get("full_attention") {
        all.insert("rope_parameters".into(), full.clone());
    }
    if let Some(theta) = rope.get("sliding_attention").and_then(|local| local.get("rope_theta")) {
        all.insert("rope_local_base_freq".into(), theta.clone());
    }
}
