//! Files through the tokenizer into the store: blocks are read in order, become tokens on all threads,
//! and are put behind each other in order again. What comes out does not depend on how many threads
//! there are, nor on how often it was interrupted.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use weights::WeightsError;

use super::encode::{Encoded, Encoder};
use super::read::{Block, Reader};
use super::source::Source;
use super::store::{Growing, Store};
use super::{TOKENS, Tokenizer, Width};
use crate::error::Result;
use crate::progress::{Event, Tell};

/// Blocks that are read before any of them becomes tokens. Chosen: four megabytes, which keeps
/// sixteen threads busy; not a function of the threads, since a shard ends behind such a wave.
const WAVE: usize = 16;

/// Goes on where the store ends, up to the end of all files.
pub(super) fn tokenise(
    sources: &[Source],
    width: Option<Width>,
    tokenizer: &Tokenizer,
    store: &mut Store,
    tell: Tell<'_>,
) -> Result<()> {
    tell(Event::Phase { name: TOKENS, total: sources.len() - store.at.source });
    let encoder = Encoder::new(tokenizer);
    let mut reader = Reader::new(sources, width, store.at);
    let mut growing = Growing::new(tokenizer.vocabulary());
    while reader.position().source < sources.len() {
        for (source, encoded) in encode(&encoder, wave(&mut reader, tell)?) {
            growing.add(source, encoded);
        }
        let is_done = reader.position().source == sources.len();
        if growing.is_full() || is_done {
            let full = std::mem::replace(&mut growing, Growing::new(tokenizer.vocabulary()));
            store.push(full, reader.position())?;
        }
    }
    Ok(())
}

/// Reads some blocks, and says so.
fn wave(reader: &mut Reader<'_>, tell: Tell<'_>) -> Result<Vec<Block>> {
    let mut blocks = Vec::with_capacity(WAVE);
    while blocks.len() < WAVE
        && let Some(block) = reader.next()?
    {
        let goes_on =
            tell(Event::Loaded(block.bytes.len() as u64)) && (!block.is_last || tell(Event::Done));
        if !goes_on {
            return Err(WeightsError::Cancelled.into());
        }
        blocks.push(block);
    }
    Ok(blocks)
}

/// All blocks at once, each with the file it is of; in the order they were given.
fn encode(encoder: &Encoder<'_>, blocks: Vec<Block>) -> Vec<(usize, Encoded)> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(blocks.len());
    let blocks: Vec<Mutex<Option<Block>>> =
        blocks.into_iter().map(|block| Mutex::new(Some(block))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(block) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let block = block.lock().expect("no thread panics with it").take();
            let block = block.expect("each number is drawn once");
            let (at, source) = (block.at, block.at.source);
            done.push((at, (source, encoder.encode(block))));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        let done = threads.into_iter().flat_map(|thread| thread.join().expect("it does not panic"));
        done.collect::<Vec<_>>()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, encoded)| encoded).collect()
}
