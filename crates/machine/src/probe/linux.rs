//! Linux: `/proc` and `/sys`. The kernel's own words are parsed here and nowhere else.

use std::collections::BTreeMap;

use crate::cpu::{CpuFeature, CpuInfo, features_present};
use crate::gpu::{GpuInfo, NvidiaGpu};
use crate::key_values::KeyValueLines;
use crate::memory::{ContainerLimit, MemoryPressure, SystemMemory};
use crate::pressure::StallPressure;
use crate::process::resident;
use crate::reading::{Bytes, Celsius, Reading, Unknown};
use crate::source::{ProbeQuery, ProbeSource};
use crate::thermal::{Thermal, ThermalSensor};
use crate::{Machine, Provenance};

use super::{cgroup, nvidia, power};

pub fn probe(source: &mut ProbeSource) -> Machine {
    let cpu = cpu(source);
    let memory = memory(source);
    let thermal = Thermal { sensors: sensors(source), mac: None };
    let power = power::linux(source);
    let nvidia = nvidia::probe(source);
    let kernel =
        source.file("/proc/sys/kernel/osrelease").map(|text| format!("Linux {}", text.trim()));
    Machine {
        title: title(source, &cpu, &nvidia.gpus),
        provenance: Provenance::of(source),
        system: source.reading("/proc/sys/kernel/osrelease", kernel),
        arch: source.recording().arch.clone(),
        cpu,
        memory,
        thermal,
        power,
        gpus: nvidia.gpus.into_iter().map(GpuInfo::Nvidia).collect(),
        nvidia: Some(nvidia.stack),
        translated: None,
    }
}

/// What the maker calls the computer; virtual machines and home-built ones go by their GPU or
/// CPU.
fn title(source: &mut ProbeSource, cpu: &CpuInfo, gpus: &[NvidiaGpu]) -> String {
    if !source.recording().title.is_empty() {
        return source.recording().title.clone();
    }
    let model =
        source.file("/sys/class/dmi/id/product_name").map(|name| name.trim().replace('_', " "));
    let placeholder = |name: &String| {
        let name = name.to_lowercase();
        name.is_empty()
            || name.contains("o.e.m.")
            || name == "system product name"
            || name == "default string"
    };
    match model {
        Ok(name) if !placeholder(&name) => name,
        _ => {
            let gpu = gpus.iter().find_map(|gpu| gpu.name.known());
            gpu.or(cpu.model.known()).cloned().unwrap_or_else(|| "Linux computer".into())
        }
    }
}

fn cpu(source: &mut ProbeSource) -> CpuInfo {
    let info = source.file("/proc/cpuinfo");
    let status = source.file("/proc/self/status");
    let threads = info.as_deref().map_err(Clone::clone).and_then(count_threads);
    let affinity = status.as_deref().map_err(Clone::clone).and_then(allowed_threads);
    let quota = cgroup::cpu_quota(source);
    let usable = match (&affinity, &threads) {
        (Ok(allowed), _) | (Err(_), Ok(allowed)) => {
            Ok(quota.map_or(*allowed, |quota| quota.min(*allowed)))
        }
        (Err(reason), Err(_)) => Err(reason.clone()),
    };
    let cores = source.ask(ProbeQuery::PerformanceCores).and_then(|text| {
        text.trim().parse().map_err(|_| Unknown(format!("not a number: {text:?}")))
    });
    let named = |value: Result<String, Unknown>| source.reading("/proc/cpuinfo", value);
    CpuInfo {
        model: named(info.as_deref().map_err(Clone::clone).and_then(model)),
        threads: source.reading("/proc/cpuinfo", threads),
        usable_threads: source
            .reading("/proc/self/status Cpus_allowed_list, cgroup cpu quota", usable),
        performance_cores: source.reading("/sys/devices/system/cpu", cores),
        features: source.reading("/proc/cpuinfo", info.map(|text| features(&text))),
    }
}

fn count_threads(info: &str) -> Result<u32, Unknown> {
    match KeyValueLines::new(info).pairs().filter(|(key, _)| *key == "processor").count() {
        0 => Err(Unknown::because("no CPU is listed")),
        count => Ok(count as u32),
    }
}

/// Counts a list such as `0-3,8,10-11`.
fn allowed_threads(status: &str) -> Result<u32, Unknown> {
    let list = KeyValueLines::new(status).text("Cpus_allowed_list")?;
    let span = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    list.split(',')
        .try_fold(0_u32, |sum, part| sum.checked_add(span(part)?))
        .ok_or_else(|| Unknown(format!("Cpus_allowed_list is not a list of numbers: {list:?}")))
}

/// x86 kernels name the model; Arm ones give part numbers, of which a chip may have several.
fn model(info: &str) -> Result<String, Unknown> {
    let fields = KeyValueLines::new(info);
    if let Ok(name) = fields.text("model name") {
        return Ok(name.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    let mut counts = BTreeMap::<&str, u32>::new();
    for (_, part) in fields.pairs().filter(|(key, _)| *key == "CPU part") {
        *counts.entry(part).or_default() += 1;
    }
    if counts.is_empty() {
        return Err(Unknown::because("neither a model name nor a part number is listed"));
    }
    // The faster core of a big.LITTLE pair is by Arm's habit listed first in data sheets.
    let mut cores: Vec<_> = counts.iter().map(|(part, count)| (arm_core(part), *count)).collect();
    cores.sort_by_key(|((rank, _), _)| *rank);
    let names = cores.iter().map(|((_, name), count)| format!("{count} × {name}"));
    Ok(names.collect::<Vec<_>>().join(" + "))
}

/// Source: part numbers from Linux `arch/arm64/include/asm/cputype.h`; big cores first.
const ARM_CORES: &[(&str, &str)] = &[
    ("0xd85", "Cortex-X925"),
    ("0xd83", "Neoverse V3AE"),
    ("0xd84", "Neoverse V3"),
    ("0xd4f", "Neoverse V2"),
    ("0xd40", "Neoverse V1"),
    ("0xd8e", "Neoverse N3"),
    ("0xd49", "Neoverse N2"),
    ("0xd0c", "Neoverse N1"),
    ("0xd87", "Cortex-A725"),
    ("0xd42", "Cortex-A78AE"),
    ("0xd0b", "Cortex-A76"),
    ("0xd08", "Cortex-A72"),
];

fn arm_core(part: &str) -> (usize, String) {
    match ARM_CORES.iter().position(|(number, _)| *number == part) {
        Some(rank) => (rank, ARM_CORES[rank].1.to_owned()),
        None => (ARM_CORES.len(), format!("Arm core {part}")),
    }
}

fn features(info: &str) -> Vec<CpuFeature> {
    let fields = KeyValueLines::new(info);
    let flags = fields.text("flags").or_else(|_| fields.text("Features")).unwrap_or_default();
    features_present(|row| row.linux, |name| flags.split(' ').any(|flag| flag == name))
}

/// What this process holds.
pub fn process_memory(source: &mut ProbeSource) -> Reading<Bytes> {
    let held = source.file("/proc/self/status").and_then(|text| resident(&text));
    source.reading("/proc/self/status VmRSS", held)
}

pub fn memory(source: &mut ProbeSource) -> SystemMemory {
    let info = source.file("/proc/meminfo");
    let container = cgroup::memory_limit(source);
    let pressure = pressure(source, &container);
    let held = process_memory(source);
    let wakeup = source.ask(ProbeQuery::PressureTrigger).map(|_| true);
    let field = |key| source.number("/proc/meminfo", &info, key).and_then(Bytes::from_kib);
    let total = field("MemTotal");
    let available = field("MemAvailable").and_then(|available| match total.known() {
        Some(total) if available > *total => {
            Err(Unknown(format!("{available} exceeds the total of {total}")))
        }
        _ => Ok(available),
    });
    SystemMemory {
        total,
        available,
        held,
        container,
        swap_total: field("SwapTotal"),
        swap_free: field("SwapFree"),
        pressure,
        pressure_wakeup: source.reading("/proc/pressure/memory", wakeup),
    }
}

/// Within a limit, what counts is how hard that group fights for memory; else how hard the machine does.
fn pressure(
    source: &mut ProbeSource,
    container: &Reading<Option<ContainerLimit>>,
) -> Reading<MemoryPressure> {
    let mut at = |path: String| {
        let stalls = source.file(&path).and_then(|text| StallPressure::parse(&text));
        source.reading(path, stalls.map(MemoryPressure::Stalls).map_err(pressure_off))
    };
    let machine = at("/proc/pressure/memory".into());
    match (container.known(), container.source.strip_suffix("memory.max")) {
        (Some(Some(_)), Some(folder)) => at(format!("{folder}memory.pressure")).or(machine),
        _ => machine,
    }
}

/// Kernels built with pressure accounting but booted without it have no such file, or one that
/// answers "operation not supported".
fn pressure_off(reason: Unknown) -> Unknown {
    match reason.0.as_str() {
        "no such file" => Unknown::because("the kernel keeps no pressure statistics"),
        _ => reason,
    }
}

/// hwmon drivers know labels and critical limits; thermal zones fill in what no driver covers.
fn sensors(source: &mut ProbeSource) -> Reading<Vec<ThermalSensor>> {
    let mut found = hwmon(source);
    let zones = zones(source);
    if let (Ok(found), Ok(zones)) = (&mut found, &zones) {
        let covered =
            |zone: &ThermalSensor| found.iter().any(|known| known.name.starts_with(&zone.name));
        let missing: Vec<_> = zones.iter().filter(|zone| !covered(zone)).cloned().collect();
        found.extend(missing);
    }
    let all = match (found, zones) {
        (Ok(found), _) if !found.is_empty() => Ok(found),
        (_, Ok(zones)) if !zones.is_empty() => Ok(zones),
        (Err(hwmon), Err(zones)) => {
            Err(Unknown(format!("/sys/class/hwmon: {hwmon}; /sys/class/thermal: {zones}")))
        }
        _ => Err(Unknown::because("the kernel shows no temperature sensor")),
    };
    source.reading("/sys/class/hwmon, /sys/class/thermal", all)
}

fn hwmon(source: &mut ProbeSource) -> Result<Vec<ThermalSensor>, Unknown> {
    const ROOT: &str = "/sys/class/hwmon";
    let mut found = Vec::new();
    for chip in source.folder(ROOT)? {
        let folder = format!("{ROOT}/{chip}");
        let Ok(driver) = source.file(&format!("{folder}/name")) else { continue };
        for file in source.folder(&folder).unwrap_or_default() {
            let Some(stem) = file.strip_suffix("_input").filter(|stem| stem.starts_with("temp"))
            else {
                continue;
            };
            let path = format!("{folder}/{file}");
            let temperature = temperature(source, &path);
            let label =
                source.file(&format!("{folder}/{stem}_label")).unwrap_or_else(|_| stem.into());
            let critical = source.file(&format!("{folder}/{stem}_crit"));
            found.push(ThermalSensor {
                name: format!("{} {}", driver.trim(), label.trim()),
                temperature: source.reading(path, temperature),
                critical: critical.and_then(|text| millidegrees(&text)).ok(),
            });
        }
    }
    Ok(found)
}

fn zones(source: &mut ProbeSource) -> Result<Vec<ThermalSensor>, Unknown> {
    const ROOT: &str = "/sys/class/thermal";
    let mut found = Vec::new();
    for zone in source.folder(ROOT)?.iter().filter(|name| name.starts_with("thermal_zone")) {
        let path = format!("{ROOT}/{zone}/temp");
        let Ok(kind) = source.file(&format!("{ROOT}/{zone}/type")) else { continue };
        let temperature = temperature(source, &path);
        found.push(ThermalSensor {
            name: kind.trim().to_owned(),
            temperature: source.reading(path, temperature),
            critical: critical_trip(source, &format!("{ROOT}/{zone}")),
        });
    }
    Ok(found)
}

fn critical_trip(source: &mut ProbeSource, zone: &str) -> Option<Celsius> {
    let names = source.folder(zone).ok()?;
    let trips = names.iter().filter_map(|name| name.strip_suffix("_type"));
    for trip in trips.filter(|trip| trip.starts_with("trip_point_")) {
        if source.file(&format!("{zone}/{trip}_type")).is_ok_and(|kind| kind.trim() == "critical") {
            let limit = source.file(&format!("{zone}/{trip}_temp"));
            return limit.and_then(|text| millidegrees(&text)).ok();
        }
    }
    None
}

/// What the sensor behind this file says now.
pub fn temperature(source: &mut ProbeSource, path: &str) -> Result<Celsius, Unknown> {
    source.file(path).and_then(|text| millidegrees(&text))
}

fn millidegrees(text: &str) -> Result<Celsius, Unknown> {
    let text = text.trim();
    let value: f64 = text.parse().map_err(|_| Unknown(format!("not a temperature: {text:?}")))?;
    Celsius::from_sensor(value / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arm_parts_become_core_names() {
        let info = "processor : 0\nCPU part : 0xd87\nprocessor : 1\nCPU part : 0xd85\nprocessor : 2\nCPU part : 0xd87\n";
        assert_eq!(model(info).unwrap(), "1 × Cortex-X925 + 2 × Cortex-A725");
        assert_eq!(count_threads(info), Ok(3));
        assert_eq!(model("CPU part : 0xfff").unwrap(), "1 × Arm core 0xfff");
        assert!(model("").is_err());
    }

    #[test]
    fn affinity_lists_are_counted() {
        let check =
            |list: &str| allowed_threads(&format!("Name:\tx\nCpus_allowed_list:\t{list}\n")).ok();
        assert_eq!(check("0-1"), Some(2));
        assert_eq!(check("0-3,8,10-11"), Some(7));
        assert_eq!(check("3-1"), None);
        assert_eq!(check("0-4294967295"), None);
        assert_eq!(check("all"), None);
    }

    #[test]
    fn more_available_than_there_is_cannot_be() {
        let text = "MemTotal: 100 kB\nMemAvailable: 200 kB\n";
        let mut source = recorded(&[("file /proc/meminfo", text)]);
        let memory = memory(&mut source);
        assert_eq!(memory.total.known(), Some(&Bytes(102_400)));
        assert!(memory.available.value.unwrap_err().0.contains("exceeds"));
    }

    #[test]
    fn within_a_limit_the_groups_own_pressure_counts() {
        let stalls = |share: &str| {
            format!(
                "some avg10={share} avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00\n"
            )
        };
        let (machine, group) = (stalls("1.00"), stalls("7.00"));
        let mut answers = vec![
            ("file /proc/pressure/memory", machine.as_str()),
            ("file /proc/self/cgroup", "0::/job\n"),
            ("file /sys/fs/cgroup/job/memory.max", "8000\n"),
            ("file /sys/fs/cgroup/job/memory.current", "3000\n"),
            ("file /sys/fs/cgroup/job/memory.pressure", group.as_str()),
        ];
        let some = |answers: &[(&str, &str)]| match memory(&mut recorded(answers)).pressure.value {
            Ok(MemoryPressure::Stalls(stalls)) => stalls.some_10s.0,
            other => panic!("{other:?}"),
        };
        assert_eq!(some(&answers), 7.0);
        answers[2].1 = "max\n";
        assert_eq!(some(&answers), 1.0, "no limit, no contest within the group");
        answers[2].1 = "8000\n";
        answers.pop();
        assert_eq!(some(&answers), 1.0, "the group keeps no statistics");
    }

    #[test]
    fn zones_that_a_driver_covers_are_not_counted_twice() {
        let mut source = recorded(&[
            ("folder /sys/class/hwmon", "hwmon0"),
            ("folder /sys/class/hwmon/hwmon0", "name\ntemp1_input\ntemp1_crit"),
            ("file /sys/class/hwmon/hwmon0/name", "acpitz\n"),
            ("file /sys/class/hwmon/hwmon0/temp1_input", "41000\n"),
            ("file /sys/class/hwmon/hwmon0/temp1_crit", "105000\n"),
            ("folder /sys/class/thermal", "cooling_device0\nthermal_zone0\nthermal_zone1"),
            ("file /sys/class/thermal/thermal_zone0/type", "acpitz\n"),
            ("file /sys/class/thermal/thermal_zone0/temp", "41000\n"),
            ("file /sys/class/thermal/thermal_zone1/type", "x86_pkg_temp\n"),
            ("file /sys/class/thermal/thermal_zone1/temp", "-274000\n"),
        ]);
        let sensors = sensors(&mut source).value.unwrap();
        let names: Vec<_> = sensors.iter().map(|sensor| sensor.name.as_str()).collect();
        assert_eq!(names, ["acpitz temp1", "x86_pkg_temp"]);
        assert_eq!(sensors[0].critical, Some(Celsius(105.0)));
        assert!(sensors[1].temperature.value.is_err());
    }

    fn recorded(answers: &[(&str, &str)]) -> ProbeSource {
        crate::recording::testing::source(answers)
    }
}
