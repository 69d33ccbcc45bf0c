//! Whole pipelines against what diffusers computed with them: FLUX.1 (`tests/golden/flux/pipelines.py`), with guidance as an
//! input of the model and none, schedules shifted by size and not, prompts of 512 and of 256 tokens; Qwen-Image
//! (`tests/golden/qwen_image/pipelines.py`), with prompts of any length, and prompts that are cut; Kandinsky 5
//! (`tests/golden/kandinsky5/pipelines.py`), with the prompt template and sigmas of its authors and of diffusers, and clips
//! with an adapter that was trained; Z-Image (`tests/golden/z_image/pipelines.py`), sampled like its base and like Turbo;
//! FLUX.2 klein (`tests/golden/flux2/pipelines.py`), base and distilled, and with two references of different sizes.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use compute::{Device, Dtype, Tape, Tensor};
use serde_json::Value;
use tempfile::TempDir;
use trainer::data::DecodingMemory;
use trainer::model::build::Precision;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::condition::{Condition, Conditions};
use trainer::model::diffusion::denoiser::DenoiserInput;
use trainer::model::diffusion::guidance::GuidanceScales;
use trainer::model::diffusion::implementation::Implementation;
use trainer::model::diffusion::paths::PartPaths;
use trainer::model::diffusion::scheduler::euler_step;
use trainer::model::diffusion::text::{EncodeCallbacks, EncoderLoading, EncodingOptions, Prompt};
use trainer::model::recompute::Recompute;
use trainer::sample::reference::{ReferenceLatents, encode_references, fit_references};
use trainer::sample::{ImageRequest, SampleJob};

use crate::kandinsky5;
use crate::models::{LIMIT, check, recorded_in};

fn folders() -> Vec<PathBuf> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    [
        "flux/dev/pipeline",
        "flux/schnell/pipeline",
        "qwen_image/pipeline",
        "qwen_image/short",
        "kandinsky5/original",
        "kandinsky5/diffusers",
        "kandinsky5/clip",
        "kandinsky5/clip_trained",
        "z_image/base",
        "z_image/turbo",
        "flux2/base",
        "flux2/distilled",
        "flux2/edit",
    ]
    .map(|folder| golden.join(folder))
    .to_vec()
}

/// A pipeline with what diffusers computed.
pub struct Reference {
    pub folder: PathBuf,
    settings: Value,
    pub recorded: HashMap<String, Vec<f32>>,
    pub pipeline: Pipeline,
    device: Device,
    /// A pipeline that was put together from the parts of others.
    _place: Option<TempDir>,
}

impl Reference {
    pub fn open(folder: &Path) -> Self {
        let folder = folder.to_owned();
        let text = fs::read_to_string(folder.join("golden.json")).unwrap();
        let settings: Value = serde_json::from_str(&text).unwrap();
        let place = settings["parts"].as_object().map(|_| kandinsky5::assembled(&folder));
        let implementation = match settings["implementation"].as_str() {
            Some("diffusers") => Some(Implementation::Diffusers),
            _ => None,
        };
        let parts = PartPaths { implementation, ..PartPaths::default() };
        let model = place.as_ref().map_or(&*folder, TempDir::path);
        Self {
            settings,
            recorded: recorded_in(&folder.join("golden.safetensors")),
            pipeline: Pipeline::open(model, &parts).unwrap(),
            device: Device::cpu(2, LIMIT).unwrap(),
            folder,
            _place: place,
        }
    }

    /// Of a clip.
    fn frames(&self) -> usize {
        self.settings["frames"].as_u64().unwrap_or(1) as usize
    }

    /// The adapter that diffusers' images with one were made with.
    fn adapter(&self) -> PathBuf {
        let file = "lora.safetensors";
        let own = self.folder.join(file);
        if own.exists() { own } else { self.folder.join("../pipeline").join(file) }
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
        let prompts: Vec<Prompt> = self.prompts().into_iter().map(Prompt::from).collect();
        encoders.encode(&self.device, encoding, &prompts, callbacks).unwrap()
    }

    /// Reference images.
    pub fn references(&self) -> Vec<PathBuf> {
        let n = self.settings["references"].as_u64().unwrap_or(0);
        (0..n).map(|number| self.folder.join(format!("reference-{number}.png"))).collect()
    }

    /// Their latents, for so many images.
    fn reference_latents(&self, n: usize) -> Vec<Tensor> {
        let Self { pipeline, device, .. } = self;
        let sized = fit_references(pipeline, &self.references(), 1024).unwrap();
        let memory = DecodingMemory::new(usize::MAX);
        let latents = encode_references(pipeline, device, &sized, &memory, &|_| true).unwrap();
        let upload = |latents: &ReferenceLatents| {
            device.upload(latents.shape.batch(n), &latents.values.repeat(n)).unwrap()
        };
        latents.iter().map(upload).collect()
    }

    pub fn images(&self, true_cfg: f64) -> Vec<f32> {
        self.images_of(true_cfg, self.references())
    }

    pub fn images_of(&self, true_cfg: f64, references: Vec<PathBuf>) -> Vec<f32> {
        let request = ImageRequest {
            prompts: self.prompts(),
            negative: self.settings["negative"].as_str().unwrap().to_owned(),
            size: Self::size(&self.settings["size"]),
            frames: self.frames(),
            fps: 1,
            steps: self.number("steps") as usize,
            guidance: GuidanceScales {
                guidance: self.number("guidance") as f32,
                true_cfg: true_cfg as f32,
            },
            seed: 1,
            latents: Some(self.folder.join("golden.safetensors")),
            references,
            reference_resolution: 1024,
            precision: Precision::plain(Dtype::F32),
        };
        let job = SampleJob::new(&self.pipeline, request).unwrap();
        let plan = job.plan(self.device.kind(), LIMIT).unwrap();
        let clips = job.run(&self.device, &plan, &|_| true).unwrap();
        clips.into_iter().flat_map(|clip| clip.frames).flat_map(|frame| frame.values).collect()
    }

    /// Compares latents after every step with those of a name.
    fn check_steps(&self, name: &str) {
        let Self { pipeline, device, recorded, .. } = self;
        let mut adapters = pipeline.loaded_adapter();
        let plain = Precision::plain(Dtype::F32);
        let model = pipeline.load_denoiser(device, plain, &mut adapters, &|_| true).unwrap();
        let prompts = self.encode();
        let (size, frames) = (Self::size(&self.settings["size"]), self.frames());
        let shape = pipeline.latent_shape(size, frames).batch(prompts.len());
        let steps = self.number("steps") as usize;
        let sigmas = pipeline.schedule.sigmas(pipeline.image_tokens(size, frames), steps);
        check("sigmas", recorded, &sigmas);
        let scale = self.number("guidance") as f32;
        let guidance = pipeline.family().guidance.embedded(scale, prompts.len());
        let conditions: Vec<&Condition> = prompts.iter().collect();
        let references = self.reference_latents(prompts.len());
        let mut latents = recorded["in.latents"].clone();
        for (step, pair) in sigmas.windows(2).enumerate() {
            let tape = Tape::inference(device, &adapters.params, 0);
            let input = DenoiserInput {
                latents: &device.upload(shape, &latents).unwrap(),
                references: &references,
                timesteps: &vec![pipeline.schedule.timestep(pair[0]); prompts.len()],
                condition: &Conditions::upload(device, &conditions, Dtype::F32).unwrap(),
                guidance: guidance.as_deref(),
                time_dtype: Dtype::F32,
            };
            let predicted = model.predict(&tape, input, Recompute::None).unwrap();
            let velocity = predicted.latents(&tape).unwrap().tensor().read_f32().unwrap();
            euler_step(&mut latents, &velocity, pair[0], pair[1]);
            check(&format!("{name}.{step}"), recorded, &latents);
        }
    }
}

#[test]
fn prompts_are_those_of_the_reference() {
    for folder in folders() {
        let reference = Reference::open(&folder);
        let length = reference.number("length") as usize;
        assert_eq!(
            reference.pipeline.encoders.lengths().last(),
            Some(length),
            "{}",
            folder.display()
        );
        let encoded = reference.encode();
        let of = |index: usize| -> Vec<f32> {
            encoded.iter().flat_map(|condition| condition.0[index].values.clone()).collect()
        };
        if reference.recorded.contains_key("out.prompt_embeds") {
            check("prompt_embeds", &reference.recorded, &of(0));
        }
        if reference.recorded.contains_key("out.pooled_prompt_embeds") {
            check("pooled_prompt_embeds", &reference.recorded, &of(1));
        }
    }
}

#[test]
fn sigmas_are_those_of_the_reference_at_every_size() {
    for folder in folders() {
        let reference = Reference::open(&folder);
        for size in reference.settings["sizes"].as_array().unwrap() {
            let [width, height] = Reference::size(size);
            let tokens = reference.pipeline.image_tokens([width, height], 1);
            let sigmas = reference.pipeline.schedule.sigmas(tokens, 28);
            check(&format!("sigmas.{width}x{height}"), &reference.recorded, &sigmas);
        }
    }
}

/// Latents after every step, from the predictions of the transformer alone, and with an adapter.
#[test]
fn every_step_of_the_sampler_is_that_of_the_reference() {
    for folder in folders() {
        let mut reference = Reference::open(&folder);
        reference.check_steps("latents");
        if reference.recorded.contains_key("out.latents_lora.0") {
            reference.pipeline.add_adapter(&reference.adapter()).unwrap();
            reference.check_steps("latents_lora");
        }
    }
}

#[test]
fn images_are_those_of_the_reference() {
    for folder in folders() {
        let mut reference = Reference::open(&folder);
        // Of some only the first is kept.
        let (n, images) = (reference.recorded["out.image"].len(), reference.images(1.0));
        check("image", &reference.recorded, &images[..n]);
        let true_cfg = reference.number("true_cfg");
        if true_cfg > 1.0 {
            check("image_cfg", &reference.recorded, &reference.images(true_cfg));
        }
        if reference.recorded.contains_key("out.image_lora") {
            reference.pipeline.add_adapter(&reference.adapter()).unwrap();
            let n = reference.recorded["out.image_lora"].len();
            check("image_lora", &reference.recorded, &reference.images(1.0)[..n]);
        }
    }
}
