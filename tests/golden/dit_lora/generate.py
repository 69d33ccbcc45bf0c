"""The values of golden.safetensors, computed by PyTorch from the weights and inputs beside it.

    pip install torch safetensors
    python generate.py            compares, and says how far off the recorded numbers are
    python generate.py --write    writes them anew, from the same weights and inputs

The job is the one of crates/trainer/src/workload.rs at width 128 with 2 blocks, 48 tokens and 2
samples, in f32, with adapters of rank 16 and AdamW at its defaults but for the learning rate 1e-4.
Recorded with torch 2.15.
"""
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

folder = Path(__file__).parent
base = {name: tensor.float() for name, tensor in load_file(folder / "base.safetensors").items()}
golden = load_file(folder / "golden.safetensors")
x, c, target = (golden[f"in.{name}"] for name in ("x", "c", "target"))
adapters = {
    name.removeprefix("lora0."): torch.nn.Parameter(tensor.clone())
    for name, tensor in golden.items() if name.startswith("lora0.")
}


def linear(name, x):
    y = F.linear(x, base[name + ".weight"], base[name + ".bias"])
    if name + ".A" in adapters:
        y = y + F.linear(F.linear(x, adapters[name + ".A"]), adapters[name + ".B"])
    return y


def heads(x):
    return x.view(*x.shape[:2], -1, 64)


def block(name, x):
    shift1, scale1, gate1, shift2, scale2, gate2 = linear(name + ".mod", F.silu(c)).unsqueeze(1).chunk(6, -1)
    h = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale1) + shift1
    q, k, v = (heads(linear(f"{name}.{which}", h)) for which in "qkv")
    q = F.rms_norm(q, (64,), base[name + ".qn"], 1e-6)
    k = F.rms_norm(k, (64,), base[name + ".kn"], 1e-6)
    a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    x = x + gate1 * linear(name + ".o", a.reshape(x.shape))
    h = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale2) + shift2
    return x + gate2 * linear(name + ".down", F.gelu(linear(name + ".up", h), approximate="tanh"))


found, losses = {}, []
optimizer = torch.optim.AdamW(adapters.values(), lr=1e-4)
for step in range(13):
    out = block("blocks.1", block("blocks.0", x))
    loss = F.mse_loss(out, target)
    optimizer.zero_grad()
    loss.backward()
    if step == 0:
        found["out.step0"] = out.detach()
    if step < 2:
        found |= {f"grad_step{step}.{name}": p.grad.clone() for name, p in adapters.items()}
    losses.append(loss.item())
    optimizer.step()
found["loss"] = torch.tensor(losses, dtype=torch.float64)
found |= {f"lora13.{name}": p.detach() for name, p in adapters.items()}

if "--write" in sys.argv:
    inputs = {name: t for name, t in golden.items() if name.startswith(("in.", "lora0."))}
    save_file(inputs | {name: t.contiguous() for name, t in found.items()}, folder / "golden.safetensors")
for name in sorted(found):
    off = (found[name] - golden[name]).abs().max() / golden[name].abs().max().clamp(min=1e-30)
    print(f"{off:.1e}  {name}")
