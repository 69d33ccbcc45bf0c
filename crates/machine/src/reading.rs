//! A reading: a value with its unit, its source and its age, or the reason why there is none.
//!
//! Nothing here invents a number. A sensor that is missing, unreadable or implausible becomes
//! [`Unknown`] with a reason a person can act on, and stays unknown through every later stage.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use serde::ser::{Serialize, SerializeStruct, Serializer};

/// Why a value is not known, in words for the user: lower case, no full stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown(pub String);

impl Unknown {
    /// An unknown with this reason.
    pub fn because(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One fact about the machine.
#[derive(Clone, Debug)]
pub struct Reading<T> {
    /// The value, or why it is not known.
    pub value: Result<T, Unknown>,
    /// Where it was read, as a user could look it up.
    pub source: String,
    /// When it was read; a replayed reading has no age.
    pub taken: Option<Instant>,
}

impl<T> Reading<T> {
    /// The value if it is known.
    pub fn known(&self) -> Option<&T> {
        self.value.as_ref().ok()
    }

    /// The value, or where it was sought and why it is not known.
    pub fn require(&self) -> Result<T, Unknown>
    where
        T: Clone,
    {
        self.value.clone().map_err(|reason| Unknown(format!("{}: {reason}", self.source)))
    }

    /// The same reading with its value turned into another; unknown stays unknown.
    pub fn map<U>(self, turn: impl FnOnce(T) -> U) -> Reading<U> {
        self.and_then(|value| Ok(turn(value)))
    }

    /// The same reading with its value judged: a value that makes no sense becomes unknown.
    pub fn and_then<U>(self, judge: impl FnOnce(T) -> Result<U, Unknown>) -> Reading<U> {
        Reading { value: self.value.and_then(judge), source: self.source, taken: self.taken }
    }

    /// This reading if it is known, else the other.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        if self.value.is_ok() { self } else { other }
    }
}

/// What a value is measured in, as written into `--json`.
pub trait Quantity {
    /// The unit's plain English name.
    const UNIT: &'static str;
}

macro_rules! quantity {
    ($($type:ty => $unit:literal),* $(,)?) => {
        $(impl Quantity for $type { const UNIT: &'static str = $unit; })*
    };
}

quantity! {
    Bytes => "bytes",
    Celsius => "celsius",
    Watts => "watts",
    Megahertz => "megahertz",
    Percent => "percent",
    u32 => "count",
    u64 => "count",
    bool => "yes or no",
    String => "text",
}

impl<T> Quantity for Vec<T> {
    const UNIT: &'static str = "list";
}

impl<T> Quantity for Option<T>
where
    T: Quantity,
{
    const UNIT: &'static str = T::UNIT;
}

impl<T: Serialize + Quantity> Serialize for Reading<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Reading", 5)?;
        fields.serialize_field("value", &self.value.as_ref().ok())?;
        if let Err(unknown) = &self.value {
            fields.serialize_field("unknown", &unknown.0)?;
        } else {
            fields.skip_field("unknown")?;
        }
        fields.serialize_field("unit", T::UNIT)?;
        fields.serialize_field("source", &self.source)?;
        let age_ms = self.taken.map(|taken| taken.elapsed().as_millis() as u64);
        fields.serialize_field("age_ms", &age_ms)?;
        fields.end()
    }
}

/// An amount of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Bytes(pub u64);

impl Bytes {
    /// That many KiB, unless that overflows.
    pub fn from_kib(kib: u64) -> Result<Self, Unknown> {
        let bytes = kib.checked_mul(1 << 10).map(Self);
        bytes.ok_or_else(|| Unknown(format!("{kib} KiB is too large")))
    }

    /// That many MiB, unless that overflows.
    pub fn from_mib(mib: u64) -> Option<Self> {
        mib.checked_mul(1 << 20).map(Self)
    }

    /// What is left after taking `other` away, at least nothing.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The share of `whole` that this is, from 0 to 1.
    pub fn share_of(self, whole: Self) -> f64 {
        if whole.0 == 0 { 0.0 } else { (self.0 as f64 / whole.0 as f64).min(1.0) }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const KIB: f64 = 1024.0;
        let kib = self.0 as f64 / KIB;
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..1_048_576 => write!(f, "{kib:.0} KiB"),
            1_048_576..1_073_741_824 => write!(f, "{:.0} MiB", kib / KIB),
            _ => write!(f, "{:.1} GiB", kib / KIB / KIB),
        }
    }
}

/// Reads `10GB`, `1.5 GiB`, `300MB` or plain bytes; a thousand and 1024 are told apart.
impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
        let (number, unit) = (text[..split].trim(), &text[split..]);
        let unit =
            UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, bytes)| *bytes);
        let number =
            number.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
        match (number, unit) {
            (Some(number), Some(unit)) => Ok(Self((number * unit) as u64)),
            _ => Err(format!(
                "{text:?} is not a size; write 10GB, 1.5GiB, 300MB or a number of bytes"
            )),
        }
    }
}

const UNITS: &[(&str, f64)] = &[
    ("", 1.0),
    ("B", 1.0),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
];

/// A temperature.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, serde::Serialize)]
pub struct Celsius(pub f64);

impl Celsius {
    /// Chosen: outside this range no computer runs. Exactly 0 is what an unconnected sensor
    /// returns, ACPI zones without one return absolute zero, failed ones 255 or 65535.
    const PLAUSIBLE: std::ops::RangeInclusive<f64> = 1.0..=130.0;

    /// A temperature that a sensor could mean, or why it cannot be one.
    pub fn from_sensor(degrees: f64) -> Result<Self, Unknown> {
        if Self::PLAUSIBLE.contains(&degrees) {
            return Ok(Self(degrees));
        }
        let (low, high) = (Self::PLAUSIBLE.start(), Self::PLAUSIBLE.end());
        Err(Unknown(format!("sensor reads {degrees} °C, outside {low} to {high} °C")))
    }
}

impl fmt::Display for Celsius {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} °C", self.0)
    }
}

/// Electrical power.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, serde::Serialize)]
pub struct Watts(pub f64);

impl Watts {
    /// Chosen: twice what the sockets of a large server's GPUs draw together; more is a meter's nonsense.
    const MOST: f64 = 20_000.0;

    /// Power that a meter could mean, or why it cannot be.
    pub fn from_meter(watts: f64) -> Result<Self, Unknown> {
        if (0.0..=Self::MOST).contains(&watts) {
            return Ok(Self(watts));
        }
        Err(Unknown(format!("meter reads {watts} W, outside 0 to {} W", Self::MOST)))
    }
}

impl fmt::Display for Watts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} W", self.0)
    }
}

/// A clock rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Megahertz(pub u32);

impl fmt::Display for Megahertz {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MHz", self.0)
    }
}

/// A share of a whole, 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, serde::Serialize)]
pub struct Percent(pub f64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} %", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_as_people_write_them() {
        let check = |bytes, text: &str| assert_eq!(Bytes(bytes).to_string(), text);
        check(0, "0 B");
        check(17, "17 B");
        check(2000, "2 KiB");
        check(512 << 20, "512 MiB");
        check(24 << 30, "24.0 GiB");
        check(25_275_000_000, "23.5 GiB");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let check = |text: &str, bytes| assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        check("10GB", 10_000_000_000);
        check("1.5 GiB", 3 << 29);
        check("300mb", 300_000_000);
        check("4096", 4096);
        for text in ["", "GB", "ten GB", "-1GB", "1 parsec", "nanGB", "infGB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn nonsense_temperatures_are_unknown() {
        for degrees in [0.0, -273.2, 255.0, 65535.0, f64::NAN] {
            assert!(Celsius::from_sensor(degrees).is_err(), "{degrees} was believed");
        }
        assert_eq!(Celsius::from_sensor(41.0), Ok(Celsius(41.0)));
    }

    #[test]
    fn a_reading_says_where_it_is_from_and_an_unknown_one_why() {
        let known = Reading { value: Ok(Bytes(7)), source: "/proc/meminfo".into(), taken: None };
        let json = serde_json::to_value(&known).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"value": 7, "unit": "bytes", "source": "/proc/meminfo", "age_ms": null})
        );

        let lost: Reading<Celsius> = Reading {
            value: Err(Unknown::because("no such file")),
            source: "/sys".into(),
            taken: Some(Instant::now()),
        };
        let json = serde_json::to_value(&lost).unwrap();
        assert_eq!(json["value"], serde_json::Value::Null);
        assert_eq!(json["unknown"], "no such file");
        assert!(json["age_ms"].as_u64().unwrap() < 1000);
    }
}
