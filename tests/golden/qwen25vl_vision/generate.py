"""Makes the reference data of this folder and checks it: Qwen2.5-VL with its vision tower, as the text encoder of
Qwen-Image-Edit. Every model here is tiny and has random weights. Made on a CPU in f32 with Python 3.11, torch 2.15,
diffusers 0.42.1, transformers 5.23.0, Pillow 13 and safetensors, all from PyPI.

    python generate.py            remake everything
    python generate.py --check    recompute everything from the stored files

SOURCE.md describes the layout of the files.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "qwen25vl"))
from generate import differences, make_tokenizer, randomise

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

MODELS = {
    # Windows of 2 x 2 merged patches, one block with full attention among others; names and settings as before 4.52.
    "flat": dict(
        text=dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                  max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=False,
                  rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[2, 1, 3])),
        vision=dict(depth=4, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=4, spatial_merge_size=2,
                    temporal_patch_size=2, window_size=16, fullatt_block_indexes=[1, 3]),
        pixels=[256, 1600], seed=11,
    ),
    # Nothing is two: squares of 3 x 3 patches, one frame, windows of 3 x 3 squares; newer names and settings.
    "nested": dict(
        text=dict(hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
                  max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=True,
                  rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 2, 1])),
        vision=dict(depth=3, hidden_size=12, intermediate_size=10, num_heads=3, patch_size=3, spatial_merge_size=3,
                    temporal_patch_size=1, window_size=27, fullatt_block_indexes=[0]),
        pixels=[162, 4000], seed=12,
    ),
}
# Width and height. Those that the processor scales are seen alone; others have sides that are multiples of its unit.
IMAGES = {
    "flat": dict(wide=[40, 24], square=[24, 24], tall=[8, 56], even=[32, 32],
                 scaled_up=[9, 13], scaled=[37, 22], scaled_down=[64, 39]),
    "nested": dict(wide=[45, 27], square=[27, 27], tall=[18, 45], scaled_up=[38, 7]),
}
# Each prompt, its pipeline, its images.
CASES = {
    "flat": [
        ("edit", "a red fox in the snow", ["wide"]),
        ("edit", "", ["even"]),
        ("plus", "the fox begins here: \u00e9t\u00e9", ["square"]),
        ("plus", "the harbour in the evening", ["wide", "tall"]),
        ("plus", "a watercolour of three pears", ["tall", "square", "wide"]),
        ("plus", "\nno image", []),
    ],
    "nested": [("edit", "don't you see it?", ["tall"]), ("plus", "the light is soft", ["wide", "square", "tall"])],
}
PIPELINES = dict(edit=QwenImageEditPipeline, plus=QwenImageEditPlusPipeline)


def image(name, size):
    """Smooth in parts, noisy in others, all colours."""
    width, height = size
    gen = np.random.default_rng(sum(map(ord, name)) + width)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = [128 + 127 * np.sin(x / a + y / b) for a, b in [(3.1, 7.3), (9.7, 2.9), (5.3, 4.1)]]
    noise = gen.integers(-40, 40, (height, width, 3)) * (x > width / 2)[..., None]
    return np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)


def processor(tokenizer, m):
    """Without the part for videos, which needs torchvision."""
    vision = m["vision"]
    made = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    made.image_processor = Qwen2VLImageProcessorPil(
        min_pixels=m["pixels"][0], max_pixels=m["pixels"][1], patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"], temporal_patch_size=vision["temporal_patch_size"])
    made.tokenizer, made.video_processor, made.chat_template = tokenizer, None, None
    made.image_token, made.video_token = "<|image_pad|>", "<|video_pad|>"
    made.image_token_id = tokenizer.convert_tokens_to_ids(made.image_token)
    made.video_token_id = tokenizer.convert_tokens_to_ids(made.video_token)
    return made


def build(m, tokenizer):
    text = m["text"] | dict(vocab_size=len(tokenizer))
    vision = m["vision"] | dict(out_hidden_size=text["hidden_size"])
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in [
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end")]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids,
                              tie_word_embeddings=text["tie_word_embeddings"])
    return randomise(Qwen2_5_VLForConditionalGeneration(config), m["seed"])


def save_model(model, m, folder, is_nested):
    folder.mkdir(parents=True)
    text = m["text"] | dict(vocab_size=model.config.text_config.vocab_size)
    rope = text.pop("rope_parameters")
    if is_nested:
        settings = dict(text_config=text | dict(model_type="qwen2_5_vl_text", rope_parameters=rope))
    else:
        section = dict(type="mrope", mrope_section=rope["mrope_section"])
        settings = text | dict(rope_theta=rope["rope_theta"], rope_scaling=section)
    vision = m["vision"] | dict(out_hidden_size=text["hidden_size"])
    settings |= dict(architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", vision_config=vision)
    settings |= {name: getattr(model.config, name) for name in (
        "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    names = lambda name: name if is_nested else (
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."))
    tensors = {names(name): tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))


def save_processor(m, folder, is_nested):
    folder.mkdir(parents=True)
    vision, (least, most) = m["vision"], m["pixels"]
    settings = dict(image_mean=MEAN, image_std=STD, patch_size=vision["patch_size"],
                    merge_size=vision["spatial_merge_size"], temporal_patch_size=vision["temporal_patch_size"])
    if is_nested:
        settings |= dict(size=dict(shortest_edge=least, longest_edge=most), resample=3, rescale_factor=1 / 255)
        name, settings = "processor_config.json", dict(image_processor=settings, processor_class="Qwen2_5_VLProcessor")
    else:
        settings |= dict(min_pixels=least, max_pixels=most, image_processor_type="Qwen2VLImageProcessor")
        name = "preprocessor_config.json"
    (folder / name).write_text(json.dumps(settings, indent=2) + "\n")


class WithPositions:
    """Passes on which tokens are images. diffusers 0.42.1 leaves that out, and the model then counts positions on one
    axis."""

    def __init__(self, model, image_token_id):
        self.model, self.image_token_id, self.dtype = model, image_token_id, model.dtype

    def __call__(self, input_ids, **inputs):
        types = (input_ids == self.image_token_id).int()
        self.seen = input_ids
        return self.model(input_ids=input_ids, mm_token_type_ids=types, **inputs)


@torch.no_grad()
def outputs(name, m):
    folder = HERE / name
    tokenizer = Qwen2Tokenizer.from_pretrained(HERE / "flat/tokenizer")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()
    made = processor(tokenizer, m)
    pixels = {key: image(key, size) for key, size in IMAGES[name].items()}
    found = {}
    for key, array in pixels.items():
        seen = made.image_processor([Image.fromarray(array)], return_tensors="pt")
        features = model.model.visual(seen["pixel_values"], seen["image_grid_thw"]).pooler_output
        found |= {f"image.{key}": torch.from_numpy(array), f"grid.{key}": seen["image_grid_thw"][0]}
        found |= {f"features.{key}": features}
        if key in ["wide", "scaled_up", "scaled_down"]:
            found |= {f"pixels.{key}": seen["pixel_values"]}
    largest = 0
    for at, (kind, prompt, images) in enumerate(CASES[name]):
        encoder = WithPositions(model, made.image_token_id)
        parts = dict(scheduler=None, vae=None, tokenizer=tokenizer, processor=made, transformer=None)
        pipeline = PIPELINES[kind](text_encoder=None, **parts)
        given = [Image.fromarray(pixels[key]) for key in images]
        given = None if not given else given[0] if kind == "edit" else given
        pipeline.text_encoder = encoder
        found[f"out.{at}"] = pipeline.encode_prompt(prompt, given, device="cpu")[0][0]
        found[f"ids.{at}"] = encoder.seen[0]
        pipeline.text_encoder = model
        stock = pipeline.encode_prompt(prompt, given, device="cpu")[0][0]
        largest = max(largest, (stock - found[f"out.{at}"]).abs().max().item())
    print(name, "largest difference of stock positions", largest)
    return {key: value.contiguous() for key, value in found.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    for name, m in MODELS.items():
        folder, is_nested = HERE / name, name == "nested"
        if not is_check:
            shutil.rmtree(folder, ignore_errors=True)
            if not is_nested:
                template = QwenImageEditPipeline(None, None, None, None, None, None).prompt_template_encode
                make_tokenizer(folder / "tokenizer", template, SPECIAL)
            tokenizer = Qwen2Tokenizer.from_pretrained(HERE / "flat/tokenizer")
            save_model(build(m, tokenizer), m, folder / "text_encoder", is_nested)
            save_processor(m, folder / "processor", is_nested)
            save_file(outputs(name, m), folder / "golden.safetensors")
            cases = [dict(pipeline=kind, prompt=prompt, images=images) for kind, prompt, images in CASES[name]]
            (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
        print(name, differences(outputs(name, m), load_file(folder / "golden.safetensors")))


if __name__ == "__main__":
    main()
