//! SD3's position embedding, which is computed and not trained.

use super::Sd3Config;

/// The position embedding: sines and cosines of the column, then of the row, as diffusers'
/// `get_2d_sincos_pos_embed` computes them. [side · side, D]
pub fn positions(config: &Sd3Config) -> Vec<f32> {
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
    use std::path::Path;

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
}
