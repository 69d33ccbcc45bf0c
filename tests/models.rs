//! Models against what diffusers, transformers and PEFT computed (`tests/golden/sd3`), and `verify`
//! and `sample` as they are run.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use compute::{Device, DeviceKind, Dtype, Quantisation};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;
use tempfile::TempDir;
use trainer::export::export;
use trainer::model::adapter::AdapterFormat;
use trainer::model::adapter::read::Component;
use trainer::model::adapter::{Adapters, LayerWeights};
use trainer::model::build::{ModelBuilder, Precision, RandomWeights, tensor_specs};
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::condition::{Condition, Conditions, POOLED, TOKENS};
use trainer::model::diffusion::denoiser::{DenoiserConfig, DenoiserInput};
use trainer::model::diffusion::guidance::GuidanceScales;
use trainer::model::diffusion::paths::PartPaths;
use trainer::model::diffusion::sd3;
use trainer::model::diffusion::text::{EncodeCallbacks, EncoderLoading, EncodingOptions, Prompt};
use trainer::model::diffusion::vae::LatentShape;
use trainer::model::encoder::clip::{self, ClipTextModel};
use trainer::model::encoder::t5::{self, T5Encoder};
use trainer::model::encoder::tokenizer::PromptTokenizer;
use trainer::model::files::{WeightFiles, load_model};
use trainer::model::recompute::Recompute;
use trainer::model::vae::{self, KlVaeConfig, VaeConfig, VaeDecoder, VaeEncoder, kl};
use trainer::objective::flow::Timestep;
use trainer::sample::{ImageRequest, SampleEvent, SampleJob};
use trainer::verify::relative_error;

use weights::Catalog;

use crate::{hearth, package, printed, said, text};

pub fn golden() -> PathBuf {
    package().join("../../tests/golden/sd3")
}

pub fn at(path: &str) -> String {
    text(&golden().join(path)).to_owned()
}

/// The weights of one folder serve two.
const SD3_WEIGHTS: &str = "models/sd3/diffusion_pytorch_model.safetensors";

#[test]
fn outputs_and_gradients_are_those_of_the_reference() {
    let folders = ["sd3", "sd35", "sd3_dora", "clip_l", "clip_g", "t5", "vae_kl16"];
    for folder in folders {
        for dtype in ["f32", "bf16", "f16"] {
            let (folder, weights) = (at(&format!("models/{folder}")), at(SD3_WEIGHTS));
            let mut arguments = vec!["verify", &folder, "--dtype", dtype];
            if folder.ends_with("dora") {
                arguments.extend(["--weights", &weights]);
            }
            let page = printed(&arguments);
            assert!(page.contains("within tolerance"), "{page}");
        }
    }
}

#[test]
fn flux_is_that_of_the_reference_in_both_layouts() {
    let flux = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/flux");
    for model in ["dev", "schnell"] {
        let folder = flux.join(model);
        let original = folder.join("original.safetensors");
        for weights in [vec![], vec!["--weights", text(&original)]] {
            for dtype in ["f32", "bf16", "f16"] {
                let words = ["verify", text(&folder), "--dtype", dtype];
                let page = printed(&[&words, &weights[..]].concat());
                assert!(page.contains("all 15 tensors are within tolerance"), "{page}");
            }
        }
    }
}

/// In the settings and names of older and newer versions of transformers.
/// Kontext with one reference image, Qwen-Image-Edit with two, also modulated as if without noise.
#[test]
fn editing_models_are_those_of_the_reference() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    for (model, weights) in
        [("kontext", "flux/dev"), ("edit", "qwen_image/mask"), ("edit_2511", "qwen_image/mask")]
    {
        let folder = golden.join("editing").join(model);
        let weights = golden.join(weights).join("diffusion_pytorch_model.safetensors");
        for dtype in ["f32", "bf16", "f16"] {
            let words = ["verify", text(&folder), "--weights", text(&weights), "--dtype", dtype];
            let page = printed(&words);
            assert!(page.contains("all 13 tensors are within tolerance"), "{page}");
        }
    }
}

#[test]
fn qwen25vl_is_that_of_the_reference() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen25vl");
    for form in ["flat", "nested"] {
        let folder = golden.join(form);
        for dtype in ["f32", "bf16", "f16"] {
            let page = printed(&["verify", text(&folder), "--dtype", dtype]);
            assert!(page.contains("all 1 tensors are within tolerance"), "{page}");
        }
    }
}

#[test]
fn the_vae_of_qwen_image_is_that_of_the_reference_in_both_layouts() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/vae_qwen");
    let (other, original) = (folder.join("other"), folder.join("original"));
    let weights = original.join("original.safetensors");
    for words in [vec![text(&other)], vec![text(&original), "--weights", text(&weights)]] {
        for dtype in ["f32", "bf16", "f16"] {
            let page = printed(&[&["verify", "--dtype", dtype], &words[..]].concat());
            assert!(page.contains("all 4 tensors are within tolerance"), "{page}");
        }
    }
}

/// On the meta device too: of weights for three frames only those for one are held.
#[test]
fn the_vae_of_qwen_image_takes_as_much_memory_as_planned() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/vae_qwen/other");
    let config = VaeConfig::read(&folder.join("config.json")).unwrap();
    let catalog = Catalog::open(&folder.join("diffusion_pytorch_model.safetensors")).unwrap();
    let layout = config.layout(&catalog, None);
    let peaks = |device: &Device| {
        let plain = Precision::plain(Dtype::F16);
        let build = |build: &mut ModelBuilder<'_>| {
            Ok((VaeEncoder::new(&config, build)?, VaeDecoder::new(&config, build)?))
        };
        let found = WeightFiles::find(&catalog, &layout, build).unwrap();
        let adapters = &mut Adapters::none();
        let (encoder, decoder) =
            load_model(device, &found, plain, adapters, &|_| true, build).unwrap();
        let loaded = device.usage().peak;
        let params = compute::Params::default();
        let tape = compute::Tape::inference(device, &params, 0);
        let image = device.zeros([1, 3, 36, 28], Dtype::F16).unwrap();
        let encoded = encoder.forward(&tape, &image).unwrap();
        assert_eq!(encoded.shape(), [1, 10, 9, 7].into());
        let latent =
            vae::LatentView { values: &[0.3; 5 * 9 * 7], shape: LatentShape::image(5, 9, 7) };
        let tiling = vae::Tiling { tile: 6, overlap: 2, ..vae::Tiling::WHOLE };
        let image = vae::decode_tiled(&tape, &decoder, latent, tiling).unwrap();
        assert_eq!(image.len(), 3 * 36 * 28);
        (loaded, device.usage().peak)
    };
    let (loaded, peak) = peaks(&Device::cpu(2, LIMIT).unwrap());
    assert_eq!(peaks(&Device::meta(DeviceKind::cpu(2), LIMIT)), (loaded, peak));
    let stored = config.stored_tensors().unwrap();
    let stored: usize = stored.iter().map(|spec| 2 * spec.shape.elements()).sum();
    assert!(loaded < stored / 2 && loaded < peak, "{loaded} {stored} {peak}");
}

#[test]
fn a_quantised_base_stays_near_the_reference() {
    for folder in ["models/sd3", "models/sd35"] {
        for format in ["int8", "fp8", "nf4"] {
            printed(&["verify", &at(folder), "--quantise", format]);
        }
    }
}

#[test]
fn adapters_of_all_programs_are_the_same() {
    for file in ["diffusers.safetensors", "peft", "kohya.safetensors", "comfy.safetensors"] {
        let adapter = at(&format!("adapters/{file}"));
        let json = printed(&["verify", &at("models/sd3"), "--adapter", &adapter, "--json"]);
        let found: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(found["tensors"].as_array().unwrap().len(), 19, "{file}");
    }
    // One matrix for q, k and v together.
    let (shared, data) =
        (at("adapters/kohya_shared.safetensors"), at("adapters/kohya_shared_golden.safetensors"));
    printed(&["verify", &at("models/sd3"), "--adapter", &shared, "--golden", &data]);
    let dora = at("models/sd3_dora/pytorch_lora_weights.safetensors");
    printed(&["verify", &at("models/sd3_dora"), "--weights", &at(SD3_WEIGHTS), "--adapter", &dora]);
}

#[test]
fn another_adapter_is_told_apart() {
    let output = hearth(&[
        "verify",
        &at("models/sd3"),
        "--adapter",
        &at("adapters/kohya_shared.safetensors"),
    ]);
    assert_eq!(output.status.code(), Some(1));
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(page.contains("tensors differ") && page.contains("reference / here"), "{page}");
}

#[test]
fn checkpoints_of_the_original_layout_are_the_same_models() {
    for (folder, file) in [("sd3", "sd3"), ("sd35", "sd35"), ("vae_kl16", "sd3")] {
        let weights = at(&format!("single/{file}.safetensors"));
        printed(&["verify", &at(&format!("models/{folder}")), "--weights", &weights]);
    }
}

/// Counted by diffusers and transformers on their device without data; the table of positions is
/// a tensor of the file, not a parameter.
#[test]
fn published_models_have_their_number_of_weights() {
    fn count<T>(build: impl FnOnce(&mut ModelBuilder<'_>) -> trainer::Result<T>) -> usize {
        tensor_specs(build).unwrap().iter().map(|want| want.shape.elements()).sum()
    }
    let config = |n_heads: usize, side: usize, dual: usize, norm: &str| -> DenoiserConfig {
        let text = format!(
            r#"{{"in_channels": 16, "out_channels": 16, "patch_size": 2, "num_layers": {n_heads},
                "num_attention_heads": {n_heads}, "attention_head_dim": 64, "joint_attention_dim": 4096,
                "caption_projection_dim": {}, "pooled_projection_dim": 2048,
                "pos_embed_max_size": {side}, "qk_norm": {norm}, "dual_attention_layers": {:?}}}"#,
            64 * n_heads,
            (0..dual).collect::<Vec<_>>()
        );
        serde_json::from_str::<sd3::Sd3Config>(&text).unwrap().into()
    };
    let published = [
        ("SD3 medium", config(24, 192, 0, "null"), 2_084_951_104),
        ("SD3.5 medium", config(24, 384, 13, "\"rms_norm\""), 2_469_663_936),
        ("SD3.5 large", config(38, 192, 0, "\"rms_norm\""), 8_146_280_768),
    ];
    for (name, config, expected) in published {
        assert_eq!(count(|build| config.build(build)), expected, "{name}");
        check_dry_run(name, &config, expected);
    }
    let t5: t5::T5Config = serde_json::from_str(
        r#"{"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24,
            "num_heads": 64, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu"}"#,
    )
    .unwrap();
    assert_eq!(count(|build| T5Encoder::new(&t5, build)), 4_762_310_656);
    let clip = |width: usize, layers: usize, heads: usize| -> clip::ClipConfig {
        let text = format!(
            r#"{{"vocab_size": 49408, "hidden_size": {width}, "intermediate_size": {},
                "num_hidden_layers": {layers}, "num_attention_heads": {heads}, "eos_token_id": 2,
                "max_position_embeddings": 77, "projection_dim": {width}, "hidden_act": "gelu"}}"#,
            4 * width
        );
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(count(|build| ClipTextModel::new(&clip(768, 12, 12), build)), 123_650_304);
    assert_eq!(count(|build| ClipTextModel::new(&clip(1280, 32, 20), build)), 694_659_840);
    let vae = KlVaeConfig::published(0.0609, 1.5305);
    let halves = count(|build| kl::encoder(&vae, build)) + count(|build| kl::decoder(&vae, build));
    assert_eq!(halves, 83_819_683);
}

/// An image of 1024 pixels a side and a prompt, without data: everything a step allocates is
/// known, and the weights are two bytes each but for the vectors.
fn check_dry_run(name: &str, config: &DenoiserConfig, n_weights: usize) {
    let device = Device::meta(DeviceKind::cpu(16), usize::MAX / 2);
    let precision = Precision::plain(Dtype::Bf16);
    let mut source = RandomWeights::new(precision, 0);
    let mut adapters = Adapters::none();
    let mut build = ModelBuilder::new(&device, precision, &mut source, &mut adapters);
    let model = config.build(&mut build).unwrap();
    let held = device.usage().in_use;
    assert!(held > 2 * n_weights && held < 2 * n_weights + n_weights / 100, "{name} {held}");
    let zeros = |shape: &[usize]| device.zeros(compute::Shape::new(shape), Dtype::Bf16).unwrap();
    let tape = compute::Tape::inference(&device, &adapters.params, 0);
    let latents = &zeros(&[2, 16, 128, 128]);
    let told = [(TOKENS, zeros(&[2, 333, 4096])), (POOLED, zeros(&[2, 2048]))];
    let (levels, condition) =
        (&[Timestep { sigma: 0.5, t: 500.0 }; 2], &Conditions::from_tensors(told));
    let before = device.work().flops;
    let input = DenoiserInput {
        latents,
        references: &[],
        timesteps: levels,
        condition,
        guidance: None,
        time_dtype: Dtype::Bf16,
    };
    let out = model.predict(&tape, input, Recompute::None).unwrap();
    assert_eq!(out.tokens.shape().sizes(), [2, 4096, 64]);
    // Twice the weights of blocks for each of 4429 tokens, and attention.
    let per_token = (device.work().flops - before) as f64 / (2.0 * 4429.0);
    assert!(per_token > 1.5 * n_weights as f64 / 2.0, "{name} {per_token:e}");
    assert!(device.usage().extent < 3 * n_weights, "{name} {}", device.usage().extent);
}

/// The recorded numbers of the pipeline.
pub fn recorded() -> HashMap<String, Vec<f32>> {
    recorded_in(&golden().join("pipeline/golden.safetensors"))
}

/// The floats of a file.
pub fn recorded_in(path: &Path) -> HashMap<String, Vec<f32>> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let of = |name: &str| {
        let (numbers, _) = file.tensor(name).unwrap().data().as_chunks::<4>();
        numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let float = |name: &&str| file.tensor(name).unwrap().dtype() == safetensors::Dtype::F32;
    file.names().into_iter().filter(float).map(|name| (name.to_owned(), of(name))).collect()
}

fn prompts() -> Vec<String> {
    let text = fs::read_to_string(golden().join("pipeline/golden.json")).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    json["prompts"].as_array().unwrap().iter().map(|p| p.as_str().unwrap().to_owned()).collect()
}

/// As `golden.json` has it.
pub fn request() -> ImageRequest {
    ImageRequest {
        prompts: prompts(),
        negative: String::new(),
        size: [96, 64],
        frames: 1,
        fps: 1,
        steps: 4,
        guidance: GuidanceScales { guidance: 5.0, true_cfg: 1.0 },
        seed: 1,
        latents: Some(golden().join("pipeline/golden.safetensors")),
        references: Vec::new(),
        reference_resolution: 1024,
        precision: Precision::plain(Dtype::F32),
    }
}

fn pipeline() -> Pipeline {
    Pipeline::open(&golden().join("pipeline"), &PartPaths::default()).unwrap()
}

pub const LIMIT: usize = 1 << 30;

#[test]
fn prompts_and_images_are_those_of_the_reference() {
    let (mut pipeline, recorded) = (pipeline(), recorded());
    let device = Device::cpu(2, LIMIT).unwrap();
    let texts = [vec![String::new()], prompts()].concat();
    let texts: Vec<Prompt> = texts.into_iter().map(Prompt::from).collect();
    let plain = Precision::plain(Dtype::F32);
    let encoding = EncodingOptions { precision: plain, loading: EncoderLoading::Whole };
    let watch = EncodeCallbacks { on_begin: &|_, _| (), tick: &|_| true, on_encoded: &|| true };
    let encoded = pipeline.encoders.encode(&device, encoding, &texts, watch).unwrap();
    let of = |all: &[Condition], index: usize| -> Vec<f32> {
        all.iter().flat_map(|condition| condition.0[index].values.clone()).collect()
    };
    let (tokens, pooled) = (of(&encoded[1..], 0), of(&encoded[1..], 1));
    check("prompt_embeds", &recorded, &tokens);
    check("pooled_prompt_embeds", &recorded, &pooled);
    check("negative_prompt_embeds", &recorded, &of(&encoded[..1], 0));
    check("negative_pooled_prompt_embeds", &recorded, &of(&encoded[..1], 1));
    check("sigmas", &recorded, &pipeline.schedule.sigmas(16, 4));
    let draw = |pipeline: &Pipeline| -> Vec<f32> {
        let job = SampleJob::new(pipeline, request()).unwrap();
        let plan = job.plan(device.kind(), LIMIT).unwrap();
        let clips = job.run(&device, &plan, &|_| true).unwrap();
        clips.into_iter().flat_map(|clip| clip.frames).flat_map(|frame| frame.values).collect()
    };
    check("image", &recorded, &draw(&pipeline));
    pipeline.add_adapter(&golden().join("pipeline/lora.safetensors")).unwrap();
    check("image_lora", &recorded, &draw(&pipeline));
}

/// Twice what was measured.
const TOLERANCE: f64 = 2e-5;

pub fn check(name: &str, recorded: &HashMap<String, Vec<f32>>, got: &[f32]) {
    let expected = &recorded[&format!("out.{name}")];
    let apart = relative_error(expected, got);
    assert!(apart < TOLERANCE, "{name}: {apart:e}\n{:?}\n{:?}", &expected[..4], &got[..4]);
}

#[test]
fn every_phase_takes_what_was_planned() {
    let pipeline = pipeline();
    for base in [None, Some(Quantisation::Int8)] {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let precision = Precision { base, ..Precision::plain(dtype) };
            let job = SampleJob::new(&pipeline, ImageRequest { precision, ..request() }).unwrap();
            let plan = job.plan(DeviceKind::cpu(2), LIMIT).unwrap();
            let device = Device::cpu(2, plan.peak_bytes()).unwrap();
            let taken = Mutex::new(Vec::new());
            let note = |event| {
                if let SampleEvent::Phase(_) = event {
                    taken.lock().unwrap().push(device.usage().extent);
                    device.reset_peak();
                }
                true
            };
            job.run(&device, &plan, &note).unwrap();
            let mut taken = taken.into_inner().unwrap();
            taken.push(device.usage().extent);
            let planned: Vec<usize> = plan.phases.iter().map(|phase| phase.peak_bytes).collect();
            assert_eq!(taken[1..], planned, "{dtype} {base:?}");
        }
    }
}

#[test]
fn work_that_does_not_fit_is_tiled_or_refused() {
    let pipeline = pipeline();
    let job = SampleJob::new(&pipeline, request()).unwrap();
    let roomy = job.plan(DeviceKind::cpu(2), LIMIT).unwrap();
    assert!(roomy.is_cfg_batched && roomy.tiling.is_none());
    let denoise = roomy.phases.iter().find(|phase| phase.name == "denoise").unwrap();
    let tight = job.plan(DeviceKind::cpu(2), denoise.peak_bytes - 1).unwrap();
    assert!(!tight.is_cfg_batched && tight.peak_bytes() < denoise.peak_bytes);
    let device = Device::cpu(2, tight.peak_bytes()).unwrap();
    let clips = job.run(&device, &tight, &|_| true).unwrap();
    let numbers: Vec<f32> =
        clips.into_iter().flat_map(|clip| clip.frames).flat_map(|frame| frame.values).collect();
    check("image", &recorded(), &numbers);
    let error = job.plan(DeviceKind::cpu(2), 1 << 20).unwrap_err();
    assert!(error.to_string().ends_with("limit 1 MiB"), "{error}");
    assert!(error.hint().starts_with("nothing fits: the least is "), "{}", error.hint());
    // A little less than the tightest way takes: the hint names a request that fits.
    let least = tight.phases.iter().map(|phase| phase.peak_bytes).max().unwrap();
    let limits = std::iter::successors(Some(least), |limit| Some(limit * 99 / 100));
    let mut refused = limits.filter_map(|limit| job.plan(DeviceKind::cpu(2), limit).err());
    let error = refused.next().unwrap();
    let hint = error.hint().into_owned();
    assert!(hint.starts_with("--quantise nf4 needs ") || hint.starts_with("--size "), "{hint}");
}

#[test]
fn tiles_of_a_smooth_latent_meet_without_a_seam() {
    let pipeline = pipeline();
    let device = Device::cpu(2, LIMIT).unwrap();
    let decoder =
        pipeline.vae.load_decoder(&device, Precision::plain(Dtype::F32), &|_| true).unwrap();
    let (side, reduction, params) = (24, 8, compute::Params::default());
    let constant = vec![0.3; 16 * side * side];
    let latent = vae::LatentView { values: &constant, shape: LatentShape::image(16, side, side) };
    let decode = |tile, overlap| {
        let tape = compute::Tape::inference(&device, &params, 0);
        let tiling = vae::Tiling { tile, overlap, ..vae::Tiling::WHOLE };
        vae::decode_tiled(&tape, &decoder, latent, tiling).unwrap()
    };
    let (whole, tiled) = (decode(side, 0), decode(12, 3));
    assert_eq!(whole.len(), tiled.len());
    // Away from the border, where zeros around each tile do not reach, both are the same.
    let width = side * reduction;
    let middle = |image: &[f32]| image[width * (width / 2) + width / 2];
    assert!((middle(&whole) - middle(&tiled)).abs() < 0.1, "{} {}", middle(&whole), middle(&tiled));
    assert!(tiled.iter().all(|number| number.is_finite()));
}

/// Draws by the program; the image's bytes and what lies in it.
pub fn drawn(folder: &TempDir, arguments: &[&str]) -> (Vec<u8>, HashMap<String, String>) {
    let out = folder.path().join("image.png");
    let base = at("pipeline");
    let base = if arguments.contains(&"--base") { vec![] } else { vec!["--base", &base] };
    let common = ["sample", "--size", "96x64", "--steps", "4", "--out", text(&out)];
    printed(&[&common, &base[..], arguments].concat());
    let file = std::io::BufReader::new(fs::File::open(&out).unwrap());
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    reader.finish().unwrap();
    let texts = reader.info().utf8_text.iter();
    (pixels, texts.map(|t| (t.keyword.clone(), t.get_text().unwrap())).collect())
}

#[test]
fn sample_writes_the_image_of_the_reference() {
    let folder = TempDir::new().unwrap();
    let (latents, prompt) = (at("pipeline/golden.safetensors"), prompts()[0].clone());
    let shared = ["--prompt", &prompt, "--dtype", "f32", "--guidance", "5", "--latents", &latents];
    let adapter = at("pipeline/lora.safetensors");
    let recorded = recorded();
    for (name, more) in [("out.image", vec![]), ("out.image_lora", vec!["--adapter", &adapter])] {
        let (pixels, texts) = drawn(&folder, &[&shared[..], &more].concat());
        let expected = &recorded[name];
        let count = 96 * 64;
        for (at, pixel) in pixels.chunks(3).enumerate() {
            for (colour, byte) in pixel.iter().enumerate() {
                let theirs = expected[colour * count + at] * 255.0;
                assert!((f32::from(*byte) - theirs).abs() < 0.51, "{name} {at} {byte} {theirs}");
            }
        }
        assert!(texts["parameters"].starts_with(&format!("{prompt}\nSteps: 4, Sampler: Euler")));
        let json: Value = serde_json::from_str(&texts["hearth"]).unwrap();
        assert_eq!(json["adapter"].is_null(), more.is_empty());
    }
}

#[test]
fn the_seed_decides_the_image() {
    let folder = TempDir::new().unwrap();
    let draw = |seed: &str, threads: &str| {
        drawn(&folder, &["--prompt", "a fox", "--seed", seed, "--threads", threads]).0
    };
    let first = draw("1", "1");
    assert_eq!(first, draw("1", "2"));
    assert_ne!(first, draw("2", "1"));
}

#[test]
fn several_prompts_become_several_files() {
    let folder = TempDir::new().unwrap();
    let (list, out) = (folder.path().join("prompts.txt"), folder.path().join("new/fox.png"));
    fs::write(&list, "a fox\n\n  an owl  \n").unwrap();
    let base = at("pipeline");
    let json = printed(&[
        "sample",
        "--base",
        &base,
        "--prompts",
        text(&list),
        "--size",
        "32x32",
        "--steps",
        "1",
        "--out",
        text(&out),
        "--seed",
        "5",
        "--json",
    ]);
    let found: Value = serde_json::from_str(&json).unwrap();
    let images = found["images"].as_array().unwrap();
    let of = |key: &str| images.iter().map(|p| p[key].to_string()).collect::<Vec<_>>();
    assert_eq!(of("prompt"), ["\"a fox\"", "\"an owl\""]);
    assert_eq!(of("seed"), ["5", "6"]);
    for name in ["fox-1.png", "fox-2.png"] {
        assert!(folder.path().join("new").join(name).exists());
    }
}

#[test]
fn a_checkpoint_draws_with_a_folder_for_the_rest() {
    let folder = TempDir::new().unwrap();
    let arguments = ["--prompt", "a fox", "--dtype", "f32"];
    let (checkpoint, rest) = (at("single/pipeline.safetensors"), at("pipeline"));
    let from_folder = drawn(&folder, &[&["--base", &rest], &arguments[..]].concat()).0;
    let both = [&["--base", &checkpoint, "--rest", &rest], &arguments[..]].concat();
    assert_eq!(from_folder, drawn(&folder, &both).0);
    // Weights that do not fit the folder's settings are found before anything is read.
    let output = hearth(&[
        "sample",
        "--base",
        &at("single/sd3.safetensors"),
        "--rest",
        &at("pipeline"),
        "--prompt",
        "a",
    ]);
    let words = said(&output);
    assert!(words.contains("first_stage_model.decoder.conv_in.weight has shape"), "{words}");
    let output = hearth(&["sample", "--base", &at("single/sd3.safetensors"), "--prompt", "a"]);
    assert!(said(&output).contains("--rest"), "{}", said(&output));
}

/// A copy of the pipeline, to be broken.
pub fn copy() -> TempDir {
    let folder = TempDir::new().unwrap();
    copy_folder(&golden().join("pipeline"), folder.path());
    folder
}

/// Copies a folder with all that is in it.
pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// What `sample` says of a folder that cannot be used.
fn refused(base: &Path, arguments: &[&str]) -> String {
    let out = base.join("never.png");
    let common =
        ["sample", "--base", text(base), "--prompt", "a fox", "--steps", "1", "--out", text(&out)];
    let size = if arguments.contains(&"--size") { &[][..] } else { &["--size", "64x64"] };
    let output = hearth(&[&common, size, arguments].concat());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(!out.exists());
    let words = said(&output);
    assert!(words.starts_with("error: ") && words.contains("\nhint: "), "{words}");
    words
}

#[test]
fn what_is_not_an_sd3_folder_is_refused() {
    let empty = TempDir::new().unwrap();
    assert!(refused(empty.path(), &[]).contains("has no model_index.json"));
    let folder = copy();
    fs::write(folder.path().join("model_index.json"), r#"{"_class_name": "SanaPipeline"}"#)
        .unwrap();
    let words = refused(folder.path(), &[]);
    assert!(words.contains("this is a Sana pipeline (SanaPipeline), expected an SD3"), "{words}");
}

#[test]
fn weights_that_are_not_the_models_are_refused() {
    let folder = copy();
    let transformer = folder.path().join("transformer");
    let config = transformer.join("config.json");
    let as_it_was = fs::read_to_string(&config).unwrap();
    fs::write(&config, as_it_was.replace("\"num_layers\": 2", "\"num_layers\": 3")).unwrap();
    let words = refused(folder.path(), &[]);
    assert!(words.contains("missing (transformer_blocks.1.attn.to_add_out.weight"), "{words}");
    let narrow = as_it_was.replace("\"joint_attention_dim\": 96", "\"joint_attention_dim\": 80");
    fs::write(&config, narrow).unwrap();
    let words = refused(folder.path(), &[]);
    assert!(
        words.contains("context_embedder.weight has shape [64, 96], expected [64, 80]"),
        "{words}"
    );
    fs::write(&config, as_it_was.replace("\"num_layers\": 2", "\"num_layers\": \"two\"")).unwrap();
    assert!(refused(folder.path(), &[]).contains("invalid type: string \"two\""));
    fs::write(&config, &as_it_was).unwrap();
    shard_and_lose_one(&transformer);
    let words = refused(folder.path(), &[]);
    assert!(words.contains("is missing"), "{words}");
}

fn shard_and_lose_one(folder: &Path) {
    let stem = "diffusion_pytorch_model";
    let whole = folder.join(format!("{stem}.safetensors"));
    printed(&["shard", text(&whole), "--out", text(folder), "--max-size", "200KB", "--stem", stem]);
    fs::remove_file(whole).unwrap();
    let first = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| text(path).contains("-00001-of-"));
    fs::remove_file(first.unwrap()).unwrap();
}

#[test]
fn broken_tokenizers_and_weights_are_refused() {
    let folder = copy();
    let cut = |name: &str| {
        let path = folder.path().join(name);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        let words = refused(folder.path(), &[]);
        assert!(words.contains(Path::new(name).file_name().unwrap().to_str().unwrap()), "{words}");
        fs::write(path, bytes).unwrap();
    };
    cut("tokenizer/vocab.json");
    cut("tokenizer_3/tokenizer.json");
    cut("vae/diffusion_pytorch_model.safetensors");
    cut("scheduler/scheduler_config.json");
}

#[test]
fn requests_that_cannot_be_met_are_refused() {
    let base = golden().join("pipeline");
    let words = refused(&base, &["--size", "100x64"]);
    assert!(words.contains("size 100x64 is not a multiple of 16, 96x64 would be"), "{words}");
    let words = refused(&base, &["--size", "512x512"]);
    assert!(words.contains("size 512x512 is larger than the model's 192x192"), "{words}");
    let words = refused(&base, &["--latents", &at("pipeline/golden.safetensors")]);
    assert!(
        words.contains("latents have shape [2, 16, 8, 12], image 1 asks for [16, 8, 8]"),
        "{words}"
    );
    let words = refused(&base, &["--limit", "1MB"]);
    assert!(words.contains("does not fit: needs"), "{words}");
}

#[test]
fn an_adapter_for_another_family_is_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("flux.safetensors");
    let zeros = vec![0; 4 * 64 * 4];
    let tensor = |shape: [usize; 2]| {
        TensorView::new(safetensors::Dtype::F32, shape.to_vec(), &zeros).unwrap()
    };
    let flux = "transformer.single_transformer_blocks.0.attn.to_q";
    let tensors = [
        (format!("{flux}.lora_A.weight"), tensor([4, 64])),
        (format!("{flux}.lora_B.weight"), tensor([64, 4])),
    ];
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    let words = refused(&golden().join("pipeline"), &["--adapter", text(&path)]);
    assert!(words.contains("2 of its 2 tensors, such as transformer.single"), "{words}");
    let wider = "transformer.transformer_blocks.0.attn.to_q";
    let tensors = [
        (format!("{wider}.lora_A.weight"), tensor([8, 32])),
        (format!("{wider}.lora_B.weight"), tensor([32, 8])),
    ];
    safetensors::serialize_to_file(tensors, None, &path).unwrap();
    let words = refused(&golden().join("pipeline"), &["--adapter", text(&path)]);
    assert!(words.contains("[8, 32] and [32, 8], the layer needs [8, 64] and [64, 8]"), "{words}");
}

#[test]
fn tokens_of_difficult_texts_are_those_of_the_reference() {
    let recorded = fs::read_to_string(golden().join("tokenizers.json")).unwrap();
    let recorded: Value = serde_json::from_str(&recorded).unwrap();
    let texts = recorded["texts"].as_array().unwrap();
    for name in ["tokenizer", "tokenizer_2", "tokenizer_3"] {
        let its = &recorded[name];
        let length = its["max_length"].as_u64().unwrap() as usize;
        let tokenizer =
            PromptTokenizer::open(&golden().join("pipeline").join(name), length).unwrap();
        for (text, ids) in texts.iter().zip(its["ids"].as_array().unwrap()) {
            let mut expected: Vec<u64> =
                ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
            expected.resize(length, its["pad_token_id"].as_u64().unwrap());
            let ids = tokenizer.encode(text.as_str().unwrap()).ids;
            let ids: Vec<u64> = ids.into_iter().map(u64::from).collect();
            assert_eq!(ids, expected, "{name}: {text}");
        }
    }
}

#[test]
fn an_adapter_goes_from_any_program_to_any_other() {
    let folder = TempDir::new().unwrap();
    let (base, mut adapter) = (at("pipeline"), golden().join("pipeline/lora.safetensors"));
    let recorded = recorded();
    let device = Device::cpu(2, LIMIT).unwrap();
    // Each is made of the one before, so that all are read once and written once.
    for format in ["comfyui", "kohya", "peft", "diffusers"] {
        let out = folder.path().join(format);
        let json = printed(&[
            "export",
            text(&adapter),
            "--base",
            &base,
            "--out",
            text(&out),
            "--format",
            format,
            "--name",
            "x",
            "--json",
        ]);
        let row: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (row["layers"].as_u64(), row["unmatched"].as_u64()),
            (Some(8), Some(0)),
            "{json}"
        );
        adapter = PathBuf::from(row["path"].as_str().unwrap());
        let mut pipeline = pipeline();
        pipeline.add_adapter(&adapter).unwrap();
        let job = SampleJob::new(&pipeline, request()).unwrap();
        let plan = job.plan(device.kind(), LIMIT).unwrap();
        let clips = job.run(&device, &plan, &|_| true).unwrap();
        let numbers: Vec<f32> =
            clips.into_iter().flat_map(|clip| clip.frames).flat_map(|frame| frame.values).collect();
        check("image_lora", &recorded, &numbers);
    }
}

#[test]
fn magnitudes_and_unequal_ranks_survive_conversion() {
    let folder = TempDir::new().unwrap();
    let mut pipeline = pipeline();
    let layer = |name: &str, rank: usize, has_magnitude: bool| {
        let numbers = |count: usize, by: f32| (0..count).map(|i| (i as f32 * by).sin()).collect();
        let magnitude = has_magnitude.then(|| (0..64).map(|i| 1.0 + i as f32).collect());
        let (down, up) = (numbers(rank * 64, 0.3), numbers(64 * rank, 0.7));
        let given = LayerWeights::lora(rank, 3.0 * rank as f32, down, up);
        (name.to_owned(), given.with_magnitude(magnitude))
    };
    let block = |end: &str| format!("transformer_blocks.1.attn.{end}");
    let all = |has_magnitude| {
        let layers =
            [(block("to_q"), 2), (block("to_k"), 4), (block("to_v"), 3), (block("to_out.0"), 4)];
        layers
            .iter()
            .map(|(name, rank)| layer(name, *rank, has_magnitude))
            .collect::<BTreeMap<_, _>>()
    };
    let formats = [
        AdapterFormat::Diffusers,
        AdapterFormat::Peft,
        AdapterFormat::Kohya,
        AdapterFormat::Comfyui,
    ];
    for has_magnitude in [false, true] {
        for format in formats {
            pipeline.set_adapter(vec![(Component::Transformer, all(has_magnitude))]);
            let done = export(&mut pipeline, format, folder.path(), "x").unwrap();
            assert_eq!(done.n_layers, 4, "{format:?}");
        }
    }
    // A magnitude for q alone has no place where q, k and v are one.
    let one = BTreeMap::from([layer(&block("to_q"), 2, true)]);
    pipeline.set_adapter(vec![(Component::Transformer, one)]);
    let error = export(&mut pipeline, AdapterFormat::Kohya, folder.path(), "x").unwrap_err();
    assert!(error.to_string().contains("magnitudes for 1 of its 3 parts"), "{error}");
}
