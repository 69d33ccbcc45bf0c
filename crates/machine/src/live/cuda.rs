//! The CUDA driver and libraries, loaded at run time: versions, and the GPU facts that the
//! management library does not have (integrated or discrete, memory of unified parts).
//!
//! No context is made: that would cost memory and most of a second.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};

use libloading::{Library, Symbol};

use crate::key_values::write_key_value;
use crate::reading::Unknown;
use crate::source::ProbeAnswer;

const DRIVER: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

// Taken from `CUdevice_attribute` in cuda.h, unchanged since CUDA 8 but for the last (CUDA 11.3).
const MULTIPROCESSORS: c_int = 16;
const INTEGRATED: c_int = 18;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
const PAGEABLE_MEMORY_ACCESS: c_int = 88;
const GPU_DIRECT_RDMA: c_int = 116;

type Init = unsafe extern "C" fn(flags: u32) -> c_int;
type GetInt = unsafe extern "C" fn(out: *mut c_int) -> c_int;
type DeviceGet = unsafe extern "C" fn(device: *mut c_int, ordinal: c_int) -> c_int;
type DeviceText = unsafe extern "C" fn(text: *mut c_char, length: c_int, device: c_int) -> c_int;
type DeviceMemory = unsafe extern "C" fn(bytes: *mut usize, device: c_int) -> c_int;
type DeviceAttribute =
    unsafe extern "C" fn(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
type TwoInts = unsafe extern "C" fn(major: *mut c_int, minor: *mut c_int) -> c_int;
type GetSize = unsafe extern "C" fn() -> usize;

/// The initialised CUDA driver.
pub struct CudaProbe(Library);

impl CudaProbe {
    /// Loads and initialises the driver, or says why it cannot.
    pub fn load() -> Result<Self, Unknown> {
        let driver = Self(open(&[DRIVER]).ok_or_else(|| Unknown(format!("{DRIVER} not found")))?);
        let init = *driver.symbol::<Init>(b"cuInit")?;
        // SAFETY: `cuInit` takes one flag word, which must be 0, and may be called at any time; the
        // library is still loaded.
        checked(unsafe { init(0) })?;
        Ok(driver)
    }

    /// Version of CUDA that the driver speaks, and the number of GPUs it shows.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        write_key_value(&mut text, "cuda", self.int(b"cuDriverGetVersion").map(version_text));
        write_key_value(&mut text, "cards", self.int(b"cuDeviceGetCount"));
        text
    }

    /// One GPU's facts.
    pub fn gpu(&self, index: u32) -> ProbeAnswer {
        let device = self.device(index)?;
        let attribute = |number| self.attribute(device, number);
        let mut text = String::new();
        write_key_value(&mut text, "name", self.text(b"cuDeviceGetName", device));
        write_key_value(&mut text, "pci_bus_id", self.text(b"cuDeviceGetPCIBusId", device));
        let major = attribute(CAPABILITY_MAJOR);
        let capability =
            major.and_then(|major| Ok(format!("{major}.{}", attribute(CAPABILITY_MINOR)?)));
        write_key_value(&mut text, "compute_capability", capability);
        let integrated = if is_unified_forced() { Ok(1) } else { attribute(INTEGRATED) };
        write_key_value(&mut text, "integrated", integrated);
        write_key_value(&mut text, "memory_total_bytes", self.total_memory(device));
        write_key_value(&mut text, "multiprocessors", attribute(MULTIPROCESSORS));
        write_key_value(&mut text, "pageable_memory_access", attribute(PAGEABLE_MEMORY_ACCESS));
        write_key_value(&mut text, "gpu_direct_rdma", attribute(GPU_DIRECT_RDMA));
        Ok(text)
    }

    fn symbol<T>(&self, name: &[u8]) -> Result<Symbol<'_, T>, Unknown> {
        // SAFETY: each caller names a documented function of this library and gives its type from
        // the list above, copied from cuda.h.
        unsafe { self.0.get(name) }
            .map_err(|_| Unknown(format!("{DRIVER} has no {}", String::from_utf8_lossy(name))))
    }

    fn int(&self, name: &[u8]) -> Result<c_int, Unknown> {
        let function: Symbol<'_, GetInt> = self.symbol(name)?;
        let mut value = 0;
        // SAFETY: the two functions of this shape write one int through a valid pointer.
        checked(unsafe { function(&raw mut value) })?;
        Ok(value)
    }

    fn device(&self, index: u32) -> Result<c_int, Unknown> {
        let get: Symbol<'_, DeviceGet> = self.symbol(b"cuDeviceGet")?;
        let mut device = 0;
        // SAFETY: writes one handle through a valid pointer; a wrong index is an error code.
        checked(unsafe { get(&raw mut device, index.cast_signed()) })?;
        Ok(device)
    }

    fn attribute(&self, device: c_int, number: c_int) -> Result<c_int, Unknown> {
        let get: Symbol<'_, DeviceAttribute> = self.symbol(b"cuDeviceGetAttribute")?;
        let mut value = 0;
        // SAFETY: writes one int through a valid pointer; an unknown attribute is an error code.
        checked(unsafe { get(&raw mut value, number, device) })?;
        Ok(value)
    }

    fn total_memory(&self, device: c_int) -> Result<usize, Unknown> {
        let get: Symbol<'_, DeviceMemory> = self.symbol(b"cuDeviceTotalMem_v2")?;
        let mut bytes = 0;
        // SAFETY: writes one size through a valid pointer.
        checked(unsafe { get(&raw mut bytes, device) })?;
        Ok(bytes)
    }

    fn text(&self, name: &[u8], device: c_int) -> Result<String, Unknown> {
        let get: Symbol<'_, DeviceText> = self.symbol(name)?;
        let mut buffer: [c_char; 256] = [0; 256];
        // SAFETY: both functions of this shape write at most the given length, ending in NUL; the
        // length is one short of the buffer, so that a NUL follows in any case.
        checked(unsafe { get(buffer.as_mut_ptr(), 255, device) })?;
        // SAFETY: the buffer is NUL-terminated as said above and lives until the copy is made.
        let text = unsafe { CStr::from_ptr(buffer.as_ptr()) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// 13000 is CUDA 13.0, 12080 is CUDA 12.8.
pub fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The CUDA libraries the engine uses, newest first, each asked for its own version.
pub fn libraries() -> String {
    let mut text = String::new();
    write_key_value(&mut text, "nvrtc", nvrtc());
    write_key_value(&mut text, "cublaslt", cublas_lt());
    write_key_value(&mut text, "cudnn", cudnn());
    write_key_value(&mut text, "nccl", nccl());
    text
}

fn nvrtc() -> Result<String, Unknown> {
    let library = open_any("libnvrtc.so", &["13", "12"])?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: `nvrtcVersion` has this signature since CUDA 7 and writes two ints.
    let code = unsafe {
        let version: Symbol<'_, TwoInts> = library.get(b"nvrtcVersion").map_err(no_version)?;
        version(&raw mut major, &raw mut minor)
    };
    checked(code)?;
    Ok(format!("{major}.{minor}"))
}

fn cublas_lt() -> Result<String, Unknown> {
    let version = size(&open_any("libcublasLt.so", &["13", "12"])?, b"cublasLtGetVersion")?;
    // 130100 is 13.1.0, 120803 is 12.8.3.
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

fn nccl() -> Result<String, Unknown> {
    let library = open_any("libnccl.so", &["2"])?;
    let mut version = 0;
    // SAFETY: `ncclGetVersion` has this signature since NCCL 1 and writes one int.
    let code = unsafe {
        let ask: Symbol<'_, GetInt> = library.get(b"ncclGetVersion").map_err(no_version)?;
        ask(&raw mut version)
    };
    checked(code)?;
    // 22803 is 2.28.3.
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

fn cudnn() -> Result<String, Unknown> {
    let version = size(&open_any("libcudnn.so", &["9"])?, b"cudnnGetVersion")?;
    // From cuDNN 9 on, 91300 is 9.13.0.
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

fn size(library: &Library, name: &[u8]) -> Result<usize, Unknown> {
    // SAFETY: both version functions take nothing and return a size_t.
    unsafe {
        let version: Symbol<'_, GetSize> = library.get(name).map_err(no_version)?;
        Ok(version())
    }
}

fn no_version(_: libloading::Error) -> Unknown {
    Unknown::because("the library has no version function")
}

/// Tries the loader's own path, then the toolkit's usual place, which containers often leave out
/// of the loader's configuration.
fn open_any(stem: &str, versions: &[&str]) -> Result<Library, Unknown> {
    let names: Vec<String> = versions
        .iter()
        .map(|version| format!("{stem}.{version}"))
        .flat_map(|name| [format!("/usr/local/cuda/lib64/{name}"), name].into_iter().rev())
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    open(&names).ok_or_else(|| Unknown(format!("{stem}.{} not found", versions.join(" or "))))
}

fn open(names: &[&str]) -> Option<Library> {
    // SAFETY: loading runs the library's initialisers. These names belong to NVIDIA's libraries,
    // whose initialisers are made to run inside any process.
    names.iter().find_map(|name| unsafe { Library::new(name) }.ok())
}

/// Whether every GPU is to count as one that shares main memory. For tests on a GPU that does not: it changes which
/// memory is watched and given back, never a result. With `straight` weights are also read straight into memory that it
/// shares, whatever was measured; that is up to `compute`.
fn is_unified_forced() -> bool {
    let value = std::env::var_os("HEARTH_FORCE_UNIFIED");
    value.is_some_and(|value| value == "1" || value == "straight")
}

/// Taken from `CUresult` in cuda.h: the codes a user meets before any context exists.
fn checked(code: c_int) -> Result<(), Unknown> {
    let name = match code {
        0 => return Ok(()),
        3 => "not initialised",
        34 => "the library is the toolkit's stub, not a driver",
        100 => "no CUDA GPU is visible",
        101 => "no such GPU",
        802 => "the system is not yet initialised (fabric manager)",
        803 => "driver and library versions differ",
        804 => "forward compatibility is not supported on this GPU",
        999 => "unknown driver error",
        _ => return Err(Unknown(format!("CUDA error {code}"))),
    };
    Err(Unknown(format!("{name} (CUDA error {code})")))
}
