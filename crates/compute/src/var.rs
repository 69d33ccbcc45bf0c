//! Tensors within a computation, and what is saved of them for backward: the tensor itself, or where it is
//! cheap to recompute (a norm, an activation) only how to recompute it.

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;

use crate::op::OpContext;
use crate::ops::Activation;
use crate::quantised::fp8_rows::Fp8Rows;
use crate::{Dtype, Result, Shape, Tensor};

/// A tensor within a computation: it knows whether a gradient is wanted for it.
#[derive(Clone)]
pub struct Var {
    pub(crate) tensor: Tensor,
    pub(crate) grad_target: Option<GradTarget>,
    /// How to recompute the tensor from tensors that are saved anyway.
    pub(crate) remat: Option<Rc<Remat>>,
    /// If it is an activation's result: of what.
    pub(crate) activated: Option<Rc<Activated>>,
    /// The tensor in fp8, once a matmul asked for it: several layers often read the same.
    pub(crate) fp8_rows: Rc<OnceCell<Fp8Rows>>,
    /// Which op of its tape made it, counted from 1; 0 for what came from outside.
    pub(crate) op: usize,
}

/// Where a gradient goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradTarget {
    /// To the op that made the tensor.
    Node(usize),
    /// To a trained parameter.
    Param(usize),
}

impl From<Tensor> for Var {
    /// A tensor that no gradient is wanted for.
    fn from(tensor: Tensor) -> Self {
        let fp8_rows = Rc::default();
        Self { tensor, grad_target: None, remat: None, activated: None, fp8_rows, op: 0 }
    }
}

impl Var {
    /// Its tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Its tensor, taken out of the computation.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// Its shape.
    pub fn shape(&self) -> Shape {
        self.tensor.shape()
    }

    /// Its dtype.
    pub fn dtype(&self) -> Dtype {
        self.tensor.dtype()
    }

    /// The `index`-th of the equal parts of its rows, as wide as the tensor it is used with.
    pub fn chunk(&self, index: usize) -> Chunk<'_> {
        Chunk { of: self, index }
    }

    /// The same data with the same gradient, in another shape of as many elements.
    ///
    /// # Panics
    /// If the number of elements differs.
    #[must_use]
    pub fn reshape(&self, shape: impl Into<Shape>) -> Self {
        // A recomputed tensor would come back in its old shape; without one the tensor itself is saved.
        let Self { grad_target, op, .. } = *self;
        Self { grad_target, op, ..Self::from(self.tensor.reshape(shape)) }
    }

    /// The same data as rows of another width; recomputed where this is.
    ///
    /// # Panics
    /// If the number of elements is no multiple of it.
    #[must_use]
    pub fn in_rows(&self, width: usize) -> Self {
        let shape = [self.shape().elements() / width.max(1), width];
        let remat = self.remat.as_ref().map(|_| {
            let (saved, needs) = self.to_saved();
            Rc::new(Remat::new(needs, move |cx| Ok(saved.get(cx)?.into_shape(shape.into()))))
        });
        Self { remat, ..self.reshape(shape) }
    }

    /// Its rows in fp8, which live as long as it does.
    pub(crate) fn fp8_rows(&self, cx: OpContext<'_>) -> Result<Fp8Rows> {
        if let Some(known) = self.fp8_rows.get() {
            return Ok(known.clone());
        }
        let made = Fp8Rows::new(cx, &self.tensor)?;
        Ok(if cx.is_run { self.fp8_rows.get_or_init(|| made).clone() } else { made })
    }

    pub(crate) fn grad_target(&self) -> Option<GradTarget> {
        self.grad_target
    }

    /// What to save in order to have this tensor later, and the ops whose results that needs.
    pub(crate) fn to_saved(&self) -> (SavedTensor, Vec<usize>) {
        match &self.remat {
            Some(remake) => (SavedTensor::Remat(Rc::clone(remake)), remake.needs.clone()),
            None => (SavedTensor::Tensor(self.tensor.clone()), vec![self.op]),
        }
    }
}

/// A part of each row of a tensor: several small vectors often come out of one matmul.
#[derive(Clone, Copy)]
pub struct Chunk<'a> {
    pub(crate) of: &'a Var,
    pub(crate) index: usize,
}

/// What an activation was applied to.
pub(crate) struct Activated {
    pub activation: Activation,
    pub input: Tensor,
}

/// How to recompute a tensor.
pub(crate) struct Remat {
    make: Box<dyn Fn(OpContext<'_>) -> Result<Tensor>>,
    needs: Vec<usize>,
    /// The recomputed tensor, for others that saved the same; freed with the last of them.
    made: RefCell<Option<Tensor>>,
}

impl Remat {
    /// From what the inputs' [`Var::to_saved`] gave.
    pub fn new(
        needs: Vec<usize>,
        make: impl Fn(OpContext<'_>) -> Result<Tensor> + 'static,
    ) -> Self {
        Self { make: Box::new(make), needs, made: RefCell::new(None) }
    }
}

/// A tensor saved for backward, or how to recompute it.
#[derive(Clone)]
pub(crate) enum SavedTensor {
    Tensor(Tensor),
    Remat(Rc<Remat>),
}

impl SavedTensor {
    pub fn get(&self, cx: OpContext<'_>) -> Result<Tensor> {
        let remake = match self {
            Self::Tensor(tensor) => return Ok(tensor.clone()),
            Self::Remat(remake) => remake,
        };
        if let Some(made) = &*remake.made.borrow() {
            return Ok(made.clone());
        }
        let made = (remake.make)(cx)?;
        // Worth holding only while someone else will ask for it too.
        if Rc::strong_count(remake) > 1 {
            *remake.made.borrow_mut() = Some(made.clone());
        }
        Ok(made)
    }
}
