"""Makes the reference data of this folder: the VAE of Qwen-Image with random weights, tiny, of sizes that no other file
has. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1 and safetensors, all from PyPI.

    python generate.py

`original/` is stored under the names of Wan 2.1, as ComfyUI has them; diffusers' own converter must make its layout of
them, so that the names are held against diffusers too. That converter knows the number of blocks of the published model
only, so `other/`, with other numbers, is stored as diffusers saves it.
"""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import save_file

HERE = Path(__file__).parent

MODELS = {
    # The published numbers of sizes and blocks; latents of 3 x 5.
    "original": dict(
        config=dict(base_dim=4, z_dim=3, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True]),
        image=(24, 40), dtype=torch.bfloat16, loud=1.0),
    # Widths that no power of two is in, an odd number of channels after upsampling, sides that are not whole multiples
    # of the latent's, and decoded values beyond -1 and 1.
    "other": dict(
        config=dict(base_dim=5, z_dim=5, dim_mult=[2, 3, 2], num_res_blocks=1, temperal_downsample=[True, False]),
        image=(22, 31), dtype=torch.float32, loud=4.5),
}


def statistics(n):
    return dict(latents_mean=[round(0.3 * i - 0.7, 4) for i in range(n)], latents_std=[round(1.1 + 0.4 * i, 4) for i in range(n)])


def randomise(vae, dtype, loud):
    """Norms have weights other than 1; all values are as they are stored."""
    for name, tensor in vae.state_dict().items():
        if name.endswith("gamma"):
            tensor.copy_(1.0 + 0.4 * torch.randn_like(tensor))
        # Few channels are often all near zero, and what is divided by their norm then tells nothing.
        if name.endswith("bias") and "conv_out" not in name:
            tensor.copy_(0.25 * torch.randn_like(tensor))
        if name == "decoder.conv_out.weight":
            tensor.mul_(loud)
        tensor.copy_(tensor.to(dtype).float())


def to_original(name, blocks):
    """The name in the layout of Wan 2.1."""
    words = name.split(".")
    if "up_blocks" in words:
        level, kind, index = int(words[2]), words[3], int(words[4])
        index = level * (blocks + 2) + (index if kind == "resnets" else blocks + 1)
        words = [words[0], "upsamples", str(index), *words[5:]]
    if "mid_block" in words:
        index = {"resnets": {"0": "0", "1": "2"}, "attentions": {"0": "1"}}[words[2]][words[3]]
        words = [words[0], "middle", index, *words[4:]]
    inner = {
        "down_blocks": "downsamples", "norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3",
        "conv2": "residual.6", "conv_shortcut": "shortcut", "conv_in": "conv1", "norm_out": "head.0",
        "conv_out": "head.2", "quant_conv": "conv1", "post_quant_conv": "conv2",
    }
    return ".".join(inner.get(word, word) for word in words)


def outputs(vae, image, config):
    encoded = vae.encode(image).latent_dist
    mean = torch.tensor(config["latents_mean"]).view(1, -1, 1, 1, 1)
    std = torch.tensor(config["latents_std"]).view(1, -1, 1, 1, 1)
    return {
        "out.mean": encoded.mean,
        "out.logvar": encoded.logvar,
        "out.scaled_latent": (encoded.mean - mean) / std,
        "out.decoded": vae.decode(encoded.mean).sample,
    }


@torch.no_grad()
def make(name, model, seed):
    torch.manual_seed(seed)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    config = model["config"] | statistics(model["config"]["z_dim"])
    vae = AutoencoderKLQwenImage(**config).eval()
    randomise(vae, model["dtype"], model["loud"])
    image = torch.rand(2, 3, 1, *model["image"]) * 2 - 1
    found = outputs(vae, image, config)
    save_file({"in.image": image} | {key: value.contiguous() for key, value in found.items()},
              folder / "golden.safetensors", metadata={"class": "AutoencoderKLQwenImage"})
    (folder / "config.json").write_text(vae.to_json_string())
    state = {key: value.to(model["dtype"]) for key, value in vae.state_dict().items()}
    if name == "original":
        renamed = {to_original(key, model["config"]["num_res_blocks"]): value for key, value in state.items()}
        back = convert_wan_vae_to_diffusers(dict(renamed))
        assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
        save_file(renamed, folder / "original.safetensors")
    else:
        save_file(state, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    decoded = found["out.decoded"]
    print(name, {key: tuple(value.shape) for key, value in found.items()}, "clamped",
          (decoded.abs() == 1).float().mean().item())


if __name__ == "__main__":
    for seed, (name, model) in enumerate(MODELS.items()):
        make(name, model, 7300 + seed)
