//! What can be shown without a GPU: that every kernel compiles. Needs NVRTC, and says so where it is
//! missing. And with one: what becomes of the arena's memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use super::driver::SmVersion;
use super::kernels::{CudaVariant, PRELUDE};
use super::nvrtc::Nvrtc;
use crate::testing::on_gpu;
use crate::{Device, DeviceKind, Dtype, FillPart, FillStats, RandomSequence, Tensor, fill_all};

/// Every kernel source.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "cu") {
            found.push(path);
        }
    }
    found
}

/// What sources must compile for: every dtype, alone and beside f32, one element at a time and several, for
/// the oldest GPUs and for newer ones.
fn variants() -> [(CudaVariant, SmVersion); 3] {
    let of = |types: &[Dtype], pack| CudaVariant::of(types).with_pack(pack);
    let [ampere, hopper] = [8, 9].map(|major| SmVersion { major, minor: 0 });
    [
        (of(&[Dtype::F32], 8), ampere),
        (of(&[Dtype::Bf16], 1), ampere),
        (of(&[Dtype::F16, Dtype::F32], 8), hopper),
    ]
}

#[test]
#[allow(clippy::print_stderr)] // Says why nothing is shown.
fn every_kernel_compiles() {
    let nvrtc = match Nvrtc::open() {
        Ok(nvrtc) => nvrtc,
        Err(error) => return eprintln!("no NVRTC here: {error}"),
    };
    let sources = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(sources.len() > 20);
    for source in sources {
        // What the sources of an op share lies beside them.
        let beside = ["shape.cuh", "tensors.cuh"].map(|name| source.with_file_name(name));
        let shared = beside.map(|path| fs::read_to_string(path).unwrap_or_default()).concat();
        let text = [PRELUDE, &shared, &fs::read_to_string(&source).unwrap()].concat();
        for (variant, capability) in variants() {
            // Tensor cores multiply 16-bit values, for heads of two widths.
            let by_units = text.contains("mma.sync");
            if by_units && variant.types[0] == Dtype::F32 {
                continue;
            }
            for &size in if by_units { &[64, 128][..] } else { &[4] } {
                let variant = CudaVariant { size, ..variant };
                let options = variant.options(&nvrtc.target(capability));
                let made = nvrtc.compile(&source.display().to_string(), &text, &options);
                assert!(made.is_ok(), "{variant:?}: {}", made.unwrap_err());
            }
        }
    }
}

/// On any GPU, as if it shared main memory: what is unmapped is mapped again, and computed with.
#[test]
fn pieces_above_the_last_tensor_are_unmapped_where_memory_is_shared() {
    const PIECES: u64 = 64 << 20;
    let Some(device) = on_gpu(1 << 30) else { return };
    let DeviceKind::Cuda { .. } = device.kind() else { return };
    let committed = device.committed_bytes();
    let committed = || committed.load(Ordering::Relaxed);
    device.set_shared_memory(true);
    device.take_host_memory(false);
    let stays = device.upload([4], &[1u32, 2, 3, 4]).unwrap();
    let sequence = RandomSequence::new(3, 4);
    let numbers = || {
        let tensor = device.normal([128 << 20], Dtype::F32, 1.0, sequence).unwrap();
        assert_eq!(committed(), 9 * PIECES);
        tensor.narrow(127 << 20..128 << 20).to_f32_vec()
    };
    let before = numbers();
    device.trim();
    assert_eq!(committed(), PIECES);
    assert!(before == numbers());
    assert_eq!(stays.to_vec::<u32>(), [1, 2, 3, 4]);
    // A GPU with memory of its own keeps it.
    device.set_shared_memory(false);
    device.trim();
    assert_eq!(committed(), 9 * PIECES);
}

/// Lets threads write to all of a tensor, while the GPU may still be at work in it, and reads it by the driver.
fn fill_and_read(device: &Device, bytes: usize, seed: usize) -> Tensor {
    let byte = move |at: usize| (at * seed % 251) as u8;
    drop(device.normal([bytes / 4], Dtype::F32, 1.0, RandomSequence::new(5, 6)).unwrap());
    let mut tensor = device.alloc([bytes], Dtype::U8).unwrap();
    fill_all(vec![&mut tensor], |_, mut parts: Vec<FillPart<'_>>| -> crate::Result<()> {
        let mut rest = parts.remove(0);
        std::thread::scope(|scope| {
            for start in (0..bytes).step_by(8 << 20) {
                let (part, after) = rest.split_at((bytes - start).min(8 << 20));
                rest = after;
                scope.spawn(move || {
                    part.fill(&mut |to| -> crate::Result<()> {
                        to.iter_mut().zip(start..).for_each(|(to, at)| *to = byte(at));
                        Ok(())
                    })
                });
            }
        });
        Ok(())
    })
    .unwrap();
    assert!(tensor.to_vec::<u8>().into_iter().eq((0..bytes).map(byte)));
    tensor
}

/// On any GPU whose driver maps host memory, as if it shared main memory.
#[test]
#[allow(clippy::print_stderr)] // Says why nothing is shown, and what was measured.
fn host_memory_is_filled_in_place_and_computed_with() {
    const PIECE: usize = 64 << 20;
    let Some(device) = on_gpu(1 << 30) else { return };
    let DeviceKind::Cuda { .. } = device.kind() else { return };
    let numbers = || device.normal([3 << 20], Dtype::F32, 1.0, RandomSequence::new(3, 4)).unwrap();
    device.take_host_memory(false);
    let expected = numbers().to_f32_vec();
    device.trim();
    let has_host = device.take_host_memory(true);
    eprintln!("{:?}", super::host_memory_trial(0));
    if !has_host {
        return;
    }
    assert!(numbers().to_f32_vec() == expected);
    // Across pieces, twice in the same place.
    for seed in [7, 9] {
        fill_and_read(&device, 2 * PIECE + 12_345, seed);
    }
    let in_place = 2 * (2 * PIECE as u64 + 12_345);
    assert_eq!(device.fill_stats(), FillStats { in_place, staged: 0 });
    // Given back, and taken again.
    let committed = device.committed_bytes();
    let stays = fill_and_read(&device, 1000, 11);
    device.trim();
    assert_eq!(committed.load(Ordering::Relaxed), PIECE as u64);
    // One that lies in both memories goes through buffers.
    device.take_host_memory(false);
    fill_and_read(&device, 2 * PIECE, 13);
    let in_place = in_place + 1000;
    assert_eq!(device.fill_stats(), FillStats { in_place, staged: 2 * PIECE as u64 });
    assert!(stays.to_vec::<u8>().into_iter().eq((0..1000).map(|at| (at * 11 % 251) as u8)));
}
