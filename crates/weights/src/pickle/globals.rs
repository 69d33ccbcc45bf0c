//! The allow-list: every function and class of Python that a pickle may name.

use crate::dtype::Dtype;

/// A function or class a pickle may name, and what we make of it.
#[derive(Debug, PartialEq, Eq)]
pub struct Global {
    pub(super) module: &'static str,
    pub(super) name: &'static str,
    pub(super) role: Role,
}

impl Global {
    /// As Python code spells it.
    pub fn full_name(&self) -> String {
        format!("{}.{}", self.module, self.name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Called: an empty dict.
    OrderedDict,
    /// Called: a tensor in a storage that knows its number format.
    Tensor,
    /// Called: a tensor that brings its number format along.
    TypedTensor,
    /// Called: the tensor it was given.
    Parameter,
    /// Called: the tuple it was given.
    Size,
    /// Called: the words it was given.
    Device,
    /// Names the number format of a storage.
    Storage(Dtype),
    /// A number format; nothing for those we do not read.
    Number(Option<Dtype>),
    /// PyTorch's own and harmless, but tensors we do not read.
    Refused,
}

const fn global(module: &'static str, name: &'static str, role: Role) -> Global {
    Global { module, name, role }
}

/// Everything a pickle may name. Taken: what `Tensor.__reduce_ex__` and `torch.save` of PyTorch
/// 2.15 write, and its `_dtype_to_storage_type_map`. Number formats without a storage class of their
/// own come as an untyped storage (bytes) and a dtype.
pub(super) const GLOBALS: &[Global] = &[
    global("collections", "OrderedDict", Role::OrderedDict),
    global("torch._utils", "_rebuild_tensor_v2", Role::Tensor),
    global("torch._utils", "_rebuild_tensor_v3", Role::TypedTensor),
    global("torch._utils", "_rebuild_parameter", Role::Parameter),
    global("torch._utils", "_rebuild_parameter_with_state", Role::Parameter),
    global("torch", "Size", Role::Size),
    global("torch", "device", Role::Device),
    global("torch", "BoolStorage", Role::Storage(Dtype::Bool)),
    global("torch", "ByteStorage", Role::Storage(Dtype::U8)),
    global("torch", "CharStorage", Role::Storage(Dtype::I8)),
    global("torch", "ShortStorage", Role::Storage(Dtype::I16)),
    global("torch", "IntStorage", Role::Storage(Dtype::I32)),
    global("torch", "LongStorage", Role::Storage(Dtype::I64)),
    global("torch", "HalfStorage", Role::Storage(Dtype::F16)),
    global("torch", "BFloat16Storage", Role::Storage(Dtype::Bf16)),
    global("torch", "FloatStorage", Role::Storage(Dtype::F32)),
    global("torch", "DoubleStorage", Role::Storage(Dtype::F64)),
    global("torch", "ComplexFloatStorage", Role::Storage(Dtype::C64)),
    global("torch", "UntypedStorage", Role::Storage(Dtype::U8)),
    global("torch.storage", "UntypedStorage", Role::Storage(Dtype::U8)),
    global("torch", "bool", Role::Number(Some(Dtype::Bool))),
    global("torch", "uint8", Role::Number(Some(Dtype::U8))),
    global("torch", "int8", Role::Number(Some(Dtype::I8))),
    global("torch", "float8_e5m2", Role::Number(Some(Dtype::F8E5M2))),
    global("torch", "float8_e4m3fn", Role::Number(Some(Dtype::F8E4M3))),
    global("torch", "float8_e8m0fnu", Role::Number(Some(Dtype::F8E8M0))),
    global("torch", "uint16", Role::Number(Some(Dtype::U16))),
    global("torch", "int16", Role::Number(Some(Dtype::I16))),
    global("torch", "float16", Role::Number(Some(Dtype::F16))),
    global("torch", "bfloat16", Role::Number(Some(Dtype::Bf16))),
    global("torch", "uint32", Role::Number(Some(Dtype::U32))),
    global("torch", "int32", Role::Number(Some(Dtype::I32))),
    global("torch", "float32", Role::Number(Some(Dtype::F32))),
    global("torch", "uint64", Role::Number(Some(Dtype::U64))),
    global("torch", "int64", Role::Number(Some(Dtype::I64))),
    global("torch", "float64", Role::Number(Some(Dtype::F64))),
    global("torch", "complex64", Role::Number(Some(Dtype::C64))),
    global("torch", "complex32", Role::Number(None)),
    global("torch", "complex128", Role::Number(None)),
    global("torch", "float8_e5m2fnuz", Role::Number(None)),
    global("torch", "float8_e4m3fnuz", Role::Number(None)),
    global("torch", "float4_e2m1fn_x2", Role::Number(None)),
    // Without a number format of its own; `torch.save` never writes it.
    global("torch.storage", "TypedStorage", Role::Refused),
    global("torch", "ComplexDoubleStorage", Role::Refused),
    global("torch", "QInt8Storage", Role::Refused),
    global("torch", "QInt32Storage", Role::Refused),
    global("torch", "QUInt8Storage", Role::Refused),
    global("torch", "QUInt4x2Storage", Role::Refused),
    global("torch", "QUInt2x4Storage", Role::Refused),
    global("torch._utils", "_rebuild_qtensor", Role::Refused),
    global("torch._utils", "_rebuild_sparse_tensor", Role::Refused),
    global("torch._utils", "_rebuild_nested_tensor", Role::Refused),
    global("torch._utils", "_rebuild_meta_tensor_no_storage", Role::Refused),
    global("torch._tensor", "_rebuild_from_type_v2", Role::Refused),
];
