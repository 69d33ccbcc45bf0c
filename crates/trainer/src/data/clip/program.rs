//! A program beside hearth, run without a shell: its output is read in pieces, it is killed when it says nothing for too
//! long or is no longer wanted, and nothing it writes is kept without a limit. On Linux its memory and time are limited,
//! too, and it can gain no rights.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use machine::process::spawn_confined;

use crate::data::problem::ProblemKind;

/// How long a program may be silent. Chosen: a frame of a large video on a slow, busy computer takes a few seconds.
const PATIENCE: Duration = Duration::from_secs(120);

/// Most of what a program says of its errors that is kept. Chosen: some ten lines.
const MOST_SAID: u64 = 4096;

/// Most address space of a program. Chosen: several times what ffmpeg takes for a video of 8192 x 4320 pixels.
const MOST_MEMORY: u64 = 8 << 30;

/// Most time of a CPU that a program may take. Chosen: a day of work on one file is none.
const MOST_CPU_TIME: Duration = Duration::from_secs(4 * 3600);

/// A program at work. Killed when dropped.
pub(crate) struct RunningProgram {
    name: &'static str,
    child: Child,
    pieces: Receiver<io::Result<Vec<u8>>>,
    said: Receiver<String>,
}

impl RunningProgram {
    /// Starts it. Its output comes in pieces of `piece` bytes, the last one may be shorter.
    pub fn start(
        name: &'static str,
        arguments: &[OsString],
        piece: usize,
    ) -> Result<Self, ProblemKind> {
        Self::start_with(name, arguments, piece, Stdio::null())
    }

    /// Starts one that is given its input by the pipe that comes back.
    pub fn start_piped(
        name: &'static str,
        arguments: &[OsString],
        piece: usize,
    ) -> Result<(Self, Option<ChildStdin>), ProblemKind> {
        let mut program = Self::start_with(name, arguments, piece, Stdio::piped())?;
        let input = program.child.stdin.take();
        Ok((program, input))
    }

    fn start_with(
        name: &'static str,
        arguments: &[OsString],
        piece: usize,
        input: Stdio,
    ) -> Result<Self, ProblemKind> {
        let mut command = Command::new(name);
        command.args(arguments).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = spawn_confined(&mut command, MOST_MEMORY, MOST_CPU_TIME);
        let mut child = child.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ProblemKind::ProgramMissing { n: 1 },
            _ => failed(format!("{name} does not start: {error}")),
        })?;
        let (sender, pieces) = sync_channel(1);
        let (said_sender, said) = sync_channel(1);
        let pipes = (child.stdout.take(), child.stderr.take());
        let program = Self { name, child, pieces, said };
        if let (Some(stdout), Some(stderr)) = pipes {
            // Both end with the program, or when nobody receives any more.
            let read = thread::Builder::new().spawn(move || send_pieces(stdout, piece, &sender));
            let said = thread::Builder::new().spawn(move || said_sender.send(read_said(stderr)));
            let no_thread = |error| failed(format!("no thread to read from {name}: {error}"));
            read.map(drop).and(said.map(drop)).map_err(no_thread)?;
        }
        Ok(program)
    }

    /// The next piece; nothing at the end.
    pub fn next(&mut self) -> Result<Option<Vec<u8>>, ProblemKind> {
        match self.pieces.recv_timeout(PATIENCE) {
            Ok(Ok(piece)) => Ok(Some(piece)),
            Ok(Err(error)) => Err(ProblemKind::unreadable(&error)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                let (name, secs) = (self.name, PATIENCE.as_secs());
                Err(failed(format!("{name} said nothing for {secs} seconds")))
            }
        }
    }

    /// Waits for its end. An error if it failed: the first line that it said.
    pub fn finish(mut self) -> Result<(), ProblemKind> {
        let status = self.ended()?;
        if status.success() {
            return Ok(());
        }
        let said = self.said.recv_timeout(PATIENCE).unwrap_or_default();
        let why = said.lines().map(without_place).find(|line| !line.is_empty());
        let why = why.map_or_else(|| format!("{} ended with {status}", self.name), str::to_owned);
        Err(failed(why.to_lowercase()))
    }
}

impl RunningProgram {
    /// Waits as long as for a piece. It has closed its output, and what it still does nobody asked for.
    fn ended(&mut self) -> Result<ExitStatus, ProblemKind> {
        let begun = Instant::now();
        loop {
            match self.child.try_wait().map_err(|error| ProblemKind::unreadable(&error))? {
                Some(status) => return Ok(status),
                None if begun.elapsed() > PATIENCE => {
                    let (name, secs) = (self.name, PATIENCE.as_secs());
                    return Err(failed(format!("{name} did not end within {secs} seconds")));
                }
                None => thread::sleep(Duration::from_millis(2)),
            }
        }
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        // Either may fail only because it has ended.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn failed(why: String) -> ProblemKind {
    ProblemKind::Damaged { why }
}

/// `[mov,mp4 @ 0x5581] moov atom not found` without what stands in brackets.
fn without_place(line: &str) -> &str {
    let text = line.strip_prefix('[').and_then(|rest| rest.split_once("] "));
    text.map_or(line, |(_, text)| text).trim()
}

fn send_pieces(mut from: ChildStdout, size: usize, sender: &SyncSender<io::Result<Vec<u8>>>) {
    loop {
        let mut piece = Vec::with_capacity(size);
        let read = from.by_ref().take(size as u64).read_to_end(&mut piece);
        let is_last = read.is_err() || piece.len() < size;
        let piece = read.map(|_| piece);
        let is_empty = piece.as_ref().is_ok_and(Vec::is_empty);
        if is_empty || sender.send(piece).is_err() || is_last {
            return;
        }
    }
}

/// The beginning is kept; the rest is read all the same, as a full pipe would stop the program.
fn read_said(mut from: ChildStderr) -> String {
    let mut said = Vec::new();
    _ = from.by_ref().take(MOST_SAID).read_to_end(&mut said);
    _ = io::copy(&mut from, &mut io::sink());
    String::from_utf8_lossy(&said).into_owned()
}

/// How ffmpeg is installed on this computer.
pub fn install_command() -> &'static str {
    const PACKAGES: [(&str, &str); 4] = [
        ("/usr/bin/apt-get", "sudo apt install ffmpeg"),
        ("/usr/bin/dnf", "sudo dnf install ffmpeg-free"),
        ("/usr/bin/pacman", "sudo pacman -S ffmpeg"),
        ("/usr/bin/zypper", "sudo zypper install ffmpeg"),
    ];
    match std::env::consts::OS {
        "macos" => "brew install ffmpeg",
        "windows" => "winget install Gyan.FFmpeg",
        _ => {
            let found = PACKAGES.iter().find(|(manager, _)| Path::new(manager).exists());
            found.map_or("install the package ffmpeg", |(_, command)| command)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_given_its_input_and_read() {
        let (mut program, input) = RunningProgram::start_piped("cat", &[], 4).unwrap();
        io::Write::write_all(&mut input.unwrap(), b"123456").unwrap();
        let mut pieces = Vec::new();
        while let Some(piece) = program.next().unwrap() {
            pieces.push(piece);
        }
        program.finish().unwrap();
        assert_eq!(pieces, [b"1234".to_vec(), b"56".to_vec()]);
    }
}
