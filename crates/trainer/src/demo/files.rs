//! The built-in model inside the program, so that the demo needs neither a download nor this
//! project's folder.

use std::fs;
use std::io::Write;
use std::path::Path;

use weights::write::AtomicFile;

use crate::error::{Result, TrainerError};

macro_rules! files {
    ($($path:literal),+ $(,)?) => {
        &[$(($path, include_bytes!(concat!("../../../../assets/demo/", $path)))),+]
    };
}

/// Every file of `assets/demo` but what is there to be read by people.
const FILES: &[(&str, &[u8])] = files![
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "text_encoder_2/config.json",
    "text_encoder_2/model.safetensors",
    "tokenizer/merges.txt",
    "tokenizer/special_tokens_map.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/vocab.json",
    "tokenizer_2/merges.txt",
    "tokenizer_2/special_tokens_map.json",
    "tokenizer_2/tokenizer_config.json",
    "tokenizer_2/vocab.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
];

/// Writes the model into a folder, as diffusers lays models out; over nothing else.
pub fn unpack(folder: &Path) -> Result<()> {
    let is_other = |(name, bytes): &&(&str, &[u8])| {
        fs::read(folder.join(name)).is_ok_and(|found| found != *bytes)
    };
    if let Some((name, _)) = FILES.iter().find(is_other) {
        return Err(TrainerError::ForeignFile { path: folder.join(name) });
    }
    for (name, bytes) in FILES {
        let path = folder.join(name);
        let failed = |source| TrainerError::Io { what: "write", path: path.clone(), source };
        fs::create_dir_all(path.parent().unwrap_or(folder)).map_err(failed)?;
        // Whole or not at all: what a kill leaves is not taken for another model.
        let mut file = AtomicFile::create(&path)?;
        file.write_all(bytes).map_err(failed)?;
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
    }
}
