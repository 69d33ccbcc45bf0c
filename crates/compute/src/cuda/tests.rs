//! What can be shown without a GPU: that every kernel compiles. Needs NVRTC, and says so where it is
//! missing.

use std::fs;
use std::path::{Path, PathBuf};

use super::driver::SmVersion;
use super::kernels::{CudaVariant, PRELUDE};
use super::nvrtc::Nvrtc;
use crate::Dtype;

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
