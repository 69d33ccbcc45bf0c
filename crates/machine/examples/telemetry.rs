//! Prints what a run on a GPU or on the CPU would be paced by, a line of JSON per reading, and the
//! energy at the end: to be held against `nvidia-smi` and other meters.
//!
//! `cargo run --release -p machine --example telemetry -- cuda 60`: the first GPU, for a minute.

use std::io::Write;

use machine::budget::DeviceId;
use machine::energy::EnergyMeter;
use machine::monitor::Monitor;
use machine::sampler::TelemetrySampler;
use machine::{Machine, ProbeSource};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_cuda = arguments.first().is_some_and(|device| device == "cuda");
    let device = if is_cuda { DeviceId::Cuda(0) } else { DeviceId::Cpu };
    let secs: f64 = arguments.get(1).map_or(Ok(10.0), |secs| secs.parse())?;
    let monitor = Monitor::new(&Machine::probe(&mut ProbeSource::live()), device, None);
    let sampler = TelemetrySampler::start(ProbeSource::live(), monitor)?;
    let mut out = std::io::stdout().lock();
    let (mut energy, mut first) = (EnergyMeter::default(), None);
    while let Some((at, telemetry)) = sampler.next() {
        let since = at.duration_since(*first.get_or_insert(at)).as_secs_f64();
        energy.add(at, telemetry.watts);
        writeln!(out, "{{\"secs\":{since:.3},\"feel\":{}}}", serde_json::to_string(&telemetry)?)?;
        if since >= secs {
            break;
        }
    }
    let joules = serde_json::to_string(&energy.joules())?;
    writeln!(out, "{{\"joules\":{joules},\"covered\":{}}}", energy.covered())?;
    Ok(())
}
