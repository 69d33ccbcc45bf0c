//! Plans of the tiny model: never above the limit, never worse with more memory, and hints where nothing fits.

use std::path::Path;

use compute::{Device, DeviceKind};
use machine::{Machine, MachineRecording, ProbeSource};

use super::rates::{CallSizeUnit, RateCurve};
use super::*;
use crate::config::RawConfig;
use crate::data::{Bucket, DecodingNeed, SampleSize, SizeCounts};
use crate::error::{LimitRaise, typed_limit};
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::paths::PartPaths;
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;
use crate::task::session::{BatchPosition, MicroBatchStep, Session};
use crate::train::diffusion::DiffusionTask;

/// Two sizes, the larger one rare.
fn dataset() -> DatasetSummary<SampleSize> {
    let counts: SizeCounts<SampleSize> = [([64, 64], 10), ([96, 64], 3)]
        .map(|([width, height], shown)| (Bucket { width, height }.into(), shown))
        .into();
    DatasetSummary {
        train: counts.clone(),
        held_out: counts,
        // Beside a model so small, what the program holds while it encodes would decide.
        to_encode: SizeCounts::new(),
        references_to_encode: SizeCounts::new(),
        decoding: DecodingNeed::default(),
        n_texts: 0,
        is_nominal: false,
    }
}

/// Those of a CPU that was not measured.
fn documented() -> Rates {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../machines/xeon-2-core.toml");
    let machine = Machine::probe(&mut ProbeSource::replay(MachineRecording::load(&path).unwrap()));
    Rates::documented(&machine, DeviceKind::cpu(2))
}

struct TestJob {
    pipeline: Pipeline,
    config: RunConfig,
    dataset: DatasetSummary<SampleSize>,
    rates: Rates,
}

impl TestJob {
    fn new(settings: &[&str]) -> Self {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/pipeline");
        Self::of(&golden, settings)
    }

    fn of(base: &Path, settings: &[&str]) -> Self {
        let mut raw = RawConfig::empty();
        raw.set_path("base.path", base).unwrap();
        let fixed = ["data.images=images", "data.bucket_step=32", "data.resolution=64"];
        for setting in fixed.iter().chain(&["train.batch_size=4"]).chain(settings) {
            raw.set(setting).unwrap();
        }
        Self {
            pipeline: Pipeline::open(base, &PartPaths::default()).unwrap(),
            config: raw.resolve().unwrap(),
            dataset: dataset(),
            rates: documented(),
        }
    }

    /// With so many bytes for the arena.
    fn plan(&self, arena_bytes: usize) -> Result<Plan> {
        self.plan_raisable(arena_bytes + self.host_bytes(), None)
    }

    /// With so many bytes for all, on a machine that could give more.
    fn plan_raisable(&self, limit_bytes: usize, raisable: Option<RaisableLimit>) -> Result<Plan> {
        let Self { pipeline, config, dataset, rates } = self;
        let task = &DiffusionTask::new(config, pipeline)?;
        let kind = DeviceKind::cpu(2);
        let budget = DeviceBudget { kind, limit_bytes, rates, host_bytes: None, raisable };
        choose(PlanRequest { task, config, dataset }, budget)
    }

    /// What the program holds beside the arena.
    fn host_bytes(&self) -> usize {
        let task = DiffusionTask::new(&self.config, &self.pipeline).unwrap();
        host::program_bytes(2) + task.host_bytes(&self.config, &self.dataset)
    }

    /// With so many bytes of a GPU, and of main memory beside it.
    fn plan_on_gpu(&self, limit_bytes: usize, host_bytes: Option<usize>) -> Result<Plan> {
        let Self { pipeline, config, dataset, rates } = self;
        let task = &DiffusionTask::new(config, pipeline)?;
        let kind = DeviceKind::Cuda { is_deterministic: true };
        choose(
            PlanRequest { task, config, dataset },
            DeviceBudget { kind, limit_bytes, rates, host_bytes, raisable: None },
        )
    }

    /// Bytes that are enough for anything.
    fn plenty(&self) -> usize {
        self.plan(usize::MAX / 4).unwrap().peak_bytes()
    }
}

/// A GPU with memory of its own, on a machine without main memory for blocks.
const NOTHING_BESIDE: Option<usize> = Some(0);

/// From good to bad.
fn rank(config: &RunConfig, choice: &PlanChoice) -> usize {
    let all = precisions(config);
    let PlanChoice { fused_backward_pass: is_fused, quantise, optimizer, .. } = *choice;
    let of = Precisions { is_fused, quantise, optimizer };
    all.iter().position(|precisions| *precisions == of).unwrap()
}

#[test]
fn plenty_of_memory_gives_the_fastest_plan_in_full_precision() {
    let job = TestJob::new(&[]);
    let plan = job.plan(usize::MAX / 4).unwrap();
    assert_eq!(plan.choice, PlanChoice { micro_batch: 4, ..PlanChoice::from_config(&job.config) });
    assert!(plan.runner_up().unwrap().secs >= plan.chosen().unwrap().secs);
}

#[test]
fn more_memory_is_never_worse_and_the_limit_always_holds() {
    let job = TestJob::new(&[]);
    let plenty = job.plenty();
    let mut before: Option<Plan> = None;
    let mut kinds = Vec::new();
    for limit in (0..=24).map(|n| plenty / 3 + n * plenty / 32) {
        let Ok(plan) = job.plan(limit) else {
            assert!(before.is_none(), "{limit} bytes do not fit, and less did");
            continue;
        };
        assert!(plan.peak_bytes() <= limit, "{} of {limit}", plan.peak_bytes());
        assert_eq!(plan, job.plan(limit).unwrap(), "not the same twice");
        if let Some(before) = &before {
            let [was, is] = [before, &plan].map(|plan| rank(&job.config, &plan.choice));
            assert!(is <= was, "less precise with more memory: {}", plan.choice);
            assert!(is < was || plan.step_secs <= before.step_secs, "slower: {}", plan.choice);
        }
        kinds.push(plan.choice);
        before = Some(plan);
    }
    kinds.dedup();
    assert!(kinds.len() >= 4, "few plans were needed: {kinds:?}");
}

#[test]
fn an_exact_limit_is_enough_and_one_byte_less_is_another_plan() {
    let job = TestJob::new(&[]);
    let roomy = job.plan(usize::MAX / 4).unwrap();
    let exact = job.plan(roomy.peak_bytes()).unwrap();
    assert_eq!(exact.choice, roomy.choice);
    let tighter = job.plan(roomy.peak_bytes() - 1).unwrap();
    assert_ne!(tighter.choice, roomy.choice);
}

#[test]
fn a_job_that_does_not_fit_names_a_change_that_would() {
    let typed = ["train.micro_batch=4", "train.recompute=none", "base.quantise=none"];
    let job = TestJob::new(&typed);
    let plenty = job.plenty();
    let error = job.plan(plenty * 9 / 10).unwrap_err();
    let TrainerError::TooLarge { phase, needed, limit, remedy: Some(remedy) } = &error else {
        panic!("{error}")
    };
    assert_eq!((phase.as_str(), *needed > *limit), ("train 96x64", true), "{error}");
    assert_eq!((remedy.change.as_str(), remedy.fits), ("train.micro_batch = 1", true), "{error}");
    let hint = error.hint();
    assert!(hint.starts_with("train.micro_batch = 1 needs ") && hint.ends_with("iB"), "{hint}");
}

/// The job with what a hint says.
fn with(settings: &[&str], change: &str) -> TestJob {
    let changes: Vec<String> =
        change.split(" and ").map(|change| change.replace(" = ", "=")).collect();
    let changes = changes.iter().map(String::as_str).filter(|change| !change.is_empty());
    TestJob::new(&settings.iter().copied().chain(changes).collect::<Vec<_>>())
}

/// The change that a hint names fits; where nothing fits, the memory it names is enough, and not much too much:
/// for tensors as small as these some formats take more than a better one.
#[test]
fn a_hint_is_true_at_any_limit() {
    let shown = ["sample.prompts=[\"a fox\"]", "sample.size=96"];
    let typed = ["train.micro_batch=4", "train.recompute=none", "base.quantise=none"];
    let wide = ["base.dtype=f32", "adapter.rank=64", "optimizer.kind=adamw"];
    let full = ["adapter.kind=full", "train.recompute=none"];
    let (mut n_fit, mut n_not) = (0, 0);
    for settings in [&shown[..], &typed, &wide, &full] {
        let job = TestJob::new(settings);
        let plenty = job.plenty();
        for limit in (1..20).step_by(3).map(|n| plenty * n / 20) {
            let Err(error) = job.plan(limit) else { continue };
            let TrainerError::TooLarge { remedy: Some(remedy), .. } = &error else {
                panic!("{settings:?} {limit}: {error}")
            };
            let changed = with(settings, &remedy.change);
            let host_bytes = changed.host_bytes();
            if remedy.fits {
                n_fit += 1;
                let plan = changed.plan(limit).unwrap_or_else(|e| panic!("{error}: {remedy}: {e}"));
                assert!(plan.total_bytes >= remedy.needed, "{remedy}: {}", plan.total_bytes);
            } else {
                n_not += 1;
                changed
                    .plan(remedy.needed - host_bytes)
                    .unwrap_or_else(|e| panic!("{remedy}: {e}"));
                changed.plan((remedy.needed - host_bytes) * 9 / 10).unwrap_err();
            }
        }
    }
    assert!(n_fit > 2 && n_not > 5, "{n_fit} {n_not}");
}

/// The limit that a hint names is enough with the change beside it, and no higher than the machine can give.
#[test]
fn a_limit_that_a_hint_names_is_true() {
    let settings = ["train.micro_batch=4", "train.recompute=none", "base.quantise=none"];
    let job = TestJob::new(&settings);
    let plenty = job.plenty() + job.host_bytes();
    let (mut n_enough, mut n_too_low) = (0, 0);
    for (limit, max) in [(5, 30), (17, 30), (5, 17), (5, 6), (2, 30)] {
        let [limit, max_limit_bytes] = [limit, max].map(|n| plenty * n / 20);
        let raisable = Some(RaisableLimit { default_bytes: limit, max_limit_bytes });
        let error = job.plan_raisable(limit, raisable).unwrap_err();
        let TrainerError::TooLarge { remedy: Some(remedy), .. } = &error else { panic!("{error}") };
        match &remedy.raise {
            LimitRaise::Enough { needed, change, takes_others } => {
                let (typed, words) = typed_limit(*needed);
                assert!(typed <= max_limit_bytes && *takes_others, "{remedy}");
                assert!(error.hint().contains(&format!("--limit {words} with other")), "{remedy}");
                with(&settings, change).plan_raisable(typed, None).unwrap();
                n_enough += 1;
            }
            LimitRaise::TooLow { max_bytes } => {
                assert!(!remedy.fits && remedy.needed > *max_bytes, "{remedy}");
                n_too_low += 1;
            }
            LimitRaise::Unknown => panic!("{remedy}"),
        }
    }
    assert!(n_enough > 0 && n_too_low > 0, "{n_enough} {n_too_low}");
}

#[test]
fn keys_that_were_set_stay_at_any_limit() {
    let job = TestJob::new(&["train.recompute=alternate", "base.quantise=int8"]);
    let plenty = job.plenty();
    for limit in [plenty, plenty - 1, plenty * 8 / 10] {
        let Ok(plan) = job.plan(limit) else { continue };
        assert_eq!(plan.choice.settings()[1].1, "alternate");
        assert_eq!(plan.choice.settings()[3].1, "int8");
    }
}

/// A model of four blocks, so that not all of them are on the device at once.
fn of_blocks(settings: &[&str]) -> TestJob {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    TestJob::of(&demo, &[&["train.batch_size=1"], settings].concat())
}

/// The least that a GPU needs for a job without offloading.
fn least_without(settings: &[&str]) -> usize {
    let smallest = ["machine.offload=none", "train.recompute=block", "base.quantise=none"];
    let smallest = of_blocks(&[&smallest[..], settings].concat());
    smallest.plan_on_gpu(usize::MAX / 4, None).unwrap().peak_bytes()
}

/// The same with a link of so many bytes a second.
fn over(link: f64, settings: &[&str]) -> TestJob {
    let mut job = of_blocks(settings);
    let points = [1.0, 1e12].map(|bytes| (bytes, bytes / link));
    job.rates.curves.insert(rates::LINK.into(), RateCurve::through(CallSizeUnit::Bytes, points));
    job
}

#[test]
fn blocks_are_offloaded_before_precision_is_lost_and_where_that_is_faster() {
    let (typed, host) = (["optimizer.kind=adamw"], Some(usize::MAX / 4));
    let (job, least) = (over(1e5, &typed), least_without(&typed));
    let roomy = job.plan_on_gpu(least, host).unwrap();
    assert_eq!((roomy.choice.offload, roomy.offloaded_bytes), (Offload::None, 0));
    assert_eq!(roomy.choice.recompute, Recompute::Block);
    let faster = over(1e12, &typed).plan_on_gpu(least, host).unwrap();
    assert_eq!(faster.choice.offload, Offload::Blocks);
    assert!(1.1 * faster.step_secs < roomy.step_secs, "{faster:?} {roomy:?}");
    // Without gradient checkpointing there is nothing to gain.
    let much = over(1e12, &typed).plan_on_gpu(usize::MAX / 4, host).unwrap();
    assert_eq!(much.choice.offload, Offload::None);
    let tight = job.plan_on_gpu(least - 1, host).unwrap();
    assert_eq!((tight.choice.offload, tight.choice.quantise), (Offload::Blocks, None));
    assert!(tight.offloaded_bytes > 0 && tight.peak_bytes() < least, "{tight:?}");
    assert_eq!(tight.host_bytes, 0);
    // What does not fit into main memory either loses precision.
    for host in [NOTHING_BESIDE, Some(tight.offloaded_bytes - 1)] {
        let lossy = job.plan_on_gpu(least - 1, host).unwrap();
        assert!(lossy.choice.quantise.is_some(), "{}", lossy.choice);
    }
    let exact = job.plan_on_gpu(least - 1, Some(tight.offloaded_bytes)).unwrap();
    assert_eq!(exact.choice, tight.choice);
}

/// Where a GPU shares main memory, the program and CUDA itself are within the limit.
#[test]
fn a_limit_of_shared_memory_bounds_the_whole_program() {
    let job = TestJob::new(&[]);
    let own = job.plan_on_gpu(usize::MAX / 4, NOTHING_BESIDE).unwrap();
    let shared = job.plan_on_gpu(usize::MAX / 4, None).unwrap();
    assert_eq!((own.host_bytes, own.total_bytes), (0, own.peak_bytes()));
    assert!(shared.host_bytes > 1 << 30, "{}", shared.host_bytes);
    assert!(shared.total_bytes >= shared.training_bytes() + shared.host_bytes);
    let tight = job.plan_on_gpu(shared.total_bytes, None).unwrap();
    assert_eq!((tight.choice, tight.total_bytes), (shared.choice, shared.total_bytes));
    assert!(job.plan_on_gpu(shared.peak_bytes(), None).is_err(), "the arena alone is not enough");
}

#[test]
fn a_backward_pass_is_fused_where_nothing_else_fits() {
    let full = ["adapter.kind=full", "train.recompute=block", "optimizer.kind=adamw"];
    let job = |setting: &str| of_blocks(&[&full[..], &[setting]].concat());
    let [fused, whole] = ["true", "false"].map(|is_fused| {
        let job = job(&format!("train.fused_backward_pass={is_fused}"));
        job.plan_on_gpu(usize::MAX / 4, NOTHING_BESIDE).unwrap().peak_bytes()
    });
    assert!(fused < whole, "{fused} of {whole}");
    let free = of_blocks(&full);
    assert!(!free.plan_on_gpu(whole, NOTHING_BESIDE).unwrap().choice.fused_backward_pass);
    for limit in [whole - 1, fused] {
        let tight = free.plan_on_gpu(limit, NOTHING_BESIDE).unwrap();
        assert!(tight.choice.fused_backward_pass, "{}", tight.choice);
        assert_eq!(tight.peak_bytes(), fused);
    }
    // What keeps it from being fused is named.
    for (setting, expected) in [
        ("train.gradient_accumulation=4", "train.gradient_accumulation = 1"),
        ("train.fused_backward_pass=false", "train.fused_backward_pass = true"),
    ] {
        let error = job(setting).plan_on_gpu(fused, NOTHING_BESIDE).unwrap_err();
        let TrainerError::TooLarge { remedy: Some(remedy), .. } = &error else { panic!("{error}") };
        assert_eq!((remedy.change.as_str(), remedy.fits), (expected, true));
    }
}

#[test]
fn a_key_that_keeps_blocks_on_the_gpu_is_named() {
    let typed = ["machine.offload=none", "base.quantise=none", "optimizer.kind=adamw"];
    let (job, least) = (of_blocks(&typed), least_without(&["optimizer.kind=adamw"]));
    let error = job.plan_on_gpu(least - 1, Some(usize::MAX / 4)).unwrap_err();
    let TrainerError::TooLarge { remedy: Some(remedy), .. } = &error else { panic!("{error}") };
    assert_eq!((remedy.change.as_str(), remedy.fits), ("machine.offload = \"blocks\"", true));
    let error = of_blocks(&["machine.offload=blocks"]).plan_on_gpu(usize::MAX / 4, Some(1000));
    let error = error.unwrap_err();
    let TrainerError::TooLarge { phase, limit: 1000, remedy: Some(remedy), .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(phase, "the model's blocks in main memory");
    assert_eq!((remedy.change.as_str(), remedy.fits), ("machine.offload = \"none\"", true));
}

#[test]
fn on_the_cpu_offloaded_blocks_are_host_memory() {
    let typed = ["train.recompute=none", "base.quantise=none", "optimizer.kind=adamw"];
    let [plain, offloaded] = ["none", "blocks"].map(|offload| {
        let offload = format!("machine.offload={offload}");
        of_blocks(&[&typed[..], &[&offload]].concat()).plan(usize::MAX / 4).unwrap()
    });
    assert_eq!(offloaded.host_bytes, plain.host_bytes + offloaded.offloaded_bytes);
    assert!(offloaded.peak_bytes() < plain.peak_bytes());
    // The same memory holds all blocks, and two of them twice.
    let both = |plan: &Plan| plan.peak_bytes() + plan.host_bytes;
    assert!(both(&offloaded) > both(&plain));
}

/// A step waits only for the part of a copy that computation does not hide.
#[test]
fn a_slow_link_makes_a_step_longer_and_a_fast_one_does_not() {
    let plan = |link| {
        let job = over(link, &["machine.offload=blocks", "train.recompute=none"]);
        job.plan_on_gpu(usize::MAX / 4, Some(usize::MAX / 4)).unwrap()
    };
    let [fast, slow] = [1e15, 1e6].map(plan);
    let plain = of_blocks(&["machine.offload=none", "train.recompute=none"]);
    let plain = plain.plan_on_gpu(usize::MAX / 4, None).unwrap();
    assert!((fast.step_secs / plain.step_secs - 1.0).abs() < 1e-3, "{fast:?} {plain:?}");
    // Forward and backward, all but the two blocks that are on the device already.
    let waits = 2.0 * (slow.offloaded_bytes / 2) as f64 / 1e6;
    assert!((slow.step_secs / waits - 1.0).abs() < 0.2, "{} {waits}", slow.step_secs);
}

/// Prompts of other lengths than a plan looks at, of a model whose memory they fill differently: with 100 tokens of 512
/// it takes more than with 512.
#[test]
fn a_step_with_a_shorter_prompt_stays_within_its_plan() {
    let base = Path::new("Kandinsky-5.0-T2I-Lite-sft-Diffusers");
    let pipeline = Pipeline::open_or_published(base, &PartPaths::default()).unwrap();
    let mut raw = RawConfig::empty();
    raw.set_path("base.path", base).unwrap();
    let settings = ["data.images=images", "data.resolution=1024", "train.batch_size=3"];
    for setting in settings.iter().chain(&["train.micro_batch=3", "train.recompute=block"]) {
        raw.set(setting).unwrap();
    }
    let config = raw.resolve().unwrap();
    let size = SampleSize::from(Bucket { width: 1024, height: 1024 });
    let counts: SizeCounts<SampleSize> = [(size, 3)].into();
    let dataset = DatasetSummary { train: counts, held_out: SizeCounts::new(), ..dataset() };
    let job = TestJob { pipeline, config, dataset, rates: documented() };
    let plan = job.plan_on_gpu(140 << 30, NOTHING_BESIDE).unwrap();

    let task = DiffusionTask::new(&job.config, &job.pipeline).unwrap();
    let config = job.config.with_choice(&plan.choice);
    let prompt = job.pipeline.encoders.zero_condition(&[]).unwrap();
    let device = Device::meta(DeviceKind::Cuda { is_deterministic: true }, usize::MAX / 2);
    let mut session = Session::new(&device, &task, &config, &|_| true).unwrap();
    // One after the other, as a run has them.
    for n_tokens in [100, 512, 500, 300, 33, 210, 150, 100, 50, 512, 20] {
        let shorter = prompt.shortened(f64::from(n_tokens) / 512.0);
        let micro_batch = &task.dummy_with_prompt(size, 3, shorter);
        let position = BatchPosition::default();
        let recompute = Recompute::Block;
        session
            .dry_run_step(MicroBatchStep { micro_batch, position, share: 1.0, recompute })
            .unwrap();
        session.update(0.0, 0, 1.0).unwrap();
        let (needed, planned) = (device.usage().extent, plan.training_bytes());
        assert!(needed <= planned, "{n_tokens} tokens: {needed} of {planned}");
    }
}
