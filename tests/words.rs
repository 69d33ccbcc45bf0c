//! The field's language, kept by machine: words of our own that the field has other words for, type names
//! that say whose they are, and parameters that have names. STYLE.md has the reasons.

use std::collections::BTreeMap;

use crate::tidy::{found, kept};
use crate::tree::Tree;

/// Words that are not written, in names, comments, messages and pages, and what is written instead.
const WORDS: &[(&str, &str)] = &[
    ("at once with", "in micro-batches of"),
    ("computed twice", "recomputed (gradient checkpointing)"),
    ("detour", "LoRA, adapter"),
    ("exaggerated", "classifier-free guidance scale"),
    ("from nothing", "from scratch"),
    ("go back", "backward"),
    ("graphics card", "GPU"),
    ("happening", "event"),
    ("hollow", "meta"),
    ("ladder", "memory levels"),
    ("laid out", "packed"),
    ("learner", "trainable model"),
    ("length of a step", "learning rate"),
    ("lesson", "task"),
    ("levels of noise", "timesteps, sigmas"),
    ("nvidia card", "NVIDIA GPU"),
    ("on a card", "on a GPU"),
    ("outlook", "dataset"),
    ("own weights", "full fine-tune, weights"),
    ("park", "offload"),
    ("picture", "image"),
    ("portion", "micro-batch"),
    ("processor", "CPU"),
    ("product", "matmul"),
    ("rehearsal", "dry run"),
    ("rehearse", "dry run"),
    ("running mean", "EMA"),
    ("rung", "memory level"),
    ("shape only", "meta"),
    ("teller", "listener"),
    ("the card", "the GPU"),
    ("tighter way", "fallback"),
    ("way back", "backward pass"),
    ("way there", "forward pass"),
    ("workplace", "device"),
];

/// Where such a word is right: the start of a path, the word, why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("STYLE.md", "", "lists the words"),
    ("tests/words.rs", "", "lists the words"),
    ("CHANGELOG.md", "", "names what was renamed"),
    ("crates/trainer/src/event/", "picture", "reads journals of older versions"),
    ("crates/trainer/src/event/", "rung", "reads journals of older versions"),
    ("crates/machine/src/awake.rs", "park", "the standard library's thread::park"),
    ("crates/machine/src/", "processor", "the key in /proc/cpuinfo"),
    ("crates/machine/src/governor/mod.rs", "rung", "reads journals of older versions"),
    ("crates/machine/src/probe/linux.rs", "product", "a file of DMI, and what it holds"),
    ("machines/", "", "what systems answered, in their words"),
    ("crates/trainer/src/train/identity.rs", "picture", "reads checkpoints of older versions"),
    ("crates/trainer/src/model/llama/init.rs", "learner", "the title of a paper"),
    ("crates/trainer/src/model/adapter/names.rs", "processor", "in names of XLabs' adapters"),
    (
        "crates/trainer/src/model/diffusion/flux/names.rs",
        "processor",
        "in names of XLabs' adapters",
    ),
    ("crates/trainer/src/model/vae/flux2/names.rs", "running mean", "in names of its tensors"),
    ("tests/golden/flux/adapters.py", "processor", "in names of XLabs' adapters"),
    (
        "crates/trainer/src/text/tokenizer",
        "processor",
        "post_processor is a key of tokenizer.json; transformers' processors of images",
    ),
    ("crates/trainer/src/model/diffusion/text/", "processor", "transformers' image processor"),
    ("crates/trainer/src/caption/", "processor", "transformers' image processor"),
    ("crates/trainer/src/clip_score/", "processor", "transformers' image processor"),
    ("crates/trainer/src/model/encoder/", "processor", "transformers' image processor"),
    ("tests/golden/clip_score/", "processor", "transformers' image processor"),
    ("tests/golden/caption/", "processor", "transformers' image processor"),
    ("tests/golden/caption/", "picture", "a word of Qwen2.5-VL's template"),
    ("crates/trainer/src/export/model.rs", "processor", "transformers' image processor"),
    ("crates/trainer/src/pixels.rs", "processor", "transformers' image processor"),
    ("tests/golden/qwen25vl_vision/", "processor", "transformers' image processor"),
    ("tests/editing.rs", "processor", "transformers' image processor"),
    (
        "crates/trainer/src/model/encoder/tokenizer/template.rs",
        "picture",
        "a word of Qwen-Image-Edit's template",
    ),
    (
        "crates/trainer/src/demo/vocabulary.rs",
        "picture",
        "a word of the shipped tokenizer's vocabulary",
    ),
];

/// Type names that more than one crate or folder may use, and why.
const SHARED_NAMES: &[(&str, &str)] = &[
    ("PressureTrigger", "one for Linux, one for systems without it"),
    ("Result", "every crate's own, as in the standard library"),
];

/// The words of a line as one string, each between spaces: names are taken apart where their words meet.
fn words_of(line: &str) -> String {
    let mut words = String::from(" ");
    let mut before = ' ';
    for c in line.chars() {
        let begins = c.is_uppercase() && before.is_lowercase();
        if (begins || !c.is_alphanumeric()) && !words.ends_with(' ') {
            words.push(' ');
        }
        if c.is_alphanumeric() {
            words.extend(c.to_lowercase());
        }
        before = c;
    }
    words.push(' ');
    words
}

/// One of [`WORDS`] in a line, also with an ending of grammar.
fn foreign_word(line: &str) -> Option<(&'static str, &'static str)> {
    // Words that the field has too, and a method of Rust's iterators.
    let terms = [
        "dot product",
        "inner product",
        "outer product",
        "elementwise product",
        "khatri rao product",
        "kronecker product",
        "multiprocessor",
    ];
    let words = terms
        .iter()
        .fold(words_of(&line.replace(".product()", "")), |words, term| words.replace(term, ""));
    let stands = |word: &str| {
        ["", "s", "d", "ed"].iter().any(|ending| words.contains(&format!(" {word}{ending} ")))
    };
    WORDS.iter().copied().find(|(word, _)| stands(word))
}

fn foreign_words(tree: &Tree) -> Vec<String> {
    let kinds = [".rs", ".md", ".toml", ".cu", ".wgsl", ".wgsli"];
    let mut broken = Vec::new();
    for (path, text) in
        tree.files.iter().filter(|(path, _)| kinds.iter().any(|kind| path.ends_with(kind)))
    {
        for (at, line) in text.lines().enumerate() {
            let Some((word, instead)) = foreign_word(line) else { continue };
            let is_excepted = |(start, excepted, _): &&(&str, &str, &str)| {
                path.starts_with(start) && (excepted.is_empty() || *excepted == word)
            };
            if EXCEPTIONS.iter().find(is_excepted).is_none() {
                broken.push(format!(
                    "{path}:{}: \"{word}\" is not the field's word: {instead}",
                    at + 1
                ));
            }
        }
    }
    broken
}

/// Types as they are declared at the start of a line, or in a module within a file; tests may repeat names.
fn shared_type_names(tree: &Tree) -> Vec<String> {
    let mut declared: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (path, text) in tree.sources() {
        if !path.starts_with("crates/") || path.ends_with("tests.rs") {
            continue;
        }
        let tested = text.find("#[cfg(test)]\nmod ").unwrap_or(text.len());
        for (at, line) in text[..tested].lines().enumerate() {
            let code = line.strip_prefix("pub").map_or(line, |rest| match rest.strip_prefix('(') {
                Some(rest) => rest.split_once(") ").map_or(rest, |(_, rest)| rest),
                None => rest.trim_start(),
            });
            let mut words = code.split(' ');
            if !matches!(words.next(), Some("struct" | "enum" | "trait" | "type" | "union")) {
                continue;
            }
            let name = words.next().unwrap_or_default();
            let end = name.find(|c: char| !c.is_alphanumeric()).unwrap_or(name.len());
            declared.entry(&name[..end]).or_default().push(format!("{path}:{}", at + 1));
        }
    }
    let several = declared.into_iter().filter(|(name, places)| {
        places.len() > 1 && SHARED_NAMES.iter().all(|(shared, _)| shared != name)
    });
    several
        .map(|(name, places)| format!("{name}: is declared in {}", places.join(" and ")))
        .collect()
}

/// Parameters without names of their own: `(a, b): (A, B)` and `pair: (A, B)`.
fn tuple_parameters(tree: &Tree) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in tree.sources().filter(|(path, _)| path.starts_with("crates/")) {
        for (at, _) in text.match_indices("fn ") {
            let Some((name, parameters)) = signature(&text[at + 3..]) else { continue };
            let bare: String = parameters.chars().filter(|c| !c.is_whitespace()).collect();
            if bare.contains(":(") || bare.contains(":&(") && !bare.contains(":&(dyn") {
                let line = text[..at].matches('\n').count() + 1;
                broken.push(format!(
                    "{path}:{line}: {name} takes a tuple: name what is in it by a struct"
                ));
            }
        }
    }
    broken
}

/// Name and parameters of what stands behind `fn `.
fn signature(text: &str) -> Option<(&str, &str)> {
    let open = text.find('(')?;
    let name = text[..open].split('<').next()?;
    if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let mut depth = 0;
    for (at, c) in text[open..].char_indices() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth == 0 {
            return Some((name, &text[open..open + at]));
        }
    }
    None
}

#[test]
fn the_words_are_the_fields() {
    kept(foreign_words);
    let code = "let a = way_back();\n// Images.\nstruct HollowTensor;\n// parking_lot\n";
    found(foreign_words, &[("a.rs", code)], &["a.rs:1: \"way back\"", "a.rs:3: \"hollow\""]);
}

#[test]
fn a_type_has_a_name_of_its_own() {
    kept(shared_type_names);
    let files = [
        ("crates/a/src/x.rs", "pub(crate) struct Row<T> {}\ntype Result = u8;\n"),
        (
            "crates/b/src/y.rs",
            "pub enum Row {}\ntype Result = u8;\n#[cfg(test)]\nmod tests {\nstruct Row;\n",
        ),
    ];
    found(
        shared_type_names,
        &files,
        &["Row: is declared in crates/a/src/x.rs:1 and crates/b/src/y.rs:1"],
    );
}

#[test]
fn parameters_have_names() {
    kept(tuple_parameters);
    let code = "fn a((x, y): (u8, u8)) {}\nfn b(f: impl Fn((u8, u8))) {}\nfn c(x: &[(u8, u8)]) {}\nfn d<T>(at: &(T, T)) {}\n";
    found(tuple_parameters, &[("crates/a.rs", code)], &["a.rs:1: a takes", "a.rs:4: d takes"]);
}
