//! A checkpoint read back: `progress.json`, a zero, and the file of the state. It is refused, or says how far the run is.

use std::fs;

use trainer::train::checkpoint::read_progress;

/// Of the seeds; another step is refused.
const FOLDER: &str = "step-000002";

pub fn read(bytes: &[u8]) {
    let at = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let folder = crate::place("run").join(FOLDER);
    fs::create_dir_all(&folder).expect("the temporary folder can be written to");
    fs::write(folder.join("progress.json"), &bytes[..at]).expect("it can be written");
    let state = bytes.get(at + 1..).unwrap_or_default();
    fs::write(folder.join("state.safetensors"), state).expect("it can be written");
    if let Ok(mut progress) = read_progress(&folder) {
        assert_eq!(progress.step, 2, "the step of another folder");
        _ = progress.resumable_at();
        progress.record_validation(0.0);
        _ = progress.record_save(true);
    }
}
