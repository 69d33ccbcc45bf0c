//! How timesteps are drawn, and what they weigh.

use serde_json::Value;

use super::super::error::ImportError;
use super::super::family::ForeignFamily;
use super::super::mapping::Mapping;
use crate::objective::flow::WeightingScheme;

pub(super) fn write(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let from = "train.timestep_type";
    let typed = mapping.config.text(from)?;
    loss(mapping);
    bias(mapping)?;
    // Both make timesteps linear, whatever their type.
    for (from, weighting) in
        [("train.linear_timesteps2", "half_bell"), ("train.linear_timesteps", "bell")]
    {
        if mapping.config.flag(from)? == Some(true) {
            mapping.set("train.loss_weighting", weighting, from);
            mapping.set("train.weighting_scheme", "uniform", from);
            mapping.set("train.timestep_shift", 1.0, from);
        }
    }
    if mapping.value("train.loss_weighting").is_some() {
        range(mapping)?;
        if typed.is_some() {
            mapping.no_effect(from, "`linear_timesteps` makes them linear");
        }
        return Ok(());
    }
    let (scheme, shift): (_, Value) = match typed.as_deref().unwrap_or("sigmoid") {
        "sigmoid" => ("logit_normal", 1.0.into()),
        "linear" => ("uniform", 1.0.into()),
        "weighted" => {
            mapping.differs(from, "timesteps are as likely, but the loss has no weights by timestep (up to 1.5 there)");
            ("uniform", 1.0.into())
        }
        "shift" | "flux_shift" | "lumina2_shift" if family == ForeignFamily::Sd3 => {
            ("uniform", "scheduler".into())
        }
        // The scheduler that it trains Z-Image with.
        "shift" | "flux_shift" | "lumina2_shift" if family == ForeignFamily::ZImage => {
            ("uniform", 3.0.into())
        }
        "shift" | "flux_shift" | "lumina2_shift" => {
            if family == ForeignFamily::QwenImage {
                mapping.differs(
                    from,
                    "the shift is the same, the stretch to the scheduler's last sigma is left out",
                );
            }
            ("uniform", "resolution".into())
        }
        _ => {
            mapping
                .differs(from, "hearth has no such distribution of timesteps; all are as likely");
            ("uniform", 1.0.into())
        }
    };
    mapping.set_or("train.weighting_scheme", typed.as_ref().map(|_| scheme), scheme, from);
    mapping.set_or("train.timestep_shift", typed.map(|_| shift.clone()), shift, from);
    range(mapping)
}

/// The range of timesteps: places among 1000, from most noise to least, in the order of the distribution.
fn range(mapping: &mut Mapping) -> Result<(), ImportError> {
    let (first, last) = ("train.min_denoising_steps", "train.max_denoising_steps");
    for (from, key, all) in
        [(first, "train.timestep_max", 0.0), (last, "train.timestep_min", 999.0)]
    {
        let Some(place) = mapping.config.number(from)? else { continue };
        if place <= 0.0 && all == 0.0 || place >= 999.0 && all > 0.0 {
            continue;
        }
        match timestep(mapping, place / 1000.0) {
            Some(timestep) => mapping.set(key, timestep, from),
            None => mapping.differs(
                from,
                "all timesteps are trained: which ones these are depends on the size of each image",
            ),
        }
        if mapping.value("train.timestep_bias").is_some() {
            let why = "timesteps outside are drawn again; there all are squeezed into the range";
            mapping.differs(from, why);
        }
    }
    Ok(())
}

/// The timestep above which a share of the draws are.
fn timestep(mapping: &Mapping, share: f64) -> Option<f64> {
    let is_normal = mapping.value("train.weighting_scheme")? == "logit_normal";
    let scheme = if is_normal {
        WeightingScheme::LogitNormal { mean: 0.0, deviation: 1.0 }
    } else {
        WeightingScheme::Uniform
    };
    let shift = mapping.value("train.timestep_shift")?.as_f64()?;
    let sigma = 1.0 - scheme.quantile(share.clamp(0.0, 1.0));
    let sigma = shift * sigma / (1.0 + (shift - 1.0) * sigma);
    Some((sigma * 1e5).round() / 100.0)
}

/// The loss; a rule tells of those that hearth does not have.
fn loss(mapping: &mut Mapping) {
    let from = "train.loss_type";
    match mapping.config.peek(from).and_then(Value::as_str) {
        Some("mae") => mapping.set("train.loss", "l1", from),
        Some("pseudo_huber") => {
            mapping.set("train.loss", "pseudo_smooth_l1", from);
            mapping.set_default("train.huber_c", 0.01, "the threshold of `pseudo_huber`");
            mapping
                .differs(from, "the loss is twice as large, which does nothing to AdamW's steps");
        }
        _ => return,
    }
    mapping.config.value(from);
}

fn bias(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "train.content_or_style";
    match mapping.config.text(from)?.as_deref() {
        None => {}
        Some("balanced") => mapping.no_effect(from, "as hearth does it"),
        Some(bias @ ("content" | "style")) => mapping.set("train.timestep_bias", bias, from),
        Some(other) => {
            let accepted = "balanced, content or style";
            return Err(mapping.config.refuse(from, &Value::from(other), accepted));
        }
    }
    Ok(())
}
