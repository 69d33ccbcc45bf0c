//! What values a key may have beyond its type, and how that is said.

use std::fmt;

/// A bound on every number of a value; of texts and lists, on their length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ValueBound {
    /// Everything of the type.
    Any,
    /// This or more.
    AtLeast(f64),
    /// More than this.
    Above(f64),
    /// More than the first, up to the second.
    UpTo(f64, f64),
    /// Both included.
    Within(f64, f64),
    /// The first included, the second not.
    Under(f64, f64),
    /// Both included, and only multiples of the first.
    Multiple(f64, f64),
    /// A text or list with something in it.
    Filled,
}

impl ValueBound {
    pub fn holds(self, number: f64) -> bool {
        match self {
            Self::Any => true,
            Self::AtLeast(least) => number >= least,
            Self::Above(limit) => number > limit,
            Self::UpTo(limit, most) => number > limit && number <= most,
            Self::Within(least, most) => (least..=most).contains(&number),
            Self::Under(least, limit) => (least..limit).contains(&number),
            Self::Multiple(of, most) => (of..=most).contains(&number) && number % of == 0.0,
            Self::Filled => number >= 1.0,
        }
    }
}

impl fmt::Display for ValueBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => Ok(()),
            Self::AtLeast(least) => write!(f, "at least {least}"),
            Self::Above(limit) => write!(f, "above {limit}"),
            Self::UpTo(limit, most) => write!(f, "above {limit}, at most {most}"),
            Self::Within(least, most) => write!(f, "{least} to {most}"),
            Self::Under(least, limit) => write!(f, "{least} to below {limit}"),
            Self::Multiple(of, most) => write!(f, "a multiple of {of}, at most {most}"),
            Self::Filled => f.write_str("not empty"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_hold_what_they_say() {
        for (bound, inside, outside) in [
            (ValueBound::Any, vec![-1e9, 1e9], vec![]),
            (ValueBound::AtLeast(1.0), vec![1.0, 9.0], vec![0.99, f64::NAN]),
            (ValueBound::Above(0.0), vec![1e-300], vec![0.0, -1.0]),
            (ValueBound::UpTo(0.0, 1.0), vec![1e-300, 1.0], vec![0.0, 1.1, f64::NAN]),
            (ValueBound::Within(0.0, 1.0), vec![0.0, 1.0], vec![-0.1, 1.1]),
            (ValueBound::Under(0.0, 1.0), vec![0.0, 0.99], vec![-0.1, 1.0]),
            (ValueBound::Multiple(16.0, 64.0), vec![16.0, 64.0], vec![0.0, 24.0, 80.0]),
            (ValueBound::Filled, vec![1.0], vec![0.0]),
        ] {
            assert!(inside.iter().all(|number| bound.holds(*number)), "{bound:?}");
            assert!(!outside.iter().any(|number| bound.holds(*number)), "{bound:?}");
        }
    }
}
