"""Makes the reference data of this folder: the VAE of HunyuanVideo with random weights, tiny, of sizes that no other file
has. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1 and safetensors, all from PyPI.

    python generate.py

`renamed/` is stored under the names of original checkpoints, as ComfyUI has them; its attention has kernels of 1 x 1 x 1.
"""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent

MODELS = {
    # The published number of sizes; two frames of 3 x 5.
    "clip": dict(
        config=dict(block_out_channels=(4, 4, 8, 8), latent_channels=3, norm_num_groups=2, layers_per_block=1),
        clip=(1, 5, 24, 40), dtype=torch.bfloat16),
    # Five frames of latents, frames and rows that are not whole multiples of the latent's, two samples.
    "renamed": dict(
        config=dict(block_out_channels=(6, 3, 6), latent_channels=2, norm_num_groups=3, layers_per_block=2,
                    spatial_compression_ratio=4),
        clip=(2, 17, 10, 7), dtype=torch.bfloat16),
    # Eight frames of latents, cut into tiles of five; the last has one that is its own.
    "long": dict(weights="clip", clip=(1, 29, 16, 16), is_tiled=True),
    # Seven, of which the last tile has none.
    "long_even": dict(weights="clip", clip=(1, 25, 8, 16), is_tiled=True),
    # One frame, no attention, one size that halves time only.
    "frame": dict(
        config=dict(block_out_channels=(4, 8, 4), latent_channels=5, norm_num_groups=4, layers_per_block=1,
                    spatial_compression_ratio=2, mid_block_add_attention=False, scaling_factor=0.75),
        clip=(1, 1, 12, 14), dtype=torch.float32),
    # The same with more frames, and neither one more than a multiple of four.
    "frames": dict(weights="frame", clip=(1, 7, 8, 6)),
}

SEEDS = ["clip", "renamed", "frame", "frames", "long", "long_even"]


def randomise(vae, dtype):
    """Norms have weights other than 1. Kernels are larger than PyTorch makes them: else what a norm divides by is so small
    that PyTorch's own f32 is off by 3e-5. All values are as they are stored."""
    for name, tensor in vae.state_dict().items():
        if "norm" in name and name.endswith("weight"):
            tensor.copy_(1.0 + 0.4 * torch.randn_like(tensor))
        elif name.endswith("weight"):
            tensor.mul_(2.5)
        else:
            tensor.copy_(0.25 * torch.randn_like(tensor))
        tensor.copy_(tensor.to(dtype).float())


def renamed(name, levels):
    """The name in original checkpoints."""
    words = name.split(".")
    if "down_blocks" in words or "up_blocks" in words:
        is_down, level = "down_blocks" in words, int(words[2])
        rest = ".".join(words[3:]).replace("resnets.", "block.").replace("conv_shortcut", "nin_shortcut")
        rest = rest.replace("downsamplers.0.", "downsample.").replace("upsamplers.0.", "upsample.")
        return f"{words[0]}.{'down' if is_down else 'up'}.{level if is_down else levels - 1 - level}.{rest}"
    pairs = {
        "mid_block.resnets.0": "mid.block_1", "mid_block.resnets.1": "mid.block_2",
        "mid_block.attentions.0.group_norm": "mid.attn_1.norm", "mid_block.attentions.0.to_q": "mid.attn_1.q",
        "mid_block.attentions.0.to_k": "mid.attn_1.k", "mid_block.attentions.0.to_v": "mid.attn_1.v",
        "mid_block.attentions.0.to_out.0": "mid.attn_1.proj_out", "conv_norm_out": "norm_out",
    }
    for ours, theirs in pairs.items():
        name = name.replace(ours, theirs)
    return name


def full_config(config):
    levels = len(config["block_out_channels"])
    return dict(
        down_block_types=("HunyuanVideoDownBlock3D",) * levels, up_block_types=("HunyuanVideoUpBlock3D",) * levels, **config)


def make(name, m, seed):
    torch.manual_seed(seed)
    model = m if "config" in m else MODELS[m["weights"]]
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    vae = AutoencoderKLHunyuanVideo(**full_config(model["config"])).eval()
    # Else the whole clip at once, however long.
    vae.use_framewise_encoding = vae.use_framewise_decoding = "is_tiled" in m
    if model is m:
        with torch.no_grad():
            randomise(vae, m["dtype"])
        weights = {key: tensor.to(m["dtype"]).contiguous() for key, tensor in vae.state_dict().items()}
        path = folder / "diffusion_pytorch_model.safetensors"
        if name == "renamed":
            path, levels = folder / "renamed.safetensors", len(m["config"]["block_out_channels"])
            weights = {renamed(key, levels): tensor for key, tensor in weights.items()}
            for key, tensor in weights.items():
                if "attn_1" in key and tensor.dim() == 2:
                    weights[key] = tensor[..., None, None, None].contiguous()
        save_file(weights, path)
    else:
        other = HERE / m["weights"] / "diffusion_pytorch_model.safetensors"
        vae.load_state_dict(load_file(other))
    config = {"_class_name": "AutoencoderKLHunyuanVideo"} | {k: v for k, v in vae.config.items() if k[0] != "_"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    samples, frames, height, width = m["clip"]
    clip = torch.rand(samples, 3, frames, height, width) * 2 - 1
    with torch.no_grad():
        encoded = vae.encode(clip).latent_dist
        outputs = {
            "out.mean": encoded.mean, "out.logvar": encoded.logvar,
            "out.scaled_latent": encoded.mean * vae.config.scaling_factor, "out.decoded": vae.decode(encoded.mean).sample,
        }
    save_file({"in.image": clip} | {k: v.contiguous() for k, v in outputs.items()}, folder / "golden.safetensors")
    print(name, {k: tuple(v.shape) for k, v in outputs.items()}, [v.abs().max().item() for v in outputs.values()])


if __name__ == "__main__":
    for name, m in MODELS.items():
        make(name, m, 9100 + SEEDS.index(name))
