//! The CPU: what it is called, how many cores we may use, and the instructions that decide
//! how fast the CPU engine runs.

use serde::Serialize;

use crate::reading::Reading;

/// The CPU of a machine.
#[derive(Clone, Debug, Serialize)]
pub struct CpuInfo {
    /// Its name, e.g. `Apple M3 Max` or `10 × Cortex-X925 + 10 × Cortex-A725`.
    pub model: Reading<String>,
    /// Hardware threads of the machine.
    pub threads: Reading<u32>,
    /// Threads that this process may keep busy: affinity and container quota taken off.
    pub usable_threads: Reading<u32>,
    /// Cores of the fastest kind, each counted once however many threads it has.
    pub performance_cores: Reading<u32>,
    /// The instruction sets hearth looks for.
    pub features: Reading<Vec<CpuFeature>>,
}

impl CpuInfo {
    /// Threads that ops on the CPU run on by default, as [`crate::cores::compute_threads`] chooses them.
    pub fn compute_threads(&self) -> Option<u32> {
        let usable = self.usable_threads.known().copied()?;
        Some(self.performance_cores.known().map_or(usable, |cores| usable.min(*cores)))
    }

    /// Whether the CPU is known to have a feature.
    pub fn has(&self, feature: CpuFeature) -> bool {
        self.features.known().is_some_and(|found| found.contains(&feature))
    }
}

/// An instruction set that makes matmuls faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuFeature {
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors (F, BW, DQ, VL).
    Avx512,
    /// bf16 dot products in 512-bit vectors.
    Avx512Bf16,
    /// bf16 matrix tiles.
    AmxBf16,
    /// int8 matrix tiles.
    AmxInt8,
    /// 128-bit Arm vectors.
    Neon,
    /// Arm bf16 dot products and matmuls.
    ArmBf16,
    /// Arm int8 matmuls.
    ArmI8mm,
    /// Scalable Arm vectors, second version.
    Sve2,
    /// Arm matrix tiles, second version.
    Sme2,
}

/// One row of [`CPU_FEATURES`].
pub struct CpuFeatureNames {
    /// The feature.
    pub feature: CpuFeature,
    /// As people write it.
    pub label: &'static str,
    /// Words that must all stand in `/proc/cpuinfo` (`flags` on x86, `Features` on Arm).
    pub linux: &'static [&'static str],
    /// `sysctl` names that must all be 1 on macOS.
    pub macos: &'static [&'static str],
}

/// How each feature is spelled. Sources: Linux `arch/x86/include/asm/cpufeatures.h` and
/// `arch/arm64/kernel/cpuinfo.c`; Apple, "Determining instruction set characteristics".
pub const CPU_FEATURES: &[CpuFeatureNames] = &[
    row(CpuFeature::Avx2, "AVX2", &["avx2", "fma"], &["hw.optional.avx2_0", "hw.optional.fma"]),
    row(
        CpuFeature::Avx512,
        "AVX-512",
        &["avx512f", "avx512bw", "avx512dq", "avx512vl"],
        &[
            "hw.optional.avx512f",
            "hw.optional.avx512bw",
            "hw.optional.avx512dq",
            "hw.optional.avx512vl",
        ],
    ),
    row(CpuFeature::Avx512Bf16, "AVX-512 bf16", &["avx512_bf16"], &["hw.optional.avx512bf16"]),
    row(CpuFeature::AmxBf16, "AMX bf16", &["amx_tile", "amx_bf16"], &[]),
    row(CpuFeature::AmxInt8, "AMX int8", &["amx_tile", "amx_int8"], &[]),
    row(CpuFeature::Neon, "NEON", &["asimd"], &["hw.optional.arm64"]),
    row(CpuFeature::ArmBf16, "bf16", &["bf16"], &["hw.optional.arm.FEAT_BF16"]),
    row(CpuFeature::ArmI8mm, "i8mm", &["i8mm"], &["hw.optional.arm.FEAT_I8MM"]),
    row(CpuFeature::Sve2, "SVE2", &["sve2"], &[]),
    row(CpuFeature::Sme2, "SME2", &["sme2"], &["hw.optional.arm.FEAT_SME2"]),
];

const fn row(
    feature: CpuFeature,
    label: &'static str,
    linux: &'static [&'static str],
    macos: &'static [&'static str],
) -> CpuFeatureNames {
    CpuFeatureNames { feature, label, linux, macos }
}

impl CpuFeature {
    /// As people write it.
    pub fn label(self) -> &'static str {
        let found = CPU_FEATURES.iter().find(|names| names.feature == self);
        found.expect("every feature has a row").label
    }
}

/// The features whose names are all present.
pub fn features_present(
    names: impl Fn(&CpuFeatureNames) -> &'static [&'static str],
    present: impl Fn(&str) -> bool,
) -> Vec<CpuFeature> {
    let has = |row: &&CpuFeatureNames| {
        !names(row).is_empty() && names(row).iter().all(|name| present(name))
    };
    CPU_FEATURES.iter().filter(has).map(|row| row.feature).collect()
}
