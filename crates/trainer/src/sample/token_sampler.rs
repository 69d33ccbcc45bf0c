//! Samples the next token from logits: greedy, or with temperature, top-k and top-p.
//!
//! As transformers' generation has it: logits are divided by the temperature, then only the first `k`
//! count, then of these as few as together have the share `p`.

use compute::RandomSequence;

use crate::error::{Result, TrainerError};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenSampler {
    /// Temperature: 0 is greedy, 1 samples the model's distribution.
    pub temperature: f32,
    /// Top-k.
    pub top_k: Option<usize>,
    /// Top-p (nucleus sampling).
    pub top_p: f32,
    /// Seed.
    pub seed: u64,
}

impl TokenSampler {
    /// Greedy.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: 1.0, seed: 0 }
    }

    /// Checks the settings.
    pub fn check(&self) -> Result<()> {
        let Self { temperature, top_k, top_p, .. } = *self;
        let wrong = |problem: String, hint| Err(TrainerError::Request { problem, hint });
        if !(0.0..=100.0).contains(&temperature) {
            return wrong(format!("temperature is {temperature}"), "give a number from 0 to 100");
        }
        if top_k == Some(0) {
            return wrong("top-k is 0".into(), "leave it out to draw from all tokens");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return wrong(format!("top-p is {top_p}"), "give a number above 0, up to 1");
        }
        Ok(())
    }

    /// The token at a position of the text, from its logits.
    pub fn sample(&self, logits: &[f32], place: usize) -> u32 {
        if self.temperature == 0.0 {
            return argmax(logits);
        }
        let uniform = RandomSequence::new(self.seed, 0).uniform(place);
        drawn(self.probabilities(logits).into_iter(), uniform)
    }

    /// The token that a number, uniform between 0 and 1, draws from logits. Where all tokens count, they keep their order:
    /// sorting a large vocabulary for every token of many texts would take longer than a GPU takes for them.
    pub fn draw(&self, logits: &[f32], uniform: f32) -> u32 {
        if self.temperature == 0.0 {
            return argmax(logits);
        }
        if self.top_k.is_some() || self.top_p < 1.0 {
            return drawn(self.probabilities(logits).into_iter(), uniform);
        }
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let power = |logit: &f32| f64::from((logit - most) / self.temperature).exp();
        let sum: f64 = logits.iter().map(power).sum();
        let shares = logits.iter().map(|logit| power(logit) / sum);
        drawn((0..).zip(shares), uniform)
    }

    /// The tokens that are drawn from, likeliest first, and the share of each.
    fn probabilities(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |token: &u32| logits[*token as usize];
        // Of equals the first one comes first, so that a seed gives the same text everywhere.
        tokens.sort_by(|a, b| logit(b).total_cmp(&logit(a)).then(a.cmp(b)));
        tokens.truncate(self.top_k.unwrap_or(tokens.len()));
        let most = tokens.first().map_or(0.0, logit);
        let power = |token: &u32| f64::from((logit(token) - most) / self.temperature).exp();
        let sum: f64 = tokens.iter().map(power).sum();
        let mut shares: Vec<(u32, f64)> =
            tokens.iter().map(|token| (*token, power(token) / sum)).collect();
        let (mut before, limit) = (0.0, f64::from(self.top_p));
        shares.retain(|(_, share)| {
            let is_kept = before < limit;
            before += share;
            is_kept
        });
        let kept: f64 = shares.iter().map(|(_, share)| share).sum();
        for (_, share) in &mut shares {
            *share /= kept;
        }
        shares
    }
}

/// The token at which the shares before it and its own are more than `uniform`.
fn drawn(shares: impl Iterator<Item = (u32, f64)>, uniform: f32) -> u32 {
    let (mut left, mut last) = (f64::from(uniform), 0);
    for (token, share) in shares.filter(|(_, share)| *share > 0.0) {
        left -= share;
        last = token;
        if left < 0.0 {
            break;
        }
    }
    // The shares may sum up to a little less than one.
    last
}

/// The first of the largest.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use serde_json::Value;

    use super::*;

    fn floats(value: &Value) -> Vec<f32> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
    }

    #[test]
    fn shares_are_those_of_transformers() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama/sampling.json");
        let golden: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let logits = floats(&golden["logits"]);
        for case in golden["cases"].as_array().unwrap() {
            let choice = TokenSampler {
                temperature: case["temperature"].as_f64().unwrap() as f32,
                top_k: case["top_k"].as_u64().map(|k| k as usize),
                top_p: case["top_p"].as_f64().unwrap() as f32,
                seed: 0,
            };
            let mut got = vec![0.0; logits.len()];
            for (token, share) in choice.probabilities(&logits) {
                got[token as usize] = share as f32;
            }
            for (token, (expected, got)) in floats(&case["shares"]).iter().zip(&got).enumerate() {
                assert!((expected - got).abs() < 1e-6, "{case} {token}: {expected} {got}");
            }
        }
    }

    #[test]
    fn tokens_are_drawn_as_often_as_their_share() {
        let choice = TokenSampler { temperature: 1.0, top_k: None, top_p: 1.0, seed: 3 };
        let logits = [0.5_f32.ln(), f32::NEG_INFINITY, 0.2_f32.ln(), 0.3_f32.ln()];
        let mut counts = [0; 4];
        (0..4000).for_each(|place| counts[choice.sample(&logits, place) as usize] += 1);
        for (count, share) in counts.iter().zip([0.5, 0.0, 0.2, 0.3]) {
            assert!((f64::from(*count) / 4000.0 - share).abs() < 0.03, "{counts:?}");
        }
        let mut counts = [0; 4];
        let uniform = |n: u32| (n as f32 + 0.5) / 4000.0;
        (0..4000).for_each(|n| counts[choice.draw(&logits, uniform(n)) as usize] += 1);
        assert_eq!(counts, [2000, 0, 800, 1200]);
        let few = TokenSampler { top_k: Some(2), ..choice };
        assert!((0..4000).all(|n| [0, 3].contains(&few.draw(&logits, uniform(n)))));
        let other = TokenSampler { seed: 4, ..choice };
        assert!((0..20).any(|at| choice.sample(&logits, at) != other.sample(&logits, at)));
    }

    #[test]
    fn the_likeliest_is_the_first_of_the_largest() {
        assert_eq!(TokenSampler::greedy().sample(&[1.0, 3.0, 2.0, 3.0], 0), 1);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let fine = TokenSampler { temperature: 1.0, top_k: Some(3), top_p: 0.5, seed: 0 };
        fine.check().unwrap();
        for (choice, says) in [
            (TokenSampler { temperature: -1.0, ..fine }, "temperature is -1"),
            (TokenSampler { temperature: f32::NAN, ..fine }, "temperature is NaN"),
            (TokenSampler { top_k: Some(0), ..fine }, "top-k is 0"),
            (TokenSampler { top_p: 0.0, ..fine }, "top-p is 0"),
        ] {
            assert_eq!(choice.check().unwrap_err().to_string(), says);
        }
    }
}
