//! Any bytes as the `config.json` of every kind of model: no panic, and no more tensors than a model can have.

use std::fs;

use trainer::model::build::tensor_specs;
use trainer::model::config::read_checked;
use trainer::model::diffusion::denoiser::{DenoiserConfig, FAMILIES};
use trainer::model::encoder::clip::{ClipConfig, ClipTextModel};
use trainer::model::encoder::qwen25vl::{Qwen25VlConfig, Qwen25VlEncoder};
use trainer::model::encoder::t5::{T5Config, T5Encoder};
use trainer::model::llama::{Llama, LlamaConfig};
use trainer::model::vae::VaeConfig;

pub fn read(bytes: &[u8]) {
    let path = crate::place("settings.json");
    fs::write(&path, bytes).expect("the temporary folder is there");
    for family in FAMILIES {
        if let Ok(config) = DenoiserConfig::read(family, &path) {
            _ = config.tensor_specs();
            _ = config.latent_spec();
        }
    }
    if let Ok(config) = VaeConfig::read(&path) {
        _ = config.stored_tensors();
        _ = config.vae_scale_factor();
    }
    if let Ok(config) = read_checked(&path, LlamaConfig::check) {
        _ = tensor_specs(|build| Llama::new(&config, build));
    }
    if let Ok(config) = read_checked(&path, ClipConfig::check) {
        _ = tensor_specs(|build| ClipTextModel::new(&config, build));
    }
    if let Ok(config) = read_checked(&path, T5Config::check) {
        _ = tensor_specs(|build| T5Encoder::new(&config, build));
    }
    if let Ok(config) = read_checked(&path, Qwen25VlConfig::check) {
        _ = tensor_specs(|build| Qwen25VlEncoder::new(&config, build));
    }
}
