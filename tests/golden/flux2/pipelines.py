"""Makes the reference pipelines of this folder: a tiny FLUX.2 klein with random weights (`pipeline/`), and what diffusers computes
with it: `base/` with guidance, `distilled/` without and with prompts that are cut, `edit/` with one and two references. The
tokenizer is that of another folder, which `golden.json` names. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1,
transformers 5.23.0, peft 0.21.2, pillow and safetensors, all from PyPI.

    python pipelines.py
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
from generate import randomise
import importlib.util
own = importlib.util.spec_from_file_location("own", HERE / "generate.py")
generate = importlib.util.module_from_spec(own)
own.loader.exec_module(generate)

# A user's turn by the template of Qwen3, whose other cases are not used.
TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
            "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}")
PROMPTS = ["a red fox in the snow, oil painting", "two boats on a calm lake at dusk, 4k; a sign says \"OPEN\""]
OWN = {part: f"flux2/pipeline/{part}" for part in ["transformer", "text_encoder", "vae", "scheduler"]}
PARTS = OWN | {"tokenizer": "qwen_image/pipeline/tokenizer"}
SAMPLERS = {
    # Wider than high.
    "base": dict(steps=5, cfg=4.0, size=[96, 48], length=64, references=[]),
    "distilled": dict(steps=4, cfg=1.0, size=[64, 64], length=40, references=[]),
    # Cropped to 96 x 64, and to 64 x 160.
    "edit": dict(steps=3, cfg=4.0, size=[64, 80], length=64, references=[(100, 75), (70, 165)]),
}
SIZES = [[512, 512], [1024, 1024], [1664, 928]]
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_add_out", "linear_in", "linear_out", "to_qkv_mlp_proj",
           "single_transformer_blocks.0.attn.to_out", "double_stream_modulation_txt.linear"]
HIDDEN, CHANNELS = 16, 4
# Images that are scaled down to the area of a square with this side and cropped, as the pipeline does it with 1024. Sizes for
# which Pillow 13 scales columns first, as those before it always do.
RESOLUTION, SCALED = 96, [(160, 100), (301, 97), (70, 90)]


def text_encoder():
    words = len(Qwen2Tokenizer.from_pretrained(HERE.parent / PARTS["tokenizer"]))
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=words + 5, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=28, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e6)))


def transformer():
    return generate.transformer(layers=2, singles=2, heads=2, axes=[2, 4, 4, 2], channels=4 * CHANNELS, text=3 * HIDDEN)


def make_model(folder, seed):
    shutil.rmtree(folder, ignore_errors=True)
    randomise(transformer(), seed).to(torch.bfloat16).save_pretrained(folder / "transformer")
    randomise(text_encoder(), seed + 1).to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    (folder / "text_encoder/generation_config.json").unlink()
    vae = generate.autoencoder([4, 8, 8, 8], latent=CHANNELS, groups=4, blocks=1)
    generate.randomised(vae, seed + 2).to(torch.bfloat16).save_pretrained(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    model = Flux2Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    gen = torch.Generator().manual_seed(seed + 3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_" in name:
                parameter.copy_((0.3 if ".lora_A." in name else 0.05) * torch.randn(parameter.shape, generator=gen))
    Flux2KleinPipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(model), weight_name="lora.safetensors",
        **_collate_lora_metadata({"transformer": model}))


def load(is_distilled=False):
    part = lambda name: HERE.parent / PARTS[name]
    f32 = dict(torch_dtype=torch.float32)
    words = Qwen2Tokenizer.from_pretrained(part("tokenizer"))
    words.chat_template = TEMPLATE
    pipeline = Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel.from_pretrained(part("transformer"), **f32),
        vae=AutoencoderKLFlux2.from_pretrained(part("vae"), **f32), tokenizer=words,
        text_encoder=Qwen3ForCausalLM.from_pretrained(part("text_encoder"), **f32),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(part("scheduler")), is_distilled=is_distilled)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(path, width, height):
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (7 + 3 * c) + c) * np.cos(y / (11 - 2 * c)) for c in range(3)]
    Image.fromarray((127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8)).save(path, optimize=True)


@torch.no_grad()
def results(pipeline, p, seed, images):
    width, height = p["size"]
    patched = [height // 16, width // 16]
    latents = torch.randn(2, 4 * CHANNELS, *patched, generator=torch.Generator().manual_seed(seed))
    unpatched = pipeline._unpatchify_latents
    embeds, _ = pipeline.encode_prompt(PROMPTS, max_sequence_length=p["length"])
    out = {"in.latents": unpatched(latents)}
    if not images:
        out["out.prompt_embeds"] = embeds

    def sample(cfg, images, keep=None):
        def step(_, index, __, tensors):
            if keep is not None:
                tokens = tensors["latents"]
                keep.append(unpatched(tokens.permute(0, 2, 1).reshape(2, -1, *patched)))
            return tensors
        return pipeline(
            image=images or None, prompt=list(PROMPTS), guidance_scale=cfg, width=width, height=height,
            num_inference_steps=p["steps"], max_sequence_length=p["length"], latents=latents.clone(), output_type="pt",
            callback_on_step_end=step).images

    steps = []
    sample(1.0, images, steps)
    out["out.sigmas"] = pipeline.scheduler.sigmas.clone()
    for index, after in enumerate(steps):
        out[f"out.latents.{index}"] = after
    # With references the first image alone is kept, and with an adapter.
    out["out.image"] = sample(p["cfg"], images)[: 1 if images else 2]
    if images:
        out["out.image_one"] = sample(p["cfg"], images[:1])[:1]
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
    for wide, high in SIZES:
        mu = compute_empirical_mu(wide * high // 256, 28)
        pipeline.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 28, 28), mu=mu)
        out[f"out.sigmas.{wide}x{high}"] = pipeline.scheduler.sigmas.clone()
    pipeline.load_lora_weights(HERE / "pipeline", weight_name="lora.safetensors")
    out["out.image_lora"] = sample(p["cfg"], images)[:1]
    return out


def scaled(folder):
    """As the pipeline prepares a reference, before it is made a tensor."""
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(SCALED):
        draw(folder / f"{number}.png", *size)
        image = Flux2ImageProcessor._resize_if_exceeds_area(Image.open(folder / f"{number}.png"), RESOLUTION**2)
        width, height = (side // 16 * 16 for side in image.size)
        cropped = Flux2ImageProcessor()._resize_and_crop(image, width, height)
        cropped.save(folder / f"{number}-{width}x{height}.png", optimize=True)


def main():
    make_model(HERE / "pipeline", 10800)
    for name, p in SAMPLERS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        is_distilled = name == "distilled"
        pipeline, images = load(is_distilled), []
        for number, size in enumerate(p["references"]):
            draw(folder / f"reference-{number}.png", *size)
            images.append(Image.open(folder / f"reference-{number}.png"))
        golden = results(pipeline, p, 10810, images)
        save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
        settings = {"steps": p["steps"], "guidance": p["cfg"], "true_cfg": 1.0, "length": p["length"], "parts": PARTS,
                    "class": "Flux2KleinPipeline", "is_distilled": is_distilled, "prompts": PROMPTS, "negative": "",
                    "size": p["size"], "sizes": SIZES, "references": len(images)}
        (folder / "golden.json").write_text(json.dumps(settings, indent=1) + "\n")
    scaled(HERE / "scaled")


if __name__ == "__main__":
    main()
