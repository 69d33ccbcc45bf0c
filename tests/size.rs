//! Prints the sizes of files and functions, largest first, for people to look at. Nothing is
//! enforced: the numbers are a compass. `just size`

mod tree;

use std::io::Write;

use tree::Tree;

const SHOWN: usize = 12;

fn main() -> std::io::Result<()> {
    let tree = Tree::ours();
    let sources: Vec<_> = tree.sources().map(|(path, text)| (path, before_tests(text))).collect();
    let mut files: Vec<_> =
        sources.iter().map(|(path, lines)| (lines.len(), (*path).to_owned())).collect();
    let mut functions: Vec<_> =
        sources.iter().flat_map(|(path, lines)| functions(path, lines)).collect();
    let out = &mut std::io::stdout().lock();
    table(out, "lines of files, before their tests", &mut files)?;
    table(out, "lines of functions", &mut functions)
}

fn table(out: &mut dyn Write, title: &str, rows: &mut [(usize, String)]) -> std::io::Result<()> {
    rows.sort_unstable_by(|a, b| b.cmp(a));
    let total: usize = rows.iter().map(|(lines, _)| lines).sum();
    let at = |share: usize| rows.get(rows.len() * share / 100).map_or(0, |(lines, _)| *lines);
    writeln!(
        out,
        "{title}: {} of them, {total} lines, half above {}, a tenth above {}",
        rows.len(),
        at(50),
        at(10)
    )?;
    for (lines, name) in rows.iter().take(SHOWN) {
        writeln!(out, "{lines:6}  {name}")?;
    }
    writeln!(out)
}

fn before_tests(text: &str) -> Vec<&str> {
    text.lines().take_while(|line| line.trim() != "#[cfg(test)]").collect()
}

/// A function ends at the closing brace that stands as far left as its first line does.
fn functions(path: &str, lines: &[&str]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let Some(name) = code.split("fn ").nth(1).filter(|_| is_function(code)) else { continue };
        let name = name.split(['(', '<']).next().unwrap_or_default();
        let end = lines[start..].iter().position(|line| *line == format!("{indent}}}"));
        found.extend(end.map(|length| (length + 1, format!("{path}:{} {name}", start + 1))));
    }
    found
}

fn is_function(code: &str) -> bool {
    let words = [
        "fn ",
        "pub fn ",
        "const fn ",
        "pub const fn ",
        "pub(crate) fn ",
        "pub(super) fn ",
        "unsafe fn ",
    ];
    words.iter().any(|word| code.starts_with(word)) && code.ends_with(['{', '(', ','])
}
