//! The trained adapter of a layer: its numbers, as files have them.

use super::factors::{AdapterMatrix, Factors, LokrFactor};

/// A trained adapter of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerWeights {
    /// LoRA rank.
    pub rank: usize,
    /// LoRA alpha; the scale is alpha / rank.
    pub alpha: f32,
    /// Its matrices.
    pub factors: Factors<AdapterMatrix>,
    /// `[out]`, if it is a `DoRA`.
    pub magnitude: Option<Vec<f32>>,
}

impl LayerWeights {
    /// A `LoRA` of A [rank, in] and B [out, rank].
    pub fn lora(rank: usize, alpha: f32, down: Vec<f32>, up: Vec<f32>) -> Self {
        let (inputs, outputs) = (down.len() / rank, up.len() / rank);
        let (down, up) =
            (AdapterMatrix::new([rank, inputs], down), AdapterMatrix::new([outputs, rank], up));
        Self { rank, alpha, factors: Factors::Lora { down, up }, magnitude: None }
    }

    /// The same with magnitudes.
    #[must_use]
    pub fn with_magnitude(self, magnitude: Option<Vec<f32>>) -> Self {
        Self { magnitude, ..self }
    }

    /// [out, in]
    pub fn sizes(&self) -> [usize; 2] {
        self.factors.sizes()
    }

    /// LoRA scale.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// The same with its scale in the values, if it is a `LoKr` of whole matrices.
    pub fn with_baked_scale(&self) -> Option<Self> {
        let Factors::Lokr { w1: LokrFactor::Full(w1), w2: w2 @ LokrFactor::Full(_) } =
            &self.factors
        else {
            return None;
        };
        let values = w1.values.iter().map(|value| value * self.scale()).collect();
        let w1 = LokrFactor::Full(AdapterMatrix::new(w1.sizes(), values));
        let factors = Factors::Lokr { w1, w2: w2.clone() };
        Some(Self { alpha: self.rank as f32, factors, ..self.clone() })
    }

    /// The same with its scale in B, if it is a `LoRA`.
    pub fn with_scale_in_b(&self) -> Option<Self> {
        let Factors::Lora { down, up } = &self.factors else { return None };
        let values = up.values.iter().map(|value| value * self.scale()).collect();
        let up = AdapterMatrix::new(up.sizes(), values);
        let factors = Factors::Lora { down: down.clone(), up };
        Some(Self { alpha: self.rank as f32, factors, ..self.clone() })
    }

    /// Whether it adds nothing to the layer.
    pub fn is_zero(&self) -> bool {
        let is_zero = |matrix: &AdapterMatrix| matrix.values.iter().all(|value| *value == 0.0);
        match &self.factors {
            // The others are zero where one of their matrices is.
            Factors::Norm { .. } => self.factors.all().all(is_zero),
            factors => factors.all().any(is_zero),
        }
    }

    /// Whether all of its values are finite.
    pub fn is_finite(&self) -> bool {
        let all = self.factors.all().map(|matrix| &matrix.values).chain(&self.magnitude).flatten();
        self.alpha.is_finite() && all.copied().all(f32::is_finite)
    }

    /// What it adds to the layer for one fixed input, the cosines of 1, 2, …: to compare two adapters.
    pub fn probe(&self) -> Vec<f32> {
        let [_, inputs] = self.sizes();
        let x: Vec<f64> = (1..=inputs).map(|index| (index as f64).cos()).collect();
        let scale = f64::from(self.alpha) / self.rank as f64;
        self.factors.apply(&x).into_iter().map(|value| (scale * value) as f32).collect()
    }
}
