//! A LoRA as a GGUF file, for `llama-cli --lora` and the `ADAPTER` of an Ollama Modelfile. Metadata and names are those of
//! llama.cpp's `convert_lora_to_gguf.py`: each matrix's name with `.lora_a` and `.lora_b`, the rows of B in the order that
//! the base has there.

use std::path::Path;

use weights::Catalog;
use weights::gguf::write::{self, GgufFormat, GgufTensor, GgufValue};
use weights::load::load_f32;

use crate::error::{Result, TrainerError};
use crate::export::kept_if_equal;
use crate::model::adapter::LayerWeights;
use crate::model::adapter::factors::{AdapterMatrix, Factors};
use crate::model::llama::LlamaConfig;
use crate::model::llama::language_model::LanguageModel;
use crate::model::llama::names;

/// Writes the adapter of a model, reads it back and compares. Returns the number of layers.
pub fn write_adapter(base: &LanguageModel, name: &str, out: &Path) -> Result<usize> {
    super::check_experts(&base.config)?;
    let layers = base.adapter();
    if layers.values().any(|layer| layer.magnitude.is_some()) {
        return Err(TrainerError::Request {
            problem: "a DoRA has no form in GGUF, which knows LoRA alone".into(),
            hint: "merge it: `hearth export --merge`, then `hearth convert` the folder to GGUF",
        });
    }
    let (mut tensors, mut values) = (Vec::new(), Vec::new());
    for (module, layer) in &layers {
        let Factors::Lora { down, up } = &layer.factors else {
            return Err(TrainerError::Request {
                problem: format!(
                    "a {} has no form in GGUF, which knows LoRA alone",
                    layer.factors.form_name()
                ),
                hint: "merge it: `hearth export --merge`, then `hearth convert` the folder to GGUF",
            });
        };
        for (tensor, numbers) in matrices(&base.config, module, down, up) {
            tensors.push(tensor);
            values.push(numbers);
        }
    }
    let alpha = shared_alpha(layers.values());
    if alpha.is_none() {
        bake_scales(layers.values(), &mut values);
    }
    write::write(out, &metadata(base, name, alpha), &tensors, &mut |index, range| {
        Ok(values[index][range.start as usize..range.end as usize].to_vec())
    })?;
    kept_if_equal(out, || compare(out, &tensors, &values))?;
    Ok(layers.len())
}

/// A and B of a layer.
fn matrices(
    config: &LlamaConfig,
    module: &str,
    down: &AdapterMatrix,
    up: &AdapterMatrix,
) -> [(GgufTensor, Vec<f32>); 2] {
    let weight = format!("{module}.weight");
    let (key, rank) = (names::gguf_name_of(config, &weight), down.rows);
    let tensor = |end: &str, shape: [usize; 2]| GgufTensor {
        name: format!("{key}.{end}"),
        shape: shape.map(|size| size as u64).into(),
        format: GgufFormat::F32,
    };
    let mut stored = up.values.clone();
    if names::is_permuted(config, &weight) {
        for (row, numbers) in up.values.chunks(rank).enumerate() {
            let at = names::stored_row(row, config.head_dim) * rank;
            stored[at..at + rank].copy_from_slice(numbers);
        }
    }
    [(tensor("lora_a", down.sizes()), down.values.clone()), (tensor("lora_b", up.sizes()), stored)]
}

/// The file has one alpha, which each layer divides by its rank.
fn shared_alpha<'a>(mut layers: impl Iterator<Item = &'a LayerWeights>) -> Option<f32> {
    let first = layers.next()?.alpha;
    layers.all(|layer| layer.alpha == first).then_some(first)
}

/// Without an alpha nothing is scaled: what differs between layers goes into B.
fn bake_scales<'a>(layers: impl Iterator<Item = &'a LayerWeights>, values: &mut [Vec<f32>]) {
    for (layer, pair) in layers.zip(values.chunks_mut(2)) {
        pair[1].iter_mut().for_each(|value| *value *= layer.scale());
    }
}

fn metadata(base: &LanguageModel, name: &str, alpha: Option<f32>) -> Vec<(String, GgufValue)> {
    let text = |text: &str| GgufValue::Text(text.into());
    let all = [
        ("general.architecture", text(base.config.family.architecture())),
        ("general.type", text("adapter")),
        ("general.name", text(name)),
        ("adapter.type", text("lora")),
        ("adapter.lora.alpha", GgufValue::F32(alpha.unwrap_or(0.0))),
    ];
    all.map(|(key, value)| (key.to_owned(), value)).into()
}

/// Refuses a file that reads back as something else; no value may differ.
fn compare(path: &Path, tensors: &[GgufTensor], values: &[Vec<f32>]) -> Result<f64> {
    let catalog = Catalog::open(path)?;
    for (tensor, numbers) in tensors.iter().zip(values) {
        let found = catalog.find(&tensor.name)?;
        let again = load_f32(&catalog, found, 0..found.numel())?;
        let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        if found.shape != tensor.shape || !again.iter().zip(numbers).all(is_same) {
            return Err(TrainerError::Adapter {
                problem: format!("{} reads back as something else", tensor.name),
                path: path.into(),
            });
        }
    }
    Ok(0.0)
}
