//! The reference of all keys, `docs/config.md`, made from their declarations.

use std::fmt::Write as _;

use super::SECTIONS;
use super::section::{Key, KeyDefault};

const OPENING: &str = "\
# Keys of a job

A job is one TOML file. Only `base.path` and either `data.images` or `text.path` must be in it; every other key has a
default. A job about images has `[data]` and `[sample]`, one about texts `[text]` and `[writing]`. Relative paths are
relative to the file's folder. Ready jobs are in `recipes/`.

On the command line `--set KEY=VALUE` stands above the file, and relative paths are relative to the current folder there.
Of several `--set` for one key the last counts. `--set data.validation=unset` takes a key back to its default; in quotes
`unset` is text: `--set 'data.trigger=\"unset\"'`. Some keys have a flag of their own:

| flag | key |
|---|---|
| `--images` | `data.images` |
| `--text` | `text.path` |
| `--base` | `base.path` |
| `--out` | `output.folder` |
| `--steps` | `train.steps` |
| `--batch` | `train.batch` |
| `--lr` | `optimizer.learning_rate` |
| `--rank` | `adapter.rank` |
| `--resolution` | `data.resolution` |
| `--mode` | `machine.mode` |
| `--max-temp` | `machine.max_temp` |

A flag and `--set` for the same key are refused, since one of them is a slip.

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
            KeyDefault::Required => "required".to_owned(),
            KeyDefault::Default(value) if value.is_empty() => "not set".to_owned(),
            KeyDefault::Default(value) => format!("`{value}`"),
        };
        let _ = writeln!(page, "| `{path}.{name}` | {accepted} | {default} | {bound} | {doc} |");
        rows(page, &format!("{path}.{name}[]"), inner);
    }
}
