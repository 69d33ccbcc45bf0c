//! Line plots as SVG inside a page. The SVG is stretched to the page's width; lines and dots keep their thickness,
//! and all text is outside of it. Without scripts: tooltips are the titles of invisible strips.

use std::fmt::Write;

use super::format::{escaped, number};

/// The drawing's own coordinates; the page stretches it.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 300.0;
/// Points of a series that are drawn. Chosen: more than a screen has columns to show them.
const POINTS: usize = 1500;
/// Strips with tooltips. Chosen: as narrow as a pointer can be held still.
const STRIPS: usize = 120;
/// Lines across, about.
const TICKS: f64 = 6.0;
/// Points of a series that are each shown as such. Chosen: as many as can be told from each other.
const FEW: usize = 40;
/// Numbers that are not written out on an axis.
const HUGE: f64 = 1e7;
/// Share of the points of a dotted series that decide the height of the plot: the few outliers above are drawn at
/// its edge, or nothing else could be seen.
const SHOWN_SHARE: f64 = 0.99;

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesStyle {
    /// A point each, faint.
    Dots,
    /// A line through all points.
    Line,
    /// A line with its points, of few.
    Beads,
    /// A wide line that others may lie on.
    Band,
}

/// Numbers over steps, or over time.
#[derive(Clone, Debug)]
pub struct PlotSeries {
    /// What it is.
    pub name: &'static str,
    /// Which of the page's colours: 1 to 4.
    pub colour: u8,
    /// How it is drawn.
    pub mark: SeriesStyle,
    /// Place along and number, places ascending; what is not finite is left out.
    pub points: Vec<(f64, f64)>,
    /// From the first place to the last, also of what was left out.
    span: Option<[f64; 2]>,
}

impl PlotSeries {
    /// A series of its finite points.
    pub fn new(
        name: &'static str,
        colour: u8,
        mark: SeriesStyle,
        points: impl Iterator<Item = (f64, f64)>,
    ) -> Self {
        let all: Vec<_> = points.collect();
        let span = range(all.iter().map(|point| point.0));
        let points = all.into_iter().filter(|(_, y)| y.is_finite()).collect();
        Self { name, colour, mark, points, span }
    }
}

/// A figure over steps of all series that have points, or nothing if none has. `from_zero`: the vertical
/// axis begins there.
pub fn plot(title: &str, from_zero: bool, series: &[PlotSeries]) -> String {
    plot_over("step", title, from_zero, series)
}

/// The same over something else than steps.
pub fn plot_over(along: &str, title: &str, from_zero: bool, series: &[PlotSeries]) -> String {
    let series: Vec<_> = series.iter().filter(|series| !series.points.is_empty()).collect();
    let Some(frame) = PlotFrame::around(&series, from_zero) else { return String::new() };
    let mut out = format!("<figure class=\"plot\"><figcaption><b>{}</b>", escaped(title));
    for series in &series {
        let PlotSeries { name, colour, .. } = series;
        _ = write!(out, " <span class=\"key c{colour} {}\">{name}</span>", class(series));
    }
    out.push_str("</figcaption><div class=\"frame\">");
    let (x_ticks, y_ticks) = (ticks(frame.x), ticks(frame.y));
    for tick in &y_ticks {
        let at = 100.0 - 100.0 * frame.down(*tick) / HEIGHT;
        _ = write!(out, "<i class=\"y\" style=\"bottom:{at:.2}%\">{}</i>", label(*tick, &y_ticks));
    }
    _ = write!(out, "<i class=\"along\">{along}</i>");
    for tick in x_ticks.iter().filter(|tick| tick.fract() == 0.0) {
        let at = 100.0 * frame.along(*tick) / WIDTH;
        _ = write!(out, "<i class=\"x\" style=\"left:{at:.2}%\">{}</i>", label(*tick, &x_ticks));
    }
    _ = write!(
        out,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"{}\">",
        escaped(title)
    );
    for tick in &y_ticks {
        let y = frame.down(*tick);
        _ = write!(out, "<path class=\"grid\" d=\"M0 {y:.1}H{WIDTH}\"/>");
    }
    for series in &series {
        draw(series, &frame, &mut out);
    }
    strips(along, &series, &frame, &mut out);
    out.push_str("</svg></div></figure>");
    out
}

/// What part of the plane is seen.
struct PlotFrame {
    x: [f64; 2],
    y: [f64; 2],
}

impl PlotFrame {
    fn around(series: &[&PlotSeries], from_zero: bool) -> Option<Self> {
        let [left, right] = range(series.iter().filter_map(|series| series.span).flatten())?;
        let heights = series.iter().filter_map(|series| shown(series));
        let [low, high] = range(heights.flatten())?;
        let low = if from_zero { low.min(0.0) } else { low };
        // A series that never changes lies in the middle.
        let room = if high > low { 0.06 * (high - low) } else { high.abs().max(1.0) / 2.0 };
        let low = if from_zero && low == 0.0 { 0.0 } else { low - room };
        // A single step stands in the middle too.
        let [left, right] = if right > left { [left, right] } else { [left - 0.5, right + 0.5] };
        Some(Self { x: [left, right], y: [low, high + room] })
    }

    fn along(&self, x: f64) -> f64 {
        WIDTH * (x - self.x[0]) / (self.x[1] - self.x[0])
    }

    /// From above; what lies beyond is drawn at the edge.
    fn down(&self, y: f64) -> f64 {
        HEIGHT * (1.0 - ((y - self.y[0]) / (self.y[1] - self.y[0])).clamp(0.0, 1.0))
    }
}

fn range(numbers: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    numbers.fold(None, |range: Option<[f64; 2]>, number| {
        let [low, high] = range.unwrap_or([number, number]);
        Some([low.min(number), high.max(number)])
    })
}

/// The lowest and highest number that the plot must have room for.
fn shown(series: &PlotSeries) -> Option<[f64; 2]> {
    let mut numbers: Vec<f64> = series.points.iter().map(|point| point.1).collect();
    numbers.sort_by(f64::total_cmp);
    let (first, last) = (*numbers.first()?, numbers.len() - 1);
    let share = if series.mark == SeriesStyle::Dots { SHOWN_SHARE } else { 1.0 };
    Some([first, numbers[(last as f64 * share).ceil() as usize]])
}

fn class(series: &PlotSeries) -> &'static str {
    match series.mark {
        SeriesStyle::Dots if series.points.len() <= FEW => "dots few",
        SeriesStyle::Dots => "dots",
        SeriesStyle::Line => "line",
        SeriesStyle::Beads => "line beads",
        SeriesStyle::Band => "band",
    }
}

fn draw(series: &PlotSeries, frame: &PlotFrame, out: &mut String) {
    let points = thin(&series.points, POINTS);
    let places: Vec<_> = points
        .iter()
        .map(|(x, y)| format!("{:.1} {:.1}", frame.along(*x), frame.down(*y)))
        .collect();
    // A line of no length with round ends is a dot that is not stretched with the drawing.
    let dots = || format!("M{}h0", places.join("h0M"));
    let line = || format!("M{}", places.join("L"));
    let mut path = |class: &str, d: String| {
        _ = write!(out, "<path class=\"c{} {class}\" d=\"{d}\"/>", series.colour);
    };
    let is_few = series.points.len() <= FEW;
    match series.mark {
        SeriesStyle::Dots if is_few => path("beads", dots()),
        SeriesStyle::Dots => path("dots", dots()),
        // One point is no line.
        SeriesStyle::Line if series.points.len() == 1 => path("beads", dots()),
        SeriesStyle::Line => path("line", line()),
        SeriesStyle::Band => path("band", line()),
        SeriesStyle::Beads => {
            path("line", line());
            path("beads", dots());
        }
    }
}

/// At most about `limit` points that look the same: the lowest and highest of each group, and both
/// ends.
fn thin(points: &[(f64, f64)], limit: usize) -> Vec<(f64, f64)> {
    if points.len() <= limit {
        return points.to_vec();
    }
    let size = points.len().div_ceil(limit / 2);
    let mut thinned = Vec::with_capacity(limit + 2);
    for group in points.chunks(size) {
        let lower = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let (low, high) = (group.iter().min_by(lower), group.iter().max_by(lower));
        let mut both: Vec<_> = low.into_iter().chain(high).copied().collect();
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        both.dedup();
        thinned.extend(both);
    }
    for (at, end) in [(0, points.first()), (usize::MAX, points.last())] {
        if let Some(end) = end.filter(|end| !thinned.contains(end)) {
            thinned.insert(at.min(thinned.len()), *end);
        }
    }
    thinned
}

/// Round numbers within a range, about [`TICKS`] of them.
pub fn ticks([low, high]: [f64; 2]) -> Vec<f64> {
    // A little less, so that rounding does not push a range that fits into wider steps.
    let rough = 0.999 * (high - low) / TICKS;
    let power = 10_f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|step| step * power);
    let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(10.0 * power);
    let (first, last) = ((low / step).ceil() as i64, (high / step).floor() as i64);
    (first..=last).map(|times| times as f64 * step).collect()
}

/// A tick's number, with as many digits as tell it from its neighbours.
pub fn label(tick: f64, ticks: &[f64]) -> String {
    let highest = ticks.iter().fold(0.0_f64, |highest, tick| highest.max(tick.abs()));
    if tick == 0.0 {
        return "0".into();
    }
    if highest < 1e-3 {
        return number(tick);
    }
    if highest >= HUGE {
        return format!("{tick:.1e}");
    }
    let (number, suffix, scale) =
        if highest >= 10_000.0 { (tick / 1000.0, "k", 1000.0) } else { (tick, "", 1.0) };
    // Neighbours differ by one step, which is a short number.
    let step = ticks.windows(2).map(|pair| (pair[1] - pair[0]) / scale).fold(1.0, f64::min);
    let digits = (0..12).find(|digits| {
        let shifted = step * 10_f64.powi(*digits);
        (shifted - shifted.round()).abs() < 1e-3 && shifted > 0.5
    });
    let text = format!("{number:.*}", digits.unwrap_or(4) as usize);
    let is_fraction = text.contains('.');
    let text = if is_fraction { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{suffix}")
}

/// Invisible strips over the whole drawing that say what lies below them.
fn strips(along: &str, series: &[&PlotSeries], frame: &PlotFrame, out: &mut String) {
    let Some(longest) = series.iter().max_by_key(|series| series.points.len()) else { return };
    let every = longest.points.len().div_ceil(STRIPS);
    let steps: Vec<f64> = longest.points.iter().step_by(every).map(|point| point.0).collect();
    for (index, step) in steps.iter().enumerate() {
        let left = frame.along(*step);
        let right = steps.get(index + 1).map_or(WIDTH, |next| frame.along(*next));
        _ = write!(
            out,
            "<rect x=\"{left:.1}\" width=\"{:.1}\" height=\"{HEIGHT}\"><title>{along} {step}",
            (right - left).max(1.0)
        );
        for PlotSeries { name, points, .. } in series {
            let after = points.partition_point(|point| point.0 <= *step);
            if let Some((_, y)) = after.checked_sub(1).map(|at| points[at]) {
                _ = write!(out, "\n{name} {}", number(y));
            }
        }
        out.push_str("</title></rect>");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn steps_without_a_finite_number_have_their_place() {
        let diverged = (1..=12).map(|x| (f64::from(x), if x > 2 { f64::NAN } else { 1.0 }));
        let series = PlotSeries::new("loss", 1, SeriesStyle::Dots, diverged);
        assert_eq!(PlotFrame::around(&[&series], false).unwrap().x, [1.0, 12.0]);
    }

    #[test]
    fn few_points_are_shown_each() {
        for (n, class) in [(4, "beads"), (40, "beads"), (41, "dots")] {
            let points = (1..=n).map(|x| (f64::from(x), 1.0 / f64::from(x)));
            let drawn =
                plot("Loss", false, &[PlotSeries::new("loss", 1, SeriesStyle::Dots, points)]);
            assert!(drawn.contains(&format!("class=\"c1 {class}\"")), "{n}: {drawn}");
        }
    }

    #[test]
    fn ticks_are_round_and_within() {
        assert_eq!(ticks([0.0, 1000.0]), [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        assert_eq!(ticks([-0.3, 1.1]), [-0.25, 0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(ticks([1e-5, 9e-5]).len(), 4);
        let labels = |range: [f64; 2]| {
            let ticks = ticks(range);
            ticks.iter().map(|tick| label(*tick, &ticks)).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(labels([0.0, 1.2e-4]), "0 2e-5 4e-5 6e-5 8e-5 1e-4 1.2e-4");
        assert_eq!(labels([0.11, 0.23]), "0.12 0.14 0.16 0.18 0.2 0.22");
        assert_eq!(labels([0.0, 100_000.0]), "0 20k 40k 60k 80k 100k");
        assert_eq!(
            labels([0.123_405, 0.123_465]),
            "0.12341 0.12342 0.12343 0.12344 0.12345 0.12346"
        );
        assert_eq!(labels([0.0, 1e30]), "0 2.0e29 4.0e29 6.0e29 8.0e29 1.0e30");
        assert_eq!(labels([10_000.0, 10_006.0]).split(' ').collect::<HashSet<_>>().len(), 7);
    }

    #[test]
    fn thinned_points_keep_extremes_ends_and_order() {
        let points: Vec<_> = (0..100_000).map(|x| (f64::from(x), f64::from(x % 977))).collect();
        let mut odd = points.clone();
        odd[54_321].1 = 5000.0;
        odd[12_345].1 = -7.0;
        let thinned = thin(&odd, POINTS);
        assert!(thinned.len() <= POINTS + 2, "{}", thinned.len());
        assert!(thinned.is_sorted_by(|a, b| a.0 < b.0));
        for kept in [odd[54_321], odd[12_345], odd[0], odd[99_999]] {
            assert!(thinned.contains(&kept), "{kept:?}");
        }
        assert_eq!(thin(&points[..POINTS], POINTS), points[..POINTS]);
    }

    #[test]
    fn a_jump_is_drawn_at_the_edge_and_does_not_flatten_the_rest() {
        let mut points: Vec<_> = (1..=400).map(|x| (f64::from(x), 0.5)).collect();
        points[7].1 = 1e9;
        let series = PlotSeries::new("loss", 1, SeriesStyle::Dots, points.into_iter());
        let frame = PlotFrame::around(&[&series], false).unwrap();
        assert!(frame.y[1] < 2.0, "{:?}", frame.y);
        assert!(frame.down(1e9).abs() < 1e-9);
    }

    #[test]
    fn nothing_to_show_is_no_plot_and_one_point_is_one() {
        let empty = PlotSeries::new("loss", 1, SeriesStyle::Line, [(1.0, f64::NAN)].into_iter());
        assert_eq!(plot("Loss", false, &[empty]), "");
        for y in [0.0, 3.0, -3.0] {
            let one = PlotSeries::new("loss", 1, SeriesStyle::Line, [(1.0, y)].into_iter());
            let drawn = plot("Loss", true, &[one]);
            // In the middle, where it can be seen, with its step and no other below it.
            assert!(drawn.contains("beads\" d=\"M500.0 ") && !drawn.contains("NaN"), "{drawn}");
            assert_eq!(drawn.matches("class=\"x\"").count(), 1, "{drawn}");
        }
    }
}
