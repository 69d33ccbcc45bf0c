//! Job files: what is accepted is written and read back the same.

use std::path::Path;

use trainer::config::RawConfig;

pub fn read(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let read = |text: &str| RawConfig::from_text(text, Path::new("job.toml"))?.resolve();
    if let Ok(job) = read(text) {
        let again = read(&job.resolved());
        assert!(again.is_ok_and(|again| again == job), "{}", job.resolved());
    }
}
