//! Programs measured beside each other: one after the other and round after round, each in a
//! process of its own, so that a slow spell of the machine meets all alike. Every second round goes
//! backwards, so that none always comes after the same one.

use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use super::median;
use crate::failure::Failure;
use crate::render::bench::figures::{BenchProgram, ProgramFigures};

/// What one process measured: the fields of its JSON that both sides have.
#[derive(Clone, Copy, Debug, Deserialize)]
struct ProcessFigures {
    ms_median: f64,
    cpu_ms_median: f64,
    rss_peak_bytes: Option<u64>,
    rss_before_bytes: Option<u64>,
    #[serde(default)]
    wait_ms: Option<f64>,
}

/// Measures programs, hearth first.
pub fn measure(
    rounds: u32,
    programs: &mut [(BenchProgram, Command)],
) -> Result<Vec<ProgramFigures>, Failure> {
    programs.iter().try_for_each(|(_, command)| check_runs(command))?;
    let mut samples: Vec<Vec<ProcessFigures>> = programs.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..programs.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let (program, command) = &mut programs[index];
            samples[index].push(sample(*program, command)?);
        }
    }
    let all: Vec<ProgramFigures> = programs
        .iter()
        .zip(&samples)
        .map(|((program, _), samples)| summarise(*program, samples))
        .collect();
    let ours = all[0];
    Ok(all
        .into_iter()
        .map(|its| ProgramFigures {
            hearth_time_ratio: ours.ms_median / its.ms_median,
            hearth_cpu_ratio: ours.cpu_ms_median / its.cpu_ms_median,
            hearth_memory_ratio: ours
                .memory_bytes
                .zip(its.memory_bytes)
                .map(|(ours, its)| ours as f64 / its as f64),
            ..its
        })
        .collect())
}

/// That a program can be started, before the others are measured for minutes.
fn check_runs(command: &Command) -> Result<(), Failure> {
    let program = Path::new(command.get_program());
    let failed =
        |said: String| Failure::Peer { what: format!("cannot run {}", program.display()), said };
    let output = Command::new(program).arg("--version").output();
    let status = output.map_err(|error| failed(error.to_string()))?.status;
    if status.success() { Ok(()) } else { Err(failed(status.to_string())) }
}

fn summarise(program: BenchProgram, samples: &[ProcessFigures]) -> ProgramFigures {
    let memory = |sample: &ProcessFigures| Some(sample.rss_peak_bytes? - sample.rss_before_bytes?);
    ProgramFigures {
        program,
        ms_median: median(samples.iter().map(|sample| sample.ms_median)),
        cpu_ms_median: median(samples.iter().map(|sample| sample.cpu_ms_median)),
        memory_bytes: samples.iter().filter_map(memory).max(),
        wait_ms: samples.iter().filter_map(|sample| sample.wait_ms).max_by(f64::total_cmp),
        hearth_time_ratio: f64::NAN,
        hearth_cpu_ratio: f64::NAN,
        hearth_memory_ratio: None,
    }
}

fn sample(program: BenchProgram, command: &mut Command) -> Result<ProcessFigures, Failure> {
    let failed =
        |said: String| Failure::Peer { what: format!("measuring {program:?} failed"), said };
    let output = command.output().map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.lines().last().unwrap_or_default())
        .map_err(|_| failed(String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// This program, with other arguments.
pub fn hearth(arguments: &[&str]) -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments);
    Ok(command)
}

/// A script with its job.
pub fn python(python: &Path, script: &str, job: &serde_json::Value, threads: usize) -> Command {
    let mut command = Command::new(python);
    command.args(["-c", script, &job.to_string()]);
    // Threads that spin while they wait would take the cores from whoever is measured next, and
    // make CPU time meaningless.
    command.env("OMP_WAIT_POLICY", "PASSIVE").env("OMP_NUM_THREADS", threads.to_string());
    command
}
