//! Layers with adapters as `LyCORIS` and PEFT wrote them, against their outputs and gradients
//! (`tests/golden/adapters/generate.py`).

use std::path::{Path, PathBuf};

use compute::{Device, Dtype, Gradients, Quantisation, Quantised, Shape};
use weights::Catalog;
use weights::load::load_f32;

use super::*;
use crate::model::adapter::read::{AdapterFile, Component, TargetModule};
use crate::model::adapter::{Adapters, NormPart};
use crate::model::build::{TensorRole, TensorSpec};
use crate::model::host::{relative_error, to_vec};

const MODULES: [&str; 2] = ["first", "second"];
const TENSORS: [(&str, TensorRole); 5] = [
    ("first.weight", TensorRole::Matrix),
    ("norm.weight", TensorRole::Vector),
    ("norm.bias", TensorRole::Vector),
    ("rms.weight", TensorRole::Vector),
    ("second.weight", TensorRole::Matrix),
];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/adapters")
}

/// The reference's tensors, on a device.
struct Reference {
    device: Device,
    catalog: Catalog,
}

impl Reference {
    fn open() -> Self {
        let device = Device::cpu(2, 1 << 24).unwrap();
        Self { device, catalog: Catalog::open(&golden().join("expected.safetensors")).unwrap() }
    }

    fn values(&self, name: &str) -> (Shape, Vec<f32>) {
        let tensor = self.catalog.find(name).unwrap();
        let sizes: Vec<usize> = tensor.shape.iter().map(|size| *size as usize).collect();
        (Shape::new(&sizes), load_f32(&self.catalog, tensor, 0..tensor.numel()).unwrap())
    }

    fn tensor(&self, name: &str) -> Tensor {
        let (shape, values) = self.values(name);
        self.device.upload(shape, &values).unwrap()
    }

    /// The two layers with an adapter from a file.
    fn layers(&self, path: &Path, adapters: &mut Adapters) -> [LinearLayer; 2] {
        let spec = |(name, role): (&str, TensorRole)| {
            let (shape, _) = self.values(&format!("base.{name}"));
            TensorSpec { name: name.into(), shape, role, block: None }
        };
        let specs = TENSORS.map(spec);
        let modules = TargetModule::with_norms(&specs, |_| Vec::new());
        let mut file = AdapterFile::open(path).unwrap();
        *adapters = Adapters::loaded(file.take(Component::Transformer, None, &modules).unwrap());
        file.check_all_taken().unwrap();
        MODULES.map(|module| {
            let weight = Var::from(self.tensor(&format!("base.{module}.weight")));
            let sizes = [weight.shape().rows(), weight.shape().width()];
            let weight = WeightTensor::Dense(weight);
            let adapter = adapters.attach(&self.device, module, &weight, sizes).unwrap();
            assert!(adapter.is_some(), "{module}");
            let bias = Var::from(self.tensor(&format!("base.{module}.bias")));
            LinearLayer {
                weight: LayerWeight::Frozen(weight),
                bias: Some(ModelTensor::Frozen(bias)),
                adapter,
                training: None,
            }
        })
    }

    /// The norm of this name with what a file adds to it, if it adds something.
    fn norm(&self, adapters: &mut Adapters, module: &str, has_bias: bool) -> Vec<NormTensor> {
        let part = NormPart { has_bias, is_unused: false };
        let keys = adapters.attach_norm(&self.device, module, 40, part).unwrap().unwrap();
        let added = [Some(keys.weight), keys.bias];
        let all = ["weight", "bias"].into_iter().zip(added).take(1 + usize::from(has_bias));
        all.map(|(end, added)| {
            let own = Var::from(self.tensor(&format!("base.{module}.{end}")));
            NormTensor { tensor: ModelTensor::Frozen(own), added }
        })
        .collect()
    }

    fn compare(&self, name: &str, ours: &[f32]) {
        let apart = relative_error(&self.values(name).1, ours);
        assert!(apart < 2e-5, "{name} differs by {apart:e}");
    }
}

fn check(case: &str, prefix: &str, lora: [&'static str; 2]) {
    let reference = Reference::open();
    let mut adapters = Adapters::none();
    let path = golden().join(case);
    let path = if path.is_dir() { path } else { path.with_extension("safetensors") };
    let [first, second] = reference.layers(&path, &mut adapters);
    let norms = case.ends_with("norm").then(|| {
        let before = reference.norm(&mut adapters, "norm", true);
        (before, reference.norm(&mut adapters, "rms", false))
    });
    let tape = Tape::training(&reference.device, &adapters.params, 0);
    let x = tape.leaf(reference.tensor("x"));
    let inner = match &norms {
        None => first.forward_activated(&tape, &x, Activation::Silu).unwrap(),
        Some((before, after)) => {
            let var = |norm: &NormTensor| norm.var(&tape).unwrap();
            let (weight, bias) = (var(&before[0]), var(&before[1]));
            let inner = first.forward(&tape, &x).unwrap();
            let inner = tape.layer_norm(&inner, Some(&weight), Some(&bias), 1e-5).unwrap();
            let inner = tape.activate(&inner, Activation::Silu).unwrap();
            tape.rms_norm(&inner, Some(&var(&after[0])), 1e-6).unwrap()
        }
    };
    let y = second.forward(&tape, &inner).unwrap();
    reference.compare(&format!("{case}.out"), &to_vec(y.tensor()).unwrap());
    let mut gradients = Gradients::default();
    let mut leaves = tape.backward_from(y, reference.tensor("grad.out"), &mut gradients).unwrap();
    let of_x = leaves.take(&x).unwrap();
    reference.compare(&format!("{case}.grad.x"), &to_vec(&of_x).unwrap());
    for layer in &adapters.layers {
        for (name, key) in layer.factors.named(lora) {
            let name = format!("{case}.grad.{prefix}{}.{name}", layer.module);
            reference.compare(&name, &to_vec(gradients.get(*key).unwrap()).unwrap());
        }
    }
}

#[test]
fn adapters_of_lycoris() {
    for case in [
        "lycoris_loha",
        "lycoris_loha_rs",
        "lycoris_lokr",
        "lycoris_lokr_four",
        "lycoris_lokr_both",
        "lycoris_lokr_full",
        "lycoris_lora_rs",
        "lycoris_norm",
    ] {
        check(case, "lycoris_", ["lora_down.weight", "lora_up.weight"]);
    }
}

#[test]
fn adapters_of_peft() {
    for case in ["peft_loha", "peft_lokr", "peft_lokr_both", "peft_lokr_full", "peft_lora_rs"] {
        check(case, "base_model.model.", ["lora_A.weight", "lora_B.weight"]);
    }
}

/// Over a quantised weight an adapter adds the same as over the numbers that it stands for.
#[test]
fn adapters_over_quantised_weights() {
    let device = Device::cpu(2, 1 << 24).unwrap();
    let wave = |shape: [usize; 2], by: f32| {
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|at| (at as f32 * by).sin()).collect();
        device.upload(shape, &values).unwrap()
    };
    let pair = |adapters: &mut Adapters, by: f32| {
        [wave([64, 2], by), wave([2, 128], by + 0.1)].map(|matrix| adapters.params.add(matrix))
    };
    let mut adapters = Adapters::none();
    let all = [
        Factors::Loha { w1: pair(&mut adapters, 0.3), w2: pair(&mut adapters, 0.7) },
        Factors::Lokr {
            w1: LokrFactor::Full(adapters.params.add(wave([4, 8], 0.2))),
            w2: LokrFactor::Full(adapters.params.add(wave([16, 16], 0.9))),
        },
    ];
    let quantised = Quantised::new(&wave([64, 128], 0.05), Quantisation::Nf4).unwrap();
    let dense = device.upload([64, 128], &quantised.to_f32_vec().unwrap()).unwrap();
    for factors in all {
        let output = |weight: WeightTensor| {
            let adapter = LayerAdapter {
                factors: factors.clone(),
                scale: 0.5,
                dropout: 0.0,
                magnitude: None,
            };
            let layer = LinearLayer {
                weight: LayerWeight::Frozen(weight),
                bias: None,
                adapter: Some(adapter),
                training: None,
            };
            let tape = Tape::inference(&device, &adapters.params, 0);
            let y = layer.forward(&tape, &Var::from(wave([7, 128], 0.4))).unwrap();
            assert_eq!(y.dtype(), Dtype::F32);
            to_vec(y.tensor()).unwrap()
        };
        let over_codes = output(WeightTensor::Quantised(quantised.clone()));
        let over_numbers = output(WeightTensor::Dense(dense.clone().into()));
        let apart = relative_error(&over_numbers, &over_codes);
        assert!(apart < 1e-5, "{}: {apart:e}", factors.form_name());
    }
}
