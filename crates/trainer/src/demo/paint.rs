//! Scenes onto pixels. One distance per pixel gives the edge, softened over a pixel, which is as
//! smooth as many samples per pixel and takes one.

use super::scene::Scene;
use crate::config::data::DemoStyle;
use crate::sample::Image;

/// Side of the demo's images. Chosen: 24 by 24 latents, 144 patches, seconds per image on two
/// cores.
pub const SIDE: usize = 96;

/// How much darker a filled shape's outline is. Chosen by eye, as all numbers below.
const OUTLINE_SHADE: f32 = 0.68;
/// Its width in pixels of [`SIDE`].
const OUTLINE: f32 = 2.2;

/// What is behind a glowing outline.
const NIGHT: [u8; 3] = [10, 12, 38];
/// Half the width of the line, in pixels of [`SIDE`].
const LINE: f32 = 1.5;
/// How far its glow reaches, near and wide, in pixels of [`SIDE`].
const GLOW: [f32; 2] = [4.0, 12.0];
/// How strong each is.
const GLOW_STRENGTH: [f32; 2] = [0.55, 0.45];
/// How much of the line is white.
const WHITE_HOT: f32 = 0.55;

impl Scene {
    /// Draws it, `side` pixels wide and high.
    pub fn draw(&self, side: usize) -> Image {
        let edge = self.shape.edge();
        let scale = SIDE as f32;
        let mut numbers = vec![0.0; 3 * side * side];
        for at in 0..side * side {
            // The pixel's middle, seen from the shape's.
            let place = [at % side, at / side].map(|at| (at as f32 + 0.5) / side as f32);
            let point = [0, 1].map(|axis| (place[axis] - self.centre[axis]) / self.radius);
            let distance = edge.distance(point) * self.radius * scale;
            // Softened over a pixel of this image, not of the usual one.
            let softness = scale / side as f32;
            let colour = match self.style {
                DemoStyle::Flat => self.flat(distance, softness),
                DemoStyle::Neon => self.neon(distance, softness),
            };
            for (channel, number) in colour.into_iter().enumerate() {
                numbers[channel * side * side + at] = number;
            }
        }
        Image { values: numbers, size: [side, side] }
    }

    /// Filled, with a darker rim inside.
    fn flat(&self, distance: f32, softness: f32) -> [f32; 3] {
        let fill = shares(self.colour.fill);
        let rim = fill.map(|share| share * OUTLINE_SHADE);
        let inside = mix(rim, fill, step(-distance - OUTLINE, 2.0 * softness));
        mix(shares(self.background.fill), inside, step(-distance, softness))
    }

    /// A hot line along the edge, its glow added to the night.
    fn neon(&self, distance: f32, softness: f32) -> [f32; 3] {
        let (away, glow) = (distance.abs(), shares(self.colour.glow));
        let [near, wide] = GLOW;
        let light = GLOW_STRENGTH[0] * (-(away / near).powi(2)).exp()
            + GLOW_STRENGTH[1] * (-away / wide).exp();
        let night = shares(NIGHT);
        let lit = [0, 1, 2].map(|c| 1.0 - (1.0 - night[c]) * (1.0 - glow[c] * light));
        let hot = WHITE_HOT * (-(away / LINE).powi(2)).exp();
        let line = mix(glow, [1.0; 3], hot);
        mix(lit, line, step(LINE - away, softness))
    }
}

fn shares(bytes: [u8; 3]) -> [f32; 3] {
    bytes.map(|byte| f32::from(byte) / 255.0)
}

/// From 0 to 1 as `from_edge` goes through 0, over `softness`.
fn step(from_edge: f32, softness: f32) -> f32 {
    (from_edge / softness + 0.5).clamp(0.0, 1.0)
}

fn mix(from: [f32; 3], to: [f32; 3], share: f32) -> [f32; 3] {
    [0, 1, 2].map(|channel| from[channel] + share * (to[channel] - from[channel]))
}
