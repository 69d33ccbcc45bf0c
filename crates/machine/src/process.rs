//! This process itself: what it took so far, where the system tells.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use crate::key_values::KeyValueLines;
use crate::reading::{Bytes, Unknown};

/// The most memory it has held at once, in bytes.
pub fn peak_resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    in_status(&status, "VmHWM").ok().map(|bytes| bytes.0)
}

/// The memory it holds, out of the text of `/proc/self/status`. Pages of files that are mapped count: they
/// are ours to give back.
pub fn resident(status: &str) -> Result<Bytes, Unknown> {
    in_status(status, "VmRSS")
}

fn in_status(status: &str, key: &str) -> Result<Bytes, Unknown> {
    KeyValueLines::new(status).number(key).and_then(Bytes::from_kib)
}

/// CPU time of all its threads: what the same work takes, whoever else is on the machine.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Lets other threads go before this one and those that it will start. Only on Linux: elsewhere a priority is that of
/// the whole program.
pub fn give_way() {
    #[cfg(target_os = "linux")]
    {
        // Chosen: against a thread as it began, a tenth of a core.
        _ = rustix::process::nice(10);
    }
}

/// This program, to be run once more; the same file, also after an update has put another in its place.
pub fn own_program() -> Option<PathBuf> {
    let link = Path::new("/proc/self/exe");
    if link.exists() { Some(link.into()) } else { std::env::current_exe().ok() }
}

/// Keeps Ctrl-C in the terminal from a program that is about to be started.
pub fn apart_from_terminal(command: &mut Command) {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    // CREATE_NEW_PROCESS_GROUP
    #[cfg(windows)]
    std::os::windows::process::CommandExt::creation_flags(command, 0x200);
}

/// Takes rights from this process for good, before it works on what nobody vouches for: it may hold so many bytes
/// of address space, leaves no core dump, changes no file, opens no connection, and no program it starts may have more
/// rights. On other systems than Linux nothing of it is enforced. Threads that run already keep theirs.
pub fn confine(bytes: u64) {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        for (resource, most) in [(Resource::As, bytes), (Resource::Core, 0)] {
            // Fails only where the limit is lower already.
            _ = setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) });
        }
        _ = rustix::thread::set_no_new_privs(true);
        crate::landlock::forbid_writes();
    }
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
}

/// Starts a program that works on what nobody vouches for: it may hold so many bytes of address space and compute for
/// so long, leaves no core dump, changes no file, opens no connection, and gains no rights. What it says goes through
/// pipes. On other systems than Linux nothing of it is enforced.
pub fn spawn_confined(command: &mut Command, bytes: u64, cpu_time: Duration) -> io::Result<Child> {
    let child = spawn_without_rights(command)?;
    #[cfg(target_os = "linux")]
    if let Some(pid) = rustix::process::Pid::from_raw(child.id().cast_signed()) {
        use rustix::process::{Resource, Rlimit, prlimit};
        let secs = cpu_time.as_secs();
        for (resource, most) in [(Resource::As, bytes), (Resource::Cpu, secs), (Resource::Core, 0)]
        {
            // Fails only where the limit is lower already, or where it has ended.
            _ = prlimit(Some(pid), resource, Rlimit { current: Some(most), maximum: Some(most) });
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (bytes, cpu_time);
    Ok(child)
}

/// By a thread of its own, whose rights it has; they are taken from that one alone.
#[cfg(target_os = "linux")]
fn spawn_without_rights(command: &mut Command) -> io::Result<Child> {
    std::thread::scope(|scope| {
        let start = || {
            _ = rustix::thread::set_no_new_privs(true);
            crate::landlock::forbid_writes();
            command.spawn()
        };
        let thread = std::thread::Builder::new().spawn_scoped(scope, start)?;
        thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

#[cfg(not(target_os = "linux"))]
fn spawn_without_rights(command: &mut Command) -> io::Result<Child> {
    command.spawn()
}

/// Bytes of address space that this process may still take; nothing where that is not limited (`ulimit -v`).
pub fn address_space_left() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        Some(limit.saturating_sub(in_status(&status, "VmSize").ok()?.0))
    }
    #[cfg(not(target_os = "linux"))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_read() {
        let status = "Name:\thearth\nVmHWM:\t    3340 kB\nVmRSS:\t    3000 kB\n";
        assert_eq!(resident(status), Ok(Bytes(3000 * 1024)));
        for broken in ["", "VmRSS: lots kB", "VmRSS: -1 kB", "VmRSS: 18446744073709551615 kB"] {
            assert!(resident(broken).is_err(), "{broken}");
        }
    }

    #[test]
    fn work_takes_cpu_time() {
        let before = cpu_time();
        let sum = (0..20_000_000u64).fold(0u64, |sum, i| std::hint::black_box(sum ^ i));
        assert!(cpu_time() > before, "{sum}");
    }

    /// Limits are set when it has started, which the shell waits for.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_program_is_confined() {
        let script = "sleep 0.5; ulimit -v; ulimit -t; grep NoNewPrivs /proc/self/status";
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(std::process::Stdio::piped());
        let child = spawn_confined(&mut command, 1 << 30, Duration::from_secs(60)).unwrap();
        let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert_eq!(said, "1048576\n60\nNoNewPrivs:\t1\n");
    }

    /// As far as the kernel can: it may read and say what it read, and change nothing.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_confined_program_changes_no_file() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("old"), "old").unwrap();
        let can_forbid =
            std::thread::scope(|scope| scope.spawn(crate::landlock::forbid_writes).join().unwrap());
        let script = "cat old; echo x > new; echo x > old; rm old; mkdir folder; ln -s old link";
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(folder.path());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let child = spawn_confined(&mut command, 1 << 30, Duration::from_secs(60)).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "old");
        let names = std::fs::read_dir(folder.path()).unwrap().count();
        let old = std::fs::read_to_string(folder.path().join("old")).unwrap_or_default();
        if can_forbid {
            assert_eq!((names, old.as_str()), (1, "old"), "{output:?}");
        }
        // Only that program has lost its rights.
        std::fs::write(folder.path().join("ours"), "ours").unwrap();
    }
}
