//! Stands in for AMX on machines without it.
#![allow(unsafe_code)]

use super::{GemmOutPtr, GemmSize, MatrixView};

pub(super) use super::plain::multiply;

pub(super) fn is_available() -> bool {
    false
}

pub(crate) fn pack_right(_: MatrixView<'_>, _: f32, _: usize, _: usize, _: &mut [f32]) {
    unreachable!("there is no AMX");
}

/// # Safety
/// Not to be called.
pub(crate) unsafe fn multiply_packed(
    _: GemmSize,
    _: GemmOutPtr,
    _: MatrixView<'_>,
    _: &[f32],
    _: usize,
    _: &mut [f32],
) {
    unreachable!("there is no AMX");
}
