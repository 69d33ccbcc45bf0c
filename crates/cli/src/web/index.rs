//! The runs that are served: found in the folders that were named, by a thread that looks again now and then. What is
//! asked for is looked up here by its id; no path ever comes from a request.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use trainer::event::find::find_runs;
use trainer::event::journal;

use super::follow::FollowedRun;

/// Runs that are served at most.
const RUNS: usize = 1000;
/// How often runs are read, and looked for.
const POLL_EVERY: Duration = Duration::from_millis(250);
const SCAN_EVERY: Duration = Duration::from_secs(3);
/// Steps of runs that are over, held in memory at most, and for how long they are held anyway. Chosen: 50 MB.
const IDLE_STEPS: usize = 400_000;
const IDLE_TIME: Duration = Duration::from_secs(60);
/// The runs of some folders.
pub struct RunIndex {
    roots: Vec<PathBuf>,
    runs: RwLock<BTreeMap<String, Arc<FollowedRun>>>,
}

impl RunIndex {
    /// Of these folders, each a run or a folder of runs.
    pub fn new(roots: Vec<PathBuf>) -> Arc<Self> {
        let index = Self { roots, runs: RwLock::default() };
        index.scan();
        Arc::new(index)
    }

    /// The run of an id.
    pub fn get(&self, id: &str) -> Option<Arc<FollowedRun>> {
        self.runs.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// All of them, by name.
    pub fn all(&self) -> Vec<Arc<FollowedRun>> {
        let runs = self.runs.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = runs.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Where new runs are begun: the first folder that is no run itself.
    pub fn home(&self) -> Option<&Path> {
        self.roots.iter().map(PathBuf::as_path).find(|root| !is_run(root))
    }

    /// Looks for runs that are new, and forgets those that are gone.
    pub fn scan(&self) {
        let found: BTreeMap<PathBuf, String> =
            self.roots.iter().flat_map(|root| named(root)).collect();
        let mut runs = self.runs.write().unwrap_or_else(PoisonError::into_inner);
        runs.retain(|_, run| found.contains_key(&run.folder));
        let mut names: Vec<String> = runs.values().map(|run| run.name.clone()).collect();
        for (folder, name) in found {
            let id = id(&folder);
            if runs.contains_key(&id) || runs.len() >= RUNS {
                continue;
            }
            let name = if names.contains(&name) { format!("{name} ({})", &id[..4]) } else { name };
            names.push(name.clone());
            runs.insert(id.clone(), Arc::new(FollowedRun::new(id, name, folder)));
        }
    }

    /// Follows the runs until the program ends.
    pub fn follow(self: Arc<Self>) {
        machine::process::give_way();
        let mut next_scan = Instant::now();
        loop {
            // Those that nobody works on change seldom.
            let is_scan = Instant::now() >= next_scan;
            self.all().iter().filter(|run| is_scan || run.is_held()).for_each(|run| run.poll());
            if is_scan {
                let begun = Instant::now();
                self.scan();
                self.release();
                // A slow disk is not kept busy.
                next_scan = Instant::now() + SCAN_EVERY.max(begun.elapsed() * 30);
            }
            thread::sleep(POLL_EVERY);
        }
    }

    /// Lets go of runs that are over and that nobody looks at, those first that were not looked at for longest.
    fn release(&self) {
        let mut idle: Vec<_> =
            self.all().into_iter().filter_map(|run| Some((run.idle()?, run))).collect();
        idle.sort_by_key(|((_, since), _)| *since);
        let mut held = 0;
        for ((steps, since), run) in idle {
            held += steps;
            if held > IDLE_STEPS && since > IDLE_TIME {
                run.release();
            }
        }
    }
}

fn is_run(folder: &Path) -> bool {
    folder.join(journal::FILE_NAME).is_file()
}

/// Folders of runs and their names.
fn named(root: &Path) -> Vec<(PathBuf, String)> {
    let name = |folder: &Path| {
        let inner = folder.strip_prefix(root).ok().filter(|inner| !inner.as_os_str().is_empty());
        let own = inner.or(root.file_name().map(Path::new)).unwrap_or(folder);
        own.to_string_lossy().into_owned()
    };
    // A folder that is gone may come back.
    let runs = find_runs(root).unwrap_or_default();
    runs.into_iter().map(|folder| (folder.clone(), name(&folder))).collect()
}

/// The same for the same folder in every program: FNV-1a of its path. Taken: RFC 9923, 64 bits.
fn id(folder: &Path) -> String {
    let bytes = folder.as_os_str().as_encoded_bytes();
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn runs_are_found_by_their_file_and_not_through_links() {
        let place = tempfile::tempdir().unwrap();
        let run = |path: &str| {
            let folder = place.path().join(path);
            fs::create_dir_all(&folder).unwrap();
            let line = "{\"event\":\"note\",\"text\":\"a\"}\n";
            fs::write(folder.join(journal::FILE_NAME), line).unwrap();
            folder
        };
        let [cat, ..] = ["cat", "group/dog", "cat/ranks/1", ".hidden/run", "a/b/c/d/deep"].map(run);
        symlink(&cat, place.path().join("link")).unwrap();
        let index = RunIndex::new(vec![place.path().into(), place.path().join("cat")]);
        let names: Vec<String> = index.all().iter().map(|run| run.name.clone()).collect();
        assert_eq!(names, ["cat", "group/dog"]);
        assert_eq!(index.home(), Some(place.path()));
        let id = index.all()[0].id.clone();
        assert_eq!(index.get(&id).unwrap().folder, cat);
        assert!(index.get("../cat").is_none());
        fs::remove_dir_all(&cat).unwrap();
        run("new");
        index.scan();
        assert!(index.get(&id).is_none() && index.all().len() == 2);
    }
}
