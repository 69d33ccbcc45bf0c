//! Norm and rotation on the processor, a head at a time.

use super::{Form, Pairs};
use crate::Tensor;
use crate::backward::Slot;
use crate::cpu::Cpu;
use crate::cpu::rows::{load, store};
use crate::dtype::with_real;
use crate::ops::rms_norm::{back_through, normalise};

pub fn forward(cpu: &Cpu, x: &Tensor, weight: Option<&Tensor>, form: &Form, y: &mut Tensor) {
    let (width, head_width) = (x.shape().width(), form.head_width);
    let weight = weight.map(Tensor::data::<f32>);
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.rows(y.data_mut::<T>(), width, |first, rows| {
            let mut turn = Turn::forth(form);
            let mut head = vec![0.0; head_width];
            for (row, y) in (first..).zip(rows.chunks_exact_mut(width)) {
                turn.go_to(row);
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
pub fn backward(cpu: &Cpu, norm: Option<&(Tensor, Tensor)>, form: &Form, gradient: &mut Tensor) {
    let (width, head_width) = (gradient.shape().width(), form.head_width);
    with_real!(gradient.dtype(), T => {
        let norm = norm.map(|(x, weight)| (x.data::<T>(), weight.data::<f32>()));
        cpu.rows(gradient.data_mut::<T>(), width, |first, rows| {
            let mut turn = Turn::back(form);
            let (mut head, mut g) = (vec![0.0; head_width], vec![0.0; head_width]);
            for (row, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                turn.go_to(row);
                for (index, out) in out.chunks_exact_mut(head_width).enumerate() {
                    load(out, &mut g);
                    turn.apply(&mut g);
                    if let Some((x, weight)) = norm {
                        load(&x[row * width + index * head_width..][..head_width], &mut head);
                        let inverse = normalise(&mut head, form.epsilon);
                        g.iter_mut().zip(weight).for_each(|(g, weight)| *g *= weight);
                        back_through(&head, inverse, &mut g);
                    }
                    store(&g, out, false);
                }
            }
        });
    });
}

/// Σ gradient · x̂ over the heads of all rows, the gradient turned back.
pub fn weight_gradient(
    cpu: &Cpu,
    x: &Tensor,
    gradient: &Tensor,
    form: &Form,
    partial: &mut Tensor,
    slot: &mut Slot,
) {
    let (rows, width, head_width) = (x.shape().rows(), x.shape().width(), form.head_width);
    with_real!(x.dtype(), T => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        cpu.sum_rows(rows, partial, (&mut slot.tensor, slot.add), |block, sums| {
            let mut turn = Turn::back(form);
            let (mut head, mut g) = (vec![0.0; head_width], vec![0.0; head_width]);
            for row in block {
                turn.go_to(row);
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
struct Turn<'a> {
    rope: Option<(&'a [f32], Pairs)>,
    /// -1 to turn back.
    sign: f32,
    /// Of the token it stands at; apart, because all heads use them and halves lie apart too.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl<'a> Turn<'a> {
    fn forth(form: &'a Form) -> Self {
        let rope = form.rope.as_ref().map(|(table, pairs)| (table.data::<f32>(), *pairs));
        let angles = vec![0.0; form.head_width / 2];
        Self { rope, sign: 1.0, cos: angles.clone(), sin: angles }
    }

    fn back(form: &'a Form) -> Self {
        Self { sign: -1.0, ..Self::forth(form) }
    }

    /// Goes to the token of a row. Where samples share a table, it has a row per token.
    #[inline(always)]
    fn go_to(&mut self, row: usize) {
        let Some((table, _)) = self.rope else { return };
        let start = row * 2 * self.cos.len() % table.len();
        let (angles, _) = table[start..].as_chunks::<2>();
        for ((cos, sin), angle) in self.cos.iter_mut().zip(&mut self.sin).zip(angles) {
            (*cos, *sin) = (angle[0], self.sign * angle[1]);
        }
    }

    #[inline(always)]
    fn apply(&self, head: &mut [f32]) {
        let angles = self.cos.iter().zip(&self.sin);
        let turned = |a: f32, b: f32, cos: f32, sin: f32| (a * cos - b * sin, a * sin + b * cos);
        match self.rope {
            None => {}
            Some((_, Pairs::Interleaved)) => {
                for ([a, b], (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                    (*a, *b) = turned(*a, *b, *cos, *sin);
                }
            }
            Some((_, Pairs::HalfSplit)) => {
                let (first, second) = head.split_at_mut(head.len() / 2);
                for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                    (*a, *b) = turned(*a, *b, *cos, *sin);
                }
            }
        }
    }
}
