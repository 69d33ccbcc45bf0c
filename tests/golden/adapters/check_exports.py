"""LoHa, LoKr, rsLoRA and norms of language models that hearth trained, in PEFT.

    pip install torch diffusers transformers peft safetensors
    python check_exports.py path/to/hearth

An SD3 and a Llama of a few layers are trained for some steps; the output of the model with the adapter is compared
with that of hearth's own merge (`hearth export --merge`) loaded without an adapter.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from peft import PeftModel
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
# Merged weights are rounded to the format of the base, f16 in that of images.
TOLERANCE = 5e-4
IMAGE_BASE = HERE.parent / "sd3" / "pipeline"
FORMS = {
    "loha": ["adapter.kind=loha", "adapter.rank=3", "adapter.rslora=true"],
    "lokr": ["adapter.kind=lokr", "adapter.rank=2", "adapter.alpha=3"],
    "lokr factor": ["adapter.kind=lokr", "adapter.rank=2", "adapter.factor=4"],
    "lokr both": ["adapter.kind=lokr", "adapter.rank=1", "adapter.decompose_both=true"],
    "lokr full": ["adapter.kind=lokr", "adapter.full_matrix=true", "adapter.factor=4"],
    "rslora": ["adapter.rank=4", "adapter.rslora=true", "output.formats=['peft']"],
}
IMAGE_JOB = """[base]
path = '{base}'
dtype = 'f32'
[data]
images = 'images'
draw = 'neon'
draw_count = 3
resolution = 64
bucket_step = 16
[train]
steps = 4
[optimizer]
learning_rate = 3e-2
[output]
folder = 'run'
formats = ['peft']
"""
BASE_JOB = """[base]
path = 'tiny'
random_init = true
dtype = 'f32'
[text]
path = 'notes.txt'
length = 16
[adapter]
kind = 'full'
[train]
steps = 1
[output]
folder = 'base'
"""
TEXT_JOB = """[base]
path = '{base}'
dtype = 'f32'
[text]
path = 'notes.txt'
length = 16
[train]
steps = 4
[optimizer]
learning_rate = 3e-2
[output]
folder = 'run'
"""


def hearth(*arguments, cwd):
    done = subprocess.run([sys.argv[1], *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"hearth {arguments}: {done.stdout}{done.stderr}")


def apart(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


def image_model(folder):
    return SD3Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32).eval()


@torch.no_grad()
def image_output(model, config):
    gen = torch.Generator().manual_seed(0)
    size = config.sample_size
    latents = torch.randn(1, config.in_channels, size, size, generator=gen)
    prompt = torch.randn(1, 7, config.joint_attention_dim, generator=gen)
    pooled = torch.randn(1, config.pooled_projection_dim, generator=gen)
    return model(hidden_states=latents, encoder_hidden_states=prompt, pooled_projections=pooled,
                 timestep=torch.tensor([400.0])).sample


@torch.no_grad()
def text_output(model):
    return model(torch.arange(12)[None]).logits


def check(what, got, expected, plain):
    difference, change = apart(got, expected), apart(plain, expected)
    print(f"{what:32} differs by {difference:.1e}, the adapter changes {change:.1e}")
    if difference > TOLERANCE or change < 20 * TOLERANCE:
        sys.exit("too far apart, or an adapter without effect")


def trained(folder, job, base, settings):
    (folder / "job.toml").write_text(job.format(base=base))
    sets = [part for setting in settings for part in ("--set", setting)]
    hearth("train", "job.toml", "--quiet", *sets, cwd=folder)
    hearth("export", "run", "--base", base, "--merge", "--out", "merged", cwd=folder)


def check_images(name, settings):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        trained(folder, IMAGE_JOB, IMAGE_BASE, settings)
        config = image_model(IMAGE_BASE).config
        expected = image_output(image_model(folder / "merged"), config)
        plain = image_output(image_model(IMAGE_BASE), config)
        model = PeftModel.from_pretrained(image_model(IMAGE_BASE), folder / "run/adapter/peft")
        check(f"images, {name}, PEFT", image_output(model, config), expected, plain)


def check_texts(name, settings):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        settings = [it for it in settings if "formats" not in it]
        (folder / "notes.txt").write_text("The plan of a fire is written in wood. " * 40)
        (folder / "base.toml").write_text(BASE_JOB)
        hearth("train", "base.toml", "--quiet", cwd=folder)
        base = folder / "base" / "model"
        trained(folder, TEXT_JOB, base, settings)
        load = lambda path: AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
        expected, plain = text_output(load(folder / "merged")), text_output(load(base))
        model = PeftModel.from_pretrained(load(base), folder / "run/adapter/peft")
        check(f"texts, {name}, PEFT", text_output(model), expected, plain)


for form in ("lora", "loha", "lokr"):
    check_texts(f"{form} and norms", [f"adapter.kind={form}", "adapter.train_norm=true"])
for form, keys in FORMS.items():
    check_images(form, keys)
    check_texts(form, keys)
