//! The cost of encoding texts, by a dry run: memory, work, and bytes that are read. T5 runs whole where that
//! fits, else block by block, with the same output.

use std::cell::RefCell;

use compute::{Device, DeviceKind, WorkStats};

use crate::cost::{Cost, Stage, StageMemory, UNLIMITED};
use crate::error::Result;
use crate::model::build::Precision;
use crate::model::diffusion::text::{
    EncodeCallbacks, EncodingOptions, T5_NAME, T5Loading, TextEncoders,
};
use crate::model::encoder::stack::TEXT_BATCH;

/// The stages of encoding so many texts, with T5 block by block if the whole takes more than `limit` bytes.
pub(crate) fn plan_encoding(
    encoders: &TextEncoders,
    precision: Precision,
    n_texts: usize,
    kind: DeviceKind,
    limit: usize,
) -> Result<(Vec<Stage>, T5Loading)> {
    let of_t5 = |stages: &[Stage]| {
        let stage = stages.iter().find(|stage| stage.memory.name == T5_NAME);
        stage.map_or(0, |stage| stage.memory.peak_bytes)
    };
    let whole =
        dry_run(encoders, EncodingOptions { precision, t5: T5Loading::Whole }, n_texts, kind)?;
    if of_t5(&whole) <= limit {
        return Ok((whole, T5Loading::Whole));
    }
    let blocks =
        dry_run(encoders, EncodingOptions { precision, t5: T5Loading::Blocks }, n_texts, kind)?;
    // With a tiny model the hidden states of waiting texts take more than its weights.
    let is_smaller = of_t5(&blocks) < of_t5(&whole);
    Ok(if is_smaller { (blocks, T5Loading::Blocks) } else { (whole, T5Loading::Whole) })
}

/// An encoder in a dry run: the device's work when it began, and after each text.
struct EncoderRun {
    name: &'static str,
    peak_bytes: usize,
    works: Vec<WorkStats>,
}

/// The stages of encoding so many texts in one way.
pub(crate) fn dry_run(
    encoders: &TextEncoders,
    encoding: EncodingOptions,
    n_texts: usize,
    kind: DeviceKind,
) -> Result<Vec<Stage>> {
    let device = Device::meta(kind, UNLIMITED);
    let seen = RefCell::new(Vec::<EncoderRun>::new());
    let end = |device: &Device| {
        if let Some(seen) = seen.borrow_mut().last_mut() {
            seen.peak_bytes = device.usage().extent;
        }
        device.reset_peak();
    };
    let begin = |name, device: &Device| {
        end(device);
        let works = vec![device.work()];
        seen.borrow_mut().push(EncoderRun { name, peak_bytes: 0, works });
    };
    let encoded = || {
        if let Some(seen) = seen.borrow_mut().last_mut() {
            seen.works.push(device.work());
        }
        true
    };
    let watch = EncodeCallbacks { on_begin: &begin, tick: &|_| true, on_encoded: &encoded };
    encoders.encode_longest(&device, encoding, n_dry_run(encoding.t5, n_texts), watch)?;
    end(&device);
    let stages = seen.into_inner().into_iter().zip(encoders.file_bytes());
    Ok(stages.map(|(seen, (_, file_bytes))| seen.stage(encoding.t5, n_texts, file_bytes)).collect())
}

/// Texts of a dry run that show the cost of all. One by one, the second is like all that follow; in batches, a full
/// batch and the last one.
fn n_dry_run(t5: T5Loading, n_texts: usize) -> usize {
    match t5 {
        T5Loading::Whole => n_texts.clamp(1, 2),
        T5Loading::Blocks if n_texts > TEXT_BATCH => TEXT_BATCH + n_texts % TEXT_BATCH,
        T5Loading::Blocks => n_texts.max(1),
    }
}

impl EncoderRun {
    fn stage(self, t5: T5Loading, n_texts: usize, file_bytes: u64) -> Stage {
        let Self { name, peak_bytes, works } = self;
        let phase = StageMemory { name, peak_bytes };
        let is_in_blocks = t5 == T5Loading::Blocks && name == T5_NAME;
        let since = |from: usize, to: usize| works[to].since(&works[from]);
        let n_read = if is_in_blocks { n_texts.div_ceil(TEXT_BATCH) } else { 1 };
        let n_seen = works.len() - 1;
        let works = if is_in_blocks || n_seen < 2 {
            vec![(n_texts as f64 / n_seen as f64, since(0, n_seen))]
        } else {
            vec![(1.0, since(0, 1)), (n_texts as f64 - 1.0, since(1, 2))]
        };
        Stage { memory: phase, cost: Cost { works, read_bytes: n_read as u64 * file_bytes } }
    }
}
