//! Power supplies, batteries and energy counters: `/sys/class/power_supply` and `/sys/class/powercap` on
//! Linux, `pmset -g batt` on macOS.

use crate::power::{EnergyCounter, PowerInfo};
use crate::reading::{Percent, Reading, Unknown, Watts};
use crate::source::ProbeSource;

const SUPPLIES: &str = "/sys/class/power_supply";
const COUNTERS: &str = "/sys/class/powercap";

pub fn linux(source: &mut ProbeSource) -> PowerInfo {
    let PowerStatus { on_battery, charge, drain } = power_status(source);
    PowerInfo { on_battery, charge, drain, counters: counters(source) }
}

/// The part of [`PowerInfo`] that comes and goes with the plug.
pub struct PowerStatus {
    pub on_battery: Reading<bool>,
    pub charge: Reading<Option<Percent>>,
    pub drain: Reading<Watts>,
}

/// What feeds a Linux computer.
pub fn power_status(source: &mut ProbeSource) -> PowerStatus {
    let found = power_supplies(source);
    let found = found.as_ref().map_err(Clone::clone);
    let on_battery = found.clone().and_then(|found| is_on_battery(source, found));
    let charge = found.clone().and_then(|found| match found.batteries.first() {
        Some(battery) => percent(&source.file(&format!("{battery}/capacity"))?).map(Some),
        None => Ok(None),
    });
    let drain = on_battery.clone().and_then(|on_battery| match found {
        Ok(found) if on_battery => {
            found.batteries.iter().map(|battery| drain(source, battery)).sum()
        }
        _ => Err(Unknown::because("no battery is drained")),
    });
    PowerStatus {
        on_battery: source.reading(SUPPLIES, on_battery),
        charge: source.reading(SUPPLIES, charge),
        drain: source.reading(SUPPLIES, drain.and_then(Watts::from_meter)),
    }
}

/// What the kernel lists, as far as it feeds the computer.
#[derive(Default)]
struct PowerSupplies {
    /// Folders of its batteries.
    batteries: Vec<String>,
    /// Whether anything else delivers.
    is_online: bool,
}

/// Mice and headsets, which have batteries of their own, are passed over.
fn power_supplies(source: &mut ProbeSource) -> Result<PowerSupplies, Unknown> {
    let mut found = PowerSupplies::default();
    for name in source.folder(SUPPLIES)? {
        let folder = format!("{SUPPLIES}/{name}");
        let mut says = |file: &str| {
            let text = source.file(&format!("{folder}/{file}"));
            text.map(|text| text.trim().to_owned())
        };
        if says("scope").is_ok_and(|scope| scope == "Device") {
            continue;
        }
        let kind = says("type").map_err(|reason| Unknown(format!("type of {name}: {reason}")))?;
        match kind.as_str() {
            "Battery" => found.batteries.push(folder),
            "Mains" | "USB" | "Wireless" => found.is_online |= says("online") == Ok("1".into()),
            _ => {}
        }
    }
    Ok(found)
}

/// Taken: the rule of systemd's `on_ac_power`. A supply that is online feeds it; else a battery does if it
/// says that it is discharging.
fn is_on_battery(source: &mut ProbeSource, found: &PowerSupplies) -> Result<bool, Unknown> {
    if found.is_online {
        return Ok(false);
    }
    let status = |battery: &String| is_drained(&source.file(&format!("{battery}/status"))?);
    let drained: Vec<bool> = found.batteries.iter().map(status).collect::<Result<_, _>>()?;
    Ok(drained.contains(&true))
}

/// Taken: the words of the kernel's `power_supply_sysfs.c`.
fn is_drained(status: &str) -> Result<bool, Unknown> {
    match status.trim() {
        "Discharging" => Ok(true),
        "Charging" | "Not charging" | "Full" => Ok(false),
        other => Err(Unknown(format!("the battery's status is {other:?}"))),
    }
}

/// Watts drawn from a battery: drivers tell either power or current and voltage, in millionths, and some
/// write what flows out as less than nothing.
fn drain(source: &mut ProbeSource, battery: &str) -> Result<f64, Unknown> {
    let mut micro = |file: &str| -> Result<f64, Unknown> {
        let text = source.file(&format!("{battery}/{file}"))?;
        let text = text.trim();
        let value: f64 = text.parse().map_err(|_| Unknown(format!("{file} reads {text:?}")))?;
        Ok(value.abs() / 1e6)
    };
    micro("power_now").or_else(|_| Ok(micro("current_now")? * micro("voltage_now")?))
}

fn percent(text: &str) -> Result<Percent, Unknown> {
    let text = text.trim().trim_end_matches('%');
    match text.parse() {
        Ok(share) if (0.0..=100.0).contains(&share) => Ok(Percent(share)),
        _ => Err(Unknown(format!("the battery's charge is no share: {text:?}"))),
    }
}

/// The CPU's packages. What lies below them (cores, memory) they hold already; of the whole board
/// (`psys`) few machines tell.
fn counters(source: &mut ProbeSource) -> Reading<Vec<EnergyCounter>> {
    let found = source.folder(COUNTERS).map(|zones| {
        let zones = zones.iter().filter(|zone| is_package(zone));
        zones.filter_map(|zone| counter(source, &format!("{COUNTERS}/{zone}"))).collect()
    });
    source.reading(COUNTERS, found)
}

/// `intel-rapl:0`, which AMD's CPUs are called as well; `intel-rapl:0:1` is a part of it, and
/// `intel-rapl-mmio:0` the same counter read another way.
fn is_package(zone: &str) -> bool {
    zone.strip_prefix("intel-rapl:").is_some_and(|number| number.parse::<u32>().is_ok())
}

fn counter(source: &mut ProbeSource, zone: &str) -> Option<EnergyCounter> {
    let name = source.file(&format!("{zone}/name")).ok()?.trim().to_owned();
    if !name.starts_with("package") {
        return None;
    }
    let range = source.file(&format!("{zone}/max_energy_range_uj")).ok()?.trim().parse().ok()?;
    let path = format!("{zone}/energy_uj");
    let microjoules = microjoules(source, &path);
    Some(EnergyCounter { name, microjoules: source.reading(path, microjoules), range })
}

/// What a counter says now; since a leak of keys through it, most kernels show it to root only.
pub fn microjoules(source: &mut ProbeSource, path: &str) -> Result<u64, Unknown> {
    let text = source.file(path)?;
    let text = text.trim();
    text.parse().map_err(|_| Unknown(format!("not a number of microjoules: {text:?}")))
}

pub fn macos(source: &mut ProbeSource) -> PowerInfo {
    let PowerStatus { on_battery, charge, drain } = mac_power_status(source);
    let counters = Err(Unknown::because("macOS shows energy to root only"));
    PowerInfo { on_battery, charge, drain, counters: source.reading("macOS", counters) }
}

/// What feeds a Mac.
pub fn mac_power_status(source: &mut ProbeSource) -> PowerStatus {
    const LINE: &str = "pmset -g batt";
    let text = source.command(LINE);
    let text = text.as_deref().map_err(Clone::clone);
    let drain = Err(Unknown::because("macOS does not tell without root"));
    PowerStatus {
        on_battery: source.reading(LINE, text.clone().and_then(mac_on_battery)),
        charge: source.reading(LINE, text.and_then(mac_charge)),
        drain: source.reading("macOS", drain),
    }
}

/// The first line reads `Now drawing from 'Battery Power'`.
fn mac_on_battery(text: &str) -> Result<bool, Unknown> {
    let fed_by = text.split('\'').nth(1).unwrap_or_default();
    match fed_by {
        "AC Power" => Ok(false),
        "Battery Power" | "UPS Power" => Ok(true),
        _ => Err(Unknown(format!("pmset does not say what it draws from: {fed_by:?}"))),
    }
}

/// ` -InternalBattery-0 (id=4653155)\t63%; discharging; 3:46 remaining present: true`
fn mac_charge(text: &str) -> Result<Option<Percent>, Unknown> {
    mac_on_battery(text)?;
    let Some(battery) = text.lines().find(|line| line.contains("InternalBattery")) else {
        return Ok(None);
    };
    let words = battery.split([' ', '\t', ';']);
    let charge = words.into_iter().find(|word| word.ends_with('%')).unwrap_or_default();
    percent(charge).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::testing::source;

    const LAPTOP: &[(&str, &str)] = &[
        ("folder /sys/class/power_supply", "AC\nBAT0\nhidpp_battery_0\nucsi-source-psy-1"),
        ("file /sys/class/power_supply/AC/type", "Mains\n"),
        ("file /sys/class/power_supply/AC/online", "0\n"),
        ("file /sys/class/power_supply/BAT0/type", "Battery\n"),
        ("file /sys/class/power_supply/BAT0/status", "Discharging\n"),
        ("file /sys/class/power_supply/BAT0/capacity", "63\n"),
        ("file /sys/class/power_supply/BAT0/power_now", "18500000\n"),
        ("file /sys/class/power_supply/hidpp_battery_0/type", "Battery\n"),
        ("file /sys/class/power_supply/hidpp_battery_0/scope", "Device\n"),
        ("file /sys/class/power_supply/hidpp_battery_0/status", "Discharging\n"),
        ("file /sys/class/power_supply/ucsi-source-psy-1/type", "USB\n"),
        ("file /sys/class/power_supply/ucsi-source-psy-1/online", "0\n"),
    ];

    /// A laptop on its battery with a few answers changed, empty ones taken away.
    fn check(
        changed: &[(&str, &str)],
        on_battery: Option<bool>,
        charge: Option<f64>,
        drain: Option<f64>,
    ) {
        let named = |name: &str| format!("file {SUPPLIES}/{name}");
        let changed: Vec<_> = changed.iter().map(|(name, text)| (named(name), *text)).collect();
        let mut answers = LAPTOP.to_vec();
        answers.retain(|(key, _)| !changed.iter().any(|(other, _)| other == key));
        let added = changed.iter().filter(|(_, text)| !text.is_empty());
        answers.extend(added.map(|(key, text)| (key.as_str(), *text)));
        let power = linux(&mut source(&answers));
        assert_eq!(power.on_battery.known().copied(), on_battery, "{changed:?}");
        let found = power.charge.known().copied().flatten().map(|share| share.0);
        assert_eq!(found, charge, "{changed:?}");
        assert_eq!(power.drain.known().map(|watts| watts.0), drain, "{changed:?}");
    }

    #[test]
    fn a_laptop_knows_what_feeds_it() {
        let full = Some(63.0);
        check(&[], Some(true), full, Some(18.5));
        check(&[("AC/online", "1\n")], Some(false), full, None);
        check(&[("ucsi-source-psy-1/online", "1\n")], Some(false), full, None);
        check(&[("BAT0/status", "Not charging\n")], Some(false), full, None);
        check(&[("hidpp_battery_0/status", "")], Some(true), full, Some(18.5));
        let current = [
            ("BAT0/power_now", ""),
            ("BAT0/current_now", "-1500000"),
            ("BAT0/voltage_now", "12000000"),
        ];
        check(&current, Some(true), full, Some(18.0));
    }

    #[test]
    fn what_a_battery_does_not_tell_is_unknown() {
        let full = Some(63.0);
        check(&[("BAT0/status", "Unknown\n")], None, full, None);
        check(&[("BAT0/status", "")], None, full, None);
        check(&[("BAT0/type", "")], None, None, None);
        check(&[("BAT0/capacity", "101\n")], Some(true), None, Some(18.5));
        check(&[("BAT0/power_now", "lots\n")], Some(true), full, None);
        check(&[("BAT0/power_now", "9e15\n")], Some(true), full, None);
    }

    #[test]
    fn a_desktop_has_no_battery_and_a_sandbox_knows_nothing() {
        let desktop = linux(&mut source(&[("folder /sys/class/power_supply", "")]));
        assert_eq!(desktop.on_battery.value, Ok(false));
        assert_eq!(desktop.charge.known(), Some(&None));
        let sandbox = linux(&mut source(&[]));
        assert!(sandbox.on_battery.value.is_err() && sandbox.charge.value.is_err());
    }

    #[test]
    fn packages_are_counted_once() {
        let zone = |zone: &str, name: &str| {
            let path = format!("file /sys/class/powercap/{zone}");
            [
                (format!("{path}/name"), name.to_owned()),
                (format!("{path}/max_energy_range_uj"), "262143328850\n".to_owned()),
                (format!("{path}/energy_uj"), "1234\n".to_owned()),
            ]
        };
        let mut answers = vec![(
            "folder /sys/class/powercap".to_owned(),
            "dtpm\nintel-rapl\nintel-rapl-mmio:0\nintel-rapl:0\nintel-rapl:0:0\nintel-rapl:1"
                .to_owned(),
        )];
        for (place, name) in [
            ("intel-rapl-mmio:0", "package-0\n"),
            ("intel-rapl:0", "package-0\n"),
            ("intel-rapl:0:0", "core\n"),
            ("intel-rapl:1", "psys\n"),
        ] {
            answers.extend(zone(place, name));
        }
        let answers: Vec<_> =
            answers.iter().map(|(key, text)| (key.as_str(), text.as_str())).collect();
        let counters = linux(&mut source(&answers)).counters.value.unwrap();
        assert_eq!(counters.len(), 1);
        assert_eq!(counters[0].microjoules.source, "/sys/class/powercap/intel-rapl:0/energy_uj");
        assert_eq!(counters[0].microjoules.value, Ok(1234));
        assert_eq!(counters[0].range, 262_143_328_850);
    }

    /// As printed by a MacBook (spaceship-prompt PR 640) and by an iMac (liquidprompt PR 317).
    #[test]
    fn pmset_tells_what_feeds_a_mac() {
        let laptop = "Now drawing from 'Battery Power'\n \
            -InternalBattery-0 (id=4653155)\t63%; discharging; 3:46 remaining present: true\n";
        assert_eq!(mac_on_battery(laptop), Ok(true));
        assert_eq!(mac_charge(laptop), Ok(Some(Percent(63.0))));
        let plugged =
            laptop.replace("Battery Power", "AC Power").replace("discharging", "charging");
        assert_eq!(mac_on_battery(&plugged), Ok(false));
        assert_eq!(mac_charge("Now drawing from 'AC Power'\n"), Ok(None));
        for nonsense in ["", "Now drawing from scratch", "'Sun'"] {
            assert!(mac_on_battery(nonsense).is_err() && mac_charge(nonsense).is_err());
        }
        assert!(mac_charge(&laptop.replace("63%", "full")).is_err());
    }
}
