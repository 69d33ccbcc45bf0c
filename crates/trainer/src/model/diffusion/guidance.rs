//! Guidance of a sampler: classifier-free guidance, or a guidance scale that the model takes as an input.

use super::vae::LatentShape;

/// The kind of guidance of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guidance {
    /// None.
    None,
    /// Classifier-free guidance: predictions with the prompt and with the negative prompt (Ho and
    /// Salimans, arXiv 2207.12598).
    ClassifierFree,
    /// The same, with every token rescaled to the norm of the prompt's prediction: Qwen-Image.
    Rescaled,
    /// The scale is an input of the model, which predicts once (guidance distillation): FLUX.1 dev.
    Embedded,
}

impl Guidance {
    /// Whether a negative prompt is used at this scale.
    pub fn needs_negative(self, scale: f32) -> bool {
        matches!(self, Self::ClassifierFree | Self::Rescaled) && scale > 1.0
    }

    /// The scale as an input of the model for each of `n` samples.
    pub fn embedded(self, scale: f32, n: usize) -> Option<Vec<f32>> {
        (self == Self::Embedded).then(|| vec![scale; n])
    }

    /// The embedded scale in training. Taken: 1 in most trainers, so that samples at the usual scale are guided
    /// versions of what was trained.
    pub fn training_scale(self, n: usize) -> Option<Vec<f32>> {
        self.embedded(1.0, n)
    }

    /// The guided velocity, from those without and with the prompt; tokens of the latents are squares of `patch`.
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

/// Scales every token to its norm in `with`.
fn rescale(guided: &mut [f32], with: &[f32], shape: LatentShape, patch: usize) {
    let LatentShape { channels, frames, height, width } = shape;
    let (rows, columns) = (height / patch, width / patch);
    let indices = |token: usize| {
        let (frame, row, column) =
            (token / (rows * columns), token / columns % rows, token % columns);
        (0..channels * patch * patch).map(move |index| {
            let (channel, inner) = (index / (patch * patch), index % (patch * patch));
            let [y, x] = [row * patch + inner / patch, column * patch + inner % patch];
            ((channel * frames + frame) * height + y) * width + x
        })
    };
    let norm = |values: &[f32], token| {
        indices(token).map(|at| values[at] * values[at]).sum::<f32>().sqrt()
    };
    for token in 0..frames * rows * columns {
        let now = norm(guided, token);
        let factor = if now > 0.0 { norm(with, token) / now } else { 1.0 };
        indices(token).for_each(|at| guided[at] *= factor);
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
    fn classifier_free_guidance_scales_the_difference() {
        let guided = Guidance::ClassifierFree.apply([&WITHOUT, &WITH], 2.0, SHAPE, PATCH);
        assert_eq!(guided, [6.0, 8.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]);
    }

    /// The first token has norm 5 with the prompt and 10 guided; the second is unchanged.
    #[test]
    fn rescaled_tokens_have_the_norm_of_the_prompts() {
        let guided = Guidance::Rescaled.apply([&WITHOUT, &WITH], 2.0, SHAPE, PATCH);
        assert_eq!(guided, WITH);
        let nothing = Guidance::Rescaled.apply([&[0.0; 8], &[0.0; 8]], 2.0, SHAPE, PATCH);
        assert_eq!(nothing, [0.0; 8]);
    }

    #[test]
    fn a_negative_prompt_is_used_only_where_there_are_two_predictions() {
        assert!(
            Guidance::ClassifierFree.needs_negative(2.0) && Guidance::Rescaled.needs_negative(4.0)
        );
        assert!(!Guidance::ClassifierFree.needs_negative(1.0));
        assert!(!Guidance::Embedded.needs_negative(3.5) && !Guidance::None.needs_negative(3.5));
        assert_eq!(Guidance::Embedded.embedded(3.5, 2), Some(vec![3.5; 2]));
        assert_eq!(Guidance::ClassifierFree.embedded(3.5, 2), None);
    }
}
