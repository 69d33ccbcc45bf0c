"""Trains the tiny autoencoder of clips that tests/teach_motion.rs uses: diffusers' AutoencoderKLHunyuanVideo with few
channels, on clips of its shapes and colours, which stand or move. Two minutes on an H200, in f32; weights are saved in
f16. Made with torch 2.11 and diffusers 0.42.1.

    python train.py FOLDER
"""
import os
import sys
import time

sys.path.insert(0, os.environ.get("PYLIB", "."))

import torch
from diffusers import AutoencoderKLHunyuanVideo

SIDE, FRAMES, STEPS, BATCH = 64, 9, 2500, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLOURS = torch.tensor([[0.9, 0.15, 0.1], [0.1, 0.8, 0.2], [0.15, 0.25, 0.95]], device=DEVICE)
BACKGROUND = torch.tensor([0.92, 0.9, 0.82], device=DEVICE)
torch.manual_seed(0)


def uniform(low, high, *shape):
    return low + (high - low) * torch.rand(*shape, device=DEVICE)


def clips(n):
    """Clips [n, 3, frames, side, side] from -1 to 1."""
    radius = uniform(10, 13, n, 1, 1, 1)
    begin = uniform(15, SIDE - 15, n, 2)
    end = torch.where(uniform(0, 1, n, 1) < 0.4, begin, uniform(15, SIDE - 15, n, 2))
    share = torch.linspace(0, 1, FRAMES, device=DEVICE)[None, :, None]
    centre = begin[:, None] * (1 - share) + end[:, None] * share
    grid = torch.arange(SIDE, device=DEVICE) + 0.5
    x = grid[None, None, None, :] - centre[..., 0, None, None]
    y = grid[None, None, :, None] - centre[..., 1, None, None]
    far, bar = torch.hypot(x, y), lambda a, b: torch.maximum(a.abs(), 3 * b.abs())
    distance = torch.stack([
        far - radius,
        torch.maximum(x.abs(), y.abs()) - 0.85 * radius,
        x.abs() + y.abs() - 1.2 * radius,
        torch.minimum(bar(x, y), bar(y, x)) - radius,
        (far - 0.75 * radius).abs() - 0.3 * radius,
    ])[torch.randint(0, 5, (n,), device=DEVICE), torch.arange(n, device=DEVICE)]
    covered = (0.5 - distance).clamp(0, 1)[:, None]
    fill = COLOURS[torch.randint(0, 3, (n,), device=DEVICE)] + uniform(-0.05, 0.05, n, 3)
    fill, ground = fill[:, :, None, None, None], BACKGROUND[None, :, None, None, None]
    return 2 * (fill * covered + ground * (1 - covered)) - 1


model = AutoencoderKLHunyuanVideo(
    block_out_channels=(8, 16, 16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=8).to(DEVICE)
model.use_framewise_encoding = model.use_framewise_decoding = False
optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, STEPS, pct_start=0.1)
begin = time.time()
for step in range(STEPS):
    x = clips(BATCH)
    encoded = model.encode(x).latent_dist
    decoded = model.decode(encoded.sample()).sample
    kl = 0.5 * (encoded.mean ** 2 + encoded.var - 1 - encoded.logvar).mean()
    loss = (decoded - x).abs().mean() + ((decoded - x) ** 2).mean() + 5e-4 * kl
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    if step % 250 == 0 or step + 1 == STEPS:
        apart = (decoded - x).abs().mean().item() * 127.5
        print(f"step {step}, {time.time() - begin:.0f} s: {apart:.1f} of 255 apart, kl {kl.item():.2f}", flush=True)
with torch.no_grad():
    means = model.encode(clips(64)).latent_dist.mean
model.register_to_config(scaling_factor=round(float(1 / means.std()), 4))
model.half().save_pretrained(sys.argv[1])
