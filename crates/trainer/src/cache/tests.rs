//! The cache on a tiny model with random weights: against what diffusers makes of the same image
//! and texts, and against everything that happens to files.

mod masks;
mod sets;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use compute::{Device, DeviceKind, Dtype};
use tempfile::TempDir;
use weights::load::load_f32;
use weights::{Catalog, WeightsError};

use super::*;
use crate::config::RawConfig;
use crate::data::{ProblemKind, SampleSize};
use crate::model::diffusion::condition::Condition;
use crate::model::diffusion::paths::PartPaths;
use crate::task::prefetch::Prefetch;
use crate::task::traits::TrainBatch;
use crate::train::diffusion::batch::{BatchReader, EncodedSample};

const LIMIT: usize = 1 << 28;

/// For small images.
const DECODING: usize = 8 << 20;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
}

fn recorded(path: &str, name: &str) -> Vec<f32> {
    let catalog = Catalog::open(&golden(path)).unwrap();
    let tensor = catalog.find(name).unwrap();
    load_f32(&catalog, tensor, 0..tensor.numel()).unwrap()
}

/// A folder of images with captions and a place for the cache.
struct Place {
    folder: TempDir,
    pipeline: Pipeline,
    data: DataSets,
    precision: Precision,
    extra: Vec<String>,
}

impl Place {
    /// So many images of three shapes, no two alike.
    fn new(n: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("images")).unwrap();
        let pipeline = Pipeline::open(&golden("sd3/pipeline"), &PartPaths::default()).unwrap();
        let data = data(folder.path(), &[]);
        let precision = Precision::plain(Dtype::F32);
        let place = Self { folder, pipeline, data, precision, extra: Vec::new() };
        (0..n).for_each(|index| place.put(&format!("{index}.png"), index));
        place
    }

    fn with(n: usize, settings: &[&str]) -> Self {
        let place = Self::new(n);
        let data = data(place.folder.path(), settings);
        Self { data, ..place }
    }

    fn put(&self, name: &str, index: usize) {
        let [width, height] = [[64, 64], [96, 64], [64, 100]][index % 3];
        let rgb = |at: usize| ((at * (index + 3)) ^ (at >> 5)) as u8;
        let pixels: Vec<u8> = (0..width * height * 3).map(rgb).collect();
        let path = self.image(name);
        let file = fs::File::create(&path).unwrap();
        let mut encoder = png::Encoder::new(file, width as u32, height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        fs::write(path.with_extension("txt"), format!("image, number {index}, of many")).unwrap();
    }

    fn image(&self, name: &str) -> PathBuf {
        self.folder.path().join("images").join(name)
    }

    fn caching(&self) -> Result<CacheBuilder<'_>> {
        let request = CacheRequest {
            data: &self.data,
            seed: 7,
            precision: self.precision,
            folder: self.folder.path().join("cache"),
            samples: SampleTexts { prompts: self.extra.clone(), ..SampleTexts::default() },
        };
        CacheBuilder::new(&self.pipeline, request, &|_| true)
    }

    fn missing(&self) -> (usize, usize) {
        let MissingEntries { images, texts } = self.caching().unwrap().missing();
        (images, texts)
    }

    fn index(&self) -> CacheIndex {
        let device = Device::cpu(2, LIMIT).unwrap();
        self.caching().unwrap().run(&device, EncoderLoading::Whole, DECODING, &|_| true).unwrap()
    }

    /// Files of the cache whose names end so.
    fn files(&self, suffix: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.folder.path().join("cache/v2")).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.to_str().unwrap().ends_with(suffix)).collect()
    }
}

fn data(folder: &Path, settings: &[&str]) -> DataSets {
    let mut raw = RawConfig::empty();
    let images = format!("data.images={}", folder.join("images").display());
    let fixed = ["base.path=x", &images, "data.resolution=64", "data.bucket_step=16"];
    fixed.iter().chain(settings).for_each(|argument| raw.set(argument).unwrap());
    raw.resolve().unwrap().data.images().unwrap().0.clone()
}

fn says<T>(result: Result<T>, parts: &[&str]) {
    let error = result.map(drop).unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
}

fn assert_near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0_f32, |most, number| most.max(number.abs()));
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 2e-5 * largest, "{found} instead of {expected}");
    }
}

#[test]
fn latents_are_those_of_the_reference() {
    let place = Place::with(0, &["data.flip=true"]);
    fs::copy(golden("cache/image.png"), place.image("a.png")).unwrap();
    let index = place.index();
    let [sample] = &index.train[..] else { panic!("one image") };
    for (is_mirrored, prefix) in [(false, ""), (true, "mirrored.")] {
        let CachedLatents { mean, std: deviation, shape } =
            index.latents(sample, is_mirrored).unwrap();
        let recorded = |name| recorded("cache/latents.safetensors", &format!("{prefix}{name}"));
        assert_near(&mean, &recorded("mean"));
        assert_near(&deviation, &recorded("deviation"));
        assert_eq!(shape.sizes(), [16, 8, 8]);
    }
}

#[test]
fn prompts_are_those_of_the_reference() {
    let settings = fs::read(golden("sd3/pipeline/golden.json")).unwrap();
    let settings: serde_json::Value = serde_json::from_slice(&settings).unwrap();
    let text = settings["prompts"][0].as_str().unwrap().to_owned();
    let mut place = Place::new(1);
    place.extra = vec![text.clone()];
    let index = place.index();
    let path = "sd3/pipeline/golden.safetensors";
    for (text, tokens, pooled) in [
        (&*text, "out.prompt_embeds", "out.pooled_prompt_embeds"),
        ("", "out.negative_prompt_embeds", "out.negative_pooled_prompt_embeds"),
    ] {
        let prompt = index.condition(&text.into()).unwrap();
        for (named, theirs) in prompt.0.iter().zip([tokens, pooled]) {
            assert_near(&named.values, &recorded(path, theirs)[..named.values.len()]);
        }
    }
    says(index.condition(&"never seen".into()), &["\"never seen\" is not in the cache"]);
}

#[test]
fn what_is_there_is_not_encoded_again() {
    let place = Place::with(4, &["data.shuffle_tags=true", "data.flip=true"]);
    let (images, texts) = place.missing();
    assert_eq!(images, 4);
    assert!(texts > 4, "{texts} texts");
    let first = place.index();
    let again = place.caching().unwrap();
    assert_eq!(again.missing(), MissingEntries { images: 0, texts: 0 });
    assert_eq!(again.plan(DeviceKind::cpu(2), 0, None).unwrap().phases, []);
    // No room at all: nothing is loaded.
    let again = again
        .run(&Device::cpu(1, 0).unwrap(), EncoderLoading::Whole, DECODING, &|event| {
            panic!("{event:?}")
        })
        .unwrap();
    for (a, b) in first.train.iter().zip(&again.train) {
        assert_eq!(first.latents(a, true).unwrap(), again.latents(b, true).unwrap());
        assert_eq!(
            first.condition(&a.caption.as_str().into()).unwrap(),
            again.condition(&b.caption.as_str().into()).unwrap()
        );
    }
    place.put("4.png", 4);
    assert_eq!(place.missing().0, 1);
    fs::copy(place.image("0.png"), place.image("twin.png")).unwrap();
    assert_eq!(place.missing().0, 1, "the same image under another name");
}

#[test]
fn whatever_changes_the_numbers_changes_the_address() {
    let mut place = Place::new(2);
    place.index();
    let mut check = |settings: &[&str], expected: (usize, usize)| {
        place.data = data(place.folder.path(), settings);
        assert_eq!(place.missing(), expected, "{settings:?}");
    };
    check(&[], (0, 0));
    check(&["data.repeats=3", "data.caption_dropout=0.5"], (0, 0));
    check(&["data.flip=true"], (2, 0));
    check(&["data.crop=random"], (2, 0));
    check(&["data.resolution=96"], (2, 0));
    check(&["data.trigger=sks"], (0, 2));
    place.data = data(place.folder.path(), &[]);
    place.precision = Precision::plain(Dtype::Bf16);
    assert_eq!(place.missing(), (0, 3));
    // Other weights under the same names.
    let other = place.folder.path().join("model");
    copy_folder(&golden("sd3/pipeline"), &other);
    place.precision = Precision::plain(Dtype::F32);
    place.pipeline = Pipeline::open(&other, &PartPaths::default()).unwrap();
    assert_eq!(place.missing(), (0, 0), "the same model elsewhere");
    let settings = other.join("vae/config.json");
    let text = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, text.replace("\"norm_num_groups\": 2", "\"norm_num_groups\": 1")).unwrap();
    place.pipeline = Pipeline::open(&other, &PartPaths::default()).unwrap();
    assert_eq!(place.missing(), (2, 0));
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let target = to.join(entry.file_name().unwrap());
        if entry.is_dir() {
            copy_folder(&entry, &target);
        } else {
            fs::copy(&entry, target).unwrap();
        }
    }
}

type Harm = fn(&mut Vec<u8>);

#[test]
fn damage_is_found_and_repaired() {
    let place = Place::new(3);
    let before = place.index();
    let expected = before.latents(&before.train[1], false).unwrap();
    let harms: [Harm; 4] = [
        |bytes| *bytes.last_mut().unwrap() ^= 1,
        |bytes| bytes[20] ^= 1,
        |bytes| bytes.truncate(bytes.len() / 2),
        Vec::clear,
    ];
    for harm in harms {
        // One of images, one of texts.
        let [shard, _] = &place.files(".safetensors")[..] else { panic!("two shards") };
        let mut bytes = fs::read(shard).unwrap();
        harm(&mut bytes);
        fs::write(shard, bytes).unwrap();
        let index = place.index();
        let said: Vec<String> =
            index.problems.iter().map(|problem| problem.kind.to_string()).collect();
        assert!(said.len() == 1 && said[0].contains("checksum"), "{said:?}");
        assert_eq!(index.latents(&index.train[1], false).unwrap(), expected);
        assert_eq!(place.index().problems, []);
    }
    assert!(!place.files(".damaged").is_empty());
}

/// A bit that a disk lost leaves the file's time as it is, and may be lost while a run goes on.
#[test]
fn damage_that_shows_late_is_an_error_and_mended_by_the_next_start() {
    let place = Place::new(1);
    let index = place.index();
    for shard in place.files(".safetensors") {
        let mut bytes = fs::read(&shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(shard, bytes).unwrap();
    }
    says(index.latents(&index.train[0], false), &["checksum of entry"]);
    assert_eq!(place.files(".damaged").len(), 1);
    assert_eq!(place.missing().0, 1);
    place.index();
    assert_eq!(place.missing(), (0, 0));
}

#[test]
fn an_interruption_loses_little() {
    let place = Place::new(5);
    let n_done = AtomicUsize::new(0);
    let device = Device::cpu(2, LIMIT).unwrap();
    let tell = |event| event != ProgressEvent::Done || n_done.fetch_add(1, Ordering::Relaxed) < 2;
    let stopped = place.caching().unwrap().run(&device, EncoderLoading::Whole, DECODING, &tell);
    assert!(matches!(stopped, Err(TrainerError::Weights(WeightsError::Cancelled))));
    assert_eq!(place.missing().0, 2);
    assert_eq!(place.index().train.len(), 5);
}

#[test]
fn a_plan_is_what_a_run_takes() {
    // In f32 a CPU holds the blocks of this small T5 in 16 bits, and its embeddings decide.
    let in_bf16 = || Place { precision: Precision::plain(Dtype::Bf16), ..Place::new(3) };
    let place = in_bf16();
    let caching = place.caching().unwrap();
    let CachePlan { phases, loading, .. } = caching.plan(DeviceKind::cpu(2), LIMIT, None).unwrap();
    assert_eq!(loading, EncoderLoading::Whole);
    let names: Vec<_> = phases.iter().map(|phase| phase.name).collect();
    assert_eq!(names, ["images", "clip-l", "clip-g", "t5"]);
    let peak = |phases: &[StageMemory]| phases.iter().map(|phase| phase.peak_bytes).max().unwrap();
    let whole = peak(&phases);
    assert_eq!(phases.last().unwrap().peak_bytes, whole, "T5 decides");
    // In a byte less T5 is encoded block by block, and into the same prompts.
    let CachePlan { phases, loading, .. } =
        caching.plan(DeviceKind::cpu(2), whole - 1, None).unwrap();
    assert_eq!(loading, EncoderLoading::Blocks);
    let peak = peak(&phases);
    says(caching.plan(DeviceKind::cpu(2), peak / 2, None), &["does not fit", "limit"]);
    let device = Device::cpu(2, peak).unwrap();
    let index = caching.run(&device, loading, DECODING, &|_| true).unwrap();
    let other = in_bf16();
    let text = index.plain_text(&index.train[0]);
    assert_eq!(
        index.condition(&text.as_str().into()).unwrap(),
        other.index().condition(&text.as_str().into()).unwrap()
    );
    assert_eq!(device.usage().extent, peak);
}

#[test]
fn images_encoded_together_are_as_alone() {
    // Three of each size, and mirrored ones with them.
    let place = Place::with(9, &["data.flip=true"]);
    let together = place.index();
    for image in &together.train {
        let alone = Place::with(0, &["data.flip=true"]);
        let name = image.path.file_name().unwrap().to_str().unwrap();
        let number = image.path.file_stem().unwrap().to_str().unwrap().parse().unwrap();
        alone.put(name, number);
        let index = alone.index();
        for is_mirrored in [false, true] {
            let latents = index.latents(&index.train[0], is_mirrored).unwrap();
            assert_eq!(together.latents(image, is_mirrored).unwrap(), latents, "{number}");
        }
    }
}

#[test]
fn an_image_that_fails_late_is_a_problem() {
    let place = Place::new(3);
    let path = place.image("1.png");
    let mut bytes = fs::read(&path).unwrap();
    let half = bytes.len() / 2;
    bytes[half] ^= 0x55;
    fs::write(&path, bytes).unwrap();
    let index = place.index();
    let [problem] = &index.problems[..] else { panic!("{:?}", index.problems) };
    assert_eq!(problem.path, path);
    assert!(matches!(problem.kind, ProblemKind::Damaged { .. }), "{problem:?}");
    assert_eq!(index.train.len(), 2);
}

#[test]
fn folders_without_an_image_say_why() {
    let place = Place::new(0);
    says(place.caching(), &["no image to train with in", "images: it holds none"]);
    fs::write(place.image("a.png"), "hello").unwrap();
    fs::write(place.image("b.png"), "").unwrap();
    fs::write(place.image("c.png"), "").unwrap();
    says(place.caching(), &["a.png is not an image", "2 empty (b.png, c.png), such as"]);
    let place = Place::with(1, &["data.repeats=200000000"]);
    says(place.caching(), &["an epoch shows 200000000 images"]);
    let place = Place::with(1, &["data.resolution=512"]);
    says(place.caching(), &["bucket 512x512 is larger than the model's 192x192"]);
}

#[test]
fn images_are_held_out_by_the_seed() {
    let split = |setting: &str| {
        let place = Place::with(10, &[setting]);
        let caching = place.caching()?;
        let names = |samples: &[CachedSample]| -> Vec<String> {
            samples.iter().map(|s| s.path.file_name().unwrap().display().to_string()).collect()
        };
        Ok([names(&caching.index().train), names(&caching.index().held_out)])
    };
    assert_eq!(split("data.validation=0").unwrap()[1].len(), 0);
    let [train, held_out] = split("data.validation=3").unwrap();
    assert_eq!((train.len(), held_out.len()), (7, 3));
    assert!(train.iter().all(|name| !held_out.contains(name)));
    assert_eq!(split("data.validation=3").unwrap()[1], held_out);
    assert_eq!(split("data.validation=0.3").unwrap()[1], held_out);
    assert_eq!(split("data.validation=0.01").unwrap()[1].len(), 1);
    says(split("data.validation=10"), &["holds out 10 images, there are 10"]);
}

/// Batches read ahead.
fn read(
    index: &Arc<CacheIndex>,
    batch: usize,
    seed: u64,
    from: u64,
) -> Prefetch<TrainBatch<SampleSize, EncodedSample>> {
    let mut reader = BatchReader::new(Arc::clone(index), index.batch_sampler(batch, seed), seed);
    Prefetch::begin(from, move |number| reader.read(number))
}

fn key(ready: &TrainBatch<SampleSize, EncodedSample>) -> (u64, Vec<u64>, SampleSize, Vec<f32>) {
    let firsts =
        ready.samples.iter().map(|sample| sample.latents.mean[0] + sample.prompt.0[1].values[0]);
    let draws = ready.samples.iter().map(|sample| sample.draw).collect();
    (ready.number, draws, ready.size, firsts.collect())
}

#[test]
fn batches_are_the_same_from_the_middle_on() {
    let settings = ["data.flip=true", "data.shuffle_tags=true", "data.caption_dropout=0.3"];
    let place = Place::with(7, &settings);
    let index = Arc::new(place.index());
    let from = |first: u64, n: usize| -> Vec<_> {
        let mut batches = read(&index, 2, 5, first);
        (0..n).map(|_| key(&batches.next_batch().unwrap().0)).collect()
    };
    let all = from(0, 20);
    assert_eq!(all[13..], from(13, 7)[..]);
    let mut draws: Vec<u64> = all.iter().flat_map(|(_, draws, ..)| draws.clone()).collect();
    let n = draws.len();
    draws.sort_unstable();
    draws.dedup();
    assert_eq!(draws.len(), n);
}

#[test]
fn every_line_and_wildcard_of_a_caption_is_encoded_and_trained_on() {
    let settings = ["data.caption_choice=wildcards", "data.caption_dropout=0"];
    let place = Place::with(1, &settings);
    fs::write(place.image("0.png").with_extension("txt"), "many\n\na {red|blue} image\n").unwrap();
    let texts = ["many", "a red image", "a blue image"];
    // And the empty prompt, for samples.
    assert_eq!(place.missing(), (1, texts.len() + 1));
    let index = Arc::new(place.index());
    assert_eq!(index.plain_text(&index.train[0]), texts[0]);
    let pooled = |condition: &Condition| condition.0[1].values.clone();
    let mut batches = read(&index, 1, 5, 0);
    let seen: Vec<Vec<f32>> =
        (0..60).map(|_| pooled(&batches.next_batch().unwrap().0.samples[0].prompt)).collect();
    for text in texts {
        let own = pooled(&index.condition(&text.into()).unwrap());
        let n = seen.iter().filter(|prompt| **prompt == own).count();
        assert!(n > 5, "{text:?} was seen {n} times of 60");
    }
}

#[test]
fn errors_arrive_and_nobody_hangs() {
    let place = Place::new(3);
    let index = Arc::new(place.index());
    // Full, and nobody ever takes one.
    drop(read(&index, 1, 1, 0));
    place.files(".safetensors").iter().for_each(|shard| fs::remove_file(shard).unwrap());
    let mut batches = read(&index, 1, 1, 0);
    assert!(matches!(batches.next_batch(), Err(TrainerError::Cache { .. })));
    says(batches.next_batch(), &["after an error"]);
}
