//! What a run takes, found before it starts: its phases are run on a device without data, in the
//! order in which they will come, by the functions that will run. An arena of that size is enough.

mod outlook;
pub mod rates;

use compute::{Device, Kind, Work};

pub use outlook::{Counts, Outlook};

use crate::cache::plan_pictures;
use crate::config::RunConfig;
use crate::data::Bucket;
use crate::error::{Result, TrainerError};
use crate::model::build::Precision;
use crate::model::sd3::pipeline::Pipeline;
use crate::model::sd3::prompts::Prompt;
use crate::model::vae::Tiling;
use crate::objective::flow::Level;
use crate::sample::plan_encoding;
use crate::train::event::Phase;
use crate::train::how::How;
use crate::train::noisy::{Mixer, Noisy};
use crate::train::pictures::Pictures;
use crate::train::session::{Batch, Session};

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
    outlook: &Outlook,
    kind: Kind,
    limit: usize,
) -> Result<Plan> {
    let precision = Precision { dtype: config.base.dtype, base: config.base.quantise };
    let mut encoding = plan_pictures(pipeline, &outlook.to_encode, kind, limit)?;
    if outlook.has_texts {
        encoding.extend(plan_encoding(&pipeline.encoders, precision, kind, limit)?);
    }
    let mut phases: Vec<Phase> = encoding.into_iter().map(Phase::from).collect();
    let rehearsal = Rehearsal { pipeline, config, outlook, kind, how: How::of(config) };
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

/// What a step of full batches of one size does, counted on a device without data.
pub fn step_work(
    pipeline: &Pipeline,
    config: &RunConfig,
    kind: Kind,
    bucket: Bucket,
) -> Result<Work> {
    let train = Counts::from([(bucket, config.train.batch)]);
    let empty = Counts::new;
    let outlook = Outlook { train, held_out: empty(), to_encode: empty(), has_texts: false };
    let rehearsal = Rehearsal { pipeline, config, outlook: &outlook, kind, how: How::of(config) };
    let (device, mut session) = rehearsal.session()?;
    let before = device.work();
    let prompt = rehearsal.prompt();
    for _ in 0..config.train.accumulation {
        for samples in portions(config.train.batch, rehearsal.how.micro, config.train.batch) {
            let batch = rehearsal.batch(bucket, samples, &prompt);
            for (noisy, _) in &batch.samples {
                Mixer::rehearse(&device, noisy.latents.len())?;
            }
            session.accumulate(&batch, 1.0, 0, rehearsal.how.recompute)?;
        }
    }
    session.update(0.0, 0, 1.0)?;
    Ok(device.work().since(&before))
}

struct Rehearsal<'a> {
    pipeline: &'a Pipeline,
    config: &'a RunConfig,
    outlook: &'a Outlook,
    kind: Kind,
    how: How,
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
        let How { micro, recompute } = self.how;
        let prompt = self.prompt();
        for (bucket, shown) in &self.outlook.train {
            for samples in portions(self.config.train.batch, micro, *shown) {
                session.accumulate(&self.batch(*bucket, samples, &prompt), 1.0, 0, recompute)?;
            }
            session.update(0.0, 0, 1.0)?;
            phases.push(phase(format!("train {}x{}", bucket.width, bucket.height)));
        }
        for bucket in self.outlook.held_out.keys() {
            session.measure(&self.batch(*bucket, 1, &prompt))?;
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

/// Pictures that go through the model at once in a bucket that is shown so often: all batches but
/// the last are full, and so are all portions of a batch but the last. A smaller portion may leave
/// other holes than a full one does.
fn portions(batch: usize, micro: usize, shown: usize) -> Vec<usize> {
    let batches = [batch.min(shown), shown % batch];
    let mut portions: Vec<usize> =
        batches.into_iter().flat_map(|batch| [batch.min(micro), batch % micro]).collect();
    portions.retain(|portion| *portion > 0);
    portions.dedup();
    portions
}
