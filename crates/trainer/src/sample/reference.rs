//! Reference images of a request to an editing model: which sizes the model sees, and their latents.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::{Device, Dtype};
use weights::BytesDoneFn;

use crate::data::decoding::decoding_bytes;
use crate::data::reference::{ReferenceSize, read_reference, scaled_reference};
use crate::data::{Bucket, DecodingMemory, DecodingNeed, ProblemKind, to_chw};
use crate::error::{Result, TrainerError};
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::editing::Editing;
use crate::model::diffusion::text::PromptImage;
use crate::model::diffusion::vae::{LatentShape, vae_moments};

/// Latents of a reference image as a model sees them.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceLatents {
    /// Their values, scaled.
    pub values: Vec<f32>,
    /// Their shape.
    pub shape: LatentShape,
}

/// The sizes in which a model sees reference images, which have the area of a square of `resolution`. Refuses more than
/// it takes, none where it needs one, and what is no image.
pub fn fit_references(
    pipeline: &Pipeline,
    paths: &[PathBuf],
    resolution: usize,
) -> Result<Vec<(PathBuf, ReferenceSize)>> {
    let family = pipeline.family();
    let wrong = |problem: String, hint| Err(TrainerError::Request { problem, hint });
    let n = paths.len();
    let images = format!("{n} reference image{}", if n == 1 { "" } else { "s" });
    let Some(editing) = family.editing else {
        if n == 0 {
            return Ok(Vec::new());
        }
        let problem = format!("{images} for {}, which takes none", family.title);
        return wrong(
            problem,
            "use an editing model: FLUX.1 Kontext, FLUX.2 klein or Qwen-Image-Edit",
        );
    };
    let most = editing.max_references;
    if n > most {
        let problem = format!("{images}, {} takes at most {most}", family.title);
        return wrong(problem, "leave some out");
    }
    if n == 0 && editing.needs_reference {
        let problem = format!("no reference image for {}, which edits one", family.title);
        return wrong(problem, "give --reference IMAGE, or sample.references in a job");
    }
    let size = |path: &PathBuf| {
        let image = read_reference(path).map_err(|kind| unreadable(path, &kind))?;
        Ok((path.clone(), reference_size(editing, image.size, resolution)))
    };
    paths.iter().map(size).collect()
}

/// The sizes in which an editing model sees a reference of this width and height.
pub(crate) fn reference_size(editing: Editing, size: [u32; 2], resolution: usize) -> ReferenceSize {
    let resolution = resolution as u32;
    ReferenceSize {
        vae: editing.vae_size(size, resolution).into(),
        cropped_from: editing.cropped_from(resolution),
        encoder: editing.encoder_size(size, resolution).map(Bucket::from),
    }
}

/// A reference as the text encoder sees it, if it sees images; read when it is encoded.
pub fn prompt_image(
    path: &Path,
    size: ReferenceSize,
    memory: &Arc<DecodingMemory>,
) -> Option<PromptImage> {
    let (path, size) = (path.to_owned(), size.encoder?);
    let memory = Arc::clone(memory);
    let read =
        move || scaled_reference(&path, size, &memory).map_err(|kind| unreadable(&path, &kind));
    Some(PromptImage { size: size.sides(), read: Arc::new(read) })
}

fn unreadable(path: &Path, problem: &ProblemKind) -> TrainerError {
    TrainerError::Request {
        problem: format!("reference image {} {problem}", path.display()),
        hint: "give a png, jpeg, webp or gif image that other programs can open",
    }
}

/// What decoding references takes, one at a time or all at once.
pub(super) fn decoding_need(references: &[(PathBuf, ReferenceSize)]) -> Result<DecodingNeed> {
    let mut need = DecodingNeed::default();
    for (path, size) in references {
        for to in std::iter::once(size.vae).chain(size.encoder) {
            let bytes = decoding_bytes(path, to.sides()).map_err(|kind| unreadable(path, &kind))?;
            need.add(path, bytes);
        }
    }
    Ok(need)
}

/// Encodes references: the modes of their latents. On the meta device no image is read.
pub fn encode_references(
    pipeline: &Pipeline,
    device: &Device,
    references: &[(PathBuf, ReferenceSize)],
    memory: &DecodingMemory,
    tick: BytesDoneFn<'_>,
) -> Result<Vec<ReferenceLatents>> {
    if references.is_empty() {
        return Ok(Vec::new());
    }
    // Its activations outgrow half precision (`force_upcast` in its settings).
    let encoder = pipeline.vae.load_encoder(device, Precision::plain(Dtype::F32), tick)?;
    let statistics = pipeline.vae.statistics();
    let encode = |(path, size): &(PathBuf, ReferenceSize)| {
        let Bucket { width, height } = size.vae;
        let pixels = if device.is_meta() {
            vec![0.0; 3 * width * height]
        } else {
            let pixels = scaled_reference(path, size.of_vae(), memory);
            let pixels = pixels.map_err(|kind| unreadable(path, &kind))?;
            to_chw(&pixels, false)
        };
        let (moments, shape) = vae_moments(&encoder, device, &[&pixels], [width, height], 1)?;
        let values = statistics.to_model(&moments[0][..shape.count()], shape);
        Ok(ReferenceLatents { values, shape })
    };
    references.iter().map(encode).collect()
}
