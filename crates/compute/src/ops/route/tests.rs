//! The router against its formula, and gradients by finite differences.

use super::RowGroups;
use crate::testing::{Dual, Input, check, device};
use crate::{Dtype, Params, Tape};

/// Logits of tokens by experts, of which none is near another.
fn logits(tokens: usize, experts: usize) -> Input {
    Input::normal([1, tokens, experts], 3).scaled(2.0)
}

/// The weights of rows sorted by expert, as the module's comment has them.
fn exact(logits: &[Dual], experts: usize, k: usize, is_normalised: bool) -> Vec<Dual> {
    let mut rows = Vec::new();
    for (token, logits) in logits.chunks(experts).enumerate() {
        let powers: Vec<Dual> = logits.iter().map(|logit| logit.exp()).collect();
        let sum = powers.iter().copied().reduce(|a, b| a + b).unwrap();
        let shares: Vec<Dual> = powers.iter().map(|power| *power / sum).collect();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| shares[*b].value.total_cmp(&shares[*a].value));
        let chosen = order[..k].iter().map(|expert| shares[*expert]).reduce(|a, b| a + b).unwrap();
        for expert in &order[..k] {
            let share = shares[*expert];
            rows.push((*expert, token, if is_normalised { share / chosen } else { share }));
        }
    }
    rows.sort_by_key(|(expert, token, _)| (*expert, *token));
    rows.into_iter().map(|(_, _, weight)| weight).collect()
}

#[test]
fn weights_and_their_gradients_are_those_of_the_formula() {
    for (tokens, experts, k) in [(5, 4, 2), (3, 6, 3), (4, 2, 2), (2, 3, 1)] {
        for is_normalised in [true, false] {
            check(
                &[logits(tokens, experts)],
                4.0,
                &|tape, v| Ok(tape.route(&v[0], k, is_normalised)?.weights),
                &|v| exact(&v[0], experts, k, is_normalised),
            );
        }
    }
}

#[test]
fn rows_are_sorted_by_expert() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let logits = [3.0f32, 1.0, 2.0, 0.0, 0.0, 5.0, 4.0, 9.0, 9.0];
    let logits = device.upload([1, 3, 3], &logits).unwrap().into();
    let found = tape.route(&logits, 2, true).unwrap();
    // Token 0: experts 0 and 2; token 1: 2 and, the first of two, 0; token 2: 1 and 2.
    assert_eq!(found.groups, RowGroups::new([2, 1, 3]));
    assert_eq!(found.tokens.to_vec::<u32>(), [0, 1, 2, 0, 1, 2]);
    let ranges: Vec<_> = found.groups.ranges().collect();
    assert_eq!(ranges, [0..2, 2..3, 3..6]);
    let sums = found.weights.tensor().to_vec::<f32>();
    assert!((sums[0] + sums[3] - 1.0).abs() < 1e-6 && sums[2] == 0.5);
    let error = tape.route(&logits, 4, true).err().unwrap().to_string();
    assert_eq!(error, "route: k is 4, expected 1 to 3");
    let none = device.zeros([1, 0, 3], Dtype::F32).unwrap().into();
    assert_eq!(tape.route(&none, 2, true).unwrap().groups.n_rows(), 0);
}
