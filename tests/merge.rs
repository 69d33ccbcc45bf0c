//! `export --merge`: models that need no adapter, against drawings of diffusers with one, and what
//! is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use compute::Device;
use serde_json::Value;
use tempfile::TempDir;
use trainer::export::merge::AdapterMerge;
use trainer::model::adapter::LayerWeights;
use trainer::model::adapter::read::Component;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::paths::PartPaths;
use trainer::sample::SampleJob;
use trainer::verify::relative_error;
use weights::copy::{CopyOptions, CopyTarget};
use weights::{Catalog, FileDtype, TensorEncoding};

use crate::models::{LIMIT, at, check, copy, golden, recorded, request};
use crate::{hearth, printed, said, text};

fn draw(pipeline: &Pipeline) -> Vec<f32> {
    let device = Device::cpu(2, LIMIT).unwrap();
    let job = SampleJob::new(pipeline, request()).unwrap();
    let plan = job.plan(device.kind(), LIMIT).unwrap();
    let clips = job.run(&device, &plan, &|_| true).unwrap();
    clips.into_iter().flat_map(|clip| clip.frames).flat_map(|frame| frame.values).collect()
}

/// What `export --merge` says of a base and the adapter that was trained for it.
fn merged(base: &str, rest: &[&str], out: &Path) -> Value {
    let adapter = at("pipeline/lora.safetensors");
    let common = ["export", &adapter, "--base", base, "--merge", "--json", "--out", text(out)];
    serde_json::from_str(&printed(&[&common, rest].concat())).unwrap()
}

/// The files of a folder, relative to it, in order.
fn files(folder: &Path) -> Vec<String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            files.extend(self::files(&path).iter().map(|inner| format!("{name}/{inner}")));
        } else {
            files.push(name);
        }
    }
    files.sort();
    files
}

#[test]
fn a_merged_folder_draws_what_the_reference_drew_with_the_adapter() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("new/merged");
    let row = merged(&at("pipeline"), &[], &out);
    assert_eq!(row["changed"], 8, "{row}");
    assert_eq!(row["left_out"], serde_json::json!(["golden.safetensors", "lora.safetensors"]));
    assert!(row["worst_steps"].as_f64().unwrap() < 0.501, "{row}");
    let mut expected = files(&golden().join("pipeline"));
    expected.retain(|file| !["golden.safetensors", "lora.safetensors"].contains(&file.as_str()));
    assert_eq!(files(&out), expected);
    for file in expected.iter().filter(|file| !file.starts_with("transformer/diffusion")) {
        assert_eq!(
            fs::read(out.join(file)).unwrap(),
            fs::read(golden().join("pipeline").join(file)).unwrap(),
            "{file}"
        );
    }
    near_reference(&draw(&Pipeline::open(&out, &PartPaths::default()).unwrap()));
}

/// The base's weights are in f16, and so are the merged ones: rounded once more than the reference's
/// were, which computed in f32. Twice what was measured.
const ROUNDED: f64 = 7e-4;

fn near_reference(got: &[f32]) {
    let recorded = recorded();
    let (with, without) = (&recorded["out.image_lora"], &recorded["out.image"]);
    let (apart, change) = (relative_error(with, got), relative_error(with, without));
    assert!(apart < ROUNDED && change > 10.0 * apart, "{apart:e} of {change:e}");
}

/// The base with some of its weights in f32.
fn f32_base() -> TempDir {
    let base = copy();
    for file in ["transformer/diffusion_pytorch_model", "text_encoder/model"] {
        let path = base.path().join(format!("{file}.safetensors"));
        let how = CopyOptions {
            target: CopyTarget::File(&path),
            dtype: Some(FileDtype::F32),
            checksum: false,
        };
        weights::copy::copy(&Catalog::open(&path).unwrap(), &how, &|_| true).unwrap();
    }
    base
}

#[test]
fn without_rounding_a_merged_folder_draws_exactly_that() {
    let (base, folder) = (f32_base(), TempDir::new().unwrap());
    let out = folder.path().join("merged");
    merged(text(base.path()), &[], &out);
    check("image_lora", &recorded(), &draw(&Pipeline::open(&out, &PartPaths::default()).unwrap()));
}

#[test]
fn a_merged_checkpoint_keeps_its_layout_and_draws_the_same() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("merged");
    let (base, rest) = (at("single/pipeline.safetensors"), at("pipeline"));
    let row = merged(&base, &["--rest", &rest], &out);
    // q, k and v of both blocks lie in one matrix each.
    assert_eq!(row["changed"], 4, "{row}");
    assert_eq!(files(&out), ["pipeline.safetensors"]);
    let pipeline =
        Pipeline::open(&out.join("pipeline.safetensors"), &PartPaths::rest(Path::new(&rest)));
    near_reference(&draw(&pipeline.unwrap()));
}

/// The base with its transformer in shards of bf16, and another precision of it beside.
fn sharded_base() -> TempDir {
    let base = copy();
    let transformer = base.path().join("transformer");
    let whole = transformer.join("diffusion_pytorch_model.safetensors");
    let target = CopyTarget::Shards {
        folder: &transformer,
        stem: "diffusion_pytorch_model",
        limit: 100_000,
    };
    let how = CopyOptions { target, dtype: Some(FileDtype::Bf16), checksum: false };
    weights::copy::copy(&Catalog::open(&whole).unwrap(), &how, &|_| true).unwrap();
    fs::rename(whole, transformer.join("diffusion_pytorch_model.fp16.safetensors")).unwrap();
    base
}

#[test]
fn shards_and_formats_stay_as_they_are() {
    let (base, folder) = (sharded_base(), TempDir::new().unwrap());
    let out = folder.path().join("merged");
    let row = merged(text(base.path()), &[], &out);
    assert_eq!(row["changed"], 8, "{row}");
    assert!(row["left_out"].to_string().contains("model.fp16.safetensors"), "{row}");
    let mut expected = files(&base.path().join("transformer"));
    expected.retain(|file| !file.contains("fp16"));
    assert!(expected.len() > 3, "{expected:?}");
    assert_eq!(files(&out.join("transformer")), expected);
    let index = out.join("transformer/diffusion_pytorch_model.safetensors.index.json");
    let catalog = Catalog::open(&index).unwrap();
    assert!(
        catalog
            .tensors
            .iter()
            .all(|tensor| tensor.encoding == TensorEncoding::Plain(FileDtype::Bf16))
    );
}

fn given(sizes: [usize; 2], magnitude: Option<f32>) -> LayerWeights {
    let numbers = |count: usize, by: f32| (0..count).map(|i| 0.2 * (i as f32 * by).sin()).collect();
    let [outputs, inputs] = sizes;
    let magnitude = magnitude.map(|size| vec![size; outputs]);
    let (down, up) = (numbers(2 * inputs, 0.3), numbers(outputs * 2, 0.7));
    LayerWeights::lora(2, 3.0, down, up).with_magnitude(magnitude)
}

#[test]
fn magnitudes_and_text_encoders_are_merged_too() {
    let (base, folder) = (f32_base(), TempDir::new().unwrap());
    let mut pipeline = Pipeline::open(base.path(), &PartPaths::default()).unwrap();
    let layers = |name: &str, magnitude| {
        let key = format!("{name}.weight");
        let part = if name.starts_with("text_model") {
            "text_encoder/model"
        } else {
            "transformer/diffusion_pytorch_model"
        };
        let file = golden().join(format!("pipeline/{part}.safetensors"));
        let shape = Catalog::open(&file).unwrap().find(&key).unwrap().shape.clone();
        let sizes = [shape[0] as usize, shape[1] as usize];
        BTreeMap::from([(name.to_owned(), given(sizes, magnitude))])
    };
    pipeline.set_adapter(vec![
        (Component::Transformer, layers("transformer_blocks.0.attn.to_k", Some(1.5))),
        (Component::TextEncoder(1), layers("text_model.encoder.layers.0.self_attn.q_proj", None)),
    ]);
    let beside = draw(&pipeline);
    let out = folder.path().join("merged");
    let merged = AdapterMerge::plan(&pipeline).unwrap().run(&out, &|_| true).unwrap();
    assert_eq!(merged.n_changed, 2);
    let within = draw(&Pipeline::open(&out, &PartPaths::default()).unwrap());
    let (apart, change) =
        (relative_error(&beside, &within), relative_error(&beside, &recorded()["out.image"]));
    assert!(apart < 2e-5 && change > 100.0 * apart, "{apart:e} of {change:e}");
}

#[test]
fn what_cannot_be_merged_leaves_nothing_behind() {
    let folder = TempDir::new().unwrap();
    let refused = |base: &str, out: &Path, rest: &[&str]| {
        let adapter = at("pipeline/lora.safetensors");
        let common = ["export", &adapter, "--base", base, "--merge", "--out", text(out)];
        let output = hearth(&[&common, rest].concat());
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("\nhint: "), "{}", said(&output));
        said(&output)
    };
    let out = folder.path().join("merged");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("mine.txt"), "mine").unwrap();
    let words = refused(&at("pipeline"), &out, &[]);
    assert!(words.contains("--out exists and is not empty"), "{words}");
    assert_eq!(files(folder.path()), ["merged/mine.txt"]);

    let base = copy();
    let before = files(base.path());
    let words = refused(text(base.path()), &base.path().join("merged"), &[]);
    assert!(words.contains("--out lies in the base"), "{words}");
    assert_eq!(files(base.path()), before);
}

#[test]
fn an_interrupted_merge_and_one_that_overflows_leave_nothing_behind() {
    let folder = TempDir::new().unwrap();
    let out: PathBuf = folder.path().join("merged");
    let mut pipeline = Pipeline::open(&golden().join("pipeline"), &PartPaths::default()).unwrap();
    pipeline.add_adapter(&golden().join("pipeline/lora.safetensors")).unwrap();
    let error = AdapterMerge::plan(&pipeline).unwrap().run(&out, &|_| false).unwrap_err();
    assert!(error.to_string().contains("interrupted"), "{error}");

    let (component, mut layers) = pipeline.adapter().remove(0);
    for given in layers.values_mut() {
        given.alpha = f32::MAX;
    }
    pipeline.set_adapter(vec![(component, layers)]);
    let error = AdapterMerge::plan(&pipeline).unwrap().run(&out, &|_| true).unwrap_err();
    assert!(error.to_string().contains("ULP of"), "{error}");
    assert!(files(folder.path()).is_empty());
}
