//! What people mistype. Each row is a command that is wrong, its exit code and the words that the answer must
//! have: no panic, one `error:` line in lower case, and a `hint:`. Nothing is trained here.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::models::at;
use crate::{hearth, said};

/// Exit code, the command, and what the answer must say. `SD3` stands for a tiny pipeline, `DIR/` for a folder
/// of the test's own.
type Row = (i32, &'static str, &'static [&'static str]);

/// A job that is not whole.
const INCOMPLETE: &[Row] = &[
    (
        2,
        "train",
        &[
            "no job given",
            "hearth train job.toml",
            "--images FOLDER --base MODEL",
            "--text PATH",
            "hearth demo",
        ],
    ),
    (2, "plan", &["no job given", "hearth plan job.toml"]),
    (2, "cache --steps 5", &["no job given", "hearth cache --images FOLDER"]),
    (2, "train --images DIR/images", &["--images DIR/images needs the model too", "--base MODEL"]),
    (
        2,
        "train --text DIR/notes.txt --resume",
        &["--text DIR/notes.txt needs the model too", "--base MODEL"],
    ),
    (2, "train --base SD3", &["a model alone is no job", "--images FOLDER", "--text PATH"]),
    (2, "train --set base.path=SD3", &["no job given"]),
    (1, "train DIR/empty.toml", &["`base.path` is not set"]),
    (1, "train DIR/missing.toml", &["cannot read job", "missing.toml", "No such file"]),
    (
        2,
        "train DIR/job.toml --images a --text b",
        &["'--images <FOLDER>' cannot be used with '--text <PATH>'"],
    ),
];

/// Flags that stand for keys of a job, and the command line in general.
const FLAGS: &[Row] = &[
    (1, "train DIR/job.toml --steps 0", &["`train.steps` is 0", "at least 1", "--steps 0"]),
    (1, "train DIR/job.toml --steps -5", &["`train.steps` is -5", "at least 1", "--steps -5"]),
    (1, "train DIR/job.toml --steps many", &["`train.steps` is \"many\"", "a whole number"]),
    (1, "plan DIR/job.toml --rank 0", &["`adapter.rank` is 0", "1 to 4096", "--rank 0"]),
    (1, "plan DIR/job.toml --rank 1000000000", &["`adapter.rank` is 1000000000", "1 to 4096"]),
    (
        1,
        "cache DIR/job.toml --resolution 500",
        &["`data.resolution` is 500", "a multiple of 16", "--resolution 500"],
    ),
    (
        1,
        "train DIR/job.toml --lr -1e-4",
        &["`optimizer.learning_rate` is -1e-4", "above 0", "--lr -1e-4"],
    ),
    (1, "train DIR/job.toml --lr nan", &["`optimizer.learning_rate` is nan", "a number"]),
    (1, "train DIR/job.toml --batch 0", &["`train.batch` is 0", "1 to 1024"]),
    (
        1,
        "train DIR/job.toml --rank 4 --set adapter.rank=8",
        &["`adapter.rank` is set twice: --rank 4, --set adapter.rank=8"],
    ),
    (
        1,
        "train --text DIR/notes.txt --base SD3 --resolution 512",
        &["`data.resolution` has no effect with text.path", "--resolution 512"],
    ),
    (
        1,
        "train DIR/job.toml --mode fast",
        &["`machine.mode` is \"fast\"", "quiet, balanced, full, overnight", "--mode fast"],
    ),
    (1, "train DIR/job.toml --max-temp 900", &["`machine.max_temp` is 900", "30 to 120"]),
    (1, "train DIR/job.toml --set steps=5", &["unknown key `steps`", "[train]"]),
    (1, "train DIR/job.toml --set train.steps", &["`train.steps` sets nothing", "key=value"]),
    (
        2,
        "train DIR/job.toml --stepss 5",
        &["unexpected argument '--stepss'", "'--steps'", "`hearth train --help`"],
    ),
    (2, "trian DIR/job.toml", &["unrecognized subcommand 'trian'", "'train'"]),
    (2, "train DIR/job.toml --steps", &["a value is required for '--steps <N>'"]),
    (2, "bench stepp", &["unrecognized subcommand 'stepp'", "'step'", "`hearth bench --help`"]),
    (2, "train DIR/job.toml --device tpu", &["tpu is no device", "cpu, cuda:0, gpu:0"]),
];

#[test]
fn what_is_typed_wrong_is_refused_with_a_hint() {
    let place = Place::new();
    for row in [INCOMPLETE, FLAGS].concat() {
        place.check(row);
    }
}

/// Files to be wrong about.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        fs::create_dir(place.path("images")).unwrap();
        fs::write(place.path("notes.txt"), "A note.\n").unwrap();
        fs::write(place.path("empty.toml"), "[train]\nsteps = 1\n").unwrap();
        let job = format!("[base]\npath = '{}'\n[data]\nimages = 'images'\n", at("pipeline"));
        fs::write(place.path("job.toml"), job).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn filled(&self, text: &str) -> String {
        text.replace("SD3", &at("pipeline"))
            .replace("DIR/", &format!("{}/", self.0.path().display()))
    }

    fn check(&self, (code, line, words): Row) {
        let arguments: Vec<String> = line.split(' ').map(|word| self.filled(word)).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = hearth(&arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(code), "{line}\n{said}");
        assert!(!said.contains("panicked"), "{line}\n{said}");
        let errors: Vec<&str> =
            said.lines().filter_map(|line| line.strip_prefix("error: ")).collect();
        assert_eq!(errors.len(), 1, "{line}\n{said}");
        assert!(!errors[0].starts_with(char::is_uppercase), "{line}\n{said}");
        assert!(said.lines().any(|line| line.starts_with("hint: ")), "{line}\n{said}");
        for word in words {
            assert!(said.contains(&self.filled(word)), "{line}: {word:?} is missing from\n{said}");
        }
    }
}
