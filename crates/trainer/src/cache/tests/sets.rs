//! Several sets of images in one cache.

use super::*;

/// The images of a place twice: as they are, and in another way.
fn twice(place: &Place, first: &str, second: &str) -> DataSets {
    let images = place.folder.path().join("images");
    let set = |more: &str| format!("{{images = {images:?}, bucket_step = 16, {more}}}");
    let mut raw = RawConfig::empty();
    raw.set("base.path=x").unwrap();
    raw.set(&format!("data=[{}, {}]", set(first), set(second))).unwrap();
    raw.resolve().unwrap().data.images().unwrap().0.clone()
}

fn placed(n: usize, first: &str, second: &str) -> Place {
    let mut place = Place::new(n);
    place.data = twice(&place, first, second);
    place
}

#[test]
fn a_sample_has_the_settings_of_its_set() {
    let place = placed(
        3,
        "resolution = 64, trigger = \"sks\", repeats = 2, caption_dropout = 0",
        "resolution = [64, 96], flip = true, loss_weight = 0.5, caption_dropout = 1",
    );
    let index = place.index();
    let seen: Vec<_> = index.train.iter().map(|it| (it.set, it.repeats, it.loss_weight)).collect();
    assert_eq!(seen, [[(0, 2, 1.0); 3].to_vec(), [(1, 1, 0.5); 6].to_vec()].concat());
    let size = |sample: &CachedSample| (sample.bucket.width, sample.bucket.height);
    let sizes: Vec<_> = index.train.iter().map(size).collect();
    assert_eq!(sizes[..3], [(64, 64), (80, 48), (48, 80)]);
    let both = [[sizes[0], (96, 96)], [sizes[1], (112, 80)], [sizes[2], (80, 112)]].concat();
    assert_eq!(sizes[3..], both);
    // The same images in the same size, of which the second set has mirror images too.
    assert!(index.train[3].mirrored_key.is_some() && index.train[0].mirrored_key.is_none());
    assert_eq!(index.train[0].cache_key, index.train[3].cache_key);
    assert!(index.plain_text(&index.train[0]).starts_with("sks, image"));
    assert_eq!(index.plain_text(&index.train[3]), "");
    let mut reader = BatchReader::new(Arc::new(index), place.index().batch_sampler(1, 3), 3);
    let empty = |index: &CacheIndex| index.condition(&"".into()).unwrap();
    let empty = empty(&place.index());
    let mut n_empty = 0;
    for number in 0..12 {
        let batch = reader.read(number).unwrap();
        let EncodedSample { prompt, loss_weight, .. } = &batch.samples[0];
        assert_eq!(**prompt == empty, *loss_weight == 0.5);
        n_empty += usize::from(**prompt == empty);
    }
    assert_eq!(n_empty, 6, "an epoch shows each of the second set once in each size");
}

#[test]
fn batches_of_sets_are_the_same_from_the_middle_on() {
    let place = placed(5, "resolution = 64, flip = true", "resolution = [64, 96]");
    let index = Arc::new(place.index());
    let from = |first: u64, n: usize| -> Vec<_> {
        let mut batches = read(&index, 2, 5, first);
        (0..n).map(|_| key(&batches.next_batch().unwrap().0)).collect()
    };
    let all = from(0, 20);
    assert_eq!(all[13..], from(13, 7)[..]);
}

/// An image that is measured with in one set is not learnt in another.
#[test]
fn what_a_set_holds_out_is_held_out_of_all() {
    let split = |first: &str, second: &str| {
        let place = placed(6, &format!("resolution = 64, {first}"), second);
        let caching = place.caching()?;
        let count =
            |samples: &[CachedSample], set| samples.iter().filter(|it| it.set == set).count();
        let CacheIndex { train, held_out, .. } = caching.index();
        let paths: HashSet<&PathBuf> = held_out.iter().map(|sample| &sample.path).collect();
        assert!(train.iter().all(|sample| !paths.contains(&sample.path)));
        Ok([0, 1].map(|set| [count(train, set), count(held_out, set)]))
    };
    let sizes = "resolution = [64, 96]";
    assert_eq!(split("", sizes).unwrap(), [[6, 0], [12, 0]]);
    assert_eq!(split("validation = 2", sizes).unwrap(), [[4, 2], [8, 4]]);
    let both = &format!("{sizes}, validation = 2");
    assert_eq!(split("validation = 2", both).unwrap(), [[4, 2], [8, 4]]);
    let other = &format!("{sizes}, validation = 6");
    says(split("", other), &["data[1].validation holds out 6 images, there are 6"]);
}

/// As many of them as of the others, spread evenly.
#[test]
fn regularisation_images_are_half_of_an_epoch() {
    let repeats = |first: &str, second: &str| -> Vec<u32> {
        let place = placed(6, &format!("resolution = 64, {first}"), second);
        let caching = place.caching().unwrap();
        let told = caching.index().problems.iter().find_map(|problem| match problem.kind {
            ProblemKind::RegularisationSurplus { n, of } => Some((n, of)),
            _ => None,
        });
        let found: Vec<u32> =
            caching.index().train.iter().filter(|it| it.set == 1).map(|it| it.repeats).collect();
        let of = if second.contains("96") { 12 } else { 6 };
        assert_eq!(told, (found.len() < of).then(|| (of - found.len(), of)), "{first} {second}");
        found
    };
    let regular = "resolution = 64, regularisation = true";
    assert_eq!(repeats("repeats = 3", regular), [3; 6]);
    assert_eq!(repeats("repeats = 1", regular), [1; 6]);
    assert_eq!(repeats("repeats = 4", "resolution = [64, 96], regularisation = true"), [2; 12]);
    assert_eq!(repeats("repeats = 1", "resolution = [64, 96], regularisation = true"), [1; 6]);
}

#[test]
fn a_set_without_an_image_is_named() {
    let place = Place::new(2);
    let empty = place.folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let mut raw = RawConfig::empty();
    let images = place.folder.path().join("images");
    let sets = format!("data=[{{images = {images:?}, resolution = 64}}, {{images = {empty:?}}}]");
    for argument in ["base.path=x", &sets, "data.bucket_step=16"] {
        raw.set(argument).unwrap();
    }
    let data = raw.resolve().unwrap().data.images().unwrap().0.clone();
    fs::write(place.image("bad.png"), "hello").unwrap();
    let place = Place { data, ..place };
    let said = place.caching().map(drop).unwrap_err().to_string();
    assert!(said.ends_with("empty: it holds none"), "{said}");
}

#[test]
fn a_fingerprint_knows_sets_apart() {
    let fingerprint = |first: &str, second: &str| {
        let place = placed(2, first, second);
        let folders: Vec<PathBuf> = place.data.iter().map(|set| set.images.clone()).collect();
        place.caching().unwrap().index().fingerprint(&folders)
    };
    let plain = fingerprint("resolution = 64", "resolution = [64, 96]");
    let names: Vec<&str> = plain.parts.keys().map(String::as_str).collect();
    for name in ["0.png of data[0]", "0.png of data[1]", "0.png of data[1] at 96x96"] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    let swapped = fingerprint("resolution = [64, 96]", "resolution = 64");
    assert_ne!(plain.whole, swapped.whole);
    assert_eq!(plain.whole, fingerprint("resolution = 64", "resolution = [64, 96]").whole);
}
