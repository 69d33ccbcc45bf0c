//! `hearth doctor`: the hardware, what of it hearth uses, and what is wrong.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};

use compute::gpu::{self, GpuAdapter, GpuAdapterKind, GpuFeatures};
use compute::self_test::{TestTarget, self_test};
use compute::{HostMemoryTrial, PieceSpeeds, TrialSpeeds, host_memory_trial};
use machine::budget::budget;
use machine::findings::{Severity, findings};
use machine::monitor::Monitor;
use machine::sampler::TelemetrySampler;
use machine::{Machine, MachineRecording, ProbeSource, Provenance};
use trainer::gpu_self_test;

use super::device::DeviceChoice;
use super::node_check::NodeCheckArgs;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render::doctor::{
    AdapterFeature, Diagnosis, LoadingSpeeds, MemorySpeed, OfferedAdapter, WeightLoading,
};
use crate::{interrupt, render};

/// Show this computer's hardware, what of it hearth uses, and what is wrong.
///
/// Reads CPU, memory, memory pressure, temperatures, power, GPUs, drivers and libraries. What cannot be read
/// is shown as unknown with the reason; that is never an error.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth doctor
  hearth doctor --watch                             refreshed every second, until Ctrl-C
  hearth doctor --json | jq .budget.memory          one figure for a script
  hearth doctor --strict > /dev/null || echo faulty  for scripts and health checks
  hearth doctor --record my-machine.toml            a file to keep or to send
  hearth doctor --machine machines/dgx-spark.toml   a computer you do not have
  hearth doctor --self-test --device gpu            compare every op on a GPU with the CPU
  hearth doctor --nodes mac.local,spark.local       can they train together, and how fast is the link")]
pub struct DoctorArgs {
    /// Print everything as JSON: each reading with unit, source and age
    #[arg(long)]
    json: bool,

    /// Show a recorded machine instead of this one
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,

    /// Record this computer into a new file, for --machine
    #[arg(long, value_name = "FILE", conflicts_with = "machine")]
    record: Option<PathBuf>,

    /// Exit with 1 if there is a fault: something that makes runs slow, wrong or impossible until it is fixed
    #[arg(long)]
    strict: bool,

    /// Refresh every second and whenever the system reports memory pressure, until Ctrl-C
    #[arg(long, conflicts_with_all = ["machine", "record", "strict"])]
    watch: bool,

    /// Compare every op on a GPU with the CPU, and exit with 1 if one is wrong
    #[arg(long, conflicts_with_all = ["machine", "record", "watch", "json", "strict"])]
    self_test: bool,

    /// The GPU to test: gpu:0, gpu:software or cuda:0
    #[arg(long, default_value = "gpu:0", requires = "self_test", value_parser = DeviceChoice::parse_gpu)]
    device: DeviceChoice,

    #[command(flatten)]
    nodes: NodeCheckArgs,
}

/// Optional features of a GPU, and whether hearth uses them.
fn adapter_features(offers: GpuFeatures) -> Vec<AdapterFeature> {
    let all = [
        ("mappable buffers", offers.mappable_buffers, true),
        ("f16 arithmetic", offers.shader_f16, false),
        ("subgroups", offers.subgroups, false),
        ("matrix units", offers.matrix_units.is_some(), true),
        ("timestamps", offers.timestamps, false),
    ];
    all.map(|(name, on, is_used)| AdapterFeature { name, on, is_used }).into()
}

/// All that there are, in the order of their numbers.
fn gpu_adapters() -> Vec<OfferedAdapter> {
    let mut number = 0..;
    let describe = |adapter: GpuAdapter| {
        let is_software = adapter.kind == GpuAdapterKind::Software;
        let number = if is_software { None } else { number.next() };
        let typed =
            number.map_or("gpu:software".to_owned(), |number: usize| format!("gpu:{number}"));
        OfferedAdapter {
            device: adapter.missing.is_none().then_some(typed),
            name: adapter.name,
            driver: adapter.driver,
            interface: adapter.interface,
            is_software,
            buffer_bytes: adapter.buffer_bytes,
            tensor_bytes: adapter.tensor_bytes,
            group_bytes: adapter.group_bytes,
            shares_memory: adapter.shares_memory,
            offers: adapter_features(adapter.features),
            lacks: adapter.missing,
        }
    };
    gpu::adapters().into_iter().map(describe).collect()
}

/// Tries memory on NVIDIA GPUs that share it with the CPU; nothing on others.
fn weight_loading(machine: &Machine) -> Vec<WeightLoading> {
    let shared = machine.nvidia_gpus().filter(|gpu| gpu.unified.known() == Some(&true));
    let speed =
        |PieceSpeeds { load, gpu_read, gpu_write }| MemorySpeed { load, gpu_read, gpu_write };
    let describe = |index: &u32| {
        let HostMemoryTrial { is_used, is_forced, speeds, .. } = host_memory_trial(*index as usize);
        let (speeds, unknown) = match speeds {
            Ok(TrialSpeeds { host, device }) => {
                let (straight, buffered) = (speed(host), speed(device));
                (Some(LoadingSpeeds { straight, buffered }), None)
            }
            Err(reason) => (None, Some(reason)),
        };
        let device = DeviceChoice::Cuda(*index).to_string();
        WeightLoading { device, is_straight: is_used, is_forced, unknown, speeds }
    };
    shared.filter_map(|gpu| gpu.cuda_index.known()).map(describe).collect()
}

impl Diagnosis {
    fn new(source: &mut ProbeSource) -> Self {
        let machine = Machine::probe(source);
        let (budget, findings) = (budget(&machine), findings(&machine));
        let is_live = matches!(machine.provenance, Provenance::Live);
        let adapters = if is_live { gpu_adapters() } else { vec![] };
        let host_memory = if is_live { weight_loading(&machine) } else { vec![] };
        let hearth = env!("CARGO_PKG_VERSION");
        Self { hearth, machine, budget, findings, adapters, host_memory }
    }
}

pub fn run(arguments: &DoctorArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    if let Some(outcome) = arguments.nodes.run(out)? {
        return Ok(outcome);
    }
    if arguments.self_test {
        return test(arguments.device, out);
    }
    let mut source = match &arguments.machine {
        Some(path) => ProbeSource::replay(MachineRecording::load(path)?),
        None => ProbeSource::live(),
    };
    if arguments.watch {
        return watch(&mut source, arguments.json, out);
    }
    let diagnosis = Diagnosis::new(&mut source);
    if let Some(path) = &arguments.record {
        let title = diagnosis.machine.title.clone();
        MachineRecording { title, ..source.recording().clone() }.save(path)?;
    }
    show(&diagnosis, arguments.json, out)?;
    let has_fault = diagnosis.findings.iter().any(|finding| finding.level == Severity::Fault);
    Ok(if arguments.strict && has_fault { CommandOutcome::Differs } else { CommandOutcome::Done })
}

/// Says of every op whether it may be used.
fn test(device: DeviceChoice, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let tested = match device {
        DeviceChoice::Cpu => unreachable!("not let through by the parser"),
        DeviceChoice::Cuda(index) => TestTarget::Cuda(index as usize),
        DeviceChoice::Gpu(choice) => TestTarget::Gpu(choice),
    };
    let (mut all, mut wrong) = (0, Vec::new());
    self_test(tested, |verdict| {
        all += 1;
        if !verdict.is_right() {
            wrong.push(render::doctor::wrong_op(verdict));
        }
    })?;
    for line in &wrong {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "{}", render::doctor::tested(&device.to_string(), all, wrong.len()))?;
    let outcome = if wrong.is_empty() { CommandOutcome::Done } else { CommandOutcome::Differs };
    // Later runs on this GPU are refused if an op is wrong.
    if let (DeviceChoice::Gpu(choice), Some(folder)) = (device, gpu_self_test::folder()) {
        gpu_self_test::save(&folder, &gpu::adapter(choice)?, wrong)?;
    }
    Ok(outcome)
}

fn show(diagnosis: &Diagnosis, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    if json {
        render::json::object(out, diagnosis)?;
    } else {
        write!(out, "{}", render::doctor::page(diagnosis))?;
    }
    Ok(())
}

/// A terminal is redrawn in place; anything else gets one page or one line of JSON after another.
fn watch(
    source: &mut ProbeSource,
    json: bool,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    const HOME_AND_CLEAR: &str = "\x1b[H\x1b[J";
    let mut seen = Diagnosis::new(source);
    let wakes = wakes(&seen)?;
    let redraw = !json && std::io::stdout().is_terminal();
    loop {
        if json {
            render::json::line(out, &seen)?;
        } else {
            let page = render::doctor::page(&seen);
            if redraw {
                out.flush()?;
                // Past what shows control characters.
                std::io::stdout().write_all(HOME_AND_CLEAR.as_bytes())?;
            }
            write!(out, "{page}")?;
        }
        out.flush()?;
        match wakes.recv() {
            Ok(WatchWake::Reading) => seen = Diagnosis::new(source),
            Ok(WatchWake::Interrupt) | Err(_) => return Ok(CommandOutcome::Interrupted),
        }
    }
}

/// Why to look again, or to end.
enum WatchWake {
    Reading,
    Interrupt,
}

/// The sampler's clock is the one of every run: each second, and when memory becomes scarce.
fn wakes(seen: &Diagnosis) -> Result<Receiver<WatchWake>, Failure> {
    let (sender, receiver) = mpsc::channel();
    let monitor = Monitor::new(&seen.machine, seen.budget.device, None);
    let sampler = TelemetrySampler::start(ProbeSource::live(), monitor)?;
    let interrupted = sender.clone();
    let relay =
        move || while sampler.next().is_some_and(|_| sender.send(WatchWake::Reading).is_ok()) {};
    std::thread::Builder::new().spawn(relay)?;
    interrupt::on_first(move || _ = interrupted.send(WatchWake::Interrupt))?;
    Ok(receiver)
}
