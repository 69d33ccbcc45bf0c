//! NVIDIA's management library, loaded at run time: what `nvidia-smi` knows, as `key: value` text.

use std::fmt::Display;

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{
    Clock, EccCounter, MemoryError, TemperatureSensor, TemperatureThreshold,
};
use nvml_wrapper::error::NvmlError;

use super::cuda::version_text;
use crate::key_values::write_key_value;
use crate::reading::Unknown;
use crate::source::ProbeAnswer;

/// Drivers install only the name with the version on Linux; the bare one belongs to the toolkit.
const LIBRARY: &str = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };

pub fn load() -> Result<Nvml, Unknown> {
    Nvml::builder().lib_path(LIBRARY.as_ref()).init().map_err(|error| match error {
        NvmlError::LibloadingError(_) => Unknown(format!("{LIBRARY} not found")),
        other => Unknown(reason(&other)),
    })
}

pub fn driver(nvml: &Nvml) -> String {
    let mut text = String::new();
    put(&mut text, "driver", nvml.sys_driver_version());
    put(&mut text, "cuda", nvml.sys_cuda_driver_version().map(version_text));
    put(&mut text, "cards", nvml.device_count());
    text
}

pub fn gpu(nvml: &Nvml, index: u32) -> ProbeAnswer {
    let device = nvml.device_by_index(index).map_err(|error| Unknown(reason(&error)))?;
    let capability = device.cuda_compute_capability();
    let slowdown = device.temperature_threshold(TemperatureThreshold::Slowdown);
    let errors = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    let mut text = String::new();
    let out = &mut text;
    put(out, "name", device.name());
    put(out, "pci_bus_id", device.pci_info().map(|pci| pci.bus_id));
    put(
        out,
        "compute_capability",
        capability.map(|found| format!("{}.{}", found.major, found.minor)),
    );
    put(out, "memory_total_bytes", device.memory_info().map(|memory| memory.total));
    put(out, "memory_free_bytes", device.memory_info().map(|memory| memory.free));
    put(out, "slowdown_celsius", slowdown);
    put(out, "power_limit_milliwatts", device.enforced_power_limit());
    put(out, "sm_clock_max_mhz", device.max_clock_info(Clock::SM));
    put(out, "ecc_uncorrected", errors);
    Ok(text)
}

/// Few calls, since it is asked every second while the GPU works.
pub fn telemetry(nvml: &Nvml, index: u32) -> ProbeAnswer {
    let device = nvml.device_by_index(index).map_err(|error| Unknown(reason(&error)))?;
    let mut text = String::new();
    let out = &mut text;
    put(out, "temperature_celsius", device.temperature(TemperatureSensor::Gpu));
    put(out, "power_milliwatts", device.power_usage());
    put(out, "sm_clock_mhz", device.clock_info(Clock::SM));
    put(out, "utilisation_percent", device.utilization_rates().map(|rates| rates.gpu));
    put(out, "memory_utilisation_percent", device.utilization_rates().map(|rates| rates.memory));
    put(out, "throttle_bits", device.current_throttle_reasons().map(|reasons| reasons.bits()));
    Ok(text)
}

fn put<T: Display>(text: &mut String, key: &str, value: Result<T, NvmlError>) {
    write_key_value(text, key, value.map_err(|error| reason(&error)));
}

fn reason(error: &NvmlError) -> String {
    match error {
        NvmlError::NotSupported => "not supported by this GPU".into(),
        NvmlError::NoPermission => "permission denied".into(),
        NvmlError::DriverNotLoaded => "driver not loaded".into(),
        NvmlError::LibRmVersionMismatch => "driver and library versions differ".into(),
        NvmlError::GpuLost => "the GPU has fallen off the bus".into(),
        other => other.to_string(),
    }
}
