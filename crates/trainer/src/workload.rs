//! The benchmark: training adapters on a stack of transformer blocks, small enough to read on one
//! page and shaped like the models people train. The same job exists for PyTorch, so that figures
//! can be compared, and as recorded numbers, so that results can.
//!
//! Shapes: S samples, N tokens, D width, R rank.

use compute::ops::{Activation, AdamW, Attention, Linear, Lora, Moments, QkNormRope, adamw};
use compute::{Device, Dtype, Gradients, ParamKey, Params, Quantisation, Quantised, Result};
use compute::{Shape, Tag, Tape, Tensor, Var};

use crate::model::build::Held;
use crate::model::recompute::Recompute;

/// How large the job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// What it is called on the command line.
    pub name: &'static str,
    /// D; heads are 64 wide.
    pub width: usize,
    /// How many blocks.
    pub n_blocks: usize,
    /// N
    pub tokens: usize,
    /// S
    pub samples: usize,
}

/// The sizes that figures are published for.
pub const CONFIGS: [Config; 6] = [
    Config { name: "cpu-tiny", width: 128, n_blocks: 2, tokens: 64, samples: 2 },
    Config { name: "cpu-small", width: 512, n_blocks: 8, tokens: 320, samples: 4 },
    Config { name: "cpu-mid", width: 1024, n_blocks: 4, tokens: 1024, samples: 1 },
    Config { name: "gpu-sd3-b1", width: 1536, n_blocks: 24, tokens: 4352, samples: 1 },
    Config { name: "gpu-sd3-b4", width: 1536, n_blocks: 24, tokens: 4352, samples: 4 },
    Config { name: "gpu-flux-b1", width: 3072, n_blocks: 8, tokens: 4608, samples: 1 },
];

/// What is trained, and how.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// How large it is.
    pub config: Config,
    /// Format of activations, and of weights that are not quantised.
    pub dtype: Dtype,
    /// How weights are quantised, if they are.
    pub base: Option<Quantisation>,
    /// What is computed twice.
    pub recompute: Recompute,
}

const HEAD: usize = 64;
const RANK: usize = 16;
const ALPHA: f32 = 16.0;
const EPSILON: f32 = 1e-6;
const LEARNING_RATE: f32 = 1e-4;
/// PyTorch's default, as in its twin.
const WEIGHT_DECAY: f32 = 0.01;

/// Where the first numbers of a tensor come from: its name, shape and format, and the deviation of
/// the random numbers it would have.
pub trait Numbers {
    /// Makes the tensor.
    fn tensor(&mut self, name: &str, shape: Shape, dtype: Dtype, deviation: f32) -> Result<Tensor>;
}

/// Random numbers, the same for the same seed.
pub struct Random<'d> {
    device: &'d Device,
    seed: u64,
    stream: u64,
}

impl<'d> Random<'d> {
    /// From a seed.
    pub fn new(device: &'d Device, seed: u64) -> Self {
        Self { device, seed, stream: 0 }
    }
}

impl Numbers for Random<'_> {
    fn tensor(&mut self, name: &str, shape: Shape, dtype: Dtype, deviation: f32) -> Result<Tensor> {
        self.stream += 1;
        match name.rsplit('.').next() {
            Some("qn" | "kn") => self.device.upload(shape, &vec![1.0f32; shape.elements()]),
            _ if deviation == 0.0 => self.device.zeros(shape, dtype),
            _ => self.device.normal(shape, dtype, deviation, (self.seed, self.stream)),
        }
    }
}

/// A job with everything it holds between steps.
pub struct Workload {
    config: Config,
    recompute: Recompute,
    device: Device,
    blocks: Vec<Block>,
    adapters: Vec<(String, ParamKey)>,
    params: Params,
    moments: Vec<Moments>,
    gradients: Gradients,
    /// [S, N, D]
    x: Tensor,
    /// [S, D]
    condition: Tensor,
    /// [S, N, D]
    target: Tensor,
    steps: u64,
}

impl Workload {
    /// Takes all memory that lives as long as the job, and fills it.
    pub fn new(device: &Device, job: Job, numbers: &mut dyn Numbers) -> Result<Self> {
        let Job { config, dtype, recompute, .. } = job;
        let Config { width, tokens, samples, n_blocks, .. } = config;
        let (params, adapters, prefix) = (Params::default(), Vec::new(), String::new());
        let mut make = Maker { device, numbers: &mut *numbers, job, params, adapters, prefix };
        let mut blocks = Vec::with_capacity(n_blocks);
        for index in 0..n_blocks {
            make.prefix = format!("blocks.{index}");
            blocks.push(Block::new(&mut make, width)?);
        }
        let Maker { params, adapters, .. } = make;
        let moments = params.values().iter().map(Moments::new).collect::<Result<_>>()?;
        let gradients = Gradients::reserved(device, &params)?;
        let mut data = |name, shape: Shape| {
            device.tagged(Tag::Data, || numbers.tensor(name, shape, dtype, 1.0))
        };
        Ok(Self {
            x: data("x", [samples, tokens, width].into())?,
            condition: data("c", [samples, width].into())?,
            target: data("target", [samples, tokens, width].into())?,
            config,
            recompute,
            device: device.clone(),
            blocks,
            adapters,
            params,
            moments,
            gradients,
            steps: 0,
        })
    }

    /// Forward, backward and update. Returns the loss, or nothing on a device without data.
    pub fn step(&mut self) -> Result<Option<f32>> {
        let loss = self.gradients_of_loss()?;
        self.update()?;
        Ok(loss)
    }

    /// Forward and backward: gradients are there afterwards.
    pub fn gradients_of_loss(&mut self) -> Result<Option<f32>> {
        self.gradients.reset();
        let tape = Tape::training(&self.device, &self.params, 0);
        let out = forward(&tape, &self.blocks, self.recompute, &self.x, &self.condition)?;
        let loss = tape.mse(&out, &self.target, None, None)?;
        drop(out);
        let number = loss.tensor().clone();
        tape.backward(&loss, &mut self.gradients)?;
        if self.device.is_meta() {
            return Ok(None);
        }
        // Read last, so that a card has work while the host prepares more.
        Ok(Some(number.read::<f32>()?[0]))
    }

    /// The stack's output for the job's input.
    pub fn output(&self) -> Result<Tensor> {
        let tape = Tape::inference(&self.device, &self.params, 0);
        let out = forward(&tape, &self.blocks, Recompute::None, &self.x, &self.condition)?;
        Ok(out.into_tensor())
    }

    fn update(&mut self) -> Result<()> {
        self.steps += 1;
        let n_params = self.params.values().len();
        let gradients = self.gradients.all(n_params);
        let how = AdamW {
            learning_rate: LEARNING_RATE,
            weight_decay: WEIGHT_DECAY,
            step: self.steps,
            ..AdamW::default()
        };
        adamw(self.params.values_mut()?, &gradients, &mut self.moments, how, None)
    }

    /// The job's sizes.
    pub fn config(&self) -> Config {
        self.config
    }

    /// Every adapter matrix by name, with its gradient if there is one.
    pub fn adapters(&self) -> Vec<(String, &Tensor, Option<&Tensor>)> {
        let of = |(name, key): &(String, ParamKey)| {
            (name.clone(), self.params.get(*key), self.gradients.get(*key))
        };
        self.adapters.iter().map(of).collect()
    }
}

fn forward<'m>(
    tape: &Tape<'m>,
    blocks: &'m [Block],
    recompute: Recompute,
    x: &Tensor,
    condition: &Tensor,
) -> Result<Var> {
    let mut x = Var::from(x.clone());
    let condition = tape.activate(&condition.clone().into(), Activation::Silu)?;
    for (index, block) in blocks.iter().enumerate() {
        [x] = if recompute.does(index) {
            tape.recompute(&[&x, &condition], move |tape, inputs| {
                Ok([block.forward(tape, &inputs[0], &inputs[1], false)?])
            })?
        } else {
            [block.forward(tape, &x, &condition, recompute == Recompute::Queries)?]
        };
    }
    Ok(x)
}

/// A frozen linear layer, perhaps with an adapter.
struct Layer {
    weight: Held,
    bias: Var,
    adapter: Option<[ParamKey; 2]>,
}

impl Layer {
    fn forward(&self, tape: &Tape<'_>, x: &Var, activation: Activation) -> Result<Var> {
        self.compute(tape, x, Linear { activation, ..Linear::new(&self.weight) })
    }

    fn compute(&self, tape: &Tape<'_>, x: &Var, layer: Linear<'_>) -> Result<Var> {
        let layer = Linear { bias: Some(&self.bias), ..layer };
        let Some([down, up]) = self.adapter else { return tape.linear(x, layer) };
        let (down, up) = (tape.param(down), tape.param(up));
        let lora = Lora { down: &down, up: &up, scale: ALPHA / RANK as f32, dropout: 0.0 };
        tape.linear(x, Linear { lora: Some(lora), ..layer })
    }
}

struct Block {
    modulation: Layer,
    q: Layer,
    k: Layer,
    v: Layer,
    out: Layer,
    q_norm: Var,
    k_norm: Var,
    up: Layer,
    down: Layer,
}

impl Block {
    fn new(make: &mut Maker<'_>, width: usize) -> Result<Self> {
        Ok(Self {
            modulation: make.layer("mod", width, 6 * width)?,
            q: make.adapted("q", width)?,
            k: make.adapted("k", width)?,
            v: make.adapted("v", width)?,
            out: make.adapted("o", width)?,
            q_norm: make.weight("qn", [HEAD].into(), Dtype::F32, 1.0)?,
            k_norm: make.weight("kn", [HEAD].into(), Dtype::F32, 1.0)?,
            up: make.layer("up", width, 4 * width)?,
            down: make.layer("down", 4 * width, width)?,
        })
    }

    /// x [S, N, D], condition [S, D]
    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        condition: &Var,
        remakes_queries: bool,
    ) -> Result<Var> {
        let n_heads = x.shape().width() / HEAD;
        let per_head = |x: &Var, weight| {
            tape.qk_norm_rope(x, QkNormRope { n_heads, norm: Some((weight, EPSILON)), rope: None })
        };
        let vectors = self.modulation.forward(tape, condition, Activation::None)?;
        let h = tape.norm_modulate(x, vectors.chunk(1), vectors.chunk(0), EPSILON)?;
        let q = Linear { is_remade: remakes_queries, ..Linear::new(&self.q.weight) };
        let q = per_head(&self.q.compute(tape, &h, q)?, &self.q_norm)?;
        let k = per_head(&self.k.forward(tape, &h, Activation::None)?, &self.k_norm)?;
        let v = self.v.forward(tape, &h, Activation::None)?;
        drop(h);
        let attended = tape.attention(&q, &k, &v, Attention::full(n_heads, HEAD))?;
        drop((q, k, v));
        let x = tape.gated_add(
            x,
            vectors.chunk(2),
            &self.out.forward(tape, &attended, Activation::None)?,
        )?;
        drop(attended);
        let h = tape.norm_modulate(&x, vectors.chunk(4), vectors.chunk(3), EPSILON)?;
        let inner = self.up.forward(tape, &h, Activation::GeluTanh)?;
        drop(h);
        let y = self.down.forward(tape, &inner, Activation::None)?;
        drop(inner);
        tape.gated_add(&x, vectors.chunk(5), &y)
    }
}

/// Makes the tensors of blocks.
struct Maker<'a> {
    device: &'a Device,
    numbers: &'a mut dyn Numbers,
    job: Job,
    params: Params,
    adapters: Vec<(String, ParamKey)>,
    /// What names begin with.
    prefix: String,
}

impl Maker<'_> {
    fn weight(&mut self, name: &str, shape: Shape, dtype: Dtype, deviation: f32) -> Result<Var> {
        let name = format!("{}.{name}", self.prefix);
        let make = || self.numbers.tensor(&name, shape, dtype, deviation);
        self.device.tagged(Tag::Weights, make).map(Var::from)
    }

    fn layer(&mut self, name: &str, inputs: usize, outputs: usize) -> Result<Layer> {
        let shape = [outputs, inputs].into();
        let dense = self.weight(&format!("{name}.weight"), shape, self.job.dtype, 0.02)?;
        let weight = match self.job.base {
            None => Held::Dense(dense),
            Some(how) => {
                let quantise = || Quantised::new(dense.tensor(), how);
                Held::Quantised(self.device.tagged(Tag::Weights, quantise)?)
            }
        };
        Ok(Layer {
            weight,
            bias: self.weight(&format!("{name}.bias"), [outputs].into(), Dtype::F32, 0.0)?,
            adapter: None,
        })
    }

    fn adapted(&mut self, name: &str, width: usize) -> Result<Layer> {
        let layer = self.layer(name, width, width)?;
        let down = self.param(&format!("{name}.A"), [RANK, width].into(), 1.0 / 16.0)?;
        let up = self.param(&format!("{name}.B"), [width, RANK].into(), 0.0)?;
        Ok(Layer { adapter: Some([down, up]), ..layer })
    }

    fn param(&mut self, name: &str, shape: Shape, deviation: f32) -> Result<ParamKey> {
        let name = format!("{}.{name}", self.prefix);
        let make = || self.numbers.tensor(&name, shape, Dtype::F32, deviation);
        let key = self.params.add(self.device.tagged(Tag::Parameters, make)?);
        self.adapters.push((name, key));
        Ok(key)
    }
}
