//! The facts of Kandinsky 5 by variant: images or clips, distilled or not, the authors' prompts and sigmas or diffusers'.

use super::{Distillation, Kandinsky5Config, Kandinsky5Task, published};
use crate::model::adapter::TargetPreset;
use crate::model::adapter::names::EncoderNames;
use crate::model::diffusion::family::{
    ComfyuiLora, DiffusionFamily, ExportMetadata, SamplingDefaults, VideoDefaults,
};
use crate::model::diffusion::guidance::Guidance;
use crate::model::diffusion::implementation::Implementation;
use crate::model::diffusion::scheduler::SigmaSpacing;
use crate::model::diffusion::text::templates::{
    KANDINSKY5_IMAGE_DIFFUSERS, KANDINSKY5_IMAGE_TEMPLATE, KANDINSKY5_VIDEO_DIFFUSERS,
    KANDINSKY5_VIDEO_TEMPLATE,
};
use crate::model::diffusion::text::{
    CLIP_L_FILES, EncoderKind, PromptLength, PromptTemplate, QWEN25VL_FILES, TextEncoderSpec,
};
use crate::objective::flow::WeightingScheme;

/// What is known of Kandinsky 5: of its models for images, where variants differ.
pub const FAMILY: DiffusionFamily = DiffusionFamily {
    name: "kandinsky5",
    title: "a Kandinsky 5",
    pipelines: &[IMAGE_PIPELINE, VIDEO_PIPELINE, "Kandinsky5I2IPipeline", "Kandinsky5I2VPipeline"],
    pipeline_output: "image",
    takes_negative_text: true,
    transformer: "Kandinsky5Transformer3DModel",
    tensor_marker: "visual_transformer_blocks.0.cross_attention.key_norm.",
    // The VAE of FLUX.1.
    vae_files: &["ae.safetensors", "ae.sft"],
    encoders: &[CLIP, IMAGE_QWEN],
    trainable_encoders: &[],
    empty_prompt: "",
    cleans_prompts: true,
    max_sequence_length: 512,
    spacing: SigmaSpacing::Reciprocal,
    ignores_vae_shift: true,
    ignores_scheduler_config: true,
    guidance: Guidance::ClassifierFree,
    editing: None,
    video: None,
    distilled: None,
    // Taken: the defaults of diffusers' `Kandinsky5T2IPipeline`.
    sampling: SamplingDefaults { steps: 50, guidance: 3.5, resolution: 1024, negative_prompt: "" },
    // Taken: SimpleTuner's defaults for this family.
    scheme: WeightingScheme::LogitNormal { mean: 0.0, deviation: 1.0 },
    targets: ATTENTION,
    target_presets: &[
        TargetPreset { name: "attention", patterns: &[ATTENTION] },
        TargetPreset { name: "all", patterns: &[ATTENTION, FEED_FORWARD] },
        // Taken: what musubi-tuner trains, all layers but modulations.
        TargetPreset { name: "kohya", patterns: &[ATTENTION, FEED_FORWARD] },
        TargetPreset { name: "simpletuner", patterns: &[PROJECTIONS] },
    ],
    // Taken: `networks.lora_kandinsky` and the architecture are musubi-tuner's names.
    export: ExportMetadata {
        network: "networks.lora_kandinsky",
        architecture: "Kandinsky-5/lora",
        tag: "kandinsky",
        comfyui: ComfyuiLora::Alpha,
    },
    published: published::ALL,
};

const IMAGE_DIFFUSERS: DiffusionFamily = DiffusionFamily {
    encoders: &[CLIP, TextEncoderSpec { template: KANDINSKY5_IMAGE_DIFFUSERS, ..IMAGE_QWEN }],
    spacing: SigmaSpacing::Trained,
    ignores_scheduler_config: false,
    pipelines: &[IMAGE_PIPELINE],
    ..FAMILY
};

const VIDEO: DiffusionFamily = DiffusionFamily {
    title: "a Kandinsky 5 video",
    pipelines: &[VIDEO_PIPELINE],
    pipeline_output: "frames",
    takes_negative_text: true,
    // Taken: the file of huggingface.co/Comfy-Org/HunyuanVideo_repackaged.
    vae_files: &["hunyuan_video_vae_bf16.safetensors"],
    encoders: &[CLIP, VIDEO_QWEN],
    max_sequence_length: 256,
    // Taken: the defaults of diffusers' `Kandinsky5T2VPipeline`, and of the authors' program.
    video: Some(VideoDefaults { frames: 121, fps: 24 }),
    sampling: SamplingDefaults {
        steps: 50,
        guidance: 5.0,
        resolution: 512,
        negative_prompt: "Static, 2D cartoon, cartoon, 2d animation, paintings, images, worst quality, low quality, ugly, \
                          deformed, walking backwards",
    },
    ..FAMILY
};

const VIDEO_DIFFUSERS: DiffusionFamily = DiffusionFamily {
    encoders: &[CLIP, TextEncoderSpec { template: KANDINSKY5_VIDEO_DIFFUSERS, ..VIDEO_QWEN }],
    spacing: SigmaSpacing::Trained,
    ignores_scheduler_config: false,
    ..VIDEO
};

/// Distilled to do without guidance.
const VIDEO_NO_GUIDANCE: DiffusionFamily = DiffusionFamily {
    title: "a Kandinsky 5 video without guidance",
    sampling: SamplingDefaults { guidance: 1.0, negative_prompt: "", ..VIDEO.sampling },
    ..VIDEO
};

const VIDEO_NO_GUIDANCE_DIFFUSERS: DiffusionFamily = DiffusionFamily {
    title: VIDEO_NO_GUIDANCE.title,
    sampling: VIDEO_NO_GUIDANCE.sampling,
    ..VIDEO_DIFFUSERS
};

/// Distilled to 16 steps without guidance.
const VIDEO_DISTILLED: DiffusionFamily = DiffusionFamily {
    title: "a distilled Kandinsky 5 video",
    sampling: SamplingDefaults { steps: 16, ..VIDEO_NO_GUIDANCE.sampling },
    ..VIDEO
};

const VIDEO_DISTILLED_DIFFUSERS: DiffusionFamily = DiffusionFamily {
    title: VIDEO_DISTILLED.title,
    sampling: VIDEO_DISTILLED.sampling,
    ..VIDEO_DIFFUSERS
};

/// The facts of a model.
pub fn family(config: &Kandinsky5Config) -> &'static DiffusionFamily {
    use Implementation::{Diffusers, Original};
    match (config.is_video(), config.distillation, config.implementation) {
        (false, _, Original) => &FAMILY,
        (false, _, Diffusers) => &IMAGE_DIFFUSERS,
        (true, Distillation::None, Original) => &VIDEO,
        (true, Distillation::None, Diffusers) => &VIDEO_DIFFUSERS,
        (true, Distillation::NoGuidance, Original) => &VIDEO_NO_GUIDANCE,
        (true, Distillation::NoGuidance, Diffusers) => &VIDEO_NO_GUIDANCE_DIFFUSERS,
        (true, Distillation::Steps, Original) => &VIDEO_DISTILLED,
        (true, Distillation::Steps, Diffusers) => &VIDEO_DISTILLED_DIFFUSERS,
    }
}

const IMAGE_PIPELINE: &str = "Kandinsky5T2IPipeline";
const VIDEO_PIPELINE: &str = "Kandinsky5T2VPipeline";

/// What the pipelines of a class make.
pub fn task(class: &str) -> Option<Kandinsky5Task> {
    match class {
        IMAGE_PIPELINE => Some(Kandinsky5Task::Image),
        VIDEO_PIPELINE => Some(Kandinsky5Task::Video),
        class if FAMILY.pipelines.contains(&class) => Some(Kandinsky5Task::FromImages),
        _ => None,
    }
}

/// The class that a checkpoint is for, by its name as the authors publish it: `kandinsky5lite_t2v_sft_5s`.
pub fn pipeline_of_file(stem: &str) -> Option<&'static str> {
    let kinds = FAMILY.pipelines.iter().copied();
    let short = |class: &str| class.trim_start_matches("Kandinsky5")[..3].to_lowercase();
    kinds.into_iter().find(|class| stem.contains(&short(class)))
}

/// The layers of attentions. Text blocks have no cross-attention.
const ATTENTION: &[&str] = &[
    "self_attention.to_query",
    "self_attention.to_key",
    "self_attention.to_value",
    "self_attention.out_layer",
    "cross_attention.to_query",
    "cross_attention.to_key",
    "cross_attention.to_value",
    "cross_attention.out_layer",
];
const FEED_FORWARD: &[&str] = &["feed_forward.in_layer", "feed_forward.out_layer"];
const PROJECTIONS: &[&str] = &["to_key", "to_query", "to_value"];

/// Comes before the larger one, of which then one prompt's embedding is held at a time.
const CLIP: TextEncoderSpec = TextEncoderSpec {
    name: "clip-l",
    position: 2,
    tokenizer: "tokenizer_2",
    kind: EncoderKind::Clip,
    prompt_length: PromptLength::Positions(77),
    template: PromptTemplate::NONE,
    is_optional: false,
    adapter_names: EncoderNames { kohya: &["lora_te2"], comfyui: "clip_l" },
    files: CLIP_L_FILES,
};

const IMAGE_QWEN: TextEncoderSpec = TextEncoderSpec {
    name: "qwen2.5-vl",
    position: 1,
    tokenizer: "tokenizer",
    kind: EncoderKind::Qwen25Vl,
    prompt_length: PromptLength::Index(512),
    template: KANDINSKY5_IMAGE_TEMPLATE,
    is_optional: false,
    adapter_names: EncoderNames { kohya: &["lora_te1", "lora_te"], comfyui: "qwen25_7b" },
    files: QWEN25VL_FILES,
};

const VIDEO_QWEN: TextEncoderSpec = TextEncoderSpec {
    prompt_length: PromptLength::Index(256),
    template: KANDINSKY5_VIDEO_TEMPLATE,
    ..IMAGE_QWEN
};
