"""Trains job.toml, own.toml and edit.toml for FLUX.2 klein by PyTorch, diffusers and PEFT, and records the results.

    pip install torch diffusers transformers peft safetensors pillow numpy
    python generate.py           # writes losses.txt, adapter.safetensors, own_losses.txt, edit_losses.txt, edit_adapter.safetensors
    python generate.py --check   # trains again and prints the differences from the recorded files

The training is the plain loop of diffusers' train_dreambooth_lora_flux2_klein.py: Flux2Transformer2DModel on patches of latents,
normed by the running statistics of the VAE. In edit.toml it is that of train_dreambooth_lora_flux2_klein_img2img.py: the mode of the
reference's latent is appended as tokens whose first id is 10, and the loss is over the image's tokens. Images, random numbers and
the loop are those of `../../sd3/train/generate.py`, references those of `../../editing/train`, which have sizes in which nothing
is cropped.
"""
import importlib.util
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "sd3/train"))

import generate as shared
import numpy as np
import torch
from PIL import Image

spec = importlib.util.spec_from_file_location("pipelines", HERE.parent / "pipelines.py")
sys.path.insert(0, str(HERE.parent.parent / "sd3"))
saved = sys.modules.pop("generate")
pipelines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pipelines)
sys.modules["generate"] = saved

# Tokens of a prompt, as model_index.json of the job's base states them.
LENGTH = 64


class Flux2Trainer(shared.Trainer):
    def __init__(self, folder, job):
        self.job = job
        self.pipeline = pipelines.load()
        references = job["data"].get("references")
        self.references = read(folder / references) if references else []
        images = list(shared.read_images(folder / job["data"]["images"]))
        self.samples = [self.encode(number, *image) for number, image in enumerate(images)]
        self.parameters = shared.trained_parameters(self.pipeline.transformer, job, self.layers())

    def layers(self):
        """In the order in which the model is built."""
        attention = [f"attn.{part}" for part in ["to_q", "to_k", "to_v", "to_out.0"]]
        double = [f"transformer_blocks.{block}.{part}" for block in range(2) for part in attention]
        parts = ["attn.to_qkv_mlp_proj", "attn.to_out"]
        return double + [f"single_transformer_blocks.{block}.{part}" for block in range(2) for part in parts]

    @torch.no_grad()
    def encode(self, number, pixels, caption):
        tokens, _ = self.pipeline.encode_prompt(caption, max_sequence_length=LENGTH)
        found = self.pipeline.vae.encode(pixels).latent_dist
        size = pixels.shape[-1:-3:-1]
        if not self.references:
            return SimpleNamespace(mean=found.mean, std=found.std), tokens, None, size
        mode = self.pipeline.vae.encode(self.references[number]).latent_dist.mode()
        # Samples of one size of image and of reference are trained together.
        size = (*size, *self.references[number].shape[-1:-3:-1])
        return SimpleNamespace(mean=found.mean, std=found.std), tokens, self.scaled(mode), size

    def scaled(self, latent):
        vae, pipeline = self.pipeline.vae, self.pipeline
        mean, var = (it.view(1, -1, 1, 1) for it in (vae.bn.running_mean, vae.bn.running_var))
        patches = pipeline._patchify_latents(latent)
        return pipeline._unpatchify_latents((patches - mean) / torch.sqrt(var + vae.config.batch_norm_eps))

    def condition(self, samples):
        references = [sample[2] for sample in samples if sample[2] is not None]
        return dict(tokens=torch.cat([sample[1] for sample in samples]), references=torch.cat(references) if references else None)

    def predict(self, latents, timesteps, tokens, references):
        pipeline = self.pipeline
        patches = pipeline._patchify_latents(latents)
        packed, ids = pipeline._pack_latents(patches), pipeline._prepare_latent_ids(patches)[0]
        n = packed.shape[1]
        if references is not None:
            other = pipeline._patchify_latents(references)
            packed = torch.cat([packed, pipeline._pack_latents(other)], dim=1)
            ids = torch.cat([ids, pipeline._prepare_image_ids([other[:1]])[0]])
        found = pipeline.transformer(
            hidden_states=packed, timestep=timesteps / 1000, encoder_hidden_states=tokens, img_ids=ids,
            txt_ids=pipeline._prepare_text_ids(tokens)[0], return_dict=False)[0][:, :n]
        return pipeline._unpatchify_latents(found.permute(0, 2, 1).reshape(patches.shape))


def read(folder):
    images = [np.array(Image.open(path).convert("RGB")) for path in sorted(folder.glob("*.png"))]
    return [(torch.from_numpy(pixels).float() / 127.5 - 1).permute(2, 0, 1)[None] for pixels in images]


def train_edit():
    is_check = "--check" in sys.argv
    trainer = Flux2Trainer(HERE, tomllib.loads((HERE / "edit.toml").read_text()))
    shared.record_losses(trainer.train(), HERE / "edit_losses.txt", is_check)
    shared.record_adapter(trainer.adapter(), HERE / "edit_adapter.safetensors", is_check)


if __name__ == "__main__":
    shared.main(HERE, Flux2Trainer, draws=False)
    train_edit()
