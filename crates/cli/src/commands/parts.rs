//! The files and folders of an image model besides its checkpoint.

use std::path::PathBuf;

use trainer::model::diffusion::implementation::Implementation;
use trainer::model::diffusion::paths::PartPaths;

/// Where the parts are that a checkpoint lacks.
#[derive(Debug, clap::Args)]
pub struct PartArgs {
    /// Folder with what a checkpoint lacks: a diffusers folder, or one with tokenizers alone
    #[arg(long, value_name = "FOLDER")]
    rest: Option<PathBuf>,

    /// VAE of a checkpoint, such as ae.safetensors [default: in --rest, or beside the checkpoint]
    #[arg(long, value_name = "FILE")]
    vae: Option<PathBuf>,

    /// Text encoder of a checkpoint, such as `clip_l.safetensors`; may be given several times
    /// [default: in --rest, or beside the checkpoint]
    #[arg(long = "text-encoder", value_name = "FILE")]
    text_encoders: Vec<PathBuf>,

    /// Whose prompt templates and sigmas Kandinsky 5 is run with: original, or diffusers
    /// [default: original]
    #[arg(long, value_name = "PROGRAM", value_parser = implementation)]
    implementation: Option<Implementation>,
}

impl PartArgs {
    pub fn paths(&self) -> PartPaths {
        let Self { rest, vae, text_encoders, implementation } = self;
        PartPaths {
            rest: rest.clone(),
            vae: vae.clone(),
            text_encoders: text_encoders.clone(),
            implementation: *implementation,
        }
    }

    /// The first of them that was typed.
    pub fn first_typed(&self) -> Option<&'static str> {
        let Self { rest, vae, text_encoders, implementation } = self;
        let typed = [
            ("--rest", rest.is_some()),
            ("--vae", vae.is_some()),
            ("--text-encoder", !text_encoders.is_empty()),
            ("--implementation", implementation.is_some()),
        ];
        typed.into_iter().find(|(_, is_typed)| *is_typed).map(|(name, _)| name)
    }
}

fn implementation(word: &str) -> Result<Implementation, String> {
    match word {
        "original" => Ok(Implementation::Original),
        "diffusers" => Ok(Implementation::Diffusers),
        _ => Err("expected original or diffusers".into()),
    }
}
