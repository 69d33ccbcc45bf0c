//! Configs of other trainers: refused, or a job that hearth accepts and that names every key.

use trainer::config::RawConfig;
use trainer::import::import_text;

pub fn read(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let (config, job) = (crate::place("config"), crate::place("job.toml"));
    if let Ok(imported) = import_text(text, &config, &job) {
        let read = RawConfig::from_text(&imported.text, &job).and_then(RawConfig::resolve);
        assert!(read.is_ok(), "{}", imported.text);
    }
}
