//! `key: value` text, the form in which kernels, `sysctl`, `vm_stat` and our own library probes
//! answer. A value that starts with `?` is unknown and carries its reason: `power: ? not supported`.

use std::fmt::{Display, Write};
use std::str::FromStr;

use crate::reading::Unknown;

/// A text of `key: value` or `key = value` lines.
#[derive(Clone, Copy, Debug)]
pub struct KeyValueLines<'a>(&'a str);

impl<'a> KeyValueLines<'a> {
    /// Looks at a text; lines of another form are passed over.
    pub fn new(text: &'a str) -> Self {
        Self(text)
    }

    /// All pairs in their order.
    pub fn pairs(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.0.lines().filter_map(|line| {
            let at = line.find([':', '='])?;
            Some((line[..at].trim(), line[at + 1..].trim()))
        })
    }

    /// The first value of that key.
    pub fn text(self, key: &str) -> Result<&'a str, Unknown> {
        let Some((_, value)) = self.pairs().find(|(name, _)| *name == key) else {
            return Err(Unknown(format!("no entry {key}")));
        };
        match value.strip_prefix('?') {
            Some(reason) => Err(Unknown::because(reason.trim())),
            None => Ok(value),
        }
    }

    /// The first value of that key as a number; a unit after it is passed over.
    pub fn number<T: FromStr>(self, key: &str) -> Result<T, Unknown> {
        let value = self.text(key)?;
        let digits = value.split_whitespace().next().unwrap_or_default().trim_end_matches('.');
        digits.parse().map_err(|_| Unknown(format!("{key} is not a number: {value:?}")))
    }
}

/// Adds a line that [`KeyValueLines`] reads back.
pub fn write_key_value<T: Display, E: Display>(text: &mut String, key: &str, value: Result<T, E>) {
    let written = match value {
        Ok(value) => writeln!(text, "{key}: {value}"),
        Err(reason) => writeln!(text, "{key}: ? {reason}"),
    };
    written.expect("a String takes any text");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_kernels_write() {
        let fields = KeyValueLines::new("MemTotal:       24682416 kB\nHugePages_Total:       0\n");
        assert_eq!(fields.number("MemTotal"), Ok(24_682_416_u64));
        assert_eq!(fields.number("HugePages_Total"), Ok(0_u64));
        assert_eq!(fields.number::<u64>("SwapFree"), Err(Unknown::because("no entry SwapFree")));
    }

    #[test]
    fn reads_what_vm_stat_and_pmset_write() {
        let fields = KeyValueLines::new(
            "Pages free:                               91234.\n\tCPU_Speed_Limit \t= 62\n",
        );
        assert_eq!(fields.number("Pages free"), Ok(91_234_u64));
        assert_eq!(fields.number("CPU_Speed_Limit"), Ok(62_u32));
    }

    #[test]
    fn unknown_keeps_its_reason_both_ways() {
        let mut text = String::new();
        write_key_value(&mut text, "power_watts", Err::<f64, _>("not supported"));
        write_key_value(&mut text, "name", Ok::<_, Unknown>("NVIDIA GB10"));
        let fields = KeyValueLines::new(&text);
        assert_eq!(fields.number::<f64>("power_watts"), Err(Unknown::because("not supported")));
        assert_eq!(fields.text("name"), Ok("NVIDIA GB10"));
    }

    #[test]
    fn a_word_where_a_number_belongs_is_named() {
        let reason = KeyValueLines::new("temp: hot").number::<f64>("temp").unwrap_err();
        assert_eq!(reason.0, "temp is not a number: \"hot\"");
    }
}
