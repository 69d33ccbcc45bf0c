//! Which frames of a clip are seen: resampled to frames of equal length, and cut into segments.

/// A second, as times are counted here.
pub(super) const SECOND_US: u64 = 1_000_000;

/// A part of a clip: so many frames from one on, at so many a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClipSegment {
    /// The first frame.
    pub start: usize,
    /// How many there are.
    pub frames: usize,
    /// Frames per second, in which both are counted.
    pub fps: usize,
}

/// Frames of a clip of this length: the nearest number, at least one.
pub(super) fn n_frames(duration_us: u64, fps: usize) -> usize {
    let exact = u128::from(duration_us) * fps as u128;
    let nearest = (exact + u128::from(SECOND_US / 2)) / u128::from(SECOND_US);
    usize::try_from(nearest).unwrap_or(usize::MAX).max(1)
}

/// Which frame is shown in the middle of frame `at` after resampling; the ends of frames ascend. Taken: the filter `fps`
/// of ffmpeg rounds times to the nearest in the same way.
pub(super) fn shown(ends_us: &[u64], at: usize, fps: usize) -> usize {
    let is_over = |end: &u64| 2 * u128::from(*end) * fps as u128 <= middle(at);
    ends_us.partition_point(is_over).min(ends_us.len().saturating_sub(1))
}

/// The middle of a frame in half frames, as `shown` compares it.
fn middle(at: usize) -> u128 {
    (2 * at as u128 + 1) * u128::from(SECOND_US)
}

/// Which parts of clips a job sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClipSettings {
    /// Frames of a segment; shorter clips have fewer.
    pub frames: usize,
    /// Frames per second.
    pub fps: usize,
    /// Segments of a clip.
    pub segments: usize,
    /// Frames that make one of a latent: a VAE takes `unit`·k + 1.
    pub unit: usize,
}

impl ClipSettings {
    /// The parts of a clip of `n` frames, evenly spread from its beginning to its end. None of a clip that is too short.
    pub fn segments(&self, n: usize) -> Vec<ClipSegment> {
        let Self { frames: most, fps, unit, .. } = *self;
        let frames = whole(n.min(most), unit);
        if frames < self.least() {
            return Vec::new();
        }
        let (rest, last) = (n - frames, self.segments.max(1) - 1);
        let starts = (0..=last).map(|at| (at * rest).checked_div(last).unwrap_or(0));
        let mut segments: Vec<_> = starts.map(|start| ClipSegment { start, frames, fps }).collect();
        // A short clip has fewer places to begin.
        segments.dedup();
        segments
    }

    /// The fewest frames of a clip: two of a latent, unless single frames are asked for.
    pub fn least(&self) -> usize {
        if self.frames == 1 { 1 } else { self.unit + 1 }
    }
}

/// The most frames of `unit`·k + 1 that are no more than these.
pub fn whole(frames: usize, unit: usize) -> usize {
    match frames {
        0 => 0,
        frames => (frames - 1) / unit * unit + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_resampled_to_the_nearest_time() {
        // Of 10 frames a second, at 5, 10 and 20.
        let ends: Vec<u64> = (1..=6).map(|at| at * 100_000).collect();
        let seen = |fps| {
            let n = n_frames(600_000, fps);
            (0..n).map(|at| shown(&ends, at, fps)).collect::<Vec<_>>()
        };
        assert_eq!(seen(5), [1, 3, 5]);
        assert_eq!(seen(10), [0, 1, 2, 3, 4, 5]);
        assert_eq!(seen(20), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
        // A frame that is held for long, and one that nobody sees.
        let uneven = [500_000, 510_000, 1_000_000];
        let seen: Vec<_> = (0..8).map(|at| shown(&uneven, at, 8)).collect();
        assert_eq!(seen, [0, 0, 0, 0, 2, 2, 2, 2]);
        assert_eq!((n_frames(0, 24), n_frames(u64::MAX, 240) > 1 << 40), (1, true));
    }

    #[test]
    fn segments_spread_from_the_beginning_to_the_end() {
        let at = |n, most, n_segments| {
            let settings = ClipSettings { frames: most, fps: 24, segments: n_segments, unit: 4 };
            let place = |segment: ClipSegment| (segment.start, segment.frames);
            settings.segments(n).into_iter().map(place).collect::<Vec<_>>()
        };
        assert_eq!(at(121, 121, 1), [(0, 121)]);
        assert_eq!(at(200, 81, 1), [(0, 81)]);
        assert_eq!(at(200, 81, 3), [(0, 81), (59, 81), (119, 81)]);
        assert_eq!(at(100, 121, 2), [(0, 97), (3, 97)]);
        assert_eq!(at(10, 9, 5), [(0, 9), (1, 9)], "no two begin at the same frame");
        assert_eq!(at(5, 121, 1), [(0, 5)]);
        assert_eq!(at(4, 121, 1), [], "too short for two frames of a latent");
        assert_eq!(at(4, 1, 2), [(0, 1), (3, 1)], "single frames may be asked for");
        assert_eq!(at(0, 121, 1), []);
    }
}
