//! What transformers' image processors have in common: settings that must be as they are, and pixels as values.

use crate::model::config::Unsupported;
use crate::pixels::Pixels;

/// Red, green and blue.
pub(super) const CHANNELS: usize = 3;

/// Taken: the number of bicubic interpolation in Pillow.
const BICUBIC: u32 = 3;

/// How pixels become values: scaled, less the mean, by the standard deviation of a channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PixelNorm {
    pub mean: [f32; CHANNELS],
    pub std: [f32; CHANNELS],
    pub rescale_factor: f32,
}

impl PixelNorm {
    /// CLIP's, which Qwen2.5-VL took over. Taken: transformers' `OPENAI_CLIP_MEAN` and `OPENAI_CLIP_STD`.
    pub const CLIP: Self = Self {
        mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
        std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
        rescale_factor: 1.0 / 255.0,
    };

    /// Checks that values are finite.
    pub fn check(&self) -> Result<(), Unsupported> {
        let factor = self.rescale_factor;
        let is_fine = factor > 0.0 && factor.is_finite();
        Unsupported::unless(is_fine, format!("rescale_factor is {factor}"))?;
        let is_fine = self.std.iter().all(|std| *std > 0.0 && std.is_finite());
        Unsupported::unless(is_fine, format!("image_std is {:?}", self.std))
    }

    /// Adds one channel of the square patch at a row and a column of pixels.
    pub fn push_patch(
        &self,
        values: &mut Vec<f32>,
        image: &Pixels,
        [top, left]: [usize; 2],
        side: usize,
        channel: usize,
    ) {
        let [mean, std] = [self.mean[channel], self.std[channel]].map(|x| x / self.rescale_factor);
        for row in top..top + side {
            let from = (row * image.width as usize + left) * CHANNELS + channel;
            let pixels = image.rgb[from..].iter().step_by(CHANNELS).take(side);
            values.extend(pixels.map(|pixel| (f32::from(*pixel) - mean) / std));
        }
    }
}

/// Checks that no step is left out that a processor would do, and that images are scaled as ours are.
pub(super) fn check_steps<const N: usize>(
    steps: [(&str, Option<bool>); N],
    resample: Option<u32>,
) -> Result<(), Unsupported> {
    for (key, does) in steps {
        Unsupported::unless(does != Some(false), format!("{key} is false, expected true"))?;
    }
    let resample = resample.unwrap_or(BICUBIC);
    let problem = format!("resample is {resample}, expected {BICUBIC} (bicubic)");
    Unsupported::unless(resample == BICUBIC, problem)
}
