//! Tokens by index on a card. The indices are sorted on the host, which has them anyway.

use super::Lookup;
use crate::Tensor;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments, pack};

const KERNELS: Source = Source { name: "gather", text: include_str!("kernel.cu") };

pub fn gather(cuda: &Cuda, lookup: &Lookup, x: &Tensor, y: &mut Tensor, add: bool) {
    let (width, elements) = (x.shape().width(), y.shape().elements());
    let p = pack(width, &[x, y]);
    let packs = elements / p;
    let variant = Variant::of(&[x.dtype(), y.dtype()]).by(p);
    let arguments = arguments![x, &lookup.ids, y, packs, width, lookup.n, lookup.n_tokens, add];
    cuda.launch(&KERNELS, "gather", variant, Grid::numbers(packs), &arguments);
}

/// Brings the positions within each sample into the order of their indices; those of the same index
/// stay as they were.
pub fn sort(lookup: &Lookup, order: &mut Tensor) {
    let (ids, n) = (lookup.ids.indices(), lookup.n.max(1));
    let mut all = Vec::with_capacity(ids.len());
    for ids in ids.chunks(n) {
        let mut positions: Vec<u32> = (0..ids.len() as u32).collect();
        positions.sort_by_key(|position| ids[*position as usize]);
        all.extend(positions);
    }
    order.write(&all);
}

pub fn scatter(
    cuda: &Cuda,
    lookup: &Lookup,
    order: &Tensor,
    x: &Tensor,
    y: &mut Tensor,
    add: bool,
) {
    let (width, elements) = (x.shape().width(), y.shape().elements());
    let p = pack(width, &[x, y]);
    let packs = elements / p;
    let variant = Variant::of(&[x.dtype(), y.dtype()]).by(p);
    let Lookup { ids, n, n_tokens } = lookup;
    let arguments = arguments![x, ids, order, y, packs, width, *n, *n_tokens, add];
    cuda.launch(&KERNELS, "scatter", variant, Grid::numbers(packs), &arguments);
}
