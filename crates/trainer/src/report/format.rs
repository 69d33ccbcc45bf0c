//! Numbers as people read them, and text as a page may hold it.

use std::fmt::Write;
use std::path::Path;

use machine::Bytes;

/// Text that a page shows as it is, whatever is in it: also inside quoted attributes.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

/// A relative path as an address, in a page or in Markdown.
pub fn link(path: &Path) -> String {
    let mut out = String::new();
    for byte in path.to_string_lossy().replace('\\', "/").bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                out.push(char::from(byte));
            }
            _ => _ = write!(out, "%{byte:02X}"),
        }
    }
    out
}

/// `11.2 GiB`.
pub fn bytes(bytes: usize) -> String {
    Bytes(bytes as u64).to_string()
}

/// The same with a digit more where the number is small, for what is held beside another: `6.8 MiB`.
pub fn fine_bytes(bytes: usize) -> String {
    let (name, size) = unit(bytes);
    let number = bytes as f64 / size;
    match bytes {
        0 => "0".into(),
        _ if number < 0.1 => format!("{bytes} B"),
        _ if number < 100.0 => format!("{number:.1} {name}"),
        _ => format!("{number:.0} {name}"),
    }
}

/// The unit in which so many bytes are a short number, and its size.
pub fn unit(bytes: usize) -> (&'static str, f64) {
    match bytes {
        0..1_048_576 => ("KiB", 1024.0),
        1_048_576..1_073_741_824 => ("MiB", 1_048_576.0),
        _ => ("GiB", 1_073_741_824.0),
    }
}

/// `2 h 05 min`, `3 min 20 s`, `1.4 s`.
pub fn duration(secs: f64) -> String {
    let whole = secs.max(0.0).round() as u64;
    match whole {
        0..60 => format!("{secs:.1} s"),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

/// `1 image`, `24 images`.
pub fn plural(n: usize, what: &str) -> String {
    format!("{} {what}{}", count(n as u64), if n == 1 { "" } else { "s" })
}

/// `4.7 million`, `18,432`.
pub fn count(count: u64) -> String {
    match count {
        1_000_000_000.. => format!("{:.1} billion", count as f64 / 1e9),
        1_000_000.. => format!("{:.1} million", count as f64 / 1e6),
        1000.. => format!("{},{:03}", count / 1000, count % 1000),
        _ => count.to_string(),
    }
}

/// Four digits that matter, however small the number is: `0.1235`, `1e-4`.
pub fn number(number: f64) -> String {
    if number != 0.0 && number.abs() < 1e-3 {
        let text = format!("{number:.3e}");
        let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'));
    }
    let before = number.abs().max(1.0).log10() as usize;
    format!("{number:.*}", 4_usize.saturating_sub(before))
}

/// `2026-03-01 14:05 UTC` of seconds since 1970.
pub fn date(secs: u64) -> String {
    // Days are counted from 1 March of the year 0, so that the leap day is the last of a year; by
    // Howard Hinnant's days algorithm.
    let days = secs / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let months = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * months + 2) / 5 + 1;
    let month = if months < 10 { months + 3 } else { months - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute) = (secs % 86_400 / 3600, secs % 3600 / 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.04, 61.0, 7499.6].map(duration), ["0.0 s", "1 min 01 s", "2 h 05 min"]);
        assert_eq!([7, 18_432, 4_718_592].map(count), ["7", "18,432", "4.7 million"]);
        assert_eq!(
            [0, 64, 30_720, 7_130_316, 12 << 30].map(fine_bytes),
            ["0", "64 B", "30.0 KiB", "6.8 MiB", "12.0 GiB"]
        );
        assert_eq!(
            [0.0, 0.123_456, 1e-4, 2.5e-6, 1234.5].map(number),
            ["0.0000", "0.1235", "1e-4", "2.5e-6", "1234.5"]
        );
    }

    #[test]
    fn links_have_nothing_but_letters_and_marks() {
        assert_eq!(link(Path::new("samples/a b\"<ü>.png")), "samples/a%20b%22%3C%C3%BC%3E.png");
    }

    /// As `date -u -d @…` says.
    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(
            [0, 1_709_210_096, 1_767_225_599, 4_102_444_800].map(date),
            [
                "1970-01-01 00:00 UTC",
                "2024-02-29 12:34 UTC",
                "2025-12-31 23:59 UTC",
                "2100-01-01 00:00 UTC"
            ]
        );
    }
}
