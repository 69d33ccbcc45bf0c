//! Settings of all families, as published files spell them.

use serde_json::{Value, json};

use super::*;

/// The settings of a file, with some keys of another value.
fn config(changes: &Value) -> Result<Config, String> {
    let mut file = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu", "eos_token_id": 2
    });
    for (key, value) in changes.as_object().unwrap() {
        file[key] = value.clone();
    }
    let config: Config = serde_json::from_value(file).map_err(|error| error.to_string())?;
    config.check().map_err(|Unsupported(problem)| problem)?;
    Ok(config)
}

#[test]
fn both_spellings_of_a_rotation_are_one() {
    let old = json!({"rope_theta": 5e5, "rope_scaling": {"factor": 8.0, "type": "llama3",
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}});
    let new = json!({"rope_theta": null, "rope_parameters": {"rope_theta": 5e5, "factor": 8.0,
        "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}});
    let (old, new) = (config(&old).unwrap(), config(&new).unwrap());
    assert_eq!(old, new);
    assert_eq!(old.rope.theta, 5e5);
    assert!(matches!(old.rope.scaling, Scaling::Llama3 { .. }));
    let linear = config(&json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
    assert_eq!(linear.rope.scaling, Scaling::Linear { factor: 2.0 });
}

#[test]
fn settings_that_are_written_read_the_same() {
    let qwen = json!({"model_type": "qwen3", "head_dim": 32, "eos_token_id": [3, 4],
        "tie_word_embeddings": true, "rope_scaling": {"rope_type": "linear", "factor": 4.0}});
    for changes in [json!({}), qwen, json!({"model_type": "qwen2", "eos_token_id": null})] {
        let config = config(&changes).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config, "{text}");
    }
}

#[test]
fn what_is_not_computed_is_refused() {
    let cases = [
        (json!({"model_type": "gemma"}), "unknown variant `gemma`, expected one of `llama`"),
        (json!({"hidden_act": "gelu"}), "hidden_act is gelu, expected silu"),
        (
            json!({"num_key_value_heads": 3}),
            "num_attention_heads 4 is no multiple of num_key_value_heads 3",
        ),
        (json!({"head_dim": 15}), "head_dim 15 is odd"),
        (json!({"num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json!({"vocab_size": 5_000_000_000_u64}), "vocab_size 5000000000 does not fit"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5, expected 1"),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "of type yarn, expected default",
        ),
        (json!({"rope_scaling": {"type": "linear"}}), "of type linear has no factor"),
        (json!({"model_type": "mistral", "sliding_window": 128}), "sliding_window is 128"),
        (json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 9}), "is 9"),
    ];
    for (changes, says) in cases {
        let error = config(&changes).unwrap_err();
        assert!(error.contains(says), "{changes}: {error}");
    }
    // A window that reaches all of a text, or is not in use, is none.
    config(&json!({"model_type": "mistral", "sliding_window": 256})).unwrap();
    config(&json!({"model_type": "qwen2", "sliding_window": 9})).unwrap();
}
