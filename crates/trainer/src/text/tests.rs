//! Texts from files to sequences: against what transformers makes of the same conversations, and
//! against everything that is wrong with files.

use std::fs;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;
use weights::WeightsError;

use super::encode::Encoder;
use super::record::Record;
use super::*;

const END: u32 = 256;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text").join(name)
}

/// A folder of texts and a place for the cache.
struct Place {
    folder: TempDir,
    request: Request,
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
        let request = Request { path, width, length: 64, held_out, seed: 7, folder: cache };
        Self { folder, request, tokenizer: Tokenizer::bytes() }
    }

    fn open(&self) -> Result<Texts> {
        Texts::open(&self.request, &self.tokenizer, &|_| true)
    }

    fn texts(&self) -> Texts {
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
                Event::Phase { name, .. } => {
                    is_tokens.store(usize::from(name == TOKENS), Ordering::Relaxed);
                }
                Event::Loaded(n) => {
                    let n = n * is_tokens.load(Ordering::Relaxed) as u64;
                    bytes.fetch_add(n, Ordering::Relaxed);
                }
                Event::Done => {}
            }
            true
        };
        Texts::open(&self.request, &self.tokenizer, &tell).unwrap();
        bytes.into_inner()
    }
}

fn said(problem: &Problem) -> String {
    format!("{}: {}", problem.path.file_name().unwrap().to_str().unwrap(), problem.kind)
}

fn train(texts: &Texts) -> Vec<Sequence> {
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
    let text = tokenizer.chat().unwrap().render(&messages, false).unwrap();
    assert_eq!(json!(text), chat["text"]);
    let marked = Encoder::new(tokenizer).record(Record::Conversation(messages)).unwrap();
    assert_eq!(json!(marked.ids), chat["ids"], "{text:?}");
    let mask: Vec<u8> = marked.is_in.iter().map(|is_in| u8::from(*is_in)).collect();
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
    let asked: Vec<u32> = sequence.targets.iter().copied().filter(|id| *id != IGNORED).collect();
    assert_eq!(place.tokenizer.decode(&asked), "b!<|im_end|>\n");
    assert_eq!(sequence.targets[text.find("b!").unwrap() - 1], u32::from(b'b'));
}

#[test]
fn of_a_prompt_and_its_completion_the_completion_is_asked_for() {
    let line = r#"{"prompt": "2+2=", "completion": "4."}"#;
    let sequence = Place::new([("a.jsonl", line)]).texts().train(0).unwrap();
    let [four, dot] = [u32::from(b'4'), u32::from(b'.')];
    assert_eq!(sequence.ids[..8], [50, 43, 50, 61, four, dot, END, END]);
    assert_eq!(sequence.targets[..7], [IGNORED, IGNORED, IGNORED, four, dot, END, IGNORED]);
}

#[test]
fn every_text_is_found_again() {
    let place = Place::new([
        ("b.txt", "second"),
        ("a.txt", "\u{feff}first\r\n"),
        ("deep/c.md", "# third\n"),
        ("deep/d.jsonl", "{\"text\": \"fourth\"}\n\n{\"text\": \"fifth\"}"),
        (".hidden.txt", "no"),
        ("picture.png", "no"),
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
            assert_eq!(targets[at], if is_end { IGNORED } else { ids[at + 1] }, "{at}");
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
            [tokenizer.start().into_iter().collect(), ids, tokenizer.end().into_iter().collect()]
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
        let tell =
            |event| event != Event::Done || done.fetch_add(1, Ordering::Relaxed) < stop_after;
        let opened = Texts::open(&broken.request, &broken.tokenizer, &tell).map(drop);
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
        ("f.json", b"[{\"text\": \"x\"}]"),
        ("g.bin", b"\x01\x02"),
        ("h.jsonl", &[lines[0].as_bytes(), b"\n{\"text\": \"\xff\"}\r\n"].concat()),
    ]);
    let expected = [
        "a.jsonl: line 2 is not JSON: eof while parsing a value at column 8",
        "a.jsonl: line 3 has the keys texts, expected text, prompt with completion, or messages",
        "a.jsonl: line 4 is too long: 20013 bytes, most is 16384",
        "a.jsonl: line 7 is empty",
        "a.jsonl: line 8 message 1 of the assistant comes first",
        "b.txt: line 2 is not UTF-8: byte 1 of the line is 0xe4",
        "c.txt: is not text: byte 6 is 0x1a",
        "d.txt: is empty",
        "e.txt: is empty",
        "f.json: begins with '[': a record has to be a line of its own, in braces",
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
    assert!(error.contains("no text to train with, 1 x begins with '['"), "{error}");
    assert!(error.ends_with("f.json"), "{error}");
}

#[test]
fn many_faults_are_counted() {
    let place = Place::new([("a.jsonl", &format!("{}{{\"text\": \"good\"}}", "no\n".repeat(450)))]);
    let said = place.said();
    assert_eq!(said.len(), 101);
    assert_eq!(said[99], "a.jsonl: line 100 is not JSON: expected ident at column 2");
    assert_eq!(said[100], "a.jsonl: and 350 more like these");
}

#[test]
fn a_job_with_nothing_to_learn_says_so() {
    let place = Place::new([("picture.png", "x")]);
    let error = place.open().map(drop).unwrap_err();
    assert!(error.to_string().contains("no text to train with, there is none"), "{error}");
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
    let held = |texts: &Texts| {
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
    is_shared::<Texts>();
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
        (with_header(20_240_801, 7, &ids, 4), Some(Width::Two)),
        (plain(2), Some(Width::Two)),
        (plain(4), Some(Width::Four)),
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
    place.request.width = Some(Width::Two);
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
    use super::encode::Encoded;
    use super::read::Position;
    use super::store::Growing;
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (0..20).map(|n| n * 5_000).collect();
    let counts: Vec<bool> = (0..20).map(|n| n % 3 == 0).collect();
    let mut hashes = Hashes::open(folder.path().join("hashes.json"));
    let mut open =
        || Store::open(folder.path(), 100_000, &mut hashes, &|_| true, &mut Vec::new()).unwrap();
    let mut growing = Growing::new(100_000);
    let ends = vec![5, 20];
    growing.add(0, Encoded { ids: ids.clone(), counts: counts.clone(), ends, faults: Vec::new() });
    open().push(growing, Position::default()).unwrap();
    let store = open();
    let lengths: Vec<u32> = store.documents.iter().map(|document| document.length).collect();
    assert_eq!(lengths, [5, 15]);
    let Marked { ids: found, is_in } = store.read(7..19).unwrap();
    assert_eq!((&found[..], &is_in[..]), (&ids[7..19], &counts[7..19]));
}
