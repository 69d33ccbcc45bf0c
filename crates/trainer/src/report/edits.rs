//! Samples of an editing model as a sheet: a row per prompt, from its references over the image before training to
//! the latest one. Other steps are shown as those of any model, by `page.rs`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use super::format::{escaped, link};
use super::gallery::{Gallery, GalleryImage};
use crate::event::history::SampleImage;

/// What the sheet shows of a prompt.
#[derive(Debug, Default)]
pub struct EditRow<'a> {
    before: Option<&'a GalleryImage>,
    after: Option<&'a GalleryImage>,
}

/// A row for each prompt with references, by seed.
pub fn edit_rows(gallery: &Gallery) -> Vec<EditRow<'_>> {
    let mut rows: BTreeMap<(u64, &str), EditRow<'_>> = BTreeMap::new();
    for image in gallery.shown.iter().filter(|image| !image.sample.references.is_empty()) {
        let row = rows.entry((image.sample.seed, &image.sample.prompt)).or_default();
        // Images are ordered by step, so the last one stays.
        if image.sample.step == 0 {
            row.before = Some(image);
        } else {
            row.after = Some(image);
        }
    }
    rows.into_values().collect()
}

impl<'a> EditRow<'a> {
    /// Whether the row shows this image.
    pub fn shows(&self, sample: &SampleImage) -> bool {
        self.images().any(|image| image.sample.path == sample.path)
    }

    fn images(&self) -> impl Iterator<Item = &'a GalleryImage> {
        self.before.into_iter().chain(self.after)
    }

    /// The row as HTML. It stays a row on narrow screens, where other images are wrapped.
    pub fn html(&self, gallery: &Gallery) -> String {
        let Some(GalleryImage { sample, .. }) = self.images().last() else { return String::new() };
        let mut cells = Vec::new();
        for path in &sample.references {
            if let Some(data) = gallery.references.get(path) {
                cells.push(figure(path, data, "reference"));
            }
        }
        for GalleryImage { sample, data } in self.images() {
            cells.push(figure(&sample.path, data, &step_name(sample.step)));
        }
        let mut out = format!(
            "<h3>{}<br><span class=\"faint\">seed {}</span></h3>",
            escaped(&sample.prompt),
            sample.seed
        );
        _ = writeln!(
            out,
            "<div class=\"gallery\" style=\"grid-template-columns:repeat({},minmax(0,15rem))\">{}</div>",
            cells.len(),
            cells.concat()
        );
        out
    }
}

fn figure(path: &Path, data: &str, caption: &str) -> String {
    format!(
        "<figure class=\"card\"><a href=\"{}\"><img loading=\"lazy\" src=\"{data}\" alt=\"{caption}\"></a>\
         <figcaption>{caption}</figcaption></figure>",
        link(path)
    )
}

/// What pages call a step with samples.
pub fn step_name(step: u64) -> String {
    if step == 0 { "before training".into() } else { format!("step {step}") }
}
