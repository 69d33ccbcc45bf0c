"""The models of crates/trainer/src/bench/cases.rs in diffusers, transformers and PEFT, as
`hearth bench models --python` runs them.

    python models.py '{"model": "sd3-mid", "dtype": "f32", "repeats": 5, "threads": 2}'

Prints one JSON object with the figures that `hearth bench models --json` prints, as far as it has them.
"""
import json
import statistics
import sys
import time

import torch

WARM_UP, RANK, CONTEXT, PICTURE = 2, 16, 333, 256
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def sd3(heads, head, blocks, side, dtype):
    import peft
    from diffusers import SD3Transformer2DModel

    yield
    model = SD3Transformer2DModel(
        sample_size=side, in_channels=16, out_channels=16, patch_size=2, num_layers=blocks,
        num_attention_heads=heads, attention_head_dim=head, joint_attention_dim=4096,
        caption_projection_dim=heads * head, pooled_projection_dim=2048, pos_embed_max_size=96,
    ).to(dtype).requires_grad_(False)
    latents, target = torch.randn(2, 1, 16, side, side, dtype=dtype)
    inputs = dict(hidden_states=latents, timestep=torch.tensor([500.0]),
                  encoder_hidden_states=torch.randn(1, CONTEXT, 4096, dtype=dtype),
                  pooled_projections=torch.randn(1, 2048, dtype=dtype))
    yield training_step(model, inputs, target, dtype)


def flux(blocks, side, dtype):
    import peft
    from diffusers import FluxTransformer2DModel

    yield
    model = FluxTransformer2DModel(
        num_layers=blocks, num_single_layers=blocks, guidance_embeds=True).to(dtype).requires_grad_(False)
    latents, target = torch.randn(2, 1, (side // 2) ** 2, 64, dtype=dtype)
    places = [[0, row, column] for row in range(side // 2) for column in range(side // 2)]
    inputs = dict(hidden_states=latents, timestep=torch.tensor([0.5]), guidance=torch.tensor([3.5]),
                  encoder_hidden_states=torch.randn(1, 512, 4096, dtype=dtype),
                  pooled_projections=torch.randn(1, 768, dtype=dtype),
                  img_ids=torch.tensor(places, dtype=torch.float32), txt_ids=torch.zeros(512, 3))
    yield training_step(model, inputs, target, dtype)


def training_step(model, inputs, target, dtype):
    """Forward and backward of an adapter on a frozen transformer."""
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=TARGETS))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()

    def run():
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            out = model(**inputs).sample
        (out.float() - target.float()).square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run


def clip(dtype):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    yield
    model = CLIPTextModelWithProjection(CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=12, max_position_embeddings=77, projection_dim=768, eos_token_id=49407,
    )).to(dtype).eval()
    ids = torch.full((1, 77), 7)
    yield lambda: model(ids, output_hidden_states=True)


def t5(dtype):
    from transformers import T5Config, T5EncoderModel

    yield
    model = T5EncoderModel(T5Config(
        vocab_size=32128, d_model=1024, d_kv=64, d_ff=2816, num_layers=8, num_heads=16,
        feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False,
    )).to(dtype).eval()
    ids = torch.full((1, 256), 7)
    yield lambda: model(ids)


def vae(encode, dtype):
    from diffusers import AutoencoderKL

    yield
    model = AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[128, 256, 512, 512],
        layers_per_block=2, latent_channels=16, norm_num_groups=32, sample_size=1024,
        use_quant_conv=False, use_post_quant_conv=False,
    ).to(dtype).eval()
    # What is not measured is not held.
    if encode:
        del model.decoder
        picture = torch.randn(1, 3, PICTURE, PICTURE, dtype=dtype)
        yield lambda: model.encode(picture).latent_dist.mean
    else:
        del model.encoder
        latents = torch.randn(1, 16, PICTURE // 8, PICTURE // 8, dtype=dtype)
        yield lambda: model.decode(latents).sample


MODELS = {
    "sd3-tiny": lambda dtype: sd3(4, 16, 2, 16, dtype),
    "sd3-mid": lambda dtype: sd3(8, 64, 8, 64, dtype),
    "flux-mid": lambda dtype: flux(1, 64, dtype),
    "clip-l": clip,
    "t5": t5,
    "vae-encode": lambda dtype: vae(True, dtype),
    "vae-decode": lambda dtype: vae(False, dtype),
}


def main(job):
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[job["dtype"]]
    made = MODELS[job["model"]](dtype)
    # Up to here only libraries are loaded.
    next(made)
    before = status("VmRSS")
    run = next(made)
    walls, cpus = [], []
    with torch.set_grad_enabled(job["model"].startswith(("sd3", "flux"))):
        for repeat in range(WARM_UP + job["repeats"]):
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if repeat >= WARM_UP:
                walls.append((time.perf_counter() - wall) * 1e3)
                cpus.append((time.process_time() - cpu) * 1e3 / job["threads"])
    print(json.dumps({
        "ms_median": statistics.median(walls), "cpu_ms_median": statistics.median(cpus),
        "rss_peak_bytes": status("VmHWM"), "rss_before_bytes": before, "version": torch.__version__,
    }))


main(json.loads(sys.argv[1]))
