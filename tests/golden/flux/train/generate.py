"""Trains job.toml, own.toml and encoders.toml for FLUX.1 by PyTorch, diffusers and PEFT, and records the results.

    pip install torch diffusers transformers peft safetensors pillow numpy
    python generate.py           # writes losses.txt, adapter.safetensors, own_losses.txt and encoders_*
    python generate.py --check   # trains again and prints the differences from the recorded files

The training is the plain loop of diffusers' train_dreambooth_lora_flux.py: FluxTransformer2DModel on packed latents, with
the guidance scale as an input. Prompts are shorter, for speed: `max_sequence_length` in `model_index.json` says so to hearth.
Images, random numbers and the loop are those of `../../sd3/train/generate.py`.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "sd3/train"))

import generate as shared
import torch
from diffusers import FluxPipeline

# In the order in which the model is built.
DOUBLE = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2", "attn.add_q_proj",
          "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2"]
SINGLE = ["attn.to_q", "attn.to_k", "attn.to_v"]


SHORT_PROMPT = 24


class FluxTrainer(shared.Trainer):
    pipeline_class = FluxPipeline
    clips = {"clip-l": "text_encoder"}

    def layers(self):
        model = self.pipeline.transformer
        double = [f"transformer_blocks.{index}.{layer}" for index in range(len(model.transformer_blocks))
                  for layer in DOUBLE]
        return double + [f"single_transformer_blocks.{index}.{layer}"
                         for index in range(len(model.single_transformer_blocks)) for layer in SINGLE]

    def encode_caption(self, caption):
        tokens, pooled, _ = self.pipeline.encode_prompt(caption, None, max_sequence_length=SHORT_PROMPT)
        return tokens, pooled

    def predict(self, latents, timesteps, tokens, pooled):
        count, channels, height, width = latents.shape
        ids = self.pipeline._prepare_latent_image_ids(count, height // 2, width // 2, latents.device, latents.dtype)
        found = self.pipeline.transformer(
            hidden_states=self.pipeline._pack_latents(latents, count, channels, height, width),
            timestep=timesteps / 1000, guidance=torch.full([count], self.job["train"]["guidance_scale"]),
            encoder_hidden_states=tokens, pooled_projections=pooled, img_ids=ids,
            txt_ids=torch.zeros(tokens.shape[1], 3)).sample
        factor = self.pipeline.vae_scale_factor
        return self.pipeline._unpack_latents(found, height * factor, width * factor, factor)


shared.main(HERE, FluxTrainer, draws=False)
