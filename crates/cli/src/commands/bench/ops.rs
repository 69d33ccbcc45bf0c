//! `hearth bench ops`: each op alone, at the shapes of the benchmark job and some others.

use std::io::Write;

use compute::ops::{
    Activation, AdamW, Attention, Conv2d, Conv3d, ConvPadding, Linear, Lora, Moments, QkNormRope,
    adamw,
};
use compute::{
    Device, DeviceKind, Dtype, Gradients, Params, RandomSequence, Shape, Tape, Tensor, Var,
};

use super::{Timing, median};
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::commands::named_value;
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::{OpFigures, OpTimes};

/// Measure each op alone, forward and backward.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench ops
  hearth bench ops --only attention --dtype bf16 --device cuda:0
  hearth bench ops --json --threads 2")]
pub struct BenchOpsArgs {
    /// Only ops whose name contains this
    #[arg(long, default_value = "")]
    only: String,

    /// Number format of weights and activations
    #[arg(long, default_value = "f32", value_parser = named_value::parser::<Dtype>())]
    dtype: Dtype,

    /// Repetitions; the median counts
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object per op and shape
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &BenchOpsArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let threads = arguments.engine.threads();
    let mut all = Vec::new();
    let is_cuda = matches!(arguments.engine.kind(), DeviceKind::Cuda { .. });
    for case in cases(is_cuda).into_iter().filter(|case| case.op.contains(&arguments.only)) {
        let device = arguments.engine.open(ARENA_BYTES)?;
        let bench = OpBench { device: &device, threads, arguments };
        let figures = bench.measure(&case)?;
        if arguments.json {
            render::json::line(out, &figures)?;
        }
        all.push(figures);
    }
    if !arguments.json {
        write!(out, "{}", render::bench::ops(&all))?;
    }
    Ok(CommandOutcome::Done)
}

/// Chosen: more than any case needs; only what is touched is taken.
const ARENA_BYTES: usize = 4 << 30;

/// Of an op on a GPU. Chosen: what waiting takes is then a per cent of attention's time.
const IN_A_ROW: u32 = 10;

/// An op with its inputs.
struct OpCase {
    op: &'static str,
    /// The first is trained through, the others are frozen.
    inputs: Vec<(Shape, Option<Dtype>)>,
    run: OpRun,
}

enum OpRun {
    /// Recorded on a tape.
    ForwardBackward(fn(&Tape<'_>, &[Var]) -> compute::Result<Var>),
    /// Forward only.
    Forward(fn(&Tape<'_>, &[Var]) -> compute::Result<Var>),
    /// Changes its tensors: parameters, gradients and two moments.
    AdamW,
}

impl OpCase {
    fn new(op: &'static str, run: OpRun) -> Self {
        Self { op, inputs: vec![], run }
    }

    /// One more input in the format that is measured.
    fn with<const N: usize>(mut self, shape: [usize; N]) -> Self {
        self.inputs.push((shape.into(), None));
        self
    }

    /// One more input that is always f32.
    fn with_f32<const N: usize>(mut self, shape: [usize; N]) -> Self {
        self.inputs.push((shape.into(), Some(Dtype::F32)));
        self
    }
}

/// Rows, inputs and outputs of linear layers: those of cpu-small, cpu-mid and a 1.5 B model.
const LINEAR: [[usize; 3]; 5] =
    [[1280, 512, 512], [1280, 512, 2048], [1280, 2048, 512], [1024, 1024, 4096], [512, 1536, 6144]];
/// The same that keep a GPU busy: those of gpu-sd3-b1, and one that is as good as it gets.
const LARGE_LINEAR: [[usize; 3]; 4] =
    [[4352, 1536, 1536], [4352, 1536, 6144], [4352, 6144, 1536], [8192, 8192, 8192]];

/// Samples, tokens, width, and width of a head.
const ATTENTION: [[usize; 4]; 3] = [[4, 320, 512, 64], [1, 1024, 1024, 64], [1, 4352, 128, 64]];
const LARGE_ATTENTION: [[usize; 4]; 2] = [[1, 4352, 1536, 64], [1, 4352, 3072, 128]];

/// What is measured: on a GPU other sizes, since it would wait for most of those of a CPU.
fn cases(is_gpu: bool) -> Vec<OpCase> {
    let mut cases = Vec::new();
    for [rows, inputs, outputs] in if is_gpu { &LARGE_LINEAR[..] } else { &LINEAR[..] } {
        let run = OpRun::ForwardBackward(|tape, v| tape.linear(&v[0], Linear::new(&v[1])));
        cases.push(OpCase::new("linear", run).with([*rows, *inputs]).with([*outputs, *inputs]));
    }
    let gelu = OpRun::ForwardBackward(|tape, v| {
        tape.linear(&v[0], Linear { activation: Activation::GeluTanh, ..Linear::new(&v[1]) })
    });
    cases.push(OpCase::new("linear + gelu", gelu).with([1280, 512]).with([2048, 512]));
    let lora = OpRun::ForwardBackward(|tape, v| {
        let lora = Lora { down: &v[2], up: &v[3], scale: 1.0, dropout: 0.0 };
        tape.linear(&v[0], Linear { lora: Some(lora), ..Linear::new(&v[1]) })
    });
    cases.push(
        OpCase::new("linear + lora", lora)
            .with([1280, 512])
            .with([512, 512])
            .with_f32([16, 512])
            .with_f32([512, 16]),
    );
    for [samples, tokens, width, head] in if is_gpu { &LARGE_ATTENTION[..] } else { &ATTENTION[..] }
    {
        let shape = [*samples, *tokens, *width];
        let run = if *head == 64 { attention::<64> } else { attention::<128> };
        let case = OpCase::new("attention", OpRun::ForwardBackward(run));
        cases.push(case.with(shape).with(shape).with(shape));
    }
    cases.extend(language_cases());
    cases.extend(row_cases());
    cases
}

/// What a step of a language model of 125 million numbers is made of, all of which are trained and so
/// in f32: four texts of 1024 tokens, of a vocabulary of 32768.
fn language_cases() -> Vec<OpCase> {
    const TABLE: [usize; 2] = [32768, 768];
    /// Tokens of a document, where several make a text.
    const DOCUMENT: usize = 128;
    let attention = |name, run| OpCase::new(name, run).with(TEXTS).with(TEXTS).with(TEXTS);
    vec![
        OpCase::new(
            "linear of f32",
            OpRun::ForwardBackward(|tape, v| tape.linear(&v[0], Linear::new(&v[1]))),
        )
        .with(TEXTS)
        .with_f32([2048, 768]),
        attention(
            "causal attention",
            OpRun::ForwardBackward(|tape, v| tape.attention(&v[0], &v[1], &v[2], causal())),
        ),
        attention(
            "attention of documents",
            OpRun::ForwardBackward(|tape, v| {
                let first = by_text(tape, |token| token % TEXTS[1] / DOCUMENT * DOCUMENT)?;
                let how = Attention { first_keys: Some(&first), ..causal() };
                tape.attention(&v[0], &v[1], &v[2], how)
            }),
        ),
        OpCase::new(
            "cross_entropy",
            OpRun::ForwardBackward(|tape, v| {
                tape.cross_entropy(&v[0], &v[1], &by_text(tape, |token| token * 7 % TABLE[0])?)
            }),
        )
        .with(TEXTS)
        .with_f32(TABLE),
        OpCase::new(
            "embedding",
            OpRun::ForwardBackward(|tape, v| {
                tape.embedding(&by_text(tape, |token| token * 7 % TABLE[0])?, &v[0])
            }),
        )
        .with_f32(TABLE),
    ]
}

/// Texts, their tokens, and the width of one.
const TEXTS: [usize; 3] = [4, 1024, 768];

/// A number for each token of the texts.
fn by_text(tape: &Tape<'_>, number: impl Fn(usize) -> usize) -> compute::Result<Tensor> {
    let numbers = (0..TEXTS[0] * TEXTS[1]).map(|token| number(token) as u32);
    tape.device().upload([TEXTS[0], TEXTS[1]], &numbers.collect::<Vec<u32>>())
}

/// Twelve heads, of which each token sees those before it.
fn causal() -> Attention<'static> {
    Attention { is_causal: true, ..Attention::full(12, 64) }
}

fn attention<const HEAD: usize>(tape: &Tape<'_>, v: &[Var]) -> compute::Result<Var> {
    let n_heads = v[0].shape().width() / HEAD;
    tape.attention(&v[0], &v[1], &v[2], Attention::full(n_heads, HEAD))
}

/// Ops whose time is that of reading and writing memory, and forward-only ones.
fn row_cases() -> Vec<OpCase> {
    let x = [4, 320, 512];
    vec![
        OpCase::new(
            "norm_modulate",
            OpRun::ForwardBackward(|tape, v| {
                tape.norm_modulate(&v[0], v[1].chunk(0), v[1].chunk(1), 1e-6)
            }),
        )
        .with(x)
        .with([4, 1024]),
        OpCase::new(
            "rms_norm",
            OpRun::ForwardBackward(|tape, v| tape.rms_norm(&v[0], Some(&v[1]), 1e-6)),
        )
        .with(x)
        .with_f32([512]),
        OpCase::new(
            "qk_norm_rope",
            OpRun::ForwardBackward(|tape, v| {
                tape.qk_norm_rope(
                    &v[0],
                    QkNormRope { n_heads: 8, norm: Some((&v[1], 1e-6)), rope: None },
                )
            }),
        )
        .with(x)
        .with_f32([64]),
        OpCase::new(
            "gelu",
            OpRun::ForwardBackward(|tape, v| tape.activate(&v[0], Activation::GeluTanh)),
        )
        .with([4, 320, 2048]),
        OpCase::new(
            "swiglu",
            OpRun::ForwardBackward(|tape, v| tape.glu(&v[0], &v[1], Activation::Silu)),
        )
        .with([4, 320, 2048])
        .with([4, 320, 2048]),
        OpCase::new(
            "gated_add",
            OpRun::ForwardBackward(|tape, v| tape.gated_add(&v[0], v[2].chunk(0), &v[1])),
        )
        .with(x)
        .with(x)
        .with([4, 512]),
        OpCase::new(
            "mse",
            OpRun::ForwardBackward(|tape, v| tape.mse(&v[0], v[1].tensor(), None, None)),
        )
        .with(x)
        .with(x),
        OpCase::new(
            "conv2d",
            OpRun::Forward(|tape, v| {
                let weight = v[1].tensor();
                let convolution = Conv2d { padding: [1; 4], ..Conv2d::new(weight) };
                tape.conv2d(&v[0], convolution)
            }),
        )
        .with([1, 128, 64, 64])
        .with([128, 128, 3, 3]),
        OpCase::new(
            "conv3d",
            OpRun::Forward(|tape, v| {
                let (padding, padding_mode) = ([[2, 0], [1; 2], [1; 2]], ConvPadding::Replicate);
                let weight = v[1].tensor();
                tape.conv3d(&v[0], Conv3d { padding, padding_mode, ..Conv3d::new(weight) })
            }),
        )
        .with([1, 128, 5, 64, 64])
        .with([128, 128, 3, 3, 3]),
        OpCase::new(
            "group_norm",
            OpRun::Forward(|tape, v| {
                tape.group_norm(&v[0], 32, v[1].tensor(), v[2].tensor(), 1e-6, Activation::Silu)
            }),
        )
        .with([1, 128, 128, 128])
        .with_f32([128])
        .with_f32([128]),
        OpCase::new("adamw", OpRun::AdamW).with_f32([100_000_000]),
    ]
}

struct OpBench<'a> {
    device: &'a Device,
    threads: usize,
    arguments: &'a BenchOpsArgs,
}

impl OpBench<'_> {
    fn measure(&self, case: &OpCase) -> Result<OpFigures, Failure> {
        let dtype = self.arguments.dtype;
        let inputs = self.inputs(case, dtype)?;
        let params = Params::default();
        let use_only = |run: fn(&Tape<'_>, &[Var]) -> compute::Result<Var>| {
            let vars: Vec<Var> = inputs.iter().cloned().map(Var::from).collect();
            self.time(
                || run(&Tape::inference(self.device, &params, 0), &vars).map(|_| ()),
                || Ok(()),
            )
        };
        let (forward, backward) = match case.run {
            OpRun::ForwardBackward(run) => {
                (use_only(run)?, Some(self.backward(run, &inputs, &params)?))
            }
            OpRun::Forward(run) => (use_only(run)?, None),
            OpRun::AdamW => (self.adamw(&inputs[0])?, None),
        };
        let shapes: Vec<String> = case.inputs.iter().map(|(shape, _)| shape.to_string()).collect();
        let (shape, dtype) = (shapes.join(" "), dtype.to_string());
        Ok(OpFigures { op: case.op, shape, dtype, threads: self.threads, forward, backward })
    }

    fn inputs(&self, case: &OpCase, dtype: Dtype) -> Result<Vec<Tensor>, Failure> {
        let numbers = |(index, (shape, own)): (usize, &(Shape, Option<Dtype>))| {
            self.device.normal(
                *shape,
                own.unwrap_or(dtype),
                0.5,
                RandomSequence::new(1, index as u64),
            )
        };
        Ok(case.inputs.iter().enumerate().map(numbers).collect::<compute::Result<_>>()?)
    }

    /// Backward alone: what forward takes is left out of the time.
    fn backward(
        &self,
        run: fn(&Tape<'_>, &[Var]) -> compute::Result<Var>,
        inputs: &[Tensor],
        params: &Params,
    ) -> Result<OpTimes, Failure> {
        let ready = std::cell::RefCell::new(Vec::new());
        let prepare = || {
            let tape = Tape::training(self.device, params, 0);
            let mut vars: Vec<Var> = inputs.iter().cloned().map(Var::from).collect();
            vars[0] = tape.leaf(inputs[0].clone());
            let result = run(&tape, &vars)?;
            let gradient = self.device.normal(
                result.shape(),
                result.dtype(),
                1.0,
                RandomSequence::new(2, 0),
            )?;
            ready.borrow_mut().push((tape, result, gradient));
            Ok(())
        };
        let go = || {
            let next = ready.borrow_mut().pop();
            let (tape, result, gradient) = next.expect("prepared before each time");
            tape.backward_from(result, gradient, &mut Gradients::default()).map(|_| ())
        };
        self.time(go, prepare)
    }

    fn adamw(&self, values: &Tensor) -> Result<OpTimes, Failure> {
        let device = self.device;
        let mut params =
            vec![device.normal(values.shape(), Dtype::F32, 1.0, RandomSequence::new(3, 0))?];
        let mut moments = vec![Moments::new(values)?];
        let mut how = AdamW { step: 0, ..AdamW::default() };
        let go = || {
            how.step += 1;
            adamw(&mut params, &[Some(values)], &mut moments, how, None)
        };
        self.time(go, || Ok(()))
    }

    /// Times that work is done between two looks at the clock: to wait for a GPU takes as long as some ops.
    fn in_a_row(&self) -> u32 {
        if matches!(self.device.kind(), DeviceKind::Cuda { .. }) { IN_A_ROW } else { 1 }
    }

    fn time(
        &self,
        mut work: impl FnMut() -> compute::Result<()>,
        prepare: impl Fn() -> compute::Result<()>,
    ) -> Result<OpTimes, Failure> {
        let mut times = Vec::new();
        let mut done = Default::default();
        // The first two are not counted: memory is touched for the first time.
        for index in 0..self.arguments.repeats + 2 {
            let n = self.in_a_row();
            (0..n).try_for_each(|_| prepare())?;
            let before = self.device.work();
            self.device.synchronise()?;
            let (time, ()) = Timing::measure(self.threads, || {
                (0..n).try_for_each(|_| work())?;
                self.device.synchronise()
            })?;
            let after = self.device.work();
            let of_one = |before: u64, after: u64| (after - before) / u64::from(n);
            done = (of_one(before.flops, after.flops), of_one(before.bytes, after.bytes));
            times.extend((index >= 2).then_some(time));
        }
        let of_one = |ms: f64| ms / f64::from(self.in_a_row());
        let ms_median = median(times.iter().map(|time| of_one(time.wall_ms)));
        Ok(OpTimes {
            ms_median,
            cpu_ms_median: median(times.iter().map(|time| of_one(time.cpu_ms))),
            gflop_per_s: done.0 as f64 / ms_median / 1e6,
            gb_per_s: done.1 as f64 / ms_median / 1e6,
        })
    }
}
