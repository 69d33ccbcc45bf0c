//! The house rules that are facts, not taste. Each rule is a function from a tree to what breaks
//! it; each is run over this project and over a small tree that breaks it on purpose.

use std::collections::BTreeMap;

use crate::tree::Tree;

/// The only files that may hold `unsafe`, each with the reason.
const UNSAFE_FILES: &[(&str, &str)] = &[
    ("crates/cli/src/interrupt.rs", "ends the process at once"),
    ("crates/cluster/src/mpi/abi.rs", "asks an MPI library, loaded at run time, what it is"),
    ("crates/cluster/src/mpi/calls.rs", "calls it"),
    ("crates/cluster/src/nccl.rs", "calls NCCL, loaded at run time"),
    ("crates/compute/src/cpu/gemm/kernels.rs", "drives the matrix unit"),
    ("crates/compute/src/cpu/gemm/mod.rs", "writes blocks of a matrix from several threads"),
    ("crates/compute/src/cpu/gemm/no_tiles.rs", "stands for a function that is"),
    ("crates/compute/src/cpu/gemm/pack.rs", "loads and stores vectors"),
    ("crates/compute/src/cpu/gemm/plain.rs", "calls the gemm crate"),
    ("crates/compute/src/cpu/gemm/load16.rs", "loads vectors"),
    ("crates/compute/src/cpu/gemm/tests.rs", "calls both ways to multiply"),
    ("crates/compute/src/cpu/gemm/tiles.rs", "sets up the matrix unit, writes blocks of a matrix"),
    ("crates/compute/src/cpu/memory.rs", "cuts an arena's mapping into tensors"),
    ("crates/compute/src/cpu/rows.rs", "lends out pieces of a slice to several threads"),
    ("crates/compute/src/cpu/shared.rs", "a slice that several threads write to"),
    ("crates/compute/src/cpu/simd.rs", "calls functions compiled for vectors that were found"),
    ("crates/compute/src/cuda/blas.rs", "calls cuBLASLt, loaded at run time"),
    ("crates/compute/src/cuda/bounce.rs", "fills memory that a GPU copies from"),
    ("crates/compute/src/cuda/cudnn.rs", "calls cuDNN, loaded at run time"),
    ("crates/compute/src/cuda/driver.rs", "calls the CUDA driver, loaded at run time"),
    ("crates/compute/src/cuda/driver/mapping.rs", "the same, for the arena's memory"),
    ("crates/compute/src/cuda/driver/pinned.rs", "the same, for copies beside the computation"),
    ("crates/compute/src/cuda/library.rs", "loads NVIDIA's libraries"),
    ("crates/compute/src/cuda/nvrtc.rs", "calls NVIDIA's compiler, loaded at run time"),
    ("crates/compute/src/gpu/shared.rs", "lends out mapped memory of a GPU"),
    ("crates/compute/src/device.rs", "gives memory back that no tensor lies in"),
    (
        "crates/compute/src/gpu/context.rs",
        "asks wgpu for matrix units, which it calls experimental",
    ),
    ("crates/compute/src/ops/attention/cpu.rs", "writes heads of a tensor from several threads"),
    ("crates/compute/src/ops/conv/cpu/winograd.rs", "writes rows of a matrix from several threads"),
    ("crates/compute/src/ops/matmul/cpu.rs", "writes tiles of a matrix from several threads"),
    ("crates/compute/src/block_swap.rs", "reads and writes blocks' memory on the host"),
    ("crates/compute/src/tensor.rs", "lends out a tensor's part of the arena"),
    ("crates/machine/src/landlock.rs", "takes rights from a thread by system calls"),
    ("crates/machine/src/live/cuda.rs", "calls into NVIDIA's libraries, loaded at run time"),
    ("crates/machine/src/live/macos.rs", "calls libnotify, which has no safe wrapper"),
    ("crates/trainer/src/task/gpu_sums.rs", "lends gradients on a GPU to NCCL"),
    ("crates/weights/src/disk/linux.rs", "asks which pages of a file are cached"),
    ("crates/weights/src/mmap.rs", "maps files into memory"),
];

/// Which of our crates each of them may use. The arrows point one way.
const ARROWS: &[(&str, &[&str])] = &[
    ("hearth", &["trainer", "hub", "cluster", "compute", "weights", "machine"]),
    ("trainer", &["cluster", "compute", "weights", "machine"]),
    ("hub", &["weights"]),
    ("cluster", &[]),
    ("compute", &[]),
    ("weights", &[]),
    ("machine", &[]),
];

/// Which modules a file or folder must not use: of its own crate, or of another.
const MODULE_ARROWS: &[(&str, &str, &[&str])] = &[
    // A page is told what to draw, and only listens to a run.
    ("crates/cli/src/render/", "crate", &["commands"]),
    ("crates/cli/src/render/", "trainer", &["train"]),
    ("crates/cli/src/text.rs", "crate", &["commands", "render"]),
];

/// The rooms of `trainer` in the data's order: each uses those before it and none behind it. Tests may use any.
const ROOMS: &[&str] = &[
    "error",
    "archive",
    "fingerprint",
    "kernel_cache",
    "suggest",
    "read_ahead",
    "hashes",
    "pixels",
    "objective",
    "model",
    "data",
    "progress",
    "text",
    "config",
    "import",
    "event",
    "report",
    "cost",
    "optim",
    "sample",
    "caption",
    "clip_score",
    "evaluate",
    "demo",
    "cache",
    "export",
    "task",
    "plan",
    "train",
    "gpu_self_test",
    "verify",
    "bench",
];

/// The one error of `trainer` holds the errors of its rooms.
const SUM_OF_ERRORS: &str = "crates/trainer/src/error/mod.rs";

fn module_comments(tree: &Tree) -> Vec<String> {
    let bare = tree.sources().filter(|(_, text)| !text.starts_with("//!"));
    bare.map(|(path, _)| format!("{path}: does not open with a module comment")).collect()
}

fn unsafe_files(tree: &Tree) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in tree.sources() {
        let listed = UNSAFE_FILES.iter().any(|(file, _)| *file == path);
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| has_unsafe(line)) {
            if !listed {
                broken.push(format!("{path}:{}: unsafe outside the listed files", at + 1));
            }
            let above = &lines[at.saturating_sub(6)..at];
            if line.contains("unsafe {") && !above.iter().any(|line| line.contains("// SAFETY: ")) {
                broken.push(format!("{path}:{}: unsafe without a SAFETY sentence above", at + 1));
            }
        }
    }
    broken
}

/// The keyword in code: not in a comment, a string or `unsafe_code`.
fn has_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    !code.contains('"')
        && code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
        || code.trim_start().starts_with("unsafe extern")
}

fn stale_unsafe_list(tree: &Tree) -> Vec<String> {
    let uses = |file: &str| {
        tree.sources().any(|(path, text)| path == file && text.lines().any(has_unsafe))
    };
    let stale = UNSAFE_FILES.iter().filter(|(file, _)| !uses(file));
    stale.map(|(file, _)| format!("{file}: listed for unsafe but has none")).collect()
}

fn todos(tree: &Tree) -> Vec<String> {
    let marks = ["TO", "FIX", "XX", "HA"].into_iter().zip(["DO", "ME", "X", "CK"]);
    let [todo, others @ ..] = &marks.map(|(a, b)| format!("{a}{b}")).collect::<Vec<_>>()[..] else {
        return vec![];
    };
    let owned = |line: &str| {
        let rest = line.split_once(&format!("{todo}(")).map(|(_, rest)| rest);
        rest.and_then(|rest| rest.split_once("): ")).is_some_and(|(owner, _)| !owner.is_empty())
    };
    each_line(tree.sources(), |line| {
        let words = || line.split(|c: char| !c.is_alphanumeric());
        if words().any(|word| word == todo) && !owned(line) {
            return Some(format!("write {todo}(owner or #issue): and what is to be done"));
        }
        let other = words().find(|word| others.iter().any(|mark| mark == word))?;
        Some(format!("{other} is not a form we use, write {todo}(owner): instead"))
    })
}

fn private_paths(tree: &Tree) -> Vec<String> {
    // Written apart so that this file does not break its own rule.
    let private = ["home", "Users", "root", "work", "tmp"].map(|folder| format!("/{folder}/"));
    each_line(tree.files.iter().map(|(path, text)| (path.as_str(), text.as_str())), |line| {
        let starts = |at: usize| {
            !line[..at].ends_with(|c: char| c.is_alphanumeric() || ".~/_-}".contains(c))
        };
        let found = private
            .iter()
            .find(|path| line.match_indices(path.as_str()).any(|(at, _)| starts(at)))?;
        Some(format!("a path of somebody's machine: {found}"))
    })
}

fn each_line<'a>(
    files: impl Iterator<Item = (&'a str, &'a str)>,
    judge: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in files {
        let lines = text.lines().enumerate();
        broken.extend(
            lines.filter_map(|(at, line)| Some(format!("{path}:{}: {}", at + 1, judge(line)?))),
        );
    }
    broken
}

fn arrows(tree: &Tree) -> Vec<String> {
    let mut broken = Vec::new();
    let allowed: BTreeMap<_, _> = ARROWS.iter().copied().collect();
    for (path, text) in tree.of_kind("Cargo.toml").filter(|(path, _)| path.starts_with("crates/")) {
        let manifest: toml::Table = text.parse().expect("a manifest is TOML");
        let name = manifest["package"]["name"].as_str().expect("a package has a name");
        let Some(allowed) = allowed.get(name) else {
            broken.push(format!("{path}: crate {name} has no place in the arrows"));
            continue;
        };
        let tables = ["dependencies", "dev-dependencies", "build-dependencies"];
        let used = tables
            .iter()
            .filter_map(|table| manifest.get(*table)?.as_table())
            .flat_map(toml::Table::keys);
        let ours = used.filter(|dependency| ARROWS.iter().any(|(ours, _)| ours == dependency));
        let wrong = ours.filter(|dependency| !allowed.contains(&dependency.as_str()));
        broken.extend(wrong.map(|dependency| format!("{path}: {name} must not use {dependency}")));
    }
    broken
}

/// Crates that open connections, and the one of ours that may use them.
const NETWORK: [&str; 2] = ["ureq", "rustls"];
const NETWORK_CRATE: &str = "crates/hub/Cargo.toml";
/// What starts a download, and the only file that may.
const DOWNLOADS: [&str; 2] = ["HubClient", "FetchJob"];
const DOWNLOADING: &str = "crates/cli/src/commands/fetch.rs";

/// Nothing but `hearth fetch` downloads.
fn network(tree: &Tree) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in tree.of_kind("Cargo.toml").filter(|(path, _)| path.starts_with("crates/")) {
        let uses = |name: &&str| text.lines().any(|line| line.starts_with(*name));
        let used = NETWORK.iter().filter(|name| path != NETWORK_CRATE && uses(name));
        broken.extend(used.map(|name| format!("{path}: must not use {name}")));
    }
    let sources = tree.sources().filter(|(path, _)| path.contains("/src/") && *path != DOWNLOADING);
    for (path, text) in sources.filter(|(path, _)| !path.starts_with("crates/hub/")) {
        let used = DOWNLOADS.iter().filter(|name| text.contains(**name));
        broken.extend(used.map(|name| format!("{path}: must not use {name}")));
    }
    broken
}

/// A file at the root, which may be missing in a small tree.
fn read_toml(tree: &Tree, name: &str) -> toml::Table {
    let text = std::fs::read_to_string(tree.root.join(name)).unwrap_or_default();
    text.parse().unwrap_or_else(|error| panic!("{name} is not TOML: {error}"))
}

/// Every dependency is of crates.io, and there once unless `deny.toml` lists it.
fn dependencies(tree: &Tree) -> Vec<String> {
    let (lock, deny) = (read_toml(tree, "Cargo.lock"), read_toml(tree, "deny.toml"));
    let packages = lock.get("package").and_then(toml::Value::as_array);
    let mut versions = BTreeMap::<&str, usize>::new();
    let mut broken = Vec::new();
    for package in packages.into_iter().flatten() {
        let name = package["name"].as_str().expect("a package has a name");
        *versions.entry(name).or_default() += 1;
        let source = package.get("source").and_then(toml::Value::as_str);
        if source.is_some_and(|source| !source.ends_with("github.com/rust-lang/crates.io-index")) {
            broken.push(format!("Cargo.lock: {name} is not of crates.io"));
        }
    }
    let skipped = deny.get("bans").and_then(|bans| bans.get("skip")?.as_array());
    let is_listed =
        |name: &str| skipped.into_iter().flatten().any(|it| it["crate"].as_str() == Some(name));
    let wrong = versions.iter().filter(|(name, n)| (**n > 1) != is_listed(name));
    broken.extend(wrong.map(|(name, n)| format!("Cargo.lock: {name} is there {n} times")));
    broken
}

fn module_arrows(tree: &Tree) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in tree.sources() {
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = code.collect::<Vec<_>>().join(" ");
        for (_, of, modules) in MODULE_ARROWS.iter().filter(|(from, ..)| path.starts_with(from)) {
            let used = used_modules(&code, of);
            let wrong = modules.iter().filter(|module| used.contains(module));
            broken.extend(wrong.map(|module| format!("{path}: must not use {of}::{module}")));
        }
    }
    broken
}

fn rooms(tree: &Tree) -> Vec<String> {
    let floor = |room: &str| ROOMS.iter().position(|other| *other == room);
    let mut broken = Vec::new();
    for (path, text) in tree.sources().filter(|(path, _)| *path != SUM_OF_ERRORS) {
        let Some(inner) = path.strip_prefix("crates/trainer/src/") else { continue };
        let room = inner.split(['/', '.']).next().unwrap_or_default();
        if room == "lib" || inner.ends_with("tests.rs") {
            continue;
        }
        let Some(own) = floor(room) else {
            broken.push(format!("{path}: {room} has no place among the rooms"));
            continue;
        };
        let tested = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
        let code = text[..tested].lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = code.collect::<Vec<_>>().join(" ");
        let mut wrong = used_modules(&code, "crate");
        wrong.retain(|used| floor(used).is_some_and(|used| used > own));
        wrong.sort_unstable();
        wrong.dedup();
        broken.extend(wrong.iter().map(|used| format!("{path}: {room} must not use {used}")));
    }
    broken
}

/// Modules of a crate that code names: `crate::a::b` and `crate::{a, b::c, d::{e, f}}`.
fn used_modules<'a>(code: &'a str, of: &str) -> Vec<&'a str> {
    let mut modules = Vec::new();
    for after in code.split(&format!("{of}::")).skip(1) {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let first = |text: &'_ str| text.find(|c| !is_name(c)).unwrap_or(text.len());
        let Some(group) = after.strip_prefix('{') else {
            modules.push(&after[..first(after)]);
            continue;
        };
        let (mut depth, mut is_first) = (1, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => is_first = true,
                c if is_first && is_name(c) => {
                    modules.push(&group[at..at + first(&group[at..])]);
                    is_first = false;
                }
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
    }
    modules
}

/// What writes a file under its final name before it is complete, and through a link.
const PLAIN_WRITES: &[&str] = &["fs::write", "fs::copy", "File::create"];

/// Files are written by `weights::write`, whole or not at all; a new one by `File::create_new`, which follows no link.
fn plain_writes(tree: &Tree) -> Vec<String> {
    let mut broken = Vec::new();
    let is_test = |path: &str| path.ends_with("tests.rs") || path.contains("/tests/");
    let shipped = tree.sources().filter(|(path, _)| path.contains("/src/") && !is_test(path));
    for (path, text) in shipped {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (at, line) in code.lines().enumerate() {
            let calls = |name: &&&str| {
                let starts = |at: usize| !line[..at].ends_with(char::is_alphanumeric);
                line.match_indices(&format!("{name}(")).any(|(at, _)| starts(at))
            };
            broken.extend(PLAIN_WRITES.iter().filter(calls).map(|name| {
                format!("{path}:{}: {name} writes in place, use weights::write", at + 1)
            }));
        }
    }
    broken
}

/// Systems differ in the crates at the bottom; nothing above them may care.
fn target_conditionals(tree: &Tree) -> Vec<String> {
    let below =
        ["crates/cluster/", "crates/machine/", "crates/compute/", "crates/weights/", "tests/"];
    let above =
        tree.sources().filter(|(path, _)| !below.iter().any(|folder| path.starts_with(folder)));
    let marks = ["target_os", "target_arch", "target_family", "cfg(unix)", "cfg(windows)"];
    each_line(above, |line| {
        let mark = marks.iter().find(|mark| line.contains("cfg") && line.contains(**mark))?;
        Some(format!("{mark}: systems differ only in the crates at the bottom"))
    })
}

fn links(tree: &Tree) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in tree.of_kind(".md") {
        let folder = tree.root.join(path);
        let folder = folder.parent().expect("a file has a folder");
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        let local = targets.filter(|target| !target.is_empty() && !target.contains("://"));
        let lost = local.filter(|target| !folder.join(target).exists());
        broken.extend(lost.map(|target| format!("{path}: link to {target}, which does not exist")));
    }
    broken
}

/// Files and lines that a newcomer reads from the command line to the inside of a training step. Chosen: an
/// evening's reading.
const PATH_FILES: usize = 5;
const PATH_LINES: usize = 800;

/// How far the table may be off before somebody looks at it again: as much as a small change to a file.
const PATH_SLACK: usize = 10;

/// The newcomer's path is short, and the table that lists it is true.
fn newcomers_path(tree: &Tree) -> Vec<String> {
    let text = |wanted: &str| tree.files.iter().find(|(path, _)| path == wanted);
    let Some((_, page)) = text("ARCHITECTURE.md") else { return vec!["no ARCHITECTURE.md".into()] };
    let after = page.split_once("## The newcomer's path").map_or("", |(_, rest)| rest);
    let section = after.split("\n## ").next().unwrap_or("");
    let (mut broken, mut lines, mut files) = (Vec::new(), 0, 0);
    for row in section.lines().filter_map(|line| line.strip_prefix("| `")) {
        let mut cells = row.split('|').map(|cell| cell.trim().trim_end_matches('`'));
        let (path, listed) = (cells.next().unwrap_or(""), cells.next().unwrap_or(""));
        let Some((_, source)) = text(path) else {
            broken.push(format!("{path}: is on the newcomer's path and does not exist"));
            continue;
        };
        let n = source.lines().count();
        (lines, files) = (lines + n, files + 1);
        if listed.parse::<usize>().is_ok_and(|listed| n.abs_diff(listed) <= PATH_SLACK) {
            continue;
        }
        broken.push(format!("{path}: the newcomer's path says {listed} lines, it has {n}"));
    }
    if files == 0 || files > PATH_FILES || lines > PATH_LINES {
        let most = format!("1 to {PATH_FILES} files and {PATH_LINES} lines");
        broken.push(format!("the newcomer's path is {files} files and {lines} lines, not {most}"));
    }
    broken
}

/// Jobs and machines that we ship are files somebody will load.
fn shipped_files(tree: &Tree) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in tree.of_kind(".toml") {
        if path.starts_with("recipes/") {
            let job = text.parse::<toml::Table>();
            broken.extend(job.err().map(|error| format!("{path}: {}", error.message())));
        } else if path.starts_with("machines/") {
            let output =
                crate::hearth(&["doctor", "--machine", crate::text(&tree.root.join(path))]);
            if !output.status.success() {
                broken.push(format!("{path}: {}", crate::said(&output)));
            }
        }
    }
    broken
}

type Rule = fn(&Tree) -> Vec<String>;

pub fn kept(rule: Rule) {
    let broken = rule(&Tree::ours());
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// The rule finds `what` in a tree of these files, and nothing else.
pub fn found(rule: Rule, files: &[(&str, &str)], what: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let broken = rule(&Tree::at(folder.path()));
    assert_eq!(broken.len(), what.len(), "{broken:#?}");
    for (broken, what) in broken.iter().zip(what) {
        assert!(broken.contains(what), "{broken:?} does not say {what:?}");
    }
}

#[test]
fn every_source_opens_with_a_module_comment() {
    kept(module_comments);
    found(
        module_comments,
        &[("a.rs", "//! A.\n"), ("b.rs", "fn b() {}\n")],
        &["b.rs: does not open"],
    );
}

#[test]
fn dependencies_are_known_and_there_once() {
    kept(dependencies);
    let package = |name: &str, from: &str| {
        format!("[[package]]\nname = \"{name}\"\nsource = \"registry+https://{from}\"\n")
    };
    let (ours, other) = ("github.com/rust-lang/crates.io-index", "example.org/index");
    let lock = [package("a", ours), package("a", ours), package("b", other)].concat();
    let what = ["b is not of crates.io", "a is there 2 times"];
    found(dependencies, &[("Cargo.lock", &lock)], &what);
    let deny = "[bans]\nskip = [{ crate = \"a\" }, { crate = \"b\" }]\n";
    let what = ["b is not of crates.io", "b is there 1 times"];
    found(dependencies, &[("Cargo.lock", &lock), ("deny.toml", deny)], &what);
}

#[test]
fn only_one_command_downloads() {
    kept(network);
    let files = [
        ("crates/hub/Cargo.toml", "[dependencies]\nureq = \"3\"\n"),
        ("crates/trainer/Cargo.toml", "[dependencies]\nureq = \"3\"\n"),
        ("crates/cli/src/commands/fetch.rs", "use hub::HubClient;\n"),
        ("crates/cli/src/commands/train.rs", "use hub::FetchJob;\n"),
    ];
    found(
        network,
        &files,
        &["trainer/Cargo.toml: must not use ureq", "train.rs: must not use FetchJob"],
    );
}

#[test]
fn modules_use_what_stands_below_them() {
    kept(module_arrows);
    let [render, text] = ["crates/cli/src/render/", "crates/cli/src/text.rs"];
    let page = &format!("{render}plan.rs");
    let uses = |code: &str, what: &[&str]| found(module_arrows, &[(page, code)], what);
    uses("use crate::commands::plan::Planned;\n", &["plan.rs: must not use crate::commands"]);
    uses("fn f() {\n    crate::commands::run();\n}\n", &["must not use"]);
    uses("use crate::{\n    text::{a, commands},\n    commands::plan,\n};\n", &["must not use"]);
    uses("use crate::{text::{a, commands}, failure};\n// crate::commands draws nothing\n", &[]);
    uses("use crate::commands_of_a_shell;\n", &[]);
    uses("use trainer::train::{On, train};\n", &["must not use trainer::train"]);
    uses("use trainer::{TrainerError, event::Event};\n", &[]);
    found(module_arrows, &[("crates/cli/src/main.rs", "use crate::commands::run;\n")], &[]);
    found(module_arrows, &[(text, "use crate::render::line;\n")], &["crate::render"]);
}

#[test]
fn trainer_modules_use_those_before_them() {
    kept(rooms);
    let plan = "crates/trainer/src/plan/mod.rs";
    let code = "use crate::train::run;\nuse crate::task::session;\n";
    found(rooms, &[(plan, code)], &["plan must not use train"]);
    found(rooms, &[(plan, "use crate::{config, report, bench::cases};\n")], &["not use bench"]);
    found(rooms, &[("crates/trainer/src/attic/mod.rs", "")], &["attic has no place"]);
    let tested = "use crate::model;\n#[cfg(test)]\nmod tests {\n    use crate::train;\n}\n";
    found(rooms, &[(plan, tested)], &[]);
}

#[test]
fn unsafe_stands_in_listed_files_with_its_reason() {
    kept(unsafe_files);
    let [(listed, _), ..] = UNSAFE_FILES else { panic!("the list is empty") };
    let code = "fn f() {\n    unsafe { g() }\n}\n";
    found(unsafe_files, &[("a.rs", code)], &["a.rs:2: unsafe outside", "a.rs:2: unsafe without"]);
    found(unsafe_files, &[(listed, code)], &[":2: unsafe without a SAFETY sentence"]);
    found(unsafe_files, &[(listed, "// SAFETY: g is harmless.\nunsafe { g() }\n// unsafe\n")], &[]);
    found(unsafe_files, &[("a.rs", "#![allow(unsafe_code)]\nlet x = \"unsafe\";\n")], &[]);
}

#[test]
fn the_list_of_unsafe_files_is_not_stale() {
    kept(stale_unsafe_list);
    let [(first, _), others @ ..] = UNSAFE_FILES else { panic!("the list is empty") };
    let rest: Vec<_> = others.iter().map(|(path, _)| (*path, "unsafe {}")).collect();
    found(stale_unsafe_list, &rest, &[&format!("{first}: listed for unsafe but has none")]);
}

#[test]
fn todos_have_an_owner() {
    kept(todos);
    let mark = ["TO", "DO"].concat();
    let code = format!(
        "// {mark}: later\n// {mark}(ada): later\n// {mark}(#7): later\n// {}: later\n",
        ["FIX", "ME"].concat()
    );
    found(todos, &[("a.rs", &code)], &["a.rs:1:", "a.rs:4:"]);
}

#[test]
fn no_path_of_anybodys_machine() {
    kept(private_paths);
    let home = ["", "home", "ada", "x"].join("/");
    let text = format!("see {home}\n/proc/meminfo\nlib/home/page\n${{TMP}}/tmp/\n");
    found(private_paths, &[("a.md", &text)], &["a.md:1: a path of somebody's machine"]);
}

/// What a run or a demo left in the folder is nobody's source: the README's second command passes after its
/// first, in a checkout and without one.
#[test]
fn what_a_run_left_in_the_folder_is_not_judged() {
    let home = ["", "home", "ada", "x"].join("/");
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write(".gitignore", "/hearth-demo*\n/carry\n");
    write("ours.md", &home);
    write("hearth-demo-2/config.toml", &home);
    write("carry/a.md", &home);
    let judged = || private_paths(&Tree::at(folder.path()));
    assert_eq!(judged().len(), 1, "{:?}", judged());
    let git = |arguments: &[&str]| {
        let done =
            std::process::Command::new("git").arg("-C").arg(folder.path()).args(arguments).output();
        done.is_ok_and(|output| output.status.success())
    };
    if git(&["init", "--quiet"]) {
        assert!(git(&["add", "ours.md"]));
        write("my-job.toml", &home);
        assert_eq!(judged().len(), 1, "{:?}", judged());
    }
}

#[test]
fn crates_use_each_other_one_way() {
    kept(arrows);
    let crates = [
        (
            "crates/machine/Cargo.toml",
            "[package]\nname = \"machine\"\n[dependencies]\ntrainer = \"1\"\nserde = \"1\"\n",
        ),
        ("crates/sixth/Cargo.toml", "[package]\nname = \"sixth\"\n"),
    ];
    found(arrows, &crates, &["machine must not use trainer", "crate sixth has no place"]);
}

#[test]
fn files_are_written_whole_or_not_at_all() {
    kept(plain_writes);
    let page = "crates/cli/src/page.rs";
    let code = "std::fs::write(path, text);\nlet file = File::create(path)?;\nfs::copy(a, b);\n";
    let what = ["page.rs:1: fs::write", "page.rs:2: File::create", "page.rs:3: fs::copy"];
    found(
        plain_writes,
        &[(page, code), ("tests/page.rs", code), ("crates/cli/src/tests.rs", code)],
        &what,
    );
    let allowed =
        "AtomicFile::create(path)?;\nFile::create_new(path)?;\n#[cfg(test)]\nfs::write(a, b);\n";
    found(plain_writes, &[(page, allowed)], &[]);
}

#[test]
fn systems_differ_only_at_the_bottom() {
    kept(target_conditionals);
    let code = "#[cfg(target_os = \"linux\")]\nfn f() {}\n";
    let files = [("crates/cli/src/a.rs", code), ("crates/machine/src/b.rs", code)];
    found(target_conditionals, &files, &["crates/cli/src/a.rs:1: target_os"]);
}

#[test]
fn links_lead_somewhere() {
    kept(links);
    let text = "[a](b.md) [c](lost.md#top) [d](https://example.com) [e](#here)\n";
    found(links, &[("a.md", text), ("b.md", "")], &["a.md: link to lost.md"]);
}

#[test]
fn the_newcomers_path_is_short() {
    kept(newcomers_path);
    let check = |table: &str, what: &[&str]| {
        let page = format!("# A\n\n## The newcomer's path\n\n{table}\n\n## B\n\n| `c.rs` | 1 |\n");
        let (short, long) = ("//! A.\n".repeat(3), "//! B.\n".repeat(801));
        let files = [("ARCHITECTURE.md", &page[..]), ("a.rs", &short), ("b.rs", &long)];
        found(newcomers_path, &files, what);
    };
    check("| `a.rs` | 3 | why |", &[]);
    check("| `a.rs` | 30 | why |", &["a.rs: the newcomer's path says 30 lines, it has 3"]);
    check("| `a.rs` | 3 |\n| `gone.rs` | 3 |", &["gone.rs: is on the newcomer's path"]);
    check("| `b.rs` | 801 |", &["1 files and 801 lines"]);
    check(&"| `a.rs` | 3 |\n".repeat(6), &["6 files and 18 lines"]);
    check("nothing", &["0 files"]);
}

#[test]
fn shipped_jobs_and_machines_load() {
    kept(shipped_files);
    let files = [
        ("machines/a.toml", "title = 1\n"),
        ("recipes/b.toml", "kind = \n"),
        ("recipes/c.toml", "kind = 'x'\n"),
    ];
    found(shipped_files, &files, &["machines/a.toml: ", "recipes/b.toml: "]);
}
