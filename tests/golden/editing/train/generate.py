"""Trains job.toml for FLUX.1 Kontext by PyTorch, diffusers and PEFT, and records the results.

    pip install torch diffusers transformers peft safetensors pillow numpy
    python generate.py           # draws control/, writes losses.txt and adapter.safetensors
    python generate.py --check   # trains again and prints the differences from the recorded files

The training is the plain loop of diffusers' train_dreambooth_lora_flux_kontext.py: the mode of the reference's latent is
appended as tokens whose first id is 1, and the loss is over the image's tokens. References have the sizes in which the
model sees them, so that nothing is scaled. Images, random numbers and the loop are those of
`../../sd3/train/generate.py`, the model is that of `../../flux/train/generate.py`.
"""
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "sd3/train"))

import generate as shared
import numpy as np
import torch
from PIL import Image

# It trains when it is read, as a script: only what it declares is wanted.
source = (HERE.parent.parent / "flux/train/generate.py").read_text().rsplit("shared.main(", 1)[0]
flux = {"__file__": str(HERE.parent.parent / "flux/train/generate.py"), "__name__": "flux"}
exec(source, flux)

# Sizes that Kontext has at this resolution.
SIZES = [(96, 96), (96, 80), (112, 64), (96, 96), (96, 80), (112, 64), (96, 96), (80, 96)]


def draw_references(folder):
    folder.mkdir(exist_ok=True)
    for number, (width, height) in enumerate(SIZES):
        y, x = np.mgrid[0:height, 0:width]
        waves = [np.cos(x * (number + 3) / 17 - c) * np.sin(y * (c + 3) / 29 + number) for c in range(3)]
        pixels = (127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", optimize=True)


class KontextTrainer(flux["FluxTrainer"]):
    def __init__(self, folder, job):
        references = [pixels for pixels, _ in read(folder / job["data"]["references"])]
        self.left = iter(references)
        super().__init__(folder, job)

    @torch.no_grad()
    def encode(self, pixels, caption):
        reference = next(self.left)
        latent, tokens, pooled, size = super().encode(pixels, caption)
        mode = self.scaled(self.pipeline.vae.encode(reference).latent_dist.mode())
        # Samples of one size of image and of reference are trained together.
        return latent, tokens, pooled, mode, (*size, *reference.shape[-1:-3:-1])

    def condition(self, samples):
        return dict(tokens=torch.cat([sample[1] for sample in samples]), pooled=torch.cat([sample[2] for sample in samples]),
                    references=torch.cat([sample[3] for sample in samples]))

    def predict(self, latents, timesteps, tokens, pooled, references):
        packed, ids = [], []
        for index, images in enumerate([latents, references]):
            count, channels, height, width = images.shape
            packed.append(self.pipeline._pack_latents(images, count, channels, height, width))
            places = self.pipeline._prepare_latent_image_ids(count, height // 2, width // 2, latents.device, latents.dtype)
            places[..., 0] = index
            ids.append(places)
        count, _, height, width = latents.shape
        found = self.pipeline.transformer(
            hidden_states=torch.cat(packed, dim=1), timestep=timesteps / 1000,
            guidance=torch.full([count], self.job["train"]["guidance_scale"]), encoder_hidden_states=tokens,
            pooled_projections=pooled, img_ids=torch.cat(ids), txt_ids=torch.zeros(tokens.shape[1], 3)).sample
        factor = self.pipeline.vae_scale_factor
        found = found[:, : packed[0].shape[1]]
        return self.pipeline._unpack_latents(found, height * factor, width * factor, factor)


def read(folder):
    for path in sorted(folder.glob("*.png")):
        pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).float() / 127.5 - 1
        yield pixels.permute(2, 0, 1)[None], path


check = "--check" in sys.argv
if not check:
    draw_references(HERE / "control")
trainer = KontextTrainer(HERE, tomllib.loads((HERE / "job.toml").read_text()))
shared.record_losses(trainer.train(), HERE / "losses.txt", check)
shared.record_adapter(trainer.adapter(), HERE / "adapter.safetensors", check)
