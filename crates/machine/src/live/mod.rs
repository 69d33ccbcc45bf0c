//! Asks the computer itself. Thin on purpose: it fetches text and interprets nothing, because
//! this is the one part that a replay does not exercise.

#[cfg(target_os = "macos")]
#[path = "macos.rs"]
mod apple;
#[cfg(not(target_os = "macos"))]
#[path = "apple_elsewhere.rs"]
mod apple;
mod cuda;
mod nvml;

use std::io::{self, ErrorKind, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::cores::linux_performance_cores;
use crate::pressure::PressureTrigger;
use crate::reading::Unknown;
use crate::source::{ProbeAnswer, ProbeQuery};

/// Chosen: the largest text we ask for is `/proc/cpuinfo`, about 1.6 KiB per core, so this holds
/// 600 cores; a file that goes on for ever must not.
const LONGEST_ANSWER_BYTES: u64 = 1 << 20;

/// What is asked once and kept: loaded libraries, and whether pressure triggers are accepted, since
/// each try starts a kernel thread.
#[derive(Default)]
pub struct LiveSource {
    pressure_trigger: Option<ProbeAnswer>,
    nvml: Option<Result<nvml_wrapper::Nvml, Unknown>>,
    cuda: Option<Result<cuda::CudaProbe, Unknown>>,
}

impl LiveSource {
    /// Asks the operating system or a library.
    pub fn answer(&mut self, question: ProbeQuery<'_>) -> ProbeAnswer {
        match question {
            ProbeQuery::File(path) => read_text(Path::new(path)).map_err(unknown),
            ProbeQuery::Folder(path) => list(Path::new(path)).map_err(unknown),
            ProbeQuery::Command(line) => run(line),
            ProbeQuery::PressureTrigger => self.pressure_trigger(),
            ProbeQuery::PerformanceCores => linux_performance_cores()
                .map(|cores| cores.to_string())
                .ok_or_else(|| Unknown::because("/sys/devices does not tell cores apart")),
            ProbeQuery::Nvml => Ok(nvml::driver(self.nvml()?)),
            ProbeQuery::NvmlGpu(index) => nvml::gpu(self.nvml()?, index),
            ProbeQuery::NvmlTelemetry(index) => nvml::telemetry(self.nvml()?, index),
            ProbeQuery::Cuda => Ok(self.cuda()?.describe()),
            ProbeQuery::CudaGpu(index) => self.cuda()?.gpu(index),
            ProbeQuery::CudaLibraries => Ok(cuda::libraries()),
            ProbeQuery::Metal => apple::metal(),
            ProbeQuery::MacThermal => apple::thermal(),
            ProbeQuery::MacProcess => apple::process(),
        }
    }

    fn pressure_trigger(&mut self) -> ProbeAnswer {
        let arm = || PressureTrigger::arm().map(|_| "accepted".into());
        self.pressure_trigger.get_or_insert_with(arm).clone()
    }

    fn nvml(&mut self) -> Result<&nvml_wrapper::Nvml, Unknown> {
        self.nvml.get_or_insert_with(nvml::load).as_ref().map_err(Clone::clone)
    }

    fn cuda(&mut self) -> Result<&cuda::CudaProbe, Unknown> {
        self.cuda.get_or_insert_with(cuda::CudaProbe::load).as_ref().map_err(Clone::clone)
    }
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(LONGEST_ANSWER_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn list(path: &Path) -> io::Result<String> {
    let mut names = std::fs::read_dir(path)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names.join("\n"))
}

/// A program that prints something has answered, whatever its exit code: `sysctl` fails when one
/// of many names is unknown and still prints the others.
fn run(line: &str) -> ProbeAnswer {
    let mut words = line.split(' ');
    let program = words.next().unwrap_or_default();
    let output = Command::new(program).args(words).stdin(Stdio::null()).output();
    let output = output.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Unknown(format!("no program {program}")),
        _ => Unknown(format!("cannot run {program}: {error}")),
    })?;
    if output.stdout.is_empty() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first = stderr.lines().next().unwrap_or("no output");
        return Err(Unknown(format!("{program} said: {first}")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[allow(clippy::needless_pass_by_value)] // The shape `map_err` asks for.
fn unknown(error: io::Error) -> Unknown {
    match error.kind() {
        ErrorKind::NotFound => Unknown::because("no such file"),
        ErrorKind::PermissionDenied => Unknown::because("permission denied"),
        _ => Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_things_have_plain_reasons() {
        let mut live = LiveSource::default();
        let reason = |answer: ProbeAnswer| answer.unwrap_err().0;
        let folder = tempfile::tempdir().unwrap();
        let nothing = folder.path().join("nothing").to_string_lossy().into_owned();
        assert_eq!(reason(live.answer(ProbeQuery::File(&nothing))), "no such file");
        assert_eq!(reason(live.answer(ProbeQuery::Folder(&nothing))), "no such file");
        assert_eq!(
            reason(live.answer(ProbeQuery::Command("no-such-program -x"))),
            "no program no-such-program"
        );
    }

    #[test]
    fn a_folder_is_listed_in_order() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "a", "c"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(list(folder.path()).unwrap(), "a\nb\nc");
    }

    #[cfg(unix)]
    #[test]
    fn a_failing_program_that_printed_has_answered() {
        assert_eq!(run("ls / /no-such-place").unwrap().lines().next(), Some("/:"));
        assert!(run("ls /no-such-place").unwrap_err().0.starts_with("ls said: "));
    }
}
