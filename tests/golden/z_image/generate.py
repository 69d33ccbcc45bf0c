"""Makes the reference data of this folder: Z-Image transformers with random weights, tiny, of sizes that no other file has.
Made on a CPU in f32 with torch 2.15, diffusers 0.42.1 and safetensors, all from PyPI.

    python generate.py

Inputs and outputs are those that the sampler sees: `in.timestep` is 1000 sigma, of which the model is given
(1000 - timestep) / 1000, and `out.*` is the velocity, the negative of what the model gives.
"""

import json
import sys
from pathlib import Path

import torch
from diffusers import ZImageTransformer2DModel
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
from generate import randomise

RANK, ALPHA = 4, 8
# Of the 1024 inner values of the timestep's layers, whose number is fixed: the others' weights are zeros, which compress.
USED = 24
MODELS = {
    # Prompts of different length, padded to 32, 64 and 32 tokens; 15 tokens of an image.
    "padded": dict(layers=2, refiners=2, heads=2, axes=[4, 6, 6], text=20, eps=1e-5, size=(6, 10), prompts=[7, 40, 32]),
    # Nothing to pad: a prompt and an image of 32 tokens each. Other widths.
    "whole": dict(layers=1, refiners=1, heads=3, axes=[2, 4, 4], text=12, eps=1e-6, size=(8, 16), prompts=[32]),
}
TARGETS = [
    "layers.0.attention.to_q",
    "layers.0.attention.to_out.0",
    "layers.0.feed_forward.w1",
    "layers.0.feed_forward.w2",
    "layers.0.adaLN_modulation.0",
    "noise_refiner.0.attention.to_v",
    "context_refiner.0.feed_forward.w3",
    "cap_embedder.1",
]


def transformer(layers, refiners, heads, axes, text, eps):
    return ZImageTransformer2DModel(
        in_channels=16, dim=heads * sum(axes), n_layers=layers, n_refiner_layers=refiners, n_heads=heads, n_kv_heads=heads,
        norm_eps=eps, cap_feat_dim=text, axes_dims=axes, axes_lens=[96, 32, 32])


def randomised(model, seed):
    randomise(model, seed)
    first, _, second = model.t_embedder.mlp
    with torch.no_grad():
        first.weight[USED:] = 0
        first.bias[USED:] = 0
        second.weight[:, USED:] = 0
        second.weight *= (1024 / USED) ** 0.5
    return model


def velocity(model, latents, timesteps, prompts, lengths):
    """As `ZImagePipeline` calls the model, of latents [samples, channels, height, width]."""
    images = list(latents.unsqueeze(2).unbind(dim=0))
    texts = [text[:length] for text, length in zip(prompts, lengths)]
    out = model(images, (1000 - timesteps) / 1000, texts, return_dict=False)[0]
    return -torch.stack(list(out)).squeeze(2)


def adapted(model, targets):
    """Adapters as plain matrices beside the layers: x W + scale · (x A) B."""
    modules, stored = dict(model.named_modules()), {}
    for target in targets:
        layer = modules[target]
        a = (torch.randn(RANK, layer.in_features) * 0.2).requires_grad_()
        b = (torch.randn(layer.out_features, RANK) * 0.2).requires_grad_()
        stored[target] = (a, b)
        layer.register_forward_hook(lambda _, x, y, a=a, b=b: y + (ALPHA / RANK) * (x[0] @ a.T) @ b.T)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return stored


def make(name, m, seed):
    torch.manual_seed(seed)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    model = randomised(transformer(m["layers"], m["refiners"], m["heads"], m["axes"], m["text"], m["eps"]), seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    model.to(torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    (height, width), lengths = m["size"], m["prompts"]
    samples = len(lengths)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    latents, timesteps = torch.randn(samples, 16, height, width), torch.tensor([812.5, 203.1, 500.0])[:samples]
    prompts = torch.randn(samples, max(lengths), m["text"]) * mask[..., None]
    given = [latents, timesteps, prompts, lengths]
    out = {"in.hidden_states": latents, "in.timestep": timesteps, "in.encoder_hidden_states": prompts,
           "in.encoder_hidden_states_mask": mask}
    with torch.no_grad():
        out["out.sample"] = velocity(model, *given)
    stored = adapted(model, TARGETS)
    target = torch.randn_like(latents)
    found = velocity(model, *given)
    loss = ((found - target) ** 2).mean()
    loss.backward()
    out |= {"lora_out.sample": found.detach(), "loss": loss.detach().reshape(1), "target": target}
    for layer, (a, b) in stored.items():
        out |= {f"lora.{layer}.A": a.detach(), f"lora.{layer}.B": b.detach(), f"grad.{layer}.A": a.grad, f"grad.{layer}.B": b.grad}
    metadata = {"lora_alpha": str(ALPHA), "lora_rank": str(RANK)}
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "golden.safetensors", metadata)


if __name__ == "__main__":
    for seed, (name, m) in enumerate(MODELS.items()):
        make(name, m, 10200 + seed)
