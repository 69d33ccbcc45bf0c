//! Tokens by index on the CPU. A scatter goes by place rather than by token: with the indices
//! sorted, each place finds what lands on it, sums it in f32, and is written once by one thread.
//!
//! What is read may differ in dtype from what is written; its dtype is looked at row by row, as a
//! kernel for every pair of dtypes would be compiled for nothing.

use super::Lookup;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{load, store};
use crate::dtype::{Real, with_real};

pub fn gather(cpu: &CpuBackend, lookup: &Lookup, x: &Tensor, y: &mut Tensor, add: bool) {
    let width = x.shape().width();
    let (ids, n, n_tokens) = (lookup.ids.data::<u32>(), lookup.n, lookup.n_tokens);
    with_real!(y.dtype(), T => {
        cpu.par_rows(y.data_mut::<T>(), width, |first, rows| {
            let mut token = vec![0.0; width];
            for (row, y) in (first..).zip(rows.chunks_exact_mut(width)) {
                let start = (row / n * n_tokens + ids[row] as usize) * width;
                with_real!(x.dtype(), X => load(&x.data::<X>()[start..start + width], &mut token));
                store(&token, y, add);
            }
        });
    });
}

/// Brings the positions within each sample into the order of their indices; those of the same index
/// stay as they were.
pub fn sort(cpu: &CpuBackend, lookup: &Lookup, order: &mut Tensor) {
    let (ids, n) = (lookup.ids.data::<u32>(), lookup.n);
    cpu.par_chunks(order.data_mut::<u32>(), n, |sample, order| {
        let ids = &ids[sample * n..][..n];
        for (place, position) in order.iter_mut().zip(0..) {
            *place = position;
        }
        order.sort_unstable_by_key(|position| (ids[*position as usize], *position));
    });
}

pub fn scatter(
    cpu: &CpuBackend,
    lookup: &Lookup,
    order: &Tensor,
    x: &Tensor,
    y: &mut Tensor,
    add: bool,
) {
    let width = x.shape().width();
    let (order, n_tokens) = (order.data::<u32>(), lookup.n_tokens);
    with_real!(y.dtype(), T => {
        cpu.par_rows(y.data_mut::<T>(), width, |first, rows| {
            let mut sums = vec![0.0; width];
            for (row, y) in (first..).zip(rows.chunks_exact_mut(width)) {
                let (sample, place) = (row / n_tokens, row % n_tokens);
                let landing = landing(lookup, order, sample, place);
                if add && landing.is_empty() {
                    continue;
                }
                sums.fill(0.0);
                for position in landing {
                    add_row(x, sample * lookup.n + *position as usize, &mut sums);
                }
                store(&sums, y, add);
            }
        });
    });
}

/// The positions within a sample whose index is `place`, in their order.
fn landing<'a>(lookup: &Lookup, order: &'a [u32], sample: usize, place: usize) -> &'a [u32] {
    let ids = &lookup.ids.data::<u32>()[sample * lookup.n..][..lookup.n];
    let order = &order[sample * lookup.n..][..lookup.n];
    let id = |position: &u32| ids[*position as usize] as usize;
    let rest = &order[order.partition_point(|position| id(position) < place)..];
    let count = rest.iter().take_while(|position| id(position) == place).count();
    &rest[..count]
}

#[inline(always)]
fn add_row(x: &Tensor, row: usize, sums: &mut [f32]) {
    with_real!(x.dtype(), T => {
        let numbers = &x.data::<T>()[row * sums.len()..][..sums.len()];
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum += number.to_f32();
        }
    });
}
