//! Settings that ask for what no model has.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::*;
use crate::model::diffusion::flux::{Flux, FluxConfig};
use crate::model::diffusion::kandinsky5::{Kandinsky5, Kandinsky5Config};
use crate::model::diffusion::qwen_image::{QwenImage, QwenImageConfig};
use crate::model::diffusion::sd3::{Sd3, Sd3Config};
use crate::model::encoder::clip::{ClipConfig, ClipTextModel};
use crate::model::encoder::qwen25vl::{Qwen25VlConfig, Qwen25VlEncoder};
use crate::model::encoder::t5::{T5Config, T5Encoder};
use crate::model::files::{CheckpointLayout, WeightFiles, load_model};
use crate::model::llama::{Llama, LlamaConfig};
use crate::model::vae::{hunyuan_video, kl, qwen_image};

/// Settings of a reference model, one of them changed, do not build what nobody has.
fn check<C: DeserializeOwned, M>(
    file: &str,
    key: &str,
    build: impl Fn(&C, &mut ModelBuilder<'_>) -> Result<M>,
) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let json = std::fs::read(golden.join(file).join("config.json")).unwrap();
    let mut settings: Value = serde_json::from_slice(&json).unwrap();
    let place = settings.pointer_mut(key).unwrap_or_else(|| panic!("{file} has no {key}"));
    *place = 1_000_000_000.into();
    let config = serde_json::from_value(settings).unwrap();
    let said = tensor_specs(|builder| build(&config, builder)).unwrap_err().to_string();
    let most = format!("ask for more than {MOST_TENSORS} tensors");
    assert!(said.contains(&most), "{file} {key}: {said}");
}

#[test]
fn counts_that_no_model_has_are_refused_before_it_is_built() {
    let llama = |config: &LlamaConfig, build: &mut ModelBuilder<'_>| Llama::new(config, build);
    check("llama/llama", "/num_hidden_layers", llama);
    let sd3 = |config: &Sd3Config, build: &mut ModelBuilder<'_>| Sd3::new(config, build);
    check("sd3/pipeline/transformer", "/num_layers", sd3);
    for key in ["/num_layers", "/num_single_layers"] {
        let flux = |config: &FluxConfig, build: &mut ModelBuilder<'_>| Flux::new(config, build);
        check("flux/dev/pipeline/transformer", key, flux);
    }
    check("qwen_image/pipeline/transformer", "/num_layers", |config: &QwenImageConfig, build| {
        QwenImage::new(config, build)
    });
    for key in ["/num_text_blocks", "/num_visual_blocks"] {
        check("kandinsky5/t2v_pipeline/transformer", key, |config: &Kandinsky5Config, build| {
            Kandinsky5::new(config, build)
        });
    }
    check("sd3/pipeline/text_encoder", "/num_hidden_layers", |config: &ClipConfig, build| {
        ClipTextModel::new(config, build)
    });
    check("sd3/pipeline/text_encoder_3", "/num_layers", |config: &T5Config, build| {
        T5Encoder::new(config, build)
    });
    let qwen =
        |config: &Qwen25VlConfig, build: &mut ModelBuilder<'_>| Qwen25VlEncoder::new(config, build);
    check("qwen_image/pipeline/text_encoder", "/text_config/num_hidden_layers", qwen);
    check("sd3/pipeline/vae", "/layers_per_block", kl::encoder);
    check("sd3/pipeline/vae", "/layers_per_block", kl::decoder);
    check("kandinsky5/t2v_pipeline/vae", "/layers_per_block", hunyuan_video::encoder);
    check("qwen_image/pipeline/vae", "/num_res_blocks", qwen_image::encoder);
}

#[test]
fn counts_are_bounded_by_what_the_files_hold() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama/llama");
    let catalog = weights::Catalog::open(&golden.join("model.safetensors")).unwrap();
    let json = std::fs::read(golden.join("config.json")).unwrap();
    let find = |n_layers: usize| {
        let mut settings: Value = serde_json::from_slice(&json).unwrap();
        settings["num_hidden_layers"] = n_layers.into();
        let config: LlamaConfig = serde_json::from_value(settings).unwrap();
        let found = WeightFiles::find(&catalog, &CheckpointLayout::identity(), |build| {
            Llama::new(&config, build)
        });
        found.err().map(|error| error.to_string()).unwrap_or_default()
    };
    // A few are named, many are not even asked for.
    let missing = find(4);
    assert!(missing.contains("layers.2."), "{missing}");
    let held = format!("while its files hold {}", catalog.tensors.len());
    assert!(find(300).contains(&held), "{}", find(300));
}

#[test]
fn a_shape_that_no_memory_holds_is_refused() {
    let sizes = [usize::from(u16::MAX); 4];
    let built = tensor_specs(|build| build.array("a.weight", sizes));
    let said = built.unwrap_err().to_string();
    assert!(said.contains("a.weight of [65535, 65535, 65535, 65535]"), "{said}");
}

/// Matrices of 16 bits stay so on a CPU beside activations in f32, unless they are trained; a GPU multiplies numbers of
/// one dtype.
#[test]
fn frozen_matrices_are_held_as_they_are_stored() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/flux/dev/pipeline/transformer");
    let catalog =
        weights::Catalog::open(&golden.join("diffusion_pytorch_model.safetensors")).unwrap();
    let json = std::fs::read(golden.join("config.json")).unwrap();
    let config: FluxConfig = serde_json::from_slice(&json).unwrap();
    let build = |build: &mut ModelBuilder<'_>| Flux::new(&config, build);
    let files = WeightFiles::find(&catalog, &CheckpointLayout::identity(), build).unwrap();
    let held = |kind: DeviceKind, dtype, mut adapters: Adapters| {
        let device = Device::meta(kind, usize::MAX / 2);
        let precision = Precision::plain(dtype);
        load_model(&device, &files, precision, &mut adapters, &|_| true, build).unwrap();
        device.usage().peak
    };
    let (cpu, cuda) = (DeviceKind::cpu(2), DeviceKind::Cuda { is_deterministic: false });
    let frozen = held(cpu, Dtype::F32, Adapters::none());
    let half = held(cpu, Dtype::Bf16, Adapters::none());
    // Biases, norms and what lies outside of blocks are in f32.
    assert!(half < frozen && frozen < half * 3 / 2, "{half} {frozen}");
    for whole in [held(cuda, Dtype::F32, Adapters::none()), held(cpu, Dtype::F32, Adapters::full())]
    {
        assert!(whole > frozen * 5 / 4, "{frozen} {whole}");
    }
}
