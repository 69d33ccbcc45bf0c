//! The built-in model's folder, as diffusers lays it out, without the weights of its transformer:
//!
//! ```text
//! folder/
//!   model_index.json
//!   scheduler/scheduler_config.json
//!   tokenizer/       vocab.json, merges.txt, tokenizer_config.json, special_tokens_map.json
//!   tokenizer_2/     the same; pads prompts with another token, as SD3's second one does
//!   text_encoder/    config.json, model.safetensors: a CLIP with random weights
//!   text_encoder_2/  the same with other numbers
//!   vae/             config.json, diffusion_pytorch_model.safetensors
//!   transformer/     config.json
//! ```
//!
//! Text encoders are random: with a token per word, different words have different vectors, and
//! that is all the transformer asks for. All follows from a seed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use compute::{Device, RandomSequence};
use serde_json::{Value, json};
use weights::WeightsError;
use weights::safetensors::OutputTensor;
use weights::write::{write_file, write_whole};

use super::autoencoder::{self, DecoderProgressFn, TensorMap};
use super::paint::SIDE;
use super::vocabulary::{DemoVocabulary, LENGTH};
use crate::error::{Result, TrainerError};
use crate::model::build::{TensorSpec, tensor_specs};
use crate::model::encoder::clip::{self, ClipTextModel};

/// Of the text encoders' numbers.
const SEED: u64 = 0xc11b;

/// Width of a text encoder's tokens and of its vector for a whole prompt.
const TEXT_WIDTH: usize = 64;

/// The versions of the formats that are written.
const DIFFUSERS: &str = "0.31.0";

/// Makes the folder; the VAE's decoder is trained for some minutes, with progress to `on_progress`.
pub fn write(folder: &Path, device: &Device, on_progress: DecoderProgressFn<'_>) -> Result<()> {
    write_untrained(folder)?;
    let fitted = autoencoder::fit(device, on_progress)?;
    save(&folder.join("vae/diffusion_pytorch_model.safetensors"), &fitted)
}

/// All of it but the autoencoder's weights, in a moment.
pub(super) fn write_untrained(folder: &Path) -> Result<()> {
    let words = DemoVocabulary::new();
    write_json(&folder.join("model_index.json"), &index())?;
    write_json(&folder.join("scheduler/scheduler_config.json"), &scheduler())?;
    write_json(&folder.join("transformer/config.json"), &transformer())?;
    write_json(&folder.join("vae/config.json"), &autoencoder::settings())?;
    write_tokenizer(&folder.join("tokenizer"), &words, "<|endoftext|>")?;
    write_tokenizer(&folder.join("tokenizer_2"), &words, "!")?;
    for (name, stream) in [("text_encoder", 0), ("text_encoder_2", 1)] {
        let settings = text_encoder(&words, stream);
        let config = serde_json::from_value(settings.clone()).expect("settings of hearth's own");
        write_json(&folder.join(name).join("config.json"), &settings)?;
        let path = folder.join(name).join("model.safetensors");
        save(&path, &random_text_encoder(&config, stream)?)?;
    }
    Ok(())
}

fn index() -> Value {
    json!({
        "_class_name": "StableDiffusion3Pipeline",
        "_diffusers_version": DIFFUSERS,
        "feature_extractor": [null, null],
        "image_encoder": [null, null],
        "max_sequence_length": 0,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_3": [null, null],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "tokenizer_3": [null, null],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    })
}

fn scheduler() -> Value {
    json!({
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "_diffusers_version": DIFFUSERS,
        "num_train_timesteps": 1000,
        // Larger ones give more steps to much noise, which only large images need.
        "shift": 1.0,
        "use_dynamic_shifting": false,
    })
}

/// Chosen: a model that a CPU of two cores trains in minutes.
fn transformer() -> Value {
    let (heads, width, latents) = (5, 32, SIDE / 4);
    json!({
        "_class_name": "SD3Transformer2DModel",
        "_diffusers_version": DIFFUSERS,
        "attention_head_dim": width,
        "caption_projection_dim": heads * width,
        "dual_attention_layers": [],
        "in_channels": 16,
        "joint_attention_dim": 2 * TEXT_WIDTH,
        "num_attention_heads": heads,
        "num_layers": 4,
        "out_channels": 16,
        "patch_size": 2,
        "pooled_projection_dim": 2 * TEXT_WIDTH,
        "pos_embed_max_size": latents,
        "qk_norm": "rms_norm",
        "sample_size": latents,
    })
}

fn text_encoder(words: &DemoVocabulary, stream: u64) -> Value {
    let [begin, end] = words.frame();
    json!({
        "architectures": ["CLIPTextModelWithProjection"],
        "attention_dropout": 0.0,
        "bos_token_id": begin,
        "dtype": "bfloat16",
        "eos_token_id": end,
        // As the two of SD3 differ.
        "hidden_act": if stream == 0 { "quick_gelu" } else { "gelu" },
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": LENGTH,
        "model_type": "clip_text_model",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "pad_token_id": end,
        "projection_dim": TEXT_WIDTH,
        "vocab_size": words.tokens.len(),
    })
}

/// A tokenizer's folder; `pad` fills prompts up.
pub(super) fn write_tokenizer(folder: &Path, words: &DemoVocabulary, pad: &str) -> Result<()> {
    let special = json!({
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": pad,
        "unk_token": "<|endoftext|>",
    });
    let mut settings = json!({
        "add_prefix_space": false,
        "do_lower_case": true,
        "errors": "replace",
        "model_max_length": LENGTH,
        "tokenizer_class": "CLIPTokenizer",
    });
    if let Some((settings, special)) = settings.as_object_mut().zip(special.as_object()) {
        settings.extend(special.clone());
    }
    write_json(&folder.join("special_tokens_map.json"), &special)?;
    write_json(&folder.join("tokenizer_config.json"), &settings)?;
    write_text(&folder.join("vocab.json"), &words.vocabulary())?;
    write_text(&folder.join("merges.txt"), &words.merge_lines())
}

/// Deviations of a text encoder's numbers by what they are for. Chosen: words differ clearly, a
/// position is heard beside them, and what attention gathers is as loud as a word, since the vector
/// for the whole prompt is read off where it ends and knows of words by attention alone.
fn deviation(want: &TensorSpec) -> f32 {
    let per_input = 1.0 / (want.shape.width() as f32).sqrt();
    match want.name.rsplit('.').nth(1).unwrap_or_default() {
        "token_embedding" => 1.0,
        "position_embedding" => 0.5,
        // Nearly every word is heard alike.
        "q_proj" | "k_proj" => 0.4 * per_input,
        "out_proj" => 2.5 * per_input,
        "fc2" => 0.5 * per_input,
        _ => per_input,
    }
}

fn random_text_encoder(config: &clip::ClipConfig, stream: u64) -> Result<TensorMap> {
    let wants = tensor_specs(|build| ClipTextModel::new(config, build))?;
    let tensor = |(index, want): (usize, &TensorSpec)| {
        let random = RandomSequence::new(SEED + stream, index as u64);
        let is_norm = want.name.contains("norm");
        let number = |at: usize| match (is_norm, want.name.ends_with("weight")) {
            (true, true) => 1.0,
            (_, false) => 0.0,
            _ => deviation(want) * random.normal(at),
        };
        let numbers = (0..want.shape.elements()).map(number).collect();
        (want.name.clone(), (want.shape.sizes().to_vec(), numbers))
    };
    Ok(wants.iter().enumerate().map(tensor).collect())
}

/// Writes tensors in bf16.
pub(super) fn save(path: &Path, tensors: &TensorMap) -> Result<()> {
    let entering = tensors.iter().map(|(name, (shape, _))| OutputTensor {
        name: name.clone(),
        dtype: weights::FileDtype::Bf16,
        shape: shape.iter().map(|size| *size as u64).collect(),
    });
    // What transformers asks of every file.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    make_folder_of(path)?;
    write_file(path, &metadata, entering.collect(), false, &mut |tensor, out| {
        let (_, numbers) = &tensors[&tensor.name];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| bf16(*number)).collect();
        out.write_all(&bytes).map_err(|source| WeightsError::io("write", path, source))
    })?;
    Ok(())
}

/// The nearest number of half the bits, ties to even.
fn bf16(number: f32) -> [u8; 2] {
    let bits = number.to_bits();
    let rounded = bits + 0x7fff + (bits >> 16 & 1);
    ((rounded >> 16) as u16).to_le_bytes()
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    write_text(path, &format!("{value:#}\n"))
}

fn write_text(path: &Path, text: &str) -> Result<()> {
    make_folder_of(path)?;
    Ok(write_whole(path, text.as_bytes())?)
}

fn make_folder_of(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(|source| TrainerError::Io {
        what: "make",
        path: folder.into(),
        source,
    })
}
