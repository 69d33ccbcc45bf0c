//! Templates of `tests/golden/ollama`, whose script runs what is written here with Go.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use super::*;

/// A model's chat template, and what must be made of it.
#[derive(Deserialize)]
struct ExpectedTemplate {
    jinja: String,
    bos: String,
    eos: String,
    /// Whether texts begin with a token.
    starts: bool,
    template: Option<String>,
    system: Option<String>,
}

fn golden(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden")).join(name)
}

/// A tokenizer with a chat template.
fn tokenizer(given: &ExpectedTemplate) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(golden("gguf/llama/tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let tokens = json["added_tokens"].as_array_mut().unwrap();
    for token in [&given.bos, &given.eos] {
        tokens.push(json!({
            "id": 300 + tokens.len(), "content": token, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }));
    }
    let config = json!({
        "bos_token": given.bos, "eos_token": given.eos, "add_bos_token": given.starts,
        "chat_template": given.jinja,
    });
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::open(folder.path()).unwrap()
}

#[test]
fn known_templates_are_recognised_by_what_they_write() {
    let text = std::fs::read_to_string(golden("ollama/templates.json")).unwrap();
    let all: BTreeMap<String, ExpectedTemplate> = serde_json::from_str(&text).unwrap();
    for (name, given) in &all {
        let parts = ModelfileParts { from: "./model.gguf", adapter: Some("./adapter.gguf") };
        let Modelfile { text, template } = Modelfile::new(parts, &tokenizer(given));
        assert_eq!(template, given.template.as_deref(), "{name}");
        assert!(text.starts_with("FROM ./model.gguf\nADAPTER ./adapter.gguf\n"), "{text}");
        assert_eq!(text.contains("TEMPLATE"), template.is_some(), "{text}");
        let system = given.system.as_ref().map(|it| format!("SYSTEM \"\"\"{it}\"\"\"\n"));
        assert_eq!(text.contains("SYSTEM"), system.is_some(), "{text}");
        assert!(text.contains(system.as_deref().unwrap_or_default()), "{text}");
        assert!(text.ends_with(&format!("PARAMETER stop \"{}\"\n", given.eos)), "{text}");
    }
}

#[test]
fn a_base_and_an_adapter_lie_beside_their_modelfile() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut base = LanguageModel::open(&golden("gguf/llama")).unwrap();
    let module = "model.layers.0.self_attn.q_proj".to_owned();
    let layer = crate::model::adapter::LayerWeights::lora(2, 4.0, vec![0.1; 64], vec![0.2; 64]);
    base.set_adapter(BTreeMap::from([(module, layer)]));
    let written = write_adapter(&mut base, "test", GgufMix::Q8_0, &out, &|_| true).unwrap();
    assert_eq!((written.n_layers, written.template), (1, None));
    let text = std::fs::read_to_string(&written.path).unwrap();
    assert_eq!(text, "FROM ./model.gguf\nADAPTER ./adapter.gguf\nPARAMETER stop \"<|end|>\"\n");
    for name in ["model.gguf", "adapter.gguf"] {
        weights::Catalog::open(&out.join(name)).unwrap();
    }
}
