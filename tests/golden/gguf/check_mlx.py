"""mlx-lm itself loads what hearth writes for it, and gives the logits of PEFT.

    pip install torch transformers peft mlx[cpu] mlx-lm
    python tests/golden/gguf/check_mlx.py target/release/hearth

Made with mlx 0.32.4 and mlx-lm 0.32.2 from PyPI, on a CPU.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model
from peft import PeftModel
from transformers import AutoModelForCausalLM

HEARTH, HERE = Path(sys.argv[1]).resolve(), Path(__file__).resolve().parent
IDS = [5, 9, 33, 17, 40, 8, 21]
# Relative. Chosen: a merged folder keeps the format of the base, bf16, which alone gives up to 1.1e-2.
TOLERANCE = 2e-2


def hearth(*arguments):
    subprocess.run([HEARTH, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def of_mlx(folder, adapter=None):
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)
    if adapter:
        model = load_adapters(model, adapter)
    return torch.tensor(np.array(model(mx.array([IDS])).astype(mx.float32)))[0, -1]


def off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def old_keys(name):
    """A copy with the settings of positions as files have had them before transformers 5; mlx-lm reads no others."""
    folder = Path("bases") / name
    if not folder.exists():
        shutil.copytree(HERE / name, folder)
        config = json.loads((folder / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def check(name, kind):
    base, run = old_keys(name), f"{name}-{kind}"
    hearth("train", "--text", "notes.jsonl", "--base", base, "--out", run, "--quiet", "--steps", 30, "--rank", 4,
           "--batch", 1, "--set", "text.length=32", "--set", "optimizer.learning_rate=0.02", "--set",
           f"adapter.kind={kind}")
    hearth("export", run, "--base", base, "--format", "mlx", "--out", f"{run}-out")
    hearth("export", run, "--base", base, "--merge", "--out", f"{run}-merged")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = model(torch.tensor([IDS])).logits[0, -1].detach()
    adapted = PeftModel.from_pretrained(model, f"{run}/adapter/peft")(torch.tensor([IDS])).logits[0, -1].detach()
    found = [of_mlx(base), of_mlx(base, f"{run}-out/mlx"), of_mlx(f"{run}-merged")]
    offs = [off(a, b) for a, b in zip(found, [plain, adapted, adapted])]
    print(f"{run}: plain {offs[0]:.1e}, with the adapter {offs[1]:.1e}, merged {offs[2]:.1e}")
    assert offs[1] < 1e-4 and offs[2] < TOLERANCE
    assert off(plain, adapted) > 0.1, "the adapter changes nothing"


with tempfile.TemporaryDirectory() as place:
    os.chdir(place)
    Path("notes.jsonl").write_text('{"text": "a plan is a plan is a plan"}\n' * 20)
    for name in ["smollm", "llama", "llama3", "qwen2", "qwen3"]:
        check(name, "lora")
    check("llama", "dora")
