//! Several sets of images in one job.

use super::super::data_sets::{COMMON_KEYS, DataSets};
use super::*;

/// Two sets that differ, with a key that holds for both.
const SETS: &str = "\
[base]
path = \"model\"
[[data]]
images = \"cats\"
repeats = 2
trigger = \"sks\"
resolution = [768, 512]
[[data]]
images = \"dogs\"
flip = true
loss_weight = 0.5
cache = \"shared\"
";

fn sets(text: &str, arguments: &[&str]) -> Result<DataSets, ConfigError> {
    run(text, arguments).map(|config| config.data.images().unwrap().0.clone())
}

fn said(text: &str, arguments: &[&str]) -> String {
    sets(text, arguments).unwrap_err().to_string()
}

#[test]
fn each_set_has_its_own_keys() {
    let sets = sets(SETS, &[]).unwrap();
    let names: Vec<_> = sets.iter().map(|set| set.images.file_name().unwrap()).collect();
    assert_eq!(names, ["cats", "dogs"]);
    assert_eq!(sets.iter().map(|set| set.repeats).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(sets.iter().map(|set| set.flip).collect::<Vec<_>>(), [false, true]);
    assert_eq!(sets[1].loss_weight, 0.5);
    assert_eq!(sets[0].resolution.iter().collect::<Vec<_>>(), [512, 768]);
    assert_eq!(sets.triggers(), ["sks"]);
    // The cache holds for all, wherever it is typed.
    assert!(sets.iter().all(|set| set.cache.as_ref().unwrap().ends_with("shared")));
    let resolution = |side| sets.resolution_change(side);
    assert_eq!(resolution(768), "data[1].resolution = 768");
    assert_eq!(resolution(640), "data[0].resolution = [512, 640] and data[1].resolution = 640");
    assert_eq!(resolution(256), "data[0].resolution = 256 and data[1].resolution = 256");
}

#[test]
fn the_command_line_sets_a_key_of_all_sets_or_of_one() {
    let repeats = |argument: &str| -> Vec<u64> {
        sets(SETS, &[argument]).unwrap().iter().map(|set| set.repeats).collect()
    };
    assert_eq!(repeats("data.repeats=5"), [5, 5]);
    assert_eq!(repeats("data.repeats=unset"), [1, 1]);
    assert_eq!(repeats("data[1].repeats=5"), [2, 5]);
    assert_eq!(repeats("data.1.repeats=5"), [2, 5]);
    assert_eq!(repeats("data[0].repeats=unset"), [1, 1]);
    let one = sets(SETS, &["data=[{images='x', flip=true}]"]).unwrap();
    assert_eq!((one.n_sets(), one.key(0, "flip")), (1, "data.flip".to_owned()));
    let after = |text: &str| sets(text, &["data[0].repeats=7"]).unwrap()[0].repeats;
    assert_eq!([after(SETS), after(SHORTEST)], [7, 7]);
}

#[test]
fn mistakes_in_a_set_name_it() {
    let with = |line: &str| format!("{SETS}{line}\n");
    for (said, expected) in [
        (
            said(&with("repeats = 0"), &[]),
            "`data[1].repeats` is 0, accepted is a whole number, at least 1: ",
        ),
        (
            said(&with("repaets = 3"), &[]),
            "unknown key `data[1].repaets`, did you mean `data[1].repeats`?: ",
        ),
        (said(&with("rank = 3"), &[]), "unknown key `data[1].rank`, `rank` belongs to [adapter]: "),
        (said(&with("[[data]]\nflip = true"), &[]), "`data[2].images` is not set"),
        (
            said(SETS, &["data[2].flip=true"]),
            "unknown key `data[2]`, the job has 2 sets of images, data[0] to data[1]: ",
        ),
        (
            said(SHORTEST, &["data[1].flip=true"]),
            "unknown key `data[1]`, the job has one set of images, data[0]: ",
        ),
        (
            said(SETS, &["data[0].resolution=100"]),
            "`data[0].resolution` is 100, accepted is a whole number, or a list of different ones, a multiple of 16",
        ),
        (
            said(SETS, &["data.resolution=[512, 512]"]),
            "`data.resolution` is [512, 512], accepted is a whole number, or a list of different ones",
        ),
        (said(SETS, &["data.resolution=[]"]), "`data.resolution` is [], accepted is"),
        (said(&with("draw_count = 3"), &[]), "`data[1].draw_count` has no effect with data.draw"),
        (
            said(SETS, &["data=[]"]),
            "`data` is [], accepted is a table of keys, or at least one [[data]]: ",
        ),
        (
            said(SETS, &["train.stop_after_plateau=3"]),
            "`train.stop_after_plateau` has no effect with data.validation = 0",
        ),
        (
            said(SETS, &["train.validate_every=3"]),
            "`train.validate_every` has no effect with data.validation = 0",
        ),
        (said(SETS, &["text.path=x"]), "`data.images` has no effect with text.path"),
    ] {
        assert!(said.starts_with(expected), "{said}\ninstead of\n{expected}");
    }
}

/// Something has to be learnt, and a base has to be there to say what it would say.
#[test]
fn images_of_priors_need_others() {
    for (said, expected) in [
        (
            said(SHORTEST, &["data.regularisation=true"]),
            "`data.regularisation` has no effect with no other set of images: ",
        ),
        (
            said(SETS, &["data.target=base"]),
            "`data.target` has no effect with no set of images to learn: ",
        ),
        (
            said(SETS, &["data[0].regularisation=true"]),
            "`data[0].repeats` has no effect with data.regularisation = true: ",
        ),
        (
            said(SETS, &["data[1].target=base", "adapter.kind=full"]),
            "`data.target = \"base\"` is not possible with `adapter.kind = \"full\"`: ",
        ),
    ] {
        assert!(said.starts_with(expected), "{said}\ninstead of\n{expected}");
    }
    let sets = sets(SETS, &["data[1].target=base", "data[1].regularisation=true"]).unwrap();
    assert!(sets.has_base_target() && sets[1].regularisation && !sets[0].regularisation);
}

#[test]
fn a_key_of_the_whole_job_has_one_value() {
    for key in COMMON_KEYS {
        let values = if key == "cache" { ["\"a\"", "\"b\""] } else { ["64", "32"] };
        let of = |values: [&str; 2]| {
            let set = |value| format!("[[data]]\nimages = \"x\"\n{key} = {value}\n");
            format!("[base]\npath = \"m\"\n{}", values.map(set).concat())
        };
        let said = said(&of(values), &[]);
        assert!(
            said.starts_with(&format!("`data.{key}` holds for all of [[data]], it is ")),
            "{said}"
        );
        assert!(said.contains("job.toml:5:") && said.contains("job.toml:8:"), "{said}");
        sets(&of([values[0]; 2]), &[]).unwrap();
    }
}

#[test]
fn resolved_sets_mean_the_same() {
    for arguments in [&[][..], &["data.validation=3"], &["data[1].validation=0.25"]] {
        let before = run(SETS, arguments).unwrap();
        let resolved = before.resolved();
        assert_eq!(resolved.matches("[[data]]").count(), 2, "{resolved}");
        assert_eq!(before, run(&resolved, &[]).unwrap(), "{resolved}");
    }
    let values: Vec<_> = run(SETS, &[]).unwrap().values().map(|(key, _)| key).collect();
    assert!(["data[0].images", "data[1].flip"].iter().all(|key| values.contains(&(*key).into())));
}

/// One set is the same job however it is written, so that it finds its cache and its checkpoints.
#[test]
fn one_set_is_a_job_like_any_other() {
    let list = SHORTEST.replace("[data]", "[[data]]");
    let (one, other) = (run(SHORTEST, &[]).unwrap(), run(&list, &[]).unwrap());
    let named = |config: &RunConfig| -> Vec<_> {
        let path = |value: &String| value.contains('/');
        config.values().filter(|(_, value)| !path(value)).collect()
    };
    assert_eq!(named(&one), named(&other));
}
