//! Curves in a terminal: with dots of Braille, eight to a character, or with plain characters where those are missing.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::widgets::Widget;
use trainer::report::format::number;

/// Columns of the numbers beside a plot.
const AXIS: u16 = 9;

/// A curve.
pub struct Curve {
    /// Places ascending.
    pub points: Vec<(f64, f64)>,
    pub style: Style,
    /// Whether each point is a mark of its own, in place of dots.
    pub mark: Option<char>,
    pub height: CurveHeight,
}

/// How much of a curve a plot must have room for. What is higher is drawn at the edge, as in the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurveHeight {
    /// All of it.
    Whole,
    /// All but one value in a hundred: a few first losses, or a step that was held up, would flatten all others.
    Most,
    /// Nothing: it lies among the points of another.
    OfOthers,
}

impl Curve {
    /// The highest value that the plot must have room for.
    fn high_end(&self) -> Option<f64> {
        let mut values: Vec<f64> =
            self.points.iter().map(|point| point.1).filter(|y| y.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let n = match self.height {
            CurveHeight::Whole => values.len(),
            CurveHeight::Most => (values.len() * 99).div_ceil(100),
            CurveHeight::OfOthers => 0,
        };
        values.get(n.checked_sub(1)?).copied()
    }
}

/// Curves over the same places.
pub struct Plot {
    pub curves: Vec<Curve>,
    pub is_braille: bool,
    pub axis: Style,
}

/// What is shown of the plane.
struct Window {
    x: [f64; 2],
    y: [f64; 2],
}

impl Window {
    /// Around finite points, as high as the curves ask for. None if there is none.
    fn around(curves: &[Curve]) -> Option<Self> {
        let points =
            || curves.iter().flat_map(|curve| &curve.points).filter(|(_, y)| y.is_finite());
        let fold =
            |of: fn(&(f64, f64)) -> f64, with: fn(f64, f64) -> f64| points().map(of).reduce(with);
        let x = [fold(|p| p.0, f64::min)?, fold(|p| p.0, f64::max)?];
        let high = curves.iter().filter_map(Curve::high_end).reduce(f64::max)?;
        let low = fold(|p| p.1, f64::min)?.min(high);
        // A level line is drawn in the middle.
        let margin = if high > low { 0.0 } else { high.abs().max(1e-9) * 0.5 };
        Some(Self { x, y: [low - margin, high + margin] })
    }

    /// Where a point is on a grid, from above; none if it is not finite.
    fn place(&self, x: f64, y: f64, columns: usize, rows: usize) -> Option<(usize, usize)> {
        if !y.is_finite() {
            return None;
        }
        let share = |value: f64, [low, high]: [f64; 2]| {
            if high > low { ((value - low) / (high - low)).clamp(0.0, 1.0) } else { 0.0 }
        };
        let column = share(x, self.x) * (columns - 1) as f64;
        let row = (1.0 - share(y, self.y)) * (rows - 1) as f64;
        Some((column.round() as usize, row.round() as usize))
    }
}

impl Widget for &Plot {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let Some(window) = Window::around(&self.curves) else { return };
        if area.width <= AXIS + 4 || area.height < 2 {
            return;
        }
        let [low, high] = window.y.map(number);
        let width = usize::from(AXIS) - 1;
        buffer.set_stringn(area.x, area.y, format!("{high:>width$}"), width, self.axis);
        let last = area.y + area.height - 1;
        buffer.set_stringn(area.x, last, format!("{low:>width$}"), width, self.axis);
        let inner = Rect { x: area.x + AXIS, width: area.width - AXIS, ..area };
        for curve in &self.curves {
            match curve.mark {
                None if self.is_braille => dots(curve, &window, inner, buffer),
                mark => marks(curve, &window, inner, buffer, mark.unwrap_or('.')),
            }
        }
    }
}

/// A character at each point.
fn marks(curve: &Curve, window: &Window, area: Rect, buffer: &mut Buffer, mark: char) {
    for (x, y) in &curve.points {
        let place = window.place(*x, *y, area.width.into(), area.height.into());
        if let Some((column, row)) = place {
            let cell = &mut buffer[(area.x + column as u16, area.y + row as u16)];
            cell.set_char(mark).set_style(curve.style);
        }
    }
}

/// Bits of the dots of a Braille character, by row and column.
const DOTS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];
/// The character without dots.
const BRAILLE: u32 = 0x2800;

/// A dot at each point.
fn dots(curve: &Curve, window: &Window, area: Rect, buffer: &mut Buffer) {
    let [columns, rows] = [area.width, area.height].map(usize::from);
    let mut cells = vec![0_u8; columns * rows];
    for (x, y) in &curve.points {
        if let Some((column, row)) = window.place(*x, *y, 2 * columns, 4 * rows) {
            cells[row / 4 * columns + column / 2] |= DOTS[row % 4][column % 2];
        }
    }
    for (at, bits) in cells.into_iter().enumerate().filter(|(_, bits)| *bits != 0) {
        let (column, row) = (at % columns, at / columns);
        let cell = &mut buffer[(area.x + column as u16, area.y + row as u16)];
        let character = char::from_u32(BRAILLE + u32::from(bits)).unwrap_or('.');
        cell.set_char(character).set_style(curve.style);
    }
}
