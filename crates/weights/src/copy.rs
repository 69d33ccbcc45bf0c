//! A model written again: as one file or as shards, in its own format or another.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use crate::BytesDoneFn;
use crate::catalog::Catalog;
use crate::convert::can_convert;
use crate::dtype::FileDtype;
use crate::error::{Result, WeightsError};
use crate::load::load_blocks;
use crate::safetensors::OutputTensor;
use crate::tensor::{TensorEncoding, TensorInfo};
use crate::write::{WrittenFile, split_shards, write_file, write_shards};

/// Where and how a model is written again.
pub struct CopyOptions<'a> {
    /// File or folder.
    pub target: CopyTarget<'a>,
    /// The format for floating-point values; absent, each tensor keeps its own.
    pub dtype: Option<FileDtype>,
    /// Whether to count checksums along the way.
    pub checksum: bool,
}

/// Where a model goes.
pub enum CopyTarget<'a> {
    /// Into one file.
    File(&'a Path),
    /// Into a folder, in shards of at most so many bytes.
    Shards {
        /// The folder, which exists.
        folder: &'a Path,
        /// What the files' names start with.
        stem: &'a str,
        /// The most a shard may hold.
        limit: u64,
    },
}

impl CopyTarget<'_> {
    fn path(&self) -> &Path {
        match self {
            Self::File(path) | Self::Shards { folder: path, .. } => path,
        }
    }
}

/// Writes all tensors of a model; gives the files, the one that opens the model last. A target that holds a part
/// of the source is only replaced when everything was written.
pub fn copy(
    catalog: &Catalog,
    how: &CopyOptions<'_>,
    tick: BytesDoneFn<'_>,
) -> Result<Vec<WrittenFile>> {
    let entering = |tensor: &TensorInfo| OutputTensor {
        name: tensor.name.clone(),
        dtype: target_dtype(tensor, how.dtype),
        shape: tensor.shape.clone(),
    };
    let tensors: Vec<_> = catalog.tensors.iter().map(entering).collect();
    let metadata = metadata_of(catalog);
    let mut buffer = Vec::new();
    let mut fill = |tensor: &OutputTensor, out: &mut dyn Write| {
        let source = catalog.find(&tensor.name)?;
        load_blocks(catalog, source, tensor.dtype, &mut buffer, tick, &mut |block| {
            out.write_all(block)
                .map_err(|source| WeightsError::io("write", how.target.path(), source))
        })
    };
    match &how.target {
        CopyTarget::File(path) => {
            Ok(vec![write_file(path, &metadata, tensors, how.checksum, &mut fill)?])
        }
        CopyTarget::Shards { folder, stem, limit } => write_shards(
            folder,
            stem,
            &metadata,
            split_shards(stem, tensors, *limit),
            how.checksum,
            &mut fill,
        ),
    }
}

/// Readers refuse a file whose metadata does not say which program's layout it has.
fn metadata_of(catalog: &Catalog) -> BTreeMap<String, String> {
    let from_safetensors = catalog.metadata.contains_key("format");
    let mut metadata = if from_safetensors { catalog.metadata.clone() } else { BTreeMap::new() };
    metadata.entry("format".into()).or_insert_with(|| "pt".into());
    metadata
}

/// Quantised blocks hold values times f16 scales, so f16 is what loses least in two bytes.
fn target_dtype(tensor: &TensorInfo, asked: Option<FileDtype>) -> FileDtype {
    match (tensor.encoding, asked) {
        (TensorEncoding::Blocks(_), asked) => asked.unwrap_or(FileDtype::F16),
        (TensorEncoding::Plain(own), Some(asked)) if can_convert(own, asked) => asked,
        (TensorEncoding::Plain(own), _) => own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{bytes_of, model};

    #[test]
    fn a_model_in_shards_holds_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let source = model(folder.path(), &[70_000_000, 0, 3, 1000]);
        let out = tempfile::tempdir().unwrap();
        let target = CopyTarget::Shards { folder: out.path(), stem: "model", limit: 2000 };
        let opened =
            copy(&source, &CopyOptions { target, dtype: None, checksum: false }, &|_| true)
                .unwrap();
        assert!(opened.last().unwrap().path.ends_with("model.safetensors.index.json"));
        let copied = Catalog::open(out.path()).unwrap();
        assert_eq!(copied.files.len(), 2);
        assert_eq!(copied.metadata["format"], "pt");
        let mapped = crate::mmap::MappedFiles::open(&copied).unwrap();
        for tensor in &copied.tensors {
            assert!(mapped.bytes(tensor).unwrap() == bytes_of(tensor), "{}", tensor.name);
        }
    }

    #[test]
    fn a_file_can_be_written_over_itself_and_a_stop_leaves_it_alone() {
        let folder = tempfile::tempdir().unwrap();
        let source = model(folder.path(), &[5000]);
        let path = source.files[0].clone();
        let before = std::fs::read(&path).unwrap();
        let stopped = copy(
            &source,
            &CopyOptions { target: CopyTarget::File(&path), dtype: None, checksum: false },
            &|_| false,
        );
        assert!(matches!(stopped, Err(WeightsError::Cancelled)));
        assert_eq!(std::fs::read(&path).unwrap(), before);
        copy(
            &source,
            &CopyOptions { target: CopyTarget::File(&path), dtype: None, checksum: false },
            &|_| true,
        )
        .unwrap();
        assert_eq!(Catalog::open(&path).unwrap().bytes(), 5000);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
