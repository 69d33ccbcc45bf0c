//! The cost of encoding texts, by a dry run: memory, work, and bytes that are read. A large encoder runs whole where that
//! fits, else block by block, with the same output. Texts are as long as an encoder can see.

use std::cell::RefCell;

use compute::{Device, DeviceKind, WorkStats};

use crate::cost::{Cost, Stage, StageMemory, UNLIMITED};
use crate::error::Result;
use crate::model::build::Precision;
use crate::model::diffusion::text::{
    EncodeCallbacks, EncoderLoading, EncodingOptions, TextEncoderSpec, TextEncoders,
};
use crate::model::encoder::stack::TEXT_BATCH;

/// The stages of encoding so many texts, each with images of these sizes, with large encoders block by block if one takes
/// more than `limit` bytes as a whole.
pub(crate) fn plan_encoding(
    encoders: &TextEncoders,
    precision: Precision,
    n_texts: usize,
    images: &[[u32; 2]],
    kind: DeviceKind,
    limit: usize,
) -> Result<(Vec<Stage>, EncoderLoading)> {
    let of_large = |stages: &[Stage]| {
        let stages = stages.iter().zip(encoders.file_bytes());
        let large = stages.filter(|(_, (spec, _))| spec.kind.has_blocks());
        large.map(|(stage, _)| stage.memory.peak_bytes).max().unwrap_or(0)
    };
    let run =
        |loading| dry_run(encoders, EncodingOptions { precision, loading }, n_texts, images, kind);
    let whole = run(EncoderLoading::Whole)?;
    if of_large(&whole) <= limit {
        return Ok((whole, EncoderLoading::Whole));
    }
    let blocks = run(EncoderLoading::Blocks)?;
    // With a tiny model the hidden states of waiting texts take more than its weights.
    let is_smaller = of_large(&blocks) < of_large(&whole);
    Ok(if is_smaller { (blocks, EncoderLoading::Blocks) } else { (whole, EncoderLoading::Whole) })
}

/// An encoder in a dry run: the device's work when it began, and after each text.
struct EncoderRun {
    peak_bytes: usize,
    works: Vec<WorkStats>,
}

/// The stages of encoding so many texts in one way.
pub(crate) fn dry_run(
    encoders: &TextEncoders,
    encoding: EncodingOptions,
    n_texts: usize,
    images: &[[u32; 2]],
    kind: DeviceKind,
) -> Result<Vec<Stage>> {
    let n = n_dry_run(encoding.loading, n_texts);
    let mut runs = observe(encoders, encoding, n, images, kind)?;
    // The images of all texts are seen before the first is encoded, so that it takes two runs to know what one more does.
    if !images.is_empty() && encoding.loading == EncoderLoading::Whole && n > 1 {
        let of_one = observe(encoders, encoding, 1, images, kind)?;
        runs.iter_mut().zip(&of_one).for_each(|(run, of_one)| run.begin_like(of_one));
    }
    let stage = |(run, (spec, file_bytes)): (EncoderRun, (TextEncoderSpec, _))| {
        let is_in_blocks = encoding.loading == EncoderLoading::Blocks && spec.kind.has_blocks();
        run.stage(spec.name, is_in_blocks, n_texts, file_bytes)
    };
    Ok(runs.into_iter().zip(encoders.file_bytes()).map(stage).collect())
}

/// Encodes so many texts on a meta device.
fn observe(
    encoders: &TextEncoders,
    encoding: EncodingOptions,
    n: usize,
    images: &[[u32; 2]],
    kind: DeviceKind,
) -> Result<Vec<EncoderRun>> {
    let device = Device::meta(kind, UNLIMITED);
    let seen = RefCell::new(Vec::<EncoderRun>::new());
    let end = |device: &Device| {
        if let Some(seen) = seen.borrow_mut().last_mut() {
            seen.peak_bytes = device.usage().extent;
        }
        device.reset_peak();
    };
    let begin = |_, device: &Device| {
        end(device);
        seen.borrow_mut().push(EncoderRun { peak_bytes: 0, works: vec![device.work()] });
    };
    let encoded = || {
        if let Some(seen) = seen.borrow_mut().last_mut() {
            seen.works.push(device.work());
        }
        true
    };
    let watch = EncodeCallbacks { on_begin: &begin, tick: &|_| true, on_encoded: &encoded };
    encoders.encode_longest(&device, encoding, n, images, watch)?;
    end(&device);
    Ok(seen.into_inner())
}

/// Texts of a dry run that show the cost of all. One by one, the second is like all that follow; in batches, a full
/// batch and the last one.
fn n_dry_run(loading: EncoderLoading, n_texts: usize) -> usize {
    match loading {
        EncoderLoading::Whole => n_texts.clamp(1, 2),
        EncoderLoading::Blocks if n_texts > TEXT_BATCH => TEXT_BATCH + n_texts % TEXT_BATCH,
        EncoderLoading::Blocks => n_texts.max(1),
    }
}

impl EncoderRun {
    /// Takes the work of the first text from a run with no other, if it is the first encoder: those before another see
    /// no images.
    fn begin_like(&mut self, of_one: &Self) {
        let is_first = self.works.first() == of_one.works.first();
        if let (true, [_, ours, _], [_, first]) = (is_first, &mut self.works[..], &of_one.works[..])
        {
            *ours = first.clone();
        }
    }

    fn stage(
        self,
        name: &'static str,
        is_in_blocks: bool,
        n_texts: usize,
        file_bytes: u64,
    ) -> Stage {
        let Self { peak_bytes, works } = self;
        let since = |from: usize, to: usize| works[to].since(&works[from]);
        let n_read = if is_in_blocks { n_texts.div_ceil(TEXT_BATCH) } else { 1 };
        let n_seen = works.len() - 1;
        let works = if is_in_blocks || n_seen < 2 {
            vec![(n_texts as f64 / n_seen as f64, since(0, n_seen))]
        } else {
            vec![(1.0, since(0, 1)), (n_texts as f64 - 1.0, since(1, 2))]
        };
        let memory = StageMemory { name, peak_bytes };
        Stage { memory, cost: Cost { works, read_bytes: n_read as u64 * file_bytes } }
    }
}
