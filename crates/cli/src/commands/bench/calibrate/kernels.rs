//! Kernels that are timed alone, at a few sizes in each format: those that the steps beside this do not
//! call, or not at the sizes and formats that jobs have.

use std::fmt;

use compute::ops::{
    Activation, AdamW, Attention, Conv2d, GradClip, LatentScaling, LatentStd, Linear, Lora,
    Moments, Moments8bit, PatchOrder, adamw, adamw_8bit, add_noise, global_norm, sample_latents,
};
use compute::{Device, Dtype, Gradients, Params, RandomSequence, Result, Shape};
use compute::{Tape, Tensor, Var, WorkStats};

/// What the kernel classes of matmuls begin with, wide and narrow; what computes them follows.
const MATMUL: &str = "matmul by";
const NARROW_MATMUL: &str = "narrow matmul";

/// One kernel at one size.
pub struct KernelCase {
    /// As the tally calls it.
    kernel: &'static str,
    dtype: Dtype,
    inputs: Vec<KernelInput>,
    run: KernelRun,
    is_smallest: bool,
}

/// A tensor that an op reads: in the case's format, or in f32.
#[derive(Clone, Copy)]
enum KernelInput {
    Own(Shape),
    Single(Shape),
}

type OpFn = fn(&Tape<'_>, &[Var]) -> Result<Var>;

/// An optimizer whose state is made of `M`s.
type OptimizerStepFn<M> =
    fn(&mut [Tensor], &[Option<&Tensor>], &mut [M], AdamW, Option<&GradClip>) -> Result<()>;

#[derive(Clone, Copy)]
enum KernelRun {
    Forward(OpFn),
    /// Of the input with this index.
    Backward(usize, OpFn),
    AdamW,
    AdamW8bit,
    Norm,
    Upload,
    Normal,
    Clear,
}

/// A case with its inputs in memory.
pub struct PreparedKernel<'a> {
    case: &'a KernelCase,
    device: &'a Device,
    inputs: Vec<Var>,
    params: Params,
}

impl fmt::Display for KernelCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.kernel, self.dtype)
    }
}

impl KernelCase {
    /// Whether calls of this kernel are what it is there for.
    pub fn is_for(&self, kernel: &str) -> bool {
        let is_matmul = [MATMUL, NARROW_MATMUL].contains(&self.kernel);
        kernel == self.kernel || is_matmul && kernel.starts_with(self.kernel)
    }

    /// Whether no other case of its kernel and format is smaller.
    pub fn is_smallest(&self) -> bool {
        self.is_smallest
    }

    /// Fills its inputs.
    pub fn prepare<'a>(&'a self, device: &'a Device) -> Result<PreparedKernel<'a>> {
        let even = |shape, dtype| filled(device, shape, dtype);
        let held = |input: &KernelInput| {
            Ok(match *input {
                KernelInput::Own(shape) => even(shape, self.dtype)?.into(),
                KernelInput::Single(shape) => even(shape, Dtype::F32)?.into(),
            })
        };
        let inputs = self.inputs.iter().map(held).collect::<Result<_>>()?;
        Ok(PreparedKernel { case: self, device, inputs, params: Params::default() })
    }
}

impl PreparedKernel<'_> {
    /// Once: what it called.
    pub fn run(&mut self) -> Result<WorkStats> {
        match self.case.run {
            KernelRun::Forward(ops) => {
                let tape = Tape::inference(self.device, &self.params, 0);
                self.timed(|| ops(&tape, &self.inputs).map(drop))
            }
            KernelRun::Backward(leaf, ops) => self.backward(leaf, ops),
            KernelRun::AdamW => self.step(Moments::new, adamw),
            KernelRun::AdamW8bit => self.step(Moments8bit::new, adamw_8bit),
            KernelRun::Norm => {
                let all: Vec<_> = self.inputs.iter().map(|x| Some(x.tensor())).collect();
                self.timed(|| global_norm(&all, self.device).map(drop))
            }
            KernelRun::Upload => {
                let shape = self.inputs[0].shape();
                let numbers = vec![0.5; shape.elements()];
                self.timed(|| self.device.upload_as(shape, &numbers, self.case.dtype).map(drop))
            }
            KernelRun::Normal => {
                let x = &self.inputs[0];
                self.timed(|| {
                    self.device
                        .normal(x.shape(), x.dtype(), 1.0, RandomSequence::new(3, 4))
                        .map(drop)
                })
            }
            KernelRun::Clear => {
                let x = &self.inputs[0];
                self.timed(|| self.device.zeros(x.shape(), x.dtype()).map(drop))
            }
        }
    }

    fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<WorkStats> {
        let before = self.device.work();
        work()?;
        Ok(self.device.work().since(&before))
    }

    /// Backward alone: what forward takes is left out.
    fn backward(&mut self, leaf: usize, ops: OpFn) -> Result<WorkStats> {
        let tensor = self.inputs[leaf].tensor().clone();
        let tape = Tape::training(self.device, &self.params, 0);
        self.inputs[leaf] = tape.leaf(tensor.clone());
        let result = ops(&tape, &self.inputs)?;
        self.inputs[leaf] = tensor.into();
        let gradient = filled(self.device, result.shape(), result.dtype())?;
        let mut gradients = Gradients::default();
        self.timed(|| tape.backward_from(result, gradient, &mut gradients).map(drop))
    }

    fn step<M>(
        &self,
        moments: fn(&Tensor) -> Result<M>,
        step: OptimizerStepFn<M>,
    ) -> Result<WorkStats> {
        let gradients: Vec<&Tensor> = self.inputs.iter().map(Var::tensor).collect();
        let mut state = gradients.iter().map(|x| moments(x)).collect::<Result<Vec<_>>>()?;
        let fresh = |x: &&Tensor| filled(self.device, x.shape(), Dtype::F32);
        let mut params = gradients.iter().map(fresh).collect::<Result<Vec<_>>>()?;
        let gradients: Vec<_> = gradients.into_iter().map(Some).collect();
        // The first step has no moments yet: it is the second that is like all others.
        step(&mut params, &gradients, &mut state, AdamW::default(), None)?;
        let second = AdamW { step: 2, ..AdamW::default() };
        self.timed(|| step(&mut params, &gradients, &mut state, second, None))
    }
}

/// A tensor of one number over and over: kernels have no branches that depend on numbers, and random
/// ones would take longer to make than to be timed.
fn filled(device: &Device, shape: Shape, dtype: Dtype) -> Result<Tensor> {
    device.upload_as(shape, &vec![0.5; shape.elements()], dtype)
}

/// All cases; those of a GPU are larger, where its time is not that of asking for it.
pub fn cases(is_gpu: bool) -> Vec<KernelCase> {
    let mut all = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        adapters(&mut all, dtype, if is_gpu { &GPU_ROWS } else { &ROWS });
        attentions(&mut all, dtype);
        if is_gpu {
            wide_attention(&mut all, dtype, [1, 4352, 3072]);
        }
        passes(&mut all, dtype, if is_gpu { &GPU_TOKENS } else { &TOKENS });
        images(&mut all, dtype, if is_gpu { &GPU_SIDES } else { &SIDES });
    }
    noise(&mut all, if is_gpu { &GPU_SIDES } else { &SIDES });
    optimizers(&mut all);
    let mut seen: Vec<(&str, Dtype)> = Vec::new();
    for case in &mut all {
        case.is_smallest = !seen.contains(&(case.kernel, case.dtype));
        seen.push((case.kernel, case.dtype));
    }
    all
}

/// Rows and width.
const ROWS: [[usize; 2]; 3] = [[128, 64], [512, 512], [1280, 1536]];
const GPU_ROWS: [[usize; 2]; 4] = [[128, 64], [512, 512], [1280, 1536], [4352, 3072]];

/// Of more ranks than the steps' adapters have.
fn adapters(all: &mut Vec<KernelCase>, dtype: Dtype, sizes: &[[usize; 2]]) {
    let linear: OpFn = |tape, v| tape.linear(&v[0], Linear::new(&v[1]));
    let adapted: OpFn = |tape, v| {
        let (down, up) = (&v[2], &v[3]);
        let lora = Some(Lora { down, up, scale: 1.0, dropout: 0.0 });
        tape.linear(&v[0], Linear { lora, ..Linear::new(&v[1]) })
    };
    for (rank, kernel) in [(32, NARROW_MATMUL), (64, MATMUL)] {
        for &[rows, width] in sizes {
            let inputs = [
                KernelInput::Own([rows, width].into()),
                KernelInput::Own([width, width].into()),
                KernelInput::Single([rank, width].into()),
                KernelInput::Single([width, rank].into()),
            ];
            let x_alone = [inputs[0], inputs[2]];
            all.push(case(kernel, dtype, &x_alone, KernelRun::Forward(linear)));
            all.push(case(kernel, dtype, &inputs, KernelRun::Backward(3, adapted)));
            all.push(case(kernel, dtype, &inputs, KernelRun::Backward(2, adapted)));
        }
    }
}

/// Heads that are not as wide as the steps'.
fn attentions(all: &mut Vec<KernelCase>, dtype: Dtype) {
    let narrow: OpFn = |tape, v| {
        let how = Attention::full(v[0].shape().width() / 16, 16);
        tape.attention(&v[0], &v[1], &v[2], how)
    };
    for shape in [[1, 128, 64], [2, 256, 64], [4, 410, 64]] {
        let three = [KernelInput::Own(shape.into()); 3];
        all.push(case("attention of narrow heads", dtype, &three, KernelRun::Forward(narrow)));
        let backward = KernelRun::Backward(0, narrow);
        all.push(case("attention of narrow heads backward", dtype, &three, backward));
    }
    for shape in [[1, 128, 128], [1, 512, 512], [1, 1024, 1024]] {
        wide_attention(all, dtype, shape);
    }
}

fn wide_attention(all: &mut Vec<KernelCase>, dtype: Dtype, shape: [usize; 3]) {
    let wide: OpFn = |tape, v| {
        let how = Attention::full(v[0].shape().width() / 128, 128);
        tape.attention(&v[0], &v[1], &v[2], how)
    };
    let three = [KernelInput::Own(shape.into()); 3];
    all.push(case("attention of wide heads", dtype, &three, KernelRun::Forward(wide)));
    all.push(case("attention of wide heads backward", dtype, &three, KernelRun::Backward(0, wide)));
}

/// Samples, tokens and width.
const TOKENS: [[usize; 3]; 4] = [[1, 64, 64], [2, 256, 64], [2, 256, 512], [1, 2048, 1536]];
const GPU_TOKENS: [[usize; 3]; 4] = [[1, 64, 64], [2, 256, 512], [1, 2048, 1536], [4, 4096, 1536]];

/// Ops whose time is that of reading and writing memory.
fn passes(all: &mut Vec<KernelCase>, dtype: Dtype, sizes: &[[usize; 3]]) {
    let both: [(&'static str, &'static str, OpFn); 4] = [
        ("add", "", |tape, v| tape.add(&v[0], &v[1])),
        ("activate", "", |tape, v| tape.activate(&v[0], Activation::GeluTanh)),
        ("glu", "glu backward", |tape, v| tape.glu(&v[0], &v[1], Activation::Silu)),
        ("rms_norm", "rms_norm backward", |tape, v| tape.rms_norm(&v[0], None, 1e-6)),
    ];
    let copied: OpFn = |tape, v| tape.concat_tokens(&[&v[0], &v[1]]);
    // Read twice, so that one gradient is added to the other.
    let shared: OpFn = |tape, v| tape.add(&v[0], &v[0]);
    for shape in sizes {
        let inputs = [KernelInput::Own((*shape).into()), KernelInput::Own((*shape).into())];
        let mut push = |kernel, run| all.push(case(kernel, dtype, &inputs, run));
        for (forward, backward, ops) in both {
            push(forward, KernelRun::Forward(ops));
            if !backward.is_empty() {
                push(backward, KernelRun::Backward(0, ops));
            }
        }
        push("accumulate", KernelRun::Backward(0, shared));
        push("upload", KernelRun::Upload);
        push("normal", KernelRun::Normal);
        push("clear", KernelRun::Clear);
        // Of one sample no gradient is copied.
        let [samples, tokens, width] = *shape;
        let halves = [KernelInput::Own([2 * samples, tokens / 2, width].into()); 2];
        all.push(case("copy_tokens", dtype, &halves, KernelRun::Forward(copied)));
        all.push(case("copy_tokens backward", dtype, &halves, KernelRun::Backward(0, copied)));
    }
}

/// Pixels along a side.
const SIDES: [usize; 3] = [8, 32, 96];
const GPU_SIDES: [usize; 4] = [8, 32, 96, 384];

/// What autoencoders are made of, and the way in and out of a transformer.
fn images(all: &mut Vec<KernelCase>, dtype: Dtype, sides: &[usize]) {
    let patches: OpFn = |tape, v| tape.patchify(&v[0], 2, PatchOrder::ChannelsLast);
    let group_norm: OpFn = |tape, v| {
        let (weight, bias) = (v[1].tensor(), v[2].tensor());
        tape.group_norm(&v[0], 32, weight, bias, 1e-6, Activation::Silu)
    };
    let channel_norm: OpFn =
        |tape, v| tape.channel_rms_norm(&v[0], v[1].tensor(), Activation::Silu);
    let convolution: OpFn = |tape, v| {
        let weight = v[3].tensor();
        tape.conv2d(&v[0], Conv2d { padding: [1; 4], ..Conv2d::new(weight) })
    };
    for &side in sides {
        let x = KernelInput::Own([1, 128, side, side].into());
        let vector = KernelInput::Single([128].into());
        let inputs = [x, vector, vector, KernelInput::Own([128, 128, 3, 3].into())];
        let mut push =
            |kernel, ops| all.push(case(kernel, dtype, &inputs, KernelRun::Forward(ops)));
        push("patchify", patches);
        push("group_norm", group_norm);
        push("channel_rms_norm", channel_norm);
        if dtype == Dtype::F32 {
            push("winograd input", convolution);
        } else {
            push("conv2d columns", convolution);
        }
    }
}

/// Noise for training, which is f32 but for what the model sees.
fn noise(all: &mut Vec<KernelCase>, sides: &[usize]) {
    let sample: OpFn = |_, v| {
        let spread = LatentStd { std: v[1].tensor(), sequences: &[RandomSequence::new(3, 4)] };
        let channels = LatentScaling { shift: v[2].tensor(), scale: v[2].tensor() };
        Ok(sample_latents(v[0].tensor().clone(), Some(spread), channels)?.into())
    };
    let add: OpFn = |_, v| {
        let (latents, sigmas) = (v[0].tensor().clone(), v[3].tensor());
        Ok(add_noise(latents, sigmas, &[RandomSequence::new(3, 4)], Dtype::Bf16)?.noisy.into())
    };
    for &side in sides {
        let latents = [1, 16, side, side].into();
        let inputs = [latents, latents, [16].into(), [1].into()].map(KernelInput::Single);
        all.push(case("sample_latents", Dtype::F32, &inputs, KernelRun::Forward(sample)));
        all.push(case("add_noise", Dtype::F32, &inputs, KernelRun::Forward(add)));
    }
}

/// Adapters of a tiny model, of a middling one, and of a large one.
fn optimizers(all: &mut Vec<KernelCase>) {
    for [n_tensors, numbers] in [[16, 1024], [64, 8192], [96, 49152]] {
        let inputs = vec![KernelInput::Single([numbers].into()); n_tensors];
        for (kernel, run) in [
            ("adamw", KernelRun::AdamW),
            ("adamw_8bit", KernelRun::AdamW8bit),
            ("global_norm", KernelRun::Norm),
        ] {
            all.push(case(kernel, Dtype::F32, &inputs, run));
        }
    }
}

fn case(kernel: &'static str, dtype: Dtype, inputs: &[KernelInput], run: KernelRun) -> KernelCase {
    KernelCase { kernel, dtype, inputs: inputs.to_vec(), run, is_smallest: false }
}
