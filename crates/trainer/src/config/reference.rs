//! The reference of all keys, `docs/config.md`, made from their declarations.

use std::fmt::Write as _;

use super::SECTIONS;
use super::section::{Key, Preset};

const OPENING: &str = "\
# Keys of a job

A job is one TOML file. Only `base.path` and either `data.images` or `text.path` must be in it; every other key has a
default. A job about pictures has `[data]` and `[sample]`, one about texts `[text]` and `[writing]`. Relative paths are
relative to the file's folder. `--set train.steps=20` on the command line stands above the file, and there relative
paths are relative to the current folder. Ready jobs are in `recipes/`.

This file is written from the declarations in `crates/trainer/src/config/`, by `just snapshots`.
";

/// All keys with type, default, bound and meaning, as Markdown.
pub fn reference() -> String {
    let mut page = OPENING.to_owned();
    for (section, keys) in SECTIONS {
        let _ = write!(page, "\n## [{section}]\n\n| key | type | default | bound | meaning |\n");
        page.push_str("|---|---|---|---|---|\n");
        rows(&mut page, section, &keys());
    }
    page
}

fn rows(page: &mut String, path: &str, keys: &[Key]) {
    for Key { name, doc, accepted, default, bound, inner } in keys {
        let default = match default {
            Preset::Required => "required".to_owned(),
            Preset::Default(value) if value.is_empty() => "not set".to_owned(),
            Preset::Default(value) => format!("`{value}`"),
        };
        let _ = writeln!(page, "| `{path}.{name}` | {accepted} | {default} | {bound} | {doc} |");
        rows(page, &format!("{path}.{name}[]"), inner);
    }
}
