//! The types that a key may have: how each is read from TOML, written back and described.

use std::path::PathBuf;

use machine::Bytes;
use toml::de::DeValue;

use super::error::ConfigError;
use super::renamed;
use super::section::Key;
use super::source::RawValue;
use crate::suggest::nearest;

/// A type of a key.
pub(super) trait ConfigValue: Sized {
    /// What is accepted, in words.
    fn accepted() -> String;

    /// From what was typed.
    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError>;

    /// As TOML, so that reading it gives the same; nothing if it is absent.
    fn write(&self) -> Option<String>;

    /// The numbers that a bound is about.
    fn measures(&self) -> Vec<f64> {
        Vec::new()
    }

    /// The keys inside, if it is a table.
    fn keys() -> Vec<Key> {
        Vec::new()
    }
}

/// A setting that can be switched off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Switch<T> {
    /// Not done at all.
    Off,
    /// Done with this.
    On(T),
}

/// Size of images in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSize {
    /// From left to right.
    pub width: usize,
    /// From top to bottom.
    pub height: usize,
}

/// Implements [`ConfigValue`] for a type with a word per value.
macro_rules! words {
    ($type:ty { $($word:literal => $value:expr,)+ }) => {
        impl $crate::config::value::ConfigValue for $type {
            fn accepted() -> String {
                format!("one of {}", [$($word),+].join(", "))
            }

            fn read(
                typed: &$crate::config::source::RawValue<'_>,
            ) -> Result<Self, $crate::config::ConfigError> {
                match typed.word() {
                    $(Some($word) => Ok($value),)+
                    _ => Err($crate::config::value::unknown_word(typed, &[$($word),+])),
                }
            }

            fn write(&self) -> Option<String> {
                [$(($word, $value)),+]
                    .iter()
                    .find(|(_, value)| value == self)
                    .map(|(word, _)| $crate::config::value::quoted(word))
            }
        }
    };
}
pub(super) use words;

/// A value as a job file has it, without quotes.
pub(super) fn word(value: &impl ConfigValue) -> String {
    value.write().unwrap_or_default().trim_matches('"').to_owned()
}

/// A text as TOML.
pub(super) fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// That a word is none of those known.
pub(super) fn unknown_word(typed: &RawValue<'_>, words: &[&'static str]) -> ConfigError {
    let was = |word: &str| format!("{} = \"{word}\"", typed.key);
    let renamed =
        typed.value.as_str().and_then(|word| renamed::refuse("value", &was(word), typed.origin()));
    if let Some(renamed) = renamed {
        return renamed;
    }
    let near = typed.value.as_str().and_then(|word| nearest(word, words.iter().copied()));
    let mut error = typed.refuse(format!("one of {}", words.join(", ")));
    if let (ConfigError::Value { advice, .. }, Some(near)) = (&mut error, near) {
        *advice = format!(", did you mean `{near}`?");
    }
    error
}

fn whole<T: TryFrom<i64>>(value: &DeValue<'_>) -> Option<T> {
    let number = value.as_integer()?;
    i64::from_str_radix(number.as_str(), number.radix()).ok()?.try_into().ok()
}

impl ConfigValue for Bytes {
    fn accepted() -> String {
        "a size such as \"10GB\" or \"512MiB\"".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let size = typed.value.as_str().and_then(|text| text.parse().ok());
        size.ok_or_else(|| typed.refuse(Self::accepted()))
    }

    fn write(&self) -> Option<String> {
        // The largest unit that it is a whole number of.
        let units = [("GB", 1_000_000_000), ("MB", 1_000_000), ("KB", 1000)];
        let unit = units.into_iter().find(|(_, unit)| self.0.is_multiple_of(*unit));
        let (name, unit) = unit.unwrap_or(("B", 1));
        Some(quoted(&format!("{}{name}", self.0 / unit)))
    }

    fn measures(&self) -> Vec<f64> {
        vec![self.0 as f64]
    }
}

/// Numbers with no fraction, and their words; TOML's largest is that of `i64`.
macro_rules! whole_numbers {
    ($($type:ty),+) => {
        $(impl ConfigValue for $type {
            fn accepted() -> String {
                "a whole number".into()
            }

            fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
                whole(typed.value).ok_or_else(|| typed.refuse(Self::accepted()))
            }

            fn write(&self) -> Option<String> {
                Some(self.to_string())
            }

            fn measures(&self) -> Vec<f64> {
                vec![*self as f64]
            }
        })+
    };
}
whole_numbers!(u64, usize);

impl ConfigValue for f64 {
    fn accepted() -> String {
        "a number".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let number = match typed.value {
            DeValue::Float(float) => float.as_str().parse().ok(),
            value => whole::<i64>(value).map(|whole| whole as f64),
        };
        // TOML knows nan and inf; no key has a use for them.
        let number = number.filter(|number: &f64| number.is_finite());
        number.ok_or_else(|| typed.refuse(Self::accepted()))
    }

    fn write(&self) -> Option<String> {
        Some(format!("{self:?}"))
    }

    fn measures(&self) -> Vec<f64> {
        vec![*self]
    }
}

impl ConfigValue for bool {
    fn accepted() -> String {
        "true or false".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        typed.value.as_bool().ok_or_else(|| typed.refuse(Self::accepted()))
    }

    fn write(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl ConfigValue for String {
    fn accepted() -> String {
        "text".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let text = typed.value.as_str().map(str::to_owned);
        text.ok_or_else(|| typed.refuse(Self::accepted()))
    }

    fn write(&self) -> Option<String> {
        Some(quoted(self))
    }

    fn measures(&self) -> Vec<f64> {
        vec![self.trim().len() as f64]
    }
}

impl ConfigValue for PathBuf {
    fn accepted() -> String {
        "a path".into()
    }

    /// Absolute, so that it means the same wherever it is written down.
    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        match typed.value.as_str() {
            None | Some("") => Err(typed.refuse(Self::accepted())),
            // It would become a folder of that name.
            Some(text) if text == "~" || text.starts_with("~/") => {
                Err(typed.refuse("a path without ~, which only a shell knows"))
            }
            Some(text) => Ok(typed.folder().join(text)),
        }
    }

    fn write(&self) -> Option<String> {
        Some(quoted(&self.to_string_lossy()))
    }
}

impl<T: ConfigValue> ConfigValue for Option<T> {
    fn accepted() -> String {
        T::accepted()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        T::read(typed).map(Some)
    }

    fn write(&self) -> Option<String> {
        self.as_ref().and_then(T::write)
    }

    fn measures(&self) -> Vec<f64> {
        self.as_ref().map(T::measures).unwrap_or_default()
    }
}

impl<T: ConfigValue> ConfigValue for Switch<T> {
    fn accepted() -> String {
        format!("off or {}", T::accepted())
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        match typed.value.as_str() {
            Some("off") => Ok(Self::Off),
            _ => T::read(typed).map(Self::On).map_err(|_| typed.refuse(Self::accepted())),
        }
    }

    fn write(&self) -> Option<String> {
        match self {
            Self::Off => Some(quoted("off")),
            Self::On(value) => value.write(),
        }
    }

    fn measures(&self) -> Vec<f64> {
        match self {
            Self::Off => Vec::new(),
            Self::On(value) => value.measures(),
        }
    }
}

/// Lists of what has a value each; a list of tables describes itself (`adapter.rs`).
macro_rules! lists {
    ($($type:ty: $many:literal),+) => {
        $(impl $crate::config::value::ConfigValue for Vec<$type> {
            fn accepted() -> String {
                format!("a list of {}", $many)
            }

            fn read(
                typed: &$crate::config::source::RawValue<'_>,
            ) -> Result<Self, $crate::config::ConfigError> {
                let parts = typed.parts().ok_or_else(|| typed.refuse(Self::accepted()))?;
                parts.map(|part| <$type>::read(&part)).collect()
            }

            fn write(&self) -> Option<String> {
                let parts: Vec<_> = self.iter().filter_map(|part| part.write()).collect();
                Some(format!("[{}]", parts.join(", ")))
            }

            fn measures(&self) -> Vec<f64> {
                vec![self.len() as f64]
            }
        })+
    };
}
pub(super) use lists;

lists!(String: "texts", PathBuf: "paths");

impl ConfigValue for [f64; 2] {
    fn accepted() -> String {
        "a list of two numbers".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let parts = typed.parts().ok_or_else(|| typed.refuse(Self::accepted()))?;
        let numbers: Vec<f64> = parts.map(|part| f64::read(&part)).collect::<Result<_, _>>()?;
        numbers.try_into().map_err(|_| typed.refuse(Self::accepted()))
    }

    fn write(&self) -> Option<String> {
        Some(format!("{self:?}"))
    }

    fn measures(&self) -> Vec<f64> {
        self.to_vec()
    }
}

impl ConfigValue for ImageSize {
    fn accepted() -> String {
        "a whole number, or [width, height]".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        if let Some(edge) = whole(typed.value) {
            return Ok(Self { width: edge, height: edge });
        }
        let parts = typed.value.as_array().map(|parts| parts.iter().collect::<Vec<_>>());
        let size = match parts.as_deref() {
            Some([width, height]) => whole(width.get_ref()).zip(whole(height.get_ref())),
            _ => None,
        };
        let (width, height) = size.ok_or_else(|| typed.refuse(Self::accepted()))?;
        Ok(Self { width, height })
    }

    fn write(&self) -> Option<String> {
        let Self { width, height } = self;
        Some(format!("[{width}, {height}]"))
    }

    fn measures(&self) -> Vec<f64> {
        vec![self.width as f64, self.height as f64]
    }
}
