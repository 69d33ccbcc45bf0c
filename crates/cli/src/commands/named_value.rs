//! Values of other crates that are typed as one of a few words. Each type is listed once, with its words.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use compute::{Dtype, Quantisation};
use trainer::model::adapter::AdapterFormat;
use trainer::model::offload::Offload;
use trainer::model::recompute::Recompute;

use super::export::ExportFormat;

/// A type with a word for each value that can be typed.
pub trait NamedValue: Copy + PartialEq + Send + Sync + 'static {
    /// The words, in the order of the help.
    const NAMES: &'static [(&'static str, Self)];
}

impl NamedValue for Dtype {
    const NAMES: &'static [(&'static str, Self)] =
        &[("f32", Self::F32), ("bf16", Self::Bf16), ("f16", Self::F16)];
}

impl NamedValue for Quantisation {
    const NAMES: &'static [(&'static str, Self)] =
        &[("int8", Self::Int8), ("nf4", Self::Nf4), ("fp8", Self::Fp8)];
}

impl NamedValue for Recompute {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("none", Self::None),
        ("queries", Self::Queries),
        ("alternate", Self::Alternate),
        ("keep_attention", Self::KeepAttention),
        ("block", Self::Block),
    ];
}

impl NamedValue for Offload {
    const NAMES: &'static [(&'static str, Self)] =
        &[("none", Self::None), ("alternate", Self::Alternate), ("blocks", Self::Blocks)];
}

impl NamedValue for AdapterFormat {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("diffusers", Self::Diffusers),
        ("peft", Self::Peft),
        ("kohya", Self::Kohya),
        ("comfyui", Self::Comfyui),
    ];
}

impl NamedValue for ExportFormat {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("diffusers", Self::Adapter(AdapterFormat::Diffusers)),
        ("peft", Self::Adapter(AdapterFormat::Peft)),
        ("kohya", Self::Adapter(AdapterFormat::Kohya)),
        ("comfyui", Self::Adapter(AdapterFormat::Comfyui)),
        ("mlx", Self::Mlx),
        ("ollama", Self::Ollama),
    ];
}

/// Reads one of the words.
pub fn parser<T: NamedValue>() -> impl TypedValueParser<Value = T> {
    let words = T::NAMES.iter().map(|(word, _)| *word);
    PossibleValuesParser::new(words).map(|typed| {
        let found = T::NAMES.iter().find(|(word, _)| *word == typed);
        found.expect("it is one of the words").1
    })
}

/// The word of a value.
pub fn value_name<T: NamedValue>(value: &T) -> String {
    let found = T::NAMES.iter().find(|(_, other)| other == value);
    found.map_or_else(String::new, |(word, _)| (*word).to_owned())
}
