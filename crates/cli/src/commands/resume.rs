//! What is said of a run that was interrupted: where its latest checkpoint can be used, and how it goes on.

use trainer::config::RunConfig;
use trainer::config::adapter::AdapterKind;
use trainer::train::checkpoint;

use crate::text::quoted;

/// Where the latest checkpoint can be used.
pub fn so_far(config: &RunConfig, step: u64) -> String {
    let folder = config.output.folder.join(checkpoint::path(step));
    let folder = quoted(&folder.display().to_string());
    match config.adapter.kind {
        AdapterKind::Lora | AdapterKind::Dora | AdapterKind::Loha | AdapterKind::Lokr => {
            format!("the adapter so far is in\n  {folder}")
        }
        AdapterKind::Full => {
            let base = quoted(&weights::hub::shown(&config.base.path));
            format!("the model so far:\n  hearth export {folder} --base {base} --out model")
        }
    }
}

/// The command that goes on with a run: the words that began it, for a shell, and `--resume`.
pub fn resume_command(words: impl Iterator<Item = String>) -> String {
    let begun = words.filter(|word| word != RESUME).map(|word| quoted(&word));
    ["hearth".into()].into_iter().chain(begun).chain([RESUME.into()]).collect::<Vec<_>>().join(" ")
}

const RESUME: &str = "--resume";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_typed_is_said_again() {
        let again = |words: &[&str]| resume_command(words.iter().map(|word| (*word).to_owned()));
        let words = ["train", "job.toml", "--device", "cuda:0", "--limit", "70%"];
        assert_eq!(again(&words), "hearth train job.toml --device cuda:0 --limit 70% --resume");
        let words = ["train", "--resume", "--out", "my run", "--set", "data.trigger='s", ""];
        assert_eq!(
            again(&words),
            r"hearth train --out 'my run' --set 'data.trigger='\''s' '' --resume"
        );
    }
}
