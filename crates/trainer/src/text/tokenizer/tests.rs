//! Tokenizers against transformers and `SentencePiece` (`tests/golden/text`), and against files that
//! are damaged.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use super::*;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text").join(name)
}

#[derive(Deserialize)]
struct Expected {
    text: String,
    bpe: Vec<u32>,
    pieces: Vec<u32>,
}

fn expected() -> Vec<Expected> {
    let golden: Value = serde_json::from_slice(&fs::read(golden("golden.json")).unwrap()).unwrap();
    Vec::deserialize(&golden["texts"]).unwrap()
}

/// A copy of the small tokenizer with its file changed.
fn changed(change: impl Fn(&mut Value)) -> (tempfile::TempDir, Result<Tokenizer>) {
    let folder = tempfile::tempdir().unwrap();
    let mut file: Value =
        serde_json::from_slice(&fs::read(golden("bpe/tokenizer.json")).unwrap()).unwrap();
    change(&mut file);
    fs::write(folder.path().join(FILE), file.to_string()).unwrap();
    let opened = Tokenizer::open(folder.path());
    (folder, opened)
}

fn refused(change: impl Fn(&mut Value), said: &str) {
    let (_folder, opened) = changed(change);
    let error = opened.map(drop).unwrap_err();
    assert!(error.to_string().contains(said), "{said:?} is not in {error}");
}

#[test]
fn ids_are_those_of_the_reference() {
    for path in ["bpe", "bpe/tokenizer.json", "bpe.gguf"] {
        let tokenizer = Tokenizer::open(&golden(path)).unwrap();
        assert_eq!(tokenizer.vocab_size(), 400, "{path}");
        for Expected { text, bpe, .. } in expected() {
            assert_eq!(tokenizer.encode(&text).unwrap(), bpe, "{path}: {text:?}");
            assert_eq!(tokenizer.decode(&bpe), text, "{path}");
        }
    }
}

#[test]
fn pieces_are_those_of_sentencepiece() {
    let tokenizer = Tokenizer::open(&golden("pieces.gguf")).unwrap();
    assert!(tokenizer.puts_space());
    for Expected { text, pieces, .. } in expected() {
        assert_eq!(tokenizer.encode(&text).unwrap(), pieces, "{text:?}");
        assert_eq!(tokenizer.decode(&pieces), text);
    }
}

#[test]
fn special_tokens_are_as_the_files_say() {
    let named = |path: &str| {
        let tokenizer = Tokenizer::open(&golden(path)).unwrap();
        (tokenizer.bos(), tokenizer.eos())
    };
    // Named, but nothing puts it before texts.
    assert_eq!(named("bpe"), (None, Some(2)));
    assert_eq!(named("bpe.gguf"), (None, Some(2)));
    assert_eq!(named("pieces.gguf"), (Some(1), Some(2)));

    let template = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    });
    let (folder, opened) = changed(|file| file["post_processor"] = template.clone());
    assert_eq!(
        opened.map(|tokenizer| (tokenizer.bos(), tokenizer.eos())).unwrap(),
        (Some(0), None)
    );
    let config = json!({"add_bos_token": true, "bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"});
    fs::write(folder.path().join(CONFIG), config.to_string()).unwrap();
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [2, 0, 4000]}"#)
        .unwrap();
    let tokenizer = Tokenizer::open(folder.path()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(0)));
    assert!(tokenizer.is_eos(0) && tokenizer.is_eos(2) && !tokenizer.is_eos(1));
    fs::write(folder.path().join(CONFIG), r#"{"eos_token": "<none>"}"#).unwrap();
    let error = Tokenizer::open(folder.path()).map(drop).unwrap_err().to_string();
    assert!(error.contains("eos_token is \"<none>\""), "{error}");
}

#[test]
fn bytes_need_no_file() {
    let tokenizer = Tokenizer::bytes();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocab_size()), (None, Some(256), 257));
    for Expected { text, .. } in expected() {
        let ids = tokenizer.encode(&text).unwrap();
        assert_eq!(tokenizer.decode(&ids), text);
        // The shortcut is one.
        assert_eq!(
            ids,
            tokenizer.inner.encode_fast(text.as_str(), false).unwrap().get_ids(),
            "{text:?}"
        );
    }
    assert_eq!(tokenizer.encode("é<|endoftext|>!").unwrap(), [0xc3, 0xa9, 256, 33]);
    assert!(tokenizer.inner.get_vocab(true).len() == 257);
}

#[test]
fn what_is_saved_is_the_same() {
    for tokenizer in [
        Tokenizer::bytes(),
        Tokenizer::open(&golden("bpe")).unwrap(),
        Tokenizer::open(&golden("pieces.gguf")).unwrap(),
    ] {
        let folder = tempfile::tempdir().unwrap();
        tokenizer.save(folder.path()).unwrap();
        let saved = Tokenizer::open(folder.path()).unwrap();
        assert_eq!(saved.fingerprint(), tokenizer.fingerprint());
        assert_eq!((saved.bos(), saved.eos()), (tokenizer.bos(), tokenizer.eos()));
        for Expected { text, .. } in expected() {
            assert_eq!(saved.encode(&text).unwrap(), tokenizer.encode(&text).unwrap(), "{text:?}");
        }
    }
    let bpe = Tokenizer::open(&golden("bpe")).unwrap();
    assert_ne!(Tokenizer::bytes().fingerprint(), bpe.fingerprint());
}

#[test]
fn text_comes_as_soon_as_it_is_whole() {
    let bpe = Tokenizer::open(&golden("bpe")).unwrap();
    let pieces = Tokenizer::open(&golden("pieces.gguf")).unwrap();
    for tokenizer in [&Tokenizer::bytes(), &bpe, &pieces] {
        for Expected { text, .. } in expected() {
            let mut decoder = tokenizer.decoder();
            let mut found = String::new();
            for id in tokenizer.encode(&text).unwrap() {
                let part = decoder.push(id);
                assert!(!part.contains('\u{fffd}'), "{text:?}: {part:?}");
                found += &part;
            }
            assert_eq!(found + &decoder.finish(), text);
        }
    }
    // What never becomes a letter does not hold back the rest.
    let tokenizer = Tokenizer::bytes();
    let mut decoder = tokenizer.decoder();
    let ids = [0xf0, 0xf0, 0xf0, 0xf0, 0xf0, u32::from(b'a')];
    let found: String = ids.map(|id| decoder.push(id)).concat();
    assert_eq!(found, "\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}a");
    let mut decoder = tokenizer.decoder();
    assert_eq!(decoder.push(0xc3), "");
    assert_eq!(decoder.finish(), "\u{fffd}");
}

#[test]
fn tokens_are_marked_by_where_their_bytes_are() {
    let tokenizer = Tokenizer::bytes();
    let MaskedTokens { ids, mask: is_in } = tokenizer.encode_masked("aébc", &[1..3, 4..9]).unwrap();
    assert_eq!(ids, [97, 0xc3, 0xa9, 98, 99]);
    assert_eq!(is_in, [false, true, true, false, true]);
}

#[test]
fn files_that_say_more_than_a_vocabulary_do_not_cut_texts() {
    let truncation =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 9});
    let (_folder, tokenizer) = changed(|file| file["truncation"] = truncation.clone());
    assert_eq!(tokenizer.unwrap().encode("1234").unwrap().len(), 4);
}

#[test]
fn damaged_files_are_errors() {
    refused(|file| file["model"]["vocab"]["a"] = json!(-1), "id of \"a\" is -1");
    refused(|file| file["model"]["vocab"]["a"] = json!(1_u64 << 40), "the largest can be");
    refused(|file| file["model"]["merges"][0] = json!(["Ġ", "nowhere"]), "none of the 400");
    refused(|file| file["model"]["merges"][0] = json!("alone"), "not of two tokens");
    let long = "x".repeat(300);
    refused(
        |file| {
            file["model"]["vocab"][&long] = json!(400);
            file["model"]["merges"][0] = json!([long, long]);
        },
        "none of the 401",
    );
    refused(|file| file["model"]["type"] = json!("Unigram"), "model is Unigram, known are BPE");
    refused(|file| file["model"]["unk_token"] = json!("<none>"), "unk_token is \"<none>\"");
    refused(|file| file["model"]["continuing_subword_prefix"] = json!("##"), "begin with \"##\"");
    refused(
        |file| file["normalizer"] = json!({"type": "Precompiled"}),
        "normalizer is Precompiled",
    );
    let strip = json!({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 0, "stop": 1}]});
    refused(|file| file["decoder"] = strip.clone(), "strips 1 at the end");
    let split = json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false});
    refused(|file| file["pre_tokenizer"] = split.clone(), "malformed");
    refused(|file| *file = json!([]), "model");
    refused(|file| file["version"] = json!("2.0"), "version");
}

/// The crate panics on them, takes all memory for them, or draws numbers of its own.
#[test]
fn parts_made_to_do_harm_are_errors() {
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    for part in ["normalizer", "decoder"] {
        for pattern in ["", "a*", "(?=b)", "a|", "^", r"\b", "a{0,2}", "a?"] {
            let form = if pattern.is_empty() { "String" } else { "Regex" };
            let empty = replace(json!({form: pattern}), "x");
            refused(|file| file[part] = empty.clone(), "could replace nothing");
        }
        let inner = if part == "decoder" { "decoders" } else { "normalizers" };
        let sequence = |parts: Vec<Value>| json!({"type": "Sequence", inner: parts});
        let chain = sequence(vec![replace(json!({"String": "a"}), "aa"); 60]);
        refused(|file| file[part] = chain.clone(), "times as long, most is 16");
        let long = replace(json!({"Regex": "[a-z]"}), &"y".repeat(300));
        refused(|file| file[part] = long.clone(), "300 times as long");
        let many = sequence(vec![replace(json!({"String": "a"}), "b"); 500]);
        refused(|file| file[part] = many.clone(), "has more than 64 parts");
    }
    let prepend = json!({"type": "Prepend", "prepend": "x".repeat(5000)});
    refused(|file| file["normalizer"] = prepend.clone(), "puts 5000 bytes before a text");
    refused(|file| file["model"]["dropout"] = json!(0.5), "dropout is 0.5");
}

#[test]
fn parts_of_known_tokenizers_are_read() {
    for normalizer in [
        json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
        json!({"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}),
        json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
        json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]}),
    ] {
        let (_folder, tokenizer) = changed(|file| file["normalizer"] = normalizer.clone());
        tokenizer.unwrap().encode("a  b\n").unwrap();
    }
    let (_folder, tokenizer) = changed(|file| file["model"]["dropout"] = json!(0.0));
    tokenizer.unwrap();
}

/// Every part with the values that are most likely to hurt it: refused, or it does its work.
#[test]
fn no_part_panics() {
    let patterns =
        ["", "a", " ", "é", "(?=a)", "a*", r"\s+(?!\S)|\s+", "$", "^", r"\b", "(a+)+$", "."];
    let mut parts = Vec::new();
    for pattern in patterns {
        for form in ["String", "Regex"] {
            let pattern = json!({form: pattern});
            for content in ["", "éb"] {
                let part = json!({"type": "Replace", "pattern": pattern, "content": content});
                parts.extend([("normalizer", part.clone()), ("decoder", part)]);
            }
            for behavior in ["Removed", "Isolated", "MergedWithNext"] {
                for invert in [false, true] {
                    parts.push(("pre_tokenizer", json!({
                        "type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert,
                    })));
                }
            }
        }
    }
    for text in ["", "é", "aé"] {
        parts.push(("normalizer", json!({"type": "Prepend", "prepend": text})));
        for start in [0, 1, 9_999_999] {
            let strip = json!({"type": "Strip", "content": text, "start": start, "stop": 0});
            parts.push(("decoder", strip));
        }
        for scheme in ["always", "never", "first"] {
            let space = json!({"type": "Metaspace", "replacement": text, "prepend_scheme": scheme, "split": true});
            parts.extend([("pre_tokenizer", space.clone()), ("decoder", space)]);
        }
    }
    for token in ["", " ", "a", "é", "\u{0}"] {
        for flag in ["single_word", "lstrip", "rstrip", "normalized"] {
            let mut added = json!({"id": 401, "content": token, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true});
            added[flag] = json!(true);
            parts.push(("added_tokens", json!([added])));
        }
    }
    for (name, part) in parts {
        let (_folder, opened) = changed(|file| file[name] = part.clone());
        let Ok(tokenizer) = opened else { continue };
        for text in ["", " ", "a", "aé  aa\n\0é", "ﷺ𝔾aaaaaaaaaaaaaaaaaaaaaaaaaaaab"] {
            // Some vocabularies have no token for some letters, which is an error.
            if let Ok(ids) = tokenizer.encode(text) {
                tokenizer.decode(&ids);
                tokenizer.encode_masked(text, &[0..1, 2..3]).unwrap();
            }
        }
    }
}

#[test]
fn what_is_no_tokenizer_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let says = |path: &Path, said: &str| {
        let error = Tokenizer::open(path).map(drop).unwrap_err().to_string();
        assert!(error.contains(said), "{said:?} is not in {error}");
    };
    says(folder.path(), "looked for tokenizer.json");
    says(&folder.path().join("none.json"), "cannot read");
    let file = folder.path().join(FILE);
    fs::write(&file, "{\"model\": {").unwrap();
    says(folder.path(), "invalid JSON at line 1");
    let bytes = fs::read(golden("bpe.gguf")).unwrap();
    let gguf = folder.path().join("x.gguf");
    // Its last bytes only fill it up.
    for length in (0..bytes.len() - 32).step_by(97) {
        fs::write(&gguf, &bytes[..length]).unwrap();
        assert!(Tokenizer::open(&gguf).is_err(), "{length}");
    }
    let mixed = golden("../weights/mixed.gguf");
    says(&mixed, "tokenizer.ggml.tokens");
}

/// As transformers makes one of the other, on a tokenizer of Qwen2.5-VL.
#[test]
fn the_files_of_an_older_qwen_give_the_ids_of_the_newer_one() {
    let folder = golden("../qwen25vl/prompts");
    let [older, newer] =
        ["tokenizer", "tokenizer_json"].map(|name| Tokenizer::open(&folder.join(name)).unwrap());
    let texts = fs::read(folder.join("prompts.json")).unwrap();
    let texts: Vec<String> = serde_json::from_slice(&texts).unwrap();
    assert!(texts.len() > 8);
    for text in texts {
        let ids = older.encode(&text).unwrap();
        assert_eq!(ids, newer.encode(&text).unwrap(), "{text:?}");
        assert_eq!(older.decode(&ids), newer.decode(&ids));
        assert_eq!(older.decode_text(&ids), newer.decode_text(&ids));
    }
    let id = older.token_id("<|im_end|>");
    assert_eq!((older.eos(), older.vocab_size()), (id, newer.vocab_size()));
    assert!(!older.decode_text(&[id.unwrap()]).contains("im_end"));
}

#[test]
fn older_files_that_are_damaged_are_refused() {
    let from = golden("../qwen25vl/prompts/tokenizer");
    let opened = |name: &str, text: &str| {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(&from).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        fs::write(folder.path().join(name), text).unwrap();
        Tokenizer::open(folder.path()).map(drop).unwrap_err().to_string()
    };
    let config = r#"{"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"x": {}}}"#;
    for (name, text, says) in [
        ("merges.txt", "a zzz", "\"zzz\" is none of the"),
        ("vocab.json", "{", "invalid JSON"),
        ("tokenizer_config.json", config, "added token x is {}"),
        (
            "tokenizer_config.json",
            r#"{"tokenizer_class": "OtherTokenizer"}"#,
            "looked for tokenizer.json",
        ),
    ] {
        let said = opened(name, text);
        assert!(said.contains(says), "{said}");
    }
}
