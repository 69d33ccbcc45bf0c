//! The benchmark: LoRA training on a stack of transformer blocks, short enough to read at once and shaped like
//! the models people train. The same job exists for PyTorch, to compare speed, and as recorded outputs, to
//! compare results.
//!
//! Shapes: S samples, N tokens, D width, R rank.

use compute::ops::{Activation, AdamW, Attention, Linear, Lora, Moments, QkNormRope, adamw};
use compute::{BlockSwap, RandomSequence, Shape, Tag, Tape, Tensor, Var};
use compute::{Device, Dtype, Gradients, ParamKey, Params, Quantisation, Quantised, Result};

use crate::bench::cases::micro_batches;
use crate::model::build::WeightTensor;
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;

/// How large the job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkloadConfig {
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
pub const CONFIGS: [WorkloadConfig; 6] = [
    WorkloadConfig { name: "cpu-tiny", width: 128, n_blocks: 2, tokens: 64, samples: 2 },
    WorkloadConfig { name: "cpu-small", width: 512, n_blocks: 8, tokens: 320, samples: 4 },
    WorkloadConfig { name: "cpu-mid", width: 1024, n_blocks: 4, tokens: 1024, samples: 1 },
    WorkloadConfig { name: "gpu-sd3-b1", width: 1536, n_blocks: 24, tokens: 4352, samples: 1 },
    WorkloadConfig { name: "gpu-sd3-b4", width: 1536, n_blocks: 24, tokens: 4352, samples: 4 },
    WorkloadConfig { name: "gpu-flux-b1", width: 3072, n_blocks: 8, tokens: 4608, samples: 1 },
];

/// What is trained, and how.
#[derive(Clone, Copy, Debug)]
pub struct WorkloadJob {
    /// How large it is.
    pub config: WorkloadConfig,
    /// Format of activations, and of weights that are not quantised.
    pub dtype: Dtype,
    /// How weights are quantised, if they are.
    pub base: Option<Quantisation>,
    /// Whether those of fp8 are multiplied so.
    pub multiplies_fp8: bool,
    /// What is recomputed.
    pub recompute: Recompute,
    /// Samples of a micro-batch; gradients are accumulated.
    pub micro_batch: usize,
    /// Block offloading.
    pub offload: Offload,
}

impl WorkloadJob {
    /// One micro-batch, no offloading, no gradient checkpointing, nothing quantised.
    pub const fn plain(config: WorkloadConfig, dtype: Dtype) -> Self {
        let (recompute, offload) = (Recompute::None, Offload::None);
        let (base, multiplies_fp8, micro_batch) = (None, false, config.samples);
        Self { config, dtype, base, multiplies_fp8, recompute, micro_batch, offload }
    }
}

const HEAD: usize = 64;
const RANK: usize = 16;
const ALPHA: f32 = 16.0;
const EPSILON: f32 = 1e-6;
const LEARNING_RATE: f32 = 1e-4;
/// PyTorch's default, as in its twin.
const WEIGHT_DECAY: f32 = 0.01;

/// Where initial values come from, by a tensor's name, shape and format, and the standard std of random
/// ones.
pub trait WeightInit {
    /// Makes the tensor.
    fn tensor(&mut self, name: &str, shape: Shape, dtype: Dtype, std: f32) -> Result<Tensor>;
}

/// Random numbers, the same for the same seed.
pub struct RandomWeightInit<'d> {
    device: &'d Device,
    seed: u64,
    sequence: u64,
}

impl<'d> RandomWeightInit<'d> {
    /// From a seed.
    pub fn new(device: &'d Device, seed: u64) -> Self {
        Self { device, seed, sequence: 0 }
    }
}

impl WeightInit for RandomWeightInit<'_> {
    fn tensor(&mut self, name: &str, shape: Shape, dtype: Dtype, std: f32) -> Result<Tensor> {
        self.sequence += 1;
        match name.rsplit('.').next() {
            Some("qn" | "kn") => self.device.upload(shape, &vec![1.0f32; shape.elements()]),
            _ if std == 0.0 => self.device.zeros(shape, dtype),
            _ => {
                self.device.normal(shape, dtype, std, RandomSequence::new(self.seed, self.sequence))
            }
        }
    }
}

/// A job with everything it holds between steps.
pub struct Workload {
    job: WorkloadJob,
    device: Device,
    stack: BlockStack,
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
    pub fn new(device: &Device, job: WorkloadJob, init: &mut dyn WeightInit) -> Result<Self> {
        let WorkloadJob {
            config: WorkloadConfig { width, tokens, samples, n_blocks, .. },
            dtype,
            ..
        } = job;
        let mut make = BlockBuilder {
            block_swap: block_swap(device, job)?,
            ..BlockBuilder::new(device, &mut *init, job)
        };
        let mut blocks = Vec::with_capacity(n_blocks);
        for index in 0..n_blocks {
            make.block = index;
            blocks.push(WorkloadBlock::new(&mut make, width)?);
        }
        let BlockBuilder { params, adapters, block_swap, .. } = make;
        let moments = params.values().iter().map(Moments::new).collect::<Result<_>>()?;
        let gradients = Gradients::reserved(device, &params)?;
        let mut data = |name, shape: Shape| {
            device.with_tag(Tag::Data, || init.tensor(name, shape, dtype, 1.0))
        };
        Ok(Self {
            x: data("x", [samples, tokens, width].into())?,
            condition: data("c", [samples, width].into())?,
            target: data("target", [samples, tokens, width].into())?,
            job,
            device: device.clone(),
            stack: BlockStack { blocks, block_swap },
            adapters,
            params,
            moments,
            gradients,
            steps: 0,
        })
    }

    /// Forward, backward and update. Returns the loss, or none on the meta device.
    pub fn step(&mut self) -> Result<Option<f32>> {
        let loss = self.forward_backward()?;
        self.update()?;
        Ok(loss)
    }

    /// Forward and backward; leaves the gradients.
    pub fn forward_backward(&mut self) -> Result<Option<f32>> {
        self.gradients.reset();
        let samples = self.job.config.samples;
        let mut losses = Vec::new();
        for micro_batch in micro_batches(samples, self.job.micro_batch) {
            let share = micro_batch.len() as f32 / samples as f32;
            let tape = Tape::training(&self.device, &self.params, 0)
                .keeping_attention(self.job.recompute.keeps_attention());
            let [x, condition] =
                [&self.x, &self.condition].map(|all| all.narrow(micro_batch.clone()));
            let out = self.stack.forward(&tape, x, condition, self.job.recompute)?;
            let loss = tape.mse(&out, &self.target.narrow(micro_batch), None, None)?;
            drop(out);
            losses.push((share, loss.tensor().clone()));
            let seed_gradient = self.device.upload(loss.shape(), &[share])?;
            tape.backward_from(loss, seed_gradient, &mut self.gradients)?;
        }
        if self.device.is_meta() {
            return Ok(None);
        }
        // Read last: it waits for the GPU.
        let read = |(share, loss): &(f32, Tensor)| Ok(share * loss.read::<f32>()?[0]);
        losses.iter().map(read).sum::<Result<f32>>().map(Some)
    }

    /// The stack's output for the job's input.
    pub fn output(&self) -> Result<Tensor> {
        let tape = Tape::inference(&self.device, &self.params, 0);
        let (x, condition) = (self.x.clone(), self.condition.clone());
        let out = self.stack.forward(&tape, x, condition, Recompute::None)?;
        Ok(out.into_tensor())
    }

    fn update(&mut self) -> Result<()> {
        self.steps += 1;
        let n_params = self.params.values().len();
        let gradients = self.gradients.all(n_params);
        let settings = AdamW {
            learning_rate: LEARNING_RATE,
            weight_decay: WEIGHT_DECAY,
            step: self.steps,
            ..AdamW::default()
        };
        adamw(self.params.values_mut()?, &gradients, &mut self.moments, settings, None)
    }

    /// The job's sizes.
    pub fn config(&self) -> WorkloadConfig {
        self.job.config
    }

    /// Every adapter matrix by name, with its gradient if there is one.
    pub fn adapters(&self) -> Vec<(String, Tensor, Option<&Tensor>)> {
        let of = |(name, key): &(String, ParamKey)| {
            (name.clone(), self.params.get(*key).clone(), self.gradients.get(*key))
        };
        self.adapters.iter().map(of).collect()
    }
}

/// The model.
struct BlockStack {
    blocks: Vec<WorkloadBlock>,
    block_swap: Option<BlockSwap>,
}

impl BlockStack {
    /// x [S, N, D], condition [S, D]
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        x: Tensor,
        condition: Tensor,
        recompute: Recompute,
    ) -> Result<Var> {
        let mut x = Var::from(x);
        let condition = tape.activate(&condition.into(), Activation::Silu)?;
        for (index, block) in self.blocks.iter().enumerate() {
            [x] = tape.run_block(self.block_swap.as_ref(), index, || {
                if !recompute.recomputes(index) {
                    let remakes_queries = recompute == Recompute::Queries;
                    return Ok([block.forward(tape, &x, &condition, remakes_queries)?]);
                }
                tape.recompute(&[&x, &condition], move |tape, inputs| {
                    Ok([block.forward(tape, &inputs[0], &inputs[1], false)?])
                })
            })?;
        }
        Ok(x)
    }
}

/// Host memory for the offloaded blocks, if any are.
fn block_swap(device: &Device, job: WorkloadJob) -> Result<Option<BlockSwap>> {
    let n_blocks = job.config.n_blocks;
    if !(0..n_blocks).any(|index| job.offload.offloads(index)) {
        return Ok(None);
    }
    let meta = Device::meta(device.kind(), usize::MAX / 2);
    let init = &mut RandomWeightInit::new(&meta, 0);
    let mut dry_run = BlockBuilder::new(&meta, init, job);
    WorkloadBlock::new(&mut dry_run, job.config.width)?;
    let sizes =
        |index| if job.offload.offloads(index) { dry_run.sizes.clone() } else { Vec::new() };
    BlockSwap::new(device, &(0..n_blocks).map(sizes).collect::<Vec<_>>()).map(Some)
}

/// A frozen linear layer, perhaps with an adapter.
struct WorkloadLayer {
    weight: WeightTensor,
    bias: Var,
    adapter: Option<[ParamKey; 2]>,
}

impl WorkloadLayer {
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

struct WorkloadBlock {
    modulation: WorkloadLayer,
    q: WorkloadLayer,
    k: WorkloadLayer,
    v: WorkloadLayer,
    out: WorkloadLayer,
    q_norm: Var,
    k_norm: Var,
    up: WorkloadLayer,
    down: WorkloadLayer,
}

impl WorkloadBlock {
    fn new(make: &mut BlockBuilder<'_>, width: usize) -> Result<Self> {
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
        let q = Linear { is_remat: remakes_queries, ..Linear::new(&self.q.weight) };
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
struct BlockBuilder<'a> {
    device: &'a Device,
    init: &'a mut dyn WeightInit,
    job: WorkloadJob,
    params: Params,
    adapters: Vec<(String, ParamKey)>,
    /// Where offloaded blocks go.
    block_swap: Option<BlockSwap>,
    /// The block being built.
    block: usize,
    /// Bytes of the frozen tensors so far.
    sizes: Vec<usize>,
}

impl<'a> BlockBuilder<'a> {
    fn new(device: &'a Device, init: &'a mut dyn WeightInit, job: WorkloadJob) -> Self {
        let (params, adapters, sizes) = (Params::default(), Vec::new(), Vec::new());
        Self { device, init, job, params, adapters, block_swap: None, block: 0, sizes }
    }

    fn name(&self, name: &str) -> String {
        format!("blocks.{}.{name}", self.block)
    }

    /// Where the block's tensors go, if it is offloaded.
    fn host_memory(&self) -> Option<&BlockSwap> {
        self.block_swap.as_ref().filter(|swap| swap.is_offloaded(self.block))
    }

    fn weight(&mut self, name: &str, shape: Shape, dtype: Dtype, std: f32) -> Result<Var> {
        let made = self.frozen(name, shape, dtype, std)?;
        self.keep(made)
    }

    fn frozen(&mut self, name: &str, shape: Shape, dtype: Dtype, std: f32) -> Result<Tensor> {
        let name = self.name(name);
        let make = || self.init.tensor(&name, shape, dtype, std);
        self.device.with_tag(Tag::Weights, make)
    }

    fn keep(&mut self, made: Tensor) -> Result<Var> {
        self.sizes.push(made.shape().elements() * made.dtype().bytes());
        let kept = match self.host_memory() {
            Some(swap) => swap.offload(self.block, &made)?,
            None => made,
        };
        Ok(kept.into())
    }

    fn quantised(&mut self, made: &Tensor, format: Quantisation) -> Result<Quantised> {
        self.sizes.extend(Quantised::sizes(made.shape(), format));
        let made = self.device.with_tag(Tag::Weights, || Quantised::new(made, format))?;
        let made = match self.host_memory() {
            Some(swap) => made.offload(swap, self.block)?,
            None => made,
        };
        Ok(if self.job.multiplies_fp8 { made.multiplied_in_fp8("") } else { made })
    }

    fn layer(&mut self, name: &str, inputs: usize, outputs: usize) -> Result<WorkloadLayer> {
        let shape = [outputs, inputs].into();
        let made = self.frozen(&format!("{name}.weight"), shape, self.job.dtype, 0.02)?;
        let weight = match self.job.base {
            None => WeightTensor::Dense(self.keep(made)?),
            Some(format) => WeightTensor::Quantised(self.quantised(&made, format)?),
        };
        Ok(WorkloadLayer {
            weight,
            bias: self.weight(&format!("{name}.bias"), [outputs].into(), Dtype::F32, 0.0)?,
            adapter: None,
        })
    }

    fn adapted(&mut self, name: &str, width: usize) -> Result<WorkloadLayer> {
        let layer = self.layer(name, width, width)?;
        let down = self.param(&format!("{name}.A"), [RANK, width].into(), 1.0 / 16.0)?;
        let up = self.param(&format!("{name}.B"), [width, RANK].into(), 0.0)?;
        Ok(WorkloadLayer { adapter: Some([down, up]), ..layer })
    }

    fn param(&mut self, name: &str, shape: Shape, std: f32) -> Result<ParamKey> {
        let name = self.name(name);
        let make = || self.init.tensor(&name, shape, Dtype::F32, std);
        let key = self.params.add(self.device.with_tag(Tag::Parameters, make)?);
        self.adapters.push((name, key));
        Ok(key)
    }
}
