//! FLUX.1: adapters of other programs (`tests/golden/flux/adapters.py`), merging.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use trainer::export::export;
use trainer::model::adapter::read::Component;
use trainer::model::adapter::{AdapterFormat, LayerWeights};
use trainer::model::component;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::paths::PartPaths;
use trainer::model::tensor_piece::stored_rows;
use weights::Catalog;
use weights::load::load_f32;

use crate::models::{check, copy_folder};
use crate::pipelines::Reference;
use crate::{printed, text};

pub const VARIANTS: [&str; 2] = ["dev", "schnell"];

pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/flux")
}

pub fn folder(variant: &str) -> PathBuf {
    golden().join(variant).join("pipeline")
}

/// A copy of FLUX.1 dev with prompts of few tokens, for training in little time.
pub fn with_short_prompts(to: &Path) {
    copy_folder(&folder("dev"), to);
    let path = to.join("model_index.json");
    let index = fs::read_to_string(&path).unwrap();
    let length = format!("{{\n \"max_sequence_length\": {SHORT_PROMPT},");
    fs::write(path, index.replacen('{', &length, 1)).unwrap();
}

/// As `tests/golden/flux/train/generate.py` has it.
const SHORT_PROMPT: usize = 24;

/// One A for q, k and v, as kohya and `XLabs` train them; layers outside of blocks; halves the other way round.
#[test]
fn adapters_of_all_programs_are_the_same() {
    let transformer = folder("schnell").join("transformer");
    let at = |file: &str| golden().join(format!("adapters/{file}.safetensors"));
    for (file, expected) in [
        ("kohya", "golden"),
        ("comfyui", "golden"),
        ("comfyui_peft", "golden"),
        ("fal", "golden"),
        ("ai_toolkit", "golden"),
        ("onetrainer", "golden"),
        ("onetrainer_new", "golden"),
        ("lycoris", "golden"),
        ("xlabs", "golden"),
        ("kohya_outer", "golden_outer"),
    ] {
        let (adapter, expected) = (at(file), at(expected));
        let verify = ["verify", text(&transformer), "--golden", text(&expected)];
        let page = printed(&[&verify[..], &["--adapter", text(&adapter)]].concat());
        assert!(page.contains("all 2 tensors are within tolerance"), "{file}: {page}");
    }
}

const FORMATS: [AdapterFormat; 4] =
    [AdapterFormat::Comfyui, AdapterFormat::Kohya, AdapterFormat::Peft, AdapterFormat::Diffusers];

#[test]
fn an_adapter_goes_from_any_program_to_any_other() {
    let out = tempfile::tempdir().unwrap();
    let mut reference = Reference::open(&folder("schnell"));
    reference.pipeline.add_adapter(&reference.folder.join("lora.safetensors")).unwrap();
    // Each is made of the one before, so that all are read once and written once.
    for format in FORMATS {
        let done = export(&mut reference.pipeline, format, out.path(), "x").unwrap();
        assert_eq!(done.n_layers, 17, "{format:?}");
        reference.pipeline.add_adapter(&done.path).unwrap();
        check("image_lora", &reference.recorded, &reference.images(1.0));
    }
}

fn lora(outputs: usize, inputs: usize) -> LayerWeights {
    let values = |count: usize, by: f32| (0..count).map(|i| (i as f32 * by).sin()).collect();
    let (down, up) = (values(2 * inputs, 0.3), values(outputs * 2, 0.7));
    LayerWeights::lora(2, 3.0, down, up)
}

/// T5 is the second text encoder of FLUX.1, and kohya counts it as the third.
#[test]
fn text_encoders_have_the_names_of_other_programs() {
    let out = tempfile::tempdir().unwrap();
    let mut pipeline = Pipeline::open(&folder("schnell"), &PartPaths::default()).unwrap();
    let one =
        |name: &str, outputs, inputs| BTreeMap::from([(name.to_owned(), lora(outputs, inputs))]);
    let parts = vec![
        (Component::TextEncoder(1), one("text_model.encoder.layers.1.mlp.fc1", 48, 24)),
        (Component::TextEncoder(2), one("encoder.block.0.layer.0.SelfAttention.q", 32, 40)),
    ];
    pipeline.set_adapter(parts.clone());
    let mut stems = |format| {
        let done = export(&mut pipeline, format, out.path(), "x").unwrap();
        let tensors = Catalog::open(&done.path).unwrap().tensors;
        let alphas = tensors.iter().filter_map(|tensor| tensor.name.strip_suffix(".alpha"));
        (done.path, alphas.map(str::to_owned).collect::<Vec<_>>())
    };
    let (kohya, names) = stems(AdapterFormat::Kohya);
    let t5 = "encoder_block_0_layer_0_SelfAttention_q";
    let clip = "lora_te1_text_model_encoder_layers_1_mlp_fc1";
    assert_eq!(names, [clip.to_owned(), format!("lora_te3_{t5}")]);
    let (_, names) = stems(AdapterFormat::Comfyui);
    let clip = "text_encoders.clip_l.transformer.text_model.encoder.layers.1.mlp.fc1";
    let t5 = "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q";
    assert_eq!(names, [clip, t5]);
    // `OneTrainer` calls T5 the second; the header of a file is text of the same length.
    let bytes = fs::read(&kohya).unwrap();
    let mut renamed = bytes.clone();
    for at in 0..bytes.len() - 8 {
        if bytes[at..].starts_with(b"lora_te3") {
            renamed[at + 7] = b'2';
        }
    }
    assert_ne!(renamed, bytes);
    fs::write(&kohya, renamed).unwrap();
    let mut again = Pipeline::open(&folder("schnell"), &PartPaths::default()).unwrap();
    again.add_adapter(&kohya).unwrap();
    assert_eq!(again.adapter()[1..], parts);
}

/// The transformer of a pipeline under the names of the original checkpoints, in f32.
fn save_original(pipeline: &Pipeline, path: &Path) {
    let layout = pipeline.transformer.config.original("");
    let catalog = &component::weights(&pipeline.path.join("transformer")).unwrap();
    let mut stored: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for tensor in &catalog.tensors {
        let pieces = (layout.pieces)(&tensor.name);
        let values = load_f32(catalog, tensor, 0..tensor.numel()).unwrap();
        let mut shape: Vec<usize> = tensor.shape.iter().map(|size| *size as usize).collect();
        shape[0] = stored_rows(&pieces, shape[0]).unwrap();
        let width: usize = 4 * tensor.numel() as usize / tensor.shape[0] as usize;
        let mut rows = values.into_iter().flat_map(f32::to_le_bytes);
        for piece in pieces {
            let all = stored
                .entry(piece.key.clone())
                .or_insert_with(|| (shape.clone(), vec![0; shape[0] * width]));
            let range = piece.rows(shape[0]);
            all.1[range.start * width..range.end * width].fill_with(|| rows.next().unwrap());
        }
    }
    let views = stored.iter().map(|(name, (shape, bytes))| {
        (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// q, k and v lie in one matrix there, with the feed-forward of single-stream blocks.
#[test]
fn an_adapter_is_merged_into_a_checkpoint_of_the_original_layout() {
    let out = tempfile::tempdir().unwrap();
    let mut reference = Reference::open(&folder("schnell"));
    let base = out.path().join("flux.safetensors");
    save_original(&reference.pipeline, &base);
    let (adapter, merged) = (reference.folder.join("lora.safetensors"), out.path().join("merged"));
    let rest = ["--rest", text(&reference.folder), "--merge", "--out", text(&merged)];
    printed(&[&["export", text(&adapter), "--base", text(&base)], &rest[..]].concat());
    let path = merged.join("flux.safetensors");
    reference.pipeline = Pipeline::open(&path, &PartPaths::rest(&reference.folder)).unwrap();
    check("image_lora", &reference.recorded, &reference.images(1.0));
}
