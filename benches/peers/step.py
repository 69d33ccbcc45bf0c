"""The benchmark job of crates/trainer/src/bench/workload.rs in PyTorch, as `hearth bench peers` runs it.

    python step.py '{"config": "cpu-small", "width": 512, "n_blocks": 8, "tokens": 320, "samples": 4,
                     "dtype": "f32", "recompute": "none", "compile": false, "steps": 10, "threads": 2}'

Prints one JSON object with the figures that `hearth bench step --json` prints, as far as it has them.
"""
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

HEAD, RANK, ALPHA, EPSILON, WARM_UP = 64, 16, 16.0, 1e-6, 3


class Frozen(nn.Module):
    def __init__(self, inputs, outputs, dtype):
        super().__init__()
        self.register_buffer("weight", (torch.randn(outputs, inputs) * 0.02).to(dtype))
        self.register_buffer("bias", torch.zeros(outputs, dtype=dtype))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Adapted(Frozen):
    def __init__(self, width, dtype):
        super().__init__(width, width, dtype)
        self.down = nn.Parameter(torch.randn(RANK, width) / 16)
        self.up = nn.Parameter(torch.zeros(width, RANK))

    def forward(self, x):
        # The scale goes on the narrow side, which is the cheaper place.
        narrow = F.linear(x, self.down.to(x.dtype)) * (ALPHA / RANK)
        return super().forward(x) + F.linear(narrow, self.up.to(x.dtype))


class Block(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.modulation = Frozen(width, 6 * width, dtype)
        self.q, self.k, self.v, self.out = (Adapted(width, dtype) for _ in range(4))
        self.register_buffer("q_norm", torch.ones(HEAD, dtype=dtype))
        self.register_buffer("k_norm", torch.ones(HEAD, dtype=dtype))
        self.up, self.down = Frozen(width, 4 * width, dtype), Frozen(4 * width, width, dtype)

    def forward(self, x, c):
        split = lambda t: t.view(*t.shape[:2], -1, HEAD)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, -1)
        h = F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + scale1) + shift1
        q = F.rms_norm(split(self.q(h)), (HEAD,), self.q_norm, EPSILON).transpose(1, 2)
        k = F.rms_norm(split(self.k(h)), (HEAD,), self.k_norm, EPSILON).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, split(self.v(h)).transpose(1, 2))
        x = x + gate1 * self.out(a.transpose(1, 2).reshape(x.shape))
        h = F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def main(job):
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
    before = status("VmRSS")
    blocks = nn.ModuleList(Block(job["width"], dtype) for _ in range(job["n_blocks"]))
    shape = (job["samples"], job["tokens"], job["width"])
    x, c, target = torch.randn(shape).to(dtype), torch.randn(shape[0], shape[2]).to(dtype), torch.randn(shape).to(dtype)
    if job["compile"]:
        for block in blocks:
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW([p for p in blocks.parameters() if p.requires_grad], lr=1e-4, fused=True)
    walls, cpus, losses = [], [], []
    for step in range(WARM_UP + job["steps"]):
        wall, cpu = time.perf_counter(), time.process_time()
        out = x
        for index, block in enumerate(blocks):
            twice = {"none": False, "queries": False, "alternate": index % 2 == 0, "keep_attention": True, "block": True}[job["recompute"]]
            out = checkpoint(block, out, c, use_reentrant=False) if twice else block(out, c)
        loss = (out.float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step >= WARM_UP:
            walls.append((time.perf_counter() - wall) * 1e3)
            cpus.append((time.process_time() - cpu) * 1e3 / job["threads"])
    print(json.dumps({
        "ms_median": statistics.median(walls), "ms_min": min(walls), "cpu_ms_median": statistics.median(cpus),
        "rss_peak_bytes": status("VmHWM"), "rss_before_bytes": before,
        "loss_first": losses[0], "loss_last": losses[-1], "version": torch.__version__,
    }))


main(json.loads(sys.argv[1]))
