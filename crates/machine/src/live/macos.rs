//! What only a Mac can answer: Metal's view of the GPU, and thermal state without root.
//!
//! Never yet run on a Mac. The footprint of this process was not compiled for one either.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};

use objc2_foundation::NSProcessInfo;
use objc2_metal::{MTLCopyAllDevices, MTLCreateSystemDefaultDevice, MTLDevice};

use crate::key_values::write_key_value;
use crate::reading::Unknown;
use crate::source::ProbeAnswer;

// A command-line program gets no default Metal device unless CoreGraphics is linked.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

// Taken from <notify.h>; part of libSystem, which every program links.
unsafe extern "C" {
    fn notify_register_check(name: *const c_char, token: *mut c_int) -> u32;
    fn notify_get_state(token: c_int, state: *mut u64) -> u32;
    fn notify_cancel(token: c_int) -> u32;
}

// Taken from <libproc.h> and <sys/resource.h>; part of libSystem too.
unsafe extern "C" {
    fn proc_pid_rusage(pid: c_int, flavor: c_int, usage: *mut ResourceUsage) -> c_int;
}
const RUSAGE_INFO_V0: c_int = 0;

/// `rusage_info_v0`.
#[repr(C)]
#[derive(Default)]
struct ResourceUsage {
    uuid: [u8; 16],
    /// Times, wake-ups, page-ins, wired and resident size.
    before: [u64; 7],
    footprint_bytes: u64,
    /// When the process began and ended.
    after: [u64; 2],
}

const THERMAL_PRESSURE: &CStr = c"com.apple.system.thermalpressurelevel";

pub fn metal() -> ProbeAnswer {
    // Either call has been seen to fail where the other answers: the first over SSH, the second in
    // sandboxes.
    let device = MTLCreateSystemDefaultDevice()
        .or_else(|| MTLCopyAllDevices().firstObject())
        .ok_or_else(|| Unknown::because("no Metal device"))?;
    let mut text = String::new();
    let mut put =
        |key: &str, value: String| write_key_value(&mut text, key, Ok::<_, Unknown>(value));
    put("name", device.name().to_string());
    put("unified", u8::from(device.hasUnifiedMemory()).to_string());
    put("recommended_bytes", device.recommendedMaxWorkingSetSize().to_string());
    put("max_buffer_bytes", device.maxBufferLength().to_string());
    Ok(text)
}

#[allow(clippy::unnecessary_wraps)] // Its twin for other systems has no answer.
pub fn thermal() -> ProbeAnswer {
    let state = NSProcessInfo::processInfo().thermalState().0;
    let mut text = String::new();
    write_key_value(&mut text, "state", Ok::<_, Unknown>(state));
    write_key_value(&mut text, "pressure", thermal_pressure());
    Ok(text)
}

/// The footprint is what Activity Monitor shows as memory: unlike the resident size it has buffers of Metal, and leaves
/// out pages of mapped files.
pub fn process() -> ProbeAnswer {
    let mut usage = ResourceUsage::default();
    let pid = std::process::id().cast_signed();
    // SAFETY: writes one structure of the version that is asked for, through a valid pointer.
    let code = unsafe { proc_pid_rusage(pid, RUSAGE_INFO_V0, &raw mut usage) };
    if code != 0 {
        return Err(Unknown(format!("proc_pid_rusage failed with code {code}")));
    }
    let mut text = String::new();
    write_key_value(&mut text, "footprint_bytes", Ok::<_, Unknown>(usage.footprint_bytes));
    Ok(text)
}

fn thermal_pressure() -> Result<u64, Unknown> {
    let refused = |code| Unknown(format!("notification centre refused with code {code}"));
    let (mut token, mut level) = (0, 0);
    // SAFETY: the name is NUL-terminated and static; the token is written through a valid pointer.
    let code = unsafe { notify_register_check(THERMAL_PRESSURE.as_ptr(), &raw mut token) };
    if code != 0 {
        return Err(refused(code));
    }
    // SAFETY: the token was given by the call above; the state is written through a valid pointer.
    let code = unsafe { notify_get_state(token, &raw mut level) };
    // SAFETY: the token is valid and is not used again.
    unsafe { notify_cancel(token) };
    if code == 0 { Ok(level) } else { Err(refused(code)) }
}
