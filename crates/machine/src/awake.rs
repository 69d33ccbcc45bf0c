//! Keeps the computer from falling asleep while a run goes on.
//!
//! Both systems come with a program that holds sleep off for as long as another one runs: `caffeinate` on
//! macOS, `systemd-inhibit` on Linux. The other one is `cat`, whose input only we hold open:
//!
//! ```text
//! hearth ──input──▶ systemd-inhibit ─runs─▶ cat ──output──▶ hearth
//! ```
//!
//! `cat` sends back the line it was given, which proves that sleep is held off. It ends when its input
//! does, so nothing is left behind even if this process is killed. Does not keep the display on, nor a
//! laptop awake whose lid is closed. Asking the systems' own interfaces (`IOPMAssertion`, D-Bus) was left:
//! it would take unsafe code on one and a crate of its own on the other.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

/// What runs `cat` with sleep held off.
#[cfg(target_os = "macos")]
const HOLDER: (&str, &[&str]) = ("caffeinate", &["-i", "cat"]);
#[cfg(not(target_os = "macos"))]
const HOLDER: (&str, &[&str]) = (
    "systemd-inhibit",
    &["--what=idle:sleep", "--who=hearth", "--why=a training run", "--mode=block", "cat"],
);

/// Chosen: the system's answer takes some milliseconds; a run does not wait longer for a convenience.
const TIMEOUT: Duration = Duration::from_secs(2);

const LINE: &[u8] = b"awake\n";

/// Sleep is held off until this is dropped, or this process ends.
#[derive(Debug)]
pub struct Awake(Child);

/// Why sleep is not held off. No failure: a run goes on without.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AwakeError {
    /// The system has no such program.
    #[error("there is no program {0} here")]
    NoProgram(String),
    /// It ended instead of holding on.
    #[error("{program} said: {said}")]
    Refused {
        /// The program.
        program: String,
        /// The first line it wrote.
        said: String,
    },
    /// It neither held on nor ended.
    #[error("{0} did not answer in time")]
    Silent(String),
    /// It could not be run or talked to.
    #[error("cannot run {program}: {why}")]
    Failed {
        /// The program.
        program: String,
        /// What the system said.
        why: String,
    },
}

impl Awake {
    /// Holds sleep off, where the system lets us.
    pub fn hold() -> Result<Self, AwakeError> {
        let (program, arguments) = HOLDER;
        Self::by(program, arguments)
    }

    fn by(program: &str, arguments: &[&str]) -> Result<Self, AwakeError> {
        let named = || program.to_owned();
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound => AwakeError::NoProgram(named()),
            _ => AwakeError::Failed { program: named(), why: error.to_string() },
        };
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal goes to the whole group, and the run still has to save its state.
            .process_group(0)
            .spawn();
        let mut awake = Self(child.map_err(failed)?);
        match awake.answer().map_err(failed)? {
            AwakeReply::Line => Ok(awake),
            AwakeReply::End => Err(AwakeError::Refused { program: named(), said: awake.said() }),
            AwakeReply::Nothing => Err(AwakeError::Silent(named())),
        }
    }

    /// Whether the line comes back.
    fn answer(&mut self) -> std::io::Result<AwakeReply> {
        let input = self.0.stdin.as_mut().expect("it was spawned with a pipe");
        // One that ended at once takes no line; that its output ends too is the better sign.
        _ = input.write_all(LINE);
        let output = self.0.stdout.as_mut().expect("it was spawned with a pipe");
        let mut watched = [PollFd::new(&*output, PollFlags::IN)];
        let patience = Timespec::try_from(TIMEOUT).expect("two seconds fit");
        if poll(&mut watched, Some(&patience))? == 0 {
            return Ok(AwakeReply::Nothing);
        }
        let mut line = [0; LINE.len()];
        Ok(match output.read(&mut line)? {
            0 => AwakeReply::End,
            _ => AwakeReply::Line,
        })
    }

    /// The first line of its complaint. Its output has ended, so what it had to say is written.
    fn said(&mut self) -> String {
        self.end();
        let mut bytes = [0; 512];
        let read = self.0.stderr.as_mut().and_then(|errors| errors.read(&mut bytes).ok());
        let text = String::from_utf8_lossy(&bytes[..read.unwrap_or(0)]);
        text.lines().next().unwrap_or("nothing").to_owned()
    }

    /// Ends it: its input first, so that `cat` goes, then the program itself.
    fn end(&mut self) {
        drop(self.0.stdin.take());
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

enum AwakeReply {
    Line,
    End,
    Nothing,
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use super::*;

    /// Stands for the system's program: runs something that notes that it holds on, then that it ended.
    fn holder(note: &Path) -> Result<Awake, AwakeError> {
        let script = r#"sh -c 'echo holds > "$0"; cat; echo ended > "$0"' "$1"; true"#;
        Awake::by("sh", &["-c", script, "holder", note.to_str().unwrap()])
    }

    /// Waits for what must come; a minute without it is a failure.
    fn wait_for(note: &Path, expected: &str) {
        let begun = Instant::now();
        while std::fs::read_to_string(note).unwrap_or_default().trim() != expected {
            assert!(begun.elapsed() < Duration::from_secs(60), "it never {expected}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn what_holds_sleep_off_ends_with_the_guard() {
        let folder = tempfile::tempdir().unwrap();
        let note = folder.path().join("note");
        let awake = holder(&note).unwrap();
        assert_eq!(std::fs::read_to_string(&note).unwrap(), "holds\n");
        drop(awake);
        wait_for(&note, "ended");
    }

    /// Runs this very test a second time, as the program that is killed.
    #[test]
    fn what_holds_sleep_off_ends_when_we_are_killed() {
        const NOTE: &str = "HEARTH_TEST_AWAKE_NOTE";
        if let Some(note) = std::env::var_os(NOTE) {
            let _awake = holder(Path::new(&note)).unwrap();
            loop {
                std::thread::park();
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let note = folder.path().join("note");
        let name = "awake::tests::what_holds_sleep_off_ends_when_we_are_killed";
        let mut killed = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(NOTE, &note)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_for(&note, "holds");
        killed.kill().unwrap();
        killed.wait().unwrap();
        wait_for(&note, "ended");
    }

    #[test]
    fn why_not_is_said() {
        let why = |program: &str, arguments: &[&str]| {
            Awake::by(program, arguments).unwrap_err().to_string()
        };
        assert_eq!(why("no-such-program", &[]), "there is no program no-such-program here");
        let script = "echo Failed to inhibit: Access denied >&2; exit 1";
        assert_eq!(why("sh", &["-c", script]), "sh said: Failed to inhibit: Access denied");
        assert_eq!(why("true", &[]), "true said: nothing");
        assert_eq!(why("sleep", &["100"]), "sleep did not answer in time");
    }

    /// Whatever this system has, the answer is one of the two.
    #[test]
    fn this_system_holds_or_says_why_not() {
        if let Err(reason) = Awake::hold() {
            assert!(reason.to_string().contains(HOLDER.0), "{reason}");
        }
    }
}
