"""Makes reference data of transformers with reference images, of sizes that no other file has. The weights are those of
../flux and ../qwen_image. Made on a CPU in f32 with torch 2.15, diffusers 0.42.1 and safetensors, all from PyPI.

    python generate.py
"""

import json
import shutil
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
RANK, ALPHA = 4, 8
MODELS = {
    # One reference that is larger than the image.
    "kontext": dict(of="flux/dev", images=[(3, 5), (4, 6)], text=[6, 6]),
    # Two references, one of them of a single row, and prompts of different length.
    "edit": dict(of="qwen_image/mask", images=[(4, 3), (5, 7), (1, 2)], text=[3, 8]),
    # References modulated as if without noise.
    "edit_2511": dict(of="qwen_image/mask", images=[(3, 4), (2, 3), (5, 5)], text=[4, 6, 1], zero_cond_t=True),
}
TARGETS = {
    "flux": [
        "transformer_blocks.0.attn.to_k",
        "transformer_blocks.1.attn.add_q_proj",
        "transformer_blocks.1.ff.net.2",
        "single_transformer_blocks.0.attn.to_q",
        "single_transformer_blocks.2.proj_mlp",
    ],
    "qwen_image": [
        "transformer_blocks.0.attn.to_k",
        "transformer_blocks.0.attn.add_v_proj",
        "transformer_blocks.1.img_mlp.net.2",
        "transformer_blocks.1.img_mod.1",
        "transformer_blocks.0.txt_mod.1",
    ],
}


def flux_inputs(model, m, samples):
    places = [[index, row, column] for index, (rows, columns) in enumerate(m["images"])
              for row in range(rows) for column in range(columns)]
    return {
        "encoder_hidden_states": torch.randn(samples, m["text"][0], model.config.joint_attention_dim),
        "pooled_projections": torch.randn(samples, model.config.pooled_projection_dim),
        "guidance": torch.tensor([1.0, 0.4375])[:samples],
        "img_ids": torch.tensor(places, dtype=torch.float32),
        "txt_ids": torch.zeros(m["text"][0], 3),
    }


def qwen_inputs(model, m, samples):
    longest = max(m["text"])
    mask = torch.arange(longest)[None] < torch.tensor(m["text"])[:, None]
    prompts = torch.randn(samples, longest, model.config.joint_attention_dim) * mask[..., None]
    return {"encoder_hidden_states": prompts, "encoder_hidden_states_mask": mask}


def make(name, m, seed):
    torch.manual_seed(seed)
    family, weights = m["of"].split("/")[0], HERE.parent / m["of"]
    folder, samples = HERE / name, len(m["text"])
    folder.mkdir(exist_ok=True)
    config = json.loads((weights / "config.json").read_text())
    if m.get("zero_cond_t"):
        config["zero_cond_t"] = True
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(weights / "diffusion_pytorch_model.safetensors", folder)
    model = {"flux": FluxTransformer2DModel, "qwen_image": QwenImageTransformer2DModel}[family].from_pretrained(folder)
    (folder / "diffusion_pytorch_model.safetensors").unlink()

    tokens = [rows * columns for rows, columns in m["images"]]
    inputs = {"flux": flux_inputs, "qwen_image": qwen_inputs}[family](model, m, samples)
    inputs["hidden_states"] = torch.randn(samples, sum(tokens), 64)
    inputs["timestep"] = torch.tensor([0.8125, 0.2031, 0.5])[:samples]
    shapes = [(1, rows, columns) for rows, columns in m["images"]]
    extra = {} if family == "flux" else {"img_shapes": [shapes] * samples}
    # As the pipelines do: the references' part of the output is dropped.
    run = lambda: model(**inputs, **extra, return_dict=False)[0][:, :tokens[0]]
    with torch.no_grad():
        out = {"out.sample": run()}

    # Adapters as plain matrices beside the layers: x W + scale · (x A) B.
    modules, stored = dict(model.named_modules()), {}
    for target in TARGETS[family]:
        layer = modules[target]
        a = (torch.randn(RANK, layer.in_features) * 0.2).requires_grad_()
        b = (torch.randn(layer.out_features, RANK) * 0.2).requires_grad_()
        stored[target] = (a, b)
        layer.register_forward_hook(lambda _, x, y, a=a, b=b: y + (ALPHA / RANK) * (x[0] @ a.T) @ b.T)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    target = torch.randn(samples, tokens[0], 64)
    adapted = run()
    loss = ((adapted - target) ** 2).mean()
    loss.backward()
    out |= {"lora_out.sample": adapted.detach(), "loss": loss.detach().reshape(1), "target": target}
    for target, (a, b) in stored.items():
        out |= {f"lora.{target}.A": a.detach(), f"lora.{target}.B": b.detach()}
        out |= {f"grad.{target}.A": a.grad, f"grad.{target}.B": b.grad}
    out |= {f"in.{name}": tensor for name, tensor in inputs.items()}
    if family == "qwen_image":
        out["in.img_shapes"] = torch.tensor(shapes, dtype=torch.float32)
    metadata = {"lora_alpha": str(ALPHA), "lora_rank": str(RANK)}
    save_file({k: v.contiguous() for k, v in out.items()}, folder / "golden.safetensors", metadata)


if __name__ == "__main__":
    for seed, (name, m) in enumerate(MODELS.items()):
        make(name, m, 9300 + seed)
