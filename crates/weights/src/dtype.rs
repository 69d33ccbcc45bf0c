//! The number formats that model files hold, by the names safetensors gives them.

use std::fmt;

/// How one number is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // The names say it.
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    C64,
}

/// Source: `Dtype` of the safetensors crate. Its formats below a byte (F4, F6) are not in use by
/// any model we know and are refused by name.
const NAMES: &[(Dtype, &str, u64)] = &[
    (Dtype::Bool, "BOOL", 1),
    (Dtype::U8, "U8", 1),
    (Dtype::I8, "I8", 1),
    (Dtype::F8E5M2, "F8_E5M2", 1),
    (Dtype::F8E4M3, "F8_E4M3", 1),
    (Dtype::F8E8M0, "F8_E8M0", 1),
    (Dtype::U16, "U16", 2),
    (Dtype::I16, "I16", 2),
    (Dtype::F16, "F16", 2),
    (Dtype::Bf16, "BF16", 2),
    (Dtype::U32, "U32", 4),
    (Dtype::I32, "I32", 4),
    (Dtype::F32, "F32", 4),
    (Dtype::U64, "U64", 8),
    (Dtype::I64, "I64", 8),
    (Dtype::F64, "F64", 8),
    (Dtype::C64, "C64", 8),
];

impl Dtype {
    /// The format of that safetensors name.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(_, known, _)| *known == name).map(|(dtype, ..)| *dtype)
    }

    /// Its safetensors name.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Bytes per number.
    pub fn bytes(self) -> u64 {
        self.row().2
    }

    fn row(self) -> &'static (Self, &'static str, u64) {
        NAMES.iter().find(|(dtype, ..)| *dtype == self).expect("every format has a row")
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
