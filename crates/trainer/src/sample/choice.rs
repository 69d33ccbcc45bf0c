//! Which token comes next, out of the logits of all: the likeliest, or one drawn by its likelihood.
//!
//! As transformers' generation has it: logits are divided by the temperature, then only the first `k`
//! count, then of these as few as together have the share `p`.

use compute::Stream;

use crate::error::{Result, TrainerError};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// 0 takes the likeliest; 1 draws as the model says; more is wilder.
    pub temperature: f32,
    /// Only so many of the likeliest are drawn from.
    pub top_k: Option<usize>,
    /// Only as few of the likeliest as have this share together.
    pub top_p: f32,
    /// What the draws follow from.
    pub seed: u64,
}

impl Choice {
    /// The likeliest, always.
    pub fn likeliest() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: 1.0, seed: 0 }
    }

    /// That the numbers make sense.
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

    /// The token at a place of the text, whose logits are these.
    pub fn choose(&self, logits: &[f32], place: usize) -> u32 {
        if self.temperature == 0.0 {
            return likeliest(logits);
        }
        let shares = self.shares(logits);
        let mut left = f64::from(Stream::new(self.seed, 0).uniform(place));
        for (token, share) in &shares {
            left -= share;
            if left < 0.0 {
                return *token;
            }
        }
        // The shares may sum up to a little less than one.
        shares.last().map_or(0, |(token, _)| *token)
    }

    /// The tokens that are drawn from, likeliest first, and the share of each.
    fn shares(&self, logits: &[f32]) -> Vec<(u32, f64)> {
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
        shares.iter_mut().for_each(|(_, share)| *share /= kept);
        shares
    }
}

/// The first of the largest.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}
