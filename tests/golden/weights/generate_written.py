"""Writes written.gguf: what hearth's writer must make of the same metadata and numbers, byte for byte.

    pip install gguf numpy
    python generate_written.py

Made with gguf 0.19.0 and numpy from PyPI. The numbers are those of `number` below, which the test in
crates/weights/src/gguf/write.rs has too.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize

TENSORS = [("matrix.f32", (3, 5), Type.F32), ("matrix.f16", (7, 9), Type.F16),
           ("matrix.bf16", (3, 33), Type.BF16), ("matrix.q8_0", (5, 96), Type.Q8_0),
           ("zeros.q8_0", (1, 32), Type.Q8_0), ("vector.f32", (3,), Type.F32)]


def number(index):
    # Thirds of small integers: exact in no format, the same in every language.
    return np.float32((index * 37 % 101) - 50) / np.float32(3)


def main():
    writer = gguf.GGUFWriter(Path(__file__).parent / "written.gguf", "llama")
    writer.add_uint32("llama.block_count", 12)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "zwölf Ämter")
    writer.add_array("tokenizer.ggml.tokens", ["a", "Ġb", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, -1, 3])
    writer.add_array("tokenizer.ggml.scores", [-0.5, 1e9])
    for name, shape, type in TENSORS:
        numbers = np.array([number(i) for i in range(np.prod(shape))], np.float32).reshape(shape)
        if name.startswith("zeros"):
            numbers = np.zeros_like(numbers)
        if type == Type.F16:
            writer.add_tensor(name, numbers.astype(np.float16))
        elif type == Type.F32:
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, quantize(numbers, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
