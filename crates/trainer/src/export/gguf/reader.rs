//! The values of a model that is written as a GGUF file, by the names of transformers: of a folder some rows at a time,
//! of a GGUF file a tensor at a time, since its rows are in another order. An adapter is merged on the way.

use std::collections::BTreeMap;
use std::ops::Range;

use weights::load::load_f32;
use weights::{BytesDoneFn, Catalog, Result, WeightsError};

use crate::export::merge::patch::{MatrixPatch, apply_patches};
use crate::model::adapter::LayerWeights;
use crate::model::files::WeightFiles;
use crate::model::llama::language_model::LanguageModel;

/// Reads a base with its adapter.
pub(super) struct MergedReader<'a> {
    catalog: &'a Catalog,
    /// Of a GGUF file, and of others that name tensors otherwise.
    files: Option<WeightFiles<'a>>,
    layers: BTreeMap<String, LayerWeights>,
    /// The tensor of a GGUF file that was read last.
    held: (String, Vec<f32>),
    /// Bytes of the files, and the values they hold.
    size: [u64; 2],
    tick: BytesDoneFn<'a>,
}

impl<'a> MergedReader<'a> {
    /// Nothing for a preset, which has no values.
    pub fn new(
        base: &'a LanguageModel,
        tick: BytesDoneFn<'a>,
    ) -> crate::error::Result<Option<Self>> {
        let (Some(catalog), Some(files)) = (base.catalog(), base.files()?) else {
            return Ok(None);
        };
        let size = [catalog.bytes(), files.n_values() as u64];
        let is_renamed = |name: &str| catalog.find(name).is_err();
        let files = is_renamed("model.embed_tokens.weight").then_some(files);
        let held = (String::new(), Vec::new());
        Ok(Some(Self { catalog, files, layers: base.adapter(), held, size, tick }))
    }

    /// Whole rows of a tensor.
    pub fn read(&mut self, name: &str, range: Range<u64>) -> Result<Vec<f32>> {
        let [bytes, n_values] = self.size.map(u128::from);
        let done = u128::from(range.end - range.start) * bytes / n_values.max(1);
        if !(self.tick)(done as u64) {
            return Err(WeightsError::Cancelled);
        }
        let values = self.of_base(name, range.clone())?;
        let module = name.strip_suffix(".weight");
        let Some(given) = module.and_then(|module| self.layers.get(module)) else {
            return Ok(values);
        };
        let [_, width] = given.sizes();
        let first = range.start as usize / width;
        let merged = apply_patches(&[MatrixPatch::for_whole(given)], first, width, &values);
        Ok(merged.into_iter().map(|value| value as f32).collect())
    }

    fn of_base(&mut self, name: &str, range: Range<u64>) -> Result<Vec<f32>> {
        let Some(files) = &self.files else {
            return load_f32(self.catalog, self.catalog.find(name)?, range);
        };
        if self.held.0 != name {
            self.held = (name.to_owned(), files.values(name)?);
        }
        Ok(self.held.1[range.start as usize..range.end as usize].to_vec())
    }
}
