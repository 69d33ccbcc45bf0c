//! The device of a run, and recovery when a GPU is lost: its driver reset, or the system aborted a command
//! buffer and reported it as done. The contents of its memory are gone then. The device is opened again, and
//! the work repeated.
//!
//! Left out on purpose: a copy of the parameters on the host, which every step would have to wait for. A run
//! continues from its last checkpoint, with the same results.

use cluster::World;
use compute::{ComputeError, Device, DeviceKind, check_fp8_matmuls};
use machine::held::{HeldMemory, MemoryPlace};
use machine::sampler::TelemetrySampler;

use super::meter::PhaseMeter;
use crate::config::RunConfig;
use crate::config::base::ComputeType;
use crate::error::{Result, TrainerError};
use crate::event::{Event, EventSink, GpuLoss};
use crate::plan::{DeviceBudget, MemoryLevel, Plan, RaisableLimit, Rates};

/// How often a GPU may be lost without the run making progress. Chosen: a display that wakes up is a passing
/// cause; a loss at the same step again and again is not.
const MAX_GPU_LOSSES: u32 = 3;

/// A device, how to open it, its memory limit, and the ranks that train with it.
pub struct DeviceSetup<'a> {
    /// Its kind, for plans.
    pub kind: DeviceKind,
    /// Its name.
    pub name: String,
    /// The most that may be taken.
    pub limit_bytes: usize,
    /// Main memory for offloaded blocks; none where the device computes in main memory.
    pub host_bytes: Option<usize>,
    /// What the limit may be raised to, if that is known.
    pub raisable: Option<RaisableLimit>,
    /// How fast it is.
    pub rates: Rates,
    /// Where its memory lies.
    pub memory_place: MemoryPlace,
    /// Opens it with an arena of so many bytes.
    pub open: Box<dyn Fn(usize) -> compute::Result<Device> + 'a>,
    /// Starts reading the machine's sensors, and what the run holds; none where there are none, or that is
    /// switched off.
    pub start_sampler: Box<dyn Fn(HeldMemory) -> Option<TelemetrySampler> + 'a>,
    /// The ranks of the job; none where it is trained alone.
    pub world: Option<&'a World>,
}

/// A job with its plan.
pub(super) struct PlannedRun {
    /// With the plan's choices.
    pub config: RunConfig,
    /// Its plan.
    pub plan: Plan,
    /// Fallbacks that take less memory.
    pub levels: Vec<MemoryLevel>,
}

/// The device and the plan of a run.
#[derive(Clone, Copy)]
pub(super) struct RunSetup<'a> {
    pub device_setup: &'a DeviceSetup<'a>,
    pub plan: &'a Plan,
    pub levels: &'a [MemoryLevel],
}

impl PlannedRun {
    /// On this device.
    pub fn setup<'a>(&'a self, device_setup: &'a DeviceSetup<'a>) -> RunSetup<'a> {
        RunSetup { device_setup, plan: &self.plan, levels: &self.levels }
    }
}

impl DeviceSetup<'_> {
    /// For plans.
    pub(super) fn budget(&self) -> DeviceBudget<'_> {
        let Self { kind, limit_bytes, host_bytes, rates, raisable, .. } = self;
        DeviceBudget {
            kind: *kind,
            limit_bytes: *limit_bytes,
            rates,
            host_bytes: *host_bytes,
            raisable: *raisable,
        }
    }
}

/// An open device, and the memory of phases on it.
pub struct MeteredDevice {
    /// The device.
    pub device: Device,
    /// Memory of its phases.
    pub meter: PhaseMeter,
}

impl MeteredDevice {
    /// With an arena as large as the plan. A GPU that cannot multiply as the job asks is refused before any work.
    pub fn open(config: &RunConfig, setup: &DeviceSetup<'_>, plan: &Plan) -> Result<Self> {
        let opened = Self::reopen(setup, plan)?;
        if config.base.compute == ComputeType::Fp8 {
            check_fp8_matmuls(&opened.device)?;
        }
        Ok(opened)
    }

    fn reopen(setup: &DeviceSetup<'_>, plan: &Plan) -> Result<Self> {
        let device = (setup.open)(plan.peak_bytes())?;
        device.set_shared_memory(setup.memory_place == MemoryPlace::BesideProcess);
        let meter = PhaseMeter::new(&device, &plan.phases);
        Ok(Self { device, meter })
    }

    /// Runs `work`, and again each time the GPU is lost. `work` writes the last step it reached into its second
    /// argument; without progress it is retried only [`MAX_GPU_LOSSES`] times.
    pub(super) fn retry_on_gpu_loss<T>(
        mut self,
        setup: RunSetup<'_>,
        events: &EventSink<'_>,
        mut work: impl FnMut(&mut Self, &mut u64) -> Result<T>,
    ) -> Result<(T, Self)> {
        let (mut times, mut step) = (0, 0);
        loop {
            let before = step;
            let error = match work(&mut self, &mut step) {
                Ok(done) => return Ok((done, self)),
                Err(error) => error,
            };
            let Some(said) = self.lost_reason() else { return Err(error) };
            times = if step > before { 1 } else { times + 1 };
            if times > MAX_GPU_LOSSES {
                return Err(TrainerError::GpuLost { step, times, said });
            }
            events.emit(Event::GpuLost(GpuLoss { step, message: said }))?;
            // Its memory is freed before it is allocated again.
            drop(self);
            self = Self::reopen(setup.device_setup, setup.plan)?;
        }
    }

    /// Why the device is lost, if it is; the error of `work` may not say so.
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

    use compute::gpu::{GpuChoice, GpuFault};
    use compute::{CancelToken, Device, DeviceKind};
    use machine::held::MemoryPlace;
    use machine::{Machine, ProbeSource};

    use crate::config::RawConfig;
    use crate::error::{Result, TrainerError};
    use crate::event::EventRecord;
    use crate::event::{Event, GpuLoss, RunEnd, RunStart};
    use crate::plan::Rates;
    use crate::train::tests::software_gpu;
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

    /// The fault to inject each time a GPU is opened: the nth command buffer, and what happens to it.
    type FailurePlan<'a> = &'a dyn Fn(u32) -> Option<(u32, GpuFault)>;

    /// Trains on the software driver; returns the result, and the events, each with the number of command
    /// buffers submitted by then.
    fn trained(
        place: &Path,
        out: &str,
        faults: FailurePlan<'_>,
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
        let device_setup = DeviceSetup {
            kind,
            name: "gpu:software".into(),
            limit_bytes: 1 << 30,
            host_bytes: None,
            raisable: None,
            rates: Rates::documented(&Machine::probe(&mut ProbeSource::live()), kind),
            open: Box::new(|bytes| {
                let device = Device::gpu(GpuChoice::Software, bytes)?;
                if let Some((nth, fault)) = faults(n_opened.replace(n_opened.get() + 1)) {
                    device.fail_command_buffer(nth, fault);
                }
                *opened.lock().unwrap() = Some(device.clone());
                Ok(device)
            }),
            memory_place: MemoryPlace::Process,
            start_sampler: Box::new(|_| None),
            world: None,
        };
        let events = Mutex::new(Vec::new());
        let listener = |record: &EventRecord| {
            let opened = opened.lock().unwrap();
            let n_command_buffers = opened.as_ref().map_or(0, Device::n_command_buffers);
            events.lock().unwrap().push((record.event.clone(), n_command_buffers));
        };
        let stop = CancelToken::default();
        let end = train(&config, &device_setup, TrainOptions::default(), &[&listener], &stop);
        (end, events.into_inner().unwrap())
    }

    /// The steps after which the GPU was lost, and those from which the run continued.
    fn losses(events: &[(Event, u32)]) -> (Vec<u64>, Vec<u64>) {
        let (mut lost, mut begun) = (Vec::new(), Vec::new());
        for (event, _) in events {
            match event {
                Event::GpuLost(GpuLoss { step, .. }) => lost.push(*step),
                Event::Begin(RunStart { from_step, .. }) => begun.push(*from_step),
                _ => {}
            }
        }
        (lost, begun)
    }

    /// The kernel launches of a step.
    fn launches_of(event: &Event) -> Option<u64> {
        match event {
            Event::Step(step) => Some(step.launches.expect("a GPU counts its kernels")),
            _ => None,
        }
    }

    #[test]
    fn a_run_continues_after_gpu_loss_with_the_same_result() {
        let Some(_in_use) = software_gpu() else { return };
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path();
        let model = |out: &str| fs::read(place.join(out).join("model/model.safetensors")).unwrap();
        let (end, events) = trained(place, "whole", &|_| None);
        assert_eq!((end.unwrap().step, losses(&events)), (4, (vec![], vec![0])));
        let (buffers, launches): (Vec<u32>, Vec<u64>) = events
            .iter()
            .filter_map(|(event, n_command_buffers)| {
                Some((*n_command_buffers, launches_of(event)?))
            })
            .unzip();
        assert!(launches[1] > 0 && launches[1] == launches[2], "{launches:?}");

        for (out, fault) in [("lost", GpuFault::Lost), ("ended", GpuFault::Ended)] {
            // In the second step, before there is a checkpoint, and in the last, after that of the second.
            let faults = [(buffers[0] + 1, fault), (buffers[2] + 1, fault)];
            let (end, events) = trained(place, out, &|nth| faults.get(nth as usize).copied());
            assert_eq!(end.unwrap().step, 4);
            assert_eq!(losses(&events), (vec![1, 3], vec![0, 0, 2]));
            assert!(model("whole") == model(out), "{out}: other bytes than without a loss");
        }

        // A loss that repeats ends the run, which can be resumed.
        let fault = (buffers[0] + 1, GpuFault::Ended);
        let (end, events) = trained(place, "again", &|_| Some(fault));
        let error = end.unwrap_err();
        assert!(matches!(error, TrainerError::GpuLost { step: 1, times: 4, .. }), "{error}");
        assert_eq!(losses(&events).0, [1, 1, 1]);
    }
}
