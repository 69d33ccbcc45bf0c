//! Blocks that are computed twice to be held once: forward keeps only a block's inputs, backward
//! runs it again, records it this time, and goes back through it at once.

use crate::tape::{Mode, Tape};
use crate::var::Var;
use crate::{Result, Tensor};

impl<'m> Tape<'m> {
    /// Runs `block` on `inputs` and keeps nothing but them. In backward it is run again with the
    /// same random numbers, so `block` must compute the same from the same; the end of it, whose
    /// results nothing keeps, is not run a second time.
    pub fn recompute(
        &self,
        inputs: &[&Var],
        block: impl Fn(&Tape<'m>, &[Var]) -> Result<Var> + 'm,
    ) -> Result<Var> {
        if self.mode == Mode::Off {
            let inputs: Vec<Var> = inputs.iter().map(|input| (*input).clone()).collect();
            return block(self, &inputs);
        }
        let op = self.begin("recompute");
        let first_stream = self.next_stream.get();
        let (device, params, seed) = (&self.device, self.params, self.seed);
        let last_run = if op.is_run { usize::MAX } else { 0 };
        let rehearsal =
            Tape::with(device, params, Mode::Rehearse, seed).for_block(first_stream, last_run);
        let on_rehearsal: Vec<Var> = inputs
            .iter()
            .map(|input| rehearsal.adopt(input.tensor().clone(), input.source().is_some()))
            .collect();
        let rehearsed = block(&rehearsal, &on_rehearsal)?;
        self.next_stream.set(rehearsal.next_stream.get());
        let is_tracked = rehearsed.source().is_some();
        let result = op.result(rehearsed.into_tensor());
        if !is_tracked {
            return Ok(result);
        }
        let last_run = rehearsal.last_kept();
        let sources: Vec<_> = inputs.iter().map(|input| input.source()).collect();
        let kept: Vec<_> = inputs.iter().map(|input| self.keep(input)).collect();
        Ok(self.record(result, move |back, gradient| {
            let tape = Tape::with(back.place.device, params, Mode::Record, seed)
                .for_block(first_stream, last_run);
            let mut leaves = Vec::with_capacity(kept.len());
            for (kept, source) in kept.into_iter().zip(&sources) {
                leaves.push(tape.adopt(kept.get(back.place)?, source.is_some()));
            }
            let result = block(&tape, &leaves)?;
            let mut reached = tape.backward_from(result, gradient, back.gradients)?;
            for (leaf, source) in leaves.iter().zip(sources) {
                if let Some(gradient) = reached.take(leaf) {
                    back.pass(source, gradient)?;
                }
            }
            Ok(())
        }))
    }

    /// An input as seen from inside the block: tracked if it is tracked outside.
    fn adopt(&self, tensor: Tensor, is_tracked: bool) -> Var {
        if is_tracked { self.leaf(tensor) } else { Var::from(tensor) }
    }
}
