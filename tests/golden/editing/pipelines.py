"""Makes what diffusers computes with an editing pipeline: FLUX.1 Kontext of the parts of ../flux/dev/pipeline. Made on a CPU
in f32 with torch 2.15, diffusers 0.42.1, transformers 5.23.0, peft 0.21.2, pillow and safetensors, all from PyPI.

    python pipelines.py
"""

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
FLUX = HERE.parent / "flux/dev/pipeline"
# The size of the reference: Kontext's 1328 x 800 at a resolution of 96, so that nothing is scaled.
SEEN, RESOLUTION = (112, 64), 96
# Images that are scaled by Pillow as the pipelines do it, and the sizes they get.
SCALED = [((100, 70), (112, 64)), ((301, 97), (160, 64)), ((40, 50), (96, 96))]


def draw(path, width, height):
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + 3 * c) + c) * np.cos(y / (11 - 2 * c)) for c in range(3)]
    Image.fromarray((127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8)).save(path, optimize=True)


@torch.no_grad()
def kontext():
    folder = HERE / "kontext"
    draw(folder / "reference.png", *SEEN)
    settings = json.loads((FLUX / "golden.json").read_text())
    latents = load_file(FLUX / "golden.safetensors")["in.latents"]
    parts = FluxPipeline.from_pretrained(FLUX, torch_dtype=torch.float32).components
    pipeline = FluxKontextPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS = [SEEN]
    width, height = settings["size"]
    packed = pipeline._pack_latents(latents, 2, 16, height // 8, width // 8)

    def sample(true_cfg):
        return pipeline(
            image=Image.open(folder / "reference.png"), prompt=settings["prompts"],
            negative_prompt=settings["negative"] if true_cfg > 1 else None, true_cfg_scale=true_cfg, width=width,
            height=height, max_area=width * height, num_inference_steps=settings["steps"],
            guidance_scale=settings["guidance"], max_sequence_length=settings["length"], latents=packed.clone(),
            output_type="pt").images

    out = {"in.latents": latents, "out.image": sample(1.0), "out.image_cfg": sample(settings["true_cfg"])}
    pipeline.load_lora_weights(FLUX, weight_name="lora.safetensors")
    out["out.image_lora"] = sample(1.0)
    save_file({key: value.contiguous() for key, value in out.items()}, folder / "pipeline.safetensors")
    settings |= {"reference": "reference.png", "reference_resolution": RESOLUTION}
    (folder / "pipeline.json").write_text(json.dumps(settings, indent=1) + "\n")


def scaled():
    folder = HERE / "scaled"
    folder.mkdir(exist_ok=True)
    for number, (size, to) in enumerate(SCALED):
        draw(folder / f"{number}.png", *size)
        resized = VaeImageProcessor().resize(Image.open(folder / f"{number}.png"), to[1], to[0])
        resized.save(folder / f"{number}-{to[0]}x{to[1]}.png", optimize=True)


kontext()
scaled()
