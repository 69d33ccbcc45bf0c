//! Tokens copied on the CPU.

use super::TokenSpan;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::dtype::{Real, with_real};

pub fn copy(cpu: &CpuBackend, from: &Tensor, to: &mut Tensor, span: TokenSpan) {
    let tokens = TokenRows::new(from, to, span);
    with_real!(from.dtype(), T => {
        let from = from.data::<T>();
        tokens.each(cpu, from, to.data_mut::<T>(), |from, to| to.copy_from_slice(from));
    });
}

/// The gradient may be rounded and what it is added to not: parameters are f32.
pub fn accumulate(
    cpu: &CpuBackend,
    gradient: &Tensor,
    sum: &mut Tensor,
    span: TokenSpan,
    add: bool,
) {
    let tokens = TokenRows::new(gradient, sum, span);
    with_real!(gradient.dtype(), T => with_real!(sum.dtype(), S => {
        tokens.each(cpu, gradient.data::<T>(), sum.data_mut::<S>(), |gradient, sum| {
            for (sum, gradient) in sum.iter_mut().zip(gradient) {
                let before = if add { sum.to_f32() } else { 0.0 };
                *sum = S::from_f32(before + gradient.to_f32());
            }
        });
    }));
}

/// Which rows of one tensor belong to which of another.
#[derive(Clone, Copy)]
struct TokenRows {
    width: usize,
    n_from: usize,
    n_to: usize,
    span: TokenSpan,
}

impl TokenRows {
    fn new(from: &Tensor, to: &Tensor, span: TokenSpan) -> Self {
        let tokens = |tensor: &Tensor| tensor.shape().sizes()[1];
        Self { width: from.shape().width(), n_from: tokens(from), n_to: tokens(to), span }
    }

    /// Calls `work` with the two rows of each token of the span.
    fn each<T: Sync, S: Send>(
        self,
        cpu: &CpuBackend,
        from: &[T],
        to: &mut [S],
        work: impl Fn(&[T], &mut [S]) + Sync,
    ) {
        let Self { width, n_from, n_to, span } = self;
        cpu.par_rows(to, width, |first, rows| {
            for (row, to) in (first..).zip(rows.chunks_exact_mut(width)) {
                let (sample, token) = (row / n_to, row % n_to);
                if (span.to..span.to + span.count).contains(&token) {
                    let row = sample * n_from + span.from + token - span.to;
                    work(&from[row * width..][..width], to);
                }
            }
        });
    }
}
