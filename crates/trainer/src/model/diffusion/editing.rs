//! Editing models: an image is made from a prompt and reference images. How a family scales references before its VAE
//! and its text encoder see them.

/// How a family takes reference images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Editing {
    /// The most references of one image.
    pub max_references: usize,
    /// Whether it needs one; else it makes images from prompts alone, too.
    pub needs_reference: bool,
    /// Sizes that the VAE sees.
    pub sizing: ReferenceSizing,
    /// The sizes that the text encoder sees, where it sees images.
    pub encoder: Option<EncoderImages>,
}

/// Which sizes references get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceSizing {
    /// They are scaled to that of a list of sizes whose aspect ratio is nearest.
    Nearest(&'static [[u32; 2]]),
    /// They are scaled to an area, with sides that are multiples of a number.
    Area {
        /// Of both sides.
        multiple: u32,
    },
    /// They are scaled down to an area if they are larger, and cropped to sides that are multiples of a number.
    Cropped {
        /// Of both sides.
        multiple: u32,
    },
}

/// What a text encoder sees of reference images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderImages {
    /// The images as the VAE sees them.
    Same,
    /// Images of the area of a square with this side.
    Side(u32),
}

/// The side of a square with the area of reference images, in the pipelines of all families.
pub const REFERENCE_RESOLUTION: u32 = 1024;

/// Taken: the sizes that FLUX.1 Kontext was trained on, as diffusers' `FluxKontextPipeline` has them.
pub const KONTEXT_SIZES: [[u32; 2]; 17] = [
    [672, 1568],
    [688, 1504],
    [720, 1456],
    [752, 1392],
    [800, 1328],
    [832, 1248],
    [880, 1184],
    [944, 1104],
    [1024, 1024],
    [1104, 944],
    [1184, 880],
    [1248, 832],
    [1328, 800],
    [1392, 752],
    [1456, 720],
    [1504, 688],
    [1568, 672],
];

/// Sides of [`KONTEXT_SIZES`] are multiples of this.
const KONTEXT_MULTIPLE: u32 = 16;

impl Editing {
    /// The size in which the VAE sees a reference of this width and height, if references have the area of a square of
    /// `resolution`.
    pub fn vae_size(&self, size: [u32; 2], resolution: u32) -> [u32; 2] {
        match self.sizing {
            ReferenceSizing::Nearest(sizes) => nearest(sizes, size).map(|side| {
                let scaled =
                    u64::from(side) * u64::from(resolution) / u64::from(REFERENCE_RESOLUTION);
                (scaled as u32 / KONTEXT_MULTIPLE * KONTEXT_MULTIPLE).max(KONTEXT_MULTIPLE)
            }),
            ReferenceSizing::Area { multiple } => of_area(size, resolution, multiple),
            ReferenceSizing::Cropped { multiple } => {
                scaled_down(size, resolution).map(|side| (side / multiple * multiple).max(multiple))
            }
        }
    }

    /// The reference whose size an image has where none is asked for, as the pipelines choose it.
    pub fn sizing_reference<'a, R>(&self, references: &'a [R]) -> Option<&'a R> {
        match self.sizing {
            ReferenceSizing::Cropped { .. } => references.first(),
            ReferenceSizing::Nearest(_) | ReferenceSizing::Area { .. } => references.last(),
        }
    }

    /// The side of the square to whose area references are scaled down before they are cropped, where they are.
    pub fn cropped_from(&self, resolution: u32) -> Option<u32> {
        matches!(self.sizing, ReferenceSizing::Cropped { .. }).then_some(resolution)
    }

    /// Sides of references are multiples of this.
    pub fn multiple(&self) -> u32 {
        match self.sizing {
            ReferenceSizing::Nearest(_) => KONTEXT_MULTIPLE,
            ReferenceSizing::Area { multiple } | ReferenceSizing::Cropped { multiple } => multiple,
        }
    }

    /// The size in which the text encoder sees it, where it sees images.
    pub fn encoder_size(&self, size: [u32; 2], resolution: u32) -> Option<[u32; 2]> {
        match (self.encoder?, self.sizing) {
            (EncoderImages::Side(side), ReferenceSizing::Area { multiple }) => {
                Some(of_area(size, side, multiple))
            }
            _ => Some(self.vae_size(size, resolution)),
        }
    }
}

/// A size of this aspect ratio that has at most the area of a square, as Python's `int` rounds it.
pub fn scaled_down([width, height]: [u32; 2], side: u32) -> [u32; 2] {
    let (area, most) = (f64::from(width) * f64::from(height), f64::from(side) * f64::from(side));
    if area <= most {
        return [width, height];
    }
    let scale = (most / area).sqrt();
    [width, height].map(|side| (f64::from(side) * scale) as u32)
}

/// The size whose aspect ratio is nearest; of two as near the narrower one, as diffusers has it.
fn nearest(sizes: &[[u32; 2]], [width, height]: [u32; 2]) -> [u32; 2] {
    let ratio = |[width, height]: [u32; 2]| f64::from(width) / f64::from(height.max(1));
    let distance = |size: &[u32; 2]| (ratio(*size) - ratio([width, height])).abs();
    let by_distance = |a: &&[u32; 2], b: &&[u32; 2]| distance(a).total_cmp(&distance(b));
    *sizes.iter().min_by(by_distance).expect("there are sizes")
}

/// A size of this aspect ratio with the area of a square, both sides rounded to a multiple. Halves go to the even
/// multiple, as in Python.
fn of_area([width, height]: [u32; 2], side: u32, multiple: u32) -> [u32; 2] {
    let ratio = f64::from(width.max(1)) / f64::from(height.max(1));
    let wide = (f64::from(side) * f64::from(side) * ratio).sqrt();
    let step = f64::from(multiple);
    [wide, wide / ratio].map(|side| ((side / step).round_ties_even() * step).max(step) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KONTEXT: Editing = Editing {
        max_references: 1,
        needs_reference: true,
        sizing: ReferenceSizing::Nearest(&KONTEXT_SIZES),
        encoder: None,
    };
    const PLUS: Editing = Editing {
        max_references: 3,
        needs_reference: true,
        sizing: ReferenceSizing::Area { multiple: 32 },
        encoder: Some(EncoderImages::Side(384)),
    };

    /// A reference's size, and what Kontext, the VAE and the text encoder of Qwen-Image-Edit-Plus see.
    type SizeRow = ([u32; 2], [u32; 2], [u32; 2], [u32; 2]);
    const EXPECTED: [SizeRow; 9] = [
        ([1024, 1024], [1024, 1024], [1024, 1024], [384, 384]),
        ([1920, 1080], [1392, 752], [1376, 768], [512, 288]),
        ([1080, 1920], [752, 1392], [768, 1376], [288, 512]),
        ([640, 480], [1184, 880], [1184, 896], [448, 320]),
        ([333, 1000], [672, 1568], [576, 1760], [224, 672]),
        ([1500, 1501], [1024, 1024], [1024, 1024], [384, 384]),
        ([4000, 1000], [1568, 672], [2048, 512], [768, 192]),
        ([700, 300], [1568, 672], [1568, 672], [576, 256]),
        ([97, 64], [1248, 832], [1248, 832], [480, 320]),
    ];

    /// Computed by diffusers' pipelines: `PREFERRED_KONTEXT_RESOLUTIONS` and `calculate_dimensions`.
    #[test]
    fn sizes_are_those_of_the_pipelines() {
        for (size, kontext, vae, encoder) in EXPECTED {
            assert_eq!(KONTEXT.vae_size(size, 1024), kontext, "{size:?}");
            assert_eq!(PLUS.vae_size(size, 1024), vae, "{size:?}");
            assert_eq!(PLUS.encoder_size(size, 1024), Some(encoder), "{size:?}");
        }
        assert_eq!(KONTEXT.encoder_size([512, 512], 1024), None);
    }

    /// Computed by diffusers' `Flux2KleinPipeline`: of an image, the size that it is scaled to,
    /// and what is left of it.
    #[test]
    fn larger_images_are_scaled_down_and_all_are_cropped() {
        let sizing = ReferenceSizing::Cropped { multiple: 16 };
        let klein = Editing { sizing, ..KONTEXT };
        for (size, scaled, cropped) in [
            ([1024, 1024], [1024, 1024], [1024, 1024]),
            ([1920, 1080], [1365, 768], [1360, 768]),
            ([640, 480], [640, 480], [640, 480]),
            ([1025, 1024], [1024, 1023], [1024, 1008]),
            ([333, 1000], [333, 1000], [320, 992]),
            ([4000, 1000], [2048, 512], [2048, 512]),
        ] {
            assert_eq!(scaled_down(size, 1024), scaled, "{size:?}");
            assert_eq!(klein.vae_size(size, 1024), cropped, "{size:?}");
        }
        assert_eq!((klein.cropped_from(512), PLUS.cropped_from(512)), (Some(512), None));
        assert_eq!(
            (klein.sizing_reference(&[1, 2]), PLUS.sizing_reference(&[1, 2])),
            (Some(&1), Some(&2))
        );
    }

    #[test]
    fn references_of_another_resolution_keep_their_shape() {
        assert_eq!(KONTEXT.vae_size([1000, 1000], 512), [512, 512]);
        assert_eq!(KONTEXT.vae_size([3000, 1000], 256), [384, 160]);
        assert_eq!(PLUS.vae_size([2000, 1000], 64), [96, 32]);
        assert_eq!(PLUS.vae_size([1, 60_000], 64), [32, 15_680]);
    }
}
