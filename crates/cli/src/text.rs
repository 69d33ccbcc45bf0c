//! The few shapes all pages are made of: titles, labelled rows that wrap, bars.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;

use crate::terminal;

/// Chosen: as wide as a line may be and still be read in a bug report, and as narrow as a column of
/// text may get.
const WIDEST: usize = 96;
const NARROWEST: usize = 32;
const LABEL_WIDTH: usize = 11;
const BAR_WIDTH: usize = 24;

pub const PLAIN: Style = Style::new();
pub const BOLD: Style = Style::new().bold();
pub const DIM: Style = Style::new().dimmed();
pub const GOOD: Style = AnsiColor::Green.on_default();
pub const WARN: Style = AnsiColor::Yellow.on_default();
pub const BAD: Style = AnsiColor::Red.on_default().bold();

/// A page being written.
pub struct TextPage {
    text: String,
    width: usize,
}

impl TextPage {
    /// An empty page, no wider than the terminal if there is one.
    pub fn new() -> Self {
        let terminal = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        Self::of_width(terminal.unwrap_or(WIDEST).clamp(NARROWEST, WIDEST))
    }

    fn of_width(width: usize) -> Self {
        Self { text: String::new(), width }
    }

    /// A line in one style, wrapped without indent.
    pub fn line(&mut self, style: Style, text: &str) {
        self.wrapped("", "", style, text);
    }

    /// A heading with an empty line above.
    pub fn heading(&mut self, text: &str) {
        _ = writeln!(self.text, "\n{BOLD}{text}{BOLD:#}");
    }

    /// `  label      text`, the text wrapped in its own column.
    pub fn row(&mut self, label: &str, style: Style, text: &str) {
        let lead = format!("  {DIM}{label:LABEL_WIDTH$}{DIM:#}");
        self.wrapped(&lead, &" ".repeat(LABEL_WIDTH + 2), style, text);
    }

    /// `  ✓ text`, wrapped behind the mark.
    pub fn item(&mut self, mark: &str, mark_style: Style, text: &str) {
        self.wrapped(&format!("  {mark_style}{mark}{mark_style:#} "), "    ", PLAIN, text);
    }

    /// The same on one line, however long, so that names and commands in it can be copied.
    pub fn long_item(&mut self, mark: &str, mark_style: Style, text: &str) {
        let text = text.replace('\n', "\\n");
        _ = writeln!(self.text, "  {mark_style}{mark}{mark_style:#} {text}");
    }

    /// A line below an item.
    pub fn below(&mut self, style: Style, text: &str) {
        self.wrapped("    ", "    ", style, text);
    }

    /// Rows whose columns line up; lines too long are left to the terminal.
    pub fn table<const N: usize>(&mut self, rows: &[[String; N]]) {
        let one_line = |row: &[String; N]| row.each_ref().map(|cell| cell.replace('\n', "\\n"));
        let rows: Vec<[String; N]> = rows.iter().map(one_line).collect();
        let mut widths = [0; N];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = columns(cell).max(*width);
            }
        }
        for row in &rows {
            let padded = |(cell, width): (&String, usize)| {
                format!("{cell}{}", " ".repeat(width - columns(cell)))
            };
            let cells = row.iter().zip(widths).map(padded);
            let line = cells.collect::<Vec<_>>().join("  ");
            _ = writeln!(self.text, "  {}", line.trim_end());
        }
    }

    /// The finished text.
    pub fn finish(self) -> String {
        self.text
    }

    fn wrapped(&mut self, lead: &str, indent: &str, style: Style, text: &str) {
        let mut lead = lead;
        for line in wrap(text, self.width - indent.len()) {
            _ = writeln!(self.text, "{lead}{style}{line}{style:#}");
            lead = indent;
        }
    }
}

/// Breaks at white space; a word longer than the width stands alone.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a line");
        let joined = columns(line) + 1 + columns(word);
        if line.is_empty() {
            line.push_str(word);
        } else if joined <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// A bar filled to a share between 0 and 1.
pub fn bar(share: f64) -> String {
    bar_of_width(share, BAR_WIDTH)
}

/// The same in so many columns.
pub fn bar_of_width(share: f64, width: usize) -> String {
    let filled = (share.clamp(0.0, 1.0) * width as f64).round() as usize;
    "█".repeat(filled) + &"░".repeat(width - filled)
}

/// Columns that a text takes in a terminal: none for its styles, two for wide characters.
pub fn columns(text: &str) -> usize {
    let text = terminal::safe(text);
    let plain = anstream::adapter::strip_str(&text);
    plain.map(|part| part.chars().map(char_columns).sum::<usize>()).sum()
}

fn char_columns(c: char) -> usize {
    let within = |ranges: &[(u32, u32)]| {
        ranges.iter().any(|(first, last)| (*first..=*last).contains(&u32::from(c)))
    };
    if c.is_control() || within(&ZERO) {
        0
    } else if within(&WIDE) {
        2
    } else {
        1
    }
}

/// Characters that lie on the one before. Taken: general category Mn of Unicode 16, the common blocks.
const ZERO: [(u32, u32); 5] =
    [(0x300, 0x36F), (0x1AB0, 0x1AFF), (0x200B, 0x200F), (0x20D0, 0x20FF), (0xFE00, 0xFE0F)];
/// Characters of two columns. Taken: Unicode Standard Annex 11, East Asian Width W and F, by blocks.
const WIDE: [(u32, u32); 12] = [
    (0x1100, 0x115F),
    (0x2E80, 0x303E),
    (0x3041, 0x4DBF),
    (0x4E00, 0xA4CF),
    (0xA960, 0xA97C),
    (0xAC00, 0xD7A3),
    (0xF900, 0xFAFF),
    (0xFE30, 0xFE6F),
    (0xFF00, 0xFF60),
    (0xFFE0, 0xFFE6),
    (0x1F300, 0x1FAFF),
    (0x20000, 0x3FFFD),
];

/// `30,720`.
pub fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let from_end = |at: usize| digits.len() - at;
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && from_end(at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 step`, `1,200 steps`.
pub fn plural(n: usize, what: &str) -> String {
    format!("{} {what}{}", thousands(n), if n == 1 { "" } else { "s" })
}

/// A choice as it is typed, and as it is written in JSON.
pub fn name_of(choice: &impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// A word as a shell reads it back.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_wraps_in_its_column() {
        let mut page = TextPage::of_width(48);
        page.row("label", PLAIN, &"word ".repeat(14));
        let text = anstream::adapter::strip_str(&page.finish()).to_string();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 48), "{text}");
        assert!(text.lines().nth(1).unwrap().starts_with("             word"), "{text}");
    }

    #[test]
    fn words_are_never_broken() {
        assert_eq!(wrap("a bb ccccccccc d", 4), ["a bb", "ccccccccc", "d"]);
        assert_eq!(wrap("", 4), [""]);
    }

    #[test]
    fn columns_are_those_that_a_terminal_shows() {
        let cases = [
            ("loss 0.5", 8),
            ("°C █░ – …", 9),
            ("处理器", 6),
            ("한국어", 6),
            ("🦊", 2),
            ("e\u{301}", 1),
            ("\u{1b}[33mwarning:\u{1b}[0m x", 10),
            ("", 0),
        ];
        for (text, expected) in cases {
            assert_eq!(columns(text), expected, "{text}");
        }
    }

    #[test]
    fn thousands_are_separated() {
        let numbers = [0, 7, 999, 1000, 30_720, 4_718_592].map(thousands);
        assert_eq!(numbers, ["0", "7", "999", "1,000", "30,720", "4,718,592"]);
        assert_eq!([1, 2].map(|n| plural(n, "step")), ["1 step", "2 steps"]);
    }

    #[test]
    fn bars_stay_within_their_width() {
        for share in [-1.0, 0.0, 0.5, 1.0, 7.0, f64::NAN] {
            assert_eq!(bar(share).chars().count(), BAR_WIDTH, "{share}");
        }
    }
}
