//! Quantises on a GPU, and reads back. The scales of nf4's blocks, a sixty-fourth of the numbers, are
//! quantised on the host: their mean is a sum in f64, which GPUs of Apple's do not have.

use super::read::{NF4, SCALES};
use super::{BLOCK, Quantisation, Quantised, QuantisedInner, Scales, cpu};
use crate::Tensor;
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, WgslSource, arguments, singles};

const KERNELS: WgslSource = WgslSource { name: "quantised", text: include_str!("kernel.wgsl") };

/// `exact` has room for the scales of blocks before they are quantised too.
pub(super) fn quantise(
    gpu: &GpuBackend,
    matrix: &Tensor,
    to: &mut QuantisedInner,
    exact: &mut Tensor,
) {
    let (n, rows, width) =
        (matrix.shape().elements(), matrix.shape().rows(), matrix.shape().width());
    let variant = GpuVariant::of(&[matrix.dtype()]);
    match &mut to.scales {
        Scales::PerRow(scales) => {
            let is_fp8 = to.scheme == Quantisation::Fp8;
            // The largest number of either dtype.
            let largest = if is_fp8 { 448.0f32 } else { 127.0 };
            let arguments = arguments![matrix, &mut *scales, width, largest];
            gpu.launch(&KERNELS, "row_scales", &variant, rows, &arguments);
            let arguments = arguments![matrix, &*scales, &mut to.codes, n, width, is_fp8];
            gpu.launch(&KERNELS, "row_codes", &variant, singles(n.div_ceil(4)), &arguments);
        }
        Scales::PerBlock { codes, groups, mean } => {
            let blocks = n / BLOCK;
            let arguments = arguments![matrix, &mut *exact, blocks];
            gpu.launch(&KERNELS, "block_scales", &variant, singles(blocks), &arguments);
            let arguments =
                [matrix.into(), (&*exact).into(), tables(gpu), (&mut to.codes).into(), n.into()];
            gpu.launch(&KERNELS, "block_codes", &variant, singles(n / 8), &arguments);
            let mut distances: Vec<f32> = exact.to_vec();
            let (mut code_bytes, mut largest) =
                (vec![0u8; blocks], vec![0.0; groups.shape().elements()]);
            let average = cpu::quantise_scales(&mut distances, &mut code_bytes, &mut largest);
            codes.write(&code_bytes);
            groups.write(&largest);
            mean.write(&[average]);
        }
    }
}

/// Writes the numbers to a tensor of f32 that has room for them.
pub fn dequantise(gpu: &GpuBackend, from: &Quantised, to: &mut Tensor) {
    let (n, width) = (from.shape().elements(), from.shape().width());
    let (kernel, rest) = match from.scheme() {
        Quantisation::Nf4 => ("blocks", arguments![n].to_vec()),
        how => ("rows", arguments![n, width, how == Quantisation::Fp8].to_vec()),
    };
    let arguments = [&parts(gpu, from)[..], &arguments![to], &rest].concat();
    gpu.launch(&KERNELS, kernel, &GpuVariant::default(), singles(n), &arguments);
}

/// What kernels are given of a matrix.
pub fn parts<'a>(gpu: &GpuBackend, matrix: &'a Quantised) -> Vec<GpuArg<'a>> {
    let QuantisedInner { codes, scales, .. } = &*matrix.0;
    match scales {
        Scales::PerRow(scales) => arguments![codes, scales].to_vec(),
        Scales::PerBlock { codes: block_codes, groups, mean } => {
            let mut all = arguments![codes, block_codes, groups, mean].to_vec();
            all.push(tables(gpu));
            all
        }
    }
}

/// The sixteen numbers, and then the codebook of scales.
fn tables(gpu: &GpuBackend) -> GpuArg<'static> {
    gpu.table("nf4", || [&NF4[..], SCALES.values()].concat())
}
