//! The context of an op: where it allocates memory, which backend computes, and whether it is run at all.

use std::ops::Deref;

use crate::device::{Backend, Device};
use crate::var::Var;
use crate::work::KernelCall;
use crate::{Dtype, Result, Shape, Tag, Tensor};

/// The device of an op, and whether the op is run.
#[derive(Clone, Copy)]
pub(crate) struct OpContext<'a> {
    pub device: &'a Device,
    pub is_run: bool,
}

impl<'a> OpContext<'a> {
    pub fn new(device: &'a Device) -> Self {
        Self { device, is_run: true }
    }

    pub fn backend(self) -> &'a Backend {
        if self.is_run { self.device.backend() } else { &Backend::Meta }
    }

    /// Whether data is computed, so that there is some to look at.
    pub fn has_data(self) -> bool {
        self.is_run && !self.device.is_meta()
    }

    /// An uninitialised result.
    pub fn alloc(self, shape: impl Into<Shape>, dtype: Dtype) -> Result<Tensor> {
        let shape = shape.into();
        if self.is_run {
            self.device.alloc(shape, dtype)
        } else {
            Ok(self.device.meta_tensor(shape, dtype))
        }
    }

    /// Workspace that is freed when the op is done.
    pub fn workspace(self, shape: impl Into<Shape>, dtype: Dtype) -> Result<Tensor> {
        self.device.with_tag(Tag::Workspace, || self.alloc(shape, dtype))
    }

    /// Adds a call of a kernel to the device's work counter: its operations, and the bytes of these tensors.
    pub fn count(self, kernel: &'static str, flops: usize, tensors: &[&Tensor]) {
        self.count_call(&KernelCall::new(kernel, flops, tensors));
    }

    pub fn count_call(self, call: &KernelCall) {
        if self.is_run {
            self.device.count(call);
        }
    }
}

/// One running op.
pub(crate) struct Op<'t> {
    pub name: &'static str,
    pub index: usize,
    pub cx: OpContext<'t>,
}

impl<'t> Deref for Op<'t> {
    type Target = OpContext<'t>;

    fn deref(&self) -> &OpContext<'t> {
        &self.cx
    }
}

impl<'t> Op<'t> {
    /// An op outside of any tape, as in an optimizer step.
    pub fn standalone(name: &'static str, device: &'t Device) -> Self {
        device.enter_op(name);
        Self { name, index: 0, cx: OpContext::new(device) }
    }

    /// Adds a call of the op's own kernel to the work counter.
    pub fn count(&self, flops: usize, tensors: &[&Tensor]) {
        self.cx.count(self.name, flops, tensors);
    }

    /// The result as a part of the computation.
    pub fn result(&self, tensor: Tensor) -> Var {
        Var { op: self.index, ..Var::from(tensor) }
    }
}
