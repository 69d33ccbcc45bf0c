//! T5 with one block in memory at a time, each read from the file for as long as it is needed. A batch of texts
//! goes through a block, and their hidden states stay in the arena for the next. The same kernels see the same
//! values as in the whole model, so the result is the same bit for bit; the file is read once for every
//! [`T5_TEXT_BATCH`] texts.

use std::collections::HashMap;

use compute::{Device, Tape, Var};
use weights::{BytesDoneFn, Catalog, WeightsError};

use super::{T5Block, T5Config, T5Embedding, attention, last_norm, layout};
use crate::error::Result;
use crate::model::adapter::{Adapters, LoraWeights};
use crate::model::build::{ModelBuilder, Precision};
use crate::model::files::{self, CheckpointLayout, WeightFiles};
use crate::model::host::to_vec;

/// Texts that go through a block together. Chosen: their hidden states take 64 MiB with T5-XXL in bf16, a
/// sixth of a block, and reading the file takes less time than encoding so many.
pub const T5_TEXT_BATCH: usize = 32;

/// A T5 on disk.
pub struct BlockwiseT5<'a> {
    /// Its config.
    pub config: &'a T5Config,
    /// Its files.
    pub catalog: &'a Catalog,
    /// In which dtypes it is held.
    pub precision: Precision,
    /// Adapters by layer.
    pub adapter: &'a HashMap<String, LoraWeights>,
    /// Called with the number of bytes read; returns whether to go on.
    pub tick: BytesDoneFn<'a>,
}

impl BlockwiseT5<'_> {
    /// [N, D] of each text of N token ids, in their order.
    pub fn encode(
        &self,
        device: &Device,
        texts: &[Vec<u32>],
        take: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        for texts in texts.chunks(T5_TEXT_BATCH) {
            let encoded = self.encode_together(device, texts)?;
            encoded.into_iter().try_for_each(|state| take(&to_vec(state.tensor())?))?;
        }
        Ok(())
    }

    fn encode_together(&self, device: &Device, texts: &[Vec<u32>]) -> Result<Vec<Var>> {
        let epsilon = self.config.layer_norm_epsilon;
        let (start, adapters) = self.load(device, |build| T5Embedding::new(self.config, build))?;
        let n = texts.first().map_or(0, Vec::len);
        let relative = start.position_bias(self.config, device, n)?;
        let tape = Tape::inference(device, &adapters.params, 0);
        let embed = |ids: &Vec<u32>| start.embed(&tape, &device.upload([1, n], ids)?);
        let mut states = texts.iter().map(embed).collect::<Result<Vec<Var>>>()?;
        drop(start);
        for index in 0..self.config.num_layers {
            let (block, adapters) =
                self.load(device, |build| T5Block::new(self.config, build, index))?;
            for state in &mut states {
                let tape = Tape::inference(device, &adapters.params, 0);
                *state = block.forward(&tape, state, attention(self.config, &relative), epsilon)?;
                self.check_cancelled()?;
            }
        }
        let (norm, adapters) = self.load(device, |build| last_norm(self.config, build))?;
        let tape = Tape::inference(device, &adapters.params, 0);
        let last = |state: &Var| Ok(tape.rms_norm(state, Some(&norm), epsilon)?);
        states.iter().map(last).collect()
    }

    /// A part of the model, and the adapters beside its layers.
    fn load<T>(
        &self,
        device: &Device,
        build: impl Fn(&mut ModelBuilder<'_>) -> Result<T>,
    ) -> Result<(T, Adapters)> {
        // All names and shapes were checked when the files were opened.
        let layout = CheckpointLayout { ignores: Box::new(|_| true), ..layout(self.catalog) };
        let files = WeightFiles::find(self.catalog, &layout, &build)?;
        let mut adapters = Adapters::loaded(self.adapter.clone());
        let part =
            files::load_model(device, &files, self.precision, &mut adapters, self.tick, build)?;
        Ok((part, adapters))
    }

    /// Checked often, since a block of many texts takes a while.
    fn check_cancelled(&self) -> Result<()> {
        if (self.tick)(0) { Ok(()) } else { Err(WeightsError::Cancelled.into()) }
    }
}
