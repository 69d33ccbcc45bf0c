//! FLUX.1 in the forms that people share: GGUF files, fp8 checkpoints with and without scales, and separate files for
//! VAE and text encoders. Made, and computed with the same weights, by diffusers (`tests/golden/flux/files.py`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;
use trainer::model::build::{TensorSpec, tensor_specs};
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::paths::PartPaths;
use trainer::model::encoder::clip::{ClipConfig, ClipTextModel};
use trainer::model::encoder::t5::{T5Config, T5Encoder};
use trainer::model::files::CheckpointLayout;
use trainer::model::tensor_piece::stored_rows;
use trainer::model::vae::{KlVaeConfig, kl};
use weights::gguf::write::{GgufFormat, GgufTensor, GgufValue};

use crate::flux::{VARIANTS, folder};
use crate::models::check;
use crate::pipelines::Reference;
use crate::{hearth, printed, said, text};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/flux/files")
}

/// Fused tensors are cut in every form, and scales belong to the rows of the stored tensor.
#[test]
fn quantised_transformers_are_those_of_the_reference() {
    for (folder, file) in [
        ("gguf", "mixed.gguf"),
        ("fp8", "scaled.safetensors"),
        ("fp8", "rows.safetensors"),
        ("fp8", "cast.safetensors"),
    ] {
        let folder = golden().join(folder);
        let (weights, stem) = (folder.join(file), file.split('.').next().unwrap());
        let reference = folder.join(format!("{stem}.golden.safetensors"));
        let files = ["--weights", text(&weights), "--golden", text(&reference)];
        let page = printed(&[&["verify", text(&folder)][..], &files].concat());
        assert!(page.contains("within tolerance"), "{file}: {page}");
    }
}

/// The tensors of a file, each with its shape; all values are bf16.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

pub fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, TensorView<'_>)| {
        assert_eq!(view.dtype(), safetensors::Dtype::BF16, "{name}");
        (name, (view.shape().to_vec(), view.data().to_vec()))
    };
    // How often statistics were updated is a whole number.
    let is_value = |(name, _): &(String, TensorView<'_>)| !name.ends_with("num_batches_tracked");
    file.tensors().into_iter().filter(is_value).map(tensor).collect()
}

pub fn write(path: &Path, tensors: &Tensors) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let views: Vec<(&String, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, (shape, bytes))| {
            (name, TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
        })
        .collect();
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// The same as GGUF, in f32: each bf16 value is exact there.
pub fn write_gguf(path: &Path, architecture: &str, tensors: &Tensors) {
    let about = [("general.architecture".to_owned(), GgufValue::Text(architecture.into()))];
    let listed = tensors.iter().map(|(name, (shape, _))| GgufTensor {
        name: name.clone(),
        shape: shape.iter().map(|size| *size as u64).collect(),
        format: GgufFormat::F32,
    });
    let values: Vec<&Vec<u8>> = tensors.values().map(|(_, bytes)| bytes).collect();
    let value = |pair: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16);
    weights::gguf::write::write(path, &about, &listed.collect::<Vec<_>>(), &mut |index, range| {
        let (pairs, _) = values[index].as_chunks::<2>();
        Ok(pairs[range.start as usize..range.end as usize].iter().map(value).collect())
    })
    .unwrap();
}

pub fn with_prefix(prefix: &str, tensors: &Tensors) -> Tensors {
    tensors.iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor.clone())).collect()
}

/// A pipeline's parts as other programs share them, by the names of diffusers' converters and the `gguf` package.
struct Parts {
    transformer: Tensors,
    vae: Tensors,
    clip: Tensors,
    t5: Tensors,
    gguf_t5: Tensors,
}

impl Parts {
    fn of(variant: &str) -> Self {
        let names = fs::read_to_string(golden().join("names.json")).unwrap();
        let names: Value = serde_json::from_str(&names).unwrap();
        let at = |part: &str| read(&folder(variant).join(part));
        let renamed = |tensors: &Tensors, names: &Value| -> Tensors {
            let name = |name: &String| names[name].as_str().unwrap().to_owned();
            tensors.iter().map(|(own, tensor)| (name(own), tensor.clone())).collect()
        };
        let t5 = at("text_encoder_2/model.safetensors");
        let mut vae = renamed(&at("vae/diffusion_pytorch_model.safetensors"), &names["vae"]);
        for (name, (shape, _)) in &mut vae {
            // Matrices of attention are 1x1 convolutions there.
            if name.contains(".attn_1.") && shape.len() == 2 {
                shape.extend([1, 1]);
            }
        }
        Self {
            transformer: fused(
                &at("transformer/diffusion_pytorch_model.safetensors"),
                &names["transformer"][variant],
            ),
            vae,
            clip: at("text_encoder/model.safetensors"),
            gguf_t5: renamed(&t5, &names["t5"]),
            t5,
        }
    }

    /// As ComfyUI has them, for it to find: the folder of models, and the checkpoint.
    fn write(&self, folder: &Path) -> PathBuf {
        let checkpoint = folder.join("unet/flux.safetensors");
        write(&checkpoint, &self.transformer);
        write(&folder.join("vae/ae.safetensors"), &self.vae);
        write(&folder.join("clip/clip_l.safetensors"), &self.clip);
        write(&folder.join("text_encoders/t5xxl_fp16.safetensors"), &self.t5);
        checkpoint
    }
}

/// A transformer in the original layout: `places` has, for each of diffusers' tensors, runs of rows of stored ones.
pub fn fused(own: &Tensors, places: &Value) -> Tensors {
    let mut rows: BTreeMap<String, BTreeMap<usize, Vec<u8>>> = BTreeMap::new();
    let mut widths: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (name, runs) in places.as_object().unwrap() {
        let (shape, bytes) = &own[name];
        let mut own_rows = bytes.chunks(bytes.len() / shape[0]);
        for run in runs.as_array().unwrap() {
            let (key, ends) =
                (run[0].as_str().unwrap(), [1, 2].map(|at| run[at].as_u64().unwrap()));
            widths.insert(key.into(), shape[1..].to_vec());
            let stored = rows.entry(key.into()).or_default();
            for row in ends[0]..ends[1] {
                stored.insert(row as usize, own_rows.next().unwrap().to_vec());
            }
        }
    }
    let tensor = |(key, rows): (String, BTreeMap<usize, Vec<u8>>)| {
        let shape = [&[rows.len()], &widths[&key][..]].concat();
        (key, (shape, rows.into_values().flatten().collect()))
    };
    rows.into_iter().map(tensor).collect()
}

/// Tokenizers and configs of a pipeline, without weights and scheduler: tiny models have other heads than published
/// ones, which shapes do not tell.
fn rest(variant: &str, to: &Path) {
    for part in ["tokenizer", "tokenizer_2"] {
        fs::create_dir_all(to.join(part)).unwrap();
        for entry in fs::read_dir(folder(variant).join(part)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, to.join(part).join(path.file_name().unwrap())).unwrap();
        }
    }
    for part in ["transformer", "vae", "text_encoder", "text_encoder_2"] {
        fs::create_dir_all(to.join(part)).unwrap();
        let config = format!("{part}/config.json");
        fs::copy(folder(variant).join(&config), to.join(&config)).unwrap();
    }
}

/// Every form gives the images of diffusers, and the bits of its folder.
#[test]
fn separate_files_gguf_and_whole_checkpoints_give_the_images_of_the_folder() {
    for variant in VARIANTS {
        let (parts, place) = (Parts::of(variant), TempDir::new().unwrap());
        let at = |path: &str| place.path().join(path);
        rest(variant, &at("rest"));
        let found = parts.write(&at("comfyui"));
        let gguf = at("comfyui/unet/flux.gguf");
        write_gguf(&gguf, "flux", &parts.transformer);
        write_gguf(&at("t5.gguf"), "t5encoder", &parts.gguf_t5);
        let (alone, whole) = (at("alone/flux.safetensors"), at("alone/whole.safetensors"));
        write(&alone, &with_prefix("model.diffusion_model.", &parts.transformer));
        let mut all = with_prefix("model.diffusion_model.", &parts.transformer);
        all.extend(with_prefix("vae.", &parts.vae));
        all.extend(with_prefix("text_encoders.clip_l.transformer.", &parts.clip));
        all.extend(with_prefix("text_encoders.t5xxl.transformer.", &parts.t5));
        write(&whole, &all);
        let searched = PartPaths::rest(&at("rest"));
        let named = PartPaths {
            vae: Some(at("comfyui/vae/ae.safetensors")),
            text_encoders: vec![at("t5.gguf"), at("comfyui/clip/clip_l.safetensors")],
            ..searched.clone()
        };
        let mut reference = Reference::open(&folder(variant));
        let expected = reference.images(1.0);
        // The GGUF files have 32 bits, the folder 16: they are multiplied in another order.
        for (path, parts, is_exact) in [
            (&found, &searched, true),
            (&gguf, &searched, false),
            (&alone, &named, false),
            (&whole, &searched, true),
        ] {
            reference.pipeline = Pipeline::open(path, parts).unwrap();
            let images = reference.images(1.0);
            check("image", &reference.recorded, &images);
            assert!(images == expected || !is_exact, "{variant} {}", path.display());
        }
    }
}

/// A file with these tensors and no data: the disk holds nothing of what was never written.
fn write_sparse(path: &Path, specs: &[TensorSpec], layout: &CheckpointLayout<'_>) {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for spec in specs {
        let (pieces, sizes) = ((layout.pieces)(&spec.name), spec.shape.sizes());
        let rows = stored_rows(&pieces, sizes[0]).unwrap();
        if header.contains_key(&pieces[0].key) {
            continue;
        }
        let shape = [&[rows], &sizes[1..]].concat();
        let start = end;
        end += 2 * (spec.shape.elements() / sizes[0] * rows);
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(pieces[0].key.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header].concat()).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(8 + header.len() as u64 + end as u64).unwrap();
}

/// No config lies anywhere: all of them are inferred, and are those of the published folder.
#[test]
fn files_of_the_published_sizes_open_with_tokenizers_alone() {
    let place = TempDir::new().unwrap();
    let at = |path: &str| place.path().join(path);
    let nothing = PartPaths::default();
    let plain = CheckpointLayout::identity();
    let config = KlVaeConfig::published(0.1159, 0.3611);
    let mut specs = tensor_specs(|build| kl::encoder(&config, build)).unwrap();
    specs.extend(tensor_specs(|build| kl::decoder(&config, build)).unwrap());
    write_sparse(&at("vae/ae.safetensors"), &specs, &kl::names::original(&config, ""));
    let clip = ClipConfig::published()[0].clone().without_projection();
    let specs = tensor_specs(|build| ClipTextModel::new(&clip, build)).unwrap();
    write_sparse(&at("clip/clip_l.safetensors"), &specs, &plain);
    let specs = tensor_specs(|build| T5Encoder::new(&T5Config::xxl(), build)).unwrap();
    write_sparse(&at("clip/t5xxl_fp8_e4m3fn.safetensors"), &specs, &plain);
    rest("dev", &at("tokenizers"));
    for part in ["transformer", "vae", "text_encoder", "text_encoder_2"] {
        fs::remove_dir_all(at("tokenizers").join(part)).unwrap();
    }
    for name in ["FLUX.1-dev", "FLUX.1-schnell"] {
        let expected = Pipeline::open_or_published(Path::new(name), &nothing).unwrap();
        let config = &expected.transformer.config;
        let path = at(&format!("unet/{name}.safetensors"));
        write_sparse(&path, &config.tensor_specs().unwrap(), &config.original(""));
        let got = Pipeline::open(&path, &PartPaths::rest(&at("tokenizers"))).unwrap();
        let settings = format!("{:?}", got.transformer.config);
        let settings = settings.replace("out_channels: Some(64)", "out_channels: None");
        assert_eq!(settings, format!("{config:?}"));
        assert_eq!(got.vae.statistics(), expected.vae.statistics());
        assert_eq!(got.latent_shape([1024, 768], 1), expected.latent_shape([1024, 768], 1));
        let lengths = |pipeline: &Pipeline| pipeline.encoders.lengths().last();
        assert_eq!(lengths(&got), lengths(&expected));
        assert_eq!(got.schedule.sigmas(4096, 28), expected.schedule.sigmas(4096, 28));
    }
}

#[test]
fn all_missing_parts_are_named_with_the_files_that_were_looked_for() {
    let (parts, place) = (Parts::of("schnell"), TempDir::new().unwrap());
    let checkpoint = parts.write(&place.path().join("comfyui"));
    let says = |arguments: &[&str], expected: &[&str]| {
        let words = said(&hearth(&[&["sample", "--prompt", "fox"], arguments].concat()));
        for expected in expected {
            assert!(words.contains(expected), "{arguments:?}: {words}");
        }
    };
    says(
        &["--base", text(&checkpoint)],
        &["missing: a folder with tokenizer/, tokenizer_2/ (--rest)", "hint: name them with --vae"],
    );
    for name in ["vae/ae.safetensors", "clip/clip_l.safetensors"] {
        fs::remove_file(place.path().join("comfyui").join(name)).unwrap();
    }
    says(
        &["--base", text(&checkpoint)],
        &[
            "a VAE (ae.safetensors, ae.sft in ., ../vae)",
            "the text encoder clip-l (clip_l.safetensors in ., ../text_encoders, ../clip)",
            "a folder with tokenizer/",
        ],
    );
    let rest = place.path().join("rest");
    self::rest("schnell", &rest);
    let encoder = place.path().join("comfyui/text_encoders/t5xxl_fp16.safetensors");
    let (base, encoder) = (["--base", text(&checkpoint), "--rest", text(&rest)], text(&encoder));
    says(
        &[&base[..], &["--text-encoder", encoder, "--text-encoder", encoder]].concat(),
        &[
            "is one too many: a FLUX.1 schnell model takes clip_l.safetensors, t5xxl_fp16.safetensors",
        ],
    );
    says(
        &[&base[..], &["--text-encoder", text(&checkpoint)]].concat(),
        &["is of no kind that hearth knows: a FLUX.1"],
    );
    let ours = folder("schnell").join("transformer/diffusion_pytorch_model.safetensors");
    let files = ["--vae", text(&ours), "--text-encoder", encoder];
    says(&[&base[..], &files].concat(), &["clip-l (clip_l.safetensors"]);
    let clip = place.path().join("clip.safetensors");
    write(&clip, &parts.clip);
    let files = ["--vae", text(&ours), "--text-encoder", encoder, "--text-encoder", text(&clip)];
    fs::remove_dir_all(rest.join("vae")).unwrap();
    says(&[&base[..], &files].concat(), &["no VAE in the original layout in", "ae.safetensors"]);
}

/// Adapters, plans and runs on separate files, by the keys of a job and by flags.
#[test]
fn separate_files_are_sampled_planned_trained_and_merged() {
    let (parts, place) = (Parts::of("dev"), TempDir::new().unwrap());
    let at = |path: &str| place.path().join(path).to_str().unwrap().to_owned();
    rest("dev", &place.path().join("rest"));
    let checkpoint = parts.write(&place.path().join("comfyui"));
    let lora = folder("dev").join("lora.safetensors");
    let (vae, clip) = (at("comfyui/vae/ae.safetensors"), at("comfyui/clip/clip_l.safetensors"));
    let (rest, t5) = (at("rest"), at("comfyui/text_encoders/t5xxl_fp16.safetensors"));
    let base = ["--base", text(&checkpoint), "--rest", &rest, "--vae", &vae];
    let encoders = ["--text-encoder", &clip, "--text-encoder", &t5];
    let flags = [&base[..], &encoders].concat();
    let out = at("fox.png");
    let sample = ["sample", "--prompt", "fox", "--size", "64", "--steps", "1", "--out", &out];
    printed(&[&sample[..], &flags].concat());
    assert!(Path::new(&out).exists());
    let merge = ["export", text(&lora), "--merge", "--json", "--out"];
    let merged = printed(&[&merge[..], &[&at("merged")], &flags].concat());
    assert!(merged.contains("changed"), "{merged}");
    let job = [
        format!("base.path='{}'", text(&checkpoint)),
        format!("base.rest='{rest}'"),
        format!("base.vae='{vae}'"),
        format!("base.text_encoders=['{clip}', '{t5}']"),
        "data.draw=neon".into(),
        "data.draw_count=2".into(),
        "data.resolution=64".into(),
        "data.bucket_step=16".into(),
        "train.steps=2".into(),
        "adapter.rank=2".into(),
    ];
    let job: Vec<&str> = job.iter().flat_map(|key| ["--set", key]).collect();
    let (images, run) = (at("images"), at("run"));
    let places = ["--images", &images, "--out", &run];
    printed(&[&["plan"][..], &places, &job].concat());
    let page = printed(&[&["train"][..], &places, &job].concat());
    assert!(page.contains("--text-encoder") && page.contains("--vae"), "{page}");
    let exported = Path::new(&run).join("adapter");
    assert!(exported.exists());
}

/// A merge into weights that have a scale, or into GGUF, is refused with a remedy.
#[test]
fn merges_into_quantised_checkpoints_are_refused() {
    let (parts, place) = (Parts::of("dev"), TempDir::new().unwrap());
    rest("dev", &place.path().join("rest"));
    parts.write(&place.path().join("comfyui"));
    let gguf = place.path().join("comfyui/unet/flux.gguf");
    write_gguf(&gguf, "flux", &parts.transformer);
    let mut scaled = parts.transformer.clone();
    let one = (Vec::new(), vec![0x80, 0x3f]);
    let layers = scaled.keys().filter_map(|name| name.strip_suffix(".weight"));
    let scales: Tensors =
        layers.map(|layer| (format!("{layer}.scale_weight"), one.clone())).collect();
    scaled.extend(scales);
    let fp8 = place.path().join("comfyui/unet/scaled.safetensors");
    write(&fp8, &scaled);
    let (lora, rest) = (folder("dev").join("lora.safetensors"), place.path().join("rest"));
    for (base, expected) in [(gguf, "flux.gguf"), (fp8, ".scale_weight")] {
        let out = place.path().join("out");
        let arguments = ["export", text(&lora), "--merge", "--out", text(&out)];
        let base = ["--base", text(&base), "--rest", text(&rest)];
        let words = said(&hearth(&[&arguments[..], &base].concat()));
        let found = words.contains("cannot merge into") && words.contains(expected);
        assert!(found && words.contains("hint:"), "{words}");
    }
}
