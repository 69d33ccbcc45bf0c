//! How to use an adapter, program by program. The Python code runs as it is, from the folder of the run, if the
//! base is there under the name in the text: `tests/newcomer.py` runs it with the programs themselves.

use std::fmt::Write;
use std::path::Path;

use super::ModelCard;
use super::hub::{hub_name, is_gguf};
use super::text::{code, python, shell};
use crate::config::RunConfig;
use crate::config::sample::SampleConfig;
use crate::export::sample_command::SampleCommand;
use crate::model::diffusion::editing::{REFERENCE_RESOLUTION, ReferenceSizing};
use crate::model::diffusion::family::{DiffusionFamily, VideoDefaults};
use crate::model::diffusion::guidance::Guidance;
use crate::model::diffusion::text::{PromptLength, TextEncoderSettings};
use crate::model::kind;

/// Settings of the job's samples that other programs have other defaults for.
#[derive(Clone, Debug)]
pub struct ImageUsage {
    /// The job's own samples.
    sample: SampleConfig,
    /// The base's.
    pub family: &'static DiffusionFamily,
    /// The text encoders, and their maximum lengths.
    texts: Vec<TextEncoderSettings>,
    /// The folder with all else, if the base is one file of the transformer.
    rest: Option<String>,
    /// Flags for all other parts.
    parts: Vec<String>,
}

impl ImageUsage {
    /// Of a job; none of one about texts.
    pub fn of(config: &RunConfig) -> Option<Self> {
        let (_, sample) = config.data.images().ok()?;
        let rest = config.base.rest.as_ref();
        let folder = rest.unwrap_or(&config.base.path);
        // If the folder is gone by now, the published settings are used.
        let family = kind::family(&config.base.path).or_else(|| kind::family(folder));
        let family = family.unwrap_or_else(DiffusionFamily::fallback);
        let texts = TextEncoderSettings::read(folder, family.encoders)
            .unwrap_or_else(|_| TextEncoderSettings::defaults(family.encoders));
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let parts = config.base.parts().flags(|path| name(path).unwrap_or_default());
        let rest = rest.and_then(|path| name(path));
        Some(Self { sample: sample.clone(), family, texts, rest, parts })
    }
}

/// The section "Use it".
pub fn usage(facts: &ModelCard) -> String {
    let mut out = String::from("## Use it\n\n");
    if let Some(image_usage) = &facts.usage {
        if let Some(file) = facts.file_for("diffusers") {
            out += &diffusers(facts, image_usage, &AdapterLoading::by_diffusers(file));
        } else if let Some(folder) = facts.file_for("peft") {
            out += &diffusers(facts, image_usage, &AdapterLoading::by_peft(folder));
        }
    }
    if let Some(file) = facts.file_for("peft").filter(|_| facts.is_text()) {
        out += &peft(facts, file);
    }
    for (format, title, folder, action) in [
        ("comfyui", "ComfyUI", "ComfyUI/models/loras", "choose it in a *Load LoRA* node"),
        ("kohya", "WebUI and others that read kohya's files", "models/Lora", ""),
    ] {
        let Some(file) = facts.file_for(format) else { continue };
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let tag = format!("write `<lora:{}:1>` into the prompt", code(&stem));
        let action = if action.is_empty() { &tag } else { action };
        let path = code(&file.display().to_string());
        _ = write!(out, "### {title}\n\nPut `{path}` into `{folder}` and {action}.\n\n");
    }
    let first = || facts.exports.first().map(|export| export.path.as_path());
    if let Some(file) = facts.file_for("diffusers").or_else(first) {
        out += &hearth(facts, file);
    }
    out
}

/// How a pipeline of diffusers gets an adapter.
struct AdapterLoading {
    import: &'static str,
    line: String,
}

impl AdapterLoading {
    fn by_diffusers(file: &Path) -> Self {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let folder = file.parent().map_or_else(String::new, |folder| folder.display().to_string());
        let (folder, name) = (python(&folder), python(&name));
        Self {
            import: "",
            line: format!("pipeline.load_lora_weights({folder}, weight_name={name})"),
        }
    }

    /// For what diffusers has no form of its own for.
    fn by_peft(folder: &Path) -> Self {
        let folder = python(&folder.display().to_string());
        Self {
            import: "from peft import PeftModel\n",
            line: format!(
                "pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, {folder})"
            ),
        }
    }
}

fn diffusers(facts: &ModelCard, image_usage: &ImageUsage, adapter: &AdapterLoading) -> String {
    let (base, load) = (facts.base_name(), loading(facts, image_usage));
    let (class, model) = (image_usage.family.pipelines[0], image_usage.family.transformer);
    let (import, transformer) =
        match image_usage.rest.as_ref().filter(|_| hub_name(&facts.base).is_none()) {
            Some(rest) => (
                format!("{model}, {class}"),
                format!(
                    "transformer = {model}.from_single_file(\n    {}, config={}, \
                 subfolder=\"transformer\", torch_dtype=torch.bfloat16)\n",
                    python(&base),
                    python(rest)
                ),
            ),
            None => (class.to_owned(), String::new()),
        };
    let references = references(facts);
    let family = image_usage.family;
    let (utils, save) = match family.video {
        Some(VideoDefaults { fps, .. }) => (
            "from diffusers.utils import export_to_video\n",
            format!("export_to_video(clip, \"clip.mp4\", fps={fps})"),
        ),
        None if references.is_empty() => ("", SAVE_IMAGE.into()),
        None => ("from diffusers.utils import load_image\n", SAVE_IMAGE.into()),
    };
    let made = if family.video.is_some() { "clip" } else { "image" };
    let output = family.pipeline_output;
    let arguments = [image_arguments(&references), call_arguments(image_usage)].concat();
    format!(
        "### diffusers\n\n```python\nimport torch\nfrom diffusers import {import}\n{utils}{}\n\
         device = \"cuda\" if torch.cuda.is_available() else \"cpu\"\n\
         {transformer}\
         pipeline = {class}.from_pretrained({load}, torch_dtype=torch.bfloat16)\n\
         {}\n\
         {made} = pipeline.to(device)(\n    {},\n    {}).{output}[0]\n\
         {save}\n```\n\n",
        adapter.import,
        adapter.line,
        python(facts.prompt()),
        arguments.join(", ")
    )
}

const SAVE_IMAGE: &str = "image.save(\"image.png\")";

/// The reference images of an editing model: those of a sample of the run, else a name if it needs one.
fn references(facts: &ModelCard) -> Vec<String> {
    let editing = facts.usage.as_ref().and_then(|usage| usage.family.editing);
    let Some(editing) = editing else { return Vec::new() };
    // Of the sample whose prompt is used.
    let of_sample = facts.samples.last().map(|sample| &sample.references[..]).unwrap_or_default();
    match of_sample {
        [] if editing.needs_reference => vec!["reference.png".into()],
        paths => paths.iter().map(|path| path.display().to_string()).collect(),
    }
}

/// The argument of the pipeline's call for references: an image, or a list where there are several.
fn image_arguments(references: &[String]) -> Vec<String> {
    let images: Vec<_> =
        references.iter().map(|path| format!("load_image({})", python(path))).collect();
    match &images[..] {
        [] => Vec::new(),
        [image] => vec![format!("image={image}")],
        images => vec![format!("image=[{}]", images.join(", "))],
    }
}

/// The arguments of `from_pretrained`.
fn loading(facts: &ModelCard, image_usage: &ImageUsage) -> String {
    let is_single = image_usage.rest.is_some() && hub_name(&facts.base).is_none();
    let base = match &image_usage.rest {
        Some(rest) if is_single => python(rest),
        _ => python(&facts.base_name()),
    };
    let transformer = if is_single { ", transformer=transformer" } else { "" };
    // diffusers must be told about missing encoders.
    let left_out = image_usage.texts.iter().filter(|texts| !texts.is_there).map(
        |TextEncoderSettings { spec, .. }| {
            format!(", {}=None, {}=None", spec.folder(), spec.tokenizer)
        },
    );
    format!("{base}{transformer}{}", left_out.collect::<String>())
}

/// The arguments of the pipeline's call besides the prompt, where diffusers has other defaults or none.
fn call_arguments(ImageUsage { sample, family, texts, .. }: &ImageUsage) -> Vec<String> {
    let SampleConfig { size, frames, steps, guidance_scale, true_cfg_scale, .. } = sample;
    let mut all = vec![
        format!("width={}", size.width),
        format!("height={}", size.height),
        format!("num_inference_steps={steps}"),
    ];
    let frames = family.video.map(|video| frames.unwrap_or(video.frames));
    all.extend(frames.map(|frames| format!("num_frames={frames}")));
    // Kontext's pipeline scales width and height to an area of its own.
    let is_scaled = family.editing.is_some_and(|editing| {
        matches!(editing.sizing, ReferenceSizing::Nearest(_))
            && size.width * size.height != (REFERENCE_RESOLUTION * REFERENCE_RESOLUTION) as usize
    });
    if is_scaled {
        all.push(format!("max_area={}", size.width * size.height));
    }
    let negative = match sample.negative_prompt.as_str() {
        "" => family.empty_prompt,
        typed => typed,
    };
    match family.guidance {
        Guidance::ClassifierFree | Guidance::Added => {
            all.push(format!("guidance_scale={guidance_scale:?}"));
            all.extend((!negative.is_empty()).then(|| negative_argument(family, negative)));
        }
        Guidance::Rescaled => all.extend(true_cfg(*guidance_scale, negative)),
        Guidance::Embedded => all.push(format!("guidance_scale={guidance_scale:?}")),
        Guidance::None => {}
    }
    let scale = family.guidance.cfg_scale(sample.guidance());
    if scale.is_some() && !family.guidance.is_classifier_free() {
        all.extend(true_cfg(*true_cfg_scale, negative));
    }
    let length = texts.iter().find_map(|texts| match texts.spec.prompt_length {
        PromptLength::Index(usual) => Some(texts.length.unwrap_or(usual)),
        PromptLength::Positions(_) => None,
    });
    let length = length.filter(|length| *length != family.max_sequence_length);
    all.extend(length.map(|length| format!("max_sequence_length={length}")));
    all
}

/// The argument for a negative prompt.
fn negative_argument(family: &DiffusionFamily, negative: &str) -> String {
    let text = python(negative);
    if family.takes_negative_text {
        return format!("negative_prompt={text}");
    }
    format!("negative_prompt_embeds=pipeline.encode_prompt({text})[0]")
}

/// Without a negative prompt diffusers leaves classifier-free guidance out.
fn true_cfg(scale: f64, negative: &str) -> [String; 2] {
    [format!("true_cfg_scale={scale:?}"), format!("negative_prompt={}", python(negative))]
}

fn peft(facts: &ModelCard, file: &Path) -> String {
    let gguf = Path::new(&facts.base).file_name().filter(|_| is_gguf(&facts.base));
    let gguf = gguf.map(|name| python(&name.to_string_lossy()));
    // Transformers looks for a GGUF file in its folder, or in the model's repository on the hub.
    let (base, source) = match &gguf {
        Some(name) => {
            let cached = facts.base.contains("models--").then(|| facts.base_name());
            (python(cached.as_deref().unwrap_or(".")), format!("base, gguf_file={name}"))
        }
        None => (python(&facts.base_name()), "base".to_owned()),
    };
    let comment = if base == "\".\"" { "  # the folder with the GGUF file" } else { "" };
    format!(
        "### PEFT\n\n```python\nfrom peft import PeftModel\n\
         from transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
         base = {base}{comment}\n\
         tokenizer = AutoTokenizer.from_pretrained({source})\n\
         model = AutoModelForCausalLM.from_pretrained({source})\n\
         model = PeftModel.from_pretrained(model, {})\n\
         ids = tokenizer({}, return_tensors=\"pt\")\n\
         print(tokenizer.decode(model.generate(**ids, max_new_tokens=64)[0]))\n```\n\n",
        python(&file.display().to_string()),
        python(facts.prompt())
    )
}

fn hearth(facts: &ModelCard, file: &Path) -> String {
    let (adapter, base) = (file.display().to_string(), facts.base_name());
    // hearth reads folders, and the hub's tools name them so.
    let base = base.rsplit('/').next().unwrap_or(&base);
    let parts = facts.usage.as_ref().map_or(&[][..], |image_usage| &image_usage.parts);
    let references = references(facts).into_iter().flat_map(|path| ["--reference".into(), path]);
    let options: Vec<String> = references.chain(facts.sample_options.iter().cloned()).collect();
    let command = SampleCommand {
        base,
        parts,
        adapter: Some(&adapter),
        prompt: facts.prompt(),
        options: &options,
    };
    let parts = parts.iter().fold(String::new(), |line, word| line + " " + &shell(word));
    format!(
        "### hearth\n\n```sh\n{}\n# for another program:\n\
         hearth export {} --base {}{parts} --out for-others\n```\n\n",
        command.line(),
        shell(&adapter),
        shell(base),
    )
}
