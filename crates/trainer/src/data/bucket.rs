//! Aspect-ratio buckets: a few sizes of about equal area, so that images of similar aspect share a batch
//! and little of any is cropped.
//!
//! Ratios are compared as fractions of whole numbers: two computers choose the same bucket, which
//! logarithms from two system libraries would not promise.

use std::cmp::Ordering;
use std::fmt;

use crate::error::{Result, TrainerError};

/// A bucket: a training size in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bucket {
    /// Pixels in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

/// The sizes to choose from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// From the tallest to the widest, no two of one ratio.
    sizes: Vec<Bucket>,
    step: usize,
    upscales: bool,
}

impl Buckets {
    /// The square, and all sizes with sides that are multiples of `step` between `min_side` and
    /// `max_side`: to each width the largest height with an area of at most that of the square of
    /// `resolution`, to each height the largest width.
    pub fn new(resolution: usize, step: usize, min_side: usize, max_side: usize) -> Result<Self> {
        let square = resolution.checked_div(step).unwrap_or(0) * step;
        if square == 0 || !(min_side..=max_side).contains(&square) || max_side > MOST_SIDE {
            return Err(TrainerError::Request {
                problem: format!(
                    "no buckets for resolution {resolution} in steps of {step}: the square has \
                     {square} pixels on each side, allowed are {min_side} to {max_side}, and at \
                     most {MOST_SIDE}"
                ),
                hint: "choose a resolution that is a multiple of the step, between the two sides",
            });
        }
        let down = |side: usize| side / step * step;
        let mut sizes = vec![Bucket { width: square, height: square }];
        for side in (1..=max_side / step).map(|n| n * step).filter(|side| *side >= min_side) {
            let other = down(resolution * resolution / side);
            // A size that is too long is dropped, not shortened: it would have far fewer pixels than the rest,
            // and the model would learn that tall images are small.
            if other > 0 && (min_side..=max_side).contains(&other) {
                sizes.push(Bucket { width: side, height: other });
                sizes.push(Bucket { width: other, height: side });
            }
        }
        // Of two with one ratio the larger stays.
        sizes.sort_by(|a, b| by_ratio(*a, *b).then(b.width.cmp(&a.width)));
        sizes.dedup_by(|later, first| by_ratio(*later, *first).is_eq());
        Ok(Self { sizes, step, upscales: true })
    }

    /// The same, but images that are smaller than their bucket get a smaller bucket.
    #[must_use]
    pub fn without_upscaling(self) -> Self {
        Self { upscales: false, ..self }
    }

    /// All sizes, from the tallest to the widest. Without upscaling there may be others.
    pub fn sizes(&self) -> &[Bucket] {
        &self.sizes
    }

    /// The bucket whose ratio is nearest to that of an image, of two as near the taller one.
    ///
    /// Without upscaling no side is longer than the image's, but for images shorter than a step.
    pub fn choose(&self, [width, height]: [u32; 2]) -> Bucket {
        let [width, height] = [width.max(1) as usize, height.max(1) as usize];
        let image = Bucket { width, height };
        let nearest = |a: &&Bucket, b: &&Bucket| nearer(image, **a, **b);
        let chosen = *self.sizes.iter().min_by(nearest).expect("new puts the square in");
        if self.upscales {
            return chosen;
        }
        let within = |side: usize, chosen: usize| chosen.min(side / self.step * self.step);
        Bucket {
            width: within(width, chosen.width).max(self.step),
            height: within(height, chosen.height).max(self.step),
        }
    }

    /// The largest share of an image that is cropped, if its ratio is between those of the tallest
    /// and the widest bucket: half of the widest gap between two of them.
    pub fn most_cropped(&self) -> f64 {
        let ratio = |bucket: Bucket| bucket.width as f64 / bucket.height as f64;
        let gaps = self.sizes.windows(2).map(|two| ratio(two[0]) / ratio(two[1]));
        1.0 - gaps.fold(1.0, f64::min).sqrt()
    }
}

/// Four sides multiplied stay within 128 bits, and no model makes larger images.
const MOST_SIDE: usize = 1 << 20;

fn by_ratio(a: Bucket, b: Bucket) -> Ordering {
    (a.width * b.height).cmp(&(b.width * a.height))
}

/// Which of two has the ratio nearer to an image's, as the distance of logarithms has it.
fn nearer(image: Bucket, a: Bucket, b: Bucket) -> Ordering {
    let [a, b] = [a, b].map(|bucket| {
        let wide = image.width as u128 * bucket.height as u128;
        let tall = image.height as u128 * bucket.width as u128;
        // How many times one ratio is the other, as a fraction of at least 1.
        (wide.max(tall), wide.min(tall))
    });
    (a.0 * b.1).cmp(&(b.0 * a.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes of images that repeat themselves in no pattern, from 1 to 6000 pixels a side.
    fn images() -> impl Iterator<Item = [u32; 2]> {
        let number = |n: u64| {
            let mixed = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as u32 % 6000 + 1
        };
        (0..4000).map(move |n| [number(2 * n), number(2 * n + 1)])
    }

    /// The share that covering a bucket crops.
    fn cropped([width, height]: [u32; 2], bucket: Bucket) -> f64 {
        let times =
            f64::from(width) * bucket.height as f64 / f64::from(height) / bucket.width as f64;
        1.0 - times.min(1.0 / times)
    }

    const CASES: [[usize; 4]; 5] = [
        [1024, 64, 512, 2048],
        [512, 64, 256, 1024],
        [768, 8, 384, 1536],
        [1000, 64, 256, 2048],
        [64, 16, 16, 128],
    ];

    #[test]
    fn sizes_keep_to_what_was_asked() {
        for [resolution, step, min_side, max_side] in CASES {
            let buckets = Buckets::new(resolution, step, min_side, max_side).unwrap();
            for bucket in buckets.sizes() {
                let Bucket { width, height } = *bucket;
                let turned = Bucket { width: height, height: width };
                assert!(buckets.sizes().contains(&turned), "{bucket:?}");
                for side in [width, height] {
                    assert_eq!(side % step, 0, "{bucket:?}");
                    assert!((min_side..=max_side).contains(&side), "{bucket:?}");
                }
                assert!(width * height <= resolution * resolution, "{bucket:?}");
                // Close to it: one more step on the shorter side would be too much.
                let grown = width.max(height) * (width.min(height) + step);
                let is_bound = width == height || width.min(height) + step > max_side;
                assert!(is_bound || grown > resolution * resolution, "{bucket:?}");
            }
        }
    }

    #[test]
    fn little_is_cropped() {
        for [resolution, step, min_side, max_side] in CASES {
            let buckets = Buckets::new(resolution, step, min_side, max_side).unwrap();
            let [first, .., last] = buckets.sizes() else { panic!("one bucket") };
            let ratio = |bucket: &Bucket| bucket.width as f64 / bucket.height as f64;
            let range = ratio(first)..=ratio(last);
            let within = images().filter(|[w, h]| range.contains(&(f64::from(*w) / f64::from(*h))));
            for image in within {
                let share = cropped(image, buckets.choose(image));
                assert!(share <= buckets.most_cropped() + 1e-12, "{image:?} loses {share}");
                // None of the others would have lost less.
                let least = buckets.sizes().iter().map(|bucket| cropped(image, *bucket));
                assert!(share <= least.fold(1.0, f64::min) + 1e-12, "{image:?}");
            }
        }
        let buckets = Buckets::new(1024, 64, 512, 2048).unwrap();
        assert!(buckets.most_cropped() < 0.075, "{}", buckets.most_cropped());
    }

    #[test]
    fn a_square_gets_the_square_and_a_turned_image_the_turned_bucket() {
        for [resolution, step, min_side, max_side] in CASES {
            let buckets = Buckets::new(resolution, step, min_side, max_side).unwrap();
            let side = resolution / step * step;
            for image in [1, 77, 5000] {
                let square = Bucket { width: side, height: side };
                assert_eq!(buckets.choose([image, image]), square);
            }
            for [width, height] in images() {
                let [chosen, turned] =
                    [[width, height], [height, width]].map(|p| buckets.choose(p));
                let turned = Bucket { width: turned.height, height: turned.width };
                let share = |bucket| cropped([width, height], bucket);
                assert!((share(chosen) - share(turned)).abs() < 1e-12, "{width} x {height}");
            }
        }
    }

    #[test]
    fn nothing_is_scaled_up_that_should_not_be() {
        let buckets = Buckets::new(1024, 64, 512, 2048).unwrap().without_upscaling();
        assert_eq!(buckets.choose([4000, 4000]), Bucket { width: 1024, height: 1024 });
        assert_eq!(buckets.choose([800, 600]), Bucket { width: 768, height: 576 });
        assert_eq!(buckets.choose([10, 10]), Bucket { width: 64, height: 64 });
        for [width, height] in images().filter(|sides| sides.iter().all(|side| *side >= 64)) {
            let bucket = buckets.choose([width, height]);
            assert!(bucket.width <= width as usize && bucket.height <= height as usize);
            assert_eq!([bucket.width % 64, bucket.height % 64], [0, 0]);
        }
    }

    #[test]
    fn impossible_requests_are_refused() {
        for [resolution, step, min_side, max_side] in
            [[1024, 0, 512, 2048], [32, 64, 1, 64], [1024, 64, 1100, 2048], [1024, 64, 512, 1000]]
        {
            let error = Buckets::new(resolution, step, min_side, max_side).unwrap_err();
            assert!(error.to_string().starts_with("no buckets for resolution"), "{error}");
        }
    }
}
