//! The CUDA driver: a GPU's context, its two streams, modules, launches and copies. Every function
//! here stands for one call, and turns its status into an error with the driver's own name for it.
//!
//! Constants and signatures are taken from `cuda.h` of CUDA 13; none of them changed since 11.2.
#![allow(unsafe_code)]

mod mapping;
mod pinned;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::{null, null_mut};

pub(super) use mapping::PieceLocation;
use mapping::{AccessDescription, AllocationProperties};
pub(super) use pinned::CudaEvent;
pub(crate) use pinned::PinnedMemory;

use super::LaunchConfig;
use super::library::{functions, open};
use crate::{ComputeError, Result};

functions! {
    /// What is used of `libcuda`.
    Functions {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuGetErrorName(c_int, *mut *const c_char);
        cuDeviceGet(*mut c_int, c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGetName(*mut c_char, c_int, c_int);
        cuDeviceGetAttribute(*mut c_int, c_int, c_int);
        cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
        cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int);
        cuDevicePrimaryCtxRelease_v2(c_int);
        cuCtxSetCurrent(*mut c_void);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuStreamCreate(*mut *mut c_void, c_uint);
        cuStreamDestroy_v2(*mut c_void);
        cuStreamSynchronize(*mut c_void);
        cuStreamWaitEvent(*mut c_void, *mut c_void, c_uint);
        cuEventCreate(*mut *mut c_void, c_uint);
        cuEventRecord(*mut c_void, *mut c_void);
        cuEventQuery(*mut c_void);
        cuEventSynchronize(*mut c_void);
        cuEventElapsedTime(*mut f32, *mut c_void, *mut c_void);
        cuEventDestroy_v2(*mut c_void);
        cuMemAddressReserve(*mut u64, usize, usize, u64, u64);
        cuMemAddressFree(u64, usize);
        cuMemGetAllocationGranularity(*mut usize, *const AllocationProperties, c_uint);
        cuMemCreate(*mut u64, usize, *const AllocationProperties, u64);
        cuMemRelease(u64);
        cuMemMap(u64, usize, usize, u64, u64);
        cuMemUnmap(u64, usize);
        cuMemSetAccess(u64, usize, *const AccessDescription, usize);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, *mut c_void);
        cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, *mut c_void);
        cuMemcpyDtoDAsync_v2(u64, u64, usize, *mut c_void);
        cuMemsetD8Async(u64, u8, usize, *mut c_void);
        cuModuleLoadData(*mut *mut c_void, *const c_void);
        cuModuleGetFunction(*mut *mut c_void, *mut c_void, *const c_char);
        cuFuncGetAttribute(*mut c_int, c_int, *mut c_void);
        cuFuncSetAttribute(*mut c_void, c_int, c_int);
        cuLaunchKernel(
            *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
            *mut c_void, *mut *mut c_void, *mut *mut c_void,
        );
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: c_int = 100;

// Taken from `CUdevice_attribute`, `CUfunction_attribute` and `CUstream_flags`.
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
const MAX_SHARED_BYTES: c_int = 97;
const FUNCTION_OWN_SHARED_BYTES: c_int = 1;
const FUNCTION_MAX_SHARED_BYTES: c_int = 8;
const STREAM_NON_BLOCKING: c_uint = 1;

/// The oldest driver: that of CUDA 12.0, which the newest libraries we use still run on.
const OLDEST_DRIVER: c_int = 12_000;
/// The oldest capability: the first with bf16 in its tensor cores and copies past the registers.
const OLDEST_CAPABILITY: SmVersion = SmVersion { major: 8, minor: 0 };

/// A compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SmVersion {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for SmVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Properties of a GPU.
#[derive(Clone, Debug)]
pub(super) struct DeviceProps {
    pub capability: SmVersion,
    /// Bytes of shared memory that a block may ask for.
    pub shared_bytes: u32,
}

/// A GPU's primary context and its streams.
pub(super) struct CudaContext {
    functions: Functions,
    device: c_int,
    context: *mut c_void,
    stream: *mut c_void,
    /// Where copies go that are to be made while the other stream computes.
    copy_stream: *mut c_void,
    pub props: DeviceProps,
}

// SAFETY: handles of the driver may be used from any thread, one after the other or at once; a thread
// makes the context its own before each call (`bind`).
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

/// One of the two streams.
#[derive(Clone, Copy)]
pub(super) enum StreamKind {
    /// All that ops ask for, in the order in which they do.
    Compute,
    /// Copies from the host beside it.
    Copy,
}

/// A function of a loaded module.
#[derive(Clone, Copy)]
pub(super) struct CudaFunction(*mut c_void);
// SAFETY: a handle, valid on all threads while its module is loaded.
unsafe impl Send for CudaFunction {}
// SAFETY: as above.
unsafe impl Sync for CudaFunction {}

/// Kernels of one source, loaded.
pub(super) struct CudaModule(*mut c_void);
// SAFETY: a handle, valid on all threads.
unsafe impl Send for CudaModule {}
// SAFETY: as above.
unsafe impl Sync for CudaModule {}

impl CudaContext {
    /// Takes a GPU's primary context, or says why there is none.
    pub fn open(index: usize) -> Result<Self> {
        let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
        let functions = Functions::find(open(&[name.to_owned()])?)?;
        // SAFETY: `cuInit` takes one flag word, which must be 0.
        match unsafe { (functions.cuInit)(0) } {
            NO_DEVICE => return Err(ComputeError::CudaIndex { index, count: 0 }),
            status => functions.check("cuInit", status)?,
        }
        let device = functions.device(index)?;
        let props = functions.device_props(device)?;
        let mut context = null_mut();
        // SAFETY: writes one handle through a valid pointer.
        let status = unsafe { (functions.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        functions.check("cuDevicePrimaryCtxRetain", status)?;
        let (stream, copies) = (null_mut(), null_mut());
        let mut driver = Self { functions, device, context, stream, copy_stream: copies, props };
        driver.bind()?;
        (driver.stream, driver.copy_stream) = (driver.new_stream()?, driver.new_stream()?);
        Ok(driver)
    }

    fn new_stream(&self) -> Result<*mut c_void> {
        let mut stream = null_mut();
        // SAFETY: writes one handle through a valid pointer, in the context that is bound.
        let status =
            unsafe { (self.functions.cuStreamCreate)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check("cuStreamCreate", status).map(|()| stream)
    }

    /// The GPU's own name among all GPUs.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes, about a GPU that is there.
        let status = unsafe { (self.functions.cuDeviceGetUuid_v2)(&raw mut uuid, self.device) };
        self.check("cuDeviceGetUuid", status).map(|()| uuid)
    }

    /// The stream, for other libraries.
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }

    fn stream_of(&self, lane: StreamKind) -> *mut c_void {
        match lane {
            StreamKind::Compute => self.stream,
            StreamKind::Copy => self.copy_stream,
        }
    }

    /// Makes the context the calling thread's own.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained until `self` is dropped.
        self.check("cuCtxSetCurrent", unsafe { (self.functions.cuCtxSetCurrent)(self.context) })
    }

    /// Bytes of the GPU that nobody uses, and bytes it has.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes through valid pointers.
        let status = unsafe { (self.functions.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", status).map(|()| (free, total))
    }

    /// Waits for all that was asked of the stream.
    pub fn synchronise(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        let status = unsafe { (self.functions.cuStreamSynchronize)(self.stream) };
        self.check("cuStreamSynchronize", status)
    }

    /// Waits for all copies beside it.
    pub fn synchronise_copies(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        let status = unsafe { (self.functions.cuStreamSynchronize)(self.copy_stream) };
        self.check("cuStreamSynchronize", status)
    }

    /// Milliseconds that the GPU takes for what `work` asks of the stream.
    pub fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        let (before, after) = (CudaEvent::new(self)?, CudaEvent::new(self)?);
        before.record(StreamKind::Compute)?;
        work()?;
        after.record(StreamKind::Compute)?;
        self.synchronise()?;
        before.elapsed_ms(&after)
    }

    /// Loads compiled kernels; text must end in a zero byte.
    pub fn load(&self, image: &[u8]) -> Result<CudaModule> {
        self.bind()?;
        let mut module = null_mut();
        // SAFETY: the image is a whole binary, or text that ends in a zero byte, both as NVRTC made
        // them; it is copied.
        let status =
            unsafe { (self.functions.cuModuleLoadData)(&raw mut module, image.as_ptr().cast()) };
        self.check("cuModuleLoadData", status).map(|()| CudaModule(module))
    }

    /// A kernel by name, allowed all the shared memory that it leaves of what a block may have.
    pub fn function(&self, module: &CudaModule, name: &str) -> Result<CudaFunction> {
        self.bind()?;
        let text = CString::new(name).expect("kernels' names have no zero byte");
        let mut function = null_mut();
        // SAFETY: the module is loaded and the name ends in a zero byte; writes one handle.
        let status = unsafe {
            (self.functions.cuModuleGetFunction)(&raw mut function, module.0, text.as_ptr())
        };
        self.check("cuModuleGetFunction", status)?;
        let mut own = 0;
        // SAFETY: writes one int, about a function that was just found.
        let status = unsafe {
            (self.functions.cuFuncGetAttribute)(&raw mut own, FUNCTION_OWN_SHARED_BYTES, function)
        };
        self.check("cuFuncGetAttribute", status)?;
        let rest = self.props.shared_bytes.cast_signed() - own;
        // SAFETY: sets a number on that function.
        let status = unsafe {
            (self.functions.cuFuncSetAttribute)(function, FUNCTION_MAX_SHARED_BYTES, rest)
        };
        self.check("cuFuncSetAttribute", status).map(|()| CudaFunction(function))
    }

    /// Starts a kernel on the stream.
    pub fn launch(
        &self,
        function: CudaFunction,
        LaunchConfig { blocks: [x, y, z], threads, shared_bytes }: LaunchConfig,
        arguments: &mut [u64],
    ) -> Result<()> {
        self.bind()?;
        let mut pointers: Vec<*mut c_void> =
            arguments.iter_mut().map(|argument| (&raw mut *argument).cast()).collect();
        // SAFETY: the driver copies as many bytes of each argument as the kernel declares: at most
        // eight, or for a table, which is a kernel's last, all that are left. That they are what the
        // kernel declares is up to the function beside each kernel that calls this, and shown by the
        // op's tests on a GPU.
        let status = unsafe {
            (self.functions.cuLaunchKernel)(
                function.0,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared_bytes,
                self.stream,
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        self.check("cuLaunchKernel", status)
    }

    /// Copies to the GPU. Returns when the numbers may change again.
    pub fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: reads `from`, which the driver has copied aside when this returns; the range on the
        // GPU is a tensor's own, by the callers.
        let status = unsafe {
            (self.functions.cuMemcpyHtoDAsync_v2)(to, from.as_ptr().cast(), from.len(), self.stream)
        };
        self.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies from the GPU, and waits for it.
    pub fn read(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: writes to `to`, which is borrowed until the stream was waited for below.
        let status = unsafe {
            (self.functions.cuMemcpyDtoHAsync_v2)(
                to.as_mut_ptr().cast(),
                from,
                to.len(),
                self.stream,
            )
        };
        self.check("cuMemcpyDtoHAsync", status).and(self.synchronise())
    }

    /// Copies from one place on the GPU to another.
    pub fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: both ranges are tensors' own, by the callers.
        let status = unsafe { (self.functions.cuMemcpyDtoDAsync_v2)(to, from, bytes, self.stream) };
        self.check("cuMemcpyDtoDAsync", status)
    }

    /// Sets bytes.
    pub fn fill(&self, to: u64, byte: u8, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the range is a tensor's own, by the callers.
        let status = unsafe { (self.functions.cuMemsetD8Async)(to, byte, bytes, self.stream) };
        self.check("cuMemsetD8Async", status)
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        self.functions.check(call, status)
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            // SAFETY: all are this value's own, and nobody has them any more. What fails here has
            // failed before, and the system takes everything back with the process.
            unsafe {
                (self.functions.cuStreamDestroy_v2)(self.stream);
                (self.functions.cuStreamDestroy_v2)(self.copy_stream);
                (self.functions.cuDevicePrimaryCtxRelease_v2)(self.device);
            }
        }
    }
}

impl Functions {
    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut name = null();
        // SAFETY: writes a pointer to a text that is part of the driver, or null.
        unsafe { (self.cuGetErrorName)(status, &raw mut name) };
        let name = if name.is_null() {
            "an error without a name".into()
        } else {
            // SAFETY: the text ends in a zero byte and is never freed.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        Err(ComputeError::Cuda { call, code: status, name })
    }

    fn device(&self, index: usize) -> Result<c_int> {
        let (mut version, mut count, mut device) = (0, 0, 0);
        // SAFETY: writes one int.
        self.check("cuDriverGetVersion", unsafe { (self.cuDriverGetVersion)(&raw mut version) })?;
        if version < OLDEST_DRIVER {
            return Err(ComputeError::CudaDriver { found: version, oldest: OLDEST_DRIVER });
        }
        // SAFETY: writes one int.
        self.check("cuDeviceGetCount", unsafe { (self.cuDeviceGetCount)(&raw mut count) })?;
        let count = count.cast_unsigned() as usize;
        if index >= count {
            return Err(ComputeError::CudaIndex { index, count });
        }
        // SAFETY: writes one int, for a GPU that is there.
        let status = unsafe { (self.cuDeviceGet)(&raw mut device, (index as u32).cast_signed()) };
        self.check("cuDeviceGet", status).map(|()| device)
    }

    fn device_props(&self, device: c_int) -> Result<DeviceProps> {
        let attribute = |number| Ok(self.attribute(device, number)?.cast_unsigned());
        let capability =
            SmVersion { major: attribute(CAPABILITY_MAJOR)?, minor: attribute(CAPABILITY_MINOR)? };
        if capability < OLDEST_CAPABILITY {
            let name = self.name(device)?;
            let (capability, oldest) = (capability.to_string(), OLDEST_CAPABILITY.to_string());
            return Err(ComputeError::CudaCapability { name, capability, oldest });
        }
        let shared_bytes = attribute(MAX_SHARED_BYTES)?;
        Ok(DeviceProps { capability, shared_bytes })
    }

    fn attribute(&self, device: c_int, number: c_int) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: writes one int; a number that the driver does not know is an error.
        let status = unsafe { (self.cuDeviceGetAttribute)(&raw mut value, number, device) };
        self.check("cuDeviceGetAttribute", status).map(|()| value)
    }

    fn name(&self, device: c_int) -> Result<String> {
        let mut text = [0u8; 128];
        // SAFETY: writes at most so many bytes, the last of which is zero.
        let status = unsafe { (self.cuDeviceGetName)(text.as_mut_ptr().cast(), 127, device) };
        self.check("cuDeviceGetName", status)?;
        let length = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        Ok(String::from_utf8_lossy(&text[..length]).into_owned())
    }
}
