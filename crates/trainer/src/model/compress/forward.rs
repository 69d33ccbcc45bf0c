//! The forward pass of a compressed language model, and its loss: one scalar, so that model and policy are trained by one
//! backward pass.
//!
//! Shapes: S sequences of N tokens, M masks (one for each sequence, or two), K kept positions, D narrow width, W width of
//! the trunk.

use compute::ops::{Activation, IGNORE_INDEX, Linear, RowLosses, top_k};
use compute::{Device, Dtype, Tape, Tensor, Var};

use super::policy_gradient::{returns, rewards, score, subtract_mean};
use super::selection::{CausalRule, Selection};
use super::{CompressorConfig, CompressorTraining, Estimator, Selector};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::{LinearLayer, ModelTensor};
use crate::model::llama::{BlockInputs, LlamaBlock, run_blocks};
use crate::model::recompute::Recompute;

/// Temperature of the softmax that keys are compared in. Chosen: the order is the same at any; at this one the smallest
/// key is far from zero.
const KEY_TEMPERATURE: f32 = 8.0;

/// The model.
pub struct Compressor {
    config: CompressorConfig,
    dtype: Dtype,
    /// [vocabulary, D]; the output layer too.
    tokens: ModelTensor,
    encoder: Vec<LlamaBlock>,
    policy: Option<Policy>,
    /// Of the prediction that the encoder alone makes.
    early_norm: ModelTensor,
    trunk: Trunk,
    decoder: Vec<LlamaBlock>,
    norm: ModelTensor,
}

/// One logit for each position, from the encoder's states.
struct Policy {
    norm: ModelTensor,
    hidden: LinearLayer,
    /// [1, D]
    out: ModelTensor,
}

struct Trunk {
    in_proj: LinearLayer,
    blocks: Vec<LlamaBlock>,
    norm: ModelTensor,
    out_proj: LinearLayer,
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
struct ExitLoss {
    mean: Var,
    rows: RowLosses,
}

/// What a policy drew, or a rule chose.
struct Drawn {
    /// Of each mask.
    kept: Vec<Vec<u32>>,
    /// The policy's logits, [S, N], if it is trained.
    logits: Option<Var>,
    /// The same on the host.
    logit_values: Vec<f32>,
    /// Soft choices that gradients pass through, [S, N].
    soft: Option<Var>,
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
        let (config, dtype) = (config.clone(), build.dtype());
        Ok(Self { config, dtype, tokens, encoder, policy, early_norm, trunk, decoder, norm })
    }

    /// Its shape.
    pub fn config(&self) -> &CompressorConfig {
        &self.config
    }

    /// The mean cross entropy of the next token. On a tape that records, positions are drawn, and the gradient is that of
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
        let hidden = self.decode(tape, &states, &drawn, inputs_of_masks, &narrow, recompute)?;
        drop(states);
        let targets = tape.device().upload(inputs_of_masks.sizes, inputs_of_masks.targets)?;
        let last = self.exit_loss(tape, &hidden, &targets)?;
        drop(hidden);
        let loss = match early {
            Some(early) => combine(tape, last, &early, &drawn, inputs_of_masks, training)?,
            None => last.mean,
        };
        Ok(CompressedLoss { loss, kept: drawn.kept })
    }

    /// The logits of all tokens after the last of a text, f32 of `[vocabulary]`, and which positions of it are kept.
    pub fn next_logits<'m>(&'m self, tape: &Tape<'m>, ids: &[u32]) -> Result<(Var, Vec<u32>)> {
        let (n, first_keys) = (ids.len(), vec![0; ids.len()]);
        let inputs = CompressorInputs { sizes: [1, n], ids, targets: &[], first_keys: &first_keys };
        let narrow = self.narrow_inputs(tape.device(), &first_keys, n, Recompute::None)?;
        let uploaded = tape.device().upload([1, n], ids)?;
        let states = self.encode(tape, &uploaded, &narrow, Recompute::None)?;
        let mut drawn = self.draw(tape, &states, inputs, &CompressorTraining::default())?;
        let hidden = self.decode(tape, &states, &drawn, inputs, &narrow, Recompute::None)?;
        let last = tape.split_tokens(&hidden, n - 1..n)?;
        let last = tape.convert(&last, Dtype::F32)?;
        let logits = tape.linear(&last, Linear::new(&self.tokens.var(tape)))?;
        Ok((logits, drawn.kept.pop().unwrap_or_default()))
    }

    /// First keys of layers that see a window of their own document.
    fn narrow_inputs(
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
    fn encode<'m>(
        &'m self,
        tape: &Tape<'m>,
        ids: &Tensor,
        narrow: &NarrowInputs,
        recompute: Recompute,
    ) -> Result<Var> {
        let x = tape.convert(&tape.embedding(ids, &self.tokens.var(tape))?, self.dtype)?;
        let inputs = narrow.of_masks(tape.device(), 1)?;
        run_blocks(&self.encoder, None, 0, tape, x, &inputs, recompute)
    }

    /// Which positions are kept.
    fn draw(
        &self,
        tape: &Tape<'_>,
        states: &Var,
        CompressorInputs { sizes: [s, n], ids, .. }: CompressorInputs<'_>,
        training: &CompressorTraining,
    ) -> Result<Drawn> {
        let (one_in, k) = (self.config.keep_one_in, self.config.n_kept(n));
        let mut drawn =
            Drawn { kept: Vec::new(), logits: None, logit_values: Vec::new(), soft: None };
        let Some(policy) = &self.policy else {
            let selector = self.config.select;
            let k = if selector == Selector::All { n } else { k };
            drawn.kept = ids.chunks(n).map(|ids| selector.select(ids, one_in, k)).collect();
            return Ok(drawn);
        };
        let logits = policy.logits(tape, states)?.reshape([s, n]);
        if tape.device().is_meta() {
            drawn.logit_values = vec![0.0; s * n];
        } else {
            drawn.logit_values = logits.tensor().read::<f32>()?;
        }
        if !tape.is_recording() {
            let rows = drawn.logit_values.chunks(n);
            drawn.kept = rows.map(|keys| CausalRule::select(keys, one_in, k)).collect();
            return Ok(drawn);
        }
        let masks = match training.estimator {
            Estimator::Reinforce => {
                let detached = Var::from(logits.tensor().clone());
                vec![tape.gumbel_softmax(detached, KEY_TEMPERATURE, false)?]
            }
            Estimator::Grpo => {
                let pair = tape.gumbel_softmax_pair(logits.tensor(), KEY_TEMPERATURE)?;
                pair.map(Var::from).into()
            }
            Estimator::Gumbel => {
                vec![tape.gumbel_softmax(logits.clone(), training.temperature as f32, false)?]
            }
        };
        let picks = masks.iter().map(|keys| picks(keys.tensor(), k)).collect::<Result<Vec<_>>>()?;
        // The masks of a sequence lie beside each other.
        drawn.kept = (0..s).flat_map(|at| picks.iter().map(move |of| of[at].clone())).collect();
        match training.estimator {
            Estimator::Gumbel => drawn.soft = masks.into_iter().next(),
            _ => drawn.logits = Some(logits),
        }
        Ok(drawn)
    }

    /// From the encoder's states [S, N, D] to the normed states that predict the next token, [M, N, D].
    fn decode<'m>(
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
        let k = drawn.kept.iter().map(Vec::len).max().unwrap_or(0);
        let k = k.max(self.config.n_kept(n)).min(n);
        let selection = Selection::new(&drawn.kept, first_keys, k);
        let positions = device.upload([s, m / s * k], &selection.positions)?;
        let kept = tape.gather_tokens(states, &positions)?.reshape([m, k, d]);
        let first_slots = device.upload([m, k], &selection.first_slots)?;
        let inputs = BlockInputs::packed(&self.config.trunk, device, k, recompute)?
            .with_first_keys(first_slots, None);
        let x = self.trunk.in_proj.forward(tape, &kept)?;
        drop(kept);
        let first = self.encoder.len();
        let x = run_blocks(&self.trunk.blocks, None, first, tape, x, &inputs, recompute)?;
        let x = self.normed(tape, &x, &self.trunk.norm)?;
        let mut x = self.trunk.out_proj.forward(tape, &x)?;
        if let Some(soft) = &drawn.soft {
            x = straight_through(tape, &x, soft, &positions)?;
        }
        // Slot 0 is nothing, for positions before the first kept one of their document.
        let shifted: Vec<u32> = (0..m).flat_map(|_| 1..=k as u32).collect();
        let x = tape.scatter_tokens(&x, &device.upload([m, k], &shifted)?, k + 1)?;
        let x = tape.gather_tokens(&x, &device.upload([m, n], &selection.slots)?)?;
        let states = repeat(tape, states, m / s)?;
        let x = tape.add(&x, &states)?;
        drop(states);
        let (inputs, first) = (narrow.of_masks(device, m / s)?, first + self.trunk.blocks.len());
        let x = run_blocks(&self.decoder, None, first, tape, x, &inputs, recompute)?;
        self.normed(tape, &x, &self.norm)
    }

    fn exit_loss(&self, tape: &Tape<'_>, x: &Var, targets: &Tensor) -> Result<ExitLoss> {
        let (mean, rows) = tape.cross_entropy_with_rows(x, &self.tokens.var(tape), targets)?;
        Ok(ExitLoss { mean, rows })
    }

    fn normed(&self, tape: &Tape<'_>, x: &Var, norm: &ModelTensor) -> Result<Var> {
        Ok(tape.rms_norm(x, Some(&norm.var(tape)), self.config.trunk.rms_norm_eps)?)
    }
}

impl Policy {
    fn new(d: usize, mut b: ModelBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm: b.norm("norm", d)?,
            hidden: b.linear_unquantised("hidden", d, d)?,
            out: b.embedding("out", [1, d])?,
        })
    }

    /// [S, N, D] to [S, N, 1], f32.
    fn logits(&self, tape: &Tape<'_>, states: &Var) -> Result<Var> {
        let x = tape.rms_norm(states, Some(&self.norm.var(tape)), 1e-5)?;
        let x = self.hidden.forward_activated(tape, &x, Activation::Silu)?;
        let x = tape.convert(&x, Dtype::F32)?;
        Ok(tape.linear(&x, Linear::new(&self.out.var(tape)))?)
    }
}

/// What narrow layers share, of all their masks.
struct NarrowInputs {
    /// Of one mask of each sequence.
    first_keys: Vec<u32>,
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
struct RepeatedInputs {
    sizes: [usize; 2],
    ids: Vec<u32>,
    targets: Vec<u32>,
    first_keys: Vec<u32>,
}

impl CompressorInputs<'_> {
    fn repeated(&self, n_masks: usize) -> RepeatedInputs {
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
    fn as_inputs(&self) -> CompressorInputs<'_> {
        let Self { sizes, ids, targets, first_keys } = self;
        CompressorInputs { sizes: *sizes, ids, targets, first_keys }
    }
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

/// Positions of the `k` largest keys of each row, in their order.
fn picks(keys: &Tensor, k: usize) -> Result<Vec<Vec<u32>>> {
    let found = top_k(keys, k)?;
    if keys.device().is_meta() {
        return Ok(vec![(0..k as u32).collect(); keys.shape().rows()]);
    }
    Ok(found.read::<u32>()?.chunks(k).map(<[u32]>::to_vec).collect())
}

/// x [S, K, D] as it is, with the gradient of x times K times the soft choice of each position.
fn straight_through(tape: &Tape<'_>, x: &Var, soft: &Var, positions: &Tensor) -> Result<Var> {
    let [s, k, d] = x.shape().sizes().try_into().expect("states have three dimensions");
    let n = soft.shape().width();
    let soft = tape.gather_tokens(&soft.reshape([s, n, 1]), positions)?;
    let share = tape.scale(&soft, k as f32)?;
    let ones = Var::from(tape.device().upload([s, k, 1], &vec![1.0f32; s * k])?);
    let detached = tape.scale(&Var::from(share.tensor().clone()), -1.0)?;
    let gate = tape.add(&share, &tape.add(&ones, &detached)?)?;
    // One number for a row becomes as many as it is wide.
    let wide = Var::from(tape.device().upload([d, 1], &vec![1.0f32; d])?);
    let gate = tape.linear(&gate.reshape([s * k, 1]), Linear::new(&wide))?;
    let gate = tape.convert(&gate, x.dtype())?;
    let zeros = Var::from(tape.device().zeros([s * k, 1, d], x.dtype())?);
    let gated = tape.gated_add(&zeros, gate.chunk(0), &x.reshape([s * k, 1, d]))?;
    Ok(gated.reshape([s, k, d]))
}

/// One scalar: its value is that of `last`, its gradient that of all parts.
fn combine(
    tape: &Tape<'_>,
    last: ExitLoss,
    early: &ExitLoss,
    drawn: &Drawn,
    inputs: CompressorInputs<'_>,
    training: &CompressorTraining,
) -> Result<Var> {
    let (device, share) = (tape.device(), training.early_weight as f32);
    let mut parts = vec![tape.scale(&early.mean, share)?];
    if let Some(logits) = &drawn.logits {
        let (losses, without) = (last.rows.read()?, early.rows.read()?);
        let advantages = match training.estimator {
            Estimator::Grpo => {
                advantages_in_group(&losses, logits.shape().rows(), inputs, training)
            }
            _ => advantages_over_early(&losses, &without, inputs, training),
        };
        let n_counted = inputs.targets.iter().filter(|target| **target != IGNORE_INDEX).count();
        let scale = training.policy_weight / n_counted.max(1) as f64;
        let weights = policy_weights(&drawn.logit_values, &drawn.kept, &advantages, scale);
        // A sum of logits, each times a number that no gradient leads through.
        let n = weights.len();
        let weight = Var::from(device.upload([1, n], &weights)?);
        let policy = tape.linear(&logits.reshape([1, n]), Linear::new(&weight))?;
        parts.push(policy.reshape([]));
    }
    let mut sum = last.mean;
    for part in parts {
        let value = tape.scale(&Var::from(part.tensor().clone()), -1.0)?;
        sum = tape.add(&sum, &tape.add(&part, &value)?)?;
    }
    Ok(sum)
}

/// What each position brought by the trunk, relative to the narrow layers alone and to its sequence's mean.
fn advantages_over_early(
    losses: &[f64],
    early: &[f64],
    CompressorInputs { sizes: [_, n], targets, first_keys, .. }: CompressorInputs<'_>,
    training: &CompressorTraining,
) -> Vec<Vec<f64>> {
    let rewards = rewards(early, losses, targets);
    let of = |(rewards, first_keys): (&[f64], &[u32])| {
        let mut all = returns(rewards, first_keys, training.discount);
        // Of a reward that all positions share nothing would be left.
        if training.discount < 1.0 {
            subtract_mean(&mut all);
        }
        all
    };
    rewards.chunks(n).zip(first_keys.chunks(n)).map(of).collect()
}

/// What each position of each mask brought, relative to the mean of its sequence's masks.
fn advantages_in_group(
    losses: &[f64],
    s: usize,
    CompressorInputs { sizes: [m, n], targets, first_keys, .. }: CompressorInputs<'_>,
    training: &CompressorTraining,
) -> Vec<Vec<f64>> {
    let n_masks = m / s;
    let group_mean = |at: usize| {
        let (first, position) = (at / (n * n_masks) * n_masks, at % n);
        let of_group = (first..first + n_masks).map(|mask| losses[mask * n + position]);
        of_group.sum::<f64>() / n_masks as f64
    };
    let means: Vec<f64> = (0..m * n).map(group_mean).collect();
    let rewards = rewards(&means, losses, targets);
    let rows = rewards.chunks(n).zip(first_keys.chunks(n));
    rows.map(|(rewards, first_keys)| returns(rewards, first_keys, training.discount)).collect()
}

/// What each logit's gradient is, [S, N].
fn policy_weights(
    logits: &[f32],
    kept: &[Vec<u32>],
    advantages: &[Vec<f64>],
    scale: f64,
) -> Vec<f32> {
    let n = advantages[0].len();
    let n_masks = kept.len() * n / logits.len();
    let mut weights = vec![0.0f64; logits.len()];
    for (mask, (kept, advantages)) in kept.iter().zip(advantages).enumerate() {
        let row = mask / n_masks * n..(mask / n_masks + 1) * n;
        let scores = score(&logits[row.clone()], kept);
        for (weight, (advantage, score)) in
            weights[row].iter_mut().zip(advantages.iter().zip(scores))
        {
            *weight -= scale * advantage * score;
        }
    }
    weights.into_iter().map(|weight| weight as f32).collect()
}
