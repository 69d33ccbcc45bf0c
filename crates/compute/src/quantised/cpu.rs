//! Quantises on the CPU.

use super::read::{NF4, SCALES, e4m3};
use super::{BLOCK, GROUP, Quantisation, QuantisedInner, Scales};
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::rows::load;
use crate::dtype::{Real, with_real};

pub fn quantise(cpu: &CpuBackend, matrix: &Tensor, to: &mut QuantisedInner, exact: &mut [f32]) {
    let (how, width) = (to.scheme, matrix.shape().width());
    let codes = to.codes.data_mut::<u8>();
    match &mut to.scales {
        Scales::PerRow(scales) => {
            largest(cpu, matrix, width, scales.data_mut());
            let highest = if how == Quantisation::Int8 { 127.0 } else { 448.0 };
            for scale in scales.data_mut::<f32>() {
                *scale /= highest;
            }
            let scales = scales.data::<f32>();
            encode(cpu, matrix, width, codes, |row, number| {
                // A row of zeros has no scale, and needs none.
                let number = if scales[row] == 0.0 { 0.0 } else { number / scales[row] };
                match how {
                    Quantisation::Int8 => (number.round_ties_even() as i8).cast_unsigned(),
                    _ => nearest_e4m3(number),
                }
            });
        }
        Scales::PerBlock { codes: block_codes, groups, mean } => {
            largest(cpu, matrix, BLOCK, exact);
            encode_blocks(cpu, matrix, exact, codes);
            mean.data_mut()[0] = quantise_scales(exact, block_codes.data_mut(), groups.data_mut());
        }
    }
}

/// The largest size of every `length` numbers.
fn largest(cpu: &CpuBackend, matrix: &Tensor, length: usize, to: &mut [f32]) {
    with_real!(matrix.dtype(), T => {
        let numbers = matrix.data::<T>();
        cpu.par_rows(to, 1, |first, to| {
            for (index, to) in (first..).zip(to) {
                let line = &numbers[index * length..][..length];
                *to = line.iter().fold(0.0, |most: f32, x| most.max(x.to_f32().abs()));
            }
        });
    });
}

/// A code for every number, made from its row and itself.
fn encode(
    cpu: &CpuBackend,
    matrix: &Tensor,
    width: usize,
    codes: &mut [u8],
    code: impl Fn(usize, f32) -> u8 + Sync,
) {
    with_real!(matrix.dtype(), T => {
        let numbers = matrix.data::<T>();
        cpu.par_rows(codes, width, |first, codes| {
            for (row, codes) in (first..).zip(codes.chunks_exact_mut(width)) {
                for (to, number) in codes.iter_mut().zip(&numbers[row * width..]) {
                    *to = code(row, number.to_f32());
                }
            }
        });
    });
}

fn encode_blocks(cpu: &CpuBackend, matrix: &Tensor, scales: &[f32], codes: &mut [u8]) {
    with_real!(matrix.dtype(), T => {
        let numbers = matrix.data::<T>();
        cpu.par_rows(codes, BLOCK / 2, |first, codes| {
            let mut block = [0.0; BLOCK];
            for (index, codes) in (first..).zip(codes.chunks_exact_mut(BLOCK / 2)) {
                load(&numbers[index * BLOCK..][..BLOCK], &mut block);
                let factor = if scales[index] == 0.0 { 0.0 } else { 1.0 / scales[index] };
                for (code, pair) in codes.iter_mut().zip(block.as_chunks::<2>().0) {
                    *code = nearest_nf4(pair[0] * factor) << 4 | nearest_nf4(pair[1] * factor);
                }
            }
        });
    });
}

/// Scales' distances from their mean, which it returns, by the codebook, relative to the largest of a
/// group.
pub fn quantise_scales(exact: &mut [f32], codes: &mut [u8], groups: &mut [f32]) -> f32 {
    let total: f64 = exact.iter().map(|scale| f64::from(*scale)).sum();
    let average = (total / exact.len().max(1) as f64) as f32;
    for scale in exact.iter_mut() {
        *scale -= average;
    }
    let pieces = exact.chunks(GROUP).zip(codes.chunks_mut(GROUP)).zip(groups);
    for ((distances, codes), group) in pieces {
        *group = distances.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        SCALES.encode(distances, *group, codes);
    }
    average
}

/// The code of the nearest of the sixteen.
fn nearest_nf4(number: f32) -> u8 {
    let above = NF4.windows(2).take_while(|pair| number > f32::midpoint(pair[0], pair[1]));
    above.count() as u8
}

/// The code of the nearest e4m3 number, ties to an even code. What is larger than all becomes the
/// largest; NaN stays NaN.
pub(super) fn nearest_e4m3(number: f32) -> u8 {
    if number.is_nan() {
        return 0x7f;
    }
    let (sign, size) = (if number.is_sign_negative() { 0x80 } else { 0 }, number.abs());
    // Codes of positive numbers rise with them; 0x7e is the largest.
    let (mut low, mut high) = (0u8, 0x7e);
    while high - low > 1 {
        let middle = u8::midpoint(low, high);
        if e4m3(middle) <= size { low = middle } else { high = middle }
    }
    let (below, above) = (size - e4m3(low), e4m3(high) - size);
    let is_upper = below > above || below == above && low % 2 == 1;
    sign | if is_upper { high } else { low }
}
