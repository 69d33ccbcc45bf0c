//! Matrix products, for the ops that are made of them: a sum of products with a bias, an activation
//! and rounding, in one pass over the result.

mod cpu;
mod cuda;
mod gpu;

pub(crate) use gpu::units_agree;

use super::{Activation, activation};
use crate::device::{Engine, Kind};
use crate::op::Place;
use crate::var::Activated;
use crate::work::{Call, Format};
use crate::{Dtype, Quantised, Result, Tensor};

/// A factor: the rows of a tensor as those of a matrix, or as its columns.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: Data<'a>,
    transposed: bool,
    /// bf16 numbers that each of it becomes on a matrix unit; see [`crate::cpu::gemm::Grid`].
    parts: usize,
}

#[derive(Clone, Copy)]
enum Data<'a> {
    Dense(&'a Tensor),
    Quantised(&'a Quantised),
}

impl<'a> From<&'a Tensor> for Matrix<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        let parts = if tensor.dtype() == Dtype::Bf16 { 1 } else { 3 };
        Self { data: Data::Dense(tensor), transposed: false, parts }
    }
}

impl<'a> Matrix<'a> {
    /// A tensor, as exact as numbers of format `beside` that it meets: more would be lost in the product.
    pub fn beside(tensor: &'a Tensor, beside: Dtype) -> Self {
        let matrix = Self::from(tensor);
        if beside == Dtype::Bf16 { Self { parts: 1, ..matrix } } else { matrix }
    }

    /// A quantised matrix, as exact as numbers of format `beside` that it meets.
    pub fn quantised(quantised: &'a Quantised, beside: Dtype) -> Self {
        let parts = if beside == Dtype::Bf16 { 1 } else { 3 };
        Self { data: Data::Quantised(quantised), transposed: false, parts }
    }

    /// Rows and columns exchanged.
    pub fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    pub fn rows(&self) -> usize {
        let shape = match self.data {
            Data::Dense(tensor) => tensor.shape(),
            Data::Quantised(quantised) => quantised.shape(),
        };
        if self.transposed { shape.width() } else { shape.rows() }
    }

    pub fn columns(&self) -> usize {
        self.t().rows()
    }

    /// Numbers of a row as it is stored.
    fn width(&self) -> usize {
        if self.transposed { self.rows() } else { self.columns() }
    }

    fn format(&self) -> Format {
        match self.data {
            Data::Dense(tensor) => tensor.dtype().into(),
            Data::Quantised(quantised) => quantised.how().into(),
        }
    }

    /// The tensor that most of its bytes are in.
    fn tensor(&self) -> &'a Tensor {
        match self.data {
            Data::Dense(tensor) => tensor,
            Data::Quantised(quantised) => quantised.codes(),
        }
    }
}

/// scale · left · right
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub left: Matrix<'a>,
    pub right: Matrix<'a>,
    pub scale: f32,
}

impl<'a> Product<'a> {
    /// `left` · `right`
    pub fn new(left: impl Into<Matrix<'a>>, right: Matrix<'a>) -> Self {
        Self { left: left.into(), right, scale: 1.0 }
    }
}

/// The sum of some products, and what becomes of it.
pub(crate) struct MatMul<'a> {
    pub products: &'a [Product<'a>],
    /// Added to each row; f32, or on a card of the format of `out`.
    pub bias: Option<&'a Tensor>,
    pub activation: Activation,
    /// Takes the sum as it was before the activation; of the format of `out`.
    pub before_activation: Option<&'a mut Tensor>,
    /// Multiplies the result by the slopes of an activation at these numbers, of the shape and format of
    /// `out`.
    pub slope: Option<&'a Activated>,
    /// Takes the result, row by row, in whatever shape.
    pub out: &'a mut Tensor,
    /// Whether to add to what `out` holds.
    pub add: bool,
    /// What else to add to; of the shape and format of `out`. Not with an activation.
    pub onto: Option<&'a Tensor>,
}

impl<'a> MatMul<'a> {
    /// Products alone.
    pub fn new(products: &'a [Product<'a>], out: &'a mut Tensor) -> Self {
        let activation = Activation::None;
        let (bias, before_activation, slope, onto) = (None, None, None, None);
        Self { products, bias, activation, before_activation, slope, out, add: false, onto }
    }

    pub fn rows(&self) -> usize {
        self.products[0].left.rows()
    }

    pub fn columns(&self) -> usize {
        self.products[0].right.columns()
    }

    /// All products are one call, and so is the activation: a second product makes the first a little
    /// deeper.
    /// What it is called in the tally where a card computes it: reading takes longest, or computing.
    fn kernel_of_card(&self) -> &'static str {
        let inner = self.products.iter().map(|product| product.left.columns()).max();
        let least = self.rows().min(self.columns()).min(inner.unwrap_or(0));
        if least < cpu::NARROW { "narrow product" } else { "product by a card" }
    }

    fn count(&self, place: Place<'_>, kernel: &'static str) {
        let (mut flops, mut tensors) = (0, vec![&*self.out]);
        tensors.extend(self.onto);
        if self.activation != Activation::None {
            flops += activation::FLOPS * self.rows() * self.columns();
            tensors.extend(self.before_activation.as_deref());
        }
        if let Some(slope) = self.slope {
            flops += activation::FLOPS * self.rows() * self.columns();
            tensors.push(&slope.before);
        }
        for Product { left, right, .. } in self.products {
            flops += 2 * self.rows() * self.columns() * left.columns();
            tensors.extend([left.tensor(), right.tensor()]);
        }
        let Product { left, right, .. } = self.products[0];
        let formats = [left.format(), right.format()];
        place.count_call(&Call { formats, ..Call::new(kernel, flops, &tensors) });
    }

    /// Asks for the memory that it takes, and gives it back.
    pub fn reserve(&self, place: Place<'_>) -> Result<()> {
        let (n, dtype) = match place.device.kind() {
            Kind::Cpu { threads, has_tiles } => {
                (cpu::Plan::new(self, threads, has_tiles).floats(), Dtype::F32)
            }
            Kind::Cuda { .. } => (cuda::bytes(self), Dtype::U8),
            Kind::Gpu { .. } => (gpu::floats(self), Dtype::F32),
        };
        place.workspace([n], dtype).map(drop)
    }

    /// Computes it.
    pub fn run(self, place: Place<'_>) -> Result<()> {
        let (rows, columns) = (self.rows(), self.columns());
        let is_plain = self.activation == Activation::None && !self.add;
        assert!(is_plain || self.onto.is_none() && self.slope.is_none());
        for Product { left, right, .. } in self.products {
            assert_eq!(
                (left.rows(), left.columns(), right.columns()),
                (rows, right.rows(), columns)
            );
        }
        match place.device.kind() {
            Kind::Cpu { threads, has_tiles } => {
                let plan = cpu::Plan::new(&self, threads, has_tiles);
                self.count(place, plan.kernel(&self));
                let mut workspace = place.workspace([plan.floats()], Dtype::F32)?;
                if let Engine::Cpu(engine) = place.engine() {
                    cpu::multiply(engine, &plan, self, workspace.data_mut());
                }
            }
            Kind::Cuda { .. } => {
                self.count(place, self.kernel_of_card());
                let mut workspace = place.workspace([cuda::bytes(&self)], Dtype::U8)?;
                if let Engine::Cuda(engine) = place.engine() {
                    cuda::multiply(engine, self, &mut workspace);
                }
            }
            Kind::Gpu { .. } => {
                self.count(place, self.kernel_of_card());
                let mut workspace = place.workspace([gpu::floats(&self)], Dtype::F32)?;
                if let Engine::Gpu(engine) = place.engine() {
                    gpu::multiply(engine, self, &mut workspace);
                }
            }
        }
        Ok(())
    }
}
