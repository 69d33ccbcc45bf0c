//! LoHa, LoKr and trained norms from the job to other programs' files: memory, resume, export, merge, and what is refused.

use std::fs;
use std::path::Path;

use super::texts::Place;
use super::{Job, check_memory, events, last_state, losses, warnings};
use crate::models::{drawn, golden};
use crate::{hearth, printed, said, text};

/// Each form of the two, by the keys that choose it; the job has rank 4.
const FORMS: [(&str, &[&str]); 4] = [
    ("loha", &["adapter.kind=loha", "adapter.rslora=true"]),
    ("lokr", &["adapter.kind=lokr", "adapter.alpha=2"]),
    ("factor", &["adapter.kind=lokr", "adapter.factor=4"]),
    ("both", &["adapter.kind=lokr", "adapter.rank=1", "adapter.decompose_both=true"]),
];

fn adapter(run: &Path) -> Vec<u8> {
    fs::read(run.join("adapter/peft/adapter_model.safetensors")).unwrap()
}

#[test]
fn runs_take_what_was_planned_and_go_on_as_if_never_stopped() {
    let job = Job::new();
    for (name, form) in FORMS {
        let [whole, parts] = ["whole", "parts"].map(|end| format!("{name}-{end}"));
        let set = [form, &["train.steps=4", "train.ema=0.9", "train.recompute=alternate"]].concat();
        let whole = job.finish(&whole, &set, &[]);
        let [taken, planned] = check_memory(&events(&whole));
        assert!(
            (0.97..=1.0).contains(&(taken as f64 / planned as f64)),
            "{name} {taken} {planned}"
        );
        job.finish(&parts, &[&set[..], &["train.steps=2"]].concat(), &[]);
        let parts = job.finish(&parts, &set, &["--resume"]);
        assert!(adapter(&whole) == adapter(&parts), "{name}: another adapter than without a break");
        assert!(last_state(&whole) == last_state(&parts), "{name}: another state");
        assert!(warnings(&events(&whole)).is_empty(), "{name}: {:?}", warnings(&events(&whole)));
    }
}

/// In bf16 over 4-bit weights, with each way to recompute; a LoKr of whole matrices has no rank.
#[test]
fn they_learn_over_quantised_weights() {
    let job = Job::new();
    job.remove("rank = 4\n");
    for kind in [&["adapter.kind=loha"][..], &["adapter.kind=lokr", "adapter.full_matrix=true"]] {
        for recompute in ["train.recompute=none", "train.recompute=block"] {
            let set = ["base.dtype=bf16", "base.quantise=nf4", recompute, "train.steps=20"];
            let run = format!("{}-{recompute}", kind[kind.len() - 1]);
            let run = job.finish(&run, &[kind, &set].concat(), &[]);
            let losses = losses(&events(&run));
            let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
            assert!(mean(&losses[10..]) < mean(&losses[..10]), "{kind:?} {recompute} {losses:?}");
        }
    }
}

/// Its files are read back by those who write them; `hearth export` compares every layer.
#[test]
fn they_are_exported_and_merged() {
    let job = Job::new();
    let base = golden().join("pipeline");
    for (name, form) in FORMS {
        let run = job.finish(name, &[form, &["train.steps=2"]].concat(), &[]);
        let out = job.path(&format!("{name}-files"));
        let arguments = ["export", text(&run), "--base", text(&base), "--out", text(&out)];
        let said = printed(&arguments);
        for format in ["peft", "comfyui"] {
            assert!(said.contains(format), "{name}: {said}");
        }
        assert!(!said.contains("diffusers"), "{name}: {said}");
        // q, k and v are one in kohya's files, and no Kronecker product.
        assert_eq!(said.contains("kohya"), name == "loha", "{said}");
        let merged = job.path(&format!("{name}-merged"));
        printed(&["export", text(&run), "--base", text(&base), "--merge", "--out", text(&merged)]);
        let image = |more: &[&str]| {
            drawn(&job.folder, &[&["--prompt", "a fox", "--dtype", "f32"], more].concat()).0
        };
        let comfyui = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
        let comfyui = comfyui.into_iter().find(|path| text(path).contains("comfyui")).unwrap();
        let (plain, of_run) = (image(&[]), image(&["--adapter", text(&run)]));
        assert!(apart(&plain, &of_run) > 1, "{name}: it changes nothing");
        assert!(apart(&of_run, &image(&["--adapter", text(&comfyui)])) <= 1, "{name}");
        assert!(apart(&of_run, &image(&["--base", text(&merged)])) <= 1, "{name}");
    }
}

/// The largest difference of two images.
fn apart(a: &[u8], b: &[u8]) -> u8 {
    a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

#[test]
fn formats_without_a_place_for_them_are_refused_before_training() {
    let job = Job::new();
    let words = job.fail(&["adapter.kind=loha", "output.formats=['diffusers']"], &[]);
    assert!(words.contains("a LoHa has no form in the files of diffusers"), "{words}");
    let words = job.fail(&["adapter.kind=lokr", "output.formats=['comfyui', 'kohya']"], &[]);
    assert!(words.contains("qkv") && words.contains("no common Kronecker product"), "{words}");
    assert!(!job.path("run/cache").exists());
    for (set, part) in [
        (&["adapter.factor=4"][..], "adapter.factor"),
        (&["adapter.kind=lokr", "adapter.dropout=0.1"], "adapter.dropout"),
        (&["adapter.kind=loha", "adapter.loraplus_lr_ratio=16"], "adapter.loraplus_lr_ratio"),
        (&["adapter.kind=lokr", "adapter.full_matrix=true"], "adapter.rank"),
        (&["adapter.loraplus_lr_ratio=16", "optimizer.kind=prodigy"], "optimizer.kind"),
    ] {
        let arguments = set.iter().flat_map(|value| ["--set", value]);
        let arguments: Vec<&str> =
            ["train", text(&job.file)].into_iter().chain(arguments).collect();
        let output = hearth(&arguments);
        assert!(!output.status.success() && said(&output).contains(part), "{}", said(&output));
    }
}

/// The same steps at B's own learning rate, and layers that do not move at theirs.
#[test]
fn layers_and_b_have_learning_rates_of_their_own() {
    let job = Job::new();
    let plain = job.finish("plain", &["train.steps=3"], &[]);
    let plus = job.finish("plus", &["train.steps=3", "adapter.loraplus_lr_ratio=16"], &[]);
    let pattern = "adapter.pattern=[{ match = 'attn.to_q', learning_rate = 1e-9 }]";
    let still = job.finish("still", &["train.steps=3", pattern], &[]);
    let [plain, plus, still] = [plain, plus, still].map(|run| {
        let file = run.join("adapter/pytorch_lora_weights.safetensors");
        weights::Catalog::open(&file).unwrap()
    });
    let size = |catalog: &weights::Catalog, layer: &str| {
        let name = format!("transformer.transformer_blocks.0.attn.{layer}.lora_B.weight");
        let tensor = catalog.find(&name).unwrap();
        let values = weights::load::load_f32(catalog, tensor, 0..tensor.numel()).unwrap();
        values.iter().map(|value| f64::from(value.abs())).sum::<f64>()
    };
    for layer in ["to_q", "to_v"] {
        // AdamW's first steps are as large as the learning rate.
        let ratio = size(&plus, layer) / size(&plain, layer);
        assert!((8.0..24.0).contains(&ratio), "{layer} {ratio}");
    }
    assert!(size(&still, "to_q") < 1e-6 * size(&plain, "to_q"));
    assert!(size(&still, "to_v") > 0.1 * size(&plain, "to_v"));
}

/// FLUX norms queries and keys, Z-Image also around every layer; ComfyUI knows the first by diffusers' names alone.
#[test]
fn norms_are_trained_beside_layers() {
    for (job, name, is_in_kohya) in [
        (Job::flux(), "lycoris_transformer_blocks_0_attn_norm_q", false),
        (Job::z_image(), "diffusion_model.layers.0.attention_norm1", true),
    ] {
        let base = job.path("base");
        let set = ["adapter.train_norm=true", "train.ema=0.9", "train.recompute=alternate"];
        let whole = job.finish("whole", &[&set[..], &["train.steps=4"]].concat(), &[]);
        assert!(warnings(&events(&whole)).is_empty(), "{:?}", warnings(&events(&whole)));
        job.finish("parts", &[&set[..], &["train.steps=2"]].concat(), &[]);
        let parts = job.finish("parts", &[&set[..], &["train.steps=4"]].concat(), &["--resume"]);
        let file = |run: &Path| run.join("adapter/adapter-comfyui.safetensors");
        assert!(fs::read(file(&whole)).unwrap() == fs::read(file(&parts)).unwrap(), "{name}");
        assert!(last_state(&whole) == last_state(&parts), "{name}: another state");
        let catalog = weights::Catalog::open(&file(&whole)).unwrap();
        let norm = catalog.find(&format!("{name}.w_norm")).unwrap();
        assert_eq!(norm.shape.len(), 1);
        let values = weights::load::load_f32(&catalog, norm, 0..norm.numel()).unwrap();
        assert!(values.iter().all(|value| *value != 0.0), "{name} {values:?}");
        let (out, merged) = (job.path("files"), job.path("merged"));
        let shared = ["export", text(&whole), "--base", text(&base), "--out"];
        let said = printed(&[&shared[..], &[text(&out)]].concat());
        assert!(!said.contains("diffusers") && !said.contains("peft"), "{said}");
        assert_eq!(said.contains("kohya"), is_in_kohya, "{said}");
        printed(&[&shared[..], &[text(&merged), "--merge"]].concat());
        let image = |base: &Path, more: &[&str]| {
            let words = ["--prompt", "a fox", "--dtype", "f32", "--base", text(base)];
            drawn(&job.folder, &[&words[..], more].concat()).0
        };
        let of_run = image(&base, &["--adapter", text(&whole)]);
        assert!(apart(&image(&base, &[]), &of_run) > 1, "{name}: it changes nothing");
        assert!(apart(&of_run, &image(&base, &["--adapter", text(&file(&whole))])) <= 1, "{name}");
        assert!(apart(&of_run, &image(&merged, &[])) <= 1, "{name}");
    }
}

#[test]
fn formats_without_a_place_for_norms_are_refused_before_training() {
    let job = Job::flux();
    for (format, part) in [
        ("output.formats=['comfyui', 'diffusers']", "no form in the files of diffusers"),
        ("output.formats=['kohya']", "no names that readers of kohya's files know"),
    ] {
        let words = job.fail(&["adapter.train_norm=true", format], &[]);
        assert!(words.contains(part), "{words}");
        assert!(!job.path("run/cache").exists());
    }
    let words = Job::new().fail(&["adapter.train_norm=true"], &[]);
    assert!(words.contains("no norm of this model has weights"), "{words}");
    let words = job.fail(&["adapter.train_norm=true", "adapter.exclude=['attn.norm_x']"], &[]);
    assert!(words.contains("attn.norm_x"), "{words}");
    let set = ["adapter.train_norm=true", "adapter.exclude=['attn.norm_q']", "train.steps=2"];
    let run = job.finish("some", &set, &[]);
    let [taken, planned] = check_memory(&events(&run));
    assert_eq!(taken, planned);
    let file = fs::read(run.join("adapter/adapter-comfyui.safetensors")).unwrap();
    let has = |name: &str| file.windows(name.len()).any(|part| part == name.as_bytes());
    assert!(has("attn_norm_k.w_norm") && !has("attn_norm_q.w_norm"));
}

/// PEFT's files have the whole norm, hearth reads what was added to it.
#[test]
fn norms_of_language_models_are_trained() {
    let place = Place::new();
    let set = ["adapter.train_norm=true", "train.steps=4", "optimizer.learning_rate=2e-2"];
    let run = place.train("run", &set, &[]);
    check_memory(&events(&run));
    place.train("parts", &[&set[..], &["train.steps=2"]].concat(), &[]);
    let parts = place.train("parts", &set, &["--resume"]);
    assert!(adapter(&run) == adapter(&parts) && last_state(&run) == last_state(&parts));
    let plain = place.train("plain", &set[1..], &[]);
    let first = |run: &Path| losses(&events(run))[0];
    assert_eq!(first(&run), first(&plain), "layers begin otherwise");
    let catalog = weights::Catalog::open(&run.join("adapter/peft/adapter_model.safetensors"));
    let catalog = catalog.unwrap();
    let values = |name: &str| {
        let tensor = catalog.find(&format!("base_model.model.model.norm.{name}")).unwrap();
        weights::load::load_f32(&catalog, tensor, 0..tensor.numel()).unwrap()
    };
    let base = weights::Catalog::open(&place.path("model")).unwrap();
    let before = base.find("model.norm.weight").unwrap();
    let before = weights::load::load_f32(&base, before, 0..before.numel()).unwrap();
    let sums: Vec<f32> = before.iter().zip(values("w_norm")).map(|(a, b)| a + b).collect();
    assert_eq!(sums, values("weight"));
    let config = fs::read_to_string(run.join("adapter/peft/adapter_config.json")).unwrap();
    assert!(config.contains("modules_to_save") && config.contains("\"model.norm\""), "{config}");
    let (model, merged) = (place.path("model"), place.path("merged"));
    let evaluated = |base: &Path, more: &[&str]| {
        let texts = place.path("texts.jsonl");
        let words = ["evaluate", "--base", text(base), "--text", text(&texts), "--json"];
        let said = printed(&[&words[..], &["--dtype", "f32"], more].concat());
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        said[if more.is_empty() { "base" } else { "adapter" }]["texts"]["loss"].as_f64().unwrap()
    };
    printed(&["export", text(&run), "--base", text(&model), "--merge", "--out", text(&merged)]);
    let of_run = evaluated(&model, &["--adapter", text(&run)]);
    assert!((of_run - evaluated(&model, &[])).abs() > 1e-2);
    assert!((of_run - evaluated(&merged, &[])).abs() < 1e-3 * of_run);
}

#[test]
fn language_models_learn_by_them_too() {
    let place = Place::new();
    for (name, form) in FORMS {
        let set = [form, &["train.steps=20", "optimizer.learning_rate=2e-2"]].concat();
        let run = place.train(name, &set, &[]);
        check_memory(&events(&run));
        let losses = losses(&events(&run));
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        assert!(mean(&losses[10..]) < mean(&losses[..10]), "{name} {losses:?}");
        let base = place.path("model");
        let sample = |more: &[&str]| {
            let words = ["sample", "--base", text(&base), "--prompt", "The", "--max-tokens", "8"];
            printed(&[&words[..], more].concat())
        };
        assert!(!sample(&["--adapter", text(&run)]).is_empty());
        let merged = place.path(&format!("{name}-merged"));
        let arguments = ["export", text(&run), "--base", text(&base), "--merge", "--out"];
        printed(&[&arguments[..], &[text(&merged)]].concat());
        // GGUF knows LoRA alone.
        let gguf = place.path("adapter.gguf");
        let output = hearth(&["export", text(&run), "--base", text(&base), "--out", text(&gguf)]);
        assert!(said(&output).contains("has no form in GGUF"), "{}", said(&output));
    }
}
