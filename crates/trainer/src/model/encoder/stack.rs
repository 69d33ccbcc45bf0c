//! Text encoders that are a token embedding, equal blocks and a norm: T5 and the language models. Large as they are, they
//! encode whole, or with one block in memory at a time.
//!
//! Activations of both outgrow f16, so that with weights in f16 they are f32.
//!
//! Shapes: S samples, N tokens, D width.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};

use compute::{Device, Dtype, Result as Computed, Tape, Tensor, Var};
use weights::{BytesDoneFn, Catalog, WeightsError};

use crate::error::{Result, TrainerError};
use crate::model::adapter::{Adapters, LayerWeights};
use crate::model::build::{ModelBuilder, Precision};
use crate::model::files::{self, CheckpointLayout, WeightFiles};
use crate::model::host::to_vec;

/// The tokens of a prompt.
#[derive(Clone, Debug, Default)]
pub struct PromptTokens {
    /// Their ids. Those at the places of images stand for nothing.
    pub ids: Vec<u32>,
    /// So many of them, the first, are attended to; all if not given.
    pub n_attended: Option<usize>,
    /// The images among them, in their order.
    pub images: Vec<ImageTokens>,
}

/// An image among the tokens of a prompt.
#[derive(Clone, Debug)]
pub struct ImageTokens {
    /// Where it is.
    pub span: ImageSpan,
    /// Its hidden states, [rows · columns, D].
    pub features: Vec<f32>,
}

/// The place of an image among tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// Its first token.
    pub first: usize,
    /// Rows of tokens.
    pub rows: usize,
    /// Tokens of a row.
    pub columns: usize,
}

/// Where images are among N tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenLayout {
    /// N.
    pub n: usize,
    /// The images, in their order.
    pub images: Vec<ImageSpan>,
}

impl From<Vec<u32>> for PromptTokens {
    fn from(ids: Vec<u32>) -> Self {
        Self { ids, n_attended: None, images: Vec::new() }
    }
}

impl PromptTokens {
    /// Where its images are.
    pub(crate) fn layout(&self) -> TokenLayout {
        let images = self.images.iter().map(|image| image.span).collect();
        TokenLayout { n: self.ids.len(), images }
    }

    /// How many tokens of one sample are attended to, where that is not all.
    fn lengths(&self) -> Option<[u32; 1]> {
        self.n_attended.map(|n| [n as u32])
    }
}

/// The config of such an encoder.
pub trait EncoderStack: Clone {
    /// What comes before the blocks.
    type Embedding;
    /// A block.
    type Block;
    /// What all blocks see beside the hidden states.
    type Inputs;

    /// Blocks.
    fn n_blocks(&self) -> usize;

    /// Epsilon of norms.
    fn epsilon(&self) -> f32;

    /// Its names in these files.
    fn layout<'c>(&self, catalog: &'c Catalog) -> CheckpointLayout<'c>;

    /// Builds what comes before the blocks.
    fn embedding(&self, build: &mut ModelBuilder<'_>) -> Result<Self::Embedding>;

    /// Builds a block.
    fn block(&self, build: &mut ModelBuilder<'_>, index: usize) -> Result<Self::Block>;

    /// The output is the state after each of these numbers of blocks, in every token one beside the other; that after the
    /// last block if there are none.
    fn taps(&self) -> &[usize] {
        &[]
    }

    /// Builds the weight of the last norm; none where hidden states are taken as the last block gives them.
    fn last_norm(&self, build: &mut ModelBuilder<'_>) -> Result<Option<Var>>;

    /// The token embedding, [vocabulary, D].
    fn tokens(embedding: &Self::Embedding) -> &Var;

    /// The inputs of blocks for texts of N tokens.
    fn inputs(
        &self,
        device: &Device,
        embedding: &Self::Embedding,
        n: usize,
    ) -> Result<Self::Inputs>;

    /// The same for a prompt with images, where its places are part of them. Made again for each block, so that what
    /// many prompts take does not depend on how many sizes there are.
    fn image_inputs(&self, _: &Device, _: &TokenLayout) -> Result<Option<Self::Inputs>> {
        Ok(None)
    }

    /// x [S, N, D] to the same. With `lengths` `[S]`, tokens after a text's length are masked.
    fn forward(
        &self,
        tape: &Tape<'_>,
        block: &Self::Block,
        x: &Var,
        inputs: &Self::Inputs,
        lengths: Option<&Tensor>,
    ) -> Computed<Var>;
}

/// An encoder, whole.
pub struct StackedEncoder<C: EncoderStack> {
    config: C,
    embedding: C::Embedding,
    blocks: Vec<C::Block>,
    norm: Option<Var>,
}

impl<C: EncoderStack> StackedEncoder<C> {
    /// Builds the model.
    pub fn new(config: &C, build: &mut ModelBuilder<'_>) -> Result<Self> {
        Ok(Self {
            config: config.clone(),
            embedding: config.embedding(build)?,
            blocks: (0..config.n_blocks())
                .map(|index| config.block(build, index))
                .collect::<Result<_>>()?,
            norm: config.last_norm(build)?,
        })
    }

    /// Encodes texts of equal length, N token ids after N token ids: [S, N, D]. With `lengths`, tokens after a text's
    /// length are masked.
    pub fn forward(
        &self,
        tape: &Tape<'_>,
        ids: &[u32],
        samples: usize,
        lengths: Option<&[u32]>,
    ) -> Result<Var> {
        let (device, n) = (tape.device(), ids.len() / samples.max(1));
        let inputs = self.config.inputs(device, &self.embedding, n)?;
        let lengths = lengths.map(|lengths| device.upload([samples], lengths)).transpose()?;
        let ids = device.upload([samples, n], ids)?;
        let x = embed(tape, &ids, C::tokens(&self.embedding))?;
        let mut states = HiddenStates { last: x, tapped: Vec::new() };
        for (index, block) in self.blocks.iter().enumerate() {
            let x = self.config.forward(tape, block, &states.last, &inputs, lengths.as_ref())?;
            states.put(&self.config, index, x);
        }
        states.finish(&self.config, tape, self.norm.as_ref())
    }

    /// Encodes a prompt, perhaps with images: [1, N, D].
    pub fn forward_prompt(&self, tape: &Tape<'_>, prompt: &PromptTokens) -> Result<Var> {
        let (device, config) = (tape.device(), &self.config);
        if prompt.images.is_empty() {
            let lengths = prompt.lengths();
            return self.forward(tape, &prompt.ids, 1, lengths.as_ref().map(<[u32; 1]>::as_slice));
        }
        let inputs = config.image_inputs(device, &prompt.layout())?;
        let inputs = inputs.ok_or_else(|| sees_none(prompt))?;
        let x = embed_prompt(tape, prompt, C::tokens(&self.embedding))?;
        let mut states = HiddenStates { last: x, tapped: Vec::new() };
        for (index, block) in self.blocks.iter().enumerate() {
            states.put(config, index, config.forward(tape, block, &states.last, &inputs, None)?);
        }
        states.finish(config, tape, self.norm.as_ref())
    }
}

/// The states of a prompt's tokens between two blocks.
struct HiddenStates {
    /// [S, N, D]
    last: Var,
    /// Those before that are a part of the output.
    tapped: Vec<Var>,
}

impl HiddenStates {
    /// Takes the output of a block.
    fn put<C: EncoderStack>(&mut self, config: &C, index: usize, x: Var) {
        if config.taps().contains(&(index + 1)) {
            self.tapped.push(x.clone());
        }
        self.last = x;
    }

    /// The output: that of the last block, normed where that is asked for, or those of several.
    fn finish<C: EncoderStack>(
        self,
        config: &C,
        tape: &Tape<'_>,
        norm: Option<&Var>,
    ) -> Result<Var> {
        let shape = self.last.shape();
        let &[samples, n, d] = shape.sizes() else { unreachable!("tokens of samples") };
        if !self.tapped.is_empty() {
            let rows = self.tapped.iter().map(|state| state.reshape([samples * n, 1, d]));
            let rows: Vec<Var> = rows.collect();
            let all = tape.concat_tokens(&rows.iter().collect::<Vec<_>>())?;
            return Ok(all.reshape([samples, n, rows.len() * d]));
        }
        match norm {
            Some(norm) => Ok(tape.rms_norm(&self.last, Some(norm), config.epsilon())?),
            None => Ok(self.last),
        }
    }
}

fn sees_none(prompt: &PromptTokens) -> TrainerError {
    let problem =
        format!("a prompt with {} images, the text encoder sees none", prompt.images.len());
    TrainerError::Request { problem, hint: "leave the images out" }
}

/// The embeddings of a prompt's tokens, with the hidden states of images in their places.
fn embed_prompt(tape: &Tape<'_>, prompt: &PromptTokens, tokens: &Var) -> Result<Var> {
    let ids = tape.device().upload([1, prompt.ids.len()], &prompt.ids)?;
    with_images(tape, embed(tape, &ids, tokens)?, &prompt.images)
}

/// Embedded tokens, x [1, N, D], with the hidden states of images in their places.
pub(crate) fn with_images(tape: &Tape<'_>, x: Var, images: &[ImageTokens]) -> Result<Var> {
    if images.is_empty() {
        return Ok(x);
    }
    let (device, n) = (tape.device(), x.shape().sizes()[1]);
    let (mut parts, mut from) = (Vec::new(), 0);
    for ImageTokens { span, features } in images {
        let n_tokens = span.rows * span.columns;
        parts.push(tape.split_tokens(&x, from..span.first)?);
        parts.push(device.upload_as([1, n_tokens, x.shape().width()], features, x.dtype())?.into());
        from = span.first + n_tokens;
    }
    parts.push(tape.split_tokens(&x, from..n)?);
    parts.retain(|part| part.shape().elements() > 0);
    Ok(tape.concat_tokens(&parts.iter().collect::<Vec<_>>())?)
}

fn embed(tape: &Tape<'_>, ids: &Tensor, tokens: &Var) -> Result<Var> {
    let x = tape.embedding(ids, tokens)?;
    let dtype = if x.dtype() == Dtype::F16 { Dtype::F32 } else { x.dtype() };
    Ok(tape.convert(&x, dtype)?)
}

/// Texts that go through a block together. Chosen: their hidden states take 64 MiB with T5-XXL in bf16, a
/// sixth of a block, and reading the file takes less time than encoding so many.
pub const TEXT_BATCH: usize = 32;

/// An encoder on disk, of which one block is in memory at a time, read from the file for as long as it is needed. A batch
/// of texts goes through a block, and their hidden states stay in the arena for the next. The same kernels see the same
/// values as in the whole model, so the result is the same bit for bit; the file is read once for every [`TEXT_BATCH`]
/// texts.
pub struct BlockwiseEncoder<'a, C> {
    /// Its config.
    pub config: &'a C,
    /// Its files.
    pub catalog: &'a Catalog,
    /// In which dtypes it is held.
    pub precision: Precision,
    /// Adapters by layer.
    pub adapter: &'a HashMap<String, LayerWeights>,
    /// Called with the number of bytes read; returns whether to go on.
    pub tick: BytesDoneFn<'a>,
}

impl<C: EncoderStack> BlockwiseEncoder<'_, C> {
    /// [N, D] of each prompt of N tokens, in their order.
    pub fn encode(
        &self,
        device: &Device,
        texts: &[PromptTokens],
        take: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        // What is kept beside the states of now takes as much again.
        let batch = TEXT_BATCH / self.config.taps().len().max(1);
        for texts in texts.chunks(batch.max(1)) {
            let encoded = self.encode_together(device, texts)?;
            encoded.into_iter().try_for_each(|state| take(&to_vec(state.tensor())?))?;
        }
        Ok(())
    }

    fn encode_together(&self, device: &Device, texts: &[PromptTokens]) -> Result<Vec<Var>> {
        let (start, adapters) = self.load(device, |build| self.config.embedding(build))?;
        let mut inputs = BTreeMap::new();
        let without_images = texts.iter().filter(|prompt| prompt.images.is_empty());
        for n in without_images.map(|prompt| prompt.ids.len()) {
            if let Entry::Vacant(entry) = inputs.entry(n) {
                entry.insert(self.config.inputs(device, &start, n)?);
            }
        }
        let tape = Tape::inference(device, &adapters.params, 0);
        let embedded = |prompt: &PromptTokens| -> Result<HiddenStates> {
            let last = embed_prompt(&tape, prompt, C::tokens(&start))?;
            Ok(HiddenStates { last, tapped: Vec::new() })
        };
        let mut states = texts.iter().map(embedded).collect::<Result<Vec<_>>>()?;
        let lengths = |prompt: &PromptTokens| {
            prompt.lengths().map(|lengths| device.upload([1], &lengths)).transpose()
        };
        let lengths = texts.iter().map(lengths).collect::<Computed<Vec<Option<Tensor>>>>()?;
        drop(start);
        for index in 0..self.config.n_blocks() {
            let (block, adapters) = self.load(device, |build| self.config.block(build, index))?;
            for ((state, prompt), lengths) in states.iter_mut().zip(texts).zip(&lengths) {
                let tape = Tape::inference(device, &adapters.params, 0);
                let own = if prompt.images.is_empty() {
                    None
                } else {
                    self.config.image_inputs(device, &prompt.layout())?
                };
                let inputs = own.as_ref().or_else(|| inputs.get(&prompt.ids.len()));
                let inputs = inputs.ok_or_else(|| sees_none(prompt))?;
                let lengths = lengths.as_ref();
                let x = self.config.forward(&tape, &block, &state.last, inputs, lengths)?;
                state.put(self.config, index, x);
                self.check_cancelled()?;
            }
        }
        let (norm, adapters) = self.load(device, |build| self.config.last_norm(build))?;
        let tape = Tape::inference(device, &adapters.params, 0);
        let last = |state: HiddenStates| state.finish(self.config, &tape, norm.as_ref());
        states.into_iter().map(last).collect()
    }

    /// A part of the model, and the adapters beside its layers.
    fn load<T>(
        &self,
        device: &Device,
        build: impl Fn(&mut ModelBuilder<'_>) -> Result<T>,
    ) -> Result<(T, Adapters)> {
        // All names and shapes were checked when the files were opened.
        let layout = self.config.layout(self.catalog);
        let layout = CheckpointLayout { ignores: Box::new(|_| true), ..layout };
        let files = WeightFiles::find(self.catalog, &layout, &build)?;
        let mut adapters = Adapters::loaded(self.adapter.clone());
        let part =
            files::load_model(device, &files, self.precision, &mut adapters, self.tick, build)?;
        Ok((part, adapters))
    }

    /// Checked often, since a block of many texts takes a while.
    fn check_cancelled(&self) -> Result<()> {
        if (self.tick)(0) { Ok(()) } else { Err(WeightsError::Cancelled.into()) }
    }
}
