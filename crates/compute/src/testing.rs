//! What op tests share: a reference arithmetic that carries exact derivatives, and one `check` that
//! holds an op against it in every way an op can be wrong: value, gradient, dtype, number of
//! threads, memory on the meta device, leaks.
//!
//! A reference is plain code over [`Dual`]s in f64. Its derivative part is the analytic gradient by
//! the chain rule; its value part, moved a little, gives finite differences.

use std::collections::BTreeMap;
use std::ops::{Add, Div, Mul, Neg, Sub};
use std::sync::{Mutex, OnceLock};

use crate::gpu::GpuChoice;
use crate::random::TestRng;
use crate::tape::Tape;
use crate::var::Var;
use crate::{Device, Dtype, Gradients, KernelCache, Params, Result, Shape, Tensor};

/// A number with its derivative in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dual {
    pub value: f64,
    pub slope: f64,
}

impl Dual {
    pub fn map(self, value: f64, slope: f64) -> Self {
        Self { value, slope: slope * self.slope }
    }

    pub fn exp(self) -> Self {
        self.map(self.value.exp(), self.value.exp())
    }

    pub fn ln(self) -> Self {
        self.map(self.value.ln(), self.value.recip())
    }

    pub fn sqrt(self) -> Self {
        self.map(self.value.sqrt(), 0.5 / self.value.sqrt())
    }

    pub fn tanh(self) -> Self {
        self.map(self.value.tanh(), 1.0 - self.value.tanh().powi(2))
    }

    pub fn erf(self) -> Self {
        let slope = 2.0 / std::f64::consts::PI.sqrt() * (-self.value * self.value).exp();
        self.map(1.0 - erfc(self.value), slope)
    }
}

impl From<f64> for Dual {
    fn from(value: f64) -> Self {
        Self { value, slope: 0.0 }
    }
}

impl Add for Dual {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { value: self.value + other.value, slope: self.slope + other.slope }
    }
}

impl Neg for Dual {
    type Output = Self;
    fn neg(self) -> Self {
        Self { value: -self.value, slope: -self.slope }
    }
}

impl Sub for Dual {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl Mul for Dual {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        let slope = self.slope * other.value + self.value * other.slope;
        Self { value: self.value * other.value, slope }
    }
}

impl Mul<f64> for Dual {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        self * Self::from(factor)
    }
}

impl Div for Dual {
    type Output = Self;
    fn div(self, other: Self) -> Self {
        let value = self.value / other.value;
        Self { value, slope: (self.slope - value * other.slope) / other.value }
    }
}

impl std::iter::Sum for Dual {
    fn sum<I: Iterator<Item = Self>>(terms: I) -> Self {
        terms.fold(Self::default(), Self::add)
    }
}

/// The complementary error function by its series near zero and its continued fraction elsewhere
/// (Abramowitz and Stegun 7.1.6 and 7.1.14), good to 1e-13.
pub fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    let gauss = (-x * x).exp() / std::f64::consts::PI.sqrt();
    if x < 2.5 {
        let (mut term, mut sum) = (2.0 * x, 2.0 * x);
        for n in 1..200 {
            term *= 2.0 * x * x / f64::from(2 * n + 1);
            sum += term;
        }
        return 1.0 - gauss * sum;
    }
    let fraction = (1..200).rev().fold(0.0, |tail, n| f64::from(n) / 2.0 / (x + tail));
    gauss / (x + fraction)
}

/// A differentiable input of an op under test.
#[derive(Clone)]
pub struct Input {
    pub shape: Shape,
    pub values: Vec<f32>,
    /// Its dtype, if it is not the one under test: vectors and adapters are always f32.
    pub dtype: Option<Dtype>,
    /// Whether a gradient is asked for.
    pub is_trained: bool,
}

impl Input {
    /// Normal random numbers.
    pub fn normal(shape: impl Into<Shape>, seed: u64) -> Self {
        let shape = shape.into();
        let mut random = TestRng::new(seed ^ 0x5eed_0000);
        let values = (0..shape.elements()).map(|_| random.normal()).collect();
        Self { shape, values, dtype: None, is_trained: true }
    }

    /// Always f32.
    pub fn f32(self) -> Self {
        Self { dtype: Some(Dtype::F32), ..self }
    }

    pub fn scaled(mut self, factor: f32) -> Self {
        self.values.iter_mut().for_each(|value| *value *= factor);
        self
    }

    pub fn frozen(self) -> Self {
        Self { is_trained: false, ..self }
    }
}

type Forward<'f> = &'f dyn Fn(&Tape<'_>, &[Var]) -> Result<Var>;
type Reference<'f> = &'f dyn Fn(&[Vec<Dual>]) -> Vec<Dual>;

/// What inputs are tried in: f32, bf16 and f16, or the one that `HEARTH_TEST_DTYPE` names, for GPUs that take long.
fn dtypes() -> Vec<Dtype> {
    let mut all = vec![Dtype::F32, Dtype::Bf16, Dtype::F16];
    if let Ok(only) = std::env::var("HEARTH_TEST_DTYPE") {
        all.retain(|dtype| dtype.to_string() == only);
        assert!(!all.is_empty(), "{only} is not tested");
    }
    all
}

/// Holds `op` against `reference` for inputs in f32, bf16 and f16. Errors are relative to the
/// largest number of the tensor and allowed `slack` times what rounding the inputs' dtype costs.
pub fn check(inputs: &[Input], slack: f64, op: Forward<'_>, reference: Reference<'_>) {
    for dtype in dtypes() {
        check_in(dtype, inputs, slack, op, reference);
    }
}

/// As `check`, for shapes at which rounded dtypes would only add time.
pub fn check_f32(inputs: &[Input], slack: f64, op: Forward<'_>, reference: Reference<'_>) {
    check_in(Dtype::F32, inputs, slack, op, reference);
}

/// Half of the distance from 1 to the next number.
fn rounding(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2f64.powi(-24),
        Dtype::F16 => 2f64.powi(-11),
        Dtype::Bf16 => 2f64.powi(-8),
        other => unreachable!("{other} is not under test"),
    }
}

fn check_in(dtype: Dtype, inputs: &[Input], slack: f64, op: Forward<'_>, reference: Reference<'_>) {
    let inputs: Vec<Input> = inputs.iter().map(|input| rounded(input, dtype)).collect();
    let outcomes = on_each_machine(dtype, &|device| run_op(device, dtype, &inputs, op));
    let exact = Exact::of(&inputs, reference, &outcomes[0].cotangent);
    let allowed = slack * rounding(dtype) + 1e-6;
    for ours in outcomes {
        compare(&format!("{dtype} result"), &ours.result, &exact.result, allowed);
        for (index, gradient) in ours.gradients.iter().enumerate() {
            if let Some(gradient) = gradient {
                let what = format!("{dtype} gradient of input {index}");
                compare(&what, gradient, &exact.gradients[index], 2.0 * allowed);
            }
        }
    }
}

/// The results on this machine, on one without AMX if this one has it, and on a GPU if
/// there is one to test. On each, threads make no difference, and the meta device takes the same
/// memory.
fn on_each_machine(dtype: Dtype, run: &dyn Fn(&Device) -> Outcome) -> Vec<Outcome> {
    const LIMIT: usize = 1 << 28;
    let this = |threads| Device::cpu(threads, LIMIT).unwrap();
    let plain = |threads| Device::cpu_without_amx(threads, LIMIT);
    let machines: [&dyn Fn(usize) -> Device; 2] = [&this, &plain];
    let count = if this(1).kind() == plain(1).kind() { 1 } else { 2 };
    let on = |machine: &&dyn Fn(usize) -> Device| {
        let [ours, others @ ..] = [1, 2, 3].map(|threads| run(&machine(threads)));
        for other in others {
            assert_eq!(ours.bits(), other.bits(), "{dtype}: results depend on the threads");
        }
        let meta = run(&Device::meta(machine(1).kind(), LIMIT));
        assert_eq!(meta.usage, ours.usage, "{dtype}: the meta device takes other memory");
        ours
    };
    // Beside a GPU the CPU is only there to tell which of the two is wrong.
    let mut outcomes: Vec<Outcome> = match test_gpu() {
        None => machines[..count].iter().map(on).collect(),
        Some(_) => vec![run(&this(2))],
    };
    if let Some(gpu) = test_gpu() {
        let devices = [(); 2].map(|()| open_gpu(gpu, LIMIT));
        let [ours, again] = devices.each_ref().map(run);
        assert_eq!(ours.bits(), again.bits(), "{dtype}: results differ from run to run");
        let meta = run(&Device::meta(devices[0].kind(), LIMIT));
        assert_eq!(meta.usage, ours.usage, "{dtype}: the meta device takes other memory");
        outcomes.push(ours);
    }
    outcomes
}

/// Holds a GPU, if there is one to test, against the CPU in f32: for shapes at which a reference
/// would take minutes. Errors are as in [`check`].
pub fn check_gpu(inputs: &[Input], slack: f64, op: Forward<'_>) {
    const LIMIT: usize = 1 << 28;
    let Some(gpu) = test_gpu() else { return };
    for dtype in dtypes() {
        let inputs: Vec<Input> = inputs.iter().map(|input| rounded(input, dtype)).collect();
        let [ours, again] = [(); 2].map(|()| run_op(&open_gpu(gpu, LIMIT), dtype, &inputs, op));
        assert_eq!(ours.bits(), again.bits(), "{dtype}: results differ from run to run");
        let fast = match gpu {
            TestGpu::Cuda(index) => {
                Device::cuda(index, LIMIT, false, Some(Box::new(TestKernelCache))).unwrap()
            }
            TestGpu::Gpu(_) => open_gpu(gpu, LIMIT),
        };
        let fast = run_op(&fast, dtype, &inputs, op);
        let exact = run_op(&Device::cpu(4, LIMIT).unwrap(), Dtype::F32, &inputs, op);
        let wide = |numbers: &[f32]| numbers.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        // The CPU has errors of its own.
        let allowed = slack * rounding(dtype) + 4e-6;
        for ours in [ours, fast] {
            compare(&format!("{dtype} result"), &ours.result, &wide(&exact.result), allowed);
            let pairs = ours.gradients.iter().zip(&exact.gradients).enumerate();
            for (index, (ours, exact)) in pairs {
                if let (Some(ours), Some(exact)) = (ours, exact) {
                    let what = format!("{dtype} gradient of input {index}");
                    compare(&what, ours, &wide(exact), 2.0 * allowed);
                }
            }
        }
    }
}

/// What tests run on besides the CPU.
#[derive(Clone, Copy)]
enum TestGpu {
    Cuda(usize),
    Gpu(GpuChoice),
}

/// The GPU that tests run on as well, if `HEARTH_TEST_DEVICE` names one, as `cuda:0`, `gpu:0` or
/// `gpu:software`.
fn test_gpu() -> Option<TestGpu> {
    let name = std::env::var("HEARTH_TEST_DEVICE").ok()?;
    Some(match name.split_once(':').unwrap() {
        ("gpu", "software") => TestGpu::Gpu(GpuChoice::Software),
        ("gpu", index) => TestGpu::Gpu(GpuChoice::Index(index.parse().unwrap())),
        (_, index) => TestGpu::Cuda(index.parse().unwrap()),
    })
}

/// A device on that GPU, if there is one.
pub fn on_gpu(limit: usize) -> Option<Device> {
    test_gpu().map(|index| open_gpu(index, limit))
}

/// A device of its own on that GPU.
fn open_gpu(gpu: TestGpu, limit: usize) -> Device {
    /// Holds the GPU's context while devices come and go.
    static FIRST: OnceLock<Device> = OnceLock::new();
    let open = |limit| match gpu {
        TestGpu::Cuda(index) => {
            let cache = Some(Box::new(TestKernelCache) as Box<dyn KernelCache>);
            let device = Device::cuda(index, limit, true, cache).unwrap();
            // So all ops can be tested in host memory.
            device.set_shared_memory(std::env::var_os("HEARTH_FORCE_UNIFIED").is_some());
            device
        }
        TestGpu::Gpu(choice) => Device::gpu(choice, limit).unwrap(),
    };
    FIRST.get_or_init(|| open(1));
    open(limit)
}

/// Kernels are compiled once for all tests.
struct TestKernelCache;

static KERNELS: Mutex<BTreeMap<String, Vec<u8>>> = Mutex::new(BTreeMap::new());

impl KernelCache for TestKernelCache {
    fn load(&self, name: &str) -> Option<Vec<u8>> {
        KERNELS.lock().unwrap().get(name).cloned()
    }

    fn store(&self, name: &str, kernels: &[u8]) {
        KERNELS.lock().unwrap().insert(name.to_owned(), kernels.to_vec());
    }
}

/// As `check`, for ops that have no backward: all inputs are frozen.
pub fn check_forward(inputs: &[Input], slack: f64, op: Forward<'_>, reference: Reference<'_>) {
    check_forward_within(inputs, slack, 1e-6, op, reference);
}

/// The same with another `least` that is allowed in any dtype.
pub fn check_forward_within(
    inputs: &[Input],
    slack: f64,
    least: f64,
    op: Forward<'_>,
    reference: Reference<'_>,
) {
    for dtype in dtypes() {
        let inputs: Vec<Input> =
            inputs.iter().map(|input| rounded(input, dtype).frozen()).collect();
        let outcomes = on_each_machine(dtype, &|device| run_forward(device, dtype, &inputs, op));
        let exact = Exact::of(&inputs, reference, &[]).result;
        let allowed = slack * rounding(dtype) + least;
        for ours in outcomes {
            compare(&format!("{dtype} result"), &ours.result, &exact, allowed);
        }
    }
}

fn run_forward(device: &Device, dtype: Dtype, inputs: &[Input], op: Forward<'_>) -> Outcome {
    let params = Params::default();
    let before = device.usage();
    let outcome = {
        let tape = Tape::inference(device, &params, 7);
        let vars: Vec<Var> = inputs.iter().map(|input| as_var(&tape, input, dtype)).collect();
        let result = op(&tape, &vars).unwrap();
        assert_eq!(result.dtype(), dtype, "the result's dtype");
        let result = read(result.tensor());
        Outcome { result, gradients: vec![], cotangent: vec![], usage: device.usage() }
    };
    assert_eq!(device.usage().in_use, before.in_use, "something was not given back");
    outcome
}

/// The same computation as a block that is recomputed.
pub fn recomputed(
    block: impl Fn(&Tape<'_>, &[Var]) -> Result<Var> + Clone + 'static,
) -> impl Fn(&Tape<'_>, &[Var]) -> Result<Var> {
    move |tape, v| {
        let (block, inputs) = (block.clone(), v.iter().collect::<Vec<_>>());
        let [y] = tape.recompute(&inputs, move |tape, v| Ok([block(tape, v)?]))?;
        Ok(y)
    }
}

fn rounded(input: &Input, dtype: Dtype) -> Input {
    let values = input.values.iter().map(|value| match input.dtype.unwrap_or(dtype) {
        Dtype::Bf16 => half::bf16::from_f32(*value).to_f32(),
        Dtype::F16 => half::f16::from_f32(*value).to_f32(),
        _ => *value,
    });
    Input { values: values.collect(), ..input.clone() }
}

/// What an op gave, as f32.
#[derive(Debug)]
struct Outcome {
    result: Vec<f32>,
    gradients: Vec<Option<Vec<f32>>>,
    cotangent: Vec<f32>,
    usage: crate::Usage,
}

impl Outcome {
    fn bits(&self) -> Vec<u32> {
        let all = self.gradients.iter().flatten().flatten();
        self.result.iter().chain(all).map(|value| value.to_bits()).collect()
    }
}

fn run_op(device: &Device, dtype: Dtype, inputs: &[Input], op: Forward<'_>) -> Outcome {
    let params = Params::default();
    let before = device.usage();
    let outcome = {
        let tape = Tape::training(device, &params, 7);
        let vars: Vec<Var> = inputs.iter().map(|input| as_var(&tape, input, dtype)).collect();
        let result = op(&tape, &vars).unwrap();
        let numbers = read(result.tensor());
        let mut random = TestRng::new(99);
        let cotangent = Input {
            shape: result.shape(),
            values: (0..result.shape().elements()).map(|_| random.normal()).collect(),
            dtype: Some(result.dtype()),
            is_trained: false,
        };
        let cotangent = rounded(&cotangent, dtype);
        let gradient = upload(device, &cotangent, dtype);
        let mut leaves = tape.backward_from(result, gradient, &mut Gradients::default()).unwrap();
        let gradients = vars.iter().map(|var| leaves.take(var).map(|gradient| read(&gradient)));
        let gradients: Vec<_> = gradients.collect();
        for (input, gradient) in inputs.iter().zip(&gradients) {
            assert_eq!(input.is_trained, gradient.is_some(), "a gradient for what is trained only");
        }
        Outcome { result: numbers, gradients, cotangent: cotangent.values, usage: device.usage() }
    };
    assert_eq!(device.usage().in_use, before.in_use, "something was not given back");
    outcome
}

fn as_var(tape: &Tape<'_>, input: &Input, dtype: Dtype) -> Var {
    let tensor = upload(tape.device(), input, dtype);
    if input.is_trained { tape.leaf(tensor) } else { Var::from(tensor) }
}

/// A tensor of these values in the input's dtype.
pub fn upload(device: &Device, input: &Input, dtype: Dtype) -> Tensor {
    let values = &input.values;
    match input.dtype.unwrap_or(dtype) {
        Dtype::Bf16 => {
            let values: Vec<_> = values.iter().map(|value| half::bf16::from_f32(*value)).collect();
            device.upload(input.shape, &values).unwrap()
        }
        Dtype::F16 => {
            let values: Vec<_> = values.iter().map(|value| half::f16::from_f32(*value)).collect();
            device.upload(input.shape, &values).unwrap()
        }
        _ => device.upload(input.shape, values).unwrap(),
    }
}

fn read(tensor: &Tensor) -> Vec<f32> {
    if tensor.device().is_meta() { vec![] } else { tensor.to_f32_vec() }
}

/// The reference's result, and its gradient for a cotangent, each number of it found twice.
struct Exact {
    result: Vec<f64>,
    gradients: Vec<Vec<f64>>,
}

impl Exact {
    fn of(inputs: &[Input], reference: Reference<'_>, cotangent: &[f32]) -> Self {
        let mut duals: Vec<Vec<Dual>> = inputs
            .iter()
            .map(|input| input.values.iter().map(|value| Dual::from(f64::from(*value))).collect())
            .collect();
        let result: Vec<f64> = reference(&duals).iter().map(|dual| dual.value).collect();
        let weighted = |duals: &[Vec<Dual>]| -> Dual {
            let terms = reference(duals).into_iter().zip(cotangent);
            terms.map(|(dual, weight)| dual * f64::from(*weight)).sum()
        };
        let mut gradients = Vec::new();
        for input in 0..inputs.len() {
            let mut gradient = Vec::new();
            for element in 0..if inputs[input].is_trained { duals[input].len() } else { 0 } {
                let at = duals[input][element];
                duals[input][element].slope = 1.0;
                let slope = weighted(&duals).slope;
                gradient.push(slope);
                // Every number's finite difference would take minutes; every seventh is enough to
                // see a reference whose slopes do not belong to its values.
                if element % 7 == 0 {
                    let step = 1e-5 * at.value.abs().max(1.0);
                    let moved = [1.0, -1.0].map(|sign| {
                        duals[input][element] = Dual::from(at.value + sign * step);
                        weighted(&duals).value
                    });
                    let difference = (moved[0] - moved[1]) / (2.0 * step);
                    let scale = slope.abs().max(1.0);
                    assert!((difference - slope).abs() < 1e-4 * scale, "{difference} {slope}");
                }
                duals[input][element] = at;
            }
            gradients.push(gradient);
        }
        Self { result, gradients }
    }
}

/// Fails with the first numbers and the worst one.
pub fn compare(what: &str, ours: &[f32], exact: &[f64], allowed: f64) {
    assert_eq!(ours.len(), exact.len(), "{what}: how many values");
    let largest = exact.iter().fold(0.0f64, |most, value| most.max(value.abs())).max(1e-30);
    let worst = ours
        .iter()
        .zip(exact)
        .map(|(ours, exact)| (f64::from(*ours) - exact).abs())
        .map(|error| if error.is_nan() { f64::INFINITY } else { error })
        .fold(0.0, f64::max)
        / largest;
    let first = ours.len().min(6);
    assert!(
        worst <= allowed,
        "{what}: off by {worst:.2e} of the largest, allowed {allowed:.2e}\n  ours  {:?}\n  exact {:?}",
        &ours[..first],
        &exact[..first],
    );
}

/// Calls `test` with random sizes, each from 1 to its bound; failures name what they were.
pub fn for_random_sizes<const N: usize>(times: u64, most: [usize; N], test: impl Fn([usize; N])) {
    for seed in 0..times {
        let mut random = TestRng::new(1000 + seed);
        let sizes = most.map(|most| 1 + random.below(most));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(sizes)));
        assert!(outcome.is_ok(), "fails for {sizes:?}");
    }
}

/// That an op gives something that is not finite where an input is so, instead of hiding it.
pub fn expect_not_hidden(shape: impl Into<Shape>, op: impl Fn(&Tape<'_>, &Var) -> Result<Var>) {
    let shape = shape.into();
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut input = Input::normal(shape, 3);
        input.values[0] = value;
        let result = op(&tape, &upload(&device, &input, Dtype::F32).into()).unwrap();
        let is_seen = result.tensor().to_f32_vec().iter().any(|number| !number.is_finite());
        assert!(is_seen, "{value} is hidden");
    }
}

/// A device for a test that needs no more than one.
pub fn device() -> Device {
    match test_gpu() {
        Some(gpu) => open_gpu(gpu, 1 << 28),
        None => Device::cpu(2, 1 << 26).unwrap(),
    }
}
