"""Makes what programs other than diffusers have of FLUX.2: the names of `pipeline/`'s transformer in the authors' layout, which
ComfyUI has too (`names.json`: which rows of which tensor each of diffusers' is), those of its VAE (`vae_names.json`), and one adapter
in the layouts of the programs that write adapters of FLUX.2 (`adapters/`), with what diffusers computes with it. diffusers' own
converters must give the same weights. Run `pipelines.py` before. Made with diffusers 0.42.1.

    python files.py
"""

import copy
import json
import sys
from pathlib import Path

import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sd3"))
import importlib.util
own = importlib.util.spec_from_file_location("own", HERE / "generate.py")
generate = importlib.util.module_from_spec(own)
own.loader.exec_module(generate)

TRANSFORMER = HERE / "pipeline/transformer"
RANK, ALPHA = 3, 5.0
IMAGE = [f"transformer_blocks.1.attn.{part}" for part in ["to_q", "to_k", "to_v"]]
LAYERS = IMAGE + ["transformer_blocks.0.attn.add_v_proj", "transformer_blocks.0.attn.to_add_out", "transformer_blocks.0.ff.linear_in",
                  "transformer_blocks.1.ff_context.linear_out", "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
                  "single_transformer_blocks.1.attn.to_out"]
THIRDS = {"attn.to_q": "img_attn.qkv", "attn.to_k": "img_attn.qkv", "attn.to_v": "img_attn.qkv",
          "attn.add_q_proj": "txt_attn.qkv", "attn.add_k_proj": "txt_attn.qkv", "attn.add_v_proj": "txt_attn.qkv"}
INNER = {"attn.norm_q.weight": "norm.query_norm.scale", "attn.norm_k.weight": "norm.key_norm.scale",
         "attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}
DOUBLE = {"attn.norm_q.weight": "img_attn.norm.query_norm.scale", "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
          "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
          "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale", "attn.to_out.0": "img_attn.proj",
          "attn.to_add_out": "txt_attn.proj", "ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2",
          "ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2"}
OUTER = {"x_embedder": "img_in", "context_embedder": "txt_in", "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
         "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer", "modulation_img.linear": "modulation_img.lin",
         "modulation_txt.linear": "modulation_txt.lin", "stream_modulation.linear": "stream_modulation.lin",
         "norm_out.linear": "final_layer.adaLN_modulation.1", "proj_out": "final_layer.linear"}


def original(name):
    """The name in the authors' layout of a layer, or of a tensor."""
    if name.startswith("single_transformer_blocks."):
        _, index, inner = name.split(".", 2)
        for ours, theirs in INNER.items():
            inner = inner.replace(ours, theirs)
        return f"single_blocks.{index}.{inner}"
    if name.startswith("transformer_blocks."):
        _, index, inner = name.split(".", 2)
        for ours, theirs in (THIRDS | DOUBLE).items():
            inner = inner.replace(ours, theirs) if inner.startswith(ours) else inner
        return f"double_blocks.{index}.{inner}"
    for ours, theirs in OUTER.items():
        name = name.replace(ours, theirs)
    return name


def names(weights):
    found = {}
    for part in ["to_q.", "to_k.", "to_v.", "add_q_proj.", "add_k_proj.", "add_v_proj.", ""]:
        for name in sorted(weights):
            is_third = any(f"{third}." in name for third in THIRDS)
            if (part and part in name) or (not part and not is_third):
                found.setdefault(original(name), []).append(name)
    swap = lambda key, tensor: torch.cat(tensor.chunk(2)[::-1]) if "adaLN" in key else tensor
    fused = {key: swap(key, torch.cat([weights[name] for name in parts])) for key, parts in found.items()}
    again = convert_flux2_transformer_checkpoint_to_diffusers(copy.copy(fused))
    assert again.keys() == weights.keys(), again.keys() ^ weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    places = {}
    for key, parts in found.items():
        first = 0
        for name in parts:
            n = len(weights[name])
            half = n // 2
            # Shift and scale are swapped.
            places[name] = [[key, half, n], [key, 0, half]] if "adaLN" in key else [[key, first, first + n]]
            first += n
    return places


def vae_names(weights):
    """As in the authors' autoencoder: of the convolutions beside the two halves each is a part of one."""
    n_levels = 1 + max(int(name.split(".")[2]) for name in weights if "up_blocks" in name)
    found = {}
    for name in weights:
        theirs = name.replace("down_blocks.", "down.").replace("resnets.", "block.").replace("conv_shortcut", "nin_shortcut")
        for ours, new in [("downsamplers.0.", "downsample."), ("upsamplers.0.", "upsample."), ("mid_block.block.0", "mid.block_1"),
                          ("mid_block.block.1", "mid.block_2"), ("mid_block.attentions.0.group_norm", "mid.attn_1.norm"),
                          ("mid_block.attentions.0.to_q", "mid.attn_1.q"), ("mid_block.attentions.0.to_k", "mid.attn_1.k"),
                          ("mid_block.attentions.0.to_v", "mid.attn_1.v"), ("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out"),
                          ("conv_norm_out", "norm_out")]:
            theirs = theirs.replace(ours, new)
        for half, conv in [("encoder", "quant_conv"), ("decoder", "post_quant_conv")]:
            theirs = f"{half}.{theirs}" if theirs.startswith(conv) else theirs
        words = theirs.split(".")
        if "up_blocks" in words:
            words[1:3] = ["up", str(n_levels - 1 - int(words[2]))]
        found[name] = ".".join(words)
    assert len(set(found.values())) == len(weights)
    return found


def named(pairs, prefix, is_flat, down, up, alpha=None):
    tensors = {}
    for layer, (a, b) in pairs.items():
        stem = prefix + (layer.replace(".", "_") if is_flat else layer)
        tensors |= {f"{stem}.{down}": a.clone(), f"{stem}.{up}": b.clone()}
        if alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def as_fused(pairs):
    """q, k and v of a block as one, which share A, as programs have them whose own layers are fused. Of the prompt's three only
    values were trained: the others' rows are zero."""
    fused = {original(layer): pair for layer, pair in pairs.items() if original(layer).rsplit(".", 1)[-1] != "qkv"}
    a, _ = pairs[IMAGE[0]]
    fused[original(IMAGE[0])] = (a, torch.cat([pairs[layer][1] for layer in IMAGE]))
    a, b = pairs["transformer_blocks.0.attn.add_v_proj"]
    fused["double_blocks.0.txt_attn.qkv"] = (a, torch.cat([torch.zeros_like(b), torch.zeros_like(b), b]))
    return fused


def files(pairs):
    whole = {layer: (down, ALPHA / RANK * up) for layer, (down, up) in pairs.items()}
    kohya, peft = ["lora_down.weight", "lora_up.weight"], ["lora_A.weight", "lora_B.weight"]
    return {
        "musubi": named(as_fused(pairs), "lora_unet_", True, *kohya, ALPHA),
        "ai_toolkit": named(as_fused(whole), "diffusion_model.", False, *peft),
        "diffusers": named(whole, "transformer.", False, *peft),
        "peft": named(whole, "base_model.model.", False, *peft),
    }


# diffusers has no converter for these.
NOT_CONVERTED = ["diffusers", "peft"]


def converted(path):
    """The changes of weights by diffusers' converter."""
    state = Flux2KleinPipeline.lora_state_dict(str(path.parent), weight_name=path.name)
    stems = {key.split(".lora_")[0] for key in state}
    delta = lambda stem: state[f"{stem}.lora_B.weight"] @ state[f"{stem}.lora_A.weight"]
    return {stem.removeprefix("transformer."): delta(stem) for stem in stems}


@torch.no_grad()
def main():
    weights = load_file(TRANSFORMER / "diffusion_pytorch_model.safetensors")
    (HERE / "names.json").write_text(json.dumps(names(weights), indent=0) + "\n")
    vae = load_file(HERE / "pipeline/vae/diffusion_pytorch_model.safetensors")
    (HERE / "vae_names.json").write_text(json.dumps(vae_names(vae), indent=0) + "\n")
    out = HERE / "adapters"
    out.mkdir(exist_ok=True)
    model, gen = Flux2Transformer2DModel.from_pretrained(TRANSFORMER, torch_dtype=torch.float32), torch.Generator().manual_seed(79)
    parameters = dict(model.named_parameters())
    randn = lambda *shape: 0.3 * torch.randn(*shape, generator=gen)
    shapes = {layer: parameters[f"{layer}.weight"].shape for layer in LAYERS}
    pairs = {layer: (randn(RANK, width), randn(height, RANK)) for layer, (height, width) in shapes.items()}
    for layer in IMAGE[1:]:
        pairs[layer] = (pairs[IMAGE[0]][0], pairs[layer][1])
    expected = {layer: ALPHA / RANK * up @ down for layer, (down, up) in pairs.items()}
    for name, tensors in files(pairs).items():
        path = out / f"{name}.safetensors"
        save_file(tensors, path)
        path.chmod(0o644)
        if name not in NOT_CONVERTED:
            found = converted(path)
            # Those that were not trained.
            found = {layer: delta for layer, delta in found.items() if layer in expected or delta.any()}
            assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
            worst = max(((found[layer] - expected[layer]).abs().max() / expected[layer].abs().max()).item() for layer in found)
            print(f"{name}: diffusers' converter differs by {worst:.1e}")
            assert worst < 1e-6
    images, n_prompt = [(4, 6)], 9
    inputs = {"hidden_states": randn(1, 24, 16) / 0.3, "timestep": torch.tensor([0.4]),
              "encoder_hidden_states": randn(1, n_prompt, 48) / 0.3}
    ids = dict(img_ids=generate.places(images), txt_ids=Flux2KleinPipeline._prepare_text_ids(inputs["encoder_hidden_states"])[0])
    golden = {f"in.{name}": tensor for name, tensor in inputs.items()}
    golden["in.img_shapes"] = torch.tensor([[1, *size] for size in images], dtype=torch.float32)
    golden["out.sample"] = model(**inputs, **ids, return_dict=False)[0]
    for layer, delta in expected.items():
        parameters[f"{layer}.weight"] += delta
    golden["lora_out.sample"] = model(**inputs, **ids, return_dict=False)[0]
    save_file(golden, out / "golden.safetensors", metadata={"class": "Flux2Transformer2DModel"})
    (out / "golden.safetensors").chmod(0o644)


main()
