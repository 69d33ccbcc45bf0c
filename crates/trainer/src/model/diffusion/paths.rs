//! Where the parts of a pipeline lie. A diffusers folder has all of them. A checkpoint file has the transformer, and
//! perhaps more; for each other part the first of these counts:
//!
//! ```text
//! the file that was named          --vae, --text-encoder
//! the checkpoint itself            the VAE; the text encoders after the folder
//! the folder with the rest         --rest: a diffusers folder, or one with tokenizers alone
//! well-known names                 beside the checkpoint, and in the folders of ComfyUI next to its own
//! ```

use std::path::{Path, PathBuf};

use weights::{Catalog, WeightsError};

use super::denoiser::DenoiserConfig;
use super::family::DiffusionFamily;
use super::implementation::Implementation;
use super::text::{EncoderKind, TextEncoderSpec};
use crate::error::{Result, TrainerError};
use crate::model::encoder::{clip, qwen3, qwen25vl, t5};
use crate::model::{component, hub, kind};

/// What a user named besides the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartPaths {
    /// A folder with what a checkpoint lacks.
    pub rest: Option<PathBuf>,
    /// A file or folder of the VAE.
    pub vae: Option<PathBuf>,
    /// Files of text encoders, in any order.
    pub text_encoders: Vec<PathBuf>,
    /// Whose program the model is run like, where that makes a difference.
    pub implementation: Option<Implementation>,
    /// A LoRA of the base that acts in training alone. No flag of the command line: samples are drawn without it.
    pub training_adapter: Option<PathBuf>,
}

impl PartPaths {
    /// Refuses parts that were named as models of the hub and are not in its cache.
    pub(super) fn check(&self) -> Result<()> {
        let Self { rest, vae, text_encoders, training_adapter, .. } = self;
        let all = rest.iter().chain(vae).chain(text_encoders).chain(training_adapter);
        all.into_iter().try_for_each(|path| hub::check_exists(path))
    }

    /// A folder with all that a checkpoint lacks.
    pub fn rest(folder: &Path) -> Self {
        Self { rest: Some(folder.into()), ..Self::default() }
    }

    /// As flags of the command line, with each path as `shown`.
    pub fn flags(&self, shown: impl Fn(&Path) -> String) -> Vec<String> {
        let Self { rest, vae, text_encoders, implementation, .. } = self;
        let rest = rest.iter().map(|path| ("--rest", path));
        let vae = vae.iter().map(|path| ("--vae", path));
        let encoders = text_encoders.iter().map(|path| ("--text-encoder", path));
        let all = rest.chain(vae).chain(encoders);
        let all = all.map(|(flag, path)| [flag.to_owned(), shown(path)]);
        let implementation =
            implementation.iter().map(|it| ["--implementation".to_owned(), it.to_string()]);
        all.chain(implementation).flatten().collect()
    }
}

/// Where a part was found.
pub(super) enum PartSource {
    /// A folder with `config.json`, as diffusers saves it.
    Folder(PathBuf),
    /// Weights alone, and the config of the same part in the folder with the rest, if there is one.
    Weights(Catalog, Option<PathBuf>),
}

/// The other parts of a pipeline, found.
pub(super) struct FoundParts {
    /// The VAE.
    pub vae: PartSource,
    /// Text encoders in the family's order; `None` for one that is left out.
    pub encoders: Vec<Option<PartSource>>,
    /// The folder with tokenizers.
    pub tokenizers: PathBuf,
}

/// What is searched.
pub(super) struct PartSearch<'a> {
    path: &'a Path,
    /// The checkpoint; none if the model is a folder.
    pub checkpoint: Option<Catalog>,
    /// The model's folder, or that with the rest.
    pub folder: Option<PathBuf>,
    named: &'a PartPaths,
}

/// ComfyUI's folders of VAEs and text encoders, next to those of checkpoints. The first is the checkpoint's own.
const VAE_FOLDERS: [&str; 2] = [".", "../vae"];
const ENCODER_FOLDERS: [&str; 3] = [".", "../text_encoders", "../clip"];

impl<'a> PartSearch<'a> {
    /// For the model at `path`.
    pub fn new(path: &'a Path, named: &'a PartPaths) -> Result<Self> {
        if path.is_dir() {
            return Ok(Self { path, checkpoint: None, folder: Some(path.into()), named });
        }
        let own = path.parent().filter(|folder| folder.join(TOKENIZER).is_dir());
        let folder = named.rest.as_deref().or(own).map(Path::to_owned);
        Ok(Self { path, checkpoint: Some(Catalog::open(path)?), folder, named })
    }

    /// The family: by `model_index.json` of the folder, else by the names of the checkpoint's tensors.
    pub fn family(&self) -> Result<&'static DiffusionFamily> {
        let of_folder = |folder: &PathBuf| {
            let has_index = folder.join(kind::MODEL_INDEX).exists();
            has_index || self.checkpoint.is_none() || !folder.join(TOKENIZER).is_dir()
        };
        if let Some(folder) = self.folder.as_ref().filter(|folder| of_folder(folder)) {
            return super::family_of(folder);
        }
        let found = self.checkpoint.as_ref().and_then(kind::family_of_checkpoint);
        found.ok_or_else(|| {
            let problem = "holds no transformer that hearth knows in the original layout".into();
            TrainerError::Folder { what: "checkpoint", problem, path: self.path.into() }
        })
    }

    /// The class of the pipeline: what the name of a checkpoint says, else `model_index.json` of the folder.
    pub fn pipeline_class(&self, family: &DiffusionFamily) -> Option<String> {
        let named = self.checkpoint.as_ref();
        let named = named.and_then(|file| DenoiserConfig::pipeline_of_file(family, &file.path));
        let of_folder = || kind::pipeline_class(self.folder.as_ref()?).ok();
        named.map(str::to_owned).or_else(of_folder)
    }

    /// Finds all parts; the error names all that are missing.
    pub fn find(&self, family: &DiffusionFamily, has: HasEncoderFn<'_>) -> Result<FoundParts> {
        let mut missing = Vec::new();
        let vae = self.vae(family)?;
        if vae.is_none() {
            missing.push(lacking("a VAE", family.vae_files, &VAE_FOLDERS));
        }
        let mut encoders = self.named_encoders(family)?;
        for (spec, named) in family.encoders.iter().zip(&mut encoders) {
            let is_wanted = has(spec) || named.is_some();
            let found = if named.is_none() && is_wanted { self.encoder(spec)? } else { None };
            *named = named.take().or(found);
            if named.is_none() && (is_wanted || !spec.is_optional) {
                let what = format!("the text encoder {}", spec.name);
                missing.push(lacking(&what, spec.files, &ENCODER_FOLDERS));
            }
        }
        let is_there = |spec: &TextEncoderSpec, folder: &Path| folder.join(spec.tokenizer).is_dir();
        let wanted = || family.encoders.iter().zip(&encoders).filter(|(_, found)| found.is_some());
        let tokenizers = self.folder.as_ref().filter(|folder| {
            self.checkpoint.is_none() || wanted().all(|(spec, _)| is_there(spec, folder))
        });
        if tokenizers.is_none() {
            let names: Vec<&str> = family.encoders.iter().map(|spec| spec.tokenizer).collect();
            missing.push(format!("a folder with {} (--rest)", names.join("/, ") + "/"));
        }
        match (vae, tokenizers) {
            (Some(vae), Some(folder)) if missing.is_empty() => {
                Ok(FoundParts { vae, encoders, tokenizers: folder.clone() })
            }
            _ => Err(TrainerError::MissingParts { missing, path: self.path.into() }),
        }
    }

    fn vae(&self, family: &DiffusionFamily) -> Result<Option<PartSource>> {
        if let Some(path) = &self.named.vae {
            return self.named(path, VAE).map(Some);
        }
        let like = (family.published_model().vae)();
        if let Some(checkpoint) = &self.checkpoint
            && let Some(prefix) = like.original_prefix(checkpoint)
        {
            return Ok(Some(PartSource::Weights(checkpoint.only(prefix), self.config(VAE))));
        }
        Ok(self.in_folder(VAE).or(self.beside(family.vae_files, &VAE_FOLDERS, VAE)?))
    }

    fn encoder(&self, spec: &TextEncoderSpec) -> Result<Option<PartSource>> {
        let folder = spec.folder();
        if let Some(found) = self.in_folder(&folder) {
            return Ok(Some(found));
        }
        let own = self.checkpoint.as_ref().map(|checkpoint| checkpoint.under(&spec.prefix()));
        if let Some(own) = own.filter(|own| kind_of(own) == Some(spec.kind.of_file())) {
            return Ok(Some(PartSource::Weights(own, self.config(&folder))));
        }
        self.beside(spec.files, &ENCODER_FOLDERS, &folder)
    }

    /// The text encoders that were named: those of a kind are in the family's order.
    fn named_encoders(&self, family: &DiffusionFamily) -> Result<Vec<Option<PartSource>>> {
        let mut found: Vec<Option<PartSource>> = family.encoders.iter().map(|_| None).collect();
        for path in &self.named.text_encoders {
            let source = |spec: &TextEncoderSpec| self.named(path, &spec.folder());
            let kind =
                if path.is_dir() {
                    None
                } else {
                    let kind = kind_of(&Catalog::open(path)?);
                    Some(kind.ok_or_else(|| {
                        no_encoder(path, "is of no kind that hearth knows", family)
                    })?)
                };
            let fits = |spec: &TextEncoderSpec| kind.is_none_or(|kind| kind == spec.kind.of_file());
            let mut slots = family.encoders.iter().zip(&mut found);
            let free = slots.find(|(spec, found)| found.is_none() && fits(spec));
            let (spec, slot) = free.ok_or_else(|| no_encoder(path, "is one too many", family))?;
            *slot = Some(source(spec)?);
        }
        Ok(found)
    }

    /// A file or folder that was named, for the part that `folder` would have.
    fn named(&self, path: &Path, folder: &str) -> Result<PartSource> {
        if path.is_dir() {
            return Ok(PartSource::Folder(path.into()));
        }
        Ok(PartSource::Weights(Catalog::open(path)?, self.config(folder)))
    }

    /// The config of a part in the folder with the rest.
    fn config(&self, part: &str) -> Option<PathBuf> {
        let config = self.folder.as_ref()?.join(part).join("config.json");
        config.exists().then_some(config)
    }

    /// A part of the folder. One without weights counts only if there is no checkpoint: people keep configs and
    /// tokenizers, and have the weights elsewhere.
    fn in_folder(&self, part: &str) -> Option<PartSource> {
        let folder = self.folder.as_ref()?.join(part);
        let has_weights = || {
            let found = component::weights(&folder);
            !matches!(found, Err(TrainerError::Weights(WeightsError::NoModel { .. })))
        };
        let is_whole =
            folder.join("config.json").exists() && (self.checkpoint.is_none() || has_weights());
        is_whole.then_some(PartSource::Folder(folder))
    }

    /// A file of a well-known name, in the folders where ComfyUI has it.
    fn beside(&self, names: &[&str], folders: &[&str], part: &str) -> Result<Option<PartSource>> {
        let beside = self.path.parent().unwrap_or(Path::new(""));
        let paths = folders.iter().flat_map(|folder| names.iter().map(move |name| (folder, name)));
        let mut paths = paths.map(|(folder, name)| beside.join(folder).join(name));
        let found = paths.find(|path| self.checkpoint.is_some() && path.is_file());
        found.map(|path| self.named(&path, part)).transpose()
    }
}

/// Whether a pipeline uses a text encoder.
pub(super) type HasEncoderFn<'a> = &'a dyn Fn(&TextEncoderSpec) -> bool;

/// The folder of the VAE, and that of the first tokenizer, in a diffusers folder.
const VAE: &str = "vae";
const TOKENIZER: &str = "tokenizer";

/// The kind of text encoder that a file holds.
fn kind_of(catalog: &Catalog) -> Option<EncoderKind> {
    if t5::is_t5(catalog) {
        return Some(EncoderKind::T5);
    }
    if qwen25vl::is_qwen25vl(catalog) {
        return Some(EncoderKind::Qwen25Vl);
    }
    if qwen3::is_qwen3(catalog) {
        return Some(EncoderKind::Qwen3);
    }
    clip::is_clip(catalog).then_some(EncoderKind::Clip)
}

fn lacking(what: &str, names: &[&str], folders: &[&str]) -> String {
    format!("{what} ({} in {})", names.join(", "), folders.join(", "))
}

fn no_encoder(path: &Path, problem: &str, family: &DiffusionFamily) -> TrainerError {
    let file = |spec: &TextEncoderSpec| spec.files.first().copied().unwrap_or(spec.name);
    let files: Vec<&str> = family.encoders.iter().map(file).collect();
    TrainerError::Request {
        problem: format!(
            "text encoder {} {problem}: {} model takes {}",
            path.display(),
            family.title,
            files.join(", ")
        ),
        hint: "give each text encoder of the model once, in any order",
    }
}

#[cfg(test)]
mod tests {
    use weights::FileDtype;

    use super::*;
    use crate::model::build::{TensorSpec, tensor_specs};
    use crate::model::diffusion::flux;
    use crate::model::diffusion::text::EncoderConfig;
    use crate::model::encoder::clip::ClipTextModel;
    use crate::model::encoder::qwen25vl::Qwen25VlEncoder;
    use crate::model::encoder::t5::T5Encoder;
    use crate::model::files::WeightFiles;
    use crate::model::vae::{
        Flux2VaeConfig, HunyuanVideoVaeConfig, QwenImageVaeConfig, VaeConfig, VaeDecoder,
        VaeEncoder,
    };

    /// A file with these tensors, by other names.
    fn file(specs: &[TensorSpec], name: impl Fn(&str) -> String) -> Catalog {
        let sizes = |spec: &TensorSpec| spec.shape.sizes().iter().map(|n| *n as u64).collect();
        let tensors = specs.iter().map(|spec| (name(&spec.name), sizes(spec)));
        Catalog::meta(Path::new("file"), FileDtype::F16, tensors)
    }

    fn piece_names(layout: &crate::model::files::CheckpointLayout<'_>, name: &str) -> String {
        (layout.pieces)(name)[0].key.clone()
    }

    /// Under the original names, with a prefix.
    fn check_vae(config: &VaeConfig, like: &VaeConfig) {
        let stored = config.stored_tensors().unwrap();
        let none = Catalog::default();
        let original = config.layout(&none, Some("vae."));
        let catalog = file(&stored, |name| piece_names(&original, name));
        assert_eq!(like.original_prefix(&catalog), Some("vae."));
        assert_eq!(like.infer(&catalog, "vae.").as_ref(), Some(config));
        // All of it is found there.
        let layout = config.layout(&catalog, Some("vae."));
        WeightFiles::find(&catalog, &layout, |build| VaeEncoder::new(config, build)).unwrap();
        WeightFiles::find(&catalog, &layout, |build| VaeDecoder::new(config, build)).unwrap();
    }

    /// Of files of the published sizes; what shapes do not tell comes from another config of the family.
    #[test]
    fn configs_are_inferred_from_the_shapes_of_published_files() {
        let published = flux::FAMILY.published_model();
        let config = (published.vae)();
        let VaeConfig::Kl(mut like) = config.clone() else { panic!("FLUX.1 has an AutoencoderKL") };
        (like.block_out_channels, like.layers_per_block) = (vec![32], 9);
        like.latent_channels = 4;
        check_vae(&config, &like.into());
        let config = QwenImageVaeConfig::published();
        let mut like = config.clone();
        (like.base_dim, like.z_dim, like.num_res_blocks) = (8, 4, 1);
        (like.dim_mult, like.temperal_downsample) = (vec![1, 1], vec![true]);
        check_vae(&config.into(), &like.into());
        let config = HunyuanVideoVaeConfig::published();
        let mut like = config.clone();
        (like.block_out_channels, like.layers_per_block) = (vec![32], 9);
        (like.latent_channels, like.spatial_compression_ratio) = (4, 2);
        let (config, like) = (VaeConfig::from(config), VaeConfig::from(like));
        check_vae(&config, &like);
        // Under the names of diffusers alone.
        let catalog = file(&config.stored_tensors().unwrap(), str::to_owned);
        assert_eq!(like.original_prefix(&catalog), Some(""));
        assert_eq!(like.infer(&catalog, ""), Some(config.clone()));
        let layout = config.layout(&catalog, Some(""));
        WeightFiles::find(&catalog, &layout, |build| VaeEncoder::new(&config, build)).unwrap();
        let config = Flux2VaeConfig::published();
        let mut like = config.clone();
        (like.block_out_channels, like.layers_per_block) = (vec![32], 9);
        (like.latent_channels, like.use_quant_conv) = (4, false);
        let (config, like) = (VaeConfig::from(config), VaeConfig::from(like));
        check_vae(&config, &like);
        // Under the names of diffusers alone; and not of the VAE of FLUX.1.
        let catalog = file(&config.stored_tensors().unwrap(), str::to_owned);
        assert_eq!(like.original_prefix(&catalog), Some(""));
        assert_eq!(like.infer(&catalog, ""), Some(config));
        let other = (published.vae)();
        let original = other.layout(&catalog, Some(""));
        let other = file(&other.stored_tensors().unwrap(), |name| piece_names(&original, name));
        assert_eq!(like.original_prefix(&other), None);
        for config in (published.encoders)() {
            match &config {
                EncoderConfig::Clip(config) => {
                    let specs = tensor_specs(|build| ClipTextModel::new(config, build)).unwrap();
                    let catalog = file(&specs, str::to_owned);
                    assert_eq!(kind_of(&catalog), Some(EncoderKind::Clip));
                    let mut like = config.clone();
                    (like.hidden_size, like.num_attention_heads) = (128, 2);
                    (like.vocab_size, like.num_hidden_layers) = (5, 1);
                    assert_eq!(clip::infer(&catalog, &like), Some(config.clone()));
                }
                EncoderConfig::T5(config) => {
                    let specs = tensor_specs(|build| T5Encoder::new(config, build)).unwrap();
                    let catalog = file(&specs, str::to_owned);
                    assert_eq!(kind_of(&catalog), Some(EncoderKind::T5));
                    let mut like = config.clone();
                    (like.d_kv, like.num_heads, like.d_ff, like.num_layers) = (1, 1, 1, 1);
                    assert_eq!(t5::infer(&catalog, &like), Some(config.clone()));
                }
                EncoderConfig::Qwen25Vl(config) => {
                    let specs = tensor_specs(|build| Qwen25VlEncoder::new(config, build)).unwrap();
                    let catalog = file(&specs, str::to_owned);
                    assert_eq!(kind_of(&catalog), Some(EncoderKind::Qwen25Vl));
                    let inferred = qwen25vl::infer(&catalog, config).unwrap();
                    assert_eq!(inferred.text, config.text);
                }
                EncoderConfig::Qwen3(_) => unreachable!("FLUX.1 has none"),
            }
        }
    }

    #[test]
    fn variants_have_their_published_settings() {
        let shift = |name: &str| {
            let (_, model) = super::super::PublishedPipeline::by_path(Path::new(name)).unwrap();
            let family = (model.config)().family();
            let sigmas = (family.published_model().schedule)().sigmas(4096, 4);
            (family.title, sigmas[1])
        };
        let (dev, shifted) = shift("FLUX.1-dev");
        let (schnell, plain) = shift("FLUX.1-schnell");
        assert_eq!((dev, schnell), ("a FLUX.1", "a FLUX.1 schnell"));
        assert!(shifted > 0.9 && (plain - 0.75).abs() < 1e-6, "{shifted} {plain}");
    }

    #[test]
    fn named_parts_are_typed_again_as_flags() {
        let parts = PartPaths {
            rest: Some("a".into()),
            vae: Some("b".into()),
            text_encoders: vec!["c".into(), "d".into()],
            implementation: Some(Implementation::Diffusers),
            training_adapter: None,
        };
        let flags = parts.flags(|path| path.display().to_string()).join(" ");
        let expected =
            "--rest a --vae b --text-encoder c --text-encoder d --implementation diffusers";
        assert_eq!(flags, expected);
        assert!(PartPaths::default().flags(|_| String::new()).is_empty());
    }
}
