//! diffusers' `AutoencoderKLQwenImage`, for images. It is the video autoencoder of Wan 2.1, whose convolutions look at
//! the current frame and those before it. An image is one frame, before which there are zeros: of every kernel
//! [outputs, inputs, 3, 3, 3] only the last of the three for frames sees data, and layers that join frames
//! (`time_conv`) never run. So it is computed exactly as an autoencoder of images with the last 3x3 of each kernel,
//! and the rest is not loaded.

mod build;
pub mod names;

use serde::Deserialize;

pub use build::{decoder, encoder};

use crate::model::config::Unsupported;
use crate::model::diffusion::vae::LatentStatistics;
use crate::model::vae::kl::check_levels;

/// What `vae/config.json` says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct QwenImageVaeConfig {
    /// Channels of the first layer.
    pub base_dim: usize,
    /// Channels of a latent.
    pub z_dim: usize,
    /// Channels at each size, the image's own first, as multiples of `base_dim`.
    pub dim_mult: Vec<usize>,
    /// Blocks at each size; the decoder has one more.
    pub num_res_blocks: usize,
    /// Sizes of the encoder that have an attention, besides that in the middle.
    #[serde(default)]
    pub attn_scales: Vec<f32>,
    /// Which downsampling layers join frames of a video too.
    pub temperal_downsample: Vec<bool>,
    /// Channels of an image.
    #[serde(default = "colours")]
    pub input_channels: usize,
    /// Mean of each channel of latents.
    pub latents_mean: Vec<f32>,
    /// Standard deviation of each channel of latents.
    pub latents_std: Vec<f32>,
}

fn colours() -> usize {
    3
}

impl QwenImageVaeConfig {
    /// The VAE of Qwen-Image and Qwen-Image-Edit.
    pub fn published() -> Self {
        Self {
            base_dim: 96,
            z_dim: 16,
            dim_mult: vec![1, 2, 4, 4],
            num_res_blocks: 2,
            attn_scales: Vec::new(),
            temperal_downsample: vec![false, true, true],
            input_channels: colours(),
            latents_mean: vec![
                -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134,
                -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
            ],
            latents_std: vec![
                2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526,
                2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916,
            ],
        }
    }

    /// Channels at each size, the image's own first.
    pub fn channels(&self) -> Vec<usize> {
        self.dim_mult.iter().map(|factor| factor * self.base_dim).collect()
    }

    /// Image pixels per latent pixel, along a side.
    pub fn vae_scale_factor(&self) -> usize {
        1 << (self.dim_mult.len() - 1)
    }

    /// How latents are scaled for models.
    pub fn statistics(&self) -> LatentStatistics {
        let scale = self.latents_std.iter().map(|std| 1.0 / std).collect();
        LatentStatistics::by_channel(self.latents_mean.clone(), scale)
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> Result<(), Unsupported> {
        let n_levels = self.dim_mult.len();
        check_levels("dim_mult", n_levels)?;
        let sizes = [("base_dim", self.base_dim), ("num_res_blocks", self.num_res_blocks)];
        let sizes = sizes.into_iter().chain(self.dim_mult.iter().map(|size| ("dim_mult", *size)));
        for (name, size) in sizes {
            Unsupported::unless(size > 0, format!("{name} has a 0"))?;
        }
        Unsupported::unless(
            self.attn_scales.is_empty(),
            format!("attn_scales {:?} is not empty", self.attn_scales),
        )?;
        Unsupported::unless(
            self.input_channels == colours(),
            format!("input_channels {} is not {}", self.input_channels, colours()),
        )?;
        let frames = self.temperal_downsample.len();
        Unsupported::unless(
            frames + 1 == n_levels,
            format!("temperal_downsample has {frames} values, dim_mult {n_levels}"),
        )?;
        let statistics = [("latents_mean", &self.latents_mean), ("latents_std", &self.latents_std)];
        for (name, values) in statistics {
            let (n, z_dim) = (values.len(), self.z_dim);
            Unsupported::unless(n == z_dim, format!("{name} has {n} values, z_dim is {z_dim}"))?;
        }
        let zero = self.latents_std.iter().find(|std| **std <= 0.0);
        zero.map_or(Ok(()), |std| Err(Unsupported(format!("latents_std {std} is not above 0"))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::build::tensor_specs;
    use crate::model::vae::VaeConfig;

    /// Counted by diffusers: 126,892,531 parameters. An image needs 44,599,603 of them.
    #[test]
    fn the_published_model_has_its_number_of_parameters() {
        let published = QwenImageVaeConfig::published();
        let stored = VaeConfig::from(published.clone()).stored_tensors().unwrap();
        let count = |specs: &[crate::model::build::TensorSpec]| -> usize {
            specs.iter().map(|spec| spec.shape.elements()).sum()
        };
        assert_eq!((stored.len(), count(&stored)), (194, 126_892_531));
        let halves = [
            tensor_specs(|build| encoder(&published, build)).unwrap(),
            tensor_specs(|build| decoder(&published, build)).unwrap(),
        ];
        assert_eq!(halves.iter().map(|half| count(half)).sum::<usize>(), 44_599_603);
    }

    #[test]
    fn settings_that_are_not_supported_are_named() {
        let check = |change: &dyn Fn(&mut QwenImageVaeConfig), expected: &str| {
            let mut config = QwenImageVaeConfig::published();
            change(&mut config);
            assert_eq!(config.check().unwrap_err().0, expected);
        };
        assert!(QwenImageVaeConfig::published().check().is_ok());
        check(&|config| config.dim_mult.clear(), "dim_mult has 0 values, expected 1 to 8");
        check(&|config| config.dim_mult[1] = 0, "dim_mult has a 0");
        check(&|config| config.num_res_blocks = 0, "num_res_blocks has a 0");
        check(&|config| config.attn_scales.push(0.5), "attn_scales [0.5] is not empty");
        check(&|config| config.input_channels = 4, "input_channels 4 is not 3");
        let expected = "temperal_downsample has 2 values, dim_mult 4";
        check(&|config| _ = config.temperal_downsample.pop(), expected);
        check(&|config| config.z_dim = 4, "latents_mean has 16 values, z_dim is 4");
        check(&|config| config.latents_std[3] = 0.0, "latents_std 0 is not above 0");
    }
}
