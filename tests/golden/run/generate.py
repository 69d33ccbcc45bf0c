"""Writes a run's folder as the training loop leaves it: a run of 120 steps that was killed after step
70, went on from its checkpoint at 60, and has what reports get wrong: a step that was skipped, a loss
that is not finite, a prompt with markup, a last line that was cut off. Python's standard library only.

    python3 generate.py
"""

import json
import math
import random
import struct
import zlib
from pathlib import Path

HERE = Path(__file__).parent
GIB = 1 << 30
PROMPTS = ["a photo of sks fox in the snow", 'a <script>alert("fox")</script> & \'sks\' fox, watercolour']


def png(path, tint):
    """An image of 48 x 48 pixels, a disc on a slope of colour."""
    rows = b""
    for y in range(48):
        rows += b"\0"
        for x in range(48):
            inside = (x - 24) ** 2 + (y - 24) ** 2 < 200
            rows += bytes([220, 120, 40] if inside else [tint, 90 + 2 * y, 120 + 2 * x])
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", 48, 48, 8, 2, 0, 0, 0)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b""))


def begin(from_step, time):
    return {
        "event": "begin", "version": "0.1.0", "base": "stable-diffusion-3.5-medium", "engine": "cuda:0",
        "from_step": from_step, "steps": 120, "pictures": 24, "held_out": 3, "layers": 384,
        "parameters": 18874368, "samples_per_step": 4,
        "phases": [
            {"name": "encode prompts", "peak_bytes": int(9.6 * GIB)},
            {"name": "encode pictures", "peak_bytes": int(2.2 * GIB)},
            {"name": "train", "peak_bytes": int(11.4 * GIB)},
            {"name": "draw samples", "peak_bytes": int(8.9 * GIB)},
        ],
        "limit_bytes": 14 * GIB, "time": time,
    }


def memory(phase, planned, taken):
    return {"event": "memory", "phase": phase, "planned_bytes": int(planned * GIB), "peak_bytes": int(taken * GIB)}


def step(number, noise):
    loss = 0.18 + 0.3 * math.exp(-number / 40) + noise.gauss(0, 0.05)
    event = {
        "event": "step", "step": number, "loss": round(max(loss, 0.02), 6),
        "gradient_norm": round(0.4 + 0.6 * math.exp(-number / 30) + abs(noise.gauss(0, 0.1)), 6),
        "learning_rate": 1e-4 * min(number / 10, 0.5 + 0.5 * math.cos(math.pi * number / 120)),
        "secs": round(1.42 + abs(noise.gauss(0, 0.03)) + (2 if number in (1, 61) else 0), 4),
        "wait_secs": round(abs(noise.gauss(0, 0.004)), 5), "peak_bytes": int(11.38 * GIB),
    }
    if number == 17:
        event |= {"gradient_norm": None, "is_skipped": True, "loss_scale": 32768.0}
    if number == 18:
        event |= {"loss": None}
    return event


def samples(number, noise):
    for index, prompt in enumerate(PROMPTS):
        path = f"samples/step-{number:06}-{index + 1}.png"
        png(HERE / path, 60 + number)
        yield {"event": "sample", "step": number, "path": path, "prompt": prompt, "seed": 42 + index}


def part(first, last, noise):
    for number in range(first, last + 1):
        yield step(number, noise)
        if number % 20 == 0:
            loss = 0.21 + 0.25 * math.exp(-number / 35) + (0.01 if number == 120 else 0)
            yield {"event": "validation", "step": number, "loss": round(loss, 6)}
        if number % 40 == 0:
            yield from samples(number, noise)
        if number % 60 == 0:
            yield {"event": "checkpoint", "step": number, "path": f"checkpoints/step-{number:06}"}


def run(noise):
    yield begin(0, 1767225540)
    yield {"event": "phase", "name": "encode pictures"}
    yield {"event": "phase", "name": "train"}
    yield memory("encode prompts", 9.6, 9.1)
    yield memory("encode pictures", 2.2, 2.2)
    yield from samples(0, noise)
    yield memory("draw samples", 8.9, 8.7)
    yield memory("train", 11.4, 11.38)
    yield from part(1, 70, noise)
    yield begin(60, 1767229200)
    yield memory("train", 11.4, 11.38)
    yield from part(61, 120, noise)
    yield {"event": "warning", "step": 120, "text": "the loss on held-out pictures rose from 0.2153 to 0.2281 & may <rise> on"}
    for name, path in [("diffusers", "pytorch_lora_weights.safetensors"), ("kohya", "fox-kohya.safetensors")]:
        yield {"event": "exported", "format": name, "path": f"adapter/{path}", "layers": 384}
    yield {"event": "end", "step": 120, "why": "finished", "secs": 93.5, "peak_bytes": int(11.38 * GIB)}


lines = [json.dumps(event) for event in run(random.Random(7))]
(HERE / "events.jsonl").write_text("\n".join(lines) + '\n{"event":"st')
(HERE / "config.toml").write_text("""[base]
path = "stable-diffusion-3.5-medium" # fox.toml:2

[data]
images = "fox <24> images" # fox.toml:5
trigger = "sks fox" # fox.toml:6
validation = 3 # fox.toml:7

[train]
steps = 120 # --set train.steps=120

[output]
name = "fox" # fox.toml:10
""")
