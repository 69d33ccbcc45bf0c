//! What a run takes, found before it starts: its phases are run on a device without data, in the
//! order in which they will come, by the functions that will run. An arena of that size is enough.

use std::collections::BTreeMap;

use compute::{Device, Kind};

use super::event::Phase;
use super::noisy::Noisy;
use super::pictures::Pictures;
use super::session::{Batch, Session};
use crate::cache::{Caching, Index, Sample};
use crate::config::train::Length;
use crate::config::{RunConfig, Switch};
use crate::data::Bucket;
use crate::error::{Result, TrainerError};
use crate::model::sd3::pipeline::Pipeline;
use crate::model::sd3::prompts::Prompt;
use crate::model::vae::Tiling;
use crate::objective::flow::Level;

/// How a run is done, and what it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What each phase takes at its peak.
    pub phases: Vec<Phase>,
    /// How latents are cut for decoding samples, if they are.
    pub tiling: Option<Tiling>,
}

impl Plan {
    /// Bytes that are enough for every phase.
    pub fn peak_bytes(&self) -> usize {
        self.phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0)
    }
}

/// Plans a run; fails if it does not fit into `limit` bytes.
pub fn plan(
    pipeline: &Pipeline,
    config: &RunConfig,
    caching: &Caching<'_>,
    kind: Kind,
    limit: usize,
) -> Result<Plan> {
    let encoding = caching.plan(kind, limit)?;
    let mut phases: Vec<Phase> = encoding.into_iter().map(Phase::from).collect();
    let rehearsal = Rehearsal { pipeline, config, caching, kind };
    phases.extend(rehearsal.training()?);
    let (tiling, drawing) = rehearsal.drawing(limit)?;
    phases.extend(drawing);
    match phases.iter().find(|phase| phase.peak_bytes > limit) {
        Some(Phase { name, peak_bytes }) => {
            Err(TrainerError::TooLarge { phase: name.clone(), needed: *peak_bytes, limit })
        }
        None => Ok(Plan { phases, tiling }),
    }
}

struct Rehearsal<'a> {
    pipeline: &'a Pipeline,
    config: &'a RunConfig,
    caching: &'a Caching<'a>,
    kind: Kind,
}

impl Rehearsal<'_> {
    fn session(&self) -> Result<(Device, Session<'_>)> {
        let device = Device::meta(self.kind, usize::MAX / 2);
        let session = Session::new(&device, self.pipeline, self.config, &|_| true)?;
        Ok((device, session))
    }

    /// A step in every size that occurs, and a measurement.
    fn training(&self) -> Result<Vec<Phase>> {
        let (device, mut session) = self.session()?;
        let phase = |name: String| {
            let peak_bytes = device.usage().extent;
            device.restart_peak();
            Phase { name, peak_bytes }
        };
        let mut phases = vec![phase("load".into())];
        let Index { train, held_out, .. } = self.caching.index();
        let prompt = self.prompt();
        for (bucket, shown) in buckets(train) {
            for samples in batch_sizes(self.config.train.batch, shown) {
                session.accumulate(&self.batch(bucket, samples, &prompt), 1.0, 0)?;
            }
            session.update(0.0, 0, 1.0)?;
            phases.push(phase(format!("train {}x{}", bucket.width, bucket.height)));
        }
        for (bucket, _) in buckets(held_out) {
            session.measure(&self.batch(bucket, 1, &prompt))?;
            phases.push(phase(format!("validate {}x{}", bucket.width, bucket.height)));
        }
        Ok(phases)
    }

    /// Pictures while training, decoded whole if that fits.
    fn drawing(&self, limit: usize) -> Result<(Option<Tiling>, Option<Phase>)> {
        let mut best = None;
        for tiling in std::iter::once(None).chain(Tiling::candidates().map(Some)) {
            let Some(pictures) = Pictures::new(self.pipeline, self.config, tiling)? else {
                return Ok((None, None));
            };
            let (device, session) = self.session()?;
            pictures.rehearse(&device, &session)?;
            let phase = Phase { name: "draw".into(), peak_bytes: device.usage().extent };
            let fits = phase.peak_bytes <= limit;
            best = Some((tiling, Some(phase)));
            if fits {
                break;
            }
        }
        Ok(best.unwrap_or_default())
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
        Batch { samples: (0..samples).map(|_| (noisy(), prompt)).collect(), sizes }
    }
}

/// Sizes that occur, each with how many pictures an epoch shows of it.
fn buckets(samples: &[Sample]) -> BTreeMap<Bucket, usize> {
    let mut buckets = BTreeMap::new();
    for sample in samples {
        *buckets.entry(sample.bucket).or_default() += sample.repeats as usize;
    }
    buckets
}

/// Pictures in the batches of a bucket that is shown so often: all but the last are full. A smaller
/// batch may leave other holes than a full one does.
fn batch_sizes(batch: usize, shown: usize) -> impl Iterator<Item = usize> {
    [batch.min(shown), shown % batch].into_iter().filter(|samples| *samples > 0)
}

/// Steps that a run takes.
pub fn total_steps(config: &RunConfig, batches_per_epoch: u64) -> u64 {
    match config.train.length {
        Length::Steps(steps) => steps,
        Length::Epochs(epochs) => {
            (epochs * batches_per_epoch).div_ceil(config.train.accumulation as u64).max(1)
        }
    }
}

/// Whether something that is done every so many steps is due.
pub fn is_due(every: Switch<u64>, step: u64) -> bool {
    match every {
        Switch::On(every) => step.is_multiple_of(every),
        Switch::Off => false,
    }
}
