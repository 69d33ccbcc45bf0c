//! musubi-tuner: LoRA and full fine-tunes of Qwen-Image, FLUX.1 Kontext and Kandinsky 5.

use super::super::error::ImportError;
use super::super::family::{ForeignFamily, TRAINED};
use super::super::mapping::Mapping;
use super::super::prompts::{SampleDefaults, SampleNumber};
use super::datasets::{self, Sections};
use super::{DATASET, flags, timesteps};

pub(super) fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let program = mapping.config.text("program")?.unwrap_or_default();
    let module = mapping.config.text("network_module")?;
    // LyCORIS' modules are for all families.
    let of_family = module.clone().filter(|module| !flags::is_lycoris(module));
    let name = of_family.unwrap_or_else(|| program.clone());
    let family = match name.as_str() {
        name if name.contains("qwen_image") => ForeignFamily::QwenImage,
        name if name.contains("lora_flux") && !name.contains("flux_2") => ForeignFamily::Flux,
        name if name.contains("kandinsky") => ForeignFamily::Kandinsky5Image,
        _ => {
            mapping.refuse("network_module", TRAINED);
            return Ok(());
        }
    };
    let is_full = module.is_none();
    base(mapping, family)?;
    flags::precision(mapping, is_full)?;
    data(mapping)?;
    if is_full {
        mapping.set_default("adapter.kind", "full", "no network_module");
    } else {
        flags::network(mapping)?;
        // FLUX.1's modulations are left out, as Qwen-Image's are.
        let targets = if family == ForeignFamily::Flux { "all" } else { "kohya" };
        mapping.set_default("adapter.targets", targets, "what musubi-tuner trains");
    }
    flags::length(mapping)?;
    timesteps::write(mapping, "none", 1.0)?;
    flags::timestep_range(mapping)?;
    if family == ForeignFamily::Flux {
        mapping.number("guidance_scale", "train.guidance_scale", 1.0)?;
    }
    flags::optimizer(mapping)?;
    let defaults = SampleDefaults {
        width: SampleNumber::unless_said(256.0),
        height: SampleNumber::unless_said(256.0),
        steps: SampleNumber::unless_said(20.0),
        has_guidance: family == ForeignFamily::Flux,
        ..SampleDefaults::default()
    };
    flags::samples(mapping, defaults)?;
    flags::output(mapping)
}

fn base(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let encoders: &[&str] = match family {
        ForeignFamily::QwenImage => &["text_encoder"],
        ForeignFamily::Flux => &["text_encoder1", "text_encoder2"],
        _ => &["text_encoder_qwen", "text_encoder_clip"],
    };
    flags::base(mapping, "dit", "vae", encoders)?;
    match mapping.config.text("model_version")?.as_deref() {
        Some("layered") => mapping.refuse("model_version", "hearth has no layered images"),
        Some(_) => {
            mapping.no_effect("model_version", "the checkpoint and the reference images tell it");
        }
        None => {}
    }
    Ok(())
}

/// Writes `[data]`, or `[[data]]` of several data sets.
fn data(mapping: &mut Mapping) -> Result<(), ImportError> {
    let file = mapping
        .document("dataset_config")?
        .ok_or_else(|| mapping.config.missing("dataset_config"))?;
    mapping.config.add(DATASET, &file.root);
    let folders = datasets::plain(mapping);
    for sections in &folders {
        for name in ["image_jsonl_file", "video_jsonl_file"] {
            let from = sections.key(mapping, name);
            if mapping.config.peek(&from).is_some() {
                mapping.refuse(
                    &from,
                    "put it into the folder of the images as metadata.jsonl, and name that folder",
                );
                return Ok(());
            }
        }
    }
    let Some(first) = folders.first() else {
        return Err(mapping.config.missing("dataset_config"));
    };
    let names = ["image_directory", "video_directory"];
    for sections in &folders {
        datasets::begin(mapping, sections, &names, &[960.0, 544.0])?;
        mapping.set_default("data.caption_dropout", 0.0, "no captions are dropped");
        references(mapping, sections)?;
        frames(mapping, sections)?;
        datasets::caption_ending(mapping, sections, ".txt")?;
    }
    datasets::batches(mapping, first)?;
    datasets::tell_others(mapping, &folders, &["batch_size", "enable_bucket", "bucket_no_upscale"]);
    Ok(())
}

fn references(mapping: &mut Mapping, set: &Sections) -> Result<(), ImportError> {
    let from = set.key(mapping, "control_directory");
    let Some(folder) = mapping.config.text(&from)? else { return Ok(()) };
    let folder = mapping.places.written(&folder);
    mapping.set("data.references", folder, &from);
    for name in ["control_resolution", "qwen_image_edit_control_resolution"] {
        let from = set.key(mapping, name);
        let size = mapping.config.numbers(&from)?;
        if let Some(side) = super::super::data_folder::side(&size) {
            mapping.set("data.reference_resolution", ((side / 32.0).round() * 32.0) as u64, &from);
        }
    }
    Ok(())
}

fn frames(mapping: &mut Mapping, set: &Sections) -> Result<(), ImportError> {
    let from = set.key(mapping, "target_frames");
    let frames = mapping.config.numbers(&from)?;
    let Some(most) = frames.iter().copied().reduce(f64::max).filter(|most| *most > 1.0) else {
        return Ok(());
    };
    if frames.len() > 1 {
        mapping.differs(
            &from,
            "clips have the largest number of frames that they are long enough for",
        );
    }
    mapping.set("data.frames", most as u64, &from);
    let from = set.key(mapping, "frame_extraction");
    let method = mapping.config.text(&from)?;
    match method.as_deref().unwrap_or("head") {
        "head" => {}
        "uniform" => {
            let from = set.key(mapping, "frame_sample");
            let segments = mapping.config.whole(&from)?;
            mapping.set_or("data.segments", segments, 1, &from);
        }
        _ => mapping
            .differs(&from, "the beginning of each clip, or data.segments spread evenly over it"),
    }
    Ok(())
}
