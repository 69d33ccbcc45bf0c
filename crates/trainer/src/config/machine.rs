//! `[machine]`: how the computer is treated while it trains; docs/thermal.md.

use machine::governor::GovernorMode;

use super::section::section;
use super::value::words;
use crate::model::offload::Offload;

section! {
    /// How the computer is treated.
    pub RawMachine => MachineConfig {
        /// How much of the computer the run may take: hardly to be noticed, fast but never hot for long, as fast as it goes, or fast with cool fans
        mode: GovernorMode = Default(GovernorMode::Balanced), Any;
        /// The highest temperature in °C, instead of the mode's
        max_temp: Option<f64> = Default(None), Within(30.0, 120.0);
        /// Whether a GPU gives the same bits every time, which is slower; a CPU always does
        deterministic: bool = Default(false), Any;
        /// What stays in main memory and comes to a GPU block by block, for the same result in less of the GPU's memory: nothing, the frozen weights of every second block or of all. Not set: the plan chooses
        stream: Offload = Default(Offload::None), Any;
    }
}

words!(Offload {
    "none" => Self::None,
    "alternate" => Self::Alternate,
    "blocks" => Self::Blocks,
});

words!(GovernorMode {
    "quiet" => Self::Quiet,
    "balanced" => Self::Balanced,
    "full" => Self::Full,
    "overnight" => Self::Overnight,
});
