//! Where the random numbers of a run come from. Each is a function of the run's seed, of what it is
//! for and of the image it is for: nothing is remembered between steps, so a run that goes on
//! draws what it would have drawn.

use compute::RandomSequence;

/// What numbers are for. Each purpose has a seed of its own, so that no two share numbers.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// The matrices that adapters begin with.
    Adapters,
    /// Which level of noise an image gets.
    Timesteps,
    /// Where in its distribution a latent lies.
    Latents,
    /// The noise itself.
    Noise,
    /// What of a layer's input its adapter does not see.
    Dropout,
    /// The noise of held-out images.
    HeldOut,
    /// The weights of a model that begins with none.
    Weights,
}

/// The seed for a purpose.
pub fn seed(run: u64, purpose: Purpose) -> u64 {
    // Far from the numbers that people choose and that files are counted by.
    const FAMILY: u64 = 0x6865_6172_7468;
    let stream = RandomSequence::new(run, FAMILY + purpose as u64);
    u64::from(stream.word(0)) << 32 | u64::from(stream.word(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purposes_and_runs_have_seeds_of_their_own() {
        let all = [0, 1, 42].into_iter().flat_map(|run| {
            [Purpose::Adapters, Purpose::Timesteps, Purpose::Noise]
                .map(|purpose| seed(run, purpose))
        });
        let mut all: Vec<u64> = all.collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 9);
    }
}
