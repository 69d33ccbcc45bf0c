//! Heat, in the words of whatever sensor there is. Sensors are believed second: a laptop can lose
//! two thirds of its clock with every public counter at "nominal", so pacing goes by step time.

use serde::Serialize;

use crate::reading::{Celsius, Percent, Quantity, Reading};

/// All that is known about how hot the machine is.
#[derive(Clone, Debug, Serialize)]
pub struct Thermal {
    /// Temperature sensors of the main board, CPU and disks; those of a GPU stand with it.
    pub sensors: Reading<Vec<ThermalSensor>>,
    /// What macOS says; absent elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacThermal>,
}

/// One temperature sensor.
#[derive(Clone, Debug, Serialize)]
pub struct ThermalSensor {
    /// The kernel's name for it, e.g. `k10temp Tctl`.
    pub name: String,
    /// What it says.
    pub temperature: Reading<Celsius>,
    /// The temperature at which the hardware protects itself, where the kernel tells.
    pub critical: Option<Celsius>,
}

/// The thermal signals of macOS, strongest last.
#[derive(Clone, Debug, Serialize)]
pub struct MacThermal {
    /// `pmset -g therm`: share of full CPU speed. A real signal on Intel; Apple Silicon records
    /// nothing there even while it throttles.
    pub cpu_speed_limit: Reading<Percent>,
    /// `NSProcessInfo.thermalState`.
    pub state: Reading<ThermalState>,
    /// The Darwin notification that `powermetrics` also shows; finer than the state.
    pub pressure: Reading<ThermalPressure>,
    /// Whether the user chose low power.
    pub power_mode: Reading<PowerMode>,
}

impl MacThermal {
    /// Whether any of the signals says that it is slowed down for heat.
    pub fn is_hot(&self) -> bool {
        self.state.known().is_some_and(|state| state.is_hot())
            || self.pressure.known().is_some_and(|level| level.is_hot())
            || self.cpu_speed_limit.known().is_some_and(|limit| limit.0 < 100.0)
    }
}

/// `NSProcessInfoThermalState`, in Apple's order from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // Apple's own words.
pub enum ThermalState {
    Nominal,
    Fair,
    Serious,
    Critical,
}

impl ThermalState {
    /// Whether the system slows down for heat.
    pub fn is_hot(self) -> bool {
        self >= Self::Serious
    }
}

/// `OSThermalPressureLevel` on macOS, in Apple's order from 0 (`OSThermalNotification.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // Apple's own words.
pub enum ThermalPressure {
    Nominal,
    Moderate,
    Heavy,
    Trapping,
    Sleeping,
}

impl ThermalPressure {
    /// Whether the system slows down for heat.
    pub fn is_hot(self) -> bool {
        self >= Self::Heavy
    }
}

/// The energy mode of macOS (`powermode`, or `lowpowermode` where there is no high one).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The words of System Settings.
pub enum PowerMode {
    Automatic,
    Low,
    High,
}

impl Quantity for ThermalState {
    const UNIT: &'static str = "level";
}

impl Quantity for ThermalPressure {
    const UNIT: &'static str = "level";
}

impl Quantity for PowerMode {
    const UNIT: &'static str = "mode";
}
