//! Random init for training from scratch: Xavier (Glorot) matrices, biases of zero, norms of one; and
//! zeros in every modulation and output layer (adaLN-Zero), so that at first each block is the identity
//! (Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv 2212.09748, section 3.2).

use std::collections::BTreeMap;
use std::path::Path;

use compute::RandomSequence;
use weights::FileDtype;

use super::denoiser::DenoiserConfig;
use super::sd3::positions::positions;
use super::{TRANSFORMER, family_of};
use crate::error::Result;
use crate::model::build::{TensorRole, TensorSpec};
use crate::model::files::save;

/// The config of a model's folder, which may be without weights.
pub fn config_of(folder: &Path) -> Result<DenoiserConfig> {
    DenoiserConfig::read(family_of(folder)?, &folder.join(TRANSFORMER).join("config.json"))
}

/// Writes a randomly initialised transformer.
pub fn write_random_init(
    config: &DenoiserConfig,
    seed: u64,
    dtype: FileDtype,
    path: &Path,
) -> Result<()> {
    let wants = config.tensor_specs()?;
    save(path, &BTreeMap::new(), &wants, dtype, &mut |at, want| {
        Ok(init_values(config, want, RandomSequence::new(seed, at as u64)))
    })
}

/// Layers that are initialised with zeros: the modulations of all families, which give blocks their gates. The last
/// layers of blocks are not: behind a gate of zero they would have no gradient.
const ZERO_INIT: [&str; 10] = [
    "norm1.linear.",
    "norm1_context.linear.",
    ".norm.linear.",
    "_mod.1.",
    "norm_out.linear.",
    "modulation.out_layer.",
    "adaLN_modulation.",
    "modulation_img.linear.",
    "modulation_txt.linear.",
    "single_stream_modulation.linear.",
];
/// The last layer of the model. Blocks of FLUX have one of the same name.
const OUTPUT: [&str; 3] = ["proj_out.", "out_layer.out_layer.", "all_final_layer.2-1.linear."];

fn is_zero_init(name: &str) -> bool {
    OUTPUT.iter().any(|layer| name.starts_with(layer))
        || ZERO_INIT.iter().any(|layer| name.contains(layer))
}

fn init_values(config: &DenoiserConfig, want: &TensorSpec, stream: RandomSequence) -> Vec<f32> {
    let n = want.shape.elements();
    if let (DenoiserConfig::Sd3(config), "pos_embed.pos_embed") = (config, want.name.as_str()) {
        return positions(config);
    }
    let is_norm = want.role == TensorRole::Vector && want.name.ends_with("weight");
    let is_zero = is_zero_init(&want.name);
    if is_norm {
        return vec![1.0; n];
    }
    if is_zero || want.role == TensorRole::Vector {
        return vec![0.0; n];
    }
    let outputs = want.shape.sizes()[0];
    let deviation = (2.0 / (outputs + n / outputs) as f32).sqrt();
    (0..n).map(|index| deviation * stream.normal(index)).collect()
}

#[cfg(test)]
mod tests {
    use weights::Catalog;
    use weights::load::load_f32;

    use super::*;
    use crate::model::diffusion::family::DiffusionFamily;
    use crate::model::diffusion::{flux, flux2, kandinsky5, qwen_image, sd3, z_image};

    /// A family, the folder of one of its models, a layer of a block, and layers that are zero at first.
    const MODELS: [(&DiffusionFamily, &str, &str, [&str; 3]); 6] = [
        (
            &sd3::FAMILY,
            "sd3/models/sd3",
            "transformer_blocks.0.attn.to_q",
            ["transformer_blocks.0.norm1.linear", "norm_out.linear", "proj_out"],
        ),
        (
            &flux::FAMILY,
            "flux/dev",
            "single_transformer_blocks.0.attn.to_q",
            ["single_transformer_blocks.0.norm.linear", "norm_out.linear", "proj_out"],
        ),
        (
            &qwen_image::FAMILY,
            "qwen_image/mask",
            "transformer_blocks.0.attn.to_q",
            ["transformer_blocks.0.img_mod.1", "norm_out.linear", "proj_out"],
        ),
        (
            &kandinsky5::FAMILY,
            "kandinsky5/video",
            "visual_transformer_blocks.0.self_attention.out_layer",
            [
                "visual_transformer_blocks.0.visual_modulation.out_layer",
                "out_layer.modulation.out_layer",
                "out_layer.out_layer",
            ],
        ),
        (
            &flux2::FAMILY,
            "flux2/image",
            "transformer_blocks.0.attn.to_q",
            ["double_stream_modulation_txt.linear", "single_stream_modulation.linear", "proj_out"],
        ),
        (
            &z_image::FAMILY,
            "z_image/padded",
            "layers.0.attention.to_q",
            [
                "layers.0.adaLN_modulation.0",
                "all_final_layer.2-1.adaLN_modulation.1",
                "all_final_layer.2-1.linear",
            ],
        ),
    ];

    #[test]
    fn every_tensor_of_the_model_is_written() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        for (family, model, layer, zeros) in MODELS {
            let settings = golden.join(model).join("config.json");
            let config = DenoiserConfig::read(family, &settings).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("model.safetensors");
            write_random_init(&config, 1, FileDtype::F32, &path).unwrap();
            let catalog = Catalog::open(&path).unwrap();
            assert_eq!(catalog.tensors.len(), config.tensor_specs().unwrap().len());
            // The mean square of a matrix's values and the number of its outputs.
            let square = |name: &str| {
                let tensor = catalog.find(&format!("{name}.weight")).unwrap();
                let values = load_f32(&catalog, tensor, 0..tensor.numel()).unwrap();
                let sum = values.iter().map(|x| x * x).sum::<f32>();
                (sum / values.len() as f32, tensor.shape[0] as f32)
            };
            let (of_layer, width) = square(layer);
            assert!((of_layer * width - 1.0).abs() < 0.2, "{layer}: {of_layer}");
            for zero in zeros {
                assert_eq!(square(zero).0, 0.0, "{zero}");
            }
        }
        assert!(!is_zero_init("single_transformer_blocks.0.proj_out.weight"));
    }
}
