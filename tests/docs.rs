//! `README.md` and the pages of `docs/` against the program: what they quote is what it prints.
//!
//! | fenced block | what becomes of it |
//! |---|---|
//! | `console` | run: `$ hearth …`, and below it the output, compared line by line |
//! | `sh` | commands without their output; a test in `crates/cli/src/args.rs` parses them |
//! | `toml`, `json` | parsed; below `<!-- file: NAME -->` also written, for the commands that follow |
//! | `python`, `rust` | nothing |
//! | `text` below `<!-- drawing -->` | nothing: a tree of files, a diagram |
//! | `text` below `<!-- recorded: WHERE, YYYY-MM-DD -->` | nothing: the output of a machine that tests do not have |
//!
//! Any other block is refused. In a quoted output `…` stands for anything, and on a line of its own for any number of
//! lines. A command that goes on in the next line ends in a backslash. The commands of a page run one after the other
//! in a folder of their own, with our recipes, machines, assets, docs and tests beside them, on the CPU unless they say
//! otherwise. A command fails exactly where an `error:` is quoted.

use std::fs;
use std::io::{Read, Seek};
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use crate::command;
use crate::tree::Tree;

const FENCE: &str = "```";
const PROMPT: &str = "$ ";
const ANYTHING: &str = "…";

/// A fenced block of a page.
struct Block {
    /// Where it begins, from 1.
    line: usize,
    language: String,
    /// What the HTML comment above it says; empty where there is none.
    note: String,
    lines: Vec<String>,
}

/// A command and the output that a page quotes.
struct Quote {
    line: usize,
    command: String,
    output: Vec<String>,
}

fn blocks(text: &str) -> Vec<Block> {
    let (mut blocks, mut note) = (Vec::new(), String::new());
    let mut lines = text.lines().zip(1..);
    while let Some((line, number)) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix(FENCE) else {
            // An empty line may stand between a comment and its block.
            if !line.trim().is_empty() {
                comment(line).unwrap_or_default().clone_into(&mut note);
            }
            continue;
        };
        let indent = line.len() - line.trim_start().len();
        let inside = lines.by_ref().map(|(line, _)| line);
        let inside = inside.take_while(|line| !line.trim_start().starts_with(FENCE));
        let inside = inside.map(|line| line.get(indent..).unwrap_or_default().to_owned()).collect();
        let (language, note) = (language.trim().to_owned(), std::mem::take(&mut note));
        blocks.push(Block { line: number, language, note, lines: inside });
    }
    blocks
}

/// What a line says that is an HTML comment.
fn comment(line: &str) -> Option<&str> {
    line.trim().strip_prefix("<!--")?.strip_suffix("-->").map(str::trim)
}

/// What is wrong with a block, whatever the program prints.
fn fault(block: &Block) -> Option<String> {
    let text = block.lines.join("\n");
    match block.language.as_str() {
        "sh" | "python" | "rust" => None,
        "console" => {
            let begins = block.lines.first().is_some_and(|line| line.starts_with(PROMPT));
            (!begins).then(|| format!("a console block begins with a command behind `{PROMPT}`"))
        }
        "toml" => text.parse::<toml::Table>().err().map(|error| error.message().to_owned()),
        "json" => {
            let mut values = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
            values.find_map(Result::err).map(|error| error.to_string())
        }
        "text" if block.note == "drawing" || is_record(&block.note) => None,
        "text" => Some(
            "an output is a `console` block; a text that is none stands below `<!-- drawing -->` or \
             `<!-- recorded: WHERE, YYYY-MM-DD -->`"
                .to_owned(),
        ),
        other => Some(format!(
            "a block of {other:?}, expected console, sh, toml, json, python, rust or text"
        )),
    }
}

/// Whether a comment says where and when an output was recorded.
fn is_record(note: &str) -> bool {
    let is_date = |date: &str| {
        date.split('-').map(str::len).eq([4, 2, 2])
            && date.chars().all(|c| c.is_ascii_digit() || c == '-')
    };
    let said = note.strip_prefix("recorded: ").and_then(|said| said.rsplit_once(", "));
    said.is_some_and(|(place, date)| !place.is_empty() && is_date(date))
}

fn quotes(block: &Block) -> Vec<Quote> {
    let mut quotes: Vec<Quote> = Vec::new();
    for (text, line) in block.lines.iter().zip(block.line + 1..) {
        if let Some(command) = text.strip_prefix(PROMPT) {
            quotes.push(Quote { line, command: command.to_owned(), output: Vec::new() });
            continue;
        }
        let Some(quote) = quotes.last_mut() else { continue };
        if quote.output.is_empty() && quote.command.ends_with('\\') {
            quote.command.pop();
            quote.command.push_str(text.trim_start());
        } else {
            quote.output.push(text.clone());
        }
    }
    quotes
}

/// The words of a shell's line.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match quote {
            Some(end) if c == end => quote = None,
            None if c == '\'' || c == '"' => {
                word.get_or_insert_default();
                quote = Some(c);
            }
            None if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Runs a command in a folder; returns its exit code and what it printed, both outputs in one, as in a terminal.
fn run(arguments: &[&str], folder: &Path) -> (Option<i32>, String) {
    let mut file = tempfile::tempfile().unwrap();
    let mut command = command(arguments);
    // Rates that somebody measured on this machine are kept in the user's cache folder: the pages have none.
    command.current_dir(folder).env("HOME", folder).env("XDG_CACHE_HOME", folder.join(".cache"));
    command.stdout(file.try_clone().unwrap()).stderr(file.try_clone().unwrap());
    let status = command.status().expect("hearth starts");
    let mut printed = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut printed).expect("output is UTF-8");
    (status.code(), printed)
}

/// What is not as a page says.
fn difference(quote: &Quote, folder: &Path) -> Option<String> {
    let words = words(&quote.command);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let ["hearth", arguments @ ..] = &words[..] else {
        return Some(format!("`{}` is not run: only hearth is", quote.command));
    };
    let (code, printed) = run(arguments, folder);
    let lines: Vec<&str> = printed.trim_end().lines().map(str::trim_end).collect();
    let quoted = quote.output.join("\n");
    let expected: Vec<&str> = quoted.trim_end().lines().map(str::trim_end).collect();
    let is_error = expected.iter().any(|line| line.starts_with("error: "));
    let same = is_like(&expected, &lines) && (code == Some(0)) != is_error;
    (!same).then(|| {
        let code = code.map_or_else(|| "a signal".to_owned(), |code| code.to_string());
        format!(
            "`{}` ends with {code} and prints something else\n--- quoted\n{}\n--- printed\n{}",
            quote.command,
            expected.join("\n"),
            lines.join("\n")
        )
    })
}

/// Whether lines are as they are quoted.
fn is_like(quoted: &[&str], printed: &[&str]) -> bool {
    match quoted.split_first() {
        None => printed.is_empty(),
        Some((first, rest)) if first.trim() == ANYTHING => {
            (0..=printed.len()).any(|n| is_like(rest, &printed[n..]))
        }
        Some((first, rest)) => printed
            .split_first()
            .is_some_and(|(line, more)| is_line_like(first, line) && is_like(rest, more)),
    }
}

fn is_line_like(quoted: &str, line: &str) -> bool {
    let mut parts = quoted.split(ANYTHING);
    let Some(mut rest) = line.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// A folder with what commands of the pages name. Recipes are copied: their paths begin where they lie.
fn furnished(root: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let recipes = folder.path().join("recipes");
    fs::create_dir(&recipes).unwrap();
    for entry in fs::read_dir(root.join("recipes")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, recipes.join(path.file_name().unwrap())).unwrap();
    }
    for name in ["assets", "docs", "machines", "tests"] {
        symlink(root.join(name), folder.path().join(name)).unwrap();
    }
    folder
}

/// All that is wrong with a page, and how many commands it quotes the output of.
fn judged(page: &str, text: &str, root: &Path) -> (Vec<String>, usize) {
    let folder = furnished(root);
    let (mut wrong, mut n_quotes) = (Vec::new(), 0);
    for block in blocks(text) {
        if let Some(fault) = fault(&block) {
            wrong.push(format!("{page}:{}: {fault}", block.line));
            continue;
        }
        if let Some(name) = block.note.strip_prefix("file: ") {
            fs::write(folder.path().join(name), block.lines.join("\n") + "\n").unwrap();
        }
        for quote in quotes(&block).iter().filter(|_| block.language == "console") {
            n_quotes += 1;
            let difference = difference(quote, folder.path());
            wrong.extend(difference.map(|what| format!("{page}:{}: {what}", quote.line)));
        }
    }
    (wrong, n_quotes)
}

#[test]
fn what_pages_quote_is_what_the_program_prints() {
    let tree = Tree::ours();
    let is_ours = |path: &str| path == "README.md" || path.starts_with("docs/");
    let (mut wrong, mut n_quotes) = (Vec::new(), 0);
    for (page, text) in tree.of_kind(".md").filter(|(path, _)| is_ours(path)) {
        let (found, n) = judged(page, text, &tree.root);
        wrong.extend(found);
        n_quotes += n;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(n_quotes >= 8, "only {n_quotes} commands were found");
}

/// Every event of a small run, and every field of it, stands in the lists of `docs/formats.md`.
#[test]
fn events_are_described() {
    let tree = Tree::ours();
    let (_, page) = tree.of_kind("docs/formats.md").next().expect("the page exists");
    let folder = furnished(&tree.root);
    let line = "train recipes/demo.toml --out run --steps 4 --batch 1 --set data.validation=1 --quiet \
                --set sample.steps=1";
    let words = words(line);
    let (code, printed) = run(&words.iter().map(String::as_str).collect::<Vec<_>>(), folder.path());
    assert_eq!(code, Some(0), "{printed}");
    let events = fs::read_to_string(folder.path().join("run/events.jsonl")).unwrap();
    let (mut missing, mut names) = (Vec::new(), Vec::new());
    for line in events.lines() {
        let event: serde_json::Map<String, Value> = serde_json::from_str(line).unwrap();
        let name = event["event"].as_str().expect("an event has a name").to_owned();
        let mut items = page.split("\n- ").filter_map(|item| item.split("\n\n").next());
        let item = items.find(|item| item.starts_with(&format!("`{name}`:"))).unwrap_or_default();
        let is_told = |field: &str| {
            item.contains(&format!("`{field}`")) || item.contains(&format!("`{field}[]`"))
        };
        let fields = event.keys().filter(|field| !["event", "time"].contains(&field.as_str()));
        missing.extend(fields.filter(|f| !is_told(f)).map(|field| format!("{name}: {field}")));
        names.push(name);
    }
    missing.sort_unstable();
    missing.dedup();
    assert!(missing.is_empty(), "not in docs/formats.md: {missing:#?}");
    for name in
        ["phase", "begin", "step", "validation", "image_sample", "checkpoint", "exported", "end"]
    {
        assert!(names.iter().any(|other| other == name), "{name} did not happen: {names:?}");
    }
}

#[test]
fn a_quote_that_is_not_so_is_found() {
    let root = Tree::ours().root;
    let check = |page: &str, expected: &[&str]| {
        let (wrong, _) = judged("a.md", page, &root);
        assert_eq!(wrong.len(), expected.len(), "{page}\n{wrong:#?}");
        for (wrong, expected) in wrong.iter().zip(expected) {
            assert!(wrong.contains(expected), "{wrong:?} does not say {expected:?}");
        }
    };
    let version = env!("CARGO_PKG_VERSION");
    check("```console\n$ hearth --version\nhearth …\n```\n", &[]);
    check("```console\n$ hearth \\\n    --version\nhearth …\n```\n", &[]);
    check(
        "a\n\n```console\n$ hearth --version\nhearth none\n```\n",
        &[&format!("--- quoted\nhearth none\n--- printed\nhearth {version}")],
    );
    check(
        "a\n\n```console\n$ hearth --version\nhearth none\n```\n",
        &["a.md:4: `hearth --version`"],
    );
    check("```console\n$ hearth --version\n```\n", &["--- quoted\n\n--- printed\nhearth"]);
    check("```console\n$ hearth docter\n…\n```\n", &["ends with 2"]);
    check("```console\n$ hearth --version\nerror: …\n```\n", &["ends with 0"]);
    check("```console\n$ ls\n```\n", &["only hearth is"]);
    check(
        "```console\nhearth --version\n```\n",
        &["a.md:1: a console block begins with a command"],
    );
    let machine = "<!-- file: a.toml -->\n```toml\ntitle = 1\n```\n";
    let asked = "```console\n$ hearth doctor --machine a.toml\nerror: …\n…\n```\n";
    check(&format!("{machine}\n{asked}"), &[]);
    check("```toml\ntitle = \n```\n", &["a.md:1: "]);
    check("```json\n{\"a\": 1}\n{\"b\": \n```\n", &["a.md:1: EOF"]);
    check("```\nx\n```\n", &["a.md:1: a block of \"\""]);
    check("drawing\n\n```text\nx\n```\n", &["a.md:3: an output is a `console` block"]);
    check("<!-- drawing -->\n\n```text\nx\n```\n", &[]);
    check("<!-- recorded: an H200, 2026-11-17 -->\n```text\nx\n```\n", &[]);
    check("<!-- recorded: long ago -->\n```text\nx\n```\n", &["a.md:2: an output"]);
}

#[test]
fn an_ellipsis_stands_for_anything() {
    let check = |quoted: &[&str], printed: &[&str], expected: bool| {
        assert_eq!(is_like(quoted, printed), expected, "{quoted:?} {printed:?}");
    };
    check(&["a", "b"], &["a", "b"], true);
    check(&["a", "b"], &["a"], false);
    check(&["a"], &["a", "b"], false);
    check(&["…"], &[], true);
    check(&["a", "…", "d"], &["a", "b", "c", "d"], true);
    check(&["a", "…", "d"], &["a", "d", "e"], false);
    check(&["…", "b", "…", "b"], &["a", "b", "b"], true);
    check(&["loss …, mean"], &["loss 0.5, mean"], true);
    check(&["loss …, mean"], &["loss 0.5, median"], false);
    check(&["a…a"], &["a"], false);
    check(&["…: … of …"], &["x: 1 of 2"], true);
    check(&["…: … of 3"], &["x: 1 of 2"], false);
}
