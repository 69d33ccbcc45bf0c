//! `recipes/` against the planner, without any model or image: each fits the size that its name
//! promises, and on every machine of `machines/` it either fits or says what is short.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use compute::{DeviceKind, Quantisation};
use machine::budget::budget;
use machine::{Machine, MachineRecording, ProbeSource};
use serde_json::Value;
use trainer::TrainerError;
use trainer::config::RawConfig;
use trainer::config::batch::PlanChoice;
use trainer::config::optimizer::OptimizerKind;
use trainer::config::training_data::TrainingData;
use trainer::model::diffusion::Pipeline;
use trainer::model::offload::Offload;
use trainer::plan::rates::{self, CallSizeUnit, RateCurve};
use trainer::plan::{DeviceBudget, Plan, PlanRequest, Rates, choose};
use trainer::task::traits::DatasetSummary;
use trainer::train::compress;
use trainer::train::diffusion::DiffusionTask;
use trainer::train::language::LanguagePipeline;
use trainer::train::preference::PreferencePipeline;

use crate::{hearth, said, text};

/// The share of a machine's memory that a recipe may take. Chosen: the system and a desktop have
/// the rest.
const SHARE: f64 = 0.75;

/// Memory by the number of threads: plans hardly depend on it, and machines have at least so many.
const THREADS: usize = 8;

fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect();
    paths.sort();
    paths
}

/// Bytes that a recipe is meant for, by its name: `…-16gb.toml`, or `…-dgx-spark.toml` for all that a run
/// may take of that machine.
fn promised(recipe: &Path) -> Option<usize> {
    let name = recipe.file_stem()?.to_str()?;
    if let Some((_, limit)) = machines().into_iter().find(|(path, _)| is_meant_for(name, path)) {
        return Some(limit);
    }
    let size = name.rsplit_once('-')?.1.strip_suffix("gb")?;
    Some((size.parse::<f64>().ok()? * SHARE * 1e9) as usize)
}

/// Whether a recipe bears the name of a machine of ours.
fn is_meant_for(recipe: &str, machine: &Path) -> bool {
    let machine = machine.file_stem().unwrap().to_str().unwrap();
    recipe.strip_suffix(machine).is_some_and(|rest| rest.ends_with('-'))
}

/// A CPU as most are.
const CPU: DeviceKind = DeviceKind::Cpu { threads: THREADS, has_amx: false };

/// What is planned for a recipe in so many bytes, on a machine that nobody measured.
fn planned(recipe: &Path, limit_bytes: usize, kind: DeviceKind) -> Result<Plan, TrainerError> {
    let rates = Rates::documented(&Machine::probe(&mut ProbeSource::live()), kind);
    planned_in(
        recipe,
        DeviceBudget { kind, limit_bytes, rates: &rates, host_bytes: None, raisable: None },
    )
}

/// The same for a GPU with main memory beside its own, from where so many bytes come in a second.
fn planned_over(recipe: &Path, limit_bytes: usize, link: f64) -> Result<Plan, TrainerError> {
    let kind = DeviceKind::Cuda { is_deterministic: false };
    let mut rates = Rates::documented(&Machine::probe(&mut ProbeSource::live()), kind);
    let points = [1.0, 1e12].map(|bytes| (bytes, bytes / link));
    rates.curves.insert(rates::LINK.into(), RateCurve::through(CallSizeUnit::Bytes, points));
    planned_in(
        recipe,
        DeviceBudget {
            kind,
            limit_bytes,
            rates: &rates,
            host_bytes: Some(usize::MAX / 4),
            raisable: None,
        },
    )
}

fn planned_in(recipe: &Path, room: DeviceBudget<'_>) -> Result<Plan, TrainerError> {
    let config = RawConfig::from_file(recipe)?.resolve()?;
    if let Some(compress) = config.data.compression() {
        let opened = compress::open(&config, compress, true)?;
        let task = &opened.task(&config)?;
        let dataset = &task.dataset_summary(config.train.batch_size);
        return choose(PlanRequest { task, config: &config, dataset }, room);
    }
    if let Some(preference) = config.data.preference() {
        let opened = PreferencePipeline::open(&config, true)?;
        let task = &opened.task(&config, preference)?;
        let dataset = &task.dataset_summary(config.train.batch_size);
        return choose(PlanRequest { task, config: &config, dataset }, room);
    }
    if matches!(config.data, TrainingData::Texts { .. }) {
        let opened = LanguagePipeline::open(&config, true)?;
        let task = &opened.task(&config)?;
        let dataset = &task.dataset_summary(config.train.batch_size);
        return choose(PlanRequest { task, config: &config, dataset }, room);
    }
    let pipeline = Pipeline::open_or_published(&config.base.path, &config.base.parts())?;
    let task = &DiffusionTask::new(&config, &pipeline)?;
    let dataset = DatasetSummary::nominal(task, config.train.batch_size)?;
    choose(PlanRequest { task, config: &config, dataset: &dataset }, room)
}

/// The machines with the bytes that a run may take on each.
fn machines() -> Vec<(PathBuf, usize)> {
    let limit = |path: &PathBuf| {
        let machine =
            Machine::probe(&mut ProbeSource::replay(MachineRecording::load(path).unwrap()));
        budget(&machine).memory.unwrap().limit.0 as usize
    };
    files("machines").into_iter().map(|path| (path.clone(), limit(&path))).collect()
}

/// The share of a GPU's own memory that a recipe may take: a display has the rest.
const GPU_SHARE: f64 = 0.92;

/// Bytes a second from main memory to the GPU: what `PCIe` 4 gives with eight lanes.
const PCIE: f64 = 12e9;

/// That a recipe fits its size on the CPU, and on the GPU of a Mac of that size, whose largest buffer
/// is half of memory; `…-gpu-8gb` on a GPU with so much memory of its own. Gives what is wrong.
fn judge(recipe: &Path) -> Result<(), String> {
    let size = promised(recipe);
    if text(recipe).contains("-gpu-") {
        let limit = (size.unwrap() as f64 / SHARE * GPU_SHARE) as usize;
        let plan = planned_over(recipe, limit, PCIE).map_err(|error| error.to_string())?;
        let needed = plan.peak_bytes();
        return if needed <= limit { Ok(()) } else { Err(format!("{needed} above {limit}")) };
    }
    let mac = DeviceKind::gpu_with_buffer(size.map(|size| (size as f64 / SHARE / 2.0) as usize));
    [CPU, mac].into_iter().try_for_each(|kind| judge_on(recipe, kind, size))
}

fn judge_on(recipe: &Path, kind: DeviceKind, size: Option<usize>) -> Result<(), String> {
    let limit = size.unwrap_or(usize::MAX / 4);
    let plan = planned(recipe, limit, kind).map_err(|error| format!("{kind:?}: {error}"))?;
    if plan.total_bytes <= limit { Ok(()) } else { Err(format!("{plan:?} above {limit}")) }
}

/// A recipe that names a machine fits it, computed on its GPU.
#[test]
fn a_recipe_for_a_machine_fits_that_machine() {
    let meant = files("recipes").into_iter().filter_map(|recipe| {
        let name = recipe.file_stem()?.to_str()?.to_owned();
        let (_, limit) = machines().into_iter().find(|(path, _)| is_meant_for(&name, path))?;
        Some((recipe, limit))
    });
    let meant: Vec<_> = meant.collect();
    assert!(meant.iter().any(|(recipe, _)| recipe.ends_with("lm-8b-lora-dgx-spark.toml")));
    for (recipe, limit) in meant {
        let plan = planned(&recipe, limit, DeviceKind::Cuda { is_deterministic: false }).unwrap();
        assert!(plan.total_bytes <= limit, "{}: {plan:?} above {limit}", recipe.display());
        // More than the usual GPU has, or any would do.
        assert!(plan.total_bytes > 24_000_000_000, "{}: {plan:?}", recipe.display());
    }
}

/// Without room for all, blocks stream; over a slow link every second one, since it waits less.
#[test]
fn on_a_small_gpu_blocks_are_offloaded_as_pcie_allows() {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let recipe = recipe.join("sd3.5-medium-lora-16gb.toml");
    let stream = |gigabytes: f64, link: f64| {
        let limit = (gigabytes * 1e9) as usize;
        let plan = planned_over(&recipe, limit, link).unwrap();
        assert!(plan.peak_bytes() <= limit, "{plan:?}");
        assert_eq!(plan.choice.quantise, None);
        plan.choice.offload
    };
    assert_eq!(stream(8.0, 1e9), Offload::None);
    assert_eq!(stream(5.0, 1e8), Offload::Alternate);
    assert_eq!([stream(5.0, 1e12), stream(3.5, 1e8)], [Offload::Blocks; 2]);
}

/// The recipes with the least and the most memory of each kind, `flux1-dev-lora-gpu` for one.
fn extremes() -> Vec<PathBuf> {
    let mut kinds = BTreeMap::<String, Vec<PathBuf>>::new();
    for recipe in files("recipes") {
        let name = text(&recipe).rsplit_once('-').map_or("", |(kind, _)| kind).to_owned();
        kinds.entry(name).or_default().push(recipe);
    }
    let of_kind = kinds.into_values().flat_map(|mut recipes| {
        recipes.sort_by_key(|recipe| promised(recipe));
        let last = if recipes.len() > 1 { recipes.pop() } else { None };
        recipes.into_iter().next().into_iter().chain(last)
    });
    of_kind.collect()
}

/// What is wrong with each of these recipes, all of them at once.
fn each(recipes: &[PathBuf], judge: impl Fn(&Path) -> Result<(), String> + Sync) -> String {
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let judged: Vec<_> =
            recipes.iter().map(|recipe| (recipe, scope.spawn(|| judge(recipe)))).collect();
        let said = judged.into_iter().filter_map(|(recipe, judged)| {
            Some(format!("{}: {}", recipe.display(), judged.join().unwrap().err()?))
        });
        said.collect()
    });
    wrong.join("\n")
}

#[test]
fn recipes_fit_their_size() {
    let n_promised = files("recipes").iter().filter(|recipe| promised(recipe).is_some()).count();
    assert!(n_promised >= 6, "{n_promised}");
    assert_eq!(each(&extremes(), judge), "");
}

/// The same for all of them: minutes.
#[test]
#[ignore = "long: `just sweep` runs it"]
fn every_recipe_fits_its_size() {
    assert_eq!(each(&files("recipes"), judge), "");
}

/// How much precision a plan gives up: of the base, then of the optimizer.
fn loss(choice: &PlanChoice) -> (usize, bool) {
    let formats = [None, Some(Quantisation::Int8), Some(Quantisation::Nf4)];
    let format = formats.iter().position(|format| *format == choice.quantise);
    (format.unwrap(), choice.optimizer == OptimizerKind::AdamW8bit)
}

/// That more memory never gives a less precise plan, nor a slower one of the same precision, and that what
/// does not fit says by how much.
fn climb(recipe: &Path, limits: &[usize]) -> Result<(), String> {
    let mut before: Option<Plan> = None;
    for limit in limits {
        let plan = match planned(recipe, *limit, CPU) {
            Ok(plan) => plan,
            Err(TrainerError::TooLarge { needed, limit, .. })
                if needed > limit && before.is_none() =>
            {
                continue;
            }
            Err(error) => return Err(format!("{limit} bytes: {error}")),
        };
        if plan.total_bytes > *limit {
            return Err(format!("{} of {limit} bytes", plan.total_bytes));
        }
        if let Some(before) = before {
            let [less, more] = [&before, &plan].map(|plan| (loss(&plan.choice), plan.step_secs));
            if more.0 > less.0 || more.0 == less.0 && more.1 > less.1 {
                let (more, less) = (plan.choice, before.choice);
                return Err(format!("worse with {limit} bytes: {more}; with less: {less}"));
            }
        }
        before = Some(plan);
    }
    Ok(())
}

/// All recipes on all machines and sizes; a minute or two: `just sweep`.
#[test]
#[ignore = "long: `just sweep` runs it"]
fn more_memory_is_never_worse() {
    let sizes = [4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128].map(|size| size * 750_000_000);
    let mut limits: Vec<usize> = machines().into_iter().map(|(_, limit)| limit).collect();
    limits.extend(sizes);
    limits.sort_unstable();
    assert_eq!(each(&files("recipes"), |recipe| climb(recipe, &limits)), "");
}

/// What `hearth plan` says of a recipe on a recorded machine.
fn said_of(recipe: &str, machine: &str, more: &[&str]) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let [recipe, machine] = [format!("recipes/{recipe}"), format!("machines/{machine}")]
        .map(|path| root.join(format!("{path}.toml")));
    let words = ["plan", text(&recipe), "--machine", text(&machine), "--json"];
    let output = hearth(&[&words, more].concat());
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)))
}

#[test]
fn a_machine_is_planned_for_with_the_best_it_has() {
    let small = "lm-1b-lora-8gb";
    for (machine, engine) in [
        ("apple-m1-8gb", "gpu"),
        ("apple-m2-16gb", "gpu"),
        ("apple-m2-ultra-192gb", "gpu"),
        ("dgx-spark", "cuda"),
        ("rtx-4090", "cuda"),
        ("xeon-2-core", "cpu"),
    ] {
        let plan = said_of(small, machine, &["--limit", "5GB"]);
        assert_eq!(plan["engine"], engine, "{machine}: {plan:#}");
        assert_eq!(plan["is_step_secs_measured"], false);
        assert_eq!(
            said_of(small, machine, &["--limit", "5GB", "--device", "cpu"])["engine"],
            "cpu"
        );
    }
    // Metal's working set is the most that is taken, and a larger chip is faster.
    let secs = |machine| {
        let plan = said_of("sd3.5-medium-lora-16gb", machine, &["--limit", "12GB"]);
        plan["step_secs"].as_f64().unwrap_or_else(|| panic!("{plan:#}"))
    };
    assert!(secs("apple-m2-ultra-192gb") < secs("apple-m4-pro-48gb") / 2.0);
    let limit = |plan: &Value| plan["limit_bytes"].as_u64().unwrap();
    assert!(limit(&said_of(small, "apple-m3-max-128gb", &[])) <= 103_079_215_104);
}

#[test]
fn recipes_leave_choices_to_the_planner() {
    for recipe in files("recipes") {
        let job: toml::Table = std::fs::read_to_string(&recipe).unwrap().parse().unwrap();
        assert!(job["train"].get("recompute").is_none(), "{}", recipe.display());
    }
}
