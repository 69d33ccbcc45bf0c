//! `docs/errors.md` against the program: each message that an error of the libraries can print stands
//! there, told by the longest part of it that never changes.

use crate::tree::Tree;

/// What no user can cause: contracts between our own crates. Whoever sees one reports a fault.
const UNSEEN: &[&str] = &[
    "backward starts from a scalar, not from shape",
    "cannot be converted from",
    "has no backward, but its input requires a gradient",
    "is still held by",
    "is on another device",
    "needs a buffer of",
    "nothing to train: the loss does not depend on any parameter",
    "values do not fill a tensor of shape",
];

/// A shorter part says nothing: such a message is another error's, with a place.
const TOLD_BY: usize = 5;

/// The part of each message that tells it from others.
fn messages(tree: &Tree) -> Vec<(String, String)> {
    let crates = ["crates/trainer/", "crates/compute/", "crates/weights/", "crates/hub/"];
    let ours = tree.sources().filter(|(path, _)| crates.iter().any(|of| path.starts_with(of)));
    let mut messages = Vec::new();
    for (path, text) in ours {
        for rest in text.split("#[error(").skip(1) {
            let Some(message) = rest.trim_start().strip_prefix('"') else { continue };
            let message = message.split('"').next().unwrap_or_default();
            // Strings go on in the next line behind a backslash.
            let lines: Vec<&str> = message.split("\\\n").map(str::trim_start).collect();
            let message = lines.concat();
            let constant = message.split('{').map(|part| part.rsplit('}').next().unwrap_or(part));
            let parts = constant.map(|part| part.trim_matches([' ', ':', ',', '`', '\\']));
            let longest = parts.max_by_key(|part| part.len()).unwrap_or_default();
            if longest.len() >= TOLD_BY {
                messages.push((path.to_owned(), longest.to_owned()));
            }
        }
    }
    messages
}

fn unexplained(tree: &Tree, page: &str) -> Vec<String> {
    let is_told = |told: &str| page.contains(told) || UNSEEN.contains(&told);
    let all = messages(tree).into_iter().filter(|(_, told)| !is_told(told));
    all.map(|(path, told)| format!("{path}: `{told}` is not in docs/errors.md")).collect()
}

#[test]
fn every_message_is_explained() {
    let tree = Tree::ours();
    let page = tree.of_kind("docs/errors.md").next().expect("the page exists").1;
    let missing = unexplained(&tree, page);
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    let messages = messages(&tree);
    assert!(messages.len() > 60, "only {} messages were found", messages.len());
    for unseen in UNSEEN {
        assert!(messages.iter().any(|(_, told)| told == unseen), "no error says `{unseen}`");
    }
}

#[test]
fn a_message_that_is_not_there_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("crates/weights/src");
    std::fs::create_dir_all(&source).unwrap();
    let code = "#[error(\"{x}: no room \\\n    for {y}\")]\n#[error(\n    \"broke: {}\", z)]\n#[error(transparent)]";
    std::fs::write(source.join("error.rs"), code).unwrap();
    let tree = Tree::at(folder.path());
    assert_eq!(unexplained(&tree, "no room for N").len(), 1);
    assert_eq!(unexplained(&tree, "no room for N, broke").len(), 0);
}
