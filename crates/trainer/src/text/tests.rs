//! Texts from files to sequences: against what transformers makes of the same conversations, and
//! against everything that is wrong with files.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;
use weights::WeightsError;

use super::encode::BlockTokeniser;
use super::record::TextRecord;
use super::*;

const END: u32 = 256;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text").join(name)
}

/// A folder of texts and a place for the cache.
struct Place {
    folder: TempDir,
    request: TextDataRequest,
    tokenizer: Tokenizer,
}

impl Place {
    /// Files with these names and contents, read byte by byte.
    fn new<'a, T: AsRef<[u8]> + ?Sized + 'a>(
        files: impl IntoIterator<Item = (&'a str, &'a T)>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("texts");
        fs::create_dir(&path).unwrap();
        for (name, text) in files {
            fs::create_dir_all(path.join(name).parent().unwrap()).unwrap();
            fs::write(path.join(name), text).unwrap();
        }
        let cache = folder.path().join("cache");
        let (held_out, width) = (HeldOut::None, None);
        let (length, seed, follow_links) = (64, 7, false);
        let request = TextDataRequest {
            path,
            kind: RecordKind::Texts,
            follow_links,
            width,
            length,
            held_out,
            seed,
            folder: cache,
        };
        Self { folder, request, tokenizer: Tokenizer::bytes() }
    }

    fn open(&self) -> Result<TextDataset> {
        TextDataset::open(&self.request, &self.tokenizer, &|_| true)
    }

    fn texts(&self) -> TextDataset {
        self.open().unwrap()
    }

    /// The shards of all stores, by their paths.
    fn shards(&self) -> Vec<PathBuf> {
        let stores = fs::read_dir(self.request.folder.join(VERSION)).unwrap();
        let folders = stores.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
        let files = folders.flat_map(|folder| fs::read_dir(folder).unwrap());
        let mut shards: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
        shards.sort();
        shards
    }

    /// What is wrong, as it is printed, with the file's name.
    fn said(&self) -> Vec<String> {
        self.texts().problems.iter().map(said).collect()
    }

    /// How many bytes become tokens when it is opened.
    fn n_tokenised(&self) -> u64 {
        let (is_tokens, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
        let tell = |event| {
            match event {
                ProgressEvent::Phase { name, .. } => {
                    is_tokens.store(usize::from(name == TOKENS_PHASE), Ordering::Relaxed);
                }
                ProgressEvent::Loaded(n) => {
                    let n = n * is_tokens.load(Ordering::Relaxed) as u64;
                    bytes.fetch_add(n, Ordering::Relaxed);
                }
                ProgressEvent::Done => {}
            }
            true
        };
        TextDataset::open(&self.request, &self.tokenizer, &tell).unwrap();
        bytes.into_inner()
    }
}

fn said(problem: &Problem) -> String {
    format!("{}: {}", problem.path.file_name().unwrap().to_str().unwrap(), problem.kind)
}

fn train(texts: &TextDataset) -> Vec<Sequence> {
    (0..texts.n_train()).map(|index| texts.train(index).unwrap()).collect()
}

/// The documents of sequences, without what fills them up.
fn documents(sequences: &[Sequence]) -> Vec<Vec<u32>> {
    let mut found = Vec::new();
    for Sequence { ids, first_keys, .. } in sequences {
        for (at, id) in ids.iter().enumerate() {
            if first_keys[at] as usize == at {
                found.push(Vec::new());
            }
            found.last_mut().unwrap().push(*id);
        }
    }
    found.retain(|ids: &Vec<u32>| ids.iter().any(|id| *id != END));
    found.sort();
    found
}

fn ended(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).chain([END]).collect()
}

/// Words, different ones, of so many bytes.
fn words(bytes: usize, salt: usize) -> String {
    let word =
        |n: usize| format!("{}{} ", ["the", "word", "Of", "many"][n % 4], n * 7919 % 1000 + salt);
    let mut text: String = (0..bytes / 4).map(word).collect();
    text.truncate(bytes);
    text
}

#[test]
fn conversations_are_those_of_the_reference() {
    let recorded: Value =
        serde_json::from_slice(&fs::read(golden("golden.json")).unwrap()).unwrap();
    for (name, forms) in recorded["templates"].as_object().unwrap() {
        for form in ["marked", "plain"] {
            let folder = tempfile::tempdir().unwrap();
            let read = |name| fs::read(golden("bpe").join(name)).unwrap();
            let mut config: Value = serde_json::from_slice(&read("tokenizer_config.json")).unwrap();
            config["chat_template"] = forms[form].clone();
            fs::write(folder.path().join("tokenizer.json"), read("tokenizer.json")).unwrap();
            fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
            let tokenizer = Tokenizer::open(folder.path()).unwrap();
            let of_it = |chat: &&Value| chat["template"] == json!(name);
            for chat in recorded["conversations"].as_array().unwrap().iter().filter(of_it) {
                check_conversation(&tokenizer, chat);
            }
        }
    }
}

fn check_conversation(tokenizer: &Tokenizer, chat: &Value) {
    let messages: Vec<Message> = serde_json::from_value(chat["messages"].clone()).unwrap();
    let text = tokenizer.chat_template().render(&messages, false).unwrap();
    assert_eq!(json!(text), chat["text"]);
    let marked = BlockTokeniser::new(tokenizer, RecordKind::Texts)
        .record(TextRecord::Conversation { messages, n_prompt: 0 })
        .unwrap();
    assert_eq!(json!(marked.ids), chat["ids"], "{text:?}");
    let mask: Vec<u8> = marked.mask.iter().map(|is_in| u8::from(*is_in)).collect();
    assert_eq!(json!(mask), chat["mask"], "{text:?}");
}

/// Without a template of its own, a model gets `ChatML`; what is learnt are answers and their ends.
#[test]
fn only_answers_are_asked_for() {
    let line = r#"{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b!"}]}"#;
    let mut place = Place::new([("a.jsonl", line)]);
    place.request.length = 128;
    let sequence = place.texts().train(0).unwrap();
    let text = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb!<|im_end|>\n";
    assert_eq!(place.tokenizer.decode(&sequence.ids[..text.len()]), text);
    let asked: Vec<u32> =
        sequence.targets.iter().copied().filter(|id| *id != IGNORE_INDEX).collect();
    assert_eq!(place.tokenizer.decode(&asked), "b!<|im_end|>\n");
    assert_eq!(sequence.targets[text.find("b!").unwrap() - 1], u32::from(b'b'));
}

#[test]
fn of_a_prompt_and_its_completion_the_completion_is_asked_for() {
    let line = r#"{"prompt": "2+2=", "completion": "4."}"#;
    let sequence = Place::new([("a.jsonl", line)]).texts().train(0).unwrap();
    let [four, dot] = [u32::from(b'4'), u32::from(b'.')];
    assert_eq!(sequence.ids[..8], [50, 43, 50, 61, four, dot, END, END]);
    assert_eq!(
        sequence.targets[..7],
        [IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, four, dot, END, IGNORE_INDEX]
    );
}

#[test]
fn every_text_is_found_again() {
    let place = Place::new([
        ("b.txt", "second"),
        ("a.txt", "\u{feff}first\r\n"),
        ("deep/c.md", "# third\n"),
        ("deep/d.jsonl", "{\"text\": \"fourth\"}\n\n{\"text\": \"fifth\"}"),
        (".hidden.txt", "no"),
    ]);
    let texts = place.texts();
    assert!(texts.problems().is_empty(), "{:?}", texts.problems());
    let mut expected = ["first\r\n", "second", "# third\n", "fourth", "fifth"].map(ended).to_vec();
    expected.sort();
    assert_eq!(documents(&train(&texts)), expected);
    assert_eq!((texts.n_tokens(), texts.n_held_out()), (37, 0));
    for Sequence { ids, targets, first_keys } in train(&texts) {
        assert_eq!([ids.len(), targets.len(), first_keys.len()], [64; 3]);
        for at in 0..64 {
            let is_end = ids[at] == END;
            assert_eq!(targets[at], if is_end { IGNORE_INDEX } else { ids[at + 1] }, "{at}");
            assert!(first_keys[at] as usize <= at);
        }
    }
}

/// A long text is cut, and what is at a cut is asked for all the same; short ones stay whole.
#[test]
fn only_what_does_not_fit_is_cut() {
    let (long, short) = (words(64 * 2 + 20, 0), words(40, 1));
    let lines = format!("{}\n{}\n", json!({"text": long}), json!({"text": short}));
    let place = Place::new([("a.jsonl", &lines)]);
    let texts = place.texts();
    let found = documents(&train(&texts));
    let all = ended(&long);
    for piece in [&all[..64], &all[64..128], &all[128..], &ended(&short)[..]] {
        assert!(found.contains(&piece.to_vec()), "{piece:?}");
    }
    assert_eq!((found.len(), texts.n_train()), (4, 3));
    let first = train(&texts).into_iter().find(|sequence| sequence.ids[..] == all[..64]).unwrap();
    assert_eq!(first.targets, &all[1..65]);
}

/// Blocks, waves and shards do not show in what comes out.
#[test]
fn a_file_larger_than_all_buffers_is_one_text() {
    let text = words(15_000, 0);
    let mut tokenizers = vec![Tokenizer::bytes()];
    tokenizers.extend(["bpe", "pieces.gguf"].map(|name| Tokenizer::open(&golden(name)).unwrap()));
    for tokenizer in tokenizers {
        let line = json!({"text": words(9_000, 3)}).to_string();
        let mut place = Place::new([("a.txt", &text), ("b.jsonl", &line)]);
        place.request.length = 1 << 20;
        let framed = |text: &str| {
            let ids = tokenizer.encode(text).unwrap();
            [tokenizer.bos().into_iter().collect(), ids, tokenizer.eos().into_iter().collect()]
                .concat()
        };
        let mut expected: Vec<u32> = [framed(&text), framed(&words(9_000, 3))].concat();
        place.tokenizer = tokenizer;
        let texts = place.texts();
        let store = &texts.stores[0];
        assert!(
            place.shards().len() == 1 && store.documents.len() == 2,
            "{}",
            place.shards().len()
        );
        let mut found = store.read(0..u64::from(store.documents[0].length)).unwrap().ids;
        found.extend(store.read(found.len() as u64..store.n_tokens()).unwrap().ids);
        assert!(
            found == expected,
            "differ at {:?}",
            expected.iter().zip(&found).position(|(a, b)| a != b)
        );
        expected.clear();
    }
}

#[test]
fn what_was_read_once_is_not_read_again() {
    let texts = [words(9_000, 0), words(9_000, 1)];
    let mut place = Place::new([("a.txt", &texts[0]), ("b.txt", &texts[1])]);
    let before = place.texts();
    assert_eq!(place.n_tokenised(), 0);
    let again = place.texts();
    assert_eq!(train(&before), train(&again));
    assert_eq!(before.fingerprint(), again.fingerprint());
    // Another seed packs the same tokens otherwise.
    place.request.seed = 8;
    assert_eq!(place.n_tokenised(), 0);
    assert_ne!(place.texts().fingerprint(), before.fingerprint());
    fs::write(place.request.path.join("b.txt"), words(9_000, 2)).unwrap();
    assert_eq!(place.n_tokenised(), 18_000);
    place.tokenizer = Tokenizer::open(&golden("bpe")).unwrap();
    assert_eq!(place.n_tokenised(), 18_000);
}

/// Stopped after every few blocks, it goes on where the last shard ended and gives the same.
#[test]
fn an_interruption_loses_a_shard_at_most() {
    let files: Vec<(String, String)> =
        (0..40).map(|n| (format!("{n:02}.txt"), words(900, n))).collect();
    let files = || files.iter().map(|(name, text)| (name.as_str(), text));
    let (whole, broken) = (Place::new(files()), Place::new(files()));
    let mut n_shards = 0;
    for stop_after in [1, 17, 33] {
        let done = AtomicUsize::new(0);
        let tell = |event| {
            event != ProgressEvent::Done || done.fetch_add(1, Ordering::Relaxed) < stop_after
        };
        let opened = TextDataset::open(&broken.request, &broken.tokenizer, &tell).map(drop);
        let is_stopped = matches!(opened, Err(TrainerError::Weights(WeightsError::Cancelled)));
        assert!(is_stopped || broken.shards().len() == 3, "{opened:?}");
        assert!(broken.shards().len() >= n_shards);
        n_shards = broken.shards().len();
    }
    assert!(n_shards >= 2, "{n_shards}");
    let left = broken.n_tokenised();
    assert!(left < 40 * 900, "{left}");
    let (whole, broken) = (whole.texts(), broken.texts());
    assert_eq!(train(&whole), train(&broken));
    assert_eq!(whole.fingerprint(), broken.fingerprint());
}

#[test]
fn a_damaged_shard_is_made_again() {
    let files: Vec<(String, String)> =
        (0..40).map(|n| (format!("{n:02}.txt"), words(900, n))).collect();
    let place = Place::new(files.iter().map(|(name, text)| (name.as_str(), text)));
    let before = train(&place.texts());
    let shards = place.shards();
    assert!(shards.len() > 2);
    let mut bytes = fs::read(&shards[1]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shards[1], bytes).unwrap();
    let said = place.said();
    assert!(said.len() == 1 && said[0].contains("is damaged and was put aside"), "{said:?}");
    let texts = place.texts();
    assert!(texts.problems().is_empty());
    assert_eq!(train(&texts), before);
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    let long = format!("{{\"text\": \"{}\"}}", "x".repeat(20_000));
    let lines = [
        "{\"text\": \"good one\"}",
        "{\"text\": ",
        "{\"texts\": \"wrong key\"}",
        &long,
        "",
        "{\"text\": \"good two\"}",
        "{\"text\": \"\"}",
        "{\"messages\": [{\"role\": \"assistant\", \"content\": \"x\"}]}",
    ];
    let latin = b"good\nb\xe4d\ngood again\n";
    let mut place = Place::new([
        ("a.jsonl", lines.join("\n").as_bytes()),
        ("b.txt", latin),
        ("c.txt", b"\x89PNG\r\n\x1a\n\0\0"),
        ("d.txt", b""),
        ("e.txt", b" \n "),
        ("f.json", b"{\"data\": [{\"text\": \"x\"}]}"),
        ("g.bin", b"\x01\x02"),
        ("h.jsonl", &[lines[0].as_bytes(), b"\n{\"text\": \"\xff\"}\r\n"].concat()),
    ]);
    let expected = [
        "a.jsonl: line 2 is not JSON: eof while parsing a value at column 8",
        "a.jsonl: line 3 has the keys texts, expected text, prompt with completion, instruction with output, \
         messages, or conversations",
        "a.jsonl: line 4 is too long: 20 KiB, most is 16 KiB",
        "a.jsonl: line 7 is empty",
        "a.jsonl: line 8 message 1 of the assistant comes first",
        "b.txt: line 2 is not UTF-8: byte 1 of the line is 0xe4",
        "c.txt: is not text: byte 6 is 0x1a",
        "d.txt: is empty",
        "e.txt: is empty",
        "f.json: line 1 has the keys data, expected text, prompt with completion, instruction with output, \
         messages, or conversations",
        "g.bin: has no header that says how many bytes a token takes",
        "h.jsonl: line 2 is not UTF-8: byte 10 of the line is 0xff",
    ];
    assert_eq!(place.said(), expected);
    // Said again, though nothing is read again.
    assert_eq!(place.said(), expected);
    let found = documents(&train(&place.texts()));
    let mut good = ["good one", "good two", "good\ngood again\n", "good one"].map(ended).to_vec();
    good.sort();
    assert_eq!(found, good);

    place.request.path = place.request.path.join("f.json");
    let error = place.open().map(drop).unwrap_err().to_string();
    assert!(error.starts_with("no text to train with in "), "{error}");
    assert!(error.contains("f.json line 1 has the keys data, expected text"), "{error}");
}

/// Neighbours of one kind are one line, so that a large file of another form is a short list.
#[test]
fn many_faults_are_counted() {
    let bad = "no\n no\n".repeat(225);
    let same = "{\"words\": 1}\n".repeat(1000);
    let place = Place::new([("a.jsonl", &format!("{same}{bad}{{\"text\": \"good\"}}"))]);
    let said = place.said();
    assert_eq!(said.len(), 101);
    assert!(said[0].starts_with("a.jsonl: lines 1 to 1000 has the keys words"), "{}", said[0]);
    assert_eq!(said[99], "a.jsonl: line 1099 is not JSON: expected ident at column 2");
    assert_eq!(said[100], "a.jsonl: and 351 more like these");
    let left_out = place.texts().findings().left_out;
    let [records] = &left_out[..] else { panic!("{left_out:?}") };
    assert_eq!((records.left_out, records.of), (1450, 1451));
    assert_eq!(
        records.reasons[0].to_string(),
        "1000 with unknown keys (a.jsonl lines 1 to 1000, …)"
    );
}

/// The records of files that pandas and Python wrote: of each file the same ones, in order.
#[test]
fn files_of_other_programs_are_understood_or_refused() {
    let read = |name: &str| fs::read(golden("files").join(name)).unwrap();
    let records = |name: &str| {
        let place = Place::new([(name, &read(name))]);
        let texts = place.texts();
        assert!(texts.problems().is_empty(), "{name}: {:?}", texts.problems());
        let store = &texts.stores[0];
        store.read(0..store.n_tokens()).unwrap()
    };
    let expected = records("lines.jsonl");
    let asked: Vec<u32> =
        expected.ids.iter().zip(&expected.mask).filter(|(_, is)| **is).map(|(id, _)| *id).collect();
    let answers = ["3", "no; \"yes\"\n", " ok"].map(ended).concat();
    assert_eq!(asked, answers, "only answers are learnt");
    for name in [
        "list.json",
        "pretty.json",
        "pandas.csv",
        "index.csv",
        "semicolon.csv",
        "tabs.tsv",
        "excel.csv",
    ] {
        assert_eq!(records(name), expected, "{name}");
    }
    for (name, said) in [
        (
            "table.parquet",
            "is Parquet, which is not read: python -c \"import pandas; pandas.read_parquet('table.parquet')",
        ),
        ("packed.csv.gz", "is compressed, which is not read: gunzip -k packed.csv.gz"),
        ("utf16.csv", "is UTF-16, only UTF-8 is read"),
        ("columns.json", "line 1 has instruction that is an object, expected a text"),
    ] {
        // In a folder, named itself, and under a name that lies.
        let other = format!("{name}.txt");
        let mut place = Place::new([(name, &read(name)), ("good.txt", &b"good".to_vec())]);
        let shown = place.said();
        assert!(shown.len() == 1 && shown[0].contains(said), "{shown:?}");
        fs::write(place.request.path.join(&other), read(name)).unwrap();
        for named in [name, &other] {
            let path = place.request.path.join(named);
            let request = TextDataRequest { path, ..place.request.clone() };
            let error = std::mem::replace(&mut place.request, request);
            let shown = place.open().map(drop).unwrap_err().to_string();
            place.request = error;
            let said = said.split(&[':', '('][..]).next().unwrap();
            assert!(shown.contains(said), "{named}: {shown}");
        }
    }
}

#[test]
fn what_does_not_say_what_it_is_is_not_trained_on() {
    let place = Place::new([
        ("Makefile", "all: train"),
        ("README.md", "# a card"),
        ("LICENSE", "free"),
        ("a.txt", "good"),
        ("b.csv", "name,age\nx,3\n"),
        ("c.docx", "PK\u{3}\u{4}"),
        ("d.html", "<p>"),
        ("e.txt", "{\"text\": \"a record\"}\n{\"text\": \"another\"}\n"),
        ("f.csv", "text,id\none,1\ntwo\n\"three\",3\n\"four,4\n"),
        ("g.csv", "text\n"),
        ("h.json", "[\n]\n"),
    ]);
    assert_eq!(
        place.said(),
        [
            "LICENSE: is not trained on, since it is about the folder: give the file itself as text.path if you \
             mean it",
            "Makefile: has no ending, which does not say what it holds: rename it to .txt, .jsonl or .csv, or \
             give the file itself as text.path",
            "README.md: is not trained on, since it is about the folder: give the file itself as text.path if \
             you mean it",
            "c.docx: is a Word document, which is not read: save it as plain text (.txt)",
            "d.html: has the ending .html, which does not say what it holds: rename it to .txt, .jsonl or .csv, \
             or give the file itself as text.path",
            "b.csv: has the columns name, age, expected text, prompt with completion, instruction with output, \
             messages, or conversations",
            "f.csv: row 3 has 1 cells, the first row 2",
            "f.csv: row 5 is not closed, or longer than 16 KiB: what follows in this file is left out too",
            "g.csv: is empty",
            "h.json: is empty",
        ]
    );
    let mut expected = ["good", "a record", "another", "one", "three"].map(ended).to_vec();
    expected.sort();
    assert_eq!(documents(&train(&place.texts())), expected);
    let left_out: Vec<String> =
        place.texts().findings().left_out.iter().map(ToString::to_string).collect();
    assert!(
        left_out[0].starts_with("8 of 11 files left out: 2 about the folder (LICENSE, README.md)")
    );
    assert!(left_out[1].starts_with("2 of 7 records left out: "), "{left_out:?}");
}

/// Alpaca's words where a model has no template, and its own template where it has one.
/// What a folder from strangers may not reach.
#[test]
fn links_out_of_the_folder_are_left_out_unless_they_are_followed() {
    let mut place = Place::new([("a.txt", "a hearth"), ("sub/b.txt", "a fire")]);
    let secrets = place.folder.path().join("secrets");
    fs::create_dir(&secrets).unwrap();
    fs::write(secrets.join("key.txt"), "a secret").unwrap();
    let root = place.request.path.clone();
    symlink(secrets.join("key.txt"), root.join("c.txt")).unwrap();
    symlink("../secrets/key.txt", root.join("d.txt")).unwrap();
    symlink(&secrets, root.join("folder")).unwrap();
    symlink(root.join("sub/b.txt"), root.join("inside.txt")).unwrap();
    let texts = place.texts();
    assert_eq!(texts.n_documents(), 3, "{:?}", place.said());
    let outside = place.said().into_iter().filter(|text| text.contains("leads out of the folder"));
    assert_eq!(outside.count(), 3, "{:?}", place.said());
    assert!(!documents(&train(&texts)).contains(&ended("a secret")));
    place.request.follow_links = true;
    let texts = place.texts();
    assert!(documents(&train(&texts)).contains(&ended("a secret")), "{:?}", place.said());
    assert!(texts.n_documents() > 4, "{}", texts.n_documents());
}

#[test]
fn an_instruction_is_put_as_the_model_knows_it() {
    let line = r#"{"instruction": "Add.", "input": "1, 2", "output": "3"}"#;
    let mut place = Place::new([("a.json", line)]);
    place.request.length = 512;
    let text = |place: &Place| {
        let texts = place.texts();
        let store = &texts.stores[0];
        place.tokenizer.decode(&store.read(0..store.n_tokens()).unwrap().ids)
    };
    assert!(text(&place).starts_with(
        "Below is an instruction that describes a task, paired with an input that provides further context. Write \
         a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n\
         ### Response:\n3"
    ));
    place.tokenizer = Tokenizer::open(&golden("bpe")).unwrap();
    assert!(place.tokenizer.template().is_some());
    let conversation = json!({"messages": [
        {"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}]});
    let mut same = Place::new([("a.jsonl", &conversation.to_string())]);
    (same.tokenizer, same.request.length) = (Tokenizer::open(&golden("bpe")).unwrap(), 512);
    assert_eq!(text(&place), text(&same));
}

/// It is the model's fault, not that of each line; and nobody's where there are no conversations.
#[test]
fn a_template_that_is_no_jinja_ends_the_reading() {
    let chat = json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    for (line, is_read) in [(chat, false), (json!({"text": "a b c"}), true)] {
        let mut place = Place::new([("a.jsonl", &line.to_string())]);
        let model = place.folder.path().join("model");
        fs::create_dir(&model).unwrap();
        Tokenizer::bytes().save(&model).unwrap();
        fs::write(model.join("chat_template.jinja"), "{% if %}").unwrap();
        place.tokenizer = Tokenizer::open(&model).unwrap();
        match place.open() {
            Ok(_) => assert!(is_read),
            Err(error) => {
                let said = error.to_string();
                assert!(!is_read && said.starts_with("chat template cannot be used: "), "{said}");
                assert!(said.ends_with("chat_template.jinja"), "{said}");
            }
        }
    }
}

/// Lists and tables that are longer than a block come out as one would write them line by line.
#[test]
fn long_lists_and_tables_are_read_in_blocks() {
    let texts: Vec<String> =
        (0..300).map(|n| words(20 + n * 7 % 200, n) + "\n, \"quoted\" ]}").collect();
    let records: Vec<Value> = texts.iter().map(|text| json!({"text": text, "n": 1})).collect();
    let quoted = |text: &String| format!("1,\"{}\"\r\n", text.replace('"', "\"\""));
    let lines: String = records.iter().map(|record| record.to_string() + "\n").collect();
    let table = "n,text\r\n".to_owned() + &texts.iter().map(quoted).collect::<String>();
    let pretty = serde_json::to_string_pretty(&records).unwrap();
    let objects: String =
        records.iter().map(|record| serde_json::to_string_pretty(record).unwrap() + "\n").collect();
    let of = |name: &str, content: &String| {
        let place = Place::new([(name, content)]);
        let texts = place.texts();
        assert!(texts.problems().is_empty(), "{name}: {:?}", texts.problems());
        train(&texts)
    };
    let expected = of("a.jsonl", &lines);
    assert!(lines.len() > 4 * read::BLOCK_BYTES);
    assert_eq!(of("a.csv", &table), expected);
    assert_eq!(of("a.json", &pretty), expected);
    assert_eq!(of("b.json", &json!(records).to_string()), expected);
    assert_eq!(of("b.jsonl", &objects), expected);
}

#[test]
fn a_job_with_nothing_to_learn_says_so() {
    let place = Place::new([(".hidden", "x")]);
    let error = place.open().map(drop).unwrap_err().to_string();
    assert!(error.starts_with("no text to train with in "), "{error}");
    assert!(error.ends_with("texts: there is none"), "{error}");
    let mut place = Place::new([("a.txt", "only one")]);
    place.request.held_out = HeldOut::Share(0.1);
    let error = place.open().map(drop).unwrap_err();
    assert!(error.to_string().contains("all of it is held out"), "{error}");
    place.request.held_out = HeldOut::Share(1.5);
    assert!(place.open().map(drop).unwrap_err().to_string().contains("a share of 1.5"));
    place.request.held_out = HeldOut::None;
    assert!(place.texts().train(1).is_err());
    place.request.path = place.folder.path().join("nowhere");
    assert!(place.open().map(drop).unwrap_err().to_string().contains("cannot read"));
}

#[test]
fn some_are_held_out() {
    let lines: String =
        (0..200).map(|n| json!({"text": words(50, n)}).to_string() + "\n").collect();
    let mut place = Place::new([("texts/a.jsonl", &lines), ("other/b.txt", &"held".into())]);
    place.request.path = place.request.path.join("texts");
    place.request.held_out = HeldOut::Share(0.1);
    let texts = place.texts();
    let held = |texts: &TextDataset| {
        let held: Vec<_> =
            (0..texts.n_held_out()).map(|index| texts.held_out(index).unwrap()).collect();
        documents(&held)
    };
    let (trained, kept) = (documents(&train(&texts)), held(&texts));
    assert_eq!(trained.len() + kept.len(), 200);
    assert!((8..35).contains(&kept.len()), "{}", kept.len());
    assert!(kept.iter().all(|document| !trained.contains(document)));

    place.request.held_out = HeldOut::Path(place.folder.path().join("texts/other"));
    let texts = place.texts();
    assert_eq!((documents(&train(&texts)).len(), held(&texts)), (200, vec![ended("held")]));
}

#[test]
fn sequences_may_be_read_ahead_by_another_thread() {
    fn is_shared<T: Send + Sync>() {}
    is_shared::<TextDataset>();
}

/// Of tokens as llm.c writes them: the header, then the token that ends a text before each.
fn with_header(magic: u32, version: u32, ids: &[u32], width: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        [magic, version, ids.len() as u32].iter().flat_map(|n| n.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()));
    bytes
}

#[test]
fn tokens_of_other_programs_are_read() {
    let ids = [END, 1, 2, END, 3, 4, 5, END, 6, 7];
    let plain = |width: usize| with_header(0, 0, &ids, width)[1024..].to_vec();
    let expected = vec![vec![1, 2, END], vec![3, 4, 5, END], vec![6, 7]];
    for (bytes, width) in [
        (with_header(20_240_520, 1, &ids, 2), None),
        (with_header(20_240_801, 7, &ids, 4), Some(TokenWidth::Two)),
        (plain(2), Some(TokenWidth::Two)),
        (plain(4), Some(TokenWidth::Four)),
    ] {
        let mut place = Place::new([("a.bin", &bytes)]);
        place.request.width = width;
        assert_eq!(documents(&train(&place.texts())), expected, "{width:?}");
    }
}

#[test]
fn tokens_that_are_none_are_left_out() {
    let ids = [1, 2, END, 3, 300, END, 4, 5];
    let whole = with_header(20_240_520, 1, &ids, 2);
    let mut place = Place::new([
        ("a.bin", &whole[..]),
        ("b.bin", &whole[..whole.len() - 2]),
        ("c.bin", &with_header(20_240_520, 2, &ids, 2)),
        ("d.bin", b"\x01\0\x02"),
        ("e.bin", &with_header(20_240_520, 1, &[], 2)),
    ]);
    place.request.width = Some(TokenWidth::Two);
    assert_eq!(
        place.said(),
        [
            "a.bin: has token 300 at byte 8, the vocabulary has 257",
            "b.bin: has 1038 bytes, expected 1040 by its header",
            "c.bin: has a header of version 2, known are 1 and 7",
            "d.bin: has 3 bytes, expected a multiple of 2",
            "e.bin: is empty",
        ]
    );
    assert_eq!(documents(&train(&place.texts())), [vec![1, 2, END], vec![4, 5]]);
}

/// A large vocabulary takes wider tokens in the cache.
#[test]
fn wide_tokens_are_kept_too() {
    use super::encode::TokenisedBlock;
    use super::read::ReadPosition;
    use super::store::ShardBuilder;
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (0..20).map(|n| n * 5_000).collect();
    let counts: Vec<bool> = (0..20).map(|n| n % 3 == 0).collect();
    let mut hashes = HashCache::open(folder.path().join("hashes.json"));
    let mut open = || {
        TokenStore::open(folder.path(), 100_000, &mut hashes, &|_| true, &mut Vec::new()).unwrap()
    };
    let mut growing = ShardBuilder::new(100_000);
    let ends = vec![5, 20];
    growing.add(
        0,
        TokenisedBlock { ids: ids.clone(), loss_mask: counts.clone(), ends, faults: Vec::new() },
    );
    open().push(growing, ReadPosition::default()).unwrap();
    let store = open();
    let lengths: Vec<u32> = store.documents.iter().map(|document| document.length).collect();
    assert_eq!(lengths, [5, 15]);
    let MaskedTokens { ids: found, mask: is_in } = store.read(7..19).unwrap();
    assert_eq!((&found[..], &is_in[..]), (&ids[7..19], &counts[7..19]));
}
