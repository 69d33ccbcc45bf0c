"""Makes what programs other than diffusers have of Z-Image: the names of `pipeline/`'s transformer in the authors' layout, which
ComfyUI has too (`names.json`: which rows of which tensor each of diffusers' is), and one adapter in the layouts of the programs that
write adapters of Z-Image (`adapters/`), with what diffusers computes with it. diffusers' own converters must give the same
weights. Run `pipelines.py` before. Made with diffusers 0.42.1.

    python files.py
"""

import copy
import json
import sys
from pathlib import Path

import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
import importlib.util
own = importlib.util.spec_from_file_location("own", HERE / "generate.py")
generate = importlib.util.module_from_spec(own)
own.loader.exec_module(generate)
velocity = generate.velocity

TRANSFORMER = HERE / "pipeline/transformer"
RANK, ALPHA = 3, 5.0
LAYERS = ["layers.0.attention.to_q", "layers.0.attention.to_k", "layers.0.attention.to_v", "layers.1.attention.to_out.0",
          "layers.0.feed_forward.w1", "layers.1.feed_forward.w2", "layers.0.adaLN_modulation.0",
          "noise_refiner.0.feed_forward.w3", "context_refiner.0.attention.to_out.0"]


def original(name):
    for ours, theirs in [("all_x_embedder.2-1", "x_embedder"), ("all_final_layer.2-1", "final_layer"),
                         ("attention.to_out.0", "attention.out"), ("attention.norm_q", "attention.q_norm"),
                         ("attention.norm_k", "attention.k_norm")]:
        name = name.replace(ours, theirs)
    for third in ["to_q", "to_k", "to_v"]:
        name = name.replace(f"attention.{third}", "attention.qkv")
    return name


def names(weights):
    found = {}
    for part in ["to_q", "to_k", "to_v", ""]:
        for name in sorted(weights):
            is_fused = any(third in name for third in ["attention.to_q", "attention.to_k", "attention.to_v"])
            if (part and f".{part}." in name) or (not part and not is_fused):
                found.setdefault(original(name), []).append(name)
    fused = {key: torch.cat([weights[name] for name in parts]) for key, parts in found.items()}
    again = convert_z_image_transformer_checkpoint_to_diffusers(copy.copy(fused))
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    places = {}
    for key, parts in found.items():
        first = 0
        for name in parts:
            places[name] = [[key, first, first + len(weights[name])]]
            first += len(weights[name])
    return places


def named(pairs, prefix, is_flat, down, up, alpha=None):
    tensors = {}
    for layer, (a, b) in pairs.items():
        stem = prefix + (layer.replace(".", "_") if is_flat else layer)
        tensors |= {f"{stem}.{down}": a.contiguous(), f"{stem}.{up}": b.contiguous()}
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def as_fused(pairs):
    """q, k and v of a block as one, each with its own part of the rank; other layers by their original names."""
    fused = {original(layer): pair for layer, pair in pairs.items() if "attention.to_q" not in layer
             and "attention.to_k" not in layer and "attention.to_v" not in layer}
    three = [pairs[f"layers.0.attention.{part}"] for part in ["to_q", "to_k", "to_v"]]
    fused["layers.0.attention.qkv"] = (torch.cat([a for a, _ in three]), torch.block_diag(*[b for _, b in three]))
    return fused


def files(pairs):
    whole = {layer: (down, ALPHA / RANK * up) for layer, (down, up) in pairs.items()}
    kohya, peft = ["lora_down.weight", "lora_up.weight"], ["lora_A.weight", "lora_B.weight"]
    return {
        "musubi": named(pairs, "lora_unet_", True, *kohya, ALPHA),
        "ai_toolkit": named(whole, "diffusion_model.", False, *peft),
        "diffusers": named(whole, "transformer.", False, *peft),
        "peft": named(whole, "base_model.model.", False, *peft),
        # By the names of ComfyUI's own layers.
        "comfyui_fused": named(as_fused(whole), "diffusion_model.", False, *peft),
        "kohya_fused": named(as_fused(whole), "lora_unet_", True, *kohya),
    }


# diffusers has no converter for these.
NOT_CONVERTED = ["diffusers", "peft", "comfyui_fused", "kohya_fused"]


def converted(path):
    """The changes of weights by diffusers' converter."""
    state = ZImagePipeline.lora_state_dict(str(path.parent), weight_name=path.name)
    stems = {key.split(".lora_")[0] for key in state}
    delta = lambda stem: state[f"{stem}.lora_B.weight"] @ state[f"{stem}.lora_A.weight"]
    return {stem.removeprefix("transformer."): delta(stem) for stem in stems}


@torch.no_grad()
def main():
    weights = load_file(TRANSFORMER / "diffusion_pytorch_model.safetensors")
    (HERE / "names.json").write_text(json.dumps(names(weights), indent=0) + "\n")
    out = HERE / "adapters"
    out.mkdir(exist_ok=True)
    model, gen = ZImageTransformer2DModel.from_pretrained(TRANSFORMER, torch_dtype=torch.float32), torch.Generator().manual_seed(78)
    parameters = dict(model.named_parameters())
    randn = lambda *shape: 0.3 * torch.randn(*shape, generator=gen)
    shapes = {layer: parameters[f"{layer}.weight"].shape for layer in LAYERS}
    pairs = {layer: (randn(RANK, width), randn(height, RANK)) for layer, (height, width) in shapes.items()}
    expected = {layer: ALPHA / RANK * up @ down for layer, (down, up) in pairs.items()}
    for name, tensors in files(pairs).items():
        path = out / f"{name}.safetensors"
        save_file(tensors, path)
        path.chmod(0o644)
        if name not in NOT_CONVERTED:
            found = converted(path)
            assert found.keys() == expected.keys(), name
            worst = max(((found[layer] - expected[layer]).abs().max() / expected[layer].abs().max()).item() for layer in found)
            print(f"{name}: diffusers' converter differs by {worst:.1e}")
            assert worst < 1e-6
    latents, timestep, prompt = randn(1, 16, 4, 6) / 0.3, torch.tensor([400.0]), randn(1, 9, 24) / 0.3
    given = [latents, timestep, prompt, [9]]
    golden = {"in.hidden_states": latents, "in.timestep": timestep, "in.encoder_hidden_states": prompt}
    golden["out.sample"] = velocity(model, *given)
    for layer, delta in expected.items():
        parameters[f"{layer}.weight"] += delta
    golden["lora_out.sample"] = velocity(model, *given)
    save_file(golden, out / "golden.safetensors", metadata={"class": "ZImageTransformer2DModel"})
    (out / "golden.safetensors").chmod(0o644)


main()
