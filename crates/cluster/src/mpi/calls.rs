//! The calls of an MPI library, safe to use. All have at most six arguments.

#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::ffi::{c_char, c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::path::Path;
use std::ptr;
use std::slice;
use std::thread;
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::abi::Handles;
use super::{Number, NumberKind};
use crate::bf16;
use crate::error::{ClusterError, Result};

/// Values of one call. Chosen: pieces of 4 MB are the fastest with Open MPI and among the fastest with MPICH.
const PIECE: usize = 1 << 20;

/// How often a rank that is early looks whether all others are there, after it has looked some times in a row. Chosen: libraries
/// wait by asking all the time, which takes a core from a rank that still computes; that costs a step less than a millisecond.
const LOOK: Duration = Duration::from_micros(100);
const QUICK_LOOKS: usize = 64;

/// Longest text that a library gives. Taken: MPI's own limits are 256 to 8192.
const TEXT_BYTES: usize = 1 << 14;

/// What a library calls to add values of a type of ours to others.
type AddFn = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut c_void);

/// The functions of a library whose handles are `H`.
pub struct Calls<H> {
    handles: Handles<H>,
    init_thread:
        unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
    comm_rank: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    comm_size: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    set_errhandler: unsafe extern "C" fn(H, H) -> c_int,
    allreduce: unsafe extern "C" fn(*const c_void, *mut c_void, c_int, H, H, H) -> c_int,
    bcast: unsafe extern "C" fn(*mut c_void, c_int, H, c_int, H) -> c_int,
    ibarrier: unsafe extern "C" fn(H, *mut H) -> c_int,
    test: unsafe extern "C" fn(*mut H, *mut c_int, *mut c_void) -> c_int,
    op_create: unsafe extern "C" fn(AddFn, c_int, *mut H) -> c_int,
    /// The sum of bf16, once it is needed.
    bf16_sum: OnceCell<H>,
    library_version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    /// Holds the functions. Never unloaded: the library's own threads and exit handlers may still run.
    _library: ManuallyDrop<Library>,
}

/// Loads a library for everything that it loads itself: some have plugins that look for its symbols.
pub fn load(path: &Path) -> Result<Library> {
    // SAFETY: a library's initialisers run; it is the one that the user's launcher belongs to.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| ClusterError::Library { path: path.into(), problem: error.to_string() })
}

impl Calls<*mut c_void> {
    pub fn open_mpi(library: Library, path: &Path) -> Result<Self> {
        let handles = Handles::open_mpi(&library);
        let handles =
            handles.map_err(|problem| ClusterError::Library { path: path.into(), problem })?;
        Self::new(library, handles, path)
    }

    pub fn standard(library: Library, path: &Path) -> Result<Self> {
        Self::new(library, Handles::standard(), path)
    }
}

impl Calls<c_int> {
    pub fn mpich(library: Library, path: &Path) -> Result<Self> {
        Self::new(library, Handles::mpich(), path)
    }
}

impl<H: Copy> Calls<H> {
    fn new(library: Library, handles: Handles<H>, path: &Path) -> Result<Self> {
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: MPI's C interface has this function with these arguments.
                *unsafe { library.get($name) }.map_err(|error| ClusterError::Library {
                    path: path.into(),
                    problem: error.to_string(),
                })?
            };
        }
        Ok(Self {
            init_thread: function!(b"MPI_Init_thread\0"),
            finalize: function!(b"MPI_Finalize\0"),
            comm_rank: function!(b"MPI_Comm_rank\0"),
            comm_size: function!(b"MPI_Comm_size\0"),
            set_errhandler: function!(b"MPI_Comm_set_errhandler\0"),
            allreduce: function!(b"MPI_Allreduce\0"),
            bcast: function!(b"MPI_Bcast\0"),
            ibarrier: function!(b"MPI_Ibarrier\0"),
            test: function!(b"MPI_Test\0"),
            op_create: function!(b"MPI_Op_create\0"),
            bf16_sum: OnceCell::new(),
            library_version: function!(b"MPI_Get_library_version\0"),
            error_string: function!(b"MPI_Error_string\0"),
            handles,
            _library: ManuallyDrop::new(library),
        })
    }

    pub fn version(&self) -> Result<String> {
        let text = Self::text(|bytes, length| {
            // SAFETY: the buffer is longer than any text; the call is allowed before the start.
            unsafe { (self.library_version)(bytes, length) }
        });
        self.check("MPI_Get_library_version", text.0)?;
        Ok(text.1.split(['\n', ',']).next().unwrap_or_default().trim().to_owned())
    }

    pub fn init(&self) -> Result<()> {
        let Handles { world, errors_return, thread_funneled, .. } = self.handles;
        let mut level = 0;
        // SAFETY: the standard allows no arguments; the level is written to a place of ours.
        let code = unsafe {
            (self.init_thread)(ptr::null_mut(), ptr::null_mut(), thread_funneled, &raw mut level)
        };
        self.check("MPI_Init_thread", code)?;
        // SAFETY: both are handles of this library, which is started.
        self.check("MPI_Comm_set_errhandler", unsafe {
            (self.set_errhandler)(world, errors_return)
        })
    }

    pub fn rank(&self) -> Result<usize> {
        self.number("MPI_Comm_rank", self.comm_rank)
    }

    pub fn size(&self) -> Result<usize> {
        self.number("MPI_Comm_size", self.comm_size)
    }

    /// What a call says of the world.
    fn number(
        &self,
        call: &'static str,
        ask: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    ) -> Result<usize> {
        let mut number = 0;
        // SAFETY: the library is started; the number is written to a place of ours.
        self.check(call, unsafe { ask(self.handles.world, &raw mut number) })?;
        Ok(number as usize)
    }

    pub fn sum<T: Number>(&self, values: &mut [T]) -> Result<()> {
        self.all_reduce(values, self.handles.sum)
    }

    pub fn max<T: Number>(&self, values: &mut [T]) -> Result<()> {
        self.all_reduce(values, self.handles.max)
    }

    /// Sums of bf16, which no library knows.
    pub fn sum_bf16(&self, values: &mut [u16]) -> Result<()> {
        self.barrier()?;
        let sum = match self.bf16_sum.get() {
            Some(sum) => *sum,
            None => self.create_bf16_sum()?,
        };
        values
            .chunks_mut(PIECE)
            .try_for_each(|piece| self.reduce_piece(piece, self.handles.u16, sum))
    }

    fn all_reduce<T: Number>(&self, values: &mut [T], with: H) -> Result<()> {
        self.barrier()?;
        let Handles { f32, f64, i64, .. } = self.handles;
        let of = match T::KIND {
            NumberKind::F32 => f32,
            NumberKind::F64 => f64,
            NumberKind::I64 => i64,
        };
        values.chunks_mut(PIECE).try_for_each(|piece| self.reduce_piece(piece, of, with))
    }

    /// `of` is the type of the values.
    fn reduce_piece<T>(&self, piece: &mut [T], of: H, with: H) -> Result<()> {
        let Handles { world, in_place, .. } = self.handles;
        let (start, n) = (piece.as_mut_ptr().cast(), count(piece.len()));
        // SAFETY: the slice has so many values of that type, and nobody else has it.
        let code = unsafe { (self.allreduce)(in_place, start, n, of, with, world) };
        self.check("MPI_Allreduce", code)
    }

    fn create_bf16_sum(&self) -> Result<H> {
        let mut op = MaybeUninit::uninit();
        // SAFETY: the function lives as long as the program; the handle is written to a place of ours.
        let code = unsafe { (self.op_create)(add_bf16, 1, op.as_mut_ptr()) };
        self.check("MPI_Op_create", code)?;
        // SAFETY: the call has succeeded, and has written it.
        Ok(*self.bf16_sum.get_or_init(|| unsafe { op.assume_init() }))
    }

    pub fn broadcast(&self, bytes: &mut [u8], from: usize) -> Result<()> {
        self.barrier()?;
        for piece in bytes.chunks_mut(4 * PIECE) {
            let (start, n) = (piece.as_mut_ptr().cast(), count(piece.len()));
            let Handles { world, byte, .. } = self.handles;
            // SAFETY: the slice has so many bytes, and nobody else has it.
            let code = unsafe { (self.bcast)(start, n, byte, count(from), world) };
            self.check("MPI_Bcast", code)?;
        }
        Ok(())
    }

    /// Waits for all ranks, and leaves the core to others meanwhile.
    pub fn barrier(&self) -> Result<()> {
        let (mut request, mut is_done) = (MaybeUninit::uninit(), 0);
        // SAFETY: the library is started; the handle is written to a place of ours.
        let code = unsafe { (self.ibarrier)(self.handles.world, request.as_mut_ptr()) };
        self.check("MPI_Ibarrier", code)?;
        for n in 0_usize.. {
            // SAFETY: the handle was written above, and lives until it is done; one int is written.
            let code = unsafe {
                (self.test)(request.as_mut_ptr(), &raw mut is_done, self.handles.status_ignore)
            };
            self.check("MPI_Test", code)?;
            if is_done != 0 {
                break;
            }
            if n > QUICK_LOOKS {
                thread::sleep(LOOK);
            }
        }
        Ok(())
    }

    pub fn finalize(&self) -> Result<()> {
        // SAFETY: called once, by the one who started it.
        self.check("MPI_Finalize", unsafe { (self.finalize)() })
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let (told, text) = Self::text(|bytes, length| {
            // SAFETY: the buffer is longer than any text.
            unsafe { (self.error_string)(code, bytes, length) }
        });
        let message = if told == 0 { text } else { format!("code {code}") };
        Err(ClusterError::Call { call, message })
    }

    /// What a call writes into a buffer, and its code.
    fn text(call: impl Fn(*mut c_char, *mut c_int) -> c_int) -> (c_int, String) {
        let (mut bytes, mut length) = (vec![0_u8; TEXT_BYTES], 0);
        let code = call(bytes.as_mut_ptr().cast(), &raw mut length);
        let n = bytes.iter().position(|byte| *byte == 0).unwrap_or(TEXT_BYTES);
        (code, String::from_utf8_lossy(&bytes[..n]).into_owned())
    }
}

/// Adds values of bf16 to others, as MPI calls it.
unsafe extern "C" fn add_bf16(more: *mut c_void, sums: *mut c_void, n: *mut c_int, _: *mut c_void) {
    // SAFETY: MPI gives so many values of 16 bits in both, which do not overlap.
    let (more, sums) = unsafe {
        let n = usize::try_from(*n).unwrap_or(0);
        (
            slice::from_raw_parts(more.cast::<u16>(), n),
            slice::from_raw_parts_mut(sums.cast::<u16>(), n),
        )
    };
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum = bf16::from_f32(bf16::to_f32(*sum) + bf16::to_f32(*more));
    }
}

/// Counts and ranks are C's integers; pieces are smaller than the largest.
fn count(n: usize) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}
