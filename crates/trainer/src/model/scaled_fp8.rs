//! Scaled fp8 checkpoints, as ComfyUI and its users share them: a weight `X.weight` is stored in fp8 beside a scale,
//! and its value is the stored one times the scale. The scale is applied as the weight is read.
//!
//! | tensor | is |
//! |---|---|
//! | `X.scale_weight` | the scale, in files up to 2025 |
//! | `X.weight_scale` | the scale, in newer files; one value, or one for each row |
//! | `X.scale_input`, `X.input_scale` | for activations in fp8: not used here |
//! | `scaled_fp8`, `X.comfy_quant` | say that the file is of this kind |
//!
//! Taken: `comfy/ops.py` and `comfy/utils.py` of ComfyUI.

use std::collections::HashMap;

use compute::Shape;
use weights::load::{LoadOptions, LoadRequest, load};
use weights::{Catalog, FileDtype, TensorInfo, WeightsError};

use crate::error::{Result, TrainerError};

const WEIGHT: &str = ".weight";
const SCALES: [&str; 2] = [".scale_weight", ".weight_scale"];
const UNUSED: [&str; 3] = [".scale_input", ".input_scale", ".comfy_quant"];
const MARKER: &str = "scaled_fp8";

/// Whether a tensor belongs to the format, and is not a weight of the model.
pub fn is_of_format(name: &str) -> bool {
    let is_marker = name.strip_suffix(MARKER).is_some_and(|at| at.is_empty() || at.ends_with('.'));
    is_marker || SCALES.iter().chain(&UNUSED).any(|end| name.ends_with(end))
}

/// The scale of a weight, if it has one: a value for all of it, or one for each row.
pub fn scale_of<'a>(catalog: &'a Catalog, weight: &TensorInfo) -> Result<Option<&'a TensorInfo>> {
    let Some(layer) = weight.name.strip_suffix(WEIGHT) else { return Ok(None) };
    let find = |end: &&str| catalog.find(&format!("{layer}{end}")).ok();
    let Some(scale) = SCALES.iter().find_map(find) else { return Ok(None) };
    let rows = weight.shape.first().copied().unwrap_or(1);
    if scale.numel() == 1 || scale.numel() == rows {
        return Ok(Some(scale));
    }
    Err(TrainerError::ShapeMismatch {
        name: scale.name.clone(),
        expected: Shape::new(&[rows as usize]),
        got: scale.shape.clone(),
        path: catalog.path.clone(),
    })
}

/// The values of scales, by name.
pub struct WeightScales<'a>(HashMap<&'a str, Vec<f32>>);

impl<'a> WeightScales<'a> {
    /// Reads them, all together: there are hundreds, of a few bytes each.
    pub fn load(
        catalog: &Catalog,
        scales: impl Iterator<Item = &'a TensorInfo>,
    ) -> std::result::Result<Self, WeightsError> {
        let by_name: HashMap<&str, &'a TensorInfo> =
            scales.map(|scale| (scale.name.as_str(), scale)).collect();
        let buffer = |scale: &TensorInfo| vec![0; scale.numel() as usize * size_of::<f32>()];
        let mut bytes: Vec<(&'a TensorInfo, Vec<u8>)> =
            by_name.into_values().map(|scale| (scale, buffer(scale))).collect();
        let mut wanted = Vec::with_capacity(bytes.len());
        for (scale, into) in &mut bytes {
            wanted.push(LoadRequest::whole(scale, FileDtype::F32, &mut into[..]));
        }
        load(catalog, wanted, LoadOptions::default(), &|_| true)?;
        let numbers = |bytes: Vec<u8>| {
            bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let named = |(scale, bytes): (&'a TensorInfo, _)| (scale.name.as_str(), numbers(bytes));
        Ok(Self(bytes.into_iter().map(named).collect()))
    }

    /// The values of a scale; none of a weight that has none.
    pub fn of(&self, scale: Option<&TensorInfo>) -> &[f32] {
        scale.and_then(|scale| self.0.get(scale.name.as_str())).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_the_format_are_told_from_weights() {
        for name in [
            "scaled_fp8",
            "model.diffusion_model.scaled_fp8",
            "single_blocks.0.linear1.scale_weight",
            "single_blocks.0.linear1.weight_scale",
            "single_blocks.0.linear1.scale_input",
            "single_blocks.0.linear1.input_scale",
            "single_blocks.0.linear1.comfy_quant",
        ] {
            assert!(is_of_format(name), "{name}");
        }
        for name in [
            "double_blocks.0.img_attn.norm.key_norm.scale",
            "single_blocks.0.linear1.weight",
            "single_blocks.0.linear1.weight_scale_2",
            "unscaled_fp8",
        ] {
            assert!(!is_of_format(name), "{name}");
        }
    }
}
