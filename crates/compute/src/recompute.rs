//! Gradient checkpointing (recomputation): forward saves only a block's inputs, backward runs the block again,
//! records it this time, and computes its gradients at once. What attention gives may be kept, so that the second
//! run need not compute it.
//!
//! Gradients add up in the same order as without recomputation, so not a bit differs: what an input
//! got from later readers is moved into the block and added to there, and a result that is an input,
//! or the same as another result, has one gradient with it.

use crate::backward::BackwardPass;
use crate::tape::{KeptAttention, RecomputeRange, RngSeed, Tape, TapeMode};
use crate::var::{GradTarget, SavedTensor, Var};
use crate::{Params, Result, Tensor};

/// The block, which is run twice. Boxed, so that a model's many blocks compile one copy of what follows.
type BlockFn<'m, const N: usize> = Box<dyn Fn(&Tape<'m>, &[Var]) -> Result<[Var; N]> + 'm>;

impl<'m> Tape<'m> {
    /// Runs `block` on `inputs` and saves nothing but them. In backward it is run again with the
    /// same random numbers, once for all its results, so `block` must compute the same from the
    /// same; the end of it, whose results nothing keeps, is not run a second time.
    pub fn recompute<const N: usize>(
        &self,
        inputs: &[&Var],
        block: impl Fn(&Tape<'m>, &[Var]) -> Result<[Var; N]> + 'm,
    ) -> Result<[Var; N]> {
        self.checkpoint(inputs, Box::new(block))
    }

    fn checkpoint<const N: usize>(
        &self,
        inputs: &[&Var],
        block: BlockFn<'m, N>,
    ) -> Result<[Var; N]> {
        if self.mode == TapeMode::Off {
            let inputs: Vec<Var> = inputs.iter().map(|input| (*input).clone()).collect();
            return block(self, &inputs);
        }
        let op = self.begin_op("recompute");
        let first_sequence = self.next_sequence.get();
        let dry_run = Tape::with(&self.device, self.params, TapeMode::DryRun, self.rng)
            .for_block(first_sequence, RecomputeRange::all_if(op.is_run))
            .keeping_attention(self.keeps_attention && self.mode == TapeMode::Record);
        let sources: Vec<_> = inputs.iter().map(|input| input.grad_target()).collect();
        let tensors = inputs.iter().map(|input| input.tensor().clone()).collect();
        let leaves = dry_run.adopt(tensors, &sources);
        let dry_results = block(&dry_run, &leaves)?;
        self.next_sequence.set(dry_run.next_sequence.get());
        self.use_params(dry_run.used_params());
        let mut links = NodeMap::of_inputs(&sources, &leaves);
        let results = dry_results.map(|var| {
            let source = var.grad_target().map(|source| links.outside(source, self));
            Var { grad_target: source, ..op.result(var.into_tensor()) }
        });
        if links.results().is_empty() {
            return Ok(results);
        }
        let again = RecomputeBlock {
            saved: inputs.iter().map(|input| self.save_for_backward(input)).collect(),
            sources,
            links,
            params: self.params,
            rng: self.rng,
            first_sequence,
            run: dry_run.recompute_range(),
            kept_attention: dry_run.kept_attention.into_inner(),
        };
        self.push_record("recompute", move |back| again.run(back, &block));
        Ok(results)
    }

    /// Inputs as seen from inside the block: tracked where they are tracked outside, and those that
    /// have one gradient outside have one inside.
    fn adopt(&self, tensors: Vec<Tensor>, sources: &[Option<GradTarget>]) -> Vec<Var> {
        let mut leaves: Vec<Var> = Vec::with_capacity(tensors.len());
        for (tensor, source) in tensors.into_iter().zip(sources) {
            let known = sources.iter().zip(&leaves).find(|(known, _)| *known == source);
            let inside = match (known, source) {
                (Some((_, leaf)), _) => leaf.grad_target(),
                (None, Some(GradTarget::Node(_))) => Some(GradTarget::Node(self.new_node())),
                // Parameters are the same on every tape.
                (None, Some(GradTarget::Param(_)) | None) => *source,
            };
            if let Some(GradTarget::Param(index)) = inside {
                self.use_params([index]);
            }
            leaves.push(Var { grad_target: inside, ..Var::from(tensor) });
        }
        leaves
    }
}

/// Which node of the tape a node of the block is. The block's nodes have the same numbers in both
/// runs.
struct NodeMap {
    /// Inside and outside; those of inputs first.
    nodes: Vec<(usize, usize)>,
    n_inputs: usize,
}

impl NodeMap {
    fn of_inputs(sources: &[Option<GradTarget>], leaves: &[Var]) -> Self {
        let pairs = leaves.iter().map(Var::grad_target).zip(sources);
        let nodes: Vec<_> = pairs
            .filter_map(|pair| match pair {
                (Some(GradTarget::Node(inside)), Some(GradTarget::Node(outside))) => {
                    Some((inside, *outside))
                }
                _ => None,
            })
            .collect();
        Self { n_inputs: nodes.len(), nodes }
    }

    /// Where the gradient of a result goes: to a node of its own, unless it is one that is known.
    fn outside(&mut self, source: GradTarget, tape: &Tape<'_>) -> GradTarget {
        let GradTarget::Node(inside) = source else { return source };
        if let Some((_, outside)) = self.nodes.iter().find(|(known, _)| *known == inside) {
            return GradTarget::Node(*outside);
        }
        let outside = tape.new_node();
        self.nodes.push((inside, outside));
        GradTarget::Node(outside)
    }

    fn inputs(&self) -> &[(usize, usize)] {
        &self.nodes[..self.n_inputs]
    }

    /// Results that are no inputs.
    fn results(&self) -> &[(usize, usize)] {
        &self.nodes[self.n_inputs..]
    }
}

/// What the second run needs besides the block.
struct RecomputeBlock<'m> {
    saved: Vec<SavedTensor>,
    sources: Vec<Option<GradTarget>>,
    links: NodeMap,
    params: &'m Params,
    rng: RngSeed,
    first_sequence: u64,
    run: RecomputeRange,
    kept_attention: KeptAttention,
}

impl<'m> RecomputeBlock<'m> {
    fn run<const N: usize>(
        self,
        back: &mut BackwardPass<'_>,
        block: &BlockFn<'m, N>,
    ) -> Result<()> {
        let Self {
            saved: kept,
            sources,
            links,
            params,
            rng: draws,
            first_sequence: first_stream,
            run,
            kept_attention,
        } = self;
        if links.results().iter().all(|(_, outside)| back.nodes[*outside].is_none()) {
            return Ok(());
        }
        let tape = Tape::with(back.cx.device, params, TapeMode::Record, draws)
            .for_block(first_stream, run);
        tape.kept_attention.replace(kept_attention);
        let tensors = kept.into_iter().map(|kept| kept.get(back.cx)).collect::<Result<_>>()?;
        let leaves = tape.adopt(tensors, &sources);
        // The records hold what they need of inputs and results.
        drop((block(&tape, &leaves)?, leaves));
        let mut starts = Vec::new();
        for (inside, outside) in &links.nodes {
            let gradient = back.nodes[*outside].take();
            starts.extend(gradient.map(|gradient| (GradTarget::Node(*inside), gradient)));
        }
        let BackwardPass { sink, completing, .. } = back;
        let mut reached = tape.backward_from_all(starts, sink.reborrow(), Some(completing))?;
        for (inside, outside) in links.inputs() {
            if let Some(gradient) = reached.0[*inside].take() {
                back.pass(Some(GradTarget::Node(*outside)), gradient)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backward::{GradientSink, SinkHook};
    use crate::ops::{Attention, Linear, Lora};
    use crate::testing::{Input, device, upload};
    use crate::{Device, DeviceKind, Dtype, Gradients, ParamKey, Usage};

    const WIDTH: usize = 12;
    const TOKENS: usize = 5;
    /// What one matmul of all tokens of both streams takes.
    const MATMUL_FLOPS: usize = 2 * (2 * TOKENS) * WIDTH * WIDTH;

    /// What a block does to its two streams.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Form {
        /// Both change each other.
        Joint,
        /// The second is changed by the first, which is passed through.
        PassedThrough,
        /// The same, and the result is there twice.
        Doubled,
    }

    /// Two streams of tokens that attend to each other, with an adapter each and a vector that all
    /// blocks read.
    struct Block {
        form: Form,
        weight: Var,
        adapters: [[ParamKey; 2]; 2],
    }

    impl Block {
        fn new(device: &Device, params: &mut Params, form: Form, seed: u64) -> Self {
            let tensor = |shape: [usize; 2], seed| {
                upload(device, &Input::normal(shape, seed).scaled(0.3), Dtype::F32)
            };
            let weight = tensor([WIDTH, WIDTH], seed).into();
            let adapters = [1, 3].map(|first| {
                let (down, up) = ([2, WIDTH], [WIDTH, 2]);
                [params.add(tensor(down, seed + first)), params.add(tensor(up, seed + first + 1))]
            });
            Self { form, weight, adapters }
        }

        fn forward(&self, tape: &Tape<'_>, v: &[Var]) -> Result<[Var; 2]> {
            let [context, x, condition] = v else { unreachable!("three inputs") };
            let [a, b] = [(context, 0), (x, 1)].map(|(x, index)| self.layer(tape, x, index));
            let (a, b) = (tape.gated_add(&a?, condition.chunk(0), context)?, b?);
            let all = tape.concat_tokens(&[&a, &b])?;
            let all = tape.attention(&all, &all, &all, Attention::full(2, WIDTH / 2))?;
            // Nothing keeps what this last layer gives.
            let all = tape.linear(&all, Linear::new(&self.weight))?;
            let new_x = tape.add(x, &tape.split_tokens(&all, TOKENS..2 * TOKENS)?)?;
            Ok(match self.form {
                Form::Joint => [tape.add(context, &tape.split_tokens(&all, 0..TOKENS)?)?, new_x],
                Form::PassedThrough => [context.clone(), new_x],
                Form::Doubled => [new_x.clone(), new_x],
            })
        }

        fn layer(&self, tape: &Tape<'_>, x: &Var, index: usize) -> Result<Var> {
            let [down, up] = self.adapters[index].map(|key| tape.param(key));
            let lora = Lora { down: &down, up: &up, scale: 1.0, dropout: 0.3 };
            let normed = tape.layer_norm(x, None, None, 1e-6)?;
            tape.linear(&normed, Linear { lora: Some(lora), ..Linear::new(&self.weight) })
        }
    }

    /// Which results of the last block the loss sees.
    #[derive(Clone, Copy, Debug)]
    struct Ends {
        context: bool,
        x: bool,
    }

    fn forward<'m>(
        tape: &Tape<'m>,
        blocks: &'m [Block],
        start: [ParamKey; 2],
        depth: usize,
    ) -> Result<[Var; 2]> {
        // One stream and the vector are trained from the start on, the other only once an adapter
        // had a part in it.
        let frozen = upload(tape.device(), &Input::normal([1, TOKENS, WIDTH], 9), Dtype::F32);
        let [x, condition] = start.map(|key| tape.scale(&tape.param(key), 0.5));
        let (mut streams, condition) = ([Var::from(frozen), x?], condition?);
        for block in blocks {
            let [context, x] = streams;
            streams = run(tape, block, &[context, x, condition.clone()], depth)?;
        }
        Ok(streams)
    }

    /// A block within so many others that are recomputed.
    fn run<'m>(
        tape: &Tape<'m>,
        block: &'m Block,
        inputs: &[Var],
        depth: usize,
    ) -> Result<[Var; 2]> {
        if depth == 0 {
            return block.forward(tape, inputs);
        }
        let inputs: Vec<&Var> = inputs.iter().collect();
        tape.recompute(&inputs, move |tape, v| run(tape, block, v, depth - 1))
    }

    /// Bits of all gradients, and the memory it took.
    fn train(
        device: &Device,
        forms: &[Form],
        ends: Ends,
        depth: usize,
    ) -> (Vec<Option<Vec<u32>>>, Usage) {
        backward(device, forms, ends, Pass::recomputing(depth))
    }

    /// How gradients are found.
    #[derive(Clone, Copy, Debug)]
    struct Pass {
        /// So many recomputed blocks within each other.
        depth: usize,
        /// Fused with an update that overwrites each parameter.
        is_fused: bool,
        keeps_attention: bool,
    }

    impl Pass {
        fn recomputing(depth: usize) -> Self {
            Self { depth, is_fused: false, keeps_attention: false }
        }
    }

    fn backward(
        device: &Device,
        forms: &[Form],
        ends: Ends,
        Pass { depth, is_fused, keeps_attention }: Pass,
    ) -> (Vec<Option<Vec<u32>>>, Usage) {
        let mut params = Params::default();
        let blocks: Vec<_> = forms
            .iter()
            .zip(0..)
            .map(|(form, index)| Block::new(device, &mut params, *form, 10 * index))
            .collect();
        let start = [vec![1, TOKENS, WIDTH], vec![1, WIDTH]].map(|sizes| {
            let input = Input::normal(crate::Shape::new(&sizes), 7);
            params.add(upload(device, &input, Dtype::F32))
        });
        let count = params.values().len();
        let mut gradients = Gradients::default();
        let held = device.usage().in_use;
        let tape = Tape::training(device, &params, 3).keeping_attention(keeps_attention);
        let streams = forward(&tape, &blocks, start, depth).unwrap();
        let seen: Vec<_> = streams
            .into_iter()
            .zip([ends.context, ends.x])
            .zip(30..)
            .filter(|((_, is_seen), _)| *is_seen)
            .map(|((stream, _), seed)| {
                let input = Input::normal(stream.shape(), seed);
                (stream.grad_target().unwrap(), upload(device, &input, Dtype::F32))
            })
            .collect();
        let bits = |g: &Tensor| -> Vec<u32> {
            let read = if device.is_meta() { vec![] } else { g.to_vec::<f32>() };
            read.iter().map(|value| value.to_bits()).collect()
        };
        let mut handed = vec![None; count];
        let mut overwrite = |key: ParamKey, param: &mut Tensor, gradient: &Tensor| {
            param.fill_zeros();
            assert!(handed[key.index()].replace(bits(gradient)).is_none(), "it comes once");
            Ok(())
        };
        let hook = is_fused.then_some(SinkHook::Fused(&mut overwrite));
        tape.backward_from_all(seen, GradientSink { gradients: &mut gradients, hook }, None)
            .unwrap();
        let usage = device.usage();
        let all = gradients.all(count);
        let unit = device.kind().alignment();
        let kept: usize = all.iter().flatten().map(|g| g.bytes().next_multiple_of(unit)).sum();
        assert_eq!(usage.in_use, held + kept, "a tape leaves gradients behind, and nothing else");
        let all: Vec<_> = all.into_iter().map(|gradient| gradient.map(bits)).collect();
        if is_fused {
            assert!(all.iter().all(Option::is_none), "a fused backward pass leaves none");
        }
        (if is_fused { handed } else { all }, usage)
    }

    const BOTH: Ends = Ends { context: true, x: true };
    const ONLY_X: Ends = Ends { context: false, x: true };
    const ONLY_CONTEXT: Ends = Ends { context: true, x: false };

    /// Blocks whose results are all used by the next, with one that is not used, passed through or
    /// doubled: at the end and before other blocks.
    const CASES: [(&[Form], Ends); 7] = {
        use Form::{Doubled, Joint, PassedThrough};
        [
            (&[Joint, Joint, Joint], BOTH),
            (&[Joint, Joint, Joint], ONLY_X),
            (&[Joint, PassedThrough, Joint], BOTH),
            (&[PassedThrough, Joint, PassedThrough], ONLY_X),
            (&[Joint, Joint, PassedThrough], ONLY_CONTEXT),
            (&[Joint, Doubled, Joint], BOTH),
            (&[Joint, PassedThrough, Doubled], BOTH),
        ]
    };

    #[test]
    fn several_results_change_memory_and_not_one_bit() {
        for case in CASES {
            let (kept, kept_usage) = train(&device(), case.0, case.1, 0);
            assert!(kept.iter().flatten().count() > 4, "{case:?}");
            for depth in [1, 2] {
                let (recomputed, usage) = train(&device(), case.0, case.1, depth);
                assert_eq!(kept, recomputed, "{case:?} {depth}");
                assert!(usage.peak < kept_usage.peak, "{case:?} {depth}");
            }
        }
    }

    #[test]
    fn attention_that_is_kept_is_computed_once_and_changes_no_bit() {
        let blocks = CASES[0].0;
        let attention = blocks.len() * 2 * 2 * (2 * TOKENS) * (2 * TOKENS) * WIDTH;
        let train = |pass| {
            let device = device();
            let (gradients, usage) = backward(&device, blocks, BOTH, pass);
            (gradients, usage.peak, device.work().flops)
        };
        let (plain, least, most_flops) = train(Pass::recomputing(1));
        let (kept, peak, flops) = train(Pass { keeps_attention: true, ..Pass::recomputing(1) });
        let (_, most, _) = train(Pass::recomputing(0));
        assert_eq!(plain, kept);
        assert_eq!(most_flops - flops, attention as u64);
        assert!(least < peak && peak < most, "{least} {peak} {most}");
        // Within another recomputed block, nothing is kept that is not needed yet.
        let (deep, _, _) = train(Pass { keeps_attention: true, ..Pass::recomputing(2) });
        assert_eq!(plain, deep);
    }

    #[test]
    fn several_results_take_the_same_memory_on_the_meta_device() {
        for (case, depth) in CASES.iter().flat_map(|case| [0, 1, 2].map(|depth| (*case, depth))) {
            for [is_fused, keeps_attention] in [[false; 2], [true, false], [false, true]] {
                let pass = Pass { depth, is_fused, keeps_attention };
                let device = device();
                let meta = Device::meta(device.kind(), usize::MAX);
                let [real, imagined] =
                    [&device, &meta].map(|device| backward(device, case.0, case.1, pass).1);
                assert_eq!(real, imagined, "{case:?} {pass:?}");
            }
        }
    }

    /// A parameter is overwritten as soon as it is handed over: a later reader would give other gradients.
    #[test]
    fn a_fused_backward_pass_hands_over_every_gradient_when_it_is_complete() {
        for (case, depth) in CASES.iter().flat_map(|case| [0, 1, 2].map(|depth| (*case, depth))) {
            let (kept, kept_usage) = train(&device(), case.0, case.1, depth);
            let pass = Pass { is_fused: true, ..Pass::recomputing(depth) };
            let (handed, usage) = backward(&device(), case.0, case.1, pass);
            assert_eq!(kept, handed, "{case:?} {depth}");
            assert!(usage.peak <= kept_usage.peak, "{case:?} {depth}");
        }
    }

    /// As tied embeddings are, and a parameter that a block gets as an input and takes itself.
    #[test]
    fn a_parameter_with_several_uses_is_complete_after_its_first_in_forward() {
        let device = device();
        let vector = |numbers: [f32; 2]| device.upload([2], &numbers).unwrap();
        for depth in [0, 1, 2] {
            let mut params = Params::default();
            let [tied, input, alone] =
                [[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]].map(|numbers| params.add(vector(numbers)));
            let block = move |tape: &Tape<'_>, v: &[Var]| {
                let y = tape.add(&tape.add(&v[0], &v[1])?, &tape.param(tied))?;
                let y = tape.add(&y, &tape.param(alone))?;
                Ok([tape.add(&y, &tape.param(input))?])
            };
            let run = |sink: GradientSink<'_>| {
                let tape = Tape::training(&device, &params, 0);
                let x = tape.scale(&tape.param(tied), 2.0).unwrap();
                let given = tape.param(input);
                let inputs = [&x, &given];
                let [y] = match depth {
                    0 => block(&tape, &inputs.map(Clone::clone)),
                    1 => tape.recompute(&inputs, block),
                    _ => tape
                        .recompute(&inputs, move |tape, v| tape.recompute(&[&v[0], &v[1]], block)),
                }
                .unwrap();
                let y = tape.add(&y, &tape.param(tied)).unwrap();
                let starts = vec![(y.grad_target().unwrap(), vector([1.0, 2.0]))];
                drop((x, y, given));
                tape.backward_from_all(starts, sink, None).unwrap();
            };
            let mut gradients = Gradients::default();
            run(GradientSink { gradients: &mut gradients, hook: None });
            let expected = [tied, input, alone].map(|key| gradients.read(key).unwrap().unwrap());
            assert_eq!(expected, [[4.0, 8.0], [2.0, 4.0], [1.0, 2.0]]);
            let mut handed = Vec::new();
            let mut overwrite = |key: ParamKey, param: &mut Tensor, gradient: &Tensor| {
                param.fill_zeros();
                handed.push((key.index(), gradient.to_vec::<f32>()));
                Ok(())
            };
            let gradients = &mut Gradients::default();
            run(GradientSink { gradients, hook: Some(SinkHook::Fused(&mut overwrite)) });
            let order: Vec<usize> = handed.iter().map(|(index, _)| *index).collect();
            assert_eq!(order, [alone, input, tied].map(ParamKey::index), "{depth}");
            handed.sort_by_key(|(index, _)| *index);
            assert_eq!(handed.into_iter().map(|(_, of)| of).collect::<Vec<_>>(), expected);
            // Where gradients stay, each is whole when it is called complete.
            let (mut completed, mut gradients) = (Vec::new(), Gradients::default());
            let mut read = |key: ParamKey, gradients: &mut Gradients| {
                completed.push((key.index(), gradients.read(key)?.unwrap()));
                Ok(())
            };
            let hook = Some(SinkHook::Completed(&mut read));
            run(GradientSink { gradients: &mut gradients, hook });
            let whole = [alone, input, tied]
                .map(|key| (key.index(), gradients.read(key).unwrap().unwrap()));
            assert_eq!(completed, whole, "{depth}");
            assert_eq!(
                [tied, input, alone].map(|key| gradients.read(key).unwrap().unwrap()),
                expected
            );
        }
    }

    /// Operations that recomputing adds.
    fn more_flops(forms: &[Form], ends: Ends) -> usize {
        let [once, twice] = [0, 1].map(|depth| {
            let device = Device::meta(DeviceKind::cpu(2), usize::MAX);
            train(&device, forms, ends, depth);
            device.work().flops as usize
        });
        twice - once
    }

    #[test]
    fn one_run_serves_all_results() {
        // One matmul of two, the attention's two, and little more.
        let once = MATMUL_FLOPS + 2 * 2 * (2 * TOKENS) * (2 * TOKENS) * WIDTH;
        let joint = |count| vec![Form::Joint; count];
        for (count, ends) in [(1, BOTH), (3, BOTH), (3, ONLY_X)] {
            let more = more_flops(&joint(count), ends) / count;
            assert!(more > once && more < once + MATMUL_FLOPS, "{count} {ends:?}: {more} {once}");
        }
        // What was only passed through needs no run at all.
        let passed = more_flops(&[Form::Joint, Form::PassedThrough], ONLY_CONTEXT);
        assert_eq!(passed, more_flops(&[Form::Joint], ONLY_CONTEXT));
    }

    #[test]
    fn a_result_that_depends_on_no_parameter_is_not_tracked() {
        let (device, mut params) = (device(), Params::default());
        let key = params.add(device.upload([2], &[3.0f32, 4.0]).unwrap());
        let tape = Tape::training(&device, &params, 0);
        let frozen = Var::from(device.upload([2], &[5.0f32, 6.0]).unwrap());
        let [same, twice, trained, param] = tape
            .recompute(&[&frozen, &tape.param(key)], |tape, v| {
                let trained = tape.add(&v[0], &v[1])?;
                Ok([v[0].clone(), tape.scale(&v[0], 2.0)?, trained, v[1].clone()])
            })
            .unwrap();
        assert!(same.grad_target().is_none() && twice.grad_target().is_none());
        assert_eq!(param.grad_target(), Some(GradTarget::Param(key.index())));
        assert_eq!(twice.tensor().to_vec::<f32>(), [10.0, 12.0]);
        let gradient = device.upload([2], &[1.0f32, 2.0]).unwrap();
        let mut gradients = Gradients::default();
        tape.backward_from(trained, gradient, &mut gradients).unwrap();
        assert_eq!(gradients.get(key).unwrap().to_vec::<f32>(), [1.0, 2.0]);
    }

    #[test]
    fn of_a_last_op_only_what_is_kept_is_made_again() {
        use crate::ops::Activation;
        let device = device();
        let mut params = Params::default();
        let tensor = |shape: [usize; 2], seed| {
            upload(&device, &Input::normal(shape, seed).scaled(0.3), Dtype::F32)
        };
        let [up, down] = [1, 2].map(|seed| Var::from(tensor([WIDTH, WIDTH], seed)));
        let key = params.add(tensor([TOKENS, WIDTH], 3));
        // Of the first layer backward needs what its activation was applied to; of the second, nothing.
        let block = |tape: &Tape<'_>, x: &Var| {
            let layer = Linear { activation: Activation::GeluTanh, ..Linear::new(&up) };
            tape.linear(&tape.linear(x, layer)?, Linear::new(&down))
        };
        let train = |is_recomputed: bool| {
            let before = device.work().flops;
            let mut gradients = Gradients::default();
            let tape = Tape::training(&device, &params, 0);
            let x = tape.param(key);
            let y = if is_recomputed {
                let [y] = tape.recompute(&[&x], |tape, v| Ok([block(tape, &v[0])?])).unwrap();
                y
            } else {
                block(&tape, &x).unwrap()
            };
            let gradient = tensor([TOKENS, WIDTH], 4);
            tape.backward_from(y, gradient, &mut gradients).unwrap();
            (gradients.get(key).unwrap().to_vec::<f32>(), device.work().flops - before)
        };
        let ((once, flops), (twice, more)) = (train(false), train(true));
        assert_eq!(once, twice);
        // One matmul, and no activation.
        assert_eq!(more - flops, (2 * TOKENS * WIDTH * WIDTH) as u64);
    }
}
