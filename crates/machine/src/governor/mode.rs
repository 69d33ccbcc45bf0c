//! How a run may treat the machine, in numbers: what each mode allows of duty and heat. `docs/thermal.md`
//! shows this table to people. It does not say how limits are kept; that is the rules' part.

use serde::{Deserialize, Serialize};

use crate::feel::Heat;
use crate::reading::Celsius;

/// How a run may treat the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
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
pub struct Policy {
    /// In general.
    pub mode: Mode,
    /// The highest temperature, where the user gave one.
    pub max_celsius: Option<f64>,
    /// Whether expected times are by rates measured on this machine, so that a run can be told slow from
    /// its first step on.
    pub is_calibrated: bool,
}

/// What a mode allows.
struct Allowance {
    /// The highest duty.
    duty: f64,
    /// The highest duty on battery.
    battery_duty: f64,
    /// The limit, in degrees below the temperature at which the hardware protects itself.
    below_hardware: f64,
    /// The limit of a sensor that does not say where that is.
    celsius: f64,
}

impl Mode {
    /// Chosen. Processors hold 95 to 105 °C by themselves and cards 83 to 90: `full` stands three degrees above
    /// what the hardware keeps, so that the two never work against each other. Fans of laptops are loud from
    /// about 80 °C on. DGX Spark trains at 81 to 86 °C with nothing wrong, which `balanced` lets it.
    fn allowance(self) -> Allowance {
        let (duty, battery_duty, below_hardware, celsius) = match self {
            Self::Quiet => (0.5, 0.25, 25.0, 65.0),
            Self::Balanced => (1.0, 0.5, 8.0, 88.0),
            Self::Full => (1.0, 1.0, -3.0, 105.0),
            Self::Overnight => (1.0, 0.5, 18.0, 75.0),
        };
        Allowance { duty, battery_duty, below_hardware, celsius }
    }
}

impl Policy {
    /// The highest duty.
    pub(super) fn duty(&self, is_on_battery: bool) -> f64 {
        let allowance = self.mode.allowance();
        if is_on_battery { allowance.battery_duty } else { allowance.duty }
    }

    /// The temperature that this sensor shall stay under.
    pub(super) fn limit(&self, heat: &Heat) -> f64 {
        let plausible = |celsius: &f64| Celsius::from_sensor(*celsius).is_ok();
        let allowance = self.mode.allowance();
        let by_mode = || match heat.limit.filter(plausible) {
            Some(hardware) => hardware - allowance.below_hardware,
            None => allowance.celsius,
        };
        self.max_celsius.filter(plausible).unwrap_or_else(by_mode)
    }

    /// Whether it rests so that the hardware need not slow itself down. Mode full leaves that to the
    /// hardware.
    pub(super) fn spares_the_hardware(&self) -> bool {
        self.mode != Mode::Full
    }
}
