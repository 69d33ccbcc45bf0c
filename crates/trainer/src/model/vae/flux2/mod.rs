//! diffusers' `AutoencoderKLFlux2`, as FLUX.2 uses it: the layers of `AutoencoderKL`, and a batch norm of latents without
//! weights. Its running statistics, one for each value of a square of two by two pixels, lie in the file, and models see
//! latents normed by them.

pub mod names;

use serde::Deserialize;
use weights::Catalog;
use weights::load::load_f32;

use super::forward::{VaeDecoder, VaeEncoder};
use super::kl::{self, KlVaeConfig};
use crate::error::{Result, TrainerError};
use crate::model::build::{ModelBuilder, TensorRole, TensorSpec};
use crate::model::config::Unsupported;
use crate::model::diffusion::vae::LatentStatistics;

/// What `vae/config.json` says. What it leaves out is as diffusers' class has it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct Flux2VaeConfig {
    /// Channels of an image.
    pub in_channels: usize,
    /// Channels of a decoded image.
    pub out_channels: usize,
    /// Channels at each size, the image's own first.
    pub block_out_channels: Vec<usize>,
    /// Those of the decoder, where they differ.
    pub decoder_block_out_channels: Option<Vec<usize>>,
    /// Blocks at each size; the decoder has one more.
    pub layers_per_block: usize,
    /// Channels of a latent.
    pub latent_channels: usize,
    /// Groups of every norm.
    pub norm_num_groups: usize,
    /// The activation between convolutions.
    pub act_fn: String,
    /// Whether there is a convolution after the encoder.
    pub use_quant_conv: bool,
    /// Whether there is a convolution before the decoder.
    pub use_post_quant_conv: bool,
    /// Whether there is an attention in the middle.
    pub mid_block_add_attention: bool,
    /// Added to variances of latents.
    pub batch_norm_eps: f32,
    /// Rows and columns of pixels that have statistics of their own.
    pub patch_size: [usize; 2],
    down_block_types: Vec<String>,
    up_block_types: Vec<String>,
}

impl Default for Flux2VaeConfig {
    fn default() -> Self {
        Self::published()
    }
}

/// Pixels along a side of a square with statistics of its own. Taken: the published model.
const PATCH: usize = 2;

impl Flux2VaeConfig {
    /// The VAE of FLUX.2.
    pub fn published() -> Self {
        Self {
            in_channels: 3,
            out_channels: 3,
            block_out_channels: vec![128, 256, 512, 512],
            decoder_block_out_channels: None,
            layers_per_block: 2,
            latent_channels: 32,
            norm_num_groups: 32,
            act_fn: "silu".into(),
            use_quant_conv: true,
            use_post_quant_conv: true,
            mid_block_add_attention: true,
            batch_norm_eps: 1e-4,
            patch_size: [PATCH; 2],
            down_block_types: Vec::new(),
            up_block_types: Vec::new(),
        }
    }

    /// The layers, as those of an `AutoencoderKL`.
    pub fn layers(&self) -> KlVaeConfig {
        let mut config = KlVaeConfig::published(0.0, 1.0);
        config.in_channels = self.in_channels;
        config.out_channels = self.out_channels;
        config.block_out_channels.clone_from(&self.block_out_channels);
        config.layers_per_block = self.layers_per_block;
        config.latent_channels = self.latent_channels;
        config.norm_num_groups = self.norm_num_groups;
        config.act_fn.clone_from(&self.act_fn);
        config.use_quant_conv = self.use_quant_conv;
        config.use_post_quant_conv = self.use_post_quant_conv;
        config.mid_block_add_attention = self.mid_block_add_attention;
        config.down_block_types.clone_from(&self.down_block_types);
        config.up_block_types.clone_from(&self.up_block_types);
        config
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        self.layers().check()?;
        let (encoder, decoder) = (&self.block_out_channels, &self.decoder_block_out_channels);
        if let Some(decoder) = decoder.as_ref().filter(|decoder| *decoder != encoder) {
            let problem = format!(
                "decoder_block_out_channels {decoder:?} are not block_out_channels {encoder:?}"
            );
            return Err(Unsupported(problem));
        }
        let [rows, columns] = self.patch_size;
        let problem = format!("patch_size {rows}x{columns} is not {PATCH}x{PATCH}");
        Unsupported::unless(self.patch_size == [PATCH; 2], problem)?;
        Unsupported::unless(self.latent_channels > 0, "latent_channels is 0".into())?;
        let is_fine = self.batch_norm_eps >= 0.0 && self.batch_norm_eps.is_finite();
        Unsupported::unless(is_fine, format!("batch_norm_eps is {}", self.batch_norm_eps))
    }

    /// How many statistics there are.
    pub fn n_statistics(&self) -> usize {
        self.latent_channels * PATCH * PATCH
    }

    /// The tensors of the file that hold them.
    pub fn statistics_specs(&self) -> Vec<TensorSpec> {
        let (shape, role) = ([self.n_statistics()].into(), TensorRole::Vector);
        let spec = |name: &str| TensorSpec { name: name.into(), shape, role, block: None };
        names::STATISTICS.map(spec).into()
    }

    /// Statistics that change nothing: those of a model without files.
    pub fn neutral_statistics(&self) -> LatentStatistics {
        let n = self.n_statistics();
        LatentStatistics { shift: vec![0.0; n], scale: vec![1.0; n], patch: PATCH }
    }

    /// How latents are scaled, from the means and variances of the file.
    pub fn statistics(
        &self,
        means: Vec<f32>,
        variances: &[f32],
    ) -> std::result::Result<LatentStatistics, Unsupported> {
        let spread = |variance: &f32| variance + self.batch_norm_eps;
        let is_wrong = |variance: &&f32| !(spread(variance) > 0.0 && variance.is_finite());
        if let Some(variance) = variances.iter().find(is_wrong) {
            let problem = format!("{} is {variance}, expected more than 0", names::STATISTICS[1]);
            return Err(Unsupported(problem));
        }
        let scale = variances.iter().map(|variance| 1.0 / spread(variance).sqrt()).collect();
        Ok(LatentStatistics { shift: means, scale, patch: PATCH })
    }

    /// The same from the files, whose names have this prefix.
    pub fn stored_statistics(&self, catalog: &Catalog, prefix: &str) -> Result<LatentStatistics> {
        let problem =
            |Unsupported(problem)| TrainerError::Config { problem, path: catalog.path.clone() };
        let read = |name: &str| -> Result<Vec<f32>> {
            let tensor = catalog.find(&format!("{prefix}{name}"))?;
            let (n, expected) = (tensor.numel(), self.n_statistics());
            if n != expected as u64 {
                let text = format!("{name} has {n} values, latents need {expected}");
                return Err(problem(Unsupported(text)));
            }
            Ok(load_f32(catalog, tensor, 0..n)?)
        };
        let [means, variances] = names::STATISTICS.map(read);
        self.statistics(means?, &variances?).map_err(problem)
    }
}

/// The encoder.
pub fn encoder(config: &Flux2VaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeEncoder> {
    kl::encoder(&config.layers(), build)
}

/// The decoder.
pub fn decoder(config: &Flux2VaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeDecoder> {
    kl::decoder(&config.layers(), build)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::vae::VaeConfig;

    /// Counted by diffusers: 84,046,115 parameters, which the statistics are not.
    #[test]
    fn the_published_model_has_its_number_of_parameters() {
        let config = VaeConfig::from(Flux2VaeConfig::published());
        let stored = config.stored_tensors().unwrap();
        let count: usize = stored.iter().map(|spec| spec.shape.elements()).sum();
        assert_eq!((count, config.vae_scale_factor()), (84_046_115 + 2 * 128, 8));
    }

    #[test]
    fn settings_that_are_not_supported_are_named() {
        let check = |change: &dyn Fn(&mut Flux2VaeConfig), expected: &str| {
            let mut config = Flux2VaeConfig::published();
            change(&mut config);
            assert_eq!(config.check().unwrap_err().0, expected);
        };
        assert!(Flux2VaeConfig::published().check().is_ok());
        check(&|config| config.act_fn = "gelu".into(), "act_fn gelu is not silu");
        check(&|config| config.patch_size = [1, 2], "patch_size 1x2 is not 2x2");
        check(&|config| config.latent_channels = 0, "latent_channels is 0");
        check(&|config| config.batch_norm_eps = f32::NAN, "batch_norm_eps is NaN");
        let expected =
            "decoder_block_out_channels [64] are not block_out_channels [128, 256, 512, 512]";
        check(&|config| config.decoder_block_out_channels = Some(vec![64]), expected);
    }

    #[test]
    fn a_variance_below_zero_is_refused() {
        let config = Flux2VaeConfig::published();
        let found = config.statistics(vec![0.0; 2], &[1.0, -0.5]).unwrap_err().0;
        assert_eq!(found, "bn.running_var is -0.5, expected more than 0");
        let found = config.statistics(vec![3.0], &[0.2499]).unwrap();
        assert!((found.scale[0] - 2.0).abs() < 1e-6, "{found:?}");
    }
}
