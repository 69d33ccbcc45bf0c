//! The folder that a rank writes: the run's, or one of its own; and the checkpoint that all ranks resume from.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use cluster::{World, supervisor};
use weights::plain_file::{open_plain, read_plain};
use weights::write::AtomicFile;

use super::super::folder::{self, RunFolder};
use super::super::{TrainOptions, checkpoint, identity, output_folder};
use super::is_first;
use crate::config::RunConfig;
use crate::config::cluster::RankPart;
use crate::error::{Result, TrainerError};

/// Where ranks but the first write, in the run's folder.
const FOLDER: &str = "ranks";

/// Bytes of a file that travel together.
const PIECE_BYTES: u64 = 16 << 20;

/// Takes the folder of a run: the job's, or a rank's own. The rank with the last checkpoint of a run that is resumed sends
/// it to all others.
pub fn open_folder(
    world: Option<&World>,
    config: &RunConfig,
    options: TrainOptions,
) -> Result<RunFolder> {
    let run = &config.output.folder;
    if is_first(world) {
        output_folder::check(config, &[])?;
    }
    if is_first(world) && !options.resume && !supervisor::is_restarted() {
        clear_ranks(run, world.map_or(1, World::size))?;
    }
    let Some(world) = world else { return RunFolder::open(run, options) };
    let part = RankPart { rank: world.rank(), size: world.size() };
    let own = if is_first(Some(world)) { run.clone() } else { rank_folder(run, world.rank()) };
    let newest = newest_checkpoint(world, &own, options)?;
    // Ranks that were started again resume if there is something to resume.
    let resume = options.resume || (supervisor::is_restarted() && newest.is_some());
    let options = TrainOptions { resume, ..options };
    let source = newest.unwrap_or(0);
    if world.rank() == 0 && source == 0 {
        let folder = RunFolder::open(run, options)?.of_rank(part);
        copy_checkpoint(world, run, source, resume)?;
        return Ok(folder);
    }
    if world.rank() > 0 && world.rank() != source {
        clear(&own)?;
    }
    copy_checkpoint(world, &own, source, resume)?;
    Ok(RunFolder::open(&own, options)?.of_rank(part))
}

/// The rank that has the newest checkpoint, which all resume from: the first, or the one that saved when the first was lost.
fn newest_checkpoint(world: &World, own: &Path, options: TrainOptions) -> Result<Option<usize>> {
    let inputs = world.gather(&read_plain(&own.join(identity::INPUTS)).unwrap_or_default())?;
    let is_of_run = inputs[0].is_empty() || inputs[world.rank()] == inputs[0];
    let is_looked_for = supervisor::is_restarted() || (options.resume && is_of_run);
    let step = checkpoint::latest_step(own).filter(|_| is_looked_for);
    let mut steps = vec![0; world.size()];
    steps[world.rank()] = step.map_or(0, |step| step.cast_signed() + 1);
    let steps = world.sum(steps)?;
    let newest = steps.iter().copied().max().unwrap_or(0);
    Ok(steps.iter().position(|step| *step == newest).filter(|_| newest > 0))
}

/// Takes over the newest checkpoint that another rank has left in the run's folder: it saved when the first was lost.
pub fn take_newest(run: &Path) -> Result<()> {
    let inputs = |folder: &Path| read_plain(&folder.join(identity::INPUTS)).ok();
    let of_run = inputs(run);
    let ranks = fs::read_dir(run.join(FOLDER)).into_iter().flatten().flatten();
    let ranks = ranks.map(|entry| entry.path()).filter(|rank| inputs(rank) == of_run);
    let saved = ranks.filter_map(|rank| Some((checkpoint::latest_step(&rank)?, rank)));
    let newest = saved.max().filter(|(step, _)| Some(*step) > checkpoint::latest_step(run));
    let Some((step, rank)) = newest.filter(|_| of_run.is_some()) else { return Ok(()) };
    for name in checkpoint_files(&rank, step) {
        let path = rank.join(&name);
        let failed = |source| TrainerError::Io { what: "read", path: path.clone(), source };
        let mut from = open_plain(&path).map_err(failed)?;
        let to = run.join(&name);
        fs::create_dir_all(to.parent().unwrap_or(run)).map_err(failed)?;
        let mut file = AtomicFile::create(&to)?;
        io::copy(&mut from, &mut file).map_err(failed)?;
        file.commit()?;
    }
    Ok(())
}

/// Removes what ranks beyond so many have left in the folder of a run that begins anew.
fn clear_ranks(run: &Path, size: usize) -> Result<()> {
    let entries = fs::read_dir(run.join(FOLDER)).into_iter().flatten().flatten();
    let kept: Vec<PathBuf> = (1..size).map(|rank| rank_folder(run, rank)).collect();
    let stale = entries.map(|entry| entry.path()).filter(|path| !kept.contains(path));
    stale.filter(|path| path.is_dir()).try_for_each(|path| clear(&path))
}

/// Where a rank but the first writes.
fn rank_folder(run: &Path, rank: usize) -> PathBuf {
    run.join(FOLDER).join(format!("rank-{rank}"))
}

/// Removes what an earlier run of a rank has left.
fn clear(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(TrainerError::Io { what: "remove", path: folder.into(), source })
        }
        _ => Ok(()),
    }
}

/// Sends the files that a run resumes from to all ranks, which write them where they belong. A new run has none.
fn copy_checkpoint(world: &World, folder: &Path, source: usize, is_resumed: bool) -> Result<()> {
    let is_source = world.rank() == source;
    let names = if is_source && is_resumed { resumed_files(folder) } else { Vec::new() };
    let names = world.gather(names.join("\n").as_bytes())?.swap_remove(source);
    let names = String::from_utf8_lossy(&names).into_owned();
    for name in names.lines() {
        let path = folder.join(name);
        if is_source {
            send_file(world, &path)?;
        } else {
            receive_file(world, &path, source)?;
        }
    }
    Ok(())
}

/// The last checkpoint and what it is compared with, by their names in the run's folder.
fn resumed_files(run: &Path) -> Vec<String> {
    let kept = [folder::CONFIG, identity::INPUTS].map(str::to_owned);
    let files = checkpoint::latest_step(run).map(|step| checkpoint_files(run, step));
    let files = files.into_iter().flatten();
    kept.into_iter().chain(files).filter(|name| run.join(name).is_file()).collect()
}

/// The files of a checkpoint, by their names in the run's folder.
fn checkpoint_files(run: &Path, step: u64) -> Vec<String> {
    let checkpoint = checkpoint::path(step);
    let listed = fs::read_dir(run.join(&checkpoint)).into_iter().flatten().flatten();
    let name = |entry: fs::DirEntry| checkpoint.join(entry.file_name());
    listed.map(|entry| name(entry).to_string_lossy().into_owned()).collect()
}

/// Its length, then its bytes in pieces.
fn send_file(world: &World, path: &Path) -> Result<()> {
    let failed = |source| TrainerError::Io { what: "read", path: path.into(), source };
    let mut file = fs::File::open(path).map_err(failed)?;
    let mut left = file.metadata().map_err(failed)?.len();
    world.broadcast(left.to_le_bytes().to_vec(), world.rank())?;
    while left > 0 {
        let mut piece = vec![0; left.min(PIECE_BYTES) as usize];
        file.read_exact(&mut piece).map_err(failed)?;
        left -= piece.len() as u64;
        world.broadcast(piece, world.rank())?;
    }
    Ok(())
}

fn receive_file(world: &World, path: &Path, source: usize) -> Result<()> {
    let failed = |source| TrainerError::Io { what: "write", path: path.into(), source };
    let left = world.broadcast(vec![0; 8], source)?;
    let mut left = left.try_into().map_or(0, u64::from_le_bytes);
    fs::create_dir_all(path.parent().unwrap_or(path)).map_err(failed)?;
    let mut file = AtomicFile::create(path)?;
    while left > 0 {
        let piece = world.broadcast(vec![0; left.min(PIECE_BYTES) as usize], source)?;
        file.write_all(&piece).map_err(failed)?;
        left -= piece.len() as u64;
    }
    file.commit()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(folder: &Path, step: u64, inputs: &str) {
        let checkpoint = folder.join(checkpoint::path(step));
        fs::create_dir_all(&checkpoint).unwrap();
        fs::write(checkpoint.join("progress.json"), format!("{step}")).unwrap();
        fs::write(folder.join(identity::INPUTS), inputs).unwrap();
    }

    #[test]
    fn a_run_resumes_from_what_another_rank_saved_when_the_first_was_lost() {
        let run = tempfile::tempdir().unwrap();
        save(run.path(), 10, "this job");
        take_newest(run.path()).unwrap();
        assert_eq!(checkpoint::latest_step(run.path()), Some(10));
        for (rank, step, inputs) in [(1, 12, "this job"), (2, 13, "this job"), (3, 20, "another")] {
            save(&rank_folder(run.path(), rank), step, inputs);
        }
        take_newest(run.path()).unwrap();
        assert_eq!(checkpoint::latest_step(run.path()), Some(13));
        let progress = run.path().join(checkpoint::path(13)).join("progress.json");
        assert_eq!(fs::read_to_string(progress).unwrap(), "13");
        // What is older, or of ranks that a new run does not have, is left or removed.
        save(run.path(), 30, "this job");
        take_newest(run.path()).unwrap();
        assert_eq!(checkpoint::latest_step(run.path()), Some(30));
        clear_ranks(run.path(), 3).unwrap();
        let left = [1, 2, 3].map(|rank| rank_folder(run.path(), rank).exists());
        assert_eq!(left, [true, true, false]);
    }
}
