//! An op at work: where it takes memory, who fills it, and whether it is run at all.

use std::ops::Deref;

use crate::device::{Backend, Device};
use crate::var::Var;
use crate::work::KernelCall;
use crate::{Dtype, Result, Shape, Tag, Tensor};

/// Where work is done: who gives memory and who fills it.
#[derive(Clone, Copy)]
pub(crate) struct OpContext<'a> {
    pub device: &'a Device,
    pub is_run: bool,
}

impl<'a> OpContext<'a> {
    pub fn new(device: &'a Device) -> Self {
        Self { device, is_run: true }
    }

    pub fn engine(self) -> &'a Backend {
        if self.is_run { self.device.backend() } else { &Backend::Meta }
    }

    /// Whether numbers are computed, so that there are some to look at.
    pub fn has_data(self) -> bool {
        self.is_run && !self.device.is_meta()
    }

    /// Room for a result, with whatever it held before.
    pub fn alloc(self, shape: impl Into<Shape>, dtype: Dtype) -> Result<Tensor> {
        let shape = shape.into();
        if self.is_run {
            self.device.alloc(shape, dtype)
        } else {
            Ok(self.device.meta_tensor(shape, dtype))
        }
    }

    /// Room that is free again when the op is done.
    pub fn workspace(self, shape: impl Into<Shape>, dtype: Dtype) -> Result<Tensor> {
        self.device.with_tag(Tag::Workspace, || self.alloc(shape, dtype))
    }

    /// Adds a call of a kernel to the device's tally: its operations, and the bytes of these tensors.
    pub fn count(self, kernel: &'static str, flops: usize, tensors: &[&Tensor]) {
        self.count_call(&KernelCall::new(kernel, flops, tensors));
    }

    pub fn count_call(self, call: &KernelCall) {
        if self.is_run {
            self.device.count(call);
        }
    }
}

/// One op at work.
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
    /// Work that no tape knows of: what happens between backward and the next forward.
    pub fn standalone(name: &'static str, device: &'t Device) -> Self {
        device.enter_op(name);
        Self { name, index: 0, cx: OpContext::new(device) }
    }

    /// Adds a call of the op's own kernel to the tally.
    pub fn count(&self, flops: usize, tensors: &[&Tensor]) {
        self.cx.count(self.name, flops, tensors);
    }

    /// The result as a part of the computation.
    pub fn result(&self, tensor: Tensor) -> Var {
        Var { op: self.index, ..Var::from(tensor) }
    }
}
