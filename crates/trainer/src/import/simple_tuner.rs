//! `SimpleTuner`'s `config.json`, keys with or without `--`, and its list of data backends. Read in
//! <https://github.com/bghira/SimpleTuner/tree/bc8e6ab77>: the field registry for defaults, `helpers/models` for targets.

mod backends;
mod base;
mod lycoris;
mod rules;

use serde_json::{Map, Value};

use super::ForeignTrainer;
use super::document::Document;
use super::error::ImportError;
use super::family::{ForeignFamily, TRAINED};
use super::foreign::ForeignConfig;
use super::loss;
use super::mapping::Mapping;
use super::optimization::{self, AdamDefaults, AdamKeys, TORCH_ADAMW};
use super::precision;
use super::prompts::{self, GuidanceKind, SampleDefaults, SampleNumber, SamplePrompt};

pub(super) const TRAINER: ForeignTrainer = ForeignTrainer {
    name: "SimpleTuner",
    told_by: "`model_family` with `model_type` or `data_backend_config`",
    recognises: |document| {
        let has =
            |key: &str| document.root.get(key).or(document.root.get(format!("--{key}"))).is_some();
        has("model_family") && (has("model_type") || has("data_backend_config"))
            || is_backends(&document.root)
    },
    keys,
    map,
    rules: &[rules::RULES],
};

fn is_backends(root: &Value) -> bool {
    let is_backend = |it: &Value| it.get("id").is_some() && it.get("type").is_some();
    root.as_array().is_some_and(|entries| entries.iter().any(is_backend))
}

fn keys(document: &Document) -> Result<ForeignConfig, ImportError> {
    if is_backends(&document.root) {
        return Err(ImportError::Half {
            found: "the list of data backends",
            needed: "the config.json that names this one as `data_backend_config`",
            path: document.path.clone(),
        });
    }
    let table = document.root.as_object().cloned().unwrap_or_default();
    let table =
        table.into_iter().map(|(key, value)| (key.trim_start_matches('-').to_owned(), value));
    let mut table: Map<String, Value> = table.collect();
    // `eps=1e-6,weight_decay=0`: each is a key.
    if let Some(Value::String(settings)) = table.get("optimizer_config") {
        let pairs = settings.split(',').filter_map(|pair| pair.split_once('='));
        let pairs: Map<_, _> = pairs
            .map(|(name, value)| (name.trim().to_owned(), Value::from(value.trim())))
            .collect();
        table.insert("optimizer_config".into(), Value::Object(pairs));
    }
    Ok(ForeignConfig::new(&document.path, &Value::Object(table)))
}

fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let name = mapping.config.text("model_family")?.unwrap_or_default().replace('-', "_");
    let family = match name.as_str() {
        "flux" => ForeignFamily::Flux,
        "sd3" => ForeignFamily::Sd3,
        "qwen_image" => ForeignFamily::QwenImage,
        "kandinsky5_image" => ForeignFamily::Kandinsky5Image,
        "kandinsky5_video" => ForeignFamily::Kandinsky5Video,
        "flux2" => ForeignFamily::Flux2Klein,
        "z_image" => ForeignFamily::ZImage,
        _ => {
            mapping.refuse("model_family", TRAINED);
            return Ok(());
        }
    };
    base::write(mapping, family)?;
    let is_full = mapping.config.text("model_type")?.as_deref() != Some("lora");
    precision(mapping, is_full)?;
    backends::write(mapping, family)?;
    adapter(mapping, family, is_full)?;
    base::training_adapter(mapping, family)?;
    train(mapping)?;
    timesteps(mapping, family)?;
    let snr = "the threshold falls with noise, SimpleTuner's rises";
    loss::write_pseudo_huber(mapping, snr)?;
    optimizer(mapping)?;
    samples(mapping, family)?;
    output(mapping)
}

fn precision(mapping: &mut Mapping, is_full: bool) -> Result<(), ImportError> {
    precision::write_dtype(mapping, "mixed_precision", "bf16")?;
    let format = mapping.config.text("base_model_precision")?;
    if !is_full {
        precision::write_quantisation(
            mapping,
            "base.quantise",
            format.as_deref(),
            "base_model_precision",
        );
    }
    let mut encoders = None;
    for key in ["text_encoder_1_precision", "text_encoder_2_precision", "text_encoder_3_precision"]
    {
        let format = mapping.config.text(key)?;
        encoders = encoders.or(format.filter(|it| it != "no_change").map(|format| (key, format)));
    }
    let from = encoders.as_ref().map_or("text_encoder_1_precision", |(key, _)| *key);
    let format = encoders.as_ref().map(|(_, format)| format.as_str());
    precision::write_quantisation(mapping, "base.quantise_encoders", format, from);
    Ok(())
}

fn adapter(mapping: &mut Mapping, family: ForeignFamily, is_full: bool) -> Result<(), ImportError> {
    if is_full {
        mapping.set_or(
            "adapter.kind",
            mapping.config.peek("model_type").map(|_| "full"),
            "full",
            "model_type",
        );
        return Ok(());
    }
    if mapping.config.text("lora_type")?.as_deref() == Some("lycoris") {
        return lycoris::adapter(mapping);
    }
    let is_dora = mapping.config.flag("use_dora")? == Some(true);
    let from = if is_dora { "use_dora" } else { "model_type" };
    mapping.set("adapter.kind", if is_dora { "dora" } else { "lora" }, from);
    let rank = mapping.whole("lora_rank", "adapter.rank", 16)?;
    mapping.number("lora_alpha", "adapter.alpha", rank as f64)?;
    mapping.number("lora_dropout", "adapter.dropout", 0.1)?;
    targets(mapping, family)
}

fn targets(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let own = mapping.config.texts("peft_lora_target_modules")?;
    if !own.is_empty() {
        mapping.set("adapter.targets", own, "peft_lora_target_modules");
        return Ok(());
    }
    let plain: &[&str] = &["to_k", "to_q", "to_v", "to_out.0"];
    let attention: &[&str] = &[
        "to_k",
        "to_q",
        "to_v",
        "add_k_proj",
        "add_q_proj",
        "add_v_proj",
        "to_out.0",
        "to_add_out",
    ];
    let typed = mapping.config.text("flux_lora_target")?;
    let (names, is_known) = match family {
        ForeignFamily::Flux => match typed.as_deref().unwrap_or("all") {
            "all" => (attention.to_vec(), true),
            "context" => (vec!["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"], true),
            "ai-toolkit" => (vec!["ai-toolkit"], true),
            "all+ffs" => (vec!["all"], true),
            "tiny" => (
                vec![
                    "single_transformer_blocks.7.proj_out",
                    "single_transformer_blocks.20.proj_out",
                ],
                true,
            ),
            "nano" => (vec!["single_transformer_blocks.7.proj_out"], true),
            _ => (attention.to_vec(), false),
        },
        ForeignFamily::Kandinsky5Image | ForeignFamily::Kandinsky5Video => {
            (vec!["to_key", "to_query", "to_value"], true)
        }
        ForeignFamily::Flux2Klein => (FLUX2_TARGETS.to_vec(), true),
        _ => (plain.to_vec(), true),
    };
    if !is_known {
        mapping.differs(
            "flux_lora_target",
            "the layers of `all` have an adapter; adapter.targets can name others",
        );
    }
    if family == ForeignFamily::Flux {
        mapping.set_or("adapter.targets", typed.map(|_| names.clone()), names, "flux_lora_target");
        return Ok(());
    }
    mapping.set_default("adapter.targets", names, "its own targets");
    if typed.is_some() {
        mapping.no_effect("flux_lora_target", "for FLUX.1");
    }
    Ok(())
}

/// Of FLUX.2, whatever `flux_lora_target` says.
const FLUX2_TARGETS: [&str; 5] =
    ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"];

fn train(mapping: &mut Mapping) -> Result<(), ImportError> {
    let steps = mapping.config.whole("max_train_steps")?.filter(|steps| *steps > 0);
    let epochs = mapping.config.whole("num_train_epochs")?.filter(|epochs| *epochs > 0);
    match (steps, epochs) {
        (Some(steps), _) => mapping.set("train.steps", steps, "max_train_steps"),
        (None, epochs) => mapping.set_or("train.epochs", epochs, 1, "num_train_epochs"),
    }
    mapping.whole("train_batch_size", "train.batch_size", 4)?;
    mapping.whole("gradient_accumulation_steps", "train.gradient_accumulation", 1)?;
    mapping.limit("max_grad_norm", "train.max_grad_norm", 2.0)?;
    if mapping.config.text("grad_clip_method")?.as_deref() != Some("norm") {
        mapping.differs(
            "grad_clip_method",
            "the norm of all gradients is clipped; there each value, unless it is `norm`",
        );
    }
    if let Some(seed) = mapping.config.whole("seed")? {
        mapping.set("train.seed", seed, "seed");
    }
    if mapping.config.flag("use_ema")? == Some(true) {
        mapping.number("ema_decay", "train.ema", 0.995)?;
    }
    Ok(())
}

fn timesteps(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let is_uniform = mapping.config.flag("flow_use_uniform_schedule")? == Some(true);
    if is_uniform {
        mapping.set("train.weighting_scheme", "uniform", "flow_use_uniform_schedule");
    } else {
        mapping.set_default("train.weighting_scheme", "logit_normal", "flow_use_uniform_schedule");
        mapping.number("flow_sigmoid_scale", "train.logit_std", 1.0)?;
    }
    let shift = mapping.config.number("flow_schedule_shift")?;
    if mapping.config.flag("flow_schedule_auto_shift")? == Some(true) {
        mapping.set("train.timestep_shift", "resolution", "flow_schedule_auto_shift");
    } else {
        let factor = |shift: f64| if shift > 0.0 { shift } else { 1.0 };
        mapping.set_or("train.timestep_shift", shift.map(factor), 3.0, "flow_schedule_shift");
    }
    if family == ForeignFamily::Flux {
        match mapping.config.text("flux_guidance_mode")?.as_deref() {
            None | Some("constant") => {}
            Some(_) => {
                mapping.differs("flux_guidance_mode", "the guidance is the same in every step");
            }
        }
        mapping.number("flux_guidance_value", "train.guidance_scale", 1.0)?;
    }
    Ok(())
}

fn optimizer(mapping: &mut Mapping) -> Result<(), ImportError> {
    let name = mapping.config.text("optimizer")?;
    optimization::write_kind(mapping, "optimizer", "adamw_bf16")?;
    if name.as_deref() == Some("prodigy") {
        mapping.differs("optimizer", "hearth has its authors' Prodigy, SimpleTuner one of its own");
    }
    mapping.number("learning_rate", "optimizer.learning_rate", 4e-7)?;
    let default = match name.as_deref() {
        Some("optimi-adamw") => {
            AdamDefaults { betas: [0.9, 0.99], epsilon: 1e-6, weight_decay: 0.0 }
        }
        _ => AdamDefaults { epsilon: 1e-6, ..TORCH_ADAMW },
    };
    let has_betas = mapping.config.peek("optimizer_config.betas").is_some();
    let betas: &[&str] = if has_betas {
        &["optimizer_config.betas"]
    } else {
        &["optimizer_beta1", "optimizer_beta2"]
    };
    let keys = AdamKeys {
        betas,
        epsilon: "optimizer_config.eps",
        weight_decay: "optimizer_config.weight_decay",
        others: "optimizer_config.",
    };
    optimization::write_settings(mapping, &keys, default)?;
    schedule(mapping)
}

/// Its cosine and sine are its own: they go up and down every `lr_warmup_steps`.
fn schedule(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "lr_scheduler";
    let typed = mapping.config.text(from)?;
    let name = typed.clone().unwrap_or_else(|| "constant_with_warmup".into());
    let warmup = mapping.config.whole("lr_warmup_steps")?;
    let schedule = match name.as_str() {
        "constant" | "constant_with_warmup" => "constant",
        "linear" => "linear",
        "polynomial" => {
            mapping.differs(from, "linear to 0 here, a power of 0.8 to `lr_end` there");
            "linear"
        }
        "cosine" | "cosine_with_restarts" | "sine" => {
            mapping.differs(
                from,
                "one cosine over the whole run here, a wave of `lr_warmup_steps` there",
            );
            "cosine"
        }
        _ => {
            mapping.differs(
                from,
                "hearth has constant, linear, cosine, plateau and wsd; the rate stays constant",
            );
            "constant"
        }
    };
    mapping.set_or("optimizer.lr_scheduler", typed.map(|_| schedule), schedule, from);
    match (name.as_str(), warmup) {
        ("constant", Some(_)) => mapping.no_effect(
            "lr_warmup_steps",
            "there is no warmup with `constant`; `constant_with_warmup` has one",
        ),
        ("constant" | "cosine" | "cosine_with_restarts" | "sine", _) => {}
        (_, warmup) => mapping.set_or("optimizer.warmup_steps", warmup, 0, "lr_warmup_steps"),
    }
    Ok(())
}

fn samples(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let mut prompts: Vec<SamplePrompt> = Vec::new();
    let plain = |text: String| SamplePrompt { text, ..SamplePrompt::default() };
    prompts.extend(mapping.config.text("validation_prompt")?.map(plain));
    if let Some(library) = mapping.document("user_prompt_library")? {
        let texts =
            library.root.as_object().into_iter().flatten().filter_map(|(_, text)| text.as_str());
        prompts.extend(texts.map(|text| plain(text.to_owned())));
    }
    let negative = mapping.config.text("validation_negative_prompt")?;
    for prompt in &mut prompts {
        prompt.negative.clone_from(&negative);
    }
    let every = if mapping.config.peek("validation_steps").is_some() {
        "validation_steps"
    } else {
        "validation_step_interval"
    };
    let size = mapping.config.numbers("validation_resolution")?;
    let side = |index: usize| {
        SampleNumber::of(size.get(index).or(size.first()).copied(), "validation_resolution")
    };
    let is_real = mapping.config.number("validation_guidance_real")?.is_some_and(|it| it != 1.0);
    let scale = match family {
        ForeignFamily::Flux => "validation_guidance_real",
        ForeignFamily::Flux2Klein if is_real => "validation_guidance_real",
        _ => "validation_guidance",
    };
    let mut number =
        |key: &'static str| mapping.config.number(key).map(|it| SampleNumber::of(it, key));
    let defaults = SampleDefaults {
        from: "validation_prompt",
        every: number(every)?,
        width: side(0),
        height: side(1),
        steps: number("validation_num_inference_steps")?,
        cfg_scale: number(scale)?,
        guidance: number("validation_guidance")?,
        seed: number("validation_seed")?,
        kind: match family {
            ForeignFamily::ZImage => GuidanceKind::FromZero,
            _ => GuidanceKind::of(family),
        },
    };
    if mapping.config.flag("validation_disable")? == Some(true) {
        prompts.clear();
    }
    prompts::write(mapping, &prompts, defaults);
    if family == ForeignFamily::Kandinsky5Video
        && !prompts.is_empty()
        && let Some(frames) = mapping.config.whole("validation_num_video_frames")?
    {
        mapping.set("sample.frames", frames, "validation_num_video_frames");
    }
    Ok(())
}

fn output(mapping: &mut Mapping) -> Result<(), ImportError> {
    match mapping.config.text("output_dir")? {
        Some(path) => {
            let path = mapping.places.written(&path);
            mapping.set("output.folder", path, "output_dir");
        }
        None => mapping.set_default("output.folder", "simpletuner-results", "output_dir"),
    }
    let old = mapping.config.peek("checkpointing_steps").is_some();
    let from = if old { "checkpointing_steps" } else { "checkpoint_step_interval" };
    mapping.whole(from, "output.save_every", 500)?;
    mapping.whole("checkpoints_total_limit", "output.keep", 5)?;
    let is_comfy = mapping.config.text("lora_format")?.as_deref() == Some("comfyui");
    // What LyCORIS writes, ComfyUI reads.
    let is_lycoris = mapping.value("adapter.kind").is_some_and(|it| it == "loha" || it == "lokr");
    let format = if is_comfy || is_lycoris { "comfyui" } else { "diffusers" };
    if mapping.value("adapter.kind").is_some_and(|kind| kind != "full") {
        mapping.set_or(
            "output.formats",
            is_comfy.then(|| vec![format]),
            vec![format],
            "lora_format",
        );
    }
    Ok(())
}
