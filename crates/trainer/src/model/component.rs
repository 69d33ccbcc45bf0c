//! The weights of a component's folder, among the variants that may lie there.

use std::path::Path;

use weights::Catalog;

use crate::error::Result;

/// File names of diffusers and transformers, each one file or an index of shards. Without a variant
/// first: files of half precision may be beside them.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", "model"];
const VARIANTS: [&str; 3] = ["", ".fp16", ".bf16"];

/// Opens them; a folder with other names is taken as a whole.
pub fn weights(folder: &Path) -> Result<Catalog> {
    for variant in VARIANTS {
        for stem in STEMS {
            let names = [
                format!("{stem}{variant}.safetensors"),
                format!("{stem}.safetensors.index{variant}.json"),
                format!("{stem}{variant}.safetensors.index.json"),
            ];
            if let Some(name) = names.iter().find(|name| folder.join(name).exists()) {
                return Ok(Catalog::open(&folder.join(name))?);
            }
        }
    }
    Ok(Catalog::open(folder)?)
}
