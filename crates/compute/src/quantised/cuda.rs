//! Quantises on a GPU, and reads back.

use super::{BLOCK, GROUP, Quantisation, Quantised, QuantisedInner, Scales};
use crate::codebook::Codebook;
use crate::cuda::{CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};
use crate::{Dtype, Tensor};

const KERNELS: CudaSource = CudaSource { name: "quantised", text: include_str!("kernel.cu") };

/// The number of nf4 in the kernels.
const NF4: u32 = 2;
/// Rows and columns that a block transposes.
const TILE: usize = 64;

/// `exact` has room for the scales of blocks before they are quantised too.
pub(super) fn quantise(
    cuda: &CudaBackend,
    matrix: &Tensor,
    to: &mut QuantisedInner,
    exact: &mut Tensor,
) {
    let (rows, width) = (matrix.shape().rows(), matrix.shape().width());
    let variant = CudaVariant::of(&[matrix.dtype(), Dtype::F32]);
    match &mut to.scales {
        Scales::PerRow(scales) => {
            let is_fp8 = to.scheme == Quantisation::Fp8;
            let arguments = arguments![matrix, &mut to.codes, scales, width, is_fp8];
            cuda.launch(&KERNELS, "quantise_rows", variant, LaunchConfig::blocks(rows), &arguments);
        }
        Scales::PerBlock { codes, groups, mean } => {
            let n = matrix.shape().elements() / BLOCK;
            let arguments = arguments![matrix, &mut to.codes, &mut *exact, n];
            cuda.launch(&KERNELS, "quantise_blocks", variant, LaunchConfig::per_row(n), &arguments);
            let arguments = arguments![&*exact, &mut *mean, n];
            cuda.launch(&KERNELS, "mean_scale", variant, LaunchConfig::blocks(1), &arguments);
            let book = book(cuda);
            let zero = Codebook::signed().zero();
            let arguments =
                [&arguments![&*exact, &*mean, codes, groups, n][..], &[book, zero.into()]].concat();
            let grid =
                LaunchConfig { threads: GROUP as u32, ..LaunchConfig::blocks(n.div_ceil(GROUP)) };
            cuda.launch(&KERNELS, "quantise_scales", variant, grid, &arguments);
        }
    }
}

/// Writes the numbers in dtype `dtype` to a place that has room for them.
pub fn dequantise(cuda: &CudaBackend, from: &Quantised, dtype: Dtype, to: CudaArg) {
    let QuantisedInner { scheme: how, shape, codes, scales, .. } = &*from.0;
    let (n, width) = (shape.elements(), shape.width());
    let none = CudaArg::NONE;
    let scales = match scales {
        Scales::PerRow(scales) => [scales.into(), none, none, none, none],
        Scales::PerBlock { codes, groups, mean } => {
            [none, codes.into(), groups.into(), mean.into(), book(cuda)]
        }
    };
    let how = match how {
        Quantisation::Int8 => 0u32,
        Quantisation::Fp8 => 1,
        Quantisation::Nf4 => NF4,
    };
    let arguments = [&[codes.into()][..], &scales, &[to], &arguments![n, width, how]].concat();
    // Blocks of nf4 have 64 elements, rows of the others any number.
    let pack = if how == NF4 || width.is_multiple_of(8) { 8 } else { 1 };
    let variant = CudaVariant::of(&[Dtype::F32, dtype]).with_pack(pack);
    let grid = LaunchConfig::per_element(n.div_ceil(pack));
    cuda.launch(&KERNELS, "dequantise", variant, grid, &arguments);
}

/// Rounds the rows of an operand of a matmul, its columns multiplied by factors if there are some: to codes, and a
/// scale for each row.
pub fn round_rows(
    cuda: &CudaBackend,
    x: &Tensor,
    factors: Option<&Tensor>,
    [codes, scales]: [CudaArg; 2],
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(pack(width, &[x]).max(2));
    let (variant, threads) = variant.holding(width);
    let grid = LaunchConfig { threads, ..LaunchConfig::blocks(rows) };
    let arguments = [x.into(), factors.into(), codes, scales, width.into()];
    cuda.launch(&KERNELS, "round_rows", variant, grid, &arguments);
}

/// The codes of a matrix, with rows for columns.
pub fn transpose_codes(cuda: &CudaBackend, from: &Quantised, to: CudaArg) {
    let (rows, columns) = (from.shape().rows(), from.shape().width());
    let blocks = [columns.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1];
    let grid = LaunchConfig { blocks, ..LaunchConfig::blocks(1) };
    let arguments = [from.codes().into(), to, rows.into(), columns.into()];
    let variant = CudaVariant::of(&[Dtype::F32]);
    cuda.launch(&KERNELS, "transpose_codes", variant, grid, &arguments);
}

fn book(cuda: &CudaBackend) -> CudaArg {
    cuda.table("signed codebook", || Codebook::signed().table())
}
