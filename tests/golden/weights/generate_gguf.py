"""Writes mixed.gguf, one small tensor per type that hearth reads, and what the `gguf` Python
package makes of it.

    pip install gguf numpy
    python generate_gguf.py

    mixed.gguf          the file
    mixed.gguf.json     package versions, and every tensor as gguf.GGUFReader sees it
    mixed.gguf.f32.bin  the numbers of each tensor that gguf.quants.dequantize knows, as
                        little-endian f32 one after the other; the JSON says where

The package cannot quantise to the K formats; those tensors are random bytes with sane scales.
"""

import importlib.metadata
import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

FOLDER = pathlib.Path(__file__).parent
FILE = FOLDER / "mixed.gguf"
SEED = 20250101
# Not the default, so that a reader which ignores it fails.
ALIGNMENT = 256

PLAIN = {"f32": np.float32, "f16": np.float16, "f64": np.float64,
         "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}
QUANTISED = [Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
# Where the f16 scales lie in a block.
SCALES_AT = {Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208]}
DEQUANTISED = {Type.F32, Type.F16, *QUANTISED, *SCALES_AT}


def random_blocks(random, type, rows, blocks_per_row):
    _, size = gguf.GGML_QUANT_SIZES[type]
    blocks = random.integers(0, 256, (rows * blocks_per_row, size), dtype=np.uint8)
    for at in SCALES_AT[type]:
        scales = random.normal(0, 0.01, len(blocks)).astype("<f2")
        blocks[:, at:at + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, blocks_per_row * size)


def add_metadata(writer):
    writer.add_custom_alignment(ALIGNMENT)
    writer.add_uint8("kinds.u8", 200)
    writer.add_int8("kinds.i8", -100)
    writer.add_uint16("kinds.u16", 60000)
    writer.add_int16("kinds.i16", -30000)
    writer.add_uint32("kinds.u32", 4_000_000_000)
    writer.add_int32("kinds.i32", -2_000_000_000)
    writer.add_uint64("kinds.u64", 2**64 - 1)
    writer.add_int64("kinds.i64", -2**63)
    writer.add_float32("kinds.f32", 1e-5)
    writer.add_float64("kinds.f64", 0.1)
    writer.add_bool("kinds.bool", True)
    writer.add_string("kinds.string", "zwölf Ämter\n")
    writer.add_array("arrays.strings", ["en", 'd"e'])
    writer.add_array("arrays.integers", [1, -2, 3])
    writer.add_array("arrays.eight", [0.5] * 8)
    writer.add_array("arrays.long_strings", [f"token {i}" for i in range(9)])
    writer.add_array("arrays.long_integers", list(range(100)))
    writer.add_array("arrays.nested", [[1, 2], [3]])


def add_tensors(writer, random):
    for name, dtype in PLAIN.items():
        writer.add_tensor(f"plain.{name}", random.normal(0, 40, (2, 3, 5)).astype(dtype))
    for type in QUANTISED:
        numbers = random.normal(0, 1, (3, 64)).astype(np.float32)
        writer.add_tensor(f"quantised.{type.name}", quantize(numbers, type), raw_dtype=type)
    for type in SCALES_AT:
        writer.add_tensor(f"random.{type.name}", random_blocks(random, type, 3, 2), raw_dtype=type)


def describe(reader):
    tensors, numbers = [], b""
    for tensor in reader.tensors:
        row = {
            "name": tensor.name,
            "type": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "offset": int(tensor.data_offset),
            "bytes": int(tensor.n_bytes),
        }
        if tensor.tensor_type in DEQUANTISED:
            row["f32_offset"] = len(numbers)
            numbers += dequantize(tensor.data, tensor.tensor_type).astype("<f4").tobytes()
        tensors.append(row)
    return tensors, numbers


def main():
    random = np.random.default_rng(SEED)
    writer = gguf.GGUFWriter(FILE, "mixed")
    add_metadata(writer)
    add_tensors(writer, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    tensors, numbers = describe(gguf.GGUFReader(FILE))
    made_with = {package: importlib.metadata.version(package) for package in ["gguf", "numpy"]}
    FILE.with_suffix(".gguf.f32.bin").write_bytes(numbers)
    FILE.with_suffix(".gguf.json").write_text(
        json.dumps({"made_with": made_with, "tensors": tensors}, indent=1) + "\n")


if __name__ == "__main__":
    main()
