//! A program of the user's that says what completions are worth: one process for the run, started when it is first needed,
//! without a shell.
//!
//! ```text
//! to it      {"prompt": "…", "completion": "…", and the record's other keys}    a line for each completion
//! from it    0.5                                                               a line for each of them, in order
//! ```
//!
//! What it prints is read with limits on lines and on time, what it says of its errors is shown when it fails, and it is
//! killed with the run. It is the user's own, and may be a large model on a GPU: so it has the rights and the memory of
//! any program that its user starts.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use machine::process::apart_from_terminal;

use crate::error::{Result, TrainerError};

/// Bytes of a line that it prints. Chosen: a number has some twenty.
const MOST_LINE: u64 = 4096;

/// What is kept of the end of what it says of its errors, and the lines of that which an error shows.
const MOST_SAID: usize = 4096;
const SHOWN_LINES: usize = 3;

/// Characters of a wrong line that an error shows.
const SHOWN: usize = 60;

/// Lines that wait to be read. Chosen: a program that prints without end soon stands still.
const WAITING_LINES: usize = 64;

/// How often a request to stop is looked for.
const TICK: Duration = Duration::from_millis(20);

/// How long its last words are waited for.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A program at work. Killed when dropped.
pub(super) struct RewardProgram {
    child: Child,
    input: SyncSender<Vec<u8>>,
    lines: Receiver<Vec<u8>>,
    said: Arc<Mutex<VecDeque<u8>>>,
    said_all: thread::JoinHandle<()>,
}

impl RewardProgram {
    /// Starts it, with its arguments.
    pub fn start(words: &[String]) -> Result<Self> {
        let [program, arguments @ ..] = words else {
            return Err(failed("is not given".into(), String::new()));
        };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(Stdio::piped());
        // Ctrl-C in a terminal is for the run, which ends this one in its own time.
        apart_from_terminal(&mut command);
        let not_started =
            |error| failed(format!("{program} does not start: {error}"), String::new());
        let mut child = command.spawn().map_err(not_started)?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            unreachable!("all three were asked for")
        };
        let (input, batches) = sync_channel(1);
        let (sender, lines) = sync_channel(WAITING_LINES);
        let said = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&said);
        // All end with the program, or when nobody receives any more.
        let threads = || {
            thread::Builder::new().spawn(move || write_batches(stdin, &batches))?;
            thread::Builder::new().spawn(move || send_lines(stdout, &sender))?;
            thread::Builder::new().spawn(move || keep_end(stderr, &kept))
        };
        let no_thread =
            |error| failed(format!("cannot be read: no thread, {error}"), String::new());
        match threads() {
            Ok(said_all) => Ok(Self { child, input, lines, said, said_all }),
            Err(error) => {
                _ = child.kill().and_then(|()| child.wait().map(drop));
                Err(no_thread(error))
            }
        }
    }

    /// Whether it can be asked. One that ended without an error between two batches is started again.
    pub fn is_running(&mut self) -> Result<bool> {
        match self.child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) if status.success() => return Ok(false),
            _ => return Err(self.ended("between two batches")),
        }
        match self.lines.try_recv() {
            Ok(line) => {
                let problem = format!(
                    "printed a line that no completion asked for: {}; it is to print one number for each",
                    shown(&line)
                );
                Err(self.failed(problem))
            }
            Err(_) => Ok(true),
        }
    }

    /// The rewards of a batch, a line of JSON for each completion. `check` fails when somebody asks to stop.
    pub fn rewards(
        &mut self,
        batch: &[String],
        timeout: Duration,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<f64>> {
        let (begun, n) = (Instant::now(), batch.len());
        let mut lines = batch.join("\n").into_bytes();
        lines.push(b'\n');
        // Where it has ended, nobody takes them, and it prints nothing.
        if let Err(TrySendError::Full(_)) = self.input.try_send(lines) {
            return Err(self.failed("does not read what it is given".into()));
        }
        let mut rewards = Vec::with_capacity(n);
        while rewards.len() < n {
            check()?;
            let done = rewards.len();
            match self.lines.recv_timeout(TICK) {
                Ok(line) => {
                    let reward = reward(&line).map_err(|problem| {
                        self.failed(format!("printed {problem} in line {} of {n}", done + 1))
                    })?;
                    rewards.push(reward);
                }
                Err(RecvTimeoutError::Timeout) if begun.elapsed() >= timeout => {
                    let secs = timeout.as_secs_f64();
                    return Err(self.failed(format!("gave {done} of {n} rewards in {secs} s")));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.ended(&format!("after {done} of {n} rewards")));
                }
            }
        }
        Ok(rewards)
    }

    /// That it is no more, or has closed its output.
    fn ended(&mut self, when: &str) -> TrainerError {
        let begun = Instant::now();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break format!("ended with {status}"),
                Ok(None) if begun.elapsed() < LAST_WORDS => thread::sleep(TICK),
                _ => break "closed its output".into(),
            }
        };
        self.failed(format!("{status} {when}"))
    }

    fn failed(&mut self, problem: String) -> TrainerError {
        // Dead or not, it is not asked again, and what it has said is complete.
        _ = self.child.kill();
        _ = self.child.wait();
        let begun = Instant::now();
        while !self.said_all.is_finished() && begun.elapsed() < LAST_WORDS {
            thread::sleep(TICK);
        }
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(said.make_contiguous()).into_owned();
        let lines: Vec<&str> =
            text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        failed(problem, lines[lines.len().saturating_sub(SHOWN_LINES)..].join(" / "))
    }
}

impl Drop for RewardProgram {
    fn drop(&mut self) {
        // Either may fail only because it has ended.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn failed(problem: String, said: String) -> TrainerError {
    TrainerError::Reward { problem, said }
}

/// The number in a line, or what is there instead.
fn reward(line: &[u8]) -> std::result::Result<f64, String> {
    if line.len() as u64 == MOST_LINE && line.last() != Some(&b'\n') {
        return Err(format!("more than {MOST_LINE} bytes without the end of a line"));
    }
    let text = String::from_utf8_lossy(line);
    match text.trim().parse::<f64>() {
        Ok(reward) if reward.is_finite() => Ok(reward),
        _ => Err(format!("{}, expected a finite number,", shown(line))),
    }
}

fn shown(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let short: String = text.trim().chars().take(SHOWN).collect();
    format!("{short:?}")
}

fn write_batches(mut to: ChildStdin, batches: &Receiver<Vec<u8>>) {
    for batch in batches {
        if to.write_all(&batch).and_then(|()| to.flush()).is_err() {
            return;
        }
    }
}

fn send_lines(from: ChildStdout, sender: &SyncSender<Vec<u8>>) {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        let read = from.by_ref().take(MOST_LINE).read_until(b'\n', &mut line);
        if matches!(read, Ok(0) | Err(_)) || sender.send(line).is_err() {
            return;
        }
    }
}

/// All of it is read, as a full pipe would stop the program; its end is kept.
fn keep_end(mut from: ChildStderr, kept: &Mutex<VecDeque<u8>>) {
    let mut piece = [0; 1024];
    while let Ok(n @ 1..) = from.read(&mut piece) {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(&piece[..n]);
        let excess = kept.len().saturating_sub(MOST_SAID);
        kept.drain(..excess);
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> Vec<String> {
        ["sh", "-c", script].map(String::from).into()
    }

    fn batch(n: usize) -> Vec<String> {
        (0..n).map(|n| format!(r#"{{"completion": "{n}"}}"#)).collect()
    }

    fn rewards(script: &str, n: usize, timeout: Duration) -> Result<Vec<f64>> {
        RewardProgram::start(&shell(script))?.rewards(&batch(n), timeout, &|| Ok(()))
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_program_is_asked_batch_after_batch() {
        let script = "n=0; while read line; do n=$((n+1)); echo $n.5; done";
        let mut program = RewardProgram::start(&shell(script)).unwrap();
        for expected in [[1.5, 2.5], [3.5, 4.5]] {
            assert!(program.is_running().unwrap());
            assert_eq!(program.rewards(&batch(2), LONG, &|| Ok(())).unwrap(), expected);
        }
        // More than a pipe holds, in both directions at once.
        let many = vec!["x".repeat(1000); 3000];
        assert_eq!(program.rewards(&many, LONG, &|| Ok(())).unwrap().len(), 3000);
    }

    #[test]
    fn what_a_program_does_wrong_is_said() {
        for (script, says) in [
            (
                "echo 1; echo a >&2; echo b >&2; exit 3",
                "ended with exit status: 3 after 1 of 2 rewards; it said: a / b",
            ),
            ("exit 0", "ended with exit status: 0 after 0 of 2 rewards"),
            (
                "echo 1; echo good; cat",
                "printed \"good\", expected a finite number, in line 2 of 2",
            ),
            ("echo nan; cat", "printed \"nan\", expected a finite number, in line 1 of 2"),
            ("echo null; cat", "printed \"null\", expected a finite number, in line 1 of 2"),
            (
                "head -c 9999999 /dev/zero; cat",
                "printed more than 4096 bytes without the end of a line",
            ),
        ] {
            let error = rewards(script, 2, LONG).unwrap_err().to_string();
            assert!(error.starts_with("the reward program ") && error.contains(says), "{error}");
        }
        // Long enough for a shell to start on a machine with much else to do.
        let silent = rewards("echo 1; sleep 600", 2, Duration::from_millis(2500)).unwrap_err();
        assert_eq!(silent.to_string(), "the reward program gave 1 of 2 rewards in 2.5 s");
        let absent = RewardProgram::start(&["/no/such/program".into()]).map(drop).unwrap_err();
        assert!(absent.to_string().contains("/no/such/program does not start"), "{absent}");
    }

    #[test]
    fn lines_that_nobody_asked_for_shift_no_rewards() {
        let mut program = RewardProgram::start(&shell("yes 7")).unwrap();
        assert_eq!(program.rewards(&batch(2), LONG, &|| Ok(())).unwrap(), [7.0, 7.0]);
        let begun = Instant::now();
        let error = loop {
            match program.is_running() {
                Ok(_) if begun.elapsed() < LONG => thread::sleep(TICK),
                found => break found.unwrap_err().to_string(),
            }
        };
        assert!(error.contains("printed a line that no completion asked for: \"7\""), "{error}");
    }

    /// It prints a number for each line and reads none: what it is given fills the pipe, and then waits.
    #[test]
    fn a_program_that_reads_nothing_is_found() {
        let mut program =
            RewardProgram::start(&shell("for n in 1 2 3 4; do echo $n; done; sleep 600")).unwrap();
        let large = vec!["x".repeat(1 << 20)];
        let mut asked = || program.rewards(&large, LONG, &|| Ok(()));
        let error = (0..4).find_map(|_| asked().err()).unwrap().to_string();
        assert!(error.contains("the reward program does not read what it is given"), "{error}");
    }

    #[test]
    fn a_request_to_stop_is_heard_while_it_thinks() {
        let mut program = RewardProgram::start(&shell("sleep 600")).unwrap();
        let stopped = || Err(weights::WeightsError::Cancelled.into());
        assert!(program.rewards(&batch(1), LONG, &stopped).unwrap_err().is_cancelled());
    }
}
