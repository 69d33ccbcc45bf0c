//! An opened adapter: wgpu's device and queue, compiled kernels, and what went wrong. Devices of this
//! process on one adapter share it, so that kernels are compiled once.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType,
    BufferBindingType, ComputePipeline, ComputePipelineDescriptor, DeviceDescriptor, DeviceType,
    ErrorFilter, ExperimentalFeatures, Features, Limits, MemoryHints, PipelineCompilationOptions,
    PipelineLayout, PipelineLayoutDescriptor, ShaderModuleDescriptor, ShaderSource, ShaderStages,
    Trace,
};

use super::adapter::{MatrixUnits, all_adapters, block_on, describe, matrix_units};
use super::template::expand;
use super::{ARGUMENT_BYTES, GpuVariant, MIN_TENSORS, PER_ROW, WgslSource};
use crate::{ComputeError, Dtype, Result};

pub(super) struct WgpuContext {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    layouts: Mutex<HashMap<usize, Arc<KernelLayout>>>,
    kernels: Mutex<HashMap<(&'static str, &'static str, GpuVariant), GpuKernel>>,
    /// Whether it is a program on the CPU.
    pub is_software: bool,
    /// The matrix units that we have kernels for, and whether they were found to be right.
    pub matrix_units: Option<MatrixUnits>,
    pub matrix_units_agree: OnceLock<bool>,
    /// Shared with what wgpu calls when something goes wrong.
    pub fault: Arc<Mutex<Option<ComputeError>>>,
}

/// A compiled kernel.
#[derive(Clone)]
pub(super) struct GpuKernel {
    pub pipeline: ComputePipeline,
    pub layout: Arc<KernelLayout>,
}

/// How the tensors of a kernel are handed to it.
pub(super) struct KernelLayout {
    pub tensors: BindGroupLayout,
    pipeline: PipelineLayout,
}

impl WgpuContext {
    /// The adapter of this place among all; the one that is open already, if it still works.
    pub fn get(index: usize) -> Result<Arc<Self>> {
        static OPEN: Mutex<Vec<(usize, Weak<WgpuContext>)>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().expect("nothing panics while an adapter is opened");
        let shared =
            open.iter().find(|(at, _)| *at == index).and_then(|(_, opened)| opened.upgrade());
        if let Some(opened) = shared.filter(|opened| opened.check().is_ok()) {
            return Ok(opened);
        }
        let opened = Arc::new(Self::open(index)?);
        open.retain(|(at, _)| *at != index);
        open.push((index, Arc::downgrade(&opened)));
        Ok(opened)
    }

    /// The same, shared with nobody.
    pub fn open(index: usize) -> Result<Self> {
        let adapter = &all_adapters()[index];
        let (offered, units) = (adapter.limits(), matrix_units(adapter));
        let limits = Limits {
            max_buffer_size: offered.max_buffer_size,
            max_storage_buffer_binding_size: offered.max_storage_buffer_binding_size,
            max_storage_buffers_per_shader_stage: MIN_TENSORS as u32,
            max_compute_workgroup_storage_size: offered.max_compute_workgroup_storage_size,
            max_immediate_size: ARGUMENT_BYTES as u32,
            ..Limits::default()
        };
        let mut features = Features::IMMEDIATES;
        features.set(Features::MAPPABLE_PRIMARY_BUFFERS, describe(adapter).shares_memory);
        features.set(Features::EXPERIMENTAL_COOPERATIVE_MATRIX, units.is_some());
        let is_f16 = units.is_some_and(|units| units.element == Dtype::F16);
        features.set(Features::SHADER_F16, is_f16);
        let description = DeviceDescriptor {
            label: None,
            required_features: features,
            required_limits: limits,
            experimental_features: if units.is_some() {
                // SAFETY: matrix units are used by our own kernels alone, whose indices lie within the workgroup's
                // memory, and by no device before they agreed with plain matmuls.
                unsafe { ExperimentalFeatures::enabled() }
            } else {
                ExperimentalFeatures::disabled()
            },
            memory_hints: MemoryHints::MemoryUsage,
            trace: Trace::Off,
        };
        let (device, queue) = block_on(adapter.request_device(&description)).map_err(|error| {
            ComputeError::Gpu { call: "opening the GPU", message: error.to_string() }
        })?;
        let fault = Arc::new(Mutex::new(None));
        let (uncaught, lost) = (fault.clone(), fault.clone());
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            note(&uncaught, failed("a command", &error));
        }));
        // Dropping the device is a loss too, which nobody is there to ask about.
        device.set_device_lost_callback(move |_, message| {
            note(&lost, ComputeError::GpuLost { message });
        });
        let (layouts, kernels) = (Mutex::default(), Mutex::default());
        let is_software = adapter.get_info().device_type == DeviceType::Cpu;
        Ok(Self {
            device,
            queue,
            layouts,
            kernels,
            is_software,
            matrix_units: units,
            matrix_units_agree: OnceLock::new(),
            fault,
        })
    }

    /// Threads that share a row of numbers. Programs on a CPU run threads that wait for each other one
    /// after the other, so there nobody waits.
    pub fn per_row(&self) -> usize {
        if self.is_software { 1 } else { PER_ROW }
    }

    /// What went wrong since it was opened, if anything did.
    pub fn check(&self) -> Result<()> {
        let fault = self.fault.lock().expect("nothing panics while a fault is noted");
        fault.as_ref().map_or(Ok(()), |fault| Err(fault.again()))
    }

    /// Does something that wgpu may refuse, and says why it did.
    pub fn with_error_scope<T>(&self, call: &'static str, work: impl FnOnce() -> T) -> Result<T> {
        let memory = self.device.push_error_scope(ErrorFilter::OutOfMemory);
        let internal = self.device.push_error_scope(ErrorFilter::Internal);
        let validation = self.device.push_error_scope(ErrorFilter::Validation);
        let done = work();
        let refused =
            [block_on(validation.pop()), block_on(internal.pop()), block_on(memory.pop())];
        refused.into_iter().flatten().next().map_or(Ok(done), |error| Err(failed(call, &error)))
    }

    /// A kernel, compiled if it was not before.
    pub fn kernel(
        &self,
        source: &WgslSource,
        kernel: &'static str,
        variant: &GpuVariant,
    ) -> Result<GpuKernel> {
        let mut kernels = self.kernels.lock().expect("nothing panics while kernels are compiled");
        let key = (source.name, kernel, variant.clone());
        if let Some(found) = kernels.get(&key) {
            return Ok(found.clone());
        }
        let name = format!("{kernel} of {}", source.name);
        let fault = |message: String| ComputeError::GpuKernel { name: name.clone(), message };
        let (text, tensors) =
            expand(source.text, kernel, variant, self.per_row()).ok_or_else(|| {
                fault("the text has no such kernel, or its head cannot be read".into())
            })?;
        let layout = self.layout(tensors);
        let pipeline = self
            .with_error_scope("compiling a kernel", || self.compile(&text, &layout.pipeline))
            .map_err(|error| fault(error.to_string()))?;
        let made = GpuKernel { pipeline, layout };
        kernels.insert(key, made.clone());
        Ok(made)
    }

    fn compile(&self, text: &str, layout: &PipelineLayout) -> ComputePipeline {
        let source = ShaderSource::Wgsl(text.into());
        let module =
            self.device.create_shader_module(ShaderModuleDescriptor { label: None, source });
        self.device.create_compute_pipeline(&ComputePipelineDescriptor {
            label: None,
            layout: Some(layout),
            module: &module,
            entry_point: None,
            compilation_options: PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        })
    }

    /// For a kernel of so many tensors. All of them may be written: wgpu asks that one use of a buffer is
    /// the use of all, and they lie in the same few.
    fn layout(&self, n_tensors: usize) -> Arc<KernelLayout> {
        let mut layouts = self.layouts.lock().expect("nothing panics while a layout is made");
        let make = || {
            let ty = BufferBindingType::Storage { read_only: false };
            let entry = |binding: usize| BindGroupLayoutEntry {
                binding: binding as u32,
                visibility: ShaderStages::COMPUTE,
                ty: BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
                count: None,
            };
            let entries: Vec<_> = (0..n_tensors).map(entry).collect();
            let description = BindGroupLayoutDescriptor { label: None, entries: &entries };
            let tensors = self.device.create_bind_group_layout(&description);
            let pipeline = self.device.create_pipeline_layout(&PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&tensors)],
                immediate_size: ARGUMENT_BYTES as u32,
            });
            Arc::new(KernelLayout { tensors, pipeline })
        };
        layouts.entry(n_tensors).or_insert_with(make).clone()
    }
}

/// Keeps the first fault: it is the cause of all that follow.
fn note(fault: &Mutex<Option<ComputeError>>, error: ComputeError) {
    fault.lock().expect("nothing panics while a fault is noted").get_or_insert(error);
}

fn failed(call: &'static str, error: &wgpu::Error) -> ComputeError {
    match error {
        wgpu::Error::OutOfMemory { .. } => ComputeError::GpuMemory { call },
        other => ComputeError::Gpu { call, message: other.to_string() },
    }
}
