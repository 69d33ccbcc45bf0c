//! The ranks that trained together: who computed how much of a step, and how long it waited.

use std::fmt::Write;

use super::format::escaped;
use crate::event::RankShare;

/// As a table; nothing for a run of one process.
pub fn ranks(ranks: &[RankShare]) -> String {
    if ranks.is_empty() {
        return String::new();
    }
    let mut rows = String::new();
    for (rank, share) in ranks.iter().enumerate() {
        let heat = share.celsius.map_or_else(String::new, |celsius| format!("{celsius:.0} °C"));
        _ = write!(
            rows,
            "<tr><td>{rank}</td><td>{}</td><td>{}</td><td class=\"number\">{}</td><td \
             class=\"number\">{:.2} s</td><td class=\"number\">{:.2} s</td><td \
             class=\"number\">{:.2} s</td><td class=\"number\">{heat}</td></tr>",
            escaped(&share.node),
            escaped(&share.device),
            share.samples,
            share.compute_secs,
            share.wait_secs,
            share.exchange_secs,
        );
    }
    let mut columns = String::new();
    for name in ["samples per step", "computing", "waiting", "summing", "temperature"] {
        _ = write!(columns, "<th class=\"number\">{name}</th>");
    }
    format!(
        "<h2>Ranks</h2>\n<div class=\"card wide\"><table><tr><th>rank</th><th>machine</th>\
         <th>device</th>{columns}</tr>{rows}</table></div>\n"
    )
}
