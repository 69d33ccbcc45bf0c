"""Adapters of FLUX.1 between hearth and the programs that read and write them: diffusers with its own converters for
kohya's and ComfyUI's files, and PEFT.

    pip install torch diffusers transformers peft safetensors
    python check_exports.py path/to/hearth [dev] [schnell]

1. What `hearth export` writes is loaded by diffusers and by PEFT: the transformer's output is that of the source.
2. A model that hearth merged is the one that diffusers' `fuse_lora` makes.

`tests/newcomer.py` runs it for one of the two. Files that other programs write are read in `tests/flux.rs`.
"""

import inspect
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders import lora_conversion_utils, lora_pipeline
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from random_adapter import TOLERANCE, add_adapter, apart

# Layers within a block, and some that other programs fuse with layers that have no adapter.
BLOCKS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff.net.0.proj",
          "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "norm1.linear", "norm1_context.linear",
          "proj_mlp", "norm.linear", "0.proj_out", "1.proj_out"]
SOME = ["transformer_blocks.0.attn.to_q", "0.attn.add_v_proj", "single_transformer_blocks.1.attn.to_k",
        "single_transformer_blocks.0.proj_mlp"]
CONVERTER = inspect.getsource(lora_conversion_utils._convert_kohya_flux_lora_to_diffusers)
SOURCES = {
    "all layers of blocks": dict(target_modules=BLOCKS),
    "some of q, k and v": dict(target_modules=SOME),
    "DoRA": dict(target_modules=BLOCKS, use_dora=True),
}


def model(base):
    return FluxTransformer2DModel.from_pretrained(base / "transformer", torch_dtype=torch.float32).eval()


def inputs(config):
    gen = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=gen)
    ids = torch.zeros(24, 3)
    ids[:, 1], ids[:, 2] = torch.arange(24) // 6, torch.arange(24) % 6
    return dict(
        hidden_states=randn(1, 24, config.in_channels), encoder_hidden_states=randn(1, 20, config.joint_attention_dim),
        pooled_projections=randn(1, config.pooled_projection_dim), timestep=torch.tensor([0.4]), img_ids=ids,
        txt_ids=torch.zeros(20, 3), guidance=torch.tensor([3.5]) if config.guidance_embeds else None)


@torch.no_grad()
def output(transformer):
    return transformer(**inputs(transformer.config)).sample


def source(base, folder, **settings):
    """An adapter with random values, saved by diffusers."""
    transformer = model(base)
    gen = add_adapter(transformer, **settings)
    clip = {} if settings.get("use_dora") else clip_layers(base, gen)
    names = sorted({name.split(".lora_")[0] for name in clip})
    metadata = LoraConfig(r=4, lora_alpha=6, target_modules=names).to_dict() | {"target_modules": names}
    FluxPipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(transformer), weight_name="source.safetensors",
        text_encoder_lora_layers=clip, text_encoder_lora_adapter_metadata=metadata if clip else None,
        **_collate_lora_metadata({"transformer": transformer}))
    return folder / "source.safetensors"


def clip_layers(base, gen):
    """By the names of newer transformers, which leave out `text_model.`. With `out_proj`, by which diffusers tells
    kohya's layers."""
    weights = load_file(base / "text_encoder/model.safetensors")
    layers = {}
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "out_proj.weight", "fc1.weight")):
            stem = name.removeprefix("text_model.").removesuffix(".weight")
            layers[f"{stem}.lora_A.weight"] = 0.2 * torch.randn(4, weight.shape[1], generator=gen)
            layers[f"{stem}.lora_B.weight"] = 0.2 * torch.randn(weight.shape[0], 4, generator=gen)
    return layers


def fit_converter(width):
    """diffusers' converter has the published model's widths in its code: puts ours there."""
    published = "dims=[3072, 3072, 3072, 12288]"
    assert published in CONVERTER, "diffusers' converter is another one now"
    scope = dict(vars(lora_conversion_utils))
    exec(CONVERTER.replace(published, f"dims={[width] * 3 + [4 * width]}"), scope)
    lora_pipeline._convert_kohya_flux_lora_to_diffusers = scope["_convert_kohya_flux_lora_to_diffusers"]


def by_diffusers(base, path):
    """The outputs of the transformer and of CLIP, one after the other."""
    pipeline = FluxPipeline.from_pretrained(base, torch_dtype=torch.float32, vae=None, text_encoder_2=None)
    pipeline.load_lora_weights(path.parent, weight_name=path.name)
    with torch.no_grad():
        encoded = pipeline.text_encoder(torch.arange(1, 21)[None]).last_hidden_state
    return torch.cat([output(pipeline.transformer).flatten(), encoded.flatten()])


def check_exports(hearth, base, folder):
    for title, settings in SOURCES.items():
        adapter = source(base, folder, **settings)
        expected = by_diffusers(base, adapter)
        subprocess.run([hearth, "export", adapter, "--base", base, "--out", folder, "--name", "x"], check=True,
                       stdout=subprocess.DEVNULL)
        outputs = {"diffusers": by_diffusers(base, folder / "pytorch_lora_weights.safetensors")}
        if not settings.get("use_dora"):  # diffusers leaves out magnitudes in these
            outputs["kohya"] = by_diffusers(base, folder / "x-kohya.safetensors")
            outputs["ComfyUI"] = by_diffusers(base, folder / "x-comfyui.safetensors")
        outputs["PEFT"] = output(PeftModel.from_pretrained(model(base), folder / "peft")).flatten()
        expected_of = {"PEFT": expected[: outputs["PEFT"].numel()]}
        plain = output(model(base)).flatten()
        assert apart(expected[: plain.numel()], plain) > 1e-2, "the adapter does nothing"
        for name, got in outputs.items():
            difference = apart(got, expected_of.get(name, expected))
            print(f"{base.parent.name}, {title}, file for {name}: {difference:.1e}")
            assert difference < TOLERANCE, name


def check_merged(hearth, base, folder):
    """The weights of the merged folder, in bf16 as the base is, are those of `fuse_lora` but for the last rounding."""
    adapter = source(base, folder, **SOURCES["all layers of blocks"])
    merged = folder / "merged"
    subprocess.run([hearth, "export", adapter, "--base", base, "--merge", "--out", merged], check=True,
                   stdout=subprocess.DEVNULL)
    pipeline = FluxPipeline.from_pretrained(base, torch_dtype=torch.float32, vae=None, text_encoder_2=None)
    pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name)
    pipeline.fuse_lora(components=["transformer", "text_encoder"])
    pipeline.unload_lora_weights()
    again = FluxPipeline.from_pretrained(merged, torch_dtype=torch.float32, vae=None, text_encoder_2=None)
    for part in ["transformer", "text_encoder"]:
        plain = load_file(next((base / part).glob("*.safetensors")))
        expected, got = getattr(pipeline, part).state_dict(), getattr(again, part).state_dict()
        assert expected.keys() == got.keys()
        changed = sum(not torch.equal(plain.get(name, plain.get(f"text_model.{name}")).float(), weight)
                      for name, weight in got.items() if weight.dim() > 1)
        assert changed > 3, changed
        # bf16 has 8 bits.
        worst = max(((got[name] - expected[name]).abs() / expected[name].abs().clamp_min(1e-3)).max().item()
                    for name in expected if expected[name].is_floating_point())
        print(f"{base.parent.name}, merged {part}, {changed} matrices: {worst:.1e} from fuse_lora")
        assert worst < 2**-8, part


def main(hearth, *variants):
    for variant in variants or ["dev", "schnell"]:
        base = HERE / variant / "pipeline"
        config = model(base).config
        fit_converter(config.num_attention_heads * config.attention_head_dim)
        with tempfile.TemporaryDirectory() as folder:
            check_exports(hearth, base, Path(folder))
            check_merged(hearth, base, Path(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
