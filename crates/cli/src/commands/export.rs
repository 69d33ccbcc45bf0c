//! `hearth export`: an adapter for other programs.

use std::io::Write;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::Serialize;
use trainer::export::{Exported, Format, export};
use trainer::model::sd3::pipeline::Pipeline;

use super::engine::name_of;
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::render;

/// Write an adapter as diffusers, PEFT, kohya and ComfyUI read it.
///
/// Takes an adapter that any of them wrote. Every file is read again by the rules of the program it is
/// for: every tensor must find its layer in the base, and add the same to it as before.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth export fox.safetensors --base stable-diffusion-3.5-medium --out fox
  hearth export fox/peft --base sd3 --format comfyui --out ComfyUI/models/loras --name fox")]
pub struct Arguments {
    /// The adapter: a file, or PEFT's folder
    adapter: PathBuf,

    /// The model it is for: a diffusers folder, or a checkpoint in the original layout
    #[arg(long, value_name = "PATH")]
    base: PathBuf,

    /// A folder that has what a checkpoint lacks: text encoders, tokenizers, scheduler
    #[arg(long, value_name = "FOLDER")]
    rest: Option<PathBuf>,

    /// Where the files go
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,

    /// Whom to write for
    #[arg(long, value_delimiter = ',', default_values = ["diffusers", "peft", "kohya", "comfyui"])]
    format: Vec<For>,

    /// What files for kohya and ComfyUI begin with [default: the adapter's name]
    #[arg(long)]
    name: Option<String>,

    /// Print one JSON object per file
    #[arg(long)]
    json: bool,
}

/// A program, as it is typed.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum For {
    Diffusers,
    Peft,
    Kohya,
    Comfyui,
}

impl From<For> for Format {
    fn from(program: For) -> Self {
        match program {
            For::Diffusers => Self::Diffusers,
            For::Peft => Self::Peft,
            For::Kohya => Self::Kohya,
            For::Comfyui => Self::Comfyui,
        }
    }
}

/// A file that was written and proven.
#[derive(Serialize)]
pub struct Row {
    pub format: String,
    pub path: PathBuf,
    pub layers: usize,
    /// Tensors that have no layer in the base: none, or it would have failed.
    pub unmatched: usize,
    pub difference: f64,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let mut pipeline = Pipeline::open(&arguments.base, arguments.rest.as_deref())?;
    pipeline.add_adapter(&arguments.adapter)?;
    let stem = || arguments.adapter.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let name = arguments.name.clone().unwrap_or_else(stem);
    let mut rows = Vec::new();
    for program in &arguments.format {
        let exported = export(&mut pipeline, (*program).into(), &arguments.out, &name)?;
        let Exported { path, n_layers, difference, .. } = exported;
        let format = name_of(program);
        rows.push(Row { format, path, layers: n_layers, unmatched: 0, difference });
    }
    if arguments.json {
        for row in &rows {
            writeln!(out, "{}", serde_json::to_string(row).map_err(std::io::Error::from)?)?;
        }
    } else {
        write!(out, "{}", render::export::page(&rows))?;
    }
    Ok(Outcome::Done)
}
