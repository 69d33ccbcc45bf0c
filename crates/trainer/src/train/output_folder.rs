//! Whether a run may write into its output folder, checked before anything is written. Nothing that
//! hearth did not write is overwritten, and nothing it writes lands among what it reads: samples in the
//! folder of images would be trained on after `--resume`.
//!
//! What does not get in the way may lie there: a job file, notes, the images in a folder of their own.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use weights::plain_file::open_plain;

use super::folder::{CONFIG, CONFIG_HEADER};
use super::identity;
use crate::config::RunConfig;
use crate::config::data::DataConfig;
use crate::config::training_data::TrainingData;
use crate::data::MaskSource;
use crate::error::{Result, TrainerError};
use crate::event::journal;
use crate::export::card;
use crate::report::document;
use crate::text::HeldOut;

/// Files of a run whose text marks them as written by hearth.
const MARKED: [(&str, &str); 3] =
    [(CONFIG, CONFIG_HEADER), (card::FILE_NAME, card::MARK), ("report.html", document::MARK)];

/// Folders of a run, and a file, without such a mark.
const FOLDERS: [&str; 7] =
    ["adapter", "model", "samples", "checkpoints", "initial", "tensorboard", identity::INPUTS];

/// Fails unless a job's output folder is free, or has a run of ours. `beside` names what else the caller
/// writes there.
pub fn check(config: &RunConfig, beside: &[&str]) -> Result<()> {
    let folder = &config.output.folder;
    check_disjoint(config)?;
    match fs::metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(TrainerError::Io { what: "write", path: folder.clone(), source });
        }
        Ok(about) if !about.is_dir() => {
            return Err(TrainerError::Request {
                problem: format!("output.folder is a file: {}", folder.display()),
                hint: "choose another --out",
            });
        }
        Ok(_) => {}
    }
    match foreign_file(folder, beside) {
        Some(path) => Err(TrainerError::ForeignFile { path }),
        None => Ok(()),
    }
}

/// Fails if the output folder is, or is in, what the job reads.
fn check_disjoint(config: &RunConfig) -> Result<()> {
    let folder = real(&config.output.folder);
    let refuse = |problem: String| {
        let problem = format!("output.folder {problem}: {}", config.output.folder.display());
        Err(TrainerError::Request { problem, hint: "choose another --out" })
    };
    for (key, path) in trained_on(config) {
        if folder.starts_with(real(path)) {
            return refuse(format!("lies in {key}, where it would be trained on itself"));
        }
    }
    let base = &config.base;
    for (key, path) in [("base.path", Some(&base.path)), ("base.rest", base.rest.as_ref())] {
        if path.is_some_and(|path| folder == real(path)) {
            return refuse(format!("is {key}, the model that is trained"));
        }
    }
    Ok(())
}

/// Files and folders that samples are read from, with their keys.
fn trained_on(config: &RunConfig) -> Vec<(String, &Path)> {
    match &config.data {
        TrainingData::Images { data, .. } => {
            let mut all = Vec::new();
            for (at, DataConfig { images, references, masks, .. }) in data.iter().enumerate() {
                all.push((data.key(at, "images"), images.as_path()));
                let key = || data.key(at, "references");
                all.extend(references.0.iter().map(|path| (key(), path.as_path())));
                if let MaskSource::Folder(path) = masks {
                    all.push((data.key(at, "masks"), path));
                }
            }
            all
        }
        TrainingData::Texts { text, .. } => {
            let mut all = vec![("text.path".to_owned(), text.path.as_path())];
            if let HeldOut::Path(path) = &text.validation {
                all.push(("text.validation".to_owned(), path));
            }
            all
        }
    }
}

/// A path without links, also of what does not exist yet.
fn real(path: &Path) -> PathBuf {
    let found = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    found.map_or_else(
        || path.into(),
        |(above, real)| real.join(path.strip_prefix(above).unwrap_or(path)),
    )
}

/// What lies where a run writes, and is not hearth's.
fn foreign_file(folder: &Path, beside: &[&str]) -> Option<PathBuf> {
    let history = folder.join(journal::FILE_NAME);
    if history.exists() && !journal::is_ours(&history) {
        return Some(history);
    }
    // Old runs have no header: there the journal alone marks them as ours.
    let has_begun = journal::has_begun(folder);
    for (name, mark) in MARKED {
        let path = folder.join(name);
        if is_present(&path) && !(name == CONFIG && has_begun) && !is_marked(&path, mark) {
            return Some(path);
        }
    }
    let is_ours = history.exists() || is_present(&folder.join(CONFIG));
    let paths = FOLDERS.iter().chain(beside).map(|name| folder.join(name));
    let is_filled = |path: &PathBuf| {
        fs::read_dir(path).map_or_else(|_| is_present(path), |mut all| all.next().is_some())
    };
    paths.filter(|_| !is_ours).find(is_filled)
}

/// Also of a link that leads nowhere.
fn is_present(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn is_marked(path: &Path, mark: &str) -> bool {
    /// Chosen: a report with all its samples is smaller.
    const MOST_BYTES: u64 = 64 << 20;
    let mut bytes = Vec::new();
    let read = open_plain(path).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes));
    read.is_ok() && String::from_utf8_lossy(&bytes).contains(mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RawConfig;

    /// A job on images and a base beside its output folder.
    fn config(place: &Path, out: &str) -> RunConfig {
        let mut raw = RawConfig::empty();
        for (key, path) in
            [("base.path", "base"), ("data.images", "images"), ("output.folder", out)]
        {
            raw.set_path(key, &place.join(path)).unwrap();
        }
        raw.resolve().unwrap()
    }

    fn place() -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        for folder in ["base", "images", "out"] {
            fs::create_dir(place.path().join(folder)).unwrap();
        }
        place
    }

    /// Of a folder with these files: the one that is named, if it is refused.
    fn refused(files: &[(&str, &str)], beside: &[&str]) -> Option<String> {
        let place = place();
        let out = place.path().join("out");
        for (name, text) in files {
            let path = out.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        match check(&config(place.path(), "out"), beside) {
            Ok(()) => None,
            Err(TrainerError::ForeignFile { path }) => {
                Some(path.strip_prefix(&out).unwrap().to_string_lossy().into_owned())
            }
            Err(other) => panic!("{other}"),
        }
    }

    const PHASE: (&str, &str) = ("events.jsonl", "{\"event\":\"phase\",\"name\":\"a\"}\n");

    #[test]
    fn what_hearth_did_not_write_is_not_overwritten() {
        for (name, text) in [
            ("README.md", "# my project"),
            ("config.toml", "[package]\nname = 'mine'\n"),
            ("report.html", "<html>sales</html>"),
            ("events.jsonl", "{\"event\":\"login\",\"user\":\"me\"}\n"),
            ("events.jsonl", "not even JSON"),
        ] {
            assert_eq!(refused(&[(name, text)], &[]).as_deref(), Some(name));
        }
        for (file, folder) in [
            ("adapter/mine.safetensors", "adapter"),
            ("samples/drum.wav", "samples"),
            ("model/model.safetensors", "model"),
            ("checkpoints/last.pt", "checkpoints"),
            ("initial/config.json", "initial"),
        ] {
            assert_eq!(refused(&[(file, "")], &[]).as_deref(), Some(folder));
            // In the folder of a run they are the run's.
            assert_eq!(refused(&[(file, ""), PHASE], &[]), None);
        }
        assert_eq!(refused(&[("sheet.png", "")], &["sheet.png"]).as_deref(), Some("sheet.png"));
        // Notes that were put into a run's folder stay what they are.
        assert_eq!(refused(&[PHASE, ("README.md", "notes")], &[]).as_deref(), Some("README.md"));
    }

    #[test]
    fn a_run_an_attempt_and_what_is_not_in_the_way_are_welcome() {
        let config = format!("{CONFIG_HEADER}\n[base]\n");
        let card = format!("# cat\n\n{} 1.0.\n", card::MARK);
        let report = document::document("cat", None, "");
        for files in [
            &[][..],
            &[(".lock", ""), ("cache/v1/a.safetensors", "")],
            &[(".lock", ""), ("events.jsonl", ""), ("initial/config.json", "")],
            &[("events.jsonl", "{\"event\":\"pha")],
            &[PHASE, ("config.toml", &config), ("README.md", &card), ("report.html", &report)],
            &[("config.toml", &config), ("checkpoints/step-000002/progress.json", "")],
            &[("notes.txt", ""), ("job.toml", ""), ("images/0.png", ""), ("sheet.png", "")],
        ] {
            assert_eq!(refused(files, &[]), None, "{files:?}");
        }
    }

    #[test]
    fn nothing_is_written_among_what_is_read() {
        let place = place();
        fs::write(place.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink(place.path().join("images"), place.path().join("link")).unwrap();
        for (out, part) in [
            ("images", "lies in data.images"),
            ("images/runs/1", "lies in data.images"),
            ("out/../images", "lies in data.images"),
            ("link/run", "lies in data.images"),
            ("base", "is base.path"),
            ("file", "is a file"),
        ] {
            let error = check(&config(place.path(), out), &[]).unwrap_err().to_string();
            assert!(error.contains(part), "{out}: {error}");
        }
        for out in ["images-2", "base/run", "out", "new/run", "."] {
            assert!(check(&config(place.path(), out), &[]).is_ok(), "{out}");
        }
    }
}
