//! Full fine-tunes, from the base's weights or from scratch.

use std::fs;
use std::path::Path;

use compute::{Device, Dtype, Gradients, Shape, Tape, Tensor};
use trainer::model::adapter::Adapters;
use trainer::model::build::{ModelBuilder, Precision};
use trainer::model::component;
use trainer::model::diffusion::condition::{Conditions, POOLED, TOKENS};
use trainer::model::diffusion::denoiser::{BatchLoss, DenoiserConfig, DenoiserInput};
use trainer::model::diffusion::family::DiffusionFamily;
use trainer::model::files::{CheckpointLayout, WeightFiles, load_model};
use trainer::model::host::to_vec;
use trainer::model::recompute::Recompute;
use trainer::objective::flow::Timestep;
use trainer::objective::velocity_loss::VelocityLoss;
use trainer::verify::relative_error;
use weights::Catalog;
use weights::load::load_f32;

use super::{Job, events, losses};
use crate::models::{LIMIT, at, golden};
use crate::{printed, qwen_image, text};

const WEIGHTS: &str = "model/transformer/diffusion_pytorch_model.safetensors";

/// The result is a model folder that can be sampled from, and an interruption changes nothing.
fn check(job: &Job, base: &Path, fresh: &str) {
    let set = ["adapter.kind=full", fresh, "train.steps=4", "train.batch_size=1", "train.ema=0.9"];
    job.remove("rank = 4\n");
    let whole = job.finish("whole", &set, &[]);
    let stopped = [&set[..2], &["train.steps=2"], &set[3..]].concat();
    let run = job.finish("run", &stopped, &[]);
    let before = fs::read(run.join(WEIGHTS)).unwrap();
    job.finish("run", &set, &["--resume"]);
    let weights = |run: &Path| fs::read(run.join(WEIGHTS)).unwrap();
    assert!(weights(&whole) == weights(&run), "other bytes than without a break");
    assert!(weights(&run) != before, "two more steps changed nothing");
    assert_eq!(losses(&events(&whole)), losses(&events(&run)));
    // What it is made of lies in the last checkpoint.
    let (last, made) = (run.join("checkpoints/step-000004"), job.path("model"));
    printed(&["export", text(&last), "--base", text(base), "--out", text(&made)]);
    assert!(weights(&run) == weights(job.folder.path()), "other bytes than the run wrote");
    let (model, image) = (run.join("model"), job.path("fox.png"));
    let arguments = ["sample", "--base", text(&model), "--prompt", "a fox", "--out", text(&image)];
    printed(&[&arguments[..], &["--size", "64x64", "--steps", "1", "--dtype", "f32"]].concat());
    assert!(image.is_file());
}

#[test]
fn a_model_is_fine_tuned() {
    check(&Job::new(), &golden().join("pipeline"), "base.random_init=false");
}

#[test]
fn a_flux_is_fine_tuned() {
    let job = Job::flux();
    check(&job, &job.path("base"), "base.random_init=false");
}

#[test]
fn a_qwen_image_is_fine_tuned() {
    let base = qwen_image::golden().join("pipeline");
    check(&Job::qwen_image(), &base, "base.random_init=false");
}

#[test]
fn a_model_is_trained_from_scratch() {
    check(&Job::new(), &golden().join("pipeline"), "base.random_init=true");
}

#[test]
fn a_single_file_is_refused_before_anything_is_trained() {
    let job = Job::new();
    job.remove("rank = 4\n");
    let base = format!("base.path='{}'", at("single/pipeline.safetensors"));
    let rest = format!("base.rest='{}'", at("pipeline"));
    let words = job.fail(&["adapter.kind=full", &base, &rest], &[]);
    assert!(words.contains("a full fine-tune needs a model folder"), "{words}");
    assert!(!job.path("run/cache").exists());
}

/// Weight of the adapter in the reference data: alpha is twice the rank.
const SCALE: f32 = 2.0;

/// The parameters that a model lists as unused are those without a gradient, with one attention in a block or two.
#[test]
fn unused_parameters_have_no_gradient() {
    for (model, expected) in [("sd3", "transformer_blocks.1"), ("sd35", "transformer_blocks.2")] {
        let (mut adapters, gradients, _) = backward(model);
        let is_zero = |gradient: Option<&Tensor>| {
            gradient.is_none_or(|gradient| to_vec(gradient).unwrap().iter().all(|g| *g == 0.0))
        };
        let own = adapters.full_params.iter().filter(|(_, key)| is_zero(gradients.get(*key)));
        let mut zero: Vec<String> = own.map(|(name, _)| name.clone()).collect();
        zero.sort();
        adapters.unused.sort();
        assert_eq!(zero, adapters.unused, "{model}");
        assert!(zero.iter().all(|name| name.starts_with(expected)), "{zero:?}");
        assert!(zero.contains(&format!("{expected}.attn.add_q_proj.weight")), "{zero:?}");
    }
}

/// The adapter is merged into the weight, W = W₀ + s·B·A, so that the reference's gradients of A
/// and B follow from that of W: dB = s·dW·Aᵀ and dA = s·Bᵀ·dW.
#[test]
fn gradients_of_weights_are_those_that_the_adapters_imply() {
    let (adapters, gradients, reference) = backward("sd3");
    for (name, key) in &adapters.full_params {
        let Some((module, down, up)) = reference.adapter(name) else { continue };
        let gradient = Matrix::of(gradients.get(*key).unwrap());
        for (part, implied) in
            [("B", gradient.times(&down.transposed())), ("A", up.transposed().times(&gradient))]
        {
            let recorded = reference.values(&format!("grad.{module}.{part}"));
            let implied: Vec<f32> = implied.values.iter().map(|number| SCALE * number).collect();
            let apart = relative_error(&recorded, &implied);
            assert!(apart < 2e-5, "{module} {part}: {apart:e}");
        }
    }
}

/// A full fine-tune of a model with the recorded adapter merged, and its gradients.
fn backward(model: &str) -> (Adapters, Gradients, Reference) {
    let folder = golden().join("models").join(model);
    let reference = Reference(Catalog::open(&folder.join("golden.safetensors")).unwrap());
    let device = Device::cpu(2, LIMIT).unwrap();
    let settings =
        DenoiserConfig::read(DiffusionFamily::fallback(), &folder.join("config.json")).unwrap();
    let catalog = component::weights(&folder).unwrap();
    let build = |build: &mut ModelBuilder<'_>| settings.build(build);
    let files = WeightFiles::find(&catalog, &CheckpointLayout::identity(), build).unwrap();
    let (precision, mut adapters) = (Precision::plain(Dtype::F32), Adapters::full());
    let model = load_model(&device, &files, precision, &mut adapters, &|_| true, build).unwrap();
    let n_merged = reference.merge_into(&mut adapters);
    assert!(n_merged > 0);

    let tape = Tape::training(&device, &adapters.params, 0);
    let tensor = |name: &str| reference.tensor(&device, name);
    let timestep_of = |timestep: &f32| Timestep { sigma: timestep / 1000.0, t: *timestep };
    let timesteps: Vec<Timestep> =
        reference.values("in.timestep").iter().map(timestep_of).collect();
    let (tokens, pooled) = (tensor("in.encoder_hidden_states"), tensor("in.pooled_projections"));
    let condition = &Conditions::from_tensors([(TOKENS, tokens), (POOLED, pooled)]);
    let latents = &tensor("in.hidden_states");
    let input = DenoiserInput {
        latents,
        references: &[],
        timesteps: &timesteps,
        condition,
        guidance: None,
        time_dtype: Dtype::F32,
    };
    let predicted = model.predict(&tape, input, Recompute::Block).unwrap();
    let (weights, sigmas) = (vec![1.0; timesteps.len()], vec![0.5; timesteps.len()]);
    let target = model.patchify(&tape, tensor("target")).unwrap();
    let function = VelocityLoss::default();
    let how = BatchLoss { function, sigmas: &sigmas, weights: &weights, factors: None };
    let loss = predicted.loss(&tape, &target, &how).unwrap();
    let mut gradients = Gradients::default();
    tape.backward(&loss, &mut gradients).unwrap();
    (adapters, gradients, reference)
}

/// What the reference recorded.
struct Reference(Catalog);

impl Reference {
    fn values(&self, name: &str) -> Vec<f32> {
        let tensor = self.0.find(name).unwrap();
        load_f32(&self.0, tensor, 0..tensor.numel()).unwrap()
    }

    fn tensor(&self, device: &Device, name: &str) -> Tensor {
        let shape = &self.0.find(name).unwrap().shape;
        let sizes: Vec<usize> = shape.iter().map(|size| *size as usize).collect();
        device.upload(Shape::new(&sizes), &self.values(name)).unwrap()
    }

    /// A layer's name, A and B, if the tensor is the weight of one that has an adapter.
    fn adapter(&self, tensor: &str) -> Option<(String, Matrix, Matrix)> {
        let module = tensor.strip_suffix(".weight")?;
        let part = |part: &str| {
            let name = format!("lora.{module}.{part}");
            let columns = *self.0.find(&name).ok()?.shape.last()? as usize;
            Some(Matrix { values: self.values(&name), columns })
        };
        Some((module.to_owned(), part("A")?, part("B")?))
    }

    /// Merges the adapters into the weights; returns into how many.
    fn merge_into(&self, adapters: &mut Adapters) -> usize {
        let mut n = 0;
        // They are parameters in the order of their names.
        let values = adapters.params.values_mut().unwrap();
        for ((name, _), value) in adapters.full_params.iter().zip(values) {
            let Some((_, down, up)) = self.adapter(name) else { continue };
            let added = up.times(&down).values;
            let merged: Vec<f32> = to_vec(value)
                .unwrap()
                .iter()
                .zip(added)
                .map(|(own, more)| own + SCALE * more)
                .collect();
            *value = value.device().clone().upload(value.shape(), &merged).unwrap();
            n += 1;
        }
        n
    }
}

/// Row by row.
struct Matrix {
    values: Vec<f32>,
    columns: usize,
}

impl Matrix {
    fn of(tensor: &Tensor) -> Self {
        let columns = *tensor.shape().sizes().last().unwrap();
        Self { values: to_vec(tensor).unwrap(), columns }
    }

    fn transposed(&self) -> Self {
        let rows = self.values.len() / self.columns;
        let column = |at: usize| self.values.iter().skip(at).step_by(self.columns).copied();
        Self { values: (0..self.columns).flat_map(column).collect(), columns: rows }
    }

    fn times(&self, other: &Self) -> Self {
        let other = other.transposed();
        let dot = |a: &[f32], b: &[f32]| -> f32 {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
        };
        let rows = self.values.chunks(self.columns);
        let values =
            rows.flat_map(|row| other.values.chunks(other.columns).map(move |c| dot(row, c)));
        Self { values: values.collect(), columns: other.values.len() / other.columns }
    }
}
