"""The values of golden.safetensors: a matrix, and the same quantised and dequantised.

    pip install torch bitsandbytes safetensors
    python generate.py            compares, and says how far off the recorded numbers are
    python generate.py --write    writes them anew

nf4 and int8 are bitsandbytes' own; fp8 is PyTorch's cast of rows scaled so that their largest is 448.
Recorded with torch 2.15 and bitsandbytes 0.50.
"""
import sys
from pathlib import Path

import torch
from bitsandbytes import functional as bnb
from safetensors.torch import load_file, save_file

file = Path(__file__).parent / "golden.safetensors"


def matrix():
    torch.manual_seed(0)
    rows = torch.logspace(-4, 1, 128).unsqueeze(1)
    numbers = torch.randn(128, 192) * rows
    numbers[5] = 0
    numbers[9, 64:128] = 0
    return numbers.half().float()  # bitsandbytes' int8 takes f16


def back(numbers):
    nf4, state = bnb.quantize_4bit(numbers, blocksize=64, compress_statistics=True, quant_type="nf4")
    int8, largest, _ = bnb.int8_vectorwise_quant(numbers.half())
    scale = numbers.abs().amax(1, keepdim=True) / 448
    fp8 = (numbers / scale.where(scale > 0, 1)).to(torch.float8_e4m3fn)
    return {
        "nf4": bnb.dequantize_4bit(nf4, state),
        "int8": int8.float() * (largest / 127).unsqueeze(1),
        "fp8": fp8.float() * scale,
    }


numbers = matrix()
now = {"matrix": numbers, **back(numbers)}
if "--write" in sys.argv:
    save_file(now, file)
for name, tensor in load_file(file).items():
    print(name, (tensor - now[name]).abs().max().item())
