"""Ten steps of torch.optim.Muon for two small matrices.

    python generate.py

Made with Python 3.11 and torch 2.15 from PyPI, on a CPU.

steps.txt   a line for each number of both matrices, row by row: where it is after ten steps with
            products in f32, which PyTorch's own code computes if bfloat16 is made another name of
            float32, and with those in bf16, as it is published
"""

import math
from pathlib import Path
from unittest import mock

import torch

SHAPES = [(5, 8), (9, 4)]


def trained(rows, columns):
    n = rows * columns
    start = [math.cos(i) for i in range(n)]
    param = torch.nn.Parameter(torch.tensor(start).reshape(rows, columns))
    muon = torch.optim.Muon([param], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 11):
        gradient = [math.sin(0.7 * i * step + step) for i in range(n)]
        param.grad = torch.tensor(gradient).reshape(rows, columns)
        muon.step()
    return param.detach().flatten().tolist()


def both(dtype):
    with mock.patch.object(torch, "bfloat16", dtype):
        return [number for shape in SHAPES for number in trained(*shape)]


pairs = zip(both(torch.float32), both(torch.bfloat16))
text = "".join(f"{exact:.8f} {rounded:.8f}\n" for exact, rounded in pairs)
(Path(__file__).parent / "steps.txt").write_text(text)
