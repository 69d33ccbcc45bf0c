//! How a run may treat the machine, in numbers: what each mode allows of duty and heat. `docs/thermal.md`
//! shows this table to people. It does not say how limits are kept; that is the rules' part.

use serde::{Deserialize, Serialize};

use crate::reading::Celsius;
use crate::telemetry::Temperature;

/// How a run may treat the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GovernorMode {
    /// Hardly to be noticed.
    Quiet,
    /// Fast, and never hot for long.
    Balanced,
    /// As fast as the hardware goes.
    Full,
    /// Nobody sits there: fast, with cool fans.
    Overnight,
}

/// What it goes by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GovernorPolicy {
    /// In general.
    pub mode: GovernorMode,
    /// The highest temperature, where the user gave one.
    pub max_celsius: Option<f64>,
    /// Whether expected times are by rates measured on this machine, so that a run can be told slow from
    /// its first step on.
    pub is_calibrated: bool,
}

/// What a mode allows.
struct ModeLimits {
    /// The highest duty.
    duty: f64,
    /// The highest duty on battery.
    battery_duty: f64,
    /// The limit, in degrees below the temperature at which the hardware protects itself.
    below_hardware: f64,
    /// The limit of a sensor that does not say where that is.
    celsius: f64,
}

impl GovernorMode {
    /// Chosen. CPUs hold 95 to 105 °C by themselves and GPUs 83 to 90: `full` stands three degrees above
    /// what the hardware keeps, so that the two never work against each other. Fans of laptops are loud from
    /// about 80 °C on. DGX Spark trains at 81 to 86 °C with nothing wrong, which `balanced` lets it.
    fn limits(self) -> ModeLimits {
        let (duty, battery_duty, below_hardware, celsius) = match self {
            Self::Quiet => (0.5, 0.25, 25.0, 65.0),
            Self::Balanced => (1.0, 0.5, 8.0, 88.0),
            Self::Full => (1.0, 1.0, -3.0, 105.0),
            Self::Overnight => (1.0, 0.5, 18.0, 75.0),
        };
        ModeLimits { duty, battery_duty, below_hardware, celsius }
    }
}

impl GovernorPolicy {
    /// The highest duty.
    pub(super) fn duty(&self, is_on_battery: bool) -> f64 {
        let allowance = self.mode.limits();
        if is_on_battery { allowance.battery_duty } else { allowance.duty }
    }

    /// The temperature that this sensor shall stay under.
    pub(super) fn limit(&self, heat: &Temperature) -> f64 {
        let plausible = |celsius: &f64| Celsius::from_sensor(*celsius).is_ok();
        let allowance = self.mode.limits();
        let by_mode = || match heat.limit.filter(plausible) {
            Some(hardware) => hardware - allowance.below_hardware,
            None => allowance.celsius,
        };
        self.max_celsius.filter(plausible).unwrap_or_else(by_mode)
    }

    /// Whether it rests so that the hardware need not slow itself down. Mode full leaves that to the
    /// hardware.
    pub(super) fn avoids_throttling(&self) -> bool {
        self.mode != GovernorMode::Full
    }
}
