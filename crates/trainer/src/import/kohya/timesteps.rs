//! `timestep_sampling` of both trainers.

use serde_json::Value;

use super::super::error::ImportError;
use super::super::mapping::Mapping;

/// Writes how timesteps are drawn. `default_shift` is that of `discrete_flow_shift`.
pub(super) fn write(
    mapping: &mut Mapping,
    default_scheme: &'static str,
    default_shift: f64,
) -> Result<(), ImportError> {
    let from = "timestep_sampling";
    let typed = mapping.config.text(from)?;
    let (shift_from, scale_from) = ("discrete_flow_shift", "sigmoid_scale");
    let shift = mapping.config.number(shift_from)?;
    let scale = mapping.config.number(scale_from)?;
    let method = typed.as_deref().unwrap_or("sigma");
    let is_typed = typed.is_some();
    let scheme_is = |mapping: &mut Mapping, scheme: &str| {
        mapping.set_or("train.weighting_scheme", is_typed.then(|| scheme.to_owned()), scheme, from);
    };
    match method {
        "sigma" => {
            weighting(mapping, default_scheme)?;
            mapping.set_or("train.timestep_shift", shift, default_shift, shift_from);
            return Ok(());
        }
        "uniform" => {
            scheme_is(mapping, "uniform");
            mapping.set("train.timestep_shift", 1.0, from);
        }
        "sigmoid" | "shift" | "flux_shift" | "flux2_shift" | "qwen_shift" => {
            scheme_is(mapping, "logit_normal");
            mapping.set_or("train.logit_std", scale, 1.0, scale_from);
            match method {
                "sigmoid" => mapping.set("train.timestep_shift", 1.0, from),
                "shift" => mapping.set_or("train.timestep_shift", shift, default_shift, shift_from),
                _ => mapping.set("train.timestep_shift", Value::from("resolution"), from),
            }
        }
        _ => {
            mapping
                .differs(from, "hearth has no such distribution of timesteps; all are as likely");
            scheme_is(mapping, "uniform");
            mapping.set("train.timestep_shift", 1.0, from);
        }
    }
    let is_weighted = mapping.config.peek("weighting_scheme").and_then(Value::as_str);
    if is_weighted.is_some_and(|scheme| ["sigma_sqrt", "cosmap"].contains(&scheme)) {
        mapping.differs(
            "weighting_scheme",
            "the loss has weights only where timesteps are drawn by the scheme itself",
        );
    } else if is_weighted.is_some() {
        mapping.no_effect("weighting_scheme", "`timestep_sampling` draws the timesteps");
    }
    Ok(())
}

/// `weighting_scheme` and its numbers.
pub(super) fn weighting(mapping: &mut Mapping, default: &'static str) -> Result<(), ImportError> {
    let from = "weighting_scheme";
    let typed = mapping.config.text(from)?;
    let scheme = match typed.as_deref().unwrap_or(default) {
        "none" | "uniform" => "uniform".to_owned(),
        other => other.to_owned(),
    };
    mapping.set_or("train.weighting_scheme", typed.map(|_| scheme.clone()), scheme.clone(), from);
    if scheme == "logit_normal" {
        mapping.number("logit_mean", "train.logit_mean", 0.0)?;
        mapping.number("logit_std", "train.logit_std", 1.0)?;
    }
    if scheme == "mode" {
        mapping.number("mode_scale", "train.mode_scale", 1.29)?;
    }
    Ok(())
}
