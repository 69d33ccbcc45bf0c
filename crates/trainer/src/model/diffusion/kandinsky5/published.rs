//! The models of this family that are published, by their settings.
//!
//! Taken: `config.json` of each part at huggingface.co/kandinskylab.

use super::{Distillation, Kandinsky5Config, Kandinsky5Task, REGULAR, published_patch};
use crate::model::diffusion::family::{ModelLicense, PublishedPipeline};
use crate::model::diffusion::implementation::Implementation;
use crate::model::diffusion::scheduler::{FlowMatchScheduler, SigmaSpacing};
use crate::model::diffusion::text::EncoderConfig;
use crate::model::encoder::clip::ClipConfig;
use crate::model::encoder::qwen25vl::Qwen25VlConfig;
use crate::model::vae::{HunyuanVideoVaeConfig, KlVaeConfig};

/// Kandinsky 5.0 for images and for clips of 5 s. Those for 10 s have sparse attention.
pub const ALL: &[PublishedPipeline] = &[
    IMAGE_LITE,
    VIDEO_LITE,
    PublishedPipeline {
        name: "kandinsky-5.0-t2v-lite-nocfg-5s",
        hint: "`hearth fetch kandinskylab/Kandinsky-5.0-T2V-Lite-nocfg-5s-Diffusers` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            (
                "Kandinsky-5.0-T2V-Lite-nocfg-5s-Diffusers",
                "kandinskylab/Kandinsky-5.0-T2V-Lite-nocfg-5s-Diffusers",
            ),
            (
                "kandinsky5lite_t2v_nocfg_5s",
                "kandinskylab/Kandinsky-5.0-T2V-Lite-nocfg-5s-Diffusers",
            ),
        ],
        config: || {
            let distillation = Distillation::NoGuidance;
            Kandinsky5Config { distillation, ..video_lite() }.into()
        },
        ..VIDEO_LITE
    },
    PublishedPipeline {
        name: "kandinsky-5.0-t2v-lite-distilled16steps-5s",
        hint: "`hearth fetch kandinskylab/Kandinsky-5.0-T2V-Lite-distilled16steps-5s-Diffusers` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            (
                "Kandinsky-5.0-T2V-Lite-distilled16steps-5s-Diffusers",
                "kandinskylab/Kandinsky-5.0-T2V-Lite-distilled16steps-5s-Diffusers",
            ),
            (
                "kandinsky5lite_t2v_distilled16steps_5s",
                "kandinskylab/Kandinsky-5.0-T2V-Lite-distilled16steps-5s-Diffusers",
            ),
        ],
        config: || Kandinsky5Config { distillation: Distillation::Steps, ..video_lite() }.into(),
        schedule: || FlowMatchScheduler::fixed(5.0, SigmaSpacing::Reciprocal),
        ..VIDEO_LITE
    },
    PublishedPipeline {
        name: "kandinsky-5.0-t2v-pro",
        hint: "`hearth fetch kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            (
                "Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers",
                "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers",
            ),
            ("kandinsky5pro_t2v_sft_5s", "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers"),
        ],
        config: || video_pro().into(),
        ..VIDEO_LITE
    },
];

const VIDEO_LITE: PublishedPipeline = PublishedPipeline {
    name: "kandinsky-5.0-t2v-lite",
    hint: "`hearth fetch kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers` downloads it, give that name as the base; a plan needs its \
               name alone",
    hub: &[
        (
            "Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
            "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
        ),
        (
            "Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers",
            "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers",
        ),
        ("kandinsky5lite_t2v_sft_5s", "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers"),
    ],
    config: || video_lite().into(),
    vae: || HunyuanVideoVaeConfig::published().into(),
    // Taken: the authors' sampler.
    schedule: || FlowMatchScheduler::fixed(10.0, SigmaSpacing::Reciprocal),
    ..IMAGE_LITE
};

const IMAGE_LITE: PublishedPipeline = PublishedPipeline {
    name: "kandinsky-5.0-t2i-lite",
    hint: "`hearth fetch kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers` downloads it, give that name as the base; a plan needs its \
               name alone",
    hub: &[
        (
            "Kandinsky-5.0-T2I-Lite-sft-Diffusers",
            "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
        ),
        (
            "Kandinsky-5.0-T2I-Lite-pretrain-Diffusers",
            "kandinskylab/Kandinsky-5.0-T2I-Lite-pretrain-Diffusers",
        ),
        ("kandinsky5lite_t2i", "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers"),
    ],
    license: ModelLicense {
        id: "mit",
        name: None,
        summary: "It is the MIT License, which allows commercial use.",
    },
    config: || image_lite().into(),
    vae: || KlVaeConfig::published(0.1159, 0.3611).into(),
    encoders: || {
        let [clip, _] = ClipConfig::published();
        vec![
            EncoderConfig::Clip(clip.without_projection()),
            EncoderConfig::Qwen25Vl(Qwen25VlConfig::published()),
        ]
    },
    // Taken: the authors' sampler.
    schedule: || FlowMatchScheduler::fixed(3.0, SigmaSpacing::Reciprocal),
};

/// Kandinsky 5.0 T2I Lite.
pub(crate) fn image_lite() -> Kandinsky5Config {
    Kandinsky5Config {
        in_visual_dim: 16,
        out_visual_dim: 16,
        in_text_dim: 3584,
        in_text_dim2: 768,
        time_dim: 512,
        patch_size: published_patch(),
        model_dim: 2560,
        ff_dim: 10_240,
        num_text_blocks: 2,
        num_visual_blocks: 50,
        axes_dims: [32, 48, 48],
        visual_cond: false,
        attention_type: REGULAR.into(),
        task: Some(Kandinsky5Task::Image),
        distillation: Distillation::None,
        implementation: Implementation::Original,
    }
}

/// Kandinsky 5.0 T2V Lite for 5 s.
pub(crate) fn video_lite() -> Kandinsky5Config {
    Kandinsky5Config {
        model_dim: 1792,
        ff_dim: 7168,
        num_visual_blocks: 32,
        axes_dims: [16, 24, 24],
        visual_cond: true,
        task: Some(Kandinsky5Task::Video),
        ..image_lite()
    }
}

/// Kandinsky 5.0 T2V Pro for 5 s.
fn video_pro() -> Kandinsky5Config {
    Kandinsky5Config {
        time_dim: 1024,
        model_dim: 4096,
        ff_dim: 16_384,
        num_text_blocks: 4,
        num_visual_blocks: 60,
        axes_dims: [32, 48, 48],
        ..video_lite()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::adapter::name_matches;
    use crate::model::diffusion::Pipeline;
    use crate::model::diffusion::denoiser::DenoiserConfig;
    use crate::model::diffusion::paths::PartPaths;

    /// Counted by diffusers on the meta device.
    #[test]
    fn published_models_have_their_number_of_parameters() {
        for (name, expected) in [
            ("Kandinsky-5.0-T2I-Lite-sft-Diffusers", 6_022_080_576_usize),
            ("Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", 2_007_702_848),
            ("Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers", 19_311_325_248),
        ] {
            let tensors = open(name, None).transformer.config.tensor_specs().unwrap();
            let n: usize = tensors.iter().map(|want| want.shape.elements()).sum();
            assert_eq!(n, expected, "{name}");
        }
    }

    fn open(name: &str, implementation: Option<Implementation>) -> Pipeline {
        let parts = PartPaths { implementation, ..PartPaths::default() };
        Pipeline::open_or_published(Path::new(name), &parts).unwrap()
    }

    /// Steps, guidance, the last of four sigmas before 0, and how many tokens of a prompt are dropped.
    #[test]
    fn variants_are_sampled_as_their_authors_say() {
        let (original, diffusers) = (None, Some(Implementation::Diffusers));
        for (name, implementation, expected) in [
            ("Kandinsky-5.0-T2I-Lite-sft-Diffusers", original, (50, 3.5, 0.5, 41)),
            ("Kandinsky-5.0-T2I-Lite-sft-Diffusers", diffusers, (50, 3.5, 0.008_928_6, 40)),
            ("Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", original, (50, 5.0, 0.769_230_8, 129)),
            ("Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", diffusers, (50, 5.0, 0.090_991_8, 128)),
            ("Kandinsky-5.0-T2V-Lite-nocfg-5s-Diffusers", original, (50, 1.0, 0.769_230_8, 129)),
            (
                "Kandinsky-5.0-T2V-Lite-distilled16steps-5s-Diffusers",
                original,
                (16, 1.0, 0.625, 129),
            ),
        ] {
            let pipeline = open(name, implementation);
            let sampling = pipeline.family().sampling;
            let sigmas = pipeline.schedule.sigmas(4096, 4);
            let dropped = pipeline.encoders.templates().next().unwrap().n_dropped;
            let found = (sampling.steps, sampling.guidance, dropped);
            assert_eq!(found, (expected.0, expected.1, expected.3), "{name}");
            assert!((sigmas[3] - expected.2).abs() < 1e-5, "{name}: {sigmas:?}");
            // The VAE of FLUX.1 has a shift, which is ignored.
            assert_eq!(pipeline.vae.statistics().shift, [0.0; 16]);
        }
    }

    #[test]
    fn a_clip_has_tokens_of_every_fourth_frame() {
        let pipeline = open("Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers", None);
        let video = pipeline.family().video.unwrap();
        assert_eq!((video.frames, video.fps), (121, 24));
        assert_eq!(pipeline.image_tokens([768, 512], video.frames), 31 * 48 * 32);
        let sizes = [16, 31, 64, 96];
        assert_eq!(pipeline.latent_shape([768, 512], video.frames).sizes(), sizes);
    }

    /// Layers of each preset in T2I Lite: two text blocks, fifty of images.
    #[test]
    fn presets_of_targets_are_those_of_other_trainers() {
        let tensors = DenoiserConfig::from(image_lite()).tensor_specs().unwrap();
        let layers: Vec<&str> =
            tensors.iter().filter_map(|spec| spec.name.strip_suffix(".weight")).collect();
        for (name, n_layers) in [
            ("attention", 2 * 4 + 50 * 8),
            ("all", 2 * 6 + 50 * 10),
            ("kohya", 2 * 6 + 50 * 10),
            ("simpletuner", 2 * 3 + 50 * 6),
        ] {
            let preset = super::super::FAMILY.target_presets.iter().find(|it| it.name == name);
            let patterns = preset.unwrap().patterns.concat();
            let is_target =
                |layer: &&&str| patterns.iter().any(|pattern| name_matches(pattern, layer));
            assert_eq!(layers.iter().filter(is_target).count(), n_layers, "{name}");
        }
    }
}
