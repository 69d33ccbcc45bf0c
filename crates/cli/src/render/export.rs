//! What `hearth export` wrote, as a page.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;
use trainer::export::gguf::GgufSummary;
use trainer::export::merge::MergedModel;
use trainer::export::ollama::OllamaFolder;

use crate::text::{DIM, PLAIN, TextPage, plural};

/// A file that was written and proven.
#[derive(Serialize)]
pub struct ExportRow {
    pub format: String,
    pub path: PathBuf,
    pub layers: usize,
    /// Tensors that have no layer in the base: none, or it would have failed.
    pub unmatched: usize,
    pub difference: f64,
}

/// Draws it.
pub fn page(all: &[ExportRow]) -> String {
    let mut page = TextPage::new();
    let mut rows = vec![["for", "layers", "unmatched", "difference", "file"].map(str::to_owned)];
    rows.extend(all.iter().map(|row| {
        let difference = format!("{:.0e}", row.difference);
        let path = row.path.display().to_string();
        [row.format.clone(), row.layers.to_string(), row.unmatched.to_string(), difference, path]
    }));
    page.table(&rows);
    page.line(DIM, "each was read back by the rules of its program, and compared");
    page.finish()
}

/// Draws what was merged.
pub fn merged(merged: &MergedModel) -> String {
    let MergedModel { path, n_changed, n_unchanged, n_copied, left_out, worst_steps } = merged;
    let mut page = TextPage::new();
    page.row("merged", PLAIN, &path.display().to_string());
    page.row("tensors", PLAIN, &format!("{n_changed} changed, {n_unchanged} as they were"));
    page.row("copied", PLAIN, &format!("{n_copied} other files"));
    for path in left_out {
        page.row("left out", PLAIN, &format!("{}, weights of the base alone", path.display()));
    }
    page.line(
        DIM,
        &format!(
            "all of it was read again: what changed is base and adapter, at most {worst_steps:.3} \
             steps of its format apart; what did not is the same to the byte"
        ),
    );
    page.finish()
}

/// Draws the formats of a GGUF file.
pub fn gguf(path: &Path, summary: &GgufSummary) -> String {
    let mut page = TextPage::new();
    let counted = |(format, n): (&String, &usize)| format!("{n} {format}");
    let tensors: Vec<_> = summary.formats.iter().map(counted).collect();
    page.row("model", PLAIN, &path.display().to_string());
    page.row("tensors", PLAIN, &tensors.join(", "));
    if !summary.fallbacks.is_empty() {
        let n: usize = summary.fallbacks.values().sum();
        let formats: Vec<_> = summary.fallbacks.iter().map(counted).collect();
        page.line(
            DIM,
            &format!(
                "the rows of {} are no multiple of the format's blocks; they have another, as \
                 llama.cpp has them: {}",
                plural(n, "tensor"),
                formats.join(", ")
            ),
        );
    }
    page.finish()
}

/// Prints what was written for Ollama, as a page or as one JSON object.
pub fn show_ollama(written: &OllamaFolder, is_json: bool, out: &mut dyn Write) -> io::Result<()> {
    let OllamaFolder { path, model, n_layers, template } = written;
    if is_json {
        let model = model.as_ref().map(|(path, summary)| {
            json!({ "path": path, "formats": summary.formats, "fallbacks": summary.fallbacks })
        });
        let row = json!({ "path": path, "model": model, "layers": n_layers, "template": template });
        return writeln!(out, "{row}");
    }
    if let Some((path, summary)) = model {
        write!(out, "{}", gguf(path, summary))?;
    }
    let mut page = TextPage::new();
    if *n_layers > 0 {
        page.row("adapter", PLAIN, &format!("{n_layers} layers"));
    }
    page.row("Modelfile", PLAIN, &path.display().to_string());
    let template =
        template.unwrap_or("not one that is known: Ollama looks for it in the GGUF file");
    page.row("template", PLAIN, template);
    write!(out, "{}", page.finish())
}
