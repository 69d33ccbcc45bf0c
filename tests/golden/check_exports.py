"""Adapters of Z-Image and FLUX.2 klein between hearth and the programs that read them: diffusers with its own converters for
musubi-tuner's and ComfyUI's files, and PEFT.

    pip install torch diffusers transformers peft safetensors
    python check_exports.py path/to/hearth [z_image] [flux2]

1. What `hearth export` writes is loaded by diffusers and by PEFT: the transformer's output is that of the source.
2. A model that hearth merged is the one that diffusers' `fuse_lora` makes.

`tests/newcomer.py` runs it. Files that other programs write are read in `tests/z_image.rs` and `tests/flux2.rs`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel, ZImagePipeline, ZImageTransformer2DModel
from diffusers.training_utils import _collate_lora_metadata
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from random_adapter import TOLERANCE, add_adapter, apart

HERE = Path(__file__).resolve().parent
# Parts of a pipeline that an export does not read, as other folders have them.
SHARED = {
    "z_image": {"tokenizer": "qwen_image/pipeline/tokenizer", "vae": "flux/dev/pipeline/vae",
                "scheduler": "z_image/base/scheduler"},
    "flux2": {"tokenizer": "qwen_image/pipeline/tokenizer"},
}


# diffusers has no place for them in musubi-tuner's files, which trains none.
MODULATIONS = "modulations of all blocks"


class ZImage:
    name, pipeline, transformer = "z_image", ZImagePipeline, ZImageTransformer2DModel
    blocks = ["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3", "layers.0.adaLN_modulation.0",
              "layers.1.adaLN_modulation.0", "noise_refiner.0.adaLN_modulation.0"]
    sources = {
        "all layers of blocks": blocks,
        "some of q, k and v": ["layers.0.attention.to_q", "noise_refiner.0.attention.to_v"],
        "layers outside of blocks": ["cap_embedder.1", "t_embedder.mlp.0", "all_x_embedder.2-1"],
    }
    # Two layers, two refiners: one of those has no modulation.
    n_matrices = 4 * 7 + 3

    @staticmethod
    def output(transformer):
        gen = torch.Generator().manual_seed(0)
        config = transformer.config
        image = torch.randn(config.in_channels, 1, 8, 12, generator=gen)
        prompt = torch.randn(9, config.cap_feat_dim, generator=gen)
        return transformer([image], torch.tensor([0.6]), [prompt], return_dict=False)[0][0]


class Flux2:
    name, pipeline, transformer = "flux2", Flux2KleinPipeline, Flux2Transformer2DModel
    blocks = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "linear_in",
              "linear_out", "to_qkv_mlp_proj", "single_transformer_blocks.0.attn.to_out",
              "single_transformer_blocks.1.attn.to_out"]
    sources = {
        "all layers of blocks": blocks,
        "some of q, k and v": ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_v_proj"],
        "layers outside of blocks": ["x_embedder", "context_embedder", "proj_out"],
        MODULATIONS: ["double_stream_modulation_txt.linear", "single_stream_modulation.linear"],
    }
    n_matrices = 2 * 12 + 2 * 2

    @staticmethod
    def output(transformer):
        gen = torch.Generator().manual_seed(0)
        config = transformer.config
        randn = lambda *shape: torch.randn(*shape, generator=gen)
        image_ids, text_ids = torch.zeros(1, 24, 4), torch.zeros(1, 9, 4)
        image_ids[0, :, 1], image_ids[0, :, 2] = torch.arange(24) // 6, torch.arange(24) % 6
        text_ids[0, :, 3] = torch.arange(9)
        return transformer(
            hidden_states=randn(1, 24, config.in_channels), encoder_hidden_states=randn(1, 9, config.joint_attention_dim),
            timestep=torch.tensor([0.4]), img_ids=image_ids, txt_ids=text_ids, guidance=None, return_dict=False)[0]


def base_of(family, folder):
    """The pipeline of the reference data, with the parts that other families have too."""
    own = HERE / family.name / "pipeline"
    base = folder / "base"
    base.mkdir()
    for part in own.iterdir():
        (base / part.name).symlink_to(part)
    for name, part in SHARED[family.name].items():
        (base / name).symlink_to(HERE / part)
    parts = {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "tokenizer": ["transformers", "Qwen2Tokenizer"],
             "transformer": ["diffusers", family.transformer.__name__]}
    encoder = "Qwen3Model" if family is ZImage else "Qwen3ForCausalLM"
    vae = "AutoencoderKL" if family is ZImage else "AutoencoderKLFlux2"
    parts |= {"text_encoder": ["transformers", encoder], "vae": ["diffusers", vae]}
    extra = {} if family is ZImage else {"is_distilled": False}
    (base / "model_index.json").write_text(json.dumps({"_class_name": family.pipeline.__name__, **parts, **extra}))
    return base


def model(family, base):
    return family.transformer.from_pretrained(base / "transformer", torch_dtype=torch.float32).eval()


def pipeline(family, base):
    others = dict(scheduler=None, vae=None, text_encoder=None, tokenizer=None)
    return family.pipeline(transformer=model(family, base), **others)


@torch.no_grad()
def by_diffusers(family, base, path):
    loaded = pipeline(family, base)
    loaded.load_lora_weights(path.parent, weight_name=path.name)
    return family.output(loaded.transformer)


def source(family, base, folder, **settings):
    """An adapter with random values, saved by diffusers."""
    transformer = model(family, base)
    add_adapter(transformer, **settings)
    family.pipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(transformer), weight_name="source.safetensors",
        **_collate_lora_metadata({"transformer": transformer}))
    return folder / "source.safetensors"


@torch.no_grad()
def check_exports(hearth, family, base, folder):
    plain = family.output(model(family, base))
    sources = {title: dict(target_modules=targets) for title, targets in family.sources.items()}
    sources["DoRA"] = dict(target_modules=family.blocks, use_dora=True)
    for title, settings in sources.items():
        adapter = source(family, base, folder, **settings)
        expected = by_diffusers(family, base, adapter)
        assert apart(expected, plain) > 1e-2, f"{family.name}, {title}: the adapter does nothing"
        is_dora = settings.get("use_dora")
        formats = ["--format", "diffusers", "--format", "peft"] if is_dora else []
        subprocess.run([hearth, "export", adapter, "--base", base, "--out", folder, "--name", "x", *formats], check=True,
                       stdout=subprocess.DEVNULL)
        outputs = {"diffusers": by_diffusers(family, base, folder / "pytorch_lora_weights.safetensors")}
        if not is_dora:  # diffusers leaves out magnitudes in these
            if title != MODULATIONS:
                outputs["musubi-tuner"] = by_diffusers(family, base, folder / "x-kohya.safetensors")
            outputs["ComfyUI"] = by_diffusers(family, base, folder / "x-comfyui.safetensors")
        outputs["PEFT"] = family.output(PeftModel.from_pretrained(model(family, base), folder / "peft"))
        for name, got in outputs.items():
            difference = apart(got, expected)
            print(f"{family.name}, {title}, file for {name}: {difference:.1e}")
            assert difference < TOLERANCE, name


def check_merged(hearth, family, base, folder):
    """The weights of the merged folder, in bf16 as the base is, are those of `fuse_lora` but for the last rounding."""
    adapter = source(family, base, folder, target_modules=family.blocks)
    merged = folder / "merged"
    subprocess.run([hearth, "export", adapter, "--base", base, "--merge", "--out", merged], check=True,
                   stdout=subprocess.DEVNULL)
    fused = pipeline(family, base)
    fused.load_lora_weights(adapter.parent, weight_name=adapter.name)
    fused.fuse_lora(components=["transformer"])
    fused.unload_lora_weights()
    plain = load_file(next((base / "transformer").glob("*.safetensors")))
    expected, got = fused.transformer.state_dict(), model(family, merged).state_dict()
    assert expected.keys() == got.keys()
    changed = sum(not torch.equal(plain[name].float(), weight) for name, weight in got.items() if weight.dim() > 1)
    assert changed == family.n_matrices, changed
    # bf16 has 8 bits.
    worst = max(((got[name] - expected[name]).abs() / expected[name].abs().clamp_min(1e-3)).max().item()
                for name in expected)
    print(f"{family.name}, merged, {changed} matrices: {worst:.1e} from fuse_lora")
    assert worst < 2**-8


def main(hearth, names):
    for family in [ZImage, Flux2]:
        if names and family.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            base = base_of(family, Path(folder))
            check_exports(hearth, family, base, Path(folder))
            check_merged(hearth, family, base, Path(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
