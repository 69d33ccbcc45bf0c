"""Makes the reference pipelines of this folder: a tiny Kandinsky 5 for images with random weights, and what diffusers computes
with it, by its own templates and sigmas (`diffusers/`) and by those of the authors' program (`original/`); and one for clips
with the transformer of `video/` (`clip/`), by the authors', and with that of `t2v_pipeline/` and an adapter that was trained
(`clip_trained/`). Text encoders, tokenizers and VAEs are those of other folders,
which `golden.json` names. Run `generate.py` and `generate_t2v.py` before. Made on a CPU in f32 with torch 2.15,
diffusers 0.42.1, transformers 5.23.0, peft 0.21.2 and safetensors, all from PyPI.

    python pipelines.py
"""

import copy
import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import (AutoencoderKL, AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler,
                       Kandinsky5T2IPipeline, Kandinsky5T2VPipeline, Kandinsky5Transformer3DModel)
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "sd3"))
from generate import randomise
import importlib.util
own = importlib.util.spec_from_file_location("own", HERE / "generate.py")
generate = importlib.util.module_from_spec(own)
own.loader.exec_module(generate)

PARTS = {
    "text_encoder": "qwen_image/pipeline/text_encoder", "tokenizer": "qwen_image/pipeline/tokenizer",
    "text_encoder_2": "flux/dev/pipeline/text_encoder", "tokenizer_2": "flux/dev/pipeline/tokenizer",
    "vae": "flux/dev/pipeline/vae",
}
# The second has entities and spaces to be cleaned.
PROMPTS = ["a red fox in the snow, oil painting", " two boats &amp;amp; a lake\n at  dusk; a sign says &quot;OPEN&quot;"]
NEGATIVE = ""
# The shift differs from the one that the authors' program has for images, 3.
SHIFT, ORIGINAL_SHIFT, STEPS, CFG, SIZE = 5.0, 3.0, 4, 3.5, (48, 32)
# The tokenizer has few words, with which the template is long.
CLIP = dict(shift=10.0, steps=2, cfg=5.0, size=(32, 32), frames=5, length=1000, seed=9220)
# With the adapter that `generate_t2v.py` trained; the template's tokens are cut.
TRAINED = dict(shift=10.0, steps=3, cfg=3.0, size=(48, 32), frames=9, length=400, seed=9240)
SIZES = [[512, 512], [1024, 1024], [768, 1280]]
TARGETS = ["to_query", "to_key", "to_value", "self_attention.out_layer", "cross_attention.out_layer"]


class Processor:
    """Of a Qwen2VLProcessor, what the pipeline uses; the real one needs an image processor too."""
    def __init__(self, words):
        self.words = words

    def __call__(self, text, images=None, videos=None, **settings):
        return self.words(text, **settings)

    def decode(self, tokens):
        return self.words.decode(tokens)


def part(name):
    return HERE.parent / PARTS[name]


def transformer():
    return Kandinsky5Transformer3DModel(
        in_visual_dim=16, out_visual_dim=16, in_text_dim=32, in_text_dim2=32, time_dim=8, patch_size=(1, 2, 2),
        model_dim=16, ff_dim=20, num_text_blocks=1, num_visual_blocks=2, axes_dims=(2, 4, 2), visual_cond=False)


def load(folder):
    f32 = dict(torch_dtype=torch.float32)
    pipeline = Kandinsky5T2IPipeline(
        transformer=Kandinsky5Transformer3DModel.from_pretrained(folder / "transformer", **f32),
        vae=AutoencoderKL.from_pretrained(part("vae"), **f32),
        text_encoder=Qwen2_5_VLForConditionalGeneration.from_pretrained(part("text_encoder"), **f32), tokenizer=None,
        text_encoder_2=CLIPTextModel.from_pretrained(part("text_encoder_2"), **f32),
        tokenizer_2=CLIPTokenizer.from_pretrained(part("tokenizer_2")),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"))
    pipeline.tokenizer = Processor(Qwen2Tokenizer.from_pretrained(part("tokenizer")))
    pipeline.resolutions = [SIZE]  # it knows its own sizes only
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_clip(parts):
    f32 = dict(torch_dtype=torch.float32)
    pipeline = Kandinsky5T2VPipeline(
        transformer=Kandinsky5Transformer3DModel.from_pretrained(HERE.parent / parts["transformer"], **f32),
        vae=AutoencoderKLHunyuanVideo.from_pretrained(HERE.parent / parts["vae"], **f32),
        text_encoder=Qwen2_5_VLForConditionalGeneration.from_pretrained(part("text_encoder"), **f32), tokenizer=None,
        text_encoder_2=CLIPTextModel.from_pretrained(part("text_encoder_2"), **f32),
        tokenizer_2=CLIPTokenizer.from_pretrained(part("tokenizer_2")), scheduler=FlowMatchEulerDiscreteScheduler())
    pipeline.tokenizer = Processor(Qwen2Tokenizer.from_pretrained(part("tokenizer")))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def as_the_authors_do(pipeline, shift=ORIGINAL_SHIFT):
    pipeline.prompt_template = pipeline.prompt_template.replace("prompt", "promt")
    pipeline.prompt_template_encode_start_idx += 1
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    plain = scheduler.set_timesteps
    scheduler.set_timesteps = lambda n, device=None: plain(sigmas=np.linspace(1, 1 / n, n), device=device)
    pipeline.scheduler = scheduler


def make_model(folder, seed):
    model = randomise(transformer(), seed)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")
    index = {"_class_name": "Kandinsky5T2IPipeline", "_diffusers_version": "0.42.1",
             "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
             "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
             "text_encoder_2": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "Qwen2VLProcessor"],
             "tokenizer_2": ["transformers", "CLIPTokenizer"],
             "transformer": ["diffusers", "Kandinsky5Transformer3DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    model = Kandinsky5Transformer3DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    gen = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_" in name:
                parameter.copy_((0.3 if ".lora_A." in name else 0.1) * torch.randn(parameter.shape, generator=gen))
    Kandinsky5T2IPipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(model), weight_name="lora.safetensors",
        **_collate_lora_metadata({"transformer": model}))


@torch.no_grad()
def results(pipeline, name, folder, seed):
    width, height = SIZE
    latents = torch.randn(2, 16, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))
    encoded = [pipeline.encode_prompt(prompt)[:2] for prompt in PROMPTS]
    out = {"in.latents": latents, "out.prompt_embeds": torch.cat([tokens[0] for tokens, _ in encoded]),
           "out.pooled_prompt_embeds": torch.cat([pooled for _, pooled in encoded])}

    def sample(cfg, output_type, keep=None):
        """Prompt by prompt: of several, diffusers' shorter ones see padding, the authors' do not."""
        images = []
        for at, prompt in enumerate(PROMPTS):
            steps = []
            def step(_, index, __, tensors):
                steps.append(tensors["latents"].clone())
                return tensors
            given = latents[at].permute(1, 2, 0)[None, None].contiguous()  # [1, frames, height, width, channels]
            images.append(pipeline(
                prompt=prompt, negative_prompt=NEGATIVE if cfg > 1 else None, guidance_scale=cfg, width=width, height=height,
                num_inference_steps=STEPS, latents=given, output_type=output_type, callback_on_step_end=step).image)
            if keep is not None:
                keep.append([tokens[:, 0].permute(0, 3, 1, 2) for tokens in steps])
        return torch.cat(images)

    steps = []
    sample(1.0, "pt", steps)
    out["out.sigmas"] = pipeline.scheduler.sigmas.clone()
    for index, both in enumerate(zip(*steps)):
        out[f"out.latents.{index}"] = torch.cat(both)
    out["out.image"] = sample(CFG, "pt")[:1]
    pipeline.scheduler.set_timesteps(28)
    for wide, high in SIZES:
        out[f"out.sigmas.{wide}x{high}"] = pipeline.scheduler.sigmas.clone()
    if name == "original":
        pipeline.load_lora_weights(folder, weight_name="lora.safetensors")
        out["out.image_lora"] = sample(CFG, "pt")
    return out


def save_trained(folder):
    """What `generate_t2v.py` trained, as diffusers saves it."""
    job = tomllib.loads((HERE / "t2v_train/job.toml").read_text())["adapter"]
    model = Kandinsky5Transformer3DModel.from_pretrained(HERE / "t2v_pipeline/transformer", torch_dtype=torch.float32)
    model.add_adapter(LoraConfig(r=job["rank"], lora_alpha=job["alpha"], target_modules=TARGETS))
    trained = {key.removeprefix("transformer."): value
               for key, value in load_file(HERE / "t2v_train/adapter.safetensors").items()}
    assert trained.keys() == get_peft_model_state_dict(model).keys()
    set_peft_model_state_dict(model, trained)
    Kandinsky5T2VPipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(model), weight_name="lora.safetensors",
        **_collate_lora_metadata({"transformer": model}))


@torch.no_grad()
def clip_results(pipeline, settings, adapter=None):
    (width, height), frames = settings["size"], settings["frames"]
    channels = pipeline.vae.config.latent_channels
    gen = torch.Generator().manual_seed(settings["seed"])
    latents = torch.randn(2, channels, (frames - 1) // 4 + 1, height // 8, width // 8, generator=gen)
    out = {"in.latents": latents}

    def sample(cfg, keep=None):
        clips = []
        for at, prompt in enumerate(PROMPTS):
            steps = []
            def step(_, index, __, tensors):
                steps.append(tensors["latents"].clone())
                return tensors
            given = latents[at].permute(1, 2, 3, 0)[None]  # [1, frames, height, width, channels], then those for a given frame
            given = torch.cat([given, torch.zeros(*given.shape[:-1], channels + 1)], dim=-1)
            clips.append(pipeline(
                prompt=prompt, guidance_scale=cfg, width=width, height=height, num_frames=frames, latents=given,
                num_inference_steps=settings["steps"], output_type="pt", callback_on_step_end=step,
                max_sequence_length=settings["length"]).frames)
            if keep is not None:
                keep.append([tokens[..., :channels].permute(0, 4, 1, 2, 3) for tokens in steps])
        return torch.cat(clips)

    def record(name):
        steps = []
        sample(1.0, steps)
        for index, both in enumerate(zip(*steps)):
            out[f"out.{name}.{index}"] = torch.cat(both)

    record("latents")
    out["out.sigmas"] = pipeline.scheduler.sigmas.clone()
    out["out.image"] = sample(settings["cfg"])[:1]  # [clips, frames, 3, height, width]
    if adapter:
        pipeline.load_lora_weights(adapter, weight_name="lora.safetensors")
        record("latents_lora")
        out["out.image_lora"] = sample(settings["cfg"])[:1]
    return out


def make_clip(folder, clip, own, is_trained=False):
    folder.mkdir(exist_ok=True)
    parts = PARTS | own
    pipeline = load_clip(parts)
    negative = "Static, 2D cartoon, cartoon, 2d animation, paintings, images, worst quality, low quality, ugly, deformed, " \
               "walking backwards"
    as_the_authors_do(pipeline, clip["shift"])
    if is_trained:
        save_trained(folder)
    golden = clip_results(pipeline, clip, folder if is_trained else None)
    save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
    settings = {"steps": clip["steps"], "guidance": clip["cfg"], "true_cfg": 1.0, "length": clip["length"], "frames": clip["frames"],
                "class": "Kandinsky5T2VPipeline", "parts": parts, "prompts": PROMPTS, "negative": negative,
                "size": clip["size"], "sizes": []}
    (folder / "golden.json").write_text(json.dumps(settings, indent=1) + "\n")


def main():
    generate.without_rounding()
    model = HERE / "pipeline"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    make_model(model, 9200)
    for name in ["original", "diffusers"]:
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        pipeline = load(model)
        if name == "original":
            as_the_authors_do(pipeline)
        golden = results(pipeline, name, model, 9210)
        save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
        parts = PARTS | {key: f"kandinsky5/pipeline/{key}" for key in ["transformer", "scheduler"]}
        settings = {"steps": STEPS, "guidance": CFG, "true_cfg": 1.0, "length": 512, "implementation": name, "parts": parts,
                    "class": "Kandinsky5T2IPipeline", "prompts": PROMPTS, "negative": NEGATIVE, "size": SIZE, "sizes": SIZES}
        (folder / "golden.json").write_text(json.dumps(settings, indent=1) + "\n")
    make_clip(HERE / "clip", CLIP, {"vae": "vae_hunyuan_video/clip", "transformer": "kandinsky5/video",
                                    "scheduler": "kandinsky5/pipeline/scheduler"})
    make_clip(HERE / "clip_trained", TRAINED,
              {key: f"kandinsky5/t2v_pipeline/{key}" for key in ["vae", "transformer", "scheduler"]}, is_trained=True)


if __name__ == "__main__":
    main()
