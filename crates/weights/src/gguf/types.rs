//! The numbers by which GGUF files name the kinds of their metadata and the formats of their
//! tensors.

use std::fmt;

use crate::dtype::FileDtype;
use crate::tensor::TensorEncoding;

/// The kinds of metadata, in the order of their numbers in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GgufValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

/// Kind, name for many of it, and the bytes that a value takes at least.
pub(super) const VALUE_TYPES: [(GgufValueType, &str, u64); 13] = [
    (GgufValueType::U8, "u8", 1),
    (GgufValueType::I8, "i8", 1),
    (GgufValueType::U16, "u16", 2),
    (GgufValueType::I16, "i16", 2),
    (GgufValueType::U32, "u32", 4),
    (GgufValueType::I32, "i32", 4),
    (GgufValueType::F32, "f32", 4),
    (GgufValueType::Bool, "bools", 1),
    (GgufValueType::Text, "strings", 8),
    (GgufValueType::Array, "arrays", 12),
    (GgufValueType::U64, "u64", 8),
    (GgufValueType::I64, "i64", 8),
    (GgufValueType::F64, "f64", 8),
];

impl GgufValueType {
    pub(super) fn name(self) -> &'static str {
        VALUE_TYPES[self as usize].1
    }

    pub(super) fn least_bytes(self) -> u64 {
        VALUE_TYPES[self as usize].2
    }
}

pub(super) fn from_ggml_type(number: u32) -> Option<TensorEncoding> {
    let plain = PLAIN_TYPES.iter().find(|(known, _)| *known == number);
    let blocks = BLOCK_FORMATS.iter().find(|(_, known, ..)| *known == number);
    let plain = plain.map(|(_, dtype)| TensorEncoding::Plain(*dtype));
    plain.or(blocks.map(|(format, ..)| TensorEncoding::Blocks(*format)))
}

/// The number of a format that [`from_ggml_type`] knows.
pub(super) fn ggml_type(encoding: TensorEncoding) -> u32 {
    let row = match encoding {
        TensorEncoding::Blocks(format) => Some(format.row().1),
        TensorEncoding::Plain(dtype) => {
            PLAIN_TYPES.iter().find(|(_, known)| *known == dtype).map(|(number, _)| *number)
        }
    };
    row.expect("what is written has a row")
}

/// Number in the file and format. Source: `ggml_type` of llama.cpp's `ggml.h`.
const PLAIN_TYPES: &[(u32, FileDtype)] = &[
    (0, FileDtype::F32),
    (1, FileDtype::F16),
    (24, FileDtype::I8),
    (25, FileDtype::I16),
    (26, FileDtype::I32),
    (27, FileDtype::I64),
    (28, FileDtype::F64),
    (30, FileDtype::Bf16),
];

/// What we do not read, so that we can say it by name: number and name in `ggml_type`, with those
/// that llama.cpp has dropped.
pub(super) const OTHER_TYPES: &[(u32, &str)] = &[
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

/// The block formats of GGUF that hearth turns back into numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // llama.cpp's own names.
pub enum GgufBlockFormat {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

/// Format, number in the file, name, numbers per block, bytes per block.
/// Source: `ggml_type` and the block structs of llama.cpp's `ggml-common.h`.
const BLOCK_FORMATS: &[(GgufBlockFormat, u32, &str, u64, u64)] = &[
    (GgufBlockFormat::Q4_0, 2, "Q4_0", 32, 18),
    (GgufBlockFormat::Q4_1, 3, "Q4_1", 32, 20),
    (GgufBlockFormat::Q5_0, 6, "Q5_0", 32, 22),
    (GgufBlockFormat::Q5_1, 7, "Q5_1", 32, 24),
    (GgufBlockFormat::Q8_0, 8, "Q8_0", 32, 34),
    (GgufBlockFormat::Q2K, 10, "Q2_K", 256, 84),
    (GgufBlockFormat::Q3K, 11, "Q3_K", 256, 110),
    (GgufBlockFormat::Q4K, 12, "Q4_K", 256, 144),
    (GgufBlockFormat::Q5K, 13, "Q5_K", 256, 176),
    (GgufBlockFormat::Q6K, 14, "Q6_K", 256, 210),
];

impl GgufBlockFormat {
    /// Numbers in one block.
    pub fn values_per_block(self) -> u64 {
        self.row().3
    }

    /// Bytes of one block.
    pub fn bytes(self) -> u64 {
        self.row().4
    }

    fn row(self) -> &'static (Self, u32, &'static str, u64, u64) {
        BLOCK_FORMATS.iter().find(|(format, ..)| *format == self).expect("every format has a row")
    }
}

impl fmt::Display for GgufBlockFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_stands_at_its_number() {
        assert!(VALUE_TYPES.iter().enumerate().all(|(at, (kind, ..))| *kind as usize == at));
    }

    #[test]
    fn no_type_is_listed_twice() {
        let plain = PLAIN_TYPES.iter().map(|row| row.0);
        let blocks = BLOCK_FORMATS.iter().map(|row| row.1);
        let mut all: Vec<_> =
            plain.chain(blocks).chain(OTHER_TYPES.iter().map(|row| row.0)).collect();
        all.sort_unstable();
        // All that ggml has given out so far, without a gap.
        assert_eq!(all, (0..=41).collect::<Vec<_>>());
    }
}
