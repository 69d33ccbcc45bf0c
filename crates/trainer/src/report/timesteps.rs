//! The loss by timestep: trained, over the whole run, and held out, in its last validation.

use std::fmt::Write;

use super::format::{count, number};
use crate::event::history::History;
use crate::event::timesteps::{TENTHS, TenthLoss, TimestepSums};

/// A bar for each part of the timesteps; nothing of a run that has none.
pub(super) fn timesteps(history: &History) -> String {
    let mut sums = TimestepSums::default();
    let trained = history.timestep_losses.iter().filter(|losses| !losses.is_held_out);
    trained.flat_map(|losses| &losses.tenths).for_each(|part| sums.add_part(*part));
    let trained = sums.means();
    let held_out = history.timestep_losses.iter().rfind(|losses| losses.is_held_out);
    let held_out: &[TenthLoss] = held_out.map_or(&[], |losses| &losses.tenths);
    let all = || trained.iter().chain(held_out).filter(|part| part.loss.is_finite());
    let largest = all().map(|part| part.loss).fold(0.0, f64::max);
    if trained.is_empty() || largest <= 0.0 {
        return String::new();
    }
    let mut out = String::from("<h2>Loss by timestep</h2>\n<div class=\"card bars\">");
    for tenth in 0..TENTHS {
        let of = |parts: &[TenthLoss]| parts.iter().find(|part| part.tenth == tenth).copied();
        draw(tenth, of(&trained), of(held_out), largest, &mut out);
    }
    let held_out =
        if held_out.is_empty() { "" } else { "<span class=\"key c2\">held out, last</span> " };
    out + &format!(
        "<p class=\"note\"><span class=\"key c3\">trained</span> {held_out}– mean loss of samples by timestep, of 1000: \
         low ones have little noise. Without the weights of timesteps; a full bar is {}.</p></div>\n",
        number(largest)
    )
}

fn draw(
    tenth: usize,
    trained: Option<TenthLoss>,
    held_out: Option<TenthLoss>,
    largest: f64,
    out: &mut String,
) {
    let share = |part: Option<TenthLoss>| {
        part.map_or(0.0, |part| (100.0 * part.loss / largest).clamp(0.0, 100.0))
    };
    let figure = |part: TenthLoss| format!("{} of {}", number(part.loss), count(part.n));
    let width = 1000 / TENTHS;
    _ = write!(
        out,
        "<div class=\"bar\"><b>{} to {}</b><span style=\"--planned:{:.1}%;--taken:{:.1}%\"></span><em>{}</em></div>",
        tenth * width,
        (tenth + 1) * width,
        share(trained),
        share(held_out.filter(|part| part.loss.is_finite())),
        trained.map_or_else(|| "–".into(), figure)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::timesteps::TimestepLosses;

    #[test]
    fn bars_are_means_over_the_run_and_of_the_last_validation() {
        let losses = |step, is_held_out, parts: &[(usize, u64, f64)]| {
            let part = |&(tenth, n, loss)| TenthLoss { tenth, n, loss };
            TimestepLosses { step, is_held_out, tenths: parts.iter().map(part).collect() }
        };
        let mut history = History::default();
        assert_eq!(timesteps(&history), "");
        history.timestep_losses = vec![
            losses(1, false, &[(0, 3, 1.0), (9, 1, 0.5)]),
            losses(1, true, &[(0, 1, 9.0)]),
            losses(2, false, &[(0, 1, 5.0)]),
            losses(2, true, &[(0, 1, 4.0)]),
        ];
        let page = timesteps(&history);
        for shown in [
            "<b>0 to 100</b><span style=\"--planned:50.0%;--taken:100.0%\"></span><em>2.0000 of 4</em>",
            "<b>900 to 1000</b><span style=\"--planned:12.5%;--taken:0.0%\"></span><em>0.5000 of 1</em>",
            "<b>100 to 200</b><span style=\"--planned:0.0%;--taken:0.0%\"></span><em>–</em>",
            "a full bar is 4.0",
        ] {
            assert!(page.contains(shown), "{shown}: {page}");
        }
    }
}
