//! Loads adapters from files of any program. Each layer of the model is looked up under every name
//! that another program gives it. A tensor that no layer claims is an error, since an image sampled
//! with half an adapter is silently wrong. `names.rs` has the names.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;
use weights::catalog::INDEX_SUFFIX;
use weights::load::load_f32;
use weights::{Catalog, TensorInfo};

use super::LoraWeights;
use super::names::{EncoderNames, LORA_SUFFIXES, MAGNITUDE_SUFFIXES, original_stems, stems};
use crate::error::{Result, TrainerError};
use crate::model::build::{TensorRole, TensorSpec};
use crate::model::tensor_piece::{TensorPiece, stored_rows};
use crate::model::{config, hub};

/// Which part of a model an adapter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// The denoiser of a diffusion model.
    Transformer,
    /// A text encoder: 1, 2 or 3.
    TextEncoder(u8),
    /// A language model.
    Language,
}

impl Component {
    /// Its folder, and how diffusers' names begin.
    pub fn folder(self) -> String {
        match self {
            Self::Transformer => "transformer".into(),
            Self::TextEncoder(1) => "text_encoder".into(),
            Self::TextEncoder(index) => format!("text_encoder_{index}"),
            Self::Language => String::new(),
        }
    }
}

/// A linear layer of a model, to look up in a file.
#[derive(Clone, Debug)]
pub struct TargetModule {
    name: String,
    /// [out, in]
    sizes: [usize; 2],
    /// Where it lies in the layouts of other programs, the original one first.
    layouts: Vec<Vec<TensorPiece>>,
}

impl TargetModule {
    /// The linear layers among a model's weights.
    pub fn from_specs(
        wants: &[TensorSpec],
        layouts: impl Fn(&str) -> Vec<Vec<TensorPiece>>,
    ) -> Vec<Self> {
        let module = |want: &TensorSpec| {
            let &[outputs, inputs] = want.shape.sizes() else { return None };
            let name = want.name.strip_suffix(".weight")?;
            let is_layer = want.role != TensorRole::Vector && !name.ends_with("embedding");
            let layouts = layouts(name);
            is_layer.then(|| Self { name: name.into(), sizes: [outputs, inputs], layouts })
        };
        wants.iter().filter_map(module).collect()
    }
}

/// An open adapter file or folder; only headers are read.
pub struct AdapterFile {
    path: PathBuf,
    catalog: Catalog,
    /// `adapter_config.json` of PEFT, or what diffusers keeps of it in the header.
    config: Option<Value>,
    claimed: BTreeSet<String>,
    /// Whether values that are not finite are read, too.
    takes_any: bool,
}

/// What diffusers takes of a folder; files for other programs may lie beside it.
pub(crate) const DIFFUSERS_FILE: &str = "pytorch_lora_weights.safetensors";
/// What PEFT takes of a folder, and its settings.
pub(crate) const PEFT_FILE: &str = "adapter_model.safetensors";
pub(crate) const PEFT_CONFIG: &str = "adapter_config.json";

impl AdapterFile {
    /// Opens a file, or a folder as PEFT, diffusers or a run of hearth write it; a checkpoint is one.
    pub fn open(path: &Path) -> Result<Self> {
        hub::check_exists(path)?;
        let path = &resolve_file(path)?;
        let catalog = Catalog::open(path)?;
        let is_peft = path.ends_with(PEFT_FILE);
        let folder = path.parent().filter(|_| is_peft).unwrap_or(path);
        let beside = folder.join(PEFT_CONFIG);
        let config = if beside.exists() {
            Some(config::read(&beside)?)
        } else {
            let header = catalog.metadata.get("lora_adapter_metadata");
            header.and_then(|text| serde_json::from_str(text).ok())
        };
        let (claimed, takes_any) = (BTreeSet::new(), false);
        Ok(Self { path: path.into(), catalog, config, claimed, takes_any })
    }

    /// The same, but accepts values that are not finite; by default they are an error.
    #[must_use]
    pub fn with_any_values(self, takes_any: bool) -> Self {
        Self { takes_any, ..self }
    }

    /// The adapters of a component's layers. A text encoder may have `names` of its own.
    pub fn take(
        &mut self,
        component: Component,
        names: Option<EncoderNames>,
        modules: &[TargetModule],
    ) -> Result<HashMap<String, LoraWeights>> {
        let mut taken = HashMap::new();
        for module in modules {
            if let Some(given) = self.find(component, names, module)? {
                taken.insert(module.name.clone(), given);
            }
        }
        Ok(taken)
    }

    /// Checks that every tensor belongs to a layer.
    pub fn check_all_taken(&self) -> Result<()> {
        let is_left = |tensor: &&TensorInfo| !self.claimed.contains(&tensor.name);
        let left: Vec<&TensorInfo> = self.catalog.tensors.iter().filter(is_left).collect();
        match left.first() {
            None if self.claimed.is_empty() => Err(self.wrong("it has no tensors".into())),
            None => Ok(()),
            Some(first) => Err(self.wrong(format!(
                "{} of its {} tensors, such as {}, belong to no layer of it",
                left.len(),
                self.catalog.tensors.len(),
                first.name
            ))),
        }
    }

    fn wrong(&self, problem: String) -> TrainerError {
        TrainerError::Adapter { problem, path: self.path.clone() }
    }

    fn find(
        &mut self,
        component: Component,
        names: Option<EncoderNames>,
        module: &TargetModule,
    ) -> Result<Option<LoraWeights>> {
        let own = stems(component, names, &module.name).into_iter().map(|stem| (stem, None));
        let theirs =
            module.layouts.iter().filter_map(|pieces| Some((&pieces.first()?.key, pieces)));
        let theirs = theirs.flat_map(|(key, pieces)| {
            original_stems(component, key).into_iter().map(move |stem| (stem, Some(&pieces[..])))
        });
        for (stem, pieces) in own.chain(theirs) {
            for [down, up] in LORA_SUFFIXES {
                let names = [format!("{stem}{down}"), format!("{stem}{up}")];
                if self.catalog.find(&names[0]).is_ok() {
                    return self.read(component, module, &stem, names, pieces);
                }
            }
        }
        Ok(None)
    }

    /// `None` for a layer whose rows of a fused adapter are zeros: it had none before the others were fused.
    fn read(
        &mut self,
        component: Component,
        module: &TargetModule,
        stem: &str,
        [down, up]: [String; 2],
        pieces: Option<&[TensorPiece]>,
    ) -> Result<Option<LoraWeights>> {
        let [outputs, inputs] = module.sizes;
        let (down, up) = (self.matrix(&down)?, self.matrix(&up)?);
        let rank = down.rows;
        let full = pieces.map_or(Some(outputs), |pieces| stored_rows(pieces, outputs));
        let full = full.unwrap_or(outputs);
        let shapes = ([down.rows, down.columns], [up.rows, up.columns]);
        if shapes != ([rank, inputs], [full, rank]) || rank == 0 {
            let (down, up) = shapes;
            return Err(self.wrong(format!(
                "{stem} has matrices {down:?} and {up:?}, the layer needs {:?} and {:?}",
                [rank, inputs],
                [full, rank]
            )));
        }
        let scale = self.alpha(component, module, stem, rank)? / rank as f32;
        if !scale.is_finite() && !self.takes_any {
            return Err(self.wrong(format!("the alpha of {stem} is not finite")));
        }
        let mut given =
            LoraWeights { rank, alpha: 0.0, down: down.values, up: Vec::new(), magnitude: None };
        let whole = [TensorPiece::whole("")];
        for piece in pieces.unwrap_or(&whole) {
            let rows = piece.rows(full);
            given.up.extend_from_slice(&up.values[rows.start * rank..rows.end * rank]);
        }
        given.magnitude = self.magnitude(stem, pieces.unwrap_or(&whole))?;
        if given.is_zero() && given.magnitude.is_none() && up.values.iter().any(|b| *b != 0.0) {
            return Ok(None);
        }
        given.alpha = scale * rank as f32;
        let is_whole = full == outputs;
        Ok(Some(if is_whole { given } else { without_zero_rank(given, inputs, scale) }))
    }

    /// alpha from the file: beside the matrices, or in the settings; else the rank.
    fn alpha(
        &mut self,
        component: Component,
        module: &TargetModule,
        stem: &str,
        rank: usize,
    ) -> Result<f32> {
        let name = format!("{stem}.alpha");
        if self.catalog.find(&name).is_ok() {
            let LoraMatrix { values, .. } = self.matrix(&name)?;
            return Ok(values.first().copied().unwrap_or(rank as f32));
        }
        let Some(config) = &self.config else { return Ok(rank as f32) };
        let get = |key: &str| {
            config.get(format!("{}.{key}", component.folder())).or_else(|| config.get(key))
        };
        let of_layer = |patterns: &Value| {
            let patterns = patterns.as_object()?;
            let fits = |pattern: &&String| {
                module
                    .name
                    .strip_suffix(pattern.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            };
            patterns.keys().find(fits).and_then(|pattern| patterns[pattern].as_f64())
        };
        let own = get("alpha_pattern").and_then(of_layer);
        let alpha = own.or_else(|| get("lora_alpha").and_then(Value::as_f64));
        let alpha = alpha.map_or(rank as f32, |alpha| alpha as f32);
        // Rank-stabilised: divided by √rank where others divide by the rank.
        let is_stabilised = get("use_rslora").and_then(Value::as_bool) == Some(true);
        Ok(if is_stabilised { alpha * (rank as f32).sqrt() } else { alpha })
    }

    fn magnitude(&mut self, stem: &str, pieces: &[TensorPiece]) -> Result<Option<Vec<f32>>> {
        let names = MAGNITUDE_SUFFIXES.map(|ending| format!("{stem}{ending}"));
        let Some(name) = names.iter().find(|name| self.catalog.find(name).is_ok()) else {
            return Ok(None);
        };
        let all = self.matrix(name)?.values;
        let part = |piece: &TensorPiece| all[piece.rows(all.len())].to_vec();
        Ok(Some(pieces.iter().flat_map(part).collect()))
    }

    fn matrix(&mut self, name: &str) -> Result<LoraMatrix> {
        let tensor = self.catalog.find(name)?;
        self.claimed.insert(name.to_owned());
        let rows = tensor.shape.first().map_or(1, |rows| *rows as usize);
        let values = load_f32(&self.catalog, tensor, 0..tensor.numel())?;
        let n_lost = values.iter().filter(|value| !value.is_finite()).count();
        if n_lost > 0 && !self.takes_any {
            let (n, path) = (values.len(), self.path.clone());
            return Err(TrainerError::NotFinite { tensor: name.into(), n_lost, n, path });
        }
        // Adapters of 1x1 convolutions have two more dimensions.
        Ok(LoraMatrix { rows, columns: tensor.numel() as usize / rows.max(1), values })
    }
}

/// The adapter file in a folder, if it has a known name.
pub(crate) fn adapter_in(folder: &Path) -> Option<PathBuf> {
    [DIFFUSERS_FILE, PEFT_FILE].map(|name| folder.join(name)).into_iter().find(|file| file.exists())
}

/// The files of a run's checkpoint: its tensors in one or several files of this stem, and its progress.
pub(crate) const STATE_STEM: &str = "state";
pub(crate) const PROGRESS: &str = "progress.json";

/// The file that a checkpoint's tensors are opened by: the only one, or the index of several.
pub(crate) fn state_file(folder: &Path) -> PathBuf {
    let one = folder.join(format!("{STATE_STEM}.safetensors"));
    let index = folder.join(format!("{STATE_STEM}.safetensors{INDEX_SUFFIX}"));
    if index.exists() { index } else { one }
}

/// Whether a folder is a checkpoint.
pub fn is_checkpoint(folder: &Path) -> bool {
    state_file(folder).exists() && folder.join(PROGRESS).exists()
}

/// The adapter file or folder that a path stands for. A run keeps its adapter in `adapter/`, with a file
/// or folder for each program.
fn resolve_file(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() {
        return Ok(path.into());
    }
    if let Some(file) = adapter_in(path) {
        return Ok(file);
    }
    let of_run = path.join("adapter");
    if is_checkpoint(path) || (path.join("events.jsonl").exists() && !of_run.is_dir()) {
        return Err(no_adapter(path));
    }
    let folder = if of_run.is_dir() { &of_run } else { path };
    if let Some(file) = adapter_in(folder).or_else(|| adapter_in(&folder.join("peft"))) {
        return Ok(file);
    }
    let [first, second, ..] = &Catalog::open_each(folder)?[..] else { return Ok(folder.into()) };
    let [first, second] = [first, second].map(|catalog| name(&catalog.path));
    let folder = folder.display();
    Err(TrainerError::Request {
        problem: format!("the folder has several adapters, such as {first} and {second}: {folder}"),
        hint: "give one of the files",
    })
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The error for a checkpoint or run without an adapter.
fn no_adapter(path: &Path) -> TrainerError {
    let shown = path.display();
    let (problem, hint) = if is_checkpoint(path) {
        (
            format!("there is no adapter in the checkpoint {shown}"),
            "export the model of a full fine-tune with `hearth export CHECKPOINT --base BASE --out FOLDER`; \
             a run of an older hearth saves its adapter when resumed with --resume",
        )
    } else if path.join("model").is_dir() {
        let problem = format!("this run is a full fine-tune and has no adapter: {shown}");
        (problem, "give its folder model/ with --base")
    } else {
        let problem = format!("this run has not written its adapter yet: {shown}");
        (problem, "let it finish with `hearth train --resume`, or give one of its checkpoints/")
    };
    TrainerError::Request { problem, hint }
}

struct LoraMatrix {
    rows: usize,
    columns: usize,
    values: Vec<f32>,
}

/// Of a fused qkv adapter, q, k and v each use only their own part of the rank; the rest of `up` is zeros,
/// and computing it would be wasted.
fn without_zero_rank(given: LoraWeights, inputs: usize, scale: f32) -> LoraWeights {
    let LoraWeights { rank, down, up, magnitude, .. } = given;
    let is_used = |index: &usize| up.iter().skip(*index).step_by(rank).any(|value| *value != 0.0);
    let mut used: Vec<usize> = (0..rank).filter(is_used).collect();
    if used.is_empty() {
        used.push(0);
    }
    let of_row = |row: &[f32]| used.iter().map(|index| row[*index]).collect::<Vec<_>>();
    LoraWeights {
        rank: used.len(),
        alpha: scale * used.len() as f32,
        down: used.iter().flat_map(|i| down[i * inputs..(i + 1) * inputs].to_vec()).collect(),
        up: up.chunks(rank).flat_map(of_row).collect(),
        magnitude,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_folder_for_several_programs_one_file_is_taken() {
        let adapters =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/adapters");
        let folder = tempfile::tempdir().unwrap();
        for (from, to) in [("diffusers", DIFFUSERS_FILE), ("comfy", "fox-comfyui.safetensors")] {
            let from = adapters.join(format!("{from}.safetensors"));
            std::fs::copy(from, folder.path().join(to)).unwrap();
        }
        let file = AdapterFile::open(folder.path()).unwrap();
        let is_theirs = |tensor: &TensorInfo| tensor.name.starts_with("diffusion_model.");
        assert!(!file.catalog.tensors.iter().any(is_theirs));
    }
}
