//! Metadata of adapter files: rank, alpha and target modules.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::{AdapterFormat, kept};
use crate::model::adapter::names::CLIP_PREFIX;
use crate::model::adapter::read::Component;
use crate::model::adapter::{AdapterWeights, LoraWeights};
use crate::model::build::TensorSpec;
use crate::model::diffusion::family::ExportMetadata;

/// The metadata of a file's header, for an adapter of a model of this family.
pub fn header(
    parts: &AdapterWeights,
    format: AdapterFormat,
    family: Option<&ExportMetadata>,
) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    match format {
        AdapterFormat::Peft | AdapterFormat::Comfyui => {}
        AdapterFormat::Diffusers => {
            let mut all = Map::new();
            for (component, layers) in kept(parts, format).filter(|(_, layers)| !layers.is_empty())
            {
                let prefix = component.folder();
                let config = config(layers).into_iter();
                all.extend(config.map(|(key, value)| (format!("{prefix}.{key}"), value)));
            }
            metadata.insert("lora_adapter_metadata".into(), Value::Object(all).to_string());
        }
        AdapterFormat::Kohya => {
            let layers = kept(parts, format).flat_map(|(_, layers)| layers.values());
            let (rank, alpha) = usual(layers);
            metadata.insert("ss_network_dim".into(), rank.to_string());
            metadata.insert("ss_network_alpha".into(), alpha.to_string());
            metadata.insert("modelspec.sai_model_spec".into(), "1.0.1".into());
            if let Some(ExportMetadata { network, architecture, .. }) = family {
                metadata.insert("ss_network_module".into(), (*network).into());
                metadata.insert("modelspec.architecture".into(), (*architecture).into());
            }
        }
    }
    metadata
}

/// `adapter_config.json`, for an adapter of a model that has these tensors.
pub fn peft(parts: &AdapterWeights, tensors: &[TensorSpec]) -> String {
    let none = BTreeMap::new();
    let own = kept(parts, AdapterFormat::Peft).next();
    let layers = own.map_or(&none, |(_, layers)| layers);
    let mut config = config(layers);
    config.insert("target_modules".into(), json!(targets(layers, tensors)));
    config.insert("inference_mode".into(), json!(true));
    if own.is_some_and(|(component, _)| component == Component::Language) {
        config.insert("task_type".into(), json!("CAUSAL_LM"));
    }
    config.insert("base_model_name_or_path".into(), Value::Null);
    format!("{:#}\n", Value::Object(config))
}

/// PEFT's `target_modules`: the shortest suffixes of the layers' names that no other module has. Other programs
/// know `q_proj` and not the full names.
fn targets<'a>(
    layers: &'a BTreeMap<String, LoraWeights>,
    tensors: &[TensorSpec],
) -> BTreeSet<&'a str> {
    // A module may be no layer, as block `0`.
    let parts: BTreeSet<&str> = tensors
        .iter()
        .flat_map(|want| want.name.match_indices('.').map(|(at, _)| &want.name[..at]))
        .collect();
    let others: Vec<&str> = parts.into_iter().filter(|part| !layers.contains_key(*part)).collect();
    let has = |part: &str, ending: &str| {
        part.strip_suffix(ending).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let shortest = |layer: &'a String| {
        let endings = layer.rmatch_indices('.').map(|(at, _)| &layer[at + 1..]);
        let mut own = endings.filter(|ending| !others.iter().any(|other| has(other, ending)));
        own.next().unwrap_or(layer)
    };
    layers.keys().map(shortest).collect()
}

/// PEFT's settings for these layers: what most have, and the exceptions by name. PEFT compares ends of names, so that
/// those of CLIP fit with and without the prefix that newer transformers leave out.
fn config(layers: &BTreeMap<String, LoraWeights>) -> Map<String, Value> {
    let (rank, alpha) = usual(layers.values());
    let mut ranks = Map::new();
    let mut alphas = Map::new();
    let named = |layer: &'_ String| layer.strip_prefix(CLIP_PREFIX).unwrap_or(layer).to_owned();
    for (layer, given) in layers {
        if given.rank != rank {
            ranks.insert(named(layer), json!(given.rank));
        }
        if given.alpha != alpha {
            alphas.insert(named(layer), number(given.alpha));
        }
    }
    let targets: BTreeSet<String> = layers.keys().map(named).collect();
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
fn usual<'a>(layers: impl Iterator<Item = &'a LoraWeights>) -> (usize, f32) {
    let mut counts: HashMap<(usize, u32), usize> = HashMap::new();
    for given in layers {
        *counts.entry((given.rank, given.alpha.to_bits())).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|(kind, count)| (*count, *kind));
    most.map_or((1, 1.0), |((rank, alpha), _)| (rank, f32::from_bits(alpha)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::llama::language_model::LanguageModel;
    use crate::model::llama::preset::LlamaPreset;

    fn targets_of(is_adapted: impl Fn(&str) -> bool) -> Vec<String> {
        let tensors =
            LanguageModel::preset(LlamaPreset::Tiny, 256, 0).unwrap().tensor_specs().unwrap();
        let modules = tensors.iter().filter_map(|want| want.name.strip_suffix(".weight"));
        let none = LoraWeights { rank: 1, alpha: 1.0, down: vec![], up: vec![], magnitude: None };
        let adapted = modules.filter(|module| is_adapted(module));
        let layers = adapted.map(|module| (module.to_owned(), none.clone())).collect();
        targets(&layers, &tensors).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn layers_are_found_by_the_shortest_endings_that_are_theirs_alone() {
        let ends = |module: &str, names: &[&str]| names.iter().any(|name| module.ends_with(name));
        assert_eq!(targets_of(|m| ends(m, &["q_proj", "v_proj"])), ["q_proj", "v_proj"]);
        assert_eq!(targets_of(|m| ends(m, &["1.self_attn.q_proj"])), ["1.self_attn.q_proj"]);
        let all_but_one = |m: &str| ends(m, &["q_proj", "up_proj"]) && !m.contains("layers.2.mlp");
        let expected = ["0.mlp.up_proj", "1.mlp.up_proj", "3.mlp.up_proj", "q_proj"];
        assert_eq!(targets_of(all_but_one), expected);
        assert!(targets_of(|_| false).is_empty());
    }
}
