//! The largest keys against a sort.

use super::top_k;
use crate::testing::{device, for_random_sizes};
use crate::{Device, DeviceKind, RandomSequence};

fn picked(keys: &[f32], n: usize, k: usize) -> Vec<u32> {
    let keys = device().upload([keys.len() / n, n], keys).unwrap();
    top_k(&keys, k).unwrap().to_vec()
}

#[test]
fn the_largest_come_first_and_of_equal_ones_the_first() {
    assert_eq!(picked(&[1.0, 3.0, -2.0, 3.0, 0.0], 5, 4), [1, 3, 0, 4]);
    assert_eq!(picked(&[2.0; 6], 3, 2), [0, 1, 0, 1]);
    let infinite = [f32::NEG_INFINITY, f32::MIN, f32::INFINITY, f32::NAN, f32::MAX];
    assert_eq!(picked(&infinite, 5, 5), [3, 2, 4, 1, 0]);
    assert_eq!(picked(&[1.0, 2.0], 2, 0), []);
}

#[test]
fn every_row_has_its_own() {
    for_random_sizes(20, [3, 700, 1], |[samples, n, _]| {
        let random = RandomSequence::new(n as u64, samples as u64);
        // Rounded, so that many are equal.
        let keys: Vec<f32> = (0..samples * n).map(|at| (4.0 * random.normal(at)).round()).collect();
        let k = n.div_ceil(3);
        let mut expected = Vec::new();
        for row in keys.chunks(n.max(1)) {
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|a, b| row[*b].partial_cmp(&row[*a]).unwrap());
            expected.extend(order[..k].iter().map(|id| *id as u32));
        }
        assert_eq!(picked(&keys, n.max(1), k), expected, "{samples} rows of {n}");
    });
}

#[test]
fn wrong_sizes_are_refused_and_meta_takes_the_same_bytes() {
    let device = device();
    let keys = device.upload([1, 2], &[1.0f32, 2.0]).unwrap();
    let error = top_k(&keys, 3).err().unwrap().to_string();
    assert_eq!(error, "top_k: k is 3, expected at most the number of keys, 2");
    let meta = Device::meta(DeviceKind::cpu(1), 1 << 20);
    let keys = meta.upload([2, 64], &[0.0f32; 128]).unwrap();
    assert_eq!(top_k(&keys, 16).unwrap().shape(), [2, 16].into());
}
