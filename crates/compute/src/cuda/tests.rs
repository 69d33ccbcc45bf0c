//! What can be shown without a GPU: that every kernel compiles. Needs NVRTC, and says so where it is
//! missing. And with one: what becomes of the arena's memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use super::driver::SmVersion;
use super::kernels::{CudaVariant, PRELUDE};
use super::nvrtc::Nvrtc;
use crate::testing::on_gpu;
use crate::{DeviceKind, Dtype, RandomSequence};

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
        let shared = fs::read_to_string(source.with_file_name("shape.cuh")).unwrap_or_default();
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
