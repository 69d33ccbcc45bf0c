//! Writing a file from start to end: blocks are filled here while a thread of its own writes the
//! last ones past the page cache, so that disk and CPU work at once and a saved model does
//! not push a loaded one out of memory.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use super::{ALIGNMENT, AlignedBuffer, system};

/// Chosen: two blocks on their way while a third is filled.
const BLOCKS: usize = 3;
const BLOCK_BYTES: usize = 8 << 20;

/// A file being written.
pub struct DirectWriter {
    full: Option<SyncSender<WriteBlock>>,
    empty: Receiver<WriteBlock>,
    writer: Option<JoinHandle<io::Result<()>>>,
    current: Option<WriteBlock>,
    offset: u64,
}

struct WriteBlock {
    scratch: AlignedBuffer,
    filled: usize,
    offset: u64,
}

impl DirectWriter {
    /// Begins to write to a new, empty file. Fails where the system gives no thread.
    pub fn begin(path: &Path, file: File) -> io::Result<Self> {
        // File systems without direct writes are written through the cache.
        let direct = system::create_direct(path).ok();
        let (full, to_write) = sync_channel::<WriteBlock>(BLOCKS);
        let (give_back, empty) = channel();
        for _ in 1..BLOCKS {
            give_back.send(WriteBlock::new()).expect("the receiver is held below");
        }
        let writer = Builder::new().spawn(move || {
            for mut block in to_write {
                block.write(&file, direct.as_ref())?;
                block.filled = 0;
                // Nobody takes it back once the last block is in.
                _ = give_back.send(block);
            }
            Ok(())
        })?;
        Ok(Self {
            full: Some(full),
            empty,
            writer: Some(writer),
            current: Some(WriteBlock::new()),
            offset: 0,
        })
    }

    /// Waits until everything is written; the caller syncs.
    pub fn finish(&mut self) -> io::Result<()> {
        if let (Some(block), Some(full)) = (self.current.take(), &self.full) {
            _ = full.send(block);
        }
        self.join()
    }

    /// Ends the thread and gives its error.
    fn join(&mut self) -> io::Result<()> {
        self.full = None;
        match self.writer.take() {
            Some(writer) => writer.join().unwrap_or_else(|_| Err(ErrorKind::Other.into())),
            None => Ok(()),
        }
    }
}

impl Write for DirectWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (Some(full), Some(block)) = (&self.full, &mut self.current) else {
            return Err(ErrorKind::BrokenPipe.into());
        };
        let taken = block.fill(bytes);
        if block.filled == BLOCK_BYTES {
            self.offset += BLOCK_BYTES as u64;
            let block = self.current.take().expect("it was filled just now");
            let next = full.send(block).ok().and_then(|()| self.empty.recv().ok());
            let Some(next) = next else {
                // The thread has ended, which it does before its time only with an error.
                return Err(self.join().err().unwrap_or(ErrorKind::BrokenPipe.into()));
            };
            self.current = Some(WriteBlock { offset: self.offset, ..next });
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for DirectWriter {
    fn drop(&mut self) {
        // Given up: whoever cared for the result has called finish.
        _ = self.join();
    }
}

impl WriteBlock {
    fn new() -> Self {
        Self { scratch: AlignedBuffer::new(BLOCK_BYTES), filled: 0, offset: 0 }
    }

    fn fill(&mut self, bytes: &[u8]) -> usize {
        let room = &mut self.scratch.aligned()[self.filled..BLOCK_BYTES];
        let taken = bytes.len().min(room.len());
        room[..taken].copy_from_slice(&bytes[..taken]);
        self.filled += taken;
        taken
    }

    /// The last block of a file ends where it wants; its ragged end goes through the cache.
    fn write(&mut self, file: &File, direct: Option<&File>) -> io::Result<()> {
        let bytes = &self.scratch.aligned()[..self.filled];
        let (even, ragged) = bytes.split_at(self.filled / ALIGNMENT * ALIGNMENT);
        let written = direct.map(|direct| direct.write_all_at(even, self.offset));
        match written {
            Some(Err(error)) if error.kind() != ErrorKind::InvalidInput => return Err(error),
            Some(Ok(())) => {}
            // No direct writes here, or the file system accepts the open and refuses the write.
            _ => file.write_all_at(even, self.offset)?,
        }
        file.write_all_at(ragged, self.offset + even.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_any_length_come_out_whole() {
        let folder = tempfile::tempdir().unwrap();
        for length in
            [0, 1, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 777]
        {
            let path = folder.path().join(length.to_string());
            let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let mut stream = DirectWriter::begin(&path, File::create(&path).unwrap()).unwrap();
            for chunk in bytes.chunks(1_000_003) {
                stream.write_all(chunk).unwrap();
            }
            stream.finish().unwrap();
            assert!(std::fs::read(&path).unwrap() == bytes, "{length} bytes");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_of_the_writer() {
        let path = Path::new("/dev/full");
        let begin =
            || DirectWriter::begin(path, File::options().write(true).open(path).unwrap()).unwrap();
        let mut stream = begin();
        let error = stream.write_all(&vec![0; 10 * BLOCK_BYTES]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        let mut short = begin();
        short.write_all(b"few").unwrap();
        assert_eq!(short.finish().unwrap_err().kind(), ErrorKind::StorageFull);
    }
}
