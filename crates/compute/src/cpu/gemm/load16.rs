//! Loads values of every dtype, sixteen at a time, to be packed for AMX.
#![allow(unsafe_code)]

#[allow(clippy::wildcard_imports)] // Thirty names that all say what they are.
use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::quantised::read::NF4;
use crate::quantised::{Fp8, Int8, Nf4};

/// Sixteen elements from `at` on, of which those are there whose bit in `mask` is set.
#[derive(Clone, Copy)]
pub(super) struct Lanes16 {
    pub at: usize,
    pub mask: u16,
}

/// Values that are loaded sixteen at a time.
pub(super) trait Load16: Copy {
    /// Those whose bit in the mask is set, zeros for the others.
    ///
    /// # Safety
    /// The CPU must have AVX-512.
    unsafe fn load16(self, lanes: Lanes16) -> __m512;

    /// Prefetches those around `at`, which may be outside.
    fn prefetch(self, at: usize);

    /// Two vectors as pairs of bf16.
    ///
    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(always)]
    unsafe fn load16_as_bf16(self, low: Lanes16, high: Lanes16) -> __m512i {
        // SAFETY: up to the caller.
        unsafe {
            let [low, high] = [self.load16(low), self.load16(high)];
            pair(round(low), round(high))
        }
    }
}

#[inline(always)]
fn prefetch<T>(data: &[T], at: usize) {
    // SAFETY: a hint, which may name any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().wrapping_add(at).cast()) };
}

/// Checks that the last of the lanes is within `data`.
#[inline(always)]
fn check<T>(data: &[T], Lanes16 { at, mask }: Lanes16) -> *const T {
    assert!(mask == 0 || at + (16 - mask.leading_zeros() as usize) <= data.len());
    data.as_ptr().wrapping_add(at)
}

impl Load16 for &[f32] {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self, at);
    }

    #[inline(always)]
    unsafe fn load16(self, lanes: Lanes16) -> __m512 {
        // SAFETY: reads what `check` found to be there; AVX-512 is up to the caller.
        unsafe { _mm512_maskz_loadu_ps(lanes.mask, check(self, lanes)) }
    }
}

impl Load16 for &[bf16] {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self, at);
    }

    #[inline(always)]
    unsafe fn load16(self, lanes: Lanes16) -> __m512 {
        // SAFETY: as above.
        unsafe { widen(_mm256_maskz_loadu_epi16(lanes.mask, check(self, lanes).cast())) }
    }

    #[inline(always)]
    unsafe fn load16_as_bf16(self, low: Lanes16, high: Lanes16) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let low = _mm256_maskz_loadu_epi16(low.mask, check(self, low).cast());
            let high = _mm256_maskz_loadu_epi16(high.mask, check(self, high).cast());
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
    unsafe fn load16(self, lanes: Lanes16) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes.mask, check(self, lanes).cast())) }
    }
}

impl Load16 for Int8<'_> {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self.codes, at);
    }

    #[inline(always)]
    unsafe fn load16(self, lanes: Lanes16) -> __m512 {
        if lanes.mask == 0 {
            // SAFETY: AVX-512 is up to the caller.
            return unsafe { _mm512_setzero_ps() };
        }
        let scale = self.scales[lanes.at / self.width];
        // SAFETY: as above.
        unsafe {
            let codes = _mm_maskz_loadu_epi8(lanes.mask, check(self.codes, lanes).cast());
            let values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
            _mm512_mul_ps(values, _mm512_set1_ps(scale))
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
    unsafe fn load16(self, lanes: Lanes16) -> __m512 {
        const TWO_120: f32 = f32::from_bits((127 + 120) << 23);
        if lanes.mask == 0 {
            // SAFETY: AVX-512 is up to the caller.
            return unsafe { _mm512_setzero_ps() };
        }
        let scale = self.scales[lanes.at / self.width];
        // SAFETY: as above.
        unsafe {
            let codes = _mm_maskz_loadu_epi8(lanes.mask, check(self.codes, lanes).cast());
            let codes = _mm512_cvtepu8_epi32(codes);
            let sizes = _mm512_and_si512(codes, _mm512_set1_epi32(0x7f));
            let signs = _mm512_slli_epi32::<24>(_mm512_xor_si512(codes, sizes));
            let is_nan = _mm512_cmpeq_epi32_mask(sizes, _mm512_set1_epi32(0x7f));
            let sizes = _mm512_castsi512_ps(_mm512_slli_epi32::<20>(sizes));
            let sizes = _mm512_mul_ps(sizes, _mm512_set1_ps(TWO_120));
            let sizes = _mm512_mask_mov_ps(sizes, is_nan, _mm512_set1_ps(f32::NAN));
            let values = _mm512_or_si512(_mm512_castps_si512(sizes), signs);
            _mm512_mul_ps(_mm512_castsi512_ps(values), _mm512_set1_ps(scale))
        }
    }
}

impl Load16 for Nf4<'_> {
    #[inline(always)]
    fn prefetch(self, at: usize) {
        prefetch(self.codes, at / 2);
    }

    /// Rows are whole blocks, so sixteen values that start at a multiple of sixteen share a scale.
    #[inline(always)]
    unsafe fn load16(self, lanes: Lanes16) -> __m512 {
        debug_assert_eq!(lanes.at % 16, 0);
        if lanes.mask == 0 {
            // SAFETY: AVX-512 is up to the caller.
            return unsafe { _mm512_setzero_ps() };
        }
        let scale = self.scale(lanes.at);
        let bytes = self.codes[lanes.at / 2..].first_chunk::<8>().expect("rows are whole blocks");
        // SAFETY: as above; sixteen floats of the table are read.
        unsafe {
            let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*bytes));
            let nibble = _mm_set1_epi8(15);
            let upper = _mm_and_si128(_mm_srli_epi16::<4>(bytes), nibble);
            let codes = _mm_unpacklo_epi8(upper, _mm_and_si128(bytes, nibble));
            let table = _mm512_loadu_ps(NF4.as_ptr());
            let values = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), table);
            _mm512_maskz_mul_ps(lanes.mask, values, _mm512_set1_ps(scale))
        }
    }
}

/// The upper halves of two vectors, side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn pair(low: __m512i, high: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(low), high)
}

/// Rounds to bf16, which is the upper half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn round(values: __m512) -> __m512i {
    _mm512_add_epi32(_mm512_castps_si512(values), _mm512_set1_epi32(0x8000))
}

/// bf16 as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn widen(values: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(values)))
}
