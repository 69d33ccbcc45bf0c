//! What the program holds beside the arena: itself and the batches that are read ahead. Not exact as the
//! arena is, which a rehearsal finds to the byte, but close: `docs/measured.md` has it beside what the
//! system counts.

use compute::Dtype;

use super::outlook::Outlook;
use crate::cache::prefetch::KEPT_BYTES;
use crate::config::RunConfig;
use crate::model::sd3::pipeline::Pipeline;
use crate::train::run::AHEAD;

/// The program's code as far as it is used, its threads, and their room for matrix products. This and
/// the two below measured on a Xeon with 2 threads, 2026-11-15: what the system counts less the arena.
const PROGRAM_BYTES: usize = 26 << 20;
const THREAD_BYTES: usize = 2 << 20;
/// Blocks of files on their way to or from the disk.
const FILES_BYTES: usize = 48 << 20;
/// Pictures that are decoded, and latents that are not written yet.
const PICTURES_BYTES: usize = 24 << 20;

/// Bytes outside the arena while pictures and texts are encoded.
pub(super) fn encoding_bytes(threads: usize) -> usize {
    program_bytes(threads) + PICTURES_BYTES
}

fn program_bytes(threads: usize) -> usize {
    PROGRAM_BYTES + threads * THREAD_BYTES + FILES_BYTES
}

/// Bytes outside the arena while it trains.
pub(super) fn training_bytes(
    pipeline: &Pipeline,
    config: &RunConfig,
    outlook: &Outlook,
    threads: usize,
) -> usize {
    let model = &pipeline.transformer.config;
    let n_tokens = pipeline.encoders.n_tokens();
    let prompt = n_tokens * model.joint_attention_dim + model.pooled_projection_dim;
    let latents = |width, height| pipeline.latent_sizes([width, height]).iter().product::<usize>();
    // A mean and a deviation for each number of a latent.
    let sample = |width, height| (2 * latents(width, height) + prompt) * Dtype::F32.bytes();
    let sizes = || outlook.train.iter().map(|(bucket, n)| (sample(bucket.width, bucket.height), n));
    let repeats = (config.data.repeats as usize).max(1);
    let all: usize = sizes().map(|(bytes, shown)| bytes * shown.div_ceil(repeats)).sum();
    let largest = sizes().map(|(bytes, _)| bytes).max().unwrap_or(0);
    let batch = config.train.batch * largest;
    // What is read ahead is also kept, as long as there is room for it.
    let read = if all <= KEPT_BYTES { all } else { KEPT_BYTES + (AHEAD + 1) * batch };
    program_bytes(threads) + read
}
