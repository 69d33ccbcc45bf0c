//! How a section of a job is declared. Each field is written once, with its doc, type, default and
//! bound; from that come the struct as typed, the struct with every value decided, the reader, the
//! origins and the reference.
//!
//! A table of descriptors with getters by name was considered and left: a getter that is forgotten
//! compiles, a field that is not destructured does not.

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::bound::ValueBound;
use super::error::ConfigError;
use super::renamed;
use super::source::{RawValue, ValueOrigin};
use super::value::ConfigValue;
use crate::model::diffusion::family::DiffusionFamily;
use crate::suggest;

/// A value that somebody typed.
#[derive(Clone, Debug)]
pub(super) struct WithOrigin<T> {
    pub value: T,
    pub origin: ValueOrigin,
}

/// A section as typed.
pub(super) trait Section: Default {
    /// The same with every value decided.
    type Decided;

    /// What can be typed, in the order of the declaration.
    fn keys() -> Vec<Key>;

    /// Takes a value; whether there is such a key.
    fn put(&mut self, name: &str, typed: &RawValue<'_>) -> Result<bool, ConfigError>;

    /// The first key that was typed, and where.
    fn first_typed(&self) -> Option<(&'static str, ValueOrigin)>;

    /// Puts defaults where nothing was typed, and notes the origin of every value.
    fn decide(self, path: &str, rows: &mut ResolvedKeys) -> Result<Self::Decided, ConfigError>;
}

/// What is declared of a key.
pub(super) struct Key {
    pub name: &'static str,
    pub doc: &'static str,
    pub accepted: String,
    pub default: KeyDefault<String>,
    pub bound: ValueBound,
    /// The keys inside, if its values are tables.
    pub inner: Vec<Key>,
}

impl Key {
    pub fn of<T: ConfigValue>(
        name: &'static str,
        doc: &'static str,
        preset: &KeyDefault<T>,
        bound: ValueBound,
    ) -> Self {
        let default = match preset {
            KeyDefault::Required => KeyDefault::Required,
            KeyDefault::Default(value) => KeyDefault::Default(value.write().unwrap_or_default()),
        };
        Self { name: plain(name), doc, accepted: T::accepted(), default, bound, inner: T::keys() }
    }
}

/// What a key is when nobody typed it.
pub(super) enum KeyDefault<T> {
    /// There is no job without it.
    Required,
    /// This.
    Default(T),
}

/// The name of a field whose name is a word of Rust's, such as `r#match`.
pub(super) fn plain(name: &'static str) -> &'static str {
    name.strip_prefix("r#").unwrap_or(name)
}

/// Declares a section: the struct as typed, the struct with every value decided and how visible that
/// is, then each key with its doc, type, [`KeyDefault`] and [`ValueBound`].
///
/// ```text
/// section! {
///     /// How gradients become steps.
///     pub RawOptimizer => Optimizer {
///         /// Learning rate
///         learning_rate: f64 = Default(1e-4), Above(0.0);
///     }
/// }
/// ```
macro_rules! section {
    (
        $(#[doc = $about:literal])+
        $vis:vis $raw:ident => $decided:ident {
            $($(#[doc = $doc:literal])+ $field:ident: $type:ty = $preset:expr, $bound:expr;)+
        }
    ) => {
        $(#[doc = $about])+
        ///
        /// As typed.
        #[derive(Clone, Debug, Default)]
        pub(super) struct $raw {
            $($(#[doc = $doc])+ pub $field: Option<$crate::config::section::WithOrigin<$type>>,)+
        }

        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $decided {
            $($(#[doc = $doc])+ pub $field: $type,)+
        }

        impl $crate::config::section::Section for $raw {
            type Decided = $decided;

            fn keys() -> Vec<$crate::config::section::Key> {
                use $crate::config::{bound::ValueBound::*, section::{Key, KeyDefault::*}};
                vec![$(Key::of::<$type>(
                    stringify!($field), concat!($($doc),+).trim_ascii(), &$preset, $bound,
                )),+]
            }

            fn put(
                &mut self,
                name: &str,
                typed: &$crate::config::source::RawValue<'_>,
            ) -> Result<bool, $crate::config::ConfigError> {
                use $crate::config::{bound::ValueBound::*, section::{plain, put}};
                $(if name == plain(stringify!($field)) {
                    put(&mut self.$field, typed, $bound)?;
                    return Ok(true);
                })+
                Ok(false)
            }

            fn first_typed(&self) -> Option<(&'static str, $crate::config::ValueOrigin)> {
                $(if let Some(given) = &self.$field {
                    let name = $crate::config::section::plain(stringify!($field));
                    return Some((name, given.origin.clone()));
                })+
                None
            }

            fn decide(
                self,
                path: &str,
                rows: &mut $crate::config::section::ResolvedKeys,
            ) -> Result<$decided, $crate::config::ConfigError> {
                use $crate::config::section::{KeyDefault::*, plain};
                Ok($decided {
                    $($field: rows.decide(path, plain(stringify!($field)), self.$field, $preset)?,)+
                })
            }
        }
    };
}
pub(super) use section;

/// Puts a value in the place of the one before, or none. Two flags that disagree are refused: which was
/// typed last is not known, and one of them is a slip.
pub(super) fn put<T: ConfigValue>(
    into: &mut Option<WithOrigin<T>>,
    typed: &RawValue<'_>,
    bound: ValueBound,
) -> Result<(), ConfigError> {
    let given = if typed.is_unset() { None } else { Some(take(typed, bound)?) };
    if let Some(before) = into.as_ref().filter(|before| before.origin.contradicts(&typed.origin()))
    {
        let origins = Box::new([before.origin.clone(), typed.origin()]);
        return Err(ConfigError::Twice { key: typed.key.clone(), origins });
    }
    *into = given;
    Ok(())
}

/// Reads a value and holds it against its bound.
fn take<T: ConfigValue>(
    typed: &RawValue<'_>,
    bound: ValueBound,
) -> Result<WithOrigin<T>, ConfigError> {
    let accepted = || match bound {
        ValueBound::Any => T::accepted(),
        bound => format!("{}, {bound}", T::accepted()),
    };
    let value = T::read(typed).map_err(|error| match error {
        // A type knows nothing of the bound, but who reads the message wants to.
        ConfigError::Value { key, typed, accepted: of_type, advice, origin }
            if of_type == T::accepted() =>
        {
            ConfigError::Value { key, typed, accepted: accepted(), advice, origin }
        }
        error => error,
    })?;
    if !value.measures().iter().all(|number| bound.holds(*number)) {
        return Err(typed.refuse(accepted()));
    }
    Ok(WithOrigin { value, origin: typed.origin() })
}

/// Reads all keys of a table into a section. `known` are all keys there are, to find the nearest.
pub(super) fn read_table<S: Section>(
    into: &mut S,
    path: &str,
    typed: &RawValue<'_>,
    known: &[(&str, &str)],
) -> Result<(), ConfigError> {
    let table = typed.value.as_table().ok_or_else(|| typed.refuse("a table of keys"))?;
    for (key, value) in in_order(table) {
        let typed_name = format!("{path}.{}", key.get_ref());
        let whole = typed.source.current_name(&typed_name);
        let name = whole.rsplit('.').next().unwrap_or(whole);
        let inner = typed.source.typed(whole.into(), value);
        if !into.put(name, &inner)? {
            let origin = typed.source.origin(&key.span());
            let renamed = renamed::refuse("key", whole, origin.clone());
            return Err(renamed.unwrap_or_else(|| unknown(path, name, known, origin)));
        }
    }
    Ok(())
}

/// Keys with their values as they stand in the text, so that the first mistake is reported first.
pub(super) fn in_order<'a>(
    table: &'a DeTable<'a>,
) -> Vec<(&'a Spanned<DeString<'a>>, &'a Spanned<DeValue<'a>>)> {
    let mut pairs: Vec<_> = table.iter().collect();
    pairs.sort_by_key(|(key, _)| key.span().start);
    pairs
}

/// That there is no such key.
pub(super) fn unknown(
    path: &str,
    name: &str,
    known: &[(&str, &str)],
    origin: ValueOrigin,
) -> ConfigError {
    let key = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    ConfigError::UnknownKey { key, advice: suggest::suggestion(path, name, known), origin }
}

/// A value that was decided.
#[derive(Clone, Debug)]
pub(super) struct ResolvedKey {
    pub section: String,
    pub name: &'static str,
    /// As TOML; nothing if it is absent.
    pub value: Option<String>,
    pub origin: ValueOrigin,
}

/// All decided values with their origins, in the order of the declarations.
#[derive(Clone, Debug, Default)]
pub(super) struct ResolvedKeys(pub Vec<ResolvedKey>);

impl ResolvedKeys {
    /// What was typed, else the default.
    pub fn decide<T: ConfigValue>(
        &mut self,
        section: &str,
        name: &'static str,
        given: Option<WithOrigin<T>>,
        preset: KeyDefault<T>,
    ) -> Result<T, ConfigError> {
        let WithOrigin { value, origin } = match (given, preset) {
            (Some(given), _) => given,
            (None, KeyDefault::Default(value)) => {
                WithOrigin { value, origin: ValueOrigin::Default }
            }
            (None, KeyDefault::Required) => {
                return Err(ConfigError::Missing { key: format!("{section}.{name}") });
            }
        };
        let (section, written) = (section.to_owned(), value.write());
        self.0.push(ResolvedKey { section, name, value: written, origin: origin.clone() });
        Ok(value)
    }

    /// Where a value was decided; of several sets, the first that was typed.
    pub fn origin(&self, key: &str) -> Option<&ValueOrigin> {
        let mut origins = self.0.iter().filter(|row| row.is(key)).map(|row| &row.origin);
        let first = origins.next()?;
        if !first.is_default() {
            return Some(first);
        }
        Some(origins.find(|origin| !origin.is_default()).unwrap_or(first))
    }

    /// A value as TOML; empty if it is absent, or not the same in all sets.
    pub fn value(&self, key: &str) -> &str {
        let rows = self.0.iter().filter(|row| row.is(key));
        let mut values = rows.map(|row| row.value.as_deref().unwrap_or_default());
        let first = values.next().unwrap_or_default();
        if values.all(|value| value == first) { first } else { "" }
    }

    /// Leaves out a value that means nothing beside others.
    pub fn remove(&mut self, key: &str) {
        self.0.retain(|row| !row.is(key));
    }

    /// Leaves out a value that means nothing `with` another; refuses it if somebody typed it.
    pub fn leave_out(&mut self, key: &str, with: &str) -> Result<(), ConfigError> {
        if let Some(origin) = self.origin(key).filter(|origin| !origin.is_default()) {
            let (key, with, origin) = (key.into(), with.into(), origin.clone());
            return Err(ConfigError::NoEffect { key, with, origin });
        }
        self.remove(key);
        Ok(())
    }

    /// What a plan chose, unless somebody typed it.
    pub fn set_planned<T: ConfigValue>(&mut self, key: &str, value: &T) {
        let is_free = |row: &&mut ResolvedKey| row.is(key) && row.origin.is_default();
        for row in self.0.iter_mut().filter(is_free) {
            (row.value, row.origin) = (value.write(), ValueOrigin::Plan);
        }
    }

    /// What models of a family begin with, unless somebody typed something.
    pub fn of_family<T: ConfigValue>(
        &mut self,
        family: &DiffusionFamily,
        key: &str,
        value: &mut T,
        usual: T,
    ) {
        let is_free = |row: &&mut ResolvedKey| row.is(key) && row.origin.is_default();
        if let Some(row) = self.0.iter_mut().find(is_free) {
            (row.value, row.origin) = (usual.write(), ValueOrigin::Family(family.name));
            *value = usual;
        }
    }

    /// The value and origin of a key of another job.
    pub fn take(&mut self, key: &str, other: Self) {
        let Some(other) = other.0.into_iter().find(|row| row.is(key)) else { return };
        for row in self.0.iter_mut().filter(|row| row.is(key)) {
            *row = other.clone();
        }
    }

    /// A default that depends on other values.
    pub fn replace<T: ConfigValue>(&mut self, key: &str, value: &T) {
        for row in self.0.iter_mut().filter(|row| row.is(key)) {
            row.value = value.write();
        }
    }
}

impl ResolvedKey {
    /// `data[1].flip` is that of one set, `data.flip` that of any.
    fn is(&self, key: &str) -> bool {
        let of_set = self.section.split_once('[').map_or(&*self.section, |(section, _)| section);
        key.split_once('.').is_some_and(|(section, name)| {
            name == self.name && (section == self.section || section == of_set)
        })
    }
}
