//! Jobs read, refused, resolved and written again.

mod sets;

use std::collections::BTreeSet;
use std::error::Error;
use std::fs;

use expect_test::expect_file;
use tempfile::TempDir;

use super::adapter::AdapterKind;
use super::data::ValidationSplit;
use super::model_path::ModelPath;
use super::renamed::RENAMED;
use super::section::KeyDefault;
use super::train::TrainLength;
use super::*;
use crate::error::TrainerError;
use crate::model::adapter::AdapterForm;
use crate::model::adapter::factors::LokrShape;
use crate::model::diffusion::text::EncoderAdapter;
use crate::objective::flow::WeightingScheme;

/// The shortest job.
const SHORTEST: &str = "[base]\npath = \"model\"\n[data]\nimages = \"images\"\n";

/// A job file in a folder of its own.
fn job(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    fs::write(&path, text).unwrap();
    (folder, path)
}

fn run(text: &str, arguments: &[&str]) -> Result<RunConfig, ConfigError> {
    let (_folder, path) = job(text);
    let mut raw = RawConfig::from_file(&path)?;
    arguments.iter().try_for_each(|argument| raw.set(argument))?;
    raw.resolve()
}

/// A job with absolute paths, so that two of them can be compared.
fn set(arguments: &[&str]) -> Result<RunConfig, ConfigError> {
    let mut raw = RawConfig::empty();
    for argument in ["base.path=model", "data.images=images"].iter().chain(arguments) {
        raw.set(argument)?;
    }
    raw.resolve()
}

/// The same about texts.
fn set_text(arguments: &[&str]) -> Result<RunConfig, ConfigError> {
    let mut raw = RawConfig::empty();
    for argument in ["base.path=model", "text.path=texts"].iter().chain(arguments) {
        raw.set(argument)?;
    }
    raw.resolve()
}

/// A value for every key of a job about texts, other than its default.
const EVERY_TEXT_KEY: &[&str] = &[
    "text.path=others",
    "text.length=64",
    "text.tokenizer=tokenizer.json",
    "text.validation=0.1",
    "text.cache=elsewhere",
    "text.token_format=u16",
    "text.follow_links=true",
    "compress.keep_one_in=8",
    "compress.mode=reconstruct",
    "compress.select=spaces",
    "compress.estimator=gumbel",
    "compress.discount=0.5",
    "compress.policy_weight=2",
    "compress.exploration=0.1",
    "compress.early_weight=0.2",
    "compress.window=32",
    "compress.layers=3",
    "compress.width=128",
    "generate.prompts=['once']",
    "generate.max_tokens=9",
    "generate.temperature=0",
    "generate.top_k=3",
    "generate.top_p=0.5",
    "generate.seed=7",
];

/// A value for every key, other than its default.
const EVERY_KEY: &[&str] = &[
    "base.path=other",
    "base.rest=rest",
    "base.vae=ae.safetensors",
    "base.training_adapter=deturbo.safetensors",
    "base.text_encoders=['clip_l.safetensors']",
    "base.implementation=diffusers",
    "base.dtype=f32",
    "base.quantise=nf4",
    "base.quantise_encoders=int8",
    "base.compute=fp8",
    "data.images=others",
    "data.references=['before', 'masks']",
    "data.draw=neon",
    "data.resolution=512",
    "data.bucket_step=32",
    "data.flip=true",
    "data.reference_resolution=512",
    "data.frames=81",
    "data.fps=16",
    "data.segments=3",
    "data.follow_links=true",
    "data.repeats=3",
    "data.loss_weight=0.5",
    "data.masks=alpha",
    "data.crop=random",
    "data.trigger=xyz",
    "data.caption_dropout=0",
    "data.caption_choice=wildcards",
    "data.shuffle_tags=true",
    "data.keep_tags=2",
    "data.validation=0.1",
    "data.cache=shared",
    "adapter.kind=dora",
    "adapter.rank=8",
    "adapter.alpha=4",
    "adapter.dropout=0.5",
    "adapter.rslora=true",
    "adapter.train_norm=true",
    "adapter.loraplus_lr_ratio=16",
    "adapter.targets=['to_q']",
    "adapter.exclude=['to_q']",
    "adapter.pattern=[{match = 'to_q', rank = 4}]",
    "adapter.text_encoders=['clip-l']",
    "train.steps=20",
    "train.epochs=3",
    "train.batch_size=2",
    "train.micro_batch=1",
    "train.gradient_accumulation=4",
    "train.seed=1",
    "train.recompute=block",
    "train.weighting_scheme=cosmap",
    "train.logit_mean=0.5",
    "train.logit_std=2",
    "train.timestep_shift=resolution",
    "train.timestep_min=100",
    "train.timestep_max=900",
    "train.timestep_bias=style",
    "train.loss=l1",
    "train.loss_weighting=half_bell",
    "train.guidance_scale=off",
    "train.max_grad_norm=off",
    "train.ema=0.999",
    "optimizer.kind=adamw_8bit",
    "optimizer.learning_rate=1e-5",
    "optimizer.betas=[0.8, 0.99]",
    "optimizer.epsilon=1e-6",
    "optimizer.weight_decay=0",
    "optimizer.lr_scheduler=cosine",
    "optimizer.warmup_steps=10",
    "sample.prompts=['a fox', 'a \"red\" fox']",
    "sample.size=[512, 768]",
    "sample.frames=33",
    "sample.steps=20",
    "sample.guidance_scale=4.5",
    "sample.true_cfg_scale=2",
    "sample.seed=7",
    "sample.negative_prompt=blurry",
    "machine.mode=quiet",
    "machine.max_temp=80.0",
    "machine.deterministic=true",
    "machine.offload=blocks",
    "cluster.sync_every=4",
    "cluster.wire=bf16",
    "cluster.nccl=false",
    "cluster.shard_optimizer=true",
    "output.folder=elsewhere",
    "output.name=2024",
    "output.save_every=off",
    "output.keep=1",
    "output.keep_best=false",
    "output.max_shard_size=2GB",
    "output.formats=['peft', 'kohya']",
    "output.license=cc-by-4.0",
    "output.author=\"A. Author\"",
    "output.tensorboard=true",
];

/// Values of many types.
const VARIED: &[&str] = &[
    "adapter.pattern=[{match = 'to_q', rank = 4}]",
    "data.trigger=é",
    "optimizer.betas=[0.8, 0.99]",
    "sample.size=512",
    "train.ema=0.5",
];

/// Keys that need another one to mean anything.
const WITH_OTHERS: &[(&str, &str)] = &[
    ("train.mode_scale=0.5", "train.weighting_scheme=mode"),
    ("train.huber_c=0.5", "train.loss=huber"),
    ("train.huber_schedule=snr", "train.loss=pseudo_smooth_l1"),
    ("train.min_snr_gamma=1", "train.loss_weighting=min_snr"),
    ("train.timestep_bias_multiplier=3", "train.timestep_bias=later"),
    ("train.timestep_bias_share=0.5", "train.timestep_bias=earlier"),
    ("train.timestep_bias_begin=100", "train.timestep_bias=range"),
    ("train.timestep_bias_end=900", "train.timestep_bias=range"),
    ("train.stop_after_plateau=5", "data.validation=4"),
    ("train.validate_every=7", "data.validation=4"),
    ("base.random_init=true", "adapter.kind=full"),
    ("train.fused_backward_pass=true", "adapter.kind=full"),
    ("train.weight_dtype=bf16", "adapter.kind=full"),
    ("data.draw_count=7", "data.draw=flat"),
    ("sample.every=100", "sample.prompts=['a fox']"),
    ("sample.references=['a.png', ['b.png', 'c.png']]", "sample.prompts=['a fox', 'a cat']"),
    ("optimizer.momentum=0.9", "optimizer.kind=muon"),
    ("optimizer.scale_parameter=true", "optimizer.kind=adafactor"),
    ("optimizer.d0=1e-5", "optimizer.kind=prodigy"),
    ("optimizer.d_coef=0.5", "optimizer.kind=prodigy"),
    ("optimizer.use_bias_correction=true", "optimizer.kind=prodigy"),
    ("optimizer.safeguard_warmup=true", "optimizer.kind=prodigy"),
    ("optimizer.cycles=3", "optimizer.lr_scheduler=cosine_with_restarts"),
    ("optimizer.power=2", "optimizer.lr_scheduler=polynomial"),
    ("optimizer.lr_end=1e-6", "optimizer.lr_scheduler=polynomial"),
    ("adapter.factor=8", "adapter.kind=lokr"),
    ("adapter.full_matrix=true", "adapter.kind=lokr"),
    ("adapter.decompose_both=true", "adapter.kind=lokr"),
    ("adapter.text_encoder_targets=['fc1']", "adapter.text_encoders=['clip-l']"),
    ("adapter.text_encoder_learning_rate=5e-6", "adapter.text_encoders=['clip-l']"),
    ("cluster.outer_learning_rate=1.0", "cluster.sync_every=4"),
    ("cluster.outer_momentum=0.0", "cluster.sync_every=4"),
    ("data[0].regularisation=true", "data=[{images='a'}, {images='b'}]"),
    ("data[0].target=base", "data=[{images='a'}, {images='b'}]"),
    ("data.unmasked_weight=0.1", "data.masks=beside"),
    ("data.unmasked_probability=0.1", "data.masks=beside"),
    ("optimizer.decay=0.1", "optimizer.lr_scheduler=wsd"),
    ("optimizer.decay_curve=linear", "optimizer.lr_scheduler=wsd"),
];

#[test]
fn every_key_has_an_effect() {
    let mut seen = BTreeSet::new();
    let alone = EVERY_KEY.iter().map(|argument| (*argument, None));
    let with_others = WITH_OTHERS.iter().map(|(argument, other)| (*argument, Some(*other)));
    for (argument, other) in alone.chain(with_others) {
        let before: Vec<&str> = other.into_iter().collect();
        let after = [&before[..], &[argument]].concat();
        let changed = set(&after).unwrap();
        assert_ne!(set(&before).unwrap(), changed, "{argument} changes nothing");
        let key = argument.split('=').next().unwrap();
        let by_hand = ValueOrigin::CommandLine { flag: "--set".into(), value: argument.into() };
        assert_eq!(changed.origin(key), Some(&by_hand), "{argument}");
        // A key of one set of images is one of all.
        seen.insert(key.replace("[0]", ""));
    }
    for argument in EVERY_TEXT_KEY {
        let changed = set_text(&[argument]).unwrap();
        assert_ne!(set_text(&[]).unwrap(), changed, "{argument} changes nothing");
        let after = run(&changed.resolved(), &[]).unwrap();
        assert_eq!(changed, after, "{}", changed.resolved());
        seen.insert(argument.split('=').next().unwrap().to_owned());
    }
    let with = ["generate.prompts=['once']", "generate.every=5"];
    assert_ne!(set_text(&with[..1]).unwrap(), set_text(&with).unwrap());
    seen.insert("generate.every".into());
    let with = ["compress.estimator=gumbel", "compress.temperature=0.5"];
    assert_ne!(set_text(&with[..1]).unwrap(), set_text(&with).unwrap());
    seen.insert("compress.temperature".into());
    let method = ["preference.method=kto"];
    assert_ne!(set_text(&[]).unwrap(), set_text(&method).unwrap());
    seen.insert("preference.method".into());
    for with in [
        ["preference.method=dpo", "preference.beta=0.5"],
        ["preference.method=dpo", "preference.loss_type=ipo"],
        ["preference.method=dpo", "preference.label_smoothing=0.1"],
        ["preference.method=kto", "preference.desirable_weight=2"],
        ["preference.method=kto", "preference.undesirable_weight=2"],
    ] {
        let changed = set_text(&with).unwrap();
        assert_ne!(set_text(&with[..1]).unwrap(), changed, "{with:?}");
        assert_eq!(changed, run(&changed.resolved(), &[]).unwrap(), "{with:?}");
        seen.insert(with[1].split('=').next().unwrap().to_owned());
    }
    let grpo = ["preference.method=grpo", "preference.reward=exact_match"];
    seen.insert("preference.reward".into());
    for changed in [
        "preference.reward=['python3', 'reward.py']",
        "preference.reward_timeout=5",
        "preference.num_generations=4",
        "preference.max_completion_length=32",
        "preference.temperature=0.7",
        "preference.top_k=50",
        "preference.top_p=0.9",
        "preference.scale_rewards=batch",
        "preference.loss_type=dr_grpo",
        "preference.beta=0.04",
    ] {
        let after = set_text(&[grpo[0], grpo[1], changed]).unwrap();
        assert_ne!(set_text(&grpo).unwrap(), after, "{changed}");
        assert_eq!(after, run(&after.resolved(), &[]).unwrap(), "{changed}");
        seen.insert(changed.split('=').next().unwrap().to_owned());
    }
    let known = known().into_iter().map(|(section, name)| format!("{section}.{name}")).collect();
    assert_eq!(seen, known, "every key stands in EVERY_KEY or WITH_OTHERS");
}

#[test]
fn a_job_is_about_images_or_about_texts() {
    for (arguments, expected) in [
        (&["data.flip=true"][..], "`data.flip` has no effect with text.path"),
        (&["sample.prompts=['a']"], "`sample.prompts` has no effect with text.path"),
        (&["train.weighting_scheme=mode"], "`train.weighting_scheme` has no effect with [text]"),
        (&["base.quantise_encoders=nf4"], "`base.quantise_encoders` has no effect with [text]"),
        (&["generate.every=5"], "`generate.every` has no effect with generate.prompts = []"),
        (&["train.validate_every=5"], "`train.validate_every` has no effect with text.validation"),
        (
            &["preference.method=orpo", "preference.loss_type=ipo"],
            "`preference.loss_type` has no effect with preference.method = \"orpo\"",
        ),
        (
            &["preference.method=dpo", "preference.desirable_weight=2"],
            "`preference.desirable_weight` has no effect with preference.method = \"dpo\"",
        ),
        (
            &[
                "preference.method=dpo",
                "preference.loss_type=ipo",
                "preference.label_smoothing=0.1",
            ],
            "`preference.label_smoothing` has no effect with preference.loss_type = \"ipo\"",
        ),
        (
            &["preference.method=dpo", "preference.num_generations=4"],
            "`preference.num_generations` has no effect with preference.method = \"dpo\"",
        ),
        (
            &[
                "preference.method=grpo",
                "preference.reward=exact_match",
                "preference.loss_type=ipo",
            ],
            "`preference.loss_type` has no effect with preference.method = \"grpo\"",
        ),
        (&["preference.method=grpo"], "`preference.reward` is not set"),
        (
            &["preference.method=grpo", "preference.reward=magic"],
            "`preference.reward` is \"magic\", accepted is exact_match",
        ),
        (
            &["preference.method=dpo", "preference.beta=0"],
            "`preference.beta = 0` is not possible with `preference.method = \"dpo\"`",
        ),
        (
            &["preference.method=dpo", "compress.layers=3"],
            "`preference.method` has no effect with [compress]",
        ),
        (
            &["compress.temperature=2"],
            "`compress.temperature` has no effect with compress.estimator = \"reinforce\"",
        ),
        (
            &["compress.select=stride", "compress.discount=0.5"],
            "`compress.discount` has no effect with compress.select = \"stride\"",
        ),
        (
            &["compress.select=all", "compress.keep_one_in=3"],
            "`compress.keep_one_in` has no effect with compress.select = \"all\"",
        ),
    ] {
        let said = set_text(arguments).unwrap_err().to_string();
        assert!(said.starts_with(expected), "{said}");
    }
    let targets = set_text(&[]).unwrap().adapter.targets;
    assert_eq!(targets[0].pattern, "q_proj");
    assert!(set_text(&["adapter.targets=['a']"]).unwrap().adapter.targets[0].pattern == "a");
}

#[test]
fn a_resolved_job_means_the_same() {
    let more: &[&[&str]] = &[
        &[],
        &["train.weighting_scheme=mode", "train.mode_scale=0.5"],
        &["train.loss=pseudo_huber", "train.huber_schedule=exponential", "train.huber_c=0.2"],
        &["train.loss_weighting=min_snr", "train.min_snr_gamma=1"],
        &["train.timestep_bias=range", "train.timestep_bias_end=300"],
        &["data.validation=4"],
        &["data.validation=4", "optimizer.lr_scheduler=plateau"],
        &["optimizer.lr_scheduler=wsd", "optimizer.decay=0.1"],
        &["optimizer.kind=muon"],
        &["optimizer.kind=lion"],
        &["optimizer.kind=adafactor"],
        &["optimizer.kind=adamw_schedule_free"],
        &["optimizer.kind=prodigy", "optimizer.d_coef=2"],
        &["data.trigger=\"two\\nlines # \\\"quoted\\\" \\\\ \""],
        &["adapter.pattern=[{match='a'}, {match='b*', rank=2, alpha=0.1}]", "adapter.alpha=3"],
        &["adapter.pattern=[{match='a', learning_rate=1e-3}]", "adapter.rslora=true"],
        &["adapter.kind=loha"],
        &["adapter.kind=lokr", "adapter.full_matrix=true", "adapter.factor=4"],
    ];
    let each = EVERY_KEY.iter().map(std::slice::from_ref);
    for arguments in each.chain(more.iter().copied()) {
        let before = set(arguments).unwrap();
        let after = run(&before.resolved(), &[]).unwrap();
        assert_eq!(before, after, "{}", before.resolved());
    }
}

#[test]
fn a_resolved_job_names_origins() {
    let (_folder, path) = job(&format!("{SHORTEST}[train]\nsteps = 20\n"));
    let mut raw = RawConfig::from_file(&path).unwrap();
    raw.set("adapter.rank=8").unwrap();
    let resolved = raw.resolve().unwrap().resolved();
    for line in [
        "[adapter]".to_owned(),
        "rank = 8 # --set adapter.rank=8".into(),
        "alpha = 8.0 # default".into(),
        format!("steps = 20 # {}:6:9", path.display()),
        "# trigger is not set".into(),
    ] {
        assert!(resolved.lines().any(|other| other == line), "{line} is not in\n{resolved}");
    }
    for idle in ["epochs =", "mode_scale"] {
        assert!(!resolved.contains(idle), "{idle} is in\n{resolved}");
    }
}

#[test]
fn paths_are_relative_to_what_they_are_typed_in() {
    let (folder, path) = job(SHORTEST);
    let mut raw = RawConfig::from_file(&path).unwrap();
    raw.set("data.images=others").unwrap();
    let run = raw.resolve().unwrap();
    assert_eq!(*run.base.path, *folder.path().join("model"));
    assert_eq!(run.output.folder, folder.path().join("output"));
    assert_eq!(
        run.data.images().unwrap().0.common().images,
        std::env::current_dir().unwrap().join("others")
    );
}

#[test]
fn references_are_in_one_folder_or_up_to_four() {
    let folders = |argument: &str| {
        set(&[argument]).map(|run| run.data.images().unwrap().0.common().references.0.clone())
    };
    let here = std::env::current_dir().unwrap();
    assert_eq!(folders("data.references=before").unwrap(), [here.join("before")]);
    let two = folders("data.references=['b', 'a']").unwrap();
    assert_eq!(two, [here.join("b"), here.join("a")]);
    for argument in ["['a', 'b', 'c', 'd', 'e']", "[1]", "['']"] {
        let said = folders(&format!("data.references={argument}")).unwrap_err().to_string();
        assert!(said.contains("`data.references"), "{said}");
    }
}

#[test]
fn what_depends_on_other_keys_is_decided() {
    let targets = |arguments: &[&str]| set(arguments).unwrap().adapter.targets;
    assert!(targets(&[]).iter().all(|target| target.rank == 16 && target.alpha == 16.0));
    assert!(targets(&["adapter.rank=4"]).iter().all(|target| target.alpha == 4.0));
    let own = "adapter.pattern=[{match='x', rank=2}, {match='y'}, {match='z', rank=2, alpha=9}]";
    let sizes: Vec<_> = targets(&["adapter.alpha=5", own])
        .iter()
        .take(4)
        .map(|target| (target.pattern.clone(), target.rank, target.alpha))
        .collect();
    let expected = [("x", 2, 2.0), ("y", 16, 5.0), ("z", 2, 9.0), ("attn.to_q", 16, 5.0)];
    assert_eq!(sizes, expected.map(|(name, rank, alpha)| (name.to_owned(), rank, alpha)));

    let scheme = |arguments: &[&str]| set(arguments).unwrap().train.weighting_scheme;
    assert_eq!(scheme(&[]), WeightingScheme::LogitNormal { mean: 0.0, deviation: 1.0 });
    assert_eq!(scheme(&["train.weighting_scheme=mode"]), WeightingScheme::Mode { scale: 1.29 });
    assert_eq!(set(&["adapter.kind=dora"]).unwrap().adapter.targets[0].form, AdapterForm::Dora);
    assert_eq!(set(&["adapter.kind=dora"]).unwrap().adapter.kind, AdapterKind::Dora);
    let empty = set(&["train.timestep_min=500", "train.timestep_max=400"]).unwrap_err().to_string();
    let expected =
        "`train.timestep_min = 500.0` is not possible with `train.timestep_max = 400.0`: ";
    assert!(empty.starts_with(expected), "{empty}");
    let lokr = set(&["adapter.kind=lokr", "adapter.factor=8"]).unwrap();
    let shape = LokrShape { factor: Some(8), ..LokrShape::default() };
    assert_eq!(lokr.adapter.targets[0].form, AdapterForm::Lokr(shape));
    let stabilised = set(&["adapter.rank=16", "adapter.alpha=2", "adapter.rslora=true"]).unwrap();
    assert_eq!(stabilised.adapter.targets[0].alpha, 8.0);
}

/// Words stand for layers, alone or in a list; who typed only words is not told of layers that learn nothing.
#[test]
fn targets_may_be_words() {
    let patterns = |arguments: &[&str]| -> Vec<String> {
        let targets = set(arguments).unwrap().adapter.targets;
        targets.into_iter().map(|target| target.pattern).collect()
    };
    let all = patterns(&["adapter.targets=all"]);
    assert_eq!(patterns(&["adapter.targets=['all']"]), all);
    assert!(all.contains(&"ff.net.2".to_owned()) && !all.contains(&"norm1.linear".to_owned()));
    assert!(patterns(&["adapter.targets=kohya"]).contains(&"norm1.linear".to_owned()));
    let mixed = patterns(&["adapter.targets=['ff.net.2', 'attention', 'all', 'x']"]);
    assert_eq!((mixed.len(), &mixed[0][..], &mixed[12][..]), (all.len() + 1, "ff.net.2", "x"));
    assert_eq!(patterns(&["adapter.targets=to_q"]), ["to_q"]);
    let exclude = |arguments: &[&str]| set(arguments).unwrap().adapter.exclude;
    assert_eq!(exclude(&["adapter.targets=all"]), ["unused"]);
    assert!(exclude(&["adapter.targets=['all', 'x']"]).is_empty());
    let resolved = set(&["adapter.targets=attention"]).unwrap().resolved();
    assert!(resolved.contains("attn*.to_q"), "{resolved}");
    let text = set_text(&["adapter.targets=attention"]).unwrap().adapter.targets;
    assert_eq!(text.len(), 4);
    let said = set_text(&["adapter.targets=kohya"]).unwrap_err().to_string();
    let accepted = "accepted is for this model attention, all or names of layers";
    assert!(said.starts_with(&format!("`adapter.targets` is \"kohya\", {accepted}")), "{said}");
}

#[test]
fn text_encoders_have_learning_rates_of_their_own() {
    let factors = |rates: &str| {
        let rates = format!("adapter.text_encoder_learning_rate={rates}");
        let own = ["adapter.text_encoders=['clip-l', 'clip-g']", "optimizer.learning_rate=1e-4"];
        let adapter = set(&[&own[..], &[&rates]].concat()).unwrap().adapter;
        let rate = |own: &EncoderAdapter| (own.name.clone(), own.targets[0].rate_factors[0]);
        adapter.text_encoders.iter().map(rate).collect::<Vec<_>>()
    };
    let both = |[l, g]: [f32; 2]| vec![("clip-l".to_owned(), l), ("clip-g".to_owned(), g)];
    assert_eq!(factors("5e-5"), both([0.5, 0.5]));
    assert_eq!(factors("[5e-5, 2e-4]"), both([0.5, 2.0]));
}

#[test]
fn the_command_line_stands_above_the_file() {
    let length = |text: &str, arguments: &[&str]| {
        run(&format!("{SHORTEST}[train]\n{text}"), arguments).unwrap().train.length
    };
    assert_eq!(length("", &[]), TrainLength::Steps(1000));
    assert_eq!(length("steps = 5", &["train.steps=6"]), TrainLength::Steps(6));
    assert_eq!(length("steps = 5", &["train.epochs=2"]), TrainLength::Epochs(2));
    assert_eq!(length("epochs = 5", &["train.steps=6"]), TrainLength::Steps(6));
}

#[test]
fn a_flag_is_a_value_with_its_origin() {
    let mut raw = RawConfig::empty();
    raw.flag_path("--base", "base.path", Path::new("unset")).unwrap();
    raw.flag_path("--images", "data.images", Path::new("a = b")).unwrap();
    raw.flag("--lr", "optimizer.learning_rate", "3e-4").unwrap();
    let run = raw.clone().resolve().unwrap();
    assert_eq!(run.optimizer.learning_rate, 3e-4);
    assert!(
        run.base.path.ends_with("unset")
            && run.data.images().unwrap().0.common().images.ends_with("a = b")
    );
    let resolved = run.resolved();
    assert!(resolved.contains("learning_rate = 0.0003 # --lr 3e-4\n"), "{resolved}");
    let wrong = raw.clone().flag("--steps", "train.steps", "0").unwrap_err();
    assert_eq!(
        wrong.to_string(),
        "`train.steps` is 0, accepted is a whole number, at least 1: --steps 0"
    );
    for again in ["optimizer.learning_rate=1", "optimizer.learning_rate=unset"] {
        let twice = raw.clone().set(again).unwrap_err();
        let said = format!("`optimizer.learning_rate` is set twice: --lr 3e-4, --set {again}");
        assert_eq!(twice.to_string(), said);
    }
}

/// A published model's name tells its family, and so does a folder; what nobody typed is then the family's.
#[test]
fn what_nobody_typed_is_the_familys_default() {
    let of_sd3 = set(&["base.path=stable-diffusion-3.5-medium", "train.logit_mean=0.5"]).unwrap();
    for key in [
        "sample.steps",
        "sample.guidance_scale",
        "sample.size",
        "train.weighting_scheme",
        "adapter.targets",
    ] {
        let origin = of_sd3.origin(key).unwrap();
        assert_eq!(origin.to_string(), "sd3's default", "{key}");
        assert!(of_sd3.is_free(key), "{key}");
    }
    assert_eq!(
        of_sd3.train.weighting_scheme,
        WeightingScheme::LogitNormal { mean: 0.5, deviation: 1.0 }
    );
    let resolved = of_sd3.resolved();
    assert!(resolved.contains("steps = 28 # sd3's default\n"), "{resolved}");
    let unknown = set(&[]).unwrap();
    assert_eq!(unknown.origin("sample.steps"), Some(&ValueOrigin::Default));
    let typed = set(&["base.path=stable-diffusion-3.5-medium", "sample.steps=9"]).unwrap();
    let (_, sample) = typed.data.images().unwrap();
    assert_eq!(sample.steps, 9);
}

/// FLUX.1 dev takes a guidance scale as an input, schnell takes none, and SD3 has classifier-free guidance.
#[test]
fn a_scale_that_the_base_has_no_use_for_is_refused() {
    let of = |base: &str, more: &[&str]| set(&[&[base], more].concat());
    let (dev, schnell) = ("base.path=FLUX.1-dev", "base.path=FLUX.1-schnell");
    let sampling = |base| {
        let config = of(base, &[]).unwrap();
        let (_, sample) = config.data.images().unwrap();
        (sample.steps, config.train.guidance_scale)
    };
    assert_eq!(sampling(dev), (28, Some(1.0)));
    assert_eq!(sampling(schnell).0, 4);
    assert_eq!(of(dev, &["train.guidance_scale=3.5"]).unwrap().train.guidance_scale, Some(3.5));
    for (base, key, found) in [
        (schnell, "train.guidance_scale=3.5", "a FLUX.1 schnell base"),
        (schnell, "sample.guidance_scale=3.5", "a FLUX.1 schnell base"),
        ("base.path=stable-diffusion-3.5-medium", "train.guidance_scale=3.5", "an SD3 base"),
        ("base.path=stable-diffusion-3.5-medium", "sample.true_cfg_scale=2", "an SD3 base"),
        ("base.path=stable-diffusion-3.5-medium", "data.frames=81", "an SD3 base"),
        (schnell, "data.segments=2", "a FLUX.1 schnell base"),
    ] {
        let said = of(base, &[key]).unwrap_err().to_string();
        assert!(said.contains(&format!("has no effect with {found}")), "{said}");
    }
}

#[test]
fn a_key_can_be_unset() {
    let text = format!("{SHORTEST}validation = 2\ntrigger = 'x'\n[train]\nsteps = 5\n");
    let plain = run(SHORTEST, &[]).unwrap();
    let all = ["data.validation=unset", "data.trigger = unset ", "train.steps=unset"];
    let unset = run(&text, &all).unwrap();
    assert_eq!(unset.train.length, plain.train.length);
    assert_eq!(unset.origin("train.steps"), Some(&ValueOrigin::Default));
    let data = unset.data.images().unwrap().0.common();
    assert_eq!((data.validation, &data.trigger), (ValidationSplit::None, &None));
    // The last counts, and what is quoted is text.
    let steps = run(&text, &["train.steps=unset", "train.steps=7"]).unwrap();
    assert_eq!(steps.train.length, TrainLength::Steps(7));
    let word = run(&text, &["data.trigger=\"unset\""]).unwrap();
    assert_eq!(word.data.images().unwrap().0.common().trigger.as_deref(), Some("unset"));
    let said = |argument: &str| run(&text, &[argument]).unwrap_err().to_string();
    assert_eq!(said("data.images=unset"), "`data.images` is not set");
    assert!(said("data.imags=unset").contains("did you mean `data.images`?"));
    assert!(said("data=unset").contains("accepted is a table of keys"));
}

/// What is typed into a file after the shortest job (4 lines), and what is said about it.
const REFUSED: &[(&str, &str)] = &[
    ("[train]\nstepps = 1", "unknown key `train.stepps`, did you mean `train.steps`?: JOB:6:1"),
    // The first of two mistakes.
    (
        "[train]\nstepps = 1\nbatsh = 1",
        "unknown key `train.stepps`, did you mean `train.steps`?: JOB:6:1",
    ),
    ("[train]\n  rank = 1", "unknown key `train.rank`, `rank` belongs to [adapter]: JOB:6:3"),
    (
        "[adapter]\nseed = 1",
        "unknown key `adapter.seed`, `seed` belongs to [train] or [sample] or [generate]: JOB:6:1",
    ),
    (
        "[train]\nlearning_rat = 1",
        "unknown key `train.learning_rat`, did you mean `optimizer.learning_rate`?: JOB:6:1",
    ),
    (
        "[sample]\nxxxxxxx = 1",
        "unknown key `sample.xxxxxxx`, [sample] has prompts, references, every, size, frames, steps, guidance_scale, true_cfg_scale, seed, \
         negative_prompt: JOB:6:1",
    ),
    ("[trian]\nsteps = 1", "unknown key `trian`, did you mean `[train]`?: JOB:5:2"),
    (
        "[xxxxxxxxxx]",
        "unknown key `xxxxxxxxxx`, a job has [base], [data], [text], [compress], [preference], [adapter], [train], \
         [optimizer], [sample], [generate], [machine], [cluster], [output]: JOB:5:2",
    ),
    (
        "[[adapter.pattern]]\nmatch = 'x'\nrankk = 1",
        "unknown key `adapter.pattern[0].rankk`, did you mean `adapter.pattern[0].rank`?: JOB:7:1",
    ),
    ("[[adapter.pattern]]\nrank = 1", "`adapter.pattern[0].match` is not set"),
    (
        "[train]\nrecompute = 'blok'",
        "`train.recompute` is 'blok', accepted is one of none, queries, alternate, keep_attention, block, did you mean \
         `block`?: JOB:6:13",
    ),
    (
        "[output]\nformats = ['peft', 'kohia']",
        "`output.formats[1]` is 'kohia', accepted is one of diffusers, peft, kohya, comfyui, did \
         you mean `kohya`?: JOB:6:20",
    ),
    (
        "[train]\nsteps = 'many'",
        "`train.steps` is 'many', accepted is a whole number, at least 1: JOB:6:9",
    ),
    ("[train]\nsteps = 0", "`train.steps` is 0, accepted is a whole number, at least 1: JOB:6:9"),
    ("[train]\nsteps = -1", "`train.steps` is -1, accepted is a whole number, at least 1: JOB:6:9"),
    (
        "[train]\nmax_grad_norm = nan",
        "`train.max_grad_norm` is nan, accepted is off or a number, above 0: JOB:6:17",
    ),
    (
        "[train]\nema = 1.0",
        "`train.ema` is 1.0, accepted is off or a number, 0 to below 1: JOB:6:7",
    ),
    ("[data]", "not TOML: duplicate key: JOB:5:2"),
    (
        "[optimizer]\nbetas = [0.9, 1]",
        "`optimizer.betas` is [0.9, 1], accepted is a list of two numbers, 0 to below 1: JOB:6:9",
    ),
    (
        "[sample]\nsize = [512, 500]",
        "`sample.size` is [512, 500], accepted is a whole number, or [width, height], a multiple \
         of 16, at most 8192: JOB:6:8",
    ),
    (
        "[output]\nname = 'a/b'",
        "`output.name` is 'a/b', accepted is a file name without / \\ : * ? \" < >: JOB:6:8",
    ),
    (
        "[output]\nformats = []",
        "`output.formats` is [], accepted is a list of diffusers, peft, kohya, comfyui, not empty: \
         JOB:6:11",
    ),
    (
        "bucket_step = 20",
        "`data.bucket_step` is 20, accepted is a whole number, a multiple of 16, at most 1024: \
         JOB:5:15",
    ),
    (
        "[train]\nsteps = 1\nepochs = 1",
        "`train.steps` and `train.epochs` exclude each other: JOB:6:9, JOB:7:10",
    ),
    (
        "[train]\nweighting_scheme = 'uniform'\nlogit_mean = 1",
        "`train.logit_mean` has no effect with train.weighting_scheme = \"uniform\": JOB:7:14",
    ),
    (
        "[train]\nstop_after_plateau = 3",
        "`train.stop_after_plateau` has no effect with data.validation = 0: JOB:6:22",
    ),
    ("[sample]\nevery = 3", "`sample.every` has no effect with sample.prompts = []: JOB:6:9"),
    ("rest = 1", "unknown key `data.rest`, `rest` belongs to [base]: JOB:5:1"),
    (
        "[output]\nfolder = '~/x'",
        "`output.folder` is '~/x', accepted is a path without ~, which only a shell knows: \
         JOB:6:10",
    ),
    (
        "[train.steps]\nx = 1",
        "`train.steps` is a table, accepted is a whole number, at least 1: JOB:5:1",
    ),
    ("[[train]]\nsteps = 1", "`train` is [[train]], accepted is a table of keys: JOB:5:1"),
    (
        "[train]\nsteps = ",
        "not TOML: string values must be quoted, expected literal string: JOB:6:9",
    ),
    (
        "[train]\nsteps = 1979-05-27",
        "`train.steps` is 1979-05-27, accepted is a whole number, at least 1: JOB:6:9",
    ),
    (
        "[train]\nsteps = 99999999999999999999",
        "`train.steps` is 99999999999999999999, accepted is a whole number, at least 1: \
         JOB:6:9",
    ),
    ("[sample]\nnegative_prompt = 5", "`sample.negative_prompt` is 5, accepted is text: JOB:6:19"),
    ("[sample]\nprompts = [\n'a',\n5]", "`sample.prompts[1]` is 5, accepted is text: JOB:8:1"),
    (
        "[adapter]\ntext_encoders = ['clip-l']\ntext_encoder_learning_rate = [1e-5, 2e-5]",
        "`adapter.text_encoder_learning_rate` is [1e-5, 2e-5], accepted is a number, or a list of 1, as many as \
         adapter.text_encoders has: JOB:7:30",
    ),
    ("[adapter]\npattern = 5", "`adapter.pattern` is 5, accepted is a list of tables: JOB:6:11"),
    (
        "[adapter]\npattern = [5]",
        "`adapter.pattern[0]` is 5, accepted is a table of keys: JOB:6:12",
    ),
    (
        "[[adapter.pattern]]\nmatch = 'x'\n[[adapter.pattern]]\nmatch = 'x'\nrank = 0",
        "`adapter.pattern[1].rank` is 0, accepted is a whole number, 1 to 4096: JOB:9:8",
    ),
    ("[adapter]\ntargets = []", "`adapter.targets` is not set"),
    (
        "[adapter]\ntargets = [1]",
        "`adapter.targets` is [1], accepted is a text or a list of texts: JOB:6:11",
    ),
    (
        "[adapter]\nalpha = 1e9",
        "`adapter.alpha` is 1e9, accepted is a number, above 0, at most 65536: JOB:6:9",
    ),
    (
        "[optimizer]\nlearning_rate = 50",
        "`optimizer.learning_rate` is 50, accepted is a number, above 0, at most 10: JOB:6:17",
    ),
    (
        "[sample]\nguidance_scale = -3",
        "`sample.guidance_scale` is -3, accepted is a number, 0 to 100: JOB:6:18",
    ),
];

/// The same for the command line.
const REFUSED_ARGUMENTS: &[(&str, &str)] = &[
    ("train.steps", "`train.steps` sets nothing, accepted is key=value"),
    (
        "train.stepps=2",
        "unknown key `train.stepps`, did you mean `train.steps`?: --set train.stepps=2",
    ),
    ("rank=2", "unknown key `rank`, `rank` belongs to [adapter]: --set rank=2"),
    (
        "train.steps=many",
        "`train.steps` is \"many\", accepted is a whole number, at least 1: --set train.steps=many",
    ),
    (
        "train.steps=1.5",
        "`train.steps` is 1.5, accepted is a whole number, at least 1: --set train.steps=1.5",
    ),
    (
        "data.validation=1.5",
        "`data.validation` is 1.5, accepted is a whole number, or a share below 1: --set \
         data.validation=1.5",
    ),
    ("name=2", "unknown key `name`, `name` belongs to [output]: --set name=2"),
    (
        "=2",
        "not TOML: unquoted keys cannot be empty, expected letters, numbers, `-`, `_`: \
         --set =2",
    ),
    ("a b=2", "not TOML: key with no value, expected `=`: --set a b=2"),
    (
        "train.steps.x=2",
        "`train.steps` is a table, accepted is a whole number, at least 1: --set \
         train.steps.x=2",
    ),
    (
        "sample.prompts=[a, b]",
        "not TOML: string values must be quoted, expected literal string: --set \
         sample.prompts=[a, b]",
    ),
    ("output.name=\"x", "not TOML: invalid basic string, expected `\"`: --set output.name=\"x"),
    ("data.trigger=", "`data.trigger` is \"\", accepted is text, not empty: --set data.trigger="),
    ("train=1", "`train` is 1, accepted is a table of keys: --set train=1"),
];

#[test]
fn mistakes_are_explained() {
    for (typed, expected) in REFUSED {
        let (_folder, path) = job(&format!("{SHORTEST}{typed}\n"));
        let error = RawConfig::from_file(&path).and_then(RawConfig::resolve).unwrap_err();
        let said = error.to_string().replace(&path.display().to_string(), "JOB");
        assert_eq!(said, *expected, "{typed}");
    }
    for (argument, expected) in REFUSED_ARGUMENTS {
        assert_eq!(set(&[argument]).unwrap_err().to_string(), *expected);
    }
    let missing = RawConfig::empty().resolve().unwrap_err();
    assert_eq!(missing.to_string(), "`base.path` is not set");
}

#[test]
fn no_text_is_too_broken_to_be_refused() {
    let text = set(VARIED).unwrap().resolved();
    let form = || ConfigSourceKind::File("job.toml".into());
    for at in (0..text.len()).step_by(4).filter(|at| text.is_char_boundary(*at)) {
        for broken in [text[..at].to_owned(), format!("{}\"[=é{}", &text[..at], &text[at..])] {
            let mut raw = RawConfig::empty();
            let source = ConfigSource {
                text: broken,
                folder: PathBuf::new(),
                kind: form(),
                is_written_by_hearth: false,
            };
            // Either is fine; it must only not panic.
            let _ = raw.read(&source).and_then(|()| raw.resolve());
        }
    }
}

#[test]
fn errors_have_hints_and_causes() {
    let error = RawConfig::from_file(Path::new("nowhere.toml")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read job nowhere.toml");
    assert!(error.source().is_some());
    assert_eq!(error.hint(), TrainerError::from(error).hint());
}

#[test]
fn defaults_are_within_their_bounds() {
    for (section, keys) in SECTIONS {
        for Key { name, default, .. } in keys() {
            // Typing a value checks its bound; what it means beside others is no matter here.
            if let KeyDefault::Default(value) = default
                && !value.is_empty()
            {
                RawConfig::empty().set(&format!("{section}.{name}={value}")).unwrap();
            }
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_reference_is_up_to_date() {
    expect_file![root().join("docs/config.md")].assert_eq(&reference());
}

#[test]
fn recipes_are_jobs() {
    let mut n_recipes = 0;
    for entry in fs::read_dir(root().join("recipes")).unwrap() {
        let path = entry.unwrap().path();
        let run = RawConfig::from_file(&path).and_then(RawConfig::resolve);
        let run = run.unwrap_or_else(|error| panic!("{error}"));
        let is_named = weights::hub::HubPath::of(&run.base.path).is_some();
        let is_local = run.base.path.starts_with(root().canonicalize().unwrap());
        assert!(is_named || is_local, "{:?}", run.base.path);
        n_recipes += 1;
    }
    assert!(n_recipes > 1);
}

#[test]
fn an_old_name_is_an_error_that_tells_the_new_one() {
    for (was, now) in RENAMED {
        let (what, line) = match (was.contains('='), was.contains('.')) {
            (true, _) => ("value", was.to_owned()),
            (false, true) => ("key", format!("{was} = 1")),
            (false, false) => ("section", format!("{was}.every = 1")),
        };
        let said = |error: ConfigError| (error.to_string(), error.hint().into_owned());
        let hint = format!("it is called `{now}` now");
        let (_folder, path) = job(&line);
        let (text, remedy) = said(RawConfig::from_file(&path).unwrap_err());
        let place = format!("unknown {what} `{was}`: {}:1:", path.display());
        assert!(text.starts_with(&place), "{text}");
        assert_eq!(remedy, hint);
        let argument = line.replace(" = ", "=");
        let (text, remedy) = said(RawConfig::empty().set(&argument).unwrap_err());
        assert_eq!(text, format!("unknown {what} `{was}`: --set {argument}"));
        assert_eq!(remedy, hint);
        // There is what it is called now, and it is not taken for something old.
        assert!(RENAMED.iter().all(|(other, _)| *other != now), "{now}");
        let is_key =
            |(section, key): &(&str, &str)| format!("{section}.{key}") == now || *section == now;
        assert!(what == "value" || known().iter().any(is_key), "{now}");
    }
}

#[test]
fn a_job_that_hearth_wrote_is_read_by_its_old_names() {
    const IMAGES: &str = "
[base]
path = \"/model\"
[data]
images = \"/images\"
[train]
batch = 2
accumulation = 3
scheme = \"logit_normal\"
logit_deviation = 2.0
clip = 0.5
[optimizer]
schedule = \"cosine\"
warmup = 7
[sample]
guidance = 3.0
negative = \"blurry\"
[machine]
stream = \"blocks\"
";
    const TEXTS: &str = "
[base]
path = \"/model\"
fresh = true
[text]
path = \"/texts\"
[adapter]
kind = \"none\"
[writing]
seed = 7
";
    let old = |text: &str| {
        let text = format!("{HEADER}\n{text}");
        RawConfig::from_text(&text, Path::new("/run/config.toml")).and_then(RawConfig::resolve)
    };
    let new = [
        "train.batch_size=2",
        "train.gradient_accumulation=3",
        "train.weighting_scheme=logit_normal",
        "train.logit_std=2",
        "train.max_grad_norm=0.5",
        "optimizer.lr_scheduler=cosine",
        "optimizer.warmup_steps=7",
        "sample.guidance_scale=3",
        "sample.negative_prompt=blurry",
        "machine.offload=blocks",
        "output.folder=/run/output",
    ];
    let paths = ["base.path=/model", "data.images=/images"];
    assert_eq!(old(IMAGES).unwrap(), set(&[&new[..], &paths].concat()).unwrap());
    let new =
        ["base.path=/model", "text.path=/texts", "adapter.kind=full", "base.random_init=true"];
    let new = [&new[..], &["generate.seed=7", "output.folder=/run/output"]].concat();
    assert_eq!(old(TEXTS).unwrap(), set_text(&new).unwrap());
    let lines: Vec<&str> = IMAGES.lines().chain(TEXTS.lines()).collect();
    for (was, _) in RENAMED {
        let name = was.rsplit('.').next().unwrap();
        let has = |line: &&str| line.starts_with(name) || *line == format!("[{name}]");
        assert!(lines.iter().any(has), "{was} is not in the jobs of this test");
    }
}

#[test]
fn settings_of_an_old_checkpoint_are_compared_under_new_names() {
    for (key, value, new_key, new_value) in [
        ("train.clip", "1.0", "train.max_grad_norm", "1.0"),
        ("adapter.kind", "\"none\"", "adapter.kind", "\"full\""),
        ("writing.every", "\"off\"", "generate.every", "\"off\""),
        ("base.quantise", "\"none\"", "base.quantise", "\"none\""),
        ("adapter.rank", "8", "adapter.rank", "8"),
    ] {
        let expected = (new_key.to_owned(), new_value.to_owned());
        assert_eq!(renamed::under_new_names(key, value), expected);
    }
}

#[test]
fn a_model_may_be_named_where_a_path_is() {
    let named = |value: &str| set(&[&format!("base.path={value}")]).unwrap().base.path;
    let snapshot =
        |path: &ModelPath| weights::hub::HubPath::of(path).map(|it| it.short_name().to_string());
    assert_eq!(snapshot(&named("hf:owner/name")).as_deref(), Some("owner/name"));
    assert_eq!(snapshot(&named("owner/name@v1")).as_deref(), Some("owner/name@v1"));
    assert_eq!(snapshot(&named("src/config")), None, "a folder of that name is here");
    assert_eq!(snapshot(&named("./owner/name")), None);
    let refused = set(&["base.path=hf:name"]).unwrap_err().to_string();
    assert!(refused.contains("OWNER/NAME"), "{refused}");
    let parts = set(&["base.path=x.safetensors", "base.vae=hf:owner/name/ae.safetensors"]).unwrap();
    assert!(parts.base.vae.unwrap().ends_with("models--owner--name/snapshots/main/ae.safetensors"));
}
