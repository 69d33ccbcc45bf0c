//! Expands kernel sources to WGSL. A file has several kernels, each with a signature as a Rust function
//! would have:
//!
//! ```text
//! kernel scale(x: [X], y: mut [X], n: u32, factor: f32) {
//! ```
//!
//! `[X]` is a tensor of the first dtype that the caller gives, `[Y]` of the second, and `[f32]`,
//! `[u32]` or `[u8]` of that one. A tensor becomes a few functions (`tensor/*.wgsl`): `x(i)` and
//! `x_pair(i)` read, `set_y(i, …)` and `put_y(i, …, add)` write, `has_x()` says whether it was given.
//! `[X by WIDE]` is read and written by eights, `x_eight(i, n)` and `put_y_eight(i, …, n, add)`, of which
//! only the first n are there. Where the variant's number WIDE is 1 these are whole and start at multiples
//! of eight, and pass in one piece of 16 bytes, or two; else number by number.
//! Scalars are `p.n` and `p.factor`. In the body `lane` is the thread's index in its group, `group`
//! and `thread` those among all.
//!
//! What stands before a file's first kernel is a part of each of them; what follows a kernel is its
//! own. Leaves out everything else that a language has: WGSL does the rest.

use std::fmt::Write;

use super::{GpuVariant, THREADS};
use crate::Dtype;

/// The start of every kernel.
const PRELUDE: &str = include_str!("prelude.wgsl");

/// The WGSL of one kernel of a file, for a GPU where so many threads share a row, with the number of its
/// tensors; none if the file has no such kernel, or its signature is not as above.
pub(super) fn expand(
    file: &str,
    kernel: &str,
    variant: &GpuVariant,
    per_row: usize,
) -> Option<(String, usize)> {
    // What a language's extensions are asked for by comes before all else.
    let (enable, file) =
        file.split_once('\n').filter(|(line, _)| line.starts_with("enable ")).unwrap_or(("", file));
    let (shared, _) = file.split_once("\nkernel ")?;
    let start = file.find(&format!("\nkernel {kernel}("))? + 1;
    let own = &file[start..];
    let own = own[1..].find("\nkernel ").map_or(own, |end| &own[..=end]);
    let (head, body) = own.split_once(") {")?;
    let (_, parameters) = head.split_once('(')?;
    let threads = variant.size("THREADS").unwrap_or(THREADS);
    let mut text = format!(
        "{enable}\nconst THREADS: u32 = {threads}u;\nconst PER_ROW: u32 = {per_row}u;\n{PRELUDE}"
    );
    for (name, value) in variant.sizes.iter().filter(|(name, _)| *name != "THREADS") {
        writeln!(text, "const {name}: u32 = {value}u;").ok()?;
    }
    let (mut fields, mut tensors) = (String::new(), 0);
    for parameter in parameters.split(',') {
        let (name, kind) = parameter.trim().split_once(": ")?;
        let (is_written, kind) =
            kind.strip_prefix("mut ").map_or((false, kind), |kind| (true, kind));
        match kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
            None => write!(fields, " {name}: {kind},").ok()?,
            Some(format) => {
                write!(fields, " {name}_at: u32,").ok()?;
                let (format, is_wide) = match format.split_once(" by ") {
                    None => (format, None),
                    Some((format, wide)) => (format, Some(variant.size(wide)? == 1)),
                };
                let functions = tensor(name, format_of(format, variant)?, is_written, is_wide);
                text.push_str(&functions.replace("BINDING", &tensors.to_string()));
                tensors += 1;
            }
        }
    }
    writeln!(
        text,
        "struct Arguments {{ first_group: u32,{fields} }}\nvar<immediate> p: Arguments;"
    )
    .ok()?;
    text.push_str(shared);
    text.push_str(ENTRY);
    text.push_str(body);
    Some((text, tensors))
}

/// The entry point of a kernel.
const ENTRY: &str = "
@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group_id: vec3<u32>) {
    let group = p.first_group + group_id.x;
    let thread = group * THREADS + lane;
";

/// The functions of one tensor. Of one that is read by eights, `is_wide` says whether they are whole.
fn tensor(name: &str, format: Dtype, is_written: bool, is_wide: Option<bool>) -> String {
    let mut parts = match (format, is_written) {
        (Dtype::F32, _) if is_wide == Some(true) => vec![include_str!("tensor/f32_wide.wgsl")],
        (Dtype::Bf16 | Dtype::F16, _) if is_wide == Some(true) => {
            vec![include_str!("tensor/half_wide.wgsl")]
        }
        (Dtype::U8, _) if is_wide == Some(true) => vec![include_str!("tensor/u8_wide.wgsl")],
        (Dtype::F32, false) => vec![include_str!("tensor/f32.wgsl")],
        (Dtype::F32, true) => {
            vec![include_str!("tensor/f32.wgsl"), include_str!("tensor/f32_mut.wgsl")]
        }
        (Dtype::Bf16 | Dtype::F16, false) => vec![include_str!("tensor/half.wgsl")],
        (Dtype::Bf16 | Dtype::F16, true) => vec![include_str!("tensor/half_mut.wgsl")],
        (Dtype::U32 | Dtype::I32, false) => vec![include_str!("tensor/u32.wgsl")],
        (Dtype::U32 | Dtype::I32, true) => vec![include_str!("tensor/u32_mut.wgsl")],
        (Dtype::U8, false) => vec![include_str!("tensor/u8.wgsl")],
        (Dtype::U8, true) => {
            vec![include_str!("tensor/u8.wgsl"), include_str!("tensor/u8_mut.wgsl")]
        }
    };
    if is_wide == Some(false) {
        parts.push(include_str!("tensor/eight.wgsl"));
        if is_written {
            parts.push(include_str!("tensor/eight_mut.wgsl"));
        }
    }
    if is_wide.is_some() && is_written {
        parts.push(include_str!("tensor/put_eight.wgsl"));
    }
    let [eight, number] = if format == Dtype::U8 { ["Codes", "u32"] } else { ["Eight", "f32"] };
    let text = parts.concat().replace("EIGHT", eight).replace("NUMBER", number);
    text.replace("NAME", name).replace("FORMAT", &format.to_string())
}

/// What a dtype in a kernel's signature stands for.
fn format_of(name: &str, variant: &GpuVariant) -> Option<Dtype> {
    let letter = ["X", "Y", "Z", "V"].iter().position(|letter| *letter == name);
    match (letter, name) {
        (Some(index), _) => variant.formats.get(index).or(variant.formats.last()).copied(),
        (None, "f32") => Some(Dtype::F32),
        (None, "u32") => Some(Dtype::U32),
        (None, "u8") => Some(Dtype::U8),
        _ => None,
    }
}
