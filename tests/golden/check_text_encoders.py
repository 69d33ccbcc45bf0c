"""Adapters of a model and its text encoders, as hearth trains them, loaded by diffusers: prompts are encoded, and the transformer
computes, as with the trained matrices added by hand.

    pip install torch diffusers transformers peft safetensors
    python check_text_encoders.py path/to/hearth

It trains `sd3/train/encoders.toml` and `flux/train/encoders.toml` and looks at the run's adapter, at its checkpoint, at what
`hearth export` makes of it. The text encoders' part of files for kohya and ComfyUI is compared by the names that these have:
diffusers' converter of kohya's files takes models of the published sizes alone.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
PROMPT = "two boats, a red fox"
SCALE = 8 / 4
TOLERANCE = 1e-5


class Sd3:
    name, pipeline, encoders = "sd3", StableDiffusion3Pipeline, ["text_encoder", "text_encoder_2"]
    base = HERE / "sd3/pipeline"

    @staticmethod
    def outputs(pipeline):
        tokens, _, pooled, _ = pipeline.encode_prompt(PROMPT, None, None, do_classifier_free_guidance=False)
        latents = torch.randn(1, 16, 8, 12, generator=torch.Generator().manual_seed(0))
        velocity = pipeline.transformer(
            hidden_states=latents, timestep=torch.tensor([400.0]), encoder_hidden_states=tokens,
            pooled_projections=pooled).sample
        return {"tokens": tokens, "pooled": pooled, "velocity": velocity}


class Flux:
    name, pipeline, encoders = "flux", FluxPipeline, ["text_encoder"]
    base = HERE / "flux/dev/pipeline"

    @staticmethod
    def outputs(pipeline):
        tokens, pooled, text_ids = pipeline.encode_prompt(PROMPT, None, max_sequence_length=24)
        latents = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(0))
        ids = torch.zeros(24, 3)
        ids[:, 1], ids[:, 2] = torch.arange(24) // 6, torch.arange(24) % 6
        velocity = pipeline.transformer(
            hidden_states=latents, timestep=torch.tensor([0.4]), guidance=torch.tensor([3.5]), encoder_hidden_states=tokens,
            pooled_projections=pooled, img_ids=ids, txt_ids=text_ids).sample
        return {"pooled": pooled, "velocity": velocity}


def loaded(family):
    return family.pipeline.from_pretrained(family.base, torch_dtype=torch.float32)


@torch.no_grad()
def by_diffusers(family, folder, file=None):
    pipeline = loaded(family)
    pipeline.load_lora_weights(str(folder), **({"weight_name": file} if file else {}))
    return family.outputs(pipeline)


@torch.no_grad()
def by_hand(family, file):
    """Adds scale * B * A to each layer."""
    pipeline, tensors = loaded(family), load_file(file)
    stems = {key.split(".lora_")[0] for key in tensors}
    for part in ["transformer", *family.encoders]:
        model = getattr(pipeline, part)
        modules = {name.removeprefix("text_model."): module for name, module in model.named_modules()}
        own = [stem for stem in stems if stem.startswith(f"{part}.")]
        assert own, part
        for stem in own:
            layer = modules[stem.removeprefix(f"{part}.").removeprefix("text_model.")]
            layer.weight += SCALE * tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
    return family.outputs(pipeline)


def apart(got, expected):
    return max(((got[name] - tensor).abs().max() / tensor.abs().max()).item() for name, tensor in expected.items())


# What names of text encoders begin with, and what stands for dots.
PROGRAMS = {
    "kohya": (["lora_te1_", "lora_te2_"], "_"),
    "comfyui": (["text_encoders.clip_l.transformer.", "text_encoders.clip_g.transformer."], "."),
}


def by_names(found, tensors, encoders, starts, separator):
    """How far matrices of text encoders are from those in diffusers' file, where each layer is; there are no others."""
    worst, known = 0.0, set()
    for encoder, start in zip(encoders, starts):
        for key in [key for key in tensors if key.startswith(f"{encoder}.") and ".lora_A." in key]:
            a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
            stem = start + key.removeprefix(f"{encoder}.").removesuffix(".lora_A.weight").replace(".", separator)
            down, up = found[f"{stem}.lora_down.weight"], found[f"{stem}.lora_up.weight"]
            delta, expected = found[f"{stem}.alpha"] / down.shape[0] * up @ down, SCALE * b @ a
            worst = max(worst, ((delta - expected).abs().max() / expected.abs().max()).item())
            known.add(stem)
    others = {key.rsplit(".lora_", 1)[0] for key in found if ".lora_" in key and key.startswith(tuple(starts))} - known
    assert known and not others, others
    return worst


def check(hearth, family, folder):
    base, run, exported = folder / "base", folder / "run", folder / "exported"
    shutil.copytree(family.base, base)
    index = json.loads((base / "model_index.json").read_text())
    (base / "model_index.json").write_text(json.dumps(index | ({"max_sequence_length": 24} if family is Flux else {})))
    job = HERE / family.name / "train/encoders.toml"
    subprocess.run([hearth, "train", job, "--out", run, "--quiet", "--set", f"base.path='{base}'"], check=True)
    formats = [word for name in ["diffusers", "kohya", "comfyui"] for word in ["--format", name]]
    subprocess.run([hearth, "export", run, "--base", base, "--out", exported, "--name", "x", *formats], check=True,
                   stdout=subprocess.DEVNULL)
    file = "pytorch_lora_weights.safetensors"
    expected = by_hand(family, run / "adapter" / file)
    with torch.no_grad():
        plain = family.outputs(loaded(family))
    for name, tensor in expected.items():
        assert apart({name: plain[name]}, {name: tensor}) > 1e-2, f"{family.name}: {name} is that of the base"
    outputs = {
        "the run": by_diffusers(family, run / "adapter", file),
        "its checkpoint": by_diffusers(family, run / "checkpoints/step-000010", file),
        "the export": by_diffusers(family, exported, file),
    }
    for name, got in outputs.items():
        difference = apart(got, expected)
        print(f"{family.name}, {name}: {difference:.1e}")
        assert difference < TOLERANCE, name
    tensors = load_file(run / "adapter" / file)
    for program, (starts, separator) in PROGRAMS.items():
        difference = by_names(load_file(exported / f"x-{program}.safetensors"), tensors, family.encoders, starts, separator)
        print(f"{family.name}, text encoders for {program}: {difference:.1e}")
        assert difference < TOLERANCE, program


def main(hearth):
    for family in [Sd3, Flux]:
        with tempfile.TemporaryDirectory() as folder:
            check(hearth, family, Path(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
