//! The block transform as weights of an encoder. Pixels are gathered by the convolutions that
//! halve, 2x2 at a time; all blocks beside the shortcuts are zero. One norm and one activation
//! cannot be avoided, and are made to change nothing:
//!
//! - the norm's statistics are those of a few channels that hold a large constant, beside which no
//!   image shows; channels come in pairs of opposite sign, so that the mean is 0,
//! - silu(x) - silu(-x) = x.

use compute::Shape;

use super::transform::BlockTransform;
use super::{LATENT, TensorMap};
use crate::error::Result;
use crate::model::build::{TensorSpec, tensor_specs};
use crate::model::vae::{KlVaeConfig, kl};

/// The constant. Chosen: squares of it are a million times those of an image's numbers.
const LOUD: f32 = 4096.0;
/// Deviation of latents around their means. Chosen: a little, so that models learn not to rely on
/// what cannot be seen.
const DEVIATION: f32 = 0.02;

/// The encoder's tensors.
pub fn weights(config: &KlVaeConfig, transform: &BlockTransform) -> Result<TensorMap> {
    let wants = tensor_specs(|build| kl::encoder(config, build))?;
    let mut tensors: TensorMap = wants.iter().map(zero_tensor).collect();
    let mut put = |name: &str, at: &[usize], number: f32| {
        let (shape, numbers) = tensors.get_mut(name).expect("a name that the encoder asked for");
        let index = shape.iter().zip(at).fold(0, |index, (size, at)| index * size + at);
        numbers[index] = number;
    };
    for colour in 0..3 {
        put("encoder.conv_in.weight", &[colour, colour, 1, 1], 1.0);
        for pixel in 0..4 {
            let at = [4 * colour + pixel, colour, pixel / 2, pixel % 2];
            put("encoder.down_blocks.0.downsamplers.0.conv.weight", &at, 1.0);
        }
    }
    for channel in 0..12 {
        put("encoder.down_blocks.1.resnets.0.conv_shortcut.weight", &[channel, channel, 0, 0], 1.0);
    }
    for (channel, direction) in transform.directions.iter().enumerate() {
        for (at, number) in direction.iter().enumerate() {
            // Of the block's 4x4 pixels, which 2x2 of which 2x2.
            let (colour, row, column) = (at / 16, at / 4 % 4, at % 4);
            let input = 4 * colour + row % 2 * 2 + column % 2;
            let at = [channel, input, row / 2, column / 2];
            put("encoder.down_blocks.1.downsamplers.0.conv.weight", &at, *number as f32);
        }
        let offset: f64 = direction.iter().zip(&transform.mean).map(|(d, mean)| d * mean).sum();
        put("encoder.down_blocks.1.downsamplers.0.conv.bias", &[channel], -offset as f32);
    }
    pass(config, transform, &mut put);
    Ok(tensors)
}

/// From the transform's numbers through norm and activation to the latent.
fn pass(
    config: &KlVaeConfig,
    transform: &BlockTransform,
    put: &mut dyn FnMut(&str, &[usize], f32),
) {
    let width = config.block_out_channels[2];
    for (channel, gain) in transform.gains.iter().enumerate() {
        for (to, sign) in [(channel, 1.0), (LATENT + channel, -1.0)] {
            put("encoder.down_blocks.2.resnets.0.conv_shortcut.weight", &[to, channel, 0, 0], sign);
            put("encoder.conv_out.weight", &[channel, to, 1, 1], sign * *gain as f32);
        }
        put("encoder.conv_out.bias", &[LATENT + channel], 2.0 * DEVIATION.ln());
    }
    let n_loud = width - 2 * LATENT;
    for channel in 2 * LATENT..width {
        let sign = if channel % 2 == 0 { LOUD } else { -LOUD };
        put("encoder.down_blocks.2.resnets.0.conv_shortcut.bias", &[channel], sign);
    }
    for channel in 0..width {
        let deviation = LOUD * (n_loud as f32 / width as f32).sqrt();
        put("encoder.conv_norm_out.weight", &[channel], deviation);
    }
}

/// A tensor that lets nothing through: norms as they are, all else zero.
fn zero_tensor(want: &TensorSpec) -> (String, (Vec<usize>, Vec<f32>)) {
    let is_norm = want.name.contains("norm") && want.name.ends_with("weight");
    let numbers = vec![f32::from(u8::from(is_norm)); Shape::elements(&want.shape)];
    (want.name.clone(), (want.shape.sizes().to_vec(), numbers))
}
