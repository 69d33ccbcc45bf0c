//! Models by name, as Python's `huggingface_hub` keeps them on disk. Nothing here uses the network; `hearth fetch` fills
//! the same folders by the crate `hub`.
//!
//! ```text
//! HF_HUB_CACHE/                          else HF_HOME/hub, else ~/.cache/huggingface/hub
//!   models--OWNER--NAME/
//!     refs/main                          the commit that a branch or tag was at
//!     snapshots/COMMIT/vae/config.json   a link into blobs/
//!     blobs/CHECKSUM                     the file itself
//!   .locks/models--OWNER--NAME/CHECKSUM.lock
//! ```
//!
//! A name becomes the path of its snapshot, also where that does not exist yet: `snapshots/main`. So all behind it
//! deals with paths alone, and [`HubPath`] reads the name back out of one.

pub mod complete;
pub mod listing;

use std::fmt;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// What a user typed for a model of the hub: `OWNER/NAME`, `hf:OWNER/NAME@REVISION`, `OWNER/NAME/FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// Who published it.
    pub owner: String,
    /// What it is called.
    pub name: String,
    /// Branch, tag or commit, where one was typed.
    pub revision: Option<String>,
    /// A file or folder of it, where one was typed.
    pub file: Option<String>,
}

/// The branch that is meant where none is named.
pub const MAIN: &str = "main";

/// What tells a name from a path.
pub const PREFIX: &str = "hf:";

/// Taken: `huggingface_hub`, `validate_repo_id`.
const LONGEST_NAME: usize = 96;

impl HubName {
    /// Reads a name; `None` if this can be none, so that it is a path.
    pub fn parse(typed: &str) -> Option<Self> {
        let typed = typed.strip_prefix(PREFIX).unwrap_or(typed);
        let (owner, rest) = typed.split_once('/')?;
        let (name, file) =
            rest.split_once('/').map_or((rest, None), |(name, file)| (name, Some(file)));
        let (name, revision) =
            name.split_once('@').map_or((name, None), |(name, at)| (name, Some(at)));
        let is_valid = is_name(owner)
            && is_name(name)
            && owner.len() + name.len() < LONGEST_NAME
            && revision.is_none_or(is_revision)
            && file.is_none_or(is_inside);
        is_valid.then(|| Self {
            owner: owner.into(),
            name: name.into(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// The branch, tag or commit that is meant.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// Its folder in the cache.
    pub fn folder(&self, cache: &Path) -> PathBuf {
        cache.join(self.folder_name())
    }

    /// What that is called.
    pub fn folder_name(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }

    /// The snapshot in a cache; `None` if it is not there.
    fn snapshot(&self, cache: &Path) -> Option<PathBuf> {
        let (folder, revision) = (self.folder(cache), self.revision());
        let commit = fs::read_to_string(folder.join("refs").join(revision)).ok();
        let commit = commit.map(|text| text.trim().to_owned()).filter(|text| is_commit(text));
        let snapshots = [commit.as_deref(), Some(revision)].into_iter().flatten();
        let mut snapshots = snapshots.map(|name| folder.join("snapshots").join(name));
        snapshots.find(|snapshot| snapshot.is_dir())
    }

    /// Where its snapshot is in a cache, or would be.
    fn path(&self, cache: &Path) -> PathBuf {
        let would_be = || self.folder(cache).join("snapshots").join(self.revision());
        let snapshot = self.snapshot(cache).unwrap_or_else(would_be);
        self.file.as_ref().map_or(snapshot.clone(), |file| snapshot.join(file))
    }
}

impl fmt::Display for HubName {
    /// As it is typed again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, name, revision, file } = self;
        write!(f, "{owner}/{name}")?;
        if let Some(revision) = revision {
            write!(f, "@{revision}")?;
        }
        file.as_ref().map_or(Ok(()), |file| write!(f, "/{file}"))
    }
}

/// Taken: `huggingface_hub`, `validate_repo_id`.
fn is_name(part: &str) -> bool {
    let is_end = |c: char| c == '-' || c == '.';
    let is_known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !part.is_empty()
        && part.chars().all(is_known)
        && !part.starts_with(is_end)
        && !part.ends_with(is_end)
        && !part.contains("--")
        && !part.contains("..")
        && part.rsplit('.').next() != Some("git")
}

/// A branch, tag or commit without slashes.
pub fn is_revision(text: &str) -> bool {
    let is_known = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    !text.is_empty() && text.chars().all(is_known) && !text.starts_with('.') && !text.contains("..")
}

/// A commit's whole name.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a relative path stays in its folder, and is one that people can read.
pub fn is_inside(path: &str) -> bool {
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    path.split('/').all(is_plain) && !path.chars().any(|c| c.is_control() || c == '\\')
}

/// The cache folder, from the environment as `huggingface_hub` reads it; `None` where there is no home.
pub fn cache_dir() -> Option<PathBuf> {
    cache_dir_of(&|name| std::env::var(name).ok())
}

fn cache_dir_of(variable: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let cache =
        ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"].iter().find_map(|name| folder_of(name, variable));
    cache.or_else(|| Some(home_of(variable)?.join("hub")))
}

/// The folder of all that `huggingface_hub` keeps: the cache, and a token.
pub fn home_dir() -> Option<PathBuf> {
    home_of(&|name| std::env::var(name).ok())
}

fn home_of(variable: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let caches = || {
        folder_of("XDG_CACHE_HOME", variable)
            .or_else(|| Some(folder_of("HOME", variable)?.join(".cache")))
    };
    folder_of("HF_HOME", variable).or_else(|| Some(caches()?.join("huggingface")))
}

/// A folder that a variable names, absolute.
fn folder_of(name: &str, variable: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let typed = variable(name).filter(|typed| !typed.is_empty())?;
    let home = || variable("HOME").map(PathBuf::from);
    let path = match typed.strip_prefix('~') {
        Some("") => home()?,
        Some(rest) if rest.starts_with('/') => home()?.join(rest.trim_start_matches('/')),
        _ => typed.into(),
    };
    std::path::absolute(path).ok()
}

/// Endings of what is a file on one's own disk rather than the name of a model.
const FILES: [&str; 7] = [".safetensors", ".gguf", ".pt", ".pth", ".bin", ".json", ".toml"];

/// Where a model lies that was typed as a path or a name; `local` is the path that it would be. A path that exists
/// counts first. A file of a model needs `hf:` before it, or has to be there.
pub fn locate(typed: &str, local: &Path) -> PathBuf {
    cache_dir().map_or_else(|| local.into(), |cache| locate_in(&cache, typed, local))
}

fn locate_in(cache: &Path, typed: &str, local: &Path) -> PathBuf {
    let Some(name) = HubName::parse(typed).filter(|_| !local.exists()) else {
        return local.into();
    };
    let path = name.path(cache);
    let is_told = typed.starts_with(PREFIX);
    let is_file = name.file.is_some() || FILES.iter().any(|end| typed.ends_with(end));
    if is_told || !is_file || path.exists() { path } else { local.into() }
}

/// Whether this says that it is a name, and is none.
pub fn is_bad_name(typed: &str) -> bool {
    typed.starts_with(PREFIX) && HubName::parse(typed).is_none()
}

/// A path into the cache, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubPath {
    /// The cache.
    pub cache: PathBuf,
    /// Whose snapshot it is: the revision is a commit, or what was asked for and is not there.
    pub name: HubName,
}

impl HubPath {
    /// Reads a path; `None` if it does not lie in a snapshot.
    pub fn of(path: &Path) -> Option<Self> {
        let parts: Vec<&str> = path
            .components()
            .map(|part| if let Component::Normal(part) = part { part.to_str() } else { Some("/") })
            .collect::<Option<_>>()?;
        let at = parts.iter().rposition(|part| part.starts_with("models--"))?;
        let (owner, name) = parts[at].strip_prefix("models--")?.split_once("--")?;
        let (snapshots, revision) = (parts.get(at + 1)?, parts.get(at + 2)?);
        if *snapshots != "snapshots" || !is_name(owner) || !is_name(name) {
            return None;
        }
        let file = Some(parts[at + 3..].join("/")).filter(|file| !file.is_empty());
        let (owner, name, revision) = (owner.into(), name.into(), Some((*revision).into()));
        let cache = path.components().take(at).collect();
        Some(Self { cache, name: HubName { owner, name, revision, file } })
    }

    /// The snapshot that it lies in.
    pub fn snapshot(&self) -> PathBuf {
        self.name.folder(&self.cache).join("snapshots").join(self.name.revision())
    }

    /// The shortest name that leads to it.
    pub fn short_name(&self) -> HubName {
        let plain = HubName { revision: None, ..self.name.clone() };
        let is_same = plain.path(&self.cache) == self.name.path(&self.cache);
        if is_same || self.name.revision() == MAIN { plain } else { self.name.clone() }
    }
}

/// What a model is called: by its name on the hub, else by that of its folder or file.
pub fn model_name(path: &Path) -> String {
    match HubPath::of(path).map(|found| found.name) {
        Some(HubName { name, file: None, .. }) => name,
        _ => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
    }
}

/// A model as a command would name it.
pub fn shown(path: &Path) -> String {
    HubPath::of(path)
        .map_or_else(|| path.display().to_string(), |found| found.short_name().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn names_are_told_from_paths() {
        let parse = |typed: &str| HubName::parse(typed).map(|name| name.to_string());
        for name in
            ["a/b", "black-forest-labs/FLUX.1-dev", "a/b@v1.0", "a/b/vae/x.safetensors", "a/b@x/c"]
        {
            assert_eq!(parse(name).as_deref(), Some(name));
            assert_eq!(parse(&format!("hf:{name}")).as_deref(), Some(name));
        }
        for path in [
            "model", "/a/b", "./a", "../a", "a/..", "a/b/../c", "a b/c", "a/b@", "a/b@../x", "~/a",
            "a/b//c",
        ] {
            assert_eq!(parse(path), None, "{path}");
        }
        for path in ["a--b/c", "-a/b", "a/b.git", "a/b/\u{7}", &format!("a/{}", "b".repeat(99))] {
            assert_eq!(parse(path), None, "{path}");
        }
        assert!(is_bad_name("hf:x") && !is_bad_name("x") && !is_bad_name("hf:a/b"));
    }

    #[test]
    fn the_cache_is_where_python_has_it() {
        let check = |set: &[(&str, &str)], expected: Option<&str>| {
            let variable = |name: &str| {
                set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(cache_dir_of(&variable), expected.map(PathBuf::from), "{set:?}");
        };
        let home = ("HOME", "/h");
        check(&[home], Some("/h/.cache/huggingface/hub"));
        check(&[home, ("XDG_CACHE_HOME", "/c")], Some("/c/huggingface/hub"));
        check(&[home, ("HF_HOME", "~/hf")], Some("/h/hf/hub"));
        check(&[home, ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/x")], Some("/x"));
        check(&[home, ("HF_HUB_CACHE", "")], Some("/h/.cache/huggingface/hub"));
        check(&[], None);
    }

    #[test]
    fn a_name_becomes_a_path_and_a_path_a_name() {
        let place = tempfile::tempdir().unwrap();
        let (cache, local) = (place.path().join("hub"), place.path().join("a/b"));
        let folder = cache.join("models--a--b");
        let at = |typed: &str| locate_in(&cache, typed, &local);
        assert_eq!(at("a/b"), folder.join("snapshots/main"));
        assert_eq!(at("a/b/c.gguf"), local);
        assert_eq!(at("hf:a/b/c.gguf"), folder.join("snapshots/main/c.gguf"));
        assert_eq!(at("a/b.gguf"), local);
        let snapshot = folder.join("snapshots").join(COMMIT);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(folder.join("refs")).unwrap();
        assert_eq!(at(&format!("a/b@{COMMIT}")), snapshot);
        assert_eq!(shown(&snapshot), format!("a/b@{COMMIT}"));
        for wrong in ["../../../x", "main", ""] {
            fs::write(folder.join("refs/main"), wrong).unwrap();
            assert_eq!(at("a/b"), folder.join("snapshots/main"));
        }
        fs::write(folder.join("refs/main"), format!("{COMMIT}\n")).unwrap();
        assert_eq!(at("a/b"), snapshot);
        assert_eq!(at("a/b@v2"), folder.join("snapshots/v2"));
        assert_eq!((model_name(&snapshot), shown(&snapshot)), ("b".into(), "a/b".into()));
        fs::write(snapshot.join("c.gguf"), "").unwrap();
        assert_eq!(at("a/b/c.gguf"), snapshot.join("c.gguf"));
        assert_eq!(model_name(&at("a/b/c.gguf")), "c.gguf");
        fs::create_dir_all(&local).unwrap();
        assert_eq!(at("a/b"), local, "a path that exists counts first");
        assert_eq!((HubPath::of(&local), model_name(&local)), (None, "b".into()));
    }
}
