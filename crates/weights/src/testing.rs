//! Models for the tests of this crate, with bytes that can be told again.

use std::collections::BTreeMap;
use std::path::Path;

use crate::catalog::Catalog;
use crate::dtype::FileDtype;
use crate::safetensors::OutputTensor;
use crate::tensor::TensorInfo;
use crate::write::{FillTensorFn, write_file};

/// A file of u8 tensors of these sizes in bytes.
pub fn model(folder: &Path, sizes: &[u64]) -> Catalog {
    let path = folder.join("model.safetensors");
    let tensor = |(at, size): (usize, &u64)| OutputTensor {
        name: format!("t{at}"),
        dtype: FileDtype::U8,
        shape: vec![*size],
    };
    let tensors = sizes.iter().enumerate().map(tensor).collect();
    let fill: FillTensorFn<'_> = &mut |tensor, out| {
        out.write_all(&noise(&tensor.name, tensor.shape[0])).unwrap();
        Ok(())
    };
    write_file(&path, &BTreeMap::new(), tensors, false, fill).unwrap();
    Catalog::open(&path).unwrap()
}

/// What [`model`] put into a tensor.
pub fn bytes_of(tensor: &TensorInfo) -> Vec<u8> {
    noise(&tensor.name, tensor.bytes)
}

fn noise(name: &str, bytes: u64) -> Vec<u8> {
    let mut state =
        name.bytes().fold(1_u32, |state, byte| state.wrapping_mul(31).wrapping_add(byte.into()));
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..bytes).map(next).collect()
}
