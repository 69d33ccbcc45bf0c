//! Numbers of every format, sixteen at a time in a vector, on their way to the matrix unit.
#![allow(unsafe_code)]

#[allow(clippy::wildcard_imports)] // Thirty names that all say what they are.
use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::quantised::read::NF4;
use crate::quantised::{Fp8, Int8, Nf4};

/// Numbers that are read sixteen at a time.
pub(super) trait Load16: Copy {
    /// Those from `at` on whose bit in `mask` is set, zeros for the others.
    ///
    /// # Safety
    /// The CPU must have the vectors.
    unsafe fn load16(self, at: usize, mask: u16) -> __m512;

    /// Asks for those around `at` to be brought near. There need not be any.
    fn prefetch(self, at: usize);

    /// Two sixteens as pairs of bf16.
    ///
    /// # Safety
    /// The CPU must have the vectors.
    #[inline(always)]
    unsafe fn load16_as_bf16(self, low: (usize, u16), high: (usize, u16)) -> __m512i {
        // SAFETY: up to the caller.
        unsafe {
            let [low, high] = [self.load16(low.0, low.1), self.load16(high.0, high.1)];
            pair(round(low), round(high))
        }
    }
}

#[inline(always)]
fn prefetch<T>(numbers: &[T], at: usize) {
    // SAFETY: a hint, which may name any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(numbers.as_ptr().wrapping_add(at).cast()) };
}

/// The last number that a mask lets through must be there.
#[inline(always)]
fn check<T>(numbers: &[T], at: usize, mask: u16) -> *const T {
    assert!(mask == 0 || at + (16 - mask.leading_zeros() as usize) <= numbers.len());
    numbers.as_ptr().wrapping_add(at)
}

impl Load16 for &[f32] {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self, at);
    }

    #[inline(always)]
    unsafe fn load16(self, at: usize, mask: u16) -> __m512 {
        // SAFETY: reads what `check` found to be there; vectors are up to the caller.
        unsafe { _mm512_maskz_loadu_ps(mask, check(self, at, mask)) }
    }
}

impl Load16 for &[bf16] {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self, at);
    }

    #[inline(always)]
    unsafe fn load16(self, at: usize, mask: u16) -> __m512 {
        // SAFETY: as above.
        unsafe { widen(_mm256_maskz_loadu_epi16(mask, check(self, at, mask).cast())) }
    }

    #[inline(always)]
    unsafe fn load16_as_bf16(self, low: (usize, u16), high: (usize, u16)) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let low = _mm256_maskz_loadu_epi16(low.1, check(self, low.0, low.1).cast());
            let high = _mm256_maskz_loadu_epi16(high.1, check(self, high.0, high.1).cast());
            let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high));
            _mm512_or_si512(_mm512_cvtepu16_epi32(low), high)
        }
    }
}

impl Load16 for &[f16] {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self, at);
    }

    #[inline(always)]
    unsafe fn load16(self, at: usize, mask: u16) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, check(self, at, mask).cast())) }
    }
}

impl Load16 for Int8<'_> {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self.codes, at);
    }

    #[inline(always)]
    unsafe fn load16(self, at: usize, mask: u16) -> __m512 {
        if mask == 0 {
            // SAFETY: vectors are up to the caller.
            return unsafe { _mm512_setzero_ps() };
        }
        let scale = self.scales[at / self.width];
        // SAFETY: as above.
        unsafe {
            let codes = _mm_maskz_loadu_epi8(mask, check(self.codes, at, mask).cast());
            let numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
            _mm512_mul_ps(numbers, _mm512_set1_ps(scale))
        }
    }
}

impl Load16 for Fp8<'_> {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self.codes, at);
    }

    /// See [`crate::quantised::read::e4m3`].
    #[inline(always)]
    unsafe fn load16(self, at: usize, mask: u16) -> __m512 {
        const TWO_120: f32 = f32::from_bits((127 + 120) << 23);
        if mask == 0 {
            // SAFETY: vectors are up to the caller.
            return unsafe { _mm512_setzero_ps() };
        }
        let scale = self.scales[at / self.width];
        // SAFETY: as above.
        unsafe {
            let codes = _mm_maskz_loadu_epi8(mask, check(self.codes, at, mask).cast());
            let codes = _mm512_cvtepu8_epi32(codes);
            let sizes = _mm512_and_si512(codes, _mm512_set1_epi32(0x7f));
            let signs = _mm512_slli_epi32::<24>(_mm512_xor_si512(codes, sizes));
            let is_nan = _mm512_cmpeq_epi32_mask(sizes, _mm512_set1_epi32(0x7f));
            let sizes = _mm512_castsi512_ps(_mm512_slli_epi32::<20>(sizes));
            let sizes = _mm512_mul_ps(sizes, _mm512_set1_ps(TWO_120));
            let sizes = _mm512_mask_mov_ps(sizes, is_nan, _mm512_set1_ps(f32::NAN));
            let numbers = _mm512_or_si512(_mm512_castps_si512(sizes), signs);
            _mm512_mul_ps(_mm512_castsi512_ps(numbers), _mm512_set1_ps(scale))
        }
    }
}

impl Load16 for Nf4<'_> {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self.codes, at / 2);
    }

    /// Rows are whole blocks, so sixteen numbers that start at a multiple of sixteen share a scale.
    #[inline(always)]
    unsafe fn load16(self, at: usize, mask: u16) -> __m512 {
        debug_assert_eq!(at % 16, 0);
        if mask == 0 {
            // SAFETY: vectors are up to the caller.
            return unsafe { _mm512_setzero_ps() };
        }
        let scale = self.scale(at);
        let bytes = self.codes[at / 2..].first_chunk::<8>().expect("rows are whole blocks");
        // SAFETY: as above; sixteen floats of the table are read.
        unsafe {
            let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*bytes));
            let nibble = _mm_set1_epi8(15);
            let upper = _mm_and_si128(_mm_srli_epi16::<4>(bytes), nibble);
            let codes = _mm_unpacklo_epi8(upper, _mm_and_si128(bytes, nibble));
            let table = _mm512_loadu_ps(NF4.as_ptr());
            let numbers = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), table);
            _mm512_maskz_mul_ps(mask, numbers, _mm512_set1_ps(scale))
        }
    }
}

/// The upper halves of two sixteens, side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn pair(low: __m512i, high: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(low), high)
}

/// Rounds to bf16, which is the upper half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn round(numbers: __m512) -> __m512i {
    _mm512_add_epi32(_mm512_castps_si512(numbers), _mm512_set1_epi32(0x8000))
}

/// bf16 as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn widen(numbers: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(numbers)))
}
