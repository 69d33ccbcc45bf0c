"""Makes the reference data of this folder: FLUX.1 transformers with random weights, tiny, of sizes that no other file
has. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1 and safetensors, all from PyPI.

    python generate.py

The weights are drawn under the names of the original checkpoints (`original.safetensors`), and diffusers' own converter
makes its layout of them, so that the names are held against diffusers too.
"""

import inspect
import json
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file

HERE = Path(__file__).parent
RANK, ALPHA = 4, 8

MODELS = {
    # Guidance, two kinds of blocks of different number, an image that is wider than high.
    "dev": dict(layers=2, singles=3, heads=2, head=20, axes=[4, 8, 8], joint=36, pooled=28, guided=True, size=(3, 5), text=6),
    # No guidance, one token of text, an image of one row.
    "schnell": dict(layers=1, singles=2, heads=2, head=16, axes=[4, 4, 8], joint=24, pooled=20, guided=False, size=(1, 4), text=1),
}
TARGETS = [
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.add_k_proj",
    "transformer_blocks.0.ff_context.net.2",
    "single_transformer_blocks.0.attn.to_v",
    "single_transformer_blocks.1.proj_mlp",
    "single_transformer_blocks.1.proj_out",
]


def original(m):
    """Names and shapes of the original layout."""
    d, mlp = m["heads"] * m["head"], 4 * m["heads"] * m["head"]
    shapes = {}

    def linear(name, inputs, outputs):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    linear("img_in", 64, d)
    linear("txt_in", m["joint"], d)
    for name, width in [("time_in", 256), ("vector_in", m["pooled"])] + [("guidance_in", 256)] * m["guided"]:
        linear(f"{name}.in_layer", width, d)
        linear(f"{name}.out_layer", d, d)
    for index in range(m["layers"]):
        for stream in ["img", "txt"]:
            block = f"double_blocks.{index}.{stream}"
            linear(f"{block}_mod.lin", d, 6 * d)
            linear(f"{block}_attn.qkv", d, 3 * d)
            linear(f"{block}_attn.proj", d, d)
            linear(f"{block}_mlp.0", d, mlp)
            linear(f"{block}_mlp.2", mlp, d)
            for norm in ["query_norm", "key_norm"]:
                shapes[f"{block}_attn.norm.{norm}.scale"] = (m["head"],)
    for index in range(m["singles"]):
        block = f"single_blocks.{index}"
        linear(f"{block}.linear1", d, 3 * d + mlp)
        linear(f"{block}.linear2", d + mlp, d)
        linear(f"{block}.modulation.lin", d, 3 * d)
        for norm in ["query_norm", "key_norm"]:
            shapes[f"{block}.norm.{norm}.scale"] = (m["head"],)
    linear("final_layer.linear", d, 64)
    linear("final_layer.adaLN_modulation.1", d, 2 * d)
    return shapes


def converter(width):
    """diffusers' own, whose width is that of the published models."""
    source = inspect.getsource(single_file_utils.convert_flux_transformer_checkpoint_to_diffusers)
    assert "inner_dim = 3072" in source
    scope = dict(vars(single_file_utils))
    exec(source.replace("inner_dim = 3072", f"inner_dim = {width}"), scope)
    return scope["convert_flux_transformer_checkpoint_to_diffusers"]


def draw(shapes):
    numbers = {}
    for name, shape in shapes.items():
        spread = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        numbers[name] = torch.randn(shape) * (0.3 * spread if len(shape) == 1 else spread)
        if name.endswith("scale"):
            numbers[name] = 1 + 0.1 * torch.randn(shape)
    return numbers


def make(name, m):
    torch.manual_seed(len(name))
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    weights = draw(original(m))
    save_file(weights, folder / "original.safetensors")
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=m["layers"], num_single_layers=m["singles"],
        attention_head_dim=m["head"], num_attention_heads=m["heads"], joint_attention_dim=m["joint"],
        pooled_projection_dim=m["pooled"], guidance_embeds=m["guided"], axes_dims_rope=tuple(m["axes"]),
    )
    model.load_state_dict(converter(m["heads"] * m["head"])(dict(weights)), strict=True)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    rows, columns = m["size"]
    places = [[0, row, column] for row in range(rows) for column in range(columns)]
    inputs = {
        "hidden_states": torch.randn(2, rows * columns, 64),
        "encoder_hidden_states": torch.randn(2, m["text"], m["joint"]),
        "pooled_projections": torch.randn(2, m["pooled"]),
        "timestep": torch.tensor([0.8125, 0.2031]),
        "img_ids": torch.tensor(places, dtype=torch.float32),
        "txt_ids": torch.zeros(m["text"], 3),
    }
    if m["guided"]:
        # Small: waves of a large number differ in the last bit of an exponential.
        inputs["guidance"] = torch.tensor([1.0, 0.4375])
    with torch.no_grad():
        out = {"out.sample": model(**inputs, return_dict=False)[0]}

    # Adapters as plain matrices beside the layers: x W + scale · (x A) B.
    modules, stored = dict(model.named_modules()), {}
    for target in TARGETS:
        layer = modules[target]
        a = (torch.randn(RANK, layer.in_features) * 0.2).requires_grad_()
        b = (torch.randn(layer.out_features, RANK) * 0.2).requires_grad_()
        stored[target] = (a, b)
        layer.register_forward_hook(
            lambda _, x, y, a=a, b=b: y + (ALPHA / RANK) * (x[0] @ a.T) @ b.T
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    target = torch.randn(2, rows * columns, 64)
    adapted = model(**inputs, return_dict=False)[0]
    loss = ((adapted - target) ** 2).mean()
    loss.backward()
    out |= {"lora_out.sample": adapted.detach(), "loss": loss.detach().reshape(1), "target": target}
    for target, (a, b) in stored.items():
        out |= {f"lora.{target}.A": a.detach(), f"lora.{target}.B": b.detach()}
        out |= {f"grad.{target}.A": a.grad, f"grad.{target}.B": b.grad}
    out |= {f"in.{name}": tensor for name, tensor in inputs.items()}
    metadata = {"lora_alpha": str(ALPHA), "lora_rank": str(RANK)}
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "golden.safetensors", metadata)


if __name__ == "__main__":
    for name, m in MODELS.items():
        make(name, m)
