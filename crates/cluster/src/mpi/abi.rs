//! The three binary interfaces: how they are told apart, and the handles of each. Taken: MPICH's numbers from its
//! `mpi.h`, the standard's from MPI 5.0, appendix A.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use libloading::os::unix::{Library, Symbol};

/// A binary interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// Handles are addresses of its own variables.
    OpenMpi,
    /// Handles are numbers of 32 bits.
    Mpich,
    /// Handles are small numbers in pointers.
    Standard,
}

/// The constants that calls are given.
pub struct Handles<H> {
    pub world: H,
    pub byte: H,
    pub f32: H,
    pub f64: H,
    pub i64: H,
    pub u16: H,
    pub sum: H,
    pub max: H,
    pub errors_return: H,
    /// In the place of the values to send.
    pub in_place: *mut c_void,
    /// In the place of what a call would say of a message.
    pub status_ignore: *mut c_void,
    /// The level of threads that is asked for: all calls come from the one that started the library.
    pub thread_funneled: c_int,
}

/// Which one a library has. MPICH 5 knows the question of the standard in both of its libraries, and answers it with a
/// version only in the one that follows it.
pub fn detect(library: &Library) -> Abi {
    type GetVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    // SAFETY: the symbol is only looked up; nothing is read through it.
    if unsafe { library.get::<*mut c_void>(b"ompi_mpi_comm_world\0") }.is_ok() {
        return Abi::OpenMpi;
    }
    let [mut major, mut minor] = [-1; 2];
    // SAFETY: the standard's signature; it may be called before the library is started.
    let code = unsafe {
        library
            .get::<GetVersion>(b"MPI_Abi_get_version\0")
            .map(|ask| ask(&raw mut major, &raw mut minor))
    };
    if matches!(code, Ok(0)) && major >= 1 { Abi::Standard } else { Abi::Mpich }
}

impl Handles<c_int> {
    /// MPICH's, which Intel MPI and MVAPICH share.
    pub fn mpich() -> Self {
        Self {
            world: 0x4400_0000,
            byte: 0x4c00_010d,
            f32: 0x4c00_040a,
            f64: 0x4c00_080b,
            i64: 0x4c00_083a,
            u16: 0x4c00_023c,
            sum: 0x5800_0003,
            max: 0x5800_0001,
            errors_return: 0x5400_0001,
            in_place: std::ptr::without_provenance_mut(usize::MAX),
            status_ignore: std::ptr::without_provenance_mut(1),
            thread_funneled: 1,
        }
    }
}

impl Handles<*mut c_void> {
    /// The standard's.
    pub fn standard() -> Self {
        let handle = std::ptr::without_provenance_mut;
        Self {
            world: handle(0x101),
            byte: handle(0x247),
            f32: handle(0x210),
            f64: handle(0x214),
            i64: handle(0x258),
            u16: handle(0x249),
            sum: handle(0x21),
            max: handle(0x23),
            errors_return: handle(0x142),
            in_place: handle(1),
            status_ignore: handle(0),
            thread_funneled: 1024,
        }
    }

    /// Open MPI's: the addresses of variables; the first that is missing.
    pub fn open_mpi(library: &Library) -> Result<Self, String> {
        let address = |name: &str| -> Result<*mut c_void, String> {
            // SAFETY: a symbol of an object of the library; only its address is taken.
            unsafe { library.get::<*mut c_void>(name.as_bytes()) }
                .map(Symbol::as_raw_ptr)
                .map_err(|_| format!("it has no {name}"))
        };
        Ok(Self {
            world: address("ompi_mpi_comm_world")?,
            byte: address("ompi_mpi_byte")?,
            f32: address("ompi_mpi_float")?,
            f64: address("ompi_mpi_double")?,
            i64: address("ompi_mpi_int64_t")?,
            u16: address("ompi_mpi_uint16_t")?,
            sum: address("ompi_mpi_op_sum")?,
            max: address("ompi_mpi_op_max")?,
            errors_return: address("ompi_mpi_errors_return")?,
            in_place: std::ptr::without_provenance_mut(1),
            status_ignore: std::ptr::null_mut(),
            thread_funneled: 1,
        })
    }
}
