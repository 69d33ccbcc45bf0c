//! The demo's autoencoder, made without a convolution that is trained. Its encoder is exact: a
//! linear transform of blocks of 4x4 pixels, found from the pictures' statistics and written down
//! as weights of diffusers' `AutoencoderKL`. Its decoder is trained, since a convolution after an
//! enlargement cannot put a block's pixels into their places by arithmetic alone: all pixels of the
//! block look the same to it, but for what lies beside them.

mod decoder;
mod encoder;
mod transform;

use std::collections::BTreeMap;

use compute::{Device, Stream};
use serde_json::{Value, json};

use decoder::Round;
pub use decoder::{Progress, Tell};
use transform::Transform;

use super::paint::SIDE;
use super::scene::Scene;
use crate::config::data::Style;
use crate::error::Result;
use crate::model::vae;
use crate::sample::Picture;

/// Shape and numbers of tensors by their names.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

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
        // With one group a norm over all numbers of a picture is a layer norm, which is trained.
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
pub fn fit(device: &Device, tell: Tell<'_>) -> Result<Tensors> {
    let config: vae::Config =
        serde_json::from_value(settings()).expect("settings of hearth's own are whole");
    let pictures = pictures(N_PICTURES);
    let transform = Transform::fit(&pictures);
    let mut tensors = encoder::weights(&config, &transform)?;
    let of_decoder = decoder::train(device, &config, &transform, &pictures, &ROUNDS, tell)?;
    tensors.extend(of_decoder);
    Ok(tensors)
}

/// What the shipped decoder was trained for. Chosen: a quarter of an hour on two cores that do nothing
/// else.
const ROUNDS: [Round; 2] =
    [Round { n_steps: 2000, learning_rate: 3e-3 }, Round { n_steps: 600, learning_rate: 2e-3 }];
/// Pictures to learn from. Chosen: each shape in each size a few times.
const N_PICTURES: usize = 360;
/// Not the one that any set of pictures is drawn from.
const SEED: u64 = 0x5eed;

/// Both styles in turn, every second pair in colours that have no name, so that pictures of other
/// colours can be taught, too.
fn pictures(count: usize) -> Vec<Picture> {
    let picture = |index: usize| {
        let style = if index.is_multiple_of(2) { Style::Flat } else { Style::Neon };
        let mut scene = Scene::new(style, SEED, index);
        if index % 4 > 1 {
            let stream = Stream::new(SEED, (count + index) as u64);
            let any = |first: usize| [0, 1, 2].map(|at| stream.word(first + at) as u8);
            (scene.colour.fill, scene.colour.glow) = (any(0), any(3));
            scene.background.fill = any(6);
        }
        scene.draw(SIDE)
    };
    (0..count).map(picture).collect()
}

#[cfg(test)]
mod tests {
    use compute::{Dtype, Params, Tape, Tensor};

    use super::*;
    use crate::model::adapter::Adapters;
    use crate::model::build::{Builder, Held, Precision, Source, Want};
    use crate::model::host::numbers;

    /// Weights from memory, as a file would hold them.
    struct Made<'a>(&'a Tensors);

    impl Source for Made<'_> {
        fn take(&mut self, device: &Device, want: Want) -> Result<Held> {
            let (shape, numbers) = &self.0[&want.name];
            assert_eq!(*shape, want.shape.sizes(), "{}", want.name);
            Ok(Held::Dense(device.upload(want.shape, numbers)?.into()))
        }
    }

    fn build<T>(
        device: &Device,
        tensors: &Tensors,
        new: impl FnOnce(&mut Builder<'_>) -> Result<T>,
    ) -> T {
        let (mut source, mut adapters) = (Made(tensors), Adapters::none());
        let precision = Precision::plain(Dtype::F32);
        new(&mut Builder::new(device, precision, &mut source, &mut adapters)).unwrap()
    }

    fn config() -> vae::Config {
        serde_json::from_value(settings()).unwrap()
    }

    /// [1, channels, side, side] to [pixels, channels].
    fn by_pixel(tensor: &Tensor) -> Vec<f32> {
        let &[_, channels, height, width] = tensor.shape().sizes() else { unreachable!() };
        let (numbers, count) = (numbers(tensor).unwrap(), height * width);
        (0..channels * count).map(|at| numbers[at % channels * count + at / channels]).collect()
    }

    fn furthest(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn the_encoder_computes_the_transform() {
        let device = Device::cpu(2, 1 << 28).unwrap();
        let pictures = pictures(8);
        let transform = Transform::fit(&pictures);
        let tensors = encoder::weights(&config(), &transform).unwrap();
        let encoder = build(&device, &tensors, |b| vae::Encoder::new(&config(), b));
        let params = Params::default();
        for picture in &pictures {
            let centred: Vec<f32> = picture.numbers.iter().map(|x| 2.0 * x - 1.0).collect();
            let input = device.upload([1, 3, SIDE, SIDE], &centred).unwrap();
            let tape = Tape::inference(&device, &params, 0);
            let found = by_pixel(encoder.forward(&tape, &input).unwrap().tensor());
            let (pixels, rest): (Vec<&[f32]>, Vec<&[f32]>) =
                found.chunks(2 * LATENT).map(|pixel| pixel.split_at(LATENT)).unzip();
            let apart = furthest(&pixels.concat(), &transform.latent(picture));
            // Of numbers whose deviation is about 1.
            assert!(apart < 2e-3, "{apart}");
            let deviation = (rest.concat()[0] / 2.0).exp();
            assert!((deviation - 0.02).abs() < 1e-3, "{deviation}");
        }
    }

    #[test]
    fn the_trained_decoder_is_the_one_that_is_written() {
        let device = Device::cpu(2, 1 << 28).unwrap();
        let trained = decoder::Decoder::new(&device, &config()).unwrap();
        let tensors = trained.tensors(&config()).unwrap();
        let written = build(&device, &tensors, |b| vae::Decoder::new(&config(), b));
        let side = 3;
        let latents = device.normal([1, LATENT, side, side], Dtype::F32, 1.0, (1, 1)).unwrap();
        let tokens = by_pixel(&latents);
        let tokens = device.upload([1, side * side, LATENT], &tokens).unwrap();
        let tape = Tape::inference(&device, &trained.params, 0);
        let by_tokens = trained.forward(&tape, &tokens.into(), side).unwrap();
        let by_images = written.forward(&tape, &latents).unwrap();
        let apart = furthest(&numbers(by_tokens.tensor()).unwrap(), &by_pixel(by_images.tensor()));
        assert!(apart < 1e-4, "{apart}");
    }

    #[test]
    fn a_few_steps_of_training_bring_the_error_down() {
        let device = Device::cpu(2, 1 << 30).unwrap();
        let pictures: Vec<Picture> =
            (0..4).map(|index| Scene::new(Style::Flat, 1, index).draw(24)).collect();
        let transform = Transform::fit(&pictures);
        let rounds = [Round { n_steps: 40, learning_rate: 3e-3 }];
        let errors = std::cell::RefCell::new(Vec::new());
        let tell = |progress: Progress| {
            errors.borrow_mut().push(progress.error);
            progress.step < 12
        };
        let stopped = decoder::train(&device, &config(), &transform, &pictures, &rounds, &tell);
        assert!(stopped.is_err(), "was told to stop");
        let errors = errors.into_inner();
        assert_eq!(errors.len(), 12);
        assert!(errors[11] < 0.5 * errors[0], "{errors:?}");
    }
}
