//! What can be shown of the backend itself: that every kernel can be translated for Metal, within what
//! Apple's GPUs offer; and, where there is a software driver, that memory and errors are as they should be.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use naga::AddressSpace;
use naga::back::msl;
use naga::front::wgsl;
use naga::proc::Layouter;
use naga::valid::{Capabilities, ValidationFlags, Validator};

use super::template::expand;
use super::{
    ARGUMENT_BYTES, GpuAdapter, GpuAdapterKind, GpuChoice, GpuFault, GpuVariant, MIN_GROUP_BYTES,
    MIN_TENSORS, PER_ROW, WgslSource, adapters,
};
use crate::ops::{
    Activation, AdamW, Attention, Linear, Moments, QkNormRope, adamw, count_not_finite,
    global_norm, matrix_units_agree,
};
use crate::{
    ComputeError, Device, DeviceKind, Dtype, FillPart, FillStats, Gradients, Params,
    RandomSequence, Result, Shape, Tag, Tape, Var, fill_all,
};

/// An op of one tensor.
type Forward<'a> = &'a dyn Fn(&Tape<'_>, &Var) -> Result<Var>;

/// The oldest language of Metal that kernels must be possible in. Taken: that of macOS 12, the first of all
/// that run on every chip of Apple's own.
const METAL: (u8, u8) = (2, 4);

/// What kernels may use beyond the plainest WGSL; every GPU of Metal's has it.
const CAPABILITIES: Capabilities =
    Capabilities::IMMEDIATES.union(Capabilities::SHADER_FLOAT16_IN_FLOAT32);

/// Every kernel source, by its path.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "wgsl") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// What kernels must compile for: every dtype, and every compile-time constant.
fn variants() -> [GpuVariant; 3] {
    let of = |formats: &[Dtype], [left, right, second, fp8]: [usize; 4]| {
        let wides = ["WIDE", "LEFT_WIDE", "RIGHT_WIDE", "SECOND_WIDE", "KNOWN_WIDE"];
        let variant = GpuVariant::of(formats).with("D", 64).with("FP8", fp8);
        let variant = wides.iter().fold(variant, |variant, wide| variant.with(wide, right));
        let variant = variant.with("LEFT_T", left).with("RIGHT_T", right).with("SECOND", second);
        variant
            .with("EVEN", fp8)
            .with("KIND", second)
            .with("CENTERED", fp8)
            .with("HELD", 1 + fp8)
            .with("WIDTH", 32)
            .with("SLICES", 1 + left)
            .with("SHARED", 1 + 63 * left)
    };
    [
        of(&[Dtype::F32], [0, 1, 2, 0]),
        of(&[Dtype::Bf16], [1, 0, 0, 1]),
        of(&[Dtype::F16, Dtype::F32, Dtype::Bf16], [0, 0, 1, 0]),
    ]
}

/// What a kernel asks of a GPU: its tensors, the bytes of its arguments, and of memory that a workgroup shares.
fn needs(text: &str) -> (String, usize, usize) {
    let module = wgsl::parse_str(text).unwrap_or_else(|e| panic!("{}", e.emit_to_string(text)));
    let mut units = Capabilities::empty();
    units.set(Capabilities::COOPERATIVE_MATRIX, text.starts_with("enable wgpu_cooperative_matrix"));
    units.set(Capabilities::SHADER_FLOAT16, text.contains("alias Element = f16;"));
    let mut validator = Validator::new(ValidationFlags::all(), CAPABILITIES | units);
    let info = validator.validate(&module).unwrap_or_else(|e| panic!("{e:?}"));
    let mut sizes = Layouter::default();
    sizes.update(module.to_ctx()).unwrap();
    let bytes_in = |space: AddressSpace| -> usize {
        let used = module.global_variables.iter().filter(|(handle, variable)| {
            variable.space == space && !info.get_entry_point(0)[*handle].is_empty()
        });
        used.map(|(_, variable)| sizes[variable.ty].size as usize).sum()
    };
    let options = msl::Options { lang_version: METAL, ..Default::default() };
    let (metal, _) =
        msl::write_string(&module, &info, &options, &msl::PipelineOptions::default()).unwrap();
    (metal, bytes_in(AddressSpace::Immediate), bytes_in(AddressSpace::WorkGroup))
}

#[test]
fn every_kernel_translates_to_metal() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut table = String::from("tensors, bytes of arguments, bytes that a group shares\n");
    for path in sources(&root) {
        let path_name = path.strip_prefix(&root).unwrap().display();
        for (version, text) in full_sources(&path) {
            table += &kernels(&text, &format!("{path_name}{version}"));
        }
    }
    expect_test::expect_file!["kernels.txt"].assert_eq(&table);
}

/// The whole source of a file: sources of a folder may begin with what they share, and matmul has three versions.
fn full_sources(path: &Path) -> Vec<(&'static str, String)> {
    let read = |names: &[&str]| -> String {
        names.iter().map(|name| fs::read_to_string(path.with_file_name(name)).unwrap()).collect()
    };
    let own = path.file_name().unwrap().to_str().unwrap();
    let has = |name: &str| path.with_file_name(name).exists();
    if has("units.wgsli") {
        let by_units = |enable: &str, element: &str| {
            let head = format!("enable {enable};\nalias Element = {element};\n");
            head + &read(&["lines.wgsli", "units.wgsli", own])
        };
        return vec![
            ("", read(&["lines.wgsli", "plain.wgsli", own])),
            (" by units", by_units("wgpu_cooperative_matrix", "f32")),
            (" by f16 units", by_units("wgpu_cooperative_matrix, f16", "f16")),
        ];
    }
    vec![("", if has("shared.wgsli") { read(&["shared.wgsli", own]) } else { read(&[own]) })]
}

/// A line for each kernel of a text, with what it asks for.
fn kernels(text: &str, path_name: &str) -> String {
    let mut table = String::new();
    for line in text.lines().filter(|line| line.starts_with("kernel ")) {
        let name = line["kernel ".len()..].split('(').next().unwrap();
        let mut most = (0, 0, 0);
        for variant in variants() {
            let (text, tensors) = expand(text, name, &variant, PER_ROW).unwrap();
            let (metal, arguments, shared) = needs(&text);
            assert!(metal.contains("kernel void"), "{path_name}: {name}");
            most = (tensors, arguments, shared.max(most.2));
        }
        assert!(most.0 <= MIN_TENSORS && most.1 <= ARGUMENT_BYTES, "{path_name}: {name} {most:?}");
        assert!(most.2 <= MIN_GROUP_BYTES, "{path_name}: {name} {most:?}");
        writeln!(table, "{path_name} {name}: {}, {}, {}", most.0, most.1, most.2).unwrap();
    }
    table
}

#[test]
fn what_is_no_kernel_is_not_expanded() {
    let file = "// Words.\n\nkernel one(x: [X], n: u32) {\n}\n";
    assert!(expand(file, "one", &variants()[0], PER_ROW).is_some());
    assert!(expand(file, "two", &variants()[0], PER_ROW).is_none());
    assert!(expand(&file.replace("[X]", "[x]"), "one", &variants()[0], PER_ROW).is_none());
    assert!(expand(&file.replace(") {", "{"), "one", &variants()[0], PER_ROW).is_none());
}

/// The software driver, if there is one; else a word that nothing is shown.
#[allow(clippy::print_stderr)]
fn software(limit: usize) -> Option<Device> {
    if adapters().iter().any(|adapter| adapter.kind == GpuAdapterKind::Software) {
        return Some(Device::gpu(GpuChoice::Software, limit).unwrap());
    }
    eprintln!("no software driver for Vulkan here");
    None
}

#[test]
#[allow(clippy::print_stderr)]
fn matrix_units_multiply_as_plain_kernels_do() {
    let Some(device) = software(1 << 22) else { return };
    let software = adapters().into_iter().find(|gpu| gpu.kind == GpuAdapterKind::Software).unwrap();
    let Some(units) = software.features.matrix_units else {
        return eprintln!("{} has no matrix units", software.driver);
    };
    assert!(matrix_units_agree(&device).unwrap(), "{units:?} of {}", software.driver);
    eprintln!("{units:?} of {} agree", software.driver);
}

#[test]
fn bytes_go_up_and_come_down_wherever_they_lie() {
    let Some(device) = software(1 << 20) else { return };
    let numbers: Vec<u8> = (0..23).collect();
    let mut tensor = device.upload([23], &numbers).unwrap();
    assert_eq!(tensor.to_vec::<u8>(), numbers);
    assert_eq!(tensor.narrow(3..10).to_vec::<u8>(), numbers[3..10]);
    // Numbers beside those that are written stay, also in the same word.
    tensor.with_range_mut(5..9, |part| part.write(&[90u8, 91, 92, 93]));
    tensor.with_range_mut(10..11, crate::Tensor::fill_zeros);
    let mut expected = numbers.clone();
    expected[5..9].copy_from_slice(&[90, 91, 92, 93]);
    expected[10] = 0;
    assert_eq!(tensor.to_vec::<u8>(), expected);
    let copy = tensor.narrow(1..22).into_unique().unwrap();
    assert_eq!(copy.to_vec::<u8>(), expected[1..22]);
    let empty = device.upload([0], &[0f32; 0]).unwrap();
    assert_eq!(empty.to_vec::<f32>(), []);
}

#[test]
fn random_numbers_are_those_of_the_cpu() {
    let Some(device) = software(1 << 20) else { return };
    let cpu = Device::cpu(1, 1 << 20).unwrap();
    for stream in [0, 7 << 32] {
        let on = |device: &Device| {
            device.normal([999], Dtype::F32, 2.0, RandomSequence::new(5 << 40, stream)).unwrap()
        };
        let (ours, exact) = (on(&device).to_f32_vec(), on(&cpu).to_f32_vec());
        let far = ours.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 4e-6, "{far}");
    }
}

/// What no compiler takes.
static WRONG: WgslSource =
    WgslSource { name: "wrong", text: "\nkernel wrong(x: [X]) {\n let y = nobody; }\n" };

#[test]
fn what_goes_wrong_is_reported() {
    let error = Device::gpu(GpuChoice::Index(99), 1 << 20).err().unwrap().to_string();
    assert!(error.starts_with("no GPU is gpu:99, there are: "), "{error}");
    let kind = DeviceKind::Gpu { buffer_bytes: 1 << 20, tensor_bytes: 1 << 10 };
    let error = Device::meta(kind, 1 << 30).alloc([1 << 10], Dtype::F32).err().unwrap().to_string();
    let message =
        "a tensor of 4.0 KiB is larger than the largest buffer binding of this GPU, 1.0 KiB";
    assert_eq!(error, message);
    let Some(device) = software(1 << 16) else { return };
    let tensor = device.zeros([8], Dtype::F32).unwrap();
    let crate::device::Backend::Gpu(gpu) = device.backend() else { unreachable!("it was made so") };
    gpu.launch(&WRONG, "wrong", &GpuVariant::of(&[Dtype::F32]), 1, &super::arguments![&tensor]);
    let error = device.alloc([8], Dtype::F32).err().unwrap().to_string();
    assert!(error.starts_with("cannot compile the kernel wrong of wrong: "), "{error}");
    assert!(device.synchronise().is_err());
    // Others on the same GPU go on.
    assert!(software(1 << 16).unwrap().zeros([8], Dtype::F32).is_ok());
}

#[test]
fn tensors_of_several_buffers_are_computed_with() {
    let Some(plain) = software(1) else { return };
    let DeviceKind::Gpu { tensor_bytes, .. } = plain.kind() else { unreachable!("it was made so") };
    let small = |adapter: &mut GpuAdapter| adapter.buffer_bytes = 4096;
    let device = Device::gpu_alone(GpuChoice::Software, 1 << 16, small);
    device.set_resident(10_000);
    let held: Vec<_> = (0..8).map(|_| device.upload([700], &[1.5f32; 700]).unwrap()).collect();
    assert!(held.iter().map(|tensor| tensor.offset() / 4096).max() > Some(3));
    let count = count_not_finite(&held.iter().collect::<Vec<_>>()).unwrap();
    assert_eq!(count.to_vec::<u32>(), [0]);
    assert!(held.iter().all(|tensor| tensor.to_vec::<f32>() == [1.5; 700]));
    let meta = Device::meta(DeviceKind::Gpu { buffer_bytes: 4096, tensor_bytes }, 1 << 16);
    meta.set_resident(10_000);
    let copies: Vec<_> = (0..8).map(|_| meta.upload([700], &[0f32; 700]).unwrap()).collect();
    meta.with_tag(Tag::Activations, || meta.alloc([1], Dtype::U32)).unwrap();
    assert_eq!(meta.usage().extent, device.usage().extent);
    drop(copies);
}

/// Bytes of buffers that a device has now.
fn committed(device: &Device) -> u64 {
    device.committed_bytes().load(Ordering::Relaxed)
}

/// Bytes that this process has in memory. The software driver's buffers are a part of them.
#[cfg(target_os = "linux")]
fn resident_set() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    1024 * line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn trimmed_memory_leaves_the_process_and_is_taken_again() {
    const MIB: usize = 1 << 20;
    let Some(device) = software(1024 * MIB) else { return };
    device.set_resident(4 * MIB);
    let numbers: Vec<u32> = (0..MIB as u32).collect();
    let resident = device.upload([MIB], &numbers).unwrap();
    // Half a gibibyte in tensors as large as the driver allows.
    let norms = || {
        let normal =
            |nth| device.normal([32 * MIB], Dtype::F32, 1.0, RandomSequence::new(3, nth)).unwrap();
        let tensors = [0, 1, 2, 3].map(normal);
        let norm = global_norm(&tensors.each_ref().map(Some), &device).unwrap();
        (norm.to_vec::<f32>(), resident_set())
    };
    let (before, held) = norms();
    assert_eq!(committed(&device), 1024 * MIB as u64);
    device.trim();
    assert_eq!(committed(&device), 4 * MIB as u64);
    let trimmed = resident_set();
    assert!(trimmed + 480 * MIB as u64 <= held, "{held} B before, {trimmed} B after");
    let (after, held) = norms();
    assert!(held >= trimmed + 480 * MIB as u64, "{trimmed} B before, {held} B after");
    assert_eq!(before, after);
    assert!(resident.to_vec::<u32>() == numbers);
}

#[test]
fn buffers_are_no_larger_than_the_limit_and_longer_when_it_is_raised() {
    let Some(device) = software(1 << 20) else { return };
    device.set_resident(4096);
    device.set_limit(4096 + 8192);
    let stays = device.upload([1024], &[1u32; 1024]).unwrap();
    let numbers = |n: u32| (0..n).collect::<Vec<u32>>();
    let first = device.upload([1024], &numbers(1024)).unwrap();
    assert_eq!(committed(&device), 4096 + 8192);
    // Live tensors move to the longer buffer.
    device.set_limit(4096 + 65_536);
    let second = device.upload([4096], &numbers(4096)).unwrap();
    assert_eq!(committed(&device), 4096 + 65_536);
    assert!(first.to_vec::<u32>() == numbers(1024) && second.to_vec::<u32>() == numbers(4096));
    drop((first, second));
    device.set_limit(usize::MAX);
    let third = device.upload([1 << 17], &numbers(1 << 17)).unwrap();
    assert_eq!(committed(&device), 1 << 20);
    assert!(third.to_vec::<u32>() == numbers(1 << 17));
    // A lower limit counts from the next time on.
    drop(third);
    device.set_limit(4096 + 8192);
    device.trim();
    assert_eq!(committed(&device), 4096);
    drop(device.upload([1024], &numbers(1024)).unwrap());
    assert_eq!(committed(&device), 4096 + 8192);
    assert_eq!(stays.to_vec::<u32>(), [1; 1024]);
}

#[test]
fn a_buffer_with_a_live_tensor_stays() {
    if software(1).is_none() {
        return;
    }
    let small = |adapter: &mut GpuAdapter| adapter.buffer_bytes = 4096;
    let device = Device::gpu_alone(GpuChoice::Software, 1 << 16, small);
    let mut held: Vec<_> =
        (0..6u32).map(|n| Some(device.upload([1024], &[n; 1024]).unwrap())).collect();
    for gone in [0, 3, 5] {
        held[gone] = None;
    }
    device.trim();
    assert_eq!(committed(&device), 3 * 4096);
    held[3] = Some(device.upload([1024], &[3u32; 1024]).unwrap());
    for (n, tensor) in (0..).zip(&held) {
        assert!(tensor.as_ref().is_none_or(|tensor| tensor.to_vec::<u32>() == [n; 1024]), "{n}");
    }
}

/// Bytes of all tensors of the kernels that some work is, as a multiple of the bytes that the ops say they must
/// read and write. What is changed in `path_name` is both read and written: `again` bytes more.
fn moved<T>(device: &Device, again: usize, work: impl FnOnce() -> Result<T>) -> (f64, T) {
    let launched = &backend(device).launched;
    let before = device.work();
    launched.lock().unwrap().clear();
    let made = work().unwrap();
    // Tests poison memory; nobody else does.
    let launched = launched.lock().unwrap();
    let kernels = launched.iter().filter(|(kernel, _)| *kernel != "fill");
    let bytes = again + kernels.map(|(_, bytes)| bytes).sum::<usize>();
    (bytes as f64 / device.work().since(&before).bytes as f64, made)
}

#[test]
fn kernels_read_and_write_little_more_than_they_must() {
    let Some(device) = software(1 << 24) else { return };
    let params = Params::default();
    let normal = |shape: &[usize]| {
        device.normal(Shape::new(shape), Dtype::Bf16, 1.0, RandomSequence::new(1, 2)).unwrap()
    };
    let weight = Var::from(normal(&[640, 320]));
    let ones = Var::from(device.normal([640], Dtype::F32, 1.0, RandomSequence::new(1, 2)).unwrap());
    let full = Attention::full(5, 64);
    let trained = |tape: &Tape<'_>| tape.leaf(ones.tensor().clone());
    let heads = device.normal([64], Dtype::F32, 1.0, RandomSequence::new(1, 2)).unwrap();
    // Sums of which gradients of vectors are made are written and read besides.
    let ops: [(&str, f64, &[usize], Forward<'_>); 8] = [
        ("linear", 1.01, &[256, 320], &|tape, x| tape.linear(x, Linear::new(&weight))),
        ("attention", 1.02, &[2, 128, 320], &|tape, x| tape.attention(x, x, x, full)),
        ("layer norm", 1.01, &[256, 640], &|tape, x| {
            tape.layer_norm(x, Some(&ones), Some(&ones), 1e-6)
        }),
        ("rms norm", 1.01, &[256, 640], &|tape, x| tape.rms_norm(x, Some(&ones), 1e-6)),
        ("trained layer norm", 1.12, &[256, 640], &|tape, x| {
            tape.layer_norm(x, Some(&trained(tape)), Some(&trained(tape)), 1e-6)
        }),
        ("trained rms norm", 1.06, &[256, 640], &|tape, x| {
            tape.rms_norm(x, Some(&trained(tape)), 1e-6)
        }),
        ("gated unit", 1.01, &[256, 640], &|tape, x| {
            tape.glu(x, &tape.leaf(x.tensor().clone()), Activation::Silu)
        }),
        ("trained norm of heads", 1.02, &[1, 256, 640], &|tape, x| {
            let weight = tape.leaf(heads.clone());
            let norm = Some((&weight, 1e-6));
            tape.qk_norm_rope(x, QkNormRope { n_heads: 10, norm, rope: None })
        }),
    ];
    for (name, most, shape, op) in ops {
        let tape = Tape::training(&device, &params, 1);
        let x = tape.leaf(normal(shape));
        let (share, y) = moved(&device, 0, || op(&tape, &x));
        assert!((1.0..1.02).contains(&share), "{name}: {share}");
        let gradient = normal(y.shape().sizes());
        // Gradients of heads and of units are changed in path_name.
        let is_in_place = ["trained norm of heads", "gated unit"].contains(&name);
        let again = if is_in_place { gradient.bytes() } else { 0 };
        let back = || tape.backward_from(y, gradient, &mut Gradients::default()).map(drop);
        let (share, ()) = moved(&device, again, back);
        assert!((1.0..most).contains(&share), "{name} backward: {share}");
    }
}

#[test]
fn a_step_of_adamw_reads_and_writes_what_it_must() {
    let Some(device) = software(1 << 20) else { return };
    let zeros = || device.zeros([4096], Dtype::F32).unwrap();
    let mut state = [Moments { first: zeros(), second: zeros() }];
    let (mut params, gradient) = ([zeros()], zeros());
    let again = 3 * gradient.bytes();
    let step = || adamw(&mut params, &[Some(&gradient)], &mut state, AdamW::default(), None);
    let (share, ()) = moved(&device, again, step);
    assert!((share - 1.0).abs() < 1e-9, "{share}");
}

#[test]
fn the_norm_of_gradients_reads_them_once() {
    let Some(device) = software(1 << 20) else { return };
    let gradients = [1 << 16, 40_000]
        .map(|n| device.normal([n], Dtype::F32, 1.0, RandomSequence::new(1, 2)).unwrap());
    let (share, _) = moved(&device, 0, || global_norm(&gradients.each_ref().map(Some), &device));
    assert!((1.0..1.01).contains(&share), "{share}");
}

/// A device that shares its adapter with nobody, to be broken.
fn alone() -> Option<Device> {
    software(1)?;
    Some(Device::gpu_alone(GpuChoice::Software, 1 << 16, |_| {}))
}

#[test]
fn a_command_buffer_that_was_not_done_is_noticed() {
    let Some(device) = alone() else { return };
    let mut tensor = device.upload([8], &[1.0f32; 8]).unwrap();
    device.synchronise().unwrap();
    device.fail_command_buffer(1, GpuFault::Ended);
    tensor.fill_zeros();
    // Also if later ones completed.
    let backend = backend(&device);
    backend.submissions().send(&backend.context);
    tensor.fill_zeros();
    let error = device.synchronise().err().unwrap().to_string();
    assert_eq!(error, "the GPU was lost: a command buffer did not complete");
    // It stays so: what was computed since is worth nothing.
    assert!(device.alloc([8], Dtype::F32).is_err());
}

#[test]
fn a_lost_gpu_is_an_error_and_another_can_be_opened() {
    let Some(device) = alone() else { return };
    let mut tensor = device.upload([8], &[1.0f32; 8]).unwrap();
    device.fail_command_buffer(1, GpuFault::Lost);
    tensor.fill_zeros();
    let error = device.synchronise().err().unwrap();
    assert!(matches!(error, ComputeError::GpuLost { .. }), "{error}");
    let other = software(1 << 16).unwrap();
    assert_eq!(other.upload([2], &[3u32, 4]).unwrap().to_vec::<u32>(), [3, 4]);
}

fn backend(device: &Device) -> &super::GpuBackend {
    let crate::device::Backend::Gpu(gpu) = device.backend() else { unreachable!("it was made so") };
    gpu
}

/// Fills tensors of several sizes and dtypes with numbers that differ, between kernels; returns in how many
/// calls they were filled.
fn fill(device: &Device, sizes: &[usize]) -> usize {
    let mut tensors: Vec<_> =
        sizes.iter().map(|size| device.zeros([*size], Dtype::U8).unwrap()).collect();
    let expected = |tensor: usize, size: usize| -> Vec<u8> {
        (0..size).map(|at| (at % 251 + tensor) as u8).collect()
    };
    let mut asked = Vec::new();
    fill_all(tensors.iter_mut().collect(), |range, parts| {
        for (tensor, part) in range.clone().zip(parts) {
            let numbers = expected(tensor, part.bytes());
            part.fill(&mut |to| -> Result<()> {
                to.copy_from_slice(&numbers);
                Ok(())
            })?;
        }
        asked.push(range);
        Ok::<_, ComputeError>(())
    })
    .unwrap();
    assert!(asked.iter().cloned().flatten().eq(0..sizes.len()));
    for (index, (tensor, size)) in tensors.iter().zip(sizes).enumerate() {
        let copy = tensor.clone().into_unique().unwrap();
        assert!(copy.to_vec::<u8>() == expected(index, *size), "{index}");
    }
    asked.len()
}

#[test]
fn where_memory_is_shared_files_are_read_into_it() {
    let Some(device) = software(1 << 20) else { return };
    assert_eq!(fill(&device, &[7, 0, 3000, 1, 70_000]), 1);
    assert_eq!(device.fill_stats(), FillStats { in_place: 73_008, staged: 0 });
    // In as many buffers as there are, and again after kernels.
    let small = |adapter: &mut GpuAdapter| adapter.buffer_bytes = 4096;
    let device = Device::gpu_alone(GpuChoice::Software, 1 << 16, small);
    for _ in 0..2 {
        assert_eq!(fill(&device, &[4000, 7, 0, 3000, 1, 4096]), 1);
    }
    assert_eq!(device.fill_stats(), FillStats { in_place: 2 * 11_104, staged: 0 });
}

#[test]
fn elsewhere_files_go_through_little_memory() {
    if software(1).is_none() {
        return;
    }
    let apart = |adapter: &mut GpuAdapter| adapter.shares_memory = false;
    let device = Device::gpu_alone(GpuChoice::Software, 256 << 20, apart);
    assert_eq!(fill(&device, &[7, 40 << 20, 0, 30 << 20, 3, 70 << 20]), 3);
    assert_eq!(device.fill_stats(), FillStats { in_place: 0, staged: (140 << 20) + 10 });
}

#[test]
fn what_fails_while_memory_is_shared_leaves_it_to_kernels() {
    let Some(device) = software(1 << 16) else { return };
    let mut tensor = device.zeros([8], Dtype::U8).unwrap();
    let fault = |_, _: Vec<FillPart<'_>>| Err(ComputeError::Untracked);
    assert!(fill_all(vec![&mut tensor], fault).is_err());
    tensor.fill_zeros();
    assert_eq!(tensor.to_vec::<u8>(), [0; 8]);
    assert_eq!(device.fill_stats(), FillStats::default());
}
