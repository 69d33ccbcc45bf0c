//! What people mistype. Each row is a command that is wrong, its exit code and the words that the answer must
//! have: no panic, one `error:` line in lower case, and a `hint:`. Nothing is trained here.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use trainer::text::Tokenizer;

use crate::models::at;
use crate::{hearth, said};

/// Exit code, the command, and what the answer must say. `PIPELINE` stands for a tiny image model, `QWEN2` for a
/// tiny language model without a tokenizer, `DIR/` for the folder of a [`Place`].
type Row = (i32, &'static str, &'static [&'static str]);

/// A job that is not whole.
const INCOMPLETE: &[Row] = &[
    (
        2,
        "train",
        &[
            "no job given",
            "hearth train job.toml",
            "--images FOLDER --base MODEL",
            "--text PATH",
            "hearth demo",
        ],
    ),
    (2, "plan", &["no job given", "hearth plan job.toml"]),
    (2, "cache --steps 5", &["no job given", "hearth cache --images FOLDER"]),
    (2, "train --images DIR/images", &["--images DIR/images needs the model too", "--base MODEL"]),
    (
        2,
        "train --text DIR/notes.txt --resume",
        &["--text DIR/notes.txt needs the model too", "--base MODEL"],
    ),
    (2, "train --base PIPELINE", &["a model alone is no job", "--images FOLDER", "--text PATH"]),
    (2, "train --set base.path=PIPELINE", &["no job given"]),
    (1, "train DIR/empty.toml", &["`base.path` is not set"]),
    (1, "train DIR/missing.toml", &["cannot read job", "missing.toml", "No such file"]),
    (1, "train DIR/images", &["cannot read job", "DIR/images", "directory"]),
    (1, "train DIR/notes.txt", &["not TOML", "DIR/notes.txt:1"]),
    (
        2,
        "train DIR/job.toml --images a --text b",
        &["'--images <FOLDER>' cannot be used with '--text <PATH>'"],
    ),
];

/// Flags that stand for keys of a job, and the command line in general.
const FLAGS: &[Row] = &[
    (1, "train DIR/job.toml --steps 0", &["`train.steps` is 0", "at least 1", "--steps 0"]),
    (1, "train DIR/job.toml --steps -5", &["`train.steps` is -5", "at least 1", "--steps -5"]),
    (1, "train DIR/job.toml --steps many", &["`train.steps` is \"many\"", "a whole number"]),
    (1, "plan DIR/job.toml --rank 0", &["`adapter.rank` is 0", "1 to 4096", "--rank 0"]),
    (1, "plan DIR/job.toml --rank 1000000000", &["`adapter.rank` is 1000000000", "1 to 4096"]),
    (
        1,
        "cache DIR/job.toml --resolution 500",
        &["`data.resolution` is 500", "a multiple of 16", "--resolution 500"],
    ),
    (
        1,
        "train DIR/job.toml --lr -1e-4",
        &["`optimizer.learning_rate` is -1e-4", "above 0, at most 10", "--lr -1e-4"],
    ),
    (1, "train DIR/job.toml --lr nan", &["`optimizer.learning_rate` is nan", "a number"]),
    (1, "train DIR/job.toml --lr 100", &["`optimizer.learning_rate` is 100", "at most 10"]),
    (1, "train DIR/job.toml --batch 0", &["`train.batch_size` is 0", "1 to 1024"]),
    (
        1,
        "train DIR/job.toml --rank 4 --set adapter.rank=8",
        &["`adapter.rank` is set twice: --rank 4, --set adapter.rank=8"],
    ),
    (
        1,
        "train --text DIR/notes.txt --base PIPELINE --resolution 512",
        &["`data.resolution` has no effect with text.path", "--resolution 512"],
    ),
    (
        1,
        "train DIR/job.toml --mode fast",
        &["`machine.mode` is \"fast\"", "quiet, balanced, full, overnight", "--mode fast"],
    ),
    (1, "train DIR/job.toml --max-temp 900", &["`machine.max_temp` is 900", "30 to 120"]),
    (
        2,
        "train DIR/job.toml --stepss 5",
        &["unexpected argument '--stepss'", "'--steps'", "`hearth train --help`"],
    ),
    (2, "trian DIR/job.toml", &["unrecognized subcommand 'trian'", "'train'"]),
    (2, "train DIR/job.toml --steps", &["a value is required for '--steps <N>'"]),
    (2, "bench stepp", &["unrecognized subcommand 'stepp'", "'step'", "`hearth bench --help`"]),
    (2, "train DIR/job.toml --device tpu", &["tpu is not a device", "cpu, cuda:0, gpu:0"]),
    (2, "train DIR/job.toml --threads 0", &["invalid value '0' for '--threads"]),
    (2, "completions tcsh", &["'tcsh'", "bash", "zsh"]),
];

/// Keys of a job.
const KEYS: &[Row] = &[
    (1, "plan DIR/job.toml --set steps=5", &["unknown key `steps`", "[train]"]),
    (1, "plan DIR/job.toml --set train.stepps=5", &["unknown key `train.stepps`", "`train.steps`"]),
    (1, "plan DIR/job.toml --set train.steps", &["`train.steps` sets nothing", "key=value"]),
    (1, "plan DIR/job.toml --set train.steps=unsett", &["`train.steps` is \"unsett\""]),
    (1, "plan DIR/job.toml --set data.images=unset", &["`data.images` is not set"]),
    (1, "plan DIR/job.toml --set train.seed=-1", &["`train.seed` is -1", "at least 0"]),
    (
        1,
        "plan DIR/job.toml --set base.compute=fp8 --device cpu",
        &["the CPU does not multiply in fp8", "remove base.compute", "8.9 or newer"],
    ),
    (
        1,
        "plan DIR/job.toml --set base.compute=fp8 --machine DIR/ampere.toml",
        &["cuda:0 does not multiply in fp8", "RTX 4090 has compute capability 8.6, fp8 needs 8.9"],
    ),
    (
        1,
        "plan DIR/job.toml --set base.compute=fp8 --set base.quantise=nf4",
        &["base.compute", "base.quantise", "\"fp8\""],
    ),
    (1, "plan DIR/job.toml --set base.compute=fp8 --set base.dtype=f32", &["base.dtype", "bf16"]),
    (1, "plan DIR/job.toml --set base.compute=int4", &["`base.compute` is \"int4\"", "dtype, fp8"]),
    (
        1,
        "plan DIR/job.toml --set adapter.alpha=0",
        &["`adapter.alpha` is 0", "above 0, at most 65536"],
    ),
    (1, "plan DIR/job.toml --set adapter.alpha=-1", &["`adapter.alpha` is -1", "above 0"]),
    (1, "plan DIR/job.toml --set adapter.alpha=1e9", &["`adapter.alpha` is 1e9", "at most 65536"]),
    (1, "plan DIR/job.toml --set adapter.alpha=nan", &["`adapter.alpha` is nan", "a number"]),
    (1, "plan DIR/job.toml --set adapter.dropout=1", &["`adapter.dropout` is 1", "0 to below 1"]),
    (
        1,
        "plan DIR/job.toml --targets ai-toolkit",
        &["`adapter.targets` is \"ai-toolkit\"", "for this model attention, all, kohya or names"],
    ),
    (1, "plan DIR/job.toml --targets atention", &["names atention", "did you mean `attention`?"]),
    (
        1,
        "plan DIR/job.toml --set adapter.targets=['nonsense']",
        &["`adapter.targets` names nonsense", "attn.to_q", "ff.net.0.proj"],
    ),
    (
        1,
        "plan DIR/job.toml --set adapter.targets=['to_qq']",
        &["names to_qq", "did you mean `to_q`?"],
    ),
    (
        1,
        "plan --text DIR/notes.txt --base DIR/lm --set adapter.targets=['q_prj']",
        &["names q_prj", "did you mean `q_proj`?", "self_attn.q_proj", "mlp.up_proj"],
    ),
    (
        1,
        "plan DIR/job.toml --set sample.guidance_scale=-2",
        &["`sample.guidance_scale` is -2", "0 to 100"],
    ),
    (1, "plan DIR/job.toml --set sample.size=100", &["`sample.size` is 100", "a multiple of 16"]),
    (1, "plan DIR/job.toml --set base.dtype=fp16", &["`base.dtype` is \"fp16\"", "f32, bf16, f16"]),
    (1, "plan DIR/job.toml --set output.formats=['kohia']", &["'kohia'", "`kohya`"]),
    (
        1,
        "plan DIR/job.toml --set data.resolution=0",
        &["`data.resolution` is 0", "a multiple of 16"],
    ),
];

/// Models of another kind.
const MODELS: &[Row] = &[
    (
        1,
        "plan --images DIR/images --base DIR/lm",
        &[
            "this is a language model (LlamaForCausalLM)",
            "expected an SD3, SD3.5, FLUX.1, FLUX.2 klein, Qwen-Image, Kandinsky 5 or Z-Image model",
            "--text PATH",
        ],
    ),
    (
        1,
        "plan --text DIR/notes.txt --base PIPELINE",
        &[
            "this is an SD3 image model (StableDiffusion3Pipeline)",
            "expected a Llama, Mistral, Mixtral",
            "--images FOLDER",
        ],
    ),
    (
        1,
        "plan --images DIR/images --base DIR/sana",
        &[
            "this is a Sana pipeline (SanaPipeline)",
            "hearth trains SD3, SD3.5, FLUX.1, FLUX.2 klein, Qwen-Image, Kandinsky 5 and Z-Image",
        ],
    ),
    (
        1,
        "plan --images DIR/images --base DIR/sdxl",
        &["this is an SDXL pipeline (StableDiffusionXLPipeline)"],
    ),
    (
        1,
        "sample --base DIR/sd15 --prompt fox",
        &["this is a Stable Diffusion 1 or 2 pipeline (StableDiffusionPipeline)"],
    ),
    (
        1,
        "plan --images DIR/images --base DIR/sd15.safetensors",
        &["this is a Stable Diffusion 1.5 checkpoint"],
    ),
    (1, "plan --images DIR/images --base DIR/sdxl.safetensors", &["this is an SDXL checkpoint"]),
    (
        1,
        "plan --text DIR/notes.txt --base DIR/flux.gguf",
        &["this is a FLUX.1 checkpoint", "expected a Llama"],
    ),
    (1, "sample --base PIPELINE/vae --prompt fox", &["this is a VAE alone (AutoencoderKL)"]),
    (
        1,
        "plan --images DIR/images --base PIPELINE/transformer",
        &["this is the transformer of an SD3 pipeline alone"],
    ),
    (
        1,
        "plan --images DIR/images --base PIPELINE/text_encoder",
        &["this is a text encoder alone (CLIPTextModelWithProjection)"],
    ),
    (
        1,
        "plan --text DIR/notes.txt --base PIPELINE/text_encoder_3",
        &["this is a text encoder alone (T5EncoderModel)"],
    ),
    (
        1,
        "plan --images DIR/images --base PIPELINE/lora.safetensors",
        &["this is a LoRA adapter", "expected an SD3"],
    ),
    (1, "plan --text DIR/notes.txt --base QWEN2/peft", &["this is a LoRA adapter"]),
    (
        1,
        "sample --base DIR/gemma --prompt fox",
        &["this is a language model of another family (Gemma2ForCausalLM)"],
    ),
    (
        1,
        "plan --text DIR/notes.txt --base DIR/lm/model.safetensors",
        &["this is the weights of a language model without config.json"],
    ),
    (
        1,
        "plan --text DIR/notes.txt --base DIR/run",
        &["this is the folder of a training run (its model is in model/)"],
    ),
    (
        1,
        "plan --text DIR/notes.txt --base DIR/images",
        &["no language model in DIR/images", "config.json"],
    ),
    (1, "plan --images DIR/images --base DIR/images", &["has no model_index.json"]),
    (1, "sample --base DIR/nowhere --prompt fox", &["no model at DIR/nowhere"]),
    (1, "sample --base DIR/notes.txt --prompt fox", &["notes.txt"]),
];

/// `hearth sample`.
const SAMPLE: &[Row] = &[
    (2, "sample", &["required arguments", "--base <MODEL>"]),
    (2, "sample --base PIPELINE", &["required arguments", "--prompt <TEXT>"]),
    (2, "sample --base PIPELINE --prompt fox --seed -1", &["'-1'", "0 to 9223372036854775807"]),
    (
        2,
        "sample --base PIPELINE --prompt fox --seed 18446744073709551615",
        &["0 to 9223372036854775807"],
    ),
    (2, "sample --base PIPELINE --prompt fox --steps 0", &["'0'", "1..=1000"]),
    (2, "sample --base PIPELINE --prompt fox --guidance -3", &["'-3'", "0 to 100"]),
    (2, "sample --base PIPELINE --prompt fox --guidance nan", &["'nan'", "0 to 100"]),
    (2, "sample --base PIPELINE --prompt fox --size big", &["'big'", "1024x768"]),
    (
        1,
        "sample --base PIPELINE --prompt fox --size 100x100",
        &["size 100x100", "a multiple of 16", "96x96"],
    ),
    (1, "sample --base PIPELINE --prompt fox --size 0", &["size 0x0", "16x16"]),
    (1, "sample --base PIPELINE --prompt fox --size 99999x64", &["size 99999x64"]),
    (
        1,
        "sample --base PIPELINE --prompt fox --out DIR/fox.webp",
        &["as .webp", ".png, .jpg and .jpeg", "DIR/fox.webp"],
    ),
    (1, "sample --base PIPELINE --prompt fox --out DIR/fox", &["without an ending", ".png"]),
    (
        1,
        "sample --base PIPELINE --prompt fox --size 64 --out DIR/notes.txt/fox.png",
        &["cannot write DIR/notes.txt/fox.png"],
    ),
    (
        1,
        "sample --base PIPELINE --prompt fox --temperature 1",
        &["--temperature is for language models"],
    ),
    (1, "sample --base PIPELINE --prompt fox --chat", &["--chat is for language models"]),
    (1, "sample --base PIPELINE --prompts DIR/blank.txt", &["no prompt in DIR/blank.txt"]),
    (1, "sample --base PIPELINE --prompts DIR/nowhere.txt", &["cannot read DIR/nowhere.txt"]),
    (
        1,
        "sample --base PIPELINE --prompt fox --size 64 --latents DIR/nowhere",
        &["DIR/nowhere", "No such file"],
    ),
    (1, "sample --base DIR/lm --prompt fox --size 64x64", &["--size is for image models"]),
    (1, "sample --base DIR/lm --prompt fox --top-p 2", &["top-p is 2", "up to 1"]),
    (1, "sample --base DIR/lm --prompt fox --top-k 0", &["top-k is 0"]),
    (1, "sample --base DIR/lm --prompt fox --temperature -1", &["temperature is -1", "0 to 100"]),
    (2, "sample --base DIR/lm --prompt fox --max-tokens -1", &["'-1'", "--max-tokens"]),
    (1, "sample --base DIR/lm --prompt fox --max-tokens 900", &["903 tokens", "256"]),
];

/// Adapters, and what is made of them.
const ADAPTERS: &[Row] = &[
    (
        1,
        "sample --base PIPELINE --prompt fox --adapter DIR/nowhere",
        &["DIR/nowhere", "No such file"],
    ),
    (
        1,
        "sample --base PIPELINE --prompt fox --adapter QWEN2/peft",
        &["adapter does not fit the base", "belong to no layer"],
    ),
    (
        1,
        "sample --base DIR/lm --prompt fox --adapter PIPELINE/lora.safetensors",
        &["adapter does not fit the base"],
    ),
    (
        1,
        "sample --base PIPELINE --prompt fox --adapter DIR/several",
        &["several adapters", "a.safetensors and b.safetensors"],
    ),
    (
        1,
        "sample --base DIR/lm --prompt fox --adapter DIR/run",
        &["this run is a full fine-tune", "--base"],
    ),
    (
        1,
        "sample --base DIR/lm --prompt fox --adapter DIR/unfinished",
        &["has not written its adapter yet", "--resume"],
    ),
    (1, "export DIR/nowhere --base PIPELINE --out DIR/x", &["DIR/nowhere"]),
    (
        1,
        "export PIPELINE/lora.safetensors --base DIR/lm --out DIR/x",
        &["adapter does not fit the base"],
    ),
    (
        1,
        "export PIPELINE/lora.safetensors --base PIPELINE --out DIR/notes.txt",
        &["--out is a file, expected a folder"],
    ),
    (
        1,
        "export PIPELINE/lora.safetensors --base PIPELINE --merge --out DIR/several",
        &["exists and is not empty"],
    ),
    (
        1,
        "export QWEN2/peft --base QWEN2 --format kohya --out DIR/x",
        &["--format kohya is for image models"],
    ),
    (
        2,
        "export PIPELINE/lora.safetensors --base PIPELINE --out DIR/x --format tiff",
        &["'tiff'", "diffusers, peft, kohya, comfyui"],
    ),
    (2, "export PIPELINE/lora.safetensors --base PIPELINE", &["--out <PATH>"]),
];

/// Files that are read, and files that cannot be written.
const FILES: &[Row] = &[
    (1, "convert DIR/nowhere.pt --out DIR/x.safetensors", &["DIR/nowhere.pt", "No such file"]),
    (2, "convert PIPELINE/lora.safetensors", &["--out <PATH>"]),
    (
        1,
        "convert PIPELINE/lora.safetensors --out DIR/images/",
        &["DIR/images/", ".safetensors and .gguf"],
    ),
    (
        1,
        "convert PIPELINE/lora.safetensors --out DIR/x.bin",
        &["DIR/x.bin", ".safetensors and .gguf"],
    ),
    (
        1,
        "convert PIPELINE/lora.safetensors --out DIR/folder.safetensors",
        &["DIR/folder.safetensors", "it is a folder, expected a file"],
    ),
    (1, "convert PIPELINE/lora.safetensors --out DIR/x.safetensors --dtype q8_0", &["q8_0"]),
    (
        1,
        "convert PIPELINE/lora.safetensors --out DIR/x.gguf",
        &["this is a LoRA adapter", "expected a Llama"],
    ),
    (1, "convert DIR/sana --out DIR/x.safetensors", &["no model", "DIR/sana"]),
    (1, "shard PIPELINE/lora.safetensors --out DIR/notes.txt", &["cannot write DIR/notes.txt"]),
    (1, "shard PIPELINE/lora.safetensors --out DIR/s --max-size 0", &["--max-size is 0"]),
    (1, "shard PIPELINE/lora.safetensors --out DIR/s --stem a/b", &["--stem is \"a/b\""]),
    (2, "shard PIPELINE/lora.safetensors --out DIR/s --max-size huge", &["\"huge\" is not a size"]),
    (1, "inspect DIR/nowhere", &["DIR/nowhere", "No such file"]),
    (1, "inspect DIR/notes.txt", &["DIR/notes.txt"]),
    (1, "inspect DIR/images", &["no model", "DIR/images"]),
    (1, "verify DIR/nowhere", &["DIR/nowhere"]),
    (1, "verify DIR/images", &["DIR/images"]),
    (
        1,
        "plan DIR/job.toml --machine DIR/nowhere.toml",
        &["cannot read machine file", "No such file"],
    ),
    (
        1,
        "plan DIR/job.toml --plot DIR/images/",
        &["cannot write DIR/images/", "it is a folder, expected a file"],
    ),
    (1, "man --out DIR/nowhere/deep", &["cannot write DIR/nowhere/deep"]),
    (1, "bench load --file DIR/nowhere", &["cannot open DIR/nowhere", "No such file"]),
    (1, "bench load --size 0", &["--size is 0", "1 MB"]),
    (1, "bench predict --only nonsense", &["no job's name contains \"nonsense\""]),
    (1, "bench calibrate --folder DIR/notes.txt", &["cannot write DIR/notes.txt/rates"]),
    (1, "bench peers --python DIR/nowhere", &["cannot run DIR/nowhere", "--python"]),
    (2, "bench text --vocabulary 0", &["'0'", "2 to 16777216"]),
    (2, "bench step --steps 0", &["'0'", "--steps"]),
    (
        1,
        "export PIPELINE/lora.safetensors --base PIPELINE --out DIR/x --name a/b",
        &["--name is \"a/b\""],
    ),
];

#[test]
fn incomplete_jobs_are_refused_with_a_hint() {
    check(&[INCOMPLETE, FLAGS]);
}

#[test]
fn wrong_keys_are_refused_with_a_hint() {
    check(&[KEYS]);
}

#[test]
fn models_of_another_kind_are_refused_by_name() {
    check(&[MODELS]);
}

#[test]
fn wrong_arguments_of_sample_and_export_are_refused_with_a_hint() {
    check(&[SAMPLE, ADAPTERS]);
}

#[test]
fn wrong_files_are_refused_before_the_work() {
    check(&[FILES]);
}

fn check(tables: &[&[Row]]) {
    let place = Place::new();
    let wrong: Vec<String> =
        tables.concat().into_iter().filter_map(|row| place.wrong(row)).collect();
    assert!(wrong.is_empty(), "{} rows:\n\n{}", wrong.len(), wrong.join("\n"));
    // What fails leaves nothing behind.
    for name in ["x", "x.safetensors", "x.gguf", "x.bin", "s", "fox.webp", "image.png"] {
        assert!(!place.path(name).exists(), "{name} was left behind");
    }
}

/// Files to be wrong about.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        for folder in ["images", "folder.safetensors", "several", "lm", "run/model", "unfinished"] {
            fs::create_dir_all(place.path(folder)).unwrap();
        }
        let job = format!("[base]\npath = '{}'\n[data]\nimages = 'none'\n", at("pipeline"));
        for (name, text) in [
            ("job.toml", job.as_str()),
            ("empty.toml", "[train]\nsteps = 1\n"),
            ("notes.txt", "A note.\n"),
            ("blank.txt", " \n\n"),
            ("run/config.toml", ""),
            ("run/events.jsonl", ""),
            ("unfinished/config.toml", ""),
            ("unfinished/events.jsonl", ""),
        ] {
            fs::write(place.path(name), text).unwrap();
        }
        // A GPU from before fp8.
        let machines = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../machines");
        let recorded = fs::read_to_string(machines.join("rtx-4090.toml")).unwrap();
        fs::write(place.path("ampere.toml"), recorded.replace(": 8.9", ": 8.6")).unwrap();
        place.models();
        place
    }

    /// Models that say what they are, and hold next to nothing.
    fn models(&self) {
        let settings = |class: &str| format!("{{\"_class_name\": \"{class}\"}}");
        for (name, class) in [
            ("sana", "SanaPipeline"),
            ("sd15", "StableDiffusionPipeline"),
            ("sdxl", "StableDiffusionXLPipeline"),
        ] {
            fs::create_dir(self.path(name)).unwrap();
            fs::write(self.path(name).join("model_index.json"), settings(class)).unwrap();
        }
        fs::create_dir(self.path("gemma")).unwrap();
        let gemma = r#"{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}"#;
        fs::write(self.path("gemma/config.json"), gemma).unwrap();
        for (name, tensor) in [
            ("flux.safetensors", "double_blocks.0.img_attn.qkv.weight"),
            ("sd15.safetensors", "cond_stage_model.transformer.text_model.embeddings.weight"),
            ("sdxl.safetensors", "conditioner.embedders.1.model.positional_embedding"),
            ("several/a.safetensors", "a.lora_A.weight"),
            ("several/b.safetensors", "b.lora_A.weight"),
        ] {
            fs::write(self.path(name), safetensors(tensor)).unwrap();
        }
        fs::write(self.path("flux.gguf"), gguf("double_blocks.0.img_attn.qkv.weight")).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden().join("llama").join(file), self.path("lm").join(file)).unwrap();
        }
        Tokenizer::bytes().save(&self.path("lm")).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn filled(&self, text: &str) -> String {
        text.replace("PIPELINE", &at("pipeline"))
            .replace("QWEN2", &golden().join("qwen2").to_string_lossy())
            .replace("DIR/", &format!("{}/", self.0.path().display()))
    }

    /// What is wrong with the answer to a row.
    fn wrong(&self, (code, line, words): Row) -> Option<String> {
        let arguments: Vec<String> = line.split(' ').map(|word| self.filled(word)).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = hearth(&arguments);
        let said = said(&output);
        let errors: Vec<&str> =
            said.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
        let mut wrong: Vec<String> = words
            .iter()
            .map(|word| self.filled(word))
            .filter(|word| !said.contains(word))
            .map(|word| format!("{word:?} is missing"))
            .collect();
        if output.status.code() != Some(code) {
            wrong.push(format!("exit code {:?}, expected {code}", output.status.code()));
        }
        if errors.len() != 1 || errors[0].starts_with(char::is_uppercase) {
            wrong.push("expected one `error:` line in lower case".into());
        }
        if !said.lines().any(|line| line.starts_with("hint: ")) || said.contains("panicked") {
            wrong.push("expected a `hint:` line and no panic".into());
        }
        (!wrong.is_empty()).then(|| format!("hearth {line}\n  {}\n{said}", wrong.join("\n  ")))
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama")
}

/// A safetensors file with one number.
fn safetensors(tensor: &str) -> Vec<u8> {
    let header = format!(r#"{{"{tensor}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat()
}

/// A GGUF file with one number: version 3, one tensor, no metadata; of one dimension, in f32, at the start.
fn gguf(tensor: &str) -> Vec<u8> {
    let [version, n_dims, f32_type] = [3_u32, 1, 0].map(u32::to_le_bytes);
    let [one, none] = [1_u64, 0].map(u64::to_le_bytes);
    let length = (tensor.len() as u64).to_le_bytes();
    let mut file = [
        &b"GGUF"[..],
        &version,
        &one,
        &none,
        &length,
        tensor.as_bytes(),
        &n_dims,
        &one,
        &f32_type,
        &none,
    ]
    .concat();
    file.resize(file.len().next_multiple_of(32) + 4, 0);
    file
}
