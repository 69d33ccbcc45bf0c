//! The vision tower on disk: loaded, run over images, and freed before the language model is loaded. What it makes of an
//! image waits in main memory.

use std::thread::scope;

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
use crate::read_ahead::{ReadAhead, read_ahead};

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
    pub read: Box<dyn Fn() -> Result<Vec<f32>> + Send + Sync + 'a>,
}

/// Threads that read images. Chosen: an image of 1024 x 1024 pixels takes a core 100 ms and a large GPU 5.
const READERS: ReadAhead = ReadAhead::by(16);

impl TowerFiles<'_> {
    /// Checks that the files have all of it.
    pub fn check(&self) -> Result<()> {
        let layout = vision::layout(self.catalog);
        let build = |build: &mut ModelBuilder<'_>| VisionTower::new(self.config, build);
        WeightFiles::find(self.catalog, &layout, build).map(drop)
    }

    /// The tokens of each image, [rows · columns, width of the language model], along rows. One image after the other.
    pub fn encode(&self, device: &Device, images: &[TowerImage<'_>]) -> Result<Vec<Vec<f32>>> {
        let tower = self.load_whole(device)?;
        let mut all = vec![Vec::new(); images.len()];
        self.each_image(device, images, |index, inputs, values| {
            all[index] = features(device, &tower, &inputs, &values)?;
            Ok(())
        })?;
        Ok(all)
    }

    /// All of it, on a device.
    pub fn load_whole(&self, device: &Device) -> Result<VisionTower> {
        self.load(device, |build| VisionTower::new(self.config, build))
    }

    /// Passes each image to `take`, in the order in which they are read, with the values of its patches in the tower's
    /// order.
    fn each_image(
        &self,
        device: &Device,
        images: &[TowerImage<'_>],
        mut take: impl FnMut(usize, VisionInputs, Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        scope(|scope| {
            for (index, values) in read_ahead(scope, images, READERS, |image| (image.read)()) {
                self.check_cancelled()?;
                let inputs = self.inputs(device, &images[index])?;
                let values = values?;
                let values = inputs.order().apply_to_values(&values);
                take(index, inputs, values)?;
            }
            Ok(())
        })
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
        let mut states = vec![None; images.len()];
        self.each_image(device, images, |index, _, values| {
            states[index] = Some(start.forward(&tape(), &values)?);
            Ok(())
        })?;
        let mut states: Vec<Var> = states.into_iter().flatten().collect();
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

/// The tokens of an image, [rows · columns, width of the language model], along rows, by a tower on a device. `values` are
/// those of its patches, in the order of transformers.
pub fn encode_image(
    device: &Device,
    tower: &VisionTower,
    config: &VisionConfig,
    grid: PatchGrid,
    values: &[f32],
) -> Result<Vec<f32>> {
    let inputs = VisionInputs::new(config, device, grid)?;
    features(device, tower, &inputs, &inputs.order().apply_to_values(values))
}

/// The same of values in the tower's order.
fn features(
    device: &Device,
    tower: &VisionTower,
    inputs: &VisionInputs,
    values: &[f32],
) -> Result<Vec<f32>> {
    let params = Params::default();
    let tape = Tape::inference(device, &params, 0);
    let x = tower.forward(&tape, values, inputs)?;
    Ok(inputs.order().undo(&to_vec(x.tensor())?))
}
