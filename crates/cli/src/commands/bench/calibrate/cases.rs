//! What is timed: for each kernel that a training step calls a few sizes, in each format. Kernels
//! that others are measured beside come first.

use std::fmt;
use std::time::{Duration, Instant};

use compute::ops::{
    Activation, AdamW, Attention, Clip, Conv2d, Linear, Lora, Moments, Moments8, PatchOrder,
    QkNormRope, Weight, adamw, adamw_8bit, global_norm,
};
use compute::{Device, Dtype, Gradients, Params, Quantisation, Quantised, Result, Shape};
use compute::{Tape, Tensor, Var, Work};

/// What the names of wide products begin with; by which unit they are done is up to the engine.
const PRODUCT: &str = "product by";

/// One kernel at one size.
pub struct Case {
    /// As the tally calls it.
    pub kernel: &'static str,
    dtype: Dtype,
    inputs: Vec<Input>,
    run: Run,
    is_smallest: bool,
}

/// A tensor that an op reads: in the case's format, in f32, or a matrix in few bits.
#[derive(Clone, Copy)]
enum Input {
    Own(Shape),
    Single(Shape),
    Quantised(Shape, Quantisation),
}

type Ops = fn(&Tape<'_>, &[Held]) -> Result<Var>;

/// An optimizer whose state is made of `M`s.
type Step<M> = fn(&mut [Tensor], &[Option<&Tensor>], &mut [M], AdamW, Option<&Clip>) -> Result<()>;

#[derive(Clone, Copy)]
enum Run {
    Forward(Ops),
    /// Of the input with this index.
    Backward(usize, Ops),
    AdamW,
    AdamW8bit,
    Norm,
    Upload,
    Normal,
    Clear,
}

/// An input in memory.
pub enum Held {
    Dense(Var),
    Quantised(Quantised),
}

impl Held {
    fn var(&self) -> &Var {
        match self {
            Self::Dense(var) => var,
            Self::Quantised(_) => unreachable!("only linear layers have quantised inputs"),
        }
    }

    fn weight(&self) -> Weight<'_> {
        match self {
            Self::Dense(var) => var.into(),
            Self::Quantised(quantised) => quantised.into(),
        }
    }
}

/// A case with its inputs in memory.
pub struct Ready<'a> {
    case: &'a Case,
    device: &'a Device,
    inputs: Vec<Held>,
    params: Params,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.kernel, self.dtype)
    }
}

impl Case {
    /// Whether calls of this kernel are what it is there for.
    pub fn is_for(&self, kernel: &str) -> bool {
        kernel == self.kernel || self.kernel == PRODUCT && kernel.starts_with(PRODUCT)
    }

    /// Whether no other case of its kernel and format is smaller.
    pub fn is_smallest(&self) -> bool {
        self.is_smallest
    }

    /// Fills its inputs.
    pub fn prepare<'a>(&'a self, device: &'a Device) -> Result<Ready<'a>> {
        let even = |shape, dtype| even(device, shape, dtype);
        let held = |input: &Input| {
            Ok(match *input {
                Input::Own(shape) => Held::Dense(even(shape, self.dtype)?.into()),
                Input::Single(shape) => Held::Dense(even(shape, Dtype::F32)?.into()),
                Input::Quantised(shape, how) => {
                    Held::Quantised(Quantised::new(&even(shape, self.dtype)?, how)?)
                }
            })
        };
        let inputs = self.inputs.iter().map(held).collect::<Result<_>>()?;
        Ok(Ready { case: self, device, inputs, params: Params::default() })
    }
}

impl Ready<'_> {
    /// Once: how long it took, and what it called.
    pub fn run(&mut self) -> Result<(Duration, Work)> {
        match self.case.run {
            Run::Forward(ops) => {
                let tape = Tape::inference(self.device, &self.params, 0);
                self.timed(|| ops(&tape, &self.inputs).map(drop))
            }
            Run::Backward(leaf, ops) => self.backward(leaf, ops),
            Run::AdamW => self.step(Moments::new, adamw),
            Run::AdamW8bit => self.step(Moments8::new, adamw_8bit),
            Run::Norm => {
                let all: Vec<_> = self.inputs.iter().map(|x| Some(x.var().tensor())).collect();
                self.timed(|| global_norm(&all, self.device).map(drop))
            }
            Run::Upload => {
                let shape = self.inputs[0].var().shape();
                let numbers = vec![0.5; shape.elements()];
                self.timed(|| self.device.upload_as(shape, &numbers, self.case.dtype).map(drop))
            }
            Run::Normal => {
                let x = self.inputs[0].var();
                self.timed(|| self.device.normal(x.shape(), x.dtype(), 1.0, (3, 4)).map(drop))
            }
            Run::Clear => {
                let x = self.inputs[0].var();
                self.timed(|| self.device.zeros(x.shape(), x.dtype()).map(drop))
            }
        }
    }

    fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<(Duration, Work)> {
        let before = self.device.work();
        self.device.synchronise()?;
        let begun = Instant::now();
        work()?;
        self.device.synchronise()?;
        let took = begun.elapsed();
        Ok((took, self.device.work().since(&before)))
    }

    /// Backward alone: what forward takes is left out.
    fn backward(&mut self, leaf: usize, ops: Ops) -> Result<(Duration, Work)> {
        let tensor = self.inputs[leaf].var().tensor().clone();
        let tape = Tape::training(self.device, &self.params, 0);
        self.inputs[leaf] = Held::Dense(tape.leaf(tensor.clone()));
        let result = ops(&tape, &self.inputs)?;
        self.inputs[leaf] = Held::Dense(tensor.into());
        let gradient = even(self.device, result.shape(), result.dtype())?;
        let mut gradients = Gradients::default();
        self.timed(|| tape.backward_from(result, gradient, &mut gradients).map(drop))
    }

    fn step<M>(
        &self,
        moments: fn(&Tensor) -> Result<M>,
        step: Step<M>,
    ) -> Result<(Duration, Work)> {
        let gradients: Vec<&Tensor> = self.inputs.iter().map(|x| x.var().tensor()).collect();
        let mut state = gradients.iter().map(|x| moments(x)).collect::<Result<Vec<_>>>()?;
        let fresh = |x: &&Tensor| even(self.device, x.shape(), Dtype::F32);
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
fn even(device: &Device, shape: Shape, dtype: Dtype) -> Result<Tensor> {
    device.upload_as(shape, &vec![0.5; shape.elements()], dtype)
}

const FORMATS: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];
const FEW_BITS: [Quantisation; 3] = [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8];

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in FORMATS {
        products(&mut all, dtype);
        // Chosen: bf16 stands in for all else in f16, which nobody has compared; it would take a
        // third more time.
        if dtype == Dtype::F16 {
            continue;
        }
        narrow_products(&mut all, dtype);
        attentions(&mut all, dtype);
        passes(&mut all, dtype);
        pictures(&mut all, dtype);
    }
    optimizers(&mut all);
    let mut seen: Vec<(&str, Dtype)> = Vec::new();
    for case in &mut all {
        case.is_smallest = !seen.contains(&(case.kernel, case.dtype));
        seen.push((case.kernel, case.dtype));
    }
    all
}

/// Rows, inputs and outputs: layers of models from 64 to 1536 wide. Chosen: at least four of each
/// way to multiply, as far apart as layers are.
const LAYERS: [[usize; 3]; 10] = [
    [64, 64, 64],
    [256, 64, 256],
    [128, 256, 512],
    [256, 512, 512],
    [512, 512, 512],
    [333, 512, 2048],
    [1024, 512, 2048],
    [1024, 1536, 1536],
    [256, 1536, 6144],
    [1024, 1536, 6144],
];

fn products(all: &mut Vec<Case>, dtype: Dtype) {
    let linear: Ops = |tape, v| tape.linear(v[0].var(), Linear::new(v[1].weight()));
    for (index, [rows, inputs, outputs]) in LAYERS.into_iter().enumerate() {
        let x = Input::Own([rows, inputs].into());
        let shape = [outputs, inputs].into();
        let mut add = |weight| {
            all.push(case(PRODUCT, dtype, &[x, weight], Run::Forward(linear)));
        };
        add(Input::Own(shape));
        // Half of the sizes tell how much longer reading few bits takes.
        for how in FEW_BITS.into_iter().filter(|_| index % 2 == 1) {
            add(Input::Quantised(shape, how));
        }
    }
    let gelu: Ops = |tape, v| {
        let activation = Activation::GeluTanh;
        tape.linear(v[0].var(), Linear { activation, ..Linear::new(v[1].weight()) })
    };
    for [rows, inputs, outputs] in [[256, 64, 256], [512, 512, 2048], [1024, 1536, 6144]] {
        let both = [Input::Own([rows, inputs].into()), Input::Own([outputs, inputs].into())];
        all.push(case("activate in a product", dtype, &both, Run::Forward(gelu)));
    }
}

/// Adapters, and layers that see one vector per picture.
fn narrow_products(all: &mut Vec<Case>, dtype: Dtype) {
    let linear: Ops = |tape, v| tape.linear(v[0].var(), Linear::new(v[1].weight()));
    for [samples, inputs, outputs] in [[2, 64, 384], [2, 512, 3072], [4, 1536, 9216]] {
        let x = Input::Own([samples, inputs].into());
        let weight = Input::Own([outputs, inputs].into());
        all.push(case("product of few rows", dtype, &[x, weight], Run::Forward(linear)));
    }
    let adapted: Ops = |tape, v| {
        let (down, up) = (v[2].var(), v[3].var());
        let lora = Some(Lora { down, up, scale: 1.0, dropout: 0.0 });
        tape.linear(v[0].var(), Linear { lora, ..Linear::new(v[1].weight()) })
    };
    for (rank, kernels) in [
        (16, ["product of few columns", "product of few rows"]),
        (32, ["narrow product by tiles", "narrow product by tiles"]),
    ] {
        for [rows, width] in [[64, 64], [512, 64], [512, 512], [1280, 512], [1280, 1536]] {
            let inputs = [
                Input::Own([rows, width].into()),
                Input::Own([width, width].into()),
                Input::Single([rank, width].into()),
                Input::Single([width, rank].into()),
            ];
            let x_alone = [inputs[0], inputs[2]];
            all.push(case(kernels[0], dtype, &x_alone, Run::Forward(linear)));
            all.push(case(kernels[0], dtype, &inputs, Run::Backward(3, adapted)));
            all.push(case(kernels[1], dtype, &inputs, Run::Backward(2, adapted)));
        }
    }
}

fn attentions(all: &mut Vec<Case>, dtype: Dtype) {
    let attention: Ops = |tape, v| {
        let width = v[0].var().shape().width();
        // Tiny models have narrow heads.
        let head = if width > 64 { 64 } else { 16 };
        let how = Attention::full(width / head, head);
        tape.attention(v[0].var(), v[1].var(), v[2].var(), how)
    };
    for shape in [[1, 128, 64], [4, 192, 64], [1, 512, 256], [2, 512, 512], [1, 1536, 1024]] {
        let three = [Input::Own(shape.into()); 3];
        all.push(case("attention", dtype, &three, Run::Forward(attention)));
        all.push(case("attention backward", dtype, &three, Run::Backward(0, attention)));
    }
}

/// Samples, tokens and width.
const TOKENS: [[usize; 3]; 4] = [[1, 64, 64], [2, 256, 64], [2, 256, 512], [1, 2048, 1536]];

/// Ops whose time is that of reading and writing memory.
fn passes(all: &mut Vec<Case>, dtype: Dtype) {
    let both: [(&'static str, &'static str, Ops); 7] = [
        ("add", "", |tape, v| tape.add(v[0].var(), v[1].var())),
        ("activate", "activate backward", |tape, v| {
            tape.activate(v[0].var(), Activation::GeluTanh)
        }),
        ("glu", "glu backward", |tape, v| tape.glu(v[0].var(), v[1].var(), Activation::Silu)),
        ("norm_modulate", "norm_modulate backward", |tape, v| {
            let vectors = v[2].var();
            tape.norm_modulate(v[0].var(), vectors.chunk(0), vectors.chunk(1), 1e-6)
        }),
        ("rms_norm", "rms_norm backward", |tape, v| tape.rms_norm(v[0].var(), None, 1e-6)),
        ("qk_norm_rope", "qk_norm_rope backward", |tape, v| {
            let x = v[0].var();
            let norm = Some((v[3].var(), 1e-6));
            tape.qk_norm_rope(x, QkNormRope { n_heads: x.shape().width() / 64, norm, rope: None })
        }),
        ("mse", "mse backward", |tape, v| tape.mse(v[0].var(), v[1].var().tensor(), None, None)),
    ];
    let gated: Ops = |tape, v| tape.gated_add(v[0].var(), v[2].var().chunk(0), v[1].var());
    let copied: Ops = |tape, v| tape.concat_tokens(&[v[0].var(), v[1].var()]);
    // Read twice, so that one gradient is added to the other.
    let shared: Ops = |tape, v| tape.add(v[0].var(), v[0].var());
    for shape in TOKENS {
        let [samples, _, width] = shape;
        let inputs = [
            Input::Own(shape.into()),
            Input::Own(shape.into()),
            Input::Own([samples, 2 * width].into()),
            Input::Single([64].into()),
        ];
        let mut push = |kernel, run| all.push(case(kernel, dtype, &inputs, run));
        for (forward, backward, ops) in both {
            push(forward, Run::Forward(ops));
            if !backward.is_empty() {
                push(backward, Run::Backward(0, ops));
            }
        }
        push("gated_add", Run::Forward(gated));
        push("gated_add backward", Run::Backward(1, gated));
        push("copy_tokens", Run::Forward(copied));
        push("copy_tokens backward", Run::Backward(0, copied));
        push("accumulate", Run::Backward(0, shared));
        push("upload", Run::Upload);
        push("normal", Run::Normal);
        push("clear", Run::Clear);
    }
}

/// What autoencoders are made of, and the way in and out of a transformer.
fn pictures(all: &mut Vec<Case>, dtype: Dtype) {
    let patches: Ops = |tape, v| tape.patchify(v[0].var(), 2, PatchOrder::ChannelsLast);
    let group_norm: Ops = |tape, v| {
        let (weight, bias) = (v[1].var().tensor(), v[2].var().tensor());
        tape.group_norm(v[0].var(), 32, weight, bias, 1e-6, Activation::Silu)
    };
    let convolution: Ops = |tape, v| {
        let weight = v[3].var().tensor();
        tape.conv2d(v[0].var(), Conv2d { padding: [1; 4], ..Conv2d::new(weight) })
    };
    for side in [8, 32, 96] {
        let x = Input::Own([1, 128, side, side].into());
        let vector = Input::Single([128].into());
        let inputs = [x, vector, vector, Input::Own([128, 128, 3, 3].into())];
        let mut push = |kernel, ops| all.push(case(kernel, dtype, &inputs, Run::Forward(ops)));
        push("patchify", patches);
        push("group_norm", group_norm);
        if dtype == Dtype::F32 {
            push("winograd seen", convolution);
        } else {
            push("conv2d columns", convolution);
        }
    }
}

/// Adapters of a tiny model, of a middling one, and of a large one.
fn optimizers(all: &mut Vec<Case>) {
    for [n_tensors, numbers] in [[16, 1024], [64, 8192], [96, 49152]] {
        let inputs = vec![Input::Single([numbers].into()); n_tensors];
        for (kernel, run) in
            [("adamw", Run::AdamW), ("adamw_8bit", Run::AdamW8bit), ("global_norm", Run::Norm)]
        {
            all.push(case(kernel, Dtype::F32, &inputs, run));
        }
    }
}

fn case(kernel: &'static str, dtype: Dtype, inputs: &[Input], run: Run) -> Case {
    Case { kernel, dtype, inputs: inputs.to_vec(), run, is_smallest: false }
}
