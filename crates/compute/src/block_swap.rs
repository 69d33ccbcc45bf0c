//! Block offloading (block swap): frozen weights stay on the host and are copied to the device block by
//! block, where its memory is too small for all of them. The arena has a few slots, each as large as the
//! largest block. While one block is computed the next is copied into another slot, in the forward and in
//! the backward pass.
//!
//! ```text
//! host      0  1  2  3  4 ...          all blocks, always
//!                 ↘
//! arena     [ 1 ][ 2 ]                 the current block, and the next
//! ```
//!
//! Blocks in between may stay on the device; then there is more time to copy the others.
//!
//! A tensor of an offloaded block finds its data wherever the block is. So only the model's loop over its
//! blocks knows of it ([`Tape::run_block`]), and results do not change. With CUDA, copies run on a stream of
//! their own; elsewhere they are plain copies, which gain nothing and serve as a test.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::cpu::HostMemory;
use crate::cuda::{CopyEvents, PinnedMemory};
use crate::device::Backend;
use crate::tape::Tape;
use crate::tensor::{Tensor, TensorStorage};
use crate::{Device, Dtype, Result, Shape, Tag};

/// Slots on the device. Chosen: with two, one block is computed while the next is copied. More would only
/// help where blocks differ in size, and take the memory that was to be saved.
const N_SLOTS: usize = 2;

/// The blocks of a model; clones are the same.
#[derive(Clone)]
pub struct BlockSwap(Arc<BlockSwapInner>);

struct BlockSwapInner {
    device: Device,
    blocks: Vec<OffloadedBlock>,
    state: Mutex<SwapState>,
}

/// The memory of a block's tensors, one after the other; empty if the block is not offloaded.
struct OffloadedBlock {
    host_copy: HostCopy,
    bytes: usize,
}

/// The host copy of a block.
enum HostCopy {
    /// On a meta device, or of an empty block.
    Nowhere,
    Host(HostMemory),
    /// Pinned memory that a GPU copies from.
    Pinned(PinnedMemory),
}

struct SwapState {
    slots: Vec<SwapSlot>,
    /// Bytes of each block that its tensors have so far.
    taken: Vec<usize>,
    /// The block that is being computed.
    current: Option<usize>,
    /// Counts uses of slots.
    clock: u64,
}

struct SwapSlot {
    memory: Tensor,
    block: Option<usize>,
    /// When it was used last.
    last: u64,
    /// With CUDA: the events by which the two streams wait for each other.
    events: Option<CopyEvents>,
}

impl BlockSwap {
    /// Allocates memory for blocks whose tensors have these bytes: on the host for all, on the device for the
    /// slots. A block without tensors stays on the device.
    pub fn new(device: &Device, blocks: &[Vec<usize>]) -> Result<Self> {
        let unit = device.kind().alignment();
        let sizes = blocks.iter().map(|block| block.iter().map(|n| n.next_multiple_of(unit)).sum());
        let sizes: Vec<usize> = sizes.collect();
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let slot = |_| {
            let memory = device.with_tag(Tag::Weights, || device.alloc([largest], Dtype::U8))?;
            let events = match device.backend() {
                Backend::Cuda(cuda) => Some(cuda.copy_events()?),
                Backend::Meta | Backend::Cpu(_) | Backend::Gpu(_) => None,
            };
            Ok(SwapSlot { memory, block: None, last: 0, events })
        };
        let n_offloaded = sizes.iter().filter(|bytes| **bytes > 0).count();
        let places = (0..N_SLOTS.min(n_offloaded)).map(slot).collect::<Result<_>>()?;
        let taken = vec![0; blocks.len()];
        let state = SwapState { slots: places, taken, current: None, clock: 0 };
        let block = |bytes| Ok(OffloadedBlock { host_copy: HostCopy::new(device, bytes)?, bytes });
        let blocks: Vec<OffloadedBlock> = sizes.into_iter().map(block).collect::<Result<_>>()?;
        device.add_host_bytes(blocks.iter().map(|block| block.bytes).sum());
        Ok(Self(Arc::new(BlockSwapInner {
            device: device.clone(),
            blocks,
            state: Mutex::new(state),
        })))
    }

    /// Whether a block is offloaded to the host.
    pub fn is_offloaded(&self, block: usize) -> bool {
        self.0.blocks[block].bytes > 0
    }

    /// An uninitialised tensor of a block, to be written by [`crate::fill_all`] alone.
    ///
    /// # Panics
    /// If the block has no memory left for it.
    pub fn alloc(&self, block: usize, shape: impl Into<Shape>, dtype: Dtype) -> Tensor {
        let shape = shape.into();
        let bytes = shape.elements() * dtype.bytes();
        let taken = &mut self.state().taken[block];
        let start = *taken;
        *taken += bytes.next_multiple_of(self.0.device.kind().alignment());
        assert!(
            *taken <= self.0.blocks[block].bytes,
            "block {block} has more tensors than it was made for"
        );
        let buffer =
            TensorStorage::in_block_swap(self.0.device.clone(), self.clone(), block, start, bytes);
        Tensor::new(buffer, shape, dtype)
    }

    /// A copy of a tensor in a block's host memory.
    pub fn offload(&self, block: usize, tensor: &Tensor) -> Result<Tensor> {
        let mut copy = self.alloc(block, tensor.shape(), tensor.dtype());
        if !self.0.device.is_meta() {
            tensor.copy_to(copy.host_data_mut())?;
        }
        Ok(copy)
    }

    /// Makes sure that a block is on the device until the next call, and starts to copy those that follow it,
    /// as far as there are slots.
    pub fn enter(&self, block: usize, then: impl IntoIterator<Item = usize>) {
        let state = &mut *self.state();
        let mut copied = 0;
        if state.current != Some(block) {
            self.release_current(state);
            state.current = Some(block);
            if self.is_offloaded(block) && state.slot_of(block).is_none() {
                copied += self.load_block(state, block, &[]);
            }
        }
        state.clock += 1;
        let moment = state.clock;
        if let Some(slot) = state.slot_of(block) {
            slot.last = moment;
            if let (Backend::Cuda(cuda), Some(events)) = (self.0.device.backend(), &slot.events) {
                cuda.wait_for_copy(events);
            }
        }
        let coming: Vec<usize> =
            then.into_iter().filter(|it| self.is_offloaded(*it)).take(N_SLOTS).collect();
        for (rank, next) in coming.iter().enumerate() {
            if state.slot_of(*next).is_none() {
                copied += self.load_block(state, *next, &coming[..rank]);
            }
        }
        self.0.device.note_copy(copied, self.is_offloaded(block));
    }

    /// Marks the current block as no longer used by later work.
    fn release_current(&self, state: &mut SwapState) {
        let left =
            state.current.and_then(|block| state.slot_of(block)).and_then(|it| it.events.as_ref());
        if let (Backend::Cuda(cuda), Some(events)) = (self.0.device.backend(), left) {
            cuda.release(events);
        }
    }

    /// Copies a block to the least recently used slot, unless each has the current block or one that is needed
    /// `sooner`; returns the bytes.
    fn load_block(&self, state: &mut SwapState, block: usize, sooner: &[usize]) -> usize {
        let current = state.current;
        let is_free = |it: &&mut SwapSlot| {
            it.block.is_none_or(|has| Some(has) != current && !sooner.contains(&has))
        };
        let free = state.slots.iter_mut().filter(is_free);
        let Some(slot) = free.min_by_key(|slot| slot.last) else { return 0 };
        (slot.block, slot.last) = (Some(block), state.clock);
        let (OffloadedBlock { host_copy: home, bytes }, events) =
            (&self.0.blocks[block], &slot.events);
        slot.memory.with_range_mut(0..*bytes, |to| match (self.0.device.backend(), home, events) {
            (Backend::Cuda(cuda), HostCopy::Pinned(pinned), Some(events)) => {
                cuda.copy_async(events, pinned, to.address_mut(), *bytes);
            }
            (Backend::Cpu(_) | Backend::Gpu(_), HostCopy::Host(memory), _) => {
                // SAFETY: tensors of a block are written before anything reads them, by their only owner.
                to.write(unsafe { memory.slice::<u8>(0, *bytes) });
            }
            _ => {}
        });
        *bytes
    }

    /// Where a block starts in the arena.
    ///
    /// # Panics
    /// If it is not the one that was entered: it may still be copied, or be replaced by another.
    pub(crate) fn offset(&self, block: usize) -> usize {
        let mut state = self.state();
        let current = state.current;
        let slot = state.slot_of(block).filter(|_| current == Some(block));
        slot.expect("a block's weights are used within it").memory.offset()
    }

    /// Bytes of a tensor on the host.
    pub(crate) fn host_data(&self, block: usize, start: usize, bytes: usize) -> &[u8] {
        match &self.0.blocks[block].host_copy {
            HostCopy::Nowhere => panic!("a meta tensor was used"),
            // SAFETY: the range is the tensor's own; see `host_data_mut`.
            HostCopy::Host(memory) => unsafe { memory.slice(start, bytes) },
            // SAFETY: as above.
            HostCopy::Pinned(pinned) => unsafe { pinned.slice(start, bytes) },
        }
    }

    /// The same, to be written. The copy on the device becomes invalid.
    ///
    /// # Safety
    /// Nobody else has the tensor whose bytes these are.
    #[allow(clippy::mut_from_ref)] // Exclusiveness is the tensor's.
    pub(crate) unsafe fn host_data_mut(
        &self,
        block: usize,
        start: usize,
        bytes: usize,
    ) -> &mut [u8] {
        self.forget(block);
        match &self.0.blocks[block].host_copy {
            HostCopy::Nowhere => panic!("a meta tensor was used"),
            // SAFETY: by the caller.
            HostCopy::Host(memory) => unsafe { memory.slice_mut(start, bytes) },
            // SAFETY: as above.
            HostCopy::Pinned(pinned) => unsafe { pinned.slice_mut(start, bytes) },
        }
    }

    /// Drops a block's copy on the device, after copies from the host are done.
    fn forget(&self, block: usize) {
        let state = &mut *self.state();
        if state.current == Some(block) {
            self.release_current(state);
            state.current = None;
        }
        let Some(slot) = state.slot_of(block) else { return };
        slot.block = None;
        if let (Backend::Cuda(cuda), Some(events)) = (self.0.device.backend(), &slot.events) {
            cuda.sync_copy(events);
        }
    }

    fn state(&self) -> MutexGuard<'_, SwapState> {
        self.0.state.lock().expect("nothing panics while a block is copied")
    }
}

impl SwapState {
    /// Where a block is, if it is anywhere.
    fn slot_of(&mut self, block: usize) -> Option<&mut SwapSlot> {
        self.slots.iter_mut().find(|slot| slot.block == Some(block))
    }
}

impl HostCopy {
    fn new(device: &Device, bytes: usize) -> Result<Self> {
        Ok(match device.backend() {
            _ if bytes == 0 => Self::Nowhere,
            Backend::Meta => Self::Nowhere,
            Backend::Cpu(_) | Backend::Gpu(_) => Self::Host(HostMemory::reserve(bytes)?),
            Backend::Cuda(cuda) => Self::Pinned(cuda.pin(bytes)?),
        })
    }
}

impl Drop for BlockSwapInner {
    fn drop(&mut self) {
        self.device.sub_host_bytes(self.blocks.iter().map(|block| block.bytes).sum());
        // The slots are freed, and a block may still be copied to one.
        if let Backend::Cuda(cuda) = self.device.backend() {
            cuda.wait_for_copies();
        }
    }
}

impl fmt::Debug for BlockSwap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n_offloaded = self.0.blocks.iter().filter(|block| block.bytes > 0).count();
        write!(f, "{n_offloaded} offloaded blocks of {}", self.0.blocks.len())
    }
}

impl<'m> Tape<'m> {
    /// Runs one of a model's blocks. An offloaded block is copied to the device for that, and again for the
    /// backward pass.
    pub fn run_block<T>(
        &self,
        block_swap: Option<&'m BlockSwap>,
        index: usize,
        run: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(block_swap) = block_swap else { return run() };
        let n = block_swap.0.blocks.len();
        // Without a backward pass, the first block is needed again after the last.
        let again = if self.is_training() { 0 } else { index };
        block_swap.enter(index, (index + 1..n).chain(0..again));
        let n_records = self.n_records();
        let made = run()?;
        if self.n_records() > n_records {
            self.push_record("block", move |_| {
                block_swap.enter(index, (0..index).rev());
                Ok(())
            });
        }
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Activation, Linear, Lora};
    use crate::testing::{Input, device, upload};
    use crate::{
        Gradients, ParamKey, Params, Quantisation, Quantised, Usage, Var, WorkStats, fill_all,
    };

    const WIDTH: usize = 64;
    const BLOCKS: usize = 5;

    /// A dense matrix and a quantised one, with a bias and a LoRA.
    struct Layer {
        dense: Var,
        bias: Var,
        quantised: Quantised,
        lora: [ParamKey; 2],
    }

    struct Model {
        blocks: Vec<Layer>,
        block_swap: Option<BlockSwap>,
    }

    /// Which blocks are on the host.
    type Which = fn(usize) -> bool;
    const NONE: Which = |_| false;
    const ALL: Which = |_| true;
    const SECOND: Which = |index| index % 2 == 1;

    impl Model {
        fn new(device: &Device, params: &mut Params, streams: Which) -> Self {
            let matrix = [WIDTH, WIDTH];
            let how = Quantisation::Nf4;
            let sizes = [vec![4 * WIDTH * WIDTH, 4 * WIDTH], Quantised::sizes(matrix.into(), how)];
            let sizes = |index| if streams(index) { sizes.concat() } else { Vec::new() };
            let sizes: Vec<_> = (0..BLOCKS).map(sizes).collect();
            let block_swap =
                (0..BLOCKS).any(streams).then(|| BlockSwap::new(device, &sizes).unwrap());
            let tensor = |input: &Input| upload(device, input, Dtype::F32);
            let blocks = (0..BLOCKS).map(|index| {
                let input = |shape: &[usize], seed| {
                    Input::normal(Shape::new(shape), 10 * index as u64 + seed).scaled(0.2)
                };
                let (dense, bias) = (tensor(&input(&matrix, 1)), tensor(&input(&[WIDTH], 2)));
                let quantised = Quantised::new(&tensor(&input(&matrix, 3)), how).unwrap();
                let lora = [[2, WIDTH], [WIDTH, 2]].map(|shape| input(&shape, 4));
                let lora = lora.map(|input| params.add(tensor(&input)));
                let home = block_swap.as_ref().filter(|block_swap| block_swap.is_offloaded(index));
                let offload = |tensor: Tensor| match home {
                    Some(block_swap) => block_swap.offload(index, &tensor).unwrap(),
                    None => tensor,
                };
                let quantised = match home {
                    Some(block_swap) => quantised.offload(block_swap, index).unwrap(),
                    None => quantised,
                };
                Layer { dense: offload(dense).into(), bias: offload(bias).into(), quantised, lora }
            });
            Self { blocks: blocks.collect(), block_swap }
        }

        fn forward<'m>(&'m self, tape: &Tape<'m>, x: &Tensor, recompute: bool) -> Result<Var> {
            let mut x = Var::from(x.clone());
            for (index, layer) in self.blocks.iter().enumerate() {
                x = tape.run_block(self.block_swap.as_ref(), index, || {
                    if !recompute {
                        return layer.forward(tape, &x);
                    }
                    let again = tape.recompute(&[&x], |tape, v| Ok([layer.forward(tape, &v[0])?]));
                    again.map(|[x]| x)
                })?;
            }
            Ok(x)
        }
    }

    impl Layer {
        fn forward(&self, tape: &Tape<'_>, x: &Var) -> Result<Var> {
            let [down, up] = self.lora.map(|key| tape.param(key));
            let lora = Some(Lora { down: &down, up: &up, scale: 1.0, dropout: 0.0 });
            let (bias, activation) = (Some(&self.bias), Activation::GeluTanh);
            let y =
                tape.linear(x, Linear { bias, activation, lora, ..Linear::new(&self.dense) })?;
            tape.add(x, &tape.linear(&y, Linear::new(&self.quantised))?)
        }
    }

    /// Two steps' worth of gradients and a result without a backward pass, as bits, and the memory it took.
    fn train(device: &Device, streams: Which, recompute: bool) -> (Vec<u32>, Usage) {
        let mut params = Params::default();
        let model = Model::new(device, &mut params, streams);
        let x = upload(device, &Input::normal([7, WIDTH], 99), Dtype::F32);
        device.reset_peak();
        let mut gradients = Gradients::default();
        for _ in 0..2 {
            let tape = Tape::training(device, &params, 0);
            let y = model.forward(&tape, &x, recompute).unwrap();
            let loss = tape.mse(&y, &x, None, None).unwrap();
            drop(y);
            tape.backward(&loss, &mut gradients).unwrap();
        }
        let tape = Tape::inference(device, &params, 0);
        let last = model.forward(&tape, &x, recompute).unwrap();
        let usage = device.usage();
        if device.is_meta() {
            return (Vec::new(), usage);
        }
        let all = gradients.all(params.values().len()).into_iter().flatten();
        let all = all.chain([last.tensor()]).flat_map(Tensor::to_vec::<f32>);
        (all.map(f32::to_bits).collect(), usage)
    }

    #[test]
    fn offloaded_blocks_give_the_same_bits_in_less_memory() {
        for recompute in [false, true] {
            let (kept, kept_usage) = train(&device(), NONE, recompute);
            let (streamed, usage) = train(&device(), ALL, recompute);
            assert!(kept == streamed, "recompute {recompute}");
            assert!(kept.iter().any(|bits| f32::from_bits(*bits) != 0.0));
            assert!(usage.peak < kept_usage.peak, "{usage:?} {kept_usage:?}");
            assert!(kept == train(&device(), SECOND, recompute).0, "recompute {recompute}");
        }
    }

    #[test]
    fn the_meta_device_takes_the_same_memory() {
        let real = device();
        let meta = Device::meta(real.kind(), usize::MAX / 2);
        for recompute in [false, true] {
            for streams in [ALL, SECOND] {
                assert_eq!(train(&real, streams, recompute).1, train(&meta, streams, recompute).1);
                assert_eq!((real.host_bytes(), meta.host_bytes()), (0, 0));
            }
        }
    }

    /// The work, and how many blocks were copied for each that was waited for.
    fn comings(streams: Which) -> (WorkStats, Vec<u64>) {
        let meta = Device::meta(crate::DeviceKind::cpu(2), usize::MAX / 2);
        train(&meta, streams, false);
        let work = meta.work();
        let copied: Vec<u64> = work.offload_intervals.iter().map(|lap| lap.copied_bytes).collect();
        let block = *copied.iter().find(|bytes| **bytes > 0).unwrap() / 2;
        let came = copied.iter().map(|bytes| bytes / block).collect();
        (work, came)
    }

    /// In forward and backward, each of five blocks is copied twice but for the two that are still in their
    /// slots at each turn; then once more, and the first after the last.
    #[test]
    fn a_plan_knows_when_blocks_are_copied() {
        let (work, came) = comings(ALL);
        assert_eq!(came[..10], [2, 1, 1, 1, 0, 0, 1, 1, 1, 0]);
        assert_eq!(came[10..20], [0, 1, 1, 1, 0, 0, 1, 1, 1, 0]);
        assert_eq!(came[20..], [0, 1, 1, 1, 1]);
        let inside: u64 =
            work.offload_intervals.iter().flat_map(|lap| lap.calls.values()).map(|c| c.flops).sum();
        assert!(inside > 0 && inside <= work.flops);
    }

    /// Two offloaded blocks have two slots: they are copied once and stay.
    #[test]
    fn every_second_of_few_blocks_is_copied_once() {
        let (_, came) = comings(SECOND);
        assert_eq!((came[0], came.iter().sum::<u64>()), (2, 2));
    }

    /// With three of seven, one is copied at each turn, as soon as another has left its slot.
    #[test]
    fn the_next_block_is_copied_while_others_are_computed() {
        let meta = Device::meta(crate::DeviceKind::cpu(2), usize::MAX / 2);
        let sizes: Vec<Vec<usize>> = (0..7).map(|index| vec![64; index % 2]).collect();
        let block_swap = BlockSwap::new(&meta, &sizes).unwrap();
        let there = |block: usize, then: Vec<usize>| {
            block_swap.enter(block, then);
            let state = block_swap.state();
            let mut there: Vec<usize> = state.slots.iter().filter_map(|it| it.block).collect();
            there.sort_unstable();
            there
        };
        assert_eq!(there(0, (1..7).collect()), [1, 3]);
        assert_eq!(there(1, (2..7).collect()), [1, 3]);
        assert_eq!(there(2, (3..7).collect()), [3, 5]);
        assert_eq!(there(6, vec![]), [3, 5]);
        assert_eq!(there(6, (0..6).rev().collect()), [3, 5]);
        assert_eq!(there(4, (0..4).rev().collect()), [1, 3]);
    }

    #[test]
    fn what_is_written_after_a_copy_is_copied_again() {
        let device = device();
        let block_swap = BlockSwap::new(&device, &[vec![8], vec![8]]).unwrap();
        let mut tensor = block_swap.alloc(0, [8], Dtype::U8);
        for byte in [1, 2] {
            fill_all(vec![&mut tensor], |_, parts| -> Result<()> {
                let part = parts.into_iter().next().unwrap();
                part.fill(&mut |to| {
                    to.fill(byte);
                    Ok(())
                })
            })
            .unwrap();
            block_swap.enter(0, Some(1));
            // A copy is made of what the device has.
            let copy = tensor.clone().into_unique().unwrap();
            assert_eq!(copy.to_vec::<u8>(), [byte; 8]);
            drop(copy);
        }
        assert_eq!(device.host_bytes(), 2 * device.kind().alignment());
    }
}
