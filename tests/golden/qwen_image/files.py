"""Makes `files/`: the names of `pipeline/`'s VAE in ComfyUI's `qwen_image_vae.safetensors`, and transformers in fp8 as
people share them, with what diffusers computes with the dequantised weights. Made with diffusers 0.42.1.

    python files.py
"""

import json
import sys

import torch
from safetensors.torch import load_file, save_file

import check_exports as check

sys.path.insert(0, str(check.HERE.parent / "vae_qwen"))
from generate import to_original

OUT = check.HERE / "files"
PREFIX = "model.diffusion_model."


def is_quantised(name, tensor):
    return tensor.ndim == 2 and name.startswith("transformer_blocks.")


def scaled(weights):
    """As ComfyUI's: one scale for a matrix, a marker, a prefix."""
    stored, found = {PREFIX + "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, {}
    for name, tensor in weights.items():
        if not is_quantised(name, tensor):
            stored[PREFIX + name], found[name] = tensor, tensor.float()
            continue
        scale = tensor.float().abs().max() / 448
        stored[PREFIX + name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        stored[PREFIX + name.removesuffix(".weight") + ".scale_weight"] = scale
        found[name] = stored[PREFIX + name].float() * scale
    return stored, found


def cast(weights):
    """`qwen_image_fp8_e4m3fn.safetensors`: matrices are cast, without scales."""
    stored = {name: tensor.to(torch.float8_e4m3fn) if is_quantised(name, tensor) else tensor for name, tensor in weights.items()}
    return stored, {name: tensor.float() for name, tensor in stored.items()}


def main():
    OUT.mkdir(exist_ok=True)
    vae = load_file(check.BASE / "vae/diffusion_pytorch_model.safetensors")
    blocks = json.loads((check.BASE / "vae/config.json").read_text())["num_res_blocks"]
    names = {name: to_original(name, blocks) for name in sorted(vae)}
    (OUT / "vae_names.json").write_text(json.dumps(names, indent=0) + "\n")
    weights = load_file(check.BASE / "transformer/diffusion_pytorch_model.safetensors")
    for name, make in [("scaled", scaled), ("cast", cast)]:
        stored, found = make(weights)
        save_file(stored, OUT / f"{name}.safetensors")
        transformer = check.model()
        transformer.load_state_dict(found)
        golden = {f"in.{key}": value for key, value in check.inputs(transformer.config).items()}
        golden["out.sample"] = check.output(transformer)
        save_file(golden, OUT / f"{name}.golden.safetensors", metadata={"class": "QwenImageTransformer2DModel"})
    for path in OUT.iterdir():
        path.chmod(0o644)


main()
