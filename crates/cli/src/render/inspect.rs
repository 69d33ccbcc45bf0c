//! A model's page: what it is, its size by group, its tensors, what looks wrong.

use std::collections::BTreeMap;
use std::path::PathBuf;

use machine::Bytes;
use serde::Serialize;
use weights::survey::{Oddity, ValueStats};

use crate::text::{BOLD, DIM, GOOD, PLAIN, TextPage, WARN, bar};

/// One model: a file, a set of shards, or a component of a pipeline folder.
#[derive(Serialize)]
pub struct ModelSurvey {
    /// What was opened.
    pub path: PathBuf,
    /// Files it lies in.
    pub files: Vec<PathBuf>,
    /// Their checksums, in that order, if they were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checksums: Vec<String>,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Parameters in all tensors.
    pub params: u64,
    /// Metadata of the file.
    pub metadata: BTreeMap<String, String>,
    /// All tensors.
    pub tensors: Vec<TensorRow>,
    /// What looks wrong.
    pub warnings: Vec<Oddity>,
}

/// One tensor.
#[derive(Serialize)]
pub struct TensorRow {
    pub name: String,
    pub format: String,
    pub shape: Vec<u64>,
    pub bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<ValueStats>,
}

/// Chosen: more groups than these are better looked at with --all.
const GROUPS_SHOWN: usize = 16;

/// Metadata can hold whole training configurations.
const METADATA_SHOWN: usize = 12;
const METADATA_CHARS: usize = 200;

/// Draws one model.
pub fn page(survey: &ModelSurvey, all: bool) -> String {
    let mut page = TextPage::new();
    page.line(BOLD, &survey.path.display().to_string());
    page.row("size", PLAIN, &size(survey));
    page.row("formats", PLAIN, &formats(&survey.tensors));
    for (file, checksum) in survey.files.iter().zip(&survey.checksums) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        page.row("blake3", PLAIN, &format!("{checksum} {name}"));
    }
    metadata(survey, all, &mut page);
    page.heading("size by group");
    prefixes(survey, &mut page);
    page.heading("tensors");
    page.table(&if all { each(&survey.tensors) } else { patterns(&survey.tensors) });
    page.heading("what looks wrong");
    if survey.warnings.is_empty() {
        page.item("✓", GOOD, "nothing found");
    }
    for Oddity { what, hint } in &survey.warnings {
        page.item("!", WARN, what);
        page.below(DIM, &format!("hint: {hint}"));
    }
    page.line(PLAIN, "");
    page.finish()
}

fn metadata(survey: &ModelSurvey, all: bool, page: &mut TextPage) {
    let shown = if all { survey.metadata.len() } else { METADATA_SHOWN };
    for (at, (key, value)) in survey.metadata.iter().take(shown).enumerate() {
        let short: String = value.chars().take(METADATA_CHARS).collect();
        let more = if short.len() < value.len() { "…" } else { "" };
        page.row(if at == 0 { "metadata" } else { "" }, PLAIN, &format!("{key}: {short}{more}"));
    }
    if survey.metadata.len() > shown {
        page.row(
            "",
            DIM,
            &format!("and {} more entries, see --all", survey.metadata.len() - shown),
        );
    }
}

fn size(survey: &ModelSurvey) -> String {
    let (bytes, params) = (Bytes(survey.bytes), rounded(survey.params));
    let (tensors, files) =
        (counted(survey.tensors.len(), "tensor"), counted(survey.files.len(), "file"));
    format!("{bytes} in {tensors}, {params} parameters, {files}")
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn rounded(count: u64) -> String {
    match count {
        0..1_000_000 => count.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1} million", count as f64 / 1e6),
        _ => format!("{:.2} billion", count as f64 / 1e9),
    }
}

fn formats(tensors: &[TensorRow]) -> String {
    let mut counts = BTreeMap::<&str, (usize, u64)>::new();
    for tensor in tensors {
        let entry = counts.entry(&tensor.format).or_default();
        *entry = (entry.0 + 1, entry.1 + tensor.bytes);
    }
    let parts = counts
        .iter()
        .map(|(format, (count, bytes))| format!("{format} × {count}, {}", Bytes(*bytes)));
    parts.collect::<Vec<_>>().join(" · ")
}

fn prefixes(survey: &ModelSurvey, page: &mut TextPage) {
    let mut groups = BTreeMap::<&str, (usize, u64)>::new();
    for tensor in &survey.tensors {
        let entry = groups.entry(prefix(&tensor.name)).or_default();
        *entry = (entry.0 + 1, entry.1 + tensor.bytes);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    let whole = Bytes(survey.bytes);
    let mut rows: Vec<[String; 4]> = Vec::new();
    for (name, (count, bytes)) in groups.iter().take(GROUPS_SHOWN) {
        let bytes = Bytes(*bytes);
        rows.push([
            bar(bytes.share_of(whole)),
            bytes.to_string(),
            (*name).into(),
            counted(*count, "tensor"),
        ]);
    }
    page.table(&rows);
    if groups.len() > GROUPS_SHOWN {
        page.below(DIM, &format!("and {} smaller groups", groups.len() - GROUPS_SHOWN));
    }
}

/// Up to the first number in the name, or else up to its last part: `model.layers` of
/// `model.layers.3.mlp.weight`, `lm_head` of `lm_head.weight`.
fn prefix(name: &str) -> &str {
    let mut end = 0;
    for part in name.split('.') {
        if is_number(part) {
            return name[..end].trim_end_matches('.');
        }
        end += part.len() + 1;
    }
    name.rsplit_once('.').map_or(name, |(prefix, _)| prefix)
}

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

fn each(tensors: &[TensorRow]) -> Vec<[String; 4]> {
    let row = |tensor: &TensorRow| {
        [tensor.name.clone(), tensor.format.clone(), format!("{:?}", tensor.shape), details(tensor)]
    };
    tensors.iter().map(row).collect()
}

fn details(tensor: &TensorRow) -> String {
    let size = Bytes(tensor.bytes).to_string();
    match tensor.values.map(|values| (values.min, values.max)) {
        Some((Some(least), Some(most))) => format!("{size}, {least:.3e} to {most:.3e}"),
        _ => size,
    }
}

/// Layers that repeat share a line: `model.layers.*.mlp.weight`.
fn patterns(tensors: &[TensorRow]) -> Vec<[String; 4]> {
    let mut order: Vec<(String, &str, &[u64])> = Vec::new();
    let mut groups = BTreeMap::<(String, &str, &[u64]), (usize, u64)>::new();
    for tensor in tensors {
        let parts = tensor.name.split('.').map(|part| if is_number(part) { "*" } else { part });
        let key =
            (parts.collect::<Vec<_>>().join("."), tensor.format.as_str(), tensor.shape.as_slice());
        let entry = groups.entry(key.clone()).or_insert_with(|| {
            order.push(key);
            (0, 0)
        });
        *entry = (entry.0 + 1, entry.1 + tensor.bytes);
    }
    let row = |key: (String, &str, &[u64])| {
        let (count, bytes) = groups[&key];
        let times = if count > 1 { format!("× {count}, ") } else { String::new() };
        let (name, format, shape) = key;
        [name, format.to_owned(), format!("{shape:?}"), format!("{times}{}", Bytes(bytes))]
    };
    order.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_group_by_what_comes_before_the_first_number() {
        assert_eq!(prefix("model.layers.3.mlp.weight"), "model.layers");
        assert_eq!(prefix("lm_head.weight"), "lm_head");
        assert_eq!(prefix("3.weight"), "");
        assert_eq!(prefix("tensor"), "tensor");
    }

    #[test]
    fn repeated_layers_share_a_line() {
        let row = |name: &str| TensorRow {
            name: name.into(),
            format: "F32".into(),
            shape: vec![2],
            bytes: 8 << 20,
            values: None,
        };
        let rows = patterns(&[row("a.0.w"), row("a.1.w"), row("b.w")]);
        assert_eq!(rows, [["a.*.w", "F32", "[2]", "× 2, 16 MiB"], ["b.w", "F32", "[2]", "8 MiB"]]);
    }
}
