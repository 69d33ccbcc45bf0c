//! Values from files into the caller's memory: several threads, large blocks, one pass, no second
//! copy. Where the format asked for is another than the stored one, each block is converted on its
//! way through a small buffer that stays in the CPU's cache.

use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::vec::IntoIter;

use crate::BytesDoneFn;
use crate::catalog::Catalog;
use crate::convert::{can_compute, can_convert, convert, convert_with, encode};
pub use crate::disk::PageCache;
use crate::disk::{ALIGNMENT, AlignedBuffer, DirectReader};
use crate::dtype::FileDtype;
use crate::error::{Result, WeightsError};
use crate::gguf::GgufBlockFormat;
use crate::gguf::blocks::dequantise;
use crate::tensor::{TensorEncoding, TensorInfo};

/// Memory that values are loaded into: the CPU's own, or any that is filled through it.
pub trait LoadTarget: Sized + Send {
    /// How large it is.
    fn bytes(&self) -> usize;

    /// Its first `n` bytes, and the rest.
    fn split_at(self, n: usize) -> (Self, Self);

    /// Lets `write` write all of it.
    fn fill(self, write: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()>;
}

impl LoadTarget for &mut [u8] {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn split_at(self, n: usize) -> (Self, Self) {
        self.split_at_mut(n)
    }

    fn fill(self, write: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
        write(self)
    }
}

/// Values to load: those of a tensor from `first` on, as many as the buffer holds.
pub struct LoadRequest<'a, T = &'a mut [u8]> {
    /// Where they lie.
    pub tensor: &'a TensorInfo,
    /// The format to load them in.
    pub dtype: FileDtype,
    /// How many of the tensor's values to leave out at its start.
    pub first: u64,
    /// What the values are multiplied by in f32: nothing, one scale for all, or one for each row of the tensor.
    pub scales: &'a [f32],
    /// Where they go.
    pub into: T,
}

impl<'a, T> LoadRequest<'a, T> {
    /// All of a tensor.
    pub fn whole(tensor: &'a TensorInfo, dtype: FileDtype, into: T) -> Self {
        Self { tensor, dtype, first: 0, scales: &[], into }
    }
}

/// How to load.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Threads that read at once.
    pub threads: usize,
    /// What to do with the page cache.
    pub cache: PageCache,
}

/// Measured with `bench load`, 2026-11-15. On two cores, four readers of 8 MiB each reach what the
/// disk gives, two of them 85 % of it. On sixteen, a file in the page cache wants a reader per core:
/// with eight the copy into fresh memory ran at 0.55 of a plain one. More than 32 is untried.
const THREADS: std::ops::RangeInclusive<usize> = 4..=32;

impl Default for LoadOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { threads: cores.clamp(*THREADS.start(), *THREADS.end()), cache: PageCache::default() }
    }
}

/// Measured with [`THREADS`]: large enough that a disk streams, small enough to be shared evenly.
const BLOCK_BYTES: u64 = 8 << 20;

/// Loads everything wanted, or nothing that may be used: after an error the buffers hold anything.
pub fn load<T: LoadTarget>(
    catalog: &Catalog,
    wanted: Vec<LoadRequest<'_, T>>,
    options: LoadOptions,
    tick: BytesDoneFn<'_>,
) -> Result<()> {
    let mut disks: Vec<Option<DirectReader>> = catalog.files.iter().map(|_| None).collect();
    let mut pieces = Vec::new();
    for wanted in wanted {
        let (file, path) = (wanted.tensor.file, catalog.file_of(wanted.tensor)?);
        if disks[file].is_none() {
            disks[file] = Some(DirectReader::open(path, options.cache)?);
        }
        split(wanted, &mut pieces)?;
    }
    let groups = group(pieces);
    let threads = options.threads.clamp(1, groups.len().max(1));
    let work = LoadQueue {
        groups: Mutex::new(groups.into_iter()),
        disks: &disks,
        stop: AtomicBool::new(false),
        tick,
    };
    let errors = std::thread::scope(|scope| {
        // Fewer where the system gives no more; this one reads too.
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, || work.run()).ok();
        let hands: Vec<_> = (1..threads).filter_map(start).collect();
        let own = work.run();
        let results = hands.into_iter().map(|hand| hand.join().expect("a reader does not panic"));
        results.chain([own]).filter_map(Result::err).collect::<Vec<_>>()
    });
    // A real error rather than the interruption it caused elsewhere.
    if let Some(error) =
        errors.into_iter().min_by_key(|error| matches!(error, WeightsError::Cancelled))
    {
        return Err(error);
    }
    disks.iter().flatten().try_for_each(DirectReader::check_unchanged)
}

/// Some of a tensor's values as f32, for what is small enough to be held twice.
pub fn load_f32(catalog: &Catalog, tensor: &TensorInfo, numbers: Range<u64>) -> Result<Vec<f32>> {
    let mut bytes = vec![0; (numbers.end - numbers.start) as usize * size_of::<f32>()];
    let (dtype, first) = (FileDtype::F32, numbers.start);
    let wanted = LoadRequest { tensor, dtype, first, scales: &[], into: &mut bytes[..] };
    load(catalog, vec![wanted], LoadOptions::default(), &|_| true)?;
    let (chunks, _) = bytes.as_chunks::<4>();
    Ok(chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Chosen: enough for a disk to keep streaming, little enough to hold beside a model.
const BUFFER_BYTES: u64 = 32 << 20;

/// Loads a tensor stretch by stretch into a buffer that is used again, and hands each over.
pub fn load_blocks(
    catalog: &Catalog,
    tensor: &TensorInfo,
    dtype: FileDtype,
    buffer: &mut Vec<u8>,
    tick: BytesDoneFn<'_>,
    take: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let per_block =
        (BUFFER_BYTES / dtype.bytes()).next_multiple_of(tensor.encoding.values_per_block());
    // A strided view has no blocks that lie together.
    let per_block = if tensor.strides.is_some() { tensor.numel() } else { per_block };
    let mut first = 0;
    while first < tensor.numel() {
        let count = per_block.min(tensor.numel() - first);
        buffer.resize((count * dtype.bytes()) as usize, 0);
        let wanted = LoadRequest { tensor, dtype, first, scales: &[], into: &mut buffer[..] };
        load(catalog, vec![wanted], LoadOptions::default(), tick)?;
        take(buffer)?;
        first += count;
    }
    Ok(())
}

/// Drops a file from the page cache, as far as the system can.
pub fn drop_page_cache(path: &Path) -> Result<()> {
    DirectReader::open(path, PageCache::Release)?.release();
    Ok(())
}

/// A stretch of one tensor that one thread reads.
struct TensorChunk<'a, T> {
    tensor: &'a TensorInfo,
    encoding: TensorEncoding,
    offset: u64,
    source_bytes: u64,
    dtype: FileDtype,
    scales: RowScales<'a>,
    into: T,
}

/// The scales of a chunk's values.
#[derive(Clone, Copy)]
struct RowScales<'a> {
    /// None, one for all, or one for each row of the tensor.
    scales: &'a [f32],
    /// Values of a row.
    width: usize,
    /// The index of the chunk's first value in the tensor.
    first: usize,
}

impl<'a> RowScales<'a> {
    fn new(tensor: &TensorInfo, scales: &'a [f32], first: u64) -> Self {
        let rows = tensor.shape.first().copied().unwrap_or(1).max(1);
        Self { scales, width: (tensor.numel() / rows).max(1) as usize, first: first as usize }
    }

    /// Multiplies values; `at` is the index of the first of them in the chunk.
    fn apply(self, at: usize, numbers: &mut [f32]) {
        match self.scales {
            [] => (),
            [scale] => numbers.iter_mut().for_each(|number| *number *= scale),
            scales => {
                for (index, number) in (self.first + at..).zip(numbers) {
                    *number *= scales[index / self.width];
                }
            }
        }
    }
}

/// Cuts what is wanted into pieces of about a block.
fn split<'a, T: LoadTarget>(
    wanted: LoadRequest<'a, T>,
    pieces: &mut Vec<TensorChunk<'a, T>>,
) -> Result<()> {
    let LoadRequest { tensor, dtype, first, scales, into } = wanted;
    check(tensor, dtype, first, into.bytes() as u64)?;
    check_scales(tensor, dtype, scales)?;
    let bytes_for =
        |count| tensor.encoding.bytes_for(count).expect("the tensor's size was checked");
    let piece = |first, count, into| TensorChunk {
        tensor,
        encoding: tensor.encoding,
        offset: tensor.offset + bytes_for(first),
        source_bytes: bytes_for(count),
        dtype,
        scales: RowScales::new(tensor, scales, first),
        into,
    };
    if tensor.strides.is_some() {
        let whole =
            TensorChunk { offset: tensor.offset, source_bytes: tensor.bytes, ..piece(0, 0, into) };
        pieces.push(whole);
        return Ok(());
    }
    // A whole number of blocks of any quantised format; the first piece ends where the file is
    // aligned, so that the others begin there.
    let per_piece =
        (BLOCK_BYTES / dtype.bytes()).next_multiple_of(tensor.encoding.values_per_block());
    let lead = match tensor.encoding {
        TensorEncoding::Plain(stored) if stored == dtype => {
            (tensor.offset + bytes_for(first)) % ALIGNMENT as u64 / dtype.bytes()
        }
        _ => 0,
    };
    let mut first = first;
    let mut rest = into;
    let mut size = per_piece - lead;
    while rest.bytes() > 0 {
        let bytes = rest.bytes().min((size * dtype.bytes()) as usize);
        let (into, later) = rest.split_at(bytes);
        let count = bytes as u64 / dtype.bytes();
        pieces.push(piece(first, count, into));
        (first, rest, size) = (first + count, later, per_piece);
    }
    Ok(())
}

fn check(tensor: &TensorInfo, dtype: FileDtype, first: u64, buffer_bytes: u64) -> Result<()> {
    let convertible = match tensor.encoding {
        TensorEncoding::Plain(from) => can_convert(from, dtype),
        TensorEncoding::Blocks(_) => can_convert(FileDtype::F32, dtype),
    };
    if !convertible {
        return Err(no_conversion(tensor, dtype));
    }
    let left = tensor.numel().saturating_sub(first).saturating_mul(dtype.bytes());
    let count = buffer_bytes / dtype.bytes();
    let whole_blocks =
        tensor.encoding.bytes_for(first).is_some() && tensor.encoding.bytes_for(count).is_some();
    let strided_part = tensor.strides.is_some() && buffer_bytes != left;
    if buffer_bytes > left
        || !buffer_bytes.is_multiple_of(dtype.bytes())
        || !whole_blocks
        || strided_part
    {
        return Err(WeightsError::BufferSize {
            name: tensor.name.clone(),
            needed: left,
            got: buffer_bytes,
        });
    }
    Ok(())
}

/// Values are scaled as f32, so that they must be numbers in both formats.
fn check_scales(tensor: &TensorInfo, dtype: FileDtype, scales: &[f32]) -> Result<()> {
    let stored = match tensor.encoding {
        TensorEncoding::Plain(from) => from,
        TensorEncoding::Blocks(_) => FileDtype::F32,
    };
    if !scales.is_empty() && !can_compute(stored, dtype) {
        return Err(no_conversion(tensor, dtype));
    }
    let rows = tensor.shape.first().copied().unwrap_or(1);
    if scales.len() > 1 && scales.len() as u64 != rows {
        let (name, got) = (tensor.name.clone(), scales.len() as u64);
        return Err(WeightsError::BufferSize { name, needed: rows, got });
    }
    Ok(())
}

fn no_conversion(tensor: &TensorInfo, dtype: FileDtype) -> WeightsError {
    let (name, from) = (tensor.name.clone(), tensor.encoding.to_string());
    WeightsError::NoConversion { name, from, to: dtype.to_string() }
}

/// Chosen: a read of this size takes a disk about as long as finding its place.
const SMALL_BYTES: u64 = 256 << 10;

/// Pieces in the order of the disk, small neighbours together: a model of thousands of small tensors
/// would otherwise be read in thousands of small reads.
fn group<T: LoadTarget>(mut pieces: Vec<TensorChunk<'_, T>>) -> Vec<Vec<TensorChunk<'_, T>>> {
    pieces.sort_by_key(|piece| (piece.tensor.file, piece.offset));
    let mut groups: Vec<Vec<TensorChunk<'_, T>>> = Vec::new();
    for piece in pieces {
        match groups.last_mut() {
            Some(group) if piece.joins(group) => group.push(piece),
            _ => groups.push(vec![piece]),
        }
    }
    groups
}

/// What all threads share.
struct LoadQueue<'a, T> {
    groups: Mutex<IntoIter<Vec<TensorChunk<'a, T>>>>,
    disks: &'a [Option<DirectReader>],
    stop: AtomicBool,
    tick: BytesDoneFn<'a>,
}

impl<'a, T: LoadTarget> LoadQueue<'a, T> {
    /// One thread's work: group after group until there are none, or until somebody fails.
    fn run(&self) -> Result<()> {
        let mut buffers =
            ReadBuffers { scratch: AlignedBuffer::new(BLOCK_BYTES as usize), raw: Vec::new() };
        while let Some(group) = self.next() {
            if self.stop.load(Ordering::Relaxed) {
                return Err(WeightsError::Cancelled);
            }
            let bytes = group.iter().map(|piece| piece.source_bytes).sum();
            let read = self.read(group, &mut buffers);
            if read.is_err() || !(self.tick)(bytes) {
                self.stop.store(true, Ordering::Relaxed);
                return read.and(Err(WeightsError::Cancelled));
            }
        }
        Ok(())
    }

    fn next(&self) -> Option<Vec<TensorChunk<'a, T>>> {
        self.groups.lock().expect("no reader panics").next()
    }

    /// One piece that is wanted as it is goes straight into place; all others through the buffer.
    fn read(&self, mut group: Vec<TensorChunk<'_, T>>, buffers: &mut ReadBuffers) -> Result<()> {
        let ReadBuffers { scratch, raw } = buffers;
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return Ok(()) };
        let disk = self.disks[first.tensor.file].as_ref().expect("its file was opened before");
        let (start, end) = (first.offset, last.end());
        let is_alone = group.len() == 1 && first.is_plain();
        if let Some(only) = group.pop_if(|_| is_alone) {
            return only.into.fill(&mut |into| disk.read(start, into, scratch));
        }
        raw.resize((end - start) as usize, 0);
        disk.read(start, raw, scratch)?;
        for piece in group {
            let (from, to) = (piece.offset - start, piece.end() - start);
            piece.place(&raw[from as usize..to as usize])?;
        }
        Ok(())
    }
}

/// One thread's memory, used again for each group.
struct ReadBuffers {
    scratch: AlignedBuffer,
    raw: Vec<u8>,
}

impl<T: LoadTarget> TensorChunk<'_, T> {
    fn end(&self) -> u64 {
        self.offset + self.source_bytes
    }

    /// Whether it begins where the group ends and all of it stays small.
    fn joins(&self, group: &[Self]) -> bool {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return false };
        let small = |piece: &Self| piece.source_bytes <= SMALL_BYTES;
        last.tensor.file == self.tensor.file
            && last.end() == self.offset
            && small(first)
            && small(self)
            && self.end() - first.offset <= BLOCK_BYTES
    }

    /// Whether the bytes of the file are the bytes wanted.
    fn is_plain(&self) -> bool {
        self.encoding == TensorEncoding::Plain(self.dtype)
            && self.tensor.strides.is_none()
            && self.scales.scales.is_empty()
    }

    /// Puts the bytes of the file where they are wanted, in the format they are wanted in.
    fn place(self, bytes: &[u8]) -> Result<()> {
        let Self { tensor, encoding, dtype, scales, into, .. } = self;
        let place = |from: FileDtype, bytes: &[u8], into: &mut [u8]| match scales.scales {
            [] => convert(from, bytes, dtype, into),
            _ => convert_with(from, bytes, dtype, into, |at, numbers| scales.apply(at, numbers)),
        };
        into.fill(&mut |into| {
            match (&tensor.strides, encoding) {
                (Some(strides), TensorEncoding::Plain(from)) => {
                    let dense = gather(bytes, &tensor.shape, strides, from.bytes() as usize);
                    place(from, &dense, into);
                }
                (_, TensorEncoding::Plain(from)) => place(from, bytes, into),
                (_, TensorEncoding::Blocks(format)) => {
                    dequantise_into(format, bytes, scales, dtype, into);
                }
            }
            Ok(())
        })
    }
}

/// Quantised blocks to values of the format asked for, a cache's worth at a time.
fn dequantise_into(
    format: GgufBlockFormat,
    blocks: &[u8],
    scales: RowScales<'_>,
    dtype: FileDtype,
    into: &mut [u8],
) {
    // A multiple of every format's block.
    const NUMBERS: usize = 2048;
    let mut numbers = [0.0; NUMBERS];
    let source_bytes = NUMBERS / format.values_per_block() as usize * format.bytes() as usize;
    let targets = into.chunks_mut(NUMBERS * dtype.bytes() as usize);
    for (index, (blocks, into)) in blocks.chunks(source_bytes).zip(targets).enumerate() {
        let numbers = &mut numbers[..into.len() / dtype.bytes() as usize];
        dequantise(format, blocks, numbers);
        scales.apply(index * NUMBERS, numbers);
        encode(numbers, dtype, into);
    }
}

/// The values of a strided view in row-major order; those that lie together are copied together. The reader of the
/// archive has checked that all of them lie within the bytes.
fn gather(bytes: &[u8], shape: &[u64], strides: &[u64], width: usize) -> Vec<u8> {
    let count = crate::tensor::numel_of(shape).expect("readers refuse shapes that do not fit");
    let (mut run, mut n_outer) = (1, shape.len());
    while n_outer > 0 && (shape[n_outer - 1] == 1 || strides[n_outer - 1] == run) {
        n_outer -= 1;
        run *= shape[n_outer];
    }
    let (shape, run_bytes) = (&shape[..n_outer], run as usize * width);
    let mut dense = Vec::with_capacity(count as usize * width);
    let mut at = vec![0_u64; n_outer];
    for _ in 0..count.checked_div(run).unwrap_or(0) {
        let number: u64 = at.iter().zip(strides).map(|(index, stride)| index * stride).sum();
        let start = number as usize * width;
        dense.extend_from_slice(&bytes[start..start + run_bytes]);
        for (index, size) in at.iter_mut().zip(shape).rev() {
            *index += 1;
            if *index < *size {
                break;
            }
            *index = 0;
        }
    }
    dense
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{bytes_of, model};

    const GO_ON: BytesDoneFn<'static> = &|_| true;

    fn load_all(catalog: &Catalog, options: LoadOptions) -> Result<Vec<Vec<u8>>> {
        let mut buffers: Vec<Vec<u8>> =
            catalog.tensors.iter().map(|t| vec![0; t.bytes as usize]).collect();
        let wanted = catalog.tensors.iter().zip(&mut buffers).map(|(tensor, into)| {
            let TensorEncoding::Plain(dtype) = tensor.encoding else { panic!("a plain model") };
            LoadRequest::whole(tensor, dtype, &mut into[..])
        });
        load(catalog, wanted.collect(), options, GO_ON)?;
        Ok(buffers)
    }

    #[test]
    fn every_way_of_reading_gives_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = model(folder.path(), &[0, 1, 4095, 4096, 4097, 9_000_001, 300_000, 77, 78]);
        for cache in [PageCache::Spare, PageCache::Fill, PageCache::Release] {
            for threads in [1, 3] {
                let loaded = load_all(&catalog, LoadOptions { threads, cache }).unwrap();
                for (tensor, loaded) in catalog.tensors.iter().zip(loaded) {
                    assert!(loaded == bytes_of(tensor), "{} differs with {cache:?}", tensor.name);
                }
            }
        }
        let mapped = crate::mmap::MappedFiles::open(&catalog).unwrap();
        for tensor in &catalog.tensors {
            assert!(
                mapped.bytes(tensor).unwrap() == bytes_of(tensor),
                "{} differs mapped",
                tensor.name
            );
        }
    }

    /// Memory that is filled through another, as a GPU's is.
    struct Far<'a> {
        memory: &'a Mutex<Vec<u8>>,
        range: Range<usize>,
    }

    impl LoadTarget for Far<'_> {
        fn bytes(&self) -> usize {
            self.range.len()
        }

        fn split_at(self, n: usize) -> (Self, Self) {
            let Self { memory, range: Range { start, end } } = self;
            let of = |range| Self { memory, range };
            (of(start..start + n), of(start + n..end))
        }

        fn fill(self, write: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<()> {
            let mut near = vec![0; self.range.len()];
            write(&mut near)?;
            self.memory.lock().unwrap()[self.range].copy_from_slice(&near);
            Ok(())
        }
    }

    #[test]
    fn memory_that_is_filled_through_another_gets_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = model(folder.path(), &[0, 1, 4095, 9_000_001, 300_000, 77, 78, 20_000_000]);
        let memory: Vec<_> = catalog
            .tensors
            .iter()
            .map(|tensor| Mutex::new(vec![0; tensor.bytes as usize]))
            .collect();
        let wanted = catalog.tensors.iter().zip(&memory).map(|(tensor, memory)| {
            let into = Far { memory, range: 0..tensor.bytes as usize };
            LoadRequest::whole(tensor, FileDtype::U8, into)
        });
        load(&catalog, wanted.collect(), LoadOptions::default(), GO_ON).unwrap();
        for (tensor, memory) in catalog.tensors.iter().zip(memory) {
            assert!(memory.into_inner().unwrap() == bytes_of(tensor), "{} differs", tensor.name);
        }
    }

    #[test]
    fn parts_convert_on_the_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let numbers: Vec<f32> = (0..3_000_000).map(|i| i as f32 * 0.25 - 7.0).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![3_000_000], &bytes)
                .unwrap();
        safetensors::serialize_to_file([("x", view)], None, &path).unwrap();
        let catalog = Catalog::open(&path).unwrap();
        let mut halves = vec![0; 2 * 2_000_000];
        let wanted = LoadRequest {
            tensor: &catalog.tensors[0],
            dtype: FileDtype::Bf16,
            first: 999_999,
            scales: &[],
            into: &mut halves[..],
        };
        load(&catalog, vec![wanted], LoadOptions::default(), GO_ON).unwrap();
        let (halves, _) = halves.as_chunks::<2>();
        for (half, number) in halves.iter().zip(&numbers[999_999..]) {
            assert_eq!(half::bf16::from_le_bytes(*half), half::bf16::from_f32(*number));
        }
    }

    /// From the middle of a row on, over pieces and chunks that end inside of rows.
    #[test]
    fn values_are_multiplied_by_the_scale_of_their_row() {
        const WIDTH: usize = 1_500_001;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let bytes: Vec<u8> = (0..3 * WIDTH).map(|i| (i % 120) as u8).collect();
        let shape = vec![3, WIDTH];
        let dtype = safetensors::Dtype::F8_E4M3;
        let view = safetensors::tensor::TensorView::new(dtype, shape, &bytes).unwrap();
        safetensors::serialize_to_file([("x", view)], None, &path).unwrap();
        let catalog = Catalog::open(&path).unwrap();
        let tensor = &catalog.tensors[0];
        let read = |first: usize, scales: &[f32]| {
            let mut into = vec![0; 4 * (3 * WIDTH - first)];
            let (dtype, first) = (FileDtype::F32, first as u64);
            let wanted = LoadRequest { tensor, dtype, first, scales, into: &mut into[..] };
            load(&catalog, vec![wanted], LoadOptions::default(), GO_ON)?;
            Ok(into.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>())
        };
        let first = WIDTH - 700;
        let plain = read(first, &[]).unwrap();
        assert_eq!(read(first, &[0.25]).unwrap()[5], 0.25 * plain[5]);
        for (at, (got, plain)) in
            read(first, &[9.0, -0.5, 3.0]).unwrap().iter().zip(&plain).enumerate()
        {
            let scale = [9.0, -0.5, 3.0][(first + at) / WIDTH];
            assert_eq!(*got, scale * plain, "{at}");
        }
        let refused: Result<Vec<f32>> = read(0, &[1.0, 2.0]);
        let error = refused.unwrap_err();
        assert!(matches!(error, WeightsError::BufferSize { needed: 3, got: 2, .. }), "{error}");
    }

    #[test]
    fn buffers_that_do_not_fit_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = model(folder.path(), &[8]);
        let tensor = &catalog.tensors[0];
        let refused = |dtype, first, bytes| {
            let mut into = vec![0; bytes];
            let wanted = LoadRequest { tensor, dtype, first, scales: &[], into: &mut into[..] };
            load(&catalog, vec![wanted], LoadOptions::default(), GO_ON).unwrap_err()
        };
        assert!(matches!(
            refused(FileDtype::U8, 0, 9),
            WeightsError::BufferSize { needed: 8, got: 9, .. }
        ));
        assert!(matches!(
            refused(FileDtype::U8, 7, 2),
            WeightsError::BufferSize { needed: 1, got: 2, .. }
        ));
        assert!(matches!(refused(FileDtype::U8, u64::MAX, 1), WeightsError::BufferSize { .. }));
        assert!(matches!(refused(FileDtype::F32, 0, 8), WeightsError::NoConversion { .. }));
    }

    #[test]
    fn a_file_that_shrinks_or_changes_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = model(folder.path(), &[5_000_000]);
        let path = &catalog.files[0];
        let shortened = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        shortened.set_len(4_000_000).unwrap();
        for cache in [PageCache::Spare, PageCache::Fill] {
            let error = load_all(&catalog, LoadOptions { threads: 2, cache }).unwrap_err();
            assert!(matches!(error, WeightsError::Truncated { has: 4_000_000, .. }), "{error}");
        }
        let catalog = model(folder.path(), &[5_000_000]);
        let touch = |_| {
            std::fs::OpenOptions::new()
                .append(true)
                .open(path)
                .unwrap()
                .set_len(6_000_000)
                .unwrap();
            true
        };
        let mut into = vec![0; 5_000_000];
        let wanted = LoadRequest::whole(&catalog.tensors[0], FileDtype::U8, &mut into[..]);
        let error = load(&catalog, vec![wanted], LoadOptions::default(), &touch).unwrap_err();
        assert!(matches!(error, WeightsError::Changed { .. }), "{error}");
    }

    #[test]
    fn a_tick_can_stop_it() {
        let folder = tempfile::tempdir().unwrap();
        let catalog = model(folder.path(), &[9_000_000]);
        let mut into = vec![0; 9_000_000];
        let wanted = LoadRequest::whole(&catalog.tensors[0], FileDtype::U8, &mut into[..]);
        let error = load(&catalog, vec![wanted], LoadOptions::default(), &|_| false).unwrap_err();
        assert!(matches!(error, WeightsError::Cancelled), "{error}");
    }

    #[test]
    fn strided_views_come_out_dense() {
        let bytes: Vec<u8> = (0..12).collect();
        assert_eq!(gather(&bytes, &[3, 2], &[1, 3], 2), [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
        assert_eq!(gather(&bytes, &[2, 2], &[0, 1], 1), [0, 1, 0, 1]);
        assert_eq!(gather(&bytes, &[], &[], 4), [0, 1, 2, 3]);
        assert!(gather(&bytes, &[0, 5], &[5, 1], 4).is_empty());
        assert!(gather(&bytes, &[5, 0], &[5, 1], 4).is_empty());
        assert_eq!(gather(&bytes, &[2, 1, 2], &[4, 9, 1], 2), [0, 1, 2, 3, 8, 9, 10, 11]);
    }

    /// Of a tensor [2, 3, 2, 2], compared with indices.
    #[test]
    fn a_selected_part_is_read_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let bytes: Vec<u8> = (0..24).flat_map(|n| (n as f32).to_le_bytes()).collect();
        let dtype = safetensors::Dtype::F32;
        let view = safetensors::tensor::TensorView::new(dtype, vec![2, 3, 2, 2], &bytes).unwrap();
        safetensors::serialize_to_file([("x", view)], None, &path).unwrap();
        let catalog = Catalog::open(&path).unwrap();
        let whole = &catalog.tensors[0];
        let values = |part: &TensorInfo| load_f32(&catalog, part, 0..part.numel()).unwrap();
        let last = whole.select(1, 2).unwrap();
        assert_eq!((&last.shape[..], last.bytes), (&[2, 2, 2][..], 64));
        assert_eq!(values(&last), [8.0, 9.0, 10.0, 11.0, 20.0, 21.0, 22.0, 23.0]);
        // Of a part again; and one that lies together needs no strides.
        assert_eq!(values(&last.select(2, 1).unwrap()), [9.0, 11.0, 21.0, 23.0]);
        let second = whole.select(0, 1).unwrap();
        assert_eq!((second.strides.as_ref(), second.bytes), (None, 48));
        assert_eq!(values(&second)[..2], [12.0, 13.0]);
        assert!(whole.select(1, 3).is_none() && whole.select(4, 0).is_none());
    }
}
