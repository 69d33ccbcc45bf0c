//! The files and folders of an image model besides its checkpoint.

use trainer::model::diffusion::implementation::Implementation;
use trainer::model::diffusion::paths::PartPaths;

use super::model_arg::ModelArg;

/// Where the parts are that a checkpoint lacks.
#[derive(Debug, clap::Args)]
pub struct PartArgs {
    /// Folder with what a checkpoint lacks: a diffusers folder, or one with tokenizers alone
    #[arg(long, value_name = "FOLDER")]
    rest: Option<ModelArg>,

    /// VAE of a checkpoint, such as ae.safetensors [default: in --rest, or beside the checkpoint]
    #[arg(long, value_name = "FILE")]
    vae: Option<ModelArg>,

    /// Text encoder of a checkpoint, such as `clip_l.safetensors`; may be given several times
    /// [default: in --rest, or beside the checkpoint]
    #[arg(long = "text-encoder", value_name = "FILE")]
    text_encoders: Vec<ModelArg>,

    /// Whose prompt templates and sigmas Kandinsky 5 is run with: original, or diffusers
    /// [default: original]
    #[arg(long, value_name = "PROGRAM", value_parser = implementation)]
    implementation: Option<Implementation>,
}

impl PartArgs {
    pub fn paths(&self) -> PartPaths {
        let Self { rest, vae, text_encoders, implementation } = self;
        PartPaths {
            rest: rest.as_ref().map(ModelArg::to_owned_path),
            vae: vae.as_ref().map(ModelArg::to_owned_path),
            text_encoders: text_encoders.iter().map(ModelArg::to_owned_path).collect(),
            implementation: *implementation,
            training_adapter: None,
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
