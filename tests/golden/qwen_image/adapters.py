"""Makes `adapters/`: one adapter for `pipeline` in the layouts of the programs that write adapters of Qwen-Image, and what
diffusers' transformer computes with it. Files that diffusers has a converter for are converted by it, and must give the
same changes of weights. Made with diffusers 0.42.1 and peft 0.21.2.

    python adapters.py
"""

import torch
from diffusers import QwenImagePipeline
from safetensors.torch import save_file

import check_exports as check

OUT = check.HERE / "adapters"
RANK, ALPHA = 2, 5.0
LAYERS = ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_out.0", "transformer_blocks.0.attn.add_v_proj",
          "transformer_blocks.0.attn.to_add_out", "transformer_blocks.1.img_mlp.net.0.proj",
          "transformer_blocks.0.txt_mlp.net.2", "transformer_blocks.1.img_mod.1", "proj_out"]


def named(pairs, prefix, flat, down, up, alpha=None):
    tensors = {}
    for layer, (a, b) in pairs.items():
        stem = prefix + (layer.replace(".", "_") if flat else layer)
        tensors |= {f"{stem}.{down}": a.contiguous(), f"{stem}.{up}": b.contiguous()}
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def files(pairs):
    whole = {layer: (down, ALPHA / RANK * up) for layer, (down, up) in pairs.items()}
    kohya, peft = ["lora_down.weight", "lora_up.weight"], ["lora_A.weight", "lora_B.weight"]
    return {
        "musubi": named(pairs, "lora_unet_", True, *kohya, ALPHA),
        "comfyui": named(pairs, "diffusion_model.", False, *kohya, ALPHA),
        # Also diffusion-pipe's.
        "ai_toolkit": named(whole, "diffusion_model.", False, *peft),
        "flymyai": named(whole, "transformer.", False, *peft),
        # The last file of FlyMyAI's script for DGX Spark.
        "bare": named(whole, "", False, *peft),
        "peft": named(whole, "base_model.model.", False, *peft),
        "onetrainer": named(pairs, "transformer.", False, *kohya, ALPHA),
        "simpletuner": named(pairs, "lycoris_", True, *kohya, ALPHA),
    }


# diffusers has no converter for these.
NOT_CONVERTED = ["bare", "peft", "onetrainer", "simpletuner"]


def converted(path):
    """The changes of weights by diffusers' converter."""
    state = QwenImagePipeline.lora_state_dict(str(path.parent), weight_name=path.name)
    stems = {key.split(".lora_")[0] for key in state}
    delta = lambda stem: state[f"{stem}.lora_B.weight"] @ state[f"{stem}.lora_A.weight"]
    return {stem.removeprefix("transformer."): delta(stem) for stem in stems}


def main():
    OUT.mkdir(exist_ok=True)
    transformer, gen = check.model(), torch.Generator().manual_seed(77)
    weights = dict(transformer.named_parameters())
    randn = lambda *shape: 0.3 * torch.randn(*shape, generator=gen)
    shapes = {layer: weights[f"{layer}.weight"].shape for layer in LAYERS}
    pairs = {layer: (randn(RANK, width), randn(out, RANK)) for layer, (out, width) in shapes.items()}
    expected = {layer: ALPHA / RANK * up @ down for layer, (down, up) in pairs.items()}
    for name, tensors in files(pairs).items():
        path = OUT / f"{name}.safetensors"
        save_file(tensors, path)
        path.chmod(0o644)
        if name not in NOT_CONVERTED:
            found = converted(path)
            assert found.keys() == expected.keys(), name
            worst = max(check.apart(found[layer], expected[layer]) for layer in found)
            print(f"{name}: diffusers' converter differs by {worst:.1e}")
            assert worst < 1e-6
    golden = {f"in.{key}": value for key, value in check.inputs(transformer.config).items()}
    golden["out.sample"] = check.output(transformer)
    with torch.no_grad():
        for layer, delta in expected.items():
            weights[f"{layer}.weight"] += delta
    golden["lora_out.sample"] = check.output(transformer)
    path = OUT / "golden.safetensors"
    save_file(golden, path, metadata={"class": "QwenImageTransformer2DModel"})
    path.chmod(0o644)


main()
