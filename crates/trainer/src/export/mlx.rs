//! A language model's adapter for mlx-lm, as its trainer saves one and `mlx_lm.generate --adapter-path` loads it.
//!
//! ```text
//! OUT/mlx/
//!   adapter_config.json      fine_tune_type lora or dora; lora_parameters: rank, scale, dropout, keys
//!   adapters.safetensors     MODULE.lora_a [in, rank], MODULE.lora_b [rank, out], of DoRA MODULE.m [out]
//! ```
//!
//! The config has one rank and one scale for all layers: lower ranks are filled up with zeros, and scales that differ go
//! into B. Left out on purpose: whole models, since mlx-lm reads the folders of published models as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::json;
use weights::Catalog;
use weights::folder::fill_folder;
use weights::load::load_f32;
use weights::write::write_whole;

use super::{AdapterFormat, TensorData, compare, save};
use crate::error::{Result, TrainerError};
use crate::model::adapter::LayerWeights;
use crate::model::adapter::factors::Factors;
use crate::model::adapter::read::Component;
use crate::model::llama::language_model::LanguageModel;

const FILE: &str = "adapters.safetensors";
const CONFIG: &str = "adapter_config.json";

/// What all layers have in common there.
#[derive(Clone, Copy)]
struct MlxSettings {
    rank: usize,
    scale: f32,
    /// Whether scales differ, and are in B.
    is_baked: bool,
    is_dora: bool,
}

/// Writes the adapter of `base` into a folder, reads it back and compares. Returns the number of layers and the largest
/// difference.
pub fn write_adapter(base: &LanguageModel, folder: &Path) -> Result<(usize, f64)> {
    let layers = base.adapter();
    let settings = MlxSettings::of(&layers)?;
    let config = settings.config(&layers, base.config.num_hidden_layers)?;
    let mut tensors = BTreeMap::new();
    for (module, layer) in &layers {
        settings.insert(module, layer, &mut tensors);
    }
    let failed = |source| TrainerError::Io { what: "write", path: folder.into(), source };
    let metadata = BTreeMap::from([("format".to_owned(), "mlx".to_owned())]);
    let path = folder.join(FILE);
    fill_folder(folder, failed, || {
        write_whole(&folder.join(CONFIG), config.as_bytes())?;
        save(&path, &metadata, &tensors)
    })?;
    let again = settings.read(&path, &layers)?;
    let [before, after] = [layers, again].map(|layers| vec![(Component::Language, layers)]);
    let difference = compare(&before, &after, AdapterFormat::Peft, &path).inspect_err(|_| {
        for name in [FILE, CONFIG] {
            // It may not be there any more; the error that counts is the first.
            _ = fs::remove_file(folder.join(name));
        }
    })?;
    Ok((before[0].1.len(), difference))
}

impl MlxSettings {
    fn of(layers: &BTreeMap<String, LayerWeights>) -> Result<Self> {
        let mut all = layers.values();
        let Some(first) = all.next() else {
            return Err(refused("this adapter has no layers".into()));
        };
        let is_dora = first.magnitude.is_some();
        if all.any(|layer| layer.magnitude.is_some() != is_dora) {
            return Err(refused("layers of LoRA and DoRA together have no form in mlx-lm".into()));
        }
        for layer in layers.values() {
            if !matches!(layer.factors, Factors::Lora { .. }) {
                let form = layer.factors.form_name();
                return Err(refused(format!(
                    "a {form} has no form in mlx-lm, which knows LoRA and DoRA"
                )));
            }
        }
        let rank = layers.values().map(|layer| layer.rank).max().unwrap_or(1);
        let is_baked =
            layers.values().any(|layer| layer.scale().to_bits() != first.scale().to_bits());
        let scale = if is_baked { 1.0 } else { first.scale() };
        Ok(Self { rank, scale, is_baked, is_dora })
    }

    /// `keys` are modules within a block, or at the end of the model.
    fn config(self, layers: &BTreeMap<String, LayerWeights>, n_layers: usize) -> Result<String> {
        let mut keys = BTreeSet::new();
        for module in layers.keys() {
            let in_block =
                module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            match in_block {
                Some((_, key)) => keys.insert(key),
                None if module == "lm_head" => keys.insert(module),
                None => {
                    return Err(refused(format!("{module} has no adapter in mlx-lm's files")));
                }
            };
        }
        let Self { rank, scale, is_dora, .. } = self;
        let parameters = json!({ "rank": rank, "scale": scale, "dropout": 0.0, "keys": keys });
        let config = json!({
            "fine_tune_type": if is_dora { "dora" } else { "lora" },
            "num_layers": n_layers,
            "lora_parameters": parameters,
        });
        Ok(format!("{config:#}\n"))
    }

    fn insert(self, module: &str, layer: &LayerWeights, into: &mut BTreeMap<String, TensorData>) {
        let Factors::Lora { down, up } = &layer.factors else {
            unreachable!("other forms are refused above")
        };
        let [outputs, inputs] = layer.sizes();
        let scale = if self.is_baked { layer.scale() } else { 1.0 };
        let (mut a, mut b) = (vec![0.0; inputs * self.rank], vec![0.0; self.rank * outputs]);
        for at in 0..layer.rank {
            for input in 0..inputs {
                a[input * self.rank + at] = down.values[at * inputs + input];
            }
            for output in 0..outputs {
                b[at * outputs + output] = scale * up.values[output * layer.rank + at];
            }
        }
        let [rank, outputs, inputs] = [self.rank, outputs, inputs].map(|size| size as u64);
        into.insert(format!("{module}.lora_a"), (vec![inputs, rank], a));
        into.insert(format!("{module}.lora_b"), (vec![rank, outputs], b));
        if let Some(magnitude) = &layer.magnitude {
            into.insert(format!("{module}.m"), (vec![outputs], magnitude.clone()));
        }
    }

    /// The layers of a file, by the rules of mlx-lm: W + scale · (A · B) transposed.
    fn read(
        self,
        path: &Path,
        layers: &BTreeMap<String, LayerWeights>,
    ) -> Result<BTreeMap<String, LayerWeights>> {
        let catalog = Catalog::open(path)?;
        let values = |name: String| {
            let tensor = catalog.find(&name)?;
            load_f32(&catalog, tensor, 0..tensor.numel())
        };
        let read = |(module, layer): (&String, &LayerWeights)| {
            let (a, b) = (values(format!("{module}.lora_a"))?, values(format!("{module}.lora_b"))?);
            let (down, up) = (transposed(&a, self.rank), transposed(&b, b.len() / self.rank));
            let again = LayerWeights::lora(self.rank, self.scale * self.rank as f32, down, up);
            let m = layer.magnitude.as_ref().map(|_| values(format!("{module}.m"))).transpose()?;
            Ok((module.clone(), again.with_magnitude(m)))
        };
        layers.iter().map(read).collect()
    }
}

/// Of rows that are so wide.
fn transposed(values: &[f32], width: usize) -> Vec<f32> {
    let height = values.len() / width;
    (0..values.len()).map(|at| values[at % height * width + at / height]).collect()
}

fn refused(problem: String) -> TrainerError {
    let hint = "merge it: `hearth export --merge` writes a folder that mlx-lm loads";
    TrainerError::Request { problem, hint }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn base() -> LanguageModel {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/gguf/llama");
        LanguageModel::open(&PathBuf::from(path)).unwrap()
    }

    fn layer(rank: usize, alpha: f32, outputs: usize) -> LayerWeights {
        let some = |n: usize| (0..n).map(|at| (at as f32 * 0.37).sin()).collect();
        LayerWeights::lora(rank, alpha, some(rank * 32), some(outputs * rank))
    }

    fn written(layers: Vec<(&str, LayerWeights)>) -> Result<(serde_json::Value, Catalog)> {
        let (mut base, folder) = (base(), tempfile::tempdir().unwrap());
        base.set_adapter(
            layers.into_iter().map(|(name, layer)| (name.to_owned(), layer)).collect(),
        );
        let n_layers = base.adapter().len();
        let (n_written, difference) = write_adapter(&base, folder.path())?;
        assert!(n_written == n_layers && difference < 1e-6);
        let config = fs::read_to_string(folder.path().join(CONFIG)).unwrap();
        let catalog = Catalog::open(&folder.path().join(FILE)).unwrap();
        Ok((serde_json::from_str(&config).unwrap(), catalog))
    }

    #[test]
    fn one_rank_and_one_scale_serve_all_layers() {
        let [q, up] = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"];
        let (config, catalog) =
            written(vec![(q, layer(4, 8.0, 32)), (up, layer(2, 2.0, 64))]).unwrap();
        assert_eq!(config["fine_tune_type"], "lora");
        assert_eq!(config["num_layers"], 2);
        let keys = json!(["mlp.up_proj", "self_attn.q_proj"]);
        let expected = json!({ "rank": 4, "scale": 1.0, "dropout": 0.0, "keys": keys });
        assert_eq!(config["lora_parameters"], expected);
        assert_eq!(catalog.find(&format!("{up}.lora_a")).unwrap().shape, [32, 4]);
        assert_eq!(catalog.find(&format!("{up}.lora_b")).unwrap().shape, [4, 64]);
        let (config, _) =
            written(vec![(q, layer(4, 8.0, 32)), ("lm_head", layer(4, 8.0, 320))]).unwrap();
        assert_eq!(config["lora_parameters"]["scale"], 2.0);
    }

    #[test]
    fn magnitudes_are_of_all_layers_or_of_none() {
        let [q, k] = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"];
        let dora = layer(4, 8.0, 32).with_magnitude(Some(vec![1.5; 32]));
        let (config, catalog) = written(vec![(q, dora.clone())]).unwrap();
        assert_eq!(config["fine_tune_type"], "dora");
        assert_eq!(catalog.find(&format!("{q}.m")).unwrap().shape, [32]);
        let error = written(vec![(q, dora), (k, layer(4, 8.0, 16))]).unwrap_err().to_string();
        assert_eq!(error, "layers of LoRA and DoRA together have no form in mlx-lm");
        let error =
            written(vec![("model.embed_tokens", layer(4, 8.0, 320))]).unwrap_err().to_string();
        assert_eq!(error, "model.embed_tokens has no adapter in mlx-lm's files");
    }
}
