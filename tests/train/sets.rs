//! Runs on several sets of images.

use super::*;

/// The first with one image held out, the second at two sizes.
const SETS: &str = "
[[data]]
images = 'images'
draw = 'neon'
draw_count = 4
resolution = 64
bucket_step = 16
validation = 1
[[data]]
images = 'others'
draw = 'flat'
draw_count = 3
resolution = [64, 80]
loss_weight = 0.5
flip = true
trigger = 'flat style'
";

/// The usual job with these sets instead of its one.
fn job(sets: &str) -> Job {
    let job = Job::new();
    let text = fs::read_to_string(&job.file).unwrap();
    let (before, after) = (text.find("[data]").unwrap(), text.find("[adapter]").unwrap());
    fs::write(&job.file, format!("{}{sets}{}", &text[..before], &text[after..])).unwrap();
    job
}

#[test]
fn a_run_on_sets_resumes_bit_by_bit_and_only_on_the_same() {
    let job = job(SETS);
    // A governor that makes micro-batches smaller on a busy machine changes the order of sums.
    let alone = "train.micro_batch=1";
    let whole = trained(&job.finish("whole", &[alone], &[]));
    let run = job.finish("run", &[alone, "train.steps=2"], &[]);
    let says = |set: &[&str], said: &str| {
        let arguments = ["--resume", "--out", text(&run)];
        let words = job.fail(&[&["train.steps=6", alone], set].concat(), &arguments);
        assert!(words.contains(said), "{said:?} is missing from {words}");
    };
    says(&["data[1].repeats=3"], "data[1].repeats was 1, is 3");
    says(
        &["data.loss_weight=2"],
        "data[0].loss_weight was not set, is 2.0; data[1].loss_weight was 0.5, is 2.0",
    );
    let others = job.path("others/0000.txt");
    let caption = fs::read_to_string(&others).unwrap();
    fs::write(&others, "another caption").unwrap();
    says(
        &[],
        "2 changed (caption of 0000.png of data[1], caption of 0000.png of data[1] at 80x80)",
    );
    fs::write(&others, caption).unwrap();
    assert!(whole == trained(&job.finish("run", &[alone, "train.steps=6"], &["--resume"])));
}

#[test]
fn a_weight_of_the_loss_is_a_factor_of_it() {
    let job = job(SETS);
    let first = |out: &str, weight: &str| {
        let set = ["train.steps=1", weight];
        losses(&events(&job.finish(out, &set, &[])))[0]
    };
    assert_eq!(first("double", "data.loss_weight=2"), 2.0 * first("plain", "data.loss_weight=1"));
}

#[test]
fn a_list_of_one_set_is_that_set() {
    let job = Job::new();
    let plain = trained(&job.finish("plain", &["train.steps=2"], &[]));
    let list = fs::read_to_string(&job.file).unwrap().replace("[data]", "[[data]]");
    fs::write(&job.file, list).unwrap();
    assert!(plain == trained(&job.finish("list", &["train.steps=2"], &[])));
}

/// The base and an adapter that does nothing yet say the same; what is learnt of other images changes that, and is held
/// back by it. Memory is as planned.
#[test]
fn what_the_base_says_is_kept() {
    let job = job(SETS);
    let prior = "data[1].target=base";
    let of = |out: &str, set: &[&str]| {
        let run =
            job.finish(out, &[&["train.steps=6", "train.batch_size=3", prior], set].concat(), &[]);
        losses(&events(&run))
    };
    // Nothing is learnt of the first set: there is nothing to hold back, and the loss is 0 to the bit.
    assert_eq!(of("nothing", &["data[0].loss_weight=0", "train.steps=1"]), [0.0]);
    let [free, held] =
        ["0", "100"].map(|weight| of(weight, &[&format!("data[1].loss_weight={weight}")]));
    assert_eq!(free[0], held[0], "what it learns does not depend on what it keeps");
    assert!(held[1..].iter().zip(&free[1..]).any(|(held, free)| held > free), "{held:?} {free:?}");
}

/// A gray image of 64 x 64 pixels, white to the left of a column.
fn put_mask(path: &Path, column: usize) {
    let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), 64, 64);
    encoder.set_color(png::ColorType::Grayscale);
    let bytes: Vec<u8> = (0..64 * 64).map(|at| if at % 64 < column { 255 } else { 0 }).collect();
    encoder.write_header().unwrap().write_image_data(&bytes).unwrap();
}

/// White masks change nothing, not a bit; others do. Memory is as planned.
#[test]
fn a_run_with_masks_learns_what_is_white() {
    let job = Job::new();
    let steps = "train.steps=3";
    let plain = trained(&job.finish("plain", &[steps], &[]));
    let masks = job.path("masks");
    fs::create_dir(&masks).unwrap();
    let setting = format!("data.masks={}", text(&masks));
    let masked = |out: &str, column: usize, more: &[&str]| {
        (0..5).for_each(|at| put_mask(&masks.join(format!("{at:04}.png")), column));
        trained(&job.finish(out, &[&[steps, &setting], more].concat(), &[]))
    };
    assert!(plain == masked("white", 64, &[]));
    let half = masked("half", 32, &[]);
    assert!(plain != half);
    assert!(half != masked("weak", 32, &["data.unmasked_weight=0.5"]));
    assert!(plain == masked("none", 32, &["data.unmasked_weight=1"]));
}
