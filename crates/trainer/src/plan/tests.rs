//! Plans of the tiny model: never above the limit, never worse with more memory, and what is said
//! where nothing fits.

use std::path::Path;

use compute::Kind;
use machine::{Machine, Recording, Source};

use super::*;
use crate::config::RawConfig;
use crate::data::Bucket;
use crate::model::sd3::pipeline::Pipeline;
use crate::train::pictures::Drawing;

/// Two sizes, the larger one rare.
fn outlook() -> Outlook<Bucket> {
    let counts: Counts<Bucket> = [([64, 64], 10), ([96, 64], 3)]
        .map(|([width, height], shown)| (Bucket { width, height }, shown))
        .into();
    Outlook {
        train: counts.clone(),
        held_out: counts,
        // Beside a model so small, what the program holds while it encodes would decide.
        to_encode: Counts::new(),
        has_texts: false,
        is_nominal: false,
    }
}

/// Those of a processor that nobody measured.
fn documented() -> Rates {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../machines/xeon-2-core.toml");
    let machine = Machine::probe(&mut Source::replay(Recording::load(&path).unwrap()));
    Rates::documented(&machine, Kind::cpu(2))
}

struct Place {
    pipeline: Pipeline,
    config: RunConfig,
    outlook: Outlook<Bucket>,
    rates: Rates,
}

impl Place {
    fn new(settings: &[&str]) -> Self {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/pipeline");
        let mut raw = RawConfig::empty();
        raw.set_path("base.path", &golden).unwrap();
        let fixed = ["data.images=pictures", "data.bucket_step=32", "data.resolution=64"];
        for setting in fixed.iter().chain(&["train.batch=4"]).chain(settings) {
            raw.set(setting).unwrap();
        }
        Self {
            pipeline: Pipeline::open(&golden, None).unwrap(),
            config: raw.resolve().unwrap(),
            outlook: outlook(),
            rates: documented(),
        }
    }

    /// With so many bytes for the arena.
    fn plan(&self, arena_bytes: usize) -> Result<Plan> {
        let Self { pipeline, config, outlook, rates } = self;
        let lesson = &Drawing::of(config, pipeline)?;
        let host_bytes = host::program_bytes(2) + lesson.host_bytes(config, outlook);
        let limit_bytes = arena_bytes + host_bytes;
        let room = Room { kind: Kind::cpu(2), limit_bytes, rates };
        choose(Job { lesson, config, outlook }, room)
    }

    /// Bytes that are enough for anything.
    fn plenty(&self) -> usize {
        self.plan(usize::MAX / 4).unwrap().peak_bytes()
    }
}

/// From good to bad.
fn rank(config: &RunConfig, choice: &Choice) -> usize {
    let all = precisions(config);
    let of = Precisions { quantise: choice.quantise, optimizer: choice.optimizer };
    all.iter().position(|precisions| *precisions == of).unwrap()
}

#[test]
fn plenty_of_memory_gives_the_fastest_way_in_full_precision() {
    let place = Place::new(&[]);
    let plan = place.plan(usize::MAX / 4).unwrap();
    assert_eq!(plan.choice, Choice { micro_batch: 4, ..Choice::of(&place.config) });
    assert!(plan.runner_up().unwrap().secs >= plan.chosen().unwrap().secs);
}

#[test]
fn more_memory_is_never_worse_and_the_limit_always_holds() {
    let place = Place::new(&[]);
    let plenty = place.plenty();
    let mut before: Option<Plan> = None;
    let mut kinds = Vec::new();
    for limit in (0..=24).map(|n| plenty / 3 + n * plenty / 32) {
        let Ok(plan) = place.plan(limit) else {
            assert!(before.is_none(), "{limit} bytes do not fit, and less did");
            continue;
        };
        assert!(plan.peak_bytes() <= limit, "{} of {limit}", plan.peak_bytes());
        assert_eq!(plan, place.plan(limit).unwrap(), "not the same twice");
        if let Some(before) = &before {
            let [was, is] = [before, &plan].map(|plan| rank(&place.config, &plan.choice));
            assert!(is <= was, "less precise with more memory: {}", plan.choice);
            assert!(is < was || plan.step_secs <= before.step_secs, "slower: {}", plan.choice);
        }
        kinds.push(plan.choice);
        before = Some(plan);
    }
    kinds.dedup();
    assert!(kinds.len() >= 4, "few ways were needed: {kinds:?}");
}

#[test]
fn an_exact_limit_is_enough_and_one_byte_less_is_another_plan() {
    let place = Place::new(&[]);
    let roomy = place.plan(usize::MAX / 4).unwrap();
    let exact = place.plan(roomy.peak_bytes()).unwrap();
    assert_eq!(exact.choice, roomy.choice);
    let tighter = place.plan(roomy.peak_bytes() - 1).unwrap();
    assert_ne!(tighter.choice, roomy.choice);
}

#[test]
fn what_does_not_fit_says_what_is_missing_and_what_would_help() {
    let typed = ["train.micro_batch=4", "train.recompute=none", "base.quantise=none"];
    let place = Place::new(&typed);
    let plenty = place.plenty();
    let error = place.plan(plenty * 9 / 10).unwrap_err();
    let TrainerError::TooLarge { phase, needed, limit, nearest } = &error else {
        panic!("{error}")
    };
    assert_eq!((phase.as_str(), *needed > *limit), ("a step", true), "{error}");
    assert_eq!(nearest.as_deref(), Some("train.micro_batch = 1"), "{error}");
    let error = place.plan(1000).unwrap_err();
    assert!(matches!(error, TrainerError::TooLarge { nearest: None, .. }), "{error}");
}

#[test]
fn what_was_typed_is_kept_at_any_limit() {
    let place = Place::new(&["train.recompute=alternate", "base.quantise=int8"]);
    let plenty = place.plenty();
    for limit in [plenty, plenty - 1, plenty * 8 / 10] {
        let Ok(plan) = place.plan(limit) else { continue };
        assert_eq!(plan.choice.settings()[1].1, "alternate");
        assert_eq!(plan.choice.settings()[2].1, "int8");
    }
}
