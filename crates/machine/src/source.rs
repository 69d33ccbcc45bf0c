//! Where every fact about a computer comes from: questions with answers in text.
//!
//! A probe never opens a file or calls a library; it asks a [`ProbeSource`]. The live source asks the
//! operating system and remembers each answer, so that any machine can be recorded; a replayed
//! one answers from such a recording. The same parsing code runs over both, on every operating
//! system, which is how a Mac's or a DGX Spark's probe is tested on a plain Linux box.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use crate::key_values::KeyValueLines;
use crate::live::LiveSource;
use crate::reading::{Reading, Unknown};
use crate::recording::MachineRecording;

/// The text that answers a question, or why there is none.
pub type ProbeAnswer = Result<String, Unknown>;

/// What a probe may ask. Answers of the last eight are `key: value` lines, see [`crate::key_values`].
#[derive(Clone, Copy, Debug)]
pub enum ProbeQuery<'a> {
    /// The text of a small file.
    File(&'a str),
    /// The names in a folder, sorted, one per line.
    Folder(&'a str),
    /// What a program prints; words are split at spaces.
    Command(&'a str),
    /// Whether the kernel accepts a memory-pressure trigger.
    PressureTrigger,
    /// How many performance cores Linux lists, each counted once.
    PerformanceCores,
    /// NVIDIA's management library: driver and number of GPUs.
    Nvml,
    /// One GPU as the management library sees it.
    NvmlGpu(u32),
    /// The little about that GPU that changes from second to second.
    NvmlTelemetry(u32),
    /// The CUDA driver: its version and number of GPUs.
    Cuda,
    /// One GPU as the CUDA driver sees it.
    CudaGpu(u32),
    /// The CUDA libraries that can be loaded, with their versions.
    CudaLibraries,
    /// The default Metal device.
    Metal,
    /// Thermal state and thermal pressure of macOS.
    MacThermal,
    /// What this process holds of a Mac's memory.
    MacProcess,
}

impl fmt::Display for ProbeQuery<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file {path}"),
            Self::Folder(path) => write!(f, "folder {path}"),
            Self::Command(line) => write!(f, "run {line}"),
            Self::PressureTrigger => f.write_str("memory pressure trigger"),
            Self::PerformanceCores => f.write_str("performance cores"),
            Self::Nvml => f.write_str("nvml"),
            Self::NvmlGpu(index) => write!(f, "nvml card {index}"),
            Self::NvmlTelemetry(index) => write!(f, "nvml feel {index}"),
            Self::Cuda => f.write_str("cuda"),
            Self::CudaGpu(index) => write!(f, "cuda card {index}"),
            Self::CudaLibraries => f.write_str("cuda libraries"),
            Self::Metal => f.write_str("metal"),
            Self::MacThermal => f.write_str("mac thermal"),
            Self::MacProcess => f.write_str("mac process"),
        }
    }
}

/// Answers questions, live or from a recording.
pub struct ProbeSource {
    live: Option<LiveSource>,
    recording: MachineRecording,
}

impl ProbeSource {
    /// The computer this program runs on.
    pub fn live() -> Self {
        Self { live: Some(LiveSource::default()), recording: MachineRecording::of_this_computer() }
    }

    /// A recorded computer.
    pub fn replay(recording: MachineRecording) -> Self {
        Self { live: None, recording }
    }

    /// All that was answered so far.
    pub fn recording(&self) -> &MachineRecording {
        &self.recording
    }

    /// Whether the answers are of this computer, now.
    pub fn is_live(&self) -> bool {
        self.live.is_some()
    }

    /// Asks, and remembers the answer.
    pub fn ask(&mut self, question: ProbeQuery<'_>) -> ProbeAnswer {
        let key = question.to_string();
        let Some(live) = &mut self.live else {
            return self.recording.answer(&key);
        };
        let answer = live.answer(question);
        self.recording.answers.insert(key, answer.clone().into());
        answer
    }

    /// The text of a file.
    pub fn file(&mut self, path: &str) -> ProbeAnswer {
        self.ask(ProbeQuery::File(path))
    }

    /// The names in a folder; a folder that cannot be listed has a reason.
    pub fn folder(&mut self, path: &str) -> Result<Vec<String>, Unknown> {
        Ok(self.ask(ProbeQuery::Folder(path))?.lines().map(str::to_owned).collect())
    }

    /// What a program prints.
    pub fn command(&mut self, line: &str) -> ProbeAnswer {
        self.ask(ProbeQuery::Command(line))
    }

    /// One field of a `key: value` answer.
    pub fn text(&self, name: &str, answer: &ProbeAnswer, key: &str) -> Reading<String> {
        let value = fields(answer).and_then(|fields| fields.text(key).map(str::to_owned));
        self.reading(format!("{name} {key}"), value)
    }

    /// One field of a `key: value` answer, as a number.
    pub fn number<T: FromStr>(&self, name: &str, answer: &ProbeAnswer, key: &str) -> Reading<T> {
        let value = fields(answer).and_then(|fields| fields.number(key));
        self.reading(format!("{name} {key}"), value)
    }

    /// Puts a name and the time to a value just read.
    pub fn reading<T>(&self, source: impl Into<String>, value: Result<T, Unknown>) -> Reading<T> {
        Reading { value, source: source.into(), taken: self.is_live().then(Instant::now) }
    }
}

fn fields(answer: &ProbeAnswer) -> Result<KeyValueLines<'_>, Unknown> {
    answer.as_deref().map(KeyValueLines::new).map_err(Clone::clone)
}
