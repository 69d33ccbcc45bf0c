//! Stands for the matrix unit on machines where we know of none that a program may use.
#![allow(unsafe_code)]

use super::{Grid, Size};

pub(super) use super::plain::multiply;

pub(super) fn are_there() -> bool {
    false
}

pub(crate) fn lay_out(_: Grid<'_>, _: f32, _: usize, _: usize, _: &mut [f32]) {
    unreachable!("there is no matrix unit");
}

/// # Safety
/// Not to be called.
pub(crate) unsafe fn multiply_laid_out(
    _: Size,
    _: (*mut f32, usize),
    _: bool,
    _: Grid<'_>,
    _: (&[f32], usize),
    _: &mut [f32],
) {
    unreachable!("there is no matrix unit");
}
