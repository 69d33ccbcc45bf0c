//! Files through the tokenizer into the store: blocks are read in order, become tokens on all threads,
//! and are put behind each other in order again. What comes out does not depend on how many threads
//! there are, nor on how often it was interrupted.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use weights::WeightsError;

use super::encode::{BlockTokeniser, TokenisedBlock};
use super::read::{TextBlock, TextReader};
use super::source::TextSource;
use super::store::{ShardBuilder, TokenStore};
use super::{RecordKind, TOKENS_PHASE, TokenWidth, Tokenizer};
use crate::error::Result;
use crate::progress::{ProgressEvent, ProgressFn};

/// Blocks that are read before any of them becomes tokens. Chosen: four megabytes, which keeps
/// sixteen threads busy; not a function of the threads, since a shard ends behind such a wave.
const WAVE: usize = 16;

/// Goes on where the store ends, up to the end of all files.
pub(super) fn tokenise(
    sources: &[TextSource],
    width: Option<TokenWidth>,
    kind: RecordKind,
    tokenizer: &Tokenizer,
    store: &mut TokenStore,
    on_progress: ProgressFn<'_>,
) -> Result<()> {
    on_progress(ProgressEvent::Phase {
        name: TOKENS_PHASE,
        total: sources.len() - store.at.source,
    });
    let encoder = BlockTokeniser::new(tokenizer, kind);
    let mut reader = TextReader::new(sources, width, store.at);
    let mut growing = ShardBuilder::new(tokenizer.vocab_size());
    while reader.position().source < sources.len() {
        for (source, encoded) in encode(&encoder, read_blocks(&mut reader, on_progress)?) {
            growing.add(source, encoded);
        }
        encoder.check_template()?;
        let is_done = reader.position().source == sources.len();
        if growing.is_full() || is_done {
            let full = std::mem::replace(&mut growing, ShardBuilder::new(tokenizer.vocab_size()));
            store.push(full, reader.position())?;
        }
    }
    Ok(())
}

/// Reads some blocks, and says so.
fn read_blocks(reader: &mut TextReader<'_>, on_progress: ProgressFn<'_>) -> Result<Vec<TextBlock>> {
    let mut blocks = Vec::with_capacity(WAVE);
    while blocks.len() < WAVE
        && let Some(block) = reader.next()?
    {
        let goes_on = on_progress(ProgressEvent::Loaded(block.bytes.len() as u64))
            && (!block.is_last || on_progress(ProgressEvent::Done));
        if !goes_on {
            return Err(WeightsError::Cancelled.into());
        }
        blocks.push(block);
    }
    Ok(blocks)
}

/// All blocks at once, each with the file it is of; in the order they were given.
fn encode(encoder: &BlockTokeniser<'_>, blocks: Vec<TextBlock>) -> Vec<(usize, TokenisedBlock)> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(blocks.len());
    let blocks: Vec<Mutex<Option<TextBlock>>> =
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
        // Fewer where the system gives no more; this one takes what is left.
        let start = |_| Builder::new().spawn_scoped(scope, work).ok();
        let threads: Vec<_> = (1..n_threads).filter_map(start).collect();
        let own = work();
        let done = threads.into_iter().flat_map(|thread| thread.join().expect("it does not panic"));
        done.chain(own).collect::<Vec<_>>()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, encoded)| encoded).collect()
}
