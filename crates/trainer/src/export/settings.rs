//! Metadata of adapter files: rank, alpha and target modules.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::{AdapterFormat, kept};
use crate::error::{Result, TrainerError};
use crate::model::adapter::factors::{AdapterMatrix, Factors, LokrFactor, split};
use crate::model::adapter::names::CLIP_PREFIX;
use crate::model::adapter::read::Component;
use crate::model::adapter::{AdapterWeights, LayerWeights};
use crate::model::build::TensorSpec;
use crate::model::diffusion::family::ExportMetadata;

/// Layers by their names.
type Layers<'a> = BTreeMap<&'a str, &'a LayerWeights>;

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
                let layers = layers.iter().map(|(name, given)| (&name[..], given)).collect();
                let config = config(&layers).into_iter();
                all.extend(config.map(|(key, value)| (format!("{prefix}.{key}"), value)));
            }
            metadata.insert("lora_adapter_metadata".into(), Value::Object(all).to_string());
        }
        AdapterFormat::Kohya => {
            let all = kept(parts, format).flat_map(|(_, layers)| layers.values());
            let (norms, layers): (Vec<_>, Vec<&LayerWeights>) =
                all.partition(|given| given.factors.is_norm());
            let (rank, alpha) = usual(layers.iter().copied());
            metadata.insert("ss_network_dim".into(), rank.to_string());
            metadata.insert("ss_network_alpha".into(), alpha.to_string());
            metadata.insert("modelspec.sai_model_spec".into(), "1.0.1".into());
            if let Some(ExportMetadata { network, architecture, .. }) = family {
                // The algorithm by LyCORIS' name for it, where it is one of its own.
                let algorithm = layers.first().and_then(|given| match given.factors {
                    Factors::Lora { .. } if norms.is_empty() => None,
                    Factors::Lora { .. } => Some("lora"),
                    Factors::Loha { .. } => Some("loha"),
                    Factors::Lokr { .. } => Some("lokr"),
                    Factors::Norm { .. } => unreachable!("norms are apart"),
                });
                let network = if algorithm.is_some() { "lycoris.kohya" } else { network };
                metadata.insert("ss_network_module".into(), network.into());
                let mut settings = Map::new();
                settings.extend(algorithm.map(|name| ("algo".into(), json!(name))));
                settings.extend(norms.first().map(|_| ("train_norm".into(), json!("True"))));
                if !settings.is_empty() {
                    let settings = Value::Object(settings).to_string();
                    metadata.insert("ss_network_args".into(), settings);
                }
                metadata.insert("modelspec.architecture".into(), (*architecture).into());
            }
        }
    }
    metadata
}

/// `adapter_config.json`, for an adapter of a model that has these tensors.
pub fn peft(parts: &AdapterWeights, tensors: &[TensorSpec]) -> Result<String> {
    let own = kept(parts, AdapterFormat::Peft).next();
    let all = own.into_iter().flat_map(|(_, layers)| layers);
    let all = all.map(|(name, given)| (&name[..], given));
    let (norms, layers): (Layers<'_>, Layers<'_>) =
        all.partition(|(_, given)| given.factors.is_norm());
    let layers = &layers;
    let mut config = match layers.values().next().map(|given| &given.factors) {
        Some(Factors::Loha { .. } | Factors::Lokr { .. }) => lycoris_config(layers)?,
        _ => config(layers),
    };
    config.insert("target_modules".into(), json!(targets(layers, tensors)));
    if !norms.is_empty() {
        config.insert("modules_to_save".into(), json!(norms.keys().collect::<Vec<_>>()));
    }
    config.insert("inference_mode".into(), json!(true));
    if own.is_some_and(|(component, _)| component == Component::Language) {
        config.insert("task_type".into(), json!("CAUSAL_LM"));
    }
    config.insert("base_model_name_or_path".into(), Value::Null);
    Ok(format!("{:#}\n", Value::Object(config)))
}

/// PEFT's settings for `LoHa` or `LoKr`. PEFT finds the shapes of all matrices from them, so that they must give those
/// which are there: a whole factor is what it makes of a rank as large as the factor.
fn lycoris_config(layers: &Layers<'_>) -> Result<Map<String, Value>> {
    let scaled = |given: &LayerWeights| {
        let rank = peft_rank(given);
        (rank, given.scale() * rank as f32)
    };
    let settings: BTreeMap<&str, (usize, f32)> =
        layers.iter().map(|(layer, given)| (*layer, scaled(given))).collect();
    let (rank, alpha) = most_common(settings.values().copied());
    let ranks: Map<String, Value> = settings
        .iter()
        .filter(|(_, (own, _))| *own != rank)
        .map(|(layer, (own, _))| ((*layer).to_owned(), json!(own)))
        .collect();
    let alphas: Map<String, Value> = settings
        .iter()
        .filter(|(_, (_, own))| *own != alpha)
        .map(|(layer, (_, own))| ((*layer).to_owned(), number(*own)))
        .collect();
    let mut config = Map::new();
    let is_lokr = layers.values().any(|given| matches!(given.factors, Factors::Lokr { .. }));
    config.insert("peft_type".into(), json!(if is_lokr { "LOKR" } else { "LOHA" }));
    config.insert("r".into(), json!(rank));
    config.insert("alpha".into(), number(alpha));
    config.insert("rank_pattern".into(), Value::Object(ranks));
    config.insert("alpha_pattern".into(), Value::Object(alphas));
    config.insert("rank_dropout".into(), json!(0.0));
    config.insert("module_dropout".into(), json!(0.0));
    config.insert("init_weights".into(), json!(true));
    if is_lokr {
        config.insert("decompose_factor".into(), json!(decompose_factor(layers)?));
        let low = |given: &&LayerWeights| {
            matches!(given.factors, Factors::Lokr { w1: LokrFactor::LowRank(_), .. })
        };
        config.insert("decompose_both".into(), json!(layers.values().any(low)));
    }
    Ok(config)
}

/// The rank that PEFT makes matrices of these shapes from.
fn peft_rank(given: &LayerWeights) -> usize {
    match &given.factors {
        Factors::Lokr { w1: LokrFactor::Full(_), w2: LokrFactor::Full(inner) } => {
            inner.rows.max(inner.columns)
        }
        Factors::Lora { .. }
        | Factors::Loha { .. }
        | Factors::Lokr { .. }
        | Factors::Norm { .. } => given.rank,
    }
}

/// The one factor from which PEFT splits the sizes of all layers as they are.
fn decompose_factor(layers: &Layers<'_>) -> Result<i64> {
    let splits: Vec<[usize; 2]> = layers
        .values()
        .filter_map(|given| match &given.factors {
            Factors::Lokr { w1, w2 } => {
                let [outer, inner] = [w1, w2].map(|w| w.sizes(AdapterMatrix::sizes));
                Some([[outer[0], inner[0]], [outer[1], inner[1]]])
            }
            _ => None,
        })
        .flatten()
        .collect();
    // PEFT does not put the smaller factor first where it is given one that divides the size.
    let gives = |factor: Option<usize>| {
        splits.iter().all(|[outer, inner]| {
            let size = outer * inner;
            match factor.filter(|factor| size.is_multiple_of(*factor)) {
                Some(factor) => *outer == factor,
                None => split(size, factor) == [*outer, *inner],
            }
        })
    };
    if gives(None) {
        return Ok(-1);
    }
    let candidates: BTreeSet<usize> = splits.iter().map(|[outer, _]| *outer).collect();
    let found = candidates.into_iter().find(|factor| gives(Some(*factor)));
    found.and_then(|factor| i64::try_from(factor).ok()).ok_or_else(|| TrainerError::Request {
        problem: "PEFT has one decompose_factor, and none gives the Kronecker factors of all layers of this LoKr"
            .into(),
        hint: "export it for comfyui or kohya, or merge it with `hearth export --merge`",
    })
}

/// PEFT's `target_modules`: the shortest suffixes of the layers' names that no other module has. Other programs
/// know `q_proj` and not the full names.
fn targets<'a>(layers: &Layers<'a>, tensors: &[TensorSpec]) -> BTreeSet<&'a str> {
    // A module may be no layer, as block `0`.
    let parts: BTreeSet<&str> = tensors
        .iter()
        .flat_map(|want| want.name.match_indices('.').map(|(at, _)| &want.name[..at]))
        .collect();
    let all = parts.iter().map(|part| (*part).to_owned());
    let all = all.chain(parts.iter().flat_map(|part| without_tensors(part)));
    let others: Vec<String> = all.filter(|part| !layers.contains_key(&part[..])).collect();
    let has = |part: &str, ending: &str| {
        part.strip_suffix(ending).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    let shortest = |layer: &&'a str| {
        let layer: &'a str = layer;
        let endings = layer.rmatch_indices('.').map(|(at, _)| &layer[at + 1..]);
        let mut own = endings.filter(|ending| !others.iter().any(|other| has(other, ending)));
        own.next().unwrap_or(layer)
    };
    layers.keys().map(shortest).collect()
}

/// Modules before this one in a list, which may have no tensors: of `1`, a layer, `0` may be a `SiLU`.
fn without_tensors(part: &str) -> Vec<String> {
    let place = part.rsplit_once('.').and_then(|(list, last)| Some((list, last.parse().ok()?)));
    let Some((list, index)) = place else { return Vec::new() };
    (0_usize..index).map(|before| format!("{list}.{before}")).collect()
}

/// PEFT's settings for these layers: what most have, and the exceptions by name. PEFT compares ends of names, so that
/// those of CLIP fit with and without the prefix that newer transformers leave out.
fn config(layers: &Layers<'_>) -> Map<String, Value> {
    let (rank, alpha) = usual(layers.values().copied());
    let mut ranks = Map::new();
    let mut alphas = Map::new();
    let named = |layer: &&str| layer.strip_prefix(CLIP_PREFIX).unwrap_or(layer).to_owned();
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
fn usual<'a>(layers: impl Iterator<Item = &'a LayerWeights>) -> (usize, f32) {
    most_common(layers.map(|given| (given.rank, given.alpha)))
}

fn most_common(all: impl Iterator<Item = (usize, f32)>) -> (usize, f32) {
    let mut counts: HashMap<(usize, u32), usize> = HashMap::new();
    for (rank, alpha) in all {
        *counts.entry((rank, alpha.to_bits())).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|(kind, count)| (*count, *kind));
    most.map_or((1, 1.0), |((rank, alpha), _)| (rank, f32::from_bits(alpha)))
}

#[cfg(test)]
mod tests {
    use compute::Shape;

    use super::*;
    use crate::model::build::TensorRole;
    use crate::model::llama::language_model::LanguageModel;
    use crate::model::llama::preset::LlamaPreset;

    fn targets_of(is_adapted: impl Fn(&str) -> bool) -> Vec<String> {
        let tensors =
            LanguageModel::preset(LlamaPreset::Tiny, 256, 0).unwrap().tensor_specs().unwrap();
        let modules = tensors.iter().filter_map(|want| want.name.strip_suffix(".weight"));
        let none = LayerWeights::lora(1, 1.0, vec![], vec![]);
        let adapted = modules.filter(|module| is_adapted(module));
        let layers = adapted.map(|module| (module, &none)).collect();
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

    /// As in Z-Image, of which `final.modulation.0` is a function.
    #[test]
    fn a_module_without_tensors_is_no_target() {
        let names = ["layers.0.modulation.0", "layers.1.modulation.0", "final.modulation.1"];
        let spec = |name: &&str| TensorSpec {
            name: format!("{name}.weight"),
            shape: Shape::new(&[1, 1]),
            role: TensorRole::Matrix,
            block: None,
        };
        let tensors: Vec<TensorSpec> = names.iter().map(spec).collect();
        let given = LayerWeights::lora(1, 1.0, vec![], vec![]);
        let layers = names[..2].iter().map(|name| (*name, &given)).collect();
        let expected = BTreeSet::from(["0.modulation.0", "1.modulation.0"]);
        assert_eq!(targets(&layers, &tensors), expected);
    }
}
