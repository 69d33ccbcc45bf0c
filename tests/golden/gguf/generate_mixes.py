"""Writes mixes.json: which format llama.cpp gives each tensor of tiny models in each of its mixes.

    python generate_mixes.py

Made with Python 3.11, gguf 0.19.0, numpy 2.4.6 and llama-cpp-python 0.3.36 (llama.cpp 0c1e570) from PyPI: files of
zeros, quantised by llama_model_quantize.
"""

import itertools
import json
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

MIXES = {"q8_0": 7, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18}
# Family, layers, heads and heads of keys, whether tied, width and width of the feed-forward.
CASES = {
    "llama, 22 layers": ("llama", 22, (8, 2), False, 256, 512),
    "llama, 3 layers, tied": ("llama", 3, (8, 8), True, 256, 256),
    "llama, 80 layers": ("llama", 80, (8, 1), False, 256, 256),
    "llama, 80 layers, all heads with keys": ("llama", 80, (8, 8), False, 256, 256),
    "qwen2, 80 layers": ("qwen2", 80, (8, 8), True, 256, 256),
    "qwen3, 36 layers": ("qwen3", 36, (8, 2), True, 256, 512),
    "qwen3, 80 layers": ("qwen3", 80, (8, 2), False, 256, 256),
    # Rows that are no whole blocks of 256, and of 32.
    "qwen2, rows of 96 and 288": ("qwen2", 8, (3, 1), True, 96, 288),
    "llama, rows of 288 and 272": ("llama", 8, (4, 4), False, 288, 272),
}
ROWS = 32


def shapes(heads, is_tied, width, inner):
    keys = width // heads[0] * heads[1]
    block = dict(attn_q=[width, width], attn_k=[keys, width], attn_v=[keys, width], attn_output=[width, width],
                 ffn_gate=[inner, width], ffn_up=[inner, width], ffn_down=[width, inner], attn_norm=[width])
    all = {"token_embd.weight": [ROWS, width], "output_norm.weight": [width]}
    if not is_tied:
        all["output.weight"] = [ROWS, width]
    return all | {f"blk.#.{name}.weight": shape for name, shape in block.items()}


def write(path, family, n_layers, heads, tensors, width, inner):
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads[0])
    writer.add_head_count_kv(heads[1])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(ROWS)
    for name, shape in tensors.items():
        for index in range(n_layers if "#" in name else 1):
            writer.add_tensor(name.replace("#", str(index)), np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised(source, file_type):
    inner = llama_cpp.llama_cpp
    settings = inner.llama_model_quantize_default_params()
    settings.ftype = file_type
    settings.nthread = 1
    with tempfile.NamedTemporaryFile(suffix=".gguf") as out:
        assert inner.llama_model_quantize(str(source).encode(), out.name.encode(), settings) == 0
        return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out.name).tensors}


def runs(found, name, n_layers):
    """The formats of all layers, as "3 Q6_K, 5 Q4_K"."""
    formats = [found[name.replace("#", str(index))] for index in range(n_layers if "#" in name else 1)]
    return ", ".join(f"{len(list(run))} {format}" for format, run in itertools.groupby(formats))


def main():
    all = {}
    for case, (family, n_layers, heads, is_tied, width, inner) in CASES.items():
        tensors = shapes(heads, is_tied, width, inner)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "plain.gguf"
            write(source, family, n_layers, heads, tensors, width, inner)
            formats = {}
            for mix, file_type in MIXES.items():
                found = quantised(source, file_type)
                formats[mix] = {name: runs(found, name, n_layers) for name in tensors if len(tensors[name]) == 2}
        all[case] = dict(family=family, heads=heads, n_layers=n_layers, is_tied=is_tied, shapes=tensors,
                         formats=formats)
    text = json.dumps(all, indent=1)
    (Path(__file__).parent / "mixes.json").write_text(text + "\n")


main()
