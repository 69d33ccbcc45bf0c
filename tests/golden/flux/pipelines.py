"""Makes the reference pipelines of this folder: tiny FLUX.1 pipelines with random weights, as diffusers saves them, and
what diffusers computes with them. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1, transformers 5.22.2,
peft 0.21.2 and safetensors, all from PyPI. The tokenizers are those of `../sd3/pipeline`.

    python pipelines.py
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
from generate import randomise

TOKENIZERS = HERE.parent / "sd3" / "pipeline"
PROMPTS = ["a red fox in the snow, oil painting", "two boats on a calm lake at dusk, 4k"]
NEGATIVE = "blurry, text"

PIPELINES = {
    # A guidance embedding, a schedule shifted by the size of the image, classifier-free guidance on top.
    "dev": dict(layers=2, singles=2, heads=3, axes=[4, 6, 6], joint=48, pooled=32, guided=True, length=512,
                steps=6, guidance=3.5, true_cfg=2.5, size=[96, 64],
                schedule=dict(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
                              base_image_seq_len=256, max_image_seq_len=4096)),
    # No guidance, a schedule that is not shifted, half the prompt length.
    "schnell": dict(layers=1, singles=2, heads=2, axes=[2, 8, 6], joint=40, pooled=24, guided=False, length=256,
                    steps=4, guidance=0.0, true_cfg=1.0, size=[64, 80],
                    schedule=dict(shift=1.0, use_dynamic_shifting=False)),
}
SIZES = [[512, 512], [1024, 1024], [1216, 832]]
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_k_proj", "ff.net.0.proj", "proj_mlp", "proj_out"]


def transformer(p):
    return FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=p["layers"], num_single_layers=p["singles"],
        attention_head_dim=sum(p["axes"]), num_attention_heads=p["heads"], joint_attention_dim=p["joint"],
        pooled_projection_dim=p["pooled"], guidance_embeds=p["guided"], axes_dims_rope=tuple(p["axes"]))


def clip(vocabulary, hidden):
    return CLIPTextModel(CLIPTextConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=77, hidden_act="quick_gelu",
        bos_token_id=0, eos_token_id=2, pad_token_id=1))


def t5(vocabulary, width):
    return T5EncoderModel(T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, is_encoder_decoder=False, use_cache=False))


def vae():
    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[4, 8, 8, 8], layers_per_block=1, latent_channels=16, norm_num_groups=2, sample_size=64,
        scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False)
    return model


def make(name, p, seed):
    folder = HERE / name / "pipeline"
    shutil.rmtree(folder, ignore_errors=True)
    for theirs, ours in [("tokenizer", "tokenizer"), ("tokenizer_3", "tokenizer_2")]:
        shutil.copytree(TOKENIZERS / theirs, folder / ours)
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer_2 = T5TokenizerFast.from_pretrained(folder / "tokenizer_2")
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    autoencoder = randomise(vae(), seed + 1)
    with torch.no_grad():
        autoencoder.decoder.conv_out.weight.mul_(0.3)  # keeps most of the image inside [0, 1]
    pipeline = FluxPipeline(
        transformer=randomise(transformer(p), seed), vae=autoencoder,
        scheduler=FlowMatchEulerDiscreteScheduler(**p["schedule"]),
        text_encoder=randomise(clip(len(tokenizer), p["pooled"]), seed + 2), tokenizer=tokenizer,
        text_encoder_2=randomise(t5((len(tokenizer_2) + 15) // 16 * 16, p["joint"]), seed + 3),
        tokenizer_2=tokenizer_2)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    for path in (folder / "tokenizer").iterdir():  # the published layout, not the newer library's
        path.unlink()
    for path in (folder / "tokenizer_2").iterdir():
        path.unlink()
    for path, data in kept.items():
        path.write_bytes(data)
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer_2"] = ["transformers", "T5TokenizerFast"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    save_adapter(folder, seed + 4)
    golden = results(folder, p, seed + 5)
    save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
    settings = {key: p[key] for key in ["steps", "guidance", "true_cfg", "length"]}
    settings |= {"prompts": PROMPTS, "negative": NEGATIVE, "size": p["size"], "sizes": SIZES}
    (folder / "golden.json").write_text(json.dumps(settings, indent=1) + "\n")


def save_adapter(folder, seed):
    model = FluxTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_" in name:
                parameter.copy_((0.3 if ".lora_A." in name else 0.1) * torch.randn(parameter.shape, generator=gen))
    FluxPipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(model), weight_name="lora.safetensors",
        **_collate_lora_metadata({"transformer": model}))


@torch.no_grad()
def results(folder, p, seed):
    pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    width, height = p["size"]
    latents = torch.randn(2, 16, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))
    packed = pipeline._pack_latents(latents, 2, 16, height // 8, width // 8)
    embeds, pooled, _ = pipeline.encode_prompt(PROMPTS, None, max_sequence_length=p["length"])
    out = {"in.latents": latents, "out.prompt_embeds": embeds, "out.pooled_prompt_embeds": pooled}

    def sample(true_cfg, output_type, keep=None):
        def step(_, index, __, tensors):
            if keep is not None:
                keep.append(tensors["latents"].clone())
            return tensors
        return pipeline(
            prompt=PROMPTS, negative_prompt=NEGATIVE if true_cfg > 1 else None, true_cfg_scale=true_cfg,
            width=width, height=height, num_inference_steps=p["steps"], guidance_scale=p["guidance"],
            max_sequence_length=p["length"], latents=packed.clone(), output_type=output_type,
            callback_on_step_end=step).images

    def unpacked(tokens):
        return pipeline._unpack_latents(tokens, height, width, pipeline.vae_scale_factor)

    steps = []
    out["out.image"] = sample(1.0, "pt", steps)
    out["out.sigmas"] = pipeline.scheduler.sigmas.clone()
    for index, tokens in enumerate(steps):
        out[f"out.latents.{index}"] = unpacked(tokens)
    if p["true_cfg"] > 1:
        out["out.image_cfg"] = sample(p["true_cfg"], "pt")
    for sizes in SIZES:
        tokens = sizes[0] * sizes[1] // 256
        out[f"out.sigmas.{sizes[0]}x{sizes[1]}"] = sigmas(pipeline.scheduler, tokens)
    pipeline.load_lora_weights(folder, weight_name="lora.safetensors")
    out["out.image_lora"] = sample(1.0, "pt")
    return out


def sigmas(scheduler, tokens):
    """Of 28 steps, as the pipeline sets them."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
    import numpy as np

    config = scheduler.config
    mu = calculate_shift(tokens, config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096),
                         config.get("base_shift", 0.5), config.get("max_shift", 1.15))
    retrieve_timesteps(scheduler, 28, "cpu", sigmas=np.linspace(1.0, 1 / 28, 28), mu=mu)
    return scheduler.sigmas.clone()


for index, (name, p) in enumerate(PIPELINES.items()):
    make(name, p, 7100 + 10 * index)
