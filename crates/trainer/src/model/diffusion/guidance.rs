//! Guidance: how much closer to the prompt a sampler goes than the model would by itself.

use super::vae::LatentShape;

/// How a family guides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guidance {
    /// Not at all.
    None,
    /// By the difference between what the prompt asks for and what a negative one does: two predictions
    /// (Ho and Salimans, arXiv 2207.12598).
    ClassifierFree,
    /// The same, and every token as long as the prompt's alone: Qwen-Image.
    Rescaled,
    /// The model is told the scale and predicts once: FLUX.1 dev.
    Embedded,
}

impl Guidance {
    /// Whether a negative prompt takes part at this scale.
    pub fn needs_negative(self, scale: f32) -> bool {
        matches!(self, Self::ClassifierFree | Self::Rescaled) && scale > 1.0
    }

    /// The scale that the model is told for each of `n` samples.
    pub fn embedded(self, scale: f32, n: usize) -> Option<Vec<f32>> {
        (self == Self::Embedded).then(|| vec![scale; n])
    }

    /// The scale that the model is told in training. Taken: 1 in most trainers, so that samples at the usual scale are
    /// what was learnt, guided.
    pub fn training_scale(self, n: usize) -> Option<Vec<f32>> {
        self.embedded(1.0, n)
    }

    /// Where to go, from the velocities without and with the prompt; tokens of the latents are squares of `patch`.
    pub fn apply(
        self,
        [without, with]: [&[f32]; 2],
        scale: f32,
        shape: LatentShape,
        patch: usize,
    ) -> Vec<f32> {
        let guide = |(without, with): (&f32, &f32)| without + scale * (with - without);
        let mut guided: Vec<f32> = without.iter().zip(with).map(guide).collect();
        if self == Self::Rescaled {
            rescale(&mut guided, with, shape, patch);
        }
        guided
    }
}

/// Makes every token as long as it is in `with`.
fn rescale(guided: &mut [f32], with: &[f32], shape: LatentShape, patch: usize) {
    let LatentShape { channels, frames, height, width } = shape;
    let (rows, columns) = (height / patch, width / patch);
    let places = |token: usize| {
        let (frame, row, column) =
            (token / (rows * columns), token / columns % rows, token % columns);
        (0..channels * patch * patch).map(move |index| {
            let (channel, inner) = (index / (patch * patch), index % (patch * patch));
            let [y, x] = [row * patch + inner / patch, column * patch + inner % patch];
            ((channel * frames + frame) * height + y) * width + x
        })
    };
    let length = |numbers: &[f32], token| {
        places(token).map(|at| numbers[at] * numbers[at]).sum::<f32>().sqrt()
    };
    for token in 0..frames * rows * columns {
        let now = length(guided, token);
        let factor = if now > 0.0 { length(with, token) / now } else { 1.0 };
        places(token).for_each(|at| guided[at] *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: LatentShape = LatentShape { channels: 1, frames: 1, height: 2, width: 4 };
    const PATCH: usize = 2;
    // Two tokens of two by two, side by side.
    const WITHOUT: [f32; 8] = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0];
    const WITH: [f32; 8] = [3.0, 4.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0];

    #[test]
    fn classifier_free_guidance_exaggerates_the_difference() {
        let guided = Guidance::ClassifierFree.apply([&WITHOUT, &WITH], 2.0, SHAPE, PATCH);
        assert_eq!(guided, [6.0, 8.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]);
    }

    /// The first token was 5 long with the prompt, and is 10 long guided; the second is as it was.
    #[test]
    fn rescaled_tokens_are_as_long_as_the_prompts() {
        let guided = Guidance::Rescaled.apply([&WITHOUT, &WITH], 2.0, SHAPE, PATCH);
        assert_eq!(guided, WITH);
        let nothing = Guidance::Rescaled.apply([&[0.0; 8], &[0.0; 8]], 2.0, SHAPE, PATCH);
        assert_eq!(nothing, [0.0; 8]);
    }

    #[test]
    fn a_negative_prompt_takes_part_only_where_there_are_two_predictions() {
        assert!(
            Guidance::ClassifierFree.needs_negative(2.0) && Guidance::Rescaled.needs_negative(4.0)
        );
        assert!(!Guidance::ClassifierFree.needs_negative(1.0));
        assert!(!Guidance::Embedded.needs_negative(3.5) && !Guidance::None.needs_negative(3.5));
        assert_eq!(Guidance::Embedded.embedded(3.5, 2), Some(vec![3.5; 2]));
        assert_eq!(Guidance::ClassifierFree.embedded(3.5, 2), None);
    }
}
