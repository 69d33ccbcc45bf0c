//! A folder of drawn images with captions, as people keep their own:
//!
//! ```text
//! folder/0000.png    an image; its caption and number are in it as text, too
//! folder/0000.txt    its caption
//! folder/0001.png    ...
//! ```
//!
//! It is drawn in a folder beside it and renamed when whole, so a folder of that name has all of it.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use weights::write::{staging_path, write_whole};

use super::paint::SIDE;
use super::scene::Scene;
use crate::config::data::DemoStyle;
use crate::error::{Result, TrainerError};
use crate::sample::image_file;

/// What became of a folder of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrawnSet {
    /// The images were drawn.
    New,
    /// They were there already and were left as they are.
    Kept,
}

/// Draws the first `count` images of a seed into `folder`, unless they are there.
pub fn draw_set(folder: &Path, style: DemoStyle, count: usize, seed: u64) -> Result<DrawnSet> {
    if folder.exists() {
        return check_whole(folder, count).map(|()| DrawnSet::Kept);
    }
    remove_abandoned(folder);
    let staging = staging_path(folder);
    fs::create_dir_all(&staging).map_err(|source| failed("make", &staging, source))?;
    for index in 0..count {
        draw(&staging, &Scene::new(style, seed, index), index).inspect_err(|_| {
            _ = fs::remove_dir_all(&staging);
        })?;
    }
    fs::rename(&staging, folder).map_err(|source| failed("rename to", folder, source))?;
    Ok(DrawnSet::New)
}

fn draw(folder: &Path, scene: &Scene, index: usize) -> Result<()> {
    let texts = [("caption", scene.caption.clone()), ("number", index.to_string())];
    let path = folder.join(format!("{index:04}.png"));
    image_file::write(&path, &scene.draw(SIDE), &texts)?;
    let path = path.with_extension("txt");
    Ok(write_whole(&path, format!("{}\n", scene.caption).as_bytes())?)
}

/// That a folder has as many images, each with its caption, and no more.
fn check_whole(folder: &Path, count: usize) -> Result<()> {
    let entries = fs::read_dir(folder).map_err(|source| failed("read", folder, source))?.count();
    let is_there = |index: usize| {
        ["png", "txt"].iter().all(|end| folder.join(format!("{index:04}.{end}")).is_file())
    };
    let found = (0..count).filter(|index| is_there(*index)).count();
    if found == count && entries == 2 * count {
        return Ok(());
    }
    Err(TrainerError::Request {
        problem: format!(
            "{} of {count} drawn images among {entries} files: {}",
            found,
            folder.display()
        ),
        hint: "remove that folder, or name one that is not there",
    })
}

/// Removes what killed programs left beside a folder. Chosen: an image is drawn in far less than a minute.
fn remove_abandoned(folder: &Path) {
    const ABANDONED: Duration = Duration::from_secs(60);
    let start = format!(".{}.", folder.file_name().unwrap_or_default().to_string_lossy());
    let beside = folder.parent().unwrap_or(folder);
    for entry in fs::read_dir(beside).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.strip_prefix(&start).and_then(|rest| rest.strip_suffix(".partial"));
        let is_ours = number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()));
        let modified = entry.metadata().and_then(|about| about.modified());
        let age = modified.ok().and_then(|at| at.elapsed().ok()).unwrap_or_default();
        if is_ours && age > ABANDONED {
            _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn failed(what: &'static str, path: &Path, source: io::Error) -> TrainerError {
    TrainerError::Io { what, path: path.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_drawn_once_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let images = folder.path().join("deep/images");
        assert_eq!(draw_set(&images, DemoStyle::Neon, 3, 5).unwrap(), DrawnSet::New);
        let caption = fs::read_to_string(images.join("0002.txt")).unwrap();
        assert_eq!(caption.trim_end(), Scene::new(DemoStyle::Neon, 5, 2).caption);
        let decoded =
            png::Decoder::new(io::BufReader::new(fs::File::open(images.join("0002.png")).unwrap()));
        let reader = decoded.read_info().unwrap();
        assert_eq!(reader.info().size(), (SIDE as u32, SIDE as u32));
        assert_eq!(reader.info().utf8_text[0].get_text().unwrap(), caption.trim_end());
        assert_eq!(draw_set(&images, DemoStyle::Neon, 3, 5).unwrap(), DrawnSet::Kept);
        assert_eq!(fs::read_dir(folder.path().join("deep")).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_of_something_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("letter.txt"), "dear").unwrap();
        let error = draw_set(folder.path(), DemoStyle::Flat, 2, 5).unwrap_err();
        assert!(error.to_string().starts_with("0 of 2 drawn images among 1 files"), "{error}");
        assert!(folder.path().join("letter.txt").exists());
    }
}
