"""Makes the image here and what diffusers' autoencoder makes of it.

    python generate.py

Made with Python 3.11, torch 2.15, diffusers 0.42.1, pillow and numpy from PyPI, on a CPU in f32.
The autoencoder is the tiny one of ../sd3/pipeline, whose weights are random numbers.

picture.png           64 x 64, waves and noise from a fixed seed
latents.safetensors   `mean` and `deviation` [16, 8, 8] of `latent_dist`; `mirrored.mean` and
                      `mirrored.deviation` of the picture mirrored left to right
"""

from pathlib import Path

import numpy
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import save_file

HERE = Path(__file__).parent


def picture():
    rows, columns = numpy.mgrid[0:64, 0:64]
    waves = [numpy.sin(columns / 5 + rows / 11), numpy.cos(rows / 7), numpy.sin(columns * rows / 300)]
    noise = numpy.random.default_rng(1).normal(0, 12, (64, 64, 3))
    colours = numpy.stack(waves, axis=-1) * 100 + 128 + noise
    return colours.clip(0, 255).astype(numpy.uint8)


def moments(vae, pixels):
    numbers = torch.from_numpy(pixels.copy()).permute(2, 0, 1).unsqueeze(0).float() / 127.5 - 1
    with torch.no_grad():
        found = vae.encode(numbers).latent_dist
    return found.mean[0].contiguous(), found.std[0].contiguous()


def main():
    pixels = picture()
    Image.fromarray(pixels).save(HERE / "picture.png")
    vae = AutoencoderKL.from_pretrained(HERE.parent / "sd3/pipeline/vae", torch_dtype=torch.float32)
    mean, deviation = moments(vae, pixels)
    mirrored_mean, mirrored_deviation = moments(vae, pixels[:, ::-1])
    tensors = {
        "mean": mean,
        "deviation": deviation,
        "mirrored.mean": mirrored_mean,
        "mirrored.deviation": mirrored_deviation,
    }
    save_file(tensors, HERE / "latents.safetensors")


if __name__ == "__main__":
    main()
