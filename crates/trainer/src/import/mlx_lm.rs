//! mlx-lm's YAML for LoRA: one flat table with `lora_parameters` in it. Read in `mlx_lm/lora.py` of mlx-lm 0.32.2, whose
//! `CONFIG_DEFAULTS` are those below.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::ForeignTrainer;
use super::error::ImportError;
use super::foreign::ForeignConfig;
use super::mapping::Mapping;
use super::notes::{KeyRule, differs, no_effect, refused};
use super::optimization::{self, AdamDefaults, AdamKeys};
use crate::model::llama::published::PublishedLlama;

pub(super) const TRAINER: ForeignTrainer = ForeignTrainer {
    name: "mlx-lm",
    told_by: "`model` with `lora_parameters`, `fine_tune_type` or `iters`",
    recognises: |document| {
        let has = |key: &str| document.root.get(key).is_some();
        document.root["model"].is_string()
            && ["lora_parameters", "fine_tune_type", "iters"].iter().any(|key| has(key))
    },
    keys: |document| Ok(ForeignConfig::new(&document.path, &document.root)),
    map,
    rules: &[RULES],
};

fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let model = mapping.base("model")?;
    if ["bit", "-q4", "-q8", "mxfp4"].iter().any(|end| model.to_lowercase().ends_with(end)) {
        mapping.refuse("model", "mlx's quantised weights are not read: name the model they were made of; the plan quantises it");
    }
    mapping.set_default("base.dtype", "bf16", "the dtype of the weights");
    data(mapping)?;
    adapter(mapping, &model)?;
    train(mapping)?;
    optimizer(mapping)?;
    mapping.path("adapter_path", "output.folder").or_else(|error| match error {
        ImportError::MissingKey { .. } => {
            mapping.set_default("output.folder", "adapters", "adapter_path");
            Ok(())
        }
        error => Err(error),
    })
}

/// A folder with `train.jsonl` and `valid.jsonl`.
fn data(mapping: &mut Mapping) -> Result<(), ImportError> {
    let Some(folder) = mapping.config.text("data")? else {
        return Err(mapping.config.missing("data"));
    };
    let found = mapping.places.find(&folder);
    if found.is_none() && super::places::is_hub_name(&folder) {
        mapping.refuse(
            "data",
            "hearth downloads no data sets: save it as train.jsonl and valid.jsonl in a folder",
        );
        return Ok(());
    }
    let path = mapping.places.written(&format!("{folder}/train.jsonl"));
    mapping.set("text.path", path, "data");
    let has_held_out = found.is_none_or(|folder| folder.join("valid.jsonl").exists());
    if has_held_out {
        let path = mapping.places.written(&format!("{folder}/valid.jsonl"));
        mapping.set("text.validation", path, "data");
    }
    mapping.whole("max_seq_length", "text.length", 2048)?;
    mapping.differs("max_seq_length", "documents are packed into sequences and long ones split; there each is one, cut at this length");
    if mapping.config.flag("mask_prompt")? != Some(true) {
        mapping.differs(
            "mask_prompt",
            "the loss counts answers alone where there are prompts, as with `mask_prompt: true`",
        );
    }
    Ok(())
}

fn adapter(mapping: &mut Mapping, model: &str) -> Result<(), ImportError> {
    let kind = mapping.config.text("fine_tune_type")?;
    let name = kind.as_deref().unwrap_or("lora");
    if !["lora", "dora", "full"].contains(&name) {
        return Err(mapping.config.refuse(
            "fine_tune_type",
            &Value::from(name),
            "lora, dora or full",
        ));
    }
    mapping.set_or("adapter.kind", kind.clone(), name, "fine_tune_type");
    let (n_trained, n_blocks) = blocks(mapping, model)?;
    if name == "full" {
        if n_trained.is_some() {
            mapping.differs("num_layers", "all layers are trained, there the last ones");
        }
        return Ok(());
    }
    let rank = mapping.whole("lora_parameters.rank", "adapter.rank", 8)?;
    let scale = mapping.config.number("lora_parameters.scale")?;
    let alpha = scale.unwrap_or(20.0) * rank as f64;
    mapping.set_or("adapter.alpha", scale.map(|_| alpha), alpha, "lora_parameters.scale * rank");
    mapping.number("lora_parameters.dropout", "adapter.dropout", 0.0)?;
    let keys = mapping.config.texts("lora_parameters.keys")?;
    targets(mapping, &keys, n_trained, n_blocks);
    Ok(())
}

/// How many of the last layers are trained, if not all, and how many there are, as far as that is known.
fn blocks(mapping: &mut Mapping, model: &str) -> Result<(Option<u64>, Option<u64>), ImportError> {
    let n_trained = mapping.config.number("num_layers")?.unwrap_or(16.0);
    let n_blocks = match mapping.places.find(model) {
        Some(folder) => n_hidden_layers(&folder),
        None => {
            PublishedLlama::by_path(Path::new(model)).map(|it| it.config().num_hidden_layers as u64)
        }
    };
    let is_all = n_trained <= 0.0 || n_blocks.is_some_and(|n_blocks| n_trained >= n_blocks as f64);
    Ok(((!is_all).then_some(n_trained as u64), n_blocks))
}

/// Chosen: ten times the deepest model; each layer that is trained becomes a name in the job.
const MAX_BLOCKS: u64 = 1000;

/// Chosen: a config.json has some kilobytes.
const CONFIG_BYTES: u64 = 1 << 20;

fn n_hidden_layers(folder: &Path) -> Option<u64> {
    let path = folder.join("config.json");
    let is_small = fs::metadata(&path).ok()?.len() <= CONFIG_BYTES;
    let text = is_small.then(|| fs::read_to_string(&path).ok())??;
    serde_json::from_str::<Value>(&text).ok()?["num_hidden_layers"]
        .as_u64()
        .filter(|n_blocks| *n_blocks <= MAX_BLOCKS)
}

/// mlx's last N layers by their names.
fn targets(mapping: &mut Mapping, keys: &[String], n_trained: Option<u64>, n_blocks: Option<u64>) {
    let from = if keys.is_empty() { "num_layers" } else { "lora_parameters.keys, num_layers" };
    let all = || match keys {
        [] => Value::from("all"),
        keys => Value::from(keys.to_vec()),
    };
    let (Some(n_trained), Some(n_blocks)) = (n_trained, n_blocks) else {
        if n_trained.is_some() {
            mapping.differs(
                "num_layers",
                "all layers have an adapter: how many the model has is not known without it",
            );
        }
        let value = all();
        mapping.set_or("adapter.targets", (!keys.is_empty()).then(|| value.clone()), value, from);
        return;
    };
    let mut names = Vec::new();
    for block in n_blocks - n_trained..n_blocks {
        match keys {
            [] => names.push(format!("*layers.{block}.*")),
            keys => names.extend(keys.iter().map(|key| format!("*layers.{block}.{key}"))),
        }
    }
    mapping.set("adapter.targets", names, from);
}

fn train(mapping: &mut Mapping) -> Result<(), ImportError> {
    let accumulation =
        mapping.whole("grad_accumulation_steps", "train.gradient_accumulation", 1)?.max(1);
    let per_step = |n: u64| (n / accumulation).max(1);
    let from = |key: &str| match accumulation {
        1 => key.to_owned(),
        _ => format!("{key} / grad_accumulation_steps"),
    };
    let iterations = mapping.config.whole("iters")?;
    mapping.set_or("train.steps", iterations.map(per_step), per_step(1000), &from("iters"));
    mapping.whole("batch_size", "train.batch_size", 4)?;
    mapping.whole("seed", "train.seed", 0)?;
    mapping.set_default("train.max_grad_norm", "off", "gradients are not clipped");
    let every = mapping.config.whole("steps_per_eval")?;
    if mapping.value("text.validation").is_some() {
        mapping.set_or(
            "train.validate_every",
            every.map(per_step),
            per_step(200),
            &from("steps_per_eval"),
        );
    }
    let every = mapping.config.whole("save_every")?;
    mapping.set_or("output.save_every", every.map(per_step), per_step(100), &from("save_every"));
    Ok(())
}

/// Taken: `mlx.optimizers.AdamW`.
const ADAMW: AdamDefaults = AdamDefaults { betas: [0.9, 0.999], epsilon: 1e-8, weight_decay: 0.01 };

fn optimizer(mapping: &mut Mapping) -> Result<(), ImportError> {
    let typed = mapping.config.text("optimizer")?;
    let name = typed.unwrap_or_else(|| "adam".into()).to_lowercase();
    optimization::write_kind(mapping, "optimizer", "adam")?;
    let key = |setting: &str| format!("optimizer_config.{name}.{setting}");
    if name.starts_with("adam") && mapping.config.flag(&key("bias_correction"))? != Some(true) {
        mapping.differs(
            &key("bias_correction"),
            "the first steps are larger: moments are corrected for their start at 0",
        );
    }
    let (betas, epsilon, decay) = (key("betas"), key("eps"), key("weight_decay"));
    let others = key("");
    let (betas, epsilon, weight_decay) = (&[&*betas][..], &*epsilon, &*decay);
    let keys = AdamKeys { betas, epsilon, weight_decay, others: &others };
    let weight_decay = if name == "adam" { 0.0 } else { ADAMW.weight_decay };
    optimization::write_settings(mapping, &keys, AdamDefaults { weight_decay, ..ADAMW })?;
    schedule(mapping)
}

fn schedule(mapping: &mut Mapping) -> Result<(), ImportError> {
    let name = mapping.config.text("lr_schedule.name")?;
    let arguments = mapping.config.numbers("lr_schedule.arguments")?;
    let rate = mapping.config.number("learning_rate")?;
    let steps = mapping.value("train.steps").and_then(Value::as_f64).unwrap_or_default();
    let Some(name) = name else {
        mapping.set_or("optimizer.learning_rate", rate, 1e-5, "learning_rate");
        mapping.set_default("optimizer.lr_scheduler", "constant", "lr_schedule");
        return Ok(());
    };
    let (schedule, end, length) = match (name.as_str(), arguments.as_slice()) {
        ("cosine_decay", [_, length, rest @ ..]) => {
            ("cosine", rest.first().copied().unwrap_or(0.0), *length)
        }
        ("linear_schedule", [_, end, length]) => ("linear", *end, *length),
        _ => {
            mapping.differs(
                "lr_schedule.name",
                "hearth has constant, linear, cosine, plateau and wsd; the rate stays constant",
            );
            ("constant", 0.0, steps)
        }
    };
    if end != 0.0 || length != steps {
        let why =
            format!("here it ends at 0 after all {steps} steps, there at {end} after {length}");
        mapping.differs("lr_schedule.arguments", why);
    }
    let first = arguments.first().copied().or(rate).unwrap_or(1e-5);
    mapping.set("optimizer.learning_rate", first, "lr_schedule.arguments");
    mapping.set("optimizer.lr_scheduler", schedule, "lr_schedule.name");
    if let Some(warmup) = mapping.config.whole("lr_schedule.warmup")? {
        mapping.set("optimizer.warmup_steps", warmup, "lr_schedule.warmup");
    }
    Ok(())
}

const RULES: &[KeyRule] = &[
    no_effect("train", "hearth train trains"),
    no_effect(
        "config trust_remote_code clear_cache_threshold grad_checkpoint",
        "the plan chooses gradient checkpointing; the result is the same",
    ),
    no_effect(
        "steps_per_report report_to project_name wandb",
        "hearth logs to events.jsonl and report.html, and to TensorBoard with output.tensorboard",
    ),
    no_effect(
        "val_batches test test_batches",
        "held-out text is measured as a whole, test data not at all",
    ),
    differs("lr_schedule.warmup_init", "the warmup begins at 0"),
    differs("optimizer_config.*", "hearth's optimizer has no such setting"),
    refused("resume_adapter_file", "hearth begins with a new adapter"),
    refused(
        "hf_dataset.* hf_dataset",
        "hearth downloads no data sets: save it as train.jsonl and valid.jsonl in a folder",
    ),
    differs(
        "prompt_feature text_feature completion_feature chat_feature",
        "records have `text`, `prompt` and `completion`, or `messages`",
    )
    .unless(&["prompt", "text", "completion", "messages"]),
];
