//! A `Modelfile` for `ollama create`, beside the GGUF files it names.
//!
//! ```text
//! FROM ./model.gguf             or the base of an adapter
//! ADAPTER ./adapter.gguf
//! TEMPLATE """…"""              Go; left out where the chat template is none that we know
//! SYSTEM """…"""                what the chat template says by itself without a system message
//! PARAMETER stop "<|im_end|>"   each token that ends an answer
//! ```
//!
//! Ollama writes conversations by a Go template and cannot run the Jinja of a model. A known template is recognised by what
//! it does: it must write some conversations as the Go template does, to the byte. Without a TEMPLATE, Ollama looks at the
//! Jinja in the GGUF file and takes one of its own if it recognises it.

mod templates;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use weights::BytesDoneFn;
use weights::write::write_whole;

use self::templates::{FoundTemplate, GoTemplate};
use super::gguf::{self, GgufMix, GgufSummary};
use crate::error::{Result, TrainerError};
use crate::model::llama::language_model::LanguageModel;
use crate::text::Tokenizer;

/// What a Modelfile names.
#[derive(Clone, Copy)]
struct ModelfileParts<'a> {
    /// A GGUF file, relative to the Modelfile or absolute.
    from: &'a str,
    /// The same of an adapter.
    adapter: Option<&'a str>,
}

/// A Modelfile.
struct Modelfile {
    text: String,
    /// The chat template that was recognised.
    template: Option<&'static str>,
}

impl Modelfile {
    /// For a model with this tokenizer.
    fn new(parts: ModelfileParts<'_>, tokenizer: &Tokenizer) -> Self {
        let mut text = format!("FROM {}\n", parts.from);
        if let Some(adapter) = parts.adapter {
            _ = writeln!(text, "ADAPTER {adapter}");
        }
        let found = GoTemplate::find(tokenizer);
        if let Some(FoundTemplate { template, system }) = &found {
            _ = writeln!(text, "TEMPLATE \"\"\"{}\"\"\"", template.go);
            // A text with the mark that ends it cannot be said.
            if let Some(system) = system.as_ref().filter(|system| !system.contains("\"\"\"")) {
                _ = writeln!(text, "SYSTEM \"\"\"{system}\"\"\"");
            }
        }
        for end in tokenizer.eos_texts().iter().filter(|end| !end.contains('"')) {
            _ = writeln!(text, "PARAMETER stop \"{end}\"");
        }
        Self { text, template: found.map(|found| found.template.name) }
    }
}

/// What was written for Ollama.
pub struct OllamaFolder {
    /// The Modelfile.
    pub path: PathBuf,
    /// The GGUF file of a model, if one was written, and its formats.
    pub model: Option<(PathBuf, GgufSummary)>,
    /// Layers of an adapter beside it.
    pub n_layers: usize,
    /// The chat template that was recognised.
    pub template: Option<&'static str>,
}

const MODEL: &str = "model.gguf";
const ADAPTER: &str = "adapter.gguf";
const MODELFILE: &str = "Modelfile";

/// Writes a model, with its adapter merged, as a GGUF file with a Modelfile.
pub fn write_model(
    base: &LanguageModel,
    mix: GgufMix,
    folder: &Path,
    tick: BytesDoneFn<'_>,
) -> Result<OllamaFolder> {
    let tokenizer = Tokenizer::open(&base.path)?;
    make(folder)?;
    let path = folder.join(MODEL);
    let summary = gguf::write_model(base, &tokenizer, mix, &path, tick)?;
    let parts = ModelfileParts { from: &format!("./{MODEL}"), adapter: None };
    let (path, template) = write_modelfile(parts, &tokenizer, folder)?;
    Ok(OllamaFolder { path, model: Some((folder.join(MODEL), summary)), n_layers: 0, template })
}

/// Writes an adapter as a GGUF file with a Modelfile, and the base too unless that is a GGUF file.
pub fn write_adapter(
    base: &mut LanguageModel,
    name: &str,
    mix: GgufMix,
    folder: &Path,
    tick: BytesDoneFn<'_>,
) -> Result<OllamaFolder> {
    let tokenizer = Tokenizer::open(&base.path)?;
    make(folder)?;
    let n_layers = gguf::write_adapter(base, name, &folder.join(ADAPTER))?;
    let (mut from, mut model) = (format!("./{MODEL}"), None);
    if base.path.is_file() {
        let io = |source| TrainerError::Io { what: "find", path: base.path.clone(), source };
        from = base.path.canonicalize().map_err(io)?.display().to_string();
    } else {
        // The adapter stays apart.
        base.set_adapter(BTreeMap::new());
        let path = folder.join(MODEL);
        let summary = gguf::write_model(base, &tokenizer, mix, &path, tick)?;
        model = Some((path, summary));
    }
    let adapter = format!("./{ADAPTER}");
    let parts = ModelfileParts { from: &from, adapter: Some(&adapter) };
    let (path, template) = write_modelfile(parts, &tokenizer, folder)?;
    Ok(OllamaFolder { path, model, n_layers, template })
}

fn make(folder: &Path) -> Result<()> {
    let failed = |source| TrainerError::Io { what: "write", path: folder.into(), source };
    std::fs::create_dir_all(folder).map_err(failed)
}

fn write_modelfile(
    parts: ModelfileParts<'_>,
    tokenizer: &Tokenizer,
    folder: &Path,
) -> Result<(PathBuf, Option<&'static str>)> {
    let Modelfile { text, template } = Modelfile::new(parts, tokenizer);
    let path = folder.join(MODELFILE);
    write_whole(&path, text.as_bytes())?;
    Ok((path, template))
}

#[cfg(test)]
mod tests;
