//! Where a run computes, and what becomes of it when that is lost. A GPU may be gone from one moment to the
//! next: its driver gave up, or the system ended a list of work and did as if it were done. What lay in its
//! memory is worth nothing then. It is opened again, and what was done there is done again.
//!
//! Left out on purpose: a copy of what is trained on the host, which every step would have to be waited for.
//! A run begins again at its last checkpoint, and gives the same numbers.

use compute::{ComputeError, Device, DeviceKind};
use machine::sampler::TelemetrySampler;

use super::meter::PhaseMeter;
use crate::config::RunConfig;
use crate::error::{Result, TrainerError};
use crate::event::{Event, EventSink, GpuLoss};
use crate::plan::{DeviceBudget, MemoryLevel, Plan, Rates};

/// How often a GPU may be lost without the run getting any further. Chosen: a display that woke up is a
/// cause that goes away; what happens at the same place again and again does not.
const MAX_GPU_LOSSES: u32 = 3;

/// What computes, and in how much memory.
pub struct DeviceSetup<'a> {
    /// For plans.
    pub kind: DeviceKind,
    /// Its name.
    pub name: String,
    /// The most that may be taken.
    pub limit_bytes: usize,
    /// Main memory that blocks may stream from; nothing where the engine computes in main memory.
    pub host_bytes: Option<usize>,
    /// How fast it is.
    pub rates: Rates,
    /// Opens it with an arena of so many bytes.
    pub open: Box<dyn Fn(usize) -> compute::Result<Device> + 'a>,
    /// Begins to feel the machine; nothing where it cannot be, or is not to be.
    pub start_sampler: Box<dyn Fn() -> Option<TelemetrySampler> + 'a>,
}

/// A job of which all is decided.
pub(super) struct PlannedRun {
    /// With every choice of the plan.
    pub config: RunConfig,
    /// What it takes.
    pub plan: Plan,
    /// Ways to compute it in less memory.
    pub levels: Vec<MemoryLevel>,
}

/// What a run is set up with.
#[derive(Clone, Copy)]
pub(super) struct RunSetup<'a> {
    pub device_setup: &'a DeviceSetup<'a>,
    pub plan: &'a Plan,
    pub levels: &'a [MemoryLevel],
}

impl PlannedRun {
    /// To run on this.
    pub fn setup<'a>(&'a self, on: &'a DeviceSetup<'a>) -> RunSetup<'a> {
        RunSetup { device_setup: on, plan: &self.plan, levels: &self.levels }
    }
}

impl DeviceSetup<'_> {
    /// For plans.
    pub(super) fn budget(&self) -> DeviceBudget<'_> {
        let Self { kind, limit_bytes, host_bytes, rates, .. } = self;
        DeviceBudget { kind: *kind, limit_bytes: *limit_bytes, rates, host_bytes: *host_bytes }
    }
}

/// A device, and what phases take on it.
pub struct MeteredDevice {
    /// Where it computes.
    pub device: Device,
    /// What its phases take.
    pub meter: PhaseMeter,
}

impl MeteredDevice {
    /// With an arena as large as the plan.
    pub fn open(on: &DeviceSetup<'_>, plan: &Plan) -> Result<Self> {
        let device = (on.open)(plan.peak_bytes())?;
        let meter = PhaseMeter::new(&device, &plan.phases);
        Ok(Self { device, meter })
    }

    /// Does `work`, again as often as the GPU is lost under it. `work` is given a number in which to note how
    /// far it ever got; where that does not grow, it is not tried for ever.
    pub(super) fn retry_on_gpu_loss<T>(
        mut self,
        setup: RunSetup<'_>,
        events: &EventSink<'_>,
        mut work: impl FnMut(&mut Self, &EventSink<'_>, &mut u64) -> Result<T>,
    ) -> Result<(T, Self)> {
        let (mut times, mut step) = (0, 0);
        loop {
            let before = step;
            let error = match work(&mut self, events, &mut step) {
                Ok(done) => return Ok((done, self)),
                Err(error) => error,
            };
            let Some(said) = self.lost_reason() else { return Err(error) };
            times = if step > before { 1 } else { times + 1 };
            if times > MAX_GPU_LOSSES {
                return Err(TrainerError::GpuLost { step, times, said });
            }
            events.emit(Event::Lost(GpuLoss { step, said }))?;
            // Its memory is given back before it is asked for again.
            drop(self);
            self = Self::open(setup.device_setup, setup.plan)?;
        }
    }

    /// Why the device is lost, if it is. What failed on it may not have said so.
    fn lost_reason(&self) -> Option<String> {
        match self.device.synchronise() {
            Err(ComputeError::GpuLost { message }) => Some(message),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::path::Path;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    use compute::gpu::{GpuAdapterKind, GpuChoice, GpuFault, adapters};
    use compute::{Device, DeviceKind};
    use machine::{Machine, ProbeSource};

    use crate::config::RawConfig;
    use crate::error::{Result, TrainerError};
    use crate::event::EventRecord;
    use crate::event::{Event, GpuLoss, RunEnd, RunStart};
    use crate::plan::Rates;
    use crate::train::{DeviceSetup, TrainOptions, train};

    const JOB: &str = "
[base]
path = 'tiny'
random_init = true
dtype = 'f32'
[text]
path = 'text.txt'
length = 16
[adapter]
kind = 'full'
[train]
steps = 4
batch_size = 1
[optimizer]
learning_rate = 1e-2
[output]
save_every = 2
";

    /// What becomes of a GPU each time it is opened.
    type FailurePlan<'a> = &'a dyn Fn(u32) -> Option<(u32, GpuFault)>;

    /// Trains on the software driver in a folder of its own; gives how it went, and what was told, each with
    /// how many lists of work the GPU had been handed by then.
    fn trained(
        place: &Path,
        out: &str,
        fate: FailurePlan<'_>,
    ) -> (Result<RunEnd>, Vec<(Event, u32)>) {
        fs::write(
            place.join("text.txt"),
            "the quick brown fox jumps over the lazy dog. ".repeat(9),
        )
        .unwrap();
        let mut raw = RawConfig::from_text(JOB, &place.join("job.toml")).unwrap();
        raw.set_path("output.folder", &place.join(out)).unwrap();
        let config = raw.resolve().unwrap();
        let (n_opened, opened) = (Cell::new(0), Mutex::new(None::<Device>));
        let kind = DeviceKind::gpu(GpuChoice::Software);
        let on = DeviceSetup {
            kind,
            name: "gpu:software".into(),
            limit_bytes: 1 << 30,
            host_bytes: None,
            rates: Rates::documented(&Machine::probe(&mut ProbeSource::live()), kind),
            open: Box::new(|bytes| {
                let device = Device::gpu(GpuChoice::Software, bytes)?;
                if let Some((nth, trouble)) = fate(n_opened.replace(n_opened.get() + 1)) {
                    device.fail_command_buffer(nth, trouble);
                }
                *opened.lock().unwrap() = Some(device.clone());
                Ok(device)
            }),
            start_sampler: Box::new(|| None),
        };
        let told = Mutex::new(Vec::new());
        let listener = |record: &EventRecord| {
            let n_lists = opened.lock().unwrap().as_ref().map_or(0, Device::n_command_buffers);
            told.lock().unwrap().push((record.event.clone(), n_lists));
        };
        let stop = AtomicBool::new(false);
        let end = train(&config, &on, TrainOptions::default(), &[&listener], &stop);
        (end, told.into_inner().unwrap())
    }

    /// The steps after which the GPU was lost, and those from which the run went on.
    fn losses(events: &[(Event, u32)]) -> (Vec<u64>, Vec<u64>) {
        let (mut lost, mut begun) = (Vec::new(), Vec::new());
        for (event, _) in events {
            match event {
                Event::Lost(GpuLoss { step, .. }) => lost.push(*step),
                Event::Begin(RunStart { from_step, .. }) => begun.push(*from_step),
                _ => {}
            }
        }
        (lost, begun)
    }

    /// Of a step, the lists of work that the GPU had been handed by its end, and the kernels of the step.
    fn of_step((event, n_lists): &(Event, u32)) -> Option<(u32, u64)> {
        match event {
            Event::Step(step) => Some((*n_lists, step.launches.expect("a GPU counts its kernels"))),
            _ => None,
        }
    }

    /// In one test, since those who share a process share the GPU, which is lost to all.
    #[test]
    #[allow(clippy::print_stderr)] // Says why nothing is shown.
    fn a_run_goes_on_when_its_gpu_is_lost_and_learns_the_same() {
        if !adapters().iter().any(|adapter| adapter.kind == GpuAdapterKind::Software) {
            return eprintln!("no software driver for Vulkan here");
        }
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path();
        let model = |out: &str| fs::read(place.join(out).join("model/model.safetensors")).unwrap();
        let (end, events) = trained(place, "whole", &|_| None);
        assert_eq!((end.unwrap().step, losses(&events)), (4, (vec![], vec![0])));
        let (lists, launches): (Vec<u32>, Vec<u64>) = events.iter().filter_map(of_step).unzip();
        assert!(launches[1] > 0 && launches[1] == launches[2], "{launches:?}");

        for (out, trouble) in [("lost", GpuFault::Lost), ("ended", GpuFault::Ended)] {
            // In the second step, before there is a checkpoint, and in the last, after that of the second.
            let fates = [(lists[0] + 1, trouble), (lists[2] + 1, trouble)];
            let (end, events) = trained(place, out, &|nth| fates.get(nth as usize).copied());
            assert_eq!(end.unwrap().step, 4);
            assert_eq!(losses(&events), (vec![1, 3], vec![0, 0, 2]));
            assert!(model("whole") == model(out), "{out}: other bytes than without a loss");
        }

        // What happens again and again ends the run, which can go on.
        let fate = (lists[0] + 1, GpuFault::Ended);
        let (end, events) = trained(place, "again", &|_| Some(fate));
        let error = end.unwrap_err();
        assert!(matches!(error, TrainerError::GpuLost { step: 1, times: 4, .. }), "{error}");
        assert_eq!(losses(&events).0, [1, 1, 1]);
    }
}
