//! Kernels by name: compiled when first asked for, kept by the caller if it keeps such things, and
//! loaded once. A kernel source is written for element types X and Y, P elements at a time; these are its
//! variant, and each variant is a binary of its own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;

use super::driver::{CudaContext, CudaFunction, CudaModule, SmVersion};
use super::nvrtc::Nvrtc;
use super::{WARP, type_name};
use crate::{Dtype, Result};

/// Where compiled kernels are kept between runs; this crate touches no files.
pub trait KernelCache: Send + Sync {
    /// What was kept under a name.
    fn load(&self, name: &str) -> Option<Vec<u8>>;
    /// Keeps something under a name, or does not.
    fn store(&self, name: &str, kernels: &[u8]);
}

/// The source of some kernels.
pub(crate) struct CudaSource {
    pub name: &'static str,
    pub text: &'static str,
}

/// The start of all kernel sources.
pub(super) const PRELUDE: &str = include_str!("prelude.cuh");

/// Threads of a block that holds a row while each has few packs, the packs up to which threads stay so few, and the
/// most threads there can be. Chosen: fewer threads wait for fewer others, more packs take more registers.
const THREADS: usize = 256;
const PACKS: usize = 4;
const MOST_THREADS: usize = 1024;

/// What kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CudaVariant {
    /// X and Y; the last one given stands for those that are not.
    pub types: [Dtype; 2],
    /// Elements that a thread takes at a time.
    pub pack: usize,
    /// A compile-time constant of the kernel source, as D.
    pub size: usize,
}

impl CudaVariant {
    /// For these dtypes, one element at a time.
    pub fn of(types: &[Dtype]) -> Self {
        let first = types.first().copied().unwrap_or(Dtype::F32);
        let types = [first, types.get(1).copied().unwrap_or(first)];
        Self { types, pack: 1, size: 0 }
    }

    /// So many elements at a time.
    pub fn with_pack(self, pack: usize) -> Self {
        Self { pack, ..self }
    }

    /// For a block that holds a row of this width: how many packs each thread has, and how many threads it has.
    pub fn holding(self, width: usize) -> (Self, u32) {
        let packs = width / self.pack;
        let size = packs.div_ceil(THREADS).clamp(1, PACKS).max(packs.div_ceil(MOST_THREADS));
        let threads = packs.div_ceil(size).next_multiple_of(WARP).max(WARP);
        (Self { size, ..self }, threads as u32)
    }

    /// As options of the compiler.
    pub fn options(self, target: &str) -> Vec<String> {
        let [x, y] = self.types.map(type_name);
        vec![
            format!("--gpu-architecture={target}"),
            "--std=c++17".into(),
            format!("-DX={x}"),
            format!("-DY={y}"),
            format!("-DP={}", self.pack),
            format!("-DD={}", self.size),
            // A kernel source need not use all of the prelude.
            "--diag-suppress=177".into(),
        ]
    }
}

pub(super) struct CudaKernels {
    nvrtc: Nvrtc,
    target: String,
    cache: Option<Box<dyn KernelCache>>,
    loaded: Mutex<LoadedKernels>,
}

#[derive(Default)]
struct LoadedKernels {
    modules: HashMap<(&'static str, CudaVariant), CudaModule>,
    functions: HashMap<(&'static str, &'static str, CudaVariant), CudaFunction>,
}

impl CudaKernels {
    pub fn new(capability: SmVersion, cache: Option<Box<dyn KernelCache>>) -> Result<Self> {
        let nvrtc = Nvrtc::open()?;
        let target = nvrtc.target(capability);
        Ok(Self { nvrtc, target, cache, loaded: Mutex::default() })
    }

    /// A kernel, ready to start.
    pub fn get(
        &self,
        driver: &CudaContext,
        source: &'static CudaSource,
        function: &'static str,
        variant: CudaVariant,
    ) -> Result<CudaFunction> {
        let mut loaded = self.loaded.lock().expect("nothing panics while kernels are loaded");
        let LoadedKernels { modules, functions } = &mut *loaded;
        let key = (source.name, function, variant);
        if let Some(found) = functions.get(&key) {
            return Ok(*found);
        }
        let module = match modules.entry((source.name, variant)) {
            Entry::Occupied(module) => module.into_mut(),
            Entry::Vacant(place) => place.insert(driver.load(&self.compiled(source, variant)?)?),
        };
        let found = driver.function(module, function)?;
        functions.insert(key, found);
        Ok(found)
    }

    fn compiled(&self, source: &CudaSource, variant: CudaVariant) -> Result<Vec<u8>> {
        let text = [PRELUDE, source.text].concat();
        let options = variant.options(&self.target);
        let name = cache_name(source.name, &text, &options, &self.nvrtc.version());
        let cache = self.cache.as_ref();
        if let Some(kept) = cache.and_then(|cache| cache.load(&name)) {
            return Ok(kept);
        }
        let made = self.nvrtc.compile(source.name, &text, &options)?;
        if let Some(cache) = cache {
            cache.store(&name, &made);
        }
        Ok(made)
    }
}

/// A name that differs wherever the binary may: by source, options and compiler.
fn cache_name(source: &str, text: &str, options: &[String], version: &str) -> String {
    let mut hash = Fnv::default();
    for part in options.iter().map(String::as_str).chain([text, version]) {
        hash.add(part.as_bytes());
        hash.add(&[0]);
    }
    format!("{source}-{:032x}", hash.0)
}

/// The 128-bit hash of Fowler, Noll and Vo (variant 1a): offset and prime as they give them. Not made
/// to withstand an adversary, who could change the kept binaries themselves.
struct Fnv(u128);

impl Default for Fnv {
    fn default() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        for byte in bytes {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(PRIME);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_its_authors() {
        let hash = |text: &str| {
            let mut hash = Fnv::default();
            hash.add(text.as_bytes());
            format!("{:032x}", hash.0)
        };
        // From the authors' test vectors.
        assert_eq!(hash(""), "6c62272e07bb014262b821756295c58d");
        assert_eq!(hash("a"), "d228cb696f1a8caf78912b704e4a8964");
        assert_eq!(hash("foobar"), "343e1662793c64bf6f0d3597ba446f18");
    }

    #[test]
    fn names_differ_by_all_that_binaries_differ_by() {
        let options = |dtype| CudaVariant::of(&[dtype]).options("sm_90");
        let name = |text: &str, options: &[String], version: &str| {
            cache_name("add", text, options, version)
        };
        let first = name("a", &options(Dtype::F32), "13.0");
        assert_eq!(first, name("a", &options(Dtype::F32), "13.0"));
        assert_ne!(first, name("b", &options(Dtype::F32), "13.0"));
        assert_ne!(first, name("a", &options(Dtype::F16), "13.0"));
        assert_ne!(first, name("a", &options(Dtype::F32), "13.1"));
        assert_ne!(first, name("a", &CudaVariant::of(&[]).with_pack(8).options("sm_90"), "13.0"));
        assert_ne!(first, name("a", &CudaVariant::of(&[]).options("sm_80"), "13.0"));
    }
}
