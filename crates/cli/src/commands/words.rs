//! Values of other crates that are typed as one of a few words. Each type is listed once, with its words.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use compute::{Dtype, Quantisation};
use trainer::model::adapter::Format;
use trainer::model::recompute::Recompute;
use trainer::model::stream::Stream;

/// A type with a word for each value that can be typed.
pub trait Words: Copy + PartialEq + Send + Sync + 'static {
    /// The words, in the order of the help.
    const WORDS: &'static [(&'static str, Self)];
}

impl Words for Dtype {
    const WORDS: &'static [(&'static str, Self)] =
        &[("f32", Self::F32), ("bf16", Self::Bf16), ("f16", Self::F16)];
}

impl Words for Quantisation {
    const WORDS: &'static [(&'static str, Self)] =
        &[("int8", Self::Int8), ("nf4", Self::Nf4), ("fp8", Self::Fp8)];
}

impl Words for Recompute {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("none", Self::None),
        ("queries", Self::Queries),
        ("alternate", Self::Alternate),
        ("block", Self::Block),
    ];
}

impl Words for Stream {
    const WORDS: &'static [(&'static str, Self)] =
        &[("none", Self::None), ("alternate", Self::Alternate), ("blocks", Self::Blocks)];
}

impl Words for Format {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("diffusers", Self::Diffusers),
        ("peft", Self::Peft),
        ("kohya", Self::Kohya),
        ("comfyui", Self::Comfyui),
    ];
}

/// Reads one of the words.
pub fn parser<T: Words>() -> impl TypedValueParser<Value = T> {
    let words = T::WORDS.iter().map(|(word, _)| *word);
    PossibleValuesParser::new(words).map(|typed| {
        let found = T::WORDS.iter().find(|(word, _)| *word == typed);
        found.expect("it is one of the words").1
    })
}

/// The word of a value.
pub fn word<T: Words>(value: &T) -> String {
    let found = T::WORDS.iter().find(|(_, other)| other == value);
    found.map_or_else(String::new, |(word, _)| (*word).to_owned())
}
