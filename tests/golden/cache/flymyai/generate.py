"""Makes a cache as FlyMyAI's trainer for Qwen-Image and its forks write it, of six images `000.png` to `005.png`.

Two can be imported; the others are of another size, of another width, damaged or missing. torch 2.15, safetensors.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
IMAGES, TEXTS = HERE / "img_embs", HERE / "text_embs"
for folder in IMAGES, TEXTS:
    folder.mkdir(exist_ok=True)


def latent(value, width=8):
    return torch.full((16, 1, 8, width), value, dtype=torch.bfloat16)


def prompt(mask, width=32):
    rows = torch.arange(len(mask), dtype=torch.bfloat16)[:, None].expand(len(mask), width).contiguous()
    return dict(prompt_embeds=rows, prompt_embeds_mask=torch.tensor(mask))


torch.save(latent(0.5), IMAGES / "000.png.pt")
save_file(dict(latent=latent(0.25)), IMAGES / "001.png.safetensors", metadata=dict(type="embeddings"))
torch.save(latent(0.125, width=4), IMAGES / "002.png.pt")
(IMAGES / "004.png.pt").write_bytes(b"PK\x03\x04 not an archive")
torch.save(prompt([1, 1, 0, 1, 1, 1, 1, 0, 0]), TEXTS / "000.txt.pt")
save_file(prompt([1, 1, 1]), TEXTS / "001.txt.safetensors", metadata=dict(type="embeddings"))
torch.save(prompt([1, 1, 1], width=33), TEXTS / "002.txt.pt")
torch.save(prompt([1, 1]), TEXTS / "empty_embedding.pt")
