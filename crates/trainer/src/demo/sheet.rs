//! `before-after.png`: what a model drew before and after its training, one above the other for
//! each prompt, with words for both.
//!
//! ```text
//!           +---------+ +---------+
//!   before  |  image  | |  image  |     up to four prompts beside each other,
//!           +---------+ +---------+     the next four below
//!   after   |  image  | |  image  |
//!           +---------+ +---------+
//!            prompt      prompt
//! ```

use std::path::Path;

use super::font;
use crate::error::Result;
use crate::sample::{Image, image_file};

/// What was drawn for a prompt.
#[derive(Clone, Debug)]
pub struct BeforeAfter {
    /// The prompt.
    pub prompt: String,
    /// By the model as it was.
    pub before: Image,
    /// By the model as it became.
    pub after: Image,
}

/// Prompts beside each other.
const COLUMNS: usize = 4;
/// The width that images are enlarged to at the least, and so the factor. Chosen: images of 96
/// pixels become three times as large.
const SHOWN: usize = 240;
/// Pixels between things.
const MARGIN: usize = 16;
/// Pixels along the side of a letter's point.
const POINT: usize = 2;
/// Pixels from one line of text to the next, and from one letter to the next.
const LINE: usize = (font::HEIGHT + 2) * POINT;
const ADVANCE: usize = (font::WIDTH + 1) * POINT;
/// Lines that a prompt may take; what is longer is cut off.
const MOST_LINES: usize = 3;
/// Room for `before` and `after`.
const LABELS: usize = 6 * ADVANCE + MARGIN;

const PAPER: [f32; 3] = [0.97, 0.97, 0.96];
const INK: [f32; 3] = [0.16, 0.16, 0.20];

/// Writes the sheet; all images are taken to be as large as the first.
pub fn write(path: &Path, pairs: &[BeforeAfter]) -> Result<()> {
    let prompts: Vec<&str> = pairs.iter().map(|pair| pair.prompt.as_str()).collect();
    image_file::write(path, &compose(pairs), &[("prompts", prompts.join("\n"))])
}

/// The sheet as an image.
pub fn compose(pairs: &[BeforeAfter]) -> Image {
    let [width, height] = pairs.first().map_or([1, 1], |pair| pair.before.size);
    let factor = SHOWN.div_ceil(width.max(1));
    let [width, height] = [width * factor, height * factor];
    let columns = pairs.len().clamp(1, COLUMNS);
    let band = 2 * (height + MARGIN) + MOST_LINES * LINE + MARGIN;
    let n_bands = pairs.len().div_ceil(COLUMNS).max(1);
    let size = [LABELS + MARGIN + columns * (width + MARGIN), MARGIN + n_bands * band];
    let mut sheet = ContactSheet::new(size);
    for (index, pair) in pairs.iter().enumerate() {
        let left = LABELS + MARGIN + index % COLUMNS * (width + MARGIN);
        let top = MARGIN + index / COLUMNS * band;
        let (below, under) = (top + height + MARGIN / 2, top + 2 * height + MARGIN);
        sheet.paste(&pair.before, factor, [left, top]);
        sheet.paste(&pair.after, factor, [left, below]);
        for (line, text) in wrap(&pair.prompt, width / ADVANCE).iter().enumerate() {
            sheet.print(text, [left, under + line * LINE]);
        }
        if index % COLUMNS == 0 {
            sheet.print("before", [MARGIN, top + (height - LINE) / 2]);
            sheet.print("after", [MARGIN, below + (height - LINE) / 2]);
        }
    }
    sheet.0
}

/// A text in lines of no more than `most` letters, as far as there is room.
fn wrap(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= most => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.chars().take(most).collect()),
        }
    }
    lines.truncate(MOST_LINES);
    lines
}

/// An image that is put together.
struct ContactSheet(Image);

impl ContactSheet {
    fn new(size: [usize; 2]) -> Self {
        let count = size[0] * size[1];
        let numbers = PAPER.iter().flat_map(|share| vec![*share; count]).collect();
        Self(Image { values: numbers, size })
    }

    /// Puts a colour at a place, if it is on the sheet.
    fn put(&mut self, [x, y]: [usize; 2], colour: [f32; 3]) {
        let [width, height] = self.0.size;
        if x < width && y < height {
            for (channel, number) in colour.into_iter().enumerate() {
                self.0.values[(channel * height + y) * width + x] = number;
            }
        }
    }

    fn paste(&mut self, image: &Image, factor: usize, [left, top]: [usize; 2]) {
        let [width, height] = image.size.map(|side| side * factor);
        for y in 0..height {
            for x in 0..width {
                let place = [x, y].map(|at| (at as f32 + 0.5) / factor as f32 - 0.5);
                self.put([left + x, top + y], between(image, place));
            }
        }
    }

    fn print(&mut self, text: &str, [left, top]: [usize; 2]) {
        for (index, letter) in text.chars().enumerate() {
            for y in 0..font::HEIGHT * POINT {
                for x in 0..font::WIDTH * POINT {
                    if font::has_ink(letter, y / POINT, x / POINT) {
                        self.put([left + index * ADVANCE + x, top + y], INK);
                    }
                }
            }
        }
    }
}

/// The colour between the four nearest pixels.
fn between(image: &Image, place: [f32; 2]) -> [f32; 3] {
    let [width, height] = image.size;
    let near = |at: f32, side: usize| {
        let first = at.floor();
        let index = |at: f32| (at.max(0.0) as usize).min(side - 1);
        ([index(first), index(first + 1.0)], at - first)
    };
    let ((columns, right), (rows, down)) = (near(place[0], width), near(place[1], height));
    [0, 1, 2].map(|channel| {
        let number =
            |row: usize, column: usize| image.values[(channel * height + row) * width + column];
        let mix = |from: f32, to: f32, share: f32| from + share * (to - from);
        let [upper, lower] =
            rows.map(|row| mix(number(row, columns[0]), number(row, columns[1]), right));
        mix(upper, lower, down)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::data::DemoStyle;
    use crate::demo::scene::Scene;

    fn pair(index: usize) -> BeforeAfter {
        let (before, after) =
            (Scene::new(DemoStyle::Flat, 4, index), Scene::new(DemoStyle::Neon, 4, index));
        BeforeAfter {
            prompt: after.caption.clone(),
            before: before.draw(32),
            after: after.draw(32),
        }
    }

    #[test]
    fn images_keep_their_colours_where_they_are_put() {
        let pairs: Vec<BeforeAfter> = (0..5).map(pair).collect();
        let sheet = compose(&pairs);
        let [width, height] = sheet.size;
        let factor = SHOWN.div_ceil(32);
        let at = |x: usize, y: usize| [0, 1, 2].map(|c| sheet.values[(c * height + y) * width + x]);
        let corner = |image: &Image| [0, 1, 2].map(|c| image.values[c * 32 * 32]);
        assert_eq!(at(LABELS + MARGIN, MARGIN), corner(&pairs[0].before));
        let below = MARGIN + 32 * factor + MARGIN / 2;
        assert_eq!(at(LABELS + MARGIN, below), corner(&pairs[0].after));
        assert_eq!(at(0, 0), PAPER);
        // A letter of the label: the b of "before" has a straight stem.
        let stem = (MARGIN..MARGIN + 32 * factor).filter(|y| at(MARGIN, *y) == INK).count();
        assert_eq!(stem, 7 * POINT);
    }

    #[test]
    fn long_prompts_are_wrapped_and_cut() {
        assert_eq!(wrap("a red star on white", 10), ["a red star", "on white"]);
        assert_eq!(wrap("abcdefghijkl m", 5), ["abcde", "m"]);
        assert_eq!(wrap("a b c d e", 1).len(), MOST_LINES);
    }
}
