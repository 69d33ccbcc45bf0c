//! The forward pass of a compressed language model, and its loss: one scalar, so that model and policy are trained by one
//! backward pass.
//!
//! Shapes: S sequences of N tokens, M masks (one for each sequence, or two), K kept positions, D narrow width, W width of
//! the trunk.

use std::sync::{Mutex, PoisonError};

use compute::ops::RowLosses;
use compute::{Device, Dtype, Tape, Tensor, Var};

use super::draw::{Drawn, Policy};
use super::gate::{confidence, smoothed, straight_through};
use super::policy_loss::{Combined, combine};
use super::policy_stats::{PolicyBatch, PolicyFigures, PolicySums};
use super::selection::Selection;
use super::{CompressorConfig, CompressorMode, CompressorTraining, Selector};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::{LinearLayer, ModelTensor, NormTensor};
use crate::model::llama::{BlockInputs, LlamaBlock, run_blocks};
use crate::model::recompute::Recompute;

/// The model.
pub struct Compressor {
    pub(super) config: CompressorConfig,
    pub(super) dtype: Dtype,
    /// [vocabulary, D]; the output layer too.
    pub(super) tokens: ModelTensor,
    pub(super) encoder: Vec<LlamaBlock>,
    pub(super) policy: Option<Policy>,
    /// Of the prediction that the encoder alone makes.
    pub(super) early_norm: NormTensor,
    pub(super) trunk: Trunk,
    pub(super) decoder: Vec<LlamaBlock>,
    pub(super) norm: NormTensor,
    /// Of the prediction of kept tokens, where texts are reconstructed.
    pub(super) kept_norm: Option<NormTensor>,
    /// What the policy did since it was last asked.
    policy_sums: Mutex<PolicySums>,
}

pub(super) struct Trunk {
    pub in_proj: LinearLayer,
    pub blocks: Vec<LlamaBlock>,
    pub norm: NormTensor,
    pub out_proj: LinearLayer,
}

/// Sequences to predict, on the host.
#[derive(Clone, Copy)]
pub struct CompressorInputs<'a> {
    /// S and N.
    pub sizes: [usize; 2],
    /// Tokens.
    pub ids: &'a [u32],
    /// The token after each.
    pub targets: &'a [u32],
    /// Where each token's document begins.
    pub first_keys: &'a [u32],
}

/// The loss of a micro-batch, and what the policy did.
pub struct CompressedLoss {
    /// The mean cross entropy; its gradient is that of all parts together.
    pub loss: Var,
    /// Kept positions of each sequence, in training in the order they were drawn.
    pub kept: Vec<Vec<u32>>,
}

/// The loss of the next token, predicted from states of the decoder or, early, of the encoder.
pub(super) struct ExitLoss {
    pub mean: Var,
    pub rows: LossRows,
}

/// The loss of each position.
pub(super) enum LossRows {
    OnDevice(RowLosses),
    OnHost(Vec<f64>),
}

impl LossRows {
    pub fn read(&self) -> Result<Vec<f64>> {
        match self {
            Self::OnDevice(rows) => Ok(rows.read()?),
            Self::OnHost(rows) => Ok(rows.clone()),
        }
    }
}

impl Compressor {
    /// Builds the model.
    pub fn new(config: &CompressorConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let (narrow, trunk) = (config.narrow(), &config.trunk);
        let (d, w, n) = (config.width, trunk.hidden_size, config.layers);
        let tokens = build.embedding("embed_tokens", [trunk.vocab_size, d])?;
        let encoder =
            (0..n).map(|index| LlamaBlock::new(&narrow, build.block("encoder.layers", index)));
        let encoder = encoder.collect::<Result<_>>()?;
        let has_policy = config.select == Selector::Policy;
        let policy = has_policy.then(|| Policy::new(d, build.at("policy"))).transpose()?;
        let early_norm = build.norm("early_norm", d)?;
        let trunk = {
            let mut b = build.at("trunk");
            let in_proj = b.linear_no_bias("in_proj", d, w)?;
            let blocks = (0..trunk.num_hidden_layers)
                .map(|index| LlamaBlock::new(trunk, b.block_after(n, "layers", index)));
            let blocks: Vec<LlamaBlock> = blocks.collect::<Result<_>>()?;
            Trunk {
                in_proj,
                blocks,
                norm: b.norm("norm", w)?,
                out_proj: b.linear_no_bias("out_proj", w, d)?,
            }
        };
        let before = n + trunk.blocks.len();
        let decoder = (0..n).map(|index| {
            LlamaBlock::new(&narrow, build.block_after(before, "decoder.layers", index))
        });
        let decoder = decoder.collect::<Result<_>>()?;
        let norm = build.norm("norm", d)?;
        let reconstructs = config.mode == CompressorMode::Reconstruct;
        let kept_norm = reconstructs.then(|| build.norm("kept_norm", d)).transpose()?;
        let (config, dtype) = (config.clone(), build.dtype());
        let policy_sums = Mutex::default();
        Ok(Self {
            config,
            dtype,
            tokens,
            encoder,
            policy,
            early_norm,
            trunk,
            decoder,
            norm,
            kept_norm,
            policy_sums,
        })
    }

    /// What the policy did since this was last called; nothing if there is none, or nothing was trained.
    pub fn policy_figures(&self) -> Option<PolicyFigures> {
        self.policy_sums.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Its shape.
    pub fn config(&self) -> &CompressorConfig {
        &self.config
    }

    /// The mean cross entropy of the next token, or the mean code length of a token. On a tape that records, positions are drawn, and the gradient is that of
    ///
    /// final + `early_weight` · early + `policy_weight` · policy
    ///
    /// of which only the first is in the value. Else they are chosen without looking ahead.
    pub fn loss<'m>(
        &'m self,
        tape: &Tape<'m>,
        inputs: CompressorInputs<'_>,
        training: &CompressorTraining,
        recompute: Recompute,
    ) -> Result<CompressedLoss> {
        let [_, n] = inputs.sizes;
        let narrow = self.narrow_inputs(tape.device(), inputs.first_keys, n, recompute)?;
        let ids = tape.device().upload(inputs.sizes, inputs.ids)?;
        let states = self.encode(tape, &ids, &narrow, recompute)?;
        drop(ids);
        let drawn = self.draw(tape, &states, inputs, training)?;
        let n_masks = drawn.kept.len() / inputs.sizes[0];
        let repeated = inputs.repeated(n_masks);
        let inputs_of_masks = repeated.as_inputs();
        let early = if tape.is_recording() {
            let normed = self.normed(tape, &states, &self.early_norm)?;
            let targets = tape.device().upload(inputs.sizes, inputs.targets)?;
            Some(self.exit_loss(tape, &normed, &targets)?)
        } else {
            None
        };
        let last = match self.config.mode {
            CompressorMode::Next => {
                let hidden =
                    self.decode(tape, &states, &drawn, inputs_of_masks, &narrow, recompute)?;
                drop(states);
                let targets =
                    tape.device().upload(inputs_of_masks.sizes, inputs_of_masks.targets)?;
                self.exit_loss(tape, &hidden, &targets)?
            }
            CompressorMode::Reconstruct => {
                drop(states);
                self.reconstruct(tape, &drawn, inputs_of_masks, &narrow, recompute)?
            }
        };
        let Some(early) = early else {
            return Ok(CompressedLoss { loss: last.mean, kept: drawn.kept });
        };
        let combined = combine(tape, last, &early, &drawn, inputs_of_masks, training)?;
        if self.policy.is_some() && !tape.device().is_meta() {
            self.note(inputs, &drawn, &combined);
        }
        Ok(CompressedLoss { loss: combined.loss, kept: drawn.kept })
    }

    /// Remembers what the policy did.
    fn note(&self, inputs: CompressorInputs<'_>, drawn: &Drawn, combined: &Combined) {
        let batch = PolicyBatch {
            n: inputs.sizes[1],
            ids: inputs.ids,
            logits: &drawn.logit_values,
            kept: &drawn.kept,
            reward: combined.reward,
            advantages: &combined.advantages,
        };
        self.policy_sums.lock().unwrap_or_else(PoisonError::into_inner).add(batch);
    }

    /// First keys of layers that see a window of their own document.
    pub(super) fn narrow_inputs(
        &self,
        device: &Device,
        first_keys: &[u32],
        n: usize,
        recompute: Recompute,
    ) -> Result<NarrowInputs> {
        let window = self.config.window;
        let first = |(at, first): (usize, &u32)| {
            (at % n + 1).saturating_sub(window).max(*first as usize) as u32
        };
        let first_keys: Vec<u32> = first_keys.iter().enumerate().map(first).collect();
        let blocks = BlockInputs::packed(&self.config.narrow(), device, n, recompute)?;
        Ok(NarrowInputs { first_keys, blocks, n, window })
    }

    /// [S, N] to [S, N, D]
    pub(super) fn encode<'m>(
        &'m self,
        tape: &Tape<'m>,
        ids: &Tensor,
        narrow: &NarrowInputs,
        recompute: Recompute,
    ) -> Result<Var> {
        let x = self.embed(tape, ids)?;
        let inputs = narrow.of_masks(tape.device(), 1)?;
        run_blocks(&self.encoder, None, 0, tape, x, &inputs, recompute)
    }

    /// From the encoder's states [S, N, D] to the normed states that predict the next token, [M, N, D].
    pub(super) fn decode<'m>(
        &'m self,
        tape: &Tape<'m>,
        states: &Var,
        drawn: &Drawn,
        CompressorInputs { sizes: [m, n], first_keys, .. }: CompressorInputs<'_>,
        narrow: &NarrowInputs,
        recompute: Recompute,
    ) -> Result<Var> {
        let (device, d) = (tape.device(), self.config.width);
        let s = states.shape().sizes()[0];
        let selection = self.selection(drawn, first_keys, n);
        let k = selection.positions.len() / m;
        let positions = device.upload([s, m / s * k], &selection.positions)?;
        let kept = tape.gather_tokens(states, &positions)?.reshape([m, k, d]);
        let mut x = self.run_trunk(tape, kept, &selection, recompute)?;
        if let Some(soft) = &drawn.soft {
            x = straight_through(tape, &x, soft, &positions)?;
        }
        if self.config.is_smoothed {
            x = smoothed(tape, &x, drawn, &selection, self.config.trunk.head_dim)?;
        }
        let x = with_nothing(tape, &x)?;
        let mut x = tape.gather_tokens(&x, &device.upload([m, n], &selection.slots)?)?;
        if self.config.is_smoothed && tape.is_recording() {
            x = confidence(tape, &x, drawn)?;
        }
        let states = repeat(tape, states, m / s)?;
        let x = tape.add(&x, &states)?;
        drop(states);
        self.run_decoder(tape, x, narrow, m / s, recompute)
    }

    pub(super) fn selection(&self, drawn: &Drawn, first_keys: &[u32], n: usize) -> Selection {
        let k = drawn.kept.iter().map(Vec::len).max().unwrap_or(0);
        Selection::new(&drawn.kept, first_keys, k.max(self.config.n_kept(n)).min(n))
    }

    /// Kept positions [M, K, D] to the same.
    pub(super) fn run_trunk<'m>(
        &'m self,
        tape: &Tape<'m>,
        kept: Var,
        selection: &Selection,
        recompute: Recompute,
    ) -> Result<Var> {
        let [m, k, _] = kept.shape().sizes().try_into().expect("states have three dimensions");
        let first_slots = tape.device().upload([m, k], &selection.first_slots)?;
        let inputs = BlockInputs::packed(&self.config.trunk, tape.device(), k, recompute)?
            .with_first_keys(first_slots, None);
        let x = self.trunk.in_proj.forward(tape, &kept)?;
        drop(kept);
        let first = self.encoder.len();
        let x = run_blocks(&self.trunk.blocks, None, first, tape, x, &inputs, recompute)?;
        let x = self.normed(tape, &x, &self.trunk.norm)?;
        Ok(self.trunk.out_proj.forward(tape, &x)?)
    }

    /// [M, N, D] to the same, normed.
    pub(super) fn run_decoder<'m>(
        &'m self,
        tape: &Tape<'m>,
        x: Var,
        narrow: &NarrowInputs,
        n_masks: usize,
        recompute: Recompute,
    ) -> Result<Var> {
        let inputs = narrow.of_masks(tape.device(), n_masks)?;
        let first = self.encoder.len() + self.trunk.blocks.len();
        let x = run_blocks(&self.decoder, None, first, tape, x, &inputs, recompute)?;
        self.normed(tape, &x, &self.norm)
    }

    /// Tokens [S, N] as the narrow layers see them, [S, N, D].
    pub(super) fn embed(&self, tape: &Tape<'_>, ids: &Tensor) -> Result<Var> {
        Ok(tape.convert(&tape.embedding(ids, &self.tokens.var(tape))?, self.dtype)?)
    }

    pub(super) fn exit_loss(&self, tape: &Tape<'_>, x: &Var, targets: &Tensor) -> Result<ExitLoss> {
        let (mean, rows) = tape.cross_entropy_with_rows(x, &self.tokens.var(tape), targets)?;
        Ok(ExitLoss { mean, rows: LossRows::OnDevice(rows) })
    }

    pub(super) fn normed(&self, tape: &Tape<'_>, x: &Var, norm: &NormTensor) -> Result<Var> {
        Ok(tape.rms_norm(x, Some(&norm.var(tape)?), self.config.trunk.rms_norm_eps)?)
    }
}

/// What narrow layers share, of all their masks.
pub(super) struct NarrowInputs {
    /// Of one mask of each sequence.
    pub(super) first_keys: Vec<u32>,
    blocks: BlockInputs,
    n: usize,
    window: usize,
}

impl NarrowInputs {
    fn of_masks(&self, device: &Device, n_masks: usize) -> Result<BlockInputs> {
        let first_keys = repeated(&self.first_keys, self.n, n_masks);
        let first_keys = device.upload([first_keys.len() / self.n, self.n], &first_keys)?;
        Ok(self.blocks.with_first_keys(first_keys, Some(self.window)))
    }
}

/// Inputs of all masks.
pub(super) struct RepeatedInputs {
    sizes: [usize; 2],
    ids: Vec<u32>,
    targets: Vec<u32>,
    first_keys: Vec<u32>,
}

impl CompressorInputs<'_> {
    pub(super) fn repeated(&self, n_masks: usize) -> RepeatedInputs {
        let [s, n] = self.sizes;
        let of = |values: &[u32]| repeated(values, n, n_masks);
        RepeatedInputs {
            sizes: [s * n_masks, n],
            ids: of(self.ids),
            targets: of(self.targets),
            first_keys: of(self.first_keys),
        }
    }
}

impl RepeatedInputs {
    pub(super) fn as_inputs(&self) -> CompressorInputs<'_> {
        let Self { sizes, ids, targets, first_keys } = self;
        CompressorInputs { sizes: *sizes, ids, targets, first_keys }
    }
}

/// x [M, K, D] after a slot of zeros, for positions before the first kept one of their document: [M, K + 1, D].
pub(super) fn with_nothing(tape: &Tape<'_>, x: &Var) -> Result<Var> {
    let [m, k, _] = x.shape().sizes().try_into().expect("states have three dimensions");
    let shifted: Vec<u32> = (0..m).flat_map(|_| 1..=k as u32).collect();
    Ok(tape.scatter_tokens(x, &tape.device().upload([m, k], &shifted)?, k + 1)?)
}

/// Each sequence of `n` values so many times.
fn repeated(values: &[u32], n: usize, times: usize) -> Vec<u32> {
    values.chunks(n).flat_map(|row| std::iter::repeat_n(row, times)).flatten().copied().collect()
}

/// Each sequence of states [S, N, D] so many times.
fn repeat(tape: &Tape<'_>, states: &Var, times: usize) -> Result<Var> {
    if times == 1 {
        return Ok(states.clone());
    }
    let [s, n, d] = states.shape().sizes().try_into().expect("states have three dimensions");
    let ids: Vec<u32> = (0..s * times).flat_map(|_| 0..n as u32).collect();
    let ids = tape.device().upload([s, times * n], &ids)?;
    Ok(tape.gather_tokens(states, &ids)?.reshape([s * times, n, d]))
}
