//! The largest keys on the CPU, row by row.

use crate::Tensor;
use crate::cpu::CpuBackend;

pub fn top_k(cpu: &CpuBackend, keys: &Tensor, ids: &mut Tensor) {
    let (n, k) = (keys.shape().width(), ids.shape().width());
    if k == 0 {
        return;
    }
    let keys = keys.data::<f32>();
    cpu.par_chunks(ids.data_mut::<u32>(), k, |sample, ids| {
        let keys = &keys[sample * n..][..n];
        let mut order: Vec<u32> = (0..n as u32).collect();
        order.sort_unstable_by(|a, b| {
            keys[*b as usize].total_cmp(&keys[*a as usize]).then(a.cmp(b))
        });
        ids.copy_from_slice(&order[..k]);
    });
}
