//! What readers need to know besides the matrices: rank and alpha, and which layers.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::{Format, Parts, kept};
use crate::model::adapter::Given;
use crate::model::adapter::read::Component;

/// The words in a file's header.
pub fn header(parts: &Parts, format: Format) -> BTreeMap<String, String> {
    let mut words = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    match format {
        Format::Peft | Format::Comfyui => {}
        Format::Diffusers => {
            let mut all = Map::new();
            for (component, layers) in kept(parts, format).filter(|(_, layers)| !layers.is_empty())
            {
                let prefix = component.folder();
                let config = config(layers).into_iter();
                all.extend(config.map(|(key, value)| (format!("{prefix}.{key}"), value)));
            }
            words.insert("lora_adapter_metadata".into(), Value::Object(all).to_string());
        }
        Format::Kohya => {
            let layers = kept(parts, format).flat_map(|(_, layers)| layers.values());
            let (rank, alpha) = usual(layers);
            words.insert("ss_network_module".into(), "networks.lora_sd3".into());
            words.insert("ss_network_dim".into(), rank.to_string());
            words.insert("ss_network_alpha".into(), alpha.to_string());
            words.insert("modelspec.sai_model_spec".into(), "1.0.1".into());
            words.insert("modelspec.architecture".into(), "stable-diffusion-3/lora".into());
        }
    }
    words
}

/// `adapter_config.json`.
pub fn peft(parts: &Parts) -> String {
    let none = BTreeMap::new();
    let own = kept(parts, Format::Peft).next();
    let mut config = config(own.map_or(&none, |(_, layers)| layers));
    config.insert("inference_mode".into(), json!(true));
    if own.is_some_and(|(component, _)| component == Component::Language) {
        config.insert("task_type".into(), json!("CAUSAL_LM"));
    }
    config.insert("base_model_name_or_path".into(), Value::Null);
    format!("{:#}\n", Value::Object(config))
}

/// PEFT's settings for these layers: what most have, and the exceptions by name.
fn config(layers: &BTreeMap<String, Given>) -> Map<String, Value> {
    let (rank, alpha) = usual(layers.values());
    let mut ranks = Map::new();
    let mut alphas = Map::new();
    for (layer, given) in layers {
        if given.rank != rank {
            ranks.insert(layer.clone(), json!(given.rank));
        }
        if given.alpha != alpha {
            alphas.insert(layer.clone(), number(given.alpha));
        }
    }
    let targets: BTreeSet<&String> = layers.keys().collect();
    let settings = json!({
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": number(alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": targets,
        "use_dora": layers.values().any(|given| given.magnitude.is_some()),
        "use_rslora": false,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
    });
    match settings {
        Value::Object(map) => map,
        _ => unreachable!("written as an object above"),
    }
}

/// A whole number as such: some readers want one.
fn number(alpha: f32) -> Value {
    if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) }
}

/// The rank and alpha that most layers have.
fn usual<'a>(layers: impl Iterator<Item = &'a Given>) -> (usize, f32) {
    let mut counts: HashMap<(usize, u32), usize> = HashMap::new();
    for given in layers {
        *counts.entry((given.rank, given.alpha.to_bits())).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|(kind, count)| (*count, *kind));
    most.map_or((1, 1.0), |((rank, alpha), _)| (rank, f32::from_bits(alpha)))
}
