"""The tensors of the published models of Stable Diffusion 3, as diffusers and transformers name and
shape them: published.json.

    pip install torch diffusers transformers
    python generate.py            compares, and says what differs
    python generate.py --write    writes them anew

Models are made of their settings on a device without data; nothing is downloaded. Tensors that differ
by the number of their block alone are one line: `blocks.*.name [sizes]`, and the numbers.
Recorded with torch 2.15, diffusers 0.42 and transformers 5.22.
"""
import json
import sys
from pathlib import Path

import diffusers
import torch
import transformers

file = Path(__file__).parent / "published.json"

transformer = dict(
    sample_size=128, patch_size=2, in_channels=16, out_channels=16, attention_head_dim=64,
    joint_attention_dim=4096, pooled_projection_dim=2048)
medium = dict(transformer, num_layers=24, num_attention_heads=24, caption_projection_dim=1536)
large = dict(transformer, num_layers=38, num_attention_heads=38, caption_projection_dim=2432)
vae = dict(
    in_channels=3, out_channels=3, latent_channels=16, block_out_channels=[128, 256, 512, 512],
    layers_per_block=2, norm_num_groups=32, use_quant_conv=False, use_post_quant_conv=False,
    down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4)
clip = dict(vocab_size=49408, max_position_embeddings=77)


def models():
    sd3 = diffusers.SD3Transformer2DModel.from_config
    yield "stable-diffusion-3-medium", sd3(dict(medium, pos_embed_max_size=192))
    yield "stable-diffusion-3.5-medium", sd3(dict(
        medium, pos_embed_max_size=384, qk_norm="rms_norm", dual_attention_layers=tuple(range(13))))
    yield "stable-diffusion-3.5-large", sd3(dict(large, pos_embed_max_size=192, qk_norm="rms_norm"))
    yield "vae", diffusers.AutoencoderKL.from_config(vae)
    yield "clip-l", transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        projection_dim=768, hidden_act="quick_gelu", **clip))
    yield "clip-g", transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
        projection_dim=1280, hidden_act="gelu", **clip))
    yield "t5-xxl", transformers.T5EncoderModel(transformers.T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu"))


def shapes(model):
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "encoder.embed_tokens.weight":  # is shared.weight
            continue
        words = name.split(".")
        at = next((at for at, word in enumerate(words) if word.isdigit()), None)
        block = [] if at is None else [int(words[at])]
        if at is not None:
            words[at] = "*"
        found.setdefault(f"{'.'.join(words)} {list(tensor.shape)}", []).extend(block)
    return {name: sorted(blocks) for name, blocks in sorted(found.items())}


def lines(recorded):
    """A tensor each, so that a change shows where it is."""
    parts = [
        f"{json.dumps(name)}: {{\n" + ",\n".join(
            f" {json.dumps(tensor)}: {json.dumps(blocks)}" for tensor, blocks in part.items()) + "\n}"
        for name, part in recorded.items()]
    return "{" + ",\n".join(parts) + "}\n"


torch.set_default_device("meta")
made = {}
for name, model in models():
    made[name] = shapes(model)
    print(f"{name:28} {sum(t.numel() for t in model.state_dict().values()):>14,} numbers")
if "--write" in sys.argv:
    file.write_text(lines(made))
differs = json.loads(file.read_text()) != made
print("differs" if differs else "the same")
sys.exit(differs)
