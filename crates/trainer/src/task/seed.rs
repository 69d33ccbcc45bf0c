//! Where the random numbers of a run come from. Each is a function of the run's seed, of its purpose and
//! of the sample: no generator state is kept between steps, so a resumed run draws the same numbers.

use compute::RandomSequence;

/// What numbers are for. Each purpose has a seed of its own, so that no two share numbers.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// The initial matrices of adapters.
    Adapters,
    /// The timestep of a sample.
    Timesteps,
    /// Sampling of latents from the VAE's distribution.
    Latents,
    /// The noise itself.
    Noise,
    /// Dropout on the adapters' inputs.
    Dropout,
    /// The noise of held-out images.
    HeldOut,
    /// The initial weights of a model trained from scratch.
    Weights,
    /// Stochastic rounding of weights.
    Rounding,
    /// The tokens of completions that rewards are given for.
    Completions,
    /// The same after held-out prompts.
    HeldOutCompletions,
    /// The initial matrices of the adapters of text encoders, plus the encoder's position.
    EncoderAdapters,
}

/// The seed for a purpose.
pub fn seed(run: u64, purpose: Purpose) -> u64 {
    // Far from the numbers that people choose and that files are counted by.
    const FAMILY: u64 = 0x6865_6172_7468;
    let sequence = RandomSequence::new(run, FAMILY + purpose as u64);
    u64::from(sequence.word(0)) << 32 | u64::from(sequence.word(1))
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
