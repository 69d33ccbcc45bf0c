//! The same training by PyTorch, diffusers and PEFT: the losses of every step and the adapter that
//! came of it, recorded by tests/golden/sd3/train/generate.py.

use std::fs;
use std::path::Path;

use weights::Catalog;
use weights::load::load_f32;

use super::{check_memory, events, losses};
use crate::models::{at, golden};
use crate::{printed, text};

/// Measured: 1.7e-7. Ten times that, since other CPUs sum in other orders; the smallest fault
/// that was tried, a batch that counts too much, gives 2e-2.
const OF_LOSSES: f64 = 2e-6;

/// Of the largest number of a tensor. Measured: 1.5e-5 after 20 steps, of which each may go the other
/// way where a gradient is near zero.
const OF_ADAPTER: f64 = 1e-4;

/// Trains a job into a folder and compares the losses with those recorded.
fn check(job: &str, losses_file: &str, run: &Path) {
    printed(&["train", &at(job), "--out", text(run), "--quiet"]);
    let recorded = fs::read_to_string(golden().join(losses_file)).unwrap();
    let recorded: Vec<f64> =
        recorded.lines().map(|line| line.split_once(' ').unwrap().1.parse().unwrap()).collect();
    let events = events(run);
    let found = losses(&events);
    assert_eq!(found.len(), recorded.len());
    let apart = found.iter().zip(&recorded).map(|(found, recorded)| (found / recorded - 1.0).abs());
    let apart = apart.fold(0.0, f64::max);
    assert!(apart < OF_LOSSES, "{apart:e}");
    let [taken, planned] = check_memory(&events);
    assert_eq!(taken, planned);
}

#[test]
fn training_all_weights_is_that_of_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    check("train/own.toml", "train/own_losses.txt", &folder.path().join("run"));
}

#[test]
fn training_an_adapter_is_that_of_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    check("train/job.toml", "train/losses.txt", &run);
    let mut theirs = tensors(&golden().join("train/adapter.safetensors"));
    // Nothing depends on the queries of the last block's prompt: the reference trains them all the same.
    theirs.retain(|(name, _)| !name.contains("transformer_blocks.1.attn.add_q_proj"));
    let ours = tensors(&run.join("adapter/pytorch_lora_weights.safetensors"));
    assert_eq!(theirs.len(), ours.len());
    for ((name, theirs), (our_name, ours)) in theirs.iter().zip(&ours) {
        assert_eq!(name, our_name);
        let apart = trainer::verify::relative_error(theirs, ours);
        assert!(apart < OF_ADAPTER, "{name}: {apart:e}");
    }
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
