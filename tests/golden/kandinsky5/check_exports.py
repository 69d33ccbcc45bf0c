"""Adapters of Kandinsky 5 between hearth and the programs that read them: diffusers and PEFT.

    pip install torch diffusers transformers peft safetensors pillow
    python check_exports.py path/to/hearth

1. What `hearth export` writes is loaded by diffusers and by PEFT: the transformer's output is that of the source.
2. The names in files for kohya's programs and for ComfyUI are those that these read.
3. An adapter that hearth trains gives the same image with diffusers as with hearth.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import Kandinsky5T2IPipeline, Kandinsky5Transformer3DModel
from diffusers.training_utils import _collate_lora_metadata
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import pipelines

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from random_adapter import TOLERANCE, add_adapter, apart

MODEL = HERE / "pipeline"
ATTENTION = ["to_query", "to_key", "to_value", "self_attention.out_layer", "cross_attention.out_layer"]
SOURCES = {
    "attention": dict(target_modules=ATTENTION),
    "all layers of blocks": dict(target_modules=ATTENTION + ["feed_forward.in_layer", "feed_forward.out_layer"]),
    "DoRA": dict(target_modules=ATTENTION, use_dora=True),
}


def model():
    return Kandinsky5Transformer3DModel.from_pretrained(MODEL / "transformer", torch_dtype=torch.float32).eval()


@torch.no_grad()
def output(transformer):
    gen = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=gen)
    return transformer(
        randn(1, 1, 8, 12, 16), randn(1, 9, 32), torch.tensor([400.0]), randn(1, 32),
        visual_rope_pos=[torch.arange(n) for n in (1, 4, 6)], text_rope_pos=torch.arange(9)).sample


def source(folder, **settings):
    """An adapter with random values, saved by diffusers."""
    transformer = model()
    add_adapter(transformer, **settings)
    Kandinsky5T2IPipeline.save_lora_weights(
        folder, transformer_lora_layers=get_peft_model_state_dict(transformer), weight_name="source.safetensors",
        **_collate_lora_metadata({"transformer": transformer}))
    return folder / "source.safetensors"


def by_diffusers(path):
    loaded = pipelines.load(MODEL)
    loaded.load_lora_weights(path.parent, weight_name=path.name)
    return output(loaded.transformer)


def check_exports(hearth, base, folder):
    for title, settings in SOURCES.items():
        adapter = source(folder, **settings)
        expected = by_diffusers(adapter)
        assert apart(expected, output(model())) > 1e-2, "the adapter does nothing"
        subprocess.run([hearth, "export", adapter, "--base", base, "--out", folder, "--name", "x"], check=True,
                       stdout=subprocess.DEVNULL)
        outputs = {"diffusers": by_diffusers(folder / "pytorch_lora_weights.safetensors"),
                   "PEFT": output(PeftModel.from_pretrained(model(), folder / "peft"))}
        for name, got in outputs.items():
            difference = apart(got, expected)
            print(f"{title}, file for {name}: {difference:.1e}")
            assert difference < TOLERANCE, name
        check_names(folder)


def check_names(folder):
    with safe_open(folder / "x-kohya.safetensors", "pt") as kohya:
        metadata, names = kohya.metadata(), list(kohya.keys())
    assert all(name.startswith("lora_unet_text_transformer_blocks_0_") or
               name.startswith("lora_unet_visual_transformer_blocks_") for name in names), names
    assert metadata["ss_network_module"] == "networks.lora_kandinsky", metadata
    assert metadata["modelspec.architecture"] == "Kandinsky-5/lora", metadata
    prefix = "diffusion_model."
    layers = {name.removeprefix(prefix).split(".lora_")[0] for name in load_file(folder / "x-comfyui.safetensors")
              if not name.endswith((".alpha", ".dora_scale"))}
    known = {name for name, _ in model().named_modules()}
    assert layers <= known, layers - known


def check_trained(hearth, base, folder):
    """Both draw from the same noise with the adapter of a short run."""
    images, run = folder / "images", folder / "run"
    images.mkdir()
    for index in range(2):
        Image.new("RGB", (64, 64), (80 * index, 120, 200)).save(images / f"{index}.png")
        (images / f"{index}.txt").write_text("a plain image")
    job = ["--set", "base.dtype=f32", "--set", "data.resolution=64", "--set", "optimizer.learning_rate=0.05",
           "--set", "base.implementation=diffusers"]
    subprocess.run([hearth, "train", "--images", images, "--base", base, "--out", run, "--quiet", "--steps", "4", *job],
                   check=True)
    adapter = next(run.rglob("pytorch_lora_weights.safetensors"))
    golden, prompt = HERE / "diffusers/golden.safetensors", pipelines.PROMPTS[0]
    width, height = pipelines.SIZE
    subprocess.run([hearth, "sample", "--base", base, "--adapter", adapter, "--prompt", prompt, "--dtype", "f32", "--size",
                    f"{width}x{height}", "--steps", str(pipelines.STEPS), "--latents", golden, "--implementation",
                    "diffusers", "--out", folder / "ours.png"], check=True, stdout=subprocess.DEVNULL)
    pipelines.generate.without_rounding()
    loaded = pipelines.load(MODEL)
    latents = load_file(golden)["in.latents"][0].permute(1, 2, 0)[None, None].contiguous()
    settings = dict(prompt=prompt, negative_prompt="", guidance_scale=3.5, width=width, height=height,
                    num_inference_steps=pipelines.STEPS, output_type="np")
    plain = loaded(latents=latents.clone(), **settings).image[0]
    loaded.load_lora_weights(adapter.parent, weight_name=adapter.name)
    theirs = loaded(latents=latents.clone(), **settings).image[0]
    ours = np.asarray(Image.open(folder / "ours.png").convert("RGB")) / 255
    print(f"trained: image {np.abs(ours - theirs).max() * 255:.2f} of 255 from diffusers', "
          f"the adapter changes it by {np.abs(plain - theirs).max() * 255:.1f}")
    assert np.abs(ours - theirs).max() * 255 < 0.51 and np.abs(plain - theirs).max() * 255 > 2


def main(hearth):
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        base.mkdir()
        for name in pipelines.PARTS:
            shutil.copytree(pipelines.part(name), base / name)
        for name in ["transformer", "scheduler"]:
            shutil.copytree(MODEL / name, base / name)
        shutil.copy(MODEL / "model_index.json", base)
        check_exports(hearth, base, Path(folder))
        check_trained(hearth, base, Path(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
