//! The demo's VAE, made without training convolutions. Its encoder is exact: a
//! linear transform of blocks of 4x4 pixels, found from the images' statistics and written down
//! as weights of diffusers' `AutoencoderKL`. Its decoder is trained, since a convolution after an
//! enlargement cannot put a block's pixels into their places by arithmetic alone: all pixels of the
//! block look the same to it, but for what lies beside them.

mod decoder;
mod encoder;
mod transform;

use std::collections::BTreeMap;

use compute::{Device, RandomSequence};
use serde_json::{Value, json};

use decoder::TrainRound;
pub use decoder::{DecoderProgress, DecoderProgressFn};
use transform::BlockTransform;

use super::paint::SIDE;
use super::scene::Scene;
use crate::config::data::DemoStyle;
use crate::error::Result;
use crate::model::vae::KlVaeConfig;
use crate::sample::Image;

/// Shape and numbers of tensors by their names.
pub type TensorMap = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Pixels along the side of a block, which becomes one pixel of a latent.
const BLOCK: usize = 4;
/// Channels of a latent: as many as SD3's have.
const LATENT: usize = 16;
/// Channels at each size. Chosen: the encoder asks for 12 where it has gathered 2x2 pixels of three
/// colours, 16 before and 33 or more after the last step; the decoder of these widths is trained in
/// minutes.
const CHANNELS: [usize; 3] = [16, 32, 40];

/// What `vae/config.json` says.
pub fn settings() -> Value {
    json!({
        "_class_name": "AutoencoderKL",
        "_diffusers_version": "0.31.0",
        "act_fn": "silu",
        "block_out_channels": CHANNELS,
        "down_block_types": vec!["DownEncoderBlock2D"; CHANNELS.len()],
        "force_upcast": true,
        "in_channels": 3,
        "latent_channels": LATENT,
        "layers_per_block": 1,
        "mid_block_add_attention": false,
        // With one group a norm over all numbers of an image is a layer norm, which is trained.
        "norm_num_groups": 1,
        "out_channels": 3,
        "sample_size": SIDE,
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "up_block_types": vec!["UpDecoderBlock2D"; CHANNELS.len()],
        "use_post_quant_conv": false,
        "use_quant_conv": false,
    })
}

/// Makes the autoencoder's weights; the decoder's are trained.
pub fn fit(device: &Device, on_progress: DecoderProgressFn<'_>) -> Result<TensorMap> {
    let config: KlVaeConfig =
        serde_json::from_value(settings()).expect("settings of hearth's own are whole");
    let images = images(N_IMAGES);
    let transform = BlockTransform::fit(&images);
    let mut tensors = encoder::weights(&config, &transform)?;
    let of_decoder = decoder::train(device, &config, &transform, &images, &ROUNDS, on_progress)?;
    tensors.extend(of_decoder);
    Ok(tensors)
}

/// What the shipped decoder was trained for. Chosen: a quarter of an hour on two cores that do nothing
/// else.
const ROUNDS: [TrainRound; 2] = [
    TrainRound { n_steps: 2000, learning_rate: 3e-3 },
    TrainRound { n_steps: 600, learning_rate: 2e-3 },
];
/// Images to learn from. Chosen: each shape in each size a few times.
const N_IMAGES: usize = 360;
/// Not the one that any set of images is drawn from.
const SEED: u64 = 0x5eed;

/// Both styles in turn, every second pair in colours that have no name, so that images of other
/// colours can be taught, too.
fn images(count: usize) -> Vec<Image> {
    let image = |index: usize| {
        let style = if index.is_multiple_of(2) { DemoStyle::Flat } else { DemoStyle::Neon };
        let mut scene = Scene::new(style, SEED, index);
        if index % 4 > 1 {
            let stream = RandomSequence::new(SEED, (count + index) as u64);
            let any = |first: usize| [0, 1, 2].map(|at| stream.word(first + at) as u8);
            (scene.colour.fill, scene.colour.glow) = (any(0), any(3));
            scene.background.fill = any(6);
        }
        scene.draw(SIDE)
    };
    (0..count).map(image).collect()
}

#[cfg(test)]
mod tests {
    use compute::{Dtype, Params, Tape, Tensor};

    use super::*;
    use crate::model::adapter::Adapters;
    use crate::model::build::{ModelBuilder, Precision, TensorSpec, WeightSource, WeightTensor};
    use crate::model::host::to_vec;
    use crate::model::vae::kl;

    /// Weights from memory, as a file would hold them.
    struct MapWeights<'a>(&'a TensorMap);

    impl WeightSource for MapWeights<'_> {
        fn take(&mut self, device: &Device, want: TensorSpec) -> Result<WeightTensor> {
            let (shape, numbers) = &self.0[&want.name];
            assert_eq!(*shape, want.shape.sizes(), "{}", want.name);
            Ok(WeightTensor::Dense(device.upload(want.shape, numbers)?.into()))
        }
    }

    fn build<T>(
        device: &Device,
        tensors: &TensorMap,
        new: impl FnOnce(&mut ModelBuilder<'_>) -> Result<T>,
    ) -> T {
        let (mut source, mut adapters) = (MapWeights(tensors), Adapters::none());
        let precision = Precision::plain(Dtype::F32);
        new(&mut ModelBuilder::new(device, precision, &mut source, &mut adapters)).unwrap()
    }

    fn config() -> KlVaeConfig {
        serde_json::from_value(settings()).unwrap()
    }

    /// [1, channels, side, side] to [pixels, channels].
    fn by_pixel(tensor: &Tensor) -> Vec<f32> {
        let &[_, channels, height, width] = tensor.shape().sizes() else { unreachable!() };
        let (numbers, count) = (to_vec(tensor).unwrap(), height * width);
        (0..channels * count).map(|at| numbers[at % channels * count + at / channels]).collect()
    }

    fn furthest(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn the_encoder_computes_the_transform() {
        let device = Device::cpu(2, 1 << 28).unwrap();
        let images = images(8);
        let transform = BlockTransform::fit(&images);
        let tensors = encoder::weights(&config(), &transform).unwrap();
        let encoder = build(&device, &tensors, |b| kl::encoder(&config(), b));
        let params = Params::default();
        for image in &images {
            let centred: Vec<f32> = image.values.iter().map(|x| 2.0 * x - 1.0).collect();
            let input = device.upload([1, 3, SIDE, SIDE], &centred).unwrap();
            let tape = Tape::inference(&device, &params, 0);
            let found = by_pixel(encoder.forward(&tape, &input).unwrap().tensor());
            let (pixels, rest): (Vec<&[f32]>, Vec<&[f32]>) =
                found.chunks(2 * LATENT).map(|pixel| pixel.split_at(LATENT)).unzip();
            let apart = furthest(&pixels.concat(), &transform.latent(image));
            // Of numbers whose deviation is about 1.
            assert!(apart < 2e-3, "{apart}");
            let deviation = (rest.concat()[0] / 2.0).exp();
            assert!((deviation - 0.02).abs() < 1e-3, "{deviation}");
        }
    }

    #[test]
    fn the_trained_decoder_is_the_one_that_is_written() {
        let device = Device::cpu(2, 1 << 28).unwrap();
        let trained = decoder::DemoDecoder::new(&device, &config()).unwrap();
        let tensors = trained.tensors(&config()).unwrap();
        let written = build(&device, &tensors, |b| kl::decoder(&config(), b));
        let side = 3;
        let latents = device
            .normal([1, LATENT, side, side], Dtype::F32, 1.0, RandomSequence::new(1, 1))
            .unwrap();
        let tokens = by_pixel(&latents);
        let tokens = device.upload([1, side * side, LATENT], &tokens).unwrap();
        let tape = Tape::inference(&device, &trained.params, 0);
        let by_tokens = trained.forward(&tape, &tokens.into(), side).unwrap();
        let by_images = written.forward(&tape, &latents).unwrap();
        let apart = furthest(&to_vec(by_tokens.tensor()).unwrap(), &by_pixel(by_images.tensor()));
        assert!(apart < 1e-4, "{apart}");
    }

    #[test]
    fn a_few_steps_of_training_bring_the_error_down() {
        let device = Device::cpu(2, 1 << 30).unwrap();
        let images: Vec<Image> =
            (0..4).map(|index| Scene::new(DemoStyle::Flat, 1, index).draw(24)).collect();
        let transform = BlockTransform::fit(&images);
        let rounds = [TrainRound { n_steps: 40, learning_rate: 3e-3 }];
        let errors = std::cell::RefCell::new(Vec::new());
        let tell = |progress: DecoderProgress| {
            errors.borrow_mut().push(progress.error);
            progress.step < 12
        };
        let stopped = decoder::train(&device, &config(), &transform, &images, &rounds, &tell);
        assert!(stopped.is_err(), "was told to stop");
        let errors = errors.into_inner();
        assert_eq!(errors.len(), 12);
        assert!(errors[11] < 0.5 * errors[0], "{errors:?}");
    }
}
