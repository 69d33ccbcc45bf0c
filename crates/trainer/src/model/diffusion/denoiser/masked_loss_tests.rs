//! The loss with masks against PyTorch, from the masks' pixels on (`tests/golden/masks`).

use std::path::Path;

use compute::ops::PatchOrder;
use compute::{Device, Dtype, Gradients, Params, Tape};
use weights::Catalog;
use weights::load::load_f32;

use super::{BatchLoss, DenoiserOutput, LatentPatches, VelocityLoss};
use crate::data::mask::{ImageMask, read_mask};
use crate::data::{Bucket, Crop, DecodingMemory};

const UNMASKED_WEIGHT: f32 = 0.1;

fn recorded(name: &str) -> (Vec<usize>, Vec<f32>) {
    let path = "../../tests/golden/masks/golden.safetensors";
    let catalog = Catalog::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    let tensor = catalog.find(name).unwrap();
    let sizes = tensor.shape.iter().map(|size| *size as usize).collect();
    (sizes, load_f32(&catalog, tensor, 0..tensor.numel()).unwrap())
}

/// The masks as hearth reads them from files, one for each sample.
fn masks() -> Vec<Vec<f32>> {
    let (sizes, pixels) = recorded("in.pixels");
    let [_, height, width] = sizes[..] else { panic!("{sizes:?}") };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mask.png");
    let bucket = Bucket { width, height };
    let read = |pixels: &[f32]| {
        let file = std::fs::File::create(&path).unwrap();
        let mut encoder = png::Encoder::new(file, width as u32, height as u32);
        encoder.set_color(png::ColorType::Grayscale);
        let bytes: Vec<u8> = pixels.iter().map(|pixel| *pixel as u8).collect();
        encoder.write_header().unwrap().write_image_data(&bytes).unwrap();
        let mask = ImageMask::File(path.clone());
        let memory = DecodingMemory::new(8 << 20);
        read_mask(&mask, Path::new("image.png"), bucket, Crop::Centre, 8, &memory).unwrap()
    };
    pixels.chunks_exact(width * height).map(read).collect()
}

fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-6 * largest, "{what}: {found}, not {expected}");
    }
}

#[test]
fn a_masked_loss_and_its_gradient_are_those_of_pytorch() {
    let masks = masks();
    assert_near(&masks.concat(), &recorded("out.mask").1, "masks");
    let (sizes, prediction) = recorded("in.prediction");
    let [samples, channels, height, width] = sizes[..] else { panic!("{sizes:?}") };
    let factor = |mask: &Vec<f32>| {
        let clamped: Vec<f32> = mask.iter().map(|value| value.max(UNMASKED_WEIGHT)).collect();
        clamped.repeat(channels)
    };
    let factors = masks.iter().flat_map(factor).collect::<Vec<f32>>();
    let device = Device::cpu(1, 1 << 22).unwrap();
    let shape = [samples, channels, height, width];
    for order in [PatchOrder::ChannelsFirst, PatchOrder::ChannelsLast] {
        let nothing = Params::default();
        let look = Tape::inference(&device, &nothing, 0);
        let tokens = |values: &[f32]| {
            let latents = device.upload(shape, values).unwrap();
            look.patchify(&latents.into(), 2, order).unwrap().into_tensor()
        };
        let mut params = Params::default();
        let key = params.add(tokens(&prediction));
        let tape = Tape::training(&device, &params, 0);
        let output = DenoiserOutput {
            tokens: tape.param(key),
            size: super::PatchedSize::Image([height / 2, width / 2]),
            patches: LatentPatches { size: 2, order },
        };
        let (target, factors) = (tokens(&recorded("in.target").1), tokens(&factors));
        assert_eq!(factors.dtype(), Dtype::F32);
        let weights = recorded("in.weights").1;
        let how = BatchLoss {
            function: VelocityLoss::default(),
            sigmas: &vec![0.5; samples],
            weights: &weights,
            factors: Some(&factors),
        };
        let loss = output.loss(&tape, &target, &how).unwrap();
        assert_near(&loss.tensor().to_f32_vec(), &recorded("out.loss").1, "loss");
        let mut gradients = Gradients::default();
        tape.backward(&loss, &mut gradients).unwrap();
        let expected = tokens(&recorded("out.gradient").1).to_f32_vec();
        assert_near(&gradients.get(key).unwrap().to_f32_vec(), &expected, "gradient");
    }
}
