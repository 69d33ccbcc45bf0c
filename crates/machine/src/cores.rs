//! How many threads to compute with: one for each of the fastest cores. Two threads on one core share
//! its arithmetic units, and a slow core makes the fast ones wait at the end of every op.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

/// One per performance core that this process may use; all logical CPUs it may use, if the system does
/// not tell them apart.
pub fn compute_threads() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let fast = linux_performance_cores().or_else(macos);
    fast.map_or(usable, |cores| cores.min(usable))
}

/// Performance cores of a Linux machine, each once however many threads it has.
pub(crate) fn linux_performance_cores() -> Option<usize> {
    linux(Path::new("/sys/devices"))
}

/// Cores of the fastest kind: on Intel those that the kernel lists as such, on Arm those of the
/// highest capacity.
fn linux(devices: &Path) -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(devices.join(path)).ok();
    let cpus = listed(&read("system/cpu/online")?)?;
    let fast = read("cpu_core/cpus").and_then(|list| listed(&list));
    let capacity = |cpu: &usize| -> u32 {
        let text = read(&format!("system/cpu/cpu{cpu}/cpu_capacity"));
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    let highest = cpus.iter().map(capacity).max()?;
    let is_fast = |cpu: &usize| match &fast {
        Some(fast) => fast.contains(cpu),
        None => capacity(cpu) == highest,
    };
    // Threads of one core name the same siblings.
    let core = |cpu: usize| read(&format!("system/cpu/cpu{cpu}/topology/thread_siblings_list"));
    let cores: Option<HashSet<_>> = cpus.into_iter().filter(is_fast).map(core).collect();
    cores.map(|cores| cores.len()).filter(|count| *count > 0)
}

/// Level 0 is the fastest.
fn macos() -> Option<usize> {
    let output = Command::new("sysctl").args(["-n", "hw.perflevel0.physicalcpu"]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok().filter(|count| *count > 0)
}

/// The CPUs of a list like `0-3,8`.
fn listed(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of devices with these files.
    fn devices(files: &[(String, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        folder
    }

    fn siblings(cpu: usize, list: &str) -> (String, &str) {
        (format!("system/cpu/cpu{cpu}/topology/thread_siblings_list"), list)
    }

    #[test]
    fn two_threads_of_a_core_count_once() {
        let mut files = vec![("system/cpu/online".to_owned(), "0-3\n")];
        files.extend([0, 2].map(|cpu| siblings(cpu, "0,2\n")));
        files.extend([1, 3].map(|cpu| siblings(cpu, "1,3\n")));
        assert_eq!(linux(devices(&files).path()), Some(2));
    }

    #[test]
    fn slow_cores_do_not_count() {
        let mut arm = vec![("system/cpu/online".to_owned(), "0-2\n")];
        for (cpu, (capacity, list)) in
            [("718\n", "0\n"), ("1024\n", "1\n"), ("1024\n", "2\n")].into_iter().enumerate()
        {
            arm.push((format!("system/cpu/cpu{cpu}/cpu_capacity"), capacity));
            arm.push(siblings(cpu, list));
        }
        assert_eq!(linux(devices(&arm).path()), Some(2));
        let mut intel = vec![("system/cpu/online".to_owned(), "0-3\n")];
        intel.push(("cpu_core/cpus".to_owned(), "0-1\n"));
        intel.extend([0, 1].map(|cpu| siblings(cpu, "0-1\n")));
        intel.extend([siblings(2, "2\n"), siblings(3, "3\n")]);
        assert_eq!(linux(devices(&intel).path()), Some(1));
    }

    #[test]
    fn what_the_system_does_not_tell_is_not_guessed() {
        assert_eq!(linux(devices(&[]).path()), None);
        let bare = [("system/cpu/online".to_owned(), "0-1\n")];
        assert_eq!(linux(devices(&bare).path()), None);
        assert_eq!(listed("0-1,4,6-7\n"), Some(vec![0, 1, 4, 6, 7]));
        assert_eq!(listed("none"), None);
        assert!(compute_threads() >= 1);
    }
}
