"""Factors of the learning rate in every step of a short run, by transformers.get_scheduler.

    python schedules.py

Made with Python 3.11, torch 2.15 and transformers 5.23 from PyPI.

schedules.txt   a line for each case: its name, steps of warmup, cycles, power and last learning rate of one that begins at
                1e-3, then the factor of each of 23 steps
"""

from pathlib import Path

import torch
from transformers import get_scheduler

STEPS, RATE = 23, 1e-3
lines = []


def write(name, warmup, **settings):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    # The first step of a warmup has a rate of 0 there and is left out here.
    skipped = 1 if warmup else 0
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS + skipped,
                             scheduler_specific_kwargs=settings)
    factors = []
    for step in range(STEPS + skipped):
        if step >= skipped:
            factors.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        schedule.step()
    cycles, power, end = (settings.get(key, default) for key, default in
                          [("num_cycles", 1), ("power", 1.0), ("lr_end", 1e-7)])
    numbers = " ".join(f"{factor:.12g}" for factor in factors)
    lines.append(f"{name} {warmup} {cycles} {power} {end} {numbers}")


for warmup in [0, 5]:
    write("linear", warmup)
    write("cosine", warmup)
    write("cosine_with_restarts", warmup, num_cycles=3)
    write("polynomial", warmup, power=1.0, lr_end=1e-7)
    write("polynomial", warmup, power=2.5, lr_end=1e-5)
write("cosine_with_restarts", 0, num_cycles=1)
(Path(__file__).parent / "schedules.txt").write_text("\n".join(lines) + "\n")
