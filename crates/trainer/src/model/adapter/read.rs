//! Loads adapters from files of any program. Each layer of the model is looked up under every name
//! that another program gives it. A tensor that no layer claims is an error, since an image sampled
//! with half an adapter is silently wrong. `names.rs` has the names.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::Value;
use weights::catalog::INDEX_SUFFIX;
use weights::load::load_f32;
use weights::{Catalog, TensorInfo};

use super::LayerWeights;
use super::factors::{AdapterMatrix, Factors, HADA, LOKR, LokrFactor, NORM};
use super::names::{DIFF, EncoderNames, LORA_SUFFIXES, MAGNITUDE_SUFFIXES, original_stems, stems};
use crate::error::{Result, TrainerError};
use crate::fingerprint::Fingerprint;
use crate::model::build::{TensorRole, TensorSpec};
use crate::model::tensor_piece::{TensorPiece, stored_rows};
use crate::model::{config, files, hub};

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

/// A linear layer or a norm of a model, to look up in a file.
#[derive(Clone, Debug)]
pub struct TargetModule {
    name: String,
    /// [out, in]; of a norm [d, 1].
    sizes: [usize; 2],
    /// Of a norm, whether it has a bias.
    norm: Option<bool>,
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
            let (name, sizes) = (name.into(), [outputs, inputs]);
            is_layer.then_some(Self { name, sizes, norm: None, layouts })
        };
        wants.iter().filter_map(module).collect()
    }

    /// Its name, if it is a norm.
    pub fn into_norm(self) -> Option<String> {
        self.norm.map(|_| self.name)
    }

    /// The same with the norms.
    pub fn with_norms(
        wants: &[TensorSpec],
        layouts: impl Fn(&str) -> Vec<Vec<TensorPiece>>,
    ) -> Vec<Self> {
        let biases: HashSet<&str> =
            wants.iter().filter_map(|want| want.name.strip_suffix(".bias")).collect();
        let norm = |want: &TensorSpec| {
            let &[width] = want.shape.sizes() else { return None };
            let name = want.name.strip_suffix(".weight")?;
            let norm = Some(biases.contains(name));
            let is_norm = want.role == TensorRole::Vector;
            let layouts = layouts(name);
            is_norm.then(|| Self { name: name.into(), sizes: [width, 1], norm, layouts })
        };
        let norms: Vec<Self> = wants.iter().filter_map(norm).collect();
        Self::from_specs(wants, layouts).into_iter().chain(norms).collect()
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

    /// Identifies it.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        files::fingerprint(&self.catalog)
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
    ) -> Result<HashMap<String, LayerWeights>> {
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
    ) -> Result<Option<LayerWeights>> {
        let own = stems(component, names, &module.name).into_iter().map(|stem| (stem, None));
        let theirs =
            module.layouts.iter().filter_map(|pieces| Some((&pieces.first()?.key, pieces)));
        let theirs = theirs.flat_map(|(key, pieces)| {
            original_stems(component, key).into_iter().map(move |stem| (stem, Some(&pieces[..])))
        });
        for (stem, pieces) in own.chain(theirs) {
            let place = LayerPlace { component, module, stem, pieces };
            if let Some(has_bias) = module.norm {
                for names in [NORM, DIFF] {
                    if self.has(&place, names[0]) {
                        return self.read_norm(&place, names, has_bias).map(Some);
                    }
                }
                continue;
            }
            for [down, up] in LORA_SUFFIXES {
                let names = [down, up].map(|ending| format!("{}{ending}", place.stem));
                if self.catalog.find(&names[0]).is_ok() {
                    return self.read_lora(&place, names);
                }
            }
            if self.has(&place, HADA[0]) {
                return self.read_loha(&place);
            }
            if LOKR[0][..2].iter().any(|name| self.has(&place, name)) {
                return self.read_lokr(&place).map(Some);
            }
        }
        Ok(None)
    }

    fn has(&self, place: &LayerPlace<'_>, name: &str) -> bool {
        self.catalog.find(&format!("{}.{name}", place.stem)).is_ok()
    }

    /// `None` for a layer whose rows of a fused adapter are zeros: it had none before the others were fused.
    fn read_lora(
        &mut self,
        place: &LayerPlace<'_>,
        [down, up]: [String; 2],
    ) -> Result<Option<LayerWeights>> {
        let (down, up) = (self.matrix(&down)?, self.matrix(&up)?);
        let rank = down.rows;
        self.check_pair(place, &up, &down)?;
        let scale = self.alpha(place, "lora_alpha", rank)? / rank as f32;
        self.check_scale(place, scale)?;
        let magnitude = self.magnitude(&place.stem, &place.rows())?;
        let had_any = up.values.iter().any(|b| *b != 0.0);
        let up = up.some_rows(place.own_rows());
        let factors = Factors::Lora { down, up };
        let given = LayerWeights { rank, alpha: scale * rank as f32, factors, magnitude };
        let is_zero = up_is_zero(&given);
        if is_zero && given.magnitude.is_none() && had_any {
            return Ok(None);
        }
        Ok(Some(if place.is_whole() { given } else { without_zero_rank(given) }))
    }

    fn read_loha(&mut self, place: &LayerPlace<'_>) -> Result<Option<LayerWeights>> {
        let mut next = |name: &str| self.matrix(&format!("{}.{name}", place.stem));
        let [a, b, c, d] = [next(HADA[0])?, next(HADA[1])?, next(HADA[2])?, next(HADA[3])?];
        let rank = b.rows;
        self.check_pair(place, &a, &b)?;
        self.check_pair(place, &c, &d)?;
        let scale = self.alpha(place, "alpha", rank)? / rank as f32;
        self.check_scale(place, scale)?;
        let magnitude = self.magnitude(&place.stem, &place.rows())?;
        let [a, c] = [a, c].map(|matrix| matrix.some_rows(place.own_rows()));
        let is_zero = |matrix: &AdapterMatrix| matrix.values.iter().all(|value| *value == 0.0);
        if !place.is_whole() && is_zero(&a) && is_zero(&c) {
            return Ok(None);
        }
        let factors = Factors::Loha { w1: [a, b], w2: [c, d] };
        let given = LayerWeights { rank, alpha: scale * rank as f32, factors, magnitude };
        Ok(Some(if place.is_whole() { given } else { without_zero_rank(given) }))
    }

    fn read_lokr(&mut self, place: &LayerPlace<'_>) -> Result<LayerWeights> {
        let [w1, w2] = [self.lokr_factor(place, LOKR[0])?, self.lokr_factor(place, LOKR[1])?];
        let [[l, m], [k, n]] = [&w1, &w2].map(|w| w.sizes(AdapterMatrix::sizes));
        let stem = &place.stem;
        if [l * k, m * n] != [place.stored_rows(), place.module.sizes[1]] {
            return Err(self.wrong(format!(
                "{stem} has the Kronecker factors {:?} and {:?}, the layer needs a matrix {:?}",
                [l, m],
                [k, n],
                [place.stored_rows(), place.module.sizes[1]]
            )));
        }
        let rank = [&w1, &w2].into_iter().find_map(|w| match w {
            LokrFactor::Full(_) => None,
            LokrFactor::LowRank([_, b]) => Some(b.rows),
        });
        let scale = self.lokr_scale(place, rank)?;
        self.check_scale(place, scale)?;
        if self.magnitude(stem, &place.rows())?.is_some() {
            let problem =
                format!("{stem} is a LoKr with magnitudes (DoRA), which hearth does not have");
            return Err(self.wrong(problem));
        }
        let w1 = self.own_groups(place, w1, k)?;
        let rank = rank.unwrap_or(1);
        let factors = Factors::Lokr { w1, w2 };
        Ok(LayerWeights { rank, alpha: scale * rank as f32, factors, magnitude: None })
    }

    /// What is added to a norm. PEFT's files have the sum beside it, which is not needed.
    fn read_norm(
        &mut self,
        place: &LayerPlace<'_>,
        [weight, bias]: [&str; 2],
        has_bias: bool,
    ) -> Result<LayerWeights> {
        let (stem, width) = (&place.stem, place.module.sizes[0]);
        let is_biased = has_bias && self.has(place, bias);
        let mut vector = |name: &str| {
            let found = self.matrix(&format!("{stem}.{name}"))?;
            let n = found.values.len();
            if n == width {
                return Ok(AdapterMatrix::new(place.module.sizes, found.values));
            }
            Err(self.wrong(format!("{stem}.{name} has {n} values, the norm needs {width}")))
        };
        let weight = vector(weight)?;
        let bias = match is_biased.then(|| vector(bias)).transpose()? {
            None if has_bias => Some(AdapterMatrix::new(weight.sizes(), vec![0.0; weight.rows])),
            found => found,
        };
        self.claimed.extend(["weight", "bias"].map(|end| format!("{stem}.{end}")));
        let factors = Factors::Norm { weight, bias };
        Ok(LayerWeights { rank: 1, alpha: 1.0, factors, magnitude: None })
    }

    /// A factor, whole or of low rank.
    fn lokr_factor(
        &mut self,
        place: &LayerPlace<'_>,
        [whole, a, b]: [&str; 3],
    ) -> Result<LokrFactor<AdapterMatrix>> {
        let mut next = |name: &str| self.matrix(&format!("{}.{name}", place.stem));
        if let Ok(whole) = next(whole) {
            return Ok(LokrFactor::Full(whole));
        }
        let [a, b] = [next(a)?, next(b)?];
        if a.columns != b.rows || b.rows == 0 {
            let (stem, a, b) = (&place.stem, a.sizes(), b.sizes());
            return Err(
                self.wrong(format!("{stem} has {a:?} and {b:?}, which cannot be multiplied"))
            );
        }
        Ok(LokrFactor::LowRank([a, b]))
    }

    /// `LyCORIS` scales what has a rank; PEFT scales all.
    fn lokr_scale(&mut self, place: &LayerPlace<'_>, rank: Option<usize>) -> Result<f32> {
        let has_alpha = self.has(place, "alpha");
        let of_config = || Some(self.setting(place, "r", "rank_pattern")? as usize);
        let rank_of_config = rank.or_else(|| of_config().filter(|_| !has_alpha));
        if let Some(rank) = rank_of_config {
            return Ok(self.alpha(place, "alpha", rank)? / rank as f32);
        }
        self.claimed.insert(format!("{}.alpha", place.stem));
        Ok(1.0)
    }

    /// The outer factor's rows that are the layer's own, where a file has several layers as one.
    fn own_groups(
        &self,
        place: &LayerPlace<'_>,
        w1: LokrFactor<AdapterMatrix>,
        inner_rows: usize,
    ) -> Result<LokrFactor<AdapterMatrix>> {
        let rows: Vec<usize> = place.own_rows().collect();
        let groups = rows.chunks(inner_rows);
        let is_whole = |rows: &[usize]| {
            rows.len() == inner_rows
                && rows[0].is_multiple_of(inner_rows)
                && rows.windows(2).all(|pair| pair[1] == pair[0] + 1)
        };
        if !groups.clone().all(is_whole) {
            return Err(self.wrong(format!(
                "{} is a LoKr of layers that hearth keeps apart, and its {inner_rows} rows of the inner factor cross \
                 their borders; merge it into the base with the program that made it",
                place.stem
            )));
        }
        let own: Vec<usize> = groups.map(|rows| rows[0] / inner_rows).collect();
        Ok(match w1 {
            LokrFactor::Full(whole) => LokrFactor::Full(whole.some_rows(own)),
            LokrFactor::LowRank([a, b]) => LokrFactor::LowRank([a.some_rows(own), b]),
        })
    }

    /// Fails unless up·down has the shape of the layer, or of the layers that are stored as one.
    fn check_pair(
        &self,
        place: &LayerPlace<'_>,
        up: &AdapterMatrix,
        down: &AdapterMatrix,
    ) -> Result<()> {
        let ([_, inputs], rank, full) = (place.module.sizes, down.rows, place.stored_rows());
        let (down, up) = (down.sizes(), up.sizes());
        if (down, up) == ([rank, inputs], [full, rank]) && rank > 0 {
            return Ok(());
        }
        Err(self.wrong(format!(
            "{} has matrices {down:?} and {up:?}, the layer needs {:?} and {:?}",
            place.stem,
            [rank, inputs],
            [full, rank]
        )))
    }

    fn check_scale(&self, place: &LayerPlace<'_>, scale: f32) -> Result<()> {
        if scale.is_finite() || self.takes_any {
            return Ok(());
        }
        Err(self.wrong(format!("the alpha of {} is not finite", place.stem)))
    }

    /// alpha from the file: beside the matrices, or in the settings by this key; else the rank.
    fn alpha(&mut self, place: &LayerPlace<'_>, key: &str, rank: usize) -> Result<f32> {
        let name = format!("{}.alpha", place.stem);
        if self.catalog.find(&name).is_ok() {
            let AdapterMatrix { values, .. } = self.matrix(&name)?;
            return Ok(values.first().copied().unwrap_or(rank as f32));
        }
        let alpha = self.setting(place, key, "alpha_pattern");
        let alpha = alpha.map_or(rank as f32, |alpha| alpha as f32);
        // Rank-stabilised: divided by √rank where others divide by the rank.
        let is_stabilised =
            self.of_config(place, "use_rslora").and_then(Value::as_bool) == Some(true);
        Ok(if is_stabilised { alpha * (rank as f32).sqrt() } else { alpha })
    }

    fn of_config(&self, place: &LayerPlace<'_>, key: &str) -> Option<&Value> {
        let config = self.config.as_ref()?;
        config.get(format!("{}.{key}", place.component.folder())).or_else(|| config.get(key))
    }

    /// A number of the settings: the layer's own, or that of all.
    fn setting(&self, place: &LayerPlace<'_>, key: &str, patterns: &str) -> Option<f64> {
        let own = self.of_config(place, patterns).and_then(Value::as_object).and_then(|patterns| {
            let fits = |pattern: &&String| {
                let rest = place.module.name.strip_suffix(pattern.as_str());
                rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            };
            patterns.keys().find(fits).and_then(|pattern| patterns[pattern].as_f64())
        });
        own.or_else(|| self.of_config(place, key).and_then(Value::as_f64))
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

    fn matrix(&mut self, name: &str) -> Result<AdapterMatrix> {
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
        Ok(AdapterMatrix::new([rows, tensor.numel() as usize / rows.max(1)], values))
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

/// A layer, and what a file calls it.
struct LayerPlace<'a> {
    component: Component,
    module: &'a TargetModule,
    stem: String,
    /// Where it lies in what is stored, if that is not the layer itself.
    pieces: Option<&'a [TensorPiece]>,
}

impl LayerPlace<'_> {
    /// Rows of what is stored.
    fn stored_rows(&self) -> usize {
        let [outputs, _] = self.module.sizes;
        self.pieces.and_then(|pieces| stored_rows(pieces, outputs)).unwrap_or(outputs)
    }

    fn is_whole(&self) -> bool {
        self.stored_rows() == self.module.sizes[0]
    }

    fn rows(&self) -> Vec<TensorPiece> {
        self.pieces.map_or_else(|| vec![TensorPiece::whole("")], <[TensorPiece]>::to_vec)
    }

    /// The layer's rows among those that are stored, in its own order.
    fn own_rows(&self) -> impl Iterator<Item = usize> {
        let stored = self.stored_rows();
        self.rows().into_iter().flat_map(move |piece| piece.rows(stored))
    }
}

fn up_is_zero(given: &LayerWeights) -> bool {
    let Factors::Lora { up, .. } = &given.factors else { return false };
    up.values.iter().all(|value| *value == 0.0)
}

/// Of a fused qkv adapter, q, k and v each use only their own part of the rank; the rest of `up` is zeros,
/// and computing it would be wasted.
fn without_zero_rank(given: LayerWeights) -> LayerWeights {
    let scale = given.scale();
    let ups: Vec<&AdapterMatrix> = match &given.factors {
        Factors::Lora { up, .. } => vec![up],
        Factors::Loha { w1: [a, _], w2: [c, _] } => vec![a, c],
        Factors::Lokr { .. } | Factors::Norm { .. } => return given,
    };
    let is_used = |index: &usize| {
        ups.iter().any(|up| up.values.iter().skip(*index).step_by(up.columns).any(|v| *v != 0.0))
    };
    let mut used: Vec<usize> = (0..given.rank).filter(is_used).collect();
    if used.is_empty() {
        used.push(0);
    }
    let down = |matrix: &AdapterMatrix| matrix.some_rows(used.iter().copied());
    let up = |matrix: &AdapterMatrix| matrix.some_columns(&used);
    let factors = match &given.factors {
        Factors::Lora { down: a, up: b } => Factors::Lora { down: down(a), up: up(b) },
        Factors::Loha { w1: [a, b], w2: [c, d] } => {
            Factors::Loha { w1: [up(a), down(b)], w2: [up(c), down(d)] }
        }
        other @ (Factors::Lokr { .. } | Factors::Norm { .. }) => other.clone(),
    };
    let rank = used.len();
    LayerWeights { rank, alpha: scale * rank as f32, factors, magnitude: given.magnitude }
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
