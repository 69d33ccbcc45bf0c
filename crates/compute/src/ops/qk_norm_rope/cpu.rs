//! Norm and rotation on the CPU, a head at a time.

use super::{QkNormRopeConfig, RopePairs};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{load, store};
use crate::dtype::with_real;
use crate::ops::rms_norm::{backward_row, normalise};

pub fn forward(
    cpu: &CpuBackend,
    x: &Tensor,
    weight: Option<&Tensor>,
    form: &QkNormRopeConfig,
    y: &mut Tensor,
) {
    let (width, head_width) = (x.shape().width(), form.head_width);
    let weight = weight.map(Tensor::data::<f32>);
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), width, |first, rows| {
            let mut turn = RopeRotation::forward(form);
            let mut head = vec![0.0; head_width];
            for (row, y) in (first..).zip(rows.chunks_exact_mut(width)) {
                turn.set_row(row);
                let x = x[row * width..][..width].chunks_exact(head_width);
                for (x, y) in x.zip(y.chunks_exact_mut(head_width)) {
                    load(x, &mut head);
                    if let Some(weight) = weight {
                        normalise(&mut head, form.epsilon);
                        head.iter_mut().zip(weight).for_each(|(x, weight)| *x *= weight);
                    }
                    turn.apply(&mut head);
                    store(&head, y, false);
                }
            }
        });
    });
}

/// Turns the gradient of the result into that of x, in place; the norm needs x and its weight.
pub fn backward(
    cpu: &CpuBackend,
    norm: Option<&(Tensor, Tensor)>,
    form: &QkNormRopeConfig,
    gradient: &mut Tensor,
) {
    let (width, head_width) = (gradient.shape().width(), form.head_width);
    with_real!(gradient.dtype(), T => {
        let norm = norm.map(|(x, weight)| (x.data::<T>(), weight.data::<f32>()));
        cpu.par_rows(gradient.data_mut::<T>(), width, |first, rows| {
            let mut turn = RopeRotation::backward(form);
            let (mut head, mut g) = (vec![0.0; head_width], vec![0.0; head_width]);
            for (row, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                turn.set_row(row);
                for (index, out) in out.chunks_exact_mut(head_width).enumerate() {
                    load(out, &mut g);
                    turn.apply(&mut g);
                    if let Some((x, weight)) = norm {
                        load(&x[row * width + index * head_width..][..head_width], &mut head);
                        let inverse = normalise(&mut head, form.epsilon);
                        g.iter_mut().zip(weight).for_each(|(g, weight)| *g *= weight);
                        backward_row(&head, inverse, &mut g);
                    }
                    store(&g, out, false);
                }
            }
        });
    });
}

/// Σ gradient · x̂ over the heads of all rows, the gradient turned back.
pub fn weight_gradient(
    cpu: &CpuBackend,
    x: &Tensor,
    gradient: &Tensor,
    form: &QkNormRopeConfig,
    partial: &mut Tensor,
    slot: &mut GradientSlot,
) {
    let (rows, width, head_width) = (x.shape().rows(), x.shape().width(), form.head_width);
    with_real!(x.dtype(), T => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        cpu.sum_rows(rows, partial, &mut slot.tensor, slot.add, |block, sums| {
            let mut turn = RopeRotation::backward(form);
            let (mut head, mut g) = (vec![0.0; head_width], vec![0.0; head_width]);
            for row in block {
                turn.set_row(row);
                let x = x[row * width..][..width].chunks_exact(head_width);
                let gradient = gradient[row * width..][..width].chunks_exact(head_width);
                for (x, gradient) in x.zip(gradient) {
                    load(x, &mut head);
                    load(gradient, &mut g);
                    normalise(&mut head, form.epsilon);
                    turn.apply(&mut g);
                    for ((sum, g), x) in sums.iter_mut().zip(&g).zip(&head) {
                        *sum += g * x;
                    }
                }
            }
        });
    });
}

/// Turns the heads of one token after another, if the op turns them.
struct RopeRotation<'a> {
    rope: Option<(&'a [f32], RopePairs)>,
    /// -1 to turn back.
    sign: f32,
    /// Of the token it stands at; apart, because all heads use them and halves lie apart too.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl<'a> RopeRotation<'a> {
    fn forward(form: &'a QkNormRopeConfig) -> Self {
        let rope = form.rope.as_ref().map(|(table, pairs)| (table.data::<f32>(), *pairs));
        let angles = vec![0.0; form.rotary_width() / 2];
        Self { rope, sign: 1.0, cos: angles.clone(), sin: angles }
    }

    fn backward(form: &'a QkNormRopeConfig) -> Self {
        Self { sign: -1.0, ..Self::forward(form) }
    }

    /// Goes to the token of a row. Where samples share a table, it has a row per token.
    #[inline(always)]
    fn set_row(&mut self, row: usize) {
        let Some((table, _)) = self.rope else { return };
        let start = row * 2 * self.cos.len() % table.len();
        let (angles, _) = table[start..].as_chunks::<2>();
        for ((cos, sin), angle) in self.cos.iter_mut().zip(&mut self.sin).zip(angles) {
            (*cos, *sin) = (angle[0], self.sign * angle[1]);
        }
    }

    #[inline(always)]
    fn apply(&self, head: &mut [f32]) {
        let head = &mut head[..2 * self.cos.len()];
        let angles = self.cos.iter().zip(&self.sin);
        let turned = |a: f32, b: f32, cos: f32, sin: f32| (a * cos - b * sin, a * sin + b * cos);
        match self.rope {
            None => {}
            Some((_, RopePairs::Interleaved)) => {
                for ([a, b], (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                    (*a, *b) = turned(*a, *b, *cos, *sin);
                }
            }
            Some((_, RopePairs::HalfSplit)) => {
                let (first, second) = head.split_at_mut(head.len() / 2);
                for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                    (*a, *b) = turned(*a, *b, *cos, *sin);
                }
            }
        }
    }
}
