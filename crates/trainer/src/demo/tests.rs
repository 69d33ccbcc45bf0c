//! The shipped folder: that it is what the kit writes, that its parts fit, that images survive its
//! autoencoder.

use std::fs;
use std::path::{Path, PathBuf};

use compute::{Device, Dtype, Params, RandomSequence, Tape};
use weights::Catalog;

use super::autoencoder::TensorMap;
use super::kit::{save, write_untrained};
use super::paint::SIDE;
use super::{DemoStyle, Scene};
use crate::model::adapter::Adapters;
use crate::model::build::{ModelBuilder, Precision, tensor_specs};
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::guidance::GuidanceScales;
use crate::model::diffusion::paths::PartPaths;
use crate::model::diffusion::sd3::Sd3;
use crate::model::diffusion::vae::LatentShape;
use crate::model::files::{self, WeightFiles};
use crate::model::host::to_vec;
use crate::model::vae::{KlVaeConfig, VaeDecoder, VaeEncoder, kl};
use crate::sample::{Image, ImageRequest, SampleJob};

fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo")
}

/// All files below a folder, by their paths in it.
fn all_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(folder).unwrap().into());
            }
        }
    }
    found
}

#[test]
fn the_shipped_folder_is_what_is_written() {
    let folder = tempfile::tempdir().unwrap();
    write_untrained(folder.path()).unwrap();
    for path in all_files(folder.path()) {
        let (written, shipped) = (folder.path().join(&path), shipped().join(&path));
        let [written, shipped] = [written, shipped].map(|path| fs::read(path).unwrap());
        // Random numbers go through the system's logarithm, whose last bit may differ.
        let is_weights = path.extension().is_some_and(|end| end == "safetensors");
        let is_equal = if is_weights { written.len() == shipped.len() } else { written == shipped };
        assert!(is_equal, "{}", path.display());
    }
}

/// The shipped folder with small random numbers for a transformer, where it has none yet.
fn with_transformer() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for path in all_files(&shipped()) {
        let to = folder.path().join(&path);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(shipped().join(&path), to).unwrap();
    }
    let config = fs::read(folder.path().join("transformer/config.json")).unwrap();
    let config = serde_json::from_slice(&config).unwrap();
    let device = Device::cpu(1, 1 << 26).unwrap();
    let tensors: TensorMap = tensor_specs(|build| Sd3::new(&config, build))
        .unwrap()
        .into_iter()
        .zip(0..)
        .map(|(want, stream)| {
            let random = device
                .normal(want.shape, Dtype::F32, 0.02, RandomSequence::new(1, stream))
                .unwrap();
            (want.name, (want.shape.sizes().to_vec(), to_vec(&random).unwrap()))
        })
        .collect();
    save(&folder.path().join("transformer/diffusion_pytorch_model.safetensors"), &tensors).unwrap();
    folder
}

#[test]
fn the_parts_fit_and_draw_an_image() {
    let folder = with_transformer();
    let pipeline = Pipeline::open(folder.path(), &PartPaths::default()).unwrap();
    assert_eq!(pipeline.encoders.lengths().skip(1).sum::<usize>(), 16);
    let request = ImageRequest {
        prompts: vec!["neon style, a red star".into()],
        negative: String::new(),
        size: [SIDE, SIDE],
        frames: 1,
        fps: 1,
        steps: 2,
        guidance: GuidanceScales { guidance: 3.0, true_cfg: 1.0 },
        seed: 1,
        latents: None,
        references: Vec::new(),
        reference_resolution: 1024,
        precision: Precision::plain(Dtype::F32),
    };
    let job = SampleJob::new(&pipeline, request).unwrap();
    let device = Device::cpu(2, 1 << 29).unwrap();
    let plan = job.plan(device.kind(), 1 << 29).unwrap();
    let clips = job.run(&device, &plan, &|_| true).unwrap();
    let [image] = &clips[0].frames[..] else { panic!("one frame") };
    assert_eq!(image.size, [SIDE, SIDE]);
    assert!(image.values.iter().all(|number| (0.0..=1.0).contains(number)));
}

/// The shipped autoencoder at work.
struct Autoencoder {
    device: Device,
    config: KlVaeConfig,
    encoder: VaeEncoder,
    decoder: VaeDecoder,
}

impl Autoencoder {
    fn open() -> Self {
        let device = Device::cpu(2, 1 << 29).unwrap();
        let folder = shipped().join("vae");
        let config: KlVaeConfig =
            serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        let catalog = Catalog::open(&folder.join("diffusion_pytorch_model.safetensors")).unwrap();
        let layout = kl::names::diffusers(&catalog);
        let plain = Precision::plain(Dtype::F32);
        let encoder = |build: &mut ModelBuilder<'_>| kl::encoder(&config, build);
        let found = WeightFiles::find(&catalog, &layout, encoder).unwrap();
        let encoder =
            files::load_model(&device, &found, plain, &mut Adapters::none(), &|_| true, encoder)
                .unwrap();
        let decoder = |build: &mut ModelBuilder<'_>| kl::decoder(&config, build);
        let found = WeightFiles::find(&catalog, &layout, decoder).unwrap();
        let decoder =
            files::load_model(&device, &found, plain, &mut Adapters::none(), &|_| true, decoder)
                .unwrap();
        Self { device, config, encoder, decoder }
    }

    /// Means of latents as models see them.
    fn encode(&self, image: &Image) -> Vec<f32> {
        let centred: Vec<f32> = image.values.iter().map(|x| 2.0 * x - 1.0).collect();
        let input = self.device.upload([1, 3, SIDE, SIDE], &centred).unwrap();
        let params = Params::default();
        let tape = Tape::inference(&self.device, &params, 0);
        let found = to_vec(self.encoder.forward(&tape, &input).unwrap().tensor()).unwrap();
        self.config.statistics().to_model(&found[..found.len() / 2], self.latent_shape())
    }

    fn latent_shape(&self) -> LatentShape {
        let side = SIDE / self.config.vae_scale_factor();
        LatentShape::image(self.config.latent_channels, side, side)
    }

    fn decode(&self, latents: &[f32]) -> Vec<f32> {
        let shape = self.latent_shape();
        let latents = self.config.statistics().from_model(latents, shape);
        let input = self.device.upload(shape.batch(1), &latents).unwrap();
        let params = Params::default();
        let tape = Tape::inference(&self.device, &params, 0);
        let drawn = to_vec(self.decoder.forward(&tape, &input).unwrap().tensor()).unwrap();
        drawn.into_iter().map(|number| (number / 2.0 + 0.5).clamp(0.0, 1.0)).collect()
    }
}

/// In decibels; above 27 edges look clean.
fn peak_signal_to_noise(a: &[f32], b: &[f32]) -> f32 {
    let squares: f32 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    -10.0 * (squares / a.len() as f32).log10()
}

#[test]
fn images_survive_the_autoencoder() {
    let autoencoder = Autoencoder::open();
    let (mut least, mut sum, mut squares) = (f32::MAX, 0.0, vec![0.0; 16]);
    let count = 16;
    for index in 0..count {
        let style = if index % 2 == 0 { DemoStyle::Flat } else { DemoStyle::Neon };
        // None of those that it was made from.
        let image = Scene::new(style, 77, index).draw(SIDE);
        let latents = autoencoder.encode(&image);
        for (at, channel) in latents.chunks(latents.len() / 16).enumerate() {
            let mean = channel.iter().map(|x| x * x).sum::<f32>() / channel.len() as f32;
            squares[at] += mean / count as f32;
        }
        let found = peak_signal_to_noise(&image.values, &autoencoder.decode(&latents));
        least = least.min(found);
        sum += found;
    }
    assert!(sum / count as f32 > 27.0, "{}", sum / count as f32);
    assert!(least > 22.0, "{least}");
    // What a model draws from noise of deviation 1 should have a deviation near it.
    let deviations: Vec<f32> = squares.into_iter().map(f32::sqrt).collect();
    assert!(deviations.iter().all(|deviation| (0.2..3.0).contains(deviation)), "{deviations:?}");
}
