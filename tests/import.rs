//! `hearth import` on configs as the other trainers' users have them: the jobs stand beside them as `.job.toml`, and
//! each is planned. `UPDATE_EXPECT=1` writes the jobs anew.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::{command, said, text};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/import")
}

fn pixel() -> PathBuf {
    golden().join("../../../fuzz/seeds/pixel.png")
}

/// A copy of a trainer's configs in a folder of its own, with the images that they name.
fn place(trainer: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden().join(trainer)).unwrap() {
        let path = entry.unwrap().path();
        if !text(&path).ends_with(".job.toml") {
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let notes = folder.path().join("data/notes");
    fs::create_dir_all(&notes).unwrap();
    for name in ["train.jsonl", "valid.jsonl"] {
        fs::write(notes.join(name), "{\"prompt\": \"a\", \"completion\": \"b\"}\n").unwrap();
    }
    for (name, captions) in [("fox", 12), ("night", 5), ("day", 5), ("walk", 0)] {
        let images = folder.path().join("data").join(name);
        fs::create_dir_all(&images).unwrap();
        for index in 0..captions {
            fs::write(images.join(format!("{index:02}.png")), "").unwrap();
            fs::write(images.join(format!("{index:02}.txt")), "a fox\n").unwrap();
        }
    }
    folder
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    command(arguments).current_dir(folder).output().unwrap()
}

/// Imports a config, compares the job with the one beside it, and plans it on a large machine. A base in several files
/// is planned as the published model of the name, which needs none of them.
fn check(trainer: &str, config: &str, published: Option<&str>) {
    let folder = place(trainer);
    let output = run(folder.path(), &["import", config, "--out", "job.toml"]);
    assert!(output.status.success(), "{config}: {}", said(&output));
    let job = fs::read_to_string(folder.path().join("job.toml")).unwrap();
    let root = folder.path().canonicalize().unwrap();
    let job = job.replace(text(&root), "").replace(text(folder.path()), "");
    expect_test::expect_file![golden().join(trainer).join(format!("{config}.job.toml"))]
        .assert_eq(&job);
    // A plan needs no images.
    for name in ["fox", "night", "day", "walk"] {
        fs::remove_dir_all(folder.path().join("data").join(name)).unwrap();
    }
    // But those that samples are drawn of.
    fs::create_dir_all(folder.path().join("data/day")).unwrap();
    fs::copy(pixel(), folder.path().join("data/day/01.png")).unwrap();
    let machine = golden().join("../../../machines/apple-m2-ultra-192gb.toml");
    let mut arguments = vec!["plan", "job.toml", "--machine", text(&machine)];
    if let Some(name) = published {
        arguments.extend(["--base", name]);
        arguments.extend(["--set", "base.vae=unset", "--set", "base.text_encoders=unset"]);
    }
    let planned = run(folder.path(), &arguments);
    assert!(planned.status.success(), "{config}: {}", said(&planned));
}

#[test]
fn ai_toolkit() {
    check("ai-toolkit", "flux.yaml", None);
    check("ai-toolkit", "qwen_edit.yaml", None);
    check("ai-toolkit", "sd35_full.yaml", None);
}

#[test]
fn kohya() {
    check("kohya", "flux.sh", Some("FLUX.1-dev"));
    check("kohya", "sd3.toml", Some("stable-diffusion-3.5-medium"));
}

#[test]
fn musubi_tuner() {
    check("musubi", "qwen_edit.sh", Some("Qwen-Image-Edit-2509"));
    check("musubi", "kontext.toml", Some("FLUX.1-Kontext-dev"));
}

#[test]
fn simple_tuner() {
    check("simple-tuner", "flux.json", None);
    check("simple-tuner", "edit.json", None);
    check("simple-tuner", "kandinsky.json", None);
}

#[test]
fn diffusion_pipe() {
    check("diffusion-pipe", "flux.toml", None);
    check("diffusion-pipe", "edit.toml", None);
}

#[test]
fn flymyai() {
    for config in ["qwen.yaml", "edit.yaml", "spark.yaml", "flux.yaml", "kandinsky.yaml"] {
        check("flymyai", config, None);
    }
}

#[test]
fn mlx_lm() {
    check("mlx-lm", "llama.yaml", None);
    check("mlx-lm", "qwen.yaml", None);
}

#[test]
fn one_trainer() {
    check("one-trainer", "flux.json", None);
    check("one-trainer", "sd3_full.json", None);
}

/// kohya's Prodigy and Adafactor, as most set them.
#[test]
fn optimizers_are_taken_over() {
    for (kind, settings, expected) in [
        (
            "Prodigy",
            "'decouple=True', 'd_coef=0.8', 'safeguard_warmup=True', 'betas=0.9,0.99'",
            "d_coef = 0.8 # optimizer_args.d_coef\nuse_bias_correction = false",
        ),
        (
            "Adafactor",
            "'scale_parameter=False', 'relative_step=False', 'warmup_init=False'",
            "scale_parameter = false # optimizer_args.scale_parameter\n",
        ),
        ("AdamWScheduleFree", "", "kind = \"adamw_schedule_free\" # optimizer_type\n"),
        ("Lion", "", "betas = [0.9, 0.99] # optimizer_args.betas (default)\n"),
    ] {
        let folder = place("kohya");
        let path = folder.path().join("sd3.toml");
        let typed = format!("optimizer_type = \"{kind}\"\noptimizer_args = [{settings}]");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen("optimizer_type = \"AdamW\"", &typed, 1)).unwrap();
        let output = run(folder.path(), &["import", "sd3.toml", "--out", "job.toml"]);
        assert!(output.status.success(), "{kind}: {}", said(&output));
        let job = fs::read_to_string(folder.path().join("job.toml")).unwrap();
        assert!(job.contains(expected), "{kind}: {job}");
    }
}

/// LoKr, LoHa, rsLoRA and LoRA+ as each trainer sets them.
#[test]
fn adapters_are_taken_over() {
    let lycoris = "{\"algo\": \"lokr\", \"linear_dim\": 10000, \"linear_alpha\": 1, \"factor\": 16,
        \"apply_preset\": {\"target_module\": [\"Attention\", \"FeedForward\"]}}";
    for (trainer, config, from, to, expected) in [
        (
            "ai-toolkit",
            "flux.yaml",
            "type: \"lora\"",
            "type: \"lokr\"\n        lokr_factor: 8",
            &["kind = \"lokr\"", "factor = 8", "full_matrix = true"][..],
        ),
        (
            "kohya",
            "sd3.toml",
            "network_module = \"networks.lora_sd3\"",
            "network_module = \"lycoris.kohya\"\nnetwork_args = ['algo=lokr', 'factor=8', 'decompose_both=True', 'rs_lora=True']",
            &["kind = \"lokr\"", "factor = 8", "decompose_both = true", "rslora = true", "comfyui"],
        ),
        (
            "kohya",
            "sd3.toml",
            "network_module = \"networks.lora_sd3\"",
            "network_module = \"networks.lora_sd3\"\nnetwork_args = ['loraplus_lr_ratio=16']",
            &["loraplus_lr_ratio = 16"],
        ),
        (
            "simple-tuner",
            "flux.json",
            "\"--lora_type\": \"standard\"",
            "\"--lora_type\": \"lycoris\", \"--lycoris_config\": \"lycoris.json\"",
            &["kind = \"lokr\"", "factor = 16", "full_matrix = true", "comfyui"],
        ),
        ("one-trainer", "flux.json", "{", "{\"peft_type\": \"LOHA\",", &["kind = \"loha\""]),
    ] {
        let folder = place(trainer);
        fs::write(folder.path().join("lycoris.json"), lycoris).unwrap();
        let path = folder.path().join(config);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{config} has no {from}");
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
        let output = run(folder.path(), &["import", config, "--out", "job.toml"]);
        assert!(output.status.success(), "{trainer}: {}", said(&output));
        let job = fs::read_to_string(folder.path().join("job.toml")).unwrap();
        for part in expected {
            assert!(job.contains(part), "{trainer} {part}: {job}");
        }
    }
}

/// What a config with a change is refused with.
fn refused(trainer: &str, config: &str, from: &str, to: &str) -> String {
    let folder = place(trainer);
    let path = folder.path().join(config);
    let before = fs::read_to_string(&path).unwrap();
    assert!(before.contains(from), "{config} has no {from}");
    fs::write(&path, before.replacen(from, to, 1)).unwrap();
    let output = run(folder.path(), &["import", config, "--out", "job.toml"]);
    assert_eq!(output.status.code(), Some(1), "{config}: {}", said(&output));
    assert!(!folder.path().join("job.toml").exists(), "a job was written");
    assert!(said(&output).contains("\nhint: "), "{}", said(&output));
    said(&output)
}

#[test]
fn what_cannot_be_imported_says_why() {
    let says = |said: &str, parts: &[&str]| {
        for part in parts {
            assert!(said.contains(part), "{part:?} is missing from {said}");
        }
    };
    let aitk = |from, to| refused("ai-toolkit", "flux.yaml", from, to);
    says(
        &aitk("lr: 1e-4", "lr: fast"),
        &["`train.lr` of the config is \"fast\", accepted is a number"],
    );
    says(
        &aitk("type: \"lora\"", "type: locon"),
        &["network.type = \"locon\": hearth has LoRA, DoRA and LoKr"],
    );
    says(
        &aitk("optimizer: \"adamw8bit\"", "optimizer: automagic"),
        &["train.optimizer = \"automagic\"", "AdamW"],
    );
    says(&aitk("is_flux: true", "is_xl: true"), &["hearth trains SD3"]);
    says(
        &aitk("linear: 16", "linear: 100000"),
        &["`network.linear` has no valid job", "adapter.rank", "4096"],
    );
    says(
        &aitk("        - folder_path", "        - folder_path: other\n        - folder_path"),
        &["datasets[1].folder_path = \"data/fox\"", "one folder"],
    );
    says(&aitk("config:", "*config:"), &["not YAML"]);
    says(
        &refused("kohya", "flux.sh", "dataset.toml", "gone.toml"),
        &["`dataset_config` names a file that is not there", "gone.toml"],
    );
    says(
        &refused("kohya", "flux.sh", "$MODELS/ae", "$ELSEWHERE/ae"),
        &["not a plain shell script", "$ELSEWHERE"],
    );
    says(
        &refused("kohya", "dataset.toml", "0.05", "0.5"),
        &["this is the file of the data sets alone", "dataset_config"],
    );
    says(
        &refused("kohya", "sd3.toml", "networks.lora_sd3", "networks.lora"),
        &["network_module = \"networks.lora\""],
    );
    says(
        &refused("simple-tuner", "flux.json", "\"standard\"", "\"lycoris\""),
        &["`lycoris_config`"],
    );
    says(
        &refused("simple-tuner", "flux.json", "backends.json", "gone.json"),
        &["`data_backend_config` names a file"],
    );
    says(
        &refused("simple-tuner", "backends.json", "1024", "768"),
        &["this is the list of data backends alone"],
    );
    says(
        &refused("diffusion-pipe", "flux.toml", "rank = 32", "rank = 32\nalpha = 16"),
        &["adapter.alpha = 16"],
    );
    says(
        &refused("diffusion-pipe", "edit.toml", "type = 'qwen_image'", "type = 'wan'"),
        &["model.type = \"wan\""],
    );
    says(
        &refused("diffusion-pipe", "edit.toml", "edit-dataset.toml", "gone.toml"),
        &["`dataset` names a file"],
    );
    says(
        &refused("flymyai", "qwen.yaml", "Qwen/Qwen-Image", "Qwen/Qwen2-VL"),
        &["hearth trains SD3"],
    );
    says(
        &refused("flymyai", "qwen.yaml", "rank: 16", "rank: big"),
        &["`rank` of the config is \"big\""],
    );
    says(
        &refused("mlx-lm", "llama.yaml", "optimizer: adamw", "optimizer: adafactor"),
        &["optimizer_config.adafactor.relative_step", "set it to false, with a learning rate"],
    );
    says(
        &refused("mlx-lm", "llama.yaml", "-Instruct", "-Instruct-4bit"),
        &["mlx's quantised weights"],
    );
    says(
        &refused("one-trainer", "flux.json", "\"LORA\"", "\"EMBEDDING\""),
        &["training_method = \"EMBEDDING\""],
    );
    says(
        &refused(
            "one-trainer",
            "flux.json",
            "\"masked_training\": false",
            "\"masked_training\": true",
        ),
        &["masked"],
    );
    says(&refused("kohya", "sd3.toml", "[saving]", "[saving"), &["not TOML", "line"]);
}

#[test]
fn what_is_no_config_is_refused_with_what_was_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |content: &[u8], parts: &[&str]| {
        let path = folder.path().join("config");
        fs::write(&path, content).unwrap();
        let output = run(folder.path(), &["import", "config"]);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(output.stdout.is_empty() && said.len() < 2000, "{said}");
        for part in parts {
            assert!(said.contains(part), "{part:?} is missing from {said}");
        }
    };
    fails(
        b"a: 1\n",
        &["not a config of a trainer", "looked for ai-toolkit: `config.process`", "kohya"],
    );
    fails(b"{\"a\": 1}", &["not a config of a trainer"]);
    fails(b"once upon a time\n", &["not a config of a trainer", "JSON, TOML, YAML"]);
    fails(b"{\"a\": ", &["config is not JSON"]);
    fails(b"", &["config"]);
    fails(&[0xff, 0xfe, 0x80], &["cannot read config", "UTF-8"]);
    fails(&vec![b'#'; (1 << 20) + 1], &["config has more than 1048576 bytes"]);
    fails("[".repeat(500_000).as_bytes(), &["config is not"]);
    let more = ('a'..='y')
        .zip('b'..='z')
        .map(|(from, to)| format!("{to}: &{to} [{}]\n", vec![format!("*{from}"); 9].join(", ")));
    let laughs: String = std::iter::once("a: &a [x, x, x, x]\n".into()).chain(more).collect();
    fails(laughs.as_bytes(), &["config is not YAML", "more than 100000 values"]);
}

#[test]
fn unknown_keys_are_told_and_nothing_is_overwritten() {
    let folder = place("ai-toolkit");
    let printed = run(folder.path(), &["import", "flux.yaml"]);
    let warned = said(&printed);
    assert!(printed.status.success(), "{warned}");
    let unknown = "warning: train.lr_schedulr = \"cosine\": no key of ai-toolkit; did you mean `train.lr_scheduler`?";
    assert!(warned.contains(unknown), "{warned}");
    let json = run(folder.path(), &["import", "flux.yaml", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["trainer"], "ai-toolkit");
    assert!(json["notes"].as_array().unwrap().iter().any(|note| note["verdict"] == "unknown"));
    let job = folder.path().join("mine.toml");
    fs::write(&job, "precious").unwrap();
    let output = run(folder.path(), &["import", "flux.yaml", "--out", "mine.toml"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("file exists already: mine.toml"), "{}", said(&output));
    assert_eq!(fs::read_to_string(&job).unwrap(), "precious");
}
