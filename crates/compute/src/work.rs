//! The work counter of a device: every kernel call, by its class, by the dtypes of its operands and by its size,
//! so that the time of the whole can be estimated from a machine's rates. Counted before the backend runs, so a
//! meta device counts the same. How long calls took is measured on request, for calibration.
//!
//! Leaves out what no kernel does: copies on the host.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use crate::{Dtype, Quantisation, Tensor};

/// Arithmetic done, as counted by the ops themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkStats {
    /// Floating-point operations; a multiply-add is two.
    pub flops: u64,
    /// Bytes of tensors read and written, each once per call.
    pub bytes: u64,
    /// The same, by kind of call.
    pub calls: BTreeMap<KernelClass, CallTotals>,
    /// What of it was done while offloaded weights were copied, block by block.
    pub offload_intervals: Vec<OffloadInterval>,
}

/// The work between two blocks' beginnings, on a meta device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadInterval {
    /// Bytes that are copied from the host meanwhile.
    pub copied_bytes: u64,
    /// All calls.
    pub calls: BTreeMap<KernelClass, CallTotals>,
}

/// Calls that take about as long as each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelClass {
    /// What computes: an op's name, or a part of an op.
    pub kernel: &'static str,
    /// Of the two operands of a matmul; of what is read first, twice, for all else.
    pub formats: [StorageFormat; 2],
    /// The whole part of the logarithm, base 2, of a call's operations and of its bytes.
    pub size: [u8; 2],
}

/// Calls of one class, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallTotals {
    /// How many.
    pub count: u64,
    /// Operations of all.
    pub flops: u64,
    /// Bytes of all.
    pub bytes: u64,
    /// Nanoseconds from each call to the next of any class, while calls are timed.
    pub nanos: u64,
}

/// How values that are read are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)] // The names say it.
pub enum StorageFormat {
    F32,
    Bf16,
    F16,
    Int8,
    Nf4,
    Fp8,
    /// Indices and codes.
    Integer,
}

impl WorkStats {
    /// What was done since an earlier look at the same device.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut calls = self.calls.clone();
        calls.retain(|class, calls| {
            if let Some(before) = before.calls.get(class) {
                calls.count -= before.count;
                calls.flops -= before.flops;
                calls.bytes -= before.bytes;
                calls.nanos -= before.nanos;
            }
            calls.count > 0
        });
        let laps = self.offload_intervals[before.offload_intervals.len()..].to_vec();
        Self {
            flops: self.flops - before.flops,
            bytes: self.bytes - before.bytes,
            calls,
            offload_intervals: laps,
        }
    }

    fn add(&mut self, call: &KernelCall) -> KernelClass {
        let KernelCall { kernel, formats, flops, bytes } = *call;
        self.flops += flops;
        self.bytes += bytes;
        let size = [flops, bytes].map(|count| count.checked_ilog2().unwrap_or(0) as u8);
        let class = KernelClass { kernel, formats, size };
        self.add_calls(class, CallTotals { count: 1, flops, bytes, nanos: 0 });
        class
    }

    fn add_calls(&mut self, class: KernelClass, more: CallTotals) {
        let lap = self.offload_intervals.last_mut().map(|lap| &mut lap.calls);
        for all in [Some(&mut self.calls), lap].into_iter().flatten() {
            let calls = all.entry(class).or_default();
            calls.count += more.count;
            calls.flops += more.flops;
            calls.bytes += more.bytes;
        }
    }
}

/// Counts, and times calls if it is asked to: a call lasts until the next one.
#[derive(Default)]
pub(crate) struct WorkCounter {
    work: WorkStats,
    is_timed: bool,
    /// The call that lasts, and since when.
    open: Option<(KernelClass, Instant)>,
}

impl WorkCounter {
    pub fn add(&mut self, call: &KernelCall) {
        self.close();
        let class = self.work.add(call);
        self.open = self.is_timed.then(|| (class, Instant::now()));
    }

    /// Counts what was done since `before` so many times more.
    pub fn repeat(&mut self, before: &WorkStats, times: u64) {
        self.close();
        let WorkStats { flops, bytes, calls, .. } = self.work.since(before);
        self.work.flops += times * flops;
        self.work.bytes += times * bytes;
        for (class, CallTotals { count, flops, bytes, .. }) in calls {
            let [count, flops, bytes] = [count, flops, bytes].map(|one| times * one);
            self.work.add_calls(class, CallTotals { count, flops, bytes, nanos: 0 });
        }
    }

    pub fn note_copy(&mut self, copied: u64, is_waited_for: bool) {
        match self.work.offload_intervals.last_mut().filter(|_| !is_waited_for) {
            Some(lap) => lap.copied_bytes += copied,
            None => self
                .work
                .offload_intervals
                .push(OffloadInterval { copied_bytes: copied, ..OffloadInterval::default() }),
        }
    }

    pub fn is_timed(&self) -> bool {
        self.is_timed
    }

    pub fn set_timed(&mut self, is_timed: bool) {
        self.close();
        self.is_timed = is_timed;
    }

    /// The work so far. What is done after this, until the next call, is no call's.
    pub fn work(&mut self) -> WorkStats {
        self.close();
        self.work.clone()
    }

    fn close(&mut self) {
        let Some((class, since)) = self.open.take() else { return };
        if let Some(calls) = self.work.calls.get_mut(&class) {
            calls.nanos += since.elapsed().as_nanos() as u64;
        }
    }
}

/// One call of a kernel.
pub(crate) struct KernelCall {
    pub kernel: &'static str,
    pub formats: [StorageFormat; 2],
    pub flops: u64,
    pub bytes: u64,
}

impl KernelCall {
    /// That reads and writes these tensors.
    pub fn new(kernel: &'static str, flops: usize, tensors: &[&Tensor]) -> Self {
        let formats = tensors.iter().map(|tensor| StorageFormat::from(tensor.dtype()));
        let format = formats.min().unwrap_or(StorageFormat::Integer);
        let bytes: usize = tensors.iter().map(|tensor| tensor.bytes()).sum();
        Self { kernel, formats: [format; 2], flops: flops as u64, bytes: bytes as u64 }
    }
}

impl fmt::Display for KernelClass {
    /// What is computed with which dtypes, without the size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = self.formats;
        write!(f, "{}, {first}", self.kernel)?;
        if first == second { Ok(()) } else { write!(f, " by {second}") }
    }
}

impl fmt::Display for StorageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
            Self::Nf4 => "nf4",
            Self::Fp8 => "fp8",
            Self::Integer => "integer",
        })
    }
}

impl From<Dtype> for StorageFormat {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F16 => Self::F16,
            Dtype::U32 | Dtype::I32 | Dtype::U8 => Self::Integer,
        }
    }
}

impl From<Quantisation> for StorageFormat {
    fn from(how: Quantisation) -> Self {
        match how {
            Quantisation::Int8 => Self::Int8,
            Quantisation::Nf4 => Self::Nf4,
            Quantisation::Fp8 => Self::Fp8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Activation, Linear, Lora, activation};
    use crate::testing::device;
    use crate::{Device, DeviceKind, Params, Quantised, RandomSequence, Tape, Var};

    /// The names of all classes that some work had calls of, and how many.
    fn names(work: &WorkStats) -> Vec<(String, u64)> {
        work.calls.iter().map(|(class, calls)| (class.to_string(), calls.count)).collect()
    }

    /// A layer of 80 to 96 with LoRA and a quantised weight, on 70 rows.
    fn layer(device: &Device) -> WorkStats {
        let tensor = |shape: [usize; 2]| {
            device.normal(shape, Dtype::Bf16, 1.0, RandomSequence::new(1, 2)).unwrap()
        };
        let weight = Quantised::new(&tensor([96, 80]), Quantisation::Int8).unwrap();
        let [down, up] = [[4, 80], [96, 4]].map(|shape: [usize; 2]| {
            Var::from(device.normal(shape, Dtype::F32, 1.0, RandomSequence::new(3, 4)).unwrap())
        });
        let lora = Some(Lora { down: &down, up: &up, scale: 1.0, dropout: 0.0 });
        let (x, params) = (Var::from(tensor([70, 80])), Params::default());
        let tape = Tape::inference(device, &params, 0);
        let before = device.work();
        let activation = Activation::GeluTanh;
        tape.linear(&x, Linear { activation, lora, ..Linear::new(&weight) }).unwrap();
        device.work().since(&before)
    }

    #[test]
    fn a_layer_is_counted_by_kernel_format_and_size() {
        let work = layer(&Device::meta(DeviceKind::Cpu { threads: 2, has_amx: false }, usize::MAX));
        let expected = [
            ("activated matmul by simd, bf16 by int8".to_owned(), 1),
            ("matmul of few columns, bf16 by f32".into(), 1),
        ];
        assert_eq!(names(&work), expected);
        let (class, calls) = work.calls.iter().next().unwrap();
        // The adapter's second half makes the matmul deeper.
        assert_eq!(calls.flops, 70 * 96 * (2 * (80 + 4) + activation::FLOPS as u64));
        let dense = 2 * (70 * 80 + 70 * 96) + 96 * 80;
        assert_eq!(calls.bytes, dense + 4 * (70 * 4 + 96 * 4));
        assert_eq!(class.size, [calls.flops.ilog2() as u8, calls.bytes.ilog2() as u8]);
        let total: u64 = work.calls.values().map(|calls| calls.flops).sum();
        assert_eq!(work.flops, total);
    }

    #[test]
    fn a_meta_device_counts_the_same() {
        let real = device();
        let meta = Device::meta(real.kind(), usize::MAX);
        assert_eq!(layer(&real), layer(&meta));
        assert_eq!(real.work(), meta.work());
    }

    #[test]
    fn equal_work_is_counted_without_being_done() {
        let [once, thrice] = [(); 2].map(|()| Device::meta(DeviceKind::cpu(1), usize::MAX));
        for device in [&once, &thrice] {
            layer(device);
        }
        let before = once.work();
        layer(&once);
        once.repeat_work(&before, 2);
        for _ in 0..3 {
            layer(&thrice);
        }
        assert_eq!(once.work(), thrice.work());
    }

    #[test]
    fn what_was_done_before_is_taken_off() {
        let device = device();
        let first = layer(&device);
        assert_eq!(layer(&device), first);
        assert_eq!(device.work().since(&device.work()), WorkStats::default());
    }
}
