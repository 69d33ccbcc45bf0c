//! Training on a GPU, as far as a software driver for Vulkan can show it; says so where there is none.

use serde_json::Value;

use super::{Job, events, learnt, losses};
use crate::models::at;
use crate::printed;

const ON: [&str; 2] = ["--device", "gpu:software"];

/// Whether there is such a driver.
#[allow(clippy::print_stderr)] // Says why nothing is shown.
fn has_software() -> bool {
    let found: Value = serde_json::from_str(&printed(&["doctor", "--json"])).unwrap();
    let adapters = found["adapters"].as_array();
    let is_there = adapters.is_some_and(|all| all.iter().any(|one| one["is_software"] == true));
    if !is_there {
        eprintln!("no software driver for Vulkan here");
    }
    is_there
}

#[test]
fn a_gpu_learns_what_the_processor_does_and_goes_on_bit_for_bit() {
    if !has_software() {
        return;
    }
    let (set, more) = (["train.steps=2", "train.batch=1"], ["train.steps=4", "train.batch=1"]);
    let job = Job::new();
    let cpu = job.finish("cpu", &more, &[]);
    let whole = job.finish("whole", &more, &ON);
    job.finish("parts", &set, &ON);
    let parts = job.finish("parts", &more, &[&ON[..], &["--resume"]].concat());
    assert!(learnt(&whole) == learnt(&parts), "other bytes than without a break");
    let [exact, ours] = [&cpu, &whole].map(|run| losses(&events(run)));
    assert_eq!((exact.len(), ours.len()), (4, 4));
    for (exact, ours) in exact.iter().zip(&ours) {
        assert!((exact - ours).abs() < 1e-5 * exact, "{exact} {ours}");
    }
}

#[test]
fn a_gpu_agrees_with_the_reference() {
    if !has_software() {
        return;
    }
    for (folder, dtype) in
        [("models/sd3", "f32"), ("models/sd35", "bf16"), ("models/vae_kl16", "f32")]
    {
        let folder = at(folder);
        let page = printed(&[&["verify", &folder, "--dtype", dtype][..], &ON].concat());
        assert!(page.contains("are within tolerance"), "{page}");
    }
}
