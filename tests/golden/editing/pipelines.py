"""Makes what diffusers computes with editing pipelines: FLUX.1 Kontext of the parts of ../flux/dev/pipeline, and
Qwen-Image-Edit, the first and 2511, of those of ../qwen_image/pipeline. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1, transformers 5.23.0, peft 0.21.2, pillow and safetensors, all from PyPI.

    python pipelines.py
"""

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import (FluxKontextPipeline, FluxPipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline,
                       QwenImagePipeline, QwenImageTransformer2DModel)
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).resolve().parent
FLUX, QWEN = HERE.parent / "flux/dev/pipeline", HERE.parent / "qwen_image/pipeline"
# The size of the reference: Kontext's 1328 x 800 at a resolution of 96, so that nothing is scaled.
SEEN, RESOLUTION = (112, 64), 96
# Images that are scaled by Pillow as the pipelines do it, and the sizes they get.
# Sizes for which Pillow 13 scales columns first, as those before it always do.
SCALED = [((100, 70), (112, 96)), ((301, 97), (160, 64)), ((40, 50), (96, 96))]


class WithPositions(torch.nn.Module):
    """Passes on which tokens are images."""

    def __init__(self, model, image_token_id):
        super().__init__()
        self.model, self.image_token_id = model, image_token_id

    @property
    def dtype(self):
        return self.model.dtype

    @property
    def device(self):
        return self.model.device

    def forward(self, input_ids, **inputs):
        return self.model(input_ids=input_ids, mm_token_type_ids=(input_ids == self.image_token_id).int(), **inputs)


def draw(path, width, height):
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + 3 * c) + c) * np.cos(y / (11 - 2 * c)) for c in range(3)]
    Image.fromarray((127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8)).save(path, optimize=True)


@torch.no_grad()
def kontext():
    folder = HERE / "kontext"
    draw(folder / "reference-0.png", *SEEN)
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
            image=Image.open(folder / "reference-0.png"), prompt=settings["prompts"],
            negative_prompt=settings["negative"] if true_cfg > 1 else None, true_cfg_scale=true_cfg, width=width,
            height=height, max_area=width * height, num_inference_steps=settings["steps"],
            guidance_scale=settings["guidance"], max_sequence_length=settings["length"], latents=packed.clone(),
            output_type="pt").images

    out = {"in.latents": latents, "out.image": sample(1.0), "out.image_cfg": sample(settings["true_cfg"])}
    pipeline.load_lora_weights(FLUX, weight_name="lora.safetensors")
    out["out.image_lora"] = sample(1.0)
    save_file({key: value.contiguous() for key, value in out.items()}, folder / "pipeline.safetensors")
    settings |= {"references": 1, "reference_resolution": RESOLUTION, "class": "FluxKontextPipeline", "images": 2}
    (folder / "pipeline.json").write_text(json.dumps(settings, indent=1) + "\n")


def processor(tokenizer):
    """Without the part for videos, which needs torchvision."""
    made = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    made.image_processor = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056)
    made.tokenizer, made.video_processor, made.chat_template = tokenizer, None, None
    made.image_token, made.video_token = "<|image_pad|>", "<|video_pad|>"
    made.image_token_id = tokenizer.convert_tokens_to_ids(made.image_token)
    made.video_token_id = tokenizer.convert_tokens_to_ids(made.video_token)
    return made


@torch.no_grad()
def qwen(name, pipeline_class, references, zero_cond_t):
    """With positions on three axes, which this pair of libraries leaves out: ../qwen25vl_vision/SOURCE.md."""
    folder = HERE / name
    settings = json.loads((QWEN / "golden.json").read_text())
    latents = load_file(QWEN / "golden.safetensors")["in.latents"][:1]
    parts = QwenImagePipeline.from_pretrained(QWEN, torch_dtype=torch.float32).components
    if zero_cond_t:
        parts["transformer"] = QwenImageTransformer2DModel.from_pretrained(
            QWEN / "transformer", torch_dtype=torch.float32, zero_cond_t=True)
    words = processor(parts["tokenizer"])
    config = parts["text_encoder"].config
    config.image_token_id, config.vision_start_token_id = words.image_token_id, parts["tokenizer"].convert_tokens_to_ids("<|vision_start|>")
    pipeline = pipeline_class(**parts, processor=words)
    pipeline.text_encoder = WithPositions(parts["text_encoder"], words.image_token_id)
    pipeline.set_progress_bar_config(disable=True)
    images = []
    for number, size in enumerate(references):
        draw(folder / f"reference-{number}.png", *size)
        images.append(Image.open(folder / f"reference-{number}.png"))
    width, height = settings["size"]
    packed = pipeline._pack_latents(latents.unsqueeze(2), 1, 16, height // 8, width // 8)

    def sample(keep=None):
        def step(_, index, __, tensors):
            if keep is not None:
                keep.append(tensors["prompt_embeds"].clone())
            return tensors
        return pipeline(
            image=images if len(images) > 1 else images[0], prompt=settings["prompts"][0], negative_prompt=settings["negative"],
            true_cfg_scale=settings["guidance"], width=width, height=height, num_inference_steps=settings["steps"],
            latents=packed.clone(), output_type="pt", callback_on_step_end=step,
            callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"]).images

    seen = []
    out = {"in.latents": latents, "out.image": sample(seen), "out.prompt_embeds": seen[0]}
    pipeline.load_lora_weights(QWEN, weight_name="lora.safetensors")
    out["out.image_lora"] = sample()
    save_file({key: value.contiguous() for key, value in out.items()}, folder / "pipeline.safetensors")
    settings |= {"references": len(references), "reference_resolution": RESOLUTION, "class": pipeline_class.__name__, "images": 1}
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
# The resolution is a constant there.
pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = RESOLUTION * RESOLUTION
dimensions = pipeline_qwenimage_edit.calculate_dimensions
pipeline_qwenimage_edit.calculate_dimensions = lambda area, ratio: dimensions(RESOLUTION * RESOLUTION, ratio)
qwen("edit", QwenImageEditPipeline, [(60, 160)], zero_cond_t=False)
qwen("edit_2511", QwenImageEditPlusPipeline, [(100, 75), (60, 160)], zero_cond_t=True)
