//! What looks wrong in a model file, judged from its names and shapes, and from its values where
//! they are asked for or few.

use serde::Serialize;

use crate::BytesDoneFn;
use crate::catalog::Catalog;
use crate::dtype::FileDtype;
use crate::error::Result;
use crate::load::load_blocks;
use crate::tensor::{TensorEncoding, TensorInfo};

/// Statistics of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ValueStats {
    /// Smallest finite number; nothing if there is none.
    pub min: Option<f32>,
    /// Largest finite number.
    pub max: Option<f32>,
    /// How many are NaN.
    pub n_nan: u64,
    /// How many are infinite.
    pub n_infinite: u64,
    /// How many are zero.
    pub n_zero: u64,
}

/// Looks at every number of a tensor; nothing if they are not floating-point ones.
pub fn value_stats(
    catalog: &Catalog,
    tensor: &TensorInfo,
    tick: BytesDoneFn<'_>,
) -> Result<Option<ValueStats>> {
    if let TensorEncoding::Plain(dtype) = tensor.encoding
        && !crate::convert::can_convert(dtype, FileDtype::F32)
    {
        return Ok(None);
    }
    let mut found = ValueStats { min: None, max: None, n_nan: 0, n_infinite: 0, n_zero: 0 };
    load_blocks(catalog, tensor, FileDtype::F32, &mut Vec::new(), tick, &mut |block| {
        block.as_chunks().0.iter().for_each(|bytes| found.count(f32::from_le_bytes(*bytes)));
        Ok(())
    })?;
    Ok(Some(found))
}

impl ValueStats {
    fn count(&mut self, number: f32) {
        if number.is_nan() {
            self.n_nan += 1;
        } else if number.is_infinite() {
            self.n_infinite += 1;
        } else {
            self.n_zero += u64::from(number == 0.0);
            self.min = Some(self.min.map_or(number, |min| min.min(number)));
            self.max = Some(self.max.map_or(number, |max| max.max(number)));
        }
    }
}

/// Something a user should know about a model file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Oddity {
    /// What was found.
    pub what: String,
    /// What it means or what to do.
    pub hint: String,
}

/// What names and shapes alone give away.
pub fn oddities(catalog: &Catalog) -> Vec<Oddity> {
    let mut found = Vec::new();
    let mut say = |what: String, hint: &str| found.push(Oddity { what, hint: hint.into() });
    let list = |of: &dyn Fn(&TensorInfo) -> bool| -> Vec<&str> {
        catalog
            .tensors
            .iter()
            .filter(|tensor| of(tensor))
            .map(|tensor| tensor.name.as_str())
            .collect()
    };
    let empty = list(&|tensor| tensor.numel() == 0);
    if !empty.is_empty() {
        say(
            format!("{} without numbers: {}", tensors(empty.len()), some(&empty)),
            "nothing can be learned from them",
        );
    }
    let wide = list(&|tensor| tensor.encoding == TensorEncoding::Plain(FileDtype::F64));
    if !wide.is_empty() {
        say(
            format!("{} in F64: {}", tensors(wide.len()), some(&wide)),
            "no GPU we train on computes F64; F32 takes half",
        );
    }
    if catalog.files.iter().all(|file| file.extension().is_some_and(|kind| kind == "safetensors"))
        && !catalog.metadata.contains_key("format")
    {
        say(
            "the metadata has no entry format".into(),
            "transformers refuses such a file; `hearth convert` adds it",
        );
    }
    let unpaired = unpaired_adapters(catalog);
    if !unpaired.is_empty() {
        say(
            format!("adapter halves without a partner: {}", some(&unpaired)),
            "the file is not whole",
        );
    }
    found
}

/// What each half of an adapter is called, and its partner. Source: the readers of diffusers, PEFT,
/// kohya's scripts and ComfyUI.
const ADAPTER_HALVES: &[(&str, &str)] = &[
    (".lora_A.", ".lora_B."),
    (".lora_down.", ".lora_up."),
    ("_lora.down.", "_lora.up."),
    (".lora_a", ".lora_b"),
];

/// Whether a tensor is the half of an adapter that starts at zero and must have moved since.
pub fn is_lora_up(name: &str) -> bool {
    ADAPTER_HALVES.iter().any(|(_, output)| name.contains(output))
}

fn unpaired_adapters(catalog: &Catalog) -> Vec<&str> {
    let lonely = |name: &str| {
        ADAPTER_HALVES.iter().any(|(input, output)| {
            name.contains(input) && catalog.find(&name.replace(input, output)).is_err()
                || name.contains(output) && catalog.find(&name.replace(output, input)).is_err()
        })
    };
    catalog.tensors.iter().map(|tensor| tensor.name.as_str()).filter(|name| lonely(name)).collect()
}

/// What looks wrong in the values of a tensor.
pub fn odd_values(tensor: &TensorInfo, values: &ValueStats) -> Option<Oddity> {
    let name = &tensor.name;
    let oddity = |what: String, hint: &str| Some(Oddity { what, hint: hint.into() });
    if values.n_nan + values.n_infinite > 0 {
        let what =
            format!("{name} has {} NaN and {} infinite numbers", values.n_nan, values.n_infinite);
        return oddity(what, "a model with these computes nothing; the run that made it diverged");
    }
    if is_lora_up(name) && values.n_zero == tensor.numel() && tensor.numel() > 0 {
        return oddity(
            format!("{name} is all zero"),
            "this part of the adapter has learned nothing",
        );
    }
    None
}

fn tensors(count: usize) -> String {
    if count == 1 { "1 tensor".into() } else { format!("{count} tensors") }
}

/// The first few of many names.
fn some(names: &[&str]) -> String {
    const SHOWN: usize = 3;
    let shown = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use crate::safetensors::OutputTensor;
    use crate::write::{FillTensorFn, write_file};

    fn model(
        metadata: &[(&str, &str)],
        tensors: &[(&str, FileDtype, &[f32])],
    ) -> (tempfile::TempDir, Catalog) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let entering = |(name, dtype, numbers): &(&str, FileDtype, &[f32])| OutputTensor {
            name: (*name).into(),
            dtype: *dtype,
            shape: vec![numbers.len() as u64],
        };
        let fill: FillTensorFn<'_> = &mut |tensor, out| {
            let (_, dtype, numbers) =
                tensors.iter().find(|(name, ..)| *name == tensor.name).unwrap();
            for number in *numbers {
                let bytes = if *dtype == FileDtype::F64 {
                    f64::from(*number).to_le_bytes().to_vec()
                } else {
                    number.to_le_bytes().to_vec()
                };
                out.write_all(&bytes).unwrap();
            }
            Ok(())
        };
        let metadata: BTreeMap<_, _> =
            metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        write_file(&path, &metadata, tensors.iter().map(entering).collect(), false, fill).unwrap();
        let catalog = Catalog::open(&path).unwrap();
        (folder, catalog)
    }

    fn check(metadata: &[(&str, &str)], tensors: &[(&str, FileDtype, &[f32])], expected: &[&str]) {
        let (_folder, catalog) = model(metadata, tensors);
        let mut found: Vec<String> =
            oddities(&catalog).into_iter().map(|oddity| oddity.what).collect();
        for tensor in &catalog.tensors {
            let values = value_stats(&catalog, tensor, &|_| true).unwrap().unwrap();
            found.extend(odd_values(tensor, &values).map(|oddity| oddity.what));
        }
        assert_eq!(found, expected);
    }

    const FORMAT: &[(&str, &str)] = &[("format", "pt")];

    #[test]
    fn a_plain_model_has_nothing_odd() {
        check(FORMAT, &[("a.weight", FileDtype::F32, &[1.0, 0.0])], &[]);
        check(
            FORMAT,
            &[
                ("q.lora_A.weight", FileDtype::F32, &[1.0]),
                ("q.lora_B.weight", FileDtype::F32, &[0.0, 0.1]),
            ],
            &[],
        );
    }

    #[test]
    fn odd_things_are_named() {
        check(&[], &[("a", FileDtype::F32, &[1.0])], &["the metadata has no entry format"]);
        check(FORMAT, &[("a", FileDtype::F32, &[])], &["1 tensor without numbers: a"]);
        check(FORMAT, &[("a", FileDtype::F64, &[1.0])], &["1 tensor in F64: a"]);
        check(
            FORMAT,
            &[
                ("q.lora_A.weight", FileDtype::F32, &[1.0]),
                ("q.lora_B.weight", FileDtype::F32, &[0.0, 0.0]),
            ],
            &["q.lora_B.weight is all zero"],
        );
        check(
            FORMAT,
            &[("q.lora_A.weight", FileDtype::F32, &[1.0])],
            &["adapter halves without a partner: q.lora_A.weight"],
        );
        check(
            FORMAT,
            &[("a", FileDtype::F32, &[f32::NAN, f32::INFINITY, 1.0])],
            &["a has 1 NaN and 1 infinite numbers"],
        );
    }

    #[test]
    fn extremes_are_found() {
        let (_folder, catalog) =
            model(FORMAT, &[("a", FileDtype::F32, &[3.0, -2.0, 0.0, f32::NAN])]);
        let found = value_stats(&catalog, &catalog.tensors[0], &|_| true).unwrap().unwrap();
        assert_eq!(
            found,
            ValueStats { min: Some(-2.0), max: Some(3.0), n_nan: 1, n_infinite: 0, n_zero: 1 }
        );
    }
}
