//! Which images are references of which, by names alone, in the layouts of other trainers:
//!
//! ```text
//! images/fox.png     control/fox.png                        one folder beside the images
//! images/fox.png     control_1/fox.png  control_2/fox.png   a folder for each reference
//! images/fox.png     control/fox_0.png  control/fox_1.png   numbered names (musubi)
//! 01_out.png         01_in.png                              one folder for all (mflux)
//! ```
//!
//! References that metadata names are in `metadata`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::listing::FolderListing;
use super::problem::{Problem, ProblemKind};

/// Names of folders of images that have references; the first one found is taken.
const TARGETS: [&str; 4] = ["images", "target", "targets", "after"];

/// Names of folders of references, which may end in a number.
const REFERENCES: [&str; 6] =
    ["control", "controls", "reference", "references", "conditioning", "before"];

/// A folder of images with its folders of references.
#[derive(Debug)]
pub(super) struct FolderPair {
    pub(super) target: PathBuf,
    /// In order: reference 1 first.
    pub(super) references: Vec<PathBuf>,
}

/// The one among folders that lie side by side.
pub(super) fn folder_pair(folders: &[PathBuf]) -> Option<FolderPair> {
    let is_named =
        |path: &Path, name| path.file_name().is_some_and(|n| n.eq_ignore_ascii_case(name));
    let target =
        TARGETS.iter().find_map(|name| folders.iter().find(|path| is_named(path, name)))?.clone();
    let ranked = |path: &PathBuf| Some((reference_rank(path)?, path.clone()));
    let mut references: Vec<_> = folders.iter().filter_map(ranked).collect();
    references.sort();
    let references: Vec<_> = references.into_iter().map(|(_, path)| path).collect();
    (!references.is_empty()).then_some(FolderPair { target, references })
}

/// What folders of references are sorted by: the number, then the name.
fn reference_rank(path: &Path) -> Option<(u32, usize)> {
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    let (name, number) = name_and_number(&name);
    REFERENCES.iter().position(|known| *known == name).map(|position| (number, position))
}

/// `control` and 1 of `control1` and `control_1`; without a number it is 0.
fn name_and_number(name: &str) -> (&str, u32) {
    match split_number(name) {
        Some((rest, number)) => (rest.strip_suffix('_').unwrap_or(rest), number),
        None => (name, 0),
    }
}

/// A name and the number at its end.
fn split_number(name: &str) -> Option<(&str, u32)> {
    let rest = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = name[rest.len()..].parse().ok()?;
    Some((rest, number))
}

/// The images in one folder of references.
#[derive(Debug)]
pub(super) struct ReferenceFolder {
    pub(super) path: PathBuf,
    by_stem: BTreeMap<OsString, PathBuf>,
    /// Numbers and paths of `fox_0`, `fox_1`, by `fox`.
    numbered: BTreeMap<OsString, BTreeSet<(u32, PathBuf)>>,
    used: BTreeSet<PathBuf>,
}

impl ReferenceFolder {
    /// `targets` are the names of the images that may have references here. One that is a target's
    /// own is not counted as a numbered one of another: `fox_1` is not the first of `fox` then.
    pub(super) fn read(
        path: &Path,
        targets: &BTreeSet<&OsStr>,
        problems: &mut Vec<Problem>,
    ) -> Self {
        let images = match FolderListing::read(path) {
            Ok(listing) => listing.images,
            // The images are then reported to lack theirs.
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                problems.push(Problem::skipped(path, ProblemKind::unreadable(&error)));
                Vec::new()
            }
        };
        let by_stem = by_stem(&images, problems);
        let mut numbered: BTreeMap<OsString, BTreeSet<_>> = BTreeMap::new();
        for (stem, path) in by_stem.iter().filter(|(stem, _)| !targets.contains(stem.as_os_str())) {
            let named = stem.to_str().and_then(split_number);
            if let Some((name, number)) = named
                && let Some(name) = name.strip_suffix('_')
            {
                numbered.entry(name.into()).or_default().insert((number, path.clone()));
            }
        }
        Self { path: path.into(), by_stem, numbered, used: BTreeSet::new() }
    }

    /// Those of an image: the one of its name, else the numbered ones.
    pub(super) fn take(&mut self, stem: &OsStr) -> Vec<PathBuf> {
        let numbered = || self.numbered.get(stem).into_iter().flatten();
        let found = match self.by_stem.get(stem) {
            Some(path) => vec![path.clone()],
            None => numbered().map(|(_, path)| path.clone()).collect(),
        };
        self.used.extend(found.iter().cloned());
        found
    }

    /// Those that no image took.
    pub(super) fn unpaired(&self) -> impl Iterator<Item = &PathBuf> {
        self.by_stem.values().filter(|path| !self.used.contains(*path))
    }
}

/// The first of two with one name stays.
fn by_stem(images: &[PathBuf], problems: &mut Vec<Problem>) -> BTreeMap<OsString, PathBuf> {
    let mut by_stem: BTreeMap<OsString, PathBuf> = BTreeMap::new();
    for path in images {
        let stem = path.file_stem().unwrap_or_default();
        if let Some(other) = by_stem.get(stem) {
            let kind = ProblemKind::DuplicateStem { other: other.clone() };
            problems.push(Problem::skipped(path, kind));
        } else {
            by_stem.insert(stem.into(), path.clone());
        }
    }
    by_stem
}

/// Inputs and outputs in one folder. An image is an input only if its output is there: otherwise
/// `cabin_in.png` is an image like any other.
#[derive(Debug, Default)]
pub(super) struct InputsByOutput(BTreeMap<String, Vec<NumberedInput>>);

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NumberedInput {
    number: u32,
    stem: OsString,
    path: PathBuf,
}

impl InputsByOutput {
    pub(super) fn find(images: &[PathBuf], problems: &mut Vec<Problem>) -> Self {
        let outputs: BTreeSet<&str> =
            images.iter().filter_map(|path| output_name(path.file_stem()?)).collect();
        let is_input = |path: &&PathBuf| {
            path.file_stem().and_then(input_name).is_some_and(|(name, _)| outputs.contains(name))
        };
        let inputs: Vec<PathBuf> = images.iter().filter(is_input).cloned().collect();
        let mut found = Self::default();
        for (stem, path) in by_stem(&inputs, problems) {
            if let Some((name, number)) = input_name(&stem) {
                let input = NumberedInput { number, stem: stem.clone(), path };
                found.0.entry(name.to_owned()).or_default().push(input);
            }
        }
        found.0.values_mut().for_each(|inputs| inputs.sort());
        found
    }

    /// Whether an image is an input, and not one to train with.
    pub(super) fn is_input(&self, path: &Path) -> bool {
        path.file_stem().and_then(input_name).is_some_and(|(name, _)| self.0.contains_key(name))
    }

    /// The inputs of an output.
    pub(super) fn inputs(&self, stem: &OsStr) -> Vec<PathBuf> {
        let inputs = output_name(stem).and_then(|name| self.0.get(name));
        inputs.into_iter().flatten().map(|input| input.path.clone()).collect()
    }

    /// Names of an image's caption without their ending: its own, of an output also those of its
    /// inputs, which precede it, and the plain name.
    pub(super) fn caption_stems(&self, stem: &OsStr, targets: &BTreeSet<&OsStr>) -> Vec<OsString> {
        let pair = output_name(stem).and_then(|name| Some((name, self.0.get(name)?)));
        let Some((name, inputs)) = pair else { return vec![stem.into()] };
        let mut stems = vec![OsString::from(format!("{name}_in"))];
        stems.extend(inputs.iter().map(|input| input.stem.clone()));
        stems.dedup();
        stems.push(stem.into());
        // Unless it is the caption of an image of that name.
        let plain = Some(OsString::from(name)).filter(|name| !targets.contains(name.as_os_str()));
        stems.extend(plain);
        stems
    }
}

/// `01` of `01_out`.
fn output_name(stem: &OsStr) -> Option<&str> {
    stem.to_str()?.strip_suffix("_out")
}

/// `01` of `01_in`, `01_in2` and `01_in_2`, with the number.
fn input_name(stem: &OsStr) -> Option<(&str, u32)> {
    let (rest, number) = name_and_number(stem.to_str()?);
    Some((rest.strip_suffix("_in")?, number))
}
