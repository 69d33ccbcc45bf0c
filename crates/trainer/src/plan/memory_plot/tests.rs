//! Plots of a tiny model's step, and of what is rare.

use std::path::Path;

use compute::{Device, DeviceKind, Dtype, MemoryRecording, Tag, Usage};
use weights::{Catalog, TensorInfo};

use super::*;
use crate::config::{RawConfig, RunConfig};
use crate::data::Bucket;
use crate::event::PlannedPhase;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::paths::PartPaths;
use crate::model::recompute::Recompute;
use crate::task::session::{BatchPosition, MicroBatchStep, Session};
use crate::task::traits::Task;
use crate::train::diffusion;

const PIPELINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/sd3/pipeline");

fn config(set: &[&str]) -> RunConfig {
    let mut raw = RawConfig::empty();
    let base = format!("base.path={PIPELINE}");
    for value in [base.as_str(), "data.images=plots", "base.dtype=f32"].iter().chain(set) {
        raw.set(value).unwrap();
    }
    raw.resolve().unwrap()
}

/// A step of the tiny model, and what the device counted.
fn step(set: &[&str]) -> (MemoryRecording, Usage) {
    let config = config(set);
    let pipeline = Pipeline::open(Path::new(PIPELINE), &PartPaths::default()).unwrap();
    let device = Device::meta(DeviceKind::cpu(2), usize::MAX / 2);
    let task = diffusion::DiffusionTask::new(&config, &pipeline).unwrap();
    let mut session = Session::new(&device, &task, &config, &|_| true).unwrap();
    let micro_batch = task.dummy_micro_batch(Bucket { width: 64, height: 64 }.into(), 1).unwrap();
    device.reset_peak();
    device.start_recording();
    let (position, recompute) = (BatchPosition::default(), Recompute::None);
    let step = MicroBatchStep { micro_batch: &micro_batch, position, share: 1.0, recompute };
    session.accumulate(step).unwrap();
    session.update(0.0, 0, 1.0).unwrap();
    (device.stop_recording(), device.usage())
}

fn of(by_tag: [usize; 7], tag: Tag) -> usize {
    by_tag[tag as usize]
}

#[test]
fn bytes_by_tag_are_what_the_model_has() {
    let (recording, usage) = step(&["adapter.rank=4"]);
    let (first, last) = (recording.snapshots[0], *recording.snapshots.last().unwrap());
    assert_eq!(first.by_tag, last.by_tag, "a step leaves nothing behind");
    // As the files say, in which matrices have 16 bits; every tensor lies at a multiple of 64 bytes.
    let catalog = Catalog::open(&Path::new(PIPELINE).join("transformer")).unwrap();
    let bytes = |tensor: &TensorInfo| {
        let is_matrix = tensor.name.starts_with("transformer_blocks.") && tensor.shape.len() == 2;
        let bytes_each = if is_matrix { 2 } else { 4 };
        (bytes_each * tensor.numel() as usize).next_multiple_of(64)
    };
    let weights: usize = catalog.tensors.iter().map(bytes).sum();
    assert_eq!(of(first.by_tag, Tag::Weights), weights);
    let parameters = of(first.by_tag, Tag::Parameters);
    assert!(parameters > 0);
    assert_eq!(of(first.by_tag, Tag::Gradients), parameters);
    assert_eq!(of(first.by_tag, Tag::Optimizer), 2 * parameters);
    for tag in [Tag::Data, Tag::Activations, Tag::Workspace] {
        assert_eq!(of(first.by_tag, tag), 0, "{tag}");
        assert!(recording.snapshots.iter().any(|moment| of(moment.by_tag, tag) > 0), "{tag}");
    }
    assert_eq!(peak(&recording), usage.peak);
    let names: Vec<_> = recording.marks.iter().map(|(_, name)| *name).collect();
    assert_eq!(names, ["forward", "backward", "update"]);
}

#[test]
fn only_what_is_trained_counts_as_parameters() {
    let (recording, _) = step(&["adapter.kind=full", "train.ema=0.99"]);
    let held = recording.snapshots[0].by_tag;
    let parameters = of(held, Tag::Parameters);
    // Moments and the EMA.
    assert_eq!(of(held, Tag::Optimizer), 3 * parameters);
    assert_eq!(of(held, Tag::Gradients), parameters);
    assert!(of(held, Tag::Weights) < parameters / 10, "{held:?}");
    // The norms of frozen rows are frozen.
    let (recording, _) = step(&["adapter.kind=dora", "adapter.rank=4"]);
    let held = recording.snapshots[0].by_tag;
    assert_eq!(of(held, Tag::Gradients), of(held, Tag::Parameters));
}

fn peak(recording: &MemoryRecording) -> usize {
    recording.snapshots.iter().map(MemorySnapshot::bytes).max().unwrap()
}

/// A step of which the peak was in the middle: 3 MiB of weights, 1 MiB of data, 2 MiB of activations.
fn small(parts: usize) -> MemoryRecording {
    let device = Device::meta(DeviceKind::cpu(1), 1 << 30);
    let alloc = |mib: usize| device.alloc([mib << 20], Dtype::U8).unwrap();
    let _weights = device.with_tag(Tag::Weights, || alloc(3));
    device.start_recording();
    for _ in 0..parts {
        device.mark("forward");
        let _data = device.with_tag(Tag::Data, || alloc(1));
        device.mark("backward");
        let kept = alloc(1);
        drop((alloc(1), kept));
    }
    device.mark("update");
    drop(device.with_tag(Tag::Workspace, || alloc(1)));
    device.stop_recording()
}

#[test]
fn a_plot_shows_the_peak_its_parts_and_the_limit() {
    let recording = small(1);
    let drawn = svg(&MemoryPlot { recording: &recording, limit_bytes: 8 << 20 });
    for shown in [
        "<title id=\"memory-title\">Memory over a step</title>",
        "Peak 6.0 MiB in backward: weights 3.0 MiB, data 1.0 MiB, activations 2.0 MiB, limit 8.0 MiB.",
        ">forward</text>",
        ">backward</text>",
        ">update</text>",
        ">limit 8.0 MiB</text>",
        "class=\"limit\"",
        // Held only by the update, and so not at the peak.
        "<tspan dx=\"20\">workspace</tspan></text><text class=\" end\" x=\"786\" y=\"88\">0</text>",
    ] {
        assert!(drawn.contains(shown), "{shown} is not in {drawn}");
    }
    assert_eq!(drawn.matches("<path class=\"weights\"").count(), 1);
    assert!(!drawn.contains("optimizer\""), "{drawn}");
    // A limit far beyond would press all else to the ground.
    let far = svg(&MemoryPlot { recording: &recording, limit_bytes: 64 << 30 });
    assert!(!far.contains("class=\"limit\"") && far.contains(">64.0 GiB</text>"), "{far}");
}

#[test]
fn the_plot_is_as_high_as_the_memory_held() {
    let recording = small(1);
    let drawing = PlotLayout::of(&recording, 8 << 20).unwrap();
    let mut out = String::new();
    drawing.layers(&mut out);
    // The highest layer that is not for the update alone.
    let path = out.split("<path class=\"activations\" d=\"").nth(1).unwrap();
    let heights = path.split('"').next().unwrap().split('V').skip(1);
    let highest =
        heights.map(|rest| rest.split(['H', 'Z']).next().unwrap().parse::<f64>().unwrap());
    let highest = highest.fold(f64::MAX, f64::min);
    let [top, bottom] = DOWN;
    let bytes = (bottom - highest) / (bottom - top) * drawing.top;
    assert!((bytes / f64::from(6 << 20) - 1.0).abs() < 1e-3, "{bytes}");
}

#[test]
fn many_parts_stay_within_and_keep_their_order() {
    let recording = small(40);
    let drawing = PlotLayout::of(&recording, 8 << 20).unwrap();
    assert_eq!(drawing.parts.len(), 81);
    assert!(drawing.places.is_sorted_by(|a, b| a < b));
    assert!((drawing.places.last().unwrap() - ACROSS[1]).abs() < 1e-6);
    let mut out = String::new();
    drawing.parts(&mut out);
    assert_eq!(out, "", "there is no room for lines and names");
    let (recording, _) = step(&["adapter.rank=4"]);
    let drawing = PlotLayout::of(&recording, 8 << 20).unwrap();
    let (from, to, _) = drawing.parts[2];
    assert!(drawing.places[to] - drawing.places[from] > 20.0);
}

#[test]
fn nothing_recorded_is_no_plot() {
    let recording = MemoryRecording::default();
    let memory = MemoryPlot { recording: &recording, limit_bytes: 1 << 30 };
    assert_eq!(svg(&memory), "");
    assert!(page("empty", &memory, &[]).contains("<h1>empty</h1>"));
}

#[test]
fn a_page_has_the_plot_the_phases_and_the_figures_and_needs_nothing_else() {
    let recording = small(2);
    let memory = MemoryPlot { recording: &recording, limit_bytes: 8 << 20 };
    let phase = |name: &str, mib: usize| PlannedPhase { name: name.into(), peak_bytes: mib << 20 };
    let page = page("a <fox>", &memory, &[phase("load", 3), phase("train 64x64", 6)]);
    for shown in [
        "<h1>a &lt;fox&gt;</h1>",
        "class=\"memory\"",
        "<b>train 64x64</b><span style=\"--planned:75.0%\">",
        "<tr><td>data</td><td class=\"number\">1.0 MiB</td><td class=\"number\">1.0 MiB</td>\
         <td class=\"number\">0</td><td class=\"number\">1.0 MiB</td></tr>",
        "<tr><td><b>total</b></td><td class=\"number\">4.0 MiB</td><td class=\"number\">6.0 MiB\
         </td><td class=\"number\">4.0 MiB</td><td class=\"number\">6.0 MiB</td></tr>",
    ] {
        assert!(page.contains(shown), "{shown} is not in {page}");
    }
    for never in ["<script", "@import", "url(", "src=", "href=", "NaN"] {
        assert!(!page.contains(never), "{never} is in the page");
    }
}
