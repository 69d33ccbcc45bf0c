//! Fills tensors from outside, as raw bytes: in place where the CPU can write to the device's memory, through
//! host buffers elsewhere. Parts may be written in any order and by several threads.

use std::ops::Range;

use crate::cuda::CudaBackend;
use crate::device::{Backend, Device};
use crate::{ComputeError, Tensor};

/// Bytes of host buffers for a GPU whose memory the CPU cannot write; a larger tensor takes as many as it
/// has. Chosen: enough for all reading threads.
const STAGING_BYTES: usize = 64 << 20;

/// What a writer returns.
type FillResult<E> = Result<(), E>;

/// Lets `fill` write the data of some tensors of one device as raw bytes, each in its own dtype; does not
/// call it on a meta device. It is called for all of them at once, or for some at a time, by their indices.
///
/// # Panics
/// If a tensor is shared, or lives elsewhere than the others.
pub fn fill_all<E: From<ComputeError>>(
    mut tensors: Vec<&mut Tensor>,
    mut fill: impl FnMut(Range<usize>, Vec<FillPart<'_>>) -> FillResult<E>,
) -> FillResult<E> {
    let Some(device) = tensors.first().map(|tensor| tensor.device().clone()) else { return Ok(()) };
    let is_lone =
        |tensor: &&mut Tensor| tensor.ref_count() == 1 && tensor.device().is_same(&device);
    assert!(tensors.iter().all(is_lone), "only unshared tensors of one device are filled");
    let all = 0..tensors.len();
    match device.backend() {
        Backend::Meta => Ok(()),
        Backend::Cpu(_) => {
            fill(
                all,
                tensors
                    .iter_mut()
                    .map(|tensor| FillPart(FillTarget::Host(tensor.writable_bytes())))
                    .collect(),
            )?;
            device.note_fill(bytes_of(&tensors), false);
            Ok(())
        }
        Backend::Cuda(cuda) => {
            let mut in_place = 0;
            cuda.with_uploads(|| {
                let parts = tensors.iter_mut().map(|tensor| cuda_part(cuda, tensor, &mut in_place));
                fill(all, parts.collect())
            })?;
            device.note_fill(in_place, false);
            device.note_fill(bytes_of(&tensors) - in_place, true);
            Ok(())
        }
        Backend::Gpu(_) => {
            for range in runs(&tensors) {
                let from = range.start;
                let fill = |part: Range<usize>, parts: Vec<FillPart<'_>>| {
                    fill(from + part.start..from + part.end, parts)
                };
                fill_gpu(&device, &mut tensors[range], fill)?;
            }
            Ok(())
        }
    }
}

fn bytes_of(tensors: &[&mut Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.bytes()).sum()
}

/// A tensor, to be written through buffers, or in its place if the CPU reaches that; counts bytes of the latter.
fn cuda_part<'a>(
    cuda: &'a CudaBackend,
    tensor: &'a mut Tensor,
    in_place: &mut usize,
) -> FillPart<'a> {
    if tensor.is_offloaded() {
        return FillPart(FillTarget::Host(tensor.writable_bytes()));
    }
    let (to, bytes) = (tensor.address_mut(), tensor.bytes());
    FillPart(match tensor.shared_bytes_mut() {
        Some(here) => {
            *in_place += bytes;
            FillTarget::Host(here)
        }
        None => FillTarget::Cuda { cuda, to, bytes },
    })
}

/// Runs of tensors that are all offloaded to the host, or all not.
fn runs(tensors: &[&mut Tensor]) -> Vec<Range<usize>> {
    let runs = tensors.chunk_by(|one, next| one.is_offloaded() == next.is_offloaded());
    let mut end = 0;
    let range = |run: &[&mut Tensor]| {
        end += run.len();
        end - run.len()..end
    };
    runs.map(range).collect()
}

fn fill_gpu<E: From<ComputeError>>(
    device: &Device,
    tensors: &mut [&mut Tensor],
    mut fill: impl FnMut(Range<usize>, Vec<FillPart<'_>>) -> FillResult<E>,
) -> FillResult<E> {
    let Backend::Gpu(gpu) = device.backend() else { unreachable!("asked for a GPU's tensors") };
    let all = 0..tensors.len();
    if tensors.iter().all(|tensor| tensor.is_offloaded()) {
        return fill(
            all,
            tensors
                .iter_mut()
                .map(|tensor| FillPart(FillTarget::Host(tensor.writable_bytes())))
                .collect(),
        );
    }
    if !gpu.has_shared_memory() {
        return fill_staged(device, tensors, fill);
    }
    let place = |tensor: &&mut Tensor| tensor.offset()..tensor.offset() + tensor.bytes();
    let places: Vec<_> = tensors.iter().map(place).collect();
    gpu.fill(&places, |parts| {
        fill(all, parts.into_iter().map(|part| FillPart(FillTarget::Host(part))).collect())
    })??;
    device.note_fill(bytes_of(tensors), false);
    Ok(())
}

/// A few at a time through memory of the host's.
fn fill_staged<E>(
    device: &Device,
    tensors: &mut [&mut Tensor],
    mut fill: impl FnMut(Range<usize>, Vec<FillPart<'_>>) -> FillResult<E>,
) -> FillResult<E> {
    let mut staged = Vec::new();
    for range in groups(tensors) {
        let group = &mut tensors[range.clone()];
        staged.resize(bytes_of(group), 0);
        fill(range, split_staging(&mut staged, group))?;
        let mut rest = &staged[..];
        for tensor in group {
            let (bytes, after) = rest.split_at(tensor.bytes());
            tensor.write_bytes(bytes);
            rest = after;
        }
        device.note_fill(staged.len(), true);
    }
    Ok(())
}

/// Which tensors are staged together.
fn groups(tensors: &[&mut Tensor]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut left = 0;
    for (index, tensor) in tensors.iter().enumerate() {
        match groups.last_mut() {
            Some(group) if tensor.bytes() <= left => group.end += 1,
            _ => {
                groups.push(index..index + 1);
                left = STAGING_BYTES;
            }
        }
        left = left.saturating_sub(tensor.bytes());
    }
    groups
}

/// Bytes for each of some tensors.
fn split_staging<'a>(mut staged: &'a mut [u8], tensors: &[&mut Tensor]) -> Vec<FillPart<'a>> {
    let mut parts = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let (part, after) = staged.split_at_mut(tensor.bytes());
        parts.push(FillPart(FillTarget::Host(part)));
        staged = after;
    }
    parts
}

/// Some of a tensor's bytes that are to be written: in their place, or in a buffer that a GPU copies
/// from. Parts may be written in any order and by several threads.
pub struct FillPart<'a>(FillTarget<'a>);

enum FillTarget<'a> {
    Host(&'a mut [u8]),
    Cuda { cuda: &'a CudaBackend, to: u64, bytes: usize },
}

impl FillPart<'_> {
    /// How many they are.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            FillTarget::Host(here) => here.len(),
            FillTarget::Cuda { bytes, .. } => *bytes,
        }
    }

    /// The first `n` of them, and the rest.
    ///
    /// # Panics
    /// If they are fewer.
    #[must_use]
    pub fn split_at(self, n: usize) -> (Self, Self) {
        match self.0 {
            FillTarget::Host(here) => {
                let (first, rest) = here.split_at_mut(n);
                (Self(FillTarget::Host(first)), Self(FillTarget::Host(rest)))
            }
            FillTarget::Cuda { cuda, to, bytes } => {
                let rest = bytes.checked_sub(n).expect("no more than there are");
                let of = |to, bytes| Self(FillTarget::Cuda { cuda, to, bytes });
                (of(to, n), of(to + n as u64, rest))
            }
        }
    }

    /// Lets `write` write all of them. What they held before is not to be read.
    pub fn fill<E>(self, write: &mut dyn FnMut(&mut [u8]) -> FillResult<E>) -> FillResult<E> {
        match self.0 {
            FillTarget::Host(here) => write(here),
            FillTarget::Cuda { cuda, to, bytes } => cuda.upload(to, bytes, write),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fill_all;
    use crate::Dtype;
    use crate::testing::device;

    /// Pieces of about what a file is read in, and larger, by several threads.
    #[test]
    fn parts_are_filled_in_any_order_between_other_work() {
        let device = device();
        let sizes = [0, 1, 4097, (8 << 20) + 4097, 9 << 20];
        let byte = |at: usize| (at % 251) as u8;
        for _ in 0..2 {
            // Takes the place of what was worked in a moment ago.
            drop(sizes.map(|size| device.zeros([size], Dtype::U8).unwrap()));
            let mut tensors = sizes.map(|size| device.zeros([size], Dtype::U8).unwrap());
            fill_all(tensors.iter_mut().collect(), |_, parts| -> crate::Result<()> {
                let mut pieces = Vec::new();
                for mut rest in parts {
                    let mut at = 0;
                    while rest.bytes() > 0 {
                        let n = rest.bytes().min(3 << 20);
                        // The last is whole, for one that is larger than a buffer.
                        let n = if at == 0 && rest.bytes() == 9 << 20 { 9 << 20 } else { n };
                        let (first, after) = rest.split_at(n);
                        pieces.push((at, first));
                        (at, rest) = (at + n, after);
                    }
                }
                pieces.reverse();
                std::thread::scope(|scope| {
                    for (at, piece) in pieces {
                        scope.spawn(move || {
                            piece.fill(&mut |to| -> crate::Result<()> {
                                let all = to.iter_mut().zip(at..);
                                all.for_each(|(to, at)| *to = byte(at));
                                Ok(())
                            })
                        });
                    }
                });
                Ok(())
            })
            .unwrap();
            for (size, tensor) in sizes.into_iter().zip(&tensors) {
                assert!(tensor.to_vec::<u8>().into_iter().eq((0..size).map(byte)), "{size}");
            }
        }
    }
}
