//! Files that are read by threads which run a few items ahead of whoever computes with them.

use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, Scope, available_parallelism};

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
/// more. Where the system gives no thread, items are read when they are asked for.
pub fn read_ahead<'scope, 'a: 'scope, I: Sync, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    items: &'a [I],
    ReadAhead { threads, waiting: most_waiting }: ReadAhead,
    read: impl Fn(&'a I) -> T + Copy + Send + 'scope,
) -> impl Iterator<Item = (usize, T)> {
    let (sender, receiver) = sync_channel(most_waiting);
    let waiting = Arc::new(Mutex::new(items.iter().enumerate()));
    let n = available_parallelism().map_or(1, usize::from).min(threads).min(items.len());
    let mut n_started = 0;
    for _ in 0..n.max(1) {
        let (sender, waiting) = (sender.clone(), Arc::clone(&waiting));
        let work = move || {
            while let Some((index, item)) = next(&waiting) {
                if sender.send((index, read(item))).is_err() {
                    break;
                }
            }
        };
        n_started += usize::from(Builder::new().spawn_scoped(scope, work).is_ok());
    }
    drop(sender);
    std::iter::from_fn(move || match n_started {
        0 => next(&waiting).map(|(index, item)| (index, read(item))),
        _ => receiver.recv().ok(),
    })
}

fn next<N>(items: &Mutex<impl Iterator<Item = N>>) -> Option<N> {
    items.lock().ok()?.next()
}

#[cfg(test)]
mod tests {
    use std::thread::scope;

    use super::*;

    #[test]
    fn every_item_comes_once_with_its_index() {
        let items: Vec<usize> = (0..50).map(|n| n * n).collect();
        let mut all: Vec<_> =
            scope(|scope| read_ahead(scope, &items, ReadAhead::by(3), |n| n + 1).collect());
        all.sort_unstable();
        assert_eq!(all, items.iter().map(|n| n + 1).enumerate().collect::<Vec<_>>());
    }

    #[test]
    fn threads_end_when_nobody_receives() {
        let items = vec![0; 50];
        let first = scope(|scope| {
            read_ahead(scope, &items, ReadAhead { threads: 3, waiting: 0 }, |n| *n).next()
        });
        assert!(first.is_some());
    }
}
