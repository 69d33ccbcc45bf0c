//! Where the layers lie in files: in the layout of diffusers, and in the original one of Wan 2.1, which ComfyUI's
//! `qwen_image_vae.safetensors` has.

use std::collections::HashSet;

use compute::Shape;
use weights::Catalog;

use super::QwenImageVaeConfig;
use crate::model::build::{TensorRole, TensorSpec};
use crate::model::files::{self, CheckpointLayout};
use crate::model::tensor_piece::TensorPiece;
use crate::model::vae::PREFIXES;

const MARK: &str = "decoder.middle.0.residual.0.gamma";

/// The dimension of frames in a stored kernel [outputs, inputs, frames, height, width].
const FRAMES: usize = 2;

/// The prefix of the VAE's names in a file of the original layout; `None` if it is none.
pub fn prefix(catalog: &Catalog) -> Option<&'static str> {
    PREFIXES.iter().find_map(|prefix| files::prefix(catalog, prefix, MARK))
}

/// Infers the config of a file in the original layout from its shapes, and from `like` what they do not tell: mean and
/// standard deviation of latents.
pub fn infer(
    catalog: &Catalog,
    prefix: &str,
    like: &QwenImageVaeConfig,
) -> Option<QwenImageVaeConfig> {
    let size = |name: &str, dim: usize| {
        let tensor = catalog.find(&format!("{prefix}{name}.weight")).ok()?;
        tensor.shape.get(dim).map(|size| *size as usize)
    };
    let layer = |index: usize, name: &str| size(&format!("encoder.downsamples.{index}.{name}"), 0);
    let base_dim = size("encoder.conv1", 0).filter(|size| *size > 0)?;
    let (mut dim_mult, mut temperal_downsample) = (Vec::new(), Vec::new());
    let mut num_res_blocks = 0;
    for index in 0..catalog.tensors.len() {
        if let Some(width) = layer(index, "residual.2") {
            dim_mult.resize(temperal_downsample.len() + 1, width / base_dim);
            num_res_blocks += usize::from(temperal_downsample.is_empty());
        } else if layer(index, "resample.1").is_some() {
            temperal_downsample.push(layer(index, "time_conv").is_some());
        } else {
            break;
        }
    }
    Some(QwenImageVaeConfig {
        base_dim,
        z_dim: size("conv2", 0)?,
        dim_mult,
        num_res_blocks,
        temperal_downsample,
        input_channels: size("encoder.conv1", 1)?,
        ..like.clone()
    })
}

/// The original layout.
pub fn original<'a>(
    config: &QwenImageVaeConfig,
    catalog: &'a Catalog,
    prefix: &'static str,
) -> CheckpointLayout<'a> {
    // Blocks of the decoder at a size, and the upsampling layer after them.
    let per_level = config.num_res_blocks + 2;
    let place = move |name: &str| {
        vec![piece(name, |name| format!("{prefix}{}", original_name(name, per_level)), catalog)]
    };
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(|_| true) }
}

/// The layout of diffusers.
pub fn diffusers(catalog: &Catalog) -> CheckpointLayout<'_> {
    let place = |name: &str| vec![piece(name, str::to_owned, catalog)];
    let halves = ["encoder.", "decoder.", "quant_conv.", "post_quant_conv."];
    let ignores = move |name: &str| halves.iter().any(|half| name.starts_with(half));
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) }
}

/// Where a tensor lies, by the file's name for it: q, k and v are thirds of one, and of kernels for several frames
/// the last is taken.
fn piece(name: &str, stored: impl Fn(&str) -> String, catalog: &Catalog) -> TensorPiece {
    let (name, part) = fused(name);
    let key = stored(&name);
    match part {
        Some(part) => TensorPiece::part(key, part, QKV.len()),
        None if catalog.find(&key).is_ok_and(|tensor| tensor.shape.len() == KERNEL_RANK) => {
            TensorPiece::last_of(key, FRAMES)
        }
        None => TensorPiece::whole(key),
    }
}

const QKV: [&str; 3] = [".to_q.", ".to_k.", ".to_v."];
const KERNEL_RANK: usize = 5;

/// A tensor's name in the layout of diffusers, and which third of it is meant.
fn fused(name: &str) -> (String, Option<usize>) {
    let part = QKV.iter().position(|own| name.contains(own));
    (part.map_or(name.to_owned(), |part| name.replace(QKV[part], ".to_qkv.")), part)
}

fn original_name(name: &str, per_level: usize) -> String {
    let name = if let Some((before, rest)) = name.split_once("up_blocks.") {
        format!("{before}upsamples.{}", flat_name(rest, per_level))
    } else {
        name.replace("down_blocks.", "downsamples.")
            .replace("mid_block.resnets.0.", "middle.0.")
            .replace("mid_block.attentions.0.", "middle.1.")
            .replace("mid_block.resnets.1.", "middle.2.")
    };
    match name.split_once('.') {
        Some(("quant_conv", rest)) => format!("conv1.{rest}"),
        Some(("post_quant_conv", rest)) => format!("conv2.{rest}"),
        _ => name
            .replace(".conv1.", ".residual.2.")
            .replace(".conv_in.", ".conv1.")
            .replace(".norm_out.", ".head.0.")
            .replace(".conv_out.", ".head.2.")
            .replace(".conv_shortcut.", ".shortcut.")
            .replace(".norm1.", ".residual.0.")
            .replace(".norm2.", ".residual.3.")
            .replace(".conv2.", ".residual.6."),
    }
}

/// `level.resnets.index.…` and `level.upsamplers.0.…` as one list.
fn flat_name(name: &str, per_level: usize) -> String {
    let words: Vec<&str> = name.splitn(4, '.').collect();
    let [level, kind, index, rest] = words[..] else { return name.to_owned() };
    let number = |word: &str| word.parse::<usize>().unwrap_or(0);
    let index = if kind == "upsamplers" { per_level - 1 } else { number(index) };
    format!("{}.{rest}", number(level) * per_level + index)
}

/// All tensors of a file that diffusers saved, of which `used` are what an image needs.
pub fn stored(config: &QwenImageVaeConfig, used: &[TensorSpec]) -> Vec<TensorSpec> {
    let mut seen = HashSet::new();
    let mut all: Vec<TensorSpec> =
        used.iter().map(as_stored).filter(|spec| seen.insert(spec.name.clone())).collect();
    let joins = config.temperal_downsample.iter().enumerate().filter(|(_, joins)| **joins);
    for (level, _) in joins {
        let width = config.channels()[level];
        let index = (level + 1) * (config.num_res_blocks + 1) - 1;
        all.extend(time_conv(&format!("encoder.down_blocks.{index}"), [width, width]));
        let up = config.temperal_downsample.len() - 1 - level;
        let width = config.channels()[level + 1];
        all.extend(time_conv(&format!("decoder.up_blocks.{up}.upsamplers.0"), [2 * width, width]));
    }
    all
}

/// A tensor with the rows and the dimension of frames that are left out when it is loaded.
fn as_stored(spec: &TensorSpec) -> TensorSpec {
    let (name, part) = fused(&spec.name);
    let sizes = match (spec.shape.sizes(), part) {
        ([rows, rest @ ..], Some(_)) => [&[QKV.len() * rows], rest].concat(),
        ([outputs, inputs, height, width], _) if !name.contains(".resample.") => {
            // Kernels are cubes.
            vec![*outputs, *inputs, *height, *height, *width]
        }
        (sizes, _) => sizes.to_vec(),
    };
    TensorSpec { name, shape: Shape::new(&sizes), role: spec.role, block: spec.block }
}

/// A layer that joins frames, which images do not use.
fn time_conv(name: &str, [outputs, inputs]: [usize; 2]) -> [TensorSpec; 2] {
    let spec = |end: &str, shape: Shape, role| TensorSpec {
        name: format!("{name}.time_conv.{end}"),
        shape,
        role,
        block: None,
    };
    let kernel = [outputs, inputs, 3, 1, 1].into();
    [spec("weight", kernel, TensorRole::Array), spec("bias", [outputs].into(), TensorRole::Vector)]
}
