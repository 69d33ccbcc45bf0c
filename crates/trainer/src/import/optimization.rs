//! Optimizers and learning rate schedules by the names that other trainers give them.

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
        _ => {
            mapping.refuse(
                from,
                "hearth has AdamW, AdamW in 8 bits and Muon; its learning rate would not suit them",
            );
            return Ok(());
        }
    };
    mapping.set_or("optimizer.kind", typed.map(|_| kind), kind, from);
    Ok(())
}

/// Settings of `AdamW`, each with the key it came from.
pub(super) struct AdamKeys<'a> {
    /// One key for both, or one for each.
    pub betas: &'a [&'a str],
    pub epsilon: &'a str,
    pub weight_decay: &'a str,
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

/// Writes the settings of `AdamW`.
pub(super) fn write_adam(
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
    mapping.number(keys.epsilon, "optimizer.epsilon", default.epsilon)?;
    mapping.number(keys.weight_decay, "optimizer.weight_decay", default.weight_decay)?;
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
    let name = typed.clone().unwrap_or_else(|| default.name.into()).to_lowercase();
    let cycles = mapping.config.number(keys.cycles)?.unwrap_or(1.0);
    let power = mapping.config.number(keys.power)?.unwrap_or(default.power);
    let schedule = match name.as_str() {
        "constant" | "constant_with_warmup" => "constant",
        "linear" => "linear",
        "polynomial" => {
            if power != 1.0 {
                let why = format!("linear here, which is the power 1; there it is {power}");
                mapping.differs(keys.name, why);
            }
            "linear"
        }
        "cosine" => "cosine",
        "cosine_with_restarts" => {
            if cycles > 1.0 {
                mapping.differs(keys.cycles, "one cosine over the whole run, without restarts");
            }
            "cosine"
        }
        "cosine_with_min_lr" => {
            mapping.differs(keys.name, "the cosine here ends at 0");
            "cosine"
        }
        _ => {
            let why =
                "hearth has constant, linear, cosine, plateau and wsd; the rate stays constant";
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
    let steps = mapping.value("train.steps").and_then(serde_json::Value::as_f64);
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
