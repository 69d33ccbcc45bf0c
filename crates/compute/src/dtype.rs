//! The dtypes a tensor can hold.

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// How one number is stored. Arithmetic is in f32 whatever the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names say it.
pub enum Dtype {
    F32,
    Bf16,
    F16,
    U32,
    I32,
    U8,
}

impl Dtype {
    /// Bytes per number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::U8 => 1,
        }
    }

    /// A number as it is held in this dtype; itself in those without fractions.
    pub fn round(self, number: f32) -> f32 {
        match self {
            Self::Bf16 => bf16::from_f32(number).to_f32(),
            Self::F16 => f16::from_f32(number).to_f32(),
            Self::F32 | Self::U32 | Self::I32 | Self::U8 => number,
        }
    }

    /// Whether it holds fractions, so that ops can compute with it.
    pub fn is_real(self) -> bool {
        matches!(self, Self::F32 | Self::Bf16 | Self::F16)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U8 => "u8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a tensor can hold: any of its bit patterns is a value.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// Its dtype.
    const DTYPE: Dtype;
}

/// An element with fractions: stored as itself, computed with as f32.
pub(crate) trait Real: Element {
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;

    /// Many at once, into as many or more.
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.to_f32();
        }
    }

    /// Many at once, into as many or more.
    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::from_f32(*from);
        }
    }
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {
        $(impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: Dtype = Dtype::$dtype;
        })*
    };
}

element!(f32 => F32, bf16 => Bf16, f16 => F16, u32 => U32, i32 => I32, u8 => U8);

impl Real for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Real for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// To nearest, ties to even. Written out because half's own form asks for the value's class
    /// first, which keeps the compiler from using vectors.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        Self::from_bits((if value.is_nan() { quiet } else { rounded }) as u16)
    }
}

impl Real for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }

    // The CPU's own conversion is looked for once per slice, not once per number.
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(&mut to[..from.len()]);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to[..from.len()].convert_from_f32_slice(from);
    }
}

/// Runs `$body` with `$T` standing for the Rust type of a real `$dtype`. An op has checked before
/// that the dtype is real.
macro_rules! with_real {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::Dtype::F32 => {
                type $T = f32;
                $body
            }
            $crate::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
            $crate::Dtype::F16 => {
                type $T = half::f16;
                $body
            }
            other => unreachable!("an op let {other} through as a real format"),
        }
    };
}
pub(crate) use with_real;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        let odd = [0.0, -0.0, 1.0, 1.003_906_3, 3.4e38, -1e-40, f32::INFINITY, f32::NAN, f32::MIN];
        let many = (0..200_000u32).map(|i| f32::from_bits(i.wrapping_mul(21_473)));
        for value in odd.into_iter().chain(many) {
            let (ours, theirs) = (<bf16 as Real>::from_f32(value), bf16::from_f32(value));
            assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "{value}: {ours} {theirs}");
        }
    }
}
