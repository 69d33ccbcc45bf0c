//! Files that are read by threads which run a few items ahead of whoever computes with them.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{Scope, available_parallelism};

/// How far reading runs ahead.
#[derive(Clone, Copy)]
pub struct ReadAhead {
    /// Threads, at most; one at least.
    pub threads: usize,
    /// Items that wait to be received, at most.
    pub waiting: usize,
}

impl ReadAhead {
    /// By so many threads, with a few items waiting. Chosen: enough to bridge a slow one.
    pub const fn by(threads: usize) -> Self {
        Self { threads, waiting: 4 }
    }
}

/// What `read` makes of the items, each with its index, as they become ready. The threads end when nobody receives any
/// more.
pub fn read_ahead<'scope, 'a: 'scope, I: Sync, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    items: &'a [I],
    ReadAhead { threads, waiting: most_waiting }: ReadAhead,
    read: impl Fn(&'a I) -> T + Copy + Send + 'scope,
) -> Receiver<(usize, T)> {
    let (sender, receiver) = sync_channel(most_waiting);
    let waiting = Arc::new(Mutex::new(items.iter().enumerate()));
    let n = available_parallelism().map_or(1, usize::from).min(threads).min(items.len());
    for _ in 0..n.max(1) {
        let (sender, waiting) = (sender.clone(), Arc::clone(&waiting));
        scope.spawn(move || {
            let next = || waiting.lock().ok()?.next();
            while let Some((index, item)) = next() {
                if sender.send((index, read(item))).is_err() {
                    break;
                }
            }
        });
    }
    receiver
}

#[cfg(test)]
mod tests {
    use std::thread::scope;

    use super::*;

    #[test]
    fn every_item_comes_once_with_its_index() {
        let items: Vec<usize> = (0..50).map(|n| n * n).collect();
        let mut all: Vec<_> = scope(|scope| {
            read_ahead(scope, &items, ReadAhead::by(3), |n| n + 1).into_iter().collect()
        });
        all.sort_unstable();
        assert_eq!(all, items.iter().map(|n| n + 1).enumerate().collect::<Vec<_>>());
    }

    #[test]
    fn threads_end_when_nobody_receives() {
        let items = vec![0; 50];
        let first = scope(|scope| {
            read_ahead(scope, &items, ReadAhead { threads: 3, waiting: 0 }, |n| *n).recv()
        });
        assert!(first.is_ok());
    }
}
