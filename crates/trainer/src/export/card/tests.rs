//! The model card of a recorded run.

use std::fs;
use std::path::Path;

use super::*;
use crate::config::RawConfig;

const RUN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/run");

fn facts(set: &[&str]) -> ModelCard {
    let folder = Path::new(RUN);
    let mut job = RawConfig::from_file(&folder.join("config.toml")).unwrap();
    for argument in set {
        job.set(argument).unwrap();
    }
    ModelCard::of(&job.resolve().unwrap(), &History::open(folder).unwrap()).unwrap()
}

#[track_caller]
fn says(card: &str, what: &[&str]) {
    for what in what {
        assert!(card.contains(what), "{what:?} is not in the model card:\n{card}");
    }
}

#[test]
fn a_card_says_what_the_hub_and_people_need() {
    let card = render(&facts(&["output.author=Ada", "output.license=cc-by-4.0"]));
    says(
        &card,
        &[
            "---\nbase_model: \"stabilityai/stable-diffusion-3.5-medium\"\nbase_model_relation: adapter\n",
            "license: \"cc-by-4.0\"\n",
            "instance_prompt: \"sks fox\"\n",
            "- text: \"a <script>alert(\\\"fox\\\")</script> & 'sks' fox, watercolour\"\n  output:\n    url: \"samples/step-000120-2.png\"\n---\n",
            "# fox\n\nBy Ada.\n\nA LoRA for `stabilityai/stable-diffusion-3.5-medium`, trained on 24 images.",
            "](samples/step-000000-1.png) | ![a photo of sks fox in the snow](samples/step-000120-1.png) |",
            "| a \\<script\\>alert(\"fox\")\\</script\\> \\& 'sks' fox, watercolour | ![",
            "load_lora_weights(\"adapter\", weight_name=\"pytorch_lora_weights.safetensors\")",
            "into `models/Lora` and write `<lora:fox-kohya:1>`",
            "hearth sample --base stable-diffusion-3.5-medium --adapter adapter/pytorch_lora",
            "| steps | 120 |",
            "| `adapter.rank` | 16 |",
            "under `cc-by-4.0`. The licence of the base model applies; see LICENSE of [stab",
            "Made with hearth 0.1.0.",
        ],
    );
    assert!(!card.contains("ComfyUI/models"), "it was not written for it");
}

#[test]
fn a_base_that_the_hub_does_not_know_is_named_without_its_path() {
    let card = render(&facts(&["base.path=secret/place/my-sd3"]));
    says(&card, &["license: other\nlicense_name: as-the-base-model\nlibrary_name", "`my-sd3`"]);
    for never in ["base_model", "secret", "images\"", "LICENSE.md"] {
        assert!(!card.contains(never), "{never} is in the model card");
    }
}

#[test]
fn a_run_without_images_and_files_has_a_card() {
    let mut facts = facts(&[]);
    facts.samples.clear();
    facts.exports.clear();
    facts.trigger = None;
    let card = render(&facts);
    assert!(!card.contains("widget") && !card.contains("| before |"));
}

#[test]
fn a_model_card_is_written_into_the_run_folder() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["events.jsonl", "config.toml"] {
        fs::copy(Path::new(RUN).join(name), folder.path().join(name)).unwrap();
    }
    let job = RawConfig::from_file(&folder.path().join("config.toml")).unwrap().resolve().unwrap();
    let path = write(folder.path(), &job).unwrap();
    assert!(path.ends_with("README.md") && fs::read_to_string(path).unwrap().starts_with("---\n"));
}

#[test]
fn cards_of_editing_models_begin_with_an_image() {
    let kontext = ["base.path=./models/FLUX.1-Kontext-dev"];
    let class =
        "from diffusers import FluxKontextPipeline\nfrom diffusers.utils import load_image\n";
    says(
        &render(&facts(&kontext)),
        &[class, "    image=load_image(\"reference.png\"), width=", " --reference reference.png\n"],
    );
    let small = ["base.path=./models/FLUX.1-Kontext-dev", "sample.size=512"];
    says(
        &render(&facts(&small)),
        &["width=512, height=512, num_inference_steps=28, max_area=262144"],
    );
    let mut facts = facts(&["base.path=./models/Qwen-Image-Edit-2509"]);
    facts.samples.last_mut().unwrap().references =
        ["samples/a.png", "samples/b.png"].map(Into::into).into();
    says(
        &render(&facts),
        &[
            "QwenImageEditPlusPipeline.from_pretrained(",
            "image=[load_image(\"samples/a.png\"), load_image(\"samples/b.png\")], ",
            " --reference samples/a.png --reference samples/b.png\n",
        ],
    );
}

/// It makes images from prompts alone, too, and its pipeline takes a negative prompt only encoded.
#[test]
fn cards_of_klein_have_an_image_where_the_run_has_one() {
    let base = "base.path=./models/FLUX.2-klein-base-9B";
    let card = render(&facts(&[base, "sample.negative_prompt=blurry"]));
    let negative = "negative_prompt_embeds=pipeline.encode_prompt(\"blurry\")[0]";
    says(&card, &["Flux2KleinPipeline.from_pretrained(", negative, "FLUX Non-Commercial License"]);
    assert!(!card.contains("load_image"), "{card}");
    let mut facts = facts(&[base]);
    facts.samples.last_mut().unwrap().references = vec!["samples/a.png".into()];
    says(&render(&facts), &["image=load_image(\"samples/a.png\"), ", " --reference samples/a.png"]);
}

/// The base's own licence on the hub and in words, and calls of diffusers that give what hearth gives.
#[test]
fn cards_of_flux_state_its_licence_and_its_guidance() {
    let card = render(&facts(&["base.path=./models/FLUX.1-dev"]));
    let link = "https://huggingface.co/black-forest-labs/FLUX.1-dev/blob/main/LICENSE.md";
    let name = "license: other\nlicense_name: flux-1-dev-non-commercial-license\nlicense_link:";
    says(&card, &[&format!("{name} \"{link}\"\n"), "which allows non-commercial use", "- flux\n"]);
    says(
        &card,
        &["FluxPipeline.from_pretrained(\"black-forest-labs/FLUX.1-dev\"", "guidance_scale="],
    );
    let never = |card: &str, what: &str| assert!(!card.contains(what), "{what} is in:\n{card}");
    never(&card, "max_sequence_length");
    never(&card, "true_cfg_scale");
    let guided = ["base.path=./models/FLUX.1-dev", "sample.true_cfg_scale=2.5"];
    says(&render(&facts(&guided)), &["true_cfg_scale=2.5, negative_prompt="]);
    let card = render(&facts(&["base.path=./models/FLUX.1-schnell"]));
    says(&card, &["license: \"apache-2.0\"\n", "Apache License 2.0", "max_sequence_length=256)"]);
    never(&card, "guidance_scale=");
    let card = render(&facts(&[]));
    says(&card, &["license_name: stabilityai-ai-community\n", "Stability AI Community License"]);
}
