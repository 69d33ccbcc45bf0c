//! A whole model, as the folder that diffusers saves: a transformer with new weights among the other
//! parts of the model it came from.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;

use weights::convert::encode;
use weights::load::floats;
use weights::safetensors::Entering;
use weights::write::write_file;
use weights::{Dtype, WeightsError};

use crate::error::{Result, TrainerError};
use crate::model::build::wants;
use crate::model::sd3::pipeline::Pipeline;
use crate::model::sd3::{Config, Sd3, initial};
use crate::model::{config, files};

/// Where a transformer lies in a model's folder.
const TRANSFORMER: &str = "transformer";
const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

/// Writes the model of `base`, with what was trained in its transformer's place.
pub fn write(
    pipeline: &Pipeline,
    trained: &BTreeMap<String, Vec<f32>>,
    dtype: compute::Dtype,
    out: &Path,
) -> Result<()> {
    copy_rest(&pipeline.path, out)?;
    let transformer = &pipeline.transformer;
    let names = wants(|build| Sd3::new(&transformer.config, build))?;
    let dtype = files::stored(dtype);
    let entering = names.iter().map(|want| Entering {
        name: want.name.clone(),
        dtype,
        shape: want.shape.sizes().iter().map(|size| *size as u64).collect(),
    });
    let path = out.join(TRANSFORMER).join(WEIGHTS);
    write_file(&path, &BTreeMap::new(), entering.collect(), false, &mut |tensor, file| {
        let numbers = if let Some(numbers) = trained.get(&tensor.name) {
            numbers.clone()
        } else {
            // What is computed and not trained, as the table of positions.
            let found = transformer.catalog.find(&tensor.name)?;
            floats(&transformer.catalog, found, 0..found.count())?
        };
        let mut bytes = vec![0; numbers.len() * dtype.bytes() as usize];
        encode(&numbers, dtype, &mut bytes);
        file.write_all(&bytes).map_err(|source| WeightsError::io("write", &path, source))
    })?;
    Ok(())
}

/// Writes the model of a folder with weights that have learnt nothing yet.
pub fn write_initial(base: &Path, seed: u64, out: &Path) -> Result<()> {
    let settings = base.join(TRANSFORMER).join("config.json");
    let config: Config = config::read_checked(&settings, Config::check)?;
    copy_rest(base, out)?;
    initial::write(&config, seed, Dtype::F32, &out.join(TRANSFORMER).join(WEIGHTS))
}

/// Copies a model's folder but for the weights of its transformer.
pub(crate) fn copy_rest(from: &Path, to: &Path) -> Result<()> {
    let is_transformer = from.file_name() == Some(OsStr::new(TRANSFORMER));
    let is_left_out = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_hidden = name.starts_with('.');
        is_hidden || is_transformer && (name != "config.json")
    };
    let copy = || -> io::Result<Vec<_>> {
        fs::create_dir_all(to)?;
        let mut folders = Vec::new();
        for entry in fs::read_dir(from)? {
            let path = entry?.path();
            let Some(name) = path.file_name().filter(|_| !is_left_out(&path)) else { continue };
            if path.is_dir() {
                folders.push((path.clone(), to.join(name)));
            } else {
                fs::copy(&path, to.join(name))?;
            }
        }
        Ok(folders)
    };
    let folders =
        copy().map_err(|source| TrainerError::Io { what: "copy", path: from.into(), source })?;
    folders.iter().try_for_each(|(from, to)| copy_rest(from, to))
}
