//! Runs on images in tar archives (`WebDataset`).

use serde_json::Value;

use super::*;

fn shard() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/archives")
}

/// The usual job on the images of this folder or archive.
fn job(job: &Job, images: &str) {
    let text = fs::read_to_string(&job.file).unwrap();
    let (before, after) = (text.find("[data]").unwrap(), text.find("[adapter]").unwrap());
    let data = format!(
        "[data]\nimages = '{images}'\nresolution = 64\nbucket_step = 16\nvalidation = 1\nflip = true\n\
         masks = 'beside'\ncaption_dropout = 0.2\n"
    );
    fs::write(&job.file, format!("{}{data}{}", &text[..before], &text[after..])).unwrap();
}

/// The same bytes as files train the same adapter, and have the same place in the cache.
#[test]
fn a_shard_trains_as_its_files_in_a_folder_do() {
    let of = Job::new();
    for folder in ["images", "shards"] {
        fs::create_dir(of.path(folder)).unwrap();
    }
    let whole = fs::read(shard().join("shard-000.tar")).unwrap();
    fs::write(of.path("shards/shard-000.tar"), &whole).unwrap();
    // Where Python's tarfile found them.
    let expected = fs::read(shard().join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    for (name, member) in expected["shard-000.tar"].as_object().unwrap() {
        let [start, bytes] = [0, 1].map(|at| member[at].as_u64().unwrap() as usize);
        fs::write(of.path("images").join(name), &whole[start..start + bytes]).unwrap();
    }
    for (json, caption) in [("00001.json", "00001.txt"), ("00003.json", "00003.txt")] {
        let sample = fs::read(of.path("images").join(json)).unwrap();
        let sample: Value = serde_json::from_slice(&sample).unwrap();
        fs::write(of.path("images").join(caption), sample["caption"].as_str().unwrap()).unwrap();
    }
    let cache = format!("data.cache={}", text(&of.path("cache")));
    let alone = ["train.micro_batch=1", &cache];
    job(&of, "images");
    let files = of.finish("files", &alone, &[]);
    let n_cached = fs::read_dir(of.path("cache")).unwrap().count();
    for (out, images) in [("folder", "shards"), ("archive", "shards/shard-000.tar")] {
        job(&of, images);
        let run = of.finish(out, &alone, &[]);
        assert!(trained(&files) == trained(&run), "{images}");
        assert_eq!(losses(&events(&files)), losses(&events(&run)), "{images}");
    }
    assert_eq!(fs::read_dir(of.path("cache")).unwrap().count(), n_cached);
}

#[test]
fn an_archive_that_cannot_be_read_is_an_error() {
    let of = Job::new();
    let whole = fs::read(shard().join("shard-000.tar")).unwrap();
    fs::write(of.path("cut.tar"), &whole[..1600]).unwrap();
    job(&of, "cut.tar");
    let said = of.fail(&[], &[]);
    assert!(said.contains("cut.tar") && said.contains("is cut off: 0000"), "{said}");
}
