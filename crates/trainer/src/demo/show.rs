//! What a run of the demo shows at its end: the images of its first and of its last step side by
//! side.

use std::path::{Path, PathBuf};

use super::sheet::{self, BeforeAfter};
use crate::data::{decode, to_chw};
use crate::error::{Result, TrainerError};
use crate::event::history::{History, SampleImage};
use crate::sample::Image;

/// What is written into a run's folder.
pub const FILE_NAME: &str = "before-after.png";

/// Writes it.
pub fn before_after(run: &Path) -> Result<PathBuf> {
    let samples = History::open(run)?.samples;
    let first = samples.iter().map(|sample| sample.step).min().unwrap_or(0);
    let last = samples.iter().map(|sample| sample.step).max().unwrap_or(0);
    let of = |step: u64| samples.iter().filter(move |sample| sample.step == step);
    let pair = |(before, after): (&SampleImage, &SampleImage)| {
        Ok(BeforeAfter {
            prompt: after.prompt.clone(),
            before: read(&run.join(&before.path))?,
            after: read(&run.join(&after.path))?,
        })
    };
    let pairs = of(first).zip(of(last)).map(pair).collect::<Result<Vec<_>>>()?;
    let path = run.join(FILE_NAME);
    sheet::write(&path, &pairs)?;
    Ok(path)
}

/// An image that hearth drew, as it was drawn.
pub fn read(path: &Path) -> Result<Image> {
    let pixels = decode(path).map_err(|kind| TrainerError::Request {
        problem: format!("{} {kind}", path.display()),
        hint: "draw it again",
    })?;
    let numbers = to_chw(&pixels, false).into_iter().map(|number| number / 2.0 + 0.5);
    Ok(Image { values: numbers.collect(), size: [pixels.width as usize, pixels.height as usize] })
}
