//! Random init for training from scratch: Xavier (Glorot) matrices, biases of zero, norms of one; and
//! zeros in every modulation and output layer (adaLN-Zero), so that at first each block is the identity
//! (Peebles and Xie, "Scalable Diffusion Models with Transformers", arXiv 2212.09748, section 3.2).

use std::collections::BTreeMap;
use std::path::Path;

use compute::RandomSequence;
use weights::FileDtype;

use super::{Sd3, Sd3Config};
use crate::error::Result;
use crate::model::build::{TensorRole, TensorSpec, tensor_specs};
use crate::model::files::save;

/// Writes a randomly initialised transformer.
pub fn write_random_init(
    config: &Sd3Config,
    seed: u64,
    dtype: FileDtype,
    path: &Path,
) -> Result<()> {
    let wants = tensor_specs(|build| Sd3::new(config, build))?;
    save(path, &BTreeMap::new(), &wants, dtype, &mut |at, want| {
        Ok(init_values(config, want, RandomSequence::new(seed, at as u64)))
    })
}

/// Layers that are initialised with zeros.
const ZERO_INIT: [&str; 4] =
    ["norm1.linear.", "norm1_context.linear.", "norm_out.linear.", "proj_out."];

fn init_values(config: &Sd3Config, want: &TensorSpec, stream: RandomSequence) -> Vec<f32> {
    let n = want.shape.elements();
    if want.name == "pos_embed.pos_embed" {
        return positions(config);
    }
    let is_norm = want.role == TensorRole::Vector && want.name.ends_with("weight");
    let is_silent = ZERO_INIT.iter().any(|layer| want.name.contains(layer));
    if is_norm {
        return vec![1.0; n];
    }
    if is_silent || want.role == TensorRole::Vector {
        return vec![0.0; n];
    }
    let outputs = want.shape.sizes()[0];
    let deviation = (2.0 / (outputs + n / outputs) as f32).sqrt();
    (0..n).map(|index| deviation * stream.normal(index)).collect()
}

/// The position embedding: sines and cosines of the column, then of the row, as diffusers'
/// `get_2d_sincos_pos_embed` computes them. [side · side, D]
fn positions(config: &Sd3Config) -> Vec<f32> {
    let (side, d) = (config.pos_embed_max_size, config.width());
    // Scaled for an image of `sample_size`.
    let step = (config.sample_size / config.patch_size) as f64 / side as f64;
    let quarter = d / 4;
    let waves = |at: usize| {
        let angle =
            move |index: usize| at as f64 * step / 10000f64.powf(index as f64 / quarter as f64);
        let sines = (0..quarter).map(move |index| angle(index).sin() as f32);
        sines.chain((0..quarter).map(move |index| angle(index).cos() as f32))
    };
    let cells = (0..side).flat_map(|row| (0..side).map(move |column| (row, column)));
    cells.flat_map(|(row, column)| waves(column).chain(waves(row))).collect()
}

#[cfg(test)]
mod tests {
    use weights::Catalog;
    use weights::load::load_f32;

    use super::*;
    use crate::model::config;

    /// Held in f32, as it was computed; that of the tiny pipeline is rounded to f16.
    fn golden() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/models/sd3")
    }

    #[test]
    fn positions_are_those_that_diffusers_computed() {
        let settings: Sd3Config = config::read(&golden().join("config.json")).unwrap();
        let catalog = Catalog::open(&golden().join("diffusion_pytorch_model.safetensors")).unwrap();
        let tensor = catalog.find("pos_embed.pos_embed").unwrap();
        let expected = load_f32(&catalog, tensor, 0..tensor.numel()).unwrap();
        let got = positions(&settings);
        assert_eq!(expected.len(), got.len());
        // The file holds f16: values below 1 are off by at most half a step of it.
        let most = 0.5f32.powi(12) + 1e-6;
        for (index, (expected, got)) in expected.iter().zip(&got).enumerate() {
            assert!((expected - got).abs() <= most, "{index}: {expected} {got}");
        }
    }

    #[test]
    fn every_tensor_of_the_model_is_written() {
        let settings: Sd3Config = config::read(&golden().join("config.json")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        write_random_init(&settings, 1, FileDtype::F32, &path).unwrap();
        let catalog = Catalog::open(&path).unwrap();
        let tensor = catalog.find("transformer_blocks.0.attn.to_q.weight").unwrap();
        let numbers = load_f32(&catalog, tensor, 0..tensor.numel()).unwrap();
        let square = numbers.iter().map(|x| x * x).sum::<f32>() / numbers.len() as f32;
        let d = settings.width() as f32;
        assert!((square * d - 1.0).abs() < 0.2, "{square}");
        let silent = catalog.find("proj_out.weight").unwrap();
        assert!(load_f32(&catalog, silent, 0..silent.numel()).unwrap().iter().all(|x| *x == 0.0));
        let names = tensor_specs(|build| Sd3::new(&settings, build)).unwrap();
        assert_eq!(catalog.tensors.len(), names.len());
    }
}
