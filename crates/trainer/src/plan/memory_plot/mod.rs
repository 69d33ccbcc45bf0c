//! Memory over a step as a plot: bytes of the arena by tag, from the first upload to the end of the update.
//! Drawn from a recording, of a dry run or of a real step: one SVG without scripts, light or dark.
//!
//! The x axis is the order of allocations and frees, not time: a recording has no clock, and the meta device
//! has no time.

mod page;
#[cfg(test)]
mod tests;

use std::fmt::Write;

use compute::{MemoryRecording, MemorySnapshot, Tag};

pub use page::page;

use crate::report::bars::shows_limit;
use crate::report::document::COLOURS;
use crate::report::format::{fine_bytes, unit};
use crate::report::plot::{label, ticks};

/// The plot's size.
const SIZE: [f64; 2] = [800.0, 420.0];
/// Where the plot begins and ends, across and down.
const ACROSS: [f64; 2] = [66.0, 590.0];
const DOWN: [f64; 2] = [38.0, 380.0];
/// Where the legend begins and ends.
const LEGEND: [f64; 2] = [616.0, 786.0];
/// Moments that are drawn. Chosen: more than the plot has pixels.
const MOMENTS: usize = 600;
/// Strips that tell what is under the pointer. Chosen: as narrow as a pointer can be held still.
const STRIPS: usize = 100;
/// The least share of the width that one of a few named parts gets. Chosen: an update changes memory a
/// few times where a backward pass does so thousands of times, and still is to be seen and named.
const LEAST_PART: f64 = 0.1;
/// The narrowest part that gets a line where it begins. Chosen: with more, nothing else is seen.
const LEAST_MARKED: f64 = 20.0;
/// Room above the highest line.
const HEADROOM: f64 = 1.12;
/// How wide a letter is at most, about.
const LETTER: f64 = 7.0;

/// What is drawn.
#[derive(Clone, Copy, Debug)]
pub struct MemoryPlot<'a> {
    /// A step, or whatever was recorded.
    pub recording: &'a MemoryRecording,
    /// The most that may be taken.
    pub limit_bytes: usize,
}

/// The plot as SVG, to be put into a page or a file of its own; nothing of an empty recording.
pub fn svg(memory: &MemoryPlot<'_>) -> String {
    let thin = memory.recording.downsampled(MOMENTS);
    let Some(drawing) = PlotLayout::of(&thin, memory.limit_bytes) else { return String::new() };
    let mut out = drawing.head();
    drawing.grid(&mut out);
    drawing.layers(&mut out);
    drawing.parts(&mut out);
    drawing.limit(&mut out);
    drawing.peak(&mut out);
    drawing.legend(&mut out);
    drawing.strips(&mut out);
    out + "</svg>\n"
}

struct PlotLayout<'a> {
    moments: &'a [MemorySnapshot],
    /// Named parts: where each begins and ends, and its name.
    parts: Vec<(usize, usize, &'static str)>,
    /// Where each moment begins across; one more, for the end of the last.
    places: Vec<f64>,
    /// The fullest moment.
    peak: usize,
    limit_bytes: usize,
    is_limit_shown: bool,
    /// Bytes at the upper edge.
    top: f64,
}

impl<'a> PlotLayout<'a> {
    /// None if there is nothing to draw.
    fn of(recording: &'a MemoryRecording, limit_bytes: usize) -> Option<Self> {
        let moments = &recording.snapshots[..];
        // The first of equals: what the peak is about began there.
        let fullest = (0..moments.len()).rev().max_by_key(|index| moments[*index].bytes());
        let peak = fullest.filter(|index| moments[*index].bytes() > 0)?;
        let parts = parts(recording);
        let peak_bytes = moments[peak].bytes();
        let is_limit_shown = shows_limit(peak_bytes, limit_bytes);
        let highest = if is_limit_shown { peak_bytes.max(limit_bytes) } else { peak_bytes };
        let places = places(moments.len(), &parts);
        let top = HEADROOM * highest as f64;
        Some(Self { moments, parts, places, peak, limit_bytes, is_limit_shown, top })
    }

    fn peak_bytes(&self) -> usize {
        self.moments[self.peak].bytes()
    }

    fn y(&self, bytes: f64) -> f64 {
        DOWN[1] - (DOWN[1] - DOWN[0]) * bytes / self.top
    }

    /// Tags that ever held memory.
    fn shown(&self) -> Vec<usize> {
        let is_held = |index: &usize| self.moments.iter().any(|moment| moment.by_tag[*index] > 0);
        (0..Tag::ALL.len()).filter(is_held).collect()
    }

    /// The name of the part that a moment is in.
    fn part_of(&self, moment: usize) -> &'static str {
        let part = self.parts.iter().find(|(from, to, _)| (*from..*to).contains(&moment));
        part.map_or("", |(_, _, name)| name)
    }

    /// `in attention, backward`, as far as it is known.
    fn whereabouts(&self, moment: usize) -> String {
        let words = [self.moments[moment].op, self.part_of(moment)];
        let known: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        if known.is_empty() { String::new() } else { format!("in {}", known.join(", ")) }
    }

    /// The opening tag, with the description for screen readers.
    fn head(&self) -> String {
        let [width, height] = SIZE;
        let mut description =
            format!("Peak {} {}: ", fine_bytes(self.peak_bytes()), self.whereabouts(self.peak));
        for (tag, size) in held(&self.moments[self.peak]) {
            _ = write!(description, "{tag} {}, ", fine_bytes(size));
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"memory\" viewBox=\"0 0 {width} \
             {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" \
             aria-labelledby=\"memory-title memory-description\">\
             <title id=\"memory-title\">Memory over a step</title>\
             <desc id=\"memory-description\">{description}limit {}.</desc><style>{COLOURS}{}</style>\
             <rect class=\"ground\" width=\"{width}\" height=\"{height}\" rx=\"8\"/>",
            fine_bytes(self.limit_bytes),
            include_str!("plot.css")
        )
    }

    /// Lines across with their numbers, and what is shown along them.
    fn grid(&self, out: &mut String) {
        let (name, size) = unit(self.top as usize);
        let ticks = ticks([0.0, self.top / size]);
        let [left, right] = ACROSS;
        for tick in &ticks {
            let (y, number) = (self.y(tick * size), label(*tick, &ticks));
            let name = if *tick == 0.0 { "" } else { name };
            _ = write!(
                out,
                "<path class=\"grid\" d=\"M{left} {y:.1}H{right}\"/><text class=\"faint end\" \
                 x=\"{}\" y=\"{:.1}\">{number} {name}</text>",
                left - 8.0,
                y + 4.0
            );
        }
        _ = write!(
            out,
            "<text class=\"faint end\" x=\"{right}\" y=\"{}\">allocations and frees, in order \
             →</text>",
            DOWN[1] + 22.0
        );
    }

    /// Areas on top of each other: each is drawn down to the ground, and the ones below over it.
    fn layers(&self, out: &mut String) {
        for index in self.shown().into_iter().rev() {
            let below = |moment: &MemorySnapshot| moment.by_tag[..=index].iter().sum::<usize>();
            let mut path = format!("M{:.1} {}", ACROSS[0], DOWN[1]);
            let mut before = String::new();
            for (moment, place) in self.moments.iter().zip(&self.places) {
                let y = format!("{:.1}", self.y(below(moment) as f64));
                if y != before {
                    _ = write!(path, "H{place:.1}V{y}");
                    before = y;
                }
            }
            let tag = Tag::ALL[index];
            _ = write!(out, "<path class=\"{tag}\" d=\"{path}H{}V{}Z\"/>", ACROSS[1], DOWN[1]);
        }
    }

    /// A line where a part begins and its name above, as far as there is room.
    fn parts(&self, out: &mut String) {
        for (from, to, name) in &self.parts {
            let (start, end) = (self.places[*from], self.places[*to]);
            if end - start < LEAST_MARKED {
                continue;
            }
            let [top, bottom] = [DOWN[0] - 14.0, DOWN[1]];
            _ = write!(out, "<path class=\"mark\" d=\"M{start:.1} {top}V{bottom}\"/>");
            if LETTER * name.len() as f64 <= end - start {
                let (x, y) = (f64::midpoint(start, end), DOWN[0] - 18.0);
                _ = write!(
                    out,
                    "<text class=\"faint middle\" x=\"{x:.1}\" y=\"{y}\">{name}</text>"
                );
            }
        }
    }

    fn limit(&self, out: &mut String) {
        if !self.is_limit_shown {
            return;
        }
        let ([left, right], y) = (ACROSS, self.y(self.limit_bytes as f64));
        _ = write!(
            out,
            "<path class=\"limit\" d=\"M{left} {y:.1}H{right}\"/><text class=\"over halo\" \
             x=\"{}\" y=\"{:.1}\">limit {}</text>",
            left + 8.0,
            y - 6.0,
            fine_bytes(self.limit_bytes)
        );
    }

    fn peak(&self, out: &mut String) {
        let x = f64::midpoint(self.places[self.peak], self.places[self.peak + 1]);
        let y = self.y(self.peak_bytes() as f64);
        // Beside the edges the figure stays within.
        let side = match x {
            x if x < ACROSS[0] + 40.0 => "",
            x if x > ACROSS[1] - 40.0 => "end",
            _ => "middle",
        };
        _ = write!(
            out,
            "<circle class=\"peak\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/><text class=\"strong halo \
             {side}\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
            y - 10.0,
            fine_bytes(self.peak_bytes())
        );
    }

    /// What the peak is made of, from the top down as it lies there.
    fn legend(&self, out: &mut String) {
        let ([left, right], mut y) = (LEGEND, DOWN[0] + 6.0);
        let mut row = |class: &str, name: &str, figure: &str| {
            _ = write!(
                out,
                "<text class=\"{class}\" x=\"{left}\" y=\"{y}\">{name}</text><text class=\"{class} \
                 end\" x=\"{right}\" y=\"{y}\">{figure}</text>"
            );
            y += 22.0;
        };
        row("strong", "peak", &fine_bytes(self.peak_bytes()));
        row("faint", &self.whereabouts(self.peak), "");
        let mut squares = String::new();
        for (row_number, index) in self.shown().into_iter().rev().enumerate() {
            let (tag, down) = (Tag::ALL[index], DOWN[0] + 40.0 + 22.0 * row_number as f64);
            _ = write!(
                squares,
                "<rect class=\"{tag}\" x=\"{left}\" y=\"{down}\" width=\"12\" height=\"12\" rx=\"2\"/>"
            );
            let size = self.moments[self.peak].by_tag[index];
            row("", &format!("<tspan dx=\"20\">{tag}</tspan>"), &fine_bytes(size));
        }
        row("faint", "limit", &fine_bytes(self.limit_bytes));
        out.push_str(&squares);
    }

    /// Invisible strips over the plot that say what lies below them.
    fn strips(&self, out: &mut String) {
        let every = self.moments.len().div_ceil(STRIPS);
        for from in (0..self.moments.len()).step_by(every) {
            let to = (from + every).min(self.moments.len());
            let fullest = (from..to).max_by_key(|index| self.moments[*index].bytes());
            let fullest = fullest.unwrap_or(from);
            let moment = &self.moments[fullest];
            let ([top, bottom], left) = (DOWN, self.places[from]);
            _ = write!(
                out,
                "<rect class=\"strip\" x=\"{left:.1}\" y=\"{top}\" width=\"{:.1}\" \
                 height=\"{}\"><title>{} {}",
                self.places[to] - left,
                bottom - top,
                fine_bytes(moment.bytes()),
                self.whereabouts(fullest)
            );
            for (tag, size) in held(moment) {
                _ = write!(out, "\n{tag} {}", fine_bytes(size));
            }
            out.push_str("</title></rect>");
        }
    }
}

/// The tags that hold memory at a moment, with their bytes.
fn held(moment: &MemorySnapshot) -> Vec<(Tag, usize)> {
    let all = Tag::ALL.into_iter().zip(moment.by_tag);
    all.filter(|(_, size)| *size > 0).collect()
}

/// The parts that are not empty.
fn parts(recording: &MemoryRecording) -> Vec<(usize, usize, &'static str)> {
    let starts = recording.marks.iter();
    let ends = recording.marks.iter().skip(1).map(|(at, _)| *at).chain([recording.snapshots.len()]);
    let all = starts.zip(ends).map(|((from, name), to)| (*from, to, *name));
    all.filter(|(from, to, _)| from < to).collect()
}

/// Where moments begin and end across: evenly, but that a short part is as wide as can be seen.
fn places(n: usize, parts: &[(usize, usize, &str)]) -> Vec<f64> {
    let mut widths = vec![1.0; n];
    // Many parts share what a few have.
    let least = LEAST_PART.min(1.0 / parts.len().max(1) as f64) * n as f64;
    for (from, to, _) in parts {
        let width = (to - from) as f64;
        widths[*from..*to].fill((least / width).max(1.0));
    }
    let whole: f64 = widths.iter().sum();
    let mut places = vec![ACROSS[0]];
    let mut so_far = 0.0;
    for width in widths {
        so_far += width;
        places.push(ACROSS[0] + (ACROSS[1] - ACROSS[0]) * so_far / whole);
    }
    places
}
