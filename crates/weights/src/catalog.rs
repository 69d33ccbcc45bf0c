//! What a model file, or a folder of shards, holds: names, shapes and places, without data.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::dtype::FileDtype;
use crate::error::{Result, WeightsError};
use crate::plain_file::read_plain;
use crate::tensor::{TensorEncoding, TensorInfo, numel_of};
use crate::{gguf, safetensors, torch};

/// What one model file holds, read without its data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileContents {
    /// Words the maker put in.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, in the order of their data.
    pub tensors: Vec<TensorInfo>,
}

/// All tensors of a model, wherever they lie.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    /// What was opened.
    pub path: PathBuf,
    /// The files the tensors lie in.
    pub files: Vec<PathBuf>,
    /// Words the makers put in; of shards that disagree, the first one's.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, file by file, in the order of their data.
    pub tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl Catalog {
    /// Opens a model file of any kind we read, an index of shards, or a folder with either.
    pub fn open(path: &Path) -> Result<Self> {
        let kind = fs::metadata(path).map_err(|source| WeightsError::io("open", path, source))?;
        if kind.is_dir() {
            return Self::open_folder(path);
        }
        if path.to_string_lossy().ends_with(INDEX_SUFFIX) {
            return Self::open_index(path, path);
        }
        Self::of_files(path, vec![path.into()])
    }

    /// Every model of a folder by itself: an index is one, and where there is none each file is.
    pub fn open_each(path: &Path) -> Result<Vec<Self>> {
        match path.is_dir().then(|| models_in(path)).transpose()? {
            Some(FolderModels::Files(files)) => files.iter().map(|file| Self::open(file)).collect(),
            _ => Ok(vec![Self::open(path)?]),
        }
    }

    /// What a model would hold that is not there: names and shapes for whoever plans. Nothing can
    /// be read out of it.
    pub fn meta(
        path: &Path,
        dtype: FileDtype,
        tensors: impl IntoIterator<Item = (String, Vec<u64>)>,
    ) -> Self {
        let mut catalog = Self { path: path.into(), ..Self::default() };
        for (name, shape) in tensors {
            let encoding = TensorEncoding::Plain(dtype);
            let bytes = numel_of(&shape).and_then(|count| encoding.bytes_for(count)).unwrap_or(0);
            catalog.by_name.insert(name.clone(), catalog.tensors.len());
            catalog.tensors.push(TensorInfo {
                name,
                shape,
                encoding,
                file: 0,
                offset: 0,
                bytes,
                strides: None,
            });
        }
        catalog
    }

    /// Whether it has no files.
    pub fn is_meta(&self) -> bool {
        self.files.is_empty()
    }

    /// The file that a tensor lies in.
    pub fn file_of(&self, tensor: &TensorInfo) -> Result<&Path> {
        let file = self.files.get(tensor.file).map(PathBuf::as_path);
        file.ok_or_else(|| WeightsError::MetaModel { path: self.path.clone() })
    }

    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Result<&TensorInfo> {
        let found = self.by_name.get(name).map(|index| &self.tensors[*index]);
        found.ok_or_else(|| WeightsError::NoTensor { name: name.into(), path: self.path.clone() })
    }

    /// The tensors whose names begin with `prefix`: one model of a file that holds several.
    #[must_use]
    pub fn only(&self, prefix: &str) -> Self {
        self.renamed(|name| name.starts_with(prefix).then_some(name))
    }

    /// The same without the prefix.
    #[must_use]
    pub fn under(&self, prefix: &str) -> Self {
        self.renamed(|name| name.strip_prefix(prefix))
    }

    /// The tensors that `rename` has a name for.
    fn renamed(&self, rename: impl Fn(&str) -> Option<&str>) -> Self {
        let mut found = Self { tensors: Vec::new(), by_name: HashMap::new(), ..self.clone() };
        for tensor in &self.tensors {
            let Some(name) = rename(&tensor.name) else { continue };
            found.by_name.insert(name.into(), found.tensors.len());
            found.tensors.push(TensorInfo { name: name.into(), ..tensor.clone() });
        }
        found
    }

    /// Bytes of all tensors as stored.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    fn open_folder(folder: &Path) -> Result<Self> {
        match models_in(folder)? {
            FolderModels::Index(index) => Self::open_index(folder, &index),
            FolderModels::Files(files) => Self::of_files(folder, files),
        }
    }

    fn open_index(opened: &Path, index: &Path) -> Result<Self> {
        let wrong = |problem: String| WeightsError::Index { problem, path: index.into() };
        let text = read_plain(index).map_err(|source| WeightsError::io("read", index, source))?;
        let parsed: ShardIndex =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let folder = index.parent().unwrap_or(Path::new(""));
        let mut files: Vec<&str> = parsed.weight_map.values().map(String::as_str).collect();
        files.sort_unstable();
        files.dedup();
        for file in &files {
            if file.contains(['/', '\\']) || *file == ".." {
                return Err(wrong(format!("shard {file} does not lie beside the index")));
            }
            if !folder.join(file).exists() {
                return Err(wrong(format!("shard {file} is missing")));
            }
        }
        let paths = files.iter().map(|file| folder.join(file)).collect();
        let catalog = Self::of_files(opened, paths)?;
        for (name, file) in &parsed.weight_map {
            let found = catalog.find(name).ok().map(|tensor| files[tensor.file]);
            if found != Some(file.as_str()) {
                let place = found.map_or("nowhere".into(), |found| format!("in {found}"));
                return Err(wrong(format!("tensor {name} should be in {file}, is {place}")));
            }
        }
        let extra =
            catalog.tensors.iter().find(|tensor| !parsed.weight_map.contains_key(&tensor.name));
        match extra {
            Some(tensor) => {
                Err(wrong(format!("tensor {} is in a shard, not in the index", tensor.name)))
            }
            None => Ok(catalog),
        }
    }

    fn of_files(opened: &Path, files: Vec<PathBuf>) -> Result<Self> {
        let mut catalog = Self { path: opened.into(), files, ..Self::default() };
        for (file, path) in catalog.files.iter().enumerate() {
            let contents = read_contents(path, file)?;
            for (key, value) in contents.metadata {
                catalog.metadata.entry(key).or_insert(value);
            }
            for tensor in contents.tensors {
                if let Some(other) =
                    catalog.by_name.insert(tensor.name.clone(), catalog.tensors.len())
                {
                    let other = &catalog.files[catalog.tensors[other].file];
                    let problem = format!("tensor {} is also in {}", tensor.name, other.display());
                    return Err(WeightsError::Index { problem, path: path.clone() });
                }
                catalog.tensors.push(tensor);
            }
        }
        Ok(catalog)
    }
}

/// How the names of indexes end, for safetensors and for PyTorch shards.
pub const INDEX_SUFFIX: &str = ".index.json";

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// What a folder holds.
enum FolderModels {
    /// A sharded model, by its index.
    Index(PathBuf),
    /// Files without an index.
    Files(Vec<PathBuf>),
}

/// An index decides; else all safetensors files count; else those of another kind.
fn models_in(folder: &Path) -> Result<FolderModels> {
    let names = file_names(folder)?;
    let ending = |suffix: &str| -> Vec<PathBuf> {
        names.iter().filter(|name| name.ends_with(suffix)).map(|name| folder.join(name)).collect()
    };
    // Variants (`model.fp16.safetensors.index.json`) have longer names than what they vary.
    if let Some(index) = ending(INDEX_SUFFIX).into_iter().min_by_key(|path| path.as_os_str().len())
    {
        return Ok(FolderModels::Index(index));
    }
    let kinds = [".safetensors", ".gguf", ".pt", ".pth", ".bin"];
    let files = kinds.into_iter().map(ending).find(|files| !files.is_empty());
    files.map(FolderModels::Files).ok_or_else(|| WeightsError::NoModel { path: folder.into() })
}

/// macOS leaves `._name` files with other systems' disks; they are no models.
fn file_names(folder: &Path) -> Result<Vec<String>> {
    let io = |source| WeightsError::io("list", folder, source);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Tells the format by the first bytes; names lie more often.
fn read_contents(path: &Path, file: usize) -> Result<FileContents> {
    let io = |source| WeightsError::io("open", path, source);
    let about = fs::metadata(path).map_err(io)?;
    if !about.is_file() {
        return Err(WeightsError::NotAFile { path: path.into() });
    }
    let mut start = Vec::new();
    let opened = File::open(path).map_err(io)?;
    opened
        .take(9)
        .read_to_end(&mut start)
        .map_err(|source| WeightsError::io("read", path, source))?;
    let safetensors = || {
        let reader = std::io::BufReader::new(File::open(path).map_err(io)?);
        safetensors::parse(reader, about.len(), path, file)
    };
    match start.as_slice() {
        [b'G', b'G', b'U', b'F', ..] => gguf::read(path, file),
        // First the length of the header, whose first bytes may be those of a pickle or an archive.
        [_, _, _, _, 0, 0, 0, 0, b'{'] => safetensors(),
        [b'P', b'K', ..] | [0x80, 2..=5, ..] => torch::read(path, file),
        [_, _, _, _, _, _, _, _, b'{'] => safetensors(),
        [] => Err(WeightsError::Truncated {
            what: "any format".into(),
            needed: 8,
            has: 0,
            path: path.into(),
        }),
        _ if path.extension().is_some_and(|kind| kind == "safetensors") => safetensors(),
        _ => Err(WeightsError::UnknownFormat { path: path.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileDtype;
    use crate::safetensors::OutputTensor;
    use crate::testing::model;
    use crate::write::{split_shards, write_shards};

    fn sharded(folder: &Path) -> PathBuf {
        let tensor =
            |name: &str| OutputTensor { name: name.into(), dtype: FileDtype::U8, shape: vec![100] };
        let shards = split_shards("model", ["a", "b", "c"].map(tensor).into(), 250);
        let fill: crate::write::FillTensorFn<'_> = &mut |tensor, out| {
            out.write_all(&tensor.name.repeat(100).into_bytes()).unwrap();
            Ok(())
        };
        write_shards(folder, "model", &BTreeMap::new(), shards, false, fill)
            .unwrap()
            .pop()
            .unwrap()
            .path
    }

    /// What a folder says after one change to the index.
    fn check(change: impl Fn(String) -> String, says: &str) {
        let folder = tempfile::tempdir().unwrap();
        let index = sharded(folder.path());
        let text = fs::read_to_string(&index).unwrap();
        fs::write(&index, change(text)).unwrap();
        let error = Catalog::open(folder.path()).unwrap_err();
        assert!(
            matches!(error, WeightsError::Index { .. }) && error.to_string().contains(says),
            "{error}"
        );
    }

    /// Headers of 640 and 19280 bytes begin as a pickle and as an archive of PyTorch do.
    #[test]
    fn a_header_of_any_length_is_one_of_safetensors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapter.safetensors");
        for length in [640, 896, 1152, 1408, 19280] {
            let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
            let mut bytes = u64::to_le_bytes(length).to_vec();
            bytes.extend(format!("{header:<width$}", width = length as usize).into_bytes());
            bytes.push(7);
            fs::write(&path, bytes).unwrap();
            assert_eq!(Catalog::open(&path).unwrap().tensors.len(), 1, "{length}");
        }
    }

    #[test]
    fn shards_are_one_model() {
        let folder = tempfile::tempdir().unwrap();
        let index = sharded(folder.path());
        for path in [folder.path(), &index] {
            let catalog = Catalog::open(path).unwrap();
            assert_eq!(catalog.files.len(), 2);
            assert_eq!(catalog.bytes(), 300);
            assert_eq!(
                catalog.files[catalog.find("b").unwrap().file].file_name().unwrap(),
                "model-00001-of-00002.safetensors"
            );
            assert!(matches!(catalog.find("z").unwrap_err(), WeightsError::NoTensor { .. }));
        }
    }

    #[test]
    fn an_index_that_disagrees_with_its_shards_is_refused() {
        check(
            |text| text.replacen("00002-of", "00009-of", 1),
            "shard model-00009-of-00002.safetensors is missing",
        );
        check(
            |text| text.replacen("model-00001", "../model-00001", 1),
            "does not lie beside the index",
        );
        check(
            |text| text.replace("\"c\"", "\"d\""),
            "tensor d should be in model-00002-of-00002.safetensors, is nowhere",
        );
        check(|text| text.replace("\"c\": \"model-00002", "\"c\": \"model-00001"), "is nowhere");
        check(
            |text| text.replace("    \"a\": \"model-00001-of-00002.safetensors\",\n", ""),
            "tensor a is in a shard, not in the index",
        );
        check(|_| "{".into(), "EOF");
    }

    #[test]
    fn what_is_no_model_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert!(matches!(Catalog::open(path).unwrap_err(), WeightsError::NoModel { .. }));
        assert!(matches!(Catalog::open(&path.join("lost")).unwrap_err(), WeightsError::Io { .. }));
        fs::write(path.join("empty.safetensors"), "").unwrap();
        let error = Catalog::open(&path.join("empty.safetensors")).unwrap_err();
        assert!(matches!(error, WeightsError::Truncated { has: 0, .. }), "{error}");
        fs::write(path.join("note.txt"), "hello, this is no model").unwrap();
        let error = Catalog::open(&path.join("note.txt")).unwrap_err();
        assert!(matches!(error, WeightsError::UnknownFormat { .. }), "{error}");
        fs::create_dir(path.join("folder.safetensors")).unwrap();
        let error = Catalog::open(path).unwrap_err();
        assert!(
            matches!(error, WeightsError::Truncated { .. } | WeightsError::NotAFile { .. }),
            "{error}"
        );
    }

    #[test]
    fn links_that_lead_in_a_circle_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a.safetensors"), folder.path().join("b.safetensors"));
        std::os::unix::fs::symlink(&a, &b).unwrap();
        std::os::unix::fs::symlink(&b, &a).unwrap();
        assert!(matches!(Catalog::open(&a).unwrap_err(), WeightsError::Io { .. }));
    }

    #[test]
    fn one_model_of_a_file_that_holds_several() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = model(folder.path(), &[8, 9, 10]);
        let found = catalog.under("t");
        assert_eq!(found.find("1").unwrap().offset, catalog.find("t1").unwrap().offset);
        assert_eq!((found.tensors.len(), found.bytes()), (3, 27));
        assert!(found.find("t1").is_err());
        assert_eq!(catalog.only("t1").find("t1").unwrap(), catalog.find("t1").unwrap());
        assert_eq!(catalog.under("t1").bytes(), 9);
        assert!(catalog.under("x").tensors.is_empty());
    }

    #[test]
    fn two_files_with_the_same_tensor_are_not_one_model() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = model(folder.path(), &[8]);
        fs::copy(&catalog.files[0], folder.path().join("copy.safetensors")).unwrap();
        let error = Catalog::open(folder.path()).unwrap_err();
        assert!(error.to_string().contains("is also in"), "{error}");
        assert_eq!(Catalog::open_each(folder.path()).unwrap().len(), 2);
    }
}
