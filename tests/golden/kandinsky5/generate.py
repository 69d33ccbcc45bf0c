"""Makes the reference data of this folder: Kandinsky 5 transformers with random weights, tiny. Made on a CPU in f32 with
torch 2.15, diffusers 0.42.1 and safetensors, all from PyPI.

diffusers rounds queries and keys to bf16 after the rotary embedding even in f32, which the authors' program does too; here
they are not, so that all of it can be compared to a few millionths.

    python generate.py
"""

import copy
import json
import sys
from pathlib import Path

import torch
from diffusers import Kandinsky5Transformer3DModel
from diffusers.models.transformers import transformer_kandinsky
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
from generate import randomise

RANK, ALPHA = 4, 8
MODELS = {
    # Images; prompts of one length.
    "image": dict(blocks=(1, 2), heads=2, axes=[2, 2, 4], ff=28, time=12, text=20, pooled=12, channels=4, frames=1,
                  size=(8, 12), prompts=[5, 5], cond=False, scale=(1.0, 1.0, 1.0)),
    # Clips; prompts of different length, odd rows and columns of tokens, channels for a given frame. Also the transformer of
    # the pipeline for clips.
    "video": dict(blocks=(2, 2), heads=3, axes=[2, 4, 2], ff=36, time=10, text=32, pooled=32, channels=3, frames=3,
                  size=(6, 10), prompts=[7, 2, 4], cond=True, scale=(1.0, 3.16, 3.16)),
    # As large as clips in standard definition: another scale of positions. Without an adapter.
    "standard": dict(blocks=(1, 1), heads=1, axes=[4, 4, 4], ff=16, time=8, text=6, pooled=4, channels=1, frames=1,
                     size=(60, 60), prompts=[3], cond=True, scale=(1.0, 2.0, 2.0), plain=True),
}
TARGETS = [
    "text_transformer_blocks.0.self_attention.to_query",
    "text_transformer_blocks.0.feed_forward.in_layer",
    "visual_transformer_blocks.0.self_attention.to_key",
    "visual_transformer_blocks.0.self_attention.out_layer",
    "visual_transformer_blocks.0.cross_attention.to_query",
    "visual_transformer_blocks.0.cross_attention.to_value",
    "visual_transformer_blocks.0.feed_forward.out_layer",
    "visual_transformer_blocks.0.visual_modulation.out_layer",
]


def without_rounding():
    """`Tensor.to(torch.bfloat16)` does nothing in the module of the model."""
    class Torch:
        bfloat16 = torch.float32
        def __getattr__(self, name):
            return getattr(torch, name)
    transformer_kandinsky.torch = Torch()


def make(name, m, seed):
    torch.manual_seed(seed)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    width = m["heads"] * sum(m["axes"])
    model = randomise(Kandinsky5Transformer3DModel(
        in_visual_dim=m["channels"], out_visual_dim=m["channels"], in_text_dim=m["text"], in_text_dim2=m["pooled"],
        time_dim=m["time"], patch_size=(1, 2, 2), model_dim=width, ff_dim=m["ff"], num_text_blocks=m["blocks"][0],
        num_visual_blocks=m["blocks"][1], axes_dims=tuple(m["axes"]), visual_cond=m["cond"]), seed)
    with torch.no_grad():
        for part in model.modules():  # so that attention is not even, and its gradients not tiny
            if isinstance(part, torch.nn.RMSNorm):
                part.weight.mul_(1.5)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # half the size
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    (height, wide), samples, longest = m["size"], len(m["prompts"]), max(m["prompts"])
    shape = (samples, m["frames"], height, wide, m["channels"])
    latents = torch.randn(shape)
    if m["cond"]:
        latents = torch.cat([latents, torch.zeros(*shape[:-1], m["channels"] + 1)], dim=-1)
    prompts = torch.randn(samples, longest, m["text"])
    mask = torch.arange(longest)[None] < torch.tensor(m["prompts"])[:, None]
    # What is in the padding must not matter.
    inputs = {
        "hidden_states": latents, "encoder_hidden_states": prompts, "pooled_projections": torch.randn(samples, m["pooled"]),
        "timestep": torch.tensor([812.5, 203.1, 499.0])[:samples],
    }

    def run():
        """Sample by sample, each with its own prompt alone: so none sees padding."""
        outs = []
        for at, n in enumerate(m["prompts"]):
            part = {key: value[at:at + 1] for key, value in inputs.items()}
            part["encoder_hidden_states"] = part["encoder_hidden_states"][:, :n]
            places = [torch.arange(m["frames"]), torch.arange(height // 2), torch.arange(wide // 2)]
            outs.append(model(**part, visual_rope_pos=places, text_rope_pos=torch.arange(n), scale_factor=m["scale"],
                              return_dict=False))
        return torch.cat(outs)

    with torch.no_grad():
        out = {"out.sample": run()}
    if "plain" in m:
        out |= {f"in.{name}": tensor for name, tensor in inputs.items()}
        return save_file({k: v.contiguous() for k, v in out.items()}, folder / "golden.safetensors")
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
    target = torch.randn(shape)
    adapted = run()
    loss = ((adapted - target) ** 2).mean()
    loss.backward()
    out |= {"lora_out.sample": adapted.detach(), "loss": loss.detach().reshape(1), "target": target}
    for target, (a, b) in stored.items():
        out |= {f"lora.{target}.A": a.detach(), f"lora.{target}.B": b.detach()}
        out |= {f"grad.{target}.A": a.grad, f"grad.{target}.B": b.grad}
    if not mask.all():
        inputs["encoder_hidden_states_mask"] = mask
    out |= {f"in.{name}": tensor for name, tensor in inputs.items()}
    metadata = {"lora_alpha": str(ALPHA), "lora_rank": str(RANK)}
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "golden.safetensors", metadata)


if __name__ == "__main__":
    without_rounding()
    for seed, (name, m) in enumerate(MODELS.items()):
        make(name, m, 9100 + seed)
