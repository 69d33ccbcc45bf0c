//! The autograd tape: a model calls its ops on it, and each op whose inputs require a gradient leaves a record
//! of how to pass the gradient on. The backward pass goes through the records and frees what each one held.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use crate::backward::{BackwardPass, FirstUses, GradientSink, LeafGradients, SinkHook};
use crate::device::Device;
use crate::op::{Op, OpContext};
use crate::ops::{Fp8Check, Fp8Checks};
use crate::random::RandomSequence;
use crate::var::{GradTarget, Remat, SavedTensor, Var};
use crate::{
    CompletionHook, ComputeError, GradientHook, Gradients, ParamKey, Params, Result, Shape, Tensor,
};

/// Records what ops do. `'m` is the model, which a recomputed block borrows until backward.
pub struct Tape<'m> {
    pub(crate) device: Device,
    pub(crate) params: &'m Params,
    pub(crate) mode: TapeMode,
    /// Each with the name of its op.
    records: RefCell<Vec<(&'static str, BackwardFn<'m>)>>,
    first_uses: RefCell<FirstUses>,
    n_nodes: Cell<usize>,
    n_ops: Cell<usize>,
    last_begun: Cell<&'static str>,
    last_saved: Cell<usize>,
    /// The last op whose result itself is saved, and not only what the op made besides.
    last_saved_result: Cell<usize>,
    /// Ops after this one are not run, only recorded: their results are not saved.
    last_run: usize,
    /// Whether the result of the last op that is run is wanted.
    wants_last: bool,
    pub(crate) rng: RngSeed,
    /// The next unused random sequence.
    pub(crate) next_sequence: Cell<u64>,
    /// Whether recomputed blocks keep what attention gives.
    pub(crate) keeps_attention: bool,
    /// Whether layers use their adapters.
    has_adapters: bool,
    /// A look at layers in fp8, if it is one.
    pub(crate) fp8_checks: Option<Fp8Checks>,
    /// That of the block: from its first run on, for the second.
    pub(crate) kept_attention: RefCell<KeptAttention>,
}

/// Results of attention with their logsumexp, in the order of a block's ops.
pub(crate) type KeptAttention = VecDeque<[Tensor; 2]>;

/// What random numbers follow from.
#[derive(Clone, Copy)]
pub(crate) struct RngSeed {
    seed: u64,
    /// Which sample of its batch the first one of the computation is.
    first_sample: usize,
}

/// Which ops of a block are run.
#[derive(Clone, Copy)]
pub(crate) struct RecomputeRange {
    /// The last one.
    pub last: usize,
    /// Whether its result is wanted.
    pub wants_last: bool,
}

impl RecomputeRange {
    /// All ops, or none.
    pub fn all_if(is_run: bool) -> Self {
        Self { last: if is_run { usize::MAX } else { 0 }, wants_last: true }
    }
}

/// What a tape does with records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TapeMode {
    /// Nothing is trained.
    Off,
    /// They are kept for backward.
    Record,
    /// They are counted and dropped: the block will run again.
    DryRun,
}

/// Passes on the gradients that came for what was computed, if any came.
type BackwardFn<'m> = Box<dyn FnOnce(&mut BackwardPass<'_>) -> Result<()> + 'm>;

impl<'m> Tape<'m> {
    /// For training: ops that depend on a parameter are recorded. The seed decides every random number of the
    /// computation.
    pub fn training(device: &Device, params: &'m Params, seed: u64) -> Self {
        Self::with(device, params, TapeMode::Record, RngSeed { seed, first_sample: 0 })
    }

    /// For inference: nothing is recorded, and every tensor is freed as soon as the caller drops it.
    pub fn inference(device: &Device, params: &'m Params, seed: u64) -> Self {
        Self::with(device, params, TapeMode::Off, RngSeed { seed, first_sample: 0 })
    }

    /// For a micro-batch that begins at this sample of the batch: each sample gets the random numbers that it
    /// would get in the whole batch. Samples are the outermost dimension of what is computed.
    #[must_use]
    pub fn from_sample(mut self, first: usize) -> Self {
        self.rng.first_sample = first;
        self
    }

    /// Whether recomputed blocks keep the results of attention, which are small and take long, so that it is not
    /// recomputed.
    #[must_use]
    pub fn keeping_attention(mut self, keeps_attention: bool) -> Self {
        self.keeps_attention = keeps_attention;
        self
    }

    /// For a look at the model without its adapters while they are trained: nothing is recorded.
    #[must_use]
    pub fn without_adapters(&self) -> Self {
        let tape = Self::inference(&self.device, self.params, self.rng.seed);
        Self { has_adapters: false, ..tape }
    }

    /// For a look at how precise the layers are that are multiplied in fp8: one whose error is above `most` is
    /// multiplied in the dtype of its input from then on.
    #[must_use]
    pub fn checking_fp8(self, most: f64) -> Self {
        Self { fp8_checks: Some(Fp8Checks::new(most)), ..self }
    }

    /// What was found of them, in the order in which they were asked.
    pub fn into_fp8_checks(self) -> Vec<Fp8Check> {
        self.fp8_checks.map(Fp8Checks::into_all).unwrap_or_default()
    }

    /// Whether layers use their adapters.
    pub fn has_adapters(&self) -> bool {
        self.has_adapters
    }

    pub(crate) fn with(
        device: &Device,
        params: &'m Params,
        mode: TapeMode,
        draws: RngSeed,
    ) -> Self {
        Self {
            device: device.clone(),
            params,
            mode,
            records: RefCell::default(),
            first_uses: RefCell::default(),
            n_nodes: Cell::new(0),
            n_ops: Cell::new(0),
            last_begun: Cell::new(""),
            last_saved: Cell::new(0),
            last_saved_result: Cell::new(0),
            last_run: usize::MAX,
            wants_last: true,
            rng: draws,
            next_sequence: Cell::new(0),
            keeps_attention: false,
            has_adapters: true,
            fp8_checks: None,
            kept_attention: RefCell::default(),
        }
    }

    /// The device that computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether a gradient may be asked for.
    pub(crate) fn is_training(&self) -> bool {
        self.mode != TapeMode::Off
    }

    /// A parameter, as a tensor that is trained.
    pub fn param(&self, key: ParamKey) -> Var {
        let source = Some(GradTarget::Param(key.index())).filter(|_| self.mode != TapeMode::Off);
        self.use_params([key.index()]);
        Var { grad_target: source, ..Var::from(self.params.get(key).clone()) }
    }

    /// Backward from a scalar loss: adds to the gradient of every parameter that it depends on, and frees all
    /// that was saved.
    pub fn backward(self, loss: &Var, gradients: &mut Gradients) -> Result<()> {
        if loss.shape().elements() != 1 {
            return Err(ComputeError::NotScalar { shape: loss.shape() });
        }
        let one = self.device.upload(loss.shape(), &[1.0f32])?;
        self.backward_from(loss.clone(), one, gradients).map(|_| ())
    }

    /// Backward from any tensor whose gradient is known; returns the gradients of leaves.
    pub fn backward_from(
        self,
        from: Var,
        gradient: Tensor,
        gradients: &mut Gradients,
    ) -> Result<LeafGradients> {
        self.backward_to(from, gradient, GradientSink { gradients, hook: None })
    }

    /// The same as a fused backward pass: each parameter is handed to `hook` as soon as its gradient is complete,
    /// and the gradient's memory is freed after that. If it fails, some parameters were handed over, others not.
    pub fn fused_backward_from(
        self,
        from: Var,
        gradient: Tensor,
        hook: &mut GradientHook<'_>,
    ) -> Result<LeafGradients> {
        let gradients = &mut Gradients::default();
        let hook = Some(SinkHook::Fused(hook));
        self.backward_to(from, gradient, GradientSink { gradients, hook })
    }

    /// The same as [`Self::backward_from`], and calls `hook` with every parameter as soon as its gradient is complete. Those that
    /// the tape does not use come first.
    pub fn backward_from_with(
        self,
        from: Var,
        gradient: Tensor,
        gradients: &mut Gradients,
        hook: &mut CompletionHook<'_>,
    ) -> Result<LeafGradients> {
        let is_unused = |key: &ParamKey| !self.first_uses.borrow().contains(key.index());
        self.params.keys().filter(is_unused).try_for_each(|key| hook(key, gradients))?;
        let hook = Some(SinkHook::Completed(hook));
        self.backward_to(from, gradient, GradientSink { gradients, hook })
    }

    fn backward_to(
        self,
        from: Var,
        gradient: Tensor,
        sink: GradientSink<'_>,
    ) -> Result<LeafGradients> {
        let source = from.grad_target.ok_or(ComputeError::Untracked)?;
        drop(from);
        self.backward_from_all(vec![(source, gradient)], sink, None)
    }

    /// Backward from several tensors at once. Of a block within another tape, `outer` are the parameters that no
    /// record before the block uses; those that are completed here are taken out of it.
    pub(crate) fn backward_from_all(
        self,
        starts: Vec<(GradTarget, Tensor)>,
        mut sink: GradientSink<'_>,
        mut outer: Option<&mut Vec<usize>>,
    ) -> Result<LeafGradients> {
        let mut back = BackwardPass {
            cx: OpContext::new(&self.device),
            params: self.params,
            sink: sink.reborrow(),
            completing: Vec::new(),
            nodes: vec![None; self.n_nodes.get()],
            through_activation: HashMap::new(),
        };
        for (source, gradient) in starts {
            back.pass(Some(source), gradient)?;
        }
        let (mut records, mut first_uses) =
            (self.records.into_inner(), self.first_uses.into_inner());
        while let Some((op, record)) = records.pop() {
            self.device.enter_op(op);
            back.completing = first_uses.take_unused_by(records.len(), outer.as_deref_mut());
            record(&mut back)?;
            back.complete()?;
        }
        Ok(LeafGradients(back.nodes))
    }

    /// Notes the use of parameters by what is recorded next.
    pub(crate) fn use_params(&self, indices: impl IntoIterator<Item = usize>) {
        if self.mode != TapeMode::Off {
            self.first_uses.borrow_mut().add(indices, self.n_records());
        }
    }

    /// All parameters that were used so far.
    pub(crate) fn used_params(&self) -> Vec<usize> {
        self.first_uses.borrow().params()
    }

    /// Whether a backward pass may follow.
    pub fn is_recording(&self) -> bool {
        self.mode != TapeMode::Off
    }

    /// A tensor from outside whose gradient is wanted back.
    pub fn leaf(&self, tensor: Tensor) -> Var {
        Var { grad_target: Some(GradTarget::Node(self.new_node())), ..Var::from(tensor) }
    }

    /// Opens an op: what it computes, it computes through what this returns.
    pub(crate) fn begin_op(&self, name: &'static str) -> Op<'_> {
        let index = self.n_ops.get() + 1;
        self.n_ops.set(index);
        self.last_begun.set(name);
        self.device.enter_op(name);
        let cx = OpContext { device: &self.device, is_run: index <= self.last_run };
        Op { name, index, cx }
    }

    /// Whether an op with these inputs needs a record.
    pub(crate) fn requires_grad(&self, inputs: &[&Var]) -> bool {
        self.mode != TapeMode::Off && inputs.iter().any(|input| input.grad_target.is_some())
    }

    /// Saves a tensor for backward.
    pub(crate) fn save_for_backward(&self, var: &Var) -> SavedTensor {
        let (kept, needs) = var.to_saved();
        let last = needs.into_iter().max().unwrap_or(0);
        self.last_saved.set(self.last_saved.get().max(last));
        if let SavedTensor::Tensor(_) = kept {
            self.last_saved_result.set(self.last_saved_result.get().max(last));
        }
        kept
    }

    /// Lets readers save how to recompute `result` instead of `result`. Where nothing is recorded nothing is
    /// saved either, and this would only hold on to the inputs.
    pub(crate) fn with_remat(&self, result: Var, remake: impl FnOnce() -> Remat) -> Var {
        let remake = (self.mode != TapeMode::Off).then(|| Rc::new(remake()));
        Var { remat: remake, ..result }
    }

    /// Notes that a record saves something the op made besides its result.
    pub(crate) fn save_extra(&self, op: &Op<'_>) {
        self.last_saved.set(self.last_saved.get().max(op.index));
    }

    /// Records how the gradient of an op's result is passed on; of an activation's result, how that of what
    /// it was applied to is.
    pub(crate) fn record(
        &self,
        result: Var,
        step: impl FnOnce(&mut BackwardPass<'_>, Tensor) -> Result<()> + 'm,
    ) -> Var {
        let (node, shape) = (self.new_node(), result.shape());
        let activated = result.activated.clone();
        self.push_record(self.last_begun.get(), move |back| {
            // Its readers may have seen it in another shape.
            let gradient = back.nodes[node].take().map(|gradient| gradient.into_shape(shape));
            let gradient = match activated {
                Some(activated) => activated.gradient(back, node, gradient)?,
                None => gradient,
            };
            gradient.map_or(Ok(()), |gradient| step(back, gradient))
        });
        Var { grad_target: Some(GradTarget::Node(node)), ..result }
    }

    /// Records a step of the backward pass, under the name of its op.
    pub(crate) fn push_record(
        &self,
        op: &'static str,
        record: impl FnOnce(&mut BackwardPass<'_>) -> Result<()> + 'm,
    ) {
        if self.mode == TapeMode::Record {
            self.records.borrow_mut().push((op, Box::new(record)));
        }
    }

    pub(crate) fn n_records(&self) -> usize {
        self.records.borrow().len()
    }

    /// Random numbers for a tensor of this shape that nobody else gets, and the same ones when a block
    /// is recomputed.
    pub(crate) fn random_sequence(&self, shape: Shape) -> RandomSequence {
        let stream = self.next_sequence.get();
        self.next_sequence.set(stream + 1);
        let RngSeed { seed, first_sample } = self.rng;
        let per_sample: usize = shape.sizes().iter().skip(1).product();
        RandomSequence::new(seed, stream).skip(first_sample * per_sample)
    }

    /// Whether anybody will read the result of an op. Where a block is run again nobody reads that of the
    /// last op that is run, if only what it made besides is kept.
    pub(crate) fn wants_result(&self, op: &Op<'_>) -> bool {
        self.wants_last || op.index < self.last_run
    }

    /// The tape of a block within another: the block's own random numbers, and the ops of it to run.
    pub(crate) fn for_block(mut self, first_sequence: u64, run: RecomputeRange) -> Self {
        self.next_sequence.set(first_sequence);
        (self.last_run, self.wants_last) = (run.last, run.wants_last);
        self
    }

    /// Where a block is run again: what attention gave in the first run, if that was kept.
    pub(crate) fn kept_attention(&self) -> Option<[Tensor; 2]> {
        let is_again = self.mode == TapeMode::Record;
        is_again.then(|| self.kept_attention.borrow_mut().pop_front()).flatten()
    }

    /// Keeps what attention gave for the second run of a block.
    pub(crate) fn keep_attention(&self, op: &Op<'_>, results: [&Tensor; 2]) {
        if self.mode == TapeMode::DryRun && self.keeps_attention && op.cx.is_run {
            self.kept_attention.borrow_mut().push_back(results.map(Tensor::clone));
        }
    }

    /// Which ops must be run again to have all that records save.
    pub(crate) fn recompute_range(&self) -> RecomputeRange {
        let last = self.last_saved.get();
        RecomputeRange { last, wants_last: self.last_saved_result.get() == last }
    }

    /// A node for a gradient.
    pub(crate) fn new_node(&self) -> usize {
        let node = self.n_nodes.get();
        self.n_nodes.set(node + 1);
        node
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::norm_modulate::tests::normalised;
    use crate::ops::{Activation, Attention, Linear, Lora};
    use crate::testing::{Input, check, device, upload};
    use crate::{DeviceKind, Dtype, Tag, Usage};

    /// A residual block with an adapter, over a large frozen weight.
    struct Block {
        weight: Var,
        down: ParamKey,
        up: ParamKey,
        dropout: f32,
    }

    const WIDTH: usize = 24;

    impl Block {
        fn new(device: &Device, params: &mut Params, seed: u64, dropout: f32) -> Self {
            let tensor = |shape: [usize; 2], seed| {
                upload(device, &Input::normal(shape, seed).scaled(0.2), Dtype::F32)
            };
            Self {
                weight: tensor([WIDTH, WIDTH], seed).into(),
                down: params.add(tensor([2, WIDTH], seed + 1)),
                up: params.add(tensor([WIDTH, 2], seed + 2)),
                dropout,
            }
        }

        fn forward(&self, tape: &Tape<'_>, x: &Var) -> Result<Var> {
            let normed = tape.layer_norm(x, None, None, 1e-6)?;
            let (down, up) = (tape.param(self.down), tape.param(self.up));
            let lora = Lora { down: &down, up: &up, scale: 1.0, dropout: self.dropout };
            let layer = Linear {
                activation: Activation::GeluTanh,
                lora: Some(lora),
                ..Linear::new(&self.weight)
            };
            let y = tape.linear(&normed, layer)?;
            let y = tape.attention(&y, &y, &y, Attention::full(2, WIDTH / 2))?;
            // Nothing keeps what this last layer gives.
            let y = tape.linear(&y, Linear::new(&self.weight))?;
            tape.add(x, &y)
        }
    }

    fn forward<'m>(tape: &Tape<'m>, blocks: &'m [Block], recompute: bool) -> Result<Var> {
        let input = upload(tape.device(), &Input::normal([2, 5, WIDTH], 9), Dtype::F32);
        through(tape, blocks, input, recompute)
    }

    fn through<'m>(
        tape: &Tape<'m>,
        blocks: &'m [Block],
        input: Tensor,
        recompute: bool,
    ) -> Result<Var> {
        let mut x = Var::from(input);
        for block in blocks {
            [x] = if recompute {
                tape.recompute(&[&x], move |tape, v| Ok([block.forward(tape, &v[0])?]))?
            } else {
                [block.forward(tape, &x)?]
            };
        }
        Ok(x)
    }

    /// Bits of all gradients, and the memory it took, for two passes over three blocks.
    fn train(device: &Device, recompute: bool, dropout: f32) -> (Vec<Vec<u32>>, Usage) {
        let mut params = Params::default();
        let blocks: Vec<_> =
            (0..3).map(|index| Block::new(device, &mut params, 10 * index, dropout)).collect();
        let mut gradients = Gradients::default();
        let held = device.usage().in_use;
        for seed in 0..2 {
            let tape = Tape::training(device, &params, seed);
            let x = forward(&tape, &blocks, recompute).unwrap();
            let gradient = upload(device, &Input::normal([2, 5, WIDTH], 8), Dtype::F32);
            tape.backward_from(x, gradient, &mut gradients).unwrap();
        }
        let usage = device.usage();
        let whole = |g: &&Tensor| g.bytes().next_multiple_of(device.kind().alignment());
        let kept: usize = gradients.all(6).iter().flatten().map(whole).sum();
        assert_eq!(usage.in_use, held + kept, "a tape leaves gradients behind, and nothing else");
        let bits = |g: &Tensor| g.to_vec::<f32>().iter().map(|value| value.to_bits()).collect();
        let bits = if device.is_meta() {
            vec![]
        } else {
            gradients.all(6).into_iter().flatten().map(bits).collect()
        };
        (bits, usage)
    }

    #[test]
    fn recomputing_changes_memory_and_not_one_bit() {
        for dropout in [0.0, 0.3] {
            let (kept, kept_usage) = train(&device(), false, dropout);
            let (recomputed, recomputed_usage) = train(&device(), true, dropout);
            assert_eq!(kept.len(), 6);
            assert_eq!(kept, recomputed);
            assert!(recomputed_usage.peak < kept_usage.peak);
        }
    }

    /// Sums of gradients over some micro-batches, each from one sample to before another.
    fn in_micro_batches(micro_batches: &[[usize; 2]], recompute: bool) -> Vec<f32> {
        let (device, mut params) = (device(), Params::default());
        let blocks: Vec<_> =
            (0..2).map(|index| Block::new(&device, &mut params, 10 * index, 0.4)).collect();
        let whole = [9, 8].map(|seed| Input::normal([4, 5, WIDTH], seed));
        let whole = whole.map(|input| upload(&device, &input, Dtype::F32));
        let mut gradients = Gradients::default();
        for &[first, end] in micro_batches {
            let [x, gradient] = whole.each_ref().map(|whole| whole.narrow(first..end));
            let tape = Tape::training(&device, &params, 3).from_sample(first);
            let x = through(&tape, &blocks, x, recompute).unwrap();
            tape.backward_from(x, gradient, &mut gradients).unwrap();
        }
        gradients.all(4).into_iter().flatten().flat_map(Tensor::to_vec::<f32>).collect()
    }

    #[test]
    fn a_sample_gets_its_random_numbers_in_every_micro_batch() {
        let whole = in_micro_batches(&[[0, 4]], false);
        let largest = whole.iter().fold(0.0f32, |largest, number| largest.max(number.abs()));
        let apart = |micro_batches: &[[usize; 2]], recompute| {
            let found = in_micro_batches(micro_batches, recompute);
            let apart = found.iter().zip(&whole).map(|(found, whole)| (found - whole).abs());
            apart.fold(0.0, f32::max) / largest
        };
        for recompute in [false, true] {
            for micro_batches in
                [&[[0, 2], [2, 4]][..], &[[0, 3], [3, 4]], &[[3, 4], [1, 3], [0, 1]]]
            {
                let apart = apart(micro_batches, recompute);
                assert!(apart < 1e-6, "{micro_batches:?} {recompute}: {apart:e}");
            }
        }
        // Other samples in these places would be seen: the same ones twice are.
        assert!(apart(&[[0, 2], [0, 2]], false) > 1e-2);
    }

    #[test]
    fn the_meta_device_takes_the_same_memory() {
        for recompute in [false, true] {
            let device = device();
            let meta = Device::meta(device.kind(), usize::MAX);
            assert_eq!(train(&meta, recompute, 0.3).1, train(&device, recompute, 0.3).1);
        }
    }

    #[test]
    fn the_end_of_a_recomputed_block_is_not_run_twice() {
        let matmul = 2 * 10 * WIDTH * WIDTH;
        let flops = |recompute| {
            let device = Device::meta(DeviceKind::cpu(2), usize::MAX);
            train(&device, recompute, 0.0);
            device.work().flops as usize
        };
        let attention = 2 * 2 * 2 * 2 * 5 * 5 * (WIDTH / 2);
        let adapter = 2 * 2 * (2 * 10 * WIDTH * 2);
        let more = (flops(true) - flops(false)) / (2 * 3);
        // As the work counter has it: twenty for each number.
        let activation = 20 * 10 * WIDTH;
        // One matmul of two with its activation, the adapter's, the attention's, and what is done
        // elementwise.
        let once = matmul + activation + adapter / 2 + attention / 2;
        assert!(more > once && more < once + matmul / 2, "{more} {once} {matmul}");
    }

    #[test]
    fn what_a_recomputed_result_needs_is_run_again_with_its_block() {
        // The weight of the norm is itself recomputed: what that needs must be run, not the weight.
        let device = device();
        let params = Params::default();
        let tape = Tape::training(&device, &params, 0);
        let zeros = |shape: &[usize]| device.zeros(Shape::new(shape), Dtype::F32).unwrap();
        let x = tape.leaf(zeros(&[3, 5]));
        let weight = Var::from(zeros(&[5]));
        let [y] = tape
            .recompute(&[&x, &weight], |tape, v| {
                let x = tape.scale(&v[0], 0.5)?;
                let weight = tape.activate(&tape.scale(&v[1], 2.0)?, Activation::Silu)?;
                let y = tape.layer_norm(&x, Some(&weight), None, 1e-6)?;
                Ok([tape.glu(&y, &v[0], Activation::Silu)?])
            })
            .unwrap();
        let gradient = zeros(&[3, 5]);
        tape.backward_from(y, gradient, &mut Gradients::default()).unwrap();
    }

    #[test]
    fn without_training_a_result_does_not_hold_what_it_was_made_from() {
        let device = device();
        let params = Params::default();
        let tape = Tape::inference(&device, &params, 0);
        let x = Var::from(device.zeros([64, 64], Dtype::F32).unwrap());
        let y = tape.layer_norm(&tape.activate(&x, Activation::Silu).unwrap(), None, None, 1e-6);
        drop(x);
        assert_eq!(device.usage().in_use, y.unwrap().tensor().bytes());
    }

    #[test]
    fn frozen_weights_never_get_a_gradient() {
        let device = Device::meta(DeviceKind::cpu(2), usize::MAX);
        let mut params = Params::default();
        let large = 4096;
        let weight = Var::from(device.zeros([large, large], Dtype::F32).unwrap());
        let down = params.add(device.zeros([2, large], Dtype::F32).unwrap());
        let up = params.add(device.zeros([large, 2], Dtype::F32).unwrap());
        let before = device.usage().in_use;
        let tape = Tape::training(&device, &params, 0);
        let x = Var::from(device.zeros([3, large], Dtype::F32).unwrap());
        let (a, b) = (tape.param(down), tape.param(up));
        let lora = Lora { down: &a, up: &b, scale: 1.0, dropout: 0.0 };
        let y = tape.linear(&x, Linear { lora: Some(lora), ..Linear::new(&weight) }).unwrap();
        let gradient = device.zeros([3, large], Dtype::F32).unwrap();
        let mut gradients = Gradients::default();
        tape.backward_from(y, gradient, &mut gradients).unwrap();
        let usage = device.usage();
        assert_eq!(usage.by_tag[Tag::Gradients as usize], 2 * 2 * large * 4);
        // Some rows of activations, and nothing of the weight's 64 MiB.
        assert!(usage.peak - before < 20 * 3 * large * 4, "{}", usage.peak - before);
    }

    #[test]
    fn a_reshaped_tensor_has_one_gradient() {
        // Made as rows of 3, which the linear layer's backward pass counts on, and read as rows of 6.
        check(
            &[Input::normal([4, 2], 1), Input::normal([3, 2], 2)],
            16.0,
            &|tape, v| {
                let y = tape.linear(&v[0], Linear::new(&v[1]))?;
                let wide = tape.layer_norm(&y.reshape([2, 6]), None, None, 1e-3)?;
                tape.add(&wide.reshape([4, 3]), &y)
            },
            &|v| {
                let rows = v[0].chunks(2).flat_map(|x| v[1].chunks(2).map(move |w| (x, w)));
                let y: Vec<_> = rows.map(|(x, w)| x[0] * w[0] + x[1] * w[1]).collect();
                normalised(&y, 6, 1e-3).into_iter().zip(&y).map(|(wide, y)| wide + *y).collect()
            },
        );
    }

    #[test]
    fn gradients_add_up_over_passes_until_reset() {
        let device = device();
        let mut params = Params::default();
        let key = params.add(device.upload([1], &[3.0f32]).unwrap());
        let mut gradients = Gradients::default();
        let pass = |factor: f32, gradients: &mut Gradients| {
            let tape = Tape::training(&device, &params, 0);
            let loss = tape.scale(&tape.param(key), factor).unwrap();
            tape.backward(&loss, gradients).unwrap();
            gradients.get(key).unwrap().to_vec::<f32>()[0]
        };
        assert_eq!(pass(2.0, &mut gradients), 2.0);
        assert_eq!(pass(5.0, &mut gradients), 7.0);
        let held = device.usage().in_use;
        gradients.reset();
        assert!(gradients.get(key).is_none());
        assert_eq!(pass(4.0, &mut gradients), 4.0);
        assert_eq!(device.usage().in_use, held);
    }

    #[test]
    fn backward_refuses_what_is_not_a_loss() {
        let device = device();
        let mut params = Params::default();
        let key = params.add(device.upload([2], &[3.0f32, 4.0]).unwrap());
        let tape = Tape::training(&device, &params, 0);
        let pair = tape.scale(&tape.param(key), 1.0).unwrap();
        let error = tape.backward(&pair, &mut Gradients::default()).unwrap_err().to_string();
        assert_eq!(error, "backward starts from a scalar, not from shape [2]");
        let tape = Tape::training(&device, &params, 0);
        let constant = Var::from(device.upload([1], &[1.0f32]).unwrap());
        let error = tape.backward(&constant, &mut Gradients::default()).unwrap_err().to_string();
        assert_eq!(error, "nothing to train: the loss does not depend on any parameter");
        let reader = params.get(key).clone();
        let error = params.values_mut().unwrap_err().to_string();
        assert_eq!(error, "parameter 0 is still held by 1 other(s)");
        drop(reader);
        assert!(params.values_mut().is_ok());
    }
}
