//! Where every fact about a computer comes from: questions with answers in text.
//!
//! A probe never opens a file or calls a library; it asks a [`Source`]. The live source asks the
//! operating system and remembers each answer, so that any machine can be recorded; a replayed
//! one answers from such a recording. The same parsing code runs over both, on every operating
//! system, which is how a Mac's or a DGX Spark's probe is tested on a plain Linux box.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use crate::fields::Fields;
use crate::live::Live;
use crate::reading::{Reading, Unknown};
use crate::recording::Recording;

/// The text that answers a question, or why there is none.
pub type Answer = Result<String, Unknown>;

/// What a probe may ask. Answers of the last eight are `key: value` lines, see [`crate::fields`].
#[derive(Clone, Copy, Debug)]
pub enum Question<'a> {
    /// The text of a small file.
    File(&'a str),
    /// The names in a folder, sorted, one per line.
    Folder(&'a str),
    /// What a program prints; words are split at spaces.
    Command(&'a str),
    /// Whether the kernel accepts a memory-pressure trigger.
    PressureTrigger,
    /// NVIDIA's management library: driver and number of cards.
    Nvml,
    /// One card as the management library sees it.
    NvmlCard(u32),
    /// The little about that card that changes from second to second.
    NvmlFeel(u32),
    /// The CUDA driver: its version and number of cards.
    Cuda,
    /// One card as the CUDA driver sees it.
    CudaCard(u32),
    /// The CUDA libraries that can be loaded, with their versions.
    CudaLibraries,
    /// The default Metal device.
    Metal,
    /// Thermal state and thermal pressure of macOS.
    MacThermal,
    /// What this process holds of a Mac's memory.
    MacProcess,
}

impl fmt::Display for Question<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file {path}"),
            Self::Folder(path) => write!(f, "folder {path}"),
            Self::Command(line) => write!(f, "run {line}"),
            Self::PressureTrigger => f.write_str("memory pressure trigger"),
            Self::Nvml => f.write_str("nvml"),
            Self::NvmlCard(index) => write!(f, "nvml card {index}"),
            Self::NvmlFeel(index) => write!(f, "nvml feel {index}"),
            Self::Cuda => f.write_str("cuda"),
            Self::CudaCard(index) => write!(f, "cuda card {index}"),
            Self::CudaLibraries => f.write_str("cuda libraries"),
            Self::Metal => f.write_str("metal"),
            Self::MacThermal => f.write_str("mac thermal"),
            Self::MacProcess => f.write_str("mac process"),
        }
    }
}

/// Answers questions, live or from a recording.
pub struct Source {
    live: Option<Live>,
    recording: Recording,
}

impl Source {
    /// The computer this program runs on.
    pub fn live() -> Self {
        Self { live: Some(Live::default()), recording: Recording::of_this_computer() }
    }

    /// A recorded computer.
    pub fn replay(recording: Recording) -> Self {
        Self { live: None, recording }
    }

    /// All that was answered so far.
    pub fn recording(&self) -> &Recording {
        &self.recording
    }

    /// Whether the answers are of this computer, now.
    pub fn is_live(&self) -> bool {
        self.live.is_some()
    }

    /// Asks, and remembers the answer.
    pub fn ask(&mut self, question: Question<'_>) -> Answer {
        let key = question.to_string();
        let Some(live) = &mut self.live else {
            return self.recording.answer(&key);
        };
        let answer = live.answer(question);
        self.recording.answers.insert(key, answer.clone().into());
        answer
    }

    /// The text of a file.
    pub fn file(&mut self, path: &str) -> Answer {
        self.ask(Question::File(path))
    }

    /// The names in a folder; a folder that cannot be listed has a reason.
    pub fn folder(&mut self, path: &str) -> Result<Vec<String>, Unknown> {
        Ok(self.ask(Question::Folder(path))?.lines().map(str::to_owned).collect())
    }

    /// What a program prints.
    pub fn command(&mut self, line: &str) -> Answer {
        self.ask(Question::Command(line))
    }

    /// One field of a `key: value` answer.
    pub fn text(&self, name: &str, answer: &Answer, key: &str) -> Reading<String> {
        let value = fields(answer).and_then(|fields| fields.text(key).map(str::to_owned));
        self.reading(format!("{name} {key}"), value)
    }

    /// One field of a `key: value` answer, as a number.
    pub fn number<T: FromStr>(&self, name: &str, answer: &Answer, key: &str) -> Reading<T> {
        let value = fields(answer).and_then(|fields| fields.number(key));
        self.reading(format!("{name} {key}"), value)
    }

    /// Puts a name and the time to a value just read.
    pub fn reading<T>(&self, source: impl Into<String>, value: Result<T, Unknown>) -> Reading<T> {
        Reading { value, source: source.into(), taken: self.is_live().then(Instant::now) }
    }
}

fn fields(answer: &Answer) -> Result<Fields<'_>, Unknown> {
    answer.as_deref().map(Fields::of).map_err(Clone::clone)
}
