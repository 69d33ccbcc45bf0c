//! What a phase of work takes, in memory and in time: found by a dry run on the meta device.

use compute::{Device, DeviceKind, WorkStats};
use weights::WeightsError;

use crate::error::{LimitRaise, Remedy, Result, TrainerError};

/// A part of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageMemory {
    /// What it is called.
    pub name: &'static str,
    /// Bytes at its peak.
    pub peak_bytes: usize,
}

/// What takes time: work, each with how often it is done, and reading weights.
#[derive(Clone, Debug, Default)]
pub struct Cost {
    /// Work of kernels.
    pub works: Vec<(f64, WorkStats)>,
    /// Bytes that are read from files of weights.
    pub read_bytes: u64,
}

/// A part of what comes before a run's first step.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Its memory.
    pub memory: StageMemory,
    /// What of it takes time.
    pub cost: Cost,
}

/// For a dry run that finds out how much memory is enough.
pub(crate) const UNLIMITED: usize = usize::MAX / 2;

/// The first of `choices` whose dry run fits, else the one that takes the least; and its peak.
pub(crate) fn first_fitting<C: Copy>(
    kind: DeviceKind,
    limit: usize,
    choices: Vec<C>,
    dry_run: impl Fn(&Device, C) -> Result<()>,
) -> Result<(C, usize)> {
    let mut least: Option<(C, usize)> = None;
    for choice in choices {
        let device = Device::meta(kind, UNLIMITED);
        dry_run(&device, choice)?;
        let peak = device.usage().extent;
        if least.is_none_or(|(_, least)| peak < least) {
            least = Some((choice, peak));
        }
        if peak <= limit {
            break;
        }
    }
    Ok(least.expect("there is a choice"))
}

pub(crate) fn too_large(phase: StageMemory, limit: usize, remedy: Option<Remedy>) -> TrainerError {
    let StageMemory { name, peak_bytes } = phase;
    TrainerError::TooLarge { phase: name.into(), needed: peak_bytes, limit, remedy }
}

pub(crate) fn check_cancelled(is_wanted: bool) -> Result<()> {
    if is_wanted { Ok(()) } else { Err(WeightsError::Cancelled.into()) }
}

/// The first candidate that fits into `limit` bytes; if none does, the last, which must take the least. `need` says
/// what one takes, exactly if that is within the limit it is given.
pub(crate) fn nearest_fitting<C>(
    limit: usize,
    candidates: &[(String, C)],
    need: impl Fn(&C, usize) -> Result<usize>,
) -> Result<Option<Remedy>> {
    let raise = LimitRaise::Unknown;
    for (change, candidate) in candidates {
        let needed = need(candidate, limit)?;
        if needed <= limit {
            return Ok(Some(Remedy { change: change.clone(), needed, fits: true, raise }));
        }
    }
    let Some((change, candidate)) = candidates.last() else { return Ok(None) };
    let (change, needed) = (change.clone(), need(candidate, usize::MAX)?);
    Ok((needed < usize::MAX).then_some(Remedy { change, needed, fits: false, raise }))
}
