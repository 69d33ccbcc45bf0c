//! The benchmark job against numbers that PyTorch recorded (`tests/golden/dit_lora`), and `bench step`
//! and `bench ops` as they are run.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use compute::{Device, DeviceKind, Dtype, Quantisation, Shape, Tensor};
use safetensors::SafeTensors;
use serde_json::Value;
use trainer::TrainerError;
use trainer::bench::workload::{
    RandomWeightInit, WeightInit, Workload, WorkloadConfig, WorkloadJob,
};
use trainer::model::files::UploadTarget;
use trainer::model::offload::Offload;
use trainer::model::recompute::Recompute;
use weights::Catalog;
use weights::load::{LoadOptions, LoadRequest, load};

use crate::{hearth, printed, said};

const GOLDEN: WorkloadConfig =
    WorkloadConfig { name: "golden", width: 128, n_blocks: 2, tokens: 48, samples: 2 };

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/dit_lora")
}

/// The recorded weights and inputs, in the format asked for.
struct Recorded<'d> {
    device: &'d Device,
    base: Catalog,
    golden: Catalog,
}

impl<'d> Recorded<'d> {
    fn new(device: &'d Device) -> Self {
        let open = |name: &str| Catalog::open(&folder().join(name)).unwrap();
        Self { device, base: open("base.safetensors"), golden: open("golden.safetensors") }
    }
}

impl WeightInit for Recorded<'_> {
    fn tensor(
        &mut self,
        name: &str,
        shape: Shape,
        dtype: Dtype,
        _: f32,
    ) -> compute::Result<Tensor> {
        let (catalog, name) = match name.rsplit('.').next() {
            Some("A" | "B") => (&self.golden, format!("lora0.{name}")),
            Some("x" | "c" | "target") => (&self.golden, format!("in.{name}")),
            _ => (&self.base, name.to_owned()),
        };
        let as_stored = match dtype {
            Dtype::Bf16 => weights::FileDtype::Bf16,
            Dtype::F16 => weights::FileDtype::F16,
            _ => weights::FileDtype::F32,
        };
        let info = catalog.find(&name).unwrap();
        let mut tensor = self.device.zeros(shape, dtype)?;
        let read = compute::fill_all(vec![&mut tensor], |_, parts| -> Result<(), TrainerError> {
            let wanted = parts
                .into_iter()
                .map(|part| LoadRequest::whole(info, as_stored, UploadTarget(part)));
            Ok(load(catalog, wanted.collect(), LoadOptions::default(), &|_| true)?)
        });
        read.unwrap();
        Ok(tensor)
    }
}

/// The recorded numbers by name, as f64.
fn recorded() -> HashMap<String, Vec<f64>> {
    let bytes = std::fs::read(folder().join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let of = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        if tensor.dtype() == safetensors::Dtype::F64 {
            let (numbers, _) = tensor.data().as_chunks::<8>();
            return numbers.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        }
        let (numbers, _) = tensor.data().as_chunks::<4>();
        numbers.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
    };
    file.names().into_iter().map(|name| (name.to_owned(), of(name))).collect()
}

/// The largest difference, as a share of the largest number.
fn off(ours: &Tensor, exact: &[f64]) -> f64 {
    let ours = ours.to_f32_vec();
    assert_eq!(ours.len(), exact.len());
    let largest = exact.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    let pairs = ours.iter().zip(exact);
    pairs.map(|(ours, exact)| (f64::from(*ours) - exact).abs()).fold(0.0, f64::max) / largest
}

/// Allowed differences by format, from docs/numerics.md.
struct Allowed {
    output: f64,
    gradients: f64,
    losses: f64,
    adapters: f64,
}

fn check(job: WorkloadJob, allowed: &Allowed) {
    let device = Device::cpu(2, 1 << 28).unwrap();
    let golden = recorded();
    let WorkloadJob { dtype, recompute, micro_batch: at_once, .. } = job;
    let mut job = Workload::new(&device, job, &mut Recorded::new(&device)).unwrap();
    let mut worst: Vec<(String, f64, f64)> = Vec::new();
    worst.push((
        "output".into(),
        off(&job.output().unwrap(), &golden["out.step0"]),
        allowed.output,
    ));
    for (step, exact) in golden["loss"].iter().enumerate() {
        let loss = f64::from(job.step().unwrap().unwrap());
        worst.push((format!("loss {step}"), (loss - exact).abs() / exact, allowed.losses));
        // From the first update on, rounded formats go their own way: see docs/numerics.md.
        let compared = if dtype == Dtype::F32 { 2 } else { 1 };
        for (name, _, gradient) in job.adapters().iter().filter(|_| step < compared) {
            let exact = &golden[&format!("grad_step{step}.{name}")];
            // The first gradient of A is zero, since B is: nothing to be relative to.
            if exact.iter().any(|value| *value != 0.0) {
                let name = format!("gradient {step} of {name}");
                worst.push((name, off(gradient.unwrap(), exact), allowed.gradients));
            } else {
                assert!(gradient.unwrap().to_f32_vec().iter().all(|value| *value == 0.0));
            }
        }
    }
    for (name, value, _) in job.adapters() {
        worst.push((
            format!("{name} at the end"),
            off(&value, &golden[&format!("lora13.{name}")]),
            allowed.adapters,
        ));
    }
    let wrong: Vec<_> =
        worst.iter().filter(|(_, off, allowed)| off.is_nan() || off > allowed).collect();
    assert!(
        wrong.is_empty(),
        "{dtype} {recompute:?}, {at_once} samples per micro-batch: {wrong:#?}"
    );
}

#[test]
fn losses_gradients_and_adapters_are_pytorchs() {
    let f32 = Allowed { output: 2e-6, gradients: 6e-5, losses: 2e-6, adapters: 4e-4 };
    for recompute in [Recompute::None, Recompute::Queries, Recompute::Alternate, Recompute::Block] {
        check(WorkloadJob { recompute, ..WorkloadJob::plain(GOLDEN, Dtype::F32) }, &f32);
    }
    check(WorkloadJob { micro_batch: 1, ..WorkloadJob::plain(GOLDEN, Dtype::F32) }, &f32);
    let bf16 = Allowed { output: 8e-3, gradients: 2.5e-2, losses: 1e-4, adapters: f64::INFINITY };
    check(WorkloadJob::plain(GOLDEN, Dtype::Bf16), &bf16);
    let f16 = Allowed { output: 1.5e-3, gradients: 0.15, losses: 5e-5, adapters: f64::INFINITY };
    check(
        WorkloadJob { recompute: Recompute::Block, ..WorkloadJob::plain(GOLDEN, Dtype::F16) },
        &f16,
    );
}

const ODD: WorkloadConfig =
    WorkloadConfig { name: "odd", width: 192, n_blocks: 3, tokens: 37, samples: 3 };

/// Gradients as bits, after some steps.
fn gradient_bits(threads: usize, job: WorkloadJob) -> Vec<Vec<u32>> {
    let device = Device::cpu(threads, 1 << 28).unwrap();
    let mut job = Workload::new(&device, job, &mut RandomWeightInit::new(&device, 5)).unwrap();
    for _ in 0..3 {
        job.step().unwrap();
    }
    let bits = |tensor: &Tensor| tensor.to_f32_vec().iter().map(|value| value.to_bits()).collect();
    job.adapters().into_iter().map(|(_, _, gradient)| bits(gradient.unwrap())).collect()
}

#[test]
fn threads_checkpointing_and_offloading_change_no_bit() {
    let job = WorkloadJob::plain(ODD, Dtype::F32);
    let plain = gradient_bits(1, job);
    for threads in [2, 3] {
        assert_eq!(plain, gradient_bits(threads, job), "{threads} threads");
    }
    for recompute in [Recompute::Queries, Recompute::Alternate, Recompute::Block] {
        assert_eq!(plain, gradient_bits(2, WorkloadJob { recompute, ..job }), "{recompute:?}");
    }
    for offload in [Offload::Alternate, Offload::Blocks] {
        assert_eq!(plain, gradient_bits(2, WorkloadJob { offload, ..job }), "{offload:?}");
    }
}

#[test]
fn an_arena_of_the_planned_size_is_enough_and_one_byte_less_is_not() {
    let config = WorkloadConfig { name: "plan", width: 128, n_blocks: 3, tokens: 40, samples: 2 };
    let run = |device: &Device, job| -> compute::Result<()> {
        let mut job = Workload::new(device, job, &mut RandomWeightInit::new(device, 5))?;
        (0..3).try_for_each(|_| job.step().map(|_| ()))
    };
    let mut peaks = Vec::new();
    let plain = WorkloadJob::plain(config, Dtype::Bf16);
    let block = WorkloadJob { recompute: Recompute::Block, ..plain };
    for job in [
        plain,
        WorkloadJob { recompute: Recompute::Alternate, ..plain },
        block,
        WorkloadJob { base: Some(Quantisation::Fp8), ..block },
        WorkloadJob { base: Some(Quantisation::Nf4), ..block },
        WorkloadJob { base: Some(Quantisation::Nf4), micro_batch: 1, ..block },
    ] {
        let meta = Device::meta(DeviceKind::cpu(2), usize::MAX);
        run(&meta, job).unwrap();
        let plan = meta.usage();
        let device = Device::cpu(2, plan.extent).unwrap();
        run(&device, job).unwrap();
        assert_eq!(device.usage(), plan);
        assert_eq!(device.work(), meta.work());
        let smaller = Device::cpu(2, plan.extent - 1).unwrap();
        let error = run(&smaller, job).unwrap_err().to_string();
        assert!(error.starts_with("out of memory for "), "{error}");
        peaks.push(plan.peak);
    }
    assert!(peaks.is_sorted_by(|more, less| more > less), "{peaks:?}");
}

#[test]
fn bench_step_keeps_its_plan_in_every_variant() {
    for dtype in ["f32", "bf16", "f16"] {
        for recompute in ["none", "queries", "alternate", "block"] {
            let arguments = [
                "bench",
                "step",
                "--config",
                "cpu-tiny",
                "--steps",
                "1",
                "--json",
                "--dtype",
                dtype,
                "--recompute",
                recompute,
                "--threads",
                "2",
                "--device",
                "cpu",
            ];
            let figures: Value = serde_json::from_str(&printed(&arguments)).unwrap();
            assert_eq!(figures["peak_bytes"], figures["plan_bytes"], "{figures}");
            assert_eq!(
                (&figures["dtype"], &figures["recompute"]),
                (&dtype.into(), &recompute.into())
            );
            // Outside the arena: the program, which was there before and grows with every verb; its
            // stacks, and what the gemm crate packs into.
            let [resident, before, arena] = ["rss_peak_bytes", "rss_before_bytes", "peak_bytes"]
                .map(|figure| figures[figure].as_f64().unwrap());
            assert!(resident - before < 1.05 * arena + f64::from(8 << 20), "{figures}");
            let (first, last) = (&figures["loss_first"], &figures["loss_last"]);
            assert!(last.as_f64() < first.as_f64(), "{figures}");
            for figure in ["ms_median", "cpu_ms_median", "rss_peak_bytes"] {
                assert!(figures[figure].as_f64().is_some_and(|value| value > 0.0), "{figures}");
            }
        }
    }
}

#[test]
fn bench_step_keeps_its_plan_in_micro_batches_and_with_offloading() {
    let figures = |more: &[&str]| -> Value {
        let usual = ["bench", "step", "--config", "cpu-tiny", "--steps", "1", "--json"];
        let usual = [&usual[..], &["--dtype", "bf16", "--device", "cpu"]].concat();
        serde_json::from_str(&printed(&[&usual, more].concat())).unwrap()
    };
    let plain = figures(&[]);
    for more in [
        &["--micro-batch", "1"][..],
        &["--offload", "alternate"],
        &["--offload", "blocks", "--base", "int8"],
    ] {
        let figures = figures(more);
        assert_eq!(figures["peak_bytes"], figures["plan_bytes"], "{figures}");
        assert!(figures["peak_bytes"].as_u64() <= plain["peak_bytes"].as_u64(), "{figures}");
        let (ours, theirs) = (&figures["loss_first"], &plain["loss_first"]);
        let off = ours.as_f64().unwrap() / theirs.as_f64().unwrap() - 1.0;
        assert!(off.abs() < 1e-3, "{figures}");
        let streams = figures["offloaded_bytes"].as_u64() > Some(0);
        assert_eq!(streams, more[0] == "--offload", "{figures}");
    }
}

#[test]
fn bench_step_names_what_is_unknown() {
    let output = hearth(&["bench", "step", "--config", "cpu-huge"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("not one of cpu-tiny, cpu-small, cpu-mid"), "{}", said(&output));
}

#[test]
fn bench_ops_measures_both_directions() {
    let lines =
        printed(&["bench", "ops", "--only", "m", "--repeats", "1", "--json", "--dtype", "bf16"]);
    let all: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |op: &str| all.iter().find(|figures| figures["op"] == op).unwrap();
    for op in ["norm_modulate", "rms_norm", "mse", "group_norm", "adamw"] {
        assert!(of(op)["forward"]["ms_median"].as_f64().unwrap() > 0.0, "{op}");
    }
    assert!(of("mse")["backward"]["gb_per_s"].as_f64().unwrap() > 0.0);
    assert!(of("group_norm")["backward"].is_null());
}

#[test]
fn bench_calibrate_keeps_its_rates() {
    let folder = tempfile::tempdir().unwrap();
    let at = crate::text(folder.path());
    let line = printed(&["bench", "calibrate", "--quick", "--json", "--folder", at]);
    let all: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(all["is_measured"], true);
    for class in ["matmul by simd, f32", "attention backward, bf16", "adamw_8bit, f32", "load"] {
        let seconds = all["curves"][class]["points"][0][1].as_f64();
        assert!(seconds.is_some_and(|seconds| seconds > 0.0), "{class}");
    }
    let kept = std::fs::read_to_string(all["path"].as_str().unwrap()).unwrap();
    let kept: Value = serde_json::from_str(&kept).unwrap();
    assert_eq!((&kept["owner"], &kept["rates"]["curves"]), (&all["owner"], &all["curves"]));
}

#[test]
fn bench_peers_names_the_python_it_cannot_run() {
    let output = hearth(&[
        "bench",
        "peers",
        "--python",
        "no-such-python",
        "--config",
        "cpu-tiny",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--dtype",
        "f32",
        "--recompute",
        "none",
    ]);
    assert_eq!(output.status.code(), Some(1));
    let said = said(&output);
    assert!(
        said.contains("cannot run no-such-python") && said.contains("hint: give --python"),
        "{said}"
    );
}
