//! Optimizers and learning rate schedules by the names that other trainers give them.

use serde_json::Value;

use super::error::ImportError;
use super::mapping::Mapping;

/// Names of `AdamW`, in small letters and without anything between them.
const ADAMW: [&str; 10] = [
    "adamw",
    "adamwbf16",
    "adamwfused",
    "adamwoptimi",
    "adamwtorch",
    "optimiadamw",
    "pagedadamw",
    "pagedadamw32bit",
    "torchadamw",
    "bnbadamw",
];

/// The same with state in 8 bits.
const ADAMW_8BIT: [&str; 8] = [
    "adamw8",
    "adamw8bit",
    "adamw8bitkahan",
    "aoadamw8bit",
    "bnbadamw8bit",
    "bnbadamw8bitpaged",
    "pagedadamw8bit",
    "torchaoadamw8bit",
];

/// Lion; its state is in f32 here.
const LION: [&str; 5] = ["lion", "lion8bit", "pagedlion8bit", "optimilion", "bnblion"];

/// `AdamW` without a schedule.
const SCHEDULE_FREE: [&str; 3] =
    ["adamwschedulefree", "schedulefreeadamw", "adamwschedulefreefused"];

/// Writes the optimizer that a key names. One that hearth does not have is refused: learning rates are made for their
/// optimizer.
pub(super) fn write_kind(
    mapping: &mut Mapping,
    from: &str,
    default: &str,
) -> Result<(), ImportError> {
    let typed = mapping.config.text(from)?;
    let name: String = typed
        .as_deref()
        .unwrap_or(default)
        .to_lowercase()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect();
    let kind = match name.as_str() {
        name if ADAMW.contains(&name) => "adamw",
        name if ADAMW_8BIT.contains(&name) => "adamw_8bit",
        "adam" | "adam8bit" => {
            mapping.differs(
                from,
                "hearth has AdamW; with `optimizer.weight_decay = 0` it is the same as Adam",
            );
            if name == "adam" { "adamw" } else { "adamw_8bit" }
        }
        "muon" => "muon",
        "adafactor" => "adafactor",
        "prodigy" | "prodigyopt" => "prodigy",
        name if SCHEDULE_FREE.contains(&name) => "adamw_schedule_free",
        name if LION.contains(&name) => {
            if name.contains("8bit") {
                mapping.differs(from, "the state of hearth's Lion is in f32");
            }
            "lion"
        }
        _ => {
            mapping.refuse(
                from,
                "hearth has AdamW (also in 8 bits and schedule-free), Adafactor, Lion, Muon and Prodigy; its learning \
                 rate would not suit them",
            );
            return Ok(());
        }
    };
    mapping.set_or("optimizer.kind", typed.map(|_| kind), kind, from);
    Ok(())
}

/// Settings of an optimizer, each with the key it came from.
pub(super) struct AdamKeys<'a> {
    /// One key for both, or one for each.
    pub betas: &'a [&'a str],
    pub epsilon: &'a str,
    pub weight_decay: &'a str,
    /// What the keys of other settings begin with.
    pub others: &'a str,
}

/// What a trainer's `AdamW` does if nothing is said.
#[derive(Clone, Copy)]
pub(super) struct AdamDefaults {
    pub betas: [f64; 2],
    pub epsilon: f64,
    pub weight_decay: f64,
}

/// Taken: `torch.optim.AdamW` and `bitsandbytes.optim.AdamW8bit`.
pub(super) const TORCH_ADAMW: AdamDefaults =
    AdamDefaults { betas: [0.9, 0.999], epsilon: 1e-8, weight_decay: 0.01 };

/// Writes the settings of the optimizer, whose kind has been written; `default` is that of `AdamW`.
pub(super) fn write_settings(
    mapping: &mut Mapping,
    keys: &AdamKeys<'_>,
    default: AdamDefaults,
) -> Result<(), ImportError> {
    let kind = mapping.value("optimizer.kind").and_then(Value::as_str).unwrap_or_default();
    let kind = kind.to_owned();
    // Taken: the defaults of their authors' code.
    let plain = AdamDefaults { weight_decay: 0.0, ..TORCH_ADAMW };
    let default = match kind.as_str() {
        "lion" => AdamDefaults { betas: [0.9, 0.99], ..plain },
        "adafactor" | "adamw_schedule_free" | "prodigy" => plain,
        _ => default,
    };
    if kind != "adafactor" {
        write_betas(mapping, keys, default)?;
    }
    if !matches!(kind.as_str(), "adafactor" | "lion") {
        mapping.number(keys.epsilon, "optimizer.epsilon", default.epsilon)?;
    }
    mapping.number(keys.weight_decay, "optimizer.weight_decay", default.weight_decay)?;
    match kind.as_str() {
        "adafactor" => write_adafactor(mapping, keys.others),
        "prodigy" => write_prodigy(mapping, keys.others),
        _ => Ok(()),
    }
}

/// Trainers whose Adafactor has a relative step size unless it is turned off: kohya's, which is transformers', and mlx's.
const RELATIVE_BY_DEFAULT: [&str; 2] = ["optimizer_args.", "optimizer_config.adafactor."];

fn write_adafactor(mapping: &mut Mapping, others: &str) -> Result<(), ImportError> {
    let is_relative = RELATIVE_BY_DEFAULT.contains(&others);
    let from = format!("{others}relative_step");
    if mapping.config.flag(&from)?.unwrap_or(is_relative) {
        let why = "hearth's Adafactor takes the learning rate that it is given: set it to false, with a learning rate";
        mapping.refuse(&from, why);
    }
    write_flag(mapping, others, "scale_parameter", is_relative)
}

fn write_prodigy(mapping: &mut Mapping, others: &str) -> Result<(), ImportError> {
    let decouple = format!("{others}decouple");
    if mapping.config.flag(&decouple)? == Some(false) {
        mapping.differs(&decouple, "the weight decay is decoupled");
    }
    mapping.number(&format!("{others}d0"), "optimizer.d0", 1e-6)?;
    mapping.number(&format!("{others}d_coef"), "optimizer.d_coef", 1.0)?;
    write_flag(mapping, others, "use_bias_correction", false)?;
    write_flag(mapping, others, "safeguard_warmup", false)
}

/// A switch that has the same name in both.
fn write_flag(
    mapping: &mut Mapping,
    others: &str,
    name: &str,
    default: bool,
) -> Result<(), ImportError> {
    let key = match name {
        "scale_parameter" => "optimizer.scale_parameter",
        "use_bias_correction" => "optimizer.use_bias_correction",
        _ => "optimizer.safeguard_warmup",
    };
    let from = format!("{others}{name}");
    let typed = mapping.config.flag(&from)?;
    mapping.set_or(key, typed, default, &from);
    Ok(())
}

fn write_betas(
    mapping: &mut Mapping,
    keys: &AdamKeys<'_>,
    default: AdamDefaults,
) -> Result<(), ImportError> {
    let mut betas = Vec::new();
    for key in keys.betas {
        betas.extend(mapping.config.numbers(key)?);
    }
    let from = keys.betas.join(", ");
    match betas.as_slice() {
        [] => mapping.set_default("optimizer.betas", default.betas.to_vec(), &from),
        [first] if keys.betas.len() == 2 => {
            mapping.set("optimizer.betas", vec![*first, default.betas[1]], &from);
        }
        [..] => mapping.set("optimizer.betas", betas, &from),
    }
    Ok(())
}

/// Keys of a learning rate schedule.
pub(super) struct ScheduleKeys<'a> {
    pub name: &'a str,
    pub warmup: &'a str,
    pub cycles: &'a str,
    pub power: &'a str,
}

/// What a trainer does if nothing is said.
#[derive(Clone, Copy)]
pub(super) struct ScheduleDefaults<'a> {
    pub name: &'a str,
    pub warmup: f64,
    pub power: f64,
}

/// Writes a schedule by the names of diffusers, which most trainers use.
pub(super) fn write_schedule(
    mapping: &mut Mapping,
    keys: &ScheduleKeys<'_>,
    default: ScheduleDefaults<'_>,
) -> Result<(), ImportError> {
    let typed = mapping.config.text(keys.name)?;
    if mapping.value("optimizer.kind").is_some_and(|kind| kind == "adamw_schedule_free") {
        mapping.set_default("optimizer.lr_scheduler", "constant", "schedule-free");
        for key in [keys.name, keys.warmup, keys.cycles, keys.power] {
            if mapping.config.peek(key).is_some() {
                mapping.no_effect(key, "schedule-free AdamW has no schedule");
            }
        }
        return Ok(());
    }
    let name = typed.clone().unwrap_or_else(|| default.name.into()).to_lowercase();
    let cycles = mapping.config.whole(keys.cycles)?;
    let typed_power = mapping.config.number(keys.power)?;
    let schedule = match name.as_str() {
        "constant" | "constant_with_warmup" => "constant",
        "linear" => "linear",
        "polynomial" => {
            mapping.set_or("optimizer.power", typed_power, default.power, keys.power);
            "polynomial"
        }
        "cosine" => "cosine",
        "cosine_with_restarts" => {
            mapping.set_or("optimizer.cycles", cycles, 1, keys.cycles);
            "cosine_with_restarts"
        }
        "cosine_with_min_lr" => {
            mapping.differs(keys.name, "the cosine here ends at 0");
            "cosine"
        }
        _ => {
            let why =
                "hearth has no such schedule (`optimizer.lr_scheduler`); the rate stays constant";
            mapping.differs(keys.name, why);
            "constant"
        }
    };
    mapping.set_or("optimizer.lr_scheduler", typed.map(|_| schedule), schedule, keys.name);
    write_warmup(mapping, keys.warmup, default.warmup, name == "constant")
}

/// Writes the steps of warmup, which below 1 are a share of all steps.
fn write_warmup(
    mapping: &mut Mapping,
    from: &str,
    default: f64,
    is_ignored: bool,
) -> Result<(), ImportError> {
    let typed = mapping.config.number(from)?;
    let warmup = typed.unwrap_or(default);
    if is_ignored {
        if typed.is_some_and(|warmup| warmup > 0.0) {
            mapping.no_effect(
                from,
                "there is no warmup with `constant`; `constant_with_warmup` has one",
            );
        }
        return Ok(());
    }
    let steps = mapping.value("train.steps").and_then(Value::as_f64);
    let warmup = match steps {
        _ if warmup == 0.0 || warmup >= 1.0 => warmup,
        Some(steps) => warmup * steps,
        None => {
            mapping.differs(
                from,
                "a share of the steps, whose number is not known before the images are counted",
            );
            0.0
        }
    };
    mapping.set_or("optimizer.warmup_steps", typed.map(|_| warmup as u64), warmup as u64, from);
    Ok(())
}
