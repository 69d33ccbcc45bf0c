//! diffusers' `AutoencoderKLHunyuanVideo`, of clips, as HunyuanVideo and Kandinsky 5 use it. Its layers are those of
//! `AutoencoderKL` with a third dimension: convolutions see the current frame and those before it, a norm all frames,
//! and in the attention of the middle the pixels of a frame see those of all frames up to their own. The first frame is
//! one frame of the latent; of the others each four are.

pub mod names;

use serde::Deserialize;

use super::VaeScale;
use super::forward::{ConvKind, VaeDecoder, VaeEncoder};
use super::kl::{KlLayers, check_groups};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::diffusion::vae::LatentStatistics;

/// What `vae/config.json` says. What it leaves out is as diffusers' class has it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct HunyuanVideoVaeConfig {
    /// Channels of a clip.
    pub in_channels: usize,
    /// Channels of a decoded clip.
    pub out_channels: usize,
    /// Channels of a latent.
    pub latent_channels: usize,
    /// Channels at each size, the clip's own first.
    pub block_out_channels: Vec<usize>,
    /// Blocks at each size; the decoder has one more.
    pub layers_per_block: usize,
    /// The activation between convolutions.
    pub act_fn: String,
    /// Groups of every norm.
    pub norm_num_groups: usize,
    /// Latents are multiplied by this.
    pub scaling_factor: f32,
    /// Pixels per latent pixel, along a side.
    pub spatial_compression_ratio: usize,
    /// Frames per latent frame after the first.
    pub temporal_compression_ratio: usize,
    /// Whether there is an attention in the middle.
    pub mid_block_add_attention: bool,
    down_block_types: Vec<String>,
    up_block_types: Vec<String>,
}

impl Default for HunyuanVideoVaeConfig {
    fn default() -> Self {
        Self::published()
    }
}

const DOWN_BLOCK: &str = "HunyuanVideoDownBlock3D";
const UP_BLOCK: &str = "HunyuanVideoUpBlock3D";

/// Sizes that halve the number of frames. Taken: diffusers' class, whose decoder knows no other number.
const TIME_LEVELS: usize = 2;

impl HunyuanVideoVaeConfig {
    /// The VAE of HunyuanVideo and Kandinsky 5.
    pub fn published() -> Self {
        Self {
            in_channels: 3,
            out_channels: 3,
            latent_channels: 16,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            act_fn: "silu".into(),
            norm_num_groups: 32,
            scaling_factor: 0.476_986,
            spatial_compression_ratio: 8,
            temporal_compression_ratio: 1 << TIME_LEVELS,
            mid_block_add_attention: true,
            down_block_types: vec![DOWN_BLOCK.into(); 4],
            up_block_types: vec![UP_BLOCK.into(); 4],
        }
    }

    /// How latents are scaled for models.
    pub fn statistics(&self) -> LatentStatistics {
        let n = self.latent_channels;
        LatentStatistics::by_channel(vec![0.0; n], vec![self.scaling_factor; n])
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        let n_levels = self.block_out_channels.len();
        for (name, types, known) in [
            ("down_block_types", &self.down_block_types, DOWN_BLOCK),
            ("up_block_types", &self.up_block_types, UP_BLOCK),
        ] {
            let other = types.iter().find(|kind| *kind != known);
            other
                .map_or(Ok(()), |kind| Err(Unsupported(format!("{name} {kind} is not {known}"))))?;
            let n = types.len();
            let problem = format!("{name} has {n} values, block_out_channels {n_levels}");
            Unsupported::unless(n == n_levels, problem)?;
        }
        Unsupported::unless(self.act_fn == "silu", format!("act_fn {} is not silu", self.act_fn))?;
        for (name, channels) in [("in", self.in_channels), ("out", self.out_channels)] {
            Unsupported::unless(channels == 3, format!("{name}_channels {channels} is not 3"))?;
        }
        let frames = self.temporal_compression_ratio;
        let expected = 1 << TIME_LEVELS;
        let problem = format!("temporal_compression_ratio {frames} is not {expected}");
        Unsupported::unless(frames == expected, problem)?;
        let problem = format!("block_out_channels has {n_levels} values, needs more than 2");
        Unsupported::unless(n_levels > TIME_LEVELS, problem)?;
        let side = self.spatial_compression_ratio;
        let fits = side.is_power_of_two() && side.ilog2() as usize <= n_levels;
        let problem = format!("spatial_compression_ratio {side} does not fit {n_levels} sizes");
        Unsupported::unless(fits, problem)?;
        Unsupported::unless(self.latent_channels > 0, "latent_channels is 0".into())?;
        check_groups(self.norm_num_groups, &self.block_out_channels)
    }

    /// What the resampling layer of a size does: space first, and time in the last sizes that have one.
    fn resample(&self, level: usize) -> Option<VaeScale> {
        let n_levels = self.block_out_channels.len();
        let halves_time = level + 1 < n_levels && level + 1 + TIME_LEVELS >= n_levels;
        let halves_space = level < self.spatial_compression_ratio.ilog2() as usize;
        let factor = |is_halved: bool| if is_halved { 2 } else { 1 };
        let scale = VaeScale { side: factor(halves_space), frames: factor(halves_time) };
        (scale != VaeScale::SAME).then_some(scale)
    }

    fn layers<'a>(&'a self, resample: &'a dyn Fn(usize) -> Option<VaeScale>) -> KlLayers<'a> {
        KlLayers {
            pixel_channels: [self.in_channels, self.out_channels],
            latent_channels: self.latent_channels,
            channels: &self.block_out_channels,
            n_blocks: self.layers_per_block,
            n_groups: self.norm_num_groups,
            conv: ConvKind::CausalClip,
            has_attention: self.mid_block_add_attention,
            has_quant: [true; 2],
            resample,
        }
    }
}

/// The encoder.
pub fn encoder(config: &HunyuanVideoVaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeEncoder> {
    config.layers(&|level| config.resample(level)).encoder(build)
}

/// The decoder.
pub fn decoder(config: &HunyuanVideoVaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeDecoder> {
    config.layers(&|level| config.resample(level)).decoder(build)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::vae::VaeConfig;

    /// Counted by diffusers: 246,478,803 parameters in 248 tensors.
    #[test]
    fn the_published_model_has_its_number_of_parameters() {
        let config = VaeConfig::from(HunyuanVideoVaeConfig::published());
        let stored = config.stored_tensors().unwrap();
        let count: usize = stored.iter().map(|spec| spec.shape.elements()).sum();
        assert_eq!((stored.len(), count), (248, 246_478_803));
        assert_eq!((config.vae_scale_factor(), config.temporal_scale_factor()), (8, 4));
    }

    #[test]
    fn time_is_halved_where_the_reference_halves_it() {
        let mut config = HunyuanVideoVaeConfig::published();
        let scales = |config: &HunyuanVideoVaeConfig| {
            let levels = 0..config.block_out_channels.len();
            let scale = |level| config.resample(level).map(|it| (it.frames, it.side));
            levels.map(scale).collect::<Vec<_>>()
        };
        assert_eq!(scales(&config), [Some((1, 2)), Some((2, 2)), Some((2, 2)), None]);
        config.block_out_channels.pop();
        assert_eq!(scales(&config), [Some((2, 2)), Some((2, 2)), Some((1, 2))]);
        config.spatial_compression_ratio = 2;
        assert_eq!(scales(&config), [Some((2, 2)), Some((2, 1)), None]);
    }

    #[test]
    fn settings_that_are_not_supported_are_named() {
        let check = |change: &dyn Fn(&mut HunyuanVideoVaeConfig), expected: &str| {
            let mut config = HunyuanVideoVaeConfig::published();
            change(&mut config);
            assert_eq!(config.check().unwrap_err().0, expected);
        };
        assert!(HunyuanVideoVaeConfig::published().check().is_ok());
        check(&|config| config.act_fn = "gelu".into(), "act_fn gelu is not silu");
        check(&|config| config.in_channels = 4, "in_channels 4 is not 3");
        let expected = "temporal_compression_ratio 8 is not 4";
        check(&|config| config.temporal_compression_ratio = 8, expected);
        let expected = "spatial_compression_ratio 6 does not fit 4 sizes";
        check(&|config| config.spatial_compression_ratio = 6, expected);
        let expected = "down_block_types DownBlock3D is not HunyuanVideoDownBlock3D";
        check(&|config| config.down_block_types[1] = "DownBlock3D".into(), expected);
        let expected = "up_block_types has 3 values, block_out_channels 4";
        check(&|config| _ = config.up_block_types.pop(), expected);
        let expected = "144 channels are not a multiple of 32 groups";
        check(&|config| config.block_out_channels[0] = 144, expected);
        check(&|config| config.latent_channels = 0, "latent_channels is 0");
    }
}
