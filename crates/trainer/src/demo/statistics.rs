//! What can be counted in an image, to say without looking in which style it is drawn and in which
//! colour.

use super::scene::Colour;
use crate::sample::Image;

/// The figures of an image, each 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageStatistics {
    /// Brightness of what is behind the shape: the median along the border.
    pub backdrop: f32,
    /// The share of pixels that are dark.
    pub dark: f32,
    /// How much of the frame around the shape is shape: little where it is an outline.
    pub fill: f32,
    /// Red, green and blue of what differs most from the backdrop.
    pub ink: [f32; 3],
}

/// Darker than this is dark. Chosen: between the night of one style and all backgrounds of the
/// other.
const DARK: f32 = 0.3;
/// The share of pixels whose colour stands for the shape's.
const INKIEST: f32 = 0.04;
/// What differs from the backdrop by this share of the most that any pixel does belongs to the shape.
const OF_SHAPE: f32 = 0.5;

impl ImageStatistics {
    /// Counts.
    pub fn from_image(image: &Image) -> Self {
        let [width, height] = image.size;
        let pixels: Vec<[f32; 3]> = (0..width * height)
            .map(|at| [0, 1, 2].map(|channel| image.values[channel * width * height + at]))
            .collect();
        let is_border = |at: usize| {
            let (row, column) = (at / width, at % width);
            row == 0 || column == 0 || row + 1 == height || column + 1 == width
        };
        let border: Vec<[f32; 3]> =
            (0..pixels.len()).filter(|at| is_border(*at)).map(|at| pixels[at]).collect();
        let behind = [0, 1, 2].map(|c| median(border.iter().map(|pixel| pixel[c]).collect()));
        let n_dark = pixels.iter().filter(|pixel| brightness(**pixel) < DARK).count();
        let distances: Vec<f32> = pixels.iter().map(|pixel| distance(*pixel, behind)).collect();
        Self {
            backdrop: brightness(behind),
            dark: n_dark as f32 / pixels.len() as f32,
            fill: fill(&distances, width),
            ink: ink(&pixels, &distances),
        }
    }

    /// How well the shape's hue is that of a colour: 1 the same, -1 the opposite. For a colour
    /// without hue, how little there is of any.
    pub fn likeness(&self, colour: Colour) -> f32 {
        let wanted = tint(colour.fill.map(|byte| f32::from(byte) / 255.0));
        let (found, strength) = (tint(self.ink), length(tint(self.ink)));
        if length(wanted) < GREYEST {
            return (1.0 - strength / GREYEST).max(-1.0);
        }
        let dot: f32 = wanted.iter().zip(found).map(|(a, b)| a * b).sum();
        dot / (length(wanted) * strength).max(GREYEST * GREYEST)
    }
}

/// A tint shorter than this is hardly seen.
const GREYEST: f32 = 0.15;

/// As bright as eyes see the colours (ITU-R BT.709).
fn brightness([red, green, blue]: [f32; 3]) -> f32 {
    0.2126 * red + 0.7152 * green + 0.0722 * blue
}

fn distance(a: [f32; 3], b: [f32; 3]) -> f32 {
    length([0, 1, 2].map(|channel| a[channel] - b[channel]))
}

fn length(vector: [f32; 3]) -> f32 {
    vector.iter().map(|number| number * number).sum::<f32>().sqrt()
}

/// A colour less its grey.
fn tint(colour: [f32; 3]) -> [f32; 3] {
    let grey = colour.iter().sum::<f32>() / 3.0;
    colour.map(|share| share - grey)
}

fn median(mut numbers: Vec<f32>) -> f32 {
    numbers.sort_by(f32::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(0.0)
}

fn fill(distances: &[f32], width: usize) -> f32 {
    let most = distances.iter().copied().fold(0.0, f32::max);
    let shape: Vec<[usize; 2]> = (0..distances.len())
        .filter(|at| distances[*at] > OF_SHAPE * most)
        .map(|at| [at / width, at % width])
        .collect();
    let span = |axis: usize| {
        let ends = shape.iter().map(|place| place[axis]);
        ends.clone().max().zip(ends.min()).map_or(1, |(last, first)| last - first + 1)
    };
    shape.len() as f32 / (span(0) * span(1)) as f32
}

fn ink(pixels: &[[f32; 3]], distances: &[f32]) -> [f32; 3] {
    let mut order: Vec<usize> = (0..pixels.len()).collect();
    order.sort_by(|a, b| distances[*b].total_cmp(&distances[*a]));
    let count = ((pixels.len() as f32 * INKIEST) as usize).max(1);
    let inkiest = &order[..count.min(order.len())];
    [0, 1, 2].map(|c| inkiest.iter().map(|at| pixels[*at][c]).sum::<f32>() / inkiest.len() as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::data::DemoStyle;
    use crate::demo::scene::Scene;

    #[test]
    fn styles_are_told_apart_and_colours_found() {
        let mut fills = [0.0, 0.0];
        for index in 0..60 {
            let scenes =
                [DemoStyle::Flat, DemoStyle::Neon].map(|style| Scene::new(style, 9, index));
            let [flat, neon] =
                scenes.each_ref().map(|scene| ImageStatistics::from_image(&scene.draw(48)));
            assert!(flat.backdrop > 0.75 && neon.backdrop < 0.25, "{flat:?} {neon:?}");
            assert!(flat.dark < 0.5 && neon.dark > 0.5, "{flat:?} {neon:?}");
            for (scene, found) in scenes.iter().zip([flat, neon]) {
                let (own, likeness) = (scene.colour.name, found.likeness(scene.colour));
                assert!(likeness > 0.3, "{own}: {likeness} {found:?}");
                let others = Colour::ALL.into_iter().filter(|other| is_far(scene.colour, *other));
                for other in others {
                    assert!(found.likeness(other) < likeness, "{own} looks {}", other.name);
                }
            }
            fills[0] += flat.fill / 60.0;
            fills[1] += neon.fill / 60.0;
        }
        assert!(fills[0] > 1.4 * fills[1], "{fills:?}");
    }

    /// Whether two colours have hues, and different ones.
    fn is_far(a: Colour, b: Colour) -> bool {
        let [a, b] = [a, b].map(|colour| tint(colour.fill.map(|byte| f32::from(byte) / 255.0)));
        let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
        let both = length(a) * length(b);
        length(a) > GREYEST && length(b) > GREYEST && dot < 0.7 * both
    }
}
