"""Writes quantised.gguf: numbers, and the blocks that llama.cpp makes of them without an importance matrix.

    pip install gguf numpy llama-cpp-python
    python generate_quantised.py

Made with gguf 0.19.0, numpy 2.4.6 and llama-cpp-python 0.3.36 (llama.cpp 0c1e570) from PyPI, with fixed seeds. The
quantiser is ggml_quantize_chunk of ggml, in a build without fused multiply-add, which rounds other sums.
"""

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Type

FORMATS = [Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K]
BLOCK = 256


def numbers():
    random = np.random.default_rng(1)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    rows = [normal(BLOCK) * 0.02 for _ in range(8)]
    rows.append(random.random(BLOCK, np.float32))  # positive
    rows.append(-1 - random.random(BLOCK, np.float32))  # negative
    rows.append(normal(BLOCK) ** 5)  # outliers
    rows.append(np.zeros(BLOCK, np.float32))
    rows.append(np.full(BLOCK, 0.3, np.float32))
    rows.append(np.full(BLOCK, -0.3, np.float32))
    rows.append(np.repeat(normal(BLOCK // 16), 16))
    rows.append(np.round(normal(BLOCK)) / 3)  # few different numbers
    # The last four: scales that are zero, or become so as too small beside others or for half precision.
    rows.append(normal(BLOCK) * np.float32(1e-6))
    zeros = normal(BLOCK)
    zeros[64:160] = 0
    rows.append(zeros)
    rows.append(normal(BLOCK) * np.repeat(np.float32([1, 1e-4] * 8), 16))
    rows.append(normal(BLOCK) * np.repeat(np.float32([1, 1e-4] * 4), 32))
    return np.stack(rows)


def main():
    base = ctypes.CDLL(str(Path(llama_cpp.llama_cpp._lib._name).with_name("libggml-base.so")))
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
                                         ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    values = numbers()
    writer = gguf.GGUFWriter(Path(__file__).parent / "quantised.gguf", "llama")
    writer.add_tensor("values", values)
    for format in FORMATS:
        per_block, bytes = gguf.GGML_QUANT_SIZES[format]
        out = np.zeros((len(values), BLOCK // per_block * bytes), np.uint8)
        size = base.ggml_quantize_chunk(format.value, values.ctypes.data, out.ctypes.data, 0, len(values), BLOCK, None)
        assert size == out.nbytes
        writer.add_tensor(format.name, out, raw_dtype=format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
