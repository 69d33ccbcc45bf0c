//! Numbers from outside into tensors, as raw bytes, without a copy where the processor reaches a device's
//! memory, and through buffers of the host elsewhere. Whoever writes them may write parts of them in any
//! order and by several threads.

use std::ops::Range;

use crate::cuda::Cuda;
use crate::device::{Device, Engine};
use crate::{ComputeError, Tensor};

/// Bytes of the host's memory through which numbers go to a GPU whose memory the processor does not reach;
/// a larger tensor takes as many as it has. Chosen: enough for all reading threads.
const STAGED_BYTES: usize = 64 << 20;

/// What whoever writes says.
type Outcome<E> = Result<(), E>;

/// Lets `fill` write the numbers of some tensors of one device as raw bytes, each in its own format;
/// does not ask it on a device without data. It is called for all of them at once, or for some at a time,
/// by their places among all.
///
/// # Panics
/// If a tensor is shared, or lives elsewhere than the others.
pub fn fill_all<E: From<ComputeError>>(
    mut tensors: Vec<&mut Tensor>,
    mut fill: impl FnMut(Range<usize>, Vec<Part<'_>>) -> Outcome<E>,
) -> Outcome<E> {
    let Some(device) = tensors.first().map(|tensor| tensor.device().clone()) else { return Ok(()) };
    let is_lone = |tensor: &&mut Tensor| tensor.sharers() == 1 && tensor.device().is_same(&device);
    assert!(tensors.iter().all(is_lone), "only unshared tensors of one device are filled");
    let all = 0..tensors.len();
    match device.engine() {
        Engine::Meta => Ok(()),
        Engine::Cpu(_) => {
            fill(all, tensors.iter_mut().map(|tensor| Part(Way::Here(tensor.here()))).collect())?;
            device.note_filled(bytes_of(&tensors), false);
            Ok(())
        }
        Engine::Cuda(cuda) => {
            cuda.filling(|| {
                let parts = tensors.iter_mut().map(|tensor| of_card(cuda, tensor));
                fill(all, parts.collect())
            })?;
            device.note_filled(bytes_of(&tensors), true);
            Ok(())
        }
        Engine::Gpu(_) => {
            for range in runs(&tensors) {
                let from = range.start;
                let fill = |part: Range<usize>, parts: Vec<Part<'_>>| {
                    fill(from + part.start..from + part.end, parts)
                };
                of_gpu(&device, &mut tensors[range], fill)?;
            }
            Ok(())
        }
    }
}

fn bytes_of(tensors: &[&mut Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.bytes()).sum()
}

fn of_card<'a>(cuda: &'a Cuda, tensor: &'a mut Tensor) -> Part<'a> {
    if tensor.is_in_ring() {
        return Part(Way::Here(tensor.here()));
    }
    let (to, bytes) = (tensor.address_mut(), tensor.bytes());
    Part(Way::Card { cuda, to, bytes })
}

/// Tensors beside each other that all wait on the host for their turn in a ring, or all do not.
fn runs(tensors: &[&mut Tensor]) -> Vec<Range<usize>> {
    let runs = tensors.chunk_by(|one, next| one.is_in_ring() == next.is_in_ring());
    let mut end = 0;
    let range = |run: &[&mut Tensor]| {
        end += run.len();
        end - run.len()..end
    };
    runs.map(range).collect()
}

fn of_gpu<E: From<ComputeError>>(
    device: &Device,
    tensors: &mut [&mut Tensor],
    mut fill: impl FnMut(Range<usize>, Vec<Part<'_>>) -> Outcome<E>,
) -> Outcome<E> {
    let Engine::Gpu(gpu) = device.engine() else { unreachable!("asked for a GPU's tensors") };
    let all = 0..tensors.len();
    if tensors.iter().all(|tensor| tensor.is_in_ring()) {
        return fill(
            all,
            tensors.iter_mut().map(|tensor| Part(Way::Here(tensor.here()))).collect(),
        );
    }
    if !gpu.is_shared() {
        return staged(device, tensors, fill);
    }
    let place = |tensor: &&mut Tensor| tensor.offset()..tensor.offset() + tensor.bytes();
    let places: Vec<_> = tensors.iter().map(place).collect();
    gpu.fill(&places, |parts| {
        fill(all, parts.into_iter().map(|part| Part(Way::Here(part))).collect())
    })??;
    device.note_filled(bytes_of(tensors), false);
    Ok(())
}

/// A few at a time through memory of the host's.
fn staged<E>(
    device: &Device,
    tensors: &mut [&mut Tensor],
    mut fill: impl FnMut(Range<usize>, Vec<Part<'_>>) -> Outcome<E>,
) -> Outcome<E> {
    let mut staged = Vec::new();
    for range in groups(tensors) {
        let group = &mut tensors[range.clone()];
        staged.resize(bytes_of(group), 0);
        fill(range, cut(&mut staged, group))?;
        let mut rest = &staged[..];
        for tensor in group {
            let (bytes, after) = rest.split_at(tensor.bytes());
            tensor.write_bytes(bytes);
            rest = after;
        }
        device.note_filled(staged.len(), true);
    }
    Ok(())
}

/// Which tensors are staged together.
fn groups(tensors: &[&mut Tensor]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut room = 0;
    for (index, tensor) in tensors.iter().enumerate() {
        match groups.last_mut() {
            Some(group) if tensor.bytes() <= room => group.end += 1,
            _ => {
                groups.push(index..index + 1);
                room = STAGED_BYTES;
            }
        }
        room = room.saturating_sub(tensor.bytes());
    }
    groups
}

/// Bytes for each of some tensors.
fn cut<'a>(mut staged: &'a mut [u8], tensors: &[&mut Tensor]) -> Vec<Part<'a>> {
    let mut parts = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let (part, after) = staged.split_at_mut(tensor.bytes());
        parts.push(Part(Way::Here(part)));
        staged = after;
    }
    parts
}

/// Some of a tensor's bytes that are to be written: in their place, or in a buffer that a card copies
/// from. Parts may be written in any order and by several threads.
pub struct Part<'a>(Way<'a>);

enum Way<'a> {
    Here(&'a mut [u8]),
    Card { cuda: &'a Cuda, to: u64, bytes: usize },
}

impl Part<'_> {
    /// How many they are.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Way::Here(here) => here.len(),
            Way::Card { bytes, .. } => *bytes,
        }
    }

    /// The first `n` of them, and the rest.
    ///
    /// # Panics
    /// If they are fewer.
    #[must_use]
    pub fn split_at(self, n: usize) -> (Self, Self) {
        match self.0 {
            Way::Here(here) => {
                let (first, rest) = here.split_at_mut(n);
                (Self(Way::Here(first)), Self(Way::Here(rest)))
            }
            Way::Card { cuda, to, bytes } => {
                let rest = bytes.checked_sub(n).expect("no more than there are");
                let of = |to, bytes| Self(Way::Card { cuda, to, bytes });
                (of(to, n), of(to + n as u64, rest))
            }
        }
    }

    /// Lets `write` write all of them. What they held before is not to be read.
    pub fn fill<E>(self, write: &mut dyn FnMut(&mut [u8]) -> Outcome<E>) -> Outcome<E> {
        match self.0 {
            Way::Here(here) => write(here),
            Way::Card { cuda, to, bytes } => cuda.put(to, bytes, write),
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
