//! Whether a run is learning: pure, from the metrics of its steps. It keeps the last two hundred losses and
//! gradient norms, and counts steps that were not finite. A warning is emitted once, and again only after a
//! hundred steps without it. It changes nothing about the run; early stopping and the plateau schedule go by the
//! held-out loss, in `evaluation.rs`.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::loss_scale;
use crate::event::warning::{Divergence, WarningKind};
use crate::event::{PolicyMetrics, StepMetrics};

/// Steps that are looked at together.
pub const WINDOW: usize = 100;

/// Losses of which one half can be compared with the other. Chosen: means of 25 single images vary by a
/// tenth, and a learning rate that is far too high spoils a model in less.
const MIN_LOSSES: usize = 50;

/// A loss that is so many times that of the window before is rising. Chosen: losses of single images vary by a
/// third to a half, their means over a hundred by a twentieth.
const RISE_FACTOR: f64 = 1.5;

/// Losses whose standard deviation is so many times their mean are unstable. Measured in runs of `recipes/demo.toml`
/// with `train.batch_size=1`: 0.3 to 0.4 at a rate of 1e-3, 0.7 to 1.2 at 5e-2, which spoils the model.
const SCATTERED: f64 = 1.0;

/// A gradient norm so many times the usual one has exploded. Measured in the same runs: that of one
/// image in a hundred is ten times the median.
const EXPLODED_FACTOR: f64 = 10.0;

/// Steps in which gradients explode ...
const RECENT: usize = 20;

/// ... if so many of them do. Chosen: fewer are outliers, which gradient clipping is there for.
const SEVERAL: usize = 5;

/// A gradient norm below this share of the usual one at first has vanished. Chosen: the loss on noise never
/// reaches zero; the demo's gradient norms end at half of what they were.
const VANISHED_SHARE: f64 = 1e-3;

/// A gradient norm below this is zero. Taken: the default of `optimizer.epsilon`, below which `AdamW`'s steps
/// become smaller.
const ZERO_NORM: f64 = 1e-8;

/// Steps without a finite gradient that give no warning. Chosen: healthy runs in f32 and bf16 have none, and
/// one image may be an outlier.
const FEW_SKIPPED: u64 = 2;

/// More such steps that f16 may take until its loss scale has settled. Taken: it starts at 2^16.
const HALVINGS: u64 = 16;

/// Steps in a row without a finite gradient that end a run. Chosen: more than those halvings.
const MAX_SKIPPED: u32 = 25;

/// Losses of a run's end that are compared with the first one: a quarter of all, at most so many.
const FINAL_LOSSES: usize = 20;

/// A run whose loss is in the end so many times that of its first step has diverged. Chosen: losses of
/// single images differ by less than ten.
const DIVERGED_FACTOR: f64 = 10.0;

/// The same for fewer than [`SEVERAL`] losses at the end, all of which have to be as large. Chosen: losses of
/// single short texts may differ by more than ten times.
const DIVERGED_FACTOR_FEW: f64 = 30.0;

/// A loss below this is no reference for others. Chosen: that of memorised texts.
const ZERO_LOSS: f64 = 1e-2;

/// Steps without a finite gradient at the end of a run that make it one that diverged. Chosen: in f16 one
/// is normal now and then.
const MAX_SKIPPED_AT_END: u32 = 3;

/// A policy that keeps more than this share at the same places of all sequences does not look at them. Chosen: by chance
/// it is one in N, at most a half.
const COLLAPSED: f64 = 0.9;

/// A policy whose entropy is below this share of the largest has made up its mind. Chosen: at 1 % one position in a
/// thousand is still open, of 2048 bytes two.
const CERTAIN: f64 = 0.01;

/// State over the steps of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Health {
    /// The last losses, at most two windows.
    losses: VecDeque<f64>,
    /// The last norms of gradients: a window, and the recent ones that are compared with it.
    #[serde(default)]
    norms: VecDeque<f64>,
    /// Median norm of the first window.
    #[serde(default)]
    first_norm: Option<f64>,
    /// The first loss, which no step has changed yet.
    #[serde(default)]
    first_loss: Option<f64>,
    /// Whether the last loss was not finite.
    #[serde(default)]
    is_loss_lost: bool,
    /// Steps whose gradient was not finite, in all ...
    n_skipped: u64,
    /// ... and at the end.
    n_skipped_now: u32,
    /// How open the choices of a policy were in the last steps ...
    #[serde(default)]
    entropies: VecDeque<f64>,
    /// ... and how much of what it kept was at the same places of other sequences.
    #[serde(default)]
    same_places: VecDeque<f64>,
    /// Steps at the end in which nothing was learnt, as all completions of every prompt had the same reward.
    #[serde(default)]
    n_equal_rewards: usize,
    /// What was said, with the steps after which it is over unless it is found again.
    #[serde(default, alias = "told")]
    warned: BTreeMap<String, usize>,
}

impl Health {
    /// Takes in a step; returns new warnings. The loss of a policy gradient is not judged: it is about zero however well
    /// the policy does.
    pub fn observe(&mut self, step: &StepMetrics, judges_loss: bool) -> Vec<WarningKind> {
        self.remember(step, judges_loss);
        self.warned.retain(|_, left| {
            *left -= 1;
            *left > 0
        });
        let found = [
            self.rising(),
            self.scattered(),
            self.exploding(),
            self.vanished(),
            self.skipped(step),
            self.not_finite(),
        ];
        self.new_among(found.into_iter().flatten().collect())
    }

    /// Takes in what a policy did in a step, after that step; returns new warnings.
    pub fn observe_policy(&mut self, metrics: &PolicyMetrics) -> Vec<WarningKind> {
        push(&mut self.entropies, metrics.entropy, RECENT);
        push(&mut self.same_places, metrics.same_places, RECENT);
        let mean = |all| last(all, RECENT).map(|all| all.sum::<f64>() / RECENT as f64);
        let collapsed = mean(&self.same_places).filter(|same| *same > COLLAPSED);
        let certain = mean(&self.entropies).filter(|entropy| *entropy < CERTAIN);
        let found = [
            collapsed
                .map(|same_places| WarningKind::PolicyCollapsed { steps: RECENT, same_places }),
            certain.map(|entropy| WarningKind::PolicyCertain { steps: RECENT, entropy }),
        ];
        self.new_among(found.into_iter().flatten().collect())
    }

    /// Takes in what rewards came to in a step, after that step; returns new warnings.
    pub fn observe_rewards(&mut self, metrics: &BTreeMap<String, f64>) -> Vec<WarningKind> {
        let Some(equal) = metrics.get("frac_reward_zero_std") else { return Vec::new() };
        self.n_equal_rewards = if *equal >= 1.0 { self.n_equal_rewards + 1 } else { 0 };
        if self.n_equal_rewards < RECENT {
            return Vec::new();
        }
        let reward = metrics.get("reward").copied().unwrap_or(f64::NAN);
        self.new_among(vec![WarningKind::RewardsEqual { steps: self.n_equal_rewards, reward }])
    }

    /// All of them are remembered, also those that are not new.
    fn new_among(&mut self, mut found: Vec<WarningKind>) -> Vec<WarningKind> {
        found.retain(|kind| {
            let was_told = self.warned.insert(kind.name().into(), WINDOW).is_some();
            !was_told || is_fatal(kind)
        });
        found
    }

    fn remember(&mut self, step: &StepMetrics, judges_loss: bool) {
        self.is_loss_lost = !step.loss.is_finite();
        let Some(norm) = step.grad_norm.filter(|_| step.loss.is_finite()) else {
            self.n_skipped += 1;
            self.n_skipped_now += 1;
            return;
        };
        self.n_skipped_now = 0;
        if judges_loss {
            self.first_loss.get_or_insert(step.loss);
            push(&mut self.losses, step.loss, 2 * WINDOW);
        }
        // Where all rewards are equal there is no gradient: beside such steps every other one would seem to explode.
        if judges_loss || norm > 0.0 {
            push(&mut self.norms, norm, WINDOW + RECENT);
        }
        if self.first_norm.is_none() {
            self.first_norm = self.grad_norm();
        }
    }

    fn rising(&self) -> Option<WarningKind> {
        if self.losses.len() < MIN_LOSSES {
            return None;
        }
        let (before, now) = self.halves();
        let (before, now) = (
            LossWindow::of(&without_largest(before)).mean,
            LossWindow::of(&without_largest(now)).mean,
        );
        let steps = self.losses.len() / 2;
        (now > RISE_FACTOR * before).then_some(WarningKind::LossRising { steps, now, before })
    }

    /// By the differences of neighbours, which stay small where a loss falls or jumps.
    fn scattered(&self) -> Option<WarningKind> {
        let losses = without_largest(last(&self.losses, WINDOW)?.collect());
        let squares = losses.windows(2).map(|pair| (pair[0] - pair[1]).powi(2));
        // A difference has the variance of both.
        let spread = (squares.sum::<f64>() / (2 * (losses.len() - 1)) as f64).sqrt();
        let mean = LossWindow::of(&losses).mean;
        (spread > SCATTERED * mean).then_some(WarningKind::LossUnstable {
            steps: WINDOW,
            spread,
            mean,
        })
    }

    /// Recent norms are compared with those before them: at the start of a run norms shrink, which is not
    /// exploding.
    fn exploding(&self) -> Option<WarningKind> {
        let n_before = self.norms.len().checked_sub(RECENT).filter(|n| *n >= RECENT)?;
        let usual = median(self.norms.iter().take(n_before).copied()).max(ZERO_NORM);
        let recent = self.norms.iter().skip(n_before);
        let steps = recent.filter(|norm| **norm > EXPLODED_FACTOR * usual).count();
        (steps >= SEVERAL).then_some(WarningKind::GradientsExploding {
            steps,
            of: RECENT,
            times: EXPLODED_FACTOR,
            usual,
        })
    }

    fn vanished(&self) -> Option<WarningKind> {
        let (first, norms) = (self.first_norm?, last(&self.norms, WINDOW)?);
        let largest = norms.fold(0.0, f64::max);
        (largest <= ZERO_NORM.max(VANISHED_SHARE * first))
            .then_some(WarningKind::GradientsVanished { steps: WINDOW, largest, first })
    }

    fn skipped(&self, step: &StepMetrics) -> Option<WarningKind> {
        let in_f16 = || HALVINGS + step.step / u64::from(loss_scale::GROWTH_INTERVAL);
        let tolerated = FEW_SKIPPED + step.loss_scale.map_or(0, |_| in_f16());
        let steps = self.n_skipped;
        (steps > tolerated).then_some(WarningKind::StepsSkipped { steps })
    }

    fn not_finite(&self) -> Option<WarningKind> {
        let steps = self.n_skipped_now;
        (steps >= MAX_SKIPPED).then_some(WarningKind::NotFinite { steps })
    }

    /// Why a finished run has diverged, if it has.
    pub fn divergence(&self) -> Option<Divergence> {
        if self.is_loss_lost {
            return Some(Divergence::Loss);
        }
        let steps = self.n_skipped_now;
        if steps >= MAX_SKIPPED_AT_END
            || (steps > 0 && self.losses.is_empty() && self.norms.is_empty())
        {
            return Some(Divergence::Skipped { steps });
        }
        let n = (self.losses.len() / 4).clamp(1, FINAL_LOSSES);
        let (first, ends) = (self.first_loss?, last(&self.losses, n)?);
        let (now, grown) = match n {
            0..SEVERAL => (ends.fold(f64::INFINITY, f64::min), DIVERGED_FACTOR_FEW),
            _ => (median(ends), DIVERGED_FACTOR),
        };
        (now > grown * first.max(ZERO_LOSS)).then_some(Divergence::LossGrown { now, first })
    }

    /// Steps whose gradient was not finite.
    pub fn n_skipped(&self) -> u64 {
        self.n_skipped
    }

    /// Median norm of the last window's gradients.
    pub fn grad_norm(&self) -> Option<f64> {
        last(&self.norms, WINDOW).map(median)
    }

    /// The window before the last, and the last.
    pub fn windows(&self) -> Option<(LossWindow, LossWindow)> {
        let (before, now) = self.halves();
        (now.len() == WINDOW).then(|| (LossWindow::of(&before), LossWindow::of(&now)))
    }

    /// The losses that are remembered, earlier and later ones.
    fn halves(&self) -> (Vec<f64>, Vec<f64>) {
        let losses = self.losses.iter().copied();
        let middle = self.losses.len() / 2;
        (losses.clone().take(middle).collect(), losses.skip(middle).collect())
    }
}

/// All but the largest: one sample may be an outlier.
fn without_largest(mut losses: Vec<f64>) -> Vec<f64> {
    let largest = (0..losses.len()).max_by(|a, b| losses[*a].total_cmp(&losses[*b]));
    largest.map(|at| losses.remove(at));
    losses
}

/// Adds a value, and drops the oldest beyond `max`.
fn push(all: &mut VecDeque<f64>, value: f64, max: usize) {
    all.push_back(value);
    if all.len() > max {
        all.pop_front();
    }
}

/// The last `n`, if there are so many.
fn last(all: &VecDeque<f64>, n: usize) -> Option<impl Iterator<Item = f64>> {
    all.len().checked_sub(n).map(|from| all.iter().skip(from).copied())
}

/// The higher of the two in the middle, if there are two.
fn median(all: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = all.collect();
    let middle = all.len() / 2;
    *all.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// Whether a warning ends the run.
pub fn is_fatal(kind: &WarningKind) -> bool {
    matches!(kind, WarningKind::NotFinite { .. })
}

/// Losses of many steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossWindow {
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation.
    pub spread: f64,
}

impl LossWindow {
    fn of(losses: &[f64]) -> Self {
        let n = losses.len() as f64;
        let mean = losses.iter().sum::<f64>() / n;
        let squares: f64 = losses.iter().map(|loss| (loss - mean).powi(2)).sum();
        Self { mean, spread: (squares / n).sqrt() }
    }
}

#[cfg(test)]
mod tests;
