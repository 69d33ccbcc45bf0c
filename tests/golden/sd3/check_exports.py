"""Loads what `hearth export` wrote with diffusers and PEFT, and compares the transformer's output with that
of the adapter it was made from.

    pip install torch diffusers transformers peft safetensors
    python check_exports.py path/to/hearth

The files for kohya and ComfyUI are read by hand: W + alpha / rank * up * down, by the original layers' names.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import PeftModel
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5


def model():
    return SD3Transformer2DModel.from_pretrained(HERE / "pipeline/transformer", torch_dtype=torch.float32).eval()


def output(transformer):
    torch.manual_seed(0)
    with torch.no_grad():
        return transformer(
            hidden_states=torch.randn(1, 16, 8, 12), timestep=torch.tensor([400.0]),
            encoder_hidden_states=torch.randn(1, 20, 96), pooled_projections=torch.randn(1, 40),
        ).sample


def by_diffusers(path):
    transformer = model()
    state, metadata = StableDiffusion3Pipeline.lora_state_dict(
        str(path.parent), weight_name=path.name, return_lora_metadata=True)
    StableDiffusion3Pipeline.load_lora_into_transformer(state, transformer=transformer, metadata=metadata)
    return output(transformer)


def by_hand(path, prefix, down, up, flatten):
    transformer, tensors = model(), load_file(path)
    for key in [key for key in tensors if key.endswith(f".{down}.weight")]:
        stem = key[: -len(f".{down}.weight")]
        first, second = tensors[key], tensors[f"{stem}.{up}.weight"]
        delta = tensors[f"{stem}.alpha"] / first.shape[0] * second @ first
        for index, block in enumerate(transformer.transformer_blocks):
            places = {
                f"joint_blocks.{index}.x_block.attn.qkv": [block.attn.to_q, block.attn.to_k, block.attn.to_v],
                f"joint_blocks.{index}.x_block.attn.proj": [block.attn.to_out[0]],
            }
            for name, layers in places.items():
                if stem == prefix + (name.replace(".", "_") if flatten else name):
                    for layer, part in zip(layers, delta.chunk(len(layers))):
                        layer.weight.data += part
                    delta = None
                    break
            if delta is None:
                break
        assert delta is None, f"{stem} is no layer"
    return output(transformer)


def main(hearth):
    expected = by_diffusers(HERE / "pipeline/lora.safetensors")
    assert (expected - output(model())).abs().max() > 1e-2, "the adapter does nothing"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        adapter, base = HERE / "pipeline/lora.safetensors", HERE / "pipeline"
        subprocess.run([hearth, "export", adapter, "--base", base, "--out", folder, "--name", "x"], check=True)
        outputs = {
            "diffusers": by_diffusers(folder / "pytorch_lora_weights.safetensors"),
            "peft": output(PeftModel.from_pretrained(model(), folder / "peft")),
            "kohya": by_hand(folder / "x-kohya.safetensors", "lora_unet_", "lora_down", "lora_up", True),
            "comfyui": by_hand(folder / "x-comfyui.safetensors", "diffusion_model.", "lora_down", "lora_up", False),
        }
    for name, got in outputs.items():
        apart = ((got - expected).abs().max() / expected.abs().max()).item()
        print(f"{name}: {apart:.1e}")
        assert apart < TOLERANCE, name


main(sys.argv[1])
