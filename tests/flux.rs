//! FLUX.1 against what diffusers computed with whole pipelines (`tests/golden/flux/pipelines.py`): guidance as an input
//! of the model and none, schedules shifted by size and not, prompts of 512 and of 256 tokens. Adapters of other
//! programs (`tests/golden/flux/adapters.py`).

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use compute::{Device, Dtype, Tape};
use safetensors::tensor::TensorView;
use serde_json::Value;
use trainer::export::export;
use trainer::model::adapter::read::Component;
use trainer::model::adapter::{AdapterFormat, Adapters, LoraWeights};
use trainer::model::build::Precision;
use trainer::model::component;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::condition::{Condition, Conditions};
use trainer::model::diffusion::denoiser::DenoiserInput;
use trainer::model::diffusion::guidance::GuidanceScales;
use trainer::model::diffusion::paths::PartPaths;
use trainer::model::diffusion::scheduler::euler_step;
use trainer::model::diffusion::text::{EncodeCallbacks, EncoderLoading, EncodingOptions};
use trainer::model::recompute::Recompute;
use trainer::sample::{ImageRequest, SampleJob};

use trainer::model::tensor_piece::stored_rows;
use weights::Catalog;
use weights::load::load_f32;

use crate::models::{LIMIT, check, copy_folder, recorded_in};
use crate::{printed, text};

/// A variant with what diffusers computed.
pub struct Reference {
    folder: PathBuf,
    settings: Value,
    pub recorded: HashMap<String, Vec<f32>>,
    pub pipeline: Pipeline,
    device: Device,
}

pub const VARIANTS: [&str; 2] = ["dev", "schnell"];

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/flux")
}

pub fn folder(variant: &str) -> PathBuf {
    golden().join(variant).join("pipeline")
}

/// A copy of FLUX.1 dev with prompts of few tokens, for training in little time.
pub fn with_short_prompts(to: &Path) {
    copy_folder(&folder("dev"), to);
    let path = to.join("model_index.json");
    let index = fs::read_to_string(&path).unwrap();
    let length = format!("{{\n \"max_sequence_length\": {SHORT_PROMPT},");
    fs::write(path, index.replacen('{', &length, 1)).unwrap();
}

/// As `tests/golden/flux/train/generate.py` has it.
const SHORT_PROMPT: usize = 24;

impl Reference {
    pub fn open(variant: &str) -> Self {
        let folder = folder(variant);
        let text = fs::read_to_string(folder.join("golden.json")).unwrap();
        Self {
            settings: serde_json::from_str(&text).unwrap(),
            recorded: recorded_in(&folder.join("golden.safetensors")),
            pipeline: Pipeline::open(&folder, &PartPaths::default()).unwrap(),
            device: Device::cpu(2, LIMIT).unwrap(),
            folder,
        }
    }

    fn number(&self, key: &str) -> f64 {
        self.settings[key].as_f64().unwrap()
    }

    fn size(value: &Value) -> [usize; 2] {
        [0, 1].map(|index| value[index].as_u64().unwrap() as usize)
    }

    fn prompts(&self) -> Vec<String> {
        let texts = self.settings["prompts"].as_array().unwrap();
        texts.iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    }

    fn encode(&self) -> Vec<Condition> {
        let encoding = EncodingOptions {
            precision: Precision::plain(Dtype::F32),
            loading: EncoderLoading::Whole,
        };
        let callbacks =
            EncodeCallbacks { on_begin: &|_, _| (), tick: &|_| true, on_encoded: &|| true };
        let encoders = &self.pipeline.encoders;
        encoders.encode(&self.device, encoding, &self.prompts(), callbacks).unwrap()
    }

    pub fn images(&self, true_cfg: f64) -> Vec<f32> {
        let request = ImageRequest {
            prompts: self.prompts(),
            negative: self.settings["negative"].as_str().unwrap().to_owned(),
            size: Self::size(&self.settings["size"]),
            steps: self.number("steps") as usize,
            guidance: GuidanceScales {
                guidance: self.number("guidance") as f32,
                true_cfg: true_cfg as f32,
            },
            seed: 1,
            latents: Some(self.folder.join("golden.safetensors")),
            precision: Precision::plain(Dtype::F32),
        };
        let job = SampleJob::new(&self.pipeline, request).unwrap();
        let plan = job.plan(self.device.kind(), LIMIT).unwrap();
        let images = job.run(&self.device, &plan, &|_| true).unwrap();
        images.into_iter().flat_map(|image| image.values).collect()
    }
}

#[test]
fn prompts_are_those_of_the_reference() {
    for variant in VARIANTS {
        let reference = Reference::open(variant);
        let length = reference.number("length") as usize;
        assert_eq!(reference.pipeline.encoders.lengths().last(), Some(length), "{variant}");
        let encoded = reference.encode();
        let of = |index: usize| -> Vec<f32> {
            encoded.iter().flat_map(|condition| condition.0[index].values.clone()).collect()
        };
        check("prompt_embeds", &reference.recorded, &of(0));
        check("pooled_prompt_embeds", &reference.recorded, &of(1));
    }
}

#[test]
fn sigmas_are_those_of_the_reference_at_every_size() {
    for variant in VARIANTS {
        let reference = Reference::open(variant);
        for size in reference.settings["sizes"].as_array().unwrap() {
            let [width, height] = Reference::size(size);
            let tokens = reference.pipeline.image_tokens([width, height]);
            let sigmas = reference.pipeline.schedule.sigmas(tokens, 28);
            check(&format!("sigmas.{width}x{height}"), &reference.recorded, &sigmas);
        }
    }
}

/// Latents after every step, from the predictions of the transformer alone.
#[test]
fn every_step_of_the_sampler_is_that_of_the_reference() {
    for variant in VARIANTS {
        let reference = Reference::open(variant);
        let Reference { pipeline, device, recorded, .. } = &reference;
        let mut adapters = Adapters::none();
        let plain = Precision::plain(Dtype::F32);
        let model = pipeline.load_denoiser(device, plain, &mut adapters, &|_| true).unwrap();
        let prompts = reference.encode();
        let size = Reference::size(&reference.settings["size"]);
        let shape = pipeline.latent_shape(size).batch(prompts.len());
        let steps = reference.number("steps") as usize;
        let sigmas = pipeline.schedule.sigmas(pipeline.image_tokens(size), steps);
        check("sigmas", recorded, &sigmas);
        let scale = reference.number("guidance") as f32;
        let guidance = pipeline.family().guidance.embedded(scale, prompts.len());
        let mut latents = recorded["in.latents"].clone();
        for (step, pair) in sigmas.windows(2).enumerate() {
            let tape = Tape::inference(device, &adapters.params, 0);
            let input = DenoiserInput {
                latents: &device.upload(shape, &latents).unwrap(),
                timesteps: &vec![pipeline.schedule.timestep(pair[0]); prompts.len()],
                condition: &Conditions::upload(
                    device,
                    &prompts.iter().collect::<Vec<_>>(),
                    Dtype::F32,
                )
                .unwrap(),
                guidance: guidance.as_deref(),
                time_dtype: Dtype::F32,
            };
            let predicted = model.predict(&tape, input, Recompute::None).unwrap();
            let velocity = predicted.latents(&tape).unwrap().tensor().read_f32().unwrap();
            euler_step(&mut latents, &velocity, pair[0], pair[1]);
            check(&format!("latents.{step}"), recorded, &latents);
        }
    }
}

#[test]
fn images_are_those_of_the_reference() {
    for variant in VARIANTS {
        let mut reference = Reference::open(variant);
        check("image", &reference.recorded, &reference.images(1.0));
        let true_cfg = reference.number("true_cfg");
        if true_cfg > 1.0 {
            check("image_cfg", &reference.recorded, &reference.images(true_cfg));
        }
        reference.pipeline.add_adapter(&reference.folder.join("lora.safetensors")).unwrap();
        check("image_lora", &reference.recorded, &reference.images(1.0));
    }
}

/// One A for q, k and v, as kohya and `XLabs` train them; layers outside of blocks; halves the other way round.
#[test]
fn adapters_of_all_programs_are_the_same() {
    let transformer = folder("schnell").join("transformer");
    let at = |file: &str| golden().join(format!("adapters/{file}.safetensors"));
    for (file, expected) in [
        ("kohya", "golden"),
        ("comfyui", "golden"),
        ("comfyui_peft", "golden"),
        ("fal", "golden"),
        ("ai_toolkit", "golden"),
        ("onetrainer", "golden"),
        ("onetrainer_new", "golden"),
        ("lycoris", "golden"),
        ("xlabs", "golden"),
        ("kohya_outer", "golden_outer"),
    ] {
        let (adapter, expected) = (at(file), at(expected));
        let verify = ["verify", text(&transformer), "--golden", text(&expected)];
        let page = printed(&[&verify[..], &["--adapter", text(&adapter)]].concat());
        assert!(page.contains("all 2 tensors are within tolerance"), "{file}: {page}");
    }
}

const FORMATS: [AdapterFormat; 4] =
    [AdapterFormat::Comfyui, AdapterFormat::Kohya, AdapterFormat::Peft, AdapterFormat::Diffusers];

#[test]
fn an_adapter_goes_from_any_program_to_any_other() {
    let out = tempfile::tempdir().unwrap();
    let mut reference = Reference::open("schnell");
    reference.pipeline.add_adapter(&reference.folder.join("lora.safetensors")).unwrap();
    // Each is made of the one before, so that all are read once and written once.
    for format in FORMATS {
        let done = export(&mut reference.pipeline, format, out.path(), "x").unwrap();
        assert_eq!(done.n_layers, 17, "{format:?}");
        reference.pipeline.add_adapter(&done.path).unwrap();
        check("image_lora", &reference.recorded, &reference.images(1.0));
    }
}

fn lora(outputs: usize, inputs: usize) -> LoraWeights {
    let values = |count: usize, by: f32| (0..count).map(|i| (i as f32 * by).sin()).collect();
    let (down, up) = (values(2 * inputs, 0.3), values(outputs * 2, 0.7));
    LoraWeights { rank: 2, alpha: 3.0, down, up, magnitude: None }
}

/// T5 is the second text encoder of FLUX.1, and kohya counts it as the third.
#[test]
fn text_encoders_have_the_names_of_other_programs() {
    let out = tempfile::tempdir().unwrap();
    let mut pipeline = Pipeline::open(&folder("schnell"), &PartPaths::default()).unwrap();
    let one =
        |name: &str, outputs, inputs| BTreeMap::from([(name.to_owned(), lora(outputs, inputs))]);
    let parts = vec![
        (Component::TextEncoder(1), one("text_model.encoder.layers.1.mlp.fc1", 48, 24)),
        (Component::TextEncoder(2), one("encoder.block.0.layer.0.SelfAttention.q", 32, 40)),
    ];
    pipeline.set_adapter(parts.clone());
    let mut stems = |format| {
        let done = export(&mut pipeline, format, out.path(), "x").unwrap();
        let tensors = Catalog::open(&done.path).unwrap().tensors;
        let alphas = tensors.iter().filter_map(|tensor| tensor.name.strip_suffix(".alpha"));
        (done.path, alphas.map(str::to_owned).collect::<Vec<_>>())
    };
    let (kohya, names) = stems(AdapterFormat::Kohya);
    let t5 = "encoder_block_0_layer_0_SelfAttention_q";
    let clip = "lora_te1_text_model_encoder_layers_1_mlp_fc1";
    assert_eq!(names, [clip.to_owned(), format!("lora_te3_{t5}")]);
    let (_, names) = stems(AdapterFormat::Comfyui);
    let clip = "text_encoders.clip_l.transformer.text_model.encoder.layers.1.mlp.fc1";
    let t5 = "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q";
    assert_eq!(names, [clip, t5]);
    // `OneTrainer` calls T5 the second; the header of a file is text of the same length.
    let bytes = fs::read(&kohya).unwrap();
    let mut renamed = bytes.clone();
    for at in 0..bytes.len() - 8 {
        if bytes[at..].starts_with(b"lora_te3") {
            renamed[at + 7] = b'2';
        }
    }
    assert_ne!(renamed, bytes);
    fs::write(&kohya, renamed).unwrap();
    let mut again = Pipeline::open(&folder("schnell"), &PartPaths::default()).unwrap();
    again.add_adapter(&kohya).unwrap();
    assert_eq!(again.adapter()[1..], parts);
}

/// The transformer of a pipeline under the names of the original checkpoints, in f32.
fn save_original(pipeline: &Pipeline, path: &Path) {
    let layout = pipeline.transformer.config.original("");
    let catalog = &component::weights(&pipeline.path.join("transformer")).unwrap();
    let mut stored: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for tensor in &catalog.tensors {
        let pieces = (layout.pieces)(&tensor.name);
        let values = load_f32(catalog, tensor, 0..tensor.numel()).unwrap();
        let mut shape: Vec<usize> = tensor.shape.iter().map(|size| *size as usize).collect();
        shape[0] = stored_rows(&pieces, shape[0]).unwrap();
        let width: usize = 4 * tensor.numel() as usize / tensor.shape[0] as usize;
        let mut rows = values.into_iter().flat_map(f32::to_le_bytes);
        for piece in pieces {
            let all = stored
                .entry(piece.key.clone())
                .or_insert_with(|| (shape.clone(), vec![0; shape[0] * width]));
            let range = piece.rows(shape[0]);
            all.1[range.start * width..range.end * width].fill_with(|| rows.next().unwrap());
        }
    }
    let views = stored.iter().map(|(name, (shape, bytes))| {
        (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// q, k and v lie in one matrix there, with the feed-forward of single-stream blocks.
#[test]
fn an_adapter_is_merged_into_a_checkpoint_of_the_original_layout() {
    let out = tempfile::tempdir().unwrap();
    let mut reference = Reference::open("schnell");
    let base = out.path().join("flux.safetensors");
    save_original(&reference.pipeline, &base);
    let (adapter, merged) = (reference.folder.join("lora.safetensors"), out.path().join("merged"));
    let rest = ["--rest", text(&reference.folder), "--merge", "--out", text(&merged)];
    printed(&[&["export", text(&adapter), "--base", text(&base)], &rest[..]].concat());
    let path = merged.join("flux.safetensors");
    reference.pipeline = Pipeline::open(&path, &PartPaths::rest(&reference.folder)).unwrap();
    check("image_lora", &reference.recorded, &reference.images(1.0));
}
