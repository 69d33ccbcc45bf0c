//! Bars of the memory of phases: planned, and within it measured.

use std::fmt::Write;

use super::format::{escaped, fine_bytes};

/// A limit up to so many times the largest bar ends the scale. Chosen: beyond, all bars would be squeezed into a
/// quarter.
const LIMIT_SHOWN: usize = 4;

/// A phase and its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBar {
    /// Of the phase.
    pub name: String,
    /// What was planned for it.
    pub planned_bytes: usize,
    /// What was measured, if the phase ran.
    pub taken_bytes: Option<usize>,
}

/// All bars, with a legend.
pub fn bars(bars: &[MemoryBar], limit_bytes: usize) -> String {
    let largest = bars.iter().map(|bar| bar.planned_bytes.max(bar.taken_bytes.unwrap_or(0)));
    let largest = largest.max().unwrap_or(0);
    let is_limit_shown = shows_limit(largest, limit_bytes);
    let full = if is_limit_shown { limit_bytes } else { largest }.max(1);
    let mut out = String::from("<div class=\"card bars\">");
    for bar in bars {
        draw(bar, full, &mut out);
    }
    let limit = fine_bytes(limit_bytes);
    let scale = if is_limit_shown {
        format!("a full bar is the limit, {limit}")
    } else {
        format!("a full bar is the largest phase; the limit is {limit}")
    };
    out.push_str("<p class=\"note\"><span class=\"key c3\">planned</span> ");
    if bars.iter().any(|bar| bar.taken_bytes.is_some()) {
        out.push_str("<span class=\"key c2\">measured</span> ");
    }
    out + &format!("– peaks of each phase; {scale}.</p></div>\n")
}

/// Whether a limit is near enough to be shown.
pub fn shows_limit(largest_bytes: usize, limit_bytes: usize) -> bool {
    limit_bytes <= largest_bytes.saturating_mul(LIMIT_SHOWN)
}

fn draw(bar: &MemoryBar, full: usize, out: &mut String) {
    let share = |size: usize| (100.0 * size as f64 / full as f64).min(100.0);
    let planned = fine_bytes(bar.planned_bytes);
    let (style, figures) = match bar.taken_bytes {
        Some(taken) => (
            format!(";--taken:{:.1}%", share(taken)),
            format!("{} of {planned}", fine_bytes(taken)),
        ),
        None => (String::new(), planned),
    };
    _ = write!(
        out,
        "<div class=\"bar\"><b>{}</b><span style=\"--planned:{:.1}%{style}\"></span>\
         <em>{figures}</em></div>",
        escaped(&bar.name),
        share(bar.planned_bytes)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_the_limit_allows() {
        let train = MemoryBar {
            name: "train <1>".into(),
            planned_bytes: 6 << 30,
            taken_bytes: Some(3 << 30),
        };
        let draw = MemoryBar { name: "draw".into(), planned_bytes: 2 << 30, taken_bytes: None };
        let near = bars(&[train.clone(), draw.clone()], 8 << 30);
        for shown in [
            "--planned:75.0%;--taken:37.5%",
            "3.0 GiB of 6.0 GiB",
            "train &lt;1&gt;",
            "style=\"--planned:25.0%\"",
            "<em>2.0 GiB</em>",
            "full bar is the limit, 8.0 GiB",
        ] {
            assert!(near.contains(shown), "{shown}: {near}");
        }
        let far = bars(&[train, draw], 80 << 30);
        assert!(far.contains("--planned:100.0%;--taken:50.0%"), "{far}");
        assert!(far.contains("the limit is 80.0 GiB"), "{far}");
    }
}
