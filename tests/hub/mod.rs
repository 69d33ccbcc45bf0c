//! Models by name: downloaded from a hub on this computer, found in the cache, trained by their names.

mod server;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use self::server::{COMMIT, FakeHub, HubScript, NAME, git_sha1, sha256};
use crate::models::golden;
use crate::{command, said};

/// A computer with an empty cache.
struct HubUser {
    place: TempDir,
    endpoint: String,
}

impl HubUser {
    fn of(hub: &FakeHub) -> Self {
        Self { place: tempfile::tempdir().unwrap(), endpoint: hub.endpoint() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn blob(&self, checksum: &str) -> PathBuf {
        self.path("cache").join("models--tiny--model/blobs").join(checksum)
    }

    fn snapshot(&self) -> PathBuf {
        self.path("cache/models--tiny--model/snapshots").join(COMMIT)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = command(&line.split(' ').collect::<Vec<_>>());
        command
            .current_dir(self.place.path())
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_TOKEN", "hf_secret");
        command.env("HF_HUB_CACHE", self.path("cache")).env("XDG_CACHE_HOME", self.path("xdg"));
        for name in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"] {
            command.env_remove(name).env_remove(name.to_lowercase());
        }
        command
    }

    fn run(&self, line: &str) -> Output {
        let output = self.command(line).output().unwrap();
        assert!(!said(&output).contains("hf_secret"), "{}", said(&output));
        output
    }

    fn done(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.status.success(), "{line}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn fetched(&self) -> Value {
        serde_json::from_str(&self.done(&format!("fetch {NAME} --json"))).unwrap()
    }

    fn fails(&self, line: &str, parts: &[&str]) {
        let output = self.run(line);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.starts_with("error: ") && said.contains("\nhint: "), "{said}");
        for part in parts {
            assert!(said.contains(part), "{line}: {part:?} is missing from {said}");
        }
    }
}

/// Bytes that do not compress to anything and are the same every time.
fn noise(n: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(n).collect()
}

#[test]
fn all_models_of_a_job_are_fetched() {
    let hub = HubScript::of(&golden().join("pipeline")).serve();
    let user = HubUser::of(&hub);
    let job = |name: &str, lines: &str| fs::write(user.path(name), lines).unwrap();
    job(
        "images.toml",
        &format!("[base]\npath = '{NAME}'\nrest = '{NAME}'\n[data]\nimages = 'x'\n"),
    );
    let shown = user.done("fetch images.toml --dry-run");
    assert_eq!(
        shown,
        user.done(&format!("fetch {NAME} --dry-run")),
        "it is named twice, and there once"
    );
    let fetched: Value = serde_json::from_str(&user.done("fetch images.toml --json")).unwrap();
    assert!(fetched["transferred_bytes"].as_u64().unwrap() > 100_000, "{fetched}");
    // One that only lends its tokenizer.
    let random = "[base]\npath = 'tiny'\nrandom_init = true\n[adapter]\nkind = 'full'\n";
    job("texts.toml", &format!("{random}[text]\npath = 'x'\ntokenizer = '{NAME}'\n"));
    let lent: Value = serde_json::from_str(&user.done("fetch texts.toml --json")).unwrap();
    let files = lent["files"].as_array().unwrap();
    let is_of_tokenizer = |file: &Value| file["path"].as_str().unwrap().starts_with("tokenizer");
    assert!(!files.is_empty() && files.iter().all(is_of_tokenizer), "{lent}");
    job("paths.toml", "[base]\npath = './here'\n[data]\nimages = 'x'\n");
    for (line, says) in [
        ("fetch paths.toml", "paths.toml names no model of the hub"),
        ("fetch images.toml --all", "are for one model, images.toml is a job"),
        ("fetch nowhere.toml", "the name is \"nowhere.toml\""),
    ] {
        let output = user.run(line);
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(said(&output).contains(says), "{line}: {}", said(&output));
    }
}

#[test]
fn a_model_is_fetched_and_trained_by_its_name() {
    let hub = HubScript { page: 5, ..HubScript::of(&golden().join("pipeline")) }.serve();
    let user = HubUser::of(&hub);
    user.fails(
        &format!("inspect {NAME}"),
        &["no model tiny/model", "cache", "`hearth fetch tiny/model`"],
    );
    let dry = user.done(&format!("fetch {NAME} --dry-run"));
    assert!(
        dry.contains("vae/config.json") && !dry.contains("golden") && !dry.contains("lora"),
        "{dry}"
    );
    assert!(!user.path("cache").exists(), "a dry run wrote");

    let fetched = user.fetched();
    let missing = fetched["missing_bytes"].as_u64().unwrap();
    assert!(missing > 100_000 && fetched["transferred_bytes"] == missing, "{fetched}");
    for seen in hub.seen() {
        assert_eq!(seen.has_token, !seen.is_cdn, "a token belongs to the hub alone: {seen:?}");
    }
    assert!(hub.seen().iter().any(|seen| seen.is_cdn && seen.sent_bytes > 0));
    let reference = fs::read_to_string(user.path("cache/models--tiny--model/refs/main")).unwrap();
    assert_eq!(reference, COMMIT, "Python reads all of it");
    let link = fs::read_link(user.snapshot().join("vae/config.json")).unwrap();
    let config = fs::read(golden().join("pipeline/vae/config.json")).unwrap();
    assert_eq!(link, Path::new("../../../blobs").join(git_sha1(&config)));
    let weights =
        fs::read(golden().join("pipeline/vae/diffusion_pytorch_model.safetensors")).unwrap();
    assert_eq!(fs::read(user.blob(&sha256(&weights))).unwrap(), weights);

    let sent = hub.sent();
    assert_eq!(user.fetched()["transferred_bytes"], 0);
    let of_index = fs::read(golden().join("pipeline/model_index.json")).unwrap().len();
    assert_eq!(hub.sent(), sent + of_index, "what is there came again");

    assert!(user.done(&format!("inspect {NAME}")).contains("diffusion_pytorch_model"));
    let train = format!(
        "train --base {NAME} --images images --steps 2 --resolution 64 --out run --set data.draw=neon"
    );
    user.done(&format!(
        "{train} --set data.draw_count=3 --set data.bucket_step=16 --set sample.prompts=[]"
    ));
    let card = fs::read_to_string(user.path("run/README.md")).unwrap();
    assert!(card.contains("base_model: \"tiny/model\""), "{card}");
    user.done(&format!(
        "sample --base {NAME}@{COMMIT} --adapter run/adapter --prompt fox --size 64 --steps 1"
    ));
    fs::remove_file(user.snapshot().join("vae/config.json")).unwrap();
    user.fails(
        &format!("sample --base {NAME} --prompt fox"),
        &[
            "the download of tiny/model is not complete, vae/config.json is missing",
            "`hearth fetch tiny/model` goes on",
        ],
    );
    assert_eq!(user.fetched()["transferred_bytes"], 0, "only the link was gone");
}

/// A fetch that is killed, and the next one: both together transfer the file once, but for what was on its way.
#[test]
fn a_killed_fetch_goes_on_where_it_stopped() {
    let weights = noise(6 << 20);
    let hub = HubScript { pause_ms: 20, ..HubScript::of_bytes(weights.clone()) }.serve();
    let user = HubUser::of(&hub);
    let mut child = user.command(&format!("fetch {NAME}")).stdout(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while hub.sent() < 2 << 20 {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing came");
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    user.fails(&format!("inspect {NAME}"), &["not complete"]);
    let before = hub.sent();
    let transferred = user.fetched()["transferred_bytes"].as_u64().unwrap() as usize;
    assert_eq!(fs::read(user.snapshot().join("model.safetensors")).unwrap(), weights);
    assert!(transferred < weights.len() - (1 << 20), "{transferred} after {before}");
    let partial = fs::read_dir(user.blob(""))
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().ends_with("partial"));
    assert_eq!(partial.count(), 0);
}

#[test]
fn trouble_on_the_way_is_overcome() {
    let weights = noise(300_000);
    let plain = || HubScript::of_bytes(weights.clone());
    let scripts = [
        HubScript { cuts: Mutex::new(vec![0, 70_000, 100_000]), ..plain() },
        HubScript { stumbles: Mutex::new(vec![503, 429, 500]), ..plain() },
        HubScript { ignores_ranges: true, cuts: Mutex::new(vec![150_000]), ..plain() },
        HubScript { is_endless: true, ..plain() },
        HubScript { page: 1, ..plain() },
    ];
    for (number, script) in scripts.into_iter().enumerate() {
        let hub = script.serve();
        let user = HubUser::of(&hub);
        user.fetched();
        assert_eq!(
            fs::read(user.snapshot().join("model.safetensors")).unwrap(),
            weights,
            "script {number}"
        );
    }
}

#[test]
fn a_damaged_file_is_not_kept() {
    let weights = noise(100_000);
    let hub = HubScript {
        damaged: Some("model.safetensors".into()),
        ..HubScript::of_bytes(weights.clone())
    }
    .serve();
    let mut user = HubUser::of(&hub);
    let parts = ["model.safetensors was damaged on its way", &sha256(&weights), "run it again"];
    user.fails(&format!("fetch {NAME}"), &parts);
    assert!(
        !user.blob(&sha256(&weights)).exists()
            && !user.snapshot().join("model.safetensors").exists()
    );
    let hub = HubScript::of_bytes(weights.clone()).serve();
    user.endpoint = hub.endpoint();
    user.fetched();
    assert_eq!(fs::read(user.snapshot().join("model.safetensors")).unwrap(), weights);
}

#[test]
fn refusals_are_told_with_a_remedy() {
    let fails = |script: HubScript, parts: &[&str]| {
        let hub = script.serve();
        let user = HubUser::of(&hub);
        user.fails(&format!("fetch {NAME}"), parts);
        assert!(!user.path("cache").exists(), "a refused download wrote");
    };
    let refused =
        |status, code| HubScript { refuses: Some((status, code)), ..HubScript::of_bytes(noise(9)) };
    fails(
        refused(403, "GatedRepo"),
        &["tiny/model is gated", "accept the licence at http://127.0.0.1", "/tiny/model"],
    );
    fails(refused(401, "GatedRepo"), &["tiny/model is gated", "accept the licence"]);
    fails(refused(401, "RepoNotFound"), &["has no model tiny/model", "check the name"]);
    fails(refused(404, "RepoNotFound"), &["has no model tiny/model"]);
    fails(refused(404, "RevisionNotFound"), &["tiny/model has no revision main"]);
    fails(refused(401, ""), &["refused the token (HTTP 401)"]);
    fails(refused(418, ""), &["answered HTTP 418"]);
    let said = |body: &str| HubScript { body: Some(body.into()), ..HubScript::of_bytes(noise(9)) };
    fails(
        said("<html>log in"),
        &["an answer that hearth does not understand", "login or a firewall"],
    );
    fails(said("{\"sha\": \"../../x\"}"), &["its commit is \"../../x\""]);
    let elsewhere = HubScript {
        page: 1,
        next: Some("http://127.0.0.1:9/".into()),
        ..HubScript::of_bytes(noise(9))
    };
    fails(elsewhere, &["goes on at another server"]);
    let entry =
        |path: &str, oid: &str| json!([{ "type": "file", "path": path, "size": 3, "oid": oid }]);
    let listed = |tree: Value| HubScript { tree: Some(tree), ..HubScript::of_bytes(noise(9)) };
    let oid = git_sha1(b"abc");
    for path in ["../x", "/etc/passwd", "a/../../x", "a\u{1b}[2J", "a\\b", "", "a//b", "./a"] {
        fails(listed(entry(path, &oid)), &["refused a file whose name leads elsewhere"]);
    }
    fails(
        listed(entry("config.json", "../../../x")),
        &["the checksum of config.json is \"../../../x\""],
    );
    fails(listed(json!([])), &["tiny/model has no model that hearth reads"]);
}

#[test]
fn names_that_are_none_are_wrong_usage() {
    let user = HubUser::of(&HubScript::default().serve());
    for line in
        ["fetch model", "fetch ../x", "fetch a/b --revision ../x", "fetch a/b --only x --all"]
    {
        assert_eq!(user.run(line).status.code(), Some(2), "{line}");
    }
    let offline = user.command("fetch a/b").env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(said(&offline).contains("HF_HUB_OFFLINE is set"), "{}", said(&offline));
}

#[test]
fn two_fetches_at_once_transfer_a_model_once() {
    let weights = noise(1 << 20);
    let hub = HubScript { pause_ms: 10, ..HubScript::of_bytes(weights.clone()) }.serve();
    let user = HubUser::of(&hub);
    let fetches: Vec<_> = (0..3)
        .map(|_| user.command(&format!("fetch {NAME}")).stdout(Stdio::null()).spawn().unwrap())
        .collect();
    for mut fetch in fetches {
        assert!(fetch.wait().unwrap().success());
    }
    assert_eq!(fs::read(user.snapshot().join("model.safetensors")).unwrap(), weights);
    let of_weights: usize =
        hub.seen().iter().filter(|seen| seen.is_cdn).map(|seen| seen.sent_bytes).sum();
    assert_eq!(of_weights, weights.len());
}

/// `huggingface_hub` may have a blob as a link into a store that several caches share.
#[test]
fn a_blob_may_be_a_link() {
    let weights = noise(10_000);
    let hub = HubScript::of_bytes(weights.clone()).serve();
    let user = HubUser::of(&hub);
    user.fetched();
    let blob = user.blob(&sha256(&weights));
    fs::rename(&blob, user.path("store")).unwrap();
    symlink(user.path("store"), &blob).unwrap();
    assert_eq!(user.fetched()["transferred_bytes"], 0);
}

#[test]
fn files_are_chosen_by_patterns() {
    let files = [("a-q4.gguf", 5), ("a-q8.gguf", 9), ("README.md", 3)];
    let files = files.map(|(name, n)| (name.to_owned(), noise(n))).to_vec();
    let user = HubUser::of(&HubScript { files, lfs_bytes: 4, ..HubScript::default() }.serve());
    user.fails(
        &format!("fetch {NAME}"),
        &["2 models to choose from: a-q4.gguf, a-q8.gguf", "--only"],
    );
    user.fails(&format!("fetch {NAME} --only *.bin"), &["has no file that fits *.bin"]);
    user.done(&format!("fetch {NAME} --only *q4*"));
    assert!(
        user.snapshot().join("a-q4.gguf").exists() && !user.snapshot().join("a-q8.gguf").exists()
    );
    user.done(&format!("fetch {NAME}/a-q8.gguf"));
    assert!(
        user.snapshot().join("a-q8.gguf").exists() && !user.snapshot().join("README.md").exists()
    );
    user.done(&format!("fetch {NAME} --all"));
    assert!(user.snapshot().join("README.md").exists());
}

#[test]
fn a_plan_says_what_is_to_be_downloaded() {
    let hub = HubScript::of(&golden().join("pipeline")).serve();
    let user = HubUser::of(&hub);
    let planned = |line: &str| -> Value { serde_json::from_str(&user.done(line)).unwrap() };
    let flux = "plan black-forest-labs/FLUX.1-dev --machine ROOT/machines/rtx-4090.toml --json";
    let root = crate::package().join("../..").canonicalize().unwrap();
    let flux = planned(&flux.replace("ROOT", crate::text(&root)));
    let [download] = &flux["downloads"].as_array().unwrap()[..] else { panic!("{flux}") };
    assert_eq!(download["name"], "black-forest-labs/FLUX.1-dev");
    let about = download["about_bytes"].as_f64().unwrap() / 1e9;
    assert!(
        download["bytes"].is_null() && (33.0..34.5).contains(&about),
        "{about} GB, published are 33.7"
    );
    let llama = planned("plan meta-llama/Llama-3.2-1B --json --limit 16GB");
    assert_eq!(llama["downloads"][0]["name"], "meta-llama/Llama-3.2-1B");

    user.fails(&format!("plan {NAME}"), &["no model tiny/model", "`hearth fetch tiny/model`"]);
    user.fetched();
    let tiny = planned(&format!("plan {NAME} --resolution 64 --json"));
    assert_eq!(tiny["downloads"], json!([]));
    // What was learned of it is kept, for when it is gone.
    fs::rename(user.path("cache"), user.path("away")).unwrap();
    let listed = fs::read_dir(user.path("xdg/hearth/hub")).unwrap().count();
    assert_eq!(listed, 1);
}
