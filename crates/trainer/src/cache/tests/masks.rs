//! Masks of images in the cache.

use super::*;
use crate::cache::LatentMask;
use crate::data::Bucket;

/// A mask of so many pixels, white to the left of a column; in the alpha channel of an image if asked.
fn put_mask(path: &Path, [width, height]: [u32; 2], column: u32, is_alpha: bool) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), width, height);
    encoder.set_color(if is_alpha { png::ColorType::Rgba } else { png::ColorType::Grayscale });
    let value = |at: u32| if at % width < column { 255 } else { 0 };
    let pixel = |at| if is_alpha { vec![90, 80, 70, value(at)] } else { vec![value(at)] };
    let bytes: Vec<u8> = (0..width * height).flat_map(pixel).collect();
    encoder.write_header().unwrap().write_image_data(&bytes).unwrap();
}

/// The first row of a sample's mask, and of that of its mirror image.
fn rows(index: &CacheIndex, at: usize) -> [Vec<f32>; 2] {
    let sample = &index.train[at];
    let width = sample.bucket.width / 8;
    [false, true].map(|is_mirrored| {
        let LatentMask { values } = index.mask(sample, is_mirrored).unwrap().unwrap();
        assert_eq!(values.len(), width * sample.bucket.height / 8);
        assert!(values.chunks(width).all(|row| row == &values[..width]));
        values[..width].to_vec()
    })
}

#[test]
fn masks_are_found_wherever_other_trainers_have_them() {
    let left = vec![1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0];
    let mirrored: Vec<f32> = left.iter().rev().copied().collect();
    for (masks, name) in [
        ("beside", "images/0-masklabel.png"),
        ("FOLDER", "masks/0.png"),
        ("FOLDER/below", "images/masks/0.png"),
        ("alpha", "images/0.png"),
    ] {
        let place = Place::new(1);
        put_mask(&place.folder.path().join(name), [64, 64], 28, masks == "alpha");
        let folder = place.folder.path().join(name);
        let is_folder = masks.starts_with("FOLDER");
        let masks = if is_folder { folder.parent().unwrap().to_str().unwrap() } else { masks };
        let setting = format!("data.masks={masks}");
        let data = data(place.folder.path(), &[&setting, "data.flip=true"]);
        let place = Place { data, ..place };
        let index = place.index();
        assert_eq!((index.train.len(), &index.problems[..]), (1, &[][..]), "{masks}");
        assert_eq!(rows(&index, 0), [left.clone(), mirrored.clone()], "{masks}");
        assert_eq!(place.missing(), (0, 0));
        // What is masked is another set, of the same latents.
        let folders = [place.folder.path().join("images")];
        let before = index.fingerprint(&folders).whole;
        put_mask(&place.folder.path().join(name), [64, 64], 40, masks == "alpha");
        assert_eq!(place.missing(), (1, 0), "{masks}");
        assert_ne!(place.index().fingerprint(&folders).whole, before);
        assert_eq!(rows(&place.index(), 0)[0][..6], [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]);
    }
}

#[test]
fn a_mask_is_cropped_and_scaled_as_its_image() {
    // 96 x 64 pixels in a bucket of 80 x 48, with a mask half as large.
    let place = Place::with(2, &["data.masks=beside", "data.unmasked_weight=0.25"]);
    put_mask(&place.image("1-masklabel.png"), [48, 32], 24, false);
    let index = place.index();
    assert_eq!(index.train[1].bucket, Bucket { width: 80, height: 48 });
    let [row, _] = rows(&index, 1);
    assert_eq!((row[..4].to_vec(), row[6..].to_vec()), (vec![1.0; 4], vec![0.25; 4]), "{row:?}");
    // An image without one is told, and counts.
    assert!(index.mask(&index.train[0], false).unwrap().is_none());
    let told: Vec<_> = index.problems.iter().map(|problem| problem.kind.to_string()).collect();
    assert_eq!(told, ["has no mask: all of it counts"]);
}

#[test]
fn masks_are_no_images_and_bad_ones_leave_their_image_out() {
    let place = Place::new(3);
    put_mask(&place.image("0-masklabel.png"), [64, 64], 9, false);
    assert_eq!(place.index().train.len(), 3, "whether masks are used or not");
    put_mask(&place.image("1-masklabel.png"), [64, 64], 9, false);
    fs::write(place.image("2-masklabel.png"), "no image").unwrap();
    let data = data(place.folder.path(), &["data.masks=beside"]);
    let place = Place { data, ..place };
    let index = place.index();
    assert_eq!(index.train.len(), 1);
    let told: Vec<_> = index.problems.iter().map(|problem| problem.kind.to_string()).collect();
    assert_eq!(
        told[0],
        "has a mask of another shape: the image has 96 x 64 pixels, the mask 64 x 64"
    );
    assert!(
        told[1].starts_with("has a mask that cannot be used: 2-masklabel.png is not an image"),
        "{told:?}"
    );
}

#[test]
fn a_share_of_steps_counts_all_of_an_image() {
    let masked = |settings: &[&str]| -> Vec<bool> {
        let place = Place::with(1, &[&["data.masks=beside"], settings].concat());
        put_mask(&place.image("0-masklabel.png"), [64, 64], 9, false);
        let index = Arc::new(place.index());
        let mut batches = read(&index, 1, 5, 0);
        (0..200).map(|_| batches.next_batch().unwrap().0.samples[0].mask.is_some()).collect()
    };
    assert!(masked(&[]).iter().all(|is_masked| *is_masked));
    let some = masked(&["data.unmasked_probability=0.25"]);
    let n = some.iter().filter(|is_masked| **is_masked).count();
    assert!((130..170).contains(&n), "{n}");
    assert_eq!(some, masked(&["data.unmasked_probability=0.25"]));
}
