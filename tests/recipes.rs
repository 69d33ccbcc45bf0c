//! `recipes/` against the planner, without any model or picture: each fits the size that its name
//! promises, and on every machine of `machines/` it either fits or says what is short.

use std::path::{Path, PathBuf};

use compute::Kind;
use machine::budget::budget;
use machine::{Machine, Recording, Source};
use trainer::TrainerError;
use trainer::config::RawConfig;
use trainer::model::sd3::pipeline::Pipeline;
use trainer::plan::{Outlook, plan};

/// The share of a machine's memory that a recipe may take. Chosen: the system, a desktop and what
/// the program holds beside its arena have the rest.
const SHARE: f64 = 0.7;

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

/// Bytes that a recipe is meant for, by its name: `…-16gb.toml`.
fn promised(recipe: &Path) -> Option<usize> {
    let size = recipe.file_stem()?.to_str()?.rsplit_once('-')?.1.strip_suffix("gb")?;
    Some((size.parse::<f64>().ok()? * SHARE * 1e9) as usize)
}

/// What a recipe takes at its peak, if it fits. Blocks are computed twice unless the recipe says
/// otherwise: what else a planner may choose takes more.
fn peak(recipe: &Path, limit: usize) -> Result<usize, TrainerError> {
    let mut raw = RawConfig::from_file(recipe)?;
    raw.set("train.recompute=block")?;
    let config = raw.resolve()?;
    let pipeline = Pipeline::open_or_published(&config.base.path, config.base.rest.as_deref())?;
    let outlook = Outlook::nominal(&config);
    Ok(plan(&pipeline, &config, &outlook, Kind::cpu(THREADS), limit)?.peak_bytes())
}

/// The machines with the bytes that a run may take on each.
fn machines() -> Vec<(PathBuf, usize)> {
    let limit = |path: &PathBuf| {
        let machine = Machine::probe(&mut Source::replay(Recording::load(path).unwrap()));
        budget(&machine).memory.unwrap().limit.0 as usize
    };
    files("machines").into_iter().map(|path| (path.clone(), limit(&path))).collect()
}

/// That a recipe fits its size; gives what is wrong.
fn judge(recipe: &Path, machines: &[(PathBuf, usize)]) -> Result<(), String> {
    let promised = promised(recipe);
    let needed =
        peak(recipe, promised.unwrap_or(usize::MAX / 4)).map_err(|error| error.to_string())?;
    for (machine, limit) in machines.iter().filter(|(_, limit)| *limit < needed) {
        match peak(recipe, *limit) {
            Ok(peak) if peak <= *limit => {}
            Err(TrainerError::TooLarge { needed, .. }) if needed > *limit => {}
            other => return Err(format!("on {} of {limit} bytes: {other:?}", machine.display())),
        }
    }
    Ok(())
}

#[test]
fn recipes_fit_their_size_and_say_what_is_short_elsewhere() {
    let (recipes, machines) = (files("recipes"), machines());
    assert!(recipes.iter().filter(|recipe| promised(recipe).is_some()).count() >= 6);
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let judged: Vec<_> = recipes
            .iter()
            .map(|recipe| (recipe, scope.spawn(|| judge(recipe, &machines))))
            .collect();
        let said = judged.into_iter().filter_map(|(recipe, judged)| {
            Some(format!("{}: {}", recipe.display(), judged.join().unwrap().err()?))
        });
        said.collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_the_planner_decides_is_left_to_it() {
    for recipe in files("recipes") {
        let job: toml::Table = std::fs::read_to_string(&recipe).unwrap().parse().unwrap();
        assert!(job["train"].get("recompute").is_none(), "{}", recipe.display());
    }
}
