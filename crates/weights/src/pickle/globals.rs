//! The allow-list: every function and class of Python that a pickle may name.

use crate::dtype::FileDtype;

/// A function or class a pickle may name, and what we make of it.
#[derive(Debug, PartialEq, Eq)]
pub struct PickleGlobal {
    pub(super) module: &'static str,
    pub(super) name: &'static str,
    pub(super) role: GlobalRole,
}

impl PickleGlobal {
    /// As Python code spells it.
    pub fn full_name(&self) -> String {
        format!("{}.{}", self.module, self.name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GlobalRole {
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
    Storage(FileDtype),
    /// A number format; nothing for those we do not read.
    Dtype(Option<FileDtype>),
    /// PyTorch's own and harmless, but tensors we do not read.
    Refused,
}

const fn global(module: &'static str, name: &'static str, role: GlobalRole) -> PickleGlobal {
    PickleGlobal { module, name, role }
}

/// Everything a pickle may name. Taken: what `Tensor.__reduce_ex__` and `torch.save` of PyTorch
/// 2.15 write, and its `_dtype_to_storage_type_map`. Number formats without a storage class of their
/// own come as an untyped storage (bytes) and a dtype.
pub(super) const GLOBALS: &[PickleGlobal] = &[
    global("collections", "OrderedDict", GlobalRole::OrderedDict),
    global("torch._utils", "_rebuild_tensor_v2", GlobalRole::Tensor),
    global("torch._utils", "_rebuild_tensor_v3", GlobalRole::TypedTensor),
    global("torch._utils", "_rebuild_parameter", GlobalRole::Parameter),
    global("torch._utils", "_rebuild_parameter_with_state", GlobalRole::Parameter),
    global("torch", "Size", GlobalRole::Size),
    global("torch", "device", GlobalRole::Device),
    global("torch", "BoolStorage", GlobalRole::Storage(FileDtype::Bool)),
    global("torch", "ByteStorage", GlobalRole::Storage(FileDtype::U8)),
    global("torch", "CharStorage", GlobalRole::Storage(FileDtype::I8)),
    global("torch", "ShortStorage", GlobalRole::Storage(FileDtype::I16)),
    global("torch", "IntStorage", GlobalRole::Storage(FileDtype::I32)),
    global("torch", "LongStorage", GlobalRole::Storage(FileDtype::I64)),
    global("torch", "HalfStorage", GlobalRole::Storage(FileDtype::F16)),
    global("torch", "BFloat16Storage", GlobalRole::Storage(FileDtype::Bf16)),
    global("torch", "FloatStorage", GlobalRole::Storage(FileDtype::F32)),
    global("torch", "DoubleStorage", GlobalRole::Storage(FileDtype::F64)),
    global("torch", "ComplexFloatStorage", GlobalRole::Storage(FileDtype::C64)),
    global("torch", "UntypedStorage", GlobalRole::Storage(FileDtype::U8)),
    global("torch.storage", "UntypedStorage", GlobalRole::Storage(FileDtype::U8)),
    global("torch", "bool", GlobalRole::Dtype(Some(FileDtype::Bool))),
    global("torch", "uint8", GlobalRole::Dtype(Some(FileDtype::U8))),
    global("torch", "int8", GlobalRole::Dtype(Some(FileDtype::I8))),
    global("torch", "float8_e5m2", GlobalRole::Dtype(Some(FileDtype::F8E5M2))),
    global("torch", "float8_e4m3fn", GlobalRole::Dtype(Some(FileDtype::F8E4M3))),
    global("torch", "float8_e8m0fnu", GlobalRole::Dtype(Some(FileDtype::F8E8M0))),
    global("torch", "uint16", GlobalRole::Dtype(Some(FileDtype::U16))),
    global("torch", "int16", GlobalRole::Dtype(Some(FileDtype::I16))),
    global("torch", "float16", GlobalRole::Dtype(Some(FileDtype::F16))),
    global("torch", "bfloat16", GlobalRole::Dtype(Some(FileDtype::Bf16))),
    global("torch", "uint32", GlobalRole::Dtype(Some(FileDtype::U32))),
    global("torch", "int32", GlobalRole::Dtype(Some(FileDtype::I32))),
    global("torch", "float32", GlobalRole::Dtype(Some(FileDtype::F32))),
    global("torch", "uint64", GlobalRole::Dtype(Some(FileDtype::U64))),
    global("torch", "int64", GlobalRole::Dtype(Some(FileDtype::I64))),
    global("torch", "float64", GlobalRole::Dtype(Some(FileDtype::F64))),
    global("torch", "complex64", GlobalRole::Dtype(Some(FileDtype::C64))),
    global("torch", "complex32", GlobalRole::Dtype(None)),
    global("torch", "complex128", GlobalRole::Dtype(None)),
    global("torch", "float8_e5m2fnuz", GlobalRole::Dtype(None)),
    global("torch", "float8_e4m3fnuz", GlobalRole::Dtype(None)),
    global("torch", "float4_e2m1fn_x2", GlobalRole::Dtype(None)),
    // Without a number format of its own; `torch.save` never writes it.
    global("torch.storage", "TypedStorage", GlobalRole::Refused),
    global("torch", "ComplexDoubleStorage", GlobalRole::Refused),
    global("torch", "QInt8Storage", GlobalRole::Refused),
    global("torch", "QInt32Storage", GlobalRole::Refused),
    global("torch", "QUInt8Storage", GlobalRole::Refused),
    global("torch", "QUInt4x2Storage", GlobalRole::Refused),
    global("torch", "QUInt2x4Storage", GlobalRole::Refused),
    global("torch._utils", "_rebuild_qtensor", GlobalRole::Refused),
    global("torch._utils", "_rebuild_sparse_tensor", GlobalRole::Refused),
    global("torch._utils", "_rebuild_nested_tensor", GlobalRole::Refused),
    global("torch._utils", "_rebuild_meta_tensor_no_storage", GlobalRole::Refused),
    global("torch._tensor", "_rebuild_from_type_v2", GlobalRole::Refused),
];
