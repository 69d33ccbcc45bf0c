//! The live line, made for the width of the terminal. A line that is wider than the terminal cannot be
//! redrawn in place, so whole parts are left out, the least important first: a figure is never cut.

use crate::text::{bar_of_width, columns};

/// The widest bar, and the narrowest that still says something.
const BAR_WIDTHS: [usize; 2] = [24, 8];
/// What follows a text that had to be cut.
const CUT: char = '…';

/// How far some work has come.
pub struct ProgressLine {
    name: String,
    share: Option<f64>,
    parts: Vec<LinePart>,
}

/// A part of the line that is shown as a whole or not at all.
struct LinePart {
    /// Parts with the highest rank are left out first.
    rank: u8,
    text: String,
}

impl ProgressLine {
    /// A line about work of this name, which may be empty.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), share: None, parts: Vec::new() }
    }

    /// With a bar, where there is room for one.
    pub fn bar(mut self, share: f64) -> Self {
        self.share = Some(share);
        self
    }

    /// With one more part; of two parts the one with the higher rank is left out first.
    pub fn part(mut self, rank: u8, text: impl Into<String>) -> Self {
        self.parts.push(LinePart { rank, text: text.into() });
        self
    }

    /// The line in at most `width` columns.
    pub fn fit(&self, width: usize) -> String {
        let mut parts: Vec<&LinePart> =
            self.parts.iter().filter(|part| !part.text.is_empty()).collect();
        while columns(&self.text(&parts, None)) > width
            && let Some(least) = parts.iter().map(|part| part.rank).max()
            && parts.len() > 1
        {
            parts.retain(|part| part.rank != least);
        }
        let [widest, narrowest] = BAR_WIDTHS;
        let room = width.saturating_sub(columns(&self.text(&parts, None)) + 1).min(widest);
        let bar = self.share.filter(|_| room >= narrowest);
        let bar = bar.map(|share| bar_of_width(share, room));
        cut(self.text(&parts, bar.as_deref()), width)
    }

    fn text(&self, parts: &[&LinePart], bar: Option<&str>) -> String {
        let texts: Vec<&str> = parts.iter().map(|part| part.text.as_str()).collect();
        let texts = texts.join("  ");
        let all = [self.name.as_str(), bar.unwrap_or_default(), &texts];
        all.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ")
    }
}

/// The start of a text that is too wide even alone, without its styles.
fn cut(text: String, width: usize) -> String {
    if columns(&text) <= width {
        return text;
    }
    let mut short = String::new();
    for c in anstream::adapter::strip_str(&text).to_string().chars() {
        short.push(c);
        if columns(&short) >= width {
            short.pop();
            break;
        }
    }
    short.push(CUT);
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{DIM, WARN};

    fn training() -> ProgressLine {
        ProgressLine::new("")
            .bar(0.5)
            .part(0, "20/40")
            .part(1, "loss 6.9776")
            .part(3, "8.8 steps/s")
            .part(4, "7 of 8 MiB planned")
            .part(2, "3 s left")
            .part(2, format!("{WARN}70 % pace{WARN:#}"))
            .part(5, format!("{DIM}(hot: 处理器 at 84 °C){DIM:#}"))
    }

    fn plain(line: &ProgressLine, width: usize) -> String {
        anstream::adapter::strip_str(&line.fit(width)).to_string()
    }

    #[test]
    fn a_line_is_never_wider_than_the_terminal() {
        let unknown =
            ProgressLine::new("a phase of a long name that does not fit anywhere, 处理器");
        for width in 1..200 {
            for line in [&training(), &unknown] {
                let fitted = line.fit(width);
                assert!(columns(&fitted) <= width, "{width}: {fitted}");
            }
        }
    }

    #[test]
    fn the_least_important_parts_are_left_out_first() {
        let whole = "20/40  loss 6.9776  8.8 steps/s  7 of 8 MiB planned  3 s left  70 % pace  (hot: 处理器 at 84 °C)";
        let cases = [
            (usize::MAX, &*format!("{}{} {whole}", "█".repeat(12), "░".repeat(12))),
            (107, &*format!("█████░░░░░ {whole}")),
            (102, whole),
            (80, "20/40  loss 6.9776  8.8 steps/s  7 of 8 MiB planned  3 s left  70 % pace"),
            (61, "████░░░░ 20/40  loss 6.9776  8.8 steps/s  3 s left  70 % pace"),
            (40, "20/40  loss 6.9776  3 s left  70 % pace"),
            (20, "20/40  loss 6.9776"),
            (5, "20/40"),
            (4, "20/…"),
        ];
        for (width, expected) in cases {
            assert_eq!(plain(&training(), width), expected, "{width}");
        }
    }
}
