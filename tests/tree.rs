//! The project's own files, for the house rules and for `just size`.

use std::path::{Path, PathBuf};

/// Text files of a checkout with their paths relative to its root, in order.
pub struct Tree {
    #[allow(dead_code)] // `just size` does not ask.
    pub root: PathBuf,
    pub files: Vec<(String, String)>,
}

const KINDS: &[&str] = &["rs", "toml", "md", "txt", "json"];
const NOT_OURS: &[&str] = &["target", "carry", ".git"];

impl Tree {
    /// This project.
    pub fn ours() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        Self::at(&root.canonicalize().expect("the project's root exists"))
    }

    /// Any folder.
    pub fn at(root: &Path) -> Self {
        let mut files = Vec::new();
        collect(root, root, &mut files);
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

fn collect(root: &Path, folder: &Path, files: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the project can be read") {
        let path = entry.expect("an entry can be read").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !NOT_OURS.contains(&name.as_str()) {
            collect(root, &path, files);
        } else if path.extension().is_some_and(|kind| KINDS.iter().any(|known| kind == *known)) {
            let relative = path.strip_prefix(root).expect("it lies below the root");
            let text = std::fs::read_to_string(&path).expect("our text files are UTF-8");
            files.push((relative.to_string_lossy().replace('\\', "/"), text));
        }
    }
}
