"""Fifty steps of Lion, Adafactor, schedule-free AdamW and Prodigy, each as its authors or transformers have it.

    python generate.py

Made with Python 3.11, torch 2.15, transformers 5.23, lion-pytorch 0.2.5, prodigyopt 1.1.2 and schedulefree 1.4.1 from
PyPI, on a CPU.

steps.txt   a line for each case: its name, then every number of a matrix of 5 rows and 8 columns, of one of 9 rows and 4
            columns and of a vector of 7, row by row. For schedule-free these are the numbers that gradients are taken
            at, and on a second line those that are used in the end. Prodigy has a line with d after every step.

All in f64: which digits f32 loses is for the test to allow.
"""

import math
from pathlib import Path

import torch
from lion_pytorch import Lion
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree
from transformers.optimization import Adafactor

SHAPES = [(5, 8), (9, 4), (7,)]
STEPS = 50
lines = []


def params(start):
    def one(shape):
        n = math.prod(shape)
        values = torch.tensor([start(i) for i in range(n)], dtype=torch.float64)
        return torch.nn.Parameter(values.reshape(shape))

    return [one(shape) for shape in SHAPES]


def fixed(param, step):
    """A gradient that does not depend on where the parameter is."""
    n = param.numel()
    values = torch.tensor([math.sin(0.7 * i * step + step) for i in range(n)], dtype=torch.float64)
    return values.reshape(param.shape) * (0.5 + 0.01 * step)


def bowl(param, step):
    """That of a sum of squares around a target, with some noise."""
    n = param.numel()
    values = torch.tensor([0.3 * math.sin(i + 1) + 0.02 * math.sin(3 * i * step) for i in range(n)], dtype=torch.float64)
    return param.detach() - values.reshape(param.shape)


def write(name, all_params):
    numbers = [number for param in all_params for number in param.detach().flatten().tolist()]
    lines.append(" ".join([name] + [f"{number:.10g}" for number in numbers]))


def train(name, make, gradient, start=math.cos, warmup=0, is_averaged=False, has_d=False):
    all_params = params(start)
    optimizer = make(all_params)
    base, distances = optimizer.param_groups[0]["lr"], []
    if is_averaged:
        optimizer.train()
    for step in range(1, STEPS + 1):
        if warmup:
            optimizer.param_groups[0]["lr"] = base * min(1.0, step / warmup)
        for param in all_params:
            param.grad = gradient(param, step).clone()
        optimizer.step()
        distances.append(optimizer.param_groups[0].get("d", 0.0))
    write(name, all_params)
    if is_averaged:
        optimizer.eval()
        write(f"{name}_x", all_params)
    if has_d:
        lines.append(" ".join([f"{name}_d"] + [f"{d:.10g}" for d in distances]))


train("lion", lambda p: Lion(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), fixed)
train("schedule_free", lambda p: AdamWScheduleFree(p, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, foreach=False), fixed,
      is_averaged=True)
train("schedule_free_warmup", lambda p: AdamWScheduleFree(p, lr=0.01, betas=(0.95, 0.999), weight_decay=0, foreach=False,
      warmup_steps=10), fixed, is_averaged=True)
# As most users of kohya's scripts set it.
plain = dict(scale_parameter=False, relative_step=False, warmup_init=False)
train("adafactor", lambda p: Adafactor(p, lr=0.01, weight_decay=0.1, **plain), fixed)
plain["scale_parameter"] = True
train("adafactor_scaled", lambda p: Adafactor(p, lr=0.01, **plain), fixed)
zero = lambda i: 0.0
train("prodigy", lambda p: Prodigy(p, weight_decay=0.01), bowl, zero, has_d=True)
train("prodigy_options", lambda p: Prodigy(p, betas=(0.9, 0.99), weight_decay=0.1, use_bias_correction=True,
      safeguard_warmup=True, d_coef=2.0, d0=1e-5), bowl, zero, warmup=20, has_d=True)
train("prodigy_start", lambda p: Prodigy(p, weight_decay=0.01, d0=1e-2), bowl, lambda i: 0.5 * math.cos(i), has_d=True)
(Path(__file__).parent / "steps.txt").write_text("\n".join(lines) + "\n")
