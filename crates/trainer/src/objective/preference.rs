//! Losses of preferences: what the log-probabilities of answers are worth, and the derivative by each. Pure, in f64:
//! the model's part is to find those log-probabilities, and to pass the derivatives back.
//!
//! ```text
//! DPO    arXiv 2305.18290   a chosen and a rejected answer, beside a reference model
//! ORPO   arXiv 2403.07691   the same without a reference, and the chosen text is learnt as it is
//! KTO    arXiv 2402.01306   one answer, desirable or not, beside a reference model
//! ```
//!
//! c and r are how much more likely the chosen and the rejected answer are than in the reference, in nats. The variants
//! of each loss and their names are those of TRL.

use std::collections::BTreeMap;

use super::grpo::GrpoObjective;

/// What a pair of answers is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DpoLoss {
    /// -log σ(β(c - r)); with label smoothing, of labels that are wrong that often (conservative DPO).
    Sigmoid,
    /// max(0, 1 - β(c - r)), as in `SLiC`.
    Hinge,
    /// (c/|chosen| - r/|rejected| - 1/2β)², by tokens.
    Ipo,
    /// Unbiased where labels are wrong as often as label smoothing says.
    Robust,
    /// -log σ(βc) - ½ log σ(-βc) - ½ log σ(-βr)
    NcaPair,
    /// (c - 1/2β)² + (r + 1/2β)²
    SppoHard,
    /// 1 - σ(βc) + σ(βr): for answers better than the model's own.
    ApoZero,
    /// σ(βc) + 1 - σ(β(c - r)): for answers worse than the model's own.
    ApoDown,
    /// -log σ(β(c/|chosen| - r/|rejected|)), by tokens.
    SigmoidNorm,
}

/// What a single answer is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KtoLoss {
    /// Against how far the model is from its reference on other answers.
    Kto,
    /// 1 - σ(βc), or σ(βr).
    ApoZeroUnpaired,
}

/// A loss with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PreferenceObjective {
    /// Direct preference optimisation.
    Dpo {
        /// Its variant.
        loss: DpoLoss,
        /// How strongly it stays near the reference.
        beta: f64,
        /// Share of labels that are wrong.
        label_smoothing: f64,
    },
    /// Odds ratio preference optimisation.
    Orpo {
        /// Weight of the odds ratio.
        beta: f64,
    },
    /// Kahneman-Tversky optimisation.
    Kto {
        /// Its variant.
        loss: KtoLoss,
        /// How strongly it stays near the reference.
        beta: f64,
        /// Weight of answers that people liked.
        desirable_weight: f64,
        /// Weight of the others.
        undesirable_weight: f64,
    },
    /// Group relative policy optimisation: of completions with rewards, token by token (`grpo.rs`).
    Grpo(GrpoObjective),
}

/// An answer as the model sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AnswerLogProb {
    /// Log-probability of the answer after its prompt.
    pub answer: f64,
    /// Its tokens.
    pub answer_tokens: usize,
    /// Log-probability of prompt and answer.
    pub text: f64,
    /// Tokens of both that are predicted.
    pub text_tokens: usize,
    /// Log-probability of the answer by the reference model; zero without one.
    pub reference: f64,
}

/// The derivative of a loss by what the model says of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AnswerGradient {
    /// By the log-probability of the answer.
    pub answer: f64,
    /// By that of prompt and answer.
    pub text: f64,
}

/// The loss of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleLoss<const ANSWERS: usize> {
    /// What it is.
    pub loss: f64,
    /// Its derivative by each answer.
    pub gradients: [AnswerGradient; ANSWERS],
    /// How much each answer is rewarded, as people plot it.
    pub rewards: [f64; ANSWERS],
    /// The log-probability of each answer, as they plot it: of all of it, or of ORPO by token.
    pub logps: [f64; ANSWERS],
}

impl PreferenceObjective {
    /// Whether it needs log-probabilities of a reference model.
    pub fn has_reference(&self) -> bool {
        match self {
            Self::Orpo { .. } => false,
            Self::Grpo(grpo) => grpo.beta > 0.0,
            Self::Dpo { .. } | Self::Kto { .. } => true,
        }
    }

    /// Whether the text of the prompt is learnt too.
    pub fn learns_prompt(&self) -> bool {
        matches!(self, Self::Orpo { .. })
    }

    /// Whether a sample is one answer, and not a pair.
    pub fn is_unpaired(&self) -> bool {
        matches!(self, Self::Kto { .. } | Self::Grpo(_))
    }

    /// The objective of completions that the model makes itself, if it is that.
    pub fn grpo(&self) -> Option<&GrpoObjective> {
        match self {
            Self::Grpo(grpo) => Some(grpo),
            Self::Dpo { .. } | Self::Orpo { .. } | Self::Kto { .. } => None,
        }
    }

    /// Whether it needs to know how far the model is from its reference on answers to other prompts.
    pub fn needs_kl(&self) -> bool {
        matches!(self, Self::Kto { loss: KtoLoss::Kto, .. })
    }

    /// The loss of a chosen and a rejected answer.
    pub fn pair(&self, chosen: AnswerLogProb, rejected: AnswerLogProb) -> SampleLoss<2> {
        match *self {
            Self::Dpo { loss, beta, label_smoothing } => {
                dpo(loss, beta, label_smoothing, chosen, rejected)
            }
            Self::Orpo { beta } => orpo(beta, chosen, rejected),
            Self::Kto { .. } | Self::Grpo(_) => unreachable!("their answers come alone"),
        }
    }

    /// The loss of an answer that is desirable or not. `kl` is how much more likely other answers are than in the
    /// reference.
    pub fn single(&self, answer: AnswerLogProb, is_desirable: bool, kl: f64) -> SampleLoss<1> {
        let Self::Kto { loss, beta, desirable_weight, undesirable_weight } = *self else {
            unreachable!("only answers of KTO have labels")
        };
        let ratio = answer.answer - answer.reference;
        let (sign, weight) =
            if is_desirable { (1.0, desirable_weight) } else { (-1.0, undesirable_weight) };
        let kl = if loss == KtoLoss::Kto { kl.max(0.0) } else { 0.0 };
        let likely = sigmoid(sign * beta * (ratio - kl));
        let slope = -weight * sign * beta * likely * (1.0 - likely);
        SampleLoss {
            loss: weight * (1.0 - likely),
            gradients: [AnswerGradient { answer: slope, text: 0.0 }],
            rewards: [beta * ratio],
            logps: [answer.answer],
        }
    }
}

fn dpo(
    loss: DpoLoss,
    beta: f64,
    smoothing: f64,
    chosen: AnswerLogProb,
    rejected: AnswerLogProb,
) -> SampleLoss<2> {
    let [c, r] = [chosen, rejected].map(|it| it.answer - it.reference);
    let lengths = [chosen, rejected].map(|it| it.answer_tokens.max(1) as f64);
    let [mean_c, mean_r] = [c / lengths[0], r / lengths[1]];
    let margin = beta * (c - r);
    let both = |slope: f64| [slope, -slope];
    // σ'(x)
    let bell = |x: f64| sigmoid(x) * sigmoid(-x);
    let (loss, [by_c, by_r]) = match loss {
        DpoLoss::Sigmoid => (
            -(1.0 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin),
            both(-beta * ((1.0 - smoothing) * sigmoid(-margin) - smoothing * sigmoid(margin))),
        ),
        DpoLoss::Hinge => ((1.0 - margin).max(0.0), both(if margin < 1.0 { -beta } else { 0.0 })),
        DpoLoss::Ipo => {
            let off = mean_c - mean_r - 0.5 / beta;
            (off * off, [2.0 * off / lengths[0], -2.0 * off / lengths[1]])
        }
        DpoLoss::Robust => {
            let inverse = 1.0 / (1.0 - 2.0 * smoothing);
            (
                inverse
                    * (-(1.0 - smoothing) * log_sigmoid(margin) + smoothing * log_sigmoid(-margin)),
                both(
                    -inverse
                        * beta
                        * ((1.0 - smoothing) * sigmoid(-margin) + smoothing * sigmoid(margin)),
                ),
            )
        }
        DpoLoss::NcaPair => (
            -log_sigmoid(beta * c) - 0.5 * log_sigmoid(-beta * c) - 0.5 * log_sigmoid(-beta * r),
            [beta * (0.5 * sigmoid(beta * c) - sigmoid(-beta * c)), 0.5 * beta * sigmoid(beta * r)],
        ),
        DpoLoss::SppoHard => {
            let (off_c, off_r) = (c - 0.5 / beta, r + 0.5 / beta);
            (off_c * off_c + off_r * off_r, [2.0 * off_c, 2.0 * off_r])
        }
        DpoLoss::ApoZero => (
            sigmoid(-beta * c) + sigmoid(beta * r),
            [-beta * bell(beta * c), beta * bell(beta * r)],
        ),
        DpoLoss::ApoDown => (
            sigmoid(beta * c) + sigmoid(-margin),
            [beta * (bell(beta * c) - bell(margin)), beta * bell(margin)],
        ),
        DpoLoss::SigmoidNorm => {
            let margin = beta * (mean_c - mean_r);
            let slope = -beta * sigmoid(-margin);
            (-log_sigmoid(margin), [slope / lengths[0], -slope / lengths[1]])
        }
    };
    let gradients = [by_c, by_r].map(|answer| AnswerGradient { answer, text: 0.0 });
    let logps = [chosen, rejected].map(|it| it.answer);
    SampleLoss { loss, gradients, rewards: [beta * c, beta * r], logps }
}

fn orpo(beta: f64, chosen: AnswerLogProb, rejected: AnswerLogProb) -> SampleLoss<2> {
    let lengths = [chosen, rejected].map(|it| it.answer_tokens.max(1) as f64);
    let [c, r] = [chosen.answer / lengths[0], rejected.answer / lengths[1]];
    let odds = (c - r) - (log1mexp(c) - log1mexp(r));
    // d/dx (x - log(1 - eˣ)) = 1 / (1 - eˣ)
    let by_odds = -beta * sigmoid(-odds);
    let [by_c, by_r] = [by_odds / -c.exp_m1(), by_odds / r.exp_m1()];
    let text_tokens = chosen.text_tokens.max(1) as f64;
    SampleLoss {
        loss: -chosen.text / text_tokens - beta * log_sigmoid(odds),
        gradients: [
            AnswerGradient { answer: by_c / lengths[0], text: -1.0 / text_tokens },
            AnswerGradient { answer: by_r / lengths[1], text: 0.0 },
        ],
        rewards: [beta * c, beta * r],
        logps: [c, r],
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// log(1 - eˣ) for x below zero.
fn log1mexp(x: f64) -> f64 {
    if x > -std::f64::consts::LN_2 { (-x.exp_m1()).ln() } else { (-x.exp()).ln_1p() }
}

/// Means of what was seen in a step, by the names that TRL logs them under.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RewardSums(BTreeMap<&'static str, (f64, f64)>);

impl RewardSums {
    /// Of a pair.
    pub fn add_pair(&mut self, of: &SampleLoss<2>) {
        let ([reward, worse], [chosen, rejected]) = (of.rewards, of.logps);
        self.add("rewards/chosen", reward);
        self.add("rewards/rejected", worse);
        self.add("rewards/margins", reward - worse);
        self.add("rewards/accuracies", f64::from(u8::from(reward > worse)));
        self.add("logps/chosen", chosen);
        self.add("logps/rejected", rejected);
    }

    /// Of an answer alone.
    pub fn add_single(&mut self, of: &SampleLoss<1>, is_desirable: bool) {
        let [rewards, logps] = if is_desirable {
            ["rewards/chosen", "logps/chosen"]
        } else {
            ["rewards/rejected", "logps/rejected"]
        };
        self.add(rewards, of.rewards[0]);
        self.add(logps, of.logps[0]);
    }

    /// Another value of a mean.
    pub fn add(&mut self, name: &'static str, value: f64) {
        let (sum, n) = self.0.entry(name).or_default();
        *sum += value;
        *n += 1.0;
    }

    /// The means; of single answers also the margin between the two kinds.
    pub fn means(&self) -> BTreeMap<String, f64> {
        let means = self.0.iter().map(|(name, (sum, n))| ((*name).to_owned(), sum / n));
        let mut means: BTreeMap<_, _> = means.collect();
        let of = |name: &str| means.get(name).copied();
        if let Some((chosen, rejected)) = of("rewards/chosen").zip(of("rewards/rejected")) {
            means.entry("rewards/margins".into()).or_insert(chosen - rejected);
        }
        means
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use serde_json::Value;

    use super::*;

    const DPO_LOSSES: [(&str, DpoLoss); 9] = [
        ("sigmoid", DpoLoss::Sigmoid),
        ("hinge", DpoLoss::Hinge),
        ("ipo", DpoLoss::Ipo),
        ("robust", DpoLoss::Robust),
        ("nca_pair", DpoLoss::NcaPair),
        ("sppo_hard", DpoLoss::SppoHard),
        ("apo_zero", DpoLoss::ApoZero),
        ("apo_down", DpoLoss::ApoDown),
        ("sigmoid_norm", DpoLoss::SigmoidNorm),
    ];

    fn objectives() -> Vec<PreferenceObjective> {
        let dpo = DPO_LOSSES.map(|(_, loss)| PreferenceObjective::Dpo {
            loss,
            beta: 0.3,
            label_smoothing: 0.1,
        });
        dpo.into_iter().chain([PreferenceObjective::Orpo { beta: 0.3 }]).collect()
    }

    fn answer(answer: f64, answer_tokens: usize, reference: f64) -> AnswerLogProb {
        let (text, text_tokens) = (answer - 4.5, answer_tokens + 3);
        AnswerLogProb { answer, answer_tokens, text, text_tokens, reference }
    }

    fn close(name: &str, got: f64, expected: f64, tolerance: f64) {
        let scale = expected.abs().max(1e-3);
        assert!((got - expected).abs() <= tolerance * scale, "{name}: {got}, expected {expected}");
    }

    #[test]
    fn derivatives_are_those_of_the_loss() {
        let (chosen, rejected) = (answer(-7.0, 5, -7.5), answer(-9.0, 4, -8.0));
        let h = 1e-5;
        for objective in objectives() {
            let base = objective.pair(chosen, rejected);
            for which in 0..2 {
                let moved = |by: f64, text: f64| {
                    let mut pair = [chosen, rejected];
                    pair[which].answer += by;
                    pair[which].text += text;
                    objective.pair(pair[0], pair[1]).loss
                };
                let answer = (moved(h, 0.0) - moved(-h, 0.0)) / (2.0 * h);
                let text = (moved(0.0, h) - moved(0.0, -h)) / (2.0 * h);
                close(&format!("{objective:?}"), base.gradients[which].answer, answer, 1e-5);
                close(&format!("{objective:?}"), base.gradients[which].text, text, 1e-5);
            }
        }
        for loss in [KtoLoss::Kto, KtoLoss::ApoZeroUnpaired] {
            let (desirable_weight, undesirable_weight) = (1.5, 0.5);
            let objective =
                PreferenceObjective::Kto { loss, beta: 0.3, desirable_weight, undesirable_weight };
            for is_desirable in [true, false] {
                let of = |by: f64| {
                    let moved = AnswerLogProb { answer: chosen.answer + by, ..chosen };
                    objective.single(moved, is_desirable, 0.2)
                };
                let slope = (of(h).loss - of(-h).loss) / (2.0 * h);
                close("KTO", of(0.0).gradients[0].answer, slope, 1e-5);
            }
        }
    }

    #[test]
    fn large_differences_do_not_overflow() {
        for objective in objectives() {
            for (chosen, rejected) in [(-1.0, -4000.0), (-4000.0, -1.0)] {
                let pair = [answer(chosen, 3, -5.0), answer(rejected, 3, -5.0)];
                let of = objective.pair(pair[0], pair[1]);
                let slopes = of.gradients.map(|it| it.answer);
                assert!(of.loss.is_finite() && slopes.iter().all(|it| it.is_finite()), "{of:?}");
            }
        }
    }

    /// Losses of TRL's trainers, of log-probabilities of TRL's own, for a batch of one sample each; `make.py` beside them
    /// says how.
    #[test]
    fn losses_are_those_of_trl() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/golden/preferences/losses.json");
        let golden: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let number = |value: &Value| value.as_f64().unwrap();
        let of = |value: &Value| AnswerLogProb {
            answer: number(&value["answer"]),
            answer_tokens: value["answer_tokens"].as_u64().unwrap() as usize,
            text: number(&value["text"]),
            text_tokens: value["text_tokens"].as_u64().unwrap() as usize,
            reference: number(&value["reference"]),
        };
        let mut seen = 0;
        for case in golden["cases"].as_array().unwrap() {
            let beta = number(&case["beta"]);
            let name = format!("{} {}", case["method"], case["loss_type"]);
            let loss_type = case["loss_type"].as_str().unwrap();
            let expected = number(&case["loss"]);
            let got = match case["method"].as_str().unwrap() {
                "kto" => {
                    let loss = match loss_type {
                        "kto" => KtoLoss::Kto,
                        _ => KtoLoss::ApoZeroUnpaired,
                    };
                    let objective = PreferenceObjective::Kto {
                        loss,
                        beta,
                        desirable_weight: number(&case["desirable_weight"]),
                        undesirable_weight: number(&case["undesirable_weight"]),
                    };
                    let (label, kl) = (case["label"].as_bool().unwrap(), number(&case["kl"]));
                    let got = objective.single(of(&case["chosen"]), label, kl);
                    close(&name, got.rewards[0], number(&case["rewards"][0]), 1e-4);
                    got.loss
                }
                method => {
                    let objective = match method {
                        "orpo" => PreferenceObjective::Orpo { beta },
                        _ => PreferenceObjective::Dpo {
                            loss: DPO_LOSSES.iter().find(|(it, _)| *it == loss_type).unwrap().1,
                            beta,
                            label_smoothing: number(&case["label_smoothing"]),
                        },
                    };
                    let got = objective.pair(of(&case["chosen"]), of(&case["rejected"]));
                    for which in 0..2 {
                        let expected = number(&case["rewards"][which]);
                        close(&name, got.rewards[which], expected, 1e-4);
                    }
                    got.loss
                }
            };
            close(&name, got, expected, 1e-4);
            seen += 1;
        }
        assert!(seen >= 12, "{seen}");
    }
}
