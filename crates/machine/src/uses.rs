//! What hearth uses of a device, apart from what the hardware has ([`crate::hardware`]): which kernels
//! compute attention and matmuls, and which number formats are only storage. Kept in step with the
//! `attention` and `matmul` ops of `compute` by hand.

use std::fmt;

use serde::Serialize;

use crate::cpu::{CpuFeature, CpuInfo};
use crate::hardware::nvidia_arch;
use crate::{Machine, NvidiaStack};

/// How one thing is done on a device, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceUse {
    /// What is done.
    pub name: UseName,
    /// Whether the device computes with it.
    pub role: UseRole,
    /// By which kernel or library, or why not.
    pub how: String,
}

/// What may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UseName {
    /// Attention without the N × N matrix.
    Attention,
    /// bf16 matmuls.
    Bf16,
    /// f32 matmuls with 19-bit inputs.
    Tf32,
    /// 8-bit floating point.
    Fp8,
}

/// What a format or a kernel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UseRole {
    /// Computed with.
    Compute,
    /// Weights may be stored so; they are converted for the matmul.
    Storage,
    /// Not used.
    Never,
}

impl fmt::Display for UseName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attention => "attention",
            Self::Bf16 => "bf16",
            Self::Tf32 => "tf32",
            Self::Fp8 => "fp8",
        })
    }
}

/// What hearth uses of an NVIDIA GPU.
pub fn cuda_uses(machine: &Machine) -> Vec<DeviceUse> {
    let cudnn = |stack: &NvidiaStack| stack.cudnn.known().cloned();
    let attention = match machine.nvidia.as_ref().and_then(cudnn) {
        Some(version) => format!(
            "fused kernel of cuDNN {version} for bf16 and f16 with heads of 64 or 128, hearth's flash kernel else"
        ),
        None => "hearth's flash kernel, since cuDNN was not found".to_owned(),
    };
    vec![
        used(UseName::Attention, UseRole::Compute, attention),
        used(UseName::Bf16, UseRole::Compute, "matmuls by cuBLASLt on tensor cores, summed in f32"),
        used(UseName::Tf32, UseRole::Never, "not enabled in cuBLASLt"),
        fp8_units(machine).unwrap_or_else(fp8),
    ]
}

/// Where matmuls may be in fp8.
fn fp8_units(machine: &Machine) -> Option<DeviceUse> {
    let mut archs =
        machine.nvidia_gpus().map(|gpu| gpu.capability.known().and_then(|it| nvidia_arch(*it)));
    let how = "with base.compute = \"fp8\" frozen layers multiply so; else weights may be fp8, and are converted";
    archs
        .any(|arch| arch.is_some_and(|arch| arch.fp8))
        .then(|| used(UseName::Fp8, UseRole::Compute, how))
}

/// What hearth uses of the GPU of an Apple chip.
pub fn metal_uses() -> Vec<DeviceUse> {
    vec![
        used(UseName::Attention, UseRole::Compute, "hearth's flash kernel, in f32"),
        used(
            UseName::Bf16,
            UseRole::Storage,
            "matmuls are in f32, by simdgroup matrices where Metal offers them and a trial is right",
        ),
        used(UseName::Tf32, UseRole::Never, "f32 is computed in full"),
        fp8(),
    ]
}

/// What hearth uses of the CPU.
pub fn cpu_uses(cpu: &CpuInfo) -> Vec<DeviceUse> {
    let vectors = [CpuFeature::Avx512, CpuFeature::Avx2, CpuFeature::Neon];
    let vectors = vectors.into_iter().find(|feature| cpu.has(*feature));
    let vectors = vectors.map_or("vectors", CpuFeature::label);
    // What packs the tiles are AVX-512 instructions.
    let has_amx = cpu.has(CpuFeature::AmxBf16) && cpu.has(CpuFeature::Avx512);
    let (bf16, tf32) = if has_amx {
        (
            used(UseName::Bf16, UseRole::Compute, "matmuls by AMX, summed in f32"),
            "f32 matmuls by AMX split each value into three bf16",
        )
    } else {
        (
            used(UseName::Bf16, UseRole::Storage, format!("matmuls are in f32, by {vectors}")),
            "f32 is computed in full",
        )
    };
    vec![
        used(
            UseName::Attention,
            UseRole::Compute,
            "hearth's flash kernel, blocked for the CPU's caches",
        ),
        bf16,
        used(UseName::Tf32, UseRole::Never, tf32),
        fp8(),
    ]
}

fn fp8() -> DeviceUse {
    used(UseName::Fp8, UseRole::Storage, "weights may be fp8, and are converted for the matmul")
}

fn used(name: UseName, role: UseRole, how: impl Into<String>) -> DeviceUse {
    DeviceUse { name, role, how: how.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::testing::source;

    fn role(uses: &[DeviceUse], name: UseName) -> UseRole {
        uses.iter().find(|used| used.name == name).unwrap().role
    }

    #[test]
    fn amx_needs_avx_512() {
        let bf16 = |flags: &str| {
            let info = format!("processor : 0\nflags : {flags}\n");
            let machine = Machine::probe(&mut source(&[("file /proc/cpuinfo", &info)]));
            role(&cpu_uses(&machine.cpu), UseName::Bf16)
        };
        let avx512 = "avx512f avx512bw avx512dq avx512vl";
        assert_eq!(bf16(&format!("{avx512} amx_tile amx_bf16")), UseRole::Compute);
        assert_eq!(bf16("amx_tile amx_bf16"), UseRole::Storage);
        assert_eq!(bf16(&format!("{avx512} avx512_bf16")), UseRole::Storage);
    }

    #[test]
    fn fp8_is_storage_and_tf32_is_never_used() {
        let machine = Machine::probe(&mut source(&[]));
        for uses in [cuda_uses(&machine), metal_uses(), cpu_uses(&machine.cpu)] {
            assert_eq!(role(&uses, UseName::Fp8), UseRole::Storage);
            assert_eq!(role(&uses, UseName::Tf32), UseRole::Never);
            assert_eq!(role(&uses, UseName::Attention), UseRole::Compute);
        }
    }

    #[test]
    fn fp8_is_computed_with_where_tensor_cores_can() {
        let role_of = |capability: &str| {
            let card = format!("pci_bus_id: 1\ncompute_capability: {capability}\nintegrated: 0\n");
            let answers = [("cuda", "cuda: 13.0\ncards: 1\n"), ("cuda card 0", card.as_str())];
            role(&cuda_uses(&Machine::probe(&mut source(&answers))), UseName::Fp8)
        };
        assert_eq!(["8.9", "9.0", "12.0"].map(role_of), [UseRole::Compute; 3]);
        assert_eq!(role_of("8.6"), UseRole::Storage);
    }

    #[test]
    fn attention_is_cudnns_where_it_was_found() {
        let attention = |answers: &[(&str, &str)]| {
            cuda_uses(&Machine::probe(&mut source(answers))).remove(0).how
        };
        let cuda = [
            ("cuda", "cuda: 13.0\ncards: 1\n"),
            ("cuda card 0", "pci_bus_id: 1\ncompute_capability: 8.6\nintegrated: 0\n"),
        ];
        let [found, lacking] = ["cudnn: 9.14.0\n", "nvrtc: 13.0\n"]
            .map(|libraries| attention(&[cuda[0], cuda[1], ("cuda libraries", libraries)]));
        assert!(found.contains("cuDNN 9.14.0"), "{found}");
        assert!(lacking.contains("not found"), "{lacking}");
    }
}
