//! The plot on a page, with the memory of every phase, and its figures as a table.

use std::fmt::Write;

use compute::{MemorySnapshot, Tag};

use super::{MemoryPlot, parts, svg};
use crate::event::PlannedPhase;
use crate::report::bars::{MemoryBar, bars};
use crate::report::document::document;
use crate::report::format::fine_bytes;

/// One file that opens in any browser: the plot, a bar per phase against the limit, a table.
pub fn page(title: &str, memory: &MemoryPlot<'_>, phases: &[PlannedPhase]) -> String {
    let sections = [plot(memory), against_limit(memory, phases), table(memory)];
    document(title, None, &sections.concat())
}

fn plot(memory: &MemoryPlot<'_>) -> String {
    format!(
        "<p class=\"faint\">Memory over one step, by tag.</p>\n\
         <figure class=\"card plot\">{}</figure>\n",
        svg(memory)
    )
}

fn against_limit(memory: &MemoryPlot<'_>, phases: &[PlannedPhase]) -> String {
    if phases.is_empty() {
        return String::new();
    }
    let mut all = Vec::with_capacity(phases.len());
    for PlannedPhase { name, peak_bytes } in phases {
        all.push(MemoryBar {
            name: name.to_string(),
            planned_bytes: *peak_bytes,
            taken_bytes: None,
        });
    }
    format!("<h2>Phases</h2>\n{}", bars(&all, memory.limit_bytes))
}

/// The most of each tag in each part of the step, and at the peak of all.
fn table(memory: &MemoryPlot<'_>) -> String {
    let moments = &memory.recording.snapshots;
    let Some(peak) = moments.iter().max_by_key(|moment| moment.bytes()) else {
        return String::new();
    };
    let parts = by_name(memory);
    let mut rows = String::from("<tr><th>tag</th>");
    for (name, _) in &parts {
        _ = write!(rows, "<th class=\"number\">{name}</th>");
    }
    rows.push_str("<th class=\"number\">at the peak</th></tr>");
    let mut row = |name: &str, size: &dyn Fn(&MemorySnapshot) -> usize| {
        _ = write!(rows, "<tr><td>{name}</td>");
        let most = parts.iter().map(|(_, of)| of.iter().map(|m| size(m)).max().unwrap_or(0));
        for most in most.chain([size(peak)]) {
            _ = write!(rows, "<td class=\"number\">{}</td>", fine_bytes(most));
        }
        rows.push_str("</tr>");
    };
    for (index, tag) in Tag::ALL.iter().enumerate() {
        if moments.iter().any(|moment| moment.by_tag[index] > 0) {
            row(&tag.to_string(), &|moment| moment.by_tag[index]);
        }
    }
    row("<b>total</b>", &MemorySnapshot::bytes);
    format!(
        "<h2>Figures</h2>\n<div class=\"card wide\"><table>{rows}</table></div>\n\
         <p class=\"note\">Peak of each tag in each part of the step; the peaks may come at different times.</p>\n"
    )
}

/// Moments by the name of their part: each micro-batch has a forward and a backward pass.
fn by_name<'a>(memory: &MemoryPlot<'a>) -> Vec<(&'static str, Vec<&'a MemorySnapshot>)> {
    let mut all: Vec<(&'static str, Vec<&MemorySnapshot>)> = Vec::new();
    for (from, to, name) in parts(memory.recording) {
        let moments = memory.recording.snapshots[from..to].iter();
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, of)) => of.extend(moments),
            None => all.push((name, moments.collect())),
        }
    }
    all
}
