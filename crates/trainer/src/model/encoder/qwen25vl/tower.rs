//! The vision tower on disk: loaded, run over images, and freed before the language model is loaded. What it makes of an
//! image waits in main memory.

use compute::{Device, Params, Tape, Var};
use weights::{BytesDoneFn, Catalog, WeightsError};

use super::processor::PatchGrid;
use super::vision::{
    self, PatchEmbedding, PatchMerger, VisionBlock, VisionConfig, VisionInputs, VisionTower,
};
use crate::error::Result;
use crate::model::adapter::Adapters;
use crate::model::build::{ModelBuilder, Precision};
use crate::model::files::{self, CheckpointLayout, WeightFiles};
use crate::model::host::to_vec;

/// A vision tower on disk.
pub struct TowerFiles<'a> {
    /// Its config.
    pub config: &'a VisionConfig,
    /// The files of the whole model.
    pub catalog: &'a Catalog,
    /// In which dtypes it is held. It is never quantised: it is small beside the language model.
    pub precision: Precision,
    /// Called with the number of bytes read; returns whether to go on.
    pub tick: BytesDoneFn<'a>,
}

/// An image for the tower.
pub struct TowerImage<'a> {
    /// Its patches.
    pub grid: PatchGrid,
    /// Reads the values of its patches, in the order of transformers.
    pub read: Box<dyn Fn() -> Result<Vec<f32>> + 'a>,
}

impl TowerImage<'_> {
    /// The values of its patches in the tower's order.
    fn values(&self, inputs: &VisionInputs) -> Result<Vec<f32>> {
        let values = (self.read)()?;
        let n_squares = inputs.order().squares.len().max(1);
        Ok(inputs.order().apply(&values, values.len() / n_squares))
    }
}

impl TowerFiles<'_> {
    /// Checks that the files have all of it.
    pub fn check(&self) -> Result<()> {
        let layout = vision::layout(self.catalog);
        let build = |build: &mut ModelBuilder<'_>| VisionTower::new(self.config, build);
        WeightFiles::find(self.catalog, &layout, build).map(drop)
    }

    /// The tokens of each image, [rows · columns, width of the language model], along rows. One image after the other.
    pub fn encode(&self, device: &Device, images: &[TowerImage<'_>]) -> Result<Vec<Vec<f32>>> {
        let tower = self.load(device, |build| VisionTower::new(self.config, build))?;
        let encode = |image: &TowerImage<'_>| {
            self.check_cancelled()?;
            let params = Params::default();
            let tape = Tape::inference(device, &params, 0);
            let inputs = self.inputs(device, image)?;
            let x = tower.forward(&tape, &image.values(&inputs)?, &inputs)?;
            Ok(inputs.order().undo(&to_vec(x.tensor())?))
        };
        images.iter().map(encode).collect()
    }

    /// The same bit for bit with one block in memory at a time, and the hidden states of all images.
    pub fn encode_by_blocks(
        &self,
        device: &Device,
        images: &[TowerImage<'_>],
    ) -> Result<Vec<Vec<f32>>> {
        let params = Params::default();
        let tape = || Tape::inference(device, &params, 0);
        let start = self.load(device, |build| PatchEmbedding::new(self.config, build))?;
        let embed = |image: &TowerImage<'_>| {
            let inputs = self.inputs(device, image)?;
            start.forward(&tape(), &image.values(&inputs)?)
        };
        let mut states = images.iter().map(embed).collect::<Result<Vec<Var>>>()?;
        drop(start);
        for index in 0..self.config.depth {
            let block = self.load(device, |build| VisionBlock::new(self.config, build, index))?;
            for (state, image) in states.iter_mut().zip(images) {
                *state = block.forward(&tape(), state, &self.inputs(device, image)?)?;
                self.check_cancelled()?;
            }
        }
        let merger = self.load(device, |build| PatchMerger::new(self.config, build))?;
        let merge = |(state, image): (Var, &TowerImage<'_>)| {
            let merged = to_vec(merger.forward(&tape(), &state)?.tensor())?;
            Ok(self.config.order(image.grid).undo(&merged))
        };
        states.into_iter().zip(images).map(merge).collect()
    }

    fn inputs(&self, device: &Device, image: &TowerImage<'_>) -> Result<VisionInputs> {
        VisionInputs::new(self.config, device, image.grid)
    }

    /// A part of the tower.
    fn load<T>(
        &self,
        device: &Device,
        build: impl Fn(&mut ModelBuilder<'_>) -> Result<T>,
    ) -> Result<T> {
        // All names and shapes were checked when the files were opened.
        let layout = vision::layout(self.catalog);
        let layout = CheckpointLayout { ignores: Box::new(|_| true), ..layout };
        let files = WeightFiles::find(self.catalog, &layout, &build)?;
        let precision = Precision { base: None, ..self.precision };
        files::load_model(device, &files, precision, &mut Adapters::none(), self.tick, build)
    }

    fn check_cancelled(&self) -> Result<()> {
        if (self.tick)(0) { Ok(()) } else { Err(WeightsError::Cancelled.into()) }
    }
}
