//! The built-in model inside the program, so that the demo needs neither a download nor this
//! project's folder.

use std::borrow::Cow;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;

use flate2::read::DeflateDecoder;
use weights::write::AtomicFile;

use crate::error::{Result, TrainerError};

/// A file of the model.
struct BuiltInFile {
    path: &'static str,
    stored: &'static [u8],
    /// Whether it is stored as `build.rs` compresses weights.
    is_compressed: bool,
}

macro_rules! files {
    ($($path:literal),+; $($part:literal / $name:literal),+ $(,)?) => {
        &[
            $(BuiltInFile {
                path: $path,
                stored: include_bytes!(concat!("../../../../assets/demo/", $path)),
                is_compressed: false,
            },)+
            $(BuiltInFile {
                path: concat!($part, "/", $name),
                stored: include_bytes!(concat!(env!("OUT_DIR"), "/", $part)),
                is_compressed: true,
            }),+
        ]
    };
}

/// Every file of `assets/demo` but what is there to be read by people.
const FILES: &[BuiltInFile] = files![
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder_2/config.json",
    "tokenizer/merges.txt",
    "tokenizer/special_tokens_map.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/vocab.json",
    "tokenizer_2/merges.txt",
    "tokenizer_2/special_tokens_map.json",
    "tokenizer_2/tokenizer_config.json",
    "tokenizer_2/vocab.json",
    "transformer/config.json",
    "vae/config.json";
    "text_encoder" / "model.safetensors",
    "text_encoder_2" / "model.safetensors",
    "transformer" / "diffusion_pytorch_model.safetensors",
    "vae" / "diffusion_pytorch_model.safetensors",
];

impl BuiltInFile {
    fn bytes(&self) -> Cow<'static, [u8]> {
        if !self.is_compressed {
            return Cow::Borrowed(self.stored);
        }
        let mut planes = Vec::new();
        DeflateDecoder::new(self.stored)
            .read_to_end(&mut planes)
            .expect("it is part of the program");
        let (even, odd) = planes.split_at(planes.len().div_ceil(2));
        let mut bytes = vec![0; planes.len()];
        bytes.iter_mut().step_by(2).zip(even).for_each(|(byte, stored)| *byte = *stored);
        bytes.iter_mut().skip(1).step_by(2).zip(odd).for_each(|(byte, stored)| *byte = *stored);
        Cow::Owned(bytes)
    }
}

/// Writes the model into a folder, as diffusers lays models out; over nothing else.
pub fn unpack(folder: &Path) -> Result<()> {
    let is_other = |file: &&BuiltInFile| {
        fs::read(folder.join(file.path)).is_ok_and(|found| found != *file.bytes())
    };
    if let Some(file) = FILES.iter().find(is_other) {
        return Err(TrainerError::ForeignFile { path: folder.join(file.path) });
    }
    for built_in in FILES {
        let path = folder.join(built_in.path);
        let failed = |source| TrainerError::Io { what: "write", path: path.clone(), source };
        fs::create_dir_all(path.parent().unwrap_or(folder)).map_err(failed)?;
        // Whole or not at all: what a kill leaves is not taken for another model.
        let mut file = AtomicFile::create(&path)?;
        file.write_all(&built_in.bytes()).map_err(failed)?;
        file.commit()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn names(folder: &Path, below: &str, into: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{below}{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                names(&entry.path(), &format!("{name}/"), into);
            } else {
                into.insert(name);
            }
        }
    }

    #[test]
    fn all_of_the_model_is_in_the_program() {
        let folder = tempfile::tempdir().unwrap();
        unpack(folder.path()).unwrap();
        let [mut inside, mut outside] = [BTreeSet::new(), BTreeSet::new()];
        names(folder.path(), "", &mut inside);
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
        names(&assets, "", &mut outside);
        outside.remove("README.md");
        assert_eq!(inside, outside);
        for name in inside {
            let [unpacked, asset] = [folder.path(), &assets].map(|at| fs::read(at.join(&name)));
            assert!(unpacked.unwrap() == asset.unwrap(), "{name}");
        }
    }
}
