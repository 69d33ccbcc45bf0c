//! Stands for the matrix unit on machines where we know of none that a program may use.
#![allow(unsafe_code)]

use super::{GemmSize, MatrixView};

pub(super) use super::plain::multiply;

pub(super) fn is_available() -> bool {
    false
}

pub(crate) fn pack_right(_: MatrixView<'_>, _: f32, _: usize, _: usize, _: &mut [f32]) {
    unreachable!("there is no matrix unit");
}

/// # Safety
/// Not to be called.
pub(crate) unsafe fn multiply_packed(
    _: GemmSize,
    _: (*mut f32, usize),
    _: bool,
    _: MatrixView<'_>,
    _: (&[f32], usize),
    _: &mut [f32],
) {
    unreachable!("there is no matrix unit");
}
