//! `[[data]]`: several sets of images in one job, each with all keys of `[data]`. Keys of a set are called `data[0].flip`,
//! counted from 0; `data.flip` on the command line is that of all sets. A few keys hold for the whole job: they are typed
//! in any of the sets.

use std::ops::Index;
use std::slice;

use toml::de::DeTable;

use super::data::{DataConfig, LearningTarget, RawData, ValidationSplit};
use super::error::ConfigError;
use super::section::{ResolvedKeys, Section, WithOrigin, in_order, read_table};
use super::source::{RawValue, ValueOrigin};
use super::value::ConfigValue;
use crate::data::MaskSource;

/// The sets of images of a job, at least one.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSets(Vec<DataConfig>);

/// The same as typed, at least one.
#[derive(Clone, Debug)]
pub(super) struct RawDataSets(Vec<RawData>);

/// Keys that hold for all sets. A model sees batches of several of them, and a job has one cache.
pub(super) const COMMON_KEYS: [&str; 5] =
    ["bucket_step", "reference_resolution", "frames", "fps", "cache"];

impl Default for RawDataSets {
    fn default() -> Self {
        Self(vec![RawData::default()])
    }
}

/// Keys with their sections, to find the nearest.
type KnownKeys<'a> = [(&'a str, &'a str)];

impl RawDataSets {
    /// Reads a list of sets, which takes the place of those before, or keys of all sets.
    pub fn read(
        &mut self,
        name: &str,
        typed: &RawValue<'_>,
        known: &KnownKeys<'_>,
    ) -> Result<(), ConfigError> {
        if let Some(parts) = typed.parts() {
            let one = |part: RawValue<'_>| {
                let mut set = RawData::default();
                read_set(&mut set, name, &part, known)?;
                Ok(set)
            };
            let sets: Vec<RawData> = parts.map(one).collect::<Result<_, _>>()?;
            if sets.is_empty() {
                return Err(typed.refuse("a table of keys, or at least one [[data]]"));
            }
            self.0 = sets;
            return Ok(());
        }
        match typed.value.as_table() {
            Some(table) if typed.is_argument() && is_numbered(table) => {
                self.read_numbered(name, typed, table, known)
            }
            _ => self.0.iter_mut().try_for_each(|set| read_table(set, name, typed, known)),
        }
    }

    /// Keys of one set: `data.1.flip`.
    fn read_numbered<'a>(
        &mut self,
        name: &str,
        typed: &RawValue<'a>,
        table: &'a DeTable<'a>,
        known: &KnownKeys<'_>,
    ) -> Result<(), ConfigError> {
        let n_sets = self.0.len();
        for (number, value) in in_order(table) {
            let key = format!("{name}[{}]", number.get_ref());
            let set = number.get_ref().parse().ok().and_then(|at: usize| self.0.get_mut(at));
            let set = set.ok_or_else(|| ConfigError::UnknownKey {
                advice: match n_sets {
                    1 => format!("the job has one set of images, {name}[0]"),
                    n => format!("the job has {n} sets of images, {name}[0] to {name}[{}]", n - 1),
                },
                key: key.clone(),
                origin: typed.origin(),
            })?;
            read_set(set, name, &typed.source.typed(key, value), known)?;
        }
        Ok(())
    }

    /// The first key that was typed, and where.
    pub fn first_typed(&self) -> Option<(&'static str, ValueOrigin)> {
        self.0.iter().find_map(RawData::first_typed)
    }

    /// Puts defaults where nothing was typed, and notes the origin of every value.
    pub fn decide(mut self, name: &str, rows: &mut ResolvedKeys) -> Result<DataSets, ConfigError> {
        self.share("bucket_step", |set| &mut set.bucket_step)?;
        self.share("reference_resolution", |set| &mut set.reference_resolution)?;
        self.share("frames", |set| &mut set.frames)?;
        self.share("fps", |set| &mut set.fps)?;
        self.share("cache", |set| &mut set.cache)?;
        let n_sets = self.0.len();
        let sets = (0..).zip(self.0);
        let sets = sets.map(|(at, set)| set.decide(&section(name, at, n_sets), rows));
        Ok(DataSets(sets.collect::<Result<_, _>>()?))
    }

    /// Gives all sets the value that one of them has for a key of the whole job.
    fn share<T: Clone + PartialEq + ConfigValue>(
        &mut self,
        key: &'static str,
        field: fn(&mut RawData) -> &mut Option<WithOrigin<T>>,
    ) -> Result<(), ConfigError> {
        debug_assert!(COMMON_KEYS.contains(&key));
        let typed: Vec<WithOrigin<T>> =
            self.0.iter_mut().filter_map(|set| field(set).clone()).collect();
        let Some((first, others)) = typed.split_first() else { return Ok(()) };
        if let Some(other) = others.iter().find(|other| other.value != first.value) {
            let both = [first, other];
            return Err(ConfigError::SetsDiffer {
                key: format!("data.{key}"),
                values: both.map(|it| it.value.write().unwrap_or_default()),
                origins: Box::new(both.map(|it| it.origin.clone())),
            });
        }
        self.0.iter_mut().for_each(|set| *field(set) = Some(first.clone()));
        Ok(())
    }
}

/// Reads the keys of one set.
fn read_set(
    set: &mut RawData,
    name: &str,
    typed: &RawValue<'_>,
    known: &KnownKeys<'_>,
) -> Result<(), ConfigError> {
    let path = |section| if section == name { typed.key.as_str() } else { section };
    let known: Vec<_> = known.iter().map(|(section, key)| (path(*section), *key)).collect();
    read_table(set, &typed.key, typed, &known)
}

fn is_numbered(table: &DeTable<'_>) -> bool {
    !table.is_empty() && table.keys().all(|key| key.get_ref().parse::<usize>().is_ok())
}

/// What a set is called.
fn section(name: &str, at: usize, n_sets: usize) -> String {
    if n_sets == 1 { name.to_owned() } else { format!("{name}[{at}]") }
}

impl DataSets {
    /// All of them, in the order in which they were typed.
    pub fn iter(&self) -> slice::Iter<'_, DataConfig> {
        self.0.iter()
    }

    /// How many there are.
    pub fn n_sets(&self) -> usize {
        self.0.len()
    }

    /// A key of a set as it is typed: `data.flip`, or `data[1].flip` of one of several.
    pub fn key(&self, set: usize, name: &str) -> String {
        format!("{}.{name}", section("data", set, self.0.len()))
    }

    /// One of those keys that hold for all sets is that of the first.
    pub fn common(&self) -> &DataConfig {
        &self.0[0]
    }

    /// Whether any image is held out.
    pub fn has_validation(&self) -> bool {
        self.iter().any(|set| set.validation != ValidationSplit::None)
    }

    /// Whether what the base predicts is learnt of any set.
    pub fn has_base_target(&self) -> bool {
        self.iter().any(|set| set.target == LearningTarget::Base)
    }

    /// Whether any set has masks.
    pub fn has_masks(&self) -> bool {
        self.iter().any(|set| set.masks != MaskSource::None)
    }

    /// The largest resolution of any set.
    pub fn largest_resolution(&self) -> usize {
        self.iter().map(|set| set.resolution.largest()).max().unwrap_or(0)
    }

    /// The words that are put before captions, each once.
    pub fn triggers(&self) -> Vec<&str> {
        let mut triggers: Vec<&str> =
            self.iter().filter_map(|set| set.trigger.as_deref()).collect();
        let mut seen = std::collections::HashSet::new();
        triggers.retain(|trigger| seen.insert(*trigger));
        triggers
    }

    /// What to type so that no image is larger than at this resolution: `data.resolution = 512`.
    pub fn resolution_change(&self, side: usize) -> String {
        let change = |(at, set): (usize, &DataConfig)| {
            let smaller = set.resolution.at_most(side);
            (smaller != set.resolution).then(|| {
                let value = smaller.write().unwrap_or_default();
                format!("{} = {value}", self.key(at, "resolution"))
            })
        };
        self.iter().enumerate().filter_map(change).collect::<Vec<_>>().join(" and ")
    }

    /// Leaves out what means nothing beside other keys of the set.
    pub(super) fn leave_out_idle(&self, rows: &mut ResolvedKeys) -> Result<(), ConfigError> {
        if self.iter().all(|set| set.regularisation) {
            rows.leave_out("data.regularisation", "no other set of images")?;
        }
        if self.iter().all(|set| set.target == LearningTarget::Base) {
            rows.leave_out("data.target", "no set of images to learn")?;
        }
        for (at, set) in self.iter().enumerate() {
            if set.draw.is_none() {
                rows.leave_out(&self.key(at, "draw_count"), "data.draw = \"none\"")?;
            }
            if set.regularisation {
                for name in ["repeats", "validation"] {
                    rows.leave_out(&self.key(at, name), "data.regularisation = true")?;
                }
            }
            if set.masks == MaskSource::None {
                for name in ["unmasked_weight", "unmasked_probability"] {
                    rows.leave_out(&self.key(at, name), "data.masks = \"none\"")?;
                }
            }
        }
        Ok(())
    }

    /// Every set with a function to name its keys, to give them other defaults.
    pub(super) fn each_mut(&mut self) -> impl Iterator<Item = (String, &mut DataConfig)> {
        let n_sets = self.0.len();
        let name = move |at| section("data", at, n_sets);
        self.0.iter_mut().enumerate().map(move |(at, set)| (name(at), set))
    }
}

impl Index<usize> for DataSets {
    type Output = DataConfig;

    fn index(&self, set: usize) -> &DataConfig {
        &self.0[set]
    }
}

impl<'a> IntoIterator for &'a DataSets {
    type Item = &'a DataConfig;
    type IntoIter = slice::Iter<'a, DataConfig>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
