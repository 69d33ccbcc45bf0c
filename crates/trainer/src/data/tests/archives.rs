//! Images in tar archives: those of `WebDataset`, and what strangers may put into one.

use super::*;
use crate::archive;
use crate::data::mask::{ImageMask, MaskSource, attach_masks};

fn golden() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/archives")).to_owned()
}

fn found(folder: &Path) -> FolderScan {
    scan(folder, &[], MediaKinds::Images, &|_| true).unwrap()
}

/// Captions are those of `.txt`, else those of `.json`; pixels are those of the same bytes in a file.
#[test]
fn samples_of_a_shard_are_images_with_captions() {
    let shard = golden().join("shard-000.tar");
    let [place, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    fs::copy(&shard, place.path().join("shard-000.tar")).unwrap();
    for (folder, shard) in
        [(shard.clone(), shard), (place.path().into(), place.path().join("shard-000.tar"))]
    {
        let FolderScan { items, problems } =
            attach_masks(found(&folder), &folder, &MaskSource::Beside, false);
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert_eq!(items.len(), 4);
        for (index, (item, ending)) in items.iter().zip(["png", "jpg", "webp", "png"]).enumerate() {
            assert_eq!(item.path, shard.join(format!("{index:05}.{ending}")));
            assert_eq!(item.caption, format!("a pattern, number {index}"));
            assert_eq!(item.size, [64, 64]);
            let file = other.path().join("one.bin");
            fs::write(&file, archive::read(&item.path).unwrap()).unwrap();
            let [inside, outside] = [&item.path, &file].map(|path| decode(path).unwrap());
            assert!(inside.rgb == outside.rgb && inside.width == 64, "{index}");
        }
        let mask = ImageMask::File(shard.join("00002-masklabel.png"));
        assert_eq!(items[2].mask, Some(mask));
    }
}

/// Names that lead out of an archive, links, and an archive that is cut off: nothing of them is read, all is told.
#[test]
fn hostile_archives_are_told_of() {
    let place = tempfile::tempdir().unwrap();
    fs::copy(golden().join("hostile.tar"), place.path().join("hostile.tar")).unwrap();
    let whole = fs::read(golden().join("shard-000.tar")).unwrap();
    fs::write(place.path().join("cut.tar"), &whole[..3590]).unwrap();
    fs::write(place.path().join("zipped.tar"), [0x1f, 0x8b, 8, 0]).unwrap();
    fs::create_dir(place.path().join("folder.tar")).unwrap();
    let FolderScan { items, problems } = found(place.path());
    assert_eq!(items, []);
    let said: Vec<String> = problems
        .iter()
        .map(|it| format!("{}: {}", it.path.strip_prefix(place.path()).unwrap().display(), it.kind))
        .collect();
    for expected in [
        "cut.tar: cannot be read: is cut off: 0000",
        "zipped.tar: cannot be read: is compressed with gzip",
        "hostile.tar/etc/passwd: cannot be read: has an absolute name",
        "hostile.tar/../out.png: cannot be read: has a name that leads out",
        "hostile.tar/soft.png: cannot be read: is a link",
        "hostile.tar/good.txt: is a caption without an image",
    ] {
        assert!(said.iter().any(|said| said.starts_with(expected)), "{expected}: {said:#?}");
    }
    // Named as the data set itself, an archive that cannot be read is an error.
    let cut = scan(&place.path().join("cut.tar"), &[], MediaKinds::Images, &|_| true);
    assert!(cut.unwrap_err().with_cause().contains("is cut off"));
}
