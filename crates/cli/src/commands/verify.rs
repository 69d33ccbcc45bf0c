//! `hearth verify`: a model folder against reference data.

use compute::{Dtype, Quantisation};
use std::io::Write;
use std::path::PathBuf;

use trainer::verify::{VerifyRequest, verify};

use super::device::{DeviceArgs, FormatArgs};
use super::model_arg::ModelArg;
use super::named_value;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::verify::{ComparedRow, Verified};

/// Compare a model folder with reference data.
///
/// The folder holds config.json, weights, and golden.safetensors: inputs, outputs and adapter gradients of the
/// reference implementation. Prints the largest difference of every output and gradient, relative to the
/// largest reference value. Exits with 1 if one is above the tolerance of the number format.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth verify tests/golden/sd3/models/sd3
  hearth verify tests/golden/sd3/models/sd3 --dtype bf16
  hearth verify tests/golden/sd3/models/sd3 --adapter tests/golden/sd3/adapters/kohya.safetensors
  hearth verify folder --weights elsewhere/model.safetensors --json")]
pub struct VerifyArgs {
    /// Model folder with reference data
    folder: ModelArg,

    /// Weights from elsewhere, also a single-file checkpoint
    #[arg(long, value_name = "PATH")]
    weights: Option<ModelArg>,

    /// Reference data from elsewhere
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,

    /// Adapter to compare with that of the reference data
    #[arg(long, value_name = "PATH")]
    adapter: Option<PathBuf>,

    /// Number format of weights and activations
    #[arg(long, default_value = "f32", value_parser = named_value::parser::<Dtype>())]
    dtype: Dtype,

    /// Quantise the weights of transformer blocks
    #[arg(long, value_name = "FORMAT", value_parser = named_value::parser::<Quantisation>())]
    quantise: Option<Quantisation>,

    /// Multiply in fp8 (base.compute), with --quantise fp8
    #[arg(long, requires = "quantise")]
    fp8_matmuls: bool,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &VerifyArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let VerifyArgs { folder, weights, golden, adapter, engine, json, .. } = arguments;
    let VerifyArgs { dtype, quantise, fp8_matmuls, .. } = *arguments;
    let formats = FormatArgs { dtype, quantise, fp8_matmuls };
    let device = engine.open(engine.limit_bytes(None)?)?;
    let question = VerifyRequest {
        folder: folder.checked()?,
        weights: weights.as_ref().map(ModelArg::checked).transpose()?,
        golden: golden.as_deref(),
        adapter: adapter.as_deref(),
    };
    let report = verify(question, &device, formats.precision())?;
    let tensors: Vec<ComparedRow> = report.comparisons.into_iter().map(ComparedRow::from).collect();
    let findings = Verified {
        class: report.class,
        n_weights: report.n_weights,
        dtype: named_value::value_name(&dtype),
        device: engine.name(),
        is_fine: tensors.iter().all(|row| row.is_fine),
        tensors,
    };
    if *json {
        render::json::object(out, &findings)?;
    } else {
        write!(out, "{}", render::verify::page(&findings))?;
    }
    Ok(if findings.is_fine { CommandOutcome::Done } else { CommandOutcome::Differs })
}
