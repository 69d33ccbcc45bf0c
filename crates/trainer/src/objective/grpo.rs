//! Group relative policy optimisation (Shao et al., "`DeepSeekMath`", arXiv 2402.03300): a completion is worth as much as its
//! reward is above that of the others after the same prompt. Pure, in f64.
//!
//! Every completion is learnt from once, right after the model made it. So the ratio of its probabilities now and then is
//! 1, nothing is clipped, and the derivative of the loss by a token's log-probability is known without it:
//!
//! ```text
//! loss of a token = -advantage · ratio + beta · (e^(reference - own) - (reference - own) - 1)
//! ```
//!
//! What a completion's tokens weigh is where the variants differ. Names and definitions are those of TRL 1.16.

/// How tokens are averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrpoLoss {
    /// Every completion weighs the same (`DeepSeekMath`).
    Grpo,
    /// Every token weighs the same, as if all completions were of the greatest length (arXiv 2503.20783).
    DrGrpo,
    /// Every token of a batch weighs the same (arXiv 2503.14476).
    Dapo,
}

/// What rewards are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RewardScale {
    /// The standard deviation of those after the same prompt.
    Group,
    /// The standard deviation of all of a batch.
    Batch,
    /// Nothing.
    None,
}

/// The loss with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrpoObjective {
    /// Its variant.
    pub loss: GrpoLoss,
    /// Weight of the KL divergence from the reference.
    pub beta: f64,
    /// What rewards are divided by.
    pub scale_rewards: RewardScale,
    /// Completions of a prompt.
    pub num_generations: usize,
    /// The most tokens of a completion.
    pub max_completion_length: usize,
}

/// What is added to standard deviations. Taken: TRL.
const EPSILON: f64 = 1e-4;

/// Standard deviations up to this are none. Taken: `torch.isclose`.
const ZERO: f64 = 1e-8;

/// The loss of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLoss {
    /// What it is.
    pub loss: f64,
    /// Its derivative by the log-probability of the token.
    pub slope: f64,
    /// An estimate of the KL divergence from the reference (k3 of Schulman, "Approximating KL Divergence").
    pub kl: f64,
}

/// What a batch's rewards come to.
#[derive(Clone, Debug, PartialEq)]
pub struct Advantages {
    /// Of each completion.
    pub advantages: Vec<f64>,
    /// The share of completions that nothing is learnt from, as the rewards around them are equal.
    pub zero_std_share: f64,
}

impl GrpoObjective {
    /// How much better than the others each completion is; those of a prompt stand behind each other.
    pub fn advantages(&self, rewards: &[f64]) -> Advantages {
        let of_batch = deviation(rewards);
        let (mut advantages, mut n_zero) = (Vec::with_capacity(rewards.len()), 0);
        for group in rewards.chunks(self.num_generations) {
            let mean = mean(group);
            let deviation = match self.scale_rewards {
                RewardScale::Group | RewardScale::None => deviation(group),
                RewardScale::Batch => of_batch,
            };
            let by = match self.scale_rewards {
                RewardScale::None => 1.0,
                RewardScale::Group | RewardScale::Batch => deviation + EPSILON,
            };
            n_zero += if deviation <= ZERO { group.len() } else { 0 };
            advantages.extend(group.iter().map(|reward| (reward - mean) / by));
        }
        Advantages { advantages, zero_std_share: n_zero as f64 / rewards.len() as f64 }
    }

    /// What a token of each completion weighs in the mean over completions, by the tokens that they have.
    pub fn token_weights(&self, lengths: &[usize]) -> Vec<f64> {
        let all: usize = lengths.iter().sum();
        let weight = |length: &usize| match self.loss {
            GrpoLoss::Grpo => 1.0 / (*length).max(1) as f64,
            GrpoLoss::DrGrpo => 1.0 / self.max_completion_length as f64,
            GrpoLoss::Dapo => lengths.len() as f64 / all.max(1) as f64,
        };
        lengths.iter().map(weight).collect()
    }

    /// The loss of a token, of its log-probability and that by the reference.
    pub fn token(&self, log_prob: f64, reference: f64, advantage: f64) -> TokenLoss {
        if self.beta == 0.0 {
            return TokenLoss { loss: -advantage, slope: -advantage, kl: 0.0 };
        }
        let apart = reference - log_prob;
        let kl = apart.exp_m1() - apart;
        TokenLoss {
            loss: -advantage + self.beta * kl,
            slope: -advantage - self.beta * apart.exp_m1(),
            kl,
        }
    }
}

/// The mean; of none, 0.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The standard deviation of what they were drawn from; of a single one, 0.
pub fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len().max(2) - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use serde_json::Value;

    use super::*;

    fn numbers(value: &Value) -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    }

    /// By the lines of TRL's trainer that compute them; `generate.py` beside them says how.
    #[test]
    fn advantages_are_those_of_trl() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/grpo/grpo.json");
        let golden: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let cases = golden["advantages"].as_array().unwrap();
        assert!(cases.len() >= 9, "{}", cases.len());
        for case in cases {
            let scale_rewards = match case["scale_rewards"].as_str().unwrap() {
                "group" => RewardScale::Group,
                "batch" => RewardScale::Batch,
                _ => RewardScale::None,
            };
            let objective = GrpoObjective {
                loss: GrpoLoss::Grpo,
                beta: 0.0,
                scale_rewards,
                num_generations: case["num_generations"].as_u64().unwrap() as usize,
                max_completion_length: 8,
            };
            let got = objective.advantages(&numbers(&case["rewards"]));
            for (got, expected) in got.advantages.iter().zip(numbers(&case["advantages"])) {
                assert!((got - expected).abs() < 1e-4 * expected.abs().max(0.1), "{got} {case}");
            }
            let expected = case["frac_reward_zero_std"].as_f64().unwrap();
            assert!((got.zero_std_share - expected).abs() < 1e-6, "{got:?} {case}");
        }
    }

    #[test]
    fn slopes_are_derivatives() {
        let objective = GrpoObjective {
            loss: GrpoLoss::Dapo,
            beta: 0.04,
            scale_rewards: RewardScale::Group,
            num_generations: 2,
            max_completion_length: 8,
        };
        // The ratio is 1 and its derivative by the log-probability too: only the KL divergence is differentiated here.
        let h = 1e-6;
        for (own, reference, advantage) in [(-1.0, -2.5, 0.7), (-4.0, -0.5, -1.2)] {
            let of = |by: f64| objective.token(own + by, reference, advantage);
            let slope = (of(h).loss - of(-h).loss) / (2.0 * h) - advantage;
            assert!((of(0.0).slope - slope).abs() < 1e-6, "{} {slope}", of(0.0).slope);
            assert!(of(0.0).kl > 0.0);
        }
    }

    #[test]
    fn tokens_weigh_what_their_variant_says() {
        let of = |loss| {
            let objective = GrpoObjective {
                loss,
                beta: 0.0,
                scale_rewards: RewardScale::Group,
                num_generations: 2,
                max_completion_length: 8,
            };
            objective.token_weights(&[2, 6])
        };
        assert_eq!(of(GrpoLoss::Grpo), [1.0 / 2.0, 1.0 / 6.0]);
        assert_eq!(of(GrpoLoss::DrGrpo), [1.0 / 8.0; 2]);
        assert_eq!(of(GrpoLoss::Dapo), [2.0 / 8.0; 2]);
    }
}
