//! `hearth bench load`: our loader beside a plain memory copy, raw disk reads and, where a Python
//! is given, its usual loaders. Each measurement is a process of its own, so that peaks of memory
//! are its own too.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::Builder;
use std::time::Instant;

use compute::{DeviceKind, fill_all};
use machine::Bytes;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use trainer::TrainerError;
use trainer::model::files::UploadTarget;
use weights::load::{LoadOptions, LoadRequest, drop_page_cache, load};
use weights::mmap::{MappedFiles, map_anonymous};
use weights::safetensors::OutputTensor;
use weights::write::write_file;
use weights::{Catalog, FileDtype, TensorEncoding, WeightsError};

use super::private_folder;
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::{CacheState, LoadFigure, LoadMethod};
use crate::terminal;
use crate::text::name_of;

/// Measure how fast model files are loaded and written.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench load                                      on a new file of 2 GB
  hearth bench load --file model.safetensors --json
  hearth bench load --python .venv/bin/python            compared with safetensors and fastsafetensors
  hearth bench load --device cuda:0                      also into GPU memory")]
pub struct BenchLoadArgs {
    /// Load this safetensors file instead of a new one
    #[arg(long)]
    file: Option<PathBuf>,

    /// Size of the new file
    #[arg(long, default_value = "2GB")]
    size: Bytes,

    /// Folder for the new file, on the disk to measure
    #[arg(long, default_value = ".")]
    folder: PathBuf,

    /// A Python with torch, safetensors and fastsafetensors, to compare with
    #[arg(long)]
    python: Option<PathBuf>,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Repetitions; the fastest counts
    #[arg(long, default_value_t = 3)]
    repeats: u32,

    /// Print one JSON object per reader and cache state
    #[arg(long)]
    json: bool,

    /// Measure one reader in this process (used by hearth itself)
    #[arg(long, hide = true)]
    only: Option<LoadMethod>,
}

/// What one process measured.
#[derive(Debug, Deserialize, Serialize)]
struct LoadSample {
    secs: f64,
    bytes: u64,
    rss_peak_bytes: Option<u64>,
}

pub fn run(arguments: &BenchLoadArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let made;
    let file = if let Some(file) = &arguments.file {
        Catalog::open(file)?;
        file
    } else {
        if arguments.size.0 < LEAST_BYTES {
            let problem = format!("--size is {}, least is 1 MB", arguments.size);
            return Err(TrainerError::Request { problem, hint: "leave it out for 2 GB" }.into());
        }
        made = TempModelFile::new(&arguments.folder, arguments.size)?;
        &made.path
    };
    if let Some(reader) = arguments.only {
        let sample = measure(arguments, reader, file)?;
        render::json::line(out, &sample)?;
        return Ok(CommandOutcome::Done);
    }
    let figures = figures(arguments, file)?;
    for figure in figures.iter().filter(|_| arguments.json) {
        writeln!(out, "{}", serde_json::to_string(figure).map_err(std::io::Error::from)?)?;
    }
    if !arguments.json {
        write!(out, "{}", render::bench::loading(file, &figures))?;
    }
    Ok(CommandOutcome::Done)
}

/// Chosen: less is read in no time at all.
const LEAST_BYTES: u64 = 1_000_000;

fn figures(arguments: &BenchLoadArgs, file: &Path) -> Result<Vec<LoadFigure>, Failure> {
    use LoadMethod::{
        Hearth, HearthDevice, HearthHeld, HearthMmap, HearthWrite, Memcpy, Raw, RawWrite,
    };
    let peers = peers(arguments)?;
    let ours = [HearthHeld, Hearth, HearthMmap, HearthDevice];
    let is_near = matches!(arguments.engine.kind(), DeviceKind::Cpu { .. });
    let ours = &ours[..ours.len() - usize::from(is_near)];
    let readers = [&[Raw], ours, &peers[..]].concat();
    let mut plan = vec![(Memcpy, CacheState::Warm)];
    plan.extend(readers.iter().map(|reader| (*reader, CacheState::Warm)));
    plan.extend(readers.iter().map(|reader| (*reader, CacheState::Cold)));
    plan.extend([(RawWrite, CacheState::Cold), (HearthWrite, CacheState::Cold)]);
    let mut best: Vec<Option<LoadSample>> = plan.iter().map(|_| None).collect();
    // Round after round, so that a slow spell of the machine meets all alike.
    for _ in 0..arguments.repeats.max(1) {
        for ((reader, cache), best) in plan.iter().zip(&mut best) {
            prepare(file, *cache)?;
            let sample = sample(arguments, *reader, file)?;
            if best.as_ref().is_none_or(|best| sample.secs < best.secs) {
                *best = Some(sample);
            }
        }
    }
    let rate = |sample: &LoadSample| sample.bytes as f64 / sample.secs / f64::from(1 << 30);
    let memcpy = best[0].as_ref().map_or(f64::NAN, rate);
    let figure = |((reader, cache), sample): ((LoadMethod, CacheState), Option<LoadSample>)| {
        let sample = sample?;
        Some(LoadFigure {
            reader,
            cache,
            gib_per_s: rate(&sample),
            rss_peak_bytes: sample.rss_peak_bytes,
            tensor_bytes: sample.bytes,
            ratio_to_memcpy: rate(&sample) / memcpy,
        })
    };
    Ok(plan.into_iter().zip(best).filter_map(figure).collect())
}

/// The Python loaders that the interpreter has; those it lacks are left out with a word.
fn peers(arguments: &BenchLoadArgs) -> Result<Vec<LoadMethod>, Failure> {
    let Some(python) = &arguments.python else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for (reader, module) in [
        (LoadMethod::PythonSafetensors, "safetensors"),
        (LoadMethod::Fastsafetensors, "fastsafetensors"),
    ] {
        let output = Command::new(python).args(["-c", &format!("import torch, {module}")]).output();
        let output = output.map_err(|error| Failure::Peer {
            what: format!("cannot run {}", python.display()),
            said: error.to_string(),
        })?;
        if output.status.success() {
            found.push(reader);
        } else {
            let said = String::from_utf8_lossy(&output.stderr);
            let reason = said.lines().last().unwrap_or("it cannot be imported");
            writeln!(terminal::stderr(), "{module} is left out: {reason}")?;
        }
    }
    Ok(found)
}

/// Brings the file into the page cache, or drops it.
fn prepare(path: &Path, cache: CacheState) -> Result<(), Failure> {
    match cache {
        CacheState::Cold => drop_page_cache(path)?,
        CacheState::Warm => _ = std::io::copy(&mut File::open(path)?, &mut std::io::sink())?,
    }
    Ok(())
}

fn sample(
    arguments: &BenchLoadArgs,
    reader: LoadMethod,
    file: &Path,
) -> Result<LoadSample, Failure> {
    let name = &name_of(&reader);
    let mut command =
        if let (LoadMethod::PythonSafetensors | LoadMethod::Fastsafetensors, Some(python)) =
            (reader, &arguments.python)
        {
            let mut command = Command::new(python);
            command.args(["-c", include_str!("load_peers.py"), name]);
            command
        } else {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["bench", "load", "--only", name]);
            command.args(["--device", &arguments.engine.name(), "--file"]);
            command
        };
    command.arg(file);
    let failed = |said: String| Failure::Peer { what: format!("measuring {name} failed"), said };
    let output = command.output().map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line)
        .map_err(|_| failed(String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn measure(
    arguments: &BenchLoadArgs,
    reader: LoadMethod,
    file: &Path,
) -> Result<LoadSample, Failure> {
    let catalog = Catalog::open(file)?;
    let bytes = catalog.bytes();
    let secs = match reader {
        LoadMethod::Memcpy => time_memcpy(bytes)?,
        LoadMethod::Raw => time_raw(file)?,
        LoadMethod::Hearth => time_load(&catalog, false)?,
        LoadMethod::HearthHeld => time_load(&catalog, true)?,
        LoadMethod::HearthDevice => time_device(&catalog, &arguments.engine)?,
        LoadMethod::HearthMmap => time_mapped(&catalog)?,
        LoadMethod::RawWrite => time_raw_write(file, bytes)?,
        LoadMethod::HearthWrite => time_write(&catalog)?,
        LoadMethod::PythonSafetensors | LoadMethod::Fastsafetensors => f64::NAN,
    };
    Ok(LoadSample { secs, bytes, rss_peak_bytes: machine::process::peak_resident() })
}

/// Seconds that a made file of this size takes to load, once the system has it at hand.
pub fn time_cached(bytes: u64) -> Result<f64, Failure> {
    let made = TempModelFile::new(&std::env::temp_dir(), Bytes(bytes))?;
    let catalog = Catalog::open(&made.path)?;
    prepare(&made.path, CacheState::Warm)?;
    time_load(&catalog, true)
}

fn time_load(catalog: &Catalog, held: bool) -> Result<f64, Failure> {
    // Aligned as the file is, so that the disk can write straight into it.
    let phase = catalog.tensors.first().map_or(0, |tensor| tensor.offset % 4096);
    let mut memory = map_anonymous(catalog.bytes() + phase)?;
    if held {
        memory.fill(1);
    }
    let mut rest = &mut memory[phase as usize..];
    let mut wanted = Vec::new();
    for tensor in &catalog.tensors {
        let (into, later) = rest.split_at_mut(tensor.bytes as usize);
        rest = later;
        if let TensorEncoding::Plain(dtype) = tensor.encoding {
            wanted.push(LoadRequest::whole(tensor, dtype, into));
        }
    }
    let begun = Instant::now();
    load(catalog, wanted, LoadOptions::default(), &|_| true)?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Into memory that the device has given already, as a run's arena is.
fn time_device(catalog: &Catalog, engine: &DeviceArgs) -> Result<f64, Failure> {
    let device = engine.open(catalog.bytes() as usize + catalog.tensors.len() * 4096)?;
    let alloc = |bytes: u64| device.zeros([bytes as usize], compute::Dtype::U8);
    let tensors = catalog.tensors.iter().map(|tensor| alloc(tensor.bytes));
    let mut tensors = tensors.collect::<compute::Result<Vec<_>>>()?;
    device.synchronise()?;
    let begun = Instant::now();
    fill_all(tensors.iter_mut().collect(), |range, parts| -> Result<(), Failure> {
        let wanted = catalog.tensors[range].iter().zip(parts).filter_map(|(tensor, part)| {
            let TensorEncoding::Plain(dtype) = tensor.encoding else { return None };
            Some(LoadRequest::whole(tensor, dtype, UploadTarget(part)))
        });
        Ok(load(catalog, wanted.collect(), LoadOptions::default(), &|_| true).map(drop)?)
    })?;
    device.synchronise()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn time_mapped(catalog: &Catalog) -> Result<f64, Failure> {
    let mut memory = map_anonymous(catalog.bytes())?;
    let mapped = MappedFiles::open(catalog)?;
    let begun = Instant::now();
    let mut rest = &mut memory[..];
    for tensor in &catalog.tensors {
        let (into, later) = rest.split_at_mut(tensor.bytes as usize);
        rest = later;
        into.copy_from_slice(mapped.bytes(tensor).unwrap_or_default());
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Chosen: blocks large enough for any disk, small enough for two threads to share evenly.
const BLOCK: usize = 8 << 20;

fn time_memcpy(bytes: u64) -> Result<f64, Failure> {
    let mut source = map_anonymous(bytes)?;
    source.fill(1);
    let mut target = map_anonymous(bytes)?;
    let half = target.len().div_ceil(machine::cores::compute_threads()).next_multiple_of(BLOCK);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let mut halves = target.chunks_mut(half).zip(source.chunks(half));
        halves.try_for_each(|(to, from)| {
            Builder::new().spawn_scoped(scope, || to.copy_from_slice(from)).map(drop)
        })
    })?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Four readers with a buffer each, as `fio` would run them; past the cache if the file is cold.
fn time_raw(path: &Path) -> Result<f64, Failure> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let start = |first: u64| {
            let file = &file;
            Builder::new().spawn_scoped(scope, move || {
                let mut buffer = vec![0; BLOCK];
                let mut offset = first * BLOCK as u64;
                while offset < bytes {
                    file.read_at(&mut buffer, offset)?;
                    offset += 4 * BLOCK as u64;
                }
                Ok::<_, std::io::Error>(())
            })
        };
        let readers = (0..4).map(start).collect::<Result<Vec<_>, _>>()?;
        readers.into_iter().try_for_each(|reader| reader.join().expect("a reader does not panic"))
    })?;
    Ok(begun.elapsed().as_secs_f64())
}

fn time_raw_write(beside: &Path, bytes: u64) -> Result<f64, Failure> {
    let block = vec![7; BLOCK];
    let folder = private_folder(beside.parent().unwrap_or(beside))?;
    let begun = Instant::now();
    let mut file = File::create_new(folder.path().join("raw-write"))?;
    let mut left = bytes;
    while left > 0 {
        let now = left.min(BLOCK as u64);
        file.write_all(&block[..now as usize])?;
        left -= now;
    }
    file.sync_all()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn time_write(catalog: &Catalog) -> Result<f64, Failure> {
    let mut memory = map_anonymous(catalog.bytes())?;
    memory.fill(7);
    let tensors = catalog.tensors.iter().filter_map(|tensor| match tensor.encoding {
        TensorEncoding::Plain(dtype) => {
            Some(OutputTensor { name: tensor.name.clone(), dtype, shape: tensor.shape.clone() })
        }
        TensorEncoding::Blocks(_) => None,
    });
    let folder = private_folder(catalog.files[0].parent().unwrap_or(&catalog.files[0]))?;
    let path = folder.path().join("hearth-write");
    let begun = Instant::now();
    let mut fill = |tensor: &OutputTensor, out: &mut dyn Write| {
        let bytes = tensor.bytes().unwrap_or(0) as usize;
        out.write_all(&memory[..bytes]).map_err(|source| WeightsError::io("write", &path, source))
    };
    write_file(&path, &BTreeMap::new(), tensors.collect(), false, &mut fill)?;
    Ok(begun.elapsed().as_secs_f64())
}

/// A model file made on the spot, removed afterwards: sizes as they are mixed in real models.
struct TempModelFile {
    path: PathBuf,
    _folder: TempDir,
}

impl TempModelFile {
    fn new(folder: &Path, size: Bytes) -> Result<Self, Failure> {
        let folder = private_folder(folder)?;
        let path = folder.path().join("model.safetensors");
        let mut tensors = Vec::new();
        let mut left = size.0 / 2;
        // Chosen: a large matrix, a middling one and two small vectors, over and over.
        for (layer, count) in [16_u64 << 20, 4 << 20, 4096, 1000].into_iter().cycle().enumerate() {
            let count = count.min(left);
            if count == 0 {
                break;
            }
            tensors.push(OutputTensor {
                name: format!("layers.{layer}.weight"),
                dtype: FileDtype::Bf16,
                shape: vec![count],
            });
            left -= count;
        }
        let mut state = 1_u64;
        let mut fill = |tensor: &OutputTensor, out: &mut dyn Write| {
            let mut bytes = vec![0; tensor.bytes().unwrap_or(0) as usize];
            for chunk in bytes.chunks_mut(8) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
            }
            out.write_all(&bytes).map_err(|source| WeightsError::io("write", &path, source))
        };
        write_file(
            &path,
            &BTreeMap::from([("format".into(), "pt".into())]),
            tensors,
            false,
            &mut fill,
        )?;
        Ok(Self { path, _folder: folder })
    }
}
