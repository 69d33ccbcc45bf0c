"""Makes the reference pipelines of this folder: tiny Qwen-Image pipelines with random weights, as diffusers saves them, and
what diffusers computes with them. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1, transformers 5.22.2,
peft 0.21.2 and safetensors, all from PyPI. The tokenizer is made here: bytes, and merges of the prompts' words.

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
from diffusers import (AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline,
                       QwenImageTransformer2DModel)
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
from generate import randomise

PROMPTS = ["a red fox in the snow, oil painting", "two boats on a calm lake at dusk, 4k; a sign says \"OPEN\""]
NEGATIVE = " "
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SCHEDULE = dict(shift=1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, base_image_seq_len=256,
                max_image_seq_len=8192, shift_terminal=0.02, time_shift_type="exponential")

PIPELINES = {
    # Wider than high; an odd number of rows.
    "pipeline": dict(layers=2, heads=2, axes=[4, 6, 6], hidden=32, kv=1, depth=2, steps=6, cfg=4.0, size=[96, 48],
                     mult=[1, 2, 2, 2], res=1),
    # Prompts that are cut; other widths of everything.
    "short": dict(layers=1, heads=3, axes=[2, 4, 4], hidden=48, kv=2, depth=1, steps=4, cfg=2.5, size=[64, 80],
                  mult=[1, 1, 2, 3], res=2, length=90),
}
SIZES = [[512, 512], [1024, 1024], [1664, 928], [1328, 1328]]
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_add_out", "img_mlp.net.0.proj", "txt_mlp.net.2"]


def tokenizer(folder):
    """Bytes and merges, as Qwen's files are: vocab.json, merges.txt and a config."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(3 * PROMPTS + ["describe the image: color, shape, size", "user\n\nassistant\n"], trainer)
    state = json.loads(inner.to_str())["model"]
    made = Qwen2Tokenizer(vocab=state["vocab"], merges=[tuple(pair) for pair in state["merges"]],
                          additional_special_tokens=SPECIAL[1:])
    folder.mkdir(parents=True)
    made.save_pretrained(folder)
    for extra in folder.iterdir():
        if extra.name not in ["tokenizer.json", "tokenizer_config.json"]:
            extra.unlink()
    # The published folder has the older files.
    vocab = {name: at for name, at in made.get_vocab().items() if name not in SPECIAL}
    added = {name: made.convert_tokens_to_ids(name) for name in SPECIAL}
    merges = ["#version: 0.2"] + [" ".join(pair) for pair in state["merges"]]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(merges) + "\n")
    (folder / "added_tokens.json").write_text(json.dumps(added, indent=2))
    decoder = {str(at): dict(content=name, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
               for name, at in added.items()}
    settings = dict(add_prefix_space=False, added_tokens_decoder=decoder, additional_special_tokens=SPECIAL[1:],
                    bos_token=None, clean_up_tokenization_spaces=False, eos_token="<|im_end|>", errors="replace",
                    model_max_length=131072, pad_token="<|endoftext|>", split_special_tokens=False,
                    tokenizer_class="Qwen2Tokenizer", unk_token=None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return Qwen2Tokenizer.from_pretrained(folder), {path: path.read_bytes() for path in folder.iterdir()}


def encoder(p, tokens):
    text = dict(vocab_size=tokens, hidden_size=p["hidden"], intermediate_size=3 * p["hidden"], num_hidden_layers=p["depth"],
                num_attention_heads=4, num_key_value_heads=p["kv"], max_position_embeddings=2048, rms_norm_eps=1e-6,
                rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[1, 1, 2] if p["hidden"] == 32 else [2, 2, 2]))
    vision = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=p["hidden"], patch_size=14,
                  fullatt_block_indexes=[0])
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def vae(p):
    return AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=p["mult"], num_res_blocks=p["res"])


def transformer(p):
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=64, out_channels=16, num_layers=p["layers"], attention_head_dim=sum(p["axes"]),
        num_attention_heads=p["heads"], joint_attention_dim=p["hidden"], axes_dims_rope=tuple(p["axes"]))


def make(name, p, seed):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    words, kept = tokenizer(folder / "tokenizer")
    autoencoder = randomise(vae(p), seed + 1)
    with torch.no_grad():
        autoencoder.decoder.conv_out.weight.mul_(0.5)  # keeps most of the image inside [0, 1]
    pipeline = QwenImagePipeline(
        transformer=randomise(transformer(p), seed), vae=autoencoder, scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULE),
        text_encoder=randomise(encoder(p, len(words) + 5), seed + 2), tokenizer=words)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    for path in (folder / "tokenizer").iterdir():  # the published layout, not the newer library's
        path.unlink()
    for path, data in kept.items():
        path.write_bytes(data)
    index = json.loads((folder / "model_index.json").read_text())
    if "length" in p:
        index["max_sequence_length"] = p["length"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    save_adapter(folder, seed + 4)
    golden = results(folder, p, seed + 5)
    save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
    settings = {"steps": p["steps"], "guidance": p["cfg"], "true_cfg": 1.0, "length": p.get("length", 512)}
    settings |= {"prompts": PROMPTS, "negative": NEGATIVE, "size": p["size"], "sizes": SIZES}
    (folder / "golden.json").write_text(json.dumps(settings, indent=1) + "\n")


def save_adapter(folder, seed):
    model = QwenImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_" in name:
                parameter.copy_((0.3 if ".lora_A." in name else 0.1) * torch.randn(parameter.shape, generator=gen))
    QwenImagePipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(model), weight_name="lora.safetensors",
        **_collate_lora_metadata({"transformer": model}))


@torch.no_grad()
def results(folder, p, seed):
    pipeline = QwenImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    width, height = p["size"]
    length = p.get("length", 512)
    latents = torch.randn(2, 1, 16, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))
    packed = pipeline._pack_latents(latents, 2, 16, height // 8, width // 8)
    embeds, mask = pipeline.encode_prompt(PROMPTS, max_sequence_length=length)
    if mask is None:
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool)
    out = {"in.latents": latents[:, 0], "out.prompt_embeds": torch.cat([row[keep.bool()] for row, keep in zip(embeds, mask)])}
    out["out.prompt_lengths"] = mask.sum(1).float()

    def sample(cfg, output_type, keep=None):
        def step(_, index, __, tensors):
            if keep is not None:
                keep.append(tensors["latents"].clone())
            return tensors
        return pipeline(
            prompt=PROMPTS, negative_prompt=NEGATIVE if cfg > 1 else None, true_cfg_scale=cfg, width=width, height=height,
            num_inference_steps=p["steps"], max_sequence_length=length, latents=packed.clone(), output_type=output_type,
            callback_on_step_end=step).images

    def unpacked(tokens):
        return pipeline._unpack_latents(tokens, height, width, pipeline.vae_scale_factor)[:, :, 0]

    steps = []
    sample(1.0, "pt", steps)
    out["out.sigmas"] = pipeline.scheduler.sigmas.clone()
    for index, tokens in enumerate(steps):
        out[f"out.latents.{index}"] = unpacked(tokens)
    out["out.image"] = sample(p["cfg"], "pt")
    for sizes in SIZES:
        tokens = sizes[0] * sizes[1] // 256
        out[f"out.sigmas.{sizes[0]}x{sizes[1]}"] = sigmas(pipeline.scheduler, tokens)
    pipeline.load_lora_weights(folder, weight_name="lora.safetensors")
    out["out.image_lora"] = sample(p["cfg"], "pt")
    return out


def sigmas(scheduler, tokens):
    """Of 28 steps, as the pipeline sets them."""
    config = scheduler.config
    mu = calculate_shift(tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
    retrieve_timesteps(scheduler, 28, "cpu", sigmas=np.linspace(1.0, 1 / 28, 28), mu=mu)
    return scheduler.sigmas.clone()


for index, (name, p) in enumerate(PIPELINES.items()):
    make(name, p, 8300 + 10 * index)
