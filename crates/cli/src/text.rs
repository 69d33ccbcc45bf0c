//! The few shapes all pages are made of: titles, labelled rows that wrap, bars.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};

/// Chosen: as wide as a line may be and still be read in a bug report, and as narrow as a column of
/// text may get.
const WIDEST: usize = 96;
const NARROWEST: usize = 48;
const LABEL_WIDTH: usize = 11;
const BAR_WIDTH: usize = 24;

pub const PLAIN: Style = Style::new();
pub const BOLD: Style = Style::new().bold();
pub const DIM: Style = Style::new().dimmed();
pub const GOOD: Style = AnsiColor::Green.on_default();
pub const WARN: Style = AnsiColor::Yellow.on_default();
pub const BAD: Style = AnsiColor::Red.on_default().bold();

/// A page being written.
pub struct Page {
    text: String,
    width: usize,
}

impl Page {
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
        _ = writeln!(self.text, "  {mark_style}{mark}{mark_style:#} {text}");
    }

    /// A line below an item.
    pub fn below(&mut self, style: Style, text: &str) {
        self.wrapped("    ", "    ", style, text);
    }

    /// Rows whose columns line up; lines too long are left to the terminal.
    pub fn table<const N: usize>(&mut self, rows: &[[String; N]]) {
        let mut widths = [0; N];
        for row in rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        for row in rows {
            let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
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
        let joined = line.chars().count() + 1 + word.chars().count();
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
    let filled = (share.clamp(0.0, 1.0) * BAR_WIDTH as f64).round() as usize;
    "█".repeat(filled) + &"░".repeat(BAR_WIDTH - filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_wraps_in_its_column() {
        let mut page = Page::of_width(NARROWEST);
        page.row("label", PLAIN, &"word ".repeat(14));
        let text = anstream::adapter::strip_str(&page.finish()).to_string();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= NARROWEST), "{text}");
        assert!(text.lines().nth(1).unwrap().starts_with("             word"), "{text}");
    }

    #[test]
    fn words_are_never_broken() {
        assert_eq!(wrap("a bb ccccccccc d", 4), ["a bb", "ccccccccc", "d"]);
        assert_eq!(wrap("", 4), [""]);
    }

    #[test]
    fn bars_stay_within_their_width() {
        for share in [-1.0, 0.0, 0.5, 1.0, 7.0, f64::NAN] {
            assert_eq!(bar(share).chars().count(), BAR_WIDTH, "{share}");
        }
    }
}
