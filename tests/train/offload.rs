//! Block offloading: the same bits as without, in less device memory and in as much as was planned. On the CPU,
//! where it gains nothing.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use trainer::event::Event;
use trainer::text::Tokenizer;

use super::{Job, check_memory, events, losses, trained};
use crate::{printed, text};

fn validations(events: &[Event]) -> Vec<f64> {
    let mut losses = Vec::new();
    for event in events {
        if let Event::Validation { loss, .. } = event {
            losses.push(*loss);
        }
    }
    losses
}

/// Compares two runs that differ in where the blocks are.
fn check(plain: &Path, offloaded: &Path) {
    let [plain, offloaded] = [plain, offloaded].map(events);
    assert!(losses(&plain).len() > 2);
    assert_eq!(losses(&plain), losses(&offloaded));
    assert_eq!(validations(&plain), validations(&offloaded));
    let [taken, planned] = check_memory(&offloaded);
    assert_eq!(taken, planned);
    assert!(taken < check_memory(&plain)[0]);
}

#[test]
fn image_models_train_the_same() {
    let job = Job::new();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    let base = format!("base.path={}", text(&demo));
    let ways: [&[&str]; 3] = [
        &["train.recompute=none"],
        &["train.recompute=alternate", "base.quantise=int8"],
        &["train.recompute=block", "base.dtype=bf16", "adapter.kind=dora"],
    ];
    for (index, way) in ways.into_iter().enumerate() {
        let [plain, offloaded] = ["none", "blocks"].map(|offload| {
            let offload = &format!("machine.offload={offload}");
            let set = [&[&base[..], offload, "train.steps=3", "output.save_every=3"], way].concat();
            job.finish(&format!("{index}-{offload}"), &set, &[])
        });
        check(&plain, &offloaded);
        assert!(trained(&plain) == trained(&offloaded), "{way:?}");
    }
    let decided = fs::read_to_string(job.path("0-machine.offload=blocks/config.toml")).unwrap();
    assert!(decided.contains("offload = \"blocks\""), "{decided}");
}

#[test]
fn a_run_resumes_with_blocks_elsewhere() {
    let job = Job::new();
    let set = |steps| ["machine.offload=blocks", steps];
    job.finish("run", &set("train.steps=2"), &[]);
    let resumed = job.finish("run", &["train.steps=4"], &["--resume"]);
    let whole = job.finish("whole", &set("train.steps=4"), &[]);
    assert!(trained(&resumed) == trained(&whole));
}

/// The language model of the golden files with seven blocks instead of two, each of them there again.
fn model(folder: &Path) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama/learning");
    let model = folder.join("model");
    fs::create_dir(&model).unwrap();
    let config = fs::read_to_string(golden.join("model/config.json")).unwrap();
    let config = config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 7");
    fs::write(model.join("config.json"), config).unwrap();
    let bytes = fs::read(golden.join("model/model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<(String, TensorView<'_>)> = Vec::new();
    for (name, view) in file.tensors() {
        for index in 0..7 {
            let layer = |index| format!(".layers.{index}.");
            let again = name.replace(&layer(index % 2), &layer(index));
            if again != name || index < 2 && name.contains(&layer(index)) {
                all.push((again, view.clone()));
            }
        }
        if !name.contains(".layers.") {
            all.push((name, view));
        }
    }
    safetensors::serialize_to_file(all, None, &model.join("model.safetensors")).unwrap();
    Tokenizer::bytes().save(&model).unwrap();
    fs::copy(golden.join("texts.jsonl"), folder.join("texts.jsonl")).unwrap();
    model
}

const TEXTS: &str = "
[base]
path = 'model'
dtype = 'bf16'
[text]
path = 'texts.jsonl'
length = 64
validation = 0.2
[adapter]
rank = 4
targets = ['q_proj', 'v_proj', 'down_proj']
[train]
steps = 4
batch_size = 2
validate_every = 2
[output]
folder = 'run'
save_every = 'off'
";

#[test]
fn language_models_train_the_same() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let job = folder.path().join("job.toml");
    fs::write(&job, TEXTS).unwrap();
    for quantise in ["none", "nf4"] {
        let [plain, second, all] = ["none", "alternate", "blocks"].map(|offload| {
            let out = folder.path().join(format!("{quantise}-{offload}"));
            let set = [format!("machine.offload={offload}"), format!("base.quantise={quantise}")];
            let set = set.iter().flat_map(|value| ["--set", value]);
            let words = ["train", text(&job), "--out", text(&out), "--quiet"];
            printed(&words.into_iter().chain(set).collect::<Vec<_>>());
            out
        });
        check(&plain, &second);
        check(&second, &all);
        let adapter = "adapter/peft/adapter_model.safetensors";
        let [plain, second, all] =
            [plain, second, all].map(|run| fs::read(run.join(adapter)).unwrap());
        assert!(plain == second && plain == all, "{quantise}");
    }
}

#[test]
fn trained_blocks_are_not_offloaded() {
    let job = Job::new();
    job.remove("[adapter]\nrank = 4\n");
    let words = job.fail(&["machine.offload=blocks", "adapter.kind=full"], &[]);
    assert!(words.contains("`machine.offload` has no effect with adapter.kind"), "{words}");
}
