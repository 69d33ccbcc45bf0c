"""Trains job.toml and own.toml for Qwen-Image by PyTorch, diffusers and PEFT, and records the results.

    pip install torch diffusers transformers peft safetensors pillow numpy
    python generate.py           # writes losses.txt, adapter.safetensors and own_losses.txt
    python generate.py --check   # trains again and prints the differences from the recorded files

The training is the plain loop of diffusers' train_dreambooth_lora_qwen_image.py: QwenImageTransformer2DModel on packed
latents, with prompts as long as they are and a mask where those of a batch differ. Images, random numbers and the loop are
those of `../../sd3/train/generate.py`.
"""
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "sd3/train"))

import generate as shared
import torch
from diffusers import QwenImagePipeline


class QwenImageTrainer(shared.Trainer):
    pipeline_class = QwenImagePipeline

    @torch.no_grad()
    def encode(self, pixels, caption):
        # No caption is a space.
        tokens, mask = self.pipeline.encode_prompt(caption or " ", max_sequence_length=512)
        assert mask is None or mask.all()
        found = self.pipeline.vae.encode(pixels[:, :, None]).latent_dist
        return SimpleNamespace(mean=found.mean[:, :, 0], std=found.std[:, :, 0]), tokens, pixels.shape[-1:-3:-1]

    def scaled(self, latent):
        mean, std = (torch.tensor(numbers).reshape(1, -1, 1, 1)
                     for numbers in [self.pipeline.vae.config.latents_mean, self.pipeline.vae.config.latents_std])
        return (latent - mean) / std

    def condition(self, samples):
        tokens = [sample[1][0] for sample in samples]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        lengths = torch.tensor([len(each) for each in tokens])
        mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
        return dict(tokens=padded, mask=None if mask.all() else mask)

    def predict(self, latents, timesteps, tokens, mask):
        count, channels, height, width = latents.shape
        found = self.pipeline.transformer(
            hidden_states=self.pipeline._pack_latents(latents[:, None], count, channels, height, width),
            timestep=timesteps / 1000, encoder_hidden_states=tokens, encoder_hidden_states_mask=mask,
            img_shapes=[[(1, height // 2, width // 2)]] * count).sample
        factor = self.pipeline.vae_scale_factor
        return self.pipeline._unpack_latents(found, height * factor, width * factor, factor)[:, :, 0]


shared.main(HERE, QwenImageTrainer, draws=False)
