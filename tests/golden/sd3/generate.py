"""Makes the reference data of this folder and checks it.

Every model here is tiny and has random weights. The data were made on a CPU in
f32 with Python 3.11, torch 2.15, diffusers 0.42.1, transformers 5.22.2,
peft 0.21.2, tokenizers 0.23 and safetensors, all from PyPI.

    python generate.py                  remake every part
    python generate.py --only sd35 single
    python generate.py --check          recompute everything from the stored files

The folders models/{sd3,clip_l,t5,vae_kl16,flow_match} are given, not made here;
`--check` recomputes them too. SOURCE.md describes the layout of the files.
"""

import argparse
import json
import math
import os
import shutil
from collections import Counter
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import diffusers
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.loaders.single_file_utils import (
    convert_ldm_vae_checkpoint,
    convert_sd3_transformer_checkpoint_to_diffusers,
    swap_scale_shift,
)
from diffusers.training_utils import _collate_lora_metadata, compute_loss_weighting_for_sd3
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models as tokenizer_models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

RANK = 4
ALPHA = 8
SCALE = ALPHA / RANK

SD3_ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
SD35_TARGETS = SD3_ATTENTION + [
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
]
CLIP_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj"]


# --------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(gen, *shape):
    return torch.randn(*shape, generator=gen)


def randomise(model, seed):
    """Gives every parameter a non-trivial random value.

    Matrices and kernels: N(0, 1/fan_in). Embeddings: N(0, 1). Biases:
    N(0, 0.1^2). Norm weights: N(1, 0.1^2).
    """
    gen = generator(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = randn(gen, *parameter.shape)
            if id(parameter) in embeddings:
                parameter.copy_(noise)
            elif parameter.dim() > 1:
                parameter.copy_(noise / math.sqrt(parameter[0].numel()))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(1 + 0.1 * noise)
    return model.eval()


def attach_adapter(model, targets, **options):
    """Injects a PEFT adapter and freezes everything else."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), **options)
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return config


ADAPTER_PARTS = {
    ".lora_A.default.weight": "A",
    ".lora_B.default.weight": "B",
    ".lora_magnitude_vector.default.weight": "M",
}


def adapter_parameters(model):
    """Maps `<module>.A`, `.B` and `.M` to the adapter's parameters."""
    found = {}
    for name, parameter in model.named_parameters():
        for suffix, part in ADAPTER_PARTS.items():
            if name.endswith(suffix):
                found[f"{name.removesuffix(suffix)}.{part}"] = parameter
    return dict(sorted(found.items()))


def randomise_adapter(model, seed):
    """A ~ N(0, 0.3^2), B ~ N(0, 0.1^2); magnitudes times N(1, 0.2^2)."""
    gen = generator(seed)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            noise = randn(gen, *parameter.shape)
            if name.endswith(".A"):
                parameter.copy_(0.3 * noise)
            elif name.endswith(".B"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(parameter * (1 + 0.2 * noise))


def load_adapter(model, golden):
    parameters = adapter_parameters(model)
    stored = {k.removeprefix("lora."): v for k, v in golden.items() if k.startswith("lora.")}
    assert stored.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])


def adapter_tensors(model):
    """The adapter's values and, after backward(), its gradients."""
    tensors = {}
    for name, parameter in adapter_parameters(model).items():
        tensors[f"lora.{name}"] = parameter.detach().clone()
        tensors[f"grad.{name}"] = parameter.grad.clone()
    return tensors


def mean_square(a, b):
    return ((a - b) ** 2).mean()


def write_golden(path, tensors, class_name):
    tensors = {k: v.detach().contiguous() for k, v in tensors.items()}
    save_file(tensors, path, metadata={"class": class_name})


def named(golden, prefix):
    return {k.removeprefix(prefix): v for k, v in golden.items() if k.startswith(prefix)}


def difference(new, old):
    """Largest absolute difference, relative to the largest stored value."""
    new, old = new.detach().float(), old.detach().float()
    assert new.shape == old.shape, (new.shape, old.shape)
    return ((new - old).abs().max() / old.abs().max().clamp_min(1e-30)).item()


def worst(new, golden):
    """The largest difference over all outputs, the loss and the gradients."""
    made = {k for k in golden if k.split(".")[0] in ("out", "lora_out", "loss", "grad")}
    missing = made - new.keys()
    assert not missing, sorted(missing)
    return max(difference(new[k], golden[k]) for k in made)


def fresh(path):
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


# --------------------------------------------------------------------------
# models/: one network each, with adapter, loss and gradients
# --------------------------------------------------------------------------


def load_transformer(folder):
    return SD3Transformer2DModel.from_pretrained(folder, dtype=torch.float32).eval()


def transformer_results(model, golden, targets, **options):
    """Outputs without and with adapter, loss and gradients."""
    inputs = named(golden, "in.")
    with torch.no_grad():
        plain = model(**inputs).sample
    attach_adapter(model, targets, **options)
    load_adapter(model, golden)
    sample = model(**inputs).sample
    loss = mean_square(sample, golden["target"])
    loss.backward()
    return {"out.sample": plain, "lora_out.sample": sample, "loss": loss.detach()[None]} | adapter_tensors(model)


def transformer_inputs(gen, shape, tokens, timesteps, config):
    return {
        "in.hidden_states": randn(gen, *shape),
        "in.encoder_hidden_states": randn(gen, shape[0], tokens, config.joint_attention_dim),
        "in.pooled_projections": randn(gen, shape[0], config.pooled_projection_dim),
        "in.timestep": torch.tensor(timesteps),
        "target": randn(gen, *shape),
    }


def make_sd35(root):
    """SD3.5-medium in small: qk norm, two blocks with a second attention.

    The weights are stored in bf16, as the published model's are; everything
    is computed in f32 from those values.
    """
    folder = fresh(root / "models/sd35")
    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        caption_projection_dim=64,
        pooled_projection_dim=40,
        out_channels=16,
        pos_embed_max_size=9,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    randomise(model, 3501).to(torch.bfloat16).save_pretrained(folder)

    model = load_transformer(folder)
    golden = transformer_inputs(generator(3502), (3, 16, 10, 14), 21, [987.65, 123.4, 501.0], model.config)
    seeded = load_transformer(folder)
    attach_adapter(seeded, SD35_TARGETS)
    randomise_adapter(seeded, 3503)
    golden |= {f"lora.{k}": v for k, v in adapter_parameters(seeded).items()}
    golden |= transformer_results(model, golden, SD35_TARGETS)
    write_golden(folder / "golden.safetensors", golden, "SD3Transformer2DModel")


def make_sd3_dora(root):
    """DoRA on the weights of models/sd3 (which are not stored twice)."""
    folder = fresh(root / "models/sd3_dora")
    source = root / "models/sd3"
    shutil.copy(source / "config.json", folder / "config.json")

    golden = load_file(source / "golden.safetensors")
    golden = {k: v for k, v in golden.items() if k.startswith("in.") or k == "target"}
    seeded = load_transformer(source)
    config = attach_adapter(seeded, SD3_ATTENTION, use_dora=True)
    randomise_adapter(seeded, 3101)
    golden |= {f"lora.{k}": v for k, v in adapter_parameters(seeded).items()}
    golden |= transformer_results(load_transformer(source), golden, SD3_ATTENTION, use_dora=True)
    write_golden(folder / "golden.safetensors", golden, "SD3Transformer2DModel")
    save_diffusers_adapter(seeded, config, folder / "pytorch_lora_weights.safetensors")


def save_diffusers_adapter(model, config, path):
    """Writes what StableDiffusion3Pipeline.save_lora_weights writes."""
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set, whose order varies
    model.peft_config = {"default": config}
    StableDiffusion3Pipeline.save_lora_weights(
        path.parent,
        transformer_lora_layers=get_peft_model_state_dict(model),
        weight_name=path.name,
        **_collate_lora_metadata({"transformer": model}),
    )


def clip_results(model, golden):
    """Loss: mean square error of text_embeds plus that of hidden_states[-2]."""
    ids = golden["in.input_ids"]
    with torch.no_grad():
        plain = model(ids, output_hidden_states=True)
    attach_adapter(model, CLIP_TARGETS)
    load_adapter(model, golden)
    adapted = model(ids, output_hidden_states=True)
    loss = mean_square(adapted.text_embeds, golden["target.text_embeds"])
    loss = loss + mean_square(adapted.hidden_states[-2], golden["target.hidden_states_m2"])
    loss.backward()
    return {
        "out.text_embeds": plain.text_embeds,
        "out.last_hidden_state": plain.last_hidden_state,
        "out.hidden_states_m2": plain.hidden_states[-2],
        "lora_out.text_embeds": adapted.text_embeds,
        "lora_out.hidden_states_m2": adapted.hidden_states[-2],
        "loss": loss.detach()[None],
    } | adapter_tensors(model)


def make_clip_g(root):
    """CLIP-bigG in small: exact gelu, and the pooled token at the largest id."""
    folder = fresh(root / "models/clip_g")
    config = CLIPTextConfig(
        vocab_size=600,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=20,
        projection_dim=28,
        hidden_act="gelu",
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    randomise(CLIPTextModelWithProjection(config), 4101).save_pretrained(folder)

    # The second and third rows hold the id 2 before the end, which must not be taken for the end.
    ids = torch.zeros(3, 20, dtype=torch.int64)
    ids[0, :5] = torch.tensor([598, 5, 17, 300, 599])
    ids[1, :9] = torch.tensor([598, 44, 2, 45, 597, 3, 2, 8, 599])
    ids[2] = torch.tensor([598, *range(40, 57), 2, 599])
    gen = generator(4102)
    golden = {
        "in.input_ids": ids,
        "target.text_embeds": randn(gen, 3, config.projection_dim),
        "target.hidden_states_m2": randn(gen, 3, 20, config.hidden_size),
    }
    seeded = CLIPTextModelWithProjection.from_pretrained(folder)
    attach_adapter(seeded, CLIP_TARGETS)
    randomise_adapter(seeded, 4103)
    golden |= {f"lora.{k}": v for k, v in adapter_parameters(seeded).items()}
    golden |= clip_results(CLIPTextModelWithProjection.from_pretrained(folder).eval(), golden)
    write_golden(folder / "golden.safetensors", golden, "CLIPTextModelWithProjection")


# --------------------------------------------------------------------------
# adapters/: one adapter in the layouts that programs write
# --------------------------------------------------------------------------


def block_modules(block):
    """Maps the fused native modules of one block to diffusers' modules."""
    return {
        "attn.qkv": [f"transformer_blocks.{block}.attn.to_{x}" for x in "qkv"],
        "attn.proj": [f"transformer_blocks.{block}.attn.to_out.0"],
    }


def native_adapter(lora, blocks):
    """Fuses an adapter on to_q, to_k, to_v, to_out.0 into the native modules.

    Returns {native module: (down, up, alpha)}. For qkv the three adapters are
    stacked: down is [3r, in], up is block diagonal [3 out, 3r], and alpha is
    three times as large, so that alpha / (3r) stays alpha / r.
    """
    native = {}
    for block in range(blocks):
        for module, parts in block_modules(block).items():
            down = torch.cat([lora[f"{p}.A"] for p in parts])
            up = torch.block_diag(*[lora[f"{p}.B"] for p in parts])
            native[f"joint_blocks.{block}.x_block.{module}"] = (down, up, torch.tensor(float(ALPHA * len(parts))))
    return native


def kohya_tensors(native):
    tensors = {}
    for module, (down, up, alpha) in native.items():
        name = "lora_unet_" + module.replace(".", "_")
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}
    return tensors


def comfy_tensors(native):
    tensors = {}
    for module, (down, up, alpha) in native.items():
        name = f"diffusion_model.{module}"
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up, f"{name}.alpha": alpha}
    return tensors


def shared_adapter(seed, blocks, width):
    """A fused adapter of rank 4 whose q, k and v share one down matrix."""
    gen = generator(seed)
    return {
        f"joint_blocks.{b}.x_block.attn.qkv": (
            0.3 * randn(gen, RANK, width),
            0.1 * randn(gen, 3 * width, RANK),
            torch.tensor(float(ALPHA)),
        )
        for b in range(blocks)
    }


def merge_native(model, native):
    """Adds alpha / rank * up @ down to the weights of a diffusers model."""
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for module, (down, up, alpha) in native.items():
            _, block, _, leaf = module.split(".", 3)
            parts = block_modules(block)[leaf]
            delta = alpha / down.shape[0] * (up @ down)
            for part, rows in zip(parts, delta.chunk(len(parts))):
                weights[f"{part}.weight"].add_(rows)


def read_native(path):
    """Reads a kohya or comfy file back into {native module: (down, up, alpha)}."""
    native = {}
    tensors = load_file(path)
    for key, alpha in tensors.items():
        if not key.endswith(".alpha"):
            continue
        name = key.removesuffix(".alpha")
        if name.startswith("lora_unet_"):
            _, _, _, _, block, leaf = name.split("_", 5)
            module = f"joint_blocks.{block}.{leaf.replace('x_block_attn_', 'x_block.attn.')}"
            pair = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]
        else:
            module = name.removeprefix("diffusion_model.")
            pair = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        native[module] = (*pair, alpha)
    return native


def make_adapters(root):
    folder = fresh(root / "adapters")
    source = root / "models/sd3"
    golden = load_file(source / "golden.safetensors")
    shutil.copy(source / "pytorch_lora_weights.safetensors", folder / "diffusers.safetensors")

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=SD3_ATTENTION)
    wrapped = get_peft_model(load_transformer(source), config)
    load_adapter(wrapped.base_model.model, golden)
    wrapped.save_pretrained(folder / "peft")
    (folder / "peft/README.md").unlink(missing_ok=True)
    forget_base_model(folder / "peft/adapter_config.json")

    width = 64
    native = native_adapter(named(golden, "lora."), blocks=2)
    note = {"ss_network_module": "networks.lora_sd3", "ss_network_dim": "12", "ss_network_alpha": "24"}
    save_file(kohya_tensors(native), folder / "kohya.safetensors", metadata=note)
    save_file(comfy_tensors(native), folder / "comfy.safetensors", metadata={"format": "pt"})

    shared = shared_adapter(5101, blocks=2, width=width)
    note = {"ss_network_module": "networks.lora_sd3", "ss_network_dim": str(RANK), "ss_network_alpha": str(ALPHA)}
    save_file(kohya_tensors(shared), folder / "kohya_shared.safetensors", metadata=note)
    given = load_file(root / "models/sd3/golden.safetensors")
    out = {k: v for k, v in given.items() if k.startswith("in.") or k == "out.sample"}
    out["lora_out.sample"] = merged_output(root, shared)
    write_golden(folder / "kohya_shared_golden.safetensors", out, "SD3Transformer2DModel")


def forget_base_model(path):
    """PEFT notes the folder of the base model; that is of no use elsewhere."""
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = None
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2) + "\n")


def merged_output(root, native):
    model = load_transformer(root / "models/sd3")
    merge_native(model, native)
    inputs = named(load_file(root / "models/sd3/golden.safetensors"), "in.")
    with torch.no_grad():
        return model(**inputs).sample


# --------------------------------------------------------------------------
# single/: checkpoints in the original layout
# --------------------------------------------------------------------------

OUTER_NAMES = {
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
}

BLOCK_NAMES = {
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.to_out.0": "x_block.attn2.proj",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}

FUSED_NAMES = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
}


def original_transformer(state):
    """Inverts convert_sd3_transformer_checkpoint_to_diffusers.

    diffusers keeps scale before shift in norm_out and in the last block's
    norm1_context; the original keeps shift before scale.
    """
    state = dict(state)
    original = {"pos_embed": state.pop("pos_embed.pos_embed")}
    for ours, theirs in OUTER_NAMES.items():
        for kind in ("weight", "bias"):
            original[f"{theirs}.{kind}"] = state.pop(f"{ours}.{kind}")
    for kind in ("weight", "bias"):
        original[f"final_layer.adaLN_modulation.1.{kind}"] = swap_halves(state.pop(f"norm_out.linear.{kind}"))

    layers = 1 + max(int(k.split(".")[1]) for k in state)
    for i in range(layers):
        ours, theirs = f"transformer_blocks.{i}.", f"joint_blocks.{i}."
        for kind in ("weight", "bias"):
            for fused, parts in FUSED_NAMES.items():
                if f"{ours}{parts[0]}.{kind}" in state:
                    tensors = [state.pop(f"{ours}{p}.{kind}") for p in parts]
                    original[f"{theirs}{fused}.{kind}"] = torch.cat(tensors)
            for part, name in BLOCK_NAMES.items():
                if f"{ours}{part}.{kind}" in state:
                    original[f"{theirs}{name}.{kind}"] = state.pop(f"{ours}{part}.{kind}")
            context = state.pop(f"{ours}norm1_context.linear.{kind}")
            context = swap_halves(context) if i == layers - 1 else context
            original[f"{theirs}context_block.adaLN_modulation.1.{kind}"] = context
    assert not state, sorted(state)
    return {f"model.diffusion_model.{k}": v.contiguous() for k, v in original.items()}


def swap_halves(weight):
    return swap_scale_shift(weight, dim=None)


def original_vae(state, blocks):
    """Inverts convert_ldm_vae_checkpoint; attention weights become 1x1 kernels."""
    original = {}
    for key, value in state.items():
        name = key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = name.replace("mid_block.resnets.0", "mid.block_1").replace("mid_block.resnets.1", "mid.block_2")
        if "mid_block.attentions.0" in name:
            name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
            name = name.replace("to_out.0", "proj_out").replace("to_", "")
            value = value[:, :, None, None] if value.dim() == 2 else value
        for i in range(blocks):
            name = name.replace(f"down_blocks.{i}.resnets", f"down.{i}.block")
            name = name.replace(f"down_blocks.{i}.downsamplers.0", f"down.{i}.downsample")
            name = name.replace(f"up_blocks.{i}.resnets", f"up.{blocks - 1 - i}.block")
            name = name.replace(f"up_blocks.{i}.upsamplers.0", f"up.{blocks - 1 - i}.upsample")
        original[f"first_stage_model.{name}"] = value.contiguous()
    return original


# Each file's transformer and autoencoder.
SINGLE = {
    "sd3": ("models/sd3", "models/vae_kl16"),
    "sd35": ("models/sd35", None),
    "pipeline": ("pipeline/transformer", "pipeline/vae"),
}
STORED = "diffusion_pytorch_model.safetensors"


def make_single(root):
    folder = fresh(root / "single")
    for name, (transformer, vae) in SINGLE.items():
        tensors = original_transformer(load_file(root / transformer / STORED))
        if vae:
            tensors |= original_vae(load_file(root / vae / STORED), blocks=4)
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})


def check_single(root):
    """Runs diffusers' converters and demands equality bit for bit."""
    for name, (transformer, vae) in SINGLE.items():
        stored = load_file(root / f"single/{name}.safetensors")
        unet = {k: v for k, v in stored.items() if k.startswith("model.diffusion_model.")}
        converted = convert_sd3_transformer_checkpoint_to_diffusers(unet)
        assert not unet, sorted(unet)
        assert_same(converted, load_file(root / transformer / STORED))
        if vae:
            config = json.loads((root / vae / "config.json").read_text())
            converted = convert_ldm_vae_checkpoint(stored, config)
            assert_same(converted, load_file(root / vae / STORED))
        yield f"single/{name}", 0.0


def assert_same(new, old):
    assert new.keys() == old.keys(), new.keys() ^ old.keys()
    for key, value in old.items():
        assert new[key].dtype == value.dtype and torch.equal(new[key], value), key


# --------------------------------------------------------------------------
# Checks of models/ and adapters/
# --------------------------------------------------------------------------


def check_models(root):
    folder = root / "models"
    golden = {p.parent.name: load_file(p) for p in sorted(folder.glob("*/golden.safetensors"))}

    for name, source, targets, options in (
        ("sd3", "sd3", SD3_ATTENTION, {}),
        ("sd35", "sd35", SD35_TARGETS, {}),
        ("sd3_dora", "sd3", SD3_ATTENTION, {"use_dora": True}),
    ):
        model = load_transformer(folder / source)
        yield f"models/{name}", worst(transformer_results(model, golden[name], targets, **options), golden[name])
    yield "models/sd3_dora (pytorch_lora_weights)", check_dora_file(root)

    for name in ("clip_l", "clip_g"):
        model = CLIPTextModelWithProjection.from_pretrained(folder / name).eval()
        yield f"models/{name}", worst(clip_results(model, golden[name]), golden[name])

    yield "models/t5", worst(t5_results(folder / "t5", golden["t5"]), golden["t5"])
    yield "models/vae_kl16", worst(vae_results(folder / "vae_kl16", golden["vae_kl16"]), golden["vae_kl16"])
    yield "models/flow_match", worst(flow_match_results(golden["flow_match"]), golden["flow_match"])


def check_dora_file(root):
    """Loads the saved DoRA file the way a pipeline does."""
    model = load_transformer(root / "models/sd3")
    load_diffusers_adapter(model, root / "models/sd3_dora/pytorch_lora_weights.safetensors")
    golden = load_file(root / "models/sd3_dora/golden.safetensors")
    with torch.no_grad():
        return difference(model(**named(golden, "in.")).sample, golden["lora_out.sample"])


def load_diffusers_adapter(model, path):
    state, metadata = StableDiffusion3Pipeline.lora_state_dict(
        str(path.parent), weight_name=path.name, return_lora_metadata=True
    )
    StableDiffusion3Pipeline.load_lora_into_transformer(state, transformer=model, metadata=metadata)


@torch.no_grad()
def t5_results(folder, golden):
    model = T5EncoderModel.from_pretrained(folder).eval()
    ids = golden["in.input_ids"]
    return {
        "out.no_mask": model(ids).last_hidden_state,
        "out.masked": model(ids, attention_mask=(ids != model.config.pad_token_id).long()).last_hidden_state,
    }


@torch.no_grad()
def vae_results(folder, golden):
    model = AutoencoderKL.from_pretrained(folder).eval()
    latent = model.encode(golden["in.image"]).latent_dist
    return {
        "out.mean": latent.mean,
        "out.logvar": latent.logvar,
        "out.scaled_latent": (latent.mean - model.config.shift_factor) * model.config.scaling_factor,
        "out.decoded": model.decode(latent.mean).sample,
    }


def flow_match_results(golden):
    u = golden["in.u"]
    schedulers = {
        "sd3_shift3": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "flux_dynamic": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }
    out = {
        "out.logit_normal_u": torch.sigmoid(golden["in.normal"]),
        "out.mode_u_1.29": 1 - u - 1.29 * (torch.cos(math.pi * u / 2) ** 2 - 1 + u),
    }
    for name, scheduler in schedulers.items():
        index = (u * 1000).long()
        sigma = scheduler.sigmas[index]
        made = {
            "sigmas": scheduler.sigmas,
            "timesteps": scheduler.timesteps,
            "t_of_u": scheduler.timesteps[index],
            "sigma_of_u": sigma,
            "sigma_of_u_bf16": sigma.to(torch.bfloat16),
        }
        for scheme in ("none", "sigma_sqrt", "cosmap"):
            made[f"weight_{scheme}"] = compute_loss_weighting_for_sd3(scheme, sigma)
        out |= {f"out.{name}.{k}": v for k, v in made.items()}
    return out


def check_adapters(root):
    folder = root / "adapters"
    golden = load_file(root / "models/sd3/golden.safetensors")
    expected = golden["lora_out.sample"]
    for name in ("kohya", "comfy"):
        yield f"adapters/{name}", difference(merged_output(root, read_native(folder / f"{name}.safetensors")), expected)

    shared = load_file(folder / "kohya_shared_golden.safetensors")["lora_out.sample"]
    made = merged_output(root, read_native(folder / "kohya_shared.safetensors"))
    yield "adapters/kohya_shared", difference(made, shared)

    model = load_transformer(root / "models/sd3")
    load_diffusers_adapter(model, folder / "diffusers.safetensors")
    with torch.no_grad():
        yield "adapters/diffusers", difference(model(**named(golden, "in.")).sample, expected)

    tensors = load_file(folder / "peft/adapter_model.safetensors")
    expected = {
        f"base_model.model.{k[5:-2]}.lora_{k[-1]}.weight": v for k, v in golden.items() if k.startswith("lora.")
    }
    assert_same(tensors, expected)
    yield "adapters/peft", 0.0


# --------------------------------------------------------------------------
# pipeline/: a whole StableDiffusion3Pipeline
# --------------------------------------------------------------------------

CORPUS = """
A red fox walks through the snow at the edge of the forest, and the morning light falls on its back.
An oil painting of a small house by the sea, with a garden full of flowers and a white fence.
The old man in the blue coat is reading a book under the tree while the children play in the park.
A close photograph of a black cat sleeping on a wooden table next to a cup of coffee.
Two dogs are running along the beach, and the water is shining in the evening sun.
A portrait of a young woman with long dark hair, painted in the style of an old master.
The city at night, seen from above: streets of light, towers of glass, a river between them.
A bowl of fruit, apples and oranges and pears, on a table near the window, soft light from the left.
Mountains in the distance, a lake in front, clouds over the hills; a wide landscape in autumn colours.
A drawing of a robot holding a flower, simple lines, white background, very detailed.
The train stands at the station in the rain. People with umbrellas wait on the platform.
A digital painting of a castle on a rock above the sea, storm clouds, dramatic lighting, high detail.
She is wearing a green dress and a hat with a feather; he is wearing a brown jacket and boots.
A photo of a street market in the summer: bread, cheese, fish, bottles of wine and baskets of herbs.
Snow falls on the roofs of the village, smoke rises from the chimneys, and a dog barks somewhere.
A watercolour of birds over a field of yellow wheat, painted with a light hand and much water.
The spaceship is landing on a strange planet with two moons and red sand, science fiction, cinematic.
A wooden boat on a quiet river, reflections of the trees, mist in the early morning, long exposure.
Don't look back, she said, and I'll tell you what they've seen; we're not there yet, and it's late.
An astronaut riding a horse through the desert, photograph, thirty five millimetre film, grain.
A bridge of stone with three arches, built 1874, restored 1962 and 2015, over a mountain stream.
The best picture is the one that shows the thing as it is and not as we would wish it to be.
In the kitchen there is a fire, a pot of soup, a loaf of bread and a cat that is waiting for both.
A glass of water on a white table, the sun behind it, bright colours on the wall, macro photograph.
Three children in yellow raincoats are jumping into a puddle, splashing water, laughing, motion blur.
A map of an island with mountains, rivers, forests, harbours and a dragon in the corner, ink on paper.
The painting shows a woman at a window reading a letter, calm light, deep blue and pale yellow.
A lighthouse in the storm, great waves breaking on the rocks, dark sky, a single beam of light.
Fresh strawberries in a blue bowl, water drops, shallow depth of field, studio lighting, sharp focus.
An owl sitting on a branch in the moonlight, looking straight at the camera with large orange eyes.
A steam engine crosses the valley, smoke drifting over the fields, late afternoon, warm colours.
The clock on the tower strikes twelve; the square is empty, and only a few pigeons walk over the stones.
A knight in silver armour stands before the gate with a lantern in one hand and a sword in the other.
Bright kites over the dunes, strong wind, blue sky with thin clouds, families on blankets in the sand.
The library has tall shelves, ladders, green lamps and a round window through which the moon is seen.
A bicycle leans against a brick wall covered with ivy; somebody has left a basket of lemons on it.
Frozen waterfall in a canyon, tiny climbers with coloured ropes, cold shadows and a strip of warm light.
An abstract composition of circles, squares and triangles, primary colours, thick black outlines.
Grandmother's workshop: wool, needles, buttons in jars, a sewing machine and a sleepy grey kitten.
Elephants crossing a shallow river at sunset, dust in the air, acacia trees, telephoto photograph.
A violin, sheet music and a vase with dried roses, chiaroscuro, brown and golden tones, still life.
The astronomer points her telescope at Jupiter; charts, notebooks and an hourglass lie on the desk.
Underwater view of a coral reef with clownfish, turtles, jellyfish and rays of sunlight from above.
Der kleine Bär läuft über die Brücke; la forêt est très belle en été; el niño está en la montaña.
"""

PROMPTS = [
    "a red fox in the snow, oil painting",
    "A VERY detailed (oil) painting of 3 foxes & 12 owls near Zürich's Große Brücke -- don't forget: the café, "
    "the naïve façade, \"東京タワー\", 北京, 🦊🎨✨!!! In 1874 it was rebuilt; we're told it cost £2,500.75 [approx.]. "
    "Masterpiece, 8K, HDR, ultra-wide, style of an OLD MASTER, dramatic lighting, storm clouds, MOUNTAINS, river, "
    "reflections... and much, much more?! #art @night",
]

SETTINGS = {
    "prompts": PROMPTS,
    "negative_prompt": "",
    "height": 64,
    "width": 96,
    "num_inference_steps": 4,
    "guidance_scale": 5.0,
    "max_sequence_length": 256,
    "weights_stored_as": "float16",
    "computed_in": "float32",
    "lora_rank": RANK,
    "lora_alpha": ALPHA,
}

CLIP_MERGES = 150
T5_PIECES = 500
T5_EXTRA_IDS = 10
SPECIALS = ["<|startoftext|>", "<|endoftext|>"]


def bytes_to_unicode():
    """GPT-2's and CLIP's printable stand-ins for the 256 bytes, in CLIP's order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {b: chr(b) for b in plain}
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + len(table) - len(plain))
    return table


def learn_merges(text, count):
    """Plain byte pair encoding on lower-case words with CLIP's end-of-word mark."""
    table = bytes_to_unicode()
    words = Counter()
    for word in "".join(c if c.isalpha() else " " for c in text.lower()).split():
        symbols = [table[b] for b in word.encode()]
        words[(*symbols[:-1], symbols[-1] + "</w>")] += 1
    merges = []
    while len(merges) < count:
        pairs = Counter()
        for word, times in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({merge_pair(word, best): times for word, times in words.items()})
    return merges


def merge_pair(word, pair):
    merged = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def clip_vocabulary():
    symbols = list(bytes_to_unicode().values())
    merges = learn_merges(CORPUS, CLIP_MERGES)
    pieces = symbols + [s + "</w>" for s in symbols] + ["".join(m) for m in merges] + SPECIALS
    assert len(set(pieces)) == len(pieces)
    return {piece: i for i, piece in enumerate(pieces)}, merges


def write_clip_tokenizer(folder, pad):
    """The files of the published SD3 folders: no tokenizer.json."""
    folder.mkdir(parents=True)
    vocabulary, merges = clip_vocabulary()
    write_json(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2"] + [" ".join(m) for m in merges]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    start, end = SPECIALS
    config = {
        "add_prefix_space": False,
        "bos_token": start,
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "eos_token": end,
        "errors": "replace",
        "model_max_length": 77,
        "pad_token": pad,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": end,
    }
    write_json(folder / "tokenizer_config.json", config)
    specials = {"bos_token": start, "eos_token": end, "pad_token": pad, "unk_token": end}
    write_json(folder / "special_tokens_map.json", specials)
    return CLIPTokenizer.from_pretrained(folder)


def unigram_pieces(text, count):
    """Every character, then the frequent parts of words, with log frequencies.

    The library's trainer is not used: its result differs from run to run. A
    little noise keeps two segmentations from having the same score.
    """
    found = Counter(chr(c) for c in range(33, 127))
    for word in text.split():
        word = "▁" + word
        found.update(word[i:j] for i in range(len(word)) for j in range(i + 1, min(i + 8, len(word)) + 1))
    characters = [p for p in found if len(p) == 1]
    parts = [p for p in found if len(p) > 1]
    parts.sort(key=lambda p: (-found[p] * (len(p) - 1), p))
    kept = characters + parts[: count - len(characters)]
    total = sum(found[p] for p in kept)
    noise = 0.01 * torch.rand(len(kept), generator=generator(6100))
    scored = [(p, round(math.log(found[p] / total) - n, 6)) for p, n in zip(sorted(kept), noise.tolist())]
    return sorted(scored, key=lambda entry: (-entry[1], entry[0]))


def write_t5_tokenizer(folder):
    """A Unigram model in the form of T5's tokenizer.json, without a normaliser."""
    folder.mkdir(parents=True)
    pre = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *unigram_pieces(CORPUS, T5_PIECES)]
    extra = [f"<extra_id_{i}>" for i in reversed(range(T5_EXTRA_IDS))]
    vocabulary += [(name, 0.0) for name in extra]

    tokenizer = Tokenizer(tokenizer_models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", *extra])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    extra = sorted(extra)
    config = {
        "additional_special_tokens": extra,
        "clean_up_tokenization_spaces": True,
        "eos_token": "</s>",
        "extra_ids": T5_EXTRA_IDS,
        "model_max_length": 512,
        "pad_token": "<pad>",
        "tokenizer_class": "T5Tokenizer",
        "unk_token": "<unk>",
    }
    write_json(folder / "tokenizer_config.json", config)
    specials = {"additional_special_tokens": extra, "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_json(folder / "special_tokens_map.json", specials)
    return T5TokenizerFast.from_pretrained(folder)


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def pipeline_clip(vocabulary, hidden, heads, projection, act, seed):
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        max_position_embeddings=77,
        projection_dim=projection,
        hidden_act=act,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    return randomise(CLIPTextModelWithProjection(config), seed)


def pipeline_t5(vocabulary, seed):
    config = T5Config(
        vocab_size=vocabulary,
        d_model=96,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return randomise(T5EncoderModel(config), seed)


def pipeline_transformer(seed):
    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=96,
        caption_projection_dim=64,
        pooled_projection_dim=40,
        out_channels=16,
        pos_embed_max_size=12,
    )
    return randomise(model, seed)


def pipeline_vae(seed):
    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[4, 8, 8, 8],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=2,
        sample_size=64,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    randomise(model, seed)
    with torch.no_grad():
        model.decoder.conv_out.weight.mul_(0.3)  # keeps most of the image inside [0, 1]
    return model


def load_pipeline(folder):
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_pipeline(root):
    """The weights are stored in f16, as the published SD3 folder's are; all is computed in f32."""
    folder = fresh(root / "pipeline")
    tokenizer = write_clip_tokenizer(folder / "tokenizer", pad="<|endoftext|>")
    tokenizer_2 = write_clip_tokenizer(folder / "tokenizer_2", pad="!")
    tokenizer_3 = write_t5_tokenizer(folder / "tokenizer_3")
    kept = fresh(root / ".tokenizers")
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        shutil.copytree(folder / name, kept / name)

    words = len(tokenizer)
    pieces = (len(tokenizer_3) + 15) // 16 * 16  # T5's table, too, is larger than its tokenizer
    pipeline = StableDiffusion3Pipeline(
        transformer=pipeline_transformer(6101),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=pipeline_vae(6102),
        text_encoder=pipeline_clip(words, 32, 4, 24, "quick_gelu", 6103),
        tokenizer=tokenizer,
        text_encoder_2=pipeline_clip(words, 40, 5, 16, "gelu", 6104),
        tokenizer_2=tokenizer_2,
        text_encoder_3=pipeline_t5(pieces, 6105),
        tokenizer_3=tokenizer_3,
    )
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.float16)
    pipeline.save_pretrained(folder)
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):  # the published layout, not the newer library's
        shutil.rmtree(folder / name)
        shutil.copytree(kept / name, folder / name)
    shutil.rmtree(kept)
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer_3"] = ["transformers", "T5TokenizerFast"]
    write_json(folder / "model_index.json", index)

    model = load_transformer(folder / "transformer")
    config = attach_adapter(model, SD3_ATTENTION)
    randomise_adapter(model, 6107)
    save_diffusers_adapter(model, config, folder / "lora.safetensors")

    golden = {"in.latents": randn(generator(6106), 2, 16, 8, 12)}
    golden |= pipeline_results(folder, golden["in.latents"])
    write_golden(folder / "golden.safetensors", golden, "StableDiffusion3Pipeline")
    write_json(folder / "golden.json", SETTINGS)


@torch.no_grad()
def pipeline_results(folder, latents):
    """The negative prompt is the same for every row, so one row of it is kept."""
    pipeline = load_pipeline(folder)
    prompt_embeds, negative, pooled, negative_pooled = pipeline.encode_prompt(
        PROMPTS,
        None,
        None,
        negative_prompt=SETTINGS["negative_prompt"],
        max_sequence_length=SETTINGS["max_sequence_length"],
    )
    out = {
        "out.prompt_embeds": prompt_embeds,
        "out.pooled_prompt_embeds": pooled,
        "out.negative_prompt_embeds": negative[:1],
        "out.negative_pooled_prompt_embeds": negative_pooled[:1],
        "out.latents": sample(pipeline, latents, "latent"),
        "out.image": sample(pipeline, latents, "pt"),
    }
    out["out.sigmas"] = pipeline.scheduler.sigmas.clone()
    out["out.timesteps"] = pipeline.scheduler.timesteps.clone()
    pipeline.load_lora_weights(folder, weight_name="lora.safetensors")
    out["out.image_lora"] = sample(pipeline, latents, "pt")
    return out


def sample(pipeline, latents, output_type):
    keys = ("negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "max_sequence_length")
    settings = {key: SETTINGS[key] for key in keys}
    return pipeline(prompt=PROMPTS, latents=latents.clone(), output_type=output_type, **settings).images


# --------------------------------------------------------------------------
# tokenizers.json: what the pipeline's tokenizers make of difficult texts
# --------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "   ",
    "\t",
    "\n",
    "a",
    "a red fox in the snow, oil painting",
    "  leading and trailing  ",
    "two  spaces   three",
    "tab\tand\nnewline\r\nand return",
    "no-break\u00a0space and\u2003em space and\u200bzero width and \ufeff mark",
    "line\u2028separator and\u3000ideographic space",
    "next\u0085line unit\u001fseparator mongolian\u180espace form\u000cfeed vertical\u000btab",
    "UPPER CASE and MiXeD CaSe",
    "İstanbul ISTANBUL ıI ΣΑΣ ẞß",
    "don't I'll we've you're he'd she's I'm it's",
    "DON'T I'LL WE'VE YOU'RE HE'D SHE'S I'M",
    "don’t use the curly ’s",
    "rock 'n' roll 'tis 'twas ''quoted''",
    "'s 't 're",
    "hello, world!",
    "!!!???...",
    "wait -- what?! (yes) [no] {maybe} <tag> /slash\\ |pipe|",
    "#hashtag @name $5.00 100% a&b c*d e+f g=h ~ ` ^ _under_score_",
    "!",
    "! ! !",
    "1234567890",
    "1874, 2,500.75 and 3rd 4x4 v2.0",
    "½ ² ³ ① Ⅷ ٣ 五",
    "café naïve façade Zürich Größe",
    "cafe\u0301 nai\u0308ve fac\u0327ade Zu\u0308rich Gro\u0308\u00dfe",
    "ÀÉÎÕÜ àéîõü",
    "Å Å A\u030a Ω Ω",
    "ﬁ ﬂ ﬃ ligatures, Ｆｕｌｌ ｗｉｄｔｈ",
    "한국어 한국어 조선",
    "東京タワーと富士山",
    "北京 上海,深圳。",
    "Привет, мир! ПРИВЕТ",
    "Ελληνικά καλημέρα",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "ภาษาไทย",
    "🦊🎨✨",
    "👨‍👩‍👧‍👦 family, 👍🏽 thumb, 🇩🇪 flag, ❤️ heart, ☃",
    "fox🦊fox 🦊 fox",
    "&amp; &lt;b&gt; &quot;x&quot; &#39;y&#39; &nbsp;",
    "<b>bold</b><br/>",
    "<|startoftext|>",
    "<|endoftext|>",
    "a fox <|endoftext|> in the snow",
    "a fox<|ENDOFTEXT|>snow",
    "</s>",
    "a fox </s> in the <pad> snow <unk>",
    "<extra_id_0> fox <extra_id_9>snow",
    "▁ a▁fox ▁▁",
    "http://example.com/a?b=c&d=e#f user@example.com C:\\path\\file.txt",
    "snake_case camelCase kebab-case SCREAMING_CASE",
    "a,b;c:d.e!f?g",
    "(((masterpiece:1.3))), ((best quality)), [blurry]",
    "control\u0001chars\u007f and \u0000 null",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "x" * 300,
    "the " * 100,
    "a red fox in the snow, " * 20,
    "fox " * 74 + "snow",
    "fox " * 75 + "snow",
    "🦊" * 40,
    PROMPTS[1],
    "The quick brown fox jumps over the lazy dog. " * 12 + "END",
]

LENGTHS = {"tokenizer": 77, "tokenizer_2": 77, "tokenizer_3": 256}
TOKENIZER_CLASSES = {"tokenizer": CLIPTokenizer, "tokenizer_2": CLIPTokenizer, "tokenizer_3": T5TokenizerFast}


def token_lists(root):
    """Per tokenizer: length, padding id and, for every text, the ids without the padding at the end."""
    made = {}
    for name, length in LENGTHS.items():
        tokenizer = TOKENIZER_CLASSES[name].from_pretrained(root / "pipeline" / name)
        entries = []
        for text in TEXTS:
            encoded = tokenizer(text, padding="max_length", max_length=length, truncation=True)
            count = sum(encoded.attention_mask)
            ids = encoded.input_ids
            assert len(ids) == length and set(ids[count:]) <= {tokenizer.pad_token_id}
            entries.append(ids[:count])
        made[name] = {"max_length": length, "pad_token_id": tokenizer.pad_token_id, "ids": entries}
    return made


def make_tokenizers(root):
    lists = token_lists(root)
    parts = [f' "texts": [\n{json_lines(TEXTS)}\n ]']
    for name, entry in lists.items():
        head = f'"max_length": {entry["max_length"]}, "pad_token_id": {entry["pad_token_id"]}'
        parts.append(f' "{name}": {{{head}, "ids": [\n{json_lines(entry["ids"])}\n ]}}')
    (root / "tokenizers.json").write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def json_lines(values):
    return ",\n".join("  " + json.dumps(v, separators=(",", ":")) for v in values)


def check_pipeline(root):
    golden = load_file(root / "pipeline/golden.safetensors")
    yield "pipeline", worst(pipeline_results(root / "pipeline", golden["in.latents"]), golden)
    assert json.loads((root / "pipeline/golden.json").read_text(encoding="utf-8")) == SETTINGS

    stored = json.loads((root / "tokenizers.json").read_text(encoding="utf-8"))
    assert stored.pop("texts") == TEXTS
    assert stored == token_lists(root)
    yield "tokenizers.json", 0.0


# --------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------

PARTS = {
    "sd35": make_sd35,
    "sd3_dora": make_sd3_dora,
    "clip_g": make_clip_g,
    "adapters": make_adapters,
    "pipeline": make_pipeline,
    "single": make_single,
    "tokenizers": make_tokenizers,
}

CHECKS = (check_models, check_adapters, check_single, check_pipeline)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--root", type=Path, default=here, help="the folder to fill or check")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="remake only these parts")
    parser.add_argument("--check", action="store_true", help="recompute from the stored files and compare")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    if arguments.check:
        for check in CHECKS:
            for name, value in check(arguments.root):
                print(f"{value:9.2e}  {name}")
        return
    for name in arguments.only or PARTS:
        PARTS[name](arguments.root)
        print(f"made {name}")
    for path in arguments.root.rglob("*.safetensors"):
        path.chmod(0o644)


if __name__ == "__main__":
    main()
