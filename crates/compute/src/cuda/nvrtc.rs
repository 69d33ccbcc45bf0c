//! Compiles kernel sources for the GPU at hand. Needs no GPU: tests compile every kernel wherever
//! the library is.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use super::driver::SmVersion;
use super::library::{functions, names, open};
use crate::{ComputeError, Result};

functions! {
    /// What is used of `libnvrtc`.
    Functions {
        nvrtcVersion(*mut c_int, *mut c_int);
        nvrtcGetNumSupportedArchs(*mut c_int);
        nvrtcGetSupportedArchs(*mut c_int);
        nvrtcCreateProgram(
            *mut *mut c_void, *const c_char, *const c_char, c_int,
            *const *const c_char, *const *const c_char,
        );
        nvrtcDestroyProgram(*mut *mut c_void);
        nvrtcCompileProgram(*mut c_void, c_int, *const *const c_char);
        nvrtcGetProgramLogSize(*mut c_void, *mut usize);
        nvrtcGetProgramLog(*mut c_void, *mut c_char);
        nvrtcGetCUBINSize(*mut c_void, *mut usize);
        nvrtcGetCUBIN(*mut c_void, *mut c_char);
        nvrtcGetPTXSize(*mut c_void, *mut usize);
        nvrtcGetPTX(*mut c_void, *mut c_char);
    }
}

/// The compiler.
pub(super) struct Nvrtc {
    functions: Functions,
    version: (c_int, c_int),
    /// Rising, as 90 for capability 9.0.
    architectures: Vec<c_int>,
}

impl Nvrtc {
    pub fn open() -> Result<Self> {
        let functions = Functions::find(open(&names("nvrtc", &["13", "12"]))?)?;
        let (mut version, mut count) = ((0, 0), 0);
        // SAFETY: writes two ints.
        let status = unsafe { (functions.nvrtcVersion)(&raw mut version.0, &raw mut version.1) };
        check("nvrtcVersion", status)?;
        // SAFETY: writes one int.
        let status = unsafe { (functions.nvrtcGetNumSupportedArchs)(&raw mut count) };
        check("nvrtcGetNumSupportedArchs", status)?;
        let mut architectures = vec![0; count.cast_unsigned() as usize];
        // SAFETY: writes as many ints as it just said.
        let status = unsafe { (functions.nvrtcGetSupportedArchs)(architectures.as_mut_ptr()) };
        check("nvrtcGetSupportedArchs", status)?;
        Ok(Self { functions, version, architectures })
    }

    /// What the result depends on besides source and options.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// What to compile for: the GPU itself, or where it is newer than the compiler the newest that
    /// is known, as PTX that the driver compiles.
    pub fn target(&self, SmVersion { major, minor }: SmVersion) -> String {
        let gpu = (10 * major + minor).cast_signed();
        if self.architectures.contains(&gpu) {
            return format!("sm_{gpu}");
        }
        let below = self.architectures.iter().filter(|known| **known < gpu).max();
        format!("compute_{}", below.unwrap_or(&gpu))
    }

    /// Compiles `text`; gives a binary, or text ending in a zero byte for a `compute_` target.
    pub fn compile(&self, name: &str, text: &str, options: &[String]) -> Result<Vec<u8>> {
        let c = |text: &str| CString::new(text).expect("kernels' text has no zero byte");
        let (text, file) = (c(text), c(name));
        let options: Vec<CString> = options.iter().map(|option| c(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = null_mut();
        // SAFETY: both texts end in a zero byte and are copied; no headers are given.
        let status = unsafe {
            (self.functions.nvrtcCreateProgram)(
                &raw mut program,
                text.as_ptr(),
                file.as_ptr(),
                0,
                null(),
                null(),
            )
        };
        check("nvrtcCreateProgram", status)?;
        let count = (pointers.len() as u32).cast_signed();
        // SAFETY: the program was just made, and the options live until this returns.
        let status =
            unsafe { (self.functions.nvrtcCompileProgram)(program, count, pointers.as_ptr()) };
        let is_binary = options.iter().any(|option| option.to_string_lossy().contains("=sm_"));
        let made = if status == 0 {
            self.result(program, is_binary)
        } else {
            let message = self.log(program);
            Err(ComputeError::CudaKernel { name: name.to_owned(), message })
        };
        // SAFETY: the program is no longer used.
        unsafe { (self.functions.nvrtcDestroyProgram)(&raw mut program) };
        made
    }

    fn result(&self, program: *mut c_void, is_binary: bool) -> Result<Vec<u8>> {
        let Functions { nvrtcGetCUBIN, nvrtcGetCUBINSize, nvrtcGetPTX, nvrtcGetPTXSize, .. } =
            self.functions;
        let (size, get) = if is_binary {
            (nvrtcGetCUBINSize, nvrtcGetCUBIN)
        } else {
            (nvrtcGetPTXSize, nvrtcGetPTX)
        };
        let mut bytes = 0;
        // SAFETY: writes one size, for a program that was compiled.
        check("nvrtcGetCUBINSize", unsafe { size(program, &raw mut bytes) })?;
        let mut made = vec![0u8; bytes];
        // SAFETY: writes as many bytes as it just said.
        check("nvrtcGetCUBIN", unsafe { get(program, made.as_mut_ptr().cast()) })?;
        Ok(made)
    }

    fn log(&self, program: *mut c_void) -> String {
        let mut bytes = 0;
        // SAFETY: writes one size.
        unsafe { (self.functions.nvrtcGetProgramLogSize)(program, &raw mut bytes) };
        let mut log = vec![0u8; bytes];
        // SAFETY: writes as many bytes as it just said.
        unsafe { (self.functions.nvrtcGetProgramLog)(program, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
    }
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(ComputeError::Cuda { call, code, name: "an error of NVRTC".into() })
}
