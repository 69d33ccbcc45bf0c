"""Makes the reference pipelines of this folder: a tiny Z-Image with random weights (`pipeline/`), and what diffusers computes
with it (`base/`, and `turbo/` with the sampler and the guidance of Z-Image Turbo and prompts that are cut). Tokenizer and VAE
are those of other folders, which `golden.json` names. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1,
transformers 5.23.0, peft 0.21.2 and safetensors, all from PyPI.

    python pipelines.py
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

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
NEGATIVE = "blurry"
OWN = {part: f"z_image/pipeline/{part}" for part in ["transformer", "text_encoder"]}
PARTS = OWN | {"tokenizer": "qwen_image/pipeline/tokenizer", "vae": "flux/dev/pipeline/vae"}
SAMPLERS = {
    # Wider than high; 18 tokens of an image, padded to 32.
    "base": dict(shift=6.0, steps=5, cfg=4.0, size=[96, 48], length=512),
    # As many tokens as need no padding.
    "turbo": dict(shift=3.0, steps=8, cfg=0.0, size=[128, 64], length=24),
}
SIZES = [[512, 512], [1024, 1024], [1664, 928]]
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3", "layers.0.adaLN_modulation.0", "layers.1.adaLN_modulation.0"]
HIDDEN = 24


def text_encoder():
    words = len(Qwen2Tokenizer.from_pretrained(HERE.parent / PARTS["tokenizer"]))
    return Qwen3Model(Qwen3Config(
        vocab_size=words + 5, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e6)))


def transformer():
    return generate.transformer(layers=2, refiners=1, heads=2, axes=[4, 6, 6], text=HIDDEN, eps=1e-5)


def make_model(folder, seed):
    shutil.rmtree(folder, ignore_errors=True)
    generate.randomised(transformer(), seed).to(torch.bfloat16).save_pretrained(folder / "transformer")
    randomise(text_encoder(), seed + 1).to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    model = ZImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    gen = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_" in name:
                parameter.copy_((0.3 if ".lora_A." in name else 0.1) * torch.randn(parameter.shape, generator=gen))
    ZImagePipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(model), weight_name="lora.safetensors",
        **_collate_lora_metadata({"transformer": model}))


def load(shift):
    part = lambda name: HERE.parent / PARTS[name]
    f32 = dict(torch_dtype=torch.float32)
    words = Qwen2Tokenizer.from_pretrained(part("tokenizer"))
    words.chat_template = TEMPLATE
    pipeline = ZImagePipeline(
        transformer=ZImageTransformer2DModel.from_pretrained(part("transformer"), **f32),
        vae=AutoencoderKL.from_pretrained(part("vae"), **f32), tokenizer=words,
        text_encoder=Qwen3Model.from_pretrained(part("text_encoder"), **f32),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def results(pipeline, p, seed):
    width, height = p["size"]
    latents = torch.randn(2, 16, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))
    embeds, _ = pipeline.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False, max_sequence_length=p["length"])
    out = {"in.latents": latents, "out.prompt_embeds": torch.cat(embeds)}

    def sample(cfg, keep=None):
        def step(_, index, __, tensors):
            if keep is not None:
                keep.append(tensors["latents"].clone())
            return tensors
        return pipeline(
            prompt=list(PROMPTS), negative_prompt=[NEGATIVE] * 2, guidance_scale=cfg, width=width, height=height,
            num_inference_steps=p["steps"], max_sequence_length=p["length"], latents=latents.clone(), output_type="pt",
            callback_on_step_end=step).images

    steps = []
    sample(0.0, steps)
    out["out.sigmas"] = pipeline.scheduler.sigmas.clone()
    for index, after in enumerate(steps):
        out[f"out.latents.{index}"] = after
    out["out.image"] = sample(p["cfg"])
    pipeline.scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / 28, 28).tolist())
    for wide, high in SIZES:
        out[f"out.sigmas.{wide}x{high}"] = pipeline.scheduler.sigmas.clone()
    pipeline.load_lora_weights(HERE / "pipeline", weight_name="lora.safetensors")
    out["out.image_lora"] = sample(p["cfg"])
    return out


def main():
    make_model(HERE / "pipeline", 10300)
    for name, p in SAMPLERS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        pipeline = load(p["shift"])
        pipeline.scheduler.save_pretrained(folder / "scheduler")
        golden = results(pipeline, p, 10310)
        save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
        shutil.copy(HERE / "pipeline/lora.safetensors", folder)
        parts = PARTS | {"scheduler": f"z_image/{name}/scheduler"}
        settings = {"steps": p["steps"], "guidance": p["cfg"], "true_cfg": 1.0, "length": p["length"], "parts": parts,
                    "class": "ZImagePipeline", "prompts": PROMPTS, "negative": NEGATIVE, "size": p["size"], "sizes": SIZES}
        (folder / "golden.json").write_text(json.dumps(settings, indent=1) + "\n")
    (HERE / "pipeline/lora.safetensors").unlink()


if __name__ == "__main__":
    main()
