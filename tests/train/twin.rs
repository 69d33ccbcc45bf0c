//! The same training by PyTorch, diffusers and PEFT: the losses of every step and the adapter that
//! came of it, recorded by tests/golden/sd3/train/generate.py, and for other families by the scripts beside theirs.

use std::fs;
use std::path::Path;

use tempfile::TempDir;
use weights::Catalog;
use weights::load::load_f32;

use super::{check_memory, clips, events, losses};
use crate::models::golden;
use crate::{editing, flux, flux2, printed, qwen_image, text, z_image};

/// Measured: 1.7e-7 of SD3, 4.0e-7 of FLUX.1. Five times that, since other CPUs sum in other orders; the smallest fault
/// that was tried, a batch that counts too much, gives 2e-2.
const OF_LOSSES: f64 = 2e-6;

/// Of the largest number of a tensor. Measured: 1.5e-5 after 20 steps, of which each may go the other
/// way where a gradient is near zero.
const OF_ADAPTER: f64 = 1e-4;

/// Measured: 4.2e-4, in one tensor whose gradients are all near zero, and 5e-5 in the others. In the same tensor
/// PyTorch in f32 is 1.3e-4 from itself in f64, and hearth 2.9e-4.
pub const OF_FLUX_ADAPTER: f64 = 1e-3;

/// Trains a job of a folder and compares the losses with those recorded.
fn check(folder: &Path, job: &str, losses_file: &str, run: &Path) {
    let base = run.with_file_name("base");
    let set = format!("base.path='{}'", text(&base));
    let mut arguments = vec!["--out", text(run), "--quiet"];
    if folder.starts_with(flux::golden()) {
        flux::with_short_prompts(&base);
        arguments.extend(["--set", &set]);
    }
    if folder.starts_with(editing::golden()) {
        editing::kontext(&base);
        arguments.extend(["--set", &set]);
    }
    if folder == clips::reference() {
        clips::base(&base);
        arguments.extend(["--set", &set]);
    }
    if folder.starts_with(z_image::golden()) {
        z_image::copy_base(&base);
        arguments.extend(["--set", &set]);
    }
    if folder.starts_with(flux2::golden()) {
        flux2::copy_base(&base);
        arguments.extend(["--set", &set]);
    }
    printed(&[&["train", text(&folder.join(job))], &arguments[..]].concat());
    let recorded = fs::read_to_string(folder.join(losses_file)).unwrap();
    let recorded: Vec<f64> =
        recorded.lines().map(|line| line.split_once(' ').unwrap().1.parse().unwrap()).collect();
    let events = events(run);
    let found = losses(&events);
    assert_eq!(found.len(), recorded.len());
    let apart = found.iter().zip(&recorded).map(|(found, recorded)| (found / recorded - 1.0).abs());
    let apart = apart.fold(0.0, f64::max);
    assert!(apart < OF_LOSSES, "{apart:e}");
    let [taken, planned] = check_memory(&events);
    // Plans are for the longest prompt that the model sees; those of some families are not padded to it.
    let is_shorter = folder.starts_with(qwen_image::golden())
        || folder.starts_with(z_image::golden())
        || folder == clips::reference();
    if is_shorter {
        assert!(taken < planned, "{taken} {planned}");
    } else {
        assert_eq!(taken, planned);
    }
}

#[test]
fn training_all_weights_is_that_of_the_reference() {
    let others = [qwen_image::golden(), z_image::golden(), flux2::golden()];
    for folder in [golden(), flux::golden()].into_iter().chain(others) {
        let out = tempfile::tempdir().unwrap();
        check(&folder.join("train"), "own.toml", "own_losses.txt", &out.path().join("run"));
    }
}

/// Nothing depends on some layers of the last block's prompt: the reference trains them all the same.
#[test]
fn training_an_adapter_is_that_of_the_reference() {
    check_adapter(&golden(), &["transformer_blocks.1.attn.add_q_proj"], OF_ADAPTER);
}

#[test]
fn training_an_adapter_of_flux_is_that_of_the_reference() {
    check_adapter(&flux::golden(), &[], OF_FLUX_ADAPTER);
}

#[test]
fn training_an_adapter_of_qwen_image_is_that_of_the_reference() {
    let unused = ["transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"];
    check_adapter(&qwen_image::golden(), &unused, OF_ADAPTER);
}

#[test]
fn training_an_adapter_of_z_image_is_that_of_the_reference() {
    check_adapter(&z_image::golden(), &[], OF_ADAPTER);
}

#[test]
fn training_an_adapter_of_flux2_is_that_of_the_reference() {
    check_adapter(&flux2::golden(), &[], OF_ADAPTER);
}

/// With a reference image of another size for each image. One tensor is 1.4e-4 apart, as with FLUX.1.
#[test]
fn training_an_edit_of_flux2_is_that_of_the_reference() {
    let names = ["edit.toml", "edit_losses.txt", "edit_adapter.safetensors"];
    check_job(&flux2::golden().join("train"), names, &[], OF_FLUX_ADAPTER);
}

/// CLIP-L and CLIP-G of SD3, whose tokens and pooled embeddings are parts of the condition; of FLUX.1 CLIP-L, of which only the
/// pooled embedding is one.
#[test]
fn training_text_encoders_too_is_that_of_the_reference() {
    let unused = ["transformer_blocks.1.attn.add_q_proj"];
    for (folder, unused, tolerance) in
        [(golden(), &unused[..], OF_ADAPTER), (flux::golden(), &[], OF_FLUX_ADAPTER)]
    {
        let folder = folder.join("train");
        let names = ["encoders.toml", "encoders_losses.txt", "encoders_adapter.safetensors"];
        let out = check_job(&folder, names, unused, tolerance);
        let state = out.path().join("run/checkpoints/step-000010/state.safetensors");
        check_moments(&folder.join("encoders_moments.safetensors"), &state);
    }
}

/// Compares what AdamW has of the gradients of text encoders, an average over all steps.
fn check_moments(theirs: &Path, state: &Path) {
    let ours = Catalog::open(state).unwrap();
    for (name, theirs) in tensors(theirs) {
        let (parameter, _) = ours.metadata.iter().find(|(_, of)| **of == name).unwrap();
        let index = parameter.strip_prefix("parameter.").unwrap();
        let first = ours.find(&format!("optimizer.{index}.first")).unwrap();
        let first = load_f32(&ours, first, 0..first.numel()).unwrap();
        let apart = trainer::verify::relative_error(&theirs, &first);
        assert!(apart < OF_ADAPTER, "{name}: {apart:e}");
    }
}

/// In the reference, the adapter that acts in training alone is fused into the model.
#[test]
fn training_beside_a_training_adapter_is_that_of_the_reference() {
    let names = ["turbo.toml", "turbo_losses.txt", "turbo_adapter.safetensors"];
    check_job(&z_image::golden().join("train"), names, &[], OF_ADAPTER);
}

pub fn check_adapter(folder: &Path, unused: &[&str], tolerance: f64) {
    check_adapter_of(&folder.join("train"), unused, tolerance);
}

/// The same of the folder of the job itself.
pub fn check_adapter_of(folder: &Path, unused: &[&str], tolerance: f64) {
    check_job(folder, ["job.toml", "losses.txt", "adapter.safetensors"], unused, tolerance);
}

fn check_job(
    folder: &Path,
    [job, losses_file, adapter]: [&str; 3],
    unused: &[&str],
    tolerance: f64,
) -> TempDir {
    let out = tempfile::tempdir().unwrap();
    let run = out.path().join("run");
    check(folder, job, losses_file, &run);
    let mut theirs = tensors(&folder.join(adapter));
    theirs.retain(|(name, _)| !unused.iter().any(|unused| name.contains(unused)));
    let ours = tensors(&run.join("adapter/pytorch_lora_weights.safetensors"));
    assert_eq!(theirs.len(), ours.len());
    for ((name, theirs), (our_name, ours)) in theirs.iter().zip(&ours) {
        assert_eq!(name, our_name);
        let apart = trainer::verify::relative_error(theirs, ours);
        assert!(apart < tolerance, "{name}: {apart:e}");
    }
    out
}

/// By name, in order.
fn tensors(path: &Path) -> Vec<(String, Vec<f32>)> {
    let catalog = Catalog::open(path).unwrap();
    let all = catalog.tensors.iter().map(|tensor| {
        (tensor.name.clone(), load_f32(&catalog, tensor, 0..tensor.numel()).unwrap())
    });
    let mut all: Vec<_> = all.collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}
