//! NVIDIA: what NVML and the CUDA driver say, joined GPU by GPU through the PCI address.
//! Either of the two may be missing (containers, half-installed drivers).

use crate::NvidiaStack;
use crate::gpu::{ComputeCapability, GpuTelemetry, NvidiaGpu, ThrottleReason};
use crate::hardware::nvidia_features;
use crate::key_values::KeyValueLines;
use crate::reading::{Bytes, Celsius, Megahertz, Percent, Reading, Unknown, Watts};
use crate::source::{ProbeAnswer, ProbeQuery, ProbeSource};

/// Chosen: more GPUs than any machine has; a library that claims a billion is not followed.
const MAX_GPUS: u32 = 64;

pub struct NvidiaInfo {
    pub stack: NvidiaStack,
    pub gpus: Vec<NvidiaGpu>,
}

pub fn probe(source: &mut ProbeSource) -> NvidiaInfo {
    let nvml = source.ask(ProbeQuery::Nvml);
    let cuda = source.ask(ProbeQuery::Cuda);
    let nvml_gpus = gpus(source, &nvml, ProbeQuery::NvmlGpu);
    let cuda_gpus = gpus(source, &cuda, ProbeQuery::CudaGpu);
    let pairs = join(&nvml_gpus, &cuda_gpus, &cuda);
    let stack = stack(source, &nvml, &cuda, !pairs.is_empty());
    let gpus = pairs.iter().zip(0..).map(|(pair, index)| gpu(source, pair, index)).collect();
    NvidiaInfo { stack, gpus }
}

/// Telemetry of the GPU of that place in [`Machine::gpus`](crate::Machine::gpus): NVML's order leads there.
pub fn telemetry(source: &mut ProbeSource, index: u32) -> GpuTelemetry {
    let nvml = source.ask(ProbeQuery::NvmlTelemetry(index));
    GpuTelemetry {
        temperature: source
            .number("NVML", &nvml, "temperature_celsius")
            .and_then(Celsius::from_sensor),
        power: watts(source, &nvml, "power_milliwatts"),
        clock: source.number("NVML", &nvml, "sm_clock_mhz").map(Megahertz),
        utilisation: source.number("NVML", &nvml, "utilisation_percent").map(Percent),
        memory_utilisation: source.number("NVML", &nvml, "memory_utilisation_percent").map(Percent),
        throttle: source.number("NVML", &nvml, "throttle_bits").map(ThrottleReason::from_bits),
    }
}

fn watts(source: &ProbeSource, nvml: &ProbeAnswer, key: &str) -> Reading<Watts> {
    let milliwatts = source.number::<f64>("NVML", nvml, key);
    milliwatts.and_then(|milliwatts| Watts::from_meter(milliwatts / 1000.0))
}

fn gpus(
    source: &mut ProbeSource,
    library: &ProbeAnswer,
    question: fn(u32) -> ProbeQuery<'static>,
) -> Vec<ProbeAnswer> {
    let count = source.number("", library, "cards").value.unwrap_or(0);
    (0..count.min(MAX_GPUS)).map(|index| source.ask(question(index))).collect()
}

fn stack(
    source: &mut ProbeSource,
    nvml: &ProbeAnswer,
    cuda: &ProbeAnswer,
    has_gpus: bool,
) -> NvidiaStack {
    const MODULE: &str = "/proc/driver/nvidia/version";
    let module = source.file(MODULE).and_then(|text| module_version(&text));
    // Loading these libraries takes tens of milliseconds, which a machine without a GPU is spared.
    let libraries = if has_gpus {
        source.ask(ProbeQuery::CudaLibraries)
    } else {
        Err(Unknown::because("no GPU to use it with"))
    };
    let library = |key| source.text("library", &libraries, key);
    NvidiaStack {
        kernel_module: source.reading(MODULE, module),
        driver: source.text("NVML", nvml, "driver"),
        cuda: source.text("CUDA driver", cuda, "cuda").or(source.text("NVML", nvml, "cuda")),
        nvrtc: library("nvrtc"),
        cublaslt: library("cublaslt"),
        cudnn: library("cudnn"),
        nccl: library("nccl"),
    }
}

/// The first line reads e.g. `NVRM version: … Kernel Module  580.95.05  Release Build …`.
fn module_version(text: &str) -> Result<String, Unknown> {
    let first = text.lines().next().unwrap_or_default();
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    let found = first.split_whitespace().find(is_version);
    found.map(str::to_owned).ok_or_else(|| Unknown(format!("no version in {first:?}")))
}

/// One GPU in the words of both libraries.
struct GpuAnswers {
    nvml: ProbeAnswer,
    cuda: ProbeAnswer,
    cuda_index: Result<u32, Unknown>,
}

/// NVML's order leads, since it also lists GPUs that `CUDA_VISIBLE_DEVICES` hides.
fn join(nvml: &[ProbeAnswer], cuda: &[ProbeAnswer], library: &ProbeAnswer) -> Vec<GpuAnswers> {
    let hidden = match library {
        Ok(_) => Unknown::because("CUDA does not show this GPU"),
        Err(reason) => reason.clone(),
    };
    let mut left: Vec<_> = cuda.iter().zip(0..).collect();
    let mut pairs = Vec::new();
    for gpu in nvml {
        let same = |(other, _): &(&ProbeAnswer, u32)| {
            address(gpu).is_some() && address(other) == address(gpu)
        };
        pairs.push(match left.iter().position(same).map(|at| left.remove(at)) {
            Some((twin, index)) => {
                GpuAnswers { nvml: gpu.clone(), cuda: twin.clone(), cuda_index: Ok(index) }
            }
            None => GpuAnswers {
                nvml: gpu.clone(),
                cuda: Err(hidden.clone()),
                cuda_index: Err(hidden.clone()),
            },
        });
    }
    let unmanaged = Unknown::because("NVML does not show this GPU");
    pairs.extend(left.into_iter().map(|(gpu, index)| GpuAnswers {
        nvml: Err(unmanaged.clone()),
        cuda: gpu.clone(),
        cuda_index: Ok(index),
    }));
    pairs
}

/// NVML writes the PCI domain with eight digits, CUDA with four.
fn address(gpu: &ProbeAnswer) -> Option<String> {
    let written = KeyValueLines::new(gpu.as_ref().ok()?).text("pci_bus_id").ok()?;
    Some(written.trim_start_matches('0').to_lowercase())
}

fn gpu(source: &mut ProbeSource, pair: &GpuAnswers, index: u32) -> NvidiaGpu {
    let GpuAnswers { nvml, cuda, cuda_index } = pair;
    let telemetry = telemetry(source, index);
    let source = &*source;
    let text = |key| source.text("NVML", nvml, key).or(source.text("CUDA driver", cuda, key));
    let capability = text("compute_capability").and_then(|text| parse_capability(&text));
    let flag = |key| source.number("CUDA driver", cuda, key).map(|flag: u32| flag == 1);
    let unified = flag("integrated");
    let memory = |key| source.number("NVML", nvml, key).map(Bytes);
    let slowdown = source.number("NVML", nvml, "slowdown_celsius").and_then(Celsius::from_sensor);
    NvidiaGpu {
        cuda_index: source.reading("CUDA driver", cuda_index.clone()),
        name: text("name"),
        pci_bus_id: text("pci_bus_id"),
        features: nvidia_features(&capability.value, &unified.value),
        capability,
        unified,
        // NVML does not report the memory of unified GPUs; the CUDA driver does.
        memory_total: memory("memory_total_bytes")
            .or(source.number("CUDA driver", cuda, "memory_total_bytes").map(Bytes)),
        memory_free: memory("memory_free_bytes"),
        multiprocessors: source.number("CUDA driver", cuda, "multiprocessors"),
        pageable_memory_access: flag("pageable_memory_access"),
        gpu_direct_rdma: flag("gpu_direct_rdma"),
        telemetry,
        slowdown,
        power_limit: watts(source, nvml, "power_limit_milliwatts"),
        clock_max: source.number("NVML", nvml, "sm_clock_max_mhz").map(Megahertz),
        ecc_uncorrected: source.number("NVML", nvml, "ecc_uncorrected"),
    }
}

fn parse_capability(text: &str) -> Result<ComputeCapability, Unknown> {
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some(ComputeCapability::new(major.parse().ok()?, minor.parse().ok()?))
    };
    parse().ok_or_else(|| Unknown(format!("not a compute capability: {text:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::testing::source;

    #[test]
    fn cards_are_joined_by_address_not_by_number() {
        let mut source = source(&[
            ("nvml", "driver: 580.95.05\ncuda: 13.0\ncards: 2\n"),
            ("nvml card 0", "name: first\npci_bus_id: 00000000:01:00.0\n"),
            ("nvml card 1", "name: second\npci_bus_id: 0000000F:01:00.0\n"),
            ("cuda", "cuda: 13.0\ncards: 1\n"),
            ("cuda card 0", "name: second\npci_bus_id: 000f:01:00.0\nintegrated: 1\n"),
        ]);
        let gpus = probe(&mut source).gpus;
        assert_eq!(gpus.len(), 2);
        assert_eq!(gpus[0].cuda_index.value, Err(Unknown::because("CUDA does not show this GPU")));
        assert_eq!(gpus[1].cuda_index.value, Ok(0));
        assert_eq!(gpus[1].unified.value, Ok(true));
    }

    #[test]
    fn cuda_alone_is_enough_to_see_a_gpu() {
        let mut source = source(&[
            ("cuda", "cuda: 12.8\ncards: 1\n"),
            (
                "cuda card 0",
                "name: NVIDIA X\ncompute_capability: 8.6\nintegrated: 0\nmemory_total_bytes: 7\n",
            ),
        ]);
        let nvidia = probe(&mut source);
        assert_eq!(nvidia.gpus[0].memory_total.value, Ok(Bytes(7)));
        assert_eq!(nvidia.gpus[0].capability.value, Ok(ComputeCapability::new(8, 6)));
        assert!(nvidia.gpus[0].telemetry.temperature.value.is_err());
        assert_eq!(nvidia.stack.cuda.value, Ok("12.8".into()));
    }

    #[test]
    fn a_library_that_claims_a_billion_cards_is_not_followed() {
        let mut source = source(&[("nvml", "cards: 1000000000\n")]);
        assert_eq!(probe(&mut source).gpus.len(), MAX_GPUS as usize);
    }

    #[test]
    fn the_kernel_module_names_its_version() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\nGCC\n";
        assert_eq!(module_version(open), Ok("580.95.05".into()));
        assert!(module_version("").is_err());
    }
}
