//! FLUX.1 in the forms that people share: GGUF files, fp8 checkpoints with and without scales, and separate files for
//! VAE and text encoders. Made, and computed with the same weights, by diffusers (`tests/golden/flux/files.py`).

use std::path::{Path, PathBuf};

use crate::{printed, text};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/flux/files")
}

/// Fused tensors are cut in every form, and scales belong to the rows of the stored tensor.
#[test]
fn quantised_transformers_are_those_of_the_reference() {
    for (folder, file) in [
        ("gguf", "mixed.gguf"),
        ("fp8", "scaled.safetensors"),
        ("fp8", "rows.safetensors"),
        ("fp8", "cast.safetensors"),
    ] {
        let folder = golden().join(folder);
        let (weights, stem) = (folder.join(file), file.split('.').next().unwrap());
        let reference = folder.join(format!("{stem}.golden.safetensors"));
        let files = ["--weights", text(&weights), "--golden", text(&reference)];
        let page = printed(&[&["verify", text(&folder)][..], &files].concat());
        assert!(page.contains("within tolerance"), "{file}: {page}");
    }
}
