//! Loads a model's weights: every name is resolved and every shape compared before anything is read;
//! then all tensors are read together, straight into the arena. And writes them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::Path;

use compute::{BlockSwap, Device, Dtype, FillPart, Tag, Tensor, fill_all};
use weights::convert::{can_convert, encode};
use weights::load::{LoadOptions, LoadRequest, LoadTarget, load};
use weights::safetensors::OutputTensor;
use weights::write::{WrittenFile, split_shards, write_file, write_shards};
use weights::{BytesDoneFn, Catalog, FileDtype, TensorEncoding, TensorInfo, WeightsError};

use super::adapter::Adapters;
use super::build::{
    ModelBuilder, Precision, TensorSpec, WeightSource, WeightTensor, new_block_swap, offload,
    offload_target, quantise, tensor_specs_of_files,
};
use super::scaled_fp8::{self, WeightScales};
use super::tensor_piece::{TensorPiece, stored_rows};
use crate::error::{Result, TrainerError};
use crate::fingerprint::{Fingerprint, PartHashes, short};

/// Where a tensor of ours lies in a file.
pub type PieceMap<'a> = Box<dyn Fn(&str) -> Vec<TensorPiece> + 'a>;

/// How a file names the tensors of a model.
pub struct CheckpointLayout<'a> {
    /// The pieces that make up a tensor of ours, concatenated by rows.
    pub pieces: PieceMap<'a>,
    /// Tensors to ignore: other models, tables that we compute.
    pub ignores: Box<dyn Fn(&str) -> bool + 'a>,
}

impl CheckpointLayout<'_> {
    /// Our names, and nothing to ignore.
    pub fn identity() -> Self {
        Self {
            pieces: Box::new(|name| vec![TensorPiece::whole(name)]),
            ignores: Box::new(|_| false),
        }
    }
}

/// The prefix of a model's names in a checkpoint that may hold other models: `prefix`, or nothing. Found by a tensor
/// that only this model has; `None` if the checkpoint has no such model.
pub fn prefix(catalog: &Catalog, prefix: &'static str, mark: &str) -> Option<&'static str> {
    [prefix, ""].into_iter().find(|prefix| catalog.find(&format!("{prefix}{mark}")).is_ok())
}

/// A model's weights on disk, found and checked; nothing is read yet.
pub struct WeightFiles<'a> {
    catalog: &'a Catalog,
    members: Vec<LocatedTensor<'a>>,
}

type LocatedTensor<'a> = (TensorSpec, Vec<TensorSlice<'a>>);

/// A range of values of a tensor in a file.
struct TensorSlice<'a> {
    /// All of the tensor, or what was selected of it.
    tensor: TensorInfo,
    first: u64,
    count: u64,
    /// What its values are multiplied by.
    scale: Option<&'a TensorInfo>,
}

impl<'a> WeightFiles<'a> {
    /// Finds everything that `build` asks for, and checks that nothing is left over.
    pub fn find<T>(
        catalog: &'a Catalog,
        layout: &CheckpointLayout<'_>,
        build: impl FnOnce(&mut ModelBuilder<'_>) -> Result<T>,
    ) -> Result<Self> {
        let mut files = Self { catalog, members: Vec::new() };
        let (mut missing, mut used) = (Vec::new(), HashSet::new());
        let mut contradiction = None;
        for want in tensor_specs_of_files(catalog.tensors.len(), build)? {
            let pieces = (layout.pieces)(&want.name);
            used.extend(pieces.iter().map(|piece| piece.key.clone()));
            match files.pieces(&want, &pieces) {
                Ok(Some(found)) => files.members.push((want, found)),
                Ok(None) => missing.push(want.name),
                Err(error) => contradiction = contradiction.or(Some(error)),
            }
        }
        let is_ignored = |name: &str| (layout.ignores)(name) || scaled_fp8::is_of_format(name);
        let is_extra = |name: &String| !used.contains(name) && !is_ignored(name);
        let names = catalog.tensors.iter().map(|tensor| &tensor.name);
        let extra: Vec<String> = names.filter(|name| is_extra(name)).cloned().collect();
        // Missing and unknown names say more than the first wrong shape.
        if !missing.is_empty() || !extra.is_empty() {
            return Err(TrainerError::TensorNames { missing, extra, path: catalog.path.clone() });
        }
        contradiction.map_or(Ok(files), Err)
    }

    /// The values of all pieces of a tensor, unless one is missing.
    fn pieces(
        &self,
        want: &TensorSpec,
        pieces: &[TensorPiece],
    ) -> Result<Option<Vec<TensorSlice<'a>>>> {
        let mut found = Vec::with_capacity(pieces.len());
        let sizes: Vec<u64> = want.shape.sizes().iter().map(|size| *size as u64).collect();
        let n_rows = sizes.first().map_or(1, |rows| *rows as usize);
        for piece in pieces {
            let Ok(stored) = self.catalog.find(&piece.key) else { return Ok(None) };
            let tensor = piece.tensor(stored);
            // A matrix here may be a 1x1 convolution there.
            let shape = squeezed(&tensor.shape, sizes.len());
            let is_fit = match (shape.split_first(), sizes.split_first()) {
                (Some((rows, inner)), Some((_, wanted_inner))) => {
                    inner == wanted_inner && stored_rows(pieces, n_rows) == Some(*rows as usize)
                }
                (rows, wanted) => rows == wanted,
            };
            if !is_fit {
                return Err(TrainerError::ShapeMismatch {
                    name: piece.key.clone(),
                    expected: want.shape,
                    got: stored.shape.clone(),
                    path: self.catalog.path.clone(),
                });
            }
            let group = tensor.numel() / piece.total as u64;
            let (first, count) = (group * piece.from as u64, group * piece.count as u64);
            let scale = scaled_fp8::scale_of(self.catalog, stored)?;
            found.push(TensorSlice { tensor, first, count, scale });
        }
        Ok(Some(found))
    }

    /// The values of a tensor by the model's name for it; empty if there is no such tensor.
    pub fn values(&self, name: &str) -> std::result::Result<Vec<f32>, WeightsError> {
        let found = self.members.iter().find(|(want, _)| want.name == name);
        let Some((want, pieces)) = found else { return Ok(Vec::new()) };
        let mut bytes = vec![0; want.shape.elements() * size_of::<f32>()];
        let (mut wanted, mut rest) = (Vec::new(), &mut bytes[..]);
        let scales = self.scales(pieces)?;
        for TensorSlice { tensor, first, count, scale } in pieces {
            let (into, after) = rest.split_at_mut(*count as usize * size_of::<f32>());
            let (dtype, scales) = (FileDtype::F32, scales.of(*scale));
            wanted.push(LoadRequest { tensor, dtype, first: *first, scales, into });
            rest = after;
        }
        load(self.catalog, wanted, LoadOptions::default(), &|_| true)?;
        let (numbers, _) = bytes.as_chunks::<4>();
        Ok(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// The scales of pieces.
    fn scales<'p>(
        &self,
        pieces: impl IntoIterator<Item = &'p TensorSlice<'a>>,
    ) -> std::result::Result<WeightScales<'a>, WeightsError>
    where
        'a: 'p,
    {
        WeightScales::load(self.catalog, pieces.into_iter().filter_map(|piece| piece.scale))
    }

    /// How many parameters the model has.
    pub fn n_values(&self) -> usize {
        self.members.iter().map(|(want, _)| want.shape.elements()).sum()
    }

    /// Reads everything into the device's memory; tensors that stay frozen may be held as they are stored.
    pub fn load(
        &self,
        device: &Device,
        precision: Precision,
        is_frozen: bool,
        tick: BytesDoneFn<'_>,
    ) -> Result<LoadedWeights> {
        if self.catalog.is_meta() && !device.is_meta() {
            return Err(WeightsError::MetaModel { path: self.catalog.path.clone() }.into());
        }
        let dtype_of = |(want, pieces): &LocatedTensor<'_>| {
            let stored = stored_dtype(pieces).filter(|_| is_frozen);
            precision.frozen_dtype(device, want, stored)
        };
        let members = self.members.iter().map(|member| (&member.0, dtype_of(member)));
        let ring = new_block_swap(device, precision, members)?;
        let mut held = HashMap::new();
        for batch in self.batches(precision) {
            let tag = if batch.is_temporary { Tag::Workspace } else { Tag::Weights };
            let alloc = |member: &LocatedTensor<'_>| {
                let (want, dtype) = (&member.0, dtype_of(member));
                match (offload_target(ring.as_ref(), want), batch.is_temporary) {
                    // Straight to its final place.
                    (Some((ring, block)), false) => Ok(ring.alloc(block, want.shape, dtype)),
                    _ => device.with_tag(tag, || device.alloc(want.shape, dtype)),
                }
            };
            let mut tensors = batch
                .members
                .iter()
                .map(|member| alloc(member))
                .collect::<compute::Result<Vec<Tensor>>>()?;
            self.read(&batch.members, &mut tensors, tick)?;
            for ((want, _), tensor) in batch.members.iter().zip(tensors) {
                let how = precision.quantisation(want);
                let made = device.with_tag(Tag::Weights, || quantise(tensor, how))?;
                let to = offload_target(ring.as_ref(), want).filter(|_| batch.is_temporary);
                held.insert(want.name.clone(), offload(made, to)?);
            }
        }
        // Memory that only reading needed.
        device.trim();
        Ok(LoadedWeights { tensors: held, block_swap: ring })
    }

    fn read(
        &self,
        members: &[&LocatedTensor<'a>],
        tensors: &mut [Tensor],
        tick: BytesDoneFn<'_>,
    ) -> Result<()> {
        let dtypes: Vec<_> = tensors.iter().map(|tensor| file_dtype(tensor.dtype())).collect();
        fill_all(tensors.iter_mut().collect(), |range, parts| {
            let scales =
                self.scales(members[range.clone()].iter().flat_map(|(_, pieces)| pieces))?;
            let mut wanted = Vec::new();
            let places = members[range.clone()].iter().zip(&dtypes[range]);
            for (((_, pieces), dtype), part) in places.zip(parts) {
                let (dtype, mut rest) = (*dtype, UploadTarget(part));
                for TensorSlice { tensor, first, count, scale } in pieces {
                    let (into, after) = rest.split_at((count * dtype.bytes()) as usize);
                    let scales = scales.of(*scale);
                    wanted.push(LoadRequest { tensor, dtype, first: *first, scales, into });
                    rest = after;
                }
            }
            Ok(load(self.catalog, wanted, LoadOptions::default(), tick)?)
        })
    }

    /// What is read together: everything that is not quantised, and small batches of what is, since it
    /// needs both copies for a moment.
    fn batches(&self, precision: Precision) -> Vec<LoadBatch<'_, 'a>> {
        let bytes =
            |want: &TensorSpec| want.shape.elements() * precision.dtype_of(want.role).bytes();
        let (passing, staying): (Vec<_>, Vec<_>) =
            self.members.iter().partition(|(want, _)| precision.quantisation(want).is_some());
        let mut batches = vec![LoadBatch { members: staying, is_temporary: false }];
        let mut room = 0;
        for member in passing {
            let needed = bytes(&member.0);
            if needed > room {
                batches.push(LoadBatch { members: Vec::new(), is_temporary: true });
                room = STAGING_BYTES;
            }
            room = room.saturating_sub(needed);
            batches.last_mut().expect("there is the first").members.push(member);
        }
        batches
    }
}

/// The dtype of 16 bits that all pieces of a tensor are stored in, if there is one.
fn stored_dtype(pieces: &[TensorSlice<'_>]) -> Option<Dtype> {
    let of = |piece: &TensorSlice<'_>| match (piece.tensor.encoding, piece.scale) {
        (TensorEncoding::Plain(FileDtype::Bf16), None) => Some(Dtype::Bf16),
        (TensorEncoding::Plain(FileDtype::F16), None) => Some(Dtype::F16),
        _ => None,
    };
    let first = pieces.first().and_then(of);
    first.filter(|_| pieces.iter().all(|piece| of(piece) == first))
}

/// Memory of tensors, on the device or the host, that files are read into.
pub struct UploadTarget<'a>(pub FillPart<'a>);

impl LoadTarget for UploadTarget<'_> {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn split_at(self, n: usize) -> (Self, Self) {
        let (first, rest) = self.0.split_at(n);
        (Self(first), Self(rest))
    }

    fn fill(
        self,
        write: &mut dyn FnMut(&mut [u8]) -> std::result::Result<(), WeightsError>,
    ) -> std::result::Result<(), WeightsError> {
        self.0.fill(write)
    }
}

/// Chosen: enough for all reading threads, little beside a model that has to be quantised.
const STAGING_BYTES: usize = 128 << 20;

struct LoadBatch<'f, 'a> {
    members: Vec<&'f LocatedTensor<'a>>,
    /// Whether the tensors are freed once they are quantised.
    is_temporary: bool,
}

/// A model's weights in memory, by name.
pub struct LoadedWeights {
    tensors: HashMap<String, WeightTensor>,
    block_swap: Option<BlockSwap>,
}

impl WeightSource for LoadedWeights {
    fn take(&mut self, _: &Device, want: TensorSpec) -> Result<WeightTensor> {
        Ok(self.tensors.remove(&want.name).expect("a model asks for the same tensors each time"))
    }

    fn block_swap(&self) -> Option<&BlockSwap> {
        self.block_swap.as_ref()
    }
}

/// Loads a model: finds its tensors, reads them, and builds it.
pub fn load_model<T>(
    device: &Device,
    files: &WeightFiles<'_>,
    precision: Precision,
    adapters: &mut Adapters,
    tick: BytesDoneFn<'_>,
    build: impl FnOnce(&mut ModelBuilder<'_>) -> Result<T>,
) -> Result<T> {
    let mut loaded = files.load(device, precision, !adapters.is_full(), tick)?;
    build(&mut ModelBuilder::new(device, precision, &mut loaded, adapters))
}

/// Values of each tensor that go into the fingerprint. Chosen: training changes nearly all of them.
const FINGERPRINT_VALUES: u64 = 64;

/// A hash of names, shapes and the first values of a model's tensors. Hashing all values would take as
/// long as loading them.
pub fn fingerprint(catalog: &Catalog) -> Result<Fingerprint> {
    let (mut all, mut parts) = (blake3::Hasher::new(), PartHashes::new());
    for tensor in &catalog.tensors {
        let mut bytes = format!("{} {:?}", tensor.name, tensor.shape).into_bytes();
        bytes.extend(first_values(catalog, tensor)?);
        all.update(&bytes);
        parts.insert(tensor.name.clone(), short(&blake3::hash(&bytes)));
    }
    Ok(Fingerprint { whole: all.finalize().to_hex().to_string(), parts })
}

/// The first values of a tensor as f32; those of integers as they are stored.
fn first_values(catalog: &Catalog, tensor: &TensorInfo) -> Result<Vec<u8>> {
    // Of quantised tensors only whole blocks can be read.
    let first = FINGERPRINT_VALUES.next_multiple_of(tensor.encoding.values_per_block());
    let count = tensor.numel().min(first);
    let dtype = match tensor.encoding {
        TensorEncoding::Plain(stored) if !can_convert(stored, FileDtype::F32) => stored,
        _ => FileDtype::F32,
    };
    let mut bytes = vec![0; (count * dtype.bytes()) as usize];
    let wanted = LoadRequest::whole(tensor, dtype, &mut bytes[..]);
    load(catalog, vec![wanted], LoadOptions::default(), &|_| true)?;
    Ok(bytes)
}

/// The values of a tensor that is to be written, by its index.
pub type ValuesFn<'a> =
    &'a mut dyn FnMut(usize, &TensorSpec) -> std::result::Result<Vec<f32>, WeightsError>;

/// Writes a model's tensors; `values` is called for one tensor at a time, with its index in `specs`.
pub fn save(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    specs: &[TensorSpec],
    dtype: FileDtype,
    values: ValuesFn<'_>,
) -> Result<()> {
    let mut fill = value_writer(path, specs, dtype, values);
    write_file(path, metadata, tensor_entries(specs, dtype), false, &mut fill)?;
    Ok(())
}

/// The same into a folder, in shards with an index where one file would be too large.
pub fn save_shards(
    ShardedOutput { folder, stem, max_shard_bytes }: ShardedOutput<'_>,
    metadata: &BTreeMap<String, String>,
    specs: &[TensorSpec],
    dtype: FileDtype,
    values: ValuesFn<'_>,
) -> Result<()> {
    let shards = split_shards(stem, tensor_entries(specs, dtype), max_shard_bytes);
    let mut fill = value_writer(folder, specs, dtype, values);
    write_shards(folder, stem, metadata, shards, false, &mut fill)?;
    Ok(())
}

/// A file `STEM.safetensors`; or, where that would be too large, shards `STEM-00001-of-0000N.safetensors` and an index.
#[derive(Clone, Copy, Debug)]
pub struct ShardedOutput<'a> {
    /// The folder, which is there.
    pub folder: &'a Path,
    /// How the names of files begin.
    pub stem: &'a str,
    /// Bytes of a file at most, unless one tensor alone has more.
    pub max_shard_bytes: u64,
}

/// Writes tensors of a device in the same way, copied to the host piece by piece; returns the files with their
/// checksums. `tick` hears of every tensor that was written.
pub fn save_tensors(
    ShardedOutput { folder, stem, max_shard_bytes }: ShardedOutput<'_>,
    metadata: &BTreeMap<String, String>,
    tensors: &BTreeMap<String, &Tensor>,
    tick: BytesDoneFn<'_>,
) -> Result<Vec<WrittenFile>> {
    let entries = tensors.iter().map(|(name, tensor)| OutputTensor {
        name: name.clone(),
        dtype: file_dtype(tensor.dtype()),
        shape: tensor.shape().sizes().iter().map(|size| *size as u64).collect(),
    });
    let shards = split_shards(stem, entries.collect(), max_shard_bytes);
    Ok(write_shards(folder, stem, metadata, shards, true, &mut |tensor, out| {
        let tensor = tensors[&tensor.name];
        tensor.write_to(out).map_err(|source| WeightsError::io("write", folder, source))?;
        if tick(tensor.bytes() as u64) { Ok(()) } else { Err(WeightsError::Cancelled) }
    })?)
}

fn tensor_entries(specs: &[TensorSpec], dtype: FileDtype) -> Vec<OutputTensor> {
    let entries = specs.iter().map(|spec| OutputTensor {
        name: spec.name.clone(),
        dtype,
        shape: spec.shape.sizes().iter().map(|size| *size as u64).collect(),
    });
    entries.collect()
}

/// Writes the values of the tensor it is called with.
fn value_writer<'a>(
    path: &'a Path,
    specs: &'a [TensorSpec],
    dtype: FileDtype,
    values: ValuesFn<'a>,
) -> impl FnMut(&OutputTensor, &mut dyn Write) -> std::result::Result<(), WeightsError> + 'a {
    let indices: HashMap<&str, usize> =
        specs.iter().enumerate().map(|(index, spec)| (spec.name.as_str(), index)).collect();
    move |tensor, file| {
        let index = indices[tensor.name.as_str()];
        let values = values(index, &specs[index])?;
        let mut bytes = vec![0; values.len() * dtype.bytes() as usize];
        encode(&values, dtype, &mut bytes);
        file.write_all(&bytes).map_err(|source| WeightsError::io("write", path, source))
    }
}

/// A shape without its trailing sizes of 1, down to `n` sizes.
fn squeezed(shape: &[u64], n: usize) -> &[u64] {
    match shape {
        [inner @ .., 1] if shape.len() > n => squeezed(inner, n),
        _ => shape,
    }
}

/// The dtype's name in files.
pub(crate) fn file_dtype(dtype: Dtype) -> FileDtype {
    match dtype {
        Dtype::F32 => FileDtype::F32,
        Dtype::Bf16 => FileDtype::Bf16,
        Dtype::F16 => FileDtype::F16,
        Dtype::U32 => FileDtype::U32,
        Dtype::I32 => FileDtype::I32,
        Dtype::U8 => FileDtype::U8,
    }
}
