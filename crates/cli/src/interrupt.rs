//! Ctrl-C: the first one asks for an orderly end, the second leaves at once. In a conversation it ends an answer.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::dashboard;
use crate::failure::Failure;

/// What a shell expects of a program that Ctrl-C ended: 128 and the signal's number.
pub const EXIT_CODE: u8 = 130;

/// Ctrl-C of a program that answers: it ends an answer, and between two answers the program.
#[derive(Default)]
pub struct AnswerInterrupt {
    is_answering: AtomicBool,
    is_asked: AtomicBool,
}

impl AnswerInterrupt {
    /// An answer begins.
    pub fn begin(&self) {
        self.is_asked.store(false, Ordering::SeqCst);
        self.is_answering.store(true, Ordering::SeqCst);
    }

    /// Whether the answer is to end.
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::SeqCst)
    }

    /// The answer has ended.
    pub fn end(&self) {
        self.is_answering.store(false, Ordering::SeqCst);
    }

    /// Returns whether there was an answer to end.
    fn ask(&self) -> bool {
        self.is_answering.load(Ordering::SeqCst) && !self.is_asked.swap(true, Ordering::SeqCst)
    }
}

/// Catches Ctrl-C for answers. Once per run.
pub fn of_answers() -> Result<Arc<AnswerInterrupt>, Failure> {
    let interrupt = Arc::new(AnswerInterrupt::default());
    let asked = Arc::clone(&interrupt);
    let handler = move || {
        if !asked.ask() {
            leave(EXIT_CODE);
        }
    };
    ctrlc::set_handler(handler).map_err(Failure::Signal)?;
    Ok(interrupt)
}

/// Calls `first` on the first Ctrl-C. Once per run. A terminal that is lost sends several signals, its shell and the
/// kernel one each: nobody pressed a second time.
pub fn on_first(mut first: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    let (had_terminal, mut again) = (has_terminal(), false);
    let handler = move || {
        if again && has_terminal() == had_terminal {
            leave(EXIT_CODE);
        }
        if !std::mem::replace(&mut again, true) {
            first();
        }
    };
    ctrlc::set_handler(handler).map_err(Failure::Signal)
}

fn has_terminal() -> bool {
    io::stdin().is_terminal() || io::stdout().is_terminal() || io::stderr().is_terminal()
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
