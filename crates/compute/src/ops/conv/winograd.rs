//! Winograd convolution F(4x4, 3x3) (Lavin and Gray, "Fast Algorithms for
//! Convolutional Neural Networks", arXiv 1509.09308, section 4.3): sixteen pixels of the result,
//! four by four, from thirty-six multiplications per channel instead of a hundred and forty-four.
//!
//! y = Aᵀ·[(G·g·Gᵀ) ⊙ (Bᵀ·d·B)]·A
//!
//! for the kernel g and the tile d of six by six pixels that a square of the result sees. The
//! multiplications of all squares and channels at one of the thirty-six places are a matmul. In f32 only, where it loses
//! three or four bits.

use super::{Conv3d, ConvWindow, FLOPS, cpu, strips};
use crate::device::{Backend, DeviceKind};
use crate::op::OpContext;
use crate::ops::matmul::{FusedMatmul, Matmul};
use crate::{Dtype, Result, Tensor};

/// Pixels of the result along the side of a square, and of the image that it sees.
pub(super) const SIDE: usize = 4;
pub(super) const SEEN_SIDE: usize = 6;
/// Places of what a square sees.
pub(super) const PLACES: usize = SEEN_SIDE * SEEN_SIDE;
/// With fewer channels, the transforms take longer than the multiplications that are saved. Chosen:
/// half of the fewest that autoencoders have inside.
const MIN_CHANNELS: usize = if cfg!(test) { 3 } else { 64 };
/// Bytes of input tiles and their results at a time. Chosen: matmuls are large enough for packing the left
/// operand to be worth it.
const STRIP_BYTES: usize = if cfg!(test) { 8 << 10 } else { 64 << 20 };

impl ConvWindow {
    /// Whether Winograd is used. A GPU's matmuls are too fast for it to gain anything.
    pub(super) fn is_winograd(
        &self,
        kind: DeviceKind,
        outputs: usize,
        formats: [Dtype; 2],
    ) -> bool {
        matches!(kind, DeviceKind::Cpu { .. })
            && self.kernel[1..] == [3, 3]
            && self.stride[1..] == [1, 1]
            && self.seen_channels().min(outputs) >= MIN_CHANNELS
            && formats == [Dtype::F32; 2]
    }

    /// Squares of the result, down and across.
    pub(super) fn squares(&self) -> [usize; 2] {
        let [_, height, width] = self.result;
        [height, width].map(|side| side.div_ceil(SIDE))
    }

    /// Channels that a frame of the result is a sum of: those of each frame that the kernel sees.
    fn seen_channels(&self) -> usize {
        self.inputs * self.kernel[0]
    }
}

/// The kernels G·g·Gᵀ, [places, outputs, inputs], of which a frame of a kernel has its own.
fn kernels(cx: OpContext<'_>, weight: &Tensor) -> Result<Tensor> {
    let &[outputs, inputs, frames, ..] = weight.shape().sizes() else {
        unreachable!("checked by the op")
    };
    let mut kernels = cx.workspace([PLACES, outputs, inputs * frames], Dtype::F32)?;
    cx.count("winograd kernels", 0, &[weight, &kernels]);
    match cx.backend() {
        Backend::Meta | Backend::Cuda(_) | Backend::Gpu(_) => {}
        Backend::Cpu(backend) => cpu::winograd::kernels(backend, weight, &mut kernels),
    }
    Ok(kernels)
}

/// Convolves all clips. The squares of a frame stand beside those of the next: small frames become matmuls that
/// are large enough.
pub(super) fn convolve(
    cx: OpContext<'_>,
    window: ConvWindow,
    clips: &Tensor,
    layer: Conv3d<'_>,
    y: &mut Tensor,
) -> Result<()> {
    let kernels = kernels(cx, layer.weight)?;
    let &[_, outputs, inputs] = kernels.shape().sizes() else { unreachable!("made above") };
    let [down, across] = window.squares();
    let bytes = PLACES * (inputs + outputs) * across * Dtype::F32.bytes();
    let n_frames = clips.shape().sizes()[0] * window.result[0];
    for rows in strips(n_frames * down, (STRIP_BYTES / bytes).max(1)) {
        let n = rows.len() * across;
        let mut seen = cx.workspace([PLACES, inputs, n], Dtype::F32)?;
        cx.count("winograd input", SEEN_SIDE * seen.shape().elements(), &[&seen]);
        match cx.backend() {
            Backend::Meta | Backend::Cuda(_) | Backend::Gpu(_) => {}
            Backend::Cpu(backend) => {
                cpu::winograd::see(backend, window, clips, rows.start, &mut seen);
            }
        }
        let mut transformed = Vec::with_capacity(PLACES);
        for index in 0..PLACES {
            let mut sums = cx.workspace([outputs, n], Dtype::F32)?;
            let kernel = kernels.narrow(index..index + 1).reshape([outputs, inputs]);
            let seen = seen.narrow(index..index + 1).reshape([inputs, n]);
            FusedMatmul::new(&[Matmul::new(&kernel, (&seen).into())], &mut sums).run(cx)?;
            transformed.push(sums);
        }
        drop(seen);
        let sums: Vec<&Tensor> = transformed.iter().collect();
        cx.count("winograd finish", FLOPS * SIDE * SIDE * outputs * n, &sums);
        match cx.backend() {
            Backend::Meta | Backend::Cuda(_) | Backend::Gpu(_) => {}
            Backend::Cpu(backend) => {
                let (bias, activation) = (layer.bias, layer.activation);
                cpu::winograd::finish(backend, rows.start, &transformed, bias, activation, y);
            }
        }
    }
    Ok(())
}
