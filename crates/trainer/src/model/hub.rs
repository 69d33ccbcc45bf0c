//! Models of the Hugging Face cache, seen by those who open them: one that is not there, or not all of it, is told as
//! such instead of by the first file that is missing.

use std::path::Path;

use weights::hub::HubPath;
use weights::hub::complete::FetchState;

use crate::error::{Result, TrainerError};

/// Refuses a model of the cache that is not there with all its files. Other paths are left to whoever opens them.
pub fn check(path: &Path) -> Result<()> {
    let Some(found) = HubPath::of(path) else { return Ok(()) };
    let name = found.short_name().to_string();
    match found.state() {
        FetchState::Complete => Ok(()),
        FetchState::Absent => Err(TrainerError::NotFetched { name, path: found.cache }),
        FetchState::Partial(missing) => Err(TrainerError::PartlyFetched {
            name,
            missing: some(&missing),
            path: found.snapshot(),
        }),
    }
}

/// The same for a part of one: only that itself has to be there.
pub fn check_exists(path: &Path) -> Result<()> {
    if path.exists() { Ok(()) } else { check(path) }
}

/// Whether there is something to open.
pub fn is_ready(path: &Path) -> bool {
    path.exists() && check(path).is_ok()
}

/// Names shown of what is missing; the rest is counted.
const SHOWN: usize = 3;

fn some(missing: &[String]) -> String {
    let shown = missing.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match missing.len() {
        0 => "its files are".into(),
        1 => format!("{shown} is"),
        2..=SHOWN => format!("{shown} are"),
        all => format!("{shown} and {} more are", all - SHOWN),
    }
}
