//! Guidance of a sampler: classifier-free guidance, or a guidance scale that the model takes as an input.

use super::vae::LatentShape;

/// The scales of guidance that images are sampled with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuidanceScales {
    /// The family's own kind of guidance.
    pub guidance: f32,
    /// Classifier-free guidance on top, for families whose own kind is another; 1 is without.
    pub true_cfg: f32,
}

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
    /// The same, where the scale says how much of the difference is added to the prediction with the prompt, so that 0 is
    /// without: Z-Image.
    Added,
    /// The scale is an input of the model, which predicts once (guidance distillation): FLUX.1 dev.
    Embedded,
}

impl Guidance {
    /// Whether classifier-free guidance is the family's own kind.
    pub fn is_classifier_free(self) -> bool {
        matches!(self, Self::ClassifierFree | Self::Rescaled | Self::Added)
    }

    /// The scale of classifier-free guidance, if there is any: a negative prompt is used then.
    pub fn cfg_scale(self, scales: GuidanceScales) -> Option<f32> {
        let scale = if self.is_classifier_free() { scales.guidance } else { scales.true_cfg };
        (scale > self.without()).then_some(scale)
    }

    /// The scale that is no guidance.
    pub fn without(self) -> f32 {
        if self == Self::Added { 0.0 } else { 1.0 }
    }

    /// The scale as an input of the model for each of `n` samples.
    pub fn embedded(self, scale: f32, n: usize) -> Option<Vec<f32>> {
        (self == Self::Embedded).then(|| vec![scale; n])
    }

    /// The guided velocity, from those without and with the prompt; tokens of the latents are squares of `patch`.
    pub fn apply(
        self,
        [without, with]: [&[f32]; 2],
        scale: f32,
        shape: LatentShape,
        patch: usize,
    ) -> Vec<f32> {
        let is_added = self == Self::Added;
        let guide = |(without, with): (&f32, &f32)| {
            let from = if is_added { with } else { without };
            from + scale * (with - without)
        };
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
        let guided = Guidance::Added.apply([&WITHOUT, &WITH], 1.0, SHAPE, PATCH);
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
        let scales = |guidance, true_cfg| GuidanceScales { guidance, true_cfg };
        for own in [Guidance::ClassifierFree, Guidance::Rescaled] {
            assert_eq!(own.cfg_scale(scales(4.0, 1.0)), Some(4.0));
            assert_eq!(own.cfg_scale(scales(1.0, 1.0)), None);
        }
        assert_eq!(Guidance::Added.cfg_scale(scales(0.5, 1.0)), Some(0.5));
        assert_eq!(Guidance::Added.cfg_scale(scales(0.0, 1.0)), None);
        for other in [Guidance::Embedded, Guidance::None] {
            assert_eq!(other.cfg_scale(scales(3.5, 1.0)), None);
            assert_eq!(other.cfg_scale(scales(3.5, 2.0)), Some(2.0));
        }
        assert_eq!(Guidance::Embedded.embedded(3.5, 2), Some(vec![3.5; 2]));
        assert_eq!(Guidance::ClassifierFree.embedded(3.5, 2), None);
    }
}
