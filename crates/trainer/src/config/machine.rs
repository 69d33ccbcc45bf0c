//! `[machine]`: how the computer is treated while it trains; docs/thermal.md.

use machine::governor::GovernorMode;

use super::section::section;
use super::value::words;
use crate::model::offload::Offload;

section! {
    /// How the computer is treated.
    pub RawMachine => MachineConfig {
        /// How much of the computer a run may use: `quiet` in the background, `balanced`, `full` speed, `overnight` with slow fans
        mode: GovernorMode = Default(GovernorMode::Balanced), Any;
        /// Temperature limit in °C. Not set: that of the mode
        max_temp: Option<f64> = Default(None), Within(30.0, 120.0);
        /// The same bits every time: deterministic GPU kernels, slower, the CPU always is; ranks sum gradients exactly, in fixed point
        deterministic: bool = Default(false), Any;
        /// Block offloading (block swap; kohya: `blocks_to_swap`) of frozen weights to main memory: none, every second block, all blocks. Not set: the plan chooses
        offload: Offload = Default(Offload::None), Any;
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
