//! Decoders are made by others, and read what strangers share. One that panics has met a file that it did not expect: that
//! file is damaged, and nothing else happens. Every other panic is a bug of ours and ends the program (`main.rs` of `cli`).

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::problem::ProblemKind;

thread_local! {
    static IS_DECODING: Cell<bool> = const { Cell::new(false) };
}

/// Whether a decoder is at work on this thread, so that a panic is not ours.
pub fn is_decoding() -> bool {
    IS_DECODING.get()
}

/// What a decoder makes of a file. What it was given is not used again after a panic.
pub(super) fn contained<T>(decode: impl FnOnce() -> T) -> Result<T, ProblemKind> {
    let before = IS_DECODING.replace(true);
    let decoded = catch_unwind(AssertUnwindSafe(decode));
    IS_DECODING.set(before);
    decoded.map_err(|_| ProblemKind::Damaged { why: "its decoder failed on it".into() })
}

#[cfg(test)]
mod tests {
    use super::super::decode;

    /// Files that made decoders panic, found by fuzzing: scans of some components, a palette that is too long.
    #[test]
    fn a_decoder_that_panics_has_found_a_damaged_file() {
        let files: [(&str, &[u8]); 4] = [
            ("a.jpg", include_bytes!("contain/scans-1.jpg")),
            ("b.jpg", include_bytes!("contain/scans-2.jpg")),
            ("c.jpg", include_bytes!("contain/scans-3.jpg")),
            ("d.png", include_bytes!("contain/palette.png")),
        ];
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let problem = decode(&path).map(|_| ()).unwrap_err().to_string();
            assert!(problem.starts_with("is damaged: "), "{name}: {problem}");
            assert!(!super::is_decoding());
        }
    }
}
