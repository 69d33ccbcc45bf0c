//! Ctrl-C: the first one asks for an orderly end, the second leaves at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::dashboard;
use crate::failure::Failure;

/// What a shell expects of a program that Ctrl-C ended: 128 and the signal's number.
pub const EXIT_CODE: u8 = 130;

/// Calls `first` on the first Ctrl-C. Once per run.
pub fn on_first(mut first: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    let mut again = false;
    let handler = move || {
        if again {
            leave(EXIT_CODE);
        }
        again = true;
        first();
    };
    ctrlc::set_handler(handler).map_err(Failure::Signal)
}

/// Ends the process and nothing else, when all that it had to write is written. An orderly exit would let
/// drivers tidy up while other threads still call them, and NVIDIA's then stumbles over its own memory.
#[allow(unsafe_code)]
pub fn leave(code: u8) -> ! {
    dashboard::restore();
    // SAFETY: it reads and writes nothing of ours, and does not return.
    unsafe { libc::_exit(code.into()) }
}

/// As if the terminal had sent Ctrl-C, which it does not while a dashboard takes keys one by one.
#[allow(unsafe_code)]
pub fn raise() {
    // SAFETY: it only sends a signal that the program handles.
    _ = unsafe { libc::kill(libc::getpid(), libc::SIGINT) };
}

/// A flag that the first Ctrl-C raises.
pub fn flag() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&flag);
    on_first(move || raised.store(true, Ordering::Relaxed))?;
    Ok(flag)
}
