//! The VAE of a pipeline: its files, and latents, which are scaled, as a whole or by channel, before a model sees them.
//! `model/vae` has the kinds of autoencoders.

use std::path::{Path, PathBuf};

use compute::{Device, Params, Shape, Tape};
use weights::{BytesDoneFn, Catalog};

use super::part::PipelinePart;
use super::paths::PartSource;
use crate::error::{Result, TrainerError};
use crate::model::adapter::Adapters;
use crate::model::build::{ModelBuilder, Precision};
use crate::model::config::Unsupported;
use crate::model::files::{self, WeightFiles};
use crate::model::host::to_vec;
use crate::model::vae::{Tiling, VaeConfig, VaeDecoder, VaeEncoder, VaeScale, encode_tiled};

/// An autoencoder, open.
pub struct Vae {
    part: PipelinePart<VaeConfig>,
    statistics: LatentStatistics,
    /// Whether latents are scaled without the shift that the settings state.
    ignores_shift: bool,
}

/// The shape of a latent. An image is one frame, and its tensors have no dimension for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// Channels.
    pub channels: usize,
    /// Frames of a video; 1 of an image.
    pub frames: usize,
    /// Pixels of the latent from top to bottom.
    pub height: usize,
    /// The same from left to right.
    pub width: usize,
}

impl LatentShape {
    /// Of an image's latent.
    pub fn image(channels: usize, height: usize, width: usize) -> Self {
        Self { channels, frames: 1, height, width }
    }

    /// Values of a latent.
    pub fn count(self) -> usize {
        self.channels * self.frames * self.height * self.width
    }

    /// As a tensor's shape: [channels, height, width], with frames after the channels if there are several.
    pub fn sizes(self) -> Vec<usize> {
        let Self { channels, frames, height, width } = self;
        match frames {
            1 => vec![channels, height, width],
            _ => vec![channels, frames, height, width],
        }
    }

    /// From a tensor's shape; `None` if it is no latent's.
    pub fn from_sizes(sizes: &[usize]) -> Option<Self> {
        match *sizes {
            [channels, height, width] => Some(Self::image(channels, height, width)),
            [channels, frames, height, width] => Some(Self { channels, frames, height, width }),
            _ => None,
        }
    }

    /// The shape of a batch of latents.
    pub fn batch(self, samples: usize) -> Shape {
        Shape::new(&[&[samples][..], &self.sizes()].concat())
    }
}

/// How latents are scaled for a model: (latent - shift) · scale, channel by channel. FLUX.2's differ within a channel too.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentStatistics {
    /// Shift of each channel, and in it of each pixel of a square, row by row.
    pub shift: Vec<f32>,
    /// Scale of each.
    pub scale: Vec<f32>,
    /// Pixels along a side of the square; 1 where all pixels of a channel are scaled alike.
    pub patch: usize,
}

impl LatentStatistics {
    /// One shift and one scale for each channel.
    pub fn by_channel(shift: Vec<f32>, scale: Vec<f32>) -> Self {
        Self { shift, scale, patch: 1 }
    }

    /// Latents as models see them.
    pub fn to_model(&self, latents: &[f32], shape: LatentShape) -> Vec<f32> {
        self.map(latents, shape, |latent, shift, scale| (latent - shift) * scale)
    }

    /// Latents as the decoder sees them.
    pub fn from_model(&self, latents: &[f32], shape: LatentShape) -> Vec<f32> {
        self.map(latents, shape, |latent, shift, scale| latent / scale + shift)
    }

    /// Standard deviations of latents as models see them.
    pub fn spread_to_model(&self, deviations: &[f32], shape: LatentShape) -> Vec<f32> {
        self.map(deviations, shape, |deviation, _, scale| deviation * scale)
    }

    fn map(
        &self,
        latents: &[f32],
        LatentShape { frames, height, width, .. }: LatentShape,
        each: impl Fn(f32, f32, f32) -> f32,
    ) -> Vec<f32> {
        let patch = self.patch;
        let mut mapped = Vec::with_capacity(latents.len());
        for (line, latents) in latents.chunks(width.max(1)).enumerate() {
            let (channel, row) = (line / (frames * height), line % height % patch);
            let of_row = (channel * patch + row) * patch;
            mapped.extend(latents.iter().enumerate().map(|(column, latent)| {
                let index = of_row + column % patch;
                each(*latent, self.shift[index], self.scale[index])
            }));
        }
        mapped
    }
}

/// The moments of the latents of images or clips [3, frames, height, width], of one width and height and one number of
/// frames: means, then log variances.
pub fn vae_moments(
    encoder: &VaeEncoder,
    device: &Device,
    clips: &[&[f32]],
    [width, height]: [usize; 2],
    frames: usize,
) -> Result<(Vec<Vec<f32>>, LatentShape)> {
    let params = Params::default();
    let tape = Tape::inference(device, &params, 0);
    let shape = encoder.scale().batch(clips.len(), [3, frames, height, width]);
    let encoded = encoder.forward(&tape, &device.upload(shape, &clips.concat())?)?;
    let moments = to_vec(encoded.tensor())?;
    let latent = LatentShape::from_sizes(&encoded.shape().sizes()[1..]);
    let latent = latent.expect("latents have the dimensions of what is encoded");
    let latent = LatentShape { channels: latent.channels / 2, ..latent };
    let each = moments.len() / clips.len().max(1);
    Ok((moments.chunks(each.max(1)).map(<[f32]>::to_vec).collect(), latent))
}

/// The moments of the latent of one image or clip [3, frames, height, width], tile by tile; in the largest tiles if none
/// are given.
pub fn encode_clip(
    encoder: &VaeEncoder,
    device: &Device,
    clip: &[f32],
    [width, height]: [usize; 2],
    frames: usize,
    tiling: Option<Tiling>,
) -> Result<(Vec<f32>, LatentShape)> {
    let params = Params::default();
    let tape = Tape::inference(device, &params, 0);
    encode_tiled(&tape, encoder, clip, [frames, height, width], tiling)
}

impl Vae {
    /// A folder, or a file in the original layout; `like` is the config of published models.
    pub(super) fn open(source: PartSource, like: &VaeConfig) -> Result<Self> {
        let (catalog, config) = match source {
            PartSource::Folder(folder) => {
                return Self::of_files(PipelinePart::open(&folder, VaeConfig::read)?);
            }
            PartSource::Weights(catalog, config) => (catalog, config),
        };
        let original = like.original_prefix(&catalog);
        let infer = |catalog: &Catalog| {
            let path = catalog.path.clone();
            let found = original.and_then(|prefix| like.infer(catalog, prefix));
            let Some(config) = found else {
                let problem = format!("no VAE in the original layout in {}", path.display());
                return Err(TrainerError::Request { problem, hint: like.hint() });
            };
            let problem = |Unsupported(problem)| TrainerError::Config { problem, path };
            config.check().map(|()| config).map_err(problem)
        };
        let part = PipelinePart::of_weights(catalog, config, VaeConfig::read, infer)?;
        Self::of_files(part.in_layout(original))
    }

    /// A meta VAE, without files.
    pub(super) fn meta(folder: &Path, config: VaeConfig) -> Result<Self> {
        let (tensors, statistics) = (config.stored_tensors()?, config.statistics());
        let part = PipelinePart::meta(folder, config, tensors);
        Ok(Self { part, statistics, ignores_shift: false })
    }

    fn of_files(part: PipelinePart<VaeConfig>) -> Result<Self> {
        let statistics = part.config.stored_statistics(&part.catalog, part.original)?;
        Ok(Self { part, statistics, ignores_shift: false })
    }

    /// The same, whose latents are scaled without a shift.
    pub(super) fn ignoring_shift(self) -> Self {
        Self { ignores_shift: true, ..self }
    }

    /// Checks that the decoder's weights are there.
    pub(super) fn check(&self) -> Result<()> {
        self.find(|build| VaeDecoder::new(&self.part.config, build)).map(drop)
    }

    /// Channels of a latent.
    pub fn channels(&self) -> usize {
        self.part.config.latent_channels()
    }

    /// Image pixels per latent pixel, along a side.
    pub fn vae_scale_factor(&self) -> usize {
        self.part.config.vae_scale_factor()
    }

    /// Frames of a clip per latent frame after the first; 1 of a VAE of images.
    pub fn temporal_scale_factor(&self) -> usize {
        self.part.config.temporal_scale_factor()
    }

    /// Whether it encodes clips, and an image as a clip of one frame.
    pub fn takes_clips(&self) -> bool {
        self.temporal_scale_factor() > 1
    }

    /// The shape of the latent of a clip of this width, height and number of frames; an image has one.
    pub fn latent_shape(&self, size: [usize; 2], frames: usize) -> LatentShape {
        let scale =
            VaeScale { side: self.vae_scale_factor(), frames: self.temporal_scale_factor() };
        let [width, height] = size.map(|side| side / scale.side);
        let frames = scale.latent_frames(frames);
        LatentShape { channels: self.channels(), frames, height, width }
    }

    /// How latents are scaled for a model.
    pub fn statistics(&self) -> LatentStatistics {
        let LatentStatistics { shift, scale, patch } = self.statistics.clone();
        let shift = if self.ignores_shift { vec![0.0; shift.len()] } else { shift };
        LatentStatistics { shift, scale, patch }
    }

    /// The files that its output depends on.
    pub fn sources(&self) -> Vec<PathBuf> {
        self.part.sources()
    }

    /// Bytes of its files.
    pub fn file_bytes(&self) -> u64 {
        self.part.file_bytes()
    }

    /// What its files hold.
    pub fn catalog(&self) -> &Catalog {
        &self.part.catalog
    }

    /// Loads the decoder, which uses TF32 with CUDA.
    pub fn load_decoder(
        &self,
        device: &Device,
        precision: Precision,
        tick: BytesDoneFn<'_>,
    ) -> Result<VaeDecoder> {
        let build =
            |build: &mut ModelBuilder<'_>| VaeDecoder::new(&self.part.config, build.allow_tf32());
        let files = self.find(build)?;
        files::load_model(device, &files, precision, &mut Adapters::none(), tick, build)
    }

    /// Loads the encoder, which uses TF32 with CUDA. Its weights are checked here and not when the pipeline is opened:
    /// sampling does not need them.
    pub fn load_encoder(
        &self,
        device: &Device,
        precision: Precision,
        tick: BytesDoneFn<'_>,
    ) -> Result<VaeEncoder> {
        let build =
            |build: &mut ModelBuilder<'_>| VaeEncoder::new(&self.part.config, build.allow_tf32());
        let files = self.find(build)?;
        files::load_model(device, &files, precision, &mut Adapters::none(), tick, build)
    }

    /// The weights of the encoder or the decoder.
    fn find<T>(
        &self,
        build: impl FnOnce(&mut ModelBuilder<'_>) -> Result<T>,
    ) -> Result<WeightFiles<'_>> {
        let PipelinePart { config, catalog, original, .. } = &self.part;
        WeightFiles::find(catalog, &config.layout(catalog, *original), build)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_no_dimension_for_frames() {
        let image = LatentShape::image(16, 8, 12);
        assert_eq!(image.sizes(), [16, 8, 12]);
        assert_eq!(image.batch(2).sizes(), [2, 16, 8, 12]);
        let video = LatentShape { frames: 5, ..image };
        assert_eq!(video.sizes(), [16, 5, 8, 12]);
        assert_eq!(video.count(), 5 * image.count());
        for shape in [image, video] {
            assert_eq!(LatentShape::from_sizes(&shape.sizes()), Some(shape));
        }
        assert_eq!(LatentShape::from_sizes(&[8, 12]), None);
    }

    #[test]
    fn every_channel_has_its_own_scale() {
        let statistics = LatentStatistics::by_channel(vec![1.0, 2.0], vec![2.0, 0.5]);
        let shape = LatentShape::image(2, 1, 2);
        let scaled = statistics.to_model(&[1.0, 3.0, 2.0, 6.0], shape);
        assert_eq!(scaled, [0.0, 4.0, 0.0, 2.0]);
        assert_eq!(statistics.from_model(&scaled, shape), [1.0, 3.0, 2.0, 6.0]);
    }

    /// Of 2 x 4 pixels every second one of a row has the same scale.
    #[test]
    fn every_pixel_of_a_square_may_have_its_own_scale() {
        let (shift, scale) = (vec![1.0, 0.0, 0.0, 2.0], vec![1.0, 10.0, 100.0, 1000.0]);
        let statistics = LatentStatistics { shift, scale, patch: 2 };
        let (shape, latents) = (LatentShape::image(1, 2, 4), [3.0; 8]);
        let scaled = statistics.to_model(&latents, shape);
        assert_eq!(scaled, [2.0, 30.0, 2.0, 30.0, 300.0, 1000.0, 300.0, 1000.0]);
        assert_eq!(statistics.from_model(&scaled, shape), latents);
        let spread = statistics.spread_to_model(&latents, shape);
        assert_eq!(spread[4..6], [300.0, 3000.0]);
    }
}
