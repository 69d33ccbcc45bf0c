//! The conditioning of a model: the prompt as its text encoders encode it. Families differ in which tensors that is,
//! so it is a list of tensors by name.

mod layout;

use compute::{Device, Dtype, Shape, Tensor, Var};

pub use layout::{ConditionLayout, OutputShape, TrainedOutput};

use crate::error::{Result, TrainerError};

/// The hidden states of a prompt's tokens, [tokens, width].
pub const TOKENS: &str = "tokens";
/// A vector for the whole prompt, `[width]`.
pub const POOLED: &str = "pooled";

/// The conditioning of one sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Condition(pub Vec<NamedTensor>);

/// A tensor of a condition.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// What the family calls it.
    pub name: String,
    /// Its shape. The first size may differ from sample to sample, as the length of a prompt does.
    pub sizes: Vec<usize>,
    /// Its values.
    pub values: Vec<f32>,
}

impl NamedTensor {
    /// From values whose last sizes are `inner`.
    pub fn new(name: &str, inner: &[usize], values: Vec<f32>) -> Self {
        let row: usize = inner.iter().product();
        let sizes = [&[values.len() / row.max(1)], inner].concat();
        Self { name: name.into(), sizes, values }
    }
}

impl Condition {
    /// How many values it has.
    pub fn n_values(&self) -> usize {
        self.0.iter().map(|named| named.values.len()).sum()
    }

    /// With a share of the tokens, one at least.
    #[must_use]
    pub fn shortened(&self, share: f64) -> Self {
        let shortened = |named: &NamedTensor| {
            if named.name != TOKENS {
                return named.clone();
            }
            let (rows, inner) = (named.sizes[0] as f64 * share, &named.sizes[1..]);
            let row: usize = inner.iter().product();
            let n = (rows as usize).max(1) * row;
            NamedTensor::new(TOKENS, inner, named.values[..n].to_vec())
        };
        Self(self.0.iter().map(shortened).collect())
    }
}

/// The conditions of a batch, on the device. What trained text encoders gave has a gradient.
pub struct Conditions(Vec<BatchedTensor>);

/// A tensor of several samples.
struct BatchedTensor {
    name: String,
    /// [samples, the most rows of any, …], padded with zeros.
    tensor: Var,
    /// Rows of each sample.
    lengths: Vec<usize>,
}

impl Conditions {
    /// Uploads the tensors of all samples, batched by name.
    pub fn upload(device: &Device, samples: &[&Condition], dtype: Dtype) -> Result<Self> {
        let Some((first, others)) = samples.split_first() else { return Ok(Self(Vec::new())) };
        let names = |condition: &Condition| -> Vec<String> {
            condition.0.iter().map(|named| named.name.clone()).collect()
        };
        if let Some(other) = others.iter().find(|other| names(other) != names(first)) {
            return Err(TrainerError::Request {
                problem: format!("prompts hold {:?} and {:?}", names(first), names(other)),
                hint: "they were encoded for different models: empty the cache",
            });
        }
        let batched = |index: usize| {
            let parts: Vec<&NamedTensor> = samples.iter().map(|sample| &sample.0[index]).collect();
            BatchedTensor::upload(device, &parts, dtype)
        };
        (0..first.0.len()).map(batched).collect::<Result<_>>().map(Self)
    }

    /// From tensors that are on the device already, with equally many rows in every sample.
    pub fn from_tensors(tensors: impl IntoIterator<Item = (&'static str, Tensor)>) -> Self {
        let batched = |(name, tensor): (&str, Tensor)| {
            let (samples, rows) = (tensor.shape().sizes()[0], tensor.shape().sizes()[1]);
            BatchedTensor { name: name.into(), tensor: tensor.into(), lengths: vec![rows; samples] }
        };
        Self(tensors.into_iter().map(batched).collect())
    }

    /// The same, with so many rows of a tensor in each sample; what follows them is padding.
    #[must_use]
    pub fn with_lengths(mut self, name: &str, lengths: Vec<usize>) -> Self {
        if let Some(batched) = self.0.iter_mut().find(|batched| batched.name == name) {
            batched.lengths = lengths;
        }
        self
    }

    /// The same with other values of each tensor, by its name.
    fn try_map(self, mut change: impl FnMut(&str, Var) -> Result<Var>) -> Result<Self> {
        let changed = |BatchedTensor { name, tensor, lengths }| {
            let tensor = change(&name, tensor)?;
            Ok(BatchedTensor { name, tensor, lengths })
        };
        self.0.into_iter().map(changed).collect::<Result<_>>().map(Self)
    }

    /// A tensor [samples, …] by its name.
    pub fn get(&self, name: &str) -> Result<&Var> {
        self.find(name).map(|batched| &batched.tensor)
    }

    /// How many rows of a tensor each sample has; what follows is padding.
    pub fn lengths(&self, name: &str) -> Result<&[usize]> {
        self.find(name).map(|batched| &batched.lengths[..])
    }

    fn find(&self, name: &str) -> Result<&BatchedTensor> {
        let found = self.0.iter().find(|batched| batched.name == name);
        found.ok_or_else(|| TrainerError::Request {
            problem: format!("the prompt was encoded without `{name}`"),
            hint: "it was encoded for another model: empty the cache",
        })
    }
}

impl BatchedTensor {
    fn upload(device: &Device, parts: &[&NamedTensor], dtype: Dtype) -> Result<Self> {
        let lengths: Vec<usize> = parts.iter().map(|part| part.sizes[0]).collect();
        let most = lengths.iter().copied().max().unwrap_or(0);
        let inner = &parts[0].sizes[1..];
        let row: usize = inner.iter().product();
        let sizes = [&[parts.len(), most], inner].concat();
        let padding = vec![0.0; most * row];
        let numbers: Vec<&[f32]> = parts
            .iter()
            .flat_map(|part| [&part.values[..], &padding[..most * row - part.values.len()]])
            .filter(|numbers| !numbers.is_empty())
            .collect();
        let tensor = device.upload_parts(Shape::new(&sizes), &numbers, dtype)?;
        Ok(Self { name: parts[0].name.clone(), tensor: tensor.into(), lengths })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(tokens: &[f32], pooled: f32) -> Condition {
        let tokens = NamedTensor::new(TOKENS, &[2], tokens.to_vec());
        Condition(vec![tokens, NamedTensor::new(POOLED, &[], vec![pooled; 3])])
    }

    #[test]
    fn shorter_prompts_are_padded_and_their_lengths_known() {
        let device = Device::cpu(1, 1 << 20).unwrap();
        let (long, short) = (condition(&[1.0, 2.0, 3.0, 4.0], 5.0), condition(&[6.0, 7.0], 8.0));
        let both = Conditions::upload(&device, &[&long, &short], Dtype::F32).unwrap();
        let tokens = both.get(TOKENS).unwrap();
        assert_eq!(tokens.shape().sizes(), [2, 2, 2]);
        assert_eq!(tokens.tensor().read_f32().unwrap(), [1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 0.0, 0.0]);
        assert_eq!(both.lengths(TOKENS).unwrap(), [2, 1]);
        assert_eq!(both.get(POOLED).unwrap().shape().sizes(), [2, 3]);
    }

    #[test]
    fn prompts_of_another_model_are_refused() {
        let device = Device::cpu(1, 1 << 20).unwrap();
        let (one, other) = (condition(&[1.0, 2.0], 1.0), Condition::default());
        let refused = Conditions::upload(&device, &[&one, &other], Dtype::F32).err().unwrap();
        assert!(refused.to_string().contains(r#"["tokens", "pooled"] and []"#), "{refused}");
        let both = Conditions::upload(&device, &[&one], Dtype::F32).unwrap();
        let missing = both.get("mask").err().unwrap().to_string();
        assert_eq!(missing, "the prompt was encoded without `mask`");
    }
}
