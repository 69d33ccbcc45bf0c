//! The project's own files, for the house rules and for `just size`: what git tracks, so that the output
//! of a demo or somebody's job in the same folder is not held against the project.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Text files of a checkout with their paths relative to its root, in order.
pub struct Tree {
    #[allow(dead_code)] // `just size` does not ask.
    pub root: PathBuf,
    pub files: Vec<(String, String)>,
}

const KINDS: &[&str] = &["rs", "toml", "md", "txt", "json", "cu", "wgsl", "wgsli"];

impl Tree {
    /// This project.
    pub fn ours() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        Self::at(&root.canonicalize().expect("the project's root exists"))
    }

    /// Any folder.
    pub fn at(root: &Path) -> Self {
        let paths = tracked(root).unwrap_or_else(|| walked(root));
        let is_text = |path: &Path| {
            path.extension().is_some_and(|kind| KINDS.iter().any(|known| kind == *known))
        };
        let read = |path: PathBuf| {
            let text = fs::read_to_string(root.join(&path)).expect("our text files are UTF-8");
            (path.to_string_lossy().replace('\\', "/"), text)
        };
        let ours = paths.into_iter().filter(|path| is_text(path) && root.join(path).exists());
        let mut files: Vec<_> = ours.map(read).collect();
        files.sort_unstable();
        Self { root: root.to_owned(), files }
    }

    /// The Rust sources.
    pub fn sources(&self) -> impl Iterator<Item = (&str, &str)> {
        self.of_kind(".rs")
    }

    /// Files whose names end so.
    pub fn of_kind<'a>(&'a self, suffix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let files = self.files.iter().filter(move |(path, _)| path.ends_with(suffix));
        files.map(|(path, text)| (path.as_str(), text.as_str()))
    }
}

/// What git tracks; nothing where this is no checkout, or where there is no git.
fn tracked(root: &Path) -> Option<Vec<PathBuf>> {
    let output = Command::new("git").arg("-C").arg(root).args(["ls-files", "-z"]).output().ok()?;
    let listed = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    Some(listed.split_terminator('\0').map(PathBuf::from).collect())
}

/// Every file but those that the `.gitignore` at the root names, for sources without their history. Knows
/// the only form that is used there: a name at the root, which may end in a star.
fn walked(root: &Path) -> Vec<PathBuf> {
    let ignored = fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
    let is_ignored = |path: &Path| {
        let name = path.to_string_lossy();
        ignored.lines().chain([".git"]).map(|line| line.trim_matches('/')).any(|line| {
            match line.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => name == line,
            }
        })
    };
    let (mut files, mut folders) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder)).expect("a folder of the project can be read")
        {
            let entry = entry.expect("an entry can be read");
            let path = folder.join(entry.file_name());
            if is_ignored(&path) {
                continue;
            }
            if root.join(&path).is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files
}
