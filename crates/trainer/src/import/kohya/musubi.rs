//! musubi-tuner: LoRA and full fine-tunes of Qwen-Image, FLUX.1 Kontext, FLUX.2 klein, Z-Image and Kandinsky 5.

use super::super::error::ImportError;
use super::super::family::{self, ForeignFamily, TRAINED};
use super::super::mapping::Mapping;
use super::super::prompts::{GuidanceKind, SampleDefaults, SampleNumber};
use super::super::training_adapter;
use super::datasets::{self, Sections};
use super::{DATASET, flags, timesteps};

pub(super) fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let program = mapping.config.text("program")?.unwrap_or_default();
    let module = mapping.config.text("network_module")?;
    // LyCORIS' modules are for all families.
    let of_family = module.clone().filter(|module| !flags::is_lycoris(module));
    let name = of_family.unwrap_or_else(|| program.clone());
    let Some(family) = family(&name) else {
        mapping.refuse("network_module", TRAINED);
        return Ok(());
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
        if family == ForeignFamily::Flux2Klein {
            family::tell_fused(mapping, "network_module");
        }
    }
    merged_adapter(mapping, family)?;
    flags::length(mapping)?;
    timesteps::write(mapping, "none", 1.0)?;
    tell_shift(mapping, family)?;
    flags::timestep_range(mapping)?;
    if family == ForeignFamily::Flux {
        mapping.number("guidance_scale", "train.guidance_scale", 1.0)?;
    }
    flags::optimizer(mapping)?;
    flags::samples(mapping, samples(family))?;
    flags::output(mapping)
}

/// By the name of the module, or of the program.
fn family(name: &str) -> Option<ForeignFamily> {
    match name {
        name if name.contains("qwen_image") => Some(ForeignFamily::QwenImage),
        name if name.contains("zimage") => Some(ForeignFamily::ZImage),
        name if name.contains("flux_2") => Some(ForeignFamily::Flux2Klein),
        name if name.contains("lora_flux") => Some(ForeignFamily::Flux),
        name if name.contains("kandinsky") => Some(ForeignFamily::Kandinsky5Image),
        _ => None,
    }
}

/// `sample_image_inference` of each program.
fn samples(family: ForeignFamily) -> SampleDefaults<'static> {
    let number = SampleNumber::unless_said;
    let of_family = match family {
        ForeignFamily::ZImage => SampleDefaults {
            guidance: number(4.0),
            kind: GuidanceKind::FromZero,
            ..SampleDefaults::default()
        },
        ForeignFamily::Flux2Klein => {
            SampleDefaults { guidance: number(4.0), ..SampleDefaults::default() }
        }
        _ => SampleDefaults { kind: GuidanceKind::of(family), ..SampleDefaults::default() },
    };
    SampleDefaults { width: number(256.0), height: number(256.0), steps: number(20.0), ..of_family }
}

/// An adapter that is merged into the base before training: for Z-Image Turbo one that undoes its distillation. With others
/// the result is meant for the merged model; a rule refuses them.
fn merged_adapter(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let from = "base_weights";
    let is_whole = mapping.config.peek("base_weights_multiplier").is_none();
    if family != ForeignFamily::ZImage || !is_whole {
        return Ok(());
    }
    if let [path] = &mapping.config.texts(from)?[..] {
        let path = mapping.places.written(path);
        training_adapter::write(mapping, &path, from);
        mapping.differs(from, "samples are drawn without it");
    } else if mapping.config.is_on(from) {
        mapping.refuse(from, "hearth has one adapter beside the one that is trained");
    }
    Ok(())
}

/// Tells of a shift by the size of an image that is made for another model.
fn tell_shift(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let from = "timestep_sampling";
    let own = match family {
        ForeignFamily::QwenImage => "qwen_shift",
        ForeignFamily::Flux2Klein => "flux2_shift",
        _ => "flux_shift",
    };
    let typed = mapping.config.text(from)?;
    let is_by_size = |name: &String| ["qwen_shift", "flux2_shift", "flux_shift"].contains(&&**name);
    if typed.is_some_and(|name| is_by_size(&name) && name != own) {
        mapping.differs(from, format!("the shift by an image's size is that of `{own}`"));
    }
    Ok(())
}

fn base(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let encoders: &[&str] = match family {
        ForeignFamily::QwenImage | ForeignFamily::Flux2Klein | ForeignFamily::ZImage => {
            &["text_encoder"]
        }
        ForeignFamily::Flux => &["text_encoder1", "text_encoder2"],
        _ => &["text_encoder_qwen", "text_encoder_clip"],
    };
    flags::base(mapping, "dit", "vae", encoders)?;
    match mapping.config.text("model_version")?.as_deref() {
        None | Some("dev") if family == ForeignFamily::Flux2Klein => {
            let why = "hearth trains FLUX.2 klein, not dev, which it is if nothing is said";
            mapping.refuse("model_version", why);
        }
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
