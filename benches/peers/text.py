"""A training step of a language model in plain PyTorch, as `hearth bench text` runs it beside hearth's.

    python text.py '{"vocabulary": 32000, "width": 768, "inner": 2048, "blocks": 12, "heads": 12,
                     "kv_heads": 12, "length": 512, "batch": 4, "dtype": "f32", "recompute": "none",
                     "compile": false, "device": "cpu", "steps": 5, "threads": 2}'

Weights and the optimizer's state are f32; with bf16, matmuls are computed in it (autocast), which is
how such models are trained. Prints one JSON object with the figures that `hearth bench text --json` prints.
"""
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WARM_UP, THETA, EPSILON = 2, 10_000.0, 1e-5


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Module):
    def __init__(self, job):
        super().__init__()
        width, inner = job["width"], job["inner"]
        self.heads, self.kv_heads, self.d = job["heads"], job["kv_heads"], width // job["heads"]
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k = linear(width, width), linear(width, self.kv_heads * self.d)
        self.v, self.o = linear(width, self.kv_heads * self.d), linear(width, width)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x, cos, sin):
        b, n, _ = x.shape
        h = F.rms_norm(x, x.shape[-1:], self.norm1, EPSILON)
        q = turned(self.q(h).view(b, n, self.heads, self.d).transpose(1, 2), cos, sin)
        k = turned(self.k(h).view(b, n, self.kv_heads, self.d).transpose(1, 2), cos, sin)
        v = self.v(h).view(b, n, self.kv_heads, self.d).transpose(1, 2)
        grouped = self.heads != self.kv_heads
        a = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(a.transpose(1, 2).reshape(b, n, -1))
        h = F.rms_norm(x, x.shape[-1:], self.norm2, EPSILON)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.tokens = nn.Embedding(job["vocabulary"], job["width"])
        self.blocks = nn.ModuleList(Block(job) for _ in range(job["blocks"]))
        self.norm = nn.Parameter(torch.ones(job["width"]))
        d = job["width"] // job["heads"]
        angles = torch.outer(torch.arange(job["length"]), THETA ** (-torch.arange(0, d, 2) / d))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.recompute = job["recompute"]
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for index, block in enumerate(self.blocks):
            twice = {"none": False, "queries": False, "alternate": index % 2 == 0, "keep_attention": True, "block": True}[self.recompute]
            args = (x, self.cos, self.sin)
            x = checkpoint(block, *args, use_reentrant=False) if twice else block(*args)
        x = F.rms_norm(x, x.shape[-1:], self.norm, EPSILON)
        logits = F.linear(x, self.tokens.weight)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def main(job):
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    device, is_bf16 = job["device"].split(":")[0], job["dtype"] == "bf16"
    before = status("VmRSS")
    model = Model(job).to(device)
    if job["compile"]:
        model.compile(dynamic=False)
    ids = torch.randint(0, job["vocabulary"], (job["batch"], job["length"] + 1), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    walls, cpus, losses = [], [], []
    for step in range(WARM_UP + job["steps"]):
        sync()
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.autocast(device, torch.bfloat16, enabled=is_bf16):
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        sync()
        if step >= WARM_UP:
            walls.append((time.perf_counter() - wall) * 1e3)
            cpus.append((time.process_time() - cpu) * 1e3 / job["threads"])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    print(json.dumps({
        "ms_median": statistics.median(walls), "ms_min": min(walls), "cpu_ms_median": statistics.median(cpus),
        "rss_peak_bytes": peak or status("VmHWM"), "rss_before_bytes": 0 if peak else before,
        "loss_first": losses[0], "loss_last": losses[-1], "version": torch.__version__,
    }))


main(json.loads(sys.argv[1]))
