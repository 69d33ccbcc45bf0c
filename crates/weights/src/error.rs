//! Why a model file could not be read or written: one variant per cause, with the two values that
//! disagree.

use std::io;
use std::path::{Path, PathBuf};

use crate::tensor::TensorEncoding;

/// Everything that can go wrong with model files.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The system refused.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was tried: read, write, open…
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Neither a file nor a folder: a pipe, a socket, a device.
    #[error("neither a file nor a folder: {}", path.display())]
    NotAFile {
        /// What it is called.
        path: PathBuf,
    },
    /// The name and the first bytes fit no format we read.
    #[error("not a model file hearth reads: {}", path.display())]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// A folder without any model file in it.
    #[error("no model files in {}", path.display())]
    NoModel {
        /// The folder.
        path: PathBuf,
    },
    /// The file ends before what it promises.
    #[error("file is cut short: {what} needs {needed} bytes, the file has {has}: {}", path.display())]
    Truncated {
        /// What lies beyond the end.
        what: String,
        /// Bytes needed, from the file's start.
        needed: u64,
        /// Bytes there are.
        has: u64,
        /// The file.
        path: PathBuf,
    },
    /// The file's structure contradicts itself or its format's rules.
    #[error("{format} file is malformed: {problem}: {}", path.display())]
    Malformed {
        /// The format's name.
        format: &'static str,
        /// What is wrong, with both values.
        problem: String,
        /// The file.
        path: PathBuf,
    },
    /// A well-formed file that asks for something we do not do.
    #[error("{format} file cannot be used: {problem}: {}", path.display())]
    Unsupported {
        /// The format's name.
        format: &'static str,
        /// What it asks for.
        problem: String,
        /// The file.
        path: PathBuf,
    },
    /// A pickle that wants to run code.
    #[error("refused to run code: the file asks for {asked}: {}", path.display())]
    Hostile {
        /// The function or class it names.
        asked: String,
        /// The file.
        path: PathBuf,
    },
    /// A model of which names and shapes are known, and whose files are not there.
    #[error("its weights are not there, only their names and shapes are known: {}", path.display())]
    MetaModel {
        /// Where they would be.
        path: PathBuf,
    },
    /// The index of a sharded model and its shards disagree.
    #[error("index and shards disagree: {problem}: {}", path.display())]
    Index {
        /// What is missing where.
        problem: String,
        /// The index.
        path: PathBuf,
    },
    /// There is no tensor of that name.
    #[error("no tensor {name} in {}", path.display())]
    NoTensor {
        /// The name asked for.
        name: String,
        /// File or folder.
        path: PathBuf,
    },
    /// The caller's buffer does not fit the tensor.
    #[error("tensor {name} needs a buffer of {needed} bytes, got {got}")]
    BufferSize {
        /// The tensor.
        name: String,
        /// Bytes it takes in the asked format.
        needed: u64,
        /// Bytes given.
        got: u64,
    },
    /// There is no conversion between the two formats.
    #[error("tensor {name} cannot be converted from {from} to {to}")]
    NoConversion {
        /// The tensor.
        name: String,
        /// As stored.
        from: String,
        /// As asked.
        to: String,
    },
    /// A number that the format to be written has no room for.
    #[error("tensor {name} holds {number}, which {encoding} does not")]
    OutOfRange {
        /// The tensor.
        name: String,
        /// The first such number.
        number: f32,
        /// As it was to be written.
        encoding: TensorEncoding,
    },
    /// The file was changed by somebody else while we read it.
    #[error("file changed while it was read: {}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Cancelled,
}

/// What every function of this crate returns.
pub type Result<T> = std::result::Result<T, WeightsError>;

impl WeightsError {
    /// Whether the system refused for a reason that says nothing about the file, as too many open files. That it is
    /// gone, or that the disk cannot read it, says something.
    pub fn is_refusal(&self) -> bool {
        /// Taken from POSIX: `EIO`, which is 5 wherever there is one.
        const DISK_ERROR: i32 = 5;
        let Self::Io { source, .. } = self else { return false };
        let is_of_disk = source.raw_os_error().is_none_or(|code| code == DISK_ERROR);
        !is_of_disk && source.kind() != io::ErrorKind::NotFound
    }

    /// Wraps what the system said.
    pub fn io(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { what, path: path.into(), source }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Io { source, .. } => io_hint(source),
            Self::NotAFile { .. } => "give a model file or a folder of model files",
            Self::UnknownFormat { .. } => {
                "hearth reads .safetensors, .safetensors.index.json, .pt, .pth, .bin (PyTorch) and .gguf"
            }
            Self::MetaModel { .. } => "download the model into that folder, and run it again",
            Self::NoModel { .. } => "give a folder that holds .safetensors files, or one file",
            Self::Truncated { .. } => "download or copy the file again: its end is missing",
            Self::Malformed { .. } => "download the file again, or ask whoever made it",
            Self::Unsupported { .. } => "convert the file with the program that made it",
            Self::Hostile { .. } => {
                "numbers need no code: ask its maker for safetensors, or export the tensors alone with torch.save"
            }
            Self::Index { .. } => "download the missing shards, or remove those of another version",
            Self::NoTensor { .. } => "`hearth inspect` lists the names",
            Self::BufferSize { .. } => "this is a fault of hearth, please report it",
            Self::NoConversion { .. } => {
                "weights are read in f64, f32, f16, bf16 and fp8, and in the blocks of GGUF: get the file in one of these"
            }
            Self::OutOfRange { .. } => {
                "write bf16 or f32, which hold larger numbers; one that is not finite means that training failed"
            }
            Self::Changed { .. } => "wait until whatever writes the file is done",
            Self::Cancelled => "nothing was left half-written",
        }
    }
}

/// What can be done about what the system said.
pub fn io_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::PermissionDenied => "check the permissions of the file and its folder",
        io::ErrorKind::StorageFull => {
            "free some space or choose another folder; nothing was overwritten"
        }
        io::ErrorKind::AlreadyExists | io::ErrorKind::InvalidInput => {
            "choose another name, or remove what is there"
        }
        io::ErrorKind::WouldBlock => {
            "the system gives no more threads: close other programs, or raise `ulimit -u`"
        }
        _ => "check the disk and the file system",
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_refusal_says_nothing_about_the_file() {
        let of = |error: Errno| WeightsError::io("read", Path::new("a"), error.into()).is_refusal();
        assert!([Errno::MFILE, Errno::ACCESS, Errno::NOMEM].into_iter().all(of));
        assert!(![Errno::IO, Errno::NOENT].into_iter().any(of));
        assert!(!WeightsError::Cancelled.is_refusal());
    }
}
