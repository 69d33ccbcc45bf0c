//! `hearth doctor` on this computer, on every machine in machines/, and on broken ones.
//!
//! Snapshots lie in tests/snapshots; `UPDATE_EXPECT=1 cargo test` renews them.

use std::path::{Path, PathBuf};

use expect_test::expect_file;
use serde_json::Value;

use crate::{hearth, printed, text};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A machine's page and its JSON are what they were, for every file in machines/.
#[test]
fn every_machine_reads_as_it_should() {
    let mut seen = 0;
    for entry in std::fs::read_dir(root().join("machines")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "toml") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let page = printed(&["doctor", "--machine", text(&path)]);
            expect_file![root().join(format!("tests/snapshots/{name}.txt"))].assert_eq(&page);
            let json = printed(&["doctor", "--json", "--machine", text(&path)]);
            let json = json.replacen(env!("CARGO_PKG_VERSION"), "VERSION", 1);
            expect_file![root().join(format!("tests/snapshots/{name}.json"))].assert_eq(&json);
            seen += 1;
        }
    }
    assert!(seen >= 8, "only {seen} machines were found");
}

fn diagnosis(arguments: &[&str]) -> Value {
    let arguments = [&["doctor", "--json"], arguments].concat();
    serde_json::from_str(&printed(&arguments)).unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn this_computer_is_as_its_own_tools_say() {
    let tool = |line: &str| -> u64 {
        let mut words = line.split(' ');
        let output =
            std::process::Command::new(words.next().unwrap()).args(words).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    };
    let found = diagnosis(&[]);
    let total = tool("getconf _PHYS_PAGES") * tool("getconf PAGESIZE");
    assert_eq!(found["machine"]["memory"]["total"]["value"], total);
    assert_eq!(found["machine"]["cpu"]["threads"]["value"], tool("getconf _NPROCESSORS_ONLN"));
    let usable = found["machine"]["cpu"]["usable_threads"]["value"].as_u64().unwrap();
    assert!(usable >= 1 && usable <= tool("nproc"), "{usable} threads");
    assert_eq!(found["machine"]["arch"], std::env::consts::ARCH);
    let limit = found["budget"]["memory"]["limit"].as_u64();
    assert!(limit.is_none_or(|limit| limit < total), "limit {limit:?} of {total}");
}

#[cfg(target_os = "linux")]
#[test]
fn affinity_limits_the_threads() {
    let output = std::process::Command::new("taskset")
        .args(["-c", "0", env!("CARGO_BIN_EXE_hearth"), "doctor", "--json"])
        .output()
        .unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["machine"]["cpu"]["usable_threads"]["value"], 1);
}

#[test]
fn adapters_are_listed_with_their_features() {
    let found = diagnosis(&[]);
    for adapter in found["adapters"].as_array().into_iter().flatten() {
        let offers = adapter["offers"].as_array().unwrap();
        let on =
            |name: &str| offers.iter().find(|offer| offer["name"] == name).unwrap()["on"].clone();
        for name in ["f16 arithmetic", "subgroups", "matrix units", "timestamps"] {
            assert!(on(name).is_boolean(), "{adapter:#}");
        }
        assert!(adapter["shares_memory"] == false || on("mappable buffers") == true, "{adapter:#}");
        assert!(adapter["buffer_bytes"].as_u64() >= adapter["tensor_bytes"].as_u64());
        let page = printed(&["doctor"]);
        assert!(page.contains(adapter["name"].as_str().unwrap()), "{page}");
    }
}

#[test]
fn a_recording_replays_to_the_same_machine() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    let mut live = diagnosis(&["--record", text(&path)]);
    let mut replayed = diagnosis(&["--machine", text(&path)]);
    assert_eq!(replayed["machine"]["provenance"]["kind"], "recorded");
    for machine in [&mut live, &mut replayed] {
        machine["machine"]["provenance"].take();
        // Drivers are asked on the spot, and are no part of a recording.
        machine.as_object_mut().unwrap().remove("adapters");
        forget_ages(machine);
    }
    assert_eq!(live, replayed);
}

fn forget_ages(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.remove("age_ms");
            map.values_mut().for_each(forget_ages);
        }
        Value::Array(items) => items.iter_mut().for_each(forget_ages),
        _ => {}
    }
}

/// Whatever is taken away, doctor goes on, says unknown and why, and invents nothing.
#[test]
fn half_a_machine_is_half_known_and_never_a_failure() {
    let whole = std::fs::read_to_string(root().join("machines/rtx-4090.toml")).unwrap();
    let whole: toml::Table = whole.parse().unwrap();
    let questions: Vec<String> = whole["answers"].as_table().unwrap().keys().cloned().collect();
    let folder = tempfile::tempdir().unwrap();
    for question in &questions {
        for (kind, answer) in [
            ("missing", None),
            ("denied", Some("{ unknown = 'permission denied' }")),
            ("empty", Some("''")),
            ("nonsense", Some("'-1 \u{fffd} 99999999999999999999999: =,:/ NaN'")),
        ] {
            let mut broken = whole.clone();
            let answers = broken["answers"].as_table_mut().unwrap();
            answers.remove(question);
            if let Some(answer) = answer {
                let answer: toml::Table = format!("answer = {answer}").parse().unwrap();
                answers.insert(question.clone(), answer["answer"].clone());
            }
            let path = folder.path().join("broken.toml");
            std::fs::write(&path, toml::to_string(&broken).unwrap()).unwrap();
            let output = hearth(&["doctor", "--json", "--machine", text(&path)]);
            assert!(output.status.success(), "{question} {kind}: {}", crate::said(&output));
            let found: Value = serde_json::from_slice(&output.stdout).unwrap();
            each_reading(&found, &mut |reading| {
                let unknown = reading.get("unknown").is_some();
                let reason = reading["unknown"].as_str().is_some_and(|reason| !reason.is_empty());
                assert_eq!(unknown, reason, "{question} {kind}: {reading}");
            });
        }
    }
}

#[test]
fn nothing_at_all_is_known_of_an_empty_machine() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("empty.toml");
    for os in ["linux", "macos", "plan9"] {
        let file = format!(
            "origin = 'documented'\nbasis = 'nothing'\nos = '{os}'\narch = 'vax'\n[answers]\n"
        );
        std::fs::write(&path, file).unwrap();
        let found = diagnosis(&["--machine", text(&path)]);
        let mut readings = 0;
        each_reading(&found, &mut |reading| {
            readings += 1;
            assert!(
                reading.get("unknown").is_some() || reading["value"].is_null(),
                "{os}: {reading}"
            );
        });
        assert!(readings > 10, "{os}: only {readings} readings");
        assert_eq!(found["budget"]["memory"]["limit"], Value::Null);
        assert!(printed(&["doctor", "--machine", text(&path)]).contains("no limit can be set"));
    }
}

#[test]
fn strict_fails_where_there_is_a_fault() {
    let spark = std::fs::read_to_string(root().join("machines/dgx-spark.toml")).unwrap();
    let busy = spark.replace("utilisation_percent: 0\n", "utilisation_percent: 94\n");
    // A power supply that is stuck.
    let clocks = busy.lines().map(|line| match line.split_once("sm_clock_mhz: ") {
        Some(_) => "sm_clock_mhz: 507",
        None => line,
    });
    let stuck = clocks.collect::<Vec<_>>().join("\n");
    let folder = tempfile::tempdir().unwrap();
    for (name, recording, code) in [("whole", spark.clone(), 0), ("stuck", stuck, 1)] {
        let path = folder.path().join(name);
        std::fs::write(&path, recording).unwrap();
        let output = hearth(&["doctor", "--strict", "--machine", text(&path)]);
        assert_eq!(output.status.code(), Some(code), "{name}");
        let plain = hearth(&["doctor", "--machine", text(&path)]);
        assert_eq!(plain.status.code(), Some(0), "{name}");
        assert_eq!(plain.stdout, output.stdout, "{name}");
    }
}

fn each_reading(value: &Value, visit: &mut dyn FnMut(&Value)) {
    match value {
        Value::Object(map) if map.contains_key("unit") && map.contains_key("source") => {
            visit(value);
        }
        Value::Object(map) => map.values().for_each(|value| each_reading(value, visit)),
        Value::Array(items) => items.iter().for_each(|value| each_reading(value, visit)),
        _ => {}
    }
}
