//! A language model as a GGUF file, for llama.cpp and programs based on it. Metadata, names and the order of rows
//! are those of llama.cpp's `convert_hf_to_gguf.py`; `vocabulary` has the tokenizer, `weights::gguf` the file
//! format, `mix` says which tensor has which, `reader` has the values. `adapter` writes a LoRA alone.
//!
//! Left out on purpose: importance matrices, and the formats that need one.

mod adapter;
mod mix;
mod reader;
mod vocabulary;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use weights::BytesDoneFn;
use weights::gguf::write::{self, GgufFormat, GgufTensor, GgufValue};

pub use adapter::write_adapter;
pub use mix::GgufMix;

use self::mix::MixedFormat;
use self::reader::MergedReader;
use crate::error::{Result, TrainerError};
use crate::model::llama::language_model::LanguageModel;
use crate::model::llama::names::{self, LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS};
use crate::model::llama::{LanguageFamily, LlamaConfig, RopeConfig, RopeScaling};
use crate::text::Tokenizer;

/// A model to be written.
#[derive(Clone, Copy)]
pub struct GgufModel<'a> {
    /// What it is called.
    pub name: &'a str,
    /// Its settings.
    pub config: &'a LlamaConfig,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Name and shape of every tensor, as transformers has them.
    pub tensors: &'a [(String, Vec<u64>)],
}

/// Reads some values of a tensor by name.
pub type ReadTensorFn<'a> = &'a mut dyn FnMut(&str, Range<u64>) -> weights::Result<Vec<f32>>;

/// What a file was written in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GgufSummary {
    /// Tensors of each format, by its name.
    pub formats: BTreeMap<String, usize>,
    /// Matrices whose rows are no whole blocks of the format that the mix has for them, by the format they have instead.
    pub fallbacks: BTreeMap<String, usize>,
}

/// Writes a model, its matrices as `mix` says and all else in f32. The file appears when it is complete.
pub fn write(
    out: &Path,
    model: GgufModel<'_>,
    mix: GgufMix,
    read: ReadTensorFn<'_>,
) -> Result<GgufSummary> {
    check_gemma(model.config)?;
    check_experts(model.config)?;
    let mut metadata = settings(model, mix);
    metadata.extend(vocabulary::metadata(model.tokenizer, model.config)?);
    let (mut tensors, mut sources) = (Vec::new(), Vec::new());
    let mut summary = GgufSummary::default();
    for (name, divisors) in divisors(model.config) {
        let (name, shape) = (name.to_owned(), vec![divisors.len() as u64]);
        tensors.push(GgufTensor { name, shape, format: GgufFormat::F32 });
        sources.push(GgufTensorSource::Divisors(divisors));
    }
    for (name, shape) in model.tensors {
        let name_there = gguf_name(model.config, name)?;
        let MixedFormat { format, is_fallback } = mix.format(model.config, &name_there, shape);
        if is_fallback {
            *summary.fallbacks.entry(format.encoding().to_string()).or_default() += 1;
        }
        tensors.push(GgufTensor { name: name_there, shape: shape.clone(), format });
        sources.push(GgufTensorSource::of(model.config, name, shape));
    }
    for tensor in &tensors {
        *summary.formats.entry(tensor.format.encoding().to_string()).or_default() += 1;
    }
    write::write(out, &metadata, &tensors, &mut |index, range| sources[index].read(range, read))?;
    Ok(summary)
}

/// Experts lie in one tensor there.
fn check_experts(config: &LlamaConfig) -> Result<()> {
    if config.experts.is_none() {
        return Ok(());
    }
    Err(TrainerError::Request {
        problem: "a mixture of experts is not yet written as GGUF".into(),
        hint: "use the folder with transformers, or convert that with llama.cpp",
    })
}

/// llama.cpp has the rest of Gemma 3 built in: which layers have a window, their rotary positions, the scale of attention.
fn check_gemma(config: &LlamaConfig) -> Result<()> {
    if config.family != LanguageFamily::Gemma3 {
        return Ok(());
    }
    let is_full = |layer: usize| (layer + 1).is_multiple_of(6);
    let full: Vec<usize> = (0..config.num_hidden_layers).filter(|layer| is_full(*layer)).collect();
    // Of the 27B it is the width by heads.
    let of_27b = (config.hidden_size / config.num_attention_heads) as f64;
    let usual = if config.num_hidden_layers == 62 { of_27b } else { config.head_dim as f64 };
    let told = |own: Option<f64>| own.map_or("not set".to_owned(), |own| own.to_string());
    let problem = if config.full_attention != full {
        format!("layers {:?} have full attention, in llama.cpp every sixth", config.full_attention)
    } else if config.local_rope_theta != Some(1e4) {
        format!("rope_local_base_freq is {}, in llama.cpp 10000", told(config.local_rope_theta))
    } else if config.query_pre_attn_scalar != Some(usual) {
        let own = told(config.query_pre_attn_scalar);
        format!("query_pre_attn_scalar is {own}, in llama.cpp {usual}")
    } else {
        return Ok(());
    };
    let hint = "llama.cpp knows the published shapes of Gemma 3; use the folder with transformers";
    Err(TrainerError::Request { problem, hint })
}

/// Writes the model of a transformers folder, or of a GGUF file in other formats.
pub fn write_folder(
    path: &Path,
    out: &Path,
    mix: GgufMix,
    tick: BytesDoneFn<'_>,
) -> Result<GgufSummary> {
    let base = LanguageModel::open(path)?;
    write_model(&base, &Tokenizer::open(path)?, mix, out, tick)
}

/// Writes a model with its adapter merged.
pub fn write_model(
    base: &LanguageModel,
    tokenizer: &Tokenizer,
    mix: GgufMix,
    out: &Path,
    tick: BytesDoneFn<'_>,
) -> Result<GgufSummary> {
    let Some(mut reader) = MergedReader::new(base, tick)? else {
        let problem = format!("not a model folder: {}", base.path.display());
        let hint = "give a folder with config.json, tokenizer.json and .safetensors files";
        return Err(TrainerError::Request { problem, hint });
    };
    let sizes = |sizes: &[usize]| sizes.iter().map(|size| *size as u64).collect();
    let tensors: Vec<_> = base
        .tensor_specs()?
        .into_iter()
        .map(|want| (want.name.clone(), sizes(want.shape.sizes())))
        .collect();
    let file = if base.path.is_file() { base.path.file_stem() } else { base.path.file_name() };
    let name = file.unwrap_or_default().to_string_lossy();
    let model = GgufModel { name: &name, config: &base.config, tokenizer, tensors: &tensors };
    write(out, model, mix, &mut |name, range| reader.read(name, range))
}

/// What `general.quantization_version` says. Taken: `GGML_QNT_VERSION`.
const BLOCKS_VERSION: u32 = 2;

fn settings(model: GgufModel<'_>, mix: GgufMix) -> Vec<(String, GgufValue)> {
    let (config, architecture) = (model.config, model.config.family.architecture());
    let mut all = vec![
        ("general.architecture".to_owned(), GgufValue::Text(architecture.into())),
        ("general.name".to_owned(), GgufValue::Text(model.name.into())),
        ("general.file_type".to_owned(), GgufValue::U32(mix.file_type())),
        ("general.quantization_version".to_owned(), GgufValue::U32(BLOCKS_VERSION)),
    ];
    let size = |size: usize| GgufValue::U32(u32::try_from(size).unwrap_or(u32::MAX));
    let mut of_family = vec![
        ("vocab_size", size(config.vocab_size)),
        ("context_length", size(config.max_position_embeddings)),
        ("embedding_length", size(config.hidden_size)),
        ("block_count", size(config.num_hidden_layers)),
        ("feed_forward_length", size(config.intermediate_size)),
        ("attention.head_count", size(config.num_attention_heads)),
        ("attention.head_count_kv", size(config.num_key_value_heads)),
        ("attention.key_length", size(config.head_dim)),
        ("attention.value_length", size(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", GgufValue::F32(config.rms_norm_eps)),
        ("rope.dimension_count", size(config.rotary_dim)),
        ("rope.freq_base", GgufValue::F32(config.rope.theta as f32)),
    ];
    match &config.rope.scaling {
        RopeScaling::None | RopeScaling::Llama3 { .. } => {}
        RopeScaling::Linear { factor } => {
            of_family.push(("rope.scaling.type", GgufValue::Text("linear".into())));
            of_family.push(("rope.scaling.factor", GgufValue::F32(*factor as f32)));
        }
        RopeScaling::LongRope(long) => {
            let original = size(long.original_max_position_embeddings);
            let attention_factor = GgufValue::F32(long.attention_factor as f32);
            of_family.push(("rope.scaling.original_context_length", original));
            of_family.push(("rope.scaling.attn_factor", attention_factor));
        }
    }
    if matches!(config.family, LanguageFamily::Phi3 | LanguageFamily::Gemma3) {
        of_family.push(("attention.sliding_window", size(config.window.unwrap_or(0))));
    }
    all.extend(of_family.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value)));
    all
}

/// Divisors of the `RoPE` frequencies, where llama.cpp does not compute them itself.
fn divisors(config: &LlamaConfig) -> Vec<(&'static str, Vec<f32>)> {
    let RopeConfig { theta, scaling } = &config.rope;
    let plain = RopeConfig { theta: *theta, scaling: RopeScaling::None }.axis(config.rotary_dim, 0);
    let of_texts = |length: usize| {
        let pairs = plain.frequencies.iter().enumerate();
        pairs.map(|(pair, frequency)| scaling.divisor(pair, *frequency, length) as f32).collect()
    };
    match scaling {
        RopeScaling::None | RopeScaling::Linear { .. } => Vec::new(),
        RopeScaling::Llama3 { .. } => vec![(ROPE_FACTORS, of_texts(0))],
        RopeScaling::LongRope(_) => {
            vec![(LONG_FACTORS, of_texts(usize::MAX)), (SHORT_FACTORS, of_texts(0))]
        }
    }
}

/// A tensor's name there.
fn gguf_name(config: &LlamaConfig, name: &str) -> Result<String> {
    let stored = names::gguf_name_of(config, name);
    if stored == name {
        let problem = format!("tensor {name} has no name in GGUF");
        let hint = "this is a bug in hearth, please report it";
        return Err(TrainerError::Request { problem, hint });
    }
    Ok(stored)
}

/// Where a tensor's values come from.
enum GgufTensorSource<'a> {
    Tensor(&'a str),
    /// Queries or keys, whose rows are stored in another order within each head.
    Heads {
        name: &'a str,
        d_head: usize,
        /// Values of a row.
        row: usize,
    },
    Divisors(Vec<f32>),
    /// The weight of a norm, of which files hold one more.
    OffsetNorm(&'a str),
}

impl<'a> GgufTensorSource<'a> {
    fn of(config: &LlamaConfig, name: &'a str, shape: &[u64]) -> Self {
        if names::is_offset_norm(config, name) {
            return Self::OffsetNorm(name);
        }
        if !names::is_permuted(config, name) {
            return Self::Tensor(name);
        }
        let row = shape.get(1).map_or(1, |row| *row as usize);
        Self::Heads { name, d_head: config.head_dim, row }
    }

    fn read(&self, range: Range<u64>, read: ReadTensorFn<'_>) -> weights::Result<Vec<f32>> {
        match self {
            Self::Tensor(name) => read(name, range),
            Self::OffsetNorm(name) => {
                Ok(read(name, range)?.into_iter().map(|weight| weight + 1.0).collect())
            }
            Self::Divisors(all) => Ok(all[range.start as usize..range.end as usize].to_vec()),
            Self::Heads { name, d_head, row } => {
                let head = (d_head * row) as u64;
                // Whole heads, since a range may begin and end within one.
                let first = range.start / head * head;
                let heads = read(name, first..range.end.next_multiple_of(head))?;
                let mut stored = vec![0.0; heads.len()];
                for (at, values) in heads.chunks_exact(*row).enumerate() {
                    let to = names::stored_row(at, *d_head) * row;
                    stored[to..to + row].copy_from_slice(values);
                }
                Ok(stored[(range.start - first) as usize..(range.end - first) as usize].to_vec())
            }
        }
    }
}

#[cfg(test)]
mod tests;
