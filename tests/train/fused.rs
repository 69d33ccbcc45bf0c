//! Full fine-tunes with a fused backward pass: the same result without memory for all gradients.

use std::path::Path;

use trainer::event::Event;

use super::texts::Place;
use super::{Job, check_memory, events, last_state, losses};
use crate::text;

const FULL: &str = "adapter.kind=full";
const FUSED: &str = "train.fused_backward_pass=true";
const NOT_FUSED: &str = "train.fused_backward_pass=false";
const BF16: &str = "train.weight_dtype=bf16";

/// What the largest step was planned to take, which is what it took, as in every other phase.
fn planned_bytes(run: &Path) -> usize {
    let events = events(run);
    for event in &events {
        if let Event::Memory { phase, planned_bytes, peak_bytes } = event {
            assert_eq!(planned_bytes, peak_bytes, "{phase}");
        }
    }
    let [taken, planned] = check_memory(&events);
    assert_eq!(taken, planned);
    planned
}

fn full_job() -> Job {
    let job = Job::new();
    job.remove("rank = 4\n");
    job
}

#[test]
fn without_clipping_not_a_bit_differs() {
    let job = full_job();
    let set = [FULL, "train.steps=3", "train.micro_batch=2", "train.max_grad_norm=off"];
    for (optimizer, recompute, ema) in [
        ("adamw", "none", "0.9"),
        ("adamw_8bit", "block", "off"),
        ("muon", "alternate", "off"),
        ("lion", "none", "off"),
        ("adafactor", "none", "off"),
        ("adamw_schedule_free", "none", "off"),
    ] {
        let run = |out: &str, is_fused: &str| {
            let more = [
                &format!("optimizer.kind={optimizer}"),
                &format!("train.recompute={recompute}"),
                &format!("train.ema={ema}"),
                is_fused,
            ];
            job.finish(&format!("{out}-{optimizer}"), &[&set[..], &more].concat(), &[])
        };
        let (whole, fused) = (run("whole", NOT_FUSED), run("fused", FUSED));
        assert_eq!(losses(&events(&whole)), losses(&events(&fused)), "{optimizer}");
        assert!(last_state(&whole) == last_state(&fused), "{optimizer}: other bytes");
        let [whole, fused] = [whole, fused].map(|run| planned_bytes(&run));
        assert!(fused < whole, "{optimizer}: {fused} of {whole}");
    }
}

#[test]
fn a_language_model_has_the_same_bits_too() {
    let place = Place::new();
    let set = [FULL, "train.steps=4", "train.micro_batch=4", "train.max_grad_norm=off"];
    let run = |out: &str, more: &[&str]| place.train(out, &[&set[..], more].concat(), &[]);
    let whole = run("whole", &[NOT_FUSED, "train.recompute=none"]);
    for recompute in ["none", "block"] {
        let fused = run(recompute, &[FUSED, &format!("train.recompute={recompute}")]);
        assert_eq!(losses(&events(&whole)), losses(&events(&fused)), "{recompute}");
        assert!(last_state(&whole) == last_state(&fused), "{recompute}: other bytes");
        planned_bytes(&fused);
    }
}

#[test]
fn an_interruption_changes_nothing() {
    let job = full_job();
    let set = [FULL, FUSED, "train.steps=4", "train.max_grad_norm=0.1", "train.ema=0.9"];
    let whole = job.finish("whole", &set, &[]);
    let stopped = [&set[..2], &["train.steps=2"], &set[3..]].concat();
    let run = job.finish("run", &stopped, &[]);
    job.finish("run", &set, &["--resume"]);
    assert_eq!(losses(&events(&whole)), losses(&events(&run)));
    assert!(last_state(&whole) == last_state(&run), "other bytes than without a break");
    let unfused = [&set[..1], &[NOT_FUSED], &set[2..]].concat();
    let arguments = ["--out", text(&run), "--resume"];
    let words = job.fail(&unfused, &arguments);
    assert!(words.contains("train.fused_backward_pass"), "{words}");
    let other = job.finish("other", &unfused, &[]);
    assert!(
        last_state(&whole) != last_state(&other),
        "gradients are not clipped by their own norms"
    );
}

/// Weights of two bytes: the same bits whether fused, resumed or neither, and nearly the losses of four bytes.
#[test]
fn weights_in_bf16_are_trained_alike() {
    let job = full_job();
    job.remove("dtype = 'f32'\n");
    let set = [FULL, "train.steps=4", "train.micro_batch=2", "train.max_grad_norm=off"];
    let more = ["optimizer.kind=adamw_8bit", "optimizer.learning_rate=1e-3"];
    let set = [&set[..], &more].concat();
    let run = |out: &str, more: &[&str], arguments: &[&str]| {
        job.finish(out, &[&set[..], more].concat(), arguments)
    };
    let [exact, whole, fused] =
        [("exact", &[NOT_FUSED][..]), ("whole", &[NOT_FUSED, BF16]), ("fused", &[FUSED, BF16])]
            .map(|(out, more)| run(out, more, &[]));
    run("run", &[FUSED, BF16, "train.steps=2"], &[]);
    let resumed = run("run", &[FUSED, BF16], &["--resume"]);
    for other in [&fused, &resumed] {
        assert_eq!(losses(&events(&whole)), losses(&events(other)));
        assert!(last_state(&whole) == last_state(other), "other bytes");
    }
    assert!(planned_bytes(&fused) < planned_bytes(&whole));
    assert!(planned_bytes(&whole) < planned_bytes(&exact));
    let (exact, found) = (losses(&events(&exact)), losses(&events(&whole)));
    assert_ne!(exact, found);
    for (exact, found) in exact.iter().zip(&found) {
        assert!((found / exact - 1.0).abs() < 0.02, "{found} {exact}");
    }
}

#[test]
fn what_excludes_it_is_named_with_the_value_it_needs() {
    let job = full_job();
    for (other, problem, hint) in [
        (
            "train.gradient_accumulation=4",
            "`train.fused_backward_pass = true` is not possible with `train.gradient_accumulation = 4`",
            "set `train.gradient_accumulation = 1`, or remove `train.fused_backward_pass`",
        ),
        ("train.micro_batch=1", "with `train.micro_batch = 1`", "set `train.micro_batch = 2`"),
        ("base.dtype=f16", "with `base.dtype = \"f16\"`", "set `base.dtype = \"bf16\"`"),
    ] {
        let words = job.fail(&[FULL, FUSED, other], &[]);
        assert!(words.contains(problem) && words.contains(hint), "{words}");
    }
    for (other, problem) in [
        (
            "base.dtype=f32",
            "`train.weight_dtype = \"bf16\"` is not possible with `base.dtype = \"f32\"`",
        ),
        ("optimizer.kind=muon", "with `optimizer.kind = \"muon\"`"),
        ("train.ema=0.9", "with `train.ema = 0.9`"),
    ] {
        let dtype = if other.starts_with("base.") { other } else { "base.dtype=bf16" };
        let mut set = vec![FULL, BF16, dtype, other];
        set.dedup();
        let words = job.fail(&set, &[]);
        assert!(words.contains(problem), "{words}");
    }
    let words = Job::new().fail(&[FUSED], &[]);
    let problem = "`train.fused_backward_pass` has no effect with adapter.kind = \"lora\"";
    assert!(words.contains(problem), "{words}");
}
