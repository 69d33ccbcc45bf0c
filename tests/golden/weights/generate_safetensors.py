"""Writes python.safetensors, a tensor of every number format, and python.expected.json with its bytes.

Needs torch, numpy and safetensors from PyPI: python generate_safetensors.py
"""
import json
import pathlib

import safetensors
import torch
from safetensors.torch import save_file

FORMATS = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
}


def noise(dtype, shape):
    """Random bits, so that every number, infinity and NaN included, may occur."""
    count = torch.Size(shape).numel()
    size = torch.empty(0, dtype=dtype).element_size()
    highest = 2 if dtype == torch.bool else 256
    return torch.randint(0, highest, (count * size,), dtype=torch.uint8).view(dtype).reshape(shape)


torch.manual_seed(4)
here = pathlib.Path(__file__).parent
tensors = {f"matrix.{name}": noise(dtype, (3, 5)) for name, dtype in FORMATS.items()}
tensors |= {"scalar": noise(torch.float32, ()), "empty": noise(torch.float16, (0, 4)), "größe.重み": noise(torch.uint8, (7,))}
save_file(tensors, here / "python.safetensors", metadata={"format": "pt", "note": "größer"})
expected = {
    name: {"shape": list(tensor.shape), "hex": bytes(tensor.reshape(-1).view(torch.uint8).tolist()).hex()}
    for name, tensor in tensors.items()
}
made_with = {"torch": torch.__version__, "safetensors": safetensors.__version__}
text = json.dumps({"made_with": made_with, "tensors": expected}, indent=1, ensure_ascii=False)
(here / "python.expected.json").write_text(text + "\n")
