//! Loss functions and weights of other trainers.

use serde_json::Value;

use super::error::ImportError;
use super::mapping::Mapping;

/// `loss_type` with `huber_c` and `huber_schedule`, as sd-scripts and SimpleTuner have them: their `huber` and `smooth_l1`
/// are pseudo-Huber. `snr` is what to say of that schedule.
pub(super) fn write_pseudo_huber(mapping: &mut Mapping, snr: &str) -> Result<(), ImportError> {
    let from = "loss_type";
    let typed = mapping.config.text(from)?;
    let loss = match typed.as_deref() {
        None => return Ok(()),
        Some("l2") => {
            mapping.no_effect(from, "as hearth does it");
            return Ok(());
        }
        Some("l1") => "l1",
        Some("huber") => "pseudo_huber",
        Some("smooth_l1") => "pseudo_smooth_l1",
        Some(other) => {
            let accepted = "l1, l2, huber or smooth_l1";
            return Err(mapping.config.refuse(from, &Value::from(other), accepted));
        }
    };
    mapping.set("train.loss", loss, from);
    if loss == "l1" {
        return Ok(());
    }
    let schedule = mapping.config.text("huber_schedule")?;
    let name = schedule.clone().unwrap_or_else(|| "snr".into());
    let c = mapping.config.number("huber_c")?;
    let scale = mapping.config.number("huber_scale")?.unwrap_or(1.0);
    if name == "constant" && scale != 1.0 {
        mapping.set("train.huber_c", c.unwrap_or(0.1) * scale, "huber_c times huber_scale");
    } else {
        mapping.set_or("train.huber_c", c, 0.1, "huber_c");
    }
    if name == "exponential" && scale != 1.0 {
        mapping.differs("huber_scale", "the threshold has no scale of its own");
    }
    if name == "snr" {
        mapping.differs("huber_schedule", snr);
    }
    mapping.set_or("train.huber_schedule", schedule, name, "huber_schedule");
    Ok(())
}

/// PyTorch's functions, of which diffusion-pipe takes the first that has a threshold.
pub(super) fn write_by_threshold(
    mapping: &mut Mapping,
    losses: &[(&str, &'static str)],
) -> Result<(), ImportError> {
    for (from, loss) in losses {
        let Some(threshold) = mapping.config.number(from)? else { continue };
        mapping.set("train.loss", *loss, from);
        mapping.set("train.huber_c", threshold, from);
        return Ok(());
    }
    Ok(())
}

/// The sum of several losses, as OneTrainer has it: each with its strength, its name here and its default. One of them
/// alone is taken over.
pub(super) fn write_by_strength(
    mapping: &mut Mapping,
    losses: &[(&str, Option<&'static str>, f64)],
) -> Result<(), ImportError> {
    let mut on = Vec::new();
    for (from, loss, default) in losses {
        let strength = mapping.config.number(from)?.unwrap_or(*default);
        if strength != 0.0 {
            on.push((*from, *loss, strength));
        }
    }
    let [(from, Some(loss), strength)] = on[..] else {
        for (from, ..) in on {
            mapping
                .differs(from, "the loss is one function, not a sum; here the mean squared error");
        }
        return Ok(());
    };
    if loss != "mse" {
        mapping.set("train.loss", loss, from);
    }
    if loss == "huber" {
        mapping.number("huber_delta", "train.huber_c", 1.0)?;
    }
    if strength != 1.0 {
        mapping.differs(from, "the loss has no strength, which does nothing to AdamW's steps");
    } else if loss == "mse" && mapping.config.peek(from).is_some() {
        mapping.no_effect(from, "as hearth does it");
    }
    Ok(())
}
