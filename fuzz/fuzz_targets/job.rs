//! Job files: what is accepted is written and read back the same.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use trainer::config::RawConfig;

fuzz_target!(|text: &str| {
    let read = |text: &str| RawConfig::from_text(text, Path::new("job.toml"))?.resolve();
    if let Ok(job) = read(text) {
        let again = read(&job.resolved());
        assert!(again.is_ok_and(|again| again == job), "{}", job.resolved());
    }
});
