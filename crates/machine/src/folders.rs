//! Where the system wants programs to keep what they can make again. Creates nothing.

use std::ffi::OsString;
use std::path::PathBuf;

/// The user's cache folder, unless the system does not say where it is.
pub fn cache_dir() -> Option<PathBuf> {
    cache_dir_of(cfg!(target_os = "macos"), &|name| std::env::var_os(name))
}

/// Taken: the XDG Base Directory Specification, by which a path that is not absolute counts as not
/// set; Apple, "File System Programming Guide".
fn cache_dir_of(is_mac: bool, variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if is_mac {
        return Some(set("HOME")?.join("Library/Caches"));
    }
    set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_where_each_system_has_it() {
        let check = |is_mac, set: &[(&str, &str)], expected: Option<&str>| {
            let variable = |name: &str| {
                let found = set.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| OsString::from(value))
            };
            assert_eq!(cache_dir_of(is_mac, &variable), expected.map(PathBuf::from), "{set:?}");
        };
        let (home, cache) = (("HOME", "/h"), ("XDG_CACHE_HOME", "/c"));
        check(false, &[home, cache], Some("/c"));
        check(false, &[home], Some("/h/.cache"));
        check(false, &[home, ("XDG_CACHE_HOME", "c")], Some("/h/.cache"));
        check(true, &[home, cache], Some("/h/Library/Caches"));
        check(true, &[cache], None);
        check(false, &[("HOME", "")], None);
    }
}
