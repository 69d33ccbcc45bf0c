//! The download: threads take pieces of files in order, and whoever finishes the last piece of a file checks it and puts
//! it into the snapshot. Threads are not waited for after Ctrl-C: what is on the disk is good at every moment.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use ureq::Body;
use ureq::http::Response;
use weights::BytesDoneFn;

use crate::client::{ByteRange, CONNECTIONS, HubClient, header};
use crate::error::{HubError, Result};
use crate::model::{HubModel, RemoteFile};
use crate::snapshot::SnapshotFolder;
use crate::staging::{StagingFile, n_pieces};

/// Chosen: how often progress is told.
const TOLD_EVERY: Duration = Duration::from_millis(50);
/// Chosen: written and counted at once.
const BUFFER_BYTES: usize = 256 << 10;
/// Chosen: transfers of a piece in a row that bring nothing.
const FRUITLESS: u32 = 5;
/// Chosen: what a disk keeps free for others.
const DISK_RESERVE_BYTES: u64 = 256 << 20;

/// A download.
pub struct FetchJob {
    client: HubClient,
    model: HubModel,
    cache: PathBuf,
    folder: SnapshotFolder,
    files: Vec<RemoteFile>,
}

/// What it came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchOutcome {
    /// The snapshot.
    pub snapshot: PathBuf,
    /// Bytes that came over the network.
    pub transferred_bytes: u64,
}

/// A file on its way.
struct Transfer {
    file: RemoteFile,
    /// Opened by whoever takes the first piece, under a lock that other programs respect.
    opened: Mutex<Option<Arc<OpenTransfer>>>,
    pieces_left: AtomicUsize,
}

struct OpenTransfer {
    staging: StagingFile,
    _lock: File,
}

/// What the threads share.
struct FetchThreads {
    job: FetchJob,
    transfers: Vec<Transfer>,
    /// Each piece as a file and a number, in an order that all programs have.
    pieces: Vec<[usize; 2]>,
    next: AtomicUsize,
    transferred: AtomicU64,
    is_stopped: AtomicBool,
}

impl FetchJob {
    /// Of these files of a model, into a cache.
    pub fn new(client: HubClient, model: HubModel, cache: PathBuf, files: Vec<RemoteFile>) -> Self {
        let folder = SnapshotFolder::new(&cache, &model);
        Self { client, model, cache, folder, files }
    }

    /// Whether a file is in the cache.
    pub fn is_there(&self, file: &RemoteFile) -> bool {
        self.folder.has_link(file) || self.folder.has_blob(file)
    }

    /// Bytes that are not there yet, without those of interrupted downloads.
    pub fn missing_bytes(&self) -> u64 {
        let missing = self.files.iter().filter(|file| !self.is_there(file));
        // Files of the same content are one blob.
        let blobs: BTreeMap<_, _> = missing.map(|file| (file.checksum.hex(), file)).collect();
        let rest = |file: &&RemoteFile| file.bytes.saturating_sub(self.begun_bytes(file));
        blobs.values().map(rest).fold(0, u64::saturating_add)
    }

    /// Bytes of a file that an interrupted download left.
    fn begun_bytes(&self, file: &RemoteFile) -> u64 {
        StagingFile::begun_bytes(&self.folder.partial(file), file.bytes)
    }

    /// The files, small ones first.
    pub fn files(&self) -> &[RemoteFile] {
        &self.files
    }

    /// Downloads what is missing.
    pub fn run(self, tick: BytesDoneFn<'_>) -> Result<FetchOutcome> {
        self.folder.create()?;
        self.check_space()?;
        let (transfers, pieces) = self.transfers()?;
        let snapshot = self.folder.path();
        let threads = Arc::new(FetchThreads {
            job: self,
            transfers,
            pieces,
            next: AtomicUsize::new(0),
            transferred: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
        });
        threads.run(tick)?;
        threads.job.folder.write_ref()?;
        Ok(FetchOutcome {
            snapshot,
            transferred_bytes: threads.transferred.load(Ordering::Relaxed),
        })
    }

    fn check_space(&self) -> Result<()> {
        let needed = self.missing_bytes();
        // Where the system does not say, writing will.
        let Ok(about) = rustix::fs::statvfs(&self.cache) else { return Ok(()) };
        let free = about.f_bavail.saturating_mul(about.f_frsize);
        if needed == 0 || free.saturating_sub(DISK_RESERVE_BYTES) >= needed {
            return Ok(());
        }
        let shown = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
        let (name, path) = (self.model.repo.clone(), self.cache.clone());
        Err(HubError::DiskSpace { name, needed: shown(needed), free: shown(free), path })
    }

    /// What is to be transferred; links what only lacks a link.
    fn transfers(&self) -> Result<(Vec<Transfer>, Vec<[usize; 2]>)> {
        let (mut transfers, mut pieces) = (Vec::<Transfer>::new(), Vec::new());
        for file in self.files.iter().filter(|file| !self.folder.has_link(file)) {
            if self.folder.has_blob(file) {
                self.folder.link(file)?;
                continue;
            }
            let n = n_pieces(file.bytes);
            pieces.extend((0..n).map(|piece| [transfers.len(), piece]));
            let (opened, pieces_left) = (Mutex::new(None), AtomicUsize::new(n));
            transfers.push(Transfer { file: file.clone(), opened, pieces_left });
        }
        Ok((transfers, pieces))
    }
}

impl FetchThreads {
    fn run(self: &Arc<Self>, tick: BytesDoneFn<'_>) -> Result<()> {
        let (sender, results) = mpsc::channel();
        for _ in 0..CONNECTIONS.min(self.pieces.len()) {
            let (own, sender) = (Arc::clone(self), sender.clone());
            let begun =
                thread::Builder::new().name("fetch".into()).spawn(move || own.work(&sender));
            begun.map_err(HubError::io("start a thread for", &self.job.cache))?;
        }
        drop(sender);
        let mut told = 0;
        loop {
            let result = results.recv_timeout(TOLD_EVERY);
            let transferred = self.transferred.load(Ordering::Relaxed);
            if !tick(transferred - told) {
                self.stop();
                return Err(HubError::Cancelled);
            }
            told = transferred;
            match result {
                Ok(Err(error)) => {
                    self.stop();
                    return Err(error);
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(Ok(())) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Takes one piece after the other.
    fn work(&self, results: &Sender<Result<()>>) {
        while let Some([transfer, piece]) =
            self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            let result = if self.is_stopped() {
                return;
            } else {
                self.piece(&self.transfers[*transfer], *piece)
            };
            let has_failed = result.is_err();
            if results.send(result).is_err() || has_failed {
                return;
            }
        }
    }

    fn piece(&self, transfer: &Transfer, piece: usize) -> Result<()> {
        let Transfer { file, opened, pieces_left } = transfer;
        let folder = &self.job.folder;
        let open = {
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            if opened.is_none() {
                let lock = folder.lock(file, &|| self.is_stopped())?;
                // Another program may have finished it while we waited.
                if folder.has_blob(file) {
                    return folder.link(file);
                }
                let staging = StagingFile::open(&folder.partial(file), file.bytes)?;
                *opened = Some(Arc::new(OpenTransfer { staging, _lock: lock }));
            }
            opened.as_ref().map(Arc::clone).expect("it was just opened")
        };
        self.transfer(file, &open.staging, piece)?;
        if pieces_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            open.staging.commit(file, &folder.blob(file))?;
            folder.link(file)?;
            // The lock goes with it.
            opened.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
        Ok(())
    }

    /// Transfers what is missing of a piece, by as many requests as that takes.
    fn transfer(&self, file: &RemoteFile, staging: &StagingFile, piece: usize) -> Result<()> {
        let (client, url) = (&self.job.client, self.job.model.url(&self.job.client, file));
        let mut fruitless = 0;
        while let Some([first, end]) = staging.rest(piece) {
            let before = staging.done(piece);
            let response =
                client.get(&self.job.model.repo, &url, Some(ByteRange { first, last: end - 1 }))?;
            let received = self.receive(response, file, staging, piece);
            if self.is_stopped() {
                return Err(HubError::Cancelled);
            }
            fruitless = if staging.done(piece) > before { 0 } else { fruitless + 1 };
            match received {
                Err(error @ HubError::Unreachable { .. }) if fruitless >= FRUITLESS => {
                    return Err(error);
                }
                Err(HubError::Unreachable { .. }) => {
                    thread::sleep(Duration::from_millis(500 << fruitless));
                }
                Err(error) => return Err(error),
                Ok(()) if fruitless >= FRUITLESS => {
                    let problem =
                        format!("{} ends after {first} of {} bytes", file.path, file.bytes);
                    return Err(client.answer(problem));
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Writes what an answer brings, up to the end of the piece; whatever it would bring beyond that is not read.
    fn receive(
        &self,
        response: Response<Body>,
        file: &RemoteFile,
        staging: &StagingFile,
        piece: usize,
    ) -> Result<()> {
        let Some([first, end]) = staging.rest(piece) else { return Ok(()) };
        // A server may ignore ranges and send all of the file.
        let mut skip = if response.status() == 206 { 0 } else { first };
        let range = header(&response, "content-range").unwrap_or_default();
        if response.status() == 206 && !range.starts_with(&format!("bytes {first}-")) {
            let problem = format!("asked for {} from byte {first}, got {range:?}", file.path);
            return Err(self.job.client.answer(problem));
        }
        let (mut body, mut buffer) = (response.into_body().into_reader(), vec![0; BUFFER_BYTES]);
        let mut left = end - first;
        while left > 0 && !self.is_stopped() {
            let most = (skip + left).min(BUFFER_BYTES as u64) as usize;
            let read = body.read(&mut buffer[..most]).map_err(|error| HubError::Unreachable {
                host: self.job.client.host(),
                problem: format!("{} broke off: {error}", file.path),
            })?;
            if read == 0 {
                break;
            }
            let skipped = skip.min(read as u64);
            skip -= skipped;
            let bytes = &buffer[skipped as usize..read];
            staging.write(piece, bytes)?;
            left -= bytes.len() as u64;
            self.transferred.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}
