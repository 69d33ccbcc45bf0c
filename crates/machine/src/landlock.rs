//! Takes from a thread, and from all that it starts, the rights to change files and to open TCP connections. Linux has
//! this since 5.13 (Landlock), without privileges and for good. On older kernels nothing of it is enforced.

#![allow(unsafe_code)] // Two system calls that no safe wrapper has.

use std::ffi::c_long;

use libc::{SYS_landlock_create_ruleset, SYS_landlock_restrict_self, close, syscall};

/// Rights of the file system, by the kernel that has them first. Taken: `linux/landlock.h`.
const WRITE: [(c_long, u64); 3] = [
    // Write to a file, remove, make anything.
    (1, 1 << 1 | 0x1ff << 4),
    // Move to another folder.
    (2, 1 << 13),
    // Truncate.
    (3, 1 << 14),
];
/// TCP: to listen, to connect.
const TCP: (c_long, u64) = (4, 3);

/// What is handled, and allowed to nobody: `struct landlock_ruleset_attr`.
#[repr(C)]
struct RulesetAttributes {
    file_system: u64,
    network: u64,
}

/// Which version the kernel has; 0 for none.
fn version() -> c_long {
    const ASK: u32 = 1;
    // SAFETY: without attributes and with this flag the kernel only answers with a number.
    let version = unsafe {
        syscall(SYS_landlock_create_ruleset, std::ptr::null::<RulesetAttributes>(), 0_usize, ASK)
    };
    version.max(0)
}

/// Takes the rights from this thread, which must be one that can gain none (`no_new_privs`); whether it did.
pub(crate) fn forbid_writes() -> bool {
    let version = version();
    let file_system = WRITE.iter().filter(|(since, _)| *since <= version).map(|(_, rights)| rights);
    let network = if TCP.0 <= version { TCP.1 } else { 0 };
    let attributes = RulesetAttributes { file_system: file_system.sum(), network };
    let size = if network == 0 { size_of::<u64>() } else { size_of::<RulesetAttributes>() };
    // SAFETY: the kernel reads so many bytes of what the pointer leads to, which lives until the end of the function.
    let rules = unsafe { syscall(SYS_landlock_create_ruleset, &raw const attributes, size, 0_u32) };
    if version == 0 || rules < 0 {
        return false;
    }
    // SAFETY: the handle is the one that was made above, and is used by nobody after it is closed.
    unsafe {
        let is_done = syscall(SYS_landlock_restrict_self, rules, 0_u32) == 0;
        close(rules as i32);
        is_done
    }
}
