//! The shapes of the demo's images, as distances: how far a point is from a shape's edge. Edges,
//! outlines and glows are all functions of that one number, so no shape needs drawing of its own.
//!
//! Coordinates: a shape of radius 1 around the origin, x to the right, y down.

use std::f32::consts::{PI, TAU};

/// What an image shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoShape {
    /// A disc.
    Circle,
    /// Upright, with corners hardly rounded.
    Square,
    /// Standing on a side.
    Triangle,
    /// With five points.
    Star,
    /// Pointing down.
    Heart,
    /// A circle with a hole.
    Ring,
    /// With four equal arms.
    Cross,
    /// A crescent, open to the right.
    Moon,
}

impl DemoShape {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Circle,
        Self::Square,
        Self::Triangle,
        Self::Star,
        Self::Heart,
        Self::Ring,
        Self::Cross,
        Self::Moon,
    ];

    /// As captions call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Circle => "circle",
            Self::Square => "square",
            Self::Triangle => "triangle",
            Self::Star => "star",
            Self::Heart => "heart",
            Self::Ring => "ring",
            Self::Cross => "cross",
            Self::Moon => "moon",
        }
    }

    /// Its edge, ready to be asked for distances.
    pub fn edge(self) -> ShapeEdge {
        match self {
            Self::Circle => ShapeEdge::Band { radius: 0.0, half_width: 0.96 },
            Self::Ring => ShapeEdge::Band { radius: 0.74, half_width: 0.24 },
            Self::Square => {
                ShapeEdge::Polygon(vec![[-0.8, -0.8], [0.8, -0.8], [0.8, 0.8], [-0.8, 0.8]])
            }
            Self::Triangle => ShapeEdge::Polygon(points(3, |_| 1.1, 0.2)),
            Self::Star => {
                ShapeEdge::Polygon(points(10, |at| if at % 2 == 0 { 1.1 } else { 0.47 }, 0.06))
            }
            Self::Heart => ShapeEdge::Polygon(heart()),
            Self::Cross => ShapeEdge::Polygon(cross()),
            Self::Moon => ShapeEdge::Polygon(moon()),
        }
    }
}

/// The border of a shape.
pub enum ShapeEdge {
    /// Between two circles; a disc if the inner one has no radius.
    Band {
        /// Of the circle in its middle.
        radius: f32,
        /// From there to either border.
        half_width: f32,
    },
    /// Straight lines from corner to corner and back to the first.
    Polygon(Vec<[f32; 2]>),
}

impl ShapeEdge {
    /// How far a point is from the edge: less than 0 inside.
    pub fn distance(&self, point: [f32; 2]) -> f32 {
        match self {
            Self::Band { radius, half_width } => {
                (point[0].hypot(point[1]) - radius).abs() - half_width
            }
            Self::Polygon(corners) => to_polygon(corners, point),
        }
    }
}

/// The nearest side's distance; its sign by how often a ray to the right meets a side.
fn to_polygon(corners: &[[f32; 2]], point: [f32; 2]) -> f32 {
    let (mut nearest, mut is_inside) = (f32::INFINITY, false);
    for (at, a) in corners.iter().enumerate() {
        let b = corners[(at + 1) % corners.len()];
        nearest = nearest.min(to_side(*a, b, point));
        let is_crossed = (a[1] > point[1]) != (b[1] > point[1]);
        if is_crossed && point[0] < a[0] + (point[1] - a[1]) / (b[1] - a[1]) * (b[0] - a[0]) {
            is_inside = !is_inside;
        }
    }
    if is_inside { -nearest } else { nearest }
}

fn to_side(a: [f32; 2], b: [f32; 2], point: [f32; 2]) -> f32 {
    let (along, to) = ([b[0] - a[0], b[1] - a[1]], [point[0] - a[0], point[1] - a[1]]);
    let length = along[0] * along[0] + along[1] * along[1];
    let share = ((to[0] * along[0] + to[1] * along[1]) / length).clamp(0.0, 1.0);
    (to[0] - share * along[0]).hypot(to[1] - share * along[1])
}

/// Corners around the origin from the top on, moved down by `lower` so that they look centred.
fn points(count: usize, radius: impl Fn(usize) -> f32, lower: f32) -> Vec<[f32; 2]> {
    let corner = |at: usize| {
        let angle = TAU * at as f32 / count as f32;
        [radius(at) * angle.sin(), lower - radius(at) * angle.cos()]
    };
    (0..count).map(corner).collect()
}

/// Corners of what is round: enough that no corner shows at the sizes drawn.
const N_CORNERS: usize = 48;

/// The well-known curve, scaled to radius 1.
fn heart() -> Vec<[f32; 2]> {
    let corner = |at: usize| {
        let t = TAU * at as f32 / N_CORNERS as f32;
        let down = 13.0 * t.cos() - 5.0 * (2.0 * t).cos() - 2.0 * (3.0 * t).cos() - (4.0 * t).cos();
        [t.sin().powi(3), -0.06 - down / 16.0]
    };
    (0..N_CORNERS).map(corner).collect()
}

fn cross() -> Vec<[f32; 2]> {
    let (arm, half) = (1.0, 0.34);
    let quarter = [[-half, -arm], [half, -arm], [half, -half]];
    let turned = |turns: usize| {
        quarter.map(|[x, y]| match turns {
            0 => [x, y],
            1 => [-y, x],
            2 => [-x, -y],
            _ => [y, -x],
        })
    };
    (0..4).flat_map(turned).collect()
}

/// A disc less a smaller one to its right.
fn moon() -> Vec<[f32; 2]> {
    // Where the two circles meet, seen from the centre of each.
    let (cut, offset) = (0.82f32, 0.5f32);
    let meet_x = (1.0 - cut * cut + offset * offset) / (2.0 * offset);
    let (outer, inner) = (meet_x.acos(), ((meet_x - offset) / cut).acos());
    let half = N_CORNERS / 2;
    let share = |at: usize| at as f32 / half as f32;
    let outside = (0..half).map(|at| {
        let angle = outer + share(at) * (TAU - 2.0 * outer);
        [angle.cos(), angle.sin()]
    });
    let inside = (0..half).map(|at| {
        let angle = TAU - inner - share(at) * 2.0 * (PI - inner);
        [offset + cut * angle.cos(), cut * angle.sin()]
    });
    // Moved so that it looks centred.
    outside.chain(inside).map(|[x, y]| [x + 0.2, y]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_geometry() {
        let square = DemoShape::Square.edge();
        for (point, expected) in
            [([0.0, 0.0], -0.8), ([1.8, 0.0], 1.0), ([0.5, 0.0], -0.3), ([1.1, 1.2], 0.5)]
        {
            let found = square.distance(point);
            assert!((found - expected).abs() < 1e-5, "{point:?}: {found}, expected {expected}");
        }
        let ring = DemoShape::Ring.edge();
        assert!((ring.distance([0.0, 0.0]) - 0.5).abs() < 1e-6);
        assert!((ring.distance([0.74, 0.0]) + 0.24).abs() < 1e-6);
    }

    /// Every shape has an inside and keeps to a square of side 2.4, so that it can be placed.
    #[test]
    fn shapes_keep_to_their_frame() {
        for shape in DemoShape::ALL {
            let edge = shape.edge();
            let mut inside = 0;
            for row in -60i8..=60 {
                for column in -60i8..=60 {
                    let point = [f32::from(column) / 40.0, f32::from(row) / 40.0];
                    let is_inside = edge.distance(point) < 0.0;
                    let is_framed = point.iter().all(|at| at.abs() <= 1.2);
                    assert!(is_framed || !is_inside, "{shape:?} at {point:?}");
                    inside += usize::from(is_inside);
                }
            }
            // Of 1600 points per unit of area.
            assert!((1500..5200).contains(&inside), "{shape:?}: {inside}");
        }
    }
}
