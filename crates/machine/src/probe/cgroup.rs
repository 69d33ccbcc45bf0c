//! Control groups: the limits that containers, services and batch systems put around us. Version
//! 2 everywhere, version 1 where the memory controller still lives there.

use crate::memory::ContainerLimit;
use crate::reading::{Bytes, Reading, Unknown};
use crate::source::ProbeSource;

/// Chosen: version 1 writes "no limit" as the largest page-aligned number, which depends on the
/// page size; no computer has an exbibyte.
const NO_LIMIT: u64 = 1 << 60;

/// The tightest memory limit on the way from our group up to the root.
pub fn memory_limit(source: &mut ProbeSource) -> Reading<Option<ContainerLimit>> {
    let groups = match source.file("/proc/self/cgroup") {
        Ok(text) => text,
        Err(reason) => return source.reading("/proc/self/cgroup", Err(reason)),
    };
    let mut tightest = None::<(ContainerLimit, String)>;
    let mut answer = Err(Unknown::because("no memory controller is mounted"));
    for tree in trees(&groups) {
        for folder in tree.folders() {
            let path = format!("{folder}/{}", tree.names.limit);
            match group_limit(source, tree.names, &folder) {
                Ok(Some(limit))
                    if tightest.as_ref().is_none_or(|(known, _)| limit.left < known.left) =>
                {
                    tightest = Some((limit, path));
                }
                Ok(_) => answer = Ok(None),
                Err(reason) if reason.0 != "no such file" && reason.0 != "not in the recording" => {
                    answer = answer.or(Err(Unknown(format!("{path}: {reason}"))));
                }
                Err(_) => {}
            }
        }
    }
    match tightest {
        Some((limit, path)) => source.reading(path, Ok(Some(limit))),
        // The root group of version 2 has no limit file at all: unlimited, not unknown.
        None if groups.trim() == "0::/" => source.reading("/sys/fs/cgroup", Ok(None)),
        None => source.reading("/sys/fs/cgroup", answer),
    }
}

/// CPUs' worth of time that version 2 grants us, rounded up.
pub fn cpu_quota(source: &mut ProbeSource) -> Option<u32> {
    let groups = source.file("/proc/self/cgroup").ok()?;
    let unified = trees(&groups).into_iter().find(|tree| tree.names.limit == V2.limit)?;
    let quota = |folder: String| parse_cpu_max(&source.file(&format!("{folder}/cpu.max")).ok()?);
    unified.folders().into_iter().filter_map(quota).min()
}

/// `100000 50000` is two CPUs, `max 100000` is no limit.
fn parse_cpu_max(text: &str) -> Option<u32> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (u32, u32) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0).then(|| quota.div_ceil(period).max(1))
}

/// What the files of a version are called.
struct CgroupFiles {
    root: &'static str,
    limit: &'static str,
    usage: &'static str,
    reclaimable: &'static str,
}

const V1: CgroupFiles = CgroupFiles {
    root: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
};

const V2: CgroupFiles = CgroupFiles {
    root: "/sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: "inactive_file ",
};

/// A tree of groups, and our place in it.
struct CgroupTree {
    names: &'static CgroupFiles,
    group: String,
}

/// Reads `/proc/self/cgroup`: `0::/path` is version 2, `4:memory:/path` version 1.
fn trees(groups: &str) -> Vec<CgroupTree> {
    let parse = |line: &str| {
        let mut parts = line.splitn(3, ':');
        let names = match (parts.next()?, parts.next()?) {
            ("0", "") => &V2,
            (_, controllers) if controllers.split(',').any(|name| name == "memory") => &V1,
            _ => return None,
        };
        Some(CgroupTree { names, group: parts.next()?.trim_end_matches('/').to_owned() })
    };
    groups.lines().filter_map(parse).collect()
}

impl CgroupTree {
    /// Our group and all above it. In a container the path may be the host's and not exist; the
    /// root is then the container's own group.
    fn folders(&self) -> Vec<String> {
        let mut folders = Vec::new();
        let mut group = self.group.as_str();
        while !group.is_empty() {
            folders.push(format!("{}{group}", self.names.root));
            group = group.rsplit_once('/').map_or("", |(parent, _)| parent);
        }
        folders.push(self.names.root.into());
        folders
    }
}

fn group_limit(
    source: &mut ProbeSource,
    names: &CgroupFiles,
    folder: &str,
) -> Result<Option<ContainerLimit>, Unknown> {
    let limit = source.file(&format!("{folder}/{}", names.limit))?;
    if limit.trim() == "max" {
        return Ok(None);
    }
    let limit = number(&limit)?;
    if limit >= NO_LIMIT {
        return Ok(None);
    }
    let used = number(&source.file(&format!("{folder}/{}", names.usage))?)?;
    let stat = source.file(&format!("{folder}/memory.stat")).unwrap_or_default();
    let cached =
        stat.lines().find_map(|line| line.strip_prefix(names.reclaimable)?.trim().parse().ok());
    let held = Bytes(used).saturating_sub(Bytes(cached.unwrap_or(0)));
    Ok(Some(ContainerLimit { limit: Bytes(limit), left: Bytes(limit).saturating_sub(held) }))
}

fn number(text: &str) -> Result<u64, Unknown> {
    let text = text.trim();
    text.parse().map_err(|_| Unknown(format!("not a number of bytes: {text:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::testing::source;

    fn check(answers: &[(&str, &str)], expected: Result<Option<(u64, u64)>, &str>) {
        let found = memory_limit(&mut source(answers)).value;
        let found = found.map(|limit| limit.map(|limit| (limit.limit.0, limit.left.0)));
        assert_eq!(found, expected.map_err(Unknown::because), "{answers:?}");
    }

    #[test]
    fn the_tightest_group_on_the_way_up_counts() {
        check(
            &[
                ("file /proc/self/cgroup", "0::/job/step\n"),
                ("file /sys/fs/cgroup/job/step/memory.max", "max\n"),
                ("file /sys/fs/cgroup/job/memory.max", "8000\n"),
                ("file /sys/fs/cgroup/job/memory.current", "3000\n"),
                (
                    "file /sys/fs/cgroup/job/memory.stat",
                    "anon 100\ninactive_file 1000\nactive_file 7\n",
                ),
            ],
            Ok(Some((8000, 6000))),
        );
    }

    #[test]
    fn version_one_and_its_idea_of_no_limit() {
        let group = ("file /proc/self/cgroup", "4:memory:/docker/abc\n0::/\n");
        let path = "file /sys/fs/cgroup/memory/memory.limit_in_bytes";
        check(&[group, (path, "9223372036854771712\n")], Ok(None));
        check(
            &[
                group,
                (path, "5000\n"),
                ("file /sys/fs/cgroup/memory/memory.usage_in_bytes", "6000\n"),
            ],
            Ok(Some((5000, 0))),
        );
    }

    #[test]
    fn the_root_group_has_no_limit_and_a_missing_tree_is_unknown() {
        check(&[("file /proc/self/cgroup", "0::/\n")], Ok(None));
        check(&[("file /proc/self/cgroup", "0::/job\n")], Err("no memory controller is mounted"));
        check(&[], Err("not in the recording"));
    }

    #[test]
    fn nonsense_in_a_limit_file_is_not_a_limit() {
        let answers = [
            ("file /proc/self/cgroup", "0::/job\n"),
            ("file /sys/fs/cgroup/job/memory.max", "lots\n"),
        ];
        check(&answers, Err("/sys/fs/cgroup/job/memory.max: not a number of bytes: \"lots\""));
    }

    #[test]
    fn quotas_round_up_to_whole_cpus() {
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max("150000 100000\n"), Some(2));
        assert_eq!(parse_cpu_max("1000 100000\n"), Some(1));
        assert_eq!(parse_cpu_max("1000 0\n"), None);
    }

    #[test]
    fn a_group_name_may_hold_colons() {
        assert_eq!(trees("0::/a:b/c\n")[0].folders()[0], "/sys/fs/cgroup/a:b/c");
    }
}
