"""Makes the reference data of this folder: Qwen-Image transformers with random weights, tiny, of sizes that no other file
has. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1 and safetensors, all from PyPI.

    python generate.py
"""

import json
import sys
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
from generate import randomise

RANK, ALPHA = 4, 8
MODELS = {
    # Prompts of different length, odd sides, an image that is wider than high.
    "mask": dict(layers=2, heads=2, axes=[4, 8, 8], joint=36, size=(3, 5), text=[7, 2, 5]),
    # Prompts of one length without a mask, more rows than columns.
    "plain": dict(layers=1, heads=2, axes=[2, 4, 10], joint=20, size=(6, 3), text=[4, 4]),
}
TARGETS = [
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.add_k_proj",
    "transformer_blocks.0.img_mlp.net.0.proj",
    "transformer_blocks.0.txt_mlp.net.2",
    "transformer_blocks.0.img_mod.1",
    "transformer_blocks.0.attn.to_out.0",
]


def make(name, m, seed):
    torch.manual_seed(seed)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    model = randomise(QwenImageTransformer2DModel(
        patch_size=2, in_channels=64, out_channels=16, num_layers=m["layers"], attention_head_dim=sum(m["axes"]),
        num_attention_heads=m["heads"], joint_attention_dim=m["joint"], axes_dims_rope=tuple(m["axes"])), seed)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    (rows, columns), samples, longest = m["size"], len(m["text"]), max(m["text"])
    prompts = torch.randn(samples, longest, m["joint"])
    mask = torch.arange(longest)[None] < torch.tensor(m["text"])[:, None]
    prompts *= mask[..., None]  # as the pipeline pads
    inputs = {
        "hidden_states": torch.randn(samples, rows * columns, 64), "encoder_hidden_states": prompts,
        "timestep": torch.tensor([0.8125, 0.2031, 0.5])[:samples],
    }
    if not mask.all():
        inputs["encoder_hidden_states_mask"] = mask
    shapes = [[(1, rows, columns)]] * samples
    with torch.no_grad():
        out = {"out.sample": model(**inputs, img_shapes=shapes, return_dict=False)[0]}

    # Adapters as plain matrices beside the layers: x W + scale · (x A) B.
    modules, stored = dict(model.named_modules()), {}
    for target in TARGETS:
        layer = modules[target]
        a = (torch.randn(RANK, layer.in_features) * 0.2).requires_grad_()
        b = (torch.randn(layer.out_features, RANK) * 0.2).requires_grad_()
        stored[target] = (a, b)
        layer.register_forward_hook(lambda _, x, y, a=a, b=b: y + (ALPHA / RANK) * (x[0] @ a.T) @ b.T)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    target = torch.randn(samples, rows * columns, 64)
    adapted = model(**inputs, img_shapes=shapes, return_dict=False)[0]
    loss = ((adapted - target) ** 2).mean()
    loss.backward()
    out |= {"lora_out.sample": adapted.detach(), "loss": loss.detach().reshape(1), "target": target}
    for target, (a, b) in stored.items():
        out |= {f"lora.{target}.A": a.detach(), f"lora.{target}.B": b.detach()}
        # The last block of one has no use for the prompt.
        grad = lambda tensor: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        out |= {f"grad.{target}.A": grad(a), f"grad.{target}.B": grad(b)}
    out |= {f"in.{name}": tensor for name, tensor in inputs.items()}
    metadata = {"lora_alpha": str(ALPHA), "lora_rank": str(RANK)}
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "golden.safetensors", metadata)


if __name__ == "__main__":
    for seed, (name, m) in enumerate(MODELS.items()):
        make(name, m, 8200 + seed)
