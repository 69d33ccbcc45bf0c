//! What would fit where something does not: a change of the job, a higher limit.

use std::fmt;

use machine::Bytes;

/// A change of the job, tried in a dry run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// As it would be typed; empty if there is nothing to change.
    pub change: String,
    /// Bytes that are enough with it.
    pub needed: usize,
    /// Whether that is within the limit. If not, no change takes less.
    pub fits: bool,
    /// Whether a higher limit would help.
    pub raise: LimitRaise,
}

/// Whether a higher `--limit` would help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitRaise {
    /// What the machine could give is not known, or is the limit already.
    Unknown,
    /// This limit is enough, tried in a dry run.
    Enough {
        /// Bytes that are enough.
        needed: usize,
        /// What has to be changed too; empty if nothing has.
        change: String,
        /// Whether other programs hold some of it now.
        takes_others: bool,
    },
    /// The most that the machine can give is not enough.
    TooLow {
        /// That many bytes.
        max_bytes: usize,
    },
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, needed, fits, raise } = self;
        let needed = bytes(*needed);
        match (fits, raise, change.as_str()) {
            (true, LimitRaise::Enough { .. }, _) => {
                write!(f, "{change} needs {needed}; or {raise}")
            }
            (true, _, _) => write!(f, "{change} needs {needed}"),
            (false, LimitRaise::Enough { .. }, _) => write!(f, "{raise}"),
            (false, _, "") => write!(f, "no setting takes less than {needed}: {raise}"),
            (false, _, _) => {
                write!(f, "nothing fits: the least is {needed}, with {change}; {raise}")
            }
        }
    }
}

impl fmt::Display for LimitRaise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("raise --limit, or close other programs"),
            Self::Enough { needed, change, takes_others } => {
                write!(f, "--limit {}", typed_limit(*needed).1)?;
                if *takes_others {
                    f.write_str(" with other programs closed")?;
                }
                if change.is_empty() { Ok(()) } else { write!(f, ", and {change}") }
            }
            Self::TooLow { max_bytes } => {
                write!(
                    f,
                    "--limit can be raised to {} here, use a larger machine",
                    bytes(*max_bytes)
                )
            }
        }
    }
}

/// The smallest `--limit` of few digits that is enough for so many bytes, and as it is typed.
pub(crate) fn typed_limit(needed: usize) -> (usize, String) {
    const MB: usize = 1_000_000;
    let megabytes = needed.div_ceil(MB);
    if megabytes < 1000 {
        return (megabytes * MB, format!("{megabytes}MB"));
    }
    let hundredths = megabytes.div_ceil(10);
    (hundredths * 10 * MB, format!("{}.{:02}GB", hundredths / 100, hundredths % 100))
}

/// Two sizes, in units that show their difference.
pub(super) fn above(needed: usize, limit: usize) -> String {
    let [needed_text, limit_text] = [needed, limit].map(bytes);
    if needed_text == limit_text {
        format!("{needed_text}, {} more than the limit", bytes(needed - limit.min(needed)))
    } else {
        format!("{needed_text}, limit {limit_text}")
    }
}

pub(super) fn bytes(bytes: usize) -> String {
    Bytes(bytes as u64).to_string()
}
