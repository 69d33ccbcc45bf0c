//! Benchmarks of models with random weights: the small ones exist in `benches/peers/models.py` for diffusers,
//! transformers and PEFT too. Published models have their full size, which takes a GPU. [`folder`] writes whole
//! models to disk, for benchmarks of whole jobs.

pub mod folder;
pub mod text;

use std::ops::Range;

use compute::ops::{self, AdamW, Moments, adamw, global_norm};
use compute::{Device, Dtype, Gradients, Params, Quantisation, RandomSequence, Tape, Tensor};

use crate::error::Result;
use crate::model::adapter::{AdapterForm, AdapterTarget, Adapters};
use crate::model::build::{ModelBuilder, Precision, RandomWeights};
use crate::model::diffusion::condition::{Conditions, POOLED, TOKENS};
use crate::model::diffusion::denoiser::{Denoiser, DenoiserConfig, DenoiserInput, LatentSpec};
use crate::model::diffusion::flux::{self, flux1_dev};
use crate::model::diffusion::flux2::{klein_4b, klein_9b};
use crate::model::diffusion::guidance::Guidance;
use crate::model::diffusion::kandinsky5::{Kandinsky5Config, image_lite, video_lite};
use crate::model::diffusion::qwen_image::qwen_image;
use crate::model::diffusion::sd3::{self, sd3_medium, sd35_large};
use crate::model::diffusion::z_image::z_image;
use crate::model::encoder::clip::{self, ClipTextModel};
use crate::model::encoder::t5::{self, T5Encoder};
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;
use crate::model::vae::{
    HunyuanVideoVaeConfig, KlVaeConfig, QwenImageVaeConfig, VaeConfig, VaeDecoder, VaeEncoder, kl,
};
use crate::objective::flow::Timestep;

/// A benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchCase {
    /// Forward and backward of adapters on a transformer of two narrow blocks.
    Sd3Tiny,
    /// The same, eight blocks of width 512, an image of 512 pixels a side.
    Sd3Mid,
    /// The same on FLUX.1 dev with one double-stream and one single-stream block.
    FluxMid,
    /// A prompt through CLIP-L, as it is published.
    ClipL,
    /// A prompt through eight blocks of a T5 of width 1024.
    T5,
    /// An image of 256 pixels a side to latents, by SD3's autoencoder.
    VaeEncode,
    /// Latents back to the image.
    VaeDecode,
    /// A whole training step of adapters on Stable Diffusion 3 medium, an image of 1024 pixels a side.
    Sd3Medium,
    /// The same on Stable Diffusion 3.5 large.
    Sd35Large,
    /// The same on FLUX.1 dev.
    Flux1Dev,
    /// The same on Qwen-Image.
    QwenImage,
    /// The same on Z-Image.
    ZImage,
    /// The same on FLUX.2 klein base 4B.
    Klein4b,
    /// The same on FLUX.2 klein base 9B.
    Klein9b,
    /// The same on Kandinsky 5 T2I Lite.
    Kandinsky5Image,
    /// The same on Kandinsky 5 T2V Lite, a clip of 121 frames of 768 by 512 pixels.
    Kandinsky5Video,
    /// An image of 1024 pixels a side to latents, by SD3's autoencoder.
    VaeEncode1024,
    /// The same by Qwen-Image's.
    QwenVaeEncode1024,
    /// A tile of a clip, 17 frames of 256 pixels a side, to latents by HunyuanVideo's autoencoder.
    HunyuanVaeEncode,
    /// Latents back to the clip.
    HunyuanVaeDecode,
}

/// How a transformer is trained.
#[derive(Clone, Copy, Debug)]
pub struct BenchSettings {
    /// Images in a step.
    pub samples: usize,
    /// Images of a micro-batch; gradients are accumulated.
    pub micro_batch: usize,
    /// Gradient checkpointing.
    pub recompute: Recompute,
    /// Block offloading.
    pub offload: Offload,
    /// Quantisation of the frozen weights.
    pub quantise: Option<Quantisation>,
    /// Whether weights of fp8 are multiplied so.
    pub multiplies_fp8: bool,
}

impl BenchCase {
    /// Those that fit on any computer.
    pub const SMALL: [Self; 7] = [
        Self::Sd3Tiny,
        Self::Sd3Mid,
        Self::FluxMid,
        Self::ClipL,
        Self::T5,
        Self::VaeEncode,
        Self::VaeDecode,
    ];

    /// Those of full size.
    pub const FULL: [Self; 13] = [
        Self::Sd3Medium,
        Self::Sd35Large,
        Self::Flux1Dev,
        Self::QwenImage,
        Self::ZImage,
        Self::Klein4b,
        Self::Klein9b,
        Self::Kandinsky5Image,
        Self::Kandinsky5Video,
        Self::VaeEncode1024,
        Self::QwenVaeEncode1024,
        Self::HunyuanVaeEncode,
        Self::HunyuanVaeDecode,
    ];

    /// As it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sd3Tiny => "sd3-tiny",
            Self::Sd3Mid => "sd3-mid",
            Self::FluxMid => "flux-mid",
            Self::ClipL => "clip-l",
            Self::T5 => "t5",
            Self::VaeEncode => "vae-encode",
            Self::VaeDecode => "vae-decode",
            Self::Sd3Medium => "sd3-medium",
            Self::Sd35Large => "sd3.5-large",
            Self::Flux1Dev => "flux1-dev",
            Self::QwenImage => "qwen-image",
            Self::ZImage => "z-image",
            Self::Klein4b => "flux2-klein-4b",
            Self::Klein9b => "flux2-klein-9b",
            Self::Kandinsky5Image => "kandinsky5-t2i-lite",
            Self::Kandinsky5Video => "kandinsky5-t2v-lite",
            Self::VaeEncode1024 => "vae-encode-1024",
            Self::QwenVaeEncode1024 => "qwen-vae-encode-1024",
            Self::HunyuanVaeEncode => "hunyuan-vae-encode",
            Self::HunyuanVaeDecode => "hunyuan-vae-decode",
        }
    }

    /// Makes the model and its input; encoders and autoencoders have one input whatever the settings.
    pub fn prepare(
        self,
        device: &Device,
        dtype: Dtype,
        settings: BenchSettings,
    ) -> Result<PreparedBench> {
        let BenchSettings { offload, quantise, multiplies_fp8, .. } = settings;
        let plain = Precision::plain(dtype);
        let precision = Precision { offload, base: quantise, multiplies_fp8, ..plain };
        let transformer = self.transformer();
        let mut adapters = match &transformer {
            Some(_) => Adapters::random_init(targets(), Vec::new(), SEED),
            None => Adapters::none(),
        };
        let mut source = match &transformer {
            Some(case) => {
                let all = case.config.tensor_specs()?;
                RandomWeights::with_block_swap(device, precision, SEED, &all)?
            }
            None => RandomWeights::new(precision, SEED),
        };
        let build = &mut ModelBuilder::new(device, precision, &mut source, &mut adapters);
        let normal = |shape: &[usize]| {
            device.normal(compute::Shape::new(shape), dtype, 1.0, RandomSequence::new(SEED, 9))
        };
        let work = match self {
            Self::Sd3Tiny
            | Self::Sd3Mid
            | Self::FluxMid
            | Self::Sd3Medium
            | Self::Sd35Large
            | Self::Flux1Dev
            | Self::QwenImage
            | Self::ZImage
            | Self::Klein4b
            | Self::Klein9b
            | Self::Kandinsky5Image
            | Self::Kandinsky5Video => {
                let case = transformer.expect("these are the transformers");
                case.work(build, settings, &normal)?
            }
            Self::ClipL => BenchWork::Clip(ClipTextModel::new(&clip_l(), build)?),
            Self::T5 => BenchWork::T5(T5Encoder::new(&t5_config(), build)?),
            Self::VaeEncode | Self::VaeEncode1024 | Self::QwenVaeEncode1024 => {
                let (vae, side) = self.encoder();
                let encoder = VaeEncoder::new(&vae, build.allow_tf32())?;
                BenchWork::Encode(encoder, normal(&[1, 3, side, side])?)
            }
            Self::HunyuanVaeEncode => {
                let vae = HunyuanVideoVaeConfig::published().into();
                let encoder = VaeEncoder::new(&vae, build.allow_tf32())?;
                BenchWork::Encode(encoder, normal(&[1, 3, CLIP_FRAMES, IMAGE, IMAGE])?)
            }
            Self::HunyuanVaeDecode => {
                let vae = HunyuanVideoVaeConfig::published().into();
                let decoder = VaeDecoder::new(&vae, build.allow_tf32())?;
                let frames = CLIP_FRAMES / 4 + 1;
                BenchWork::Decode(decoder, normal(&[1, 16, frames, IMAGE / 8, IMAGE / 8])?)
            }
            Self::VaeDecode => BenchWork::Decode(
                kl::decoder(&autoencoder(), build.allow_tf32())?,
                normal(&[1, 16, IMAGE / 8, IMAGE / 8])?,
            ),
        };
        let params = adapters.params;
        let moments = if Self::FULL.contains(&self) {
            params.values().iter().map(Moments::new).collect::<compute::Result<_>>()?
        } else {
            Vec::new()
        };
        Ok(PreparedBench { device: device.clone(), work, params, moments, n_steps: 0 })
    }

    fn transformer(self) -> Option<TransformerCase> {
        match self {
            Self::Sd3Tiny => Some(TransformerCase::sd3(sd3_config(TINY), 16)),
            Self::Sd3Mid => Some(TransformerCase::sd3(sd3_config(MID), 64)),
            Self::FluxMid => {
                let blocks =
                    flux::FluxConfig { num_layers: 1, num_single_layers: 1, ..flux1_dev() };
                Some(TransformerCase::flux(blocks, 64))
            }
            Self::Sd3Medium => Some(TransformerCase::sd3(sd3_medium(), 128)),
            Self::Sd35Large => Some(TransformerCase::sd3(sd35_large(), 128)),
            Self::Flux1Dev => Some(TransformerCase::flux(flux1_dev(), 128)),
            Self::QwenImage => {
                let config = qwen_image();
                let prompt = [LONG_PROMPT, config.joint_attention_dim];
                Some(TransformerCase::prompted(config, prompt))
            }
            Self::ZImage => {
                let config = z_image();
                let prompt = [LONG_PROMPT, config.cap_feat_dim];
                Some(TransformerCase::prompted(config, prompt))
            }
            Self::Klein4b | Self::Klein9b => {
                let config = if self == Self::Klein4b { klein_4b } else { klein_9b }(false);
                let prompt = [FLUX_PROMPT, config.joint_attention_dim];
                Some(TransformerCase::prompted(config, prompt))
            }
            Self::Kandinsky5Image => {
                Some(TransformerCase::kandinsky5(image_lite(), [128, 128].into()))
            }
            // 121 frames of 768 by 512 pixels.
            Self::Kandinsky5Video => {
                Some(TransformerCase::kandinsky5(video_lite(), [31, 64, 96].into()))
            }
            _ => None,
        }
    }

    /// The autoencoder that encodes, and the pixels along a side of its image.
    fn encoder(self) -> (VaeConfig, usize) {
        match self {
            Self::VaeEncode1024 => (autoencoder().into(), LARGE_IMAGE),
            Self::QwenVaeEncode1024 => (QwenImageVaeConfig::published().into(), LARGE_IMAGE),
            _ => (autoencoder().into(), IMAGE),
        }
    }
}

/// A transformer to train.
struct TransformerCase {
    config: DenoiserConfig,
    /// Height and width of its latents, with frames before them if these are clips.
    size: Vec<usize>,
    /// The shape of each tensor of its conditioning.
    condition: Vec<(&'static str, Vec<usize>)>,
}

impl TransformerCase {
    fn sd3(config: sd3::Sd3Config, side: usize) -> Self {
        let tokens = (TOKENS, vec![SD3_PROMPT, config.joint_attention_dim]);
        let pooled = (POOLED, vec![config.pooled_projection_dim]);
        Self { condition: vec![tokens, pooled], config: config.into(), size: vec![side; 2] }
    }

    fn flux(config: flux::FluxConfig, side: usize) -> Self {
        let tokens = (TOKENS, vec![FLUX_PROMPT, config.joint_attention_dim]);
        let pooled = (POOLED, vec![config.pooled_projection_dim]);
        Self { condition: vec![tokens, pooled], config: config.into(), size: vec![side; 2] }
    }

    /// With the tokens of a prompt and their width alone, and an image of 1024 pixels a side.
    fn prompted(config: impl Into<DenoiserConfig>, prompt: [usize; 2]) -> Self {
        let condition = vec![(TOKENS, prompt.to_vec())];
        Self { config: config.into(), size: vec![LARGE_IMAGE / 8; 2], condition }
    }

    fn kandinsky5(config: Kandinsky5Config, size: Vec<usize>) -> Self {
        let tokens = (TOKENS, vec![LONG_PROMPT, config.in_text_dim]);
        let pooled = (POOLED, vec![config.in_text_dim2]);
        Self { condition: vec![tokens, pooled], config: config.into(), size }
    }

    fn work(
        &self,
        build: &mut ModelBuilder<'_>,
        BenchSettings { samples, micro_batch, recompute, .. }: BenchSettings,
        normal: NormalFn<'_>,
    ) -> Result<BenchWork> {
        let LatentSpec { channels, patch_size, .. } = self.config.latent_spec();
        let of_all = |sizes: &[usize]| normal(&[&[samples], sizes].concat());
        let condition = self.condition.iter().map(|(name, sizes)| Ok((*name, of_all(sizes)?)));
        let n_pixels: usize = self.size.iter().product();
        let n_patches = n_pixels / (patch_size * patch_size);
        Ok(BenchWork::Transformer {
            model: self.config.build(build)?,
            latents: normal(&[&[samples, channels], &self.size[..]].concat())?,
            condition: condition.collect::<Result<_>>()?,
            target: normal(&[samples, n_patches, patch_size * patch_size * channels])?,
            guidance: self.config.family().guidance,
            micro_batch,
            recompute,
        })
    }
}

const SEED: u64 = 1;
const RANK: usize = 16;
/// Pixels along a side of the autoencoder's image.
const IMAGE: usize = 256;
/// The same of a large one.
const LARGE_IMAGE: usize = 1024;
/// Frames of a clip. Taken: diffusers' tiles of clips.
const CLIP_FRAMES: usize = 17;
/// Prompt tokens as SD3 sees them.
const SD3_PROMPT: usize = 333;
/// The same of FLUX.1 dev and FLUX.2 klein.
const FLUX_PROMPT: usize = 512;
/// A long prompt of Qwen-Image, Z-Image and Kandinsky 5.
const LONG_PROMPT: usize = 256;
/// The embedded guidance scale of models that take one.
const GUIDANCE: f32 = 3.5;

fn targets() -> Vec<AdapterTarget> {
    let target = |pattern: &str| AdapterTarget {
        pattern: pattern.into(),
        rank: RANK,
        alpha: RANK as f32,
        dropout: 0.0,
        form: AdapterForm::Lora,
        rate_factors: [1.0; 2],
    };
    let names: [&[&str]; 4] = [
        &["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"],
        &["attn.to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out"],
        &["attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"],
        &[
            "*attention.to_query",
            "*attention.to_key",
            "*attention.to_value",
            "*attention.out_layer",
        ],
    ];
    names.concat().into_iter().map(target).collect()
}

/// Heads, their width, and blocks.
const TINY: [usize; 3] = [4, 16, 2];
const MID: [usize; 3] = [8, 64, 8];

fn sd3_config([n_heads, d_head, n_blocks]: [usize; 3]) -> sd3::Sd3Config {
    sd3::Sd3Config {
        in_channels: 16,
        out_channels: Some(16),
        patch_size: 2,
        num_layers: n_blocks,
        num_attention_heads: n_heads,
        attention_head_dim: d_head,
        joint_attention_dim: 4096,
        caption_projection_dim: n_heads * d_head,
        pooled_projection_dim: 2048,
        sample_size: 128,
        pos_embed_max_size: 96,
        qk_norm: None,
        dual_attention_layers: Vec::new(),
    }
}

/// SD3's.
fn autoencoder() -> KlVaeConfig {
    KlVaeConfig::published(0.0609, 1.5305)
}

fn clip_l() -> clip::ClipConfig {
    let [l, _] = clip::ClipConfig::published();
    l
}

fn t5_config() -> t5::T5Config {
    t5::T5Config {
        vocab_size: 32128,
        d_model: 1024,
        d_kv: 64,
        d_ff: 2816,
        num_layers: 8,
        num_heads: 16,
        relative_attention_num_buckets: 32,
        relative_attention_max_distance: 128,
        feed_forward_proj: "gated-gelu".into(),
        layer_norm_epsilon: 1e-6,
    }
}

type NormalFn<'a> = &'a dyn Fn(&[usize]) -> compute::Result<Tensor>;

enum BenchWork {
    Transformer {
        model: Denoiser,
        latents: Tensor,
        condition: Vec<(&'static str, Tensor)>,
        target: Tensor,
        guidance: Guidance,
        micro_batch: usize,
        recompute: Recompute,
    },
    Clip(ClipTextModel),
    T5(T5Encoder),
    Encode(VaeEncoder, Tensor),
    Decode(VaeDecoder, Tensor),
}

/// Samples in micro-batches, the last of which may be smaller.
pub(crate) fn micro_batches(samples: usize, micro: usize) -> impl Iterator<Item = Range<usize>> {
    (0..samples).step_by(micro).map(move |first| first..samples.min(first + micro))
}

/// A model and its input, ready to be run over and over.
pub struct PreparedBench {
    device: Device,
    work: BenchWork,
    params: Params,
    /// Of every parameter, if the work includes the optimizer step.
    moments: Vec<Moments>,
    n_steps: u64,
}

impl PreparedBench {
    /// Does the work once.
    pub fn run(&mut self) -> Result<()> {
        let inference = || Tape::inference(&self.device, &self.params, 0);
        match &self.work {
            BenchWork::Transformer {
                model,
                latents,
                condition,
                target,
                guidance,
                micro_batch: micro,
                recompute,
            } => {
                let mut gradients = Gradients::default();
                for micro_batch in micro_batches(latents.shape().sizes()[0], *micro) {
                    let tape = Tape::training(&self.device, &self.params, 0)
                        .keeping_attention(recompute.keeps_attention());
                    let part = |all: &Tensor| all.narrow(micro_batch.clone());
                    let [latents, target] = [latents, target].map(part);
                    let condition = condition.iter().map(|(name, all)| (*name, part(all)));
                    let condition = Conditions::from_tensors(condition);
                    let timesteps = vec![Timestep { sigma: 0.5, t: 500.0 }; micro_batch.len()];
                    let scales = guidance.embedded(GUIDANCE, micro_batch.len());
                    let input = DenoiserInput {
                        latents: &latents,
                        references: &[],
                        timesteps: &timesteps,
                        condition: &condition,
                        guidance: scales.as_deref(),
                        time_dtype: latents.dtype(),
                    };
                    let predicted = model.predict(&tape, input, *recompute)?;
                    let loss = tape.mse(&predicted.tokens, &target, None, None)?;
                    drop(predicted);
                    tape.backward(&loss, &mut gradients)?;
                }
                self.update(&gradients)?;
            }
            BenchWork::Clip(model) => {
                drop(model.forward(&inference(), &[7; 77], 1, Recompute::None)?);
            }
            BenchWork::T5(model) => drop(model.forward(&inference(), &[7; 256], 1, None)?),
            BenchWork::Encode(model, images) => drop(model.forward(&inference(), images)?),
            BenchWork::Decode(model, latents) => drop(model.forward(&inference(), latents)?),
        }
        Ok(())
    }

    /// The optimizer step, where it is part of the work.
    fn update(&mut self, gradients: &Gradients) -> Result<()> {
        if self.moments.is_empty() {
            return Ok(());
        }
        self.n_steps += 1;
        let gradients = gradients.all(self.params.values().len());
        let clip = ops::GradClip { norm: global_norm(&gradients, &self.device)?, max_norm: 1.0 };
        let adamw_settings = AdamW { learning_rate: 1e-4, step: self.n_steps, ..AdamW::default() };
        let params = self.params.values_mut()?;
        Ok(adamw(params, &gradients, &mut self.moments, adamw_settings, Some(&clip))?)
    }
}

#[cfg(test)]
mod tests {
    use compute::{DeviceKind, Usage};

    use super::*;

    /// What a step of Stable Diffusion 3 medium takes of a GPU, and its operations.
    fn step(samples: usize, recompute: Recompute) -> (Usage, u64) {
        let device = Device::meta(DeviceKind::Cuda { is_deterministic: false }, usize::MAX / 2);
        let settings = BenchSettings {
            samples,
            micro_batch: samples,
            recompute,
            offload: Offload::None,
            quantise: None,
            multiplies_fp8: false,
        };
        let mut model = BenchCase::Sd3Medium.prepare(&device, Dtype::Bf16, settings).unwrap();
        model.run().unwrap();
        let before = device.work().flops;
        model.run().unwrap();
        (device.usage(), device.work().flops - before)
    }

    /// Long-lived tensors are allocated before temporary ones, so that memory is hardly fragmented.
    #[test]
    fn a_step_has_hardly_any_fragmentation() {
        for (samples, recompute) in [
            (1, Recompute::None),
            (1, Recompute::Block),
            (4, Recompute::None),
            (4, Recompute::Block),
        ] {
            let (usage, _) = step(samples, recompute);
            let holes = (usage.extent - usage.peak) as f64 / usage.peak as f64;
            assert!(holes < 0.01, "{samples} {recompute:?}: {holes} of {usage:?}");
        }
    }

    /// The last layer of a recomputed block is not computed again: the backward pass does not need its output.
    #[test]
    fn the_end_of_a_recomputed_block_is_computed_once() {
        let [(_, once), (_, twice)] =
            [Recompute::None, Recompute::Block].map(|recompute| step(1, recompute));
        let config = sd3_medium();
        let (tokens, width) = ((128 / config.patch_size).pow(2), config.width());
        // Matmuls of a block's forward pass: four layers of one width, two of four widths, attention.
        let per_token = 2 * (4 + 4 + 4) * width * width;
        let all = (tokens + SD3_PROMPT) * per_token + 4 * (tokens + SD3_PROMPT).pow(2) * width;
        let last = 2 * tokens * width * 4 * width;
        let most = config.num_layers * (all - last);
        assert!(twice - once < (most as f64 * 1.05) as u64, "{} of {most}", twice - once);
    }
}
