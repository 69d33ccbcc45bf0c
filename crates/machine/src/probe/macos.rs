//! macOS: `sysctl`, `vm_stat`, `pmset` and `ioreg` in text, Metal and thermal state as fields.
//! Only the asking needs a Mac; this parsing is tested everywhere, with recorded outputs.

use crate::cpu::{CPU_FEATURES, CpuInfo, features_present};
use crate::gpu::{AppleChip, AppleGpu, AppleTier, GpuInfo};
use crate::hardware::apple_features;
use crate::key_values::KeyValueLines;
use crate::memory::{MemoryPressure, PressureLevel, SystemMemory};
use crate::reading::{Bytes, Percent, Reading, Unknown};
use crate::source::{ProbeAnswer, ProbeQuery, ProbeSource};
use crate::thermal::{MacThermal, PowerMode, Thermal, ThermalPressure, ThermalState};
use crate::{Machine, Provenance};

pub fn probe(source: &mut ProbeSource) -> Machine {
    let facts = source.command(&sysctl_line());
    let brand = source.text("sysctl", &facts, "machdep.cpu.brand_string");
    let system = source.text("sysctl", &facts, "kern.osproductversion");
    let gpu = gpu(source, &facts, &brand, &system);
    Machine {
        title: match (source.recording().title.as_str(), brand.known()) {
            ("", Some(brand)) => brand.clone(),
            ("", None) => "Mac".into(),
            (title, _) => title.into(),
        },
        provenance: Provenance::of(source),
        memory: memory_by(source, &facts),
        thermal: Thermal {
            sensors: source
                .reading("macOS", Err(Unknown::because("macOS shows temperatures to root only"))),
            mac: Some(thermal(source)),
        },
        power: super::power::macos(source),
        cpu: cpu(source, &facts, brand),
        gpus: gpu.map(GpuInfo::Apple).into_iter().collect(),
        nvidia: None,
        translated: Some(
            source.number("sysctl", &facts, "sysctl.proc_translated").map(|flag: u32| flag == 1),
        ),
        system: system.map(|version| format!("macOS {version}")),
        arch: source.recording().arch.clone(),
    }
}

const SYSCTLS: &[&str] = &[
    "machdep.cpu.brand_string",
    "hw.model",
    "kern.osproductversion",
    "sysctl.proc_translated",
    "hw.memsize",
    "hw.pagesize",
    "hw.logicalcpu",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel0.name",
    "hw.perflevel1.physicalcpu",
    "hw.perflevel1.name",
    "kern.memorystatus_vm_pressure_level",
    "vm.swapusage",
    "iogpu.wired_limit_mb",
    "debug.iogpu.wired_limit",
];

/// One call for all names: it prints those it knows and passes over the others.
fn sysctl_line() -> String {
    let features = CPU_FEATURES.iter().flat_map(|row| row.macos);
    let names: Vec<_> = SYSCTLS.iter().chain(features).copied().collect();
    format!("sysctl {}", names.join(" "))
}

fn cpu(source: &ProbeSource, facts: &ProbeAnswer, brand: Reading<String>) -> CpuInfo {
    let threads = || source.number("sysctl", facts, "hw.logicalcpu");
    let features = facts.as_deref().map_err(Clone::clone).map(|text| {
        let fields = KeyValueLines::new(text);
        features_present(|row| row.macos, |name| fields.text(name) == Ok("1"))
    });
    let cores = facts.as_deref().ok().and_then(core_levels);
    CpuInfo {
        model: match cores {
            Some(cores) => brand.map(|brand| format!("{brand}, {cores}")),
            None => brand,
        },
        threads: threads(),
        usable_threads: threads(),
        performance_cores: source.number("sysctl", facts, "hw.perflevel0.physicalcpu"),
        features: source.reading("sysctl hw.optional", features),
    }
}

/// Level 0 is the fastest, whatever it is called: "Performance" up to M4, "Super" from M5 on.
fn core_levels(facts: &str) -> Option<String> {
    let fields = KeyValueLines::new(facts);
    let level = |index: u32| {
        let count: u32 = fields.number(&format!("hw.perflevel{index}.physicalcpu")).ok()?;
        let name = fields.text(&format!("hw.perflevel{index}.name"));
        let usual = if index == 0 { "performance" } else { "efficiency" };
        Some(format!("{count} {}", name.map_or(usual.to_owned(), str::to_lowercase)))
    };
    let levels: Vec<_> = (0..2).filter_map(level).collect();
    (!levels.is_empty()).then(|| format!("{} cores", levels.join(" + ")))
}

/// One call of `sysctl` tells all the names of a probe about as fast as the two that are wanted here.
pub fn memory(source: &mut ProbeSource) -> SystemMemory {
    let facts = source.command(&sysctl_line());
    memory_by(source, &facts)
}

/// What this process holds, by its footprint, which has what Metal was given. Recordings of before have the resident
/// size, which has not.
pub fn process_memory(source: &mut ProbeSource) -> Reading<Bytes> {
    let process = source.ask(ProbeQuery::MacProcess);
    let footprint = source.number("proc_pid_rusage", &process, "footprint_bytes").map(Bytes);
    footprint.or(source.number("ps", &process, "resident_kib").and_then(Bytes::from_kib))
}

fn memory_by(source: &mut ProbeSource, facts: &ProbeAnswer) -> SystemMemory {
    let stat = source.command("vm_stat");
    let held = process_memory(source);
    let wakeup = source.ask(ProbeQuery::PressureTrigger).map(|_| true);
    let available = stat.as_deref().map_err(Clone::clone).and_then(available);
    let swap = |key| {
        let usage = source.text("sysctl", facts, "vm.swapusage");
        usage.and_then(|usage| swap_field(&usage, key))
    };
    let level = source.number("sysctl", facts, "kern.memorystatus_vm_pressure_level");
    SystemMemory {
        total: source.number("sysctl", facts, "hw.memsize").map(Bytes),
        available: source.reading("vm_stat", available),
        held,
        container: source.reading("macOS", Ok(None)),
        swap_total: swap("total"),
        swap_free: swap("free"),
        pressure: level.and_then(pressure_level).map(MemoryPressure::Level),
        pressure_wakeup: source.reading("macOS", wakeup),
    }
}

/// What the system could hand out without swapping: free pages, and those it only keeps in case
/// they are asked for again. The same sum as psutil's; purgeable pages are already among them.
fn available(stat: &str) -> Result<Bytes, Unknown> {
    let fields = KeyValueLines::new(stat);
    let page = stat
        .split_once("page size of ")
        .and_then(|(_, rest)| rest.split(' ').next()?.parse::<u64>().ok())
        .ok_or_else(|| Unknown::because("vm_stat does not tell its page size"))?;
    let mut pages = 0_u64;
    for kind in ["Pages free", "Pages inactive", "Pages speculative"] {
        pages = pages.saturating_add(fields.number(kind)?);
    }
    let bytes =
        pages.checked_mul(page).ok_or_else(|| Unknown(format!("{pages} pages cannot be")))?;
    Ok(Bytes(bytes))
}

/// `total = 2048.00M  used = 1141.31M  free = 906.69M  (encrypted)`; some locales write commas.
fn swap_field(usage: &str, key: &str) -> Result<Bytes, Unknown> {
    let parse = || {
        let (_, rest) = usage.split_once(&format!("{key} = "))?;
        let mib: f64 = rest.split('M').next()?.replace(',', ".").parse().ok()?;
        (mib >= 0.0).then_some(Bytes((mib * 1_048_576.0) as u64))
    };
    parse().ok_or_else(|| Unknown(format!("no {key} in {usage:?}")))
}

/// The numbers of `DISPATCH_MEMORYPRESSURE_*`.
fn pressure_level(level: u32) -> Result<PressureLevel, Unknown> {
    match level {
        1 => Ok(PressureLevel::Normal),
        2 => Ok(PressureLevel::Warning),
        4 => Ok(PressureLevel::Critical),
        other => Err(Unknown(format!("memory pressure level {other} is not 1, 2 or 4"))),
    }
}

fn gpu(
    source: &mut ProbeSource,
    facts: &ProbeAnswer,
    brand: &Reading<String>,
    system: &Reading<String>,
) -> Option<AppleGpu> {
    let metal = source.ask(ProbeQuery::Metal);
    let cores = source.command("ioreg -rc AGXAccelerator -d1").and_then(|text| gpu_cores(&text));
    let chip = brand.clone().and_then(|brand| apple_chip(&brand));
    if metal.is_err() && chip.value.is_err() {
        return None;
    }
    let unified = source.number("Metal", &metal, "unified").map(|flag: u32| flag == 1);
    let version = system.clone().and_then(|version| major(&version));
    let wired = ["iogpu.wired_limit_mb", "debug.iogpu.wired_limit"]
        .map(|key| source.number("sysctl", facts, key).and_then(wired_limit));
    let [wired, wired_before_sonoma] = wired;
    Some(AppleGpu {
        name: source.text("Metal", &metal, "name").or(brand.clone()),
        features: apple_features(&chip.value, &version.value, &unified.value),
        chip,
        cores: source.reading("ioreg AGXAccelerator", cores),
        unified,
        working_set: source.number("Metal", &metal, "recommended_bytes").map(Bytes),
        wired_limit: wired.or(wired_before_sonoma),
        max_buffer: source.number("Metal", &metal, "max_buffer_bytes").map(Bytes),
    })
}

/// `Apple M3 Max` is family 3, tier Max.
fn apple_chip(brand: &str) -> Result<AppleChip, Unknown> {
    let parse = || {
        let name = brand.strip_prefix("Apple M")?;
        let (family, tier) = name.split_once(' ').unwrap_or((name, ""));
        let tier = match tier {
            "" => AppleTier::Base,
            "Pro" => AppleTier::Pro,
            "Max" => AppleTier::Max,
            "Ultra" => AppleTier::Ultra,
            _ => return None,
        };
        Some(AppleChip { family: family.parse().ok()?, tier })
    };
    parse().ok_or_else(|| Unknown(format!("not an M-series chip: {brand:?}")))
}

fn gpu_cores(registry: &str) -> Result<u32, Unknown> {
    let line = registry.lines().find_map(|line| line.trim().strip_prefix("\"gpu-core-count\" = "));
    let cores = line.and_then(|cores| cores.trim().parse().ok());
    cores.ok_or_else(|| Unknown::because("no gpu-core-count is listed"))
}

/// 0 means that the system's own rule holds.
fn wired_limit(mib: u64) -> Result<Option<Bytes>, Unknown> {
    match Bytes::from_mib(mib) {
        Some(Bytes(0)) => Ok(None),
        Some(limit) => Ok(Some(limit)),
        None => Err(Unknown(format!("{mib} MiB cannot be"))),
    }
}

fn major(version: &str) -> Result<u32, Unknown> {
    let first = version.split('.').next().unwrap_or_default();
    first.parse().map_err(|_| Unknown(format!("not a version: {version:?}")))
}

pub fn thermal(source: &mut ProbeSource) -> MacThermal {
    let therm = source.command("pmset -g therm");
    let settings = source.command("pmset -g");
    let apple = source.ask(ProbeQuery::MacThermal);
    let speed = therm.as_deref().map_err(Clone::clone).and_then(speed_limit);
    let mode = settings.as_deref().map_err(Clone::clone).and_then(power_mode);
    MacThermal {
        cpu_speed_limit: source.reading("pmset -g therm", speed),
        state: source.number("NSProcessInfo thermal", &apple, "state").and_then(thermal_state),
        pressure: source.number("Darwin thermal", &apple, "pressure").and_then(thermal_pressure),
        power_mode: source.reading("pmset -g", mode),
    }
}

/// Intel Macs list `CPU_Speed_Limit = 62`; Apple Silicon only notes that nothing was recorded.
fn speed_limit(therm: &str) -> Result<Percent, Unknown> {
    match KeyValueLines::new(therm).number("CPU_Speed_Limit") {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Percent(percent)),
        Ok(percent) => Err(Unknown(format!("CPU_Speed_Limit {percent} is no percentage"))),
        Err(_)
            if therm.contains("No CPU power status")
                || therm.contains("No performance warning") =>
        {
            Err(Unknown::because("nothing recorded, as is usual on Apple Silicon"))
        }
        Err(reason) => Err(reason),
    }
}

/// Laptops with a high mode list `powermode`, other Macs `lowpowermode`.
fn power_mode(settings: &str) -> Result<PowerMode, Unknown> {
    let value = |key: &str| {
        let mut words = settings.lines().map(str::split_whitespace);
        words.find_map(|mut line| (line.next() == Some(key)).then(|| line.next())?)
    };
    match value("powermode").or_else(|| value("lowpowermode")) {
        Some("0") => Ok(PowerMode::Automatic),
        Some("1") => Ok(PowerMode::Low),
        Some("2") => Ok(PowerMode::High),
        Some(other) => Err(Unknown(format!("power mode {other:?} is not 0, 1 or 2"))),
        None => Err(Unknown::because("pmset lists no power mode")),
    }
}

fn thermal_state(state: i64) -> Result<ThermalState, Unknown> {
    match state {
        0 => Ok(ThermalState::Nominal),
        1 => Ok(ThermalState::Fair),
        2 => Ok(ThermalState::Serious),
        3 => Ok(ThermalState::Critical),
        other => Err(Unknown(format!("thermal state {other} is not 0 to 3"))),
    }
}

fn thermal_pressure(level: u64) -> Result<ThermalPressure, Unknown> {
    match level {
        0 => Ok(ThermalPressure::Nominal),
        1 => Ok(ThermalPressure::Moderate),
        2 => Ok(ThermalPressure::Heavy),
        3 => Ok(ThermalPressure::Trapping),
        4 => Ok(ThermalPressure::Sleeping),
        other => Err(Unknown(format!("thermal pressure {other} is not 0 to 4"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuFeature;

    /// As printed by an M1 Pro (exelban/stats issue 749) and by a throttled Intel MacBook Pro.
    const THERM_APPLE: &str = "Note: No thermal warning level has been recorded\n\
        Note: No performance warning level has been recorded\n\
        Note: No CPU power status has been recorded\n";
    const THERM_INTEL: &str = "Note: No thermal warning level has been recorded\n\
        Note: No performance warning level has been recorded\n\
        2020-11-24 13:10:40 +0100 CPU Power notify\n\
        \tCPU_Scheduler_Limit \t= 100\n\tCPU_Available_CPUs \t= 8\n\tCPU_Speed_Limit \t= 35\n";

    #[test]
    fn pmset_is_a_signal_on_intel_only() {
        assert_eq!(speed_limit(THERM_INTEL), Ok(Percent(35.0)));
        let reason = speed_limit(THERM_APPLE).unwrap_err();
        assert_eq!(reason.0, "nothing recorded, as is usual on Apple Silicon");
        assert!(speed_limit(&THERM_INTEL.replace("= 35", "= 900")).is_err());
        assert!(speed_limit("").is_err());
    }

    #[test]
    fn chip_names_become_family_and_tier() {
        let check = |brand: &str, family, tier| {
            assert_eq!(apple_chip(brand), Ok(AppleChip { family, tier }), "{brand}");
        };
        check("Apple M1", 1, AppleTier::Base);
        check("Apple M2 Ultra", 2, AppleTier::Ultra);
        check("Apple M5 Max", 5, AppleTier::Max);
        check("Apple M6", 6, AppleTier::Base);
        for brand in
            ["Apple M3 Giga", "Apple A18 Pro", "Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz", ""]
        {
            assert!(apple_chip(brand).is_err(), "{brand}");
        }
    }

    #[test]
    fn both_forms_of_vm_stat_are_read() {
        let old = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n\
            Pages free:                                4518.\nPages active:                            194947.\n\
            Pages inactive:                          191193.\nPages speculative:                         3014.\n\
            Pages purgeable:                            630.\n";
        assert_eq!(available(old), Ok(Bytes((4518 + 191_193 + 3014) * 16384)));
        let wider =
            old.replace("free: ", "free:                     ") + "Pages tagged:      177566.\n";
        assert_eq!(available(&wider), available(old));
        assert!(available(&old.replace("Pages free", "Pages gone")).is_err());
        assert!(available("").is_err());
    }

    #[test]
    fn swap_is_read_in_any_locale() {
        let usage = "total = 2048.00M  used = 1141.31M  free = 906.69M  (encrypted)";
        assert_eq!(swap_field(usage, "total"), Ok(Bytes(2048 << 20)));
        assert_eq!(swap_field(&usage.replace('.', ","), "total"), Ok(Bytes(2048 << 20)));
        assert!(swap_field("none", "total").is_err());
    }

    #[test]
    fn power_modes_of_both_generations() {
        assert_eq!(
            power_mode("Currently in use:\n lowpowermode         1\n womp 0\n"),
            Ok(PowerMode::Low)
        );
        assert_eq!(power_mode(" powermode            2\n"), Ok(PowerMode::High));
        assert!(power_mode(" standby 1\n").is_err());
    }

    #[test]
    fn core_counts_keep_apples_names() {
        let m5 = "hw.perflevel0.physicalcpu: 6\nhw.perflevel0.name: Super\n\
                  hw.perflevel1.physicalcpu: 12\nhw.perflevel1.name: Performance\n";
        assert_eq!(core_levels(m5).unwrap(), "6 super + 12 performance cores");
        let monterey = "hw.perflevel0.physicalcpu: 4\nhw.perflevel1.physicalcpu: 4\n";
        assert_eq!(core_levels(monterey).unwrap(), "4 performance + 4 efficiency cores");
        assert_eq!(core_levels("hw.memsize: 1\n"), None);
    }

    #[test]
    fn the_gpus_cores_stand_in_the_registry() {
        let registry = "+-o AGXAcceleratorG16G  <class AGXAcceleratorG16G>\n    {\n      \"model\" = \"Apple M4\"\n      \"gpu-core-count\" = 10\n    }\n";
        assert_eq!(gpu_cores(registry), Ok(10));
        assert!(gpu_cores("").is_err());
    }

    #[test]
    fn an_intel_mac_is_read_too() {
        let facts = "machdep.cpu.brand_string: Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz\n\
            kern.osproductversion: 12.7.6\nhw.memsize: 17179869184\nhw.pagesize: 4096\nhw.logicalcpu: 16\n\
            kern.memorystatus_vm_pressure_level: 2\nhw.optional.avx2_0: 1\nhw.optional.fma: 1\n\
            hw.optional.avx512f: 0\n";
        let stat = "Mach Virtual Memory Statistics: (page size of 4096 bytes)\n\
            Pages free:                               31031.\nPages active:                           1203445.\n\
            Pages inactive:                         1190233.\nPages speculative:                        11023.\n";
        let question = format!("run {}", sysctl_line());
        let mut source = crate::recording::testing::source(&[
            (&question, facts),
            ("run vm_stat", stat),
            ("run pmset -g therm", THERM_INTEL),
        ]);
        let machine = probe(&mut source);
        assert_eq!(machine.cpu.features.value, Ok(vec![CpuFeature::Avx2]));
        assert_eq!(machine.memory.available.value, Ok(Bytes((31_031 + 1_190_233 + 11_023) * 4096)));
        let level = MemoryPressure::Level(PressureLevel::Warning);
        assert_eq!(machine.memory.pressure.value, Ok(level));
        assert!(machine.gpus.is_empty(), "neither Metal nor an M-series name");
        assert_eq!(machine.thermal.mac.unwrap().cpu_speed_limit.value, Ok(Percent(35.0)));
    }
}
