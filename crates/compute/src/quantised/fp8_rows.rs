//! The left operand of a matmul in fp8: rows rounded to e4m3 with a scale each, so that the largest of a row is
//! 448. Only tensor cores of CUDA multiply such.

use super::{Quantisation, Quantised, cuda};
use crate::device::{Backend, Device, DeviceKind};
use crate::op::OpContext;
use crate::ops::Linear;
use crate::params::Params;
use crate::tape::Tape;
use crate::{ComputeError, Dtype, Result, Tensor};

/// A matrix's rows in fp8.
#[derive(Clone)]
pub(crate) struct Fp8Rows {
    /// e4m3 [rows, width]
    pub codes: Tensor,
    /// f32 `[rows]`
    pub scales: Tensor,
}

impl Fp8Rows {
    /// Of `x`.
    pub fn new(cx: OpContext<'_>, x: &Tensor) -> Result<Self> {
        let mut codes = cx.alloc(x.shape(), Dtype::U8)?;
        let mut scales = cx.alloc([x.shape().rows()], Dtype::F32)?;
        cx.count("round to fp8", x.shape().elements(), &[x, &codes]);
        if let Backend::Cuda(backend) = cx.backend() {
            cuda::round_rows(backend, x, None, [(&mut codes).into(), (&mut scales).into()]);
        }
        Ok(Self { codes, scales })
    }
}

/// What the sizes of a matrix that is multiplied in fp8 are multiples of: cuBLASLt asks for 16 bytes.
const MULTIPLE: usize = 16;
/// And the largest they are. Chosen: a block holds a row of the left operand, and no model has a wider one.
pub(crate) const MOST: usize = 1 << 16;

/// Whether CUDA multiplies the codes of this matrix, for a result of this dtype.
pub(crate) fn is_multiplied(weight: &Quantised, out: Dtype) -> bool {
    let is_fit = |size: usize| size.is_multiple_of(MULTIPLE) && size <= MOST;
    let [rows, width] = [weight.shape().rows(), weight.shape().width()];
    out != Dtype::F32 && weight.multiplied_scales().is_some() && is_fit(rows) && is_fit(width)
}

/// Whether a device multiplies in fp8, by doing so once: a library may lack what a GPU has.
pub fn check_fp8_matmuls(device: &Device) -> Result<()> {
    let fails =
        |device: &str, problem: String| ComputeError::Fp8 { device: device.into(), problem };
    match device.kind() {
        DeviceKind::Cpu { .. } => Err(fails("the CPU", "it has no instructions for it".into())),
        DeviceKind::Gpu { .. } => Err(fails("a GPU by Metal or Vulkan", "only CUDA does".into())),
        DeviceKind::Cuda { .. } => {
            let params = Params::default();
            let ones =
                || device.upload_as([MULTIPLE, MULTIPLE], &[1.0; MULTIPLE * MULTIPLE], Dtype::Bf16);
            let weight = Quantised::new(&ones()?, Quantisation::Fp8)?.multiplied_in_fp8("");
            let x = ones()?.into();
            let made = Tape::inference(device, &params, 0).linear(&x, Linear::new(&weight));
            let done = made.and_then(|y| device.synchronise().map(|()| drop(y)));
            done.map_err(|error| fails("this GPU", error.to_string()))
        }
    }
}
