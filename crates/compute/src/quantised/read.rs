//! How quantised numbers are read, a run of a row at a time.

use std::sync::LazyLock;

use super::{BLOCK, GROUP};
use crate::codebook::Codebook;
use crate::cpu::gemm::FloatSource;

/// The sixteen numbers of nf4: quantiles of the normal distribution, from its paper.
pub(crate) const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// What the codes of scales stand for.
pub(super) static SCALES: LazyLock<Codebook> = LazyLock::new(Codebook::signed);

/// Whole numbers, scaled by row.
#[derive(Clone, Copy)]
pub(crate) struct Int8<'a> {
    pub codes: &'a [u8],
    pub scales: &'a [f32],
    pub width: usize,
}

impl FloatSource for Int8<'_> {
    #[inline(always)]
    fn load(self, at: usize, to: &mut [f32]) {
        let scale = self.scales[at / self.width];
        for (to, code) in to.iter_mut().zip(&self.codes[at..]) {
            *to = scale * f32::from(code.cast_signed());
        }
    }
}

/// e4m3 floats, scaled by row.
#[derive(Clone, Copy)]
pub(crate) struct Fp8<'a> {
    pub codes: &'a [u8],
    pub scales: &'a [f32],
    pub width: usize,
}

impl FloatSource for Fp8<'_> {
    #[inline(always)]
    fn load(self, at: usize, to: &mut [f32]) {
        let scale = self.scales[at / self.width];
        for (to, code) in to.iter_mut().zip(&self.codes[at..]) {
            *to = scale * e4m3(*code);
        }
    }
}

/// What an e4m3 code stands for. Exponent and fraction moved to where f32 has them give the number
/// times 2^-120, also where the exponent is 0.
#[inline(always)]
pub(crate) fn e4m3(code: u8) -> f32 {
    const TWO_120: f32 = f32::from_bits((127 + 120) << 23);
    let size = f32::from_bits(u32::from(code & 0x7f) << 20) * TWO_120;
    let size = if code & 0x7f == 0x7f { f32::NAN } else { size };
    f32::from_bits(size.to_bits() | u32::from(code & 0x80) << 24)
}

/// Two numbers per byte, scaled by blocks.
#[derive(Clone, Copy)]
pub(crate) struct Nf4<'a> {
    pub codes: &'a [u8],
    block_codes: &'a [u8],
    groups: &'a [f32],
    mean: f32,
    book: &'static [f32; 256],
}

impl<'a> Nf4<'a> {
    pub fn new(codes: &'a [u8], block_codes: &'a [u8], groups: &'a [f32], mean: f32) -> Self {
        Self { codes, block_codes, groups, mean, book: SCALES.values() }
    }

    /// The scale of the block that a number belongs to.
    #[inline(always)]
    pub fn scale(&self, at: usize) -> f32 {
        let block = at / BLOCK;
        let distance = self.book[usize::from(self.block_codes[block])];
        distance * self.groups[block / GROUP] + self.mean
    }
}

impl FloatSource for Nf4<'_> {
    #[inline(always)]
    fn load(self, at: usize, to: &mut [f32]) {
        let mut at = at;
        let mut rest = to;
        while !rest.is_empty() {
            let (now, later) = rest.split_at_mut(rest.len().min(BLOCK - at % BLOCK));
            let scale = self.scale(at);
            for (index, to) in (at..).zip(now.iter_mut()) {
                let shift = if index % 2 == 0 { 4 } else { 0 };
                *to = scale * NF4[usize::from(self.codes[index / 2] >> shift & 15)];
            }
            at += now.len();
            rest = later;
        }
    }
}
