//! The VAE of clips against what diffusers computed (`tests/golden/vae_hunyuan_video`), whole and in tiles.

use std::path::{Path, PathBuf};

use compute::{Device, DeviceKind, Dtype, Params, RandomSequence, Tape};
use trainer::model::adapter::Adapters;
use trainer::model::build::{ModelBuilder, Precision, RandomWeights};
use trainer::model::diffusion::vae::{LatentShape, encode_clip, vae_moments};
use trainer::model::files::{WeightFiles, load_model};
use trainer::model::vae::{
    HunyuanVideoVaeConfig, LatentView, Tiling, VaeConfig, VaeDecoder, VaeEncoder, decode_tiled,
};
use weights::Catalog;

use crate::models::{check, recorded_in};
use crate::{printed, text};

const LIMIT: usize = 256 << 20;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/vae_hunyuan_video").join(name)
}

/// One, five, seven and seventeen frames; files of both namings.
#[test]
fn the_vae_of_hunyuan_video_is_that_of_the_reference_in_both_layouts() {
    let (renamed, frame) = (
        golden("renamed/renamed.safetensors"),
        golden("frame/diffusion_pytorch_model.safetensors"),
    );
    let cases =
        [("clip", None), ("renamed", Some(renamed)), ("frame", None), ("frames", Some(frame))];
    for (name, weights) in cases {
        let folder = golden(name);
        let weights: Vec<&str> =
            weights.iter().flat_map(|path| ["--weights", text(path)]).collect();
        for dtype in ["f32", "bf16", "f16"] {
            let words = ["verify", text(&folder), "--dtype", dtype];
            let page = printed(&[&words, &weights[..]].concat());
            assert!(page.contains("all 4 tensors are within tolerance"), "{page}");
        }
    }
}

/// Both halves of the golden model of one name.
fn load(device: &Device, name: &str) -> (VaeEncoder, VaeDecoder) {
    let folder = golden(name);
    let config = VaeConfig::read(&folder.join("config.json")).unwrap();
    let catalog = Catalog::open(&folder.join("diffusion_pytorch_model.safetensors")).unwrap();
    let build = |build: &mut ModelBuilder<'_>| {
        Ok((VaeEncoder::new(&config, build)?, VaeDecoder::new(&config, build)?))
    };
    let found = WeightFiles::find(&catalog, &config.layout(&catalog, None), build).unwrap();
    let (plain, adapters) = (Precision::plain(Dtype::F32), &mut Adapters::none());
    load_model(device, &found, plain, adapters, &|_| true, build).unwrap()
}

/// Long clips, cut in time.
#[test]
fn tiles_in_time_are_those_of_the_reference() {
    let device = Device::cpu(2, LIMIT).unwrap();
    let (encoder, decoder) = load(&device, "clip");
    for (name, frames, size) in [("long", 29, [16, 16]), ("long_even", 25, [16, 8])] {
        let recorded = recorded_in(&golden(name).join("golden.safetensors"));
        let clip = &recorded["in.image"];
        let (moments, shape) = encode_clip(&encoder, &device, clip, size, frames, None).unwrap();
        let (mean, logvar) = moments.split_at(shape.count());
        check("mean", &recorded, mean);
        check("logvar", &recorded, logvar);
        let tiling = Some(Tiling::largest(shape));
        check(
            "decoded",
            &recorded,
            &decode(&device, &decoder, shape, &recorded["out.mean"], tiling),
        );
    }
}

/// Tiles of a quarter of what is encoded in these tests.
const SMALL: Tiling = Tiling { tile: 4, overlap: 1, frames: 3, frame_overlap: 2 };

#[test]
fn a_clip_takes_as_much_memory_and_work_as_planned() {
    for tiling in [None, Some(SMALL)] {
        let peaks = |device: &Device| {
            let (encoder, decoder) = load(device, "clip");
            let clip = vec![0.1; 3 * 17 * 40 * 56];
            let (moments, shape) =
                encode_clip(&encoder, device, &clip, [56, 40], 17, tiling).unwrap();
            assert_eq!(shape.sizes(), [3, 5, 5, 7]);
            assert_eq!(moments.len(), 2 * shape.count());
            let encoded = device.usage().peak;
            device.reset_peak();
            let decoded = decode(device, &decoder, shape, &moments[..shape.count()], tiling);
            assert_eq!(decoded.len(), clip.len());
            let work = device.work();
            (encoded, device.usage().peak, work.flops, work.bytes)
        };
        let computed = peaks(&Device::cpu(2, LIMIT).unwrap());
        assert_eq!(peaks(&Device::meta(DeviceKind::cpu(2), LIMIT)), computed);
    }
}

fn decode(
    device: &Device,
    decoder: &VaeDecoder,
    shape: LatentShape,
    values: &[f32],
    tiling: Option<Tiling>,
) -> Vec<f32> {
    let params = Params::default();
    let tape = Tape::inference(device, &params, 0);
    let latent = LatentView { values, shape };
    decode_tiled(&tape, decoder, latent, tiling.unwrap_or(Tiling::WHOLE)).unwrap()
}

/// The largest difference, and the mean of all differences, by the largest value.
fn differences(a: &[f32], b: &[f32]) -> [f32; 2] {
    assert_eq!(a.len(), b.len());
    let largest = a.iter().fold(0.0f32, |most, a| most.max(a.abs()));
    let all = || a.iter().zip(b).map(|(a, b)| (a - b).abs() / largest);
    [all().fold(0.0, f32::max), all().sum::<f32>() / a.len() as f32]
}

/// Edges are repeated, so that tiles of a clip of one colour are all alike, and the whole too.
#[test]
fn tiles_of_a_clip_of_one_colour_are_the_whole() {
    let device = Device::cpu(2, LIMIT).unwrap();
    let (encoder, decoder) = load(&device, "clip");
    let (size, frames) = ([56, 40], 21);
    let clip: Vec<f32> = [0.3, -0.6, 0.8].map(|colour| vec![colour; frames * 56 * 40]).concat();
    let encode = |tiling| encode_clip(&encoder, &device, &clip, size, frames, tiling).unwrap();
    let ((whole, shape), (tiled, tiled_shape)) = (encode(None), encode(Some(SMALL)));
    assert_eq!(shape, tiled_shape);
    assert!(differences(&whole, &tiled)[0] < 2e-4, "{:?}", differences(&whole, &tiled));
    let latent: Vec<f32> =
        (0..shape.count()).map(|at| [1.5, -0.9, 0.3][at * 3 / shape.count()]).collect();
    let [whole, tiled] =
        [None, Some(SMALL)].map(|tiling| decode(&device, &decoder, shape, &latent, tiling));
    // Norms of values that hardly differ enlarge what rounding makes of them: PyTorch's f32 is off by as much.
    assert!(differences(&whole, &tiled)[0] < 2e-3, "{:?}", differences(&whole, &tiled));
}

/// A part of values [channels, frames, height, width]: the first and the number along each of the last three.
fn part(values: &[f32], sizes: [usize; 4], at: [[usize; 2]; 3]) -> Vec<f32> {
    let [channels, frames, height, width] = sizes;
    let [t, y, x] = at;
    let mut part = Vec::new();
    for plane in (0..channels).flat_map(|c| (t[0]..t[0] + t[1]).map(move |t| c * frames + t)) {
        for row in y[0]..y[0] + y[1] {
            part.extend_from_slice(&values[(plane * height + row) * width + x[0]..][..x[1]]);
        }
    }
    part
}

/// Where only one tile is, the result is what it gives alone: at the beginning and at the end of a clip.
#[test]
fn tiles_of_a_clip_lie_in_their_places() {
    let device = Device::cpu(2, LIMIT).unwrap();
    let (encoder, decoder) = load(&device, "clip");
    let normal = |n: usize| {
        let sequence = RandomSequence::new(5, 1);
        device.normal([n], Dtype::F32, 1.0, sequence).unwrap().read_f32().unwrap()
    };
    // Six latent frames of 8 x 11 pixels, the last two tiles in time begin at the third and the fifth.
    let (clip_sizes, latent_sizes) = ([3, 21, 64, 88], [3, 6, 8, 11]);
    let (clip, latent) = (normal(3 * 21 * 64 * 88), normal(3 * 6 * 8 * 11));
    let tiling = Tiling { tile: 6, overlap: 2, frames: 4, frame_overlap: 2 };
    let shape = |sizes: [usize; 4]| LatentShape::from_sizes(&sizes).unwrap();
    let (encoded, _) = encode_clip(&encoder, &device, &clip, [88, 64], 21, Some(tiling)).unwrap();
    let decoded = decode(&device, &decoder, shape(latent_sizes), &latent, Some(tiling));
    // The tile in the latent, what of it no other tile has, and that within the tile; then the same in pixels.
    let first = (
        [[0, 4], [0, 6], [0, 6]],
        [[[0, 3], [0, 2], [0, 4]], [[0, 3], [0, 2], [0, 4]]],
        [[[0, 9], [0, 16], [0, 32]], [[0, 9], [0, 16], [0, 32]]],
    );
    let last = (
        [[2, 4], [2, 6], [5, 6]],
        [[[4, 2], [6, 2], [10, 1]], [[2, 2], [4, 2], [5, 1]]],
        [[[13, 4], [48, 16], [80, 8]], [[5, 4], [32, 16], [40, 8]]],
    );
    for (tile, of_latent, of_clip) in [first, last] {
        let pixels = [[4 * tile[0][0], 13], [8 * tile[1][0], 48], [8 * tile[2][0], 48]];
        let cut = part(&clip, clip_sizes, pixels);
        let (alone, _) = encode_clip(&encoder, &device, &cut, [48, 48], 13, None).unwrap();
        let expected = part(&alone, [6, 4, 6, 6], of_latent[1]);
        let found = part(&encoded, [6, 6, 8, 11], of_latent[0]);
        assert!(differences(&expected, &found)[0] < 1e-6, "{expected:?} {found:?}");
        let cut = part(&latent, latent_sizes, tile);
        let alone = decode(&device, &decoder, shape([3, 4, 6, 6]), &cut, None);
        let expected = part(&alone, [3, 13, 48, 48], of_clip[1]);
        let found = part(&decoded, clip_sizes, of_clip[0]);
        assert!(differences(&expected, &found)[0] < 1e-6);
    }
}

#[test]
fn clips_of_a_batch_are_encoded_as_each_alone() {
    let device = Device::cpu(2, LIMIT).unwrap();
    let (encoder, _) = load(&device, "clip");
    let clips = [1u64, 2].map(|seed| {
        let sequence = RandomSequence::new(seed, 1);
        let clip = device.normal([3 * 5 * 16 * 24], Dtype::F32, 1.0, sequence).unwrap();
        clip.read_f32().unwrap()
    });
    let [a, b] = &clips;
    let (both, shape) = vae_moments(&encoder, &device, &[a, b], [24, 16], 5).unwrap();
    assert_eq!(shape, LatentShape { channels: 3, frames: 2, height: 2, width: 3 });
    for (clip, found) in clips.iter().zip(&both) {
        let (alone, _) = encode_clip(&encoder, &device, clip, [24, 16], 5, None).unwrap();
        assert!(differences(&alone, found)[0] < 1e-6);
    }
}

/// The published model on a GPU: 81 frames of 768 x 512, in the tiles that a plan would choose.
#[test]
fn long_clips_need_few_gibibytes() {
    let kind = DeviceKind::Cuda { is_deterministic: false };
    let config = VaeConfig::from(HunyuanVideoVaeConfig::published());
    let (size, frames) = ([768, 512], 81);
    let shape = LatentShape { channels: 16, frames: 21, height: 64, width: 96 };
    let least = Tiling::candidates(shape).last();
    let precision = Precision::plain(Dtype::F32);
    let meta = || Device::meta(kind, usize::MAX / 2);
    let (device, mut adapters) = (meta(), Adapters::none());
    let mut source = RandomWeights::new(precision, 0);
    let mut build = ModelBuilder::new(&device, precision, &mut source, &mut adapters);
    let encoder = VaeEncoder::new(&config, build.allow_tf32()).unwrap();
    let clip = vec![0.0; 3 * frames * 768 * 512];
    encode_clip(&encoder, &device, &clip, size, frames, least).unwrap();
    let encoded = device.usage().extent;
    drop(encoder);
    let (device, mut adapters) = (meta(), Adapters::none());
    let mut source = RandomWeights::new(precision, 0);
    let mut build = ModelBuilder::new(&device, precision, &mut source, &mut adapters);
    let decoder = VaeDecoder::new(&config, build.allow_tf32()).unwrap();
    decode(&device, &decoder, shape, &vec![0.0; shape.count()], least);
    let decoded = device.usage().extent;
    assert!(encoded < 3 << 30 && decoded < 4 << 30, "{encoded} {decoded}");
}
