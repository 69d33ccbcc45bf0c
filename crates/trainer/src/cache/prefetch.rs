//! Batches read ahead of the step that needs them, by a thread of their own. Which text a sample
//! gets and whether it is mirrored follows from seed, batch and place in it, so a run that is
//! continued sees what it would have seen.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use compute::Stream;

use super::index::{Index, Latents};
use crate::data::caption::{Draws, for_step};
use crate::data::{Bucket, Order};
use crate::error::{Result, TrainerError};
use crate::model::sd3::prompts::Prompt;

/// Keeps the numbers drawn here apart from others that follow from the same seed: "text".
const PURPOSE: u64 = 0x7465_7874_0000_0000;

/// Bits of a draw that count samples in a batch; the rest counts batches. Chosen: sixty-four times
/// the largest batch of a job.
const SLOT_BITS: u32 = 16;

/// Chosen: small sets are not read again in every epoch, and nobody misses so much memory.
pub(crate) const KEPT_BYTES: usize = 256 << 20;

/// A batch, ready to be trained on.
#[derive(Clone, Debug)]
pub struct Ready {
    /// Its number, counted over the whole run.
    pub number: u64,
    /// Its samples, at least one.
    pub samples: Vec<ReadySample>,
    /// Their size.
    pub bucket: Bucket,
    /// How long `next_batch` waited for it.
    pub waited: Duration,
}

/// A sample of a batch.
#[derive(Clone, Debug)]
pub struct ReadySample {
    /// Which of the index's samples it is.
    pub index: usize,
    /// Its latents, or those of its mirror image.
    pub latents: Arc<Latents>,
    /// Its text as the model sees it.
    pub prompt: Arc<Prompt>,
    /// A number that no other sample of the run has, for streams of random numbers.
    pub draw: u64,
}

/// A thread that prepares batches.
pub struct Prefetch {
    /// Taken away to end the thread.
    batches: Option<Receiver<Result<Ready>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetch {
    /// Begins with batch number `from`, up to `ahead` batches ahead.
    pub fn begin(index: Arc<Index>, order: Order, seed: u64, from: u64, ahead: usize) -> Self {
        let (sender, batches) = sync_channel(ahead);
        let mut reader = Reader { index, order, seed, kept: Kept::default() };
        let thread = thread::spawn(move || {
            for number in from.. {
                let batch = reader.read(number);
                let is_last = batch.is_err();
                // Nobody receives any more, or would go on after an error.
                if sender.send(batch).is_err() || is_last {
                    break;
                }
            }
        });
        Self { batches: Some(batches), thread: Some(thread) }
    }

    /// The next batch. After an error there are no more.
    pub fn next_batch(&mut self) -> Result<Ready> {
        let begun = Instant::now();
        let received = self.batches.as_ref().and_then(|batches| batches.recv().ok());
        let ready = received.unwrap_or_else(|| {
            Err(TrainerError::Request {
                problem: "no more batches are read after an error".into(),
                hint: "begin again at the batch that failed",
            })
        })?;
        Ok(Ready { waited: begun.elapsed(), ..ready })
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // It may have panicked, which is not worth another panic here.
            _ = thread.join();
        }
    }
}

/// What the thread has.
struct Reader {
    index: Arc<Index>,
    order: Order,
    seed: u64,
    kept: Kept,
}

impl Reader {
    fn read(&mut self, number: u64) -> Result<Ready> {
        let samples = self.order.batch(number);
        let bucket = samples.first().and_then(|first| Some(self.index.train.get(*first)?.bucket));
        let bucket = bucket.ok_or_else(|| TrainerError::Request {
            problem: "there is nothing to train on".into(),
            hint: "give data.images a folder of pictures",
        })?;
        let samples = samples.into_iter().zip(0..);
        let samples = samples.map(|(index, slot)| self.sample(index, number, slot));
        let samples = samples.collect::<Result<_>>()?;
        Ok(Ready { number, samples, bucket, waited: Duration::ZERO })
    }

    fn sample(&mut self, index: usize, number: u64, slot: u64) -> Result<ReadySample> {
        let draw = (number << SLOT_BITS) | slot;
        let stream = Stream::new(self.seed ^ PURPOSE, draw);
        let word = |at| u64::from(stream.word(at)) << 32 | u64::from(stream.word(at + 1));
        let draws = Draws { dropout: word(0), order: word(2) };
        let sample = &self.index.train[index];
        let is_mirrored = sample.mirrored.is_some() && stream.word(4) & 1 == 1;
        let text = for_step(&sample.caption, self.index.captions(), draws);
        let latents = self.kept.latents(&self.index, index, is_mirrored)?;
        Ok(ReadySample { index, latents, prompt: self.kept.prompt(&self.index, text)?, draw })
    }
}

/// What was read before, as long as there is room.
#[derive(Default)]
struct Kept {
    latents: HashMap<(usize, bool), Arc<Latents>>,
    prompts: HashMap<String, Arc<Prompt>>,
    bytes: usize,
}

impl Kept {
    fn latents(&mut self, from: &Index, index: usize, is_mirrored: bool) -> Result<Arc<Latents>> {
        if let Some(latents) = self.latents.get(&(index, is_mirrored)) {
            return Ok(Arc::clone(latents));
        }
        let latents = Arc::new(from.latents(&from.train[index], is_mirrored)?);
        if self.has_room(latents.mean.len() + latents.deviation.len()) {
            self.latents.insert((index, is_mirrored), Arc::clone(&latents));
        }
        Ok(latents)
    }

    fn prompt(&mut self, from: &Index, text: String) -> Result<Arc<Prompt>> {
        if let Some(prompt) = self.prompts.get(&text) {
            return Ok(Arc::clone(prompt));
        }
        let prompt = Arc::new(from.prompt(&text)?);
        if self.has_room(prompt.tokens.len() + prompt.pooled.len()) {
            self.prompts.insert(text, Arc::clone(&prompt));
        }
        Ok(prompt)
    }

    /// Takes the room for so many numbers, if there is any.
    fn has_room(&mut self, n_numbers: usize) -> bool {
        let bytes = self.bytes + n_numbers * size_of::<f32>();
        let has_room = bytes <= KEPT_BYTES;
        if has_room {
            self.bytes = bytes;
        }
        has_room
    }
}
