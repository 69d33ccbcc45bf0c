//! How many threads to compute with: one for each of the fastest cores. Two threads on one core share
//! its arithmetic units, and a slow core makes the fast ones wait at the end of every op.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

/// One per performance core that this process may use; all CPUs it may use, if the system does
/// not tell them apart.
pub fn compute_threads() -> usize {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let fast = linux(Path::new("/sys/devices")).or_else(macos);
    fast.map_or(usable, |cores| cores.min(usable))
}

/// Cores of the fastest kind: on Intel those that the kernel lists as such, on Arm those of the
/// highest capacity.
fn linux(devices: &Path) -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(devices.join(path)).ok();
    let processors = listed(&read("system/cpu/online")?)?;
    let fast = read("cpu_core/cpus").and_then(|list| listed(&list));
    let capacity = |processor: &usize| -> u32 {
        let text = read(&format!("system/cpu/cpu{processor}/cpu_capacity"));
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    };
    let highest = processors.iter().map(capacity).max()?;
    let is_fast = |processor: &usize| match &fast {
        Some(fast) => fast.contains(processor),
        None => capacity(processor) == highest,
    };
    // Threads of one core name the same siblings.
    let core = |processor: usize| {
        read(&format!("system/cpu/cpu{processor}/topology/thread_siblings_list"))
    };
    let cores: Option<HashSet<_>> = processors.into_iter().filter(is_fast).map(core).collect();
    cores.map(|cores| cores.len()).filter(|count| *count > 0)
}

/// Level 0 is the fastest.
fn macos() -> Option<usize> {
    let output = Command::new("sysctl").args(["-n", "hw.perflevel0.physicalcpu"]).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok().filter(|count| *count > 0)
}

/// The numbers of a list like `0-3,8`.
fn listed(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(numbers)
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
        files.extend([0, 2].map(|processor| siblings(processor, "0,2\n")));
        files.extend([1, 3].map(|processor| siblings(processor, "1,3\n")));
        assert_eq!(linux(devices(&files).path()), Some(2));
    }

    #[test]
    fn slow_cores_do_not_count() {
        let mut arm = vec![("system/cpu/online".to_owned(), "0-2\n")];
        for (processor, (capacity, list)) in
            [("718\n", "0\n"), ("1024\n", "1\n"), ("1024\n", "2\n")].into_iter().enumerate()
        {
            arm.push((format!("system/cpu/cpu{processor}/cpu_capacity"), capacity));
            arm.push(siblings(processor, list));
        }
        assert_eq!(linux(devices(&arm).path()), Some(2));
        let mut intel = vec![("system/cpu/online".to_owned(), "0-3\n")];
        intel.push(("cpu_core/cpus".to_owned(), "0-1\n"));
        intel.extend([0, 1].map(|processor| siblings(processor, "0-1\n")));
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
