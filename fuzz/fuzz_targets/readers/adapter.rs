//! Any bytes as an adapter of an image or a language model, of every program: it is refused, or every layer gets what
//! fits it.

use std::fs;
use std::sync::LazyLock;

use trainer::model::adapter::read::{AdapterFile, Component, TargetModule};
use trainer::model::build::tensor_specs;
use trainer::model::diffusion::denoiser::DenoiserConfig;
use trainer::model::diffusion::family::DiffusionFamily;
use trainer::model::llama::Llama;
use trainer::model::llama::preset::LlamaPreset;

const SD3_CONFIG: &str =
    include_str!("../../../tests/golden/sd3/pipeline/transformer/config.json");

/// The layers of the two models, the first those that `tests/golden/sd3/adapters` are for.
static MODULES: LazyLock<[(Component, Vec<TargetModule>); 2]> = LazyLock::new(|| {
    let config = crate::place("transformer.json");
    fs::write(&config, SD3_CONFIG).expect("the temporary folder is there");
    let family = DiffusionFamily::of_transformer("SD3Transformer2DModel").expect("it is known");
    let sd3 = DenoiserConfig::read(family, &config).expect("it is whole");
    let specs = sd3.tensor_specs().expect("it is small");
    let image = TargetModule::from_specs(&specs, |module| sd3.adapter_layouts(module));
    let llama = LlamaPreset::Tiny.config(300);
    let specs = tensor_specs(|build| Llama::new(&llama, build)).expect("it is small");
    let language = TargetModule::from_specs(&specs, |_| Vec::new());
    [(Component::Transformer, image), (Component::Language, language)]
});

pub fn read(bytes: &[u8]) {
    let path = crate::place("adapter.safetensors");
    fs::write(&path, bytes).expect("the temporary folder is there");
    for (component, modules) in &*MODULES {
        let Ok(mut file) = AdapterFile::open(&path) else { return };
        if let Ok(layers) = file.take(*component, None, modules) {
            assert!(layers.values().all(|layer| layer.is_finite()), "values that are not finite");
            _ = file.check_all_taken();
        }
    }
}
