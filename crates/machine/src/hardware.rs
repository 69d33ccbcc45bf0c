//! What each kind of hardware can do, as data with its source. Code elsewhere asks this table and
//! never compares a compute capability or a chip's name itself.

use std::fmt;

use serde::Serialize;

use crate::cpu::{CpuFeature, CpuInfo};
use crate::gpu::{AppleChip, AppleTier, ComputeCapability};
use crate::reading::Unknown;

/// Something the hardware has or lacks, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Feature {
    /// What it is.
    pub name: FeatureName,
    /// Whether it is there; nothing if that cannot be told.
    pub on: Option<bool>,
    /// Why, or by what it was recognised.
    pub why: String,
}

/// The features that bear on training speed and memory; [`crate::uses`] says which of them hearth uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureName {
    /// Instructions that multiply small matrices, named in the reason.
    MatrixInstructions,
    /// bf16 matmuls.
    Bf16,
    /// f32 matmuls with inputs rounded to 19 bits.
    Tf32,
    /// Matmuls of 8-bit floating point.
    Fp8,
    /// One memory for CPU and GPU.
    UnifiedMemory,
}

impl fmt::Display for FeatureName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MatrixInstructions => "matrix instructions",
            Self::Bf16 => "bf16",
            Self::Tf32 => "tf32",
            Self::Fp8 => "fp8",
            Self::UnifiedMemory => "unified memory",
        })
    }
}

/// The oldest GPU the CUDA engine is written for. Chosen: bf16 and tf32 begin here.
pub const MIN_CAPABILITY: ComputeCapability = ComputeCapability::new(8, 0);

/// The oldest CUDA that a driver must speak, with the first Linux driver that does. Chosen:
/// libraries of CUDA 12 run on every driver from R525 on (NVIDIA, "CUDA compatibility").
pub const MIN_CUDA: CudaVersion = CudaVersion { major: 12, minor: 0, driver: "525.60.13" };

/// A CUDA version and the first Linux driver that speaks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaVersion {
    /// Before the point.
    pub major: u32,
    /// After it.
    pub minor: u32,
    /// First driver, from the table in NVIDIA's CUDA 13.1 release notes.
    pub driver: &'static str,
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

const CUDA_12_8: CudaVersion = CudaVersion { major: 12, minor: 8, driver: "570.26" };
const CUDA_12_9: CudaVersion = CudaVersion { major: 12, minor: 9, driver: "575.51.03" };
const CUDA_13_0: CudaVersion = CudaVersion { major: 13, minor: 0, driver: "580.65.06" };

/// One generation of NVIDIA GPUs.
#[derive(Debug)]
pub struct NvidiaArch {
    /// The capability it begins with; it ends where the next row begins.
    pub capability: ComputeCapability,
    /// NVIDIA's name.
    pub name: &'static str,
    /// The newest matrix instructions of its tensor cores.
    pub matrix_instructions: &'static str,
    /// Whether tensor cores multiply bf16 and tf32.
    pub bf16_tf32: bool,
    /// Whether tensor cores multiply fp8.
    pub fp8: bool,
    /// FLOPs on bf16 that the tensor cores of a multiprocessor do in a clock cycle, summed in f32; those of the
    /// slowest GPU of the class.
    pub flops_per_cycle: f64,
    /// Bytes per second of memory for each multiprocessor, likewise.
    pub bandwidth: f64,
    /// The first CUDA whose compiler knows it, at least [`MIN_CUDA`].
    pub cuda: CudaVersion,
}

/// Sources: formats and instructions, NVIDIA "CUDA Programming Guide", compute capabilities,
/// tables 29 to 33; wgmma only on capability 9.0, tcgen05 only on 10.x and 11.0 (PTX ISA, targets
/// `sm_90a`, `sm_100f`, `sm_103f`, `sm_110f`); first CUDA, the PTX version that adds the target (LLVM `NVPTX.td`).
/// FLOPs and bytes: worked out from NVIDIA's data sheets, dense, of A100, A10, Orin, RTX 4090 and L4, the H100 for PCI
/// Express, B200, B300, Thor, RTX PRO 6000 and DGX Spark; Turing's are those of T4.
pub const NVIDIA_ARCHS: &[NvidiaArch] = &[
    arch(7, 5, "Turing", "mma.sync, f16 only", [false, false], [1024.0, 8e9], MIN_CUDA),
    arch(8, 0, "Ampere", "mma.sync", [true, false], [2048.0, 14e9], MIN_CUDA),
    arch(8, 6, "Ampere", "mma.sync", [true, false], [512.0, 8e9], MIN_CUDA),
    arch(8, 7, "Ampere (Orin)", "mma.sync", [true, false], [2048.0, 12e9], MIN_CUDA),
    arch(8, 9, "Ada", "mma.sync", [true, true], [512.0, 5e9], MIN_CUDA),
    arch(9, 0, "Hopper", "wgmma", [true, true], [4096.0, 17e9], MIN_CUDA),
    arch(10, 0, "Blackwell", "tcgen05", [true, true], [8192.0, 54e9], CUDA_12_8),
    arch(10, 3, "Blackwell Ultra", "tcgen05", [true, true], [8192.0, 54e9], CUDA_12_9),
    arch(11, 0, "Blackwell (Thor)", "tcgen05", [true, true], [8192.0, 13e9], CUDA_13_0),
    arch(12, 0, "Blackwell (consumer)", "mma.sync", [true, true], [512.0, 9e9], CUDA_12_8),
    arch(12, 1, "Blackwell (GB10)", "mma.sync", [true, true], [1024.0, 5.6e9], CUDA_12_9),
];

const fn arch(
    major: u32,
    minor: u32,
    name: &'static str,
    matrix_instructions: &'static str,
    [bf16_tf32, fp8]: [bool; 2],
    [flops_per_cycle, bandwidth]: [f64; 2],
    cuda: CudaVersion,
) -> NvidiaArch {
    let capability = ComputeCapability::new(major, minor);
    NvidiaArch {
        capability,
        name,
        matrix_instructions,
        bf16_tf32,
        fp8,
        flops_per_cycle,
        bandwidth,
        cuda,
    }
}

/// The row for a capability: the newest that is not newer. A GPU from after this table is taken
/// for the last one in it, which is safe because NVIDIA keeps `mma.sync` in every later GPU.
pub fn nvidia_arch(capability: ComputeCapability) -> Option<&'static NvidiaArch> {
    NVIDIA_ARCHS.iter().rev().find(|class| class.capability <= capability)
}

/// What an NVIDIA GPU can do.
pub fn nvidia_features(
    capability: &Result<ComputeCapability, Unknown>,
    unified: &Result<bool, Unknown>,
) -> Vec<Feature> {
    let class = match capability {
        Ok(capability) => nvidia_arch(*capability).ok_or_else(|| {
            Unknown(format!("compute capability {capability} is older than the table"))
        }),
        Err(reason) => Err(reason.clone()),
    };
    let since = |first: &str, has: fn(&NvidiaArch) -> bool| match &class {
        Ok(class) if has(class) => (Some(true), format!("tensor cores of {}", class.name)),
        Ok(class) => {
            (Some(false), format!("needs compute capability {first}, {} has none", class.name))
        }
        Err(reason) => (None, reason.0.clone()),
    };
    let matrix = match &class {
        Ok(class) => (Some(true), format!("{}, {}", class.matrix_instructions, class.name)),
        Err(reason) => (None, reason.0.clone()),
    };
    let unified = match unified {
        Ok(true) => (Some(true), "the driver calls the GPU integrated".into()),
        Ok(false) => (Some(false), "the GPU has memory of its own".into()),
        Err(reason) => (None, reason.0.clone()),
    };
    [
        (FeatureName::MatrixInstructions, matrix),
        (FeatureName::Bf16, since("8.0", |class| class.bf16_tf32)),
        (FeatureName::Tf32, since("8.0", |class| class.bf16_tf32)),
        (FeatureName::Fp8, since("8.9", |class| class.fp8)),
        (FeatureName::UnifiedMemory, unified),
    ]
    .map(|(name, (on, why))| Feature { name, on, why })
    .into()
}

/// The first macOS whose Metal has a bf16 type. Source: Metal Shading Language 3.1.
const BF16_MACOS: u32 = 14;

/// What the GPU of an Apple chip can do. Sources: Apple, "Metal feature set tables" (simdgroup
/// matrices since family Apple7, which is the M1; matrix units in each core since Apple10, the M5)
/// and "Metal Shading Language", number types by version.
pub fn apple_features(
    chip: &Result<AppleChip, Unknown>,
    macos: &Result<u32, Unknown>,
    unified: &Result<bool, Unknown>,
) -> Vec<Feature> {
    let matrix = match chip {
        Ok(chip) if chip.family >= 5 => {
            (Some(true), "simdgroup matrices, matrix units in each core".to_owned())
        }
        Ok(_) => (Some(true), "simdgroup matrices".into()),
        Err(reason) => (None, reason.0.clone()),
    };
    let bf16 = match macos {
        Ok(version) if *version >= BF16_MACOS => (Some(true), format!("Metal of macOS {version}")),
        Ok(version) => (Some(false), format!("needs macOS {BF16_MACOS}, this is macOS {version}")),
        Err(reason) => (None, reason.0.clone()),
    };
    let unified = match unified {
        Ok(true) => (Some(true), "Metal says so".to_owned()),
        Ok(false) => (Some(false), "Metal says so".into()),
        Err(reason) => (None, reason.0.clone()),
    };
    [
        (FeatureName::MatrixInstructions, matrix),
        (FeatureName::Bf16, bf16),
        (FeatureName::Tf32, (Some(false), "Apple GPUs have no such format".into())),
        (
            FeatureName::Fp8,
            (Some(false), "no Apple GPU is known to multiply fp8 in hardware".into()),
        ),
        (FeatureName::UnifiedMemory, unified),
    ]
    .map(|(name, (on, why))| Feature { name, on, why })
    .into()
}

/// FLOPs per second of one core of an Apple GPU, in f32. Source: Apple, 2.6 TFLOPS of the 8 cores of
/// an M1 and 3.6 of the 10 of an M2; of later chips it publishes nothing, so they are taken for an M2.
pub fn apple_core_flops(chip: AppleChip) -> f64 {
    if chip.family <= 1 { 2.6e12 / 8.0 } else { 3.6e12 / 10.0 }
}

/// Bytes per second of an Apple chip's memory, by family. Source: Apple's specifications; where a chip is sold
/// with two, the lower. An M4 Ultra was never made; those above the M5 stand here as the family before.
const APPLE_BANDWIDTH: &[(u32, [(AppleTier, f64); 4])] = &[
    (1, tiers(68e9, 200e9, 400e9, 800e9)),
    (2, tiers(100e9, 200e9, 400e9, 800e9)),
    (3, tiers(100e9, 150e9, 300e9, 819e9)),
    (4, tiers(120e9, 273e9, 410e9, 819e9)),
    (5, tiers(153e9, 273e9, 410e9, 819e9)),
];

const fn tiers(base: f64, pro: f64, max: f64, ultra: f64) -> [(AppleTier, f64); 4] {
    [
        (AppleTier::Base, base),
        (AppleTier::Pro, pro),
        (AppleTier::Max, max),
        (AppleTier::Ultra, ultra),
    ]
}

/// Bytes per second of an Apple chip's memory.
pub fn apple_bandwidth(chip: AppleChip) -> Option<f64> {
    let (_, tiers) = APPLE_BANDWIDTH.iter().rev().find(|(family, _)| *family <= chip.family)?;
    tiers.iter().find(|(tier, _)| *tier == chip.tier).map(|(_, bytes)| *bytes)
}

/// What the CPU can do.
pub fn cpu_features(cpu: &CpuInfo) -> Vec<Feature> {
    let first_of = |wanted: &[CpuFeature], without: &str| match (
        &cpu.features.value,
        wanted.iter().find(|feature| cpu.has(**feature)),
    ) {
        (_, Some(found)) => (Some(true), found.label().to_owned()),
        (Ok(_), None) => (Some(false), without.to_owned()),
        (Err(reason), None) => (None, reason.0.clone()),
    };
    let matrix = [CpuFeature::AmxBf16, CpuFeature::AmxInt8, CpuFeature::Sme2, CpuFeature::ArmBf16];
    let matrix = first_of(&matrix, "none that hearth knows");
    let bf16 = [CpuFeature::AmxBf16, CpuFeature::Avx512Bf16, CpuFeature::ArmBf16];
    let bf16 = first_of(&bf16, "no bf16 instructions");
    [
        (FeatureName::MatrixInstructions, matrix),
        (FeatureName::Bf16, bf16),
        (FeatureName::Tf32, (Some(false), "CPUs have no such format".into())),
        (FeatureName::Fp8, (Some(false), "no CPU instructions known for it".into())),
    ]
    .map(|(name, (on, why))| Feature { name, on, why })
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert!(NVIDIA_ARCHS.is_sorted_by_key(|class| class.capability));
    }

    #[test]
    fn capabilities_find_their_generation() {
        let name = |major, minor| {
            nvidia_arch(ComputeCapability::new(major, minor)).map(|class| class.name)
        };
        assert_eq!(name(7, 0), None);
        assert_eq!(name(8, 9), Some("Ada"));
        assert_eq!(name(9, 0), Some("Hopper"));
        assert_eq!(name(12, 1), Some("Blackwell (GB10)"));
        assert_eq!(name(13, 0), Some("Blackwell (GB10)"), "newer GPUs are taken for the last row");
    }

    #[test]
    fn memory_of_apple_chips_is_as_published_or_as_before() {
        let memory = |family, tier| apple_bandwidth(AppleChip { family, tier });
        assert_eq!(memory(1, AppleTier::Base), Some(68e9));
        assert_eq!(memory(2, AppleTier::Ultra), Some(800e9));
        assert_eq!(memory(4, AppleTier::Pro), Some(273e9));
        assert_eq!(memory(9, AppleTier::Base), memory(5, AppleTier::Base));
        assert_eq!(memory(0, AppleTier::Base), None);
    }

    #[test]
    fn only_what_the_silicon_has_is_on() {
        let check = |major, minor, fp8, matrix: &str| {
            let features = nvidia_features(&Ok(ComputeCapability::new(major, minor)), &Ok(false));
            let find = |name| features.iter().find(|feature| feature.name == name).unwrap();
            assert_eq!(find(FeatureName::Fp8).on, Some(fp8), "{major}.{minor}");
            assert!(find(FeatureName::MatrixInstructions).why.starts_with(matrix), "{features:?}");
        };
        check(8, 6, false, "mma.sync");
        check(8, 9, true, "mma.sync");
        check(9, 0, true, "wgmma");
        check(12, 1, true, "mma.sync");
    }

    #[test]
    fn what_cannot_be_read_is_neither_on_nor_off() {
        let lost = Err(Unknown::because("NVML not found"));
        let features = nvidia_features(&lost, &Err(Unknown::because("CUDA not found")));
        assert!(features.iter().all(|feature| feature.on.is_none()), "{features:?}");
    }
}
