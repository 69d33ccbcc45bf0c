//! `hearth import` on configs as the other trainers' users have them: the jobs stand beside them as `.job.toml`, and
//! each is planned. `UPDATE_EXPECT=1` writes the jobs anew.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use expect_test::expect;

use crate::{command, said, text};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/import")
}

fn pixel() -> PathBuf {
    golden().join("../../../fuzz/seeds/pixel.png")
}

/// A copy of a trainer's configs in a folder of its own, with the images that they name.
fn place(trainer: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden().join(trainer)).unwrap() {
        let path = entry.unwrap().path();
        if !text(&path).ends_with(".job.toml") {
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let notes = folder.path().join("data/notes");
    fs::create_dir_all(&notes).unwrap();
    for name in ["train.jsonl", "valid.jsonl"] {
        fs::write(notes.join(name), "{\"prompt\": \"a\", \"completion\": \"b\"}\n").unwrap();
    }
    for (name, captions) in [("fox", 12), ("night", 5), ("day", 5), ("walk", 0)] {
        let images = folder.path().join("data").join(name);
        fs::create_dir_all(&images).unwrap();
        for index in 0..captions {
            fs::write(images.join(format!("{index:02}.png")), "").unwrap();
            fs::write(images.join(format!("{index:02}.txt")), "a fox\n").unwrap();
        }
    }
    folder
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    command(arguments).current_dir(folder).output().unwrap()
}

/// Imports a config, compares the job with the one beside it, and plans it on a large machine. A base in several files
/// is planned as the published model of the name, which needs none of them.
fn check(trainer: &str, config: &str, published: Option<&str>) {
    let folder = place(trainer);
    let output = run(folder.path(), &["import", config, "--out", "job.toml"]);
    assert!(output.status.success(), "{config}: {}", said(&output));
    let job = fs::read_to_string(folder.path().join("job.toml")).unwrap();
    let root = folder.path().canonicalize().unwrap();
    let job = job.replace(text(&root), "").replace(text(folder.path()), "");
    expect_test::expect_file![golden().join(trainer).join(format!("{config}.job.toml"))]
        .assert_eq(&job);
    // A plan needs no images.
    for name in ["fox", "night", "day", "walk"] {
        fs::remove_dir_all(folder.path().join("data").join(name)).unwrap();
    }
    // But those that samples are drawn of.
    fs::create_dir_all(folder.path().join("data/day")).unwrap();
    fs::copy(pixel(), folder.path().join("data/day/01.png")).unwrap();
    let machine = golden().join("../../../machines/apple-m2-ultra-192gb.toml");
    let mut unset = Vec::new();
    let mut arguments = vec!["plan", "job.toml", "--machine", text(&machine)];
    if let Some(name) = published {
        arguments.extend(["--base", name]);
        for key in ["vae", "text_encoders", "rest", "training_adapter"] {
            unset.push(format!("base.{key}=unset"));
        }
        for key in &unset {
            arguments.extend(["--set", key]);
        }
    }
    let planned = run(folder.path(), &arguments);
    assert!(planned.status.success(), "{config}: {}", said(&planned));
}

#[test]
fn ai_toolkit() {
    check("ai-toolkit", "flux.yaml", None);
    check("ai-toolkit", "qwen_edit.yaml", None);
    check("ai-toolkit", "sd35_full.yaml", None);
    check("ai-toolkit", "zimage_turbo.yaml", Some("Z-Image-Turbo"));
    check("ai-toolkit", "klein_edit.yaml", None);
}

#[test]
fn kohya() {
    check("kohya", "flux.sh", Some("FLUX.1-dev"));
    check("kohya", "flux_layers.toml", Some("FLUX.1-dev"));
    check("kohya", "sd3.toml", Some("stable-diffusion-3.5-medium"));
}

#[test]
fn musubi_tuner() {
    check("musubi", "qwen_edit.sh", Some("Qwen-Image-Edit-2509"));
    check("musubi", "kontext.toml", Some("FLUX.1-Kontext-dev"));
    check("musubi", "zimage_turbo.sh", Some("Z-Image-Turbo"));
    check("musubi", "klein.toml", Some("FLUX.2-klein-base-4B"));
}

#[test]
fn simple_tuner() {
    check("simple-tuner", "flux.json", None);
    check("simple-tuner", "edit.json", None);
    check("simple-tuner", "kandinsky.json", None);
    check("simple-tuner", "zimage_turbo.json", Some("Z-Image-Turbo"));
    check("simple-tuner", "klein.json", None);
}

#[test]
fn diffusion_pipe() {
    check("diffusion-pipe", "flux.toml", None);
    check("diffusion-pipe", "edit.toml", None);
    check("diffusion-pipe", "zimage_turbo.toml", Some("Z-Image-Turbo"));
    check("diffusion-pipe", "klein_edit.toml", Some("FLUX.2-klein-base-9B"));
}

#[test]
fn flymyai() {
    for config in ["qwen.yaml", "edit.yaml", "spark.yaml", "flux.yaml", "kandinsky.yaml"] {
        check("flymyai", config, None);
    }
}

#[test]
fn mlx_lm() {
    check("mlx-lm", "llama.yaml", None);
    check("mlx-lm", "qwen.yaml", None);
}

#[test]
fn one_trainer() {
    check("one-trainer", "flux.json", None);
    check("one-trainer", "sd3_full.json", None);
    check("one-trainer", "zimage_deturbo.json", Some("Z-Image"));
    check("one-trainer", "klein_lokr.json", None);
}

/// kohya's Prodigy and Adafactor, as most set them.
#[test]
fn optimizers_are_taken_over() {
    for (kind, settings, expected) in [
        (
            "Prodigy",
            "'decouple=True', 'd_coef=0.8', 'safeguard_warmup=True', 'betas=0.9,0.99'",
            "d_coef = 0.8 # optimizer_args.d_coef\nuse_bias_correction = false",
        ),
        (
            "Adafactor",
            "'scale_parameter=False', 'relative_step=False', 'warmup_init=False'",
            "scale_parameter = false # optimizer_args.scale_parameter\n",
        ),
        ("AdamWScheduleFree", "", "kind = \"adamw_schedule_free\" # optimizer_type\n"),
        ("Lion", "", "betas = [0.9, 0.99] # optimizer_args.betas (default)\n"),
    ] {
        let folder = place("kohya");
        let path = folder.path().join("sd3.toml");
        let typed = format!("optimizer_type = \"{kind}\"\noptimizer_args = [{settings}]");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen("optimizer_type = \"AdamW\"", &typed, 1)).unwrap();
        let output = run(folder.path(), &["import", "sd3.toml", "--out", "job.toml"]);
        assert!(output.status.success(), "{kind}: {}", said(&output));
        let job = fs::read_to_string(folder.path().join("job.toml")).unwrap();
        assert!(job.contains(expected), "{kind}: {job}");
    }
}

/// LoKr, LoHa, rsLoRA and LoRA+ as each trainer sets them.
#[test]
fn adapters_are_taken_over() {
    let lycoris = "{\"algo\": \"lokr\", \"linear_dim\": 10000, \"linear_alpha\": 1, \"factor\": 16,
        \"apply_preset\": {\"target_module\": [\"Attention\", \"FeedForward\"]}}";
    for (trainer, config, from, to, expected) in [
        (
            "ai-toolkit",
            "flux.yaml",
            "type: \"lora\"",
            "type: \"lokr\"\n        lokr_factor: 8",
            &["kind = \"lokr\"", "factor = 8", "full_matrix = true"][..],
        ),
        (
            "kohya",
            "sd3.toml",
            "network_module = \"networks.lora_sd3\"",
            "network_module = \"lycoris.kohya\"\nnetwork_args = ['algo=lokr', 'factor=8', 'decompose_both=True', 'rs_lora=True']",
            &["kind = \"lokr\"", "factor = 8", "decompose_both = true", "rslora = true", "comfyui"],
        ),
        (
            "kohya",
            "sd3.toml",
            "network_module = \"networks.lora_sd3\"",
            "network_module = \"networks.lora_sd3\"\nnetwork_args = ['loraplus_lr_ratio=16']",
            &["loraplus_lr_ratio = 16"],
        ),
        (
            "simple-tuner",
            "flux.json",
            "\"--lora_type\": \"standard\"",
            "\"--lora_type\": \"lycoris\", \"--lycoris_config\": \"lycoris.json\"",
            &["kind = \"lokr\"", "factor = 16", "full_matrix = true", "comfyui"],
        ),
        ("one-trainer", "flux.json", "{", "{\"peft_type\": \"LOHA\",", &["kind = \"loha\""]),
        (
            "one-trainer",
            "flux.json",
            "{",
            "{\"peft_type\": \"LOKR\", \"lokr_full_matrix\": true, \"lokr_decompose_factor\": -1,",
            &[
                "kind = \"lokr\"",
                "full_matrix = true # lokr_full_matrix",
                "lora_rank = 32: LoKr has",
            ],
        ),
    ] {
        let folder = place(trainer);
        fs::write(folder.path().join("lycoris.json"), lycoris).unwrap();
        let path = folder.path().join(config);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{config} has no {from}");
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
        let output = run(folder.path(), &["import", config, "--out", "job.toml"]);
        assert!(output.status.success(), "{trainer}: {}", said(&output));
        let job = fs::read_to_string(folder.path().join("job.toml")).unwrap();
        for part in expected {
            assert!(job.contains(part), "{trainer} {part}: {job}");
        }
    }
}

/// CLIP's text encoders as each trainer trains them, with their learning rates.
#[test]
fn text_encoders_are_taken_over() {
    let (clip, both) = ("text_encoders = [\"clip-l\"]", "text_encoders = [\"clip-l\", \"clip-g\"]");
    let sd3 = "network_train_unet_only = true";
    for (trainer, config, from, to, expected) in [
        (
            "kohya",
            "flux.sh",
            " --network_train_unet_only",
            " --text_encoder_lr 5e-6",
            &[
                &*format!("{clip} # network_train_unet_only (default)"),
                "text_encoder_targets = [\"q_proj\", \"k_proj\", \"v_proj\", \"out_proj\", \"fc1\", \"fc2\"]",
                "text_encoder_learning_rate = 5e-6 # text_encoder_lr",
            ][..],
        ),
        (
            "kohya",
            "sd3.toml",
            sd3,
            "text_encoder_lr = [1e-5, 0, 1e-6]",
            &[clip, "text_encoder_learning_rate = 1e-5 # text_encoder_lr"],
        ),
        (
            "kohya",
            "sd3.toml",
            sd3,
            "text_encoder_lr = [1e-5, 2e-5]",
            &[both, "text_encoder_learning_rate = [1e-5, 2e-5] # text_encoder_lr"],
        ),
        (
            "kohya",
            "sd3.toml",
            sd3,
            "unet_lr = 1e-4",
            &[
                both,
                "text_encoder_learning_rate = 5e-5 # learning_rate",
                "learning_rate = 0.0001 # unet_lr",
            ],
        ),
        (
            "kohya",
            "sd3.toml",
            sd3,
            "text_encoder_lr = 0",
            &["targets = \"kohya\" # what kohya trains (default)\n\n"],
        ),
        (
            "kohya",
            "sd3.toml",
            "network_module = \"networks.lora_sd3\"\nnetwork_dim = 32\nnetwork_alpha = 16\nnetwork_train_unet_only = true",
            "network_module = \"networks.lokr\"",
            &["their layers have LoRA alone, not lokr"],
        ),
        (
            "one-trainer",
            "flux.json",
            "\"text_encoder\": {\"train\": false",
            "\"text_encoder\": {\"learning_rate\": 1e-5",
            &[
                &*format!("{clip} # text_encoder.train (default)"),
                "text_encoder_learning_rate = 1e-5 # text_encoder.learning_rate",
            ],
        ),
        (
            "one-trainer",
            "flux.json",
            "\"text_encoder_2\": {\"train\": false, ",
            "\"text_encoder_2\": {",
            &["text_encoder_2.train: it is not trained, there it is if this is left out"],
        ),
        (
            "ai-toolkit",
            "flux.yaml",
            "train_text_encoder: false",
            "train_text_encoder: true\n        text_encoder_lr: 1e-5",
            &[
                &*format!("{clip} # train.train_text_encoder"),
                "text_encoder_learning_rate = 1e-5 # train.text_encoder_lr",
            ],
        ),
    ] {
        let job = imported_with(trainer, config, &[(config, from, to)]);
        for part in expected {
            assert!(job.contains(part), "{trainer} {to} {part}: {job}");
        }
    }
}

/// The job of a config whose files have changes: the file, what stands there, and what instead.
fn imported_with(trainer: &str, config: &str, changes: &[(&str, &str, &str)]) -> String {
    let folder = place(trainer);
    for (file, from, to) in changes {
        let path = folder.path().join(file);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{file} has no {from}");
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
    }
    let output = run(folder.path(), &["import", config, "--out", "job.toml"]);
    assert!(output.status.success(), "{trainer}: {}", said(&output));
    fs::read_to_string(folder.path().join("job.toml")).unwrap()
}

/// The sets of images of an imported job, for a file with a change.
fn imported_sets(trainer: &str, config: &str, file: &str, from: &str, to: &str) -> String {
    let job = imported_with(trainer, config, &[(file, from, to)]);
    let is_data = |section: &&str| section.starts_with("[data]]");
    job.split("\n[").filter(is_data).flat_map(|section| ["[", section, "\n"]).collect()
}

/// Regularisation images, and what the base says of images.
#[test]
fn priors_are_taken_over() {
    let subset = "[[datasets.subsets]]\nimage_dir = 'data/night'\nis_reg = true\nnum_repeats = 2\n[[datasets.subsets]]";
    let args = "--network_train_unet_only --prior_loss_weight 0.5";
    let kohya = [
        ("dataset.toml", "[[datasets.subsets]]", subset),
        ("flux.sh", "--network_train_unet_only", args),
    ];
    let concept = "[{\"path\": \"data/night\", \"type\": \"PRIOR_PREDICTION\"}, ";
    let aitk = "- folder_path: data/night\n          is_reg: true\n          prior_reg: true\n        - folder_path";
    let backend = "[{\"id\": \"n\", \"instance_data_dir\": \"data/night\", \"caption_strategy\": \"textfile\", \
                   \"is_regularisation_data\": true}, ";
    for (trainer, config, changes, expected) in [
        (
            "kohya",
            "flux.sh",
            &kohya[..],
            &["regularisation = true # ", "loss_weight = 0.5 # prior_loss_weight"][..],
        ),
        (
            "ai-toolkit",
            "flux.yaml",
            &[("flux.yaml", "- folder_path", aitk)],
            &["regularisation = true", "target = \"base\""],
        ),
        (
            "one-trainer",
            "flux.json",
            &[("concepts.json", "[", concept)],
            &["target = \"base\" # concepts[0].type"],
        ),
        (
            "simple-tuner",
            "flux.json",
            &[("backends.json", "[", backend)],
            &["target = \"base\" # backends[0].is_reg"],
        ),
    ] {
        let job = imported_with(trainer, config, changes);
        let set = job.split("[[data]]").nth(1).unwrap();
        assert!(!set.contains("repeats ="), "{trainer}: {set}");
        for part in expected {
            assert!(set.contains(part), "{trainer}: {part} is not in {set}");
        }
    }
}

/// Captions of several lines, or where that is not known since the folder is elsewhere.
#[test]
fn lines_and_wildcards_of_captions_are_taken_over() {
    let subset = "[[datasets.subsets]]\nenable_wildcard = true";
    let elsewhere = ["concepts.json", "backends.json"].map(|file| (file, "data/fox", "elsewhere"));
    for (trainer, config, change, expected) in [
        (
            "kohya",
            "flux.sh",
            ("dataset.toml", "[[datasets.subsets]]", subset),
            "caption_choice = \"wildcards\" # dataset.datasets[0].subsets[0].enable_wildcard\n",
        ),
        (
            "one-trainer",
            "flux.json",
            elsewhere[0],
            "caption_choice = \"line\" # concepts[0].text.prompt_source (default)\n",
        ),
        (
            "simple-tuner",
            "flux.json",
            elsewhere[1],
            "caption_choice = \"line\" # backends[0].disable_multiline_split (default)\n",
        ),
    ] {
        let job = imported_with(trainer, config, &[change]);
        assert!(job.contains(expected), "{trainer}: {expected} is not in {job}");
        let as_it_is = imported_with(trainer, config, &[]);
        assert!(!as_it_is.contains("caption_choice"), "{trainer}: {as_it_is}");
    }
}

#[test]
fn ranges_of_timesteps_are_taken_over() {
    let args = "--network_train_unet_only --min_timestep 200 --max_timestep 800";
    let job = imported_with("kohya", "flux.sh", &[("flux.sh", "--network_train_unet_only", args)]);
    for line in ["timestep_min = 200.0 # min_timestep", "timestep_max = 800.0 # max_timestep"] {
        assert!(job.contains(line), "{line} is not in {job}");
    }
    let change = ("flux.json", "\"masked_training\": false", "\"max_noising_strength\": 0.75");
    let job = imported_with("one-trainer", "flux.json", &[change]);
    assert!(job.contains("timestep_max = 750.0 # max_noising_strength"), "{job}");
    let range = "min_denoising_steps: 100\n        max_denoising_steps: 750";
    for (scheme, lines) in [
        ("linear_timesteps: true", ["timestep_max = 900.0 # ", "timestep_min = 250.0 # "]),
        // Shares of the draws: the sigmoid of normal numbers.
        ("timestep_type: sigmoid", ["timestep_max = 782.7", "timestep_min = 337.49"]),
    ] {
        let to = format!("{scheme}\n        {range}");
        let job = imported_with(
            "ai-toolkit",
            "flux.yaml",
            &[("flux.yaml", "linear_timesteps: true", &to)],
        );
        for line in lines {
            assert!(job.contains(line), "{line} is not in {job}");
        }
    }
}

/// Losses, their weights by timestep, and timesteps that are drawn more often.
#[test]
fn losses_are_taken_over() {
    let kohya = "--huber_c 0.2 --huber_schedule exponential --loss_type huber";
    let scaled = "--huber_c 0.2 --huber_scale 0.5 --huber_schedule constant --loss_type smooth_l1";
    let aitk = "loss_type: pseudo_huber\n        content_or_style: style";
    for (trainer, config, from, to, lines) in [
        (
            "kohya",
            "flux.sh",
            "--loss_type l2",
            kohya,
            &[
                "loss = \"pseudo_huber\" # loss_type",
                "huber_c = 0.2 # huber_c",
                "huber_schedule = \"exponential\" # huber_schedule",
            ][..],
        ),
        (
            "kohya",
            "flux.sh",
            "--loss_type l2",
            scaled,
            &[
                "loss = \"pseudo_smooth_l1\" # loss_type",
                "huber_c = 0.1 # huber_c times huber_scale",
            ],
        ),
        (
            "kohya",
            "flux.sh",
            "--loss_type l2",
            "--loss_type huber --min_snr_gamma 5",
            &[
                "huber_schedule = \"snr\" # huber_schedule (default)",
                "#   huber_schedule: sd-scripts stops",
                "#   min_snr_gamma = \"5\": for models without flow matching",
            ],
        ),
        (
            "simple-tuner",
            "flux.json",
            "{",
            "{\"loss_type\": \"huber\", \"huber_schedule\": \"snr\",",
            &["loss = \"pseudo_huber\"", "SimpleTuner's rises"],
        ),
        (
            "diffusion-pipe",
            "flux.toml",
            "epochs =",
            "smooth_l1_beta = 0.4\nepochs =",
            &["loss = \"smooth_l1\" # smooth_l1_beta", "huber_c = 0.4 # smooth_l1_beta"],
        ),
        (
            "one-trainer",
            "flux.json",
            "{",
            "{\"mse_strength\": 0.0, \"huber_strength\": 1.0, \"loss_weight_fn\": \"SIGMA\",",
            &[
                "loss = \"huber\" # huber_strength",
                "huber_c = 1.0 # huber_delta (default)",
                "loss_weighting = \"sigma\" # loss_weight_fn",
            ],
        ),
        (
            "one-trainer",
            "flux.json",
            "{",
            "{\"mae_strength\": 0.5,",
            &["#   mae_strength = 0.5: the loss is one function"],
        ),
        (
            "ai-toolkit",
            "flux.yaml",
            "linear_timesteps: true",
            aitk,
            &[
                "loss = \"pseudo_smooth_l1\" # train.loss_type",
                "huber_c = 0.01 # the threshold of `pseudo_huber` (default)",
                "timestep_bias = \"style\" # train.content_or_style",
            ],
        ),
        (
            "ai-toolkit",
            "flux.yaml",
            "linear_timesteps: true",
            "linear_timesteps2: true",
            &[
                "loss_weighting = \"half_bell\" # train.linear_timesteps2",
                "weighting_scheme = \"uniform\" # train.linear_timesteps2",
            ],
        ),
    ] {
        let job = imported_with(trainer, config, &[(config, from, to)]);
        for line in lines {
            assert!(job.contains(line), "{trainer}: {line} is not in {job}");
        }
    }
}

/// The masks of each trainer.
#[test]
fn masks_are_taken_over() {
    let masked = "--network_train_unet_only --masked_loss";
    for (trainer, config, changes, expected) in [
        (
            "ai-toolkit",
            "flux.yaml",
            &[(
                "flux.yaml",
                "caption_ext: \"txt\"",
                "mask_path: data/walk\n          mask_min_value: 0.2",
            )][..],
            "masks = \"data/walk\" # datasets[0].mask_path\nunmasked_weight = 0.2 # datasets[0].mask_min_value\n",
        ),
        (
            "kohya",
            "flux.sh",
            &[
                ("flux.sh", "--network_train_unet_only", masked),
                (
                    "dataset.toml",
                    "num_repeats = 10",
                    "num_repeats = 10\nconditioning_data_dir = 'data/walk'",
                ),
            ],
            "masks = \"data/walk\" # dataset.datasets[0].subsets[0].conditioning_data_dir\n",
        ),
        (
            "kohya",
            "flux.sh",
            &[("dataset.toml", "num_repeats = 10", "num_repeats = 10\nalpha_mask = true")],
            "masks = \"alpha\" # dataset.datasets[0].subsets[0].alpha_mask\n",
        ),
        (
            "one-trainer",
            "flux.json",
            &[(
                "flux.json",
                "\"masked_training\": false",
                "\"masked_training\": true, \"unmasked_weight\": 0.3",
            )],
            "masks = \"beside\" # masked_training\nunmasked_weight = 0.3 # unmasked_weight\n\
             unmasked_probability = 0.1 # unmasked_probability (default)\n",
        ),
        (
            "diffusion-pipe",
            "edit.toml",
            &[("edit-dataset.toml", "control_path", "mask_path = 'data/walk'\ncontrol_path")],
            "masks = \"data/walk\" # dataset_file.directory[0].mask_path\n",
        ),
        (
            "simple-tuner",
            "flux.json",
            &[
                (
                    "backends.json",
                    "\"id\": \"fox\",",
                    "\"id\": \"fox\", \"conditioning_data\": \"white\",",
                ),
                (
                    "backends.json",
                    "[",
                    "[{\"id\": \"white\", \"dataset_type\": \"conditioning\", \"conditioning_type\": \"mask\", \
                     \"instance_data_dir\": \"data/walk\"},",
                ),
            ],
            "masks = \"data/walk\" # backends[1].conditioning_data\n",
        ),
    ] {
        let job = imported_with(trainer, config, changes);
        assert!(job.contains(expected), "{trainer}: {expected} is not in {job}");
    }
}

/// Several data sets become as many, each with its own settings.
#[test]
fn data_sets_are_taken_over() {
    let kohya = "[[datasets.subsets]]\nimage_dir = \"data/night\"\nshuffle_caption = false\n\
                 [[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = \"data/fox\"\n\n  \
                 [[datasets]]\nresolution = 1024\nbatch_size = 2\n[[datasets.subsets]]";
    expect![[r#"
        [[data]]
        images = "data/night" # dataset.datasets[0].subsets[0].image_dir
        resolution = 1024 # dataset.datasets[0].resolution
        bucket_step = 64 # dataset.datasets[0].subsets[0].bucket_reso_steps (default)
        caption_dropout = 0.0 # dataset.datasets[0].subsets[0].caption_dropout_rate (default)

        [[data]]
        images = "data/fox" # dataset.datasets[1].subsets[0].image_dir
        resolution = 512 # dataset.datasets[1].resolution
        caption_dropout = 0.0 # dataset.datasets[1].subsets[0].caption_dropout_rate (default)
        shuffle_tags = true # dataset.general.shuffle_caption
        keep_tags = 1 # dataset.general.keep_tokens

        [[data]]
        images = "data/fox" # dataset.datasets[2].subsets[0].image_dir
        resolution = 1024 # dataset.datasets[2].resolution
        repeats = 10 # dataset.datasets[2].subsets[0].num_repeats
        caption_dropout = 0.05 # dataset.datasets[2].subsets[0].caption_dropout_rate
        shuffle_tags = true # dataset.general.shuffle_caption
        keep_tags = 1 # dataset.general.keep_tokens
        flip = true # dataset.datasets[2].subsets[0].flip_aug
        trigger = "zwx fox" # dataset.datasets[2].subsets[0].caption_prefix

    "#]]
    .assert_eq(&imported_sets("kohya", "flux.sh", "dataset.toml", "[[datasets.subsets]]", kohya));
    let musubi = "[[datasets]]\nimage_directory = \"data/fox\"\nresolution = 768\nnum_repeats = 3\n\
                  control_directory = \"data/walk\"\n\n[[datasets]]";
    expect![[r#"
        [[data]]
        images = "data/fox" # dataset.datasets[0].image_directory
        resolution = 768 # dataset.datasets[0].resolution
        repeats = 3 # dataset.datasets[0].num_repeats
        caption_dropout = 0.0 # no captions are dropped (default)
        references = "data/walk" # dataset.datasets[0].control_directory
        reference_resolution = 1024 # dataset.datasets[1].control_resolution

        [[data]]
        images = "data/night" # dataset.datasets[1].image_directory
        resolution = 1024 # dataset.general.resolution
        caption_dropout = 0.0 # no captions are dropped (default)
        references = "data/day" # dataset.datasets[1].control_directory

    "#]]
    .assert_eq(&imported_sets("musubi", "qwen_edit.sh", "edit.toml", "[[datasets]]", musubi));
    let aitk = "        - folder_path: data/night\n          resolution: 768\n          loss_multiplier: 0.5\n          \
                flip_x: true\n          num_repeats: 2\n        - folder_path";
    expect![[r#"
        [[data]]
        images = "data/night" # datasets[0].folder_path
        resolution = 768 # datasets[0].resolution
        repeats = 2 # datasets[0].num_repeats
        caption_dropout = 0.0 # datasets[0].caption_dropout_rate (default)
        flip = true # datasets[0].flip_x
        loss_weight = 0.5 # datasets[0].loss_multiplier
        trigger = "zwx fox" # trigger_word

        [[data]]
        images = "data/fox" # datasets[1].folder_path
        resolution = [512, 768, 1024] # datasets[1].resolution
        caption_dropout = 0.05 # datasets[1].caption_dropout_rate
        trigger = "zwx fox" # trigger_word

    "#]]
    .assert_eq(&imported_sets(
        "ai-toolkit",
        "flux.yaml",
        "flux.yaml",
        "        - folder_path",
        aitk,
    ));
}

#[test]
fn directories_backends_and_concepts_are_sets() {
    let pipe = "[[directory]]\npath = 'data/fox'\nnum_repeats = 3\nresolutions = [512, 768]\nshuffle_tags = true\n\
                control_path = 'data/walk'\n[[directory]]";
    expect![[r#"
        [[data]]
        images = "data/fox" # dataset_file.directory[0].path
        resolution = [512, 768] # dataset_file.directory[0].resolutions
        repeats = 3 # dataset_file.directory[0].num_repeats
        bucket_step = 32 # sides are multiples of 32 (default)
        caption_dropout = 0.0 # uncond_fraction (default)
        shuffle_tags = true # dataset_file.directory[0].shuffle_tags
        keep_tags = 0 # all tags are shuffled (default)
        references = "data/walk" # dataset_file.directory[0].control_path

        [[data]]
        images = "data/night" # dataset_file.directory[1].path
        resolution = 1024 # dataset_file.resolutions
        caption_dropout = 0.0 # uncond_fraction (default)
        references = "data/day" # dataset_file.directory[1].control_path

    "#]]
    .assert_eq(&imported_sets(
        "diffusion-pipe",
        "edit.toml",
        "edit-dataset.toml",
        "[[directory]]",
        pipe,
    ));
    let tuner = "[{\"id\": \"night\", \"instance_data_dir\": \"data/night\", \"caption_strategy\": \"textfile\", \
                 \"resolution\": 512, \"instance_prompt\": \"dark\", \"prepend_instance_prompt\": true}, ";
    expect![[r#"
        [[data]]
        images = "data/night" # backends[0].instance_data_dir
        resolution = 512 # backends[0].resolution
        caption_dropout = 0.05 # caption_dropout_probability
        trigger = "dark" # backends[0].instance_prompt

        [[data]]
        images = "data/fox" # backends[1].instance_data_dir
        resolution = 1024 # backends[1].resolution
        repeats = 5 # backends[1].repeats + 1
        caption_dropout = 0.05 # caption_dropout_probability
        crop = "random" # backends[1].crop_style

    "#]]
    .assert_eq(&imported_sets("simple-tuner", "flux.json", "backends.json", "[", tuner));
    let one = "[{\"path\": \"data/night\", \"loss_weight\": 0.25, \"balancing\": 1.5, \"image\": \
               {\"enable_resolution_override\": true, \"resolution_override\": \"768\"}}, ";
    expect![[r#"
        [[data]]
        images = "data/night" # concepts[0].path
        resolution = 768 # concepts[0].image.resolution_override
        repeats = 2 # concepts[0].balancing
        caption_dropout = 0.05 # text_encoder.dropout_probability
        loss_weight = 0.25 # concepts[0].loss_weight
        crop = "random" # concepts[0].image.enable_crop_jitter (default)

        [[data]]
        images = "data/fox" # concepts[1].path
        resolution = 768 # resolution
        repeats = 2 # concepts[1].balancing
        caption_dropout = 0.05 # text_encoder.dropout_probability
        shuffle_tags = true # concepts[1].text.enable_tag_shuffling
        keep_tags = 2 # concepts[1].text.keep_tags_count
        flip = true # concepts[1].image.enable_random_flip
        crop = "centre" # concepts[1].image.enable_crop_jitter

    "#]]
    .assert_eq(&imported_sets("one-trainer", "flux.json", "concepts.json", "[", one));
}

/// What a config with a change is refused with.
fn refused(trainer: &str, config: &str, from: &str, to: &str) -> String {
    let folder = place(trainer);
    let path = folder.path().join(config);
    let before = fs::read_to_string(&path).unwrap();
    assert!(before.contains(from), "{config} has no {from}");
    fs::write(&path, before.replacen(from, to, 1)).unwrap();
    let output = run(folder.path(), &["import", config, "--out", "job.toml"]);
    assert_eq!(output.status.code(), Some(1), "{config}: {}", said(&output));
    assert!(!folder.path().join("job.toml").exists(), "a job was written");
    assert!(said(&output).contains("\nhint: "), "{}", said(&output));
    said(&output)
}

/// The key of the config is that of the right set.
#[test]
fn a_mistake_in_a_set_is_told_with_its_key() {
    let to = "- folder_path: a\n          caption_dropout_rate: 5\n        - folder_path";
    let said = refused("ai-toolkit", "flux.yaml", "- folder_path", to);
    for part in ["`datasets[0].caption_dropout_rate` has no valid job", "data[0].caption_dropout"] {
        assert!(said.contains(part), "{said}");
    }
}

fn says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is missing from {said}");
    }
}

/// FLUX.2 dev, and adapters that act in training.
#[test]
fn what_newer_models_cannot_be_imported_with_says_why() {
    says(
        &refused("musubi", "klein.toml", "klein-base-4b", "dev"),
        &["model_version = \"dev\": hearth trains FLUX.2 klein, not dev"],
    );
    says(
        &refused("ai-toolkit", "zimage_turbo.yaml", "type: \"lora\"", "type: \"lokr\""),
        &["model.assistant_lora_path", "beside a LoRA alone"],
    );
    says(
        &refused("one-trainer", "klein_lokr.json", "klein-base-9B", "dev"),
        &["base_model_name = \"black-forest-labs/FLUX.2-dev\": hearth trains FLUX.2 klein"],
    );
    says(
        &refused(
            "diffusion-pipe",
            "zimage_turbo.toml",
            "['models/z",
            "['a.safetensors', 'models/z",
        ),
        &["model.merge_adapters", "one adapter beside"],
    );
}

#[test]
fn what_cannot_be_imported_says_why() {
    let aitk = |from, to| refused("ai-toolkit", "flux.yaml", from, to);
    says(
        &aitk("lr: 1e-4", "lr: fast"),
        &["`train.lr` of the config is \"fast\", accepted is a number"],
    );
    says(
        &aitk("type: \"lora\"", "type: locon"),
        &["network.type = \"locon\": hearth has LoRA, DoRA and LoKr"],
    );
    says(
        &aitk("optimizer: \"adamw8bit\"", "optimizer: automagic"),
        &["train.optimizer = \"automagic\"", "AdamW"],
    );
    says(&aitk("is_flux: true", "is_xl: true"), &["hearth trains SD3"]);
    says(
        &aitk("linear: 16", "linear: 100000"),
        &["`network.linear` has no valid job", "adapter.rank", "4096"],
    );
    says(&aitk("config:", "*config:"), &["not YAML"]);
    says(
        &refused("kohya", "flux.sh", "dataset.toml", "gone.toml"),
        &["`dataset_config` names a file that is not there", "gone.toml"],
    );
    says(
        &refused("kohya", "flux.sh", "$MODELS/ae", "$ELSEWHERE/ae"),
        &["not a plain shell script", "$ELSEWHERE"],
    );
    says(
        &refused("kohya", "dataset.toml", "0.05", "0.5"),
        &["this is the file of the data sets alone", "dataset_config"],
    );
    says(
        &refused("kohya", "sd3.toml", "networks.lora_sd3", "networks.lora"),
        &["network_module = \"networks.lora\""],
    );
    says(
        &refused("simple-tuner", "flux.json", "\"standard\"", "\"lycoris\""),
        &["`lycoris_config`"],
    );
    says(
        &refused("simple-tuner", "flux.json", "backends.json", "gone.json"),
        &["`data_backend_config` names a file"],
    );
    says(
        &refused("simple-tuner", "backends.json", "1024", "768"),
        &["this is the list of data backends alone"],
    );
    says(
        &refused("diffusion-pipe", "flux.toml", "rank = 32", "rank = 32\nalpha = 16"),
        &["adapter.alpha = 16"],
    );
    says(
        &refused("diffusion-pipe", "edit.toml", "type = 'qwen_image'", "type = 'wan'"),
        &["model.type = \"wan\""],
    );
    says(
        &refused("diffusion-pipe", "edit.toml", "edit-dataset.toml", "gone.toml"),
        &["`dataset` names a file"],
    );
    says(
        &refused("flymyai", "qwen.yaml", "Qwen/Qwen-Image", "Qwen/Qwen2-VL"),
        &["hearth trains SD3"],
    );
    says(
        &refused("flymyai", "qwen.yaml", "rank: 16", "rank: big"),
        &["`rank` of the config is \"big\""],
    );
    says(
        &refused("mlx-lm", "llama.yaml", "optimizer: adamw", "optimizer: adafactor"),
        &["optimizer_config.adafactor.relative_step", "set it to false, with a learning rate"],
    );
    says(
        &refused("mlx-lm", "llama.yaml", "-Instruct", "-Instruct-4bit"),
        &["mlx's quantised weights"],
    );
    says(
        &refused("one-trainer", "flux.json", "\"LORA\"", "\"EMBEDDING\""),
        &["training_method = \"EMBEDDING\""],
    );
    says(&refused("kohya", "sd3.toml", "[saving]", "[saving"), &["not TOML", "line"]);
}

#[test]
fn what_is_no_config_is_refused_with_what_was_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |content: &[u8], parts: &[&str]| {
        let path = folder.path().join("config");
        fs::write(&path, content).unwrap();
        let output = run(folder.path(), &["import", "config"]);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(output.stdout.is_empty() && said.len() < 2000, "{said}");
        for part in parts {
            assert!(said.contains(part), "{part:?} is missing from {said}");
        }
    };
    fails(
        b"a: 1\n",
        &["not a config of a trainer", "looked for ai-toolkit: `config.process`", "kohya"],
    );
    fails(b"{\"a\": 1}", &["not a config of a trainer"]);
    fails(b"once upon a time\n", &["not a config of a trainer", "JSON, TOML, YAML"]);
    fails(b"{\"a\": ", &["config is not JSON"]);
    fails(b"", &["config"]);
    fails(&[0xff, 0xfe, 0x80], &["cannot read config", "UTF-8"]);
    fails(&vec![b'#'; (1 << 20) + 1], &["config has more than 1048576 bytes"]);
    fails("[".repeat(500_000).as_bytes(), &["config is not"]);
    let more = ('a'..='y')
        .zip('b'..='z')
        .map(|(from, to)| format!("{to}: &{to} [{}]\n", vec![format!("*{from}"); 9].join(", ")));
    let laughs: String = std::iter::once("a: &a [x, x, x, x]\n".into()).chain(more).collect();
    fails(laughs.as_bytes(), &["config is not YAML", "more than 100000 values"]);
}

#[test]
fn unknown_keys_are_told_and_nothing_is_overwritten() {
    let folder = place("ai-toolkit");
    let printed = run(folder.path(), &["import", "flux.yaml"]);
    let warned = said(&printed);
    assert!(printed.status.success(), "{warned}");
    let unknown = "warning: train.lr_schedulr = \"cosine\": no key of ai-toolkit; did you mean `train.lr_scheduler`?";
    assert!(warned.contains(unknown), "{warned}");
    let json = run(folder.path(), &["import", "flux.yaml", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["trainer"], "ai-toolkit");
    assert!(json["notes"].as_array().unwrap().iter().any(|note| note["verdict"] == "unknown"));
    let job = folder.path().join("mine.toml");
    fs::write(&job, "precious").unwrap();
    let output = run(folder.path(), &["import", "flux.yaml", "--out", "mine.toml"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("file exists already: mine.toml"), "{}", said(&output));
    assert_eq!(fs::read_to_string(&job).unwrap(), "precious");
}
