//! What a run on pictures is fed with: encoded pictures in an order that follows from the seed, mixed
//! with noise as the model sees them.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::Device;

use super::draw::Pictures;
use super::noisy::{FIXED_PLACES, Noise};
use super::read::{Reader, ReadySample};
use super::{Drawing, Portion};
use crate::cache::Index;
use crate::config::RunConfig;
use crate::data::{Bucket, Order};
use crate::error::Result;
use crate::event::Event;
use crate::fingerprint::Fingerprint;
use crate::model::build::Precision;
use crate::model::diffusion::denoiser::Denoiser;
use crate::model::vae::Tiling;
use crate::task::lesson::{self, Ahead, Learner};
use crate::task::prefetch::Prefetch;

/// Encoded pictures, and how they are shown.
pub(crate) struct Feed<'a> {
    index: Arc<Index>,
    order: Order,
    noise: Noise,
    /// Where the images lie.
    folder: PathBuf,
    /// What is drawn along the way.
    pictures: Option<Pictures<'a>>,
}

impl<'a> Feed<'a> {
    /// Of pictures that are all encoded.
    pub fn new(
        lesson: Drawing<'a>,
        config: &RunConfig,
        index: Arc<Index>,
        tiling: Option<Tiling>,
    ) -> Result<Self> {
        let seed = config.train.seed;
        let precision =
            Precision { base: config.base.quantise, ..Precision::plain(config.base.dtype) };
        let is_shown = lesson::Lesson::shows(&lesson);
        let pictures = is_shown.then(|| Pictures::new(lesson, precision, tiling)).transpose()?;
        let levels = lesson.pipeline.schedule.levels();
        let noise = Noise { levels, scheme: config.train.scheme, seed };
        let (order, folder) = (index.order(config.train.batch, seed), lesson.data.images.clone());
        Ok(Self { index, order, noise, folder, pictures })
    }
}

impl<'a> lesson::Feed for Feed<'a> {
    type Lesson = Drawing<'a>;
    type Sample = ReadySample;

    fn fingerprint(&self) -> Fingerprint {
        self.index.fingerprint(&self.folder)
    }

    fn n_train(&self) -> usize {
        self.index.train.len()
    }

    fn n_held_out(&self) -> usize {
        self.index.held_out.len()
    }

    fn batches_per_epoch(&self) -> u64 {
        self.order.batches_per_epoch()
    }

    fn read_from(&self, number: u64) -> Ahead<Self> {
        let mut reader = Reader::new(Arc::clone(&self.index), self.order.clone(), self.noise.seed);
        Prefetch::begin(number, move |number| reader.read(number))
    }

    fn expected(&mut self, numbers: Range<u64>) -> f64 {
        numbers.map(|number| self.order.batch(number).len()).sum::<usize>() as f64
    }

    fn portion(&self, samples: &[ReadySample]) -> Result<(f64, Portion)> {
        let samples: Vec<_> = samples.iter().map(|sample| self.noise.draw(sample)).collect();
        Ok((samples.len() as f64, Portion { samples }))
    }

    /// At levels of noise that are always the same.
    fn held_out(&self, index: usize) -> Result<(Bucket, Vec<(f64, Portion)>)> {
        let sample = &self.index.held_out[index];
        let latents = Arc::new(self.index.latents(sample, false)?);
        let prompt = Arc::new(self.index.condition(&self.index.plain_text(sample))?);
        let at = |place| {
            let noisy = self.noise.fixed((&latents, &prompt), index as u64, place);
            (1.0, Portion { samples: vec![noisy] })
        };
        Ok((sample.bucket, FIXED_PLACES.into_iter().map(at).collect()))
    }

    fn show(
        &self,
        device: &Device,
        learner: Learner<'_, Denoiser>,
        at: (&Path, u64),
        goes_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>> {
        match &self.pictures {
            Some(pictures) => pictures.draw(device, learner, &self.index, at, &|_| goes_on()),
            None => Ok(Vec::new()),
        }
    }
}
