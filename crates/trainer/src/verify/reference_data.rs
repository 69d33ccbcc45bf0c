//! The reference data: tensors of `golden.safetensors` by name.

use std::collections::HashMap;

use compute::{Device, Dtype, Tape, Tensor};
use weights::load::{LoadOptions, LoadRequest, load, load_f32};
use weights::{Catalog, TensorEncoding};

use crate::error::Result;
use crate::model::adapter::LayerWeights;
use crate::model::diffusion::denoiser::Denoiser;

/// The reference data.
pub struct ReferenceData {
    /// Its file.
    pub catalog: Catalog,
    /// Rows and columns of tokens of each image, where a denoiser is given latents as tokens: the image that is denoised,
    /// then reference images. Empty where it is given latents.
    pub sizes: Vec<[usize; 2]>,
    /// Channels of latents, where the reference has these as [samples, frames, height, width, channels].
    pub channels_last: Option<usize>,
}

/// The part of a name of what the reference computed in f32 throughout, where it rounds some values to bf16 otherwise.
const WITHOUT_ROUNDING: &str = "_f32rope";

impl ReferenceData {
    pub fn has(&self, name: &str) -> bool {
        self.catalog.find(name).is_ok()
    }

    pub fn floats(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>)> {
        let without_rounding = match name.split_once('.') {
            Some(("grad", layer)) => format!("grad{WITHOUT_ROUNDING}.{layer}"),
            _ => format!("{name}{WITHOUT_ROUNDING}"),
        };
        let tensor = self.catalog.find(&without_rounding).or(self.catalog.find(name))?;
        let sizes: Vec<usize> = tensor.shape.iter().map(|size| *size as usize).collect();
        let values = load_f32(&self.catalog, tensor, 0..tensor.numel())?;
        Ok(match (self.channels_last, &sizes[..]) {
            (Some(channels), &[samples, frames, height, width, all]) => {
                channels_first(&values, [samples, frames, height, width, all], channels)
            }
            _ => (sizes, values),
        })
    }

    /// Rows, and all token ids.
    pub fn ids(&self, name: &str) -> Result<(usize, Vec<u32>)> {
        let tensor = self.catalog.find(name)?;
        let mut bytes = vec![0; tensor.numel() as usize * size_of::<i64>()];
        let wanted = vec![LoadRequest::whole(tensor, weights::FileDtype::I64, &mut bytes[..])];
        load(&self.catalog, wanted, LoadOptions::default(), &|_| true)?;
        let (numbers, _) = bytes.as_chunks::<8>();
        let rows = tensor.shape.first().map_or(1, |rows| *rows as usize);
        Ok((rows, numbers.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect()))
    }

    /// The tokens of all samples.
    pub fn tokens(&self, device: &Device) -> Result<Tensor> {
        let (rows, ids) = self.ids("in.input_ids")?;
        Ok(device.upload([rows, ids.len() / rows.max(1)], &ids)?)
    }

    pub fn tensor(&self, device: &Device, name: &str, dtype: Dtype) -> Result<Tensor> {
        let (sizes, numbers) = self.floats(name)?;
        Ok(device.upload_as(compute::Shape::new(&sizes), &numbers, dtype)?)
    }

    /// Clips [samples, 3, frames, height, width] for a VAE that takes such, else images [samples, 3, height, width],
    /// for which a reference that takes clips has a dimension for their one frame.
    pub fn images(&self, device: &Device, dtype: Dtype, takes_clips: bool) -> Result<Tensor> {
        let (mut sizes, numbers) = self.floats("in.image")?;
        match sizes[..] {
            [_, _, 1, _, _] if !takes_clips => _ = sizes.remove(2),
            [_, _, _, _] if takes_clips => sizes.insert(2, 1),
            _ => {}
        }
        Ok(device.upload_as(compute::Shape::new(&sizes), &numbers, dtype)?)
    }

    /// How many rows of each sample a mask counts: they come first.
    pub fn lengths(&self, mask: &str) -> Result<Vec<usize>> {
        let tensor = self.catalog.find(mask)?;
        let n = tensor.shape.get(1).map_or(1, |n| *n as usize);
        let TensorEncoding::Plain(dtype) = tensor.encoding else { return Ok(Vec::new()) };
        let mut bytes = vec![0; tensor.bytes as usize];
        let wanted = vec![LoadRequest::whole(tensor, dtype, &mut bytes[..])];
        load(&self.catalog, wanted, LoadOptions::default(), &|_| true)?;
        let width = bytes.len() / (tensor.numel() as usize).max(1);
        let counts: Vec<bool> =
            bytes.chunks(width.max(1)).map(|one| one.iter().any(|byte| *byte != 0)).collect();
        let length = |row: &[bool]| row.iter().take_while(|counts| **counts).count();
        Ok(counts.chunks(n).map(length).collect())
    }

    /// Rows and columns of tokens of each image, where the reference is given latents as tokens. Where it does not say
    /// them, all of one image that make up so many tokens: the right one gives the right output.
    pub fn possible_sizes(&self) -> Result<Vec<Vec<[usize; 2]>>> {
        let given = self.catalog.find("in.hidden_states")?;
        let &[_, n, _] = &given.shape[..] else { return Ok(vec![Vec::new()]) };
        if self.has("in.img_shapes") {
            let (_, shapes) = self.floats("in.img_shapes")?;
            let size = |shape: &[f32]| [shape[1] as usize, shape[2] as usize];
            return Ok(vec![shapes.chunks(3).map(size).collect()]);
        }
        if self.has("in.img_ids") {
            let (_, places) = self.floats("in.img_ids")?;
            let places: Vec<&[f32]> = places.chunks(3).collect();
            let images = places.chunk_by(|one, next| one[0] == next[0]);
            let most = |image: &[&[f32]], axis: usize| {
                image.iter().map(|at| at[axis] as usize).max().unwrap_or(0)
            };
            let size = |image: &[&[f32]]| [most(image, 1) + 1, most(image, 2) + 1];
            return Ok(vec![images.map(size).collect()]);
        }
        let n = n as usize;
        let divides = |rows: &usize| n.is_multiple_of(*rows);
        Ok((1..=n).filter(divides).map(|rows| vec![[rows, n / rows]]).collect())
    }

    /// Noisy latents, then those of reference images: of each [samples, channels, height, width].
    pub fn latents(&self, model: &Denoiser, tape: &Tape<'_>, dtype: Dtype) -> Result<Vec<Tensor>> {
        let given = self.tensor(tape.device(), "in.hidden_states", dtype)?;
        if self.sizes.is_empty() {
            return Ok(vec![given]);
        }
        let (given, mut from) = (given.into(), 0);
        let image = |size: &[usize; 2]| {
            let tokens = from..from + size[0] * size[1];
            from = tokens.end;
            model.unpatchify(tape, tape.split_tokens(&given, tokens)?.into_tensor(), *size)
        };
        self.sizes.iter().map(image).collect()
    }

    pub fn adapter(&self) -> Result<HashMap<String, LayerWeights>> {
        let names = self.catalog.tensors.iter().filter_map(|tensor| {
            tensor.name.strip_prefix("lora.").and_then(|name| name.strip_suffix(".A"))
        });
        let given = |module: &str| {
            let (sizes, down) = self.floats(&format!("lora.{module}.A"))?;
            let (_, up) = self.floats(&format!("lora.{module}.B"))?;
            let magnitude = format!("lora.{module}.M");
            let magnitude =
                if self.has(&magnitude) { Some(self.floats(&magnitude)?.1) } else { None };
            let rank = sizes[0];
            let given = LayerWeights::lora(rank, 2.0 * rank as f32, down, up);
            Ok((module.to_owned(), given.with_magnitude(magnitude)))
        };
        names.map(given).collect()
    }
}

/// The first channels of latents [samples, frames, height, width, channels] as ours are: channels before frames, and no
/// dimension for a single frame.
fn channels_first(
    values: &[f32],
    [samples, frames, height, width, all]: [usize; 5],
    channels: usize,
) -> (Vec<usize>, Vec<f32>) {
    let pixels = frames * height * width;
    let of_sample = |sample: usize| {
        let values = &values[sample * pixels * all..][..pixels * all];
        (0..channels).flat_map(move |channel| values.iter().skip(channel).step_by(all).copied())
    };
    let sizes = match frames {
        1 => vec![samples, channels, height, width],
        _ => vec![samples, channels, frames, height, width],
    };
    (sizes, (0..samples).flat_map(of_sample).collect())
}
