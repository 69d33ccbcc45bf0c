"""Makes the reference data of this folder: FLUX.2 transformers and an autoencoder with random weights, tiny, of sizes that no
other file has. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1 and safetensors, all from PyPI.

    python generate.py
"""

import json
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
from generate import randomise

RANK, ALPHA = 4, 8
MODELS = {
    # An image alone.
    "image": dict(layers=2, singles=2, heads=2, axes=[4, 2, 4, 6], channels=16, text=20, images=[(3, 5)], prompt=6, samples=2),
    # Three references, one larger than the image and one of a single row; more single blocks than double ones.
    "references": dict(layers=1, singles=3, heads=3, axes=[2, 4, 4, 2], channels=8, text=12, time=32,
                       images=[(4, 3), (5, 4), (1, 6), (2, 2)], prompt=5, samples=2),
}
TARGETS = [
    "transformer_blocks.0.attn.to_k",
    "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.0.attn.add_q_proj",
    "transformer_blocks.0.ff.linear_in",
    "transformer_blocks.0.ff_context.linear_out",
    "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
    "single_transformer_blocks.1.attn.to_out",
    "double_stream_modulation_img.linear",
    "single_stream_modulation.linear",
    "context_embedder",
]


def transformer(layers, singles, heads, axes, channels, text, time=256):
    return Flux2Transformer2DModel(
        in_channels=channels, num_layers=layers, num_single_layers=singles, attention_head_dim=sum(axes),
        num_attention_heads=heads, joint_attention_dim=text, axes_dims_rope=axes, timestep_guidance_channels=time,
        guidance_embeds=False)


def places(images):
    """The image at 0, references at 10, 20, ..."""
    return torch.tensor([[10 * index, row, column, 0] for index, (rows, columns) in enumerate(images)
                         for row in range(rows) for column in range(columns)])


def adapted(model, targets):
    """Adapters as plain matrices beside the layers: x W + scale · (x A) B."""
    modules, stored = dict(model.named_modules()), {}
    for target in targets:
        layer = modules[target]
        a = (torch.randn(RANK, layer.in_features) * 0.2).requires_grad_()
        b = (torch.randn(layer.out_features, RANK) * 0.2).requires_grad_()
        stored[target] = (a, b)
        layer.register_forward_hook(lambda _, x, y, a=a, b=b: y + (ALPHA / RANK) * (x[0] @ a.T) @ b.T)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return stored


def save_model(model, folder):
    model.to(torch.bfloat16).save_pretrained(folder)
    model.to(torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make(name, m, seed):
    torch.manual_seed(seed)
    folder, samples = HERE / name, m["samples"]
    model = randomise(transformer(m["layers"], m["singles"], m["heads"], m["axes"], m["channels"], m["text"], m.get("time", 256)), seed)
    save_model(model, folder)
    tokens = [rows * columns for rows, columns in m["images"]]
    inputs = {
        "hidden_states": torch.randn(samples, sum(tokens), m["channels"]),
        "timestep": torch.tensor([0.8125, 0.2031])[:samples],
        "encoder_hidden_states": torch.randn(samples, m["prompt"], m["text"]),
    }
    ids = dict(img_ids=places(m["images"]), txt_ids=Flux2KleinPipeline._prepare_text_ids(inputs["encoder_hidden_states"])[0])
    # As the pipeline does: the references' part of the output is dropped.
    run = lambda: model(**inputs, **ids, return_dict=False)[0][:, :tokens[0]]
    with torch.no_grad():
        out = {"out.sample": run()}
    stored = adapted(model, TARGETS)
    target = torch.randn(samples, tokens[0], m["channels"])
    found = run()
    loss = ((found - target) ** 2).mean()
    loss.backward()
    out |= {"lora_out.sample": found.detach(), "loss": loss.detach().reshape(1), "target": target}
    for layer, (a, b) in stored.items():
        out |= {f"lora.{layer}.A": a.detach(), f"lora.{layer}.B": b.detach(), f"grad.{layer}.A": a.grad, f"grad.{layer}.B": b.grad}
    out |= {f"in.{name}": tensor for name, tensor in inputs.items()}
    out["in.img_shapes"] = torch.tensor([[1, *size] for size in m["images"]], dtype=torch.float32)
    metadata = {"lora_alpha": str(ALPHA), "lora_rank": str(RANK)}
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "golden.safetensors", metadata)


def autoencoder(channels, latent, groups, blocks):
    return AutoencoderKLFlux2(
        block_out_channels=channels, layers_per_block=blocks, latent_channels=latent, norm_num_groups=groups,
        down_block_types=["DownEncoderBlock2D"] * len(channels), up_block_types=["UpDecoderBlock2D"] * len(channels))


def randomised(vae, seed):
    """With statistics of latents that differ from value to value."""
    randomise(vae, seed)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        vae.bn.running_mean.copy_(0.5 * torch.randn(vae.bn.running_mean.shape, generator=gen))
        vae.bn.running_var.copy_(0.2 + 3 * torch.rand(vae.bn.running_var.shape, generator=gen))
    return vae.eval()


@torch.no_grad()
def make_vae(name, seed):
    torch.manual_seed(seed)
    folder = HERE / name
    vae = randomised(autoencoder([6, 9], latent=3, groups=3, blocks=2), seed)
    save_model(vae, folder)
    image = 2 * torch.rand(2, 3, 12, 20) - 1
    encoded = vae.encode(image).latent_dist
    patches = Flux2KleinPipeline._patchify_latents(encoded.mean)
    mean, var = (it.view(1, -1, 1, 1) for it in (vae.bn.running_mean, vae.bn.running_var))
    scaled = (patches - mean) / torch.sqrt(var + vae.config.batch_norm_eps)
    out = {"in.image": image, "out.mean": encoded.mean, "out.logvar": encoded.logvar,
           "out.scaled_latent": Flux2KleinPipeline._unpatchify_latents(scaled), "out.decoded": vae.decode(encoded.mean).sample}
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "golden.safetensors")


if __name__ == "__main__":
    for seed, (name, m) in enumerate(MODELS.items()):
        make(name, m, 10700 + seed)
    make_vae("vae", 10720)
