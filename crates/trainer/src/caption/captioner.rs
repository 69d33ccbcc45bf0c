//! Asks a vision-language model the same question about one image after the other. What all images take is found by a dry
//! run of each size that occurs; then an arena of that size is enough.

use std::collections::BTreeSet;
use std::path::Path;

use compute::{Device, DeviceKind, Params, Quantisation};
use serde::Deserialize;
use weights::BytesDoneFn;

use super::folder::CaptionTask;
use super::predictor::CaptionPredictor;
use crate::cost::{self, StageMemory, nearest_fitting};
use crate::data::Pixels;
use crate::data::caption::triggered;
use crate::data::decoding::decoding_bytes;
use crate::error::{Result, TrainerError};
use crate::model::build::Precision;
use crate::model::config;
use crate::model::encoder::qwen25vl::processor::{ImageProcessor, PatchGrid};
use crate::model::encoder::qwen25vl::vision_language::{LoadedVisionLanguage, VisionLanguageModel};
use crate::model::encoder::stack::{ImageSpan, ImageTokens, PromptTokens};
use crate::model::encoder::tokenizer::IMAGE_TOKEN;
use crate::model::llama::kv_cache::KvCache;
use crate::sample::text::{GenerationRequest, generate};
use crate::sample::token_sampler::TokenSampler;
use crate::text::{Message, Tokenizer};

/// What the model is asked unless something else is typed. Chosen: what captions of training sets have, without the
/// openings that models like (`The image shows`), which would be learnt as well.
pub const DEFAULT_PROMPT: &str = "Describe this image in one paragraph for someone who cannot see it: the subject, what it \
    does, the setting, the style, the colours and the light. Say only what can be seen. Begin with the subject itself, not \
    with \"The image shows\".";

/// Pixels that are seen of an image unless more are asked for. Taken: the model card of Qwen2.5-VL, which recommends up to
/// 1280 tokens of 28 x 28 pixels.
pub const DEFAULT_MAX_PIXELS: u64 = 1280 * 28 * 28;

/// What is asked of every image.
#[derive(Clone, Debug)]
pub struct CaptionRequest {
    /// The question.
    pub prompt: String,
    /// The trigger word: put in front of every caption that does not have it.
    pub trigger: Option<String>,
    /// Larger images are scaled down to so many pixels.
    pub max_pixels: u64,
    /// The most tokens of a caption.
    pub max_tokens: usize,
    /// How tokens are sampled.
    pub sampler: TokenSampler,
    /// The penalty of tokens that occurred; the model's own if not given.
    pub repetition_penalty: Option<f32>,
}

/// A caption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenCaption {
    /// In one line: other trainers read no more of a file. Empty if the model said nothing.
    pub text: String,
    /// As the model gave them.
    pub tokens: Vec<u32>,
    /// Whether the model ended it; otherwise it was cut off.
    pub is_whole: bool,
}

/// A vision-language model with a question.
pub struct Captioner {
    model: VisionLanguageModel,
    tokenizer: Tokenizer,
    request: CaptionRequest,
    processor: ImageProcessor,
    /// Tokens of the prompt before and after those of the image.
    around_image: [Vec<u32>; 2],
    image_token: u32,
    eos_token_ids: Vec<u32>,
    repetition_penalty: f32,
}

/// What `generation_config.json` says.
#[derive(Default, Deserialize)]
struct GenerationConfigJson {
    repetition_penalty: Option<f32>,
    eos_token_id: Option<EosTokenIds>,
}

/// One token or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum EosTokenIds {
    One(u32),
    Several(Vec<u32>),
}

impl GenerationConfigJson {
    /// Of a model: beside its weights, where a pipeline's tokenizer is not.
    fn read(model: &VisionLanguageModel) -> Result<Self> {
        let path = model.folders.weights.join("generation_config.json");
        if path.exists() { config::read(&path) } else { Ok(Self::default()) }
    }

    /// Tokens that end an answer.
    fn eos_token_ids(&self, model: &VisionLanguageModel) -> Vec<u32> {
        match &self.eos_token_id {
            None => model.config.text.eos_token_ids.clone(),
            Some(EosTokenIds::One(id)) => vec![*id],
            Some(EosTokenIds::Several(ids)) => ids.clone(),
        }
    }
}

impl Captioner {
    /// Opens a model and prepares the question.
    pub fn open(path: &Path, request: CaptionRequest) -> Result<Self> {
        let model = VisionLanguageModel::open(path)?;
        let tokenizer = Tokenizer::open(&model.folders.tokenizer)?;
        let image_token = tokenizer.token_id(IMAGE_TOKEN).ok_or_else(|| TrainerError::Config {
            problem: format!("the tokenizer has no token {IMAGE_TOKEN}"),
            path: model.folders.tokenizer.clone(),
        })?;
        let processor = model.processor.clone().with_max_pixels(request.max_pixels)?;
        let prompt = prompt_tokens(&model, &tokenizer, &request.prompt)?;
        let around_image = split_at_image(&prompt, image_token)?;
        let settings = GenerationConfigJson::read(&model)?;
        let penalty = request.repetition_penalty.or(settings.repetition_penalty).unwrap_or(1.0);
        if !(penalty > 0.0 && penalty.is_finite()) {
            let problem = format!("repetition penalty is {penalty}");
            return Err(TrainerError::Request { problem, hint: "give 1, or a little more" });
        }
        let eos_token_ids = settings.eos_token_ids(&model);
        Ok(Self {
            model,
            tokenizer,
            request,
            processor,
            around_image,
            image_token,
            eos_token_ids,
            repetition_penalty: penalty,
        })
    }

    /// Bytes of the model's files.
    pub fn model_bytes(&self) -> u64 {
        self.model.n_bytes()
    }

    /// Fails if an image of this size cannot be seen.
    pub fn check_size(&self, size: [u32; 2]) -> Result<()> {
        self.processor.grid(size).map(drop)
    }

    /// Peak bytes of loading the model and captioning these images, by a dry run of each size. If that is more than
    /// `limit`, the error names the nearest change that would fit.
    pub fn plan(
        &self,
        tasks: &[CaptionTask],
        precision: Precision,
        kind: DeviceKind,
        limit: usize,
    ) -> Result<usize> {
        let peak = |precision, max_pixels| self.peak(tasks, precision, max_pixels, kind);
        let max_pixels = self.request.max_pixels;
        let peak_bytes = peak(precision, max_pixels)?;
        if peak_bytes > limit {
            let quantised = Precision { base: Some(Quantisation::Nf4), ..precision };
            let fewer = self.fewer_pixels();
            let candidates = [
                (format!("--max-pixels {fewer}"), (precision, fewer)),
                ("--quantise nf4".to_owned(), (quantised, max_pixels)),
                (format!("--quantise nf4 --max-pixels {fewer}"), (quantised, fewer)),
            ];
            let remedy =
                nearest_fitting(limit, &candidates, |(how, pixels), _| peak(*how, *pixels))?;
            let phase = StageMemory { name: "captioning", peak_bytes };
            return Err(cost::too_large(phase, limit, remedy));
        }
        check_decoding(tasks, peak_bytes, kind, limit)?;
        Ok(peak_bytes)
    }

    /// A quarter of the pixels, or as many as the model sees at least.
    fn fewer_pixels(&self) -> u64 {
        (self.request.max_pixels / 4).max(self.model.processor.min_pixels())
    }

    fn peak(
        &self,
        tasks: &[CaptionTask],
        precision: Precision,
        max_pixels: u64,
        kind: DeviceKind,
    ) -> Result<usize> {
        let processor = self.model.processor.clone().with_max_pixels(max_pixels)?;
        let grids = grids(&processor, tasks)?;
        let device = Device::meta(kind, cost::UNLIMITED);
        let mut loaded = self.load_for(&device, precision, &grids, &|_| true)?;
        for grid in grids {
            let values = vec![0.0; grid.len() * processor.values_per_patch()];
            loaded.generate(grid, &values, self.request.sampler, &|| true)?;
        }
        Ok(device.usage().extent)
    }

    /// Loads the model, with room for captions of these images.
    pub fn load<'a>(
        &'a self,
        device: &'a Device,
        precision: Precision,
        tasks: &[CaptionTask],
        tick: BytesDoneFn<'_>,
    ) -> Result<LoadedCaptioner<'a>> {
        self.load_for(device, precision, &grids(&self.processor, tasks)?, tick)
    }

    fn load_for<'a>(
        &'a self,
        device: &'a Device,
        precision: Precision,
        grids: &BTreeSet<PatchGrid>,
        tick: BytesDoneFn<'_>,
    ) -> Result<LoadedCaptioner<'a>> {
        let lengths = grids.iter().map(|grid| self.generation(*grid).n_inputs());
        let max_tokens = lengths.max().unwrap_or(0);
        for grid in grids {
            self.generation(*grid).check(&self.model.config.text)?;
        }
        let loaded = self.model.load(device, precision, tick)?;
        let cache = loaded.text.new_cache(device, max_tokens)?;
        Ok(LoadedCaptioner { captioner: self, device, loaded, params: Params::default(), cache })
    }

    /// What is generated for an image of these patches.
    fn generation(&self, grid: PatchGrid) -> GenerationRequest {
        let (prompt, _) = self.prompt(grid);
        let CaptionRequest { max_tokens, sampler, .. } = self.request;
        GenerationRequest { prompt, max_tokens, sampler }
    }

    /// The tokens of a prompt with an image of these patches, and where the image is.
    fn prompt(&self, grid: PatchGrid) -> (Vec<u32>, ImageSpan) {
        let [before, after] = &self.around_image;
        let PatchGrid { rows, columns } = self.model.tokens_of(grid);
        let image = vec![self.image_token; rows * columns];
        let span = ImageSpan { first: before.len(), rows, columns };
        ([before, &image[..], after].concat(), span)
    }

    fn is_end(&self, token: u32) -> bool {
        self.eos_token_ids.contains(&token) || self.tokenizer.is_eos(token)
    }

    /// Tokens as a caption, in one line and without control characters.
    fn caption(&self, tokens: Vec<u32>, is_whole: bool) -> WrittenCaption {
        let text = self.tokenizer.decode_text(&tokens);
        let is_gap = |c: char| c.is_whitespace() || c.is_control();
        let words = text.split(is_gap).filter(|word| !word.is_empty());
        let text = words.collect::<Vec<_>>().join(" ");
        let trigger = self.request.trigger.as_deref().map(str::trim);
        let trigger = trigger.filter(|word| !word.is_empty() && !text.is_empty());
        let text = trigger.map_or(text.clone(), |word| triggered(&text, word));
        WrittenCaption { text, tokens, is_whole }
    }
}

/// That the largest image can be decoded beside the model. A GPU with memory of its own leaves it to main memory.
fn check_decoding(
    tasks: &[CaptionTask],
    peak_bytes: usize,
    kind: DeviceKind,
    limit: usize,
) -> Result<()> {
    if matches!(kind, DeviceKind::Cuda { .. }) {
        return Ok(());
    }
    for task in tasks {
        // What cannot be read is told when it is decoded.
        let bytes = decoding_bytes(&task.image, task.size).unwrap_or(0);
        let needed = peak_bytes.saturating_add(bytes);
        if needed > limit {
            let path = task.image.clone();
            return Err(TrainerError::DecodingTooLarge { path, needed, limit });
        }
    }
    Ok(())
}

/// The sizes that occur, in patches.
fn grids(processor: &ImageProcessor, tasks: &[CaptionTask]) -> Result<BTreeSet<PatchGrid>> {
    tasks.iter().map(|task| processor.grid(task.size)).collect()
}

/// The question in tokens, with one for the image: by the model's chat template. Those of pipelines may know no images;
/// then it is asked as by the template of the published models.
fn prompt_tokens(
    model: &VisionLanguageModel,
    tokenizer: &Tokenizer,
    prompt: &str,
) -> Result<Vec<u32>> {
    match tokenizer.image_template(model.folders.processor.as_deref())? {
        Some(template) => template.encode(tokenizer, &[Message::about_image(prompt)]),
        None => tokenizer.encode(&format!(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n\
             <|vision_start|>{IMAGE_TOKEN}<|vision_end|>{prompt}<|im_end|>\n<|im_start|>assistant\n"
        )),
    }
}

fn split_at_image(tokens: &[u32], image: u32) -> Result<[Vec<u32>; 2]> {
    let n = tokens.iter().filter(|token| **token == image).count();
    let place = tokens.iter().position(|token| *token == image);
    match place.filter(|_| n == 1) {
        Some(place) => Ok([tokens[..place].to_vec(), tokens[place + 1..].to_vec()]),
        None => Err(TrainerError::Request {
            problem: format!("the prompt has {n} tokens {IMAGE_TOKEN}, the one image takes 1"),
            hint: "leave this token out of --prompt; the model's chat template writes it",
        }),
    }
}

/// A captioner on a device.
pub struct LoadedCaptioner<'a> {
    captioner: &'a Captioner,
    device: &'a Device,
    loaded: LoadedVisionLanguage,
    params: Params,
    cache: KvCache,
}

impl LoadedCaptioner<'_> {
    /// The caption of an image, the seed of which counts where tokens are drawn; nothing if `go_on` says to stop.
    pub fn caption(
        &mut self,
        pixels: Pixels,
        seed: u64,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Option<WrittenCaption>> {
        let processor = &self.captioner.processor;
        let grid = processor.grid([pixels.width, pixels.height])?;
        let values = processor.patches(pixels, grid);
        let sampler = TokenSampler { seed, ..self.captioner.request.sampler };
        self.generate(grid, &values, sampler, go_on)
    }

    fn generate(
        &mut self,
        grid: PatchGrid,
        values: &[f32],
        sampler: TokenSampler,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Option<WrittenCaption>> {
        let captioner = self.captioner;
        let request = GenerationRequest { sampler, ..captioner.generation(grid) };
        let mut tokens = Vec::new();
        let mut take = |token| {
            tokens.push(token);
            go_on()
        };
        let device = self.device;
        let mut predictor = self.predictor(grid, values)?;
        let is_end = |token| captioner.is_end(token);
        let done = generate(device, &mut predictor, &request, &is_end, &mut take)?;
        if done.is_lost {
            return Err(TrainerError::OutputLost { what: "the caption".into() });
        }
        let is_stopped = !done.is_eos && tokens.len() < request.max_tokens;
        Ok((!is_stopped || device.is_meta()).then(|| captioner.caption(tokens, done.is_eos)))
    }

    /// The logits after the prompt of an image.
    #[cfg(test)]
    pub(super) fn prompt_logits(&mut self, pixels: Pixels) -> Result<Vec<f32>> {
        use crate::sample::text::TokenPredictor;
        let processor = &self.captioner.processor;
        let grid = processor.grid([pixels.width, pixels.height])?;
        let values = processor.patches(pixels, grid);
        let prompt = self.captioner.generation(grid).prompt;
        let mut predictor = self.predictor(grid, &values)?;
        predictor.repetition_penalty = 1.0;
        predictor.logits(&prompt)
    }

    /// Tokens in the cache.
    #[cfg(test)]
    pub(super) fn n_tokens(&self) -> usize {
        self.cache.n_tokens()
    }

    /// A caption of as many tokens as may be, whatever ends it.
    #[cfg(test)]
    pub(super) fn longest(&mut self, pixels: Pixels) -> Result<WrittenCaption> {
        let processor = &self.captioner.processor;
        let grid = processor.grid([pixels.width, pixels.height])?;
        let values = processor.patches(pixels, grid);
        let (request, device) = (self.captioner.generation(grid), self.device);
        let mut tokens = Vec::new();
        let mut predictor = self.predictor(grid, &values)?;
        let mut take = |token| {
            tokens.push(token);
            true
        };
        generate(device, &mut predictor, &request, &|_| false, &mut take)?;
        Ok(self.captioner.caption(tokens, false))
    }

    /// The model before a prompt with an image that the tower has seen.
    fn predictor(&mut self, grid: PatchGrid, values: &[f32]) -> Result<CaptionPredictor<'_>> {
        let Self { captioner, device, loaded, params, cache } = self;
        let features = captioner.model.see(device, loaded, grid, values)?;
        let (ids, span) = captioner.prompt(grid);
        let images = vec![ImageTokens { span, features }];
        Ok(CaptionPredictor {
            device,
            model: &captioner.model,
            loaded,
            params,
            cache,
            prompt: Some(PromptTokens { ids, n_attended: None, images }),
            repetition_penalty: captioner.repetition_penalty,
            seen: BTreeSet::new(),
        })
    }
}
