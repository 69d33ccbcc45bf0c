//! A run on a device without data: its phases in the order in which they will come, by the functions
//! that will run. An arena of the size that is found is enough.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use compute::{Device, Kind, Recording, Work};

use super::outlook::Outlook;
use super::rates::Rates;
use crate::cache::plan_pictures;
use crate::config::RunConfig;
use crate::data::Bucket;
use crate::error::Result;
use crate::model::build::Precision;
use crate::model::recompute::Recompute;
use crate::model::sd3::pipeline::Pipeline;
use crate::model::sd3::prompts::Prompt;
use crate::model::vae::Tiling;
use crate::objective::flow::Level;
use crate::sample::plan_encoding;
use crate::train::event::Phase;
use crate::train::how::How;
use crate::train::meter::{self, DRAW, LOAD};
use crate::train::noisy::{Mixer, Noisy};
use crate::train::pictures::Pictures;
use crate::train::session::{Batch, Session};

/// A job with every value decided, and what it is to run on.
#[derive(Clone, Copy)]
pub(super) struct Rehearsal<'a> {
    pub pipeline: &'a Pipeline,
    pub config: &'a RunConfig,
    pub outlook: &'a Outlook,
    pub kind: Kind,
}

/// What a step takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub peak_bytes: usize,
    pub secs: f64,
}

impl Rehearsal<'_> {
    /// What encoding takes; fails if that is more than `limit` bytes.
    pub fn encoding(&self, limit: usize) -> Result<Vec<Phase>> {
        let Self { pipeline, config, outlook, kind, .. } = *self;
        let mut phases = plan_pictures(pipeline, &outlook.to_encode, kind, limit)?;
        if outlook.has_texts {
            let base = config.base.quantise_encoders;
            let precision = Precision { dtype: config.base.dtype, base };
            phases.extend(plan_encoding(&pipeline.encoders, precision, kind, limit)?);
        }
        Ok(phases.into_iter().map(Phase::from).collect())
    }

    /// A step in the size that takes the most, and the mean over those that are shown most often.
    pub fn step(&self, rates: &Rates) -> Result<Step> {
        let (device, mut session) = self.session()?;
        if let Some((bucket, shown)) = self.hardest() {
            self.epoch(&device, &mut session, bucket, shown)?;
        }
        let update = work_of(&device, || session.update(0.0, 0, 1.0))?;
        let peak_bytes = device.usage().extent;
        let (mut secs, mut n_batches) = (0.0, 0);
        for (bucket, shown) in self.typical() {
            secs += seconds(rates, &self.epoch(&device, &mut session, bucket, shown)?);
            n_batches += shown.div_ceil(self.config.train.batch);
        }
        let per_batch = secs / n_batches.max(1) as f64;
        let secs = per_batch * self.config.train.accumulation as f64 + rates.seconds(&update);
        Ok(Step { peak_bytes, secs })
    }

    /// A step in every size that occurs, and a measurement.
    pub fn training(&self) -> Result<Vec<Phase>> {
        let (device, mut session) = self.session()?;
        let phase = |name: String| {
            let peak_bytes = device.usage().extent;
            device.restart_peak();
            Phase { name, peak_bytes }
        };
        let mut phases = vec![phase(LOAD.into())];
        for (bucket, shown) in &self.outlook.train {
            self.epoch(&device, &mut session, *bucket, *shown)?;
            session.update(0.0, 0, 1.0)?;
            phases.push(phase(meter::train(*bucket)));
        }
        for bucket in self.outlook.held_out.keys() {
            session.measure(&self.batch(*bucket, 1, &self.prompt()))?;
            phases.push(phase(meter::validate(*bucket)));
        }
        Ok(phases)
    }

    /// Pictures while training, decoded whole if that fits.
    pub fn drawing(&self, limit: usize) -> Result<(Option<Tiling>, Option<Phase>)> {
        let mut best = None;
        for tiling in std::iter::once(None).chain(Tiling::candidates().map(Some)) {
            let Some(pictures) = Pictures::new(self.pipeline, self.config, tiling)? else {
                return Ok((None, None));
            };
            let (device, session) = self.session()?;
            pictures.rehearse(&device, &session)?;
            let phase = Phase { name: DRAW.into(), peak_bytes: device.usage().extent };
            let fits = phase.peak_bytes <= limit;
            best = Some((tiling, Some(phase)));
            if fits {
                break;
            }
        }
        Ok(best.unwrap_or_default())
    }

    fn session(&self) -> Result<(Device, Session<'_>)> {
        let device = Device::meta(self.kind, usize::MAX / 2);
        let session = Session::new(&device, self.pipeline, self.config, &|_| true)?;
        Ok((device, session))
    }

    /// What a step of full batches of one size does.
    pub fn step_work(&self, bucket: Bucket) -> Result<Vec<(usize, Work)>> {
        let (device, mut session) = self.session()?;
        let shown = self.config.train.batch;
        let mut works = self.epoch(&device, &mut session, bucket, shown)?;
        for (times, _) in &mut works {
            *times *= self.config.train.accumulation;
        }
        works.push((1, work_of(&device, || session.update(0.0, 0, 1.0))?));
        Ok(works)
    }

    /// The memory over a step in the size that takes the most.
    pub fn recorded_step(&self) -> Result<Recording> {
        let (device, mut session) = self.session()?;
        let How { micro, recompute } = How::of(self.config);
        device.restart_peak();
        device.record();
        if let Some((bucket, shown)) = self.hardest() {
            let samples = self.config.train.batch.min(shown).min(micro);
            let prompt = self.prompt();
            session.accumulate(&self.batch(bucket, samples, &prompt), 1.0, recompute)?;
        }
        session.update(0.0, 0, 1.0)?;
        Ok(device.recorded())
    }

    /// The size that takes the most, and how often it is shown.
    fn hardest(&self) -> Option<(Bucket, usize)> {
        let batch = self.config.train.batch;
        let pixels =
            |(bucket, shown): &(&Bucket, &usize)| bucket.width * bucket.height * batch.min(**shown);
        let hardest = self.outlook.train.iter().max_by_key(pixels);
        hardest.map(|(bucket, shown)| (*bucket, *shown))
    }

    /// The sizes that are shown most often, and how often. Chosen: a few are enough for a mean, and
    /// folders of many sizes are planned in no more time.
    fn typical(&self) -> Vec<(Bucket, usize)> {
        let mut all: Vec<_> = self.outlook.train.iter().map(|(size, n)| (*size, *n)).collect();
        all.sort_by_key(|(_, shown)| Reverse(*shown));
        all.truncate(3);
        all
    }

    /// What an epoch shows of a bucket: the work of every portion that occurs, and how often it does.
    fn epoch(
        &self,
        device: &Device,
        session: &mut Session<'_>,
        bucket: Bucket,
        shown: usize,
    ) -> Result<Vec<(usize, Work)>> {
        let How { micro, recompute } = How::of(self.config);
        let prompt = self.prompt();
        let mut works = Vec::new();
        for (samples, times) in portions(self.config.train.batch, micro, shown) {
            let batch = self.batch(bucket, samples, &prompt);
            let once = || portion(device, session, &batch, recompute);
            works.push((times, work_of(device, once)?));
        }
        Ok(works)
    }

    fn prompt(&self) -> Prompt {
        let config = &self.pipeline.transformer.config;
        let n_tokens = self.pipeline.encoders.n_tokens();
        Prompt {
            tokens: vec![0.0; n_tokens * config.joint_attention_dim],
            pooled: vec![0.0; config.pooled_projection_dim],
        }
    }

    fn batch<'p>(&self, bucket: Bucket, samples: usize, prompt: &'p Prompt) -> Batch<'p> {
        let sizes = self.pipeline.latent_sizes([bucket.width, bucket.height]);
        let n: usize = sizes.iter().product();
        let noisy = || Noisy {
            latents: vec![0.0; n],
            target: vec![0.0; n],
            level: Level { sigma: 1.0, timestep: 1000.0 },
            weight: 1.0,
        };
        Batch { samples: (0..samples).map(|_| (noisy(), prompt)).collect(), sizes, place: (0, 0) }
    }
}

/// Noise, forward and backward.
fn portion(
    device: &Device,
    session: &mut Session<'_>,
    batch: &Batch<'_>,
    recompute: Recompute,
) -> Result<()> {
    for (noisy, _) in &batch.samples {
        Mixer::rehearse(device, noisy.latents.len())?;
    }
    session.accumulate(batch, 1.0, recompute).map(drop)
}

/// What `work` does.
fn work_of<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<Work> {
    let before = device.work();
    work()?;
    Ok(device.work().since(&before))
}

fn seconds(rates: &Rates, works: &[(usize, Work)]) -> f64 {
    works.iter().map(|(times, work)| *times as f64 * rates.seconds(work)).sum()
}

/// How many pictures of a bucket go through the model at once, and how often in an epoch that shows
/// so many of it: all batches but the last are full, and so are all portions of a batch but the last.
/// A smaller portion may leave other holes in memory than a full one does.
fn portions(batch: usize, micro: usize, shown: usize) -> BTreeMap<usize, usize> {
    let mut portions = BTreeMap::new();
    for (samples, times) in [(batch, shown / batch), (shown % batch, 1)] {
        *portions.entry(micro).or_default() += samples / micro * times;
        *portions.entry(samples % micro).or_default() += times;
    }
    portions.retain(|samples, times| *samples > 0 && *times > 0);
    portions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_show_every_picture_once() {
        assert_eq!(portions(4, 4, 8), [(4, 2)].into());
        assert_eq!(portions(6, 4, 15), [(4, 2), (2, 2), (3, 1)].into());
        for (batch, micro, shown) in
            (1..7).flat_map(|b| (1..=b).flat_map(move |m| (1..20).map(move |s| (b, m, s))))
        {
            let all = portions(batch, micro, shown);
            let total: usize = all.iter().map(|(samples, times)| samples * times).sum();
            assert_eq!(total, shown, "{batch} {micro} {shown}");
            assert!(all.keys().all(|samples| *samples <= micro.min(shown)), "{all:?}");
        }
    }
}
