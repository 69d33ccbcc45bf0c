//! Prompts with images against transformers and diffusers, and against themselves.

use std::fs;
use std::sync::Arc;

use compute::gpu::GpuChoice;
use compute::{DeviceKind, Quantisation};
use serde::Deserialize;
use weights::load::{LoadOptions, LoadRequest, load, load_f32};
use weights::{Catalog, FileDtype};

use super::super::encoder::{EncoderKind, PromptLength, QWEN25VL_FILES, TextEmbedding};
use super::super::templates::{QWEN_IMAGE_EDIT_PLUS_TEMPLATE, QWEN_IMAGE_EDIT_TEMPLATE};
use super::*;
use crate::model::adapter::names::EncoderNames;
use crate::model::diffusion::paths::PartSource;
use crate::model::encoder::qwen25vl::Qwen25VlConfig;
use crate::model::host::relative_error;
use crate::pixels::Pixels;
use crate::train::tests::software_gpu;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen25vl_vision")
}

/// Reference data of a model.
struct Reference {
    folder: PathBuf,
    tensors: Catalog,
}

/// A prompt of the reference.
#[derive(Deserialize)]
struct Case {
    pipeline: String,
    prompt: String,
    images: Vec<String>,
}

const MODELS: [&str; 2] = ["flat", "nested"];

impl Reference {
    fn open(name: &str) -> Self {
        let folder = golden().join(name);
        let tensors = Catalog::open(&folder.join("golden.safetensors")).unwrap();
        Self { folder, tensors }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let tensor = self.tensors.find(name).unwrap();
        load_f32(&self.tensors, tensor, 0..tensor.numel()).unwrap()
    }

    fn bytes(&self, name: &str, dtype: FileDtype, width: usize) -> Vec<u8> {
        let tensor = self.tensors.find(name).unwrap();
        let mut bytes = vec![0; tensor.numel() as usize * width];
        let wanted = vec![LoadRequest::whole(tensor, dtype, &mut bytes[..])];
        load(&self.tensors, wanted, LoadOptions::default(), &|_| true).unwrap();
        bytes
    }

    fn integers(&self, name: &str) -> Vec<u32> {
        let bytes = self.bytes(name, FileDtype::I64, size_of::<i64>());
        bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect()
    }

    /// Images by name.
    fn images(&self) -> impl Iterator<Item = &str> {
        self.tensors.tensors.iter().filter_map(|tensor| tensor.name.strip_prefix("image."))
    }

    fn pixels(&self, name: &str) -> Pixels {
        let name = format!("image.{name}");
        let [height, width, _] = self.tensors.find(&name).unwrap().shape[..] else {
            panic!("{name}")
        };
        let rgb = self.bytes(&name, FileDtype::U8, 1);
        Pixels { width: width as u32, height: height as u32, rgb }
    }

    fn image(&self, name: &str) -> PromptImage {
        let pixels = self.pixels(name);
        let size = [pixels.width, pixels.height];
        PromptImage { size, read: Arc::new(move || Ok(pixels.clone())) }
    }

    fn prompt(&self, text: &str, images: &[&str]) -> Prompt {
        Prompt { text: text.into(), images: images.iter().map(|name| self.image(name)).collect() }
    }

    /// Its encoder as a pipeline has it, for texts of so many tokens.
    fn encoder(&self, pipeline: &str, length: usize) -> TextEncoder {
        let spec = spec(pipeline);
        let like = EncoderConfig::Qwen25Vl(Qwen25VlConfig::published());
        let part = PartSource::Folder(self.folder.join("text_encoder"));
        let part = spec.part(part, &like).unwrap();
        let words = golden().join("flat/tokenizer");
        let words = TokenSource::open(&words, length, spec.template).unwrap();
        let vision = PromptVision::open(&spec, &part, &words, &self.folder).unwrap();
        let encoder = TextEncoder::new(spec, part, words, vision);
        encoder.check().unwrap();
        encoder
    }
}

fn spec(pipeline: &str) -> TextEncoderSpec {
    TextEncoderSpec {
        name: "qwen2.5-vl",
        position: 1,
        tokenizer: "tokenizer",
        kind: EncoderKind::Qwen25Vl,
        prompt_length: PromptLength::Index(512),
        template: match pipeline {
            "edit" => QWEN_IMAGE_EDIT_TEMPLATE,
            "plus" => QWEN_IMAGE_EDIT_PLUS_TEMPLATE,
            other => panic!("{other}"),
        },
        is_optional: false,
        adapter_names: EncoderNames { kohya: &["lora_te1"], comfyui: "qwen25_7b" },
        files: QWEN25VL_FILES,
    }
}

const CALLBACKS: EncodeCallbacks<'static> =
    EncodeCallbacks { on_begin: &|_, _| (), tick: &|_| true, on_encoded: &|| true };

fn options(dtype: Dtype, base: Option<Quantisation>, loading: EncoderLoading) -> EncodingOptions {
    EncodingOptions { precision: Precision { base, ..Precision::plain(dtype) }, loading }
}

fn plain(loading: EncoderLoading) -> EncodingOptions {
    options(Dtype::F32, None, loading)
}

const LOADINGS: [EncoderLoading; 2] = [EncoderLoading::Whole, EncoderLoading::Blocks];

fn encode_on(
    device: &Device,
    encoder: &TextEncoder,
    options: EncodingOptions,
    texts: PromptTexts<'_>,
) -> Result<Vec<TextEmbedding>> {
    let mut found = Vec::new();
    encoder.encode(device, options, texts, CALLBACKS, &mut |encoded| {
        found.push(encoded);
        Ok(())
    })?;
    Ok(found)
}

fn encode(
    encoder: &TextEncoder,
    options: EncodingOptions,
    prompts: &[Prompt],
) -> Vec<TextEmbedding> {
    let device = Device::cpu(2, 1 << 26).unwrap();
    encode_on(&device, encoder, options, PromptTexts::Given(prompts)).unwrap()
}

#[test]
fn the_pixels_of_patches_are_those_of_the_reference() {
    for model in MODELS {
        let reference = Reference::open(model);
        let encoder = reference.encoder("plus", 64);
        let vision = encoder.vision.as_ref().unwrap();
        let mut n_compared = 0;
        for name in reference.images() {
            let (pixels, image) = (reference.pixels(name), reference.image(name));
            let (grid, _) = vision.place([pixels.width, pixels.height], 0).unwrap();
            let stored = reference.integers(&format!("grid.{name}"));
            assert_eq!([1, grid.rows as u32, grid.columns as u32][..], stored, "{model} {name}");
            let key = format!("pixels.{name}");
            if reference.tensors.find(&key).is_err() {
                continue;
            }
            n_compared += 1;
            let (expected, found) = (reference.floats(&key), vision.values(&image, grid).unwrap());
            assert_eq!(expected.len(), found.len());
            let apart = expected.iter().zip(&found).map(|(a, b)| (a - b).abs());
            let apart = apart.fold(0.0, f32::max);
            assert!(apart <= 2e-6, "{model} {name}: {apart}");
        }
        assert!(n_compared >= 2);
    }
}

#[test]
fn the_vision_tower_is_that_of_the_reference() {
    for model in MODELS {
        let reference = Reference::open(model);
        let encoder = reference.encoder("plus", 64);
        let vision = encoder.vision.as_ref().unwrap();
        let names: Vec<&str> = reference.images().collect();
        let images = names.iter().map(|name| {
            let image = reference.image(name);
            let (grid, _) = vision.place(image.size, 0).unwrap();
            TowerImage { grid, read: Box::new(move || vision.values(&image, grid)) }
        });
        let images: Vec<TowerImage<'_>> = images.collect();
        let device = Device::cpu(2, 1 << 26).unwrap();
        let tower = vision.tower(&encoder.part, plain(EncoderLoading::Whole), CALLBACKS);
        let found = tower.encode(&device, &images).unwrap();
        assert_eq!(found, tower.encode_by_blocks(&device, &images).unwrap());
        for (name, found) in names.iter().zip(found) {
            let expected = reference.floats(&format!("features.{name}"));
            let difference = relative_error(&expected, &found);
            assert!(difference < 2e-5, "{model} {name}: {difference}");
        }
    }
}

/// As diffusers' pipelines encode them, with positions on three axes.
#[test]
fn prompts_with_images_are_those_of_the_reference() {
    for model in MODELS {
        let reference = Reference::open(model);
        let cases = fs::read(reference.folder.join("cases.json")).unwrap();
        let cases: Vec<Case> = serde_json::from_slice(&cases).unwrap();
        for (at, case) in cases.iter().enumerate() {
            let encoder = reference.encoder(&case.pipeline, 64);
            let images: Vec<&str> = case.images.iter().map(String::as_str).collect();
            let prompt = reference.prompt(&case.prompt, &images);
            let vision = encoder.vision.as_ref().unwrap();
            let placed = encoder.placed_prompt(vision, &prompt).unwrap();
            assert_eq!(placed.ids, reference.integers(&format!("ids.{at}")), "{model} {at}");
            let sizes: Vec<_> = prompt.images.iter().map(|image| image.size).collect();
            let n_text = reference.encoder("plus", 64).tokenizer.encode(&case.prompt).ids.len();
            let n_added = encoder.image_tokens(&sizes).unwrap();
            assert_eq!(placed.ids.len(), n_text + n_added, "{model} {at}");
            for (dtype, allowed) in [(Dtype::F32, 2e-5), (Dtype::Bf16, 7e-2), (Dtype::F16, 1.5e-2)]
            {
                let options = options(dtype, None, EncoderLoading::Whole);
                let found = encode(&encoder, options, std::slice::from_ref(&prompt));
                let expected = reference.floats(&format!("out.{at}"));
                let difference = relative_error(&expected, &found[0].tokens);
                assert!(difference < allowed, "{model} {at} {dtype}: {difference}");
            }
        }
    }
}

#[test]
fn bits_depend_neither_on_blocks_nor_on_other_prompts() {
    let reference = Reference::open("flat");
    let encoder = reference.encoder("plus", 64);
    let kinds: [(&str, &[&str]); 4] = [
        ("fox", &["wide"]),
        ("a fox in the evening", &["scaled_down", "tall"]),
        ("", &[]),
        ("the harbour", &["even", "wide", "scaled_up"]),
    ];
    let kinds = kinds.map(|(text, images)| reference.prompt(text, images));
    let prompts: Vec<Prompt> = kinds.iter().cycle().take(TEXT_BATCH + 3).cloned().collect();
    for (dtype, base) in [
        (Dtype::F32, None),
        (Dtype::Bf16, None),
        (Dtype::F16, None),
        (Dtype::Bf16, Some(Quantisation::Int8)),
    ] {
        let [whole, blocks] =
            LOADINGS.map(|loading| encode(&encoder, options(dtype, base, loading), &prompts));
        assert_eq!(whole, blocks, "{dtype} {base:?}");
        for (alone, together) in kinds.iter().zip(&whole) {
            let options = options(dtype, base, EncoderLoading::Blocks);
            let alone = encode(&encoder, options, std::slice::from_ref(alone));
            assert_eq!(&alone[0], together, "{dtype} {base:?}");
            assert!(together.tokens.iter().all(|value| value.is_finite()));
        }
    }
}

#[test]
fn prompts_with_images_take_as_much_memory_as_planned() {
    for (model, names) in [("flat", &["wide", "tall", "scaled_down"][..]), ("nested", &["wide"])] {
        let reference = Reference::open(model);
        let encoder = reference.encoder("plus", 24);
        // Cut to what is seen, so that it is as long as can be.
        let prompt = reference.prompt(&"fox ".repeat(90), names);
        let images: Vec<_> = prompt.images.iter().map(|image| image.size).collect();
        for (dtype, base) in
            [(Dtype::F32, None), (Dtype::Bf16, None), (Dtype::Bf16, Some(Quantisation::Int8))]
        {
            for n in [1, 3] {
                for loading in LOADINGS {
                    let options = options(dtype, base, loading);
                    let device = Device::meta(DeviceKind::cpu(2), usize::MAX / 2);
                    let longest = PromptTexts::Longest { n, images: &images };
                    let planned = encode_on(&device, &encoder, options, longest).unwrap();
                    let peak = device.usage().extent;
                    let device = Device::cpu(2, peak).unwrap();
                    let prompts = vec![prompt.clone(); n];
                    let prompts = PromptTexts::Given(&prompts);
                    let found = encode_on(&device, &encoder, options, prompts).unwrap();
                    assert_eq!(device.usage().extent, peak, "{model} {dtype} {n} {loading:?}");
                    let length =
                        |all: &[TextEmbedding]| all.iter().map(|e| e.tokens.len()).sum::<usize>();
                    assert_eq!(length(&found), length(&planned));
                }
            }
        }
    }
}

/// Others do not take more than those that a plan is made for, whatever holes they leave in memory.
#[test]
fn smaller_prompts_fit_into_what_is_planned_for_the_largest() {
    let reference = Reference::open("flat");
    let encoder = reference.encoder("plus", 40);
    let long = "fox ".repeat(90);
    let kinds: [(&str, &[&str]); 6] = [
        ("fox", &["wide"]),
        (&long, &["scaled_down", "tall", "wide"]),
        ("a fox in the evening", &["scaled_down", "tall"]),
        ("the old harbour", &[]),
        (&long, &["square"]),
        ("the harbour", &["even", "wide", "scaled_up"]),
    ];
    let kinds = kinds.map(|(text, images)| reference.prompt(text, images));
    let images: Vec<_> = kinds[1].images.iter().map(|image| image.size).collect();
    for n in [6, TEXT_BATCH + 5] {
        let prompts: Vec<Prompt> = kinds.iter().cycle().take(n).cloned().collect();
        for loading in LOADINGS {
            let device = Device::meta(DeviceKind::cpu(2), usize::MAX / 2);
            let longest = PromptTexts::Longest { n, images: &images };
            encode_on(&device, &encoder, plain(loading), longest).unwrap();
            let device = Device::cpu(2, device.usage().extent).unwrap();
            encode_on(&device, &encoder, plain(loading), PromptTexts::Given(&prompts)).unwrap();
        }
    }
}

/// In as much memory as planned.
#[test]
fn a_gpu_encodes_prompts_with_images_as_the_reference() {
    let Some(_in_use) = software_gpu() else { return };
    let reference = Reference::open("flat");
    // The fourth prompt of the reference, which has two images.
    let encoder = reference.encoder("plus", 64);
    let prompt = reference.prompt("the harbour in the evening", &["wide", "tall"]);
    let images: Vec<_> = prompt.images.iter().map(|image| image.size).collect();
    for loading in LOADINGS {
        let device = Device::meta(DeviceKind::gpu(GpuChoice::Software), usize::MAX / 2);
        let longest = PromptTexts::Longest { n: 1, images: &images };
        encode_on(&device, &encoder, plain(loading), longest).unwrap();
        let device = Device::gpu(GpuChoice::Software, device.usage().extent).unwrap();
        let prompts = PromptTexts::Given(std::slice::from_ref(&prompt));
        let found = encode_on(&device, &encoder, plain(loading), prompts).unwrap();
        let difference = relative_error(&reference.floats("out.3"), &found[0].tokens);
        assert!(difference < 2e-5, "{difference}");
    }
}

#[test]
fn what_cannot_be_seen_is_said() {
    let reference = Reference::open("flat");
    let encoder = reference.encoder("edit", 64);
    let refused = |prompt: &Prompt| {
        let device = Device::cpu(2, 1 << 26).unwrap();
        let prompts = PromptTexts::Given(std::slice::from_ref(prompt));
        encode_on(&device, &encoder, plain(EncoderLoading::Whole), prompts).unwrap_err().to_string()
    };
    let mut wrong = reference.prompt("fox", &["wide"]);
    wrong.images[0].size = [48, 24];
    assert_eq!(refused(&wrong), "an image of a prompt has 40 x 24 pixels, expected 48 x 24");
    let twice = reference.prompt("fox <|image_pad|>", &["wide"]);
    assert_eq!(refused(&twice), "a prompt has 1 images and 2 tokens <|image_pad|>");
    assert!(encoder.check_images(1).is_ok());
    let none = encoder.check_images(0).unwrap_err().to_string();
    assert_eq!(none, "a prompt with 0 images, text encoder qwen2.5-vl sees one");
}

/// Files of text encoders without a tower, and folders without a processor.
#[test]
fn a_missing_vision_tower_is_said() {
    let reference = Reference::open("flat");
    let encoder = reference.encoder("plus", 64);
    let (spec, words) = (spec("plus"), &encoder.tokenizer);
    let refused = |part: &PipelinePart<EncoderConfig>, folder: &Path| {
        PromptVision::open(&spec, part, words, folder).err().unwrap().to_string()
    };
    let folder = golden().join("nested/text_encoder");
    let without = refused(&encoder.part, &folder);
    assert!(
        without.contains("lacks preprocessor_config.json and processor_config.json"),
        "{without}"
    );
    let like = EncoderConfig::Qwen25Vl(Qwen25VlConfig::published());
    let text = golden().join("flat/text_encoder");
    let mut part = spec.part(PartSource::Folder(text), &like).unwrap();
    part.catalog.tensors.retain(|tensor| !tensor.name.starts_with("visual."));
    let without = refused(&part, &reference.folder);
    assert!(
        without.contains("prompts have images, text encoder qwen2.5-vl has no vision tower"),
        "{without}"
    );
}

/// Tokens of the context as transformers and the published tokenizer make them, and the peak: block by block takes a tenth.
#[test]
fn published_models_are_planned_without_files() {
    let path = Path::new("folder");
    let encoder = |pipeline: &str| {
        let spec = spec(pipeline);
        let part = spec.meta(path, EncoderConfig::Qwen25Vl(Qwen25VlConfig::published())).unwrap();
        let vision = PromptVision::meta(&spec, &part).unwrap();
        let encoder = TextEncoder::new(spec, part, TokenSource::Meta(64 + 512), vision);
        encoder.check().unwrap();
        encoder
    };
    let (edit, plus) = (encoder("edit"), encoder("plus"));
    assert_eq!(edit.image_tokens(&[[1024, 1024]]).unwrap(), 37 * 37 + 2);
    assert_eq!(plus.image_tokens(&[[384, 384]; 3]).unwrap(), 3 * (14 * 14 + 7));
    assert_eq!(plus.image_tokens(&[]).unwrap(), 0);
    let images = [[1024, 1024]];
    let [whole, blocks] = LOADINGS.map(|loading| {
        let device = Device::meta(DeviceKind::cpu(2), usize::MAX / 2);
        let longest = PromptTexts::Longest { n: 1, images: &images };
        let found =
            encode_on(&device, &edit, options(Dtype::Bf16, None, loading), longest).unwrap();
        assert_eq!(found[0].tokens.len(), (512 + 37 * 37 + 2) * 3584);
        device.usage().extent
    });
    // The language model takes 14.1 GB; the tower is gone before it is loaded.
    assert!((14_141_238_272..14_600_000_000).contains(&whole), "{whole}");
    assert!(10 * blocks < whole, "{blocks} {whole}");
}
