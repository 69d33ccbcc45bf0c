//! Tokens by index on a GPU. The indices are sorted on the host, which has them anyway.

use super::Lookup;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "gather", text: include_str!("kernel.cu") };

pub fn gather(cuda: &CudaBackend, lookup: &Lookup, x: &Tensor, y: &mut Tensor, add: bool) {
    let (width, elements) = (x.shape().width(), y.shape().elements());
    let p = pack(width, &[x, y]);
    let packs = elements / p;
    let variant = CudaVariant::of(&[x.dtype(), y.dtype()]).with_pack(p);
    let arguments = arguments![x, &lookup.ids, y, packs, width, lookup.n, lookup.n_tokens, add];
    cuda.launch(&KERNELS, "gather", variant, LaunchConfig::per_element(packs), &arguments);
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
    cuda: &CudaBackend,
    lookup: &Lookup,
    order: &Tensor,
    x: &Tensor,
    y: &mut Tensor,
    add: bool,
) {
    let (width, elements) = (x.shape().width(), y.shape().elements());
    let p = pack(width, &[x, y]);
    let packs = elements / p;
    let variant = CudaVariant::of(&[x.dtype(), y.dtype()]).with_pack(p);
    let Lookup { ids, n, n_tokens } = lookup;
    let arguments = arguments![x, ids, order, y, packs, width, *n, *n_tokens, add];
    cuda.launch(&KERNELS, "scatter", variant, LaunchConfig::per_element(packs), &arguments);
}
