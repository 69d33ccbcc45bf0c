//! Which layers get an adapter: those that can learn something, unless others are typed.

use std::fs;

use trainer::event::{Event, Warning};

use super::{Job, events, losses, trained, warnings};
use crate::{hearth, said, text};

/// What `adapter.targets` is unless it is typed.
const TYPED: &str = "adapter.targets=['attn.to_q','attn.to_k','attn.to_v','attn.to_out.0','attn.add_q_proj',\
                     'attn.add_k_proj','attn.add_v_proj','attn.to_add_out']";

/// The last block's queries of the prompt: nobody reads what they find.
const UNUSED: &str = "transformer_blocks.1.attn.add_q_proj";

#[test]
fn layers_without_gradient_are_left_out_unless_typed() {
    let job = Job::new();
    let usual = job.finish("usual", &[], &[]);
    assert!(warnings(&events(&usual)).is_empty());
    let typed = job.finish("typed", &[TYPED], &[]);
    let said = events(&typed);
    let mut hints = Vec::new();
    for event in &said {
        if let Event::Warning(Warning { kind, .. }) = event {
            hints.push((kind.to_string(), kind.hint().unwrap()));
        }
    }
    let [(text, hint)] = &hints[..] else { panic!("{hints:?}") };
    assert_eq!(*text, format!("1 of 15 layers have no gradient: {UNUSED}"));
    let (exclude, _) = hint.split_once(" leaves").unwrap();
    assert_eq!(exclude, format!("adapter.exclude = [\"{UNUSED}\"]"));
    // The hint works, and the others learn what they learnt with it.
    let followed = job.finish("followed", &[TYPED, exclude], &[]);
    assert!(warnings(&events(&followed)).is_empty());
    assert_eq!(losses(&events(&typed)), losses(&events(&usual)));
    let adapter = |run: &std::path::Path| {
        fs::read(run.join("adapter/pytorch_lora_weights.safetensors")).unwrap()
    };
    assert!(adapter(&followed) == adapter(&usual) && adapter(&typed) != adapter(&usual));
}

#[test]
fn a_full_fine_tune_and_dora_are_not_warned_of_what_is_known() {
    let job = Job::new();
    let formats = "output.formats=['diffusers','peft','kohya','comfyui']";
    let run = job.finish("dora", &["adapter.kind=dora", "train.steps=4", formats], &[]);
    assert!(warnings(&events(&run)).is_empty());
    job.remove("rank = 4\n");
    let run = job.finish("full", &["adapter.kind=full", "train.steps=4"], &[]);
    assert!(warnings(&events(&run)).is_empty(), "{:?}", warnings(&events(&run)));
}

#[test]
fn a_run_resumes_with_the_layers_it_began_with() {
    let job = Job::new();
    // As a run of before: the layer that learns nothing is in its checkpoint.
    let whole = job.finish("whole", &[TYPED, "train.steps=4"], &[]);
    job.finish("parts", &[TYPED, "train.steps=2"], &[]);
    let parts = job.finish("parts", &["train.steps=4"], &["--resume"]);
    assert!(trained(&whole) == trained(&parts), "other bytes than without a break");
    // And one that left it out, also from its own file.
    let usual = job.finish("usual", &["train.steps=4"], &[]);
    let run = job.finish("run", &["train.steps=2"], &[]);
    let config = run.join("config.toml");
    let output = hearth(&["train", text(&config), "--resume", "--quiet", "--set", "train.steps=4"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(trained(&usual) == trained(&run), "other bytes than without a break");
}

#[test]
fn a_pattern_that_excludes_nothing_is_an_error() {
    let job = Job::new();
    let words = job.fail(&["adapter.exclude=['attn.to_x']"], &[]);
    assert!(words.contains("attn.to_x"), "{words}");
}

/// Its default targets have q, k and v of single-stream blocks, which kohya and ComfyUI fuse with the feed-forward.
#[test]
fn a_dora_that_a_format_cannot_hold_is_refused_before_it_is_trained() {
    let job = Job::flux();
    let dora = ["adapter.kind=dora", "output.formats=['comfyui']"];
    let words = job.fail(&dora, &[]);
    assert!(words.contains("linear1 has magnitudes for 3 of its 7 parts"), "{words}");
    assert!(!job.path("run/cache").exists());
    let all = "adapter.targets=['attn.to_q', 'attn.to_k', 'attn.to_v', 'proj_mlp']";
    job.finish("whole", &[dora[0], dora[1], all, "train.steps=2"], &[]);
}
