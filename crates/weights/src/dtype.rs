//! The number formats that model files hold, by the names safetensors gives them.

use std::fmt;

/// How one number is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // The names say it.
pub enum FileDtype {
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

/// Source: `FileDtype` of the safetensors crate. Its formats below a byte (F4, F6) are not in use by
/// any model we know and are refused by name.
const NAMES: &[(FileDtype, &str, u64)] = &[
    (FileDtype::Bool, "BOOL", 1),
    (FileDtype::U8, "U8", 1),
    (FileDtype::I8, "I8", 1),
    (FileDtype::F8E5M2, "F8_E5M2", 1),
    (FileDtype::F8E4M3, "F8_E4M3", 1),
    (FileDtype::F8E8M0, "F8_E8M0", 1),
    (FileDtype::U16, "U16", 2),
    (FileDtype::I16, "I16", 2),
    (FileDtype::F16, "F16", 2),
    (FileDtype::Bf16, "BF16", 2),
    (FileDtype::U32, "U32", 4),
    (FileDtype::I32, "I32", 4),
    (FileDtype::F32, "F32", 4),
    (FileDtype::U64, "U64", 8),
    (FileDtype::I64, "I64", 8),
    (FileDtype::F64, "F64", 8),
    (FileDtype::C64, "C64", 8),
];

impl FileDtype {
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

impl fmt::Display for FileDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
