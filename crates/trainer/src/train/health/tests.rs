//! Warnings on made-up series: each comes once, ends, and may come again; noise gives none.

use std::f64::consts::TAU;

use super::*;

/// Numbers between 0 and 1 that look random and are always the same (Weyl's sequence).
fn noise(step: u64) -> f64 {
    (step as f64 * 0.618_033_988_749_895).fract()
}

/// A normal number (Box and Muller).
fn normal(step: u64) -> f64 {
    let (a, b) = (noise(step) + 1e-9, (step as f64 * std::f64::consts::SQRT_2).fract());
    (-2.0 * a.ln()).sqrt() * (TAU * b).cos()
}

/// What varies as single images do, about 1: lognormal, with a deviation of a half.
fn images(step: u64) -> f64 {
    (0.47 * normal(step) - 0.11).exp()
}

fn step(step: u64, loss: f64, norm: f64) -> StepMetrics {
    StepMetrics {
        step,
        loss,
        grad_norm: Some(norm).filter(|norm| norm.is_finite()),
        learning_rate: 1e-4,
        loss_scale: None,
        is_skipped: !norm.is_finite(),
        secs: 1.0,
        rest_secs: 0.0,
        wait_secs: 0.0,
        peak_bytes: 0,
        launches: None,
        copy_wait_secs: None,
    }
}

/// What is found, and at which step, where a step has this loss and norm.
fn found(steps: u64, of: impl Fn(u64) -> (f64, f64)) -> Vec<(u64, &'static str)> {
    let mut health = Health::default();
    let mut all = Vec::new();
    for at in 1..=steps {
        let (loss, norm) = of(at);
        all.extend(
            health.observe(&step(at, loss, norm), true).iter().map(|found| (at, found.name())),
        );
    }
    all
}

#[test]
fn a_healthy_run_gives_no_warnings() {
    assert_eq!(found(1000, |at| (1.0 / at as f64, 1.0 / at as f64)), []);
    assert_eq!(found(5000, |at| (images(at), 0.3 * images(at + 77))), []);
    // One image is an outlier in loss and gradient, and is seen every 101 steps.
    let outlier = |at: u64| if at.is_multiple_of(101) { 50.0 } else { 1.0 };
    assert_eq!(found(2000, |at| (outlier(at) * images(at), outlier(at))), []);
}

#[test]
fn a_rising_loss_warns_once_and_again_after_it_fell() {
    let steps = found(400, |at| (if at < 150 { 1.0 } else { 9.0 }, 1.0));
    assert!(matches!(steps[..], [(150..175, "loss_rising")]), "{steps:?}");
    // Spoilt from its tenth step on.
    let steps = found(400, |at| (if at < 10 { images(at) } else { 9.0 * images(at) }, 1.0));
    assert_eq!(steps, [(50, "loss_rising")]);
    let steps = found(1100, |at| (if at % 500 < 300 { 1.0 } else { 3.0 }, 1.0));
    assert!(
        matches!(steps[..], [(300..350, "loss_rising"), (800..850, "loss_rising")]),
        "{steps:?}"
    );
}

#[test]
fn unstable_losses_warn_once_and_again_after_they_settled() {
    // Every tenth is far higher and the others are lower, so that the mean stays.
    let wild = |at: u64| if at.is_multiple_of(10) { 20.0 } else { 0.1 };
    let of = |at: u64| (if at % 600 >= 300 { wild(at) } else { 2.0 * images(at) }, 1.0);
    let steps = found(1200, of);
    assert!(
        matches!(steps[..], [(300..400, "loss_unstable"), (900..1000, "loss_unstable")]),
        "{steps:?}"
    );
}

#[test]
fn exploding_gradients_warn_once_and_again_after_they_shrank() {
    let of = |at: u64| (1.0, if at % 400 >= 300 { 30.0 } else { 1.0 } * images(at));
    let steps = found(800, of);
    assert!(
        matches!(steps[..], [(300..310, "gradients_exploding"), (700..710, "gradients_exploding")]),
        "{steps:?}"
    );
    // Also slowly, and soon.
    let steps = found(300, |at| (1.0, (at as f64 / 15.0).exp()));
    assert!(matches!(steps[..], [(40..120, "gradients_exploding")]), "{steps:?}");
}

#[test]
fn vanished_gradients_warn_once_and_again_after_they_came_back() {
    let of = |at: u64| (1.0, if at % 400 >= 200 { 1e-5 } else { 0.3 } * images(at));
    let steps: Vec<_> =
        found(800, of).into_iter().filter(|(_, name)| *name == "gradients_vanished").collect();
    assert!(matches!(steps[..], [(299, _), (699, _)]), "{steps:?}");
    // Zero from the start.
    assert_eq!(found(300, |_| (1.0, 0.0)), [(100, "gradients_vanished")]);
}

#[test]
fn skipped_steps_warn_once() {
    let of = |at: u64| (1.0, if at.is_multiple_of(40) { f64::INFINITY } else { 1.0 });
    assert_eq!(found(400, of), [(120, "steps_skipped")]);
    // In f16, a loss scale that settles, and grows every 2000 steps.
    let mut health = Health::default();
    for at in 1..=10_000 {
        let is_skipped = at <= 16 || at % 2000 == 0;
        let norm = if is_skipped { f64::NAN } else { 1.0 };
        let step = StepMetrics { loss_scale: Some(1.0), ..step(at, 1.0, norm) };
        assert_eq!(health.observe(&step, true), [], "{at}");
    }
    assert_eq!(health.n_skipped(), 16 + 5);
}

#[test]
fn a_run_without_finite_steps_ends() {
    let steps = found(36, |at| (if at <= 10 { 1.0 } else { f64::NAN }, 1.0));
    assert_eq!(steps, [(13, "steps_skipped"), (35, "not_finite"), (36, "not_finite")]);
    // One finite step in between, and it continues.
    let steps = found(60, |at| (1.0, if at % 20 == 0 { 1.0 } else { f64::NAN }));
    assert_eq!(steps, [(3, "steps_skipped")]);
}

#[test]
fn warnings_have_their_figures_and_a_hint() {
    let warning = WarningKind::LossRising { steps: 100, now: 0.75, before: 0.5 };
    let text = "the loss rises: mean of the last 100 steps 0.7500, of the 100 before 0.5000";
    assert_eq!(warning.to_string(), text);
    let warning = WarningKind::GradientsExploding {
        steps: 5,
        of: RECENT,
        times: EXPLODED_FACTOR,
        usual: 0.25,
    };
    let text = "gradients explode: norms of 5 of the last 20 steps are more than 10 times as large as before, 2.50e-1";
    assert_eq!(warning.to_string(), text);
    assert!(warning.hint().unwrap().contains("train.max_grad_norm"));
}

#[test]
fn a_checkpoint_remembers_which_warnings_were_emitted() {
    let of = |at| step(at, 0.5, if at <= 200 { 1.0 } else { 50.0 });
    let mut whole = Health::default();
    let emitted: Vec<WarningKind> = (1..=230).flat_map(|at| whole.observe(&of(at), true)).collect();
    assert!(matches!(emitted[..], [WarningKind::GradientsExploding { .. }]), "{emitted:?}");
    let text = serde_json::to_string(&whole).unwrap();
    let mut again: Health = serde_json::from_str(&text).unwrap();
    assert_eq!(again, whole);
    assert_eq!(again.observe(&of(231), true), []);
}

#[test]
fn a_checkpoint_from_before_norms_were_kept_is_read() {
    let old = r#"{"losses": [0.5, 0.25], "n_skipped": 2, "n_skipped_now": 1, "has_warned": true}"#;
    let mut health: Health = serde_json::from_str(old).unwrap();
    assert_eq!(
        health.observe(&step(3, 0.5, f64::NAN), true),
        [WarningKind::StepsSkipped { steps: 3 }]
    );
    assert_eq!(health.grad_norm(), None);
    let emitted: Vec<WarningKind> =
        (4..200).flat_map(|at| health.observe(&step(at, 0.5, 0.125), true)).collect();
    assert_eq!((emitted, health.grad_norm()), (vec![], Some(0.125)));
}

/// Whether a run of so many steps has diverged, where a step has this loss and norm.
fn diverged(steps: u64, of: impl Fn(u64) -> (f64, f64)) -> Option<Divergence> {
    let mut health = Health::default();
    for at in 1..=steps {
        let (loss, norm) = of(at);
        health.observe(&step(at, loss, norm), true);
    }
    health.divergence()
}

#[test]
fn a_healthy_run_has_not_diverged() {
    for steps in [1, 2, 3, 4, 7, 8, 20, 50, 400] {
        for from in 0..40 {
            assert_eq!(diverged(steps, |at| (images(at + from), 1.0)), None, "{steps} {from}");
        }
        // Memorised texts, and one that is not.
        let texts = |at| (if at == steps { 0.2 } else { 1e-4 }, 1.0);
        assert_eq!(diverged(steps, texts), None, "{steps}");
    }
    // f16: the loss scale settles, and grows in the last step.
    let found = |at: u64| if at <= 16 || at == 30 { f64::INFINITY } else { 1.0 };
    assert_eq!(diverged(30, |at| (1.0, found(at))), None);
    // One outlier.
    assert_eq!(diverged(40, |at| (if at == 40 { 900.0 } else { 1.0 }, 1.0)), None);
}

#[test]
fn a_run_has_diverged_by_its_last_losses_and_gradients() {
    for steps in [2, 4, 10, 30, 500] {
        let of = |from: u64, loss: f64, norm: f64| {
            diverged(steps, move |at| if at > from { (loss, norm) } else { (1.0, 1.0) })
        };
        assert_eq!(of(steps - 1, f64::NAN, f64::NAN), Some(Divergence::Loss), "{steps}");
        // From the first change on, so that only the first loss is a measure.
        let grown = Some(Divergence::LossGrown { now: 40.0, first: 1.0 });
        assert_eq!(of(1, 40.0, 1.0), grown, "{steps}");
        let skipped = Some(Divergence::Skipped { steps: steps as u32 });
        assert_eq!(of(0, 1.0, f64::NAN), skipped, "{steps}");
    }
    let late = diverged(30, |at| (1.0, if at > 27 { f64::NAN } else { 1.0 }));
    assert_eq!(late, Some(Divergence::Skipped { steps: 3 }));
}

fn policy_warnings(steps: u64, of: impl Fn(u64) -> [f64; 2]) -> Vec<(u64, String)> {
    let mut health = Health::default();
    let mut found = Vec::new();
    for at in 1..=steps {
        let [entropy, same_places] = of(at);
        let metrics = PolicyMetrics {
            step: at,
            entropy,
            same_places,
            word_ends: 0.2,
            reward: 0.1,
            advantage_spread: Some(1.0),
        };
        health.observe(&step(at, 1.0, 1.0), true);
        let new = health.observe_policy(&metrics);
        found.extend(new.into_iter().map(|kind| (at, kind.name().to_owned())));
    }
    found
}

#[test]
fn a_policy_that_collapses_or_explores_no_more_is_warned_of_once() {
    assert_eq!(policy_warnings(300, |_| [0.6, 0.3]), []);
    // Single steps are no rule.
    let now_and_then = |at: u64| if at.is_multiple_of(10) { [0.0, 1.0] } else { [0.6, 0.3] };
    assert_eq!(policy_warnings(300, now_and_then), []);
    let collapsed = policy_warnings(110, |at| [0.6, if at > 50 { 0.99 } else { 0.3 }]);
    assert_eq!(collapsed, [(68, "policy_collapsed".to_owned())]);
    let certain = policy_warnings(110, |at| [if at > 50 { 1e-4 } else { 0.6 }, 0.3]);
    assert_eq!(certain, [(70, "policy_certain".to_owned())]);
}

#[test]
fn equal_rewards_warn_once_and_again_after_they_differed() {
    let mut health = Health::default();
    let mut found = Vec::new();
    for at in 1..=300 {
        // The loss of a policy gradient crosses zero, which means nothing.
        let loss = if at % 2 == 0 { 1.0 } else { -1.0 };
        let norm = if at % 3 == 0 { 1.0 } else { 0.0 };
        found.extend(health.observe(&step(at, loss, norm), false));
        let equal = if (100..220).contains(&at) { 0.5 } else { 1.0 };
        let metrics = [("frac_reward_zero_std".to_owned(), equal), ("reward".to_owned(), 0.25)];
        for kind in health.observe_rewards(&metrics.into()) {
            assert_eq!(kind, WarningKind::RewardsEqual { steps: 20, reward: 0.25 }, "{at}");
            found.push(kind);
        }
    }
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(health.divergence(), None);
}
