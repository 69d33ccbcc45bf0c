//! A model's weights out of its files: every name is resolved and every shape compared before
//! anything is read; then all tensors are read at once, straight into the arena. And back into one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Write};
use std::path::Path;

use compute::{Device, Dtype, Part, Ring, Tag, Tensor, fill_all};
use weights::convert::encode;
use weights::load::{Options, Target, Wanted, floats, load};
use weights::safetensors::Entering;
use weights::write::{deal, write_file, write_shards};
use weights::{Catalog, TensorInfo, Tick, WeightsError};

use super::adapter::Adapters;
use super::build::{Builder, Held, Precision, Source, Want, hold, home, park, ring, wants};
use super::piece::{Piece, stored_rows};
use crate::error::{Result, TrainerError};
use crate::fingerprint::{Fingerprint, Parts, short};

/// Where a tensor of ours lies in a file.
pub type Place<'a> = Box<dyn Fn(&str) -> Vec<Piece> + 'a>;

/// How a file calls the tensors of a model.
pub struct Layout<'a> {
    /// The pieces, one below the other, that make up a tensor of ours.
    pub place: Place<'a>,
    /// What the file may hold besides: other models, tables that we compute.
    pub ignores: Box<dyn Fn(&str) -> bool + 'a>,
}

impl Layout<'_> {
    /// The names we use, and nothing else.
    pub fn same() -> Self {
        Self { place: Box::new(|name| vec![Piece::whole(name)]), ignores: Box::new(|_| false) }
    }
}

/// What a model's names begin with in a checkpoint that may hold more than it: `prefix`, or nothing. Told by a tensor that
/// only this model has; none if the checkpoint has no such model.
pub fn prefix(catalog: &Catalog, prefix: &'static str, mark: &str) -> Option<&'static str> {
    [prefix, ""].into_iter().find(|prefix| catalog.find(&format!("{prefix}{mark}")).is_ok())
}

/// A model's weights on disk, found and compared; nothing is read yet.
pub struct Files<'a> {
    catalog: &'a Catalog,
    found: Vec<Member<'a>>,
}

type Member<'a> = (Want, Vec<Found<'a>>);

/// Numbers of a tensor in a file.
struct Found<'a> {
    tensor: &'a TensorInfo,
    first: u64,
    count: u64,
}

impl<'a> Files<'a> {
    /// Finds everything that `build` asks for, and that nothing is left over.
    pub fn find<T>(
        catalog: &'a Catalog,
        layout: &Layout<'_>,
        build: impl FnOnce(&mut Builder<'_>) -> Result<T>,
    ) -> Result<Self> {
        let mut files = Self { catalog, found: Vec::new() };
        let (mut missing, mut used) = (Vec::new(), HashSet::new());
        let mut contradiction = None;
        for want in wants(build)? {
            let pieces = (layout.place)(&want.name);
            used.extend(pieces.iter().map(|piece| piece.key.clone()));
            match files.pieces(&want, &pieces) {
                Ok(Some(found)) => files.found.push((want, found)),
                Ok(None) => missing.push(want.name),
                Err(error) => contradiction = contradiction.or(Some(error)),
            }
        }
        let is_extra = |name: &String| !used.contains(name) && !(layout.ignores)(name);
        let names = catalog.tensors.iter().map(|tensor| &tensor.name);
        let extra: Vec<String> = names.filter(|name| is_extra(name)).cloned().collect();
        // Names tell more of what went wrong than the first shape that does not fit.
        if !missing.is_empty() || !extra.is_empty() {
            return Err(TrainerError::Keys { missing, extra, path: catalog.path.clone() });
        }
        contradiction.map_or(Ok(files), Err)
    }

    /// The numbers of all pieces of a tensor, unless one is missing.
    fn pieces(&self, want: &Want, pieces: &[Piece]) -> Result<Option<Vec<Found<'a>>>> {
        let mut found = Vec::with_capacity(pieces.len());
        let sizes: Vec<u64> = want.shape.sizes().iter().map(|size| *size as u64).collect();
        let n_rows = sizes.first().map_or(1, |rows| *rows as usize);
        for piece in pieces {
            let Ok(tensor) = self.catalog.find(&piece.key) else { return Ok(None) };
            // What is a matrix here may be a convolution of one pixel there.
            let stored = without_ones(&tensor.shape, sizes.len());
            let is_fit = match (stored.split_first(), sizes.split_first()) {
                (Some((rows, inner)), Some((_, wanted_inner))) => {
                    inner == wanted_inner && stored_rows(pieces, n_rows) == Some(*rows as usize)
                }
                (rows, wanted) => rows == wanted,
            };
            if !is_fit {
                return Err(TrainerError::Contradiction {
                    name: piece.key.clone(),
                    expected: want.shape,
                    got: tensor.shape.clone(),
                    path: self.catalog.path.clone(),
                });
            }
            let group = tensor.count() / piece.of as u64;
            let (first, count) = (group * piece.from as u64, group * piece.count as u64);
            found.push(Found { tensor, first, count });
        }
        Ok(Some(found))
    }

    /// The numbers of a tensor by the model's name for it; none if it has no such tensor.
    pub fn numbers(&self, name: &str) -> std::result::Result<Vec<f32>, WeightsError> {
        let found = self.found.iter().find(|(want, _)| want.name == name);
        let Some((want, pieces)) = found else { return Ok(Vec::new()) };
        let mut bytes = vec![0; want.shape.elements() * size_of::<f32>()];
        let (mut wanted, mut rest) = (Vec::new(), &mut bytes[..]);
        for Found { tensor, first, count } in pieces {
            let (into, after) = rest.split_at_mut(*count as usize * size_of::<f32>());
            let dtype = weights::Dtype::F32;
            wanted.push(Wanted { tensor, dtype, first: *first, into });
            rest = after;
        }
        load(self.catalog, wanted, Options::default(), &|_| true)?;
        let (numbers, _) = bytes.as_chunks::<4>();
        Ok(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// How many numbers the model has.
    pub fn count(&self) -> usize {
        self.found.iter().map(|(want, _)| want.shape.elements()).sum()
    }

    /// Reads everything into the device's memory.
    pub fn load(&self, device: &Device, precision: Precision, tick: Tick<'_>) -> Result<Loaded> {
        if self.catalog.is_hollow() && !device.is_meta() {
            return Err(WeightsError::Hollow { path: self.catalog.path.clone() }.into());
        }
        let ring = ring(device, precision, self.found.iter().map(|(want, _)| want))?;
        let mut held = HashMap::new();
        for batch in self.batches(precision) {
            let tag = if batch.is_passing { Tag::Workspace } else { Tag::Weights };
            let alloc = |want: &Want| match (home(ring.as_ref(), want), batch.is_passing) {
                // Straight to where it will live.
                (Some((ring, block)), false) => {
                    Ok(ring.alloc(block, want.shape, precision.of(want.role)))
                }
                _ => device.tagged(tag, || device.alloc(want.shape, precision.of(want.role))),
            };
            let mut tensors = batch
                .members
                .iter()
                .map(|(want, _)| alloc(want))
                .collect::<compute::Result<Vec<Tensor>>>()?;
            self.read(&batch.members, &mut tensors, tick)?;
            for ((want, _), tensor) in batch.members.iter().zip(tensors) {
                let how = precision.quantisation(want);
                let made = device.tagged(Tag::Weights, || hold(tensor, how))?;
                let to = home(ring.as_ref(), want).filter(|_| batch.is_passing);
                held.insert(want.name.clone(), park(made, to)?);
            }
        }
        // What only reading needed.
        device.trim();
        Ok(Loaded { held, ring })
    }

    fn read(&self, members: &[&Member<'_>], tensors: &mut [Tensor], tick: Tick<'_>) -> Result<()> {
        let dtypes: Vec<_> = tensors.iter().map(|tensor| stored(tensor.dtype())).collect();
        fill_all(tensors.iter_mut().collect(), |range, parts| {
            let mut wanted = Vec::new();
            let places = members[range.clone()].iter().zip(&dtypes[range]);
            for (((_, pieces), dtype), part) in places.zip(parts) {
                let (dtype, mut rest) = (*dtype, Landing(part));
                for Found { tensor, first, count } in pieces {
                    let (into, after) = rest.split_at((count * dtype.bytes()) as usize);
                    wanted.push(Wanted { tensor, dtype, first: *first, into });
                    rest = after;
                }
            }
            Ok(load(self.catalog, wanted, Options::default(), tick)?)
        })
    }

    /// What is read at once: everything that stays as it is, and a little at a time of what is
    /// quantised, since it exists twice for a moment.
    fn batches(&self, precision: Precision) -> Vec<Batch<'_, 'a>> {
        let bytes = |want: &Want| want.shape.elements() * precision.of(want.role).bytes();
        let (passing, staying): (Vec<_>, Vec<_>) =
            self.found.iter().partition(|(want, _)| precision.quantisation(want).is_some());
        let mut batches = vec![Batch { members: staying, is_passing: false }];
        let mut room = 0;
        for member in passing {
            let needed = bytes(&member.0);
            if needed > room {
                batches.push(Batch { members: Vec::new(), is_passing: true });
                room = PASSING_BYTES;
            }
            room = room.saturating_sub(needed);
            batches.last_mut().expect("there is the first").members.push(member);
        }
        batches
    }
}

/// Tensors' memory as files are read into it, wherever it lies.
pub struct Landing<'a>(pub Part<'a>);

impl Target for Landing<'_> {
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

/// Chosen: enough for all reading threads, little beside a model that had to be quantised.
const PASSING_BYTES: usize = 128 << 20;

struct Batch<'f, 'a> {
    members: Vec<&'f Member<'a>>,
    /// Whether the tensors are gone once they are quantised.
    is_passing: bool,
}

/// A model's weights in memory, to be handed over by name.
pub struct Loaded {
    held: HashMap<String, Held>,
    ring: Option<Ring>,
}

impl Source for Loaded {
    fn take(&mut self, _: &Device, want: Want) -> Result<Held> {
        Ok(self.held.remove(&want.name).expect("the model asks for what it asked for before"))
    }

    fn ring(&self) -> Option<&Ring> {
        self.ring.as_ref()
    }
}

/// Loads a model whole: finds its tensors, reads them, and puts it together.
pub fn open<T>(
    device: &Device,
    files: &Files<'_>,
    precision: Precision,
    adapters: &mut Adapters,
    tick: Tick<'_>,
    build: impl FnOnce(&mut Builder<'_>) -> Result<T>,
) -> Result<T> {
    let mut loaded = files.load(device, precision, tick)?;
    build(&mut Builder::new(device, precision, &mut loaded, adapters))
}

/// Numbers of each tensor that tell models apart. Chosen: training moves nearly all of them.
const FIRST_NUMBERS: u64 = 64;

/// What tells a model from others: names, shapes and the first numbers of its tensors, hashed. All of
/// its numbers would take as long as loading it.
pub fn fingerprint(catalog: &Catalog) -> Result<Fingerprint> {
    let (mut all, mut parts) = (blake3::Hasher::new(), Parts::new());
    for tensor in &catalog.tensors {
        let mut bytes = format!("{} {:?}", tensor.name, tensor.shape).into_bytes();
        // Of quantised tensors only whole blocks can be read.
        let first = FIRST_NUMBERS.next_multiple_of(tensor.encoding.numbers_per_block());
        for number in floats(catalog, tensor, 0..tensor.count().min(first))? {
            bytes.extend(number.to_le_bytes());
        }
        all.update(&bytes);
        parts.insert(tensor.name.clone(), short(&blake3::hash(&bytes)));
    }
    Ok(Fingerprint { whole: all.finalize().to_hex().to_string(), parts })
}

/// The numbers of a tensor that is to be written, by its place among all.
pub type Numbers<'a> =
    &'a mut dyn FnMut(usize, &Want) -> std::result::Result<Vec<f32>, WeightsError>;

/// Writes a model's tensors, whose numbers are asked for one tensor at a time, by its place among
/// `wants`.
pub fn save(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    (wants, dtype): (&[Want], weights::Dtype),
    numbers: Numbers<'_>,
) -> Result<()> {
    let mut fill = filled(path, (wants, dtype), numbers);
    write_file(path, metadata, entering(wants, dtype), false, &mut fill)?;
    Ok(())
}

/// The same into a folder, as `model.safetensors` or, where that would be larger than `limit`, in shards
/// with an index.
pub fn save_shards(
    (folder, limit): (&Path, u64),
    metadata: &BTreeMap<String, String>,
    (wants, dtype): (&[Want], weights::Dtype),
    numbers: Numbers<'_>,
) -> Result<()> {
    const STEM: &str = "model";
    let shards = deal(STEM, entering(wants, dtype), limit);
    let mut fill = filled(folder, (wants, dtype), numbers);
    write_shards(folder, STEM, metadata, shards, false, &mut fill)?;
    Ok(())
}

/// Writes tensors as they lie on a device, copied to the host one at a time; returns the file's
/// checksum.
pub fn save_tensors(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &BTreeMap<String, &Tensor>,
) -> Result<blake3::Hash> {
    let entering = tensors.iter().map(|(name, tensor)| Entering {
        name: name.clone(),
        dtype: stored(tensor.dtype()),
        shape: tensor.shape().sizes().iter().map(|size| *size as u64).collect(),
    });
    let written = write_file(path, metadata, entering.collect(), true, &mut |tensor, out| {
        let bytes = tensors[&tensor.name].read_bytes();
        let bytes = bytes.map_err(|error| io::Error::other(error.to_string()));
        let bytes = bytes.map_err(|source| WeightsError::io("copy", path, source))?;
        out.write_all(&bytes).map_err(|source| WeightsError::io("write", path, source))
    })?;
    Ok(written.checksum.expect("it was asked for"))
}

fn entering(wants: &[Want], dtype: weights::Dtype) -> Vec<Entering> {
    let entering = wants.iter().map(|want| Entering {
        name: want.name.clone(),
        dtype,
        shape: want.shape.sizes().iter().map(|size| *size as u64).collect(),
    });
    entering.collect()
}

/// Writes the numbers of whichever tensor it is asked for.
fn filled<'a>(
    path: &'a Path,
    (wants, dtype): (&'a [Want], weights::Dtype),
    numbers: Numbers<'a>,
) -> impl FnMut(&Entering, &mut dyn Write) -> std::result::Result<(), WeightsError> + 'a {
    let places: HashMap<&str, usize> =
        wants.iter().enumerate().map(|(at, want)| (want.name.as_str(), at)).collect();
    move |tensor, file| {
        let at = places[tensor.name.as_str()];
        let numbers = numbers(at, &wants[at])?;
        let mut bytes = vec![0; numbers.len() * dtype.bytes() as usize];
        encode(&numbers, dtype, &mut bytes);
        file.write_all(&bytes).map_err(|source| WeightsError::io("write", path, source))
    }
}

/// A shape without its last sizes of 1, down to `n` sizes.
fn without_ones(shape: &[u64], n: usize) -> &[u64] {
    match shape {
        [inner @ .., 1] if shape.len() > n => without_ones(inner, n),
        _ => shape,
    }
}

/// A format of tensors as files call it.
pub(crate) fn stored(dtype: Dtype) -> weights::Dtype {
    match dtype {
        Dtype::F32 => weights::Dtype::F32,
        Dtype::Bf16 => weights::Dtype::Bf16,
        Dtype::F16 => weights::Dtype::F16,
        Dtype::U32 => weights::Dtype::U32,
        Dtype::I32 => weights::Dtype::I32,
        Dtype::U8 => weights::Dtype::U8,
    }
}
