//! Qwen2.5-VL with its vision tower and its output layer, which writes about an image (transformers'
//! `Qwen2_5_VLForConditionalGeneration`). Opening reads settings and headers and compares every name and shape.
//!
//! Two places have one: a folder as transformers saves it, and the text encoder of a pipeline such as Qwen-Image. The latter
//! lacks an image processor unless the pipeline edits images; then the published one is taken.
//!
//! Deliberately absent: GGUF, whose files have the tower apart in a layout of llama.cpp's own; videos; several images.

use std::path::{Path, PathBuf};

use compute::{Device, Tape, Var};
use weights::{BytesDoneFn, Catalog};

use super::positions::mrope_positions;
use super::processor::{ImageProcessor, PatchGrid};
use super::tower::{TowerFiles, encode_image};
use super::vision::{VisionConfig, VisionTower, has_tower};
use super::{Qwen25VlConfig, layout};
use crate::error::{Result, TrainerError};
use crate::model::adapter::Adapters;
use crate::model::build::{ModelBuilder, Precision};
use crate::model::config::{Unsupported, read_checked};
use crate::model::encoder::stack::{PromptTokens, with_images};
use crate::model::files::{self, CheckpointLayout, WeightFiles};
use crate::model::kind::{self, MODEL_INDEX, ModelKind};
use crate::model::llama::Llama;
use crate::model::llama::kv_cache::KvCache;
use crate::model::tensor_piece::TensorPiece;
use crate::model::{component, hub};

/// The model, open.
pub struct VisionLanguageModel {
    /// Its config.
    pub config: Qwen25VlConfig,
    /// How images are prepared.
    pub processor: ImageProcessor,
    /// Where its files are.
    pub folders: VisionLanguageFolders,
    vision: VisionConfig,
    catalog: Catalog,
}

/// The folders of a model: one, or some of a pipeline's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisionLanguageFolders {
    /// Of weights and settings.
    pub weights: PathBuf,
    /// Of the tokenizer.
    pub tokenizer: PathBuf,
    /// Of the image processor, if there is one.
    pub processor: Option<PathBuf>,
}

/// The same on a device.
pub struct LoadedVisionLanguage {
    /// The vision tower.
    pub tower: VisionTower,
    /// The language model.
    pub text: Llama,
}

impl VisionLanguageFolders {
    /// Of the model at a path.
    fn find(path: &Path) -> Self {
        // The folder of the text encoder may be given itself.
        let parent = path.parent().filter(|_| path.ends_with(TEXT_ENCODER));
        let pipeline = [Some(path), parent].into_iter().flatten();
        let Some(pipeline) = pipeline.into_iter().find(|it| it.join(MODEL_INDEX).exists()) else {
            let own = || path.to_path_buf();
            return Self { weights: own(), tokenizer: own(), processor: Some(own()) };
        };
        let processor = Some(pipeline.join("processor")).filter(|folder| folder.is_dir());
        let has_tokenizer = |folder: &PathBuf| folder.join("tokenizer.json").exists();
        let tokenizer = processor.clone().filter(has_tokenizer);
        let tokenizer = tokenizer.unwrap_or_else(|| pipeline.join("tokenizer"));
        Self { weights: pipeline.join(TEXT_ENCODER), tokenizer, processor }
    }

    fn lacks(&self, what: &str) -> TrainerError {
        TrainerError::WrongModel {
            found: format!("a model without {what}"),
            expected: "Qwen2.5-VL as a whole",
            path: self.weights.clone(),
            hint: kind::WRITES_CAPTIONS,
        }
    }
}

const TEXT_ENCODER: &str = "text_encoder";
const OUTPUT_LAYER: &str = "lm_head.weight";

impl VisionLanguageModel {
    /// Opens a folder.
    pub fn open(path: &Path) -> Result<Self> {
        hub::check(path)?;
        if !path.exists() {
            let problem = format!("no model at {}", path.display());
            return Err(TrainerError::Request { problem, hint: "check the path" });
        }
        let folders = VisionLanguageFolders::find(path);
        kind::check(&folders.weights, ModelKind::VisionLanguage)?;
        let settings = folders.weights.join("config.json");
        if !settings.exists() {
            return Err(folders.lacks("config.json"));
        }
        let config = read_checked(&settings, Qwen25VlConfig::check)?;
        let wrong = |Unsupported(problem)| TrainerError::Config { problem, path: settings };
        let vision = config.checked_vision().cloned().map_err(wrong)?;
        let processor = match &folders.processor {
            Some(folder) => ImageProcessor::open(folder, &vision)?.0,
            None => ImageProcessor::published_for(&vision).map_err(|Unsupported(problem)| {
                TrainerError::Config { problem, path: folders.weights.join("config.json") }
            })?,
        };
        let catalog = component::weights(&folders.weights)?;
        let opened = Self { config, processor, folders, vision, catalog };
        opened.check_parts()?;
        Ok(opened)
    }

    /// Checks that the files have all of it. Those of a text encoder alone may lack what it has no use for.
    fn check_parts(&self) -> Result<()> {
        if !has_tower(&self.catalog) {
            return Err(self.folders.lacks("vision tower (visual.*)"));
        }
        if !self.config.text.tie_word_embeddings && self.output_layer().is_none() {
            return Err(self.folders.lacks(&format!("output layer ({OUTPUT_LAYER})")));
        }
        self.tower(PLAIN, &|_| true).check()?;
        self.text_files().map(drop)
    }

    /// What the output layer is called.
    fn output_layer(&self) -> Option<&str> {
        let mut names = self.catalog.tensors.iter().map(|tensor| tensor.name.as_str());
        names.find(|name| name.ends_with(OUTPUT_LAYER))
    }

    fn tower<'a>(&'a self, precision: Precision, tick: BytesDoneFn<'a>) -> TowerFiles<'a> {
        TowerFiles { config: &self.vision, catalog: &self.catalog, precision, tick }
    }

    /// The language model's weights on disk.
    fn text_files(&self) -> Result<WeightFiles<'_>> {
        let CheckpointLayout { pieces, ignores } = layout(&self.catalog);
        let place = move |name: &str| match self.output_layer().filter(|_| name == OUTPUT_LAYER) {
            Some(stored) => vec![TensorPiece::whole(stored.to_owned())],
            None => pieces(name),
        };
        let layout = CheckpointLayout { pieces: Box::new(place), ignores };
        WeightFiles::find(&self.catalog, &layout, |build| Llama::new(&self.config.text, build))
    }

    /// Loads all of it. Only blocks of the language model are quantised, if any are.
    pub fn load(
        &self,
        device: &Device,
        precision: Precision,
        tick: BytesDoneFn<'_>,
    ) -> Result<LoadedVisionLanguage> {
        let tower = self.tower(precision, tick).load_whole(device)?;
        let build = |build: &mut ModelBuilder<'_>| Llama::new(&self.config.text, build);
        let (files, mut none) = (self.text_files()?, Adapters::none());
        let text = files::load_model(device, &files, precision, &mut none, tick, build)?;
        Ok(LoadedVisionLanguage { tower, text: text.with_wide_activations() })
    }

    /// Bytes of its files.
    pub fn n_bytes(&self) -> u64 {
        self.catalog.bytes()
    }

    /// Rows and columns of the tokens of an image with these patches.
    pub fn tokens_of(&self, grid: PatchGrid) -> PatchGrid {
        grid.merged(self.vision.spatial_merge_size)
    }

    /// What the tower makes of an image: the values of its tokens.
    pub fn see(
        &self,
        device: &Device,
        loaded: &LoadedVisionLanguage,
        grid: PatchGrid,
        values: &[f32],
    ) -> Result<Vec<f32>> {
        encode_image(device, &loaded.tower, &self.vision, grid, values)
    }

    /// The final hidden states of a prompt with an image, [1, n, D], which begins a text in the cache.
    pub fn read_prompt<'m>(
        &self,
        tape: &Tape<'m>,
        loaded: &'m LoadedVisionLanguage,
        prompt: &PromptTokens,
        cache: &mut KvCache,
    ) -> Result<Var> {
        cache.clear();
        let ids = tape.device().upload([1, prompt.ids.len()], &prompt.ids)?;
        let x = with_images(tape, loaded.text.embed(tape, &ids)?, &prompt.images)?;
        let positions = mrope_positions(&prompt.layout());
        let sections = self.config.mrope_section;
        loaded.text.forward_cached_sections(tape, x, sections, &positions, cache)
    }
}

/// To compare names and shapes.
const PLAIN: Precision = Precision::plain(compute::Dtype::F32);
