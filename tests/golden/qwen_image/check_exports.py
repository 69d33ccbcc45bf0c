"""Adapters of Qwen-Image between hearth and the programs that read and write them: diffusers with its own converters for
kohya's and ComfyUI's files, and PEFT.

    pip install torch diffusers transformers peft safetensors
    python check_exports.py path/to/hearth

1. What `hearth export` writes is loaded by diffusers and by PEFT: the transformer's output is that of the source.
2. A model that hearth merged is the one that diffusers' `fuse_lora` makes.

Files that other programs write are read in `tests/qwen_image.rs`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.training_utils import _collate_lora_metadata
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from random_adapter import TOLERANCE, add_adapter, apart

BASE = HERE / "pipeline"
BLOCKS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "img_mlp.net.0.proj",
          "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2", "img_mod.1", "txt_mod.1"]
SOURCES = {
    "all layers of blocks": dict(target_modules=BLOCKS),
    "layers outside of blocks": dict(target_modules=["img_in", "txt_in", "proj_out", "norm_out.linear"]),
    "DoRA": dict(target_modules=BLOCKS, use_dora=True),
}


def model(base=BASE):
    return QwenImageTransformer2DModel.from_pretrained(base / "transformer", torch_dtype=torch.float32).eval()


def inputs(config):
    gen = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=gen)
    return dict(hidden_states=randn(1, 24, config.in_channels),
                encoder_hidden_states=randn(1, 9, config.joint_attention_dim), timestep=torch.tensor([0.4]))


@torch.no_grad()
def output(transformer):
    return transformer(**inputs(transformer.config), img_shapes=[[(1, 4, 6)]]).sample


def source(folder, **settings):
    """An adapter with random values, saved by diffusers."""
    transformer = model()
    add_adapter(transformer, **settings)
    QwenImagePipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(transformer), weight_name="source.safetensors",
        **_collate_lora_metadata({"transformer": transformer}))
    return folder / "source.safetensors"


def pipeline(base=BASE):
    return QwenImagePipeline.from_pretrained(base, torch_dtype=torch.float32, vae=None, text_encoder=None)


def by_diffusers(path):
    loaded = pipeline()
    loaded.load_lora_weights(path.parent, weight_name=path.name)
    return output(loaded.transformer)


def check_exports(hearth, folder):
    for title, settings in SOURCES.items():
        adapter = source(folder, **settings)
        expected = by_diffusers(adapter)
        assert apart(expected, output(model())) > 1e-2, "the adapter does nothing"
        is_dora = settings.get("use_dora")
        formats = ["--format", "diffusers", "--format", "peft"] if is_dora else []
        subprocess.run([hearth, "export", adapter, "--base", BASE, "--out", folder, "--name", "x", *formats], check=True,
                       stdout=subprocess.DEVNULL)
        outputs = {"diffusers": by_diffusers(folder / "pytorch_lora_weights.safetensors")}
        if not is_dora:  # diffusers leaves out magnitudes in these
            outputs["kohya"] = by_diffusers(folder / "x-kohya.safetensors")
            outputs["ComfyUI"] = by_diffusers(folder / "x-comfyui.safetensors")
        outputs["PEFT"] = output(PeftModel.from_pretrained(model(), folder / "peft"))
        for name, got in outputs.items():
            difference = apart(got, expected)
            print(f"{title}, file for {name}: {difference:.1e}")
            assert difference < TOLERANCE, name


def check_merged(hearth, folder):
    """The weights of the merged folder, in bf16 as the base is, are those of `fuse_lora` but for the last rounding."""
    adapter = source(folder, **SOURCES["all layers of blocks"])
    merged = folder / "merged"
    subprocess.run([hearth, "export", adapter, "--base", BASE, "--merge", "--out", merged], check=True,
                   stdout=subprocess.DEVNULL)
    fused = pipeline()
    fused.load_lora_weights(adapter.parent, weight_name=adapter.name)
    fused.fuse_lora(components=["transformer"])
    fused.unload_lora_weights()
    plain = load_file(next((BASE / "transformer").glob("*.safetensors")))
    expected, got = fused.transformer.state_dict(), pipeline(merged).transformer.state_dict()
    assert expected.keys() == got.keys()
    changed = sum(not torch.equal(plain[name].float(), weight) for name, weight in got.items() if weight.dim() > 1)
    assert changed == 28, changed
    # bf16 has 8 bits.
    worst = max(((got[name] - expected[name]).abs() / expected[name].abs().clamp_min(1e-3)).max().item()
                for name in expected)
    print(f"merged, {changed} matrices: {worst:.1e} from fuse_lora")
    assert worst < 2**-8


def main(hearth):
    with tempfile.TemporaryDirectory() as folder:
        check_exports(hearth, Path(folder))
        check_merged(hearth, Path(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
