//! cuDNN's graphs: some operations on tensors that it fuses into one kernel, described once and planned
//! once per shape. It has only what attention needs; where the library is missing, or has no plan for a
//! graph, the caller falls back to its own kernels.
//!
//! Constants and signatures are taken from `cudnn_graph_v9.h` of cuDNN 9.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use super::library::{functions, names, open};
use crate::{ComputeError, Dtype, Result};

functions! {
    /// What is used of `libcudnn`.
    Functions {
        cudnnCreate(*mut *mut c_void);
        cudnnDestroy(*mut c_void);
        cudnnSetStream(*mut c_void, *mut c_void);
        cudnnBackendCreateDescriptor(c_int, *mut *mut c_void);
        cudnnBackendDestroyDescriptor(*mut c_void);
        cudnnBackendSetAttribute(*mut c_void, c_int, c_int, i64, *const c_void);
        cudnnBackendGetAttribute(*mut c_void, c_int, c_int, i64, *mut i64, *mut c_void);
        cudnnBackendFinalize(*mut c_void);
        cudnnBackendExecute(*mut c_void, *mut c_void, *mut c_void);
    }
}

/// `cudnnBackendAttributeType_t`, with the type of Rust that each is given as.
mod kind {
    pub const HANDLE: i32 = 0;
    pub const DATA_TYPE: i32 = 1;
    pub const BOOLEAN: i32 = 2;
    pub const INT64: i32 = 3;
    pub const POINTER: i32 = 6;
    pub const HEURISTIC: i32 = 8;
    pub const POINTWISE: i32 = 14;
    pub const DESCRIPTOR: i32 = 15;
    pub const REDUCTION: i32 = 18;
}

/// `cudnnBackendDescriptorType_t`.
mod descriptor {
    pub const POINTWISE: i32 = 0;
    pub const ENGINE_CONFIG: i32 = 3;
    pub const HEURISTIC: i32 = 4;
    pub const PLAN: i32 = 5;
    pub const POINTWISE_OPERATION: i32 = 13;
    pub const GRAPH: i32 = 15;
    pub const VARIANT_PACK: i32 = 16;
    pub const TENSOR: i32 = 17;
    pub const MATMUL: i32 = 18;
    pub const MATMUL_OPERATION: i32 = 19;
    pub const REDUCTION: i32 = 21;
    pub const REDUCTION_OPERATION: i32 = 22;
    pub const RESHAPE_OPERATION: i32 = 31;
}

/// `CUDNN_HEUR_MODE_A`: rules, which take no time.
const BY_RULES: i32 = 3;

/// The library, bound to a stream.
pub(crate) struct Cudnn {
    functions: Arc<Functions>,
    handle: *mut c_void,
}

// SAFETY: the handle is used under the lock of whoever holds this value.
unsafe impl Send for Cudnn {}
// SAFETY: as above.
unsafe impl Sync for Cudnn {}

impl Cudnn {
    /// For work on a stream of the context that is current.
    pub fn open(stream: *mut c_void) -> Result<Self> {
        let functions = Arc::new(Functions::find(open(&names("cudnn", &["9"]))?)?);
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        check("cudnnCreate", unsafe { (functions.cudnnCreate)(&raw mut handle) })?;
        let cudnn = Self { functions, handle };
        // SAFETY: the stream outlives the handle, by the caller.
        check("cudnnSetStream", unsafe { (cudnn.functions.cudnnSetStream)(handle, stream) })?;
        Ok(cudnn)
    }

    /// A graph without operations.
    pub fn graph(&self) -> Graph<'_> {
        Graph { cudnn: self, operations: Vec::new(), held: Vec::new(), next: FIRST_TEMPORARY }
    }

    /// Runs a plan on tensors, and on numbers of the host, by their names.
    pub fn run(
        &self,
        plan: &CudnnPlan,
        tensors: &[(i64, u64)],
        numbers: &[(i64, f32)],
        workspace: u64,
    ) -> Result<()> {
        let pack = self.descriptor(descriptor::VARIANT_PACK)?;
        let on_host = numbers.iter().map(|(name, number)| (*name, (&raw const *number) as u64));
        let (names, places): (Vec<i64>, Vec<u64>) = tensors.iter().copied().chain(on_host).unzip();
        pack.set(1000, kind::INT64, &names)?;
        pack.set(1001, kind::POINTER, &places)?;
        pack.set(1003, kind::POINTER, &[workspace])?;
        pack.finish()?;
        // SAFETY: the plan and the pack are finished, tensors lie where they are said to, by the
        // caller, and the host's numbers are read before this returns.
        check("cudnnBackendExecute", unsafe {
            (self.functions.cudnnBackendExecute)(self.handle, plan.plan.raw, pack.raw)
        })
    }

    fn descriptor(&self, of: c_int) -> Result<Descriptor> {
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (self.functions.cudnnBackendCreateDescriptor)(of, &raw mut raw) };
        check("cudnnBackendCreateDescriptor", status)?;
        Ok(Descriptor { functions: Arc::clone(&self.functions), raw })
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own.
        unsafe { (self.functions.cudnnDestroy)(self.handle) };
    }
}

/// Names of tensors that exist in a kernel only begin here.
const FIRST_TEMPORARY: i64 = 1000;

/// `cudnnPointwiseMode_t`.
#[derive(Clone, Copy)]
pub(crate) enum Pointwise {
    Add = 0,
    Multiply = 1,
    Divide = 6,
    Subtract = 9,
    Exp = 13,
    Log = 15,
    Copy = 21,
    AtLeast = 303,
    Index = 501,
    Select = 601,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Clone, Copy)]
pub(crate) enum Reduction {
    Sum = 0,
    Max = 3,
}

/// Four sizes and strides.
#[derive(Clone, Copy)]
pub(crate) struct TensorLayout {
    pub sizes: [usize; 4],
    pub strides: [usize; 4],
}

impl TensorLayout {
    /// Contiguous.
    pub fn dense(sizes: [usize; 4]) -> Self {
        let [_, b, c, d] = sizes;
        Self { sizes, strides: [b * c * d, c * d, d, 1] }
    }

    /// With the last two dimensions transposed.
    pub fn t(self) -> Self {
        let ([a, b, c, d], [w, x, y, z]) = (self.sizes, self.strides);
        Self { sizes: [a, b, d, c], strides: [w, x, z, y] }
    }
}

/// A tensor of a graph.
#[derive(Clone, Copy)]
pub(crate) struct GraphTensor(*mut c_void);

/// Operations that are to become one plan.
pub(crate) struct Graph<'a> {
    cudnn: &'a Cudnn,
    operations: Vec<Descriptor>,
    /// What the operations speak of.
    held: Vec<Descriptor>,
    next: i64,
}

impl Graph<'_> {
    /// A tensor in memory, by its name.
    pub fn tensor(&mut self, name: i64, layout: TensorLayout, dtype: Dtype) -> Result<GraphTensor> {
        self.value(name, layout, dtype, [false, false])
    }

    /// A number of the host, by its name.
    pub fn number(&mut self, name: i64) -> Result<GraphTensor> {
        self.value(name, TensorLayout::dense([1; 4]), Dtype::F32, [false, true])
    }

    /// A tensor that need not exist.
    pub fn temporary(&mut self, layout: TensorLayout, dtype: Dtype) -> Result<GraphTensor> {
        self.next += 1;
        self.value(self.next, layout, dtype, [true, false])
    }

    fn value(
        &mut self,
        name: i64,
        layout: TensorLayout,
        dtype: Dtype,
        [is_temporary, is_number]: [bool; 2],
    ) -> Result<GraphTensor> {
        let tensor = self.cudnn.descriptor(descriptor::TENSOR)?;
        let [sizes, steps] = [layout.sizes, layout.strides].map(|all| all.map(|size| size as u64));
        tensor.set(901, kind::DATA_TYPE, &[data_type(dtype)])?;
        tensor.set(902, kind::INT64, &sizes)?;
        tensor.set(903, kind::INT64, &steps)?;
        tensor.set(906, kind::INT64, &[name])?;
        tensor.set(900, kind::INT64, &[ALIGNMENT])?;
        tensor.set(907, kind::BOOLEAN, &[is_temporary])?;
        tensor.set(908, kind::BOOLEAN, &[is_number])?;
        tensor.finish()?;
        Ok(self.hold(tensor))
    }

    fn hold(&mut self, made: Descriptor) -> GraphTensor {
        let value = GraphTensor(made.raw);
        self.held.push(made);
        value
    }

    /// to = a·b
    pub fn matmul(&mut self, a: GraphTensor, b: GraphTensor, to: GraphTensor) -> Result<()> {
        let matmul = self.cudnn.descriptor(descriptor::MATMUL)?;
        matmul.set(1500, kind::DATA_TYPE, &[data_type(Dtype::F32)])?;
        matmul.finish()?;
        let matmul = self.hold(matmul);
        let parts = [(1520, a), (1521, b), (1522, to), (1523, matmul)];
        self.operation(descriptor::MATMUL_OPERATION, &parts)
    }

    /// to = x, or x and b, elementwise.
    pub fn pointwise(
        &mut self,
        mode: Pointwise,
        x: GraphTensor,
        b: Option<GraphTensor>,
        to: GraphTensor,
    ) -> Result<()> {
        let how = self.pointwise_descriptor(mode, Dtype::F32)?;
        let second = b.map(|b| (752, b));
        self.pointwise_operation(how, [(751, x), (753, to)].into_iter().chain(second))
    }

    /// to = the index of each element of x along a dimension.
    pub fn gen_index(&mut self, dimension: i64, x: GraphTensor, to: GraphTensor) -> Result<()> {
        let how = self.pointwise_descriptor(Pointwise::Index, Dtype::F32)?;
        how.set(9, kind::INT64, &[dimension])?;
        self.pointwise_operation(how, [(751, x), (753, to)])
    }

    /// to = whether a is at least b.
    pub fn at_least(&mut self, a: GraphTensor, b: GraphTensor, to: GraphTensor) -> Result<()> {
        let how = self.pointwise_descriptor(Pointwise::AtLeast, BOOL_DTYPE)?;
        self.pointwise_operation(how, [(751, a), (752, b), (753, to)])
    }

    /// to = x where the condition holds, else b.
    pub fn select(
        &mut self,
        is_so: GraphTensor,
        x: GraphTensor,
        b: GraphTensor,
        to: GraphTensor,
    ) -> Result<()> {
        let how = self.pointwise_descriptor(Pointwise::Select, Dtype::F32)?;
        self.pointwise_operation(how, [(751, x), (752, b), (758, is_so), (753, to)])
    }

    fn pointwise_descriptor(&self, mode: Pointwise, precision: Dtype) -> Result<Descriptor> {
        let how = self.cudnn.descriptor(descriptor::POINTWISE)?;
        how.set(0, kind::POINTWISE, &[mode as c_int])?;
        how.set(1, kind::DATA_TYPE, &[data_type(precision)])?;
        Ok(how)
    }

    fn pointwise_operation(
        &mut self,
        how: Descriptor,
        tensors: impl IntoIterator<Item = (c_int, GraphTensor)>,
    ) -> Result<()> {
        how.finish()?;
        let mut parts = vec![(750, self.hold(how))];
        parts.extend(tensors);
        self.operation(descriptor::POINTWISE_OPERATION, &parts)
    }

    /// to = x summed up, or its largest, in all dimensions that `to` has one of.
    pub fn reduce(&mut self, mode: Reduction, x: GraphTensor, to: GraphTensor) -> Result<()> {
        let reduction = self.cudnn.descriptor(descriptor::REDUCTION)?;
        reduction.set(1600, kind::REDUCTION, &[mode as c_int])?;
        reduction.set(1601, kind::DATA_TYPE, &[data_type(Dtype::F32)])?;
        reduction.finish()?;
        let parts = [(1610, x), (1611, to), (1612, self.hold(reduction))];
        self.operation(descriptor::REDUCTION_OPERATION, &parts)
    }

    /// to = x in another layout.
    pub fn reshape(&mut self, x: GraphTensor, to: GraphTensor) -> Result<()> {
        self.operation(descriptor::RESHAPE_OPERATION, &[(2200, x), (2201, to)])
    }

    fn operation(&mut self, of: c_int, parts: &[(c_int, GraphTensor)]) -> Result<()> {
        let operation = self.cudnn.descriptor(of)?;
        for (attribute, value) in parts {
            operation.set(*attribute, kind::DESCRIPTOR, &[value.0])?;
        }
        operation.finish()?;
        self.operations.push(operation);
        Ok(())
    }

    /// The plan that the library's rules like best.
    pub fn plan(self) -> Result<CudnnPlan> {
        let (cudnn, handle) = (self.cudnn, self.cudnn.handle);
        let graph = cudnn.descriptor(descriptor::GRAPH)?;
        let operations: Vec<_> = self.operations.iter().map(|operation| operation.raw).collect();
        graph.set(801, kind::DESCRIPTOR, &operations)?;
        graph.set(800, kind::HANDLE, &[handle])?;
        graph.finish()?;
        let rules = cudnn.descriptor(descriptor::HEURISTIC)?;
        rules.set(201, kind::DESCRIPTOR, &[graph.raw])?;
        rules.set(200, kind::HEURISTIC, &[BY_RULES])?;
        rules.finish()?;
        let config = cudnn.descriptor(descriptor::ENGINE_CONFIG)?;
        let mut place = config.raw;
        rules.get(202, kind::DESCRIPTOR, &mut place)?;
        let plan = cudnn.descriptor(descriptor::PLAN)?;
        plan.set(400, kind::HANDLE, &[handle])?;
        plan.set(401, kind::DESCRIPTOR, &[config.raw])?;
        plan.finish()?;
        let mut workspace = 0u64;
        plan.get(402, kind::INT64, &mut workspace)?;
        Ok(CudnnPlan { plan, workspace: workspace as usize })
    }
}

/// How a graph is run.
pub(crate) struct CudnnPlan {
    plan: Descriptor,
    /// Bytes it needs besides its tensors.
    pub workspace: usize,
}

/// An object of the library's, destroyed when dropped.
struct Descriptor {
    functions: Arc<Functions>,
    raw: *mut c_void,
}

// SAFETY: a handle, used under the lock of whoever holds the library.
unsafe impl Send for Descriptor {}

impl Descriptor {
    fn set<T>(&self, attribute: c_int, of: c_int, values: &[T]) -> Result<()> {
        // SAFETY: reads so many values, whose type is that of `kind`, by the callers above.
        check("cudnnBackendSetAttribute", unsafe {
            (self.functions.cudnnBackendSetAttribute)(
                self.raw,
                attribute,
                of,
                (values.len() as u64).cast_signed(),
                values.as_ptr().cast(),
            )
        })
    }

    fn get<T>(&self, attribute: c_int, of: c_int, to: &mut T) -> Result<()> {
        let mut count = 0;
        // SAFETY: writes at most one value of the type of `kind`, by the callers above.
        let status = unsafe {
            (self.functions.cudnnBackendGetAttribute)(
                self.raw,
                attribute,
                of,
                1,
                &raw mut count,
                (&raw mut *to).cast(),
            )
        };
        check("cudnnBackendGetAttribute", if count == 0 { NOT_SUPPORTED } else { status })
    }

    fn finish(&self) -> Result<()> {
        // SAFETY: the object is this value's own.
        check("cudnnBackendFinalize", unsafe { (self.functions.cudnnBackendFinalize)(self.raw) })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the object is this value's own.
        unsafe { (self.functions.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}

/// Every tensor starts at a multiple of so many bytes at the least.
const ALIGNMENT: i64 = 16;

/// The dtype of booleans.
pub(crate) const BOOL_DTYPE: Dtype = Dtype::U8;

/// `cudnnDataType_t`.
fn data_type(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::F16 => 2,
        Dtype::I32 => 4,
        Dtype::Bf16 => 9,
        BOOL_DTYPE => 11,
        _ => 0,
    }
}

/// `CUDNN_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: c_int = 3000;

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(ComputeError::Cuda { call, code, name: "an error of cuDNN".into() })
}
