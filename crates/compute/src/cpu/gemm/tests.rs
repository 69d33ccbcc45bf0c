//! Both GEMM backends against sums in f64, for all dtypes, transposed or not, and edges.

use half::{bf16, f16};

use super::*;
use crate::random::TestRng;

type Multiply = unsafe fn(GemmSize, GemmOutPtr, MatrixView<'_>, MatrixView<'_>, f32, &mut [f32]);

/// A matrix in one of the dtypes, with the values it really holds.
struct Matrix {
    f32s: Vec<f32>,
    bf16s: Vec<bf16>,
    f16s: Vec<f16>,
    format: usize,
    width: usize,
    transposed: bool,
}

impl Matrix {
    const FORMATS: usize = 4;

    fn new(random: &mut TestRng, rows: usize, columns: usize, format: usize) -> Self {
        let transposed = random.below(2) == 1;
        let (lines, length) = if transposed { (columns, rows) } else { (rows, columns) };
        // Lines may be longer than what is used of them.
        let width = length + random.below(3);
        let mut f32s: Vec<f32> = (0..lines * width).map(|_| random.normal()).collect();
        let bf16s: Vec<_> = f32s.iter().map(|x| bf16::from_f32(*x)).collect();
        let f16s: Vec<_> = f32s.iter().map(|x| f16::from_f32(*x)).collect();
        match format {
            2 => f32s = bf16s.iter().map(|x| x.to_f32()).collect(),
            3 => f32s = f16s.iter().map(|x| x.to_f32()).collect(),
            _ => {}
        }
        Self { f32s, bf16s, f16s, format, width, transposed }
    }

    fn grid(&self) -> MatrixView<'_> {
        let data = match self.format {
            0 | 1 => Floats::F32(&self.f32s),
            2 => Floats::Bf16(&self.bf16s),
            _ => Floats::F16(&self.f16s),
        };
        let grid = MatrixView::rows(data, self.width);
        let grid = if self.format == 1 { grid.as_bf16() } else { grid };
        if self.transposed { grid.t() } else { grid }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        let (line, at) = if self.transposed { (column, row) } else { (row, column) };
        f64::from(self.f32s[line * self.width + at])
    }
}

fn check(multiply: Multiply, random: &mut TestRng, size: GemmSize, formats: [usize; 2]) {
    let GemmSize { rows, columns, inner } = size;
    let left = Matrix::new(random, rows, inner, formats[0]);
    let right = Matrix::new(random, inner, columns, formats[1]);
    let (stride, add) = (columns + random.below(3), random.below(2) == 1);
    let scale = [1.0, 0.3][random.below(2)];
    let before: Vec<f32> = (0..rows * stride).map(|_| random.normal()).collect();
    let mut out = before.clone();
    let mut scratch = vec![f32::NAN; SCRATCH_FLOATS];
    let to = GemmOutPtr { start: out.as_mut_ptr(), stride, add };
    // SAFETY: `out` holds the block.
    unsafe { multiply(size, to, left.grid(), right.grid(), scale, &mut scratch) };
    // Rounded operands are as exact as bf16, whose unit is 2^-8; all else as f32.
    let unit = if formats.contains(&1) { 2f64.powi(-8) } else { f64::from(f32::EPSILON) };
    for row in 0..rows {
        for column in 0..stride {
            let at = row * stride + column;
            let (ours, before) = (f64::from(out[at]), f64::from(before[at]));
            if column >= columns {
                assert_eq!(ours, before, "beyond the block");
                continue;
            }
            let terms =
                (0..inner).map(|k| f64::from(scale) * left.at(row, k) * right.at(k, column));
            let start = if add { before } else { 0.0 };
            let size_of_terms: f64 = terms.clone().map(f64::abs).sum::<f64>() + start.abs();
            let exact = start + terms.sum::<f64>();
            let error = (ours - exact).abs() / (size_of_terms * unit).max(1e-30);
            assert!(
                error < 4.0,
                "{size:?} {formats:?} at {row}, {column}: {ours} {exact}, {error} units"
            );
        }
    }
}

fn check_all(multiply: Multiply) {
    let mut random = TestRng::new(7);
    for [rows, columns, inner] in [[1, 1, 1], [32, 32, 32], [2, 3, 0], [70, 33, 70], [33, 70, 130]]
    {
        let size = GemmSize::new(rows, columns, inner);
        for format in 0..Matrix::FORMATS * Matrix::FORMATS {
            check(
                multiply,
                &mut random,
                size,
                [format / Matrix::FORMATS, format % Matrix::FORMATS],
            );
        }
    }
    for _ in 0..60 {
        let [rows, columns] = [0; 2].map(|_: usize| 1 + random.below(140));
        let size = GemmSize::new(rows, columns, random.below(140));
        let formats = [0; 2].map(|_: usize| random.below(Matrix::FORMATS));
        check(multiply, &mut random, size, formats);
    }
}

#[test]
fn simd_matmul_is_right() {
    check_all(plain::multiply);
}

#[test]
fn amx_matmul_is_right() {
    if has_amx() {
        check_all(tiles::multiply);
    }
}

/// Magnitudes of all sizes side by side, where splits of a value get lost first.
#[test]
fn amx_is_as_exact_as_f32_over_the_whole_range() {
    if !has_amx() {
        return;
    }
    let mut random = TestRng::new(8);
    for exponent in [-30, -12, 0, 12, 30] {
        let values: Vec<f32> =
            (0..32 * 64).map(|_| random.normal() * 10f32.powi(exponent / 2)).collect();
        let (a, b) = values.split_at(32 * 32);
        let (mut out, mut scratch) = (vec![0.0; 32 * 32], vec![0.0; SCRATCH_FLOATS]);
        let [left, right] = [a, b].map(|data| MatrixView::rows(Floats::F32(data), 32));
        let (size, start) = (GemmSize::new(32, 32, 32), out.as_mut_ptr());
        let to = GemmOutPtr { start, stride: 32, add: false };
        // SAFETY: `out` holds the block.
        unsafe { tiles::multiply(size, to, left, right, 1.0, &mut scratch) };
        for (at, ours) in out.iter().enumerate() {
            let terms =
                (0..32).map(|k| f64::from(a[at / 32 * 32 + k]) * f64::from(b[k * 32 + at % 32]));
            let size: f64 = terms.clone().map(f64::abs).sum();
            let error = (f64::from(*ours) - terms.sum::<f64>()).abs() / size;
            assert!(error < f64::from(f32::EPSILON), "10^{exponent}: {error}");
        }
    }
}

#[test]
fn what_is_not_finite_is_not_hidden() {
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let (mut a, b) = (vec![1.0; 64], vec![0.5; 64]);
        a[9] = value;
        let (mut out, mut scratch) = (vec![0.0; 64], vec![0.0; SCRATCH_FLOATS]);
        let [left, right] = [&a, &b].map(|data| MatrixView::rows(Floats::F32(data), 8));
        let backend = if has_amx() { GemmBackend::Amx } else { GemmBackend::Simd };
        let to = GemmOut { data: &mut out, stride: 8, add: false };
        backend.gemm(GemmSize::new(8, 8, 8), to, left, right, &mut scratch);
        assert!(out[8..16].iter().all(|x| !x.is_finite()) && out[16..].iter().all(|x| *x == 4.0));
    }
}
