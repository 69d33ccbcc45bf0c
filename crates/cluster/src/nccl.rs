//! NCCL, loaded at run time: sums between NVIDIA GPUs, from the memory of one into that of another. MPI carries the id by which
//! the ranks find each other. No call blocks: a rank that is gone is known from the heartbeat, and what waits for it is
//! aborted. Constants and signatures are taken from `nccl.h` of NCCL 2.28; none of those used changed since 2.14.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::thread;
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{ClusterError, Result};
use crate::heartbeat::Heartbeat;
use crate::world::World;

/// Where it is: where the system's loader looks, or in the toolkit's folder.
const NAMES: [&str; 2] = ["libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"];

/// NCCL's own: lets several ranks use one GPU, since 2.30.
const SHARED_GPUS: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// `ncclSuccess`, `ncclInProgress`, `ncclFloat32`, `ncclSum`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// How often an unfinished call is looked at.
const LOOK: Duration = Duration::from_micros(200);

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
struct NcclId([u8; 128]);

/// `ncclConfig_t` as 2.14 had it; newer ones fill in the rest.
#[repr(C)]
struct NcclConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    _rest: c_int,
}

/// The library.
pub struct Nccl {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut NcclId) -> c_int,
    init_rank:
        unsafe extern "C" fn(*mut *mut c_void, c_int, NcclId, c_int, *mut NcclConfig) -> c_int,
    async_error: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        *mut c_void,
        *mut c_void,
    ) -> c_int,
    abort: unsafe extern "C" fn(*mut c_void) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    _library: Library,
}

/// A GPU at work, as NVIDIA's libraries know it.
#[derive(Clone, Copy, Debug)]
pub struct GpuStream {
    /// The stream that all work goes to.
    pub stream: *mut c_void,
}

/// Values of f32 in the memory of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct GpuValues {
    /// Where they lie.
    pub address: u64,
    /// How many there are.
    pub n: usize,
}

/// The GPUs of all ranks.
pub struct GpuRanks {
    nccl: Nccl,
    /// Null once they were aborted.
    ranks: Cell<*mut c_void>,
    heartbeat: Option<Heartbeat>,
}

impl Nccl {
    /// Loads it; none where it is missing, or too old.
    pub fn open() -> Option<Self> {
        // SAFETY: NVIDIA's initialisers run, which are made to run inside any process.
        let open = |name: &&str| unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.ok();
        let library = NAMES.iter().find_map(open)?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: NCCL's C interface has this function with these arguments.
                *unsafe { library.get($name) }.ok()?
            };
        }
        Some(Self {
            get_version: function!(b"ncclGetVersion\0"),
            get_unique_id: function!(b"ncclGetUniqueId\0"),
            init_rank: function!(b"ncclCommInitRankConfig\0"),
            async_error: function!(b"ncclCommGetAsyncError\0"),
            group_start: function!(b"ncclGroupStart\0"),
            group_end: function!(b"ncclGroupEnd\0"),
            all_reduce: function!(b"ncclAllReduce\0"),
            abort: function!(b"ncclCommAbort\0"),
            error_string: function!(b"ncclGetErrorString\0"),
            _library: library,
        })
    }

    /// As NVIDIA writes it, such as `NCCL 2.28.3`.
    pub fn version(&self) -> Result<String> {
        let mut version = 0;
        // SAFETY: writes one int.
        self.check("ncclGetVersion", unsafe { (self.get_version)(&raw mut version) })?;
        Ok(format!("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100))
    }

    fn unique_id(&self) -> Result<NcclId> {
        let mut id = NcclId([0; 128]);
        // SAFETY: writes 128 bytes.
        self.check("ncclGetUniqueId", unsafe { (self.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if matches!(status, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: the text ends in a zero byte and is part of the library.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(ClusterError::Call { call, message: text.to_string_lossy().into_owned() })
    }
}

impl World {
    /// Whether NCCL can sum: every rank has it, and a GPU of its own, which these bytes name; none have ranks without a GPU.
    pub fn have_own_gpus(&self, gpu: Option<[u8; 16]>, nccl: Option<&Nccl>) -> Result<bool> {
        let gpu = gpu.filter(|_| nccl.is_some());
        let mut gpus = self.gather(gpu.as_ref().map_or(&[], |gpu| &gpu[..]))?;
        let is_shared = env::var_os(SHARED_GPUS).is_some_and(|value| value == "1");
        let n = gpus.len();
        gpus.retain(|gpu| !gpu.is_empty());
        gpus.sort();
        let are_there = gpus.len() == n;
        gpus.dedup();
        // All ranks decide the same, whatever their variables are.
        Ok(are_there && self.max(vec![i64::from(gpus.len() < n && !is_shared)])? == [0])
    }

    /// Joins the GPUs of all ranks. That of this rank is the one whose context the calling thread has.
    pub fn join_gpus(&self, nccl: Nccl) -> Result<GpuRanks> {
        let id = if self.rank() == 0 { nccl.unique_id() } else { Ok(NcclId([0; 128])) };
        let (bytes, failed) =
            id.map_or_else(|error| (vec![0; 128], Some(error)), |id| (id.0.to_vec(), None));
        let bytes = self.broadcast(bytes, 0)?;
        let joined = if let Some(error) = failed {
            Err(error)
        } else {
            let id = NcclId(bytes.try_into().unwrap_or([0; 128]));
            GpuRanks::join(nccl, id, [self.size(), self.rank()], self.heartbeat().cloned())
        };
        // Where one cannot, nobody waits for it.
        let n_failed = self.sum(vec![i64::from(joined.is_err())])?;
        match joined {
            Ok(_) if n_failed != [0] => Err(ClusterError::Call {
                call: "ncclCommInitRankConfig",
                message: "another rank could not join".into(),
            }),
            joined => joined,
        }
    }
}

impl GpuRanks {
    fn join(
        nccl: Nccl,
        id: NcclId,
        [size, rank]: [usize; 2],
        heartbeat: Option<Heartbeat>,
    ) -> Result<Self> {
        let mut config = NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: 0xcafe_beef,
            version: 21400,
            blocking: 0,
            _rest: c_int::MIN,
        };
        let mut ranks = ptr::null_mut();
        let [size, rank] = [size, rank].map(|n| c_int::try_from(n).unwrap_or(c_int::MAX));
        // SAFETY: reads the configuration, and writes one handle.
        let status = unsafe { (nccl.init_rank)(&raw mut ranks, size, id, rank, &raw mut config) };
        nccl.check("ncclCommInitRankConfig", status)?;
        let joined = Self { nccl, ranks: Cell::new(ranks), heartbeat };
        joined.settle("ncclCommInitRankConfig")?;
        Ok(joined)
    }

    /// Asks the stream to sum values over all ranks, where they lie.
    ///
    /// # Safety
    /// The values are in the memory of the GPU that the ranks were joined with, and nobody else uses them until the stream has
    /// passed the sums; the stream is of the context that the calling thread has.
    pub unsafe fn sum(&self, all: &[GpuValues], gpu: GpuStream) -> Result<()> {
        // SAFETY: begins a group of calls of this thread.
        self.nccl.check("ncclGroupStart", unsafe { (self.nccl.group_start)() })?;
        for GpuValues { address, n } in all {
            let values = ptr::with_exposed_provenance_mut::<c_void>(*address as usize);
            let (from, to) = (values.cast_const(), values);
            // SAFETY: as many values of that type are there, by the caller.
            let status = unsafe {
                (self.nccl.all_reduce)(from, to, *n, FLOAT32, SUM, self.ranks.get(), gpu.stream)
            };
            self.nccl.check("ncclAllReduce", status)?;
        }
        // SAFETY: ends the group.
        self.nccl.check("ncclGroupEnd", unsafe { (self.nccl.group_end)() })?;
        self.settle("ncclGroupEnd")
    }

    /// Waits until the stream has done it, as `is_done` says, as long as all ranks are there.
    pub fn wait_until(&self, is_done: impl Fn() -> bool) -> Result<()> {
        while !is_done() {
            self.check_ranks()?;
            self.status("ncclAllReduce")?;
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Waits until NCCL has taken a call.
    fn settle(&self, call: &'static str) -> Result<()> {
        while self.status(call)? == IN_PROGRESS {
            self.check_ranks()?;
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn status(&self, call: &'static str) -> Result<c_int> {
        let mut status = SUCCESS;
        // SAFETY: writes one int, of ranks that are joined.
        let asked = unsafe { (self.nccl.async_error)(self.ranks.get(), &raw mut status) };
        self.nccl.check("ncclCommGetAsyncError", asked)?;
        self.nccl.check(call, status).map(|()| status)
    }

    /// Fails if a rank is gone. The GPU then waits for it no longer, so that what was trained can be read.
    fn check_ranks(&self) -> Result<()> {
        let checked = self.heartbeat.as_ref().map_or(Ok(()), Heartbeat::check);
        checked.inspect_err(|_| self.abort())
    }

    fn abort(&self) {
        let ranks = self.ranks.replace(ptr::null_mut());
        if !ranks.is_null() {
            // SAFETY: they are joined, and nobody has them any more.
            unsafe { (self.nccl.abort)(ranks) };
        }
    }
}

impl Drop for GpuRanks {
    fn drop(&mut self) {
        self.abort();
    }
}
