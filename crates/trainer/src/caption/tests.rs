//! Captions against transformers (`tests/golden/caption`), their memory against the plan, and folders.

use std::fs;
use std::path::{Path, PathBuf};

use compute::{Device, DeviceKind, Dtype, Quantisation};
use serde::Deserialize;
use weights::Catalog;
use weights::load::load_f32;

use super::captioner::{CaptionRequest, Captioner, DEFAULT_MAX_PIXELS};
use super::folder::{CaptionFolderOptions, CaptionTask, CaptionTasks};
use crate::data;
use crate::model::build::Precision;
use crate::model::encoder::qwen25vl::vision_language::VisionLanguageModel;
use crate::model::host::relative_error;
use crate::sample::token_sampler::TokenSampler;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/caption")
}

/// A caption by transformers.
#[derive(Deserialize)]
struct Case {
    image: String,
    prompt: String,
    n_prompt: usize,
    tokens: Vec<u32>,
    /// Without the repetition penalty.
    plain: Vec<u32>,
    caption: String,
}

const MODELS: [&str; 2] = ["folder", "pipeline"];
const MAX_TOKENS: usize = 16;
const PLAIN: Precision = Precision::plain(Dtype::F32);

fn cases(model: &str) -> Vec<Case> {
    serde_json::from_slice(&fs::read(golden().join(model).join("cases.json")).unwrap()).unwrap()
}

fn task(image: &str) -> CaptionTask {
    let image = golden().join(format!("images/{image}.png"));
    let pixels = data::decode(&image).unwrap();
    let (size, to) = ([pixels.width, pixels.height], "nowhere.txt".into());
    CaptionTask { image, size, to, overwrites: false }
}

fn tasks() -> Vec<CaptionTask> {
    ["wide", "tall", "large"].map(task).into()
}

fn request(prompt: &str) -> CaptionRequest {
    CaptionRequest {
        prompt: prompt.into(),
        trigger: None,
        max_pixels: DEFAULT_MAX_PIXELS,
        max_tokens: MAX_TOKENS,
        sampler: TokenSampler::greedy(),
        repetition_penalty: None,
    }
}

fn open(model: &str, request: CaptionRequest) -> Captioner {
    Captioner::open(&golden().join(model), request).unwrap()
}

fn device() -> Device {
    Device::cpu(2, 64 << 20).unwrap()
}

#[test]
fn captions_are_those_of_transformers() {
    for model in MODELS {
        let logits = Catalog::open(&golden().join(model).join("golden.safetensors")).unwrap();
        let cases = cases(model);
        assert_eq!(cases.len(), 6);
        for (at, case) in cases.iter().enumerate() {
            let (task, device) = (task(&case.image), device());
            let captioner = open(model, request(&case.prompt));
            let mut loaded =
                captioner.load(&device, PLAIN, std::slice::from_ref(&task), &|_| true).unwrap();
            let name = format!("logits.{}.{}", case.image, at % 2);
            let tensor = logits.find(&name).unwrap();
            let expected = load_f32(&logits, tensor, 0..tensor.numel()).unwrap();
            let found = loaded.prompt_logits(task.pixels().unwrap()).unwrap();
            let difference = relative_error(&expected, &found);
            assert!(difference < 2e-5, "{model} {name}: {difference}");
            assert_eq!(loaded.n_tokens(), case.n_prompt, "{model} {name}");
            let caption = loaded.caption(task.pixels().unwrap(), 0, &|| true).unwrap().unwrap();
            assert_eq!(caption.tokens, case.tokens, "{model} {name}");
            assert_eq!(caption.text, case.caption, "{model} {name}");
            assert_eq!(caption.is_whole, caption.tokens.len() < MAX_TOKENS);
        }
    }
}

/// One model for all images: nothing of an image stays for the next.
#[test]
fn the_penalty_is_that_of_the_model_unless_another_is_asked_for() {
    for model in MODELS {
        for prompt in [0, 1] {
            let cases = cases(model);
            let asked = || cases.iter().skip(prompt).step_by(2);
            let plain = CaptionRequest {
                repetition_penalty: Some(1.0),
                ..request(&asked().next().unwrap().prompt)
            };
            let (captioner, device) = (open(model, plain), device());
            let mut loaded = captioner.load(&device, PLAIN, &tasks(), &|_| true).unwrap();
            for case in asked().chain(asked()) {
                let pixels = task(&case.image).pixels().unwrap();
                let caption = loaded.caption(pixels, 0, &|| true).unwrap().unwrap();
                assert_eq!(caption.tokens, case.plain, "{model} {}", case.image);
            }
        }
    }
    assert!(cases("pipeline").iter().any(|case| case.tokens != case.plain));
}

#[test]
fn the_text_encoder_of_a_pipeline_may_be_given_itself() {
    let [whole, part] = ["pipeline", "pipeline/text_encoder"]
        .map(|path| VisionLanguageModel::open(&golden().join(path)).unwrap().folders);
    assert_eq!(whole, part);
    assert_eq!(whole.processor, None);
}

#[test]
fn captions_take_what_was_planned() {
    for (model, dtype, base) in [
        ("folder", Dtype::F32, None),
        ("pipeline", Dtype::Bf16, None),
        ("pipeline", Dtype::F16, None),
        ("pipeline", Dtype::F32, Some(Quantisation::Int8)),
    ] {
        let precision = Precision { base, ..Precision::plain(dtype) };
        let captioner = open(model, request("Describe this image."));
        let plan = |limit| captioner.plan(&tasks(), precision, DeviceKind::cpu(2), limit);
        let planned = plan(usize::MAX).unwrap();
        let device = Device::cpu(2, planned).unwrap();
        let mut loaded = captioner.load(&device, precision, &tasks(), &|_| true).unwrap();
        for task in tasks() {
            // Never at its end before the last token, so that it is as long as can be.
            let caption = loaded.longest(task.pixels().unwrap()).unwrap();
            assert_eq!(caption.tokens.len(), MAX_TOKENS);
        }
        assert_eq!(device.usage().extent, planned, "{model} {dtype} {base:?}");
        let refused = plan(planned - 1).unwrap_err().to_string();
        assert!(refused.starts_with("captioning does not fit: needs"), "{refused}");
        let refused = plan(planned).unwrap_err().to_string();
        assert!(refused.starts_with("decoding ") && refused.contains(".png"), "{refused}");
    }
}

#[test]
fn fewer_pixels_take_less_memory() {
    let peak = |max_pixels| {
        let captioner = open("pipeline", CaptionRequest { max_pixels, ..request("What is it?") });
        captioner.plan(&tasks(), PLAIN, DeviceKind::cpu(2), usize::MAX).unwrap()
    };
    assert!(peak(56 * 56) < peak(DEFAULT_MAX_PIXELS));
    let refused = Captioner::open(
        &golden().join("pipeline"),
        CaptionRequest { max_pixels: 3135, ..request("What is it?") },
    );
    let refused = refused.err().unwrap().to_string();
    assert_eq!(refused, "images of at most 3135 pixels, the model sees 3136 at least");
}

#[test]
fn a_caption_that_is_stopped_is_none() {
    let (captioner, device) = (open("folder", request("Describe this image.")), device());
    let mut loaded = captioner.load(&device, PLAIN, &tasks(), &|_| true).unwrap();
    let pixels = task("wide").pixels().unwrap();
    assert_eq!(loaded.caption(pixels, 0, &|| false).unwrap(), None);
}

#[test]
fn the_trigger_word_is_in_front() {
    let trigger = Some(" ohwx ".into());
    let asked = CaptionRequest { trigger, ..request(&cases("folder")[0].prompt) };
    let (captioner, device) = (open("folder", asked), device());
    let mut loaded = captioner.load(&device, PLAIN, &tasks(), &|_| true).unwrap();
    let case = &cases("folder")[0];
    let pixels = task(&case.image).pixels().unwrap();
    let caption = loaded.caption(pixels, 0, &|| true).unwrap().unwrap();
    assert_eq!(caption.text, format!("ohwx, {}", case.caption));
}

/// A copy of a model that is changed.
fn changed(change: impl Fn(&Path)) -> String {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden().join("folder")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    change(folder.path());
    Captioner::open(folder.path(), request("What is it?")).err().unwrap().to_string()
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from}");
    fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn a_model_that_lacks_something_is_refused() {
    let untied = changed(|folder| {
        let tied = "\"tie_word_embeddings\": true";
        replace(&folder.join("config.json"), tied, &tied.replace("true", "false"));
    });
    assert!(
        untied.contains("without output layer (lm_head.weight), expected Qwen2.5-VL as a whole"),
        "{untied}"
    );
    let blind = changed(|folder| {
        let text = golden().join("../llama/qwen2/model.safetensors");
        fs::copy(text, folder.join("model.safetensors")).unwrap();
    });
    assert!(blind.contains("a model without vision tower"), "{blind}");
    let unprocessed = changed(|folder| {
        fs::remove_file(folder.join("preprocessor_config.json")).unwrap();
    });
    assert!(unprocessed.contains("lacks preprocessor_config.json"), "{unprocessed}");
    let nameless = changed(|folder| {
        replace(&folder.join("tokenizer.json"), "<|image_pad|>", "<|other_pad|>");
    });
    assert!(nameless.contains("the tokenizer has no token <|image_pad|>"), "{nameless}");
    let penalty = changed(|folder| {
        let path = folder.join("generation_config.json");
        replace(&path, "\"repetition_penalty\": 1.0", "\"repetition_penalty\": 0.0");
    });
    assert_eq!(penalty, "repetition penalty is 0");
    let twice = Captioner::open(&golden().join("folder"), request("<|image_pad|>"));
    let twice = twice.err().unwrap().to_string();
    assert_eq!(twice, "the prompt has 2 tokens <|image_pad|>, the one image takes 1");
}

#[test]
fn other_models_are_told_by_their_name() {
    let refused = |path: &str| {
        let path = golden().join("..").join(path);
        Captioner::open(&path, request("What is it?")).err().unwrap().to_string()
    };
    for (path, says) in [
        ("llama/qwen2", "this is a language model (Qwen2ForCausalLM), expected a Qwen2.5-VL model"),
        ("sd3/pipeline", "this is a text encoder alone (CLIPTextModelWithProjection), expected"),
        ("nowhere", "no model at"),
        ("caption/images", "a model without config.json"),
    ] {
        let said = refused(path);
        assert!(said.contains(says), "{said}");
    }
}

/// Which images of a folder get which files.
fn targets(folder: &Path, options: &CaptionFolderOptions) -> Vec<String> {
    let found = CaptionTasks::find(folder, options, &|_| true).unwrap();
    let name = |path: &Path| path.strip_prefix(folder).unwrap().display().to_string();
    found.tasks.iter().map(|task| name(&task.to)).collect()
}

#[test]
fn captions_that_are_there_stay() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("3_sks fox")).unwrap();
    for name in ["a", "b", "c", "d", "e", "3_sks fox/f"] {
        fs::copy(golden().join("images/wide.png"), at(&format!("{name}.png"))).unwrap();
    }
    fs::copy(golden().join("images/wide.png"), at("e.apng")).unwrap();
    fs::write(at("a.txt"), "a fox").unwrap();
    fs::write(at("b.caption"), [0xff, 0x00]).unwrap();
    fs::write(at("c.txt"), "").unwrap();
    fs::write(at("metadata.jsonl"), "{\"file_name\": \"d.png\", \"text\": \"a fox\"}\n").unwrap();
    let options =
        CaptionFolderOptions { extension: "txt".into(), overwrites: false, follow_links: false };
    assert_eq!(targets(folder.path(), &options), ["3_sks fox/f.txt", "e.txt"]);
    let found = CaptionTasks::find(folder.path(), &options, &|_| true).unwrap();
    assert_eq!((found.n_captioned, found.n_in_metadata), (5, 1));
    let anew = CaptionFolderOptions { overwrites: true, ..options.clone() };
    let expected = ["3_sks fox/f.txt", "a.txt", "b.caption", "c.txt", "e.txt"];
    assert_eq!(targets(folder.path(), &anew), expected);
    let other = CaptionFolderOptions { extension: "caption".into(), ..options.clone() };
    assert_eq!(targets(folder.path(), &other), ["3_sks fox/f.caption", "e.caption"]);

    let e = &found.tasks[1];
    fs::write(&e.to, "somebody's").unwrap();
    assert!(!e.write("ours").unwrap());
    assert_eq!(fs::read_to_string(&e.to).unwrap(), "somebody's");
    assert_eq!(targets(folder.path(), &options), ["3_sks fox/f.txt"]);
    let f = &found.tasks[0];
    assert!(f.write("ours").unwrap());
    assert_eq!(fs::read_to_string(&f.to).unwrap(), "ours\n");
    assert_eq!(targets(folder.path(), &options), [""; 0]);

    let empty = tempfile::tempdir().unwrap();
    let refused = CaptionTasks::find(empty.path(), &options, &|_| true).unwrap_err().to_string();
    assert!(refused.starts_with("no image that can be used in"), "{refused}");
}
