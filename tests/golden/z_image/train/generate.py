"""Trains job.toml and turbo.toml for Z-Image by PyTorch, diffusers and PEFT, and records the results.

    pip install torch diffusers transformers peft safetensors pillow numpy
    python generate.py           # writes losses.txt, adapter.safetensors, training_adapter.safetensors, turbo_losses.txt and
                                 # turbo_adapter.safetensors
    python generate.py --check   # trains again and prints the differences from the recorded files

The training is the plain loop of diffusers' train_dreambooth_lora_z_image.py: ZImageTransformer2DModel on latents, with prompts
as long as they are. In turbo.toml an adapter is fused into the model before, as trainers do with the one that undoes the
distillation of Turbo. Images, random numbers and the loop are those of `../../sd3/train/generate.py`.
"""
import importlib.util
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "sd3/train"))

import generate as shared
import torch
from safetensors.torch import load_file, save_file

spec = importlib.util.spec_from_file_location("pipelines", HERE.parent / "pipelines.py")
sys.path.insert(0, str(HERE.parent.parent / "sd3"))
saved = sys.modules.pop("generate")
pipelines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pipelines)
sys.modules["generate"] = saved

SHIFT = 6.0
# What the training adapter changes.
FUSED = ["layers.0.attention.to_q", "layers.1.attention.to_out.0", "layers.0.feed_forward.w1", "layers.1.feed_forward.w2",
         "layers.1.adaLN_modulation.0", "noise_refiner.0.attention.to_v"]


class ZImageTrainer(shared.Trainer):
    def __init__(self, folder, job):
        self.job = job
        self.pipeline = pipelines.load(SHIFT)
        if "training_adapter" in job["base"]:
            fuse(self.pipeline.transformer, folder / job["base"]["training_adapter"])
        self.samples = [self.encode(*image) for image in shared.read_images(folder / job["data"]["images"])]
        self.parameters = shared.trained_parameters(self.pipeline.transformer, job, self.layers())

    def layers(self):
        parts = [f"attention.{part}" for part in ["to_q", "to_k", "to_v", "to_out.0"]]
        lists = [("noise_refiner", 1), ("context_refiner", 1), ("layers", 2)]
        return [f"{name}.{block}.{part}" for name, n in lists for block in range(n) for part in parts]

    @torch.no_grad()
    def encode(self, pixels, caption):
        tokens, _ = self.pipeline.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)
        found = self.pipeline.vae.encode(pixels).latent_dist
        return SimpleNamespace(mean=found.mean, std=found.std), tokens[0], pixels.shape[-1:-3:-1]

    def condition(self, samples):
        return dict(tokens=[sample[1] for sample in samples])

    def predict(self, latents, timesteps, tokens):
        images = list(latents.unsqueeze(2).unbind(dim=0))
        found = self.pipeline.transformer(images, (1000 - timesteps) / 1000, tokens, return_dict=False)[0]
        return -torch.stack(list(found)).squeeze(2)


def write_training_adapter(path):
    """By the names that such adapters are shared with, without alpha."""
    transformer, gen, tensors = pipelines.load(SHIFT).transformer, torch.Generator().manual_seed(10400), {}
    for layer in FUSED:
        out, width = transformer.get_submodule(layer).weight.shape
        tensors[f"diffusion_model.{layer}.lora_A.weight"] = 0.2 * torch.randn(2, width, generator=gen)
        tensors[f"diffusion_model.{layer}.lora_B.weight"] = 0.2 * torch.randn(out, 2, generator=gen)
    save_file(tensors, path)
    path.chmod(0o644)


@torch.no_grad()
def fuse(transformer, path):
    tensors = load_file(path)
    for layer in FUSED:
        up, down = (tensors[f"diffusion_model.{layer}.lora_{part}.weight"] for part in "BA")
        transformer.get_submodule(layer).weight += up @ down


def train_turbo():
    """The same with an adapter fused into the model."""
    is_check = "--check" in sys.argv
    if not is_check:
        write_training_adapter(HERE / "training_adapter.safetensors")
    trainer = ZImageTrainer(HERE, tomllib.loads((HERE / "turbo.toml").read_text()))
    shared.record_losses(trainer.train(), HERE / "turbo_losses.txt", is_check)
    shared.record_adapter(trainer.adapter(), HERE / "turbo_adapter.safetensors", is_check)


if __name__ == "__main__":
    shared.main(HERE, ZImageTrainer, draws=False)
    train_turbo()
