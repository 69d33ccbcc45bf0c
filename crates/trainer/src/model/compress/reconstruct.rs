//! `mode = "reconstruct"`: a text as a code in three parts, of which a receiver can make it again. The loss is the length
//! of all of them, in nats per token:
//!
//! ```text
//! positions   which tokens are kept: one of C(N, K) choices; nothing where all know them (every N-th, all)
//! kept        these tokens, each predicted by the trunk from the kept ones before it
//! rest        all others, each predicted from the kept tokens before it
//! ```
//!
//! The policy sees the whole text, trunk and decoder see kept tokens only. The others are coded independently of each
//! other: what a token says about its neighbours is lost unless it is kept.
//!
//! Shapes: M masks of N tokens, K kept positions, D narrow width.

use compute::ops::IGNORE_INDEX;
use compute::{Tape, Var};

use super::Selector;
use super::draw::Drawn;
use super::forward::{
    Compressor, CompressorInputs, ExitLoss, LossRows, NarrowInputs, with_nothing,
};
use super::policy_loss::later;
use super::selection::Selection;
use crate::error::Result;
use crate::model::recompute::Recompute;

/// What each part of a code has to say, as targets of a cross entropy.
struct CodeTargets {
    /// Kept tokens, [M, K]; those that are no slot are left out.
    kept: Vec<u32>,
    /// All other tokens, [M, N].
    rest: Vec<u32>,
}

impl Compressor {
    /// The mean length of a token's code.
    pub(super) fn reconstruct<'m>(
        &'m self,
        tape: &Tape<'m>,
        drawn: &Drawn,
        inputs: CompressorInputs<'_>,
        narrow: &NarrowInputs,
        recompute: Recompute,
    ) -> Result<ExitLoss> {
        let (device, [m, n]) = (tape.device(), inputs.sizes);
        let selection = self.selection(drawn, inputs.first_keys, n);
        let k = selection.positions.len() / m;
        let targets = CodeTargets::new(drawn, &selection, inputs);
        let kept = kept_ids(&selection, inputs, k);
        let embedded = self.embed(tape, &device.upload([m, k], &kept)?)?;
        let visible = visible(tape, &embedded, drawn, &selection, n)?;
        let x = self.run_trunk(tape, embedded, &selection, recompute)?;
        let x = with_nothing(tape, &x)?;
        // A kept token is predicted from the slot before it, if that is of its document.
        let slots = (0..).zip(&selection.first_slots);
        let before: Vec<u32> =
            slots.map(|(at, first)| at % k as u32 * u32::from(*first < at % k as u32)).collect();
        let of_kept = tape.gather_tokens(&x, &device.upload([m, k], &before)?)?;
        let norm = self.kept_norm.as_ref().expect("a model that reconstructs has it");
        let of_kept = self.normed(tape, &of_kept, norm)?;
        let of_kept = self.exit_loss(tape, &of_kept, &device.upload([m, k], &targets.kept)?)?;
        let x = tape.gather_tokens(&x, &device.upload([m, n], &selection.slots)?)?;
        let x = tape.add(&x, &visible)?;
        let n_masks = m * n / narrow.first_keys.len();
        let x = self.run_decoder(tape, x, narrow, n_masks, recompute)?;
        let of_rest = self.exit_loss(tape, &x, &device.upload([m, n], &targets.rest)?)?;
        self.code_length(tape, &of_kept, &of_rest, drawn, &selection, &targets)
    }

    /// Puts the parts together.
    fn code_length(
        &self,
        tape: &Tape<'_>,
        of_kept: &ExitLoss,
        of_rest: &ExitLoss,
        drawn: &Drawn,
        selection: &Selection,
        targets: &CodeTargets,
    ) -> Result<ExitLoss> {
        let (m, all) = (drawn.kept.len(), targets.rest.len());
        let (n, k) = (all / m, selection.positions.len() / m);
        let counted = |targets: &[u32]| targets.iter().filter(|id| **id != IGNORE_INDEX).count();
        let [n_kept, n_rest] = [counted(&targets.kept), counted(&targets.rest)];
        let n_counted = (n_kept + n_rest).max(1) as f32;
        let kept = tape.scale(&of_kept.mean, n_kept as f32 / n_counted)?;
        let rest = tape.scale(&of_rest.mean, n_rest as f32 / n_counted)?;
        let positions = self.position_nats(drawn, n) as f32 / n_counted;
        let positions = Var::from(tape.device().upload(kept.shape(), &[positions])?);
        let mean = tape.add(&positions, &tape.add(&kept, &rest)?)?;
        let mut rows = if tape.is_recording() { of_rest.rows.read()? } else { Vec::new() };
        if tape.is_recording() {
            for (at, loss) in of_kept.rows.read()?.into_iter().enumerate() {
                if targets.kept[at] != IGNORE_INDEX {
                    rows[at / k * n + selection.positions[at] as usize] = loss;
                }
            }
        }
        Ok(ExitLoss { mean, rows: LossRows::OnHost(rows) })
    }

    /// Nats that say which positions are kept, of all masks.
    fn position_nats(&self, drawn: &Drawn, n: usize) -> f64 {
        match self.config.select {
            Selector::All | Selector::Stride => 0.0,
            _ => drawn.kept.iter().map(|kept| ln_choices(n, kept.len())).sum(),
        }
    }
}

fn kept_ids(selection: &Selection, inputs: CompressorInputs<'_>, k: usize) -> Vec<u32> {
    let n = inputs.sizes[1];
    let id = |(at, position): (usize, &u32)| inputs.ids[at / k * n + *position as usize];
    selection.positions.iter().enumerate().map(id).collect()
}

/// Kept tokens at their positions, and nothing elsewhere: [M, N, D].
fn visible(
    tape: &Tape<'_>,
    embedded: &Var,
    drawn: &Drawn,
    selection: &Selection,
    n: usize,
) -> Result<Var> {
    let [m, k, _] = embedded.shape().sizes().try_into().expect("states have three dimensions");
    // Slots that hold no kept token go to a position that is cut off.
    let place = |(at, position): (usize, &u32)| {
        if at % k < drawn.kept[at / k].len() { *position } else { n as u32 }
    };
    let places: Vec<u32> = selection.positions.iter().enumerate().map(place).collect();
    let places = tape.device().upload([m, k], &places)?;
    let all = tape.scatter_tokens(embedded, &places, n + 1)?;
    Ok(tape.split_tokens(&all, 0..n)?)
}

impl CodeTargets {
    /// Tokens that count are those that count as the next one.
    fn new(drawn: &Drawn, selection: &Selection, inputs: CompressorInputs<'_>) -> Self {
        let CompressorInputs { sizes: [m, n], targets, .. } = inputs;
        let k = selection.positions.len() / m;
        let mut rest = later(targets, n, IGNORE_INDEX);
        let mut kept = vec![IGNORE_INDEX; m * k];
        for (row, of_row) in drawn.kept.iter().enumerate() {
            for slot in 0..of_row.len() {
                let position = selection.positions[row * k + slot] as usize;
                kept[row * k + slot] =
                    std::mem::replace(&mut rest[row * n + position], IGNORE_INDEX);
            }
        }
        Self { kept, rest }
    }
}

/// The logarithm of the number of ways to choose `k` of `n`.
fn ln_choices(n: usize, k: usize) -> f64 {
    (0..k).map(|at| ((n - at) as f64 / (at + 1) as f64).ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_counted() {
        assert!((ln_choices(4, 2) - 6f64.ln()).abs() < 1e-12);
        assert!((ln_choices(52, 5) - 2_598_960f64.ln()).abs() < 1e-9);
        assert!(ln_choices(7, 7).abs() < 1e-12 && ln_choices(7, 0) == 0.0);
    }

    #[test]
    fn every_token_that_counts_is_in_one_part_of_the_code() {
        let ids: Vec<u32> = (10..18).collect();
        // A document ends after the fourth token.
        let mut next: Vec<u32> = (11..19).collect();
        next[3] = IGNORE_INDEX;
        let first_keys = [0, 0, 0, 0, 4, 4, 4, 4];
        let inputs =
            CompressorInputs { sizes: [1, 8], ids: &ids, targets: &next, first_keys: &first_keys };
        let kept = vec![vec![6, 2, 4]];
        let selection = Selection::new(&kept, &first_keys, 4);
        let drawn = Drawn { kept, logits: None, logit_values: Vec::new(), soft: None };
        let CodeTargets { kept, rest } = CodeTargets::new(&drawn, &selection, inputs);
        let none = IGNORE_INDEX;
        assert_eq!(kept, [12, none, 16, none], "the first token of a document does not count");
        assert_eq!(rest, [none, 11, none, 13, none, 15, none, 17]);
    }
}
