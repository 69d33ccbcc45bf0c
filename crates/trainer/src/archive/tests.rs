//! Archives of Python's tarfile and of `WebDataset`, and hostile ones (`tests/golden/archives`).

use super::*;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/archives").join(name)
}

fn names(archive: &Path) -> Vec<String> {
    let index = index(archive).unwrap();
    let mut names: Vec<String> =
        index.members.keys().map(|name| name.display().to_string()).collect();
    names.sort();
    names
}

/// Each format that Python writes, with names that need its ways to be long; `WebDataset`'s shard too.
#[test]
fn files_are_found_where_python_put_them() {
    let expected: BTreeMap<String, BTreeMap<String, (u64, u64, u32)>> =
        serde_json::from_slice(&fs::read(golden("expected.json")).unwrap()).unwrap();
    assert_eq!(expected.len(), 4);
    for (archive, members) in expected {
        let archive = golden(&archive);
        assert_eq!(names(&archive), members.keys().cloned().collect::<Vec<_>>());
        for (name, (start, bytes, crc)) in members {
            let path = archive.join(&name);
            let file = DataFile::open(&path).unwrap();
            assert_eq!((file.start, file.length()), (start, bytes), "{name}");
            let mut sum = flate2::Crc::new();
            sum.update(&read(&path).unwrap());
            assert_eq!(sum.sum(), crc, "{name}");
        }
    }
}

#[test]
fn an_archive_is_a_folder() {
    let archive = golden("pax.tar");
    assert!(is_archive(&archive) && is_dir(&archive) && !is_file(&archive) && !is_inside(&archive));
    let below = archive.join("folder");
    assert!(is_dir(&below) && !is_file(&below) && is_inside(&below));
    let all = children(&archive).unwrap();
    assert!(all.contains(&below) && all.iter().all(|path| path.parent() == Some(&archive)));
    assert!(children(&below).unwrap().iter().all(|path| is_dir(path) || is_file(path)));
    assert!(!is_file(&archive.join("none.png")) && !is_dir(&archive.join("fold")));
    assert_eq!(DataFile::open(&archive.join("none")).unwrap_err().to_string(), "is not a file");
    // A folder may have the name of an archive.
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("x.tar");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("a.txt"), "a").unwrap();
    assert_eq!(children(&folder).unwrap(), [folder.join("a.txt")]);
    assert!(is_file(&folder.join("a.txt")) && !is_inside(&folder.join("a.txt")));
}

#[test]
fn a_part_of_an_archive_is_read_like_a_file() {
    let path = golden("pax.tar").join("a.txt");
    let mut file = DataFile::open(&path).unwrap();
    let whole = read(&path).unwrap();
    assert_eq!(file.seek(SeekFrom::End(-2)).unwrap(), whole.len() as u64 - 2);
    let mut other = file.try_clone().unwrap();
    let mut end = Vec::new();
    file.read_to_end(&mut end).unwrap();
    assert_eq!(end, whole[whole.len() - 2..]);
    other.seek(SeekFrom::Current(-1)).unwrap();
    let mut more = Vec::new();
    other.read_to_end(&mut more).unwrap();
    assert_eq!(more, whole[whole.len() - 3..]);
    assert!(file.seek(SeekFrom::Current(-100_000)).is_err());
    file.seek(SeekFrom::Start(1 << 40)).unwrap();
    assert_eq!(file.read(&mut [0; 9]).unwrap(), 0);
}

#[test]
fn what_leads_out_of_an_archive_is_not_used() {
    let archive = golden("hostile.tar");
    assert_eq!(names(&archive), ["good.txt"]);
    let refused: BTreeMap<PathBuf, String> = refused(&archive).into_iter().collect();
    for (name, why) in [
        ("etc/passwd", "has an absolute name"),
        ("../out.png", "has a name that leads out"),
        ("soft.png", "is a link"),
        ("hard.png", "is a link"),
        ("pipe.png", "is a device or a pipe"),
        ("sparse.png", "is of a kind that only tar itself unpacks"),
    ] {
        let found = &refused[&archive.join(name)];
        assert!(found.starts_with(why), "{name}: {found}");
    }
    assert_eq!(refused.len(), 6);
}

/// Changed bytes of a good archive, and what is said of them.
#[test]
fn damaged_archives_are_errors() {
    let place = tempfile::tempdir().unwrap();
    let whole = fs::read(golden("ustar.tar")).unwrap();
    let sum = |header: &mut [u8]| {
        header[148..156].fill(b' ');
        let sum: u64 = header[..512].iter().map(|byte| u64::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    };
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        let path = place.path().join("x.tar");
        fs::write(&path, bytes).unwrap();
        TarIndex::read(&File::open(&path).unwrap()).map(drop).unwrap_err().to_string()
    };
    let length = |digits: &'static [u8]| {
        move |bytes: &mut Vec<u8>| {
            bytes[124..136].copy_from_slice(digits);
            sum(bytes);
        }
    };
    for (said, expected) in [
        (with(&|bytes| bytes[3] ^= 1), "is damaged: has a header whose sum is another"),
        (with(&length(b"77777777777\0")), "is cut off: a.txt is 8.0 GiB long"),
        (
            with(&length(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")),
            "is damaged: has no length",
        ),
        (
            with(&length(b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff")),
            "is cut off: a.txt is 17179869184.0 GiB",
        ),
        (with(&length(b"9999999999 \0")), "is damaged: has no length"),
        (with(&|bytes| bytes.truncate(515)), "is cut off: a.txt is"),
        (with(&|bytes| bytes.truncate(100)), "is damaged: ends within a header"),
        (with(&|bytes| bytes.splice(0..2, [0x1f, 0x8b]).for_each(drop)), "is compressed with gzip"),
        (
            with(&|bytes| {
                bytes[156] = b'L';
                bytes[124..136].copy_from_slice(b"00001000000\0");
                sum(bytes);
            }),
            "is damaged: has a name of 256 KiB",
        ),
        (
            with(&|bytes| {
                bytes[156] = b'x';
                sum(bytes);
            }),
            "is damaged: has a pax header that is none",
        ),
    ] {
        assert!(said.starts_with(expected), "{said}, not {expected}");
    }
    // What speaks of the next file is there, and that is not.
    let long = fs::read(golden("gnu.tar")).unwrap();
    let at = long.windows(13).position(|bytes| bytes == b"././@LongLink").unwrap();
    fs::write(place.path().join("x.tar"), &long[..at + 1024]).unwrap();
    let said = TarIndex::read(&File::open(place.path().join("x.tar")).unwrap()).unwrap_err();
    assert!(said.to_string().contains("behind a header that speaks of another file"), "{said}");
    // Cut between two files it is an archive with fewer of them, as tar has it.
    fs::write(place.path().join("x.tar"), &whole[..1024]).unwrap();
    assert_eq!(names(&place.path().join("x.tar")), ["a.txt"]);
    fs::write(place.path().join("x.tar"), b"").unwrap();
    assert!(names(&place.path().join("x.tar")).is_empty());
}

/// The cost of each is a header that is read, and none is endless.
#[test]
fn random_bytes_are_an_error_or_an_archive() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("x.tar");
    let whole = fs::read(golden("pax.tar")).unwrap();
    let mut state = 1_u64;
    for _ in 0..400 {
        let mut bytes = whole.clone();
        for _ in 0..8 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 20) as u8;
        }
        bytes.truncate((state >> 40) as usize % bytes.len());
        fs::write(&path, bytes).unwrap();
        _ = TarIndex::read(&File::open(&path).unwrap());
    }
}
