//! The reference of all keys, `docs/config.md`, made from their declarations.

use std::fmt::Write as _;

use super::SECTIONS;
use super::data_sets::COMMON_KEYS;
use super::section::{Key, KeyDefault};

const OPENING: &str = "\
# Keys of a job

A job is one TOML file. It needs `base.path` and either `data.images` or `text.path`; every other key has a default. A
job for an image model has `[data]` and `[sample]`, a job for a language model `[text]` and `[generate]`. Relative paths
start at the folder of the file. `recipes/` has complete jobs.

`--set KEY=VALUE` on the command line overrides the file; relative paths then start at the current folder. If a key is
set twice, the last one counts. `--set data.validation=unset` restores a default; quoted, `unset` is text:
`--set 'data.trigger=\"unset\"'`. \"Not set: the plan chooses\" means the fastest value that fits into memory. Some keys
have their own flag:

| flag | key |
|---|---|
| `--images` | `data.images` |
| `--text` | `text.path` |
| `--base` | `base.path` |
| `--out` | `output.folder` |
| `--steps` | `train.steps` |
| `--batch` | `train.batch_size` |
| `--lr` | `optimizer.learning_rate` |
| `--rank` | `adapter.rank` |
| `--targets` | `adapter.targets` |
| `--resolution` | `data.resolution` |
| `--mode` | `machine.mode` |
| `--max-temp` | `machine.max_temp` |

A flag and `--set` for the same key is an error. A key that was renamed is an error that names the new key; a run of an
older version resumes all the same.

This page is generated from the declarations in `crates/trainer/src/config/` by `just snapshots`.
";

/// What is to be known of `[data]` before its keys.
fn about_data() -> String {
    let (last, others) = COMMON_KEYS.split_last().expect("there are some");
    let others: Vec<_> = others.iter().map(|key| format!("`{key}`")).collect();
    format!(
        "
Several sets of images stand one after the other, each as `[[data]]` with its own keys. An epoch shows all of them,
batches are mixed of images of one size, and an image that one set holds out is trained on in none. Five keys hold for
all sets and are typed once, in any of them: {} and `{last}`.
`--set data.repeats=2` sets a key of all sets, `--set data[1].repeats=2` that of the second. Errors name a key of a set
in the same way.
",
        others.join(", ")
    )
}

/// All keys with type, default, bound and meaning, as Markdown.
pub fn reference() -> String {
    let mut page = OPENING.to_owned();
    for (section, keys) in SECTIONS {
        let _ = writeln!(page, "\n## [{section}]");
        if section == "data" {
            page += &about_data();
        }
        page.push_str("\n| key | type | default | bound | meaning |\n|---|---|---|---|---|\n");
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
