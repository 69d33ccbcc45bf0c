//! Mapped memory. Tensors through a mapping of their file: nothing is read until it is touched, good
//! for looking at a few of many; a full load is faster and safer, and on DGX Spark copies from a
//! mapping are slow. And new memory to load into.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::PathBuf;

use memmap2::{Mmap, MmapMut};

use crate::catalog::Catalog;
use crate::error::{Result, WeightsError};
use crate::tensor::TensorInfo;

/// All files of a model, mapped.
pub struct MappedFiles(Vec<Mmap>);

impl MappedFiles {
    /// Maps every file of the catalog. Whoever changes one of them while it is mapped changes the
    /// values under us; whoever cuts one short ends the program when the lost part is touched.
    pub fn open(catalog: &Catalog) -> Result<Self> {
        let map = |path: &PathBuf| {
            let io = |source| WeightsError::io("map", path, source);
            let file = File::open(path).map_err(io)?;
            // SAFETY: the mapping is read-only and only bytes are read through it, so that a change
            // from outside gives wrong values, not wrong types; the caller was told not to change
            // the file.
            unsafe { Mmap::map(&file) }.map_err(io)
        };
        catalog.files.iter().map(map).collect::<Result<_>>().map(Self)
    }

    /// The bytes of a tensor as stored; nothing if the file has become shorter since it was opened.
    pub fn bytes(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        let start = usize::try_from(tensor.offset).ok()?;
        self.0.get(tensor.file)?.get(start..start.checked_add(usize::try_from(tensor.bytes).ok()?)?)
    }
}

/// Memory to load into as a run takes it: one piece, in large pages where the system has them.
pub fn map_anonymous(bytes: u64) -> io::Result<MmapMut> {
    let memory = MmapMut::map_anon(usize::try_from(bytes).map_err(io::Error::other)?.max(1))?;
    // A hint; without large pages the first touch of each small one takes longer.
    #[cfg(target_os = "linux")]
    memory.advise(memmap2::Advice::HugePage).ok();
    Ok(memory)
}
