"""Makes `adapters/`: one adapter for `schnell/pipeline` in the layouts of the programs that write adapters of FLUX.1,
and what diffusers' transformer computes with it. Every file is converted by diffusers itself, where it has a converter,
and must give the same changes of weights. Made with diffusers 0.42.1 and peft 0.21.2.

    python adapters.py
"""

import torch
from safetensors.torch import save_file

import check_exports as check
from diffusers import FluxPipeline

BASE = check.HERE / "schnell/pipeline"
OUT = check.HERE / "adapters"
RANK, ALPHA = 2, 5.0

# Fused layers of the original checkpoints, what XLabs calls them, and the layers of diffusers in them.
DOUBLE = {
    "img_attn.qkv": ("qkv_lora1", ["attn.to_q", "attn.to_k", "attn.to_v"]),
    "txt_attn.qkv": ("qkv_lora2", ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]),
    "img_attn.proj": ("proj_lora1", ["attn.to_out.0"]),
    "txt_attn.proj": ("proj_lora2", ["attn.to_add_out"]),
}
SINGLE = {
    "linear1": ("qkv_lora", ["attn.to_q", "attn.to_k", "attn.to_v"]),
    "linear2": ("proj_lora", ["proj_out"]),
}
# What XLabs has no names for, with the ranges of rows: the feed-forward within `linear1`, modulations, layers outside of
# blocks. Halves of the last modulation are the other way round.
OUTER = {
    "single_blocks.0.linear1": "single_transformer_blocks.0.proj_mlp",
    "double_blocks.0.img_mod.lin": "transformer_blocks.0.norm1.linear",
    "double_blocks.0.txt_mlp.2": "transformer_blocks.0.ff_context.net.2",
    "single_blocks.1.modulation.lin": "single_transformer_blocks.1.norm.linear",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
}


def reference(transformer):
    """Fused layer to (name of XLabs, layers of diffusers, A, B): q, k and v have one A."""
    gen = torch.Generator().manual_seed(77)
    randn = lambda *shape: 0.3 * torch.randn(*shape, generator=gen)
    weights, layers = dict(transformer.named_parameters()), {}
    for ours, theirs, count, table in [
        ("transformer_blocks", "double_blocks", len(transformer.transformer_blocks), DOUBLE),
        ("single_transformer_blocks", "single_blocks", len(transformer.single_transformer_blocks), SINGLE),
    ]:
        for index in range(count):
            for fused, (name, inner) in table.items():
                parts = [f"{ours}.{index}.{layer}" for layer in inner]
                out, width = weights[f"{parts[0]}.weight"].shape
                layers[f"{theirs}.{index}.{fused}"] = (
                    f"{theirs}.{index}.processor.{name}", parts, randn(RANK, width), randn(out * len(parts), RANK))
    return layers


def split(layers, scale):
    """By the layers of diffusers, `scale` within B."""
    found = {}
    for _, parts, down, up in layers.values():
        for part, rows in zip(parts, up.chunk(len(parts))):
            found[part] = (down.clone(), scale * rows)
    return found


def padded(fused, up):
    """`linear1` has rows of the feed-forward, too."""
    if not fused.endswith("linear1"):
        return up
    return torch.cat([up, torch.zeros(up.shape[0] // 3 * 4, up.shape[1])])


def named(pairs, prefix, flat, down, up, alpha=None):
    tensors = {}
    for layer, (a, b) in pairs.items():
        stem = prefix + (layer.replace(".", "_") if flat else layer)
        tensors |= {f"{stem}.{down}": a.contiguous(), f"{stem}.{up}": b.contiguous()}
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def files(layers):
    scale = ALPHA / RANK
    fused = {name: (down, padded(name, up)) for name, (_, _, down, up) in layers.items()}
    xlabs = {name: (down, scale * up) for name, _, down, up in layers.values()}
    apart, whole = split(layers, 1.0), split(layers, scale)
    kohya, peft = ["lora_down.weight", "lora_up.weight"], ["lora_A.weight", "lora_B.weight"]
    return {
        "kohya": named(fused, "lora_unet_", True, *kohya, ALPHA),
        "comfyui": named(fused, "diffusion_model.", False, *kohya, ALPHA),
        "comfyui_peft": named(fused, "diffusion_model.", False, *peft, ALPHA),
        "fal": named(dict_scaled(fused, scale), "base_model.model.", False, *peft),
        "ai_toolkit": named(whole, "transformer.", False, *peft),
        "onetrainer": named(apart, "lora_transformer_", True, *kohya, ALPHA),
        "onetrainer_new": named(apart, "transformer.", False, *kohya, ALPHA),
        "lycoris": named(apart, "lycoris_", True, *kohya, ALPHA),
        "xlabs": named(xlabs, "", False, "down.weight", "up.weight"),
    }


def dict_scaled(pairs, scale):
    return {name: (down, scale * up) for name, (down, up) in pairs.items()}


def outer(transformer):
    """A file of kohya's for the layers in `OUTER`; alpha is the rank, since diffusers forgets it for some of them."""
    gen = torch.Generator().manual_seed(78)
    weights, pairs = dict(transformer.named_parameters()), {}
    for theirs, ours in OUTER.items():
        out, width = weights[f"{ours}.weight"].shape
        rows = out // 4 * 7 if theirs.endswith("linear1") else out
        up = 0.3 * torch.randn(rows, RANK, generator=gen)
        up[: rows - out] = 0  # q, k and v
        pairs[theirs] = (0.3 * torch.randn(RANK, width, generator=gen), up)
    return named(pairs, "lora_unet_", True, "lora_down.weight", "lora_up.weight", float(RANK))


# diffusers has no converter for these, forgets alpha, or has the published widths there.
NOT_CONVERTED = ["comfyui_peft", "fal", "lycoris", "onetrainer_new"]


def converted(path):
    """The changes of weights by diffusers' converter."""
    state, alphas = FluxPipeline.lora_state_dict(str(path.parent), weight_name=path.name, return_alphas=True)
    assert not alphas
    stems = {key.split(".lora_")[0] for key in state}
    delta = lambda stem: state[f"{stem}.lora_B.weight"] @ state[f"{stem}.lora_A.weight"]
    deltas = {stem.removeprefix("transformer."): delta(stem) for stem in stems}
    return {layer: delta for layer, delta in deltas.items() if delta.abs().max() > 0}


def save_golden(name, deltas):
    transformer = check.model(BASE)
    inputs = {key: value for key, value in check.inputs(transformer.config).items() if value is not None}
    golden = {f"in.{key}": value for key, value in inputs.items()} | {"out.sample": check.output(transformer)}
    with torch.no_grad():
        weights = dict(transformer.named_parameters())
        for layer, delta in deltas.items():
            weights[f"{layer}.weight"] += delta
    golden["lora_out.sample"] = check.output(transformer)
    save_file(golden, OUT / name, metadata={"class": "FluxTransformer2DModel"})


def main():
    OUT.mkdir(exist_ok=True)
    transformer = check.model(BASE)
    check.fit_converter(transformer.config.num_attention_heads * transformer.config.attention_head_dim)
    layers = reference(transformer)
    expected = {layer: up @ down for layer, (down, up) in split(layers, ALPHA / RANK).items()}
    for name, tensors in files(layers).items():
        path = OUT / f"{name}.safetensors"
        save_file(tensors, path)
        if name not in NOT_CONVERTED:
            found = converted(path)
            if name == "onetrainer":  # of single blocks, diffusers finds the attention alone
                found = {layer: delta for layer, delta in found.items() if ".attn." in layer}
                assert found.keys() == {layer for layer in expected if ".attn." in layer}
            else:
                assert found.keys() == expected.keys(), name
            worst = max(check.apart(found[layer], expected[layer]) for layer in found)
            print(f"{name}: diffusers' converter differs by {worst:.1e}")
            assert worst < 1e-6
    save_golden("golden.safetensors", expected)
    path = OUT / "kohya_outer.safetensors"
    save_file(outer(transformer), path)
    found = converted(path)
    assert found.keys() == set(OUTER.values())
    save_golden("golden_outer.safetensors", found)
    for path in OUT.iterdir():
        path.chmod(0o644)


main()
