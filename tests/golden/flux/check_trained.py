"""Loads what hearth trained on a FLUX.1 folder with diffusers and PEFT, runs the transformer on fixed inputs, and has hearth
compute the same (`hearth verify`).

    pip install torch diffusers transformers peft safetensors
    python check_trained.py path/to/hearth path/to/base path/to/run

The run has trained an adapter, with files for diffusers, peft, kohya and comfyui, or all weights.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import FluxPipeline
from peft import PeftModel
from safetensors.torch import save_file

from check_exports import TOLERANCE, apart, inputs, model, output


def by_hearth(hearth, transformer, adapter, plain, expected):
    """How far hearth's output is from the one expected."""
    given = {f"in.{name}": value for name, value in inputs(model(transformer.parent).config).items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        golden = Path(folder) / "golden.safetensors"
        save_file(given | {"out.sample": plain} | ({"lora_out.sample": expected} if adapter else {}), golden)
        command = [hearth, "verify", transformer, "--golden", golden, "--dtype", "f32", "--json"]
        found = subprocess.run([*command, *(["--adapter", adapter] if adapter else [])], check=False,
                               capture_output=True, text=True)
    assert found.stdout, found.stderr
    return max(tensor["difference"] for tensor in json.loads(found.stdout)["tensors"])


def report(what, difference):
    print(f"{what}: {difference:.1e}")
    assert difference < TOLERANCE


def check_adapter(hearth, base, adapter):
    plain = output(model(base))
    pipeline = FluxPipeline.from_pretrained(base, torch_dtype=torch.float32)
    pipeline.load_lora_weights(adapter, weight_name="pytorch_lora_weights.safetensors")
    expected = output(pipeline.transformer)
    print(f"what the adapter changes: {apart(plain, expected):.1e}")
    report("PEFT from diffusers", apart(output(PeftModel.from_pretrained(model(base), adapter / "peft")), expected))
    for path in sorted(adapter.glob("*.safetensors")) + [adapter / "peft"]:
        report(f"hearth with {path.name}", by_hearth(hearth, base / "transformer", path, plain, expected))


def check_model(hearth, base, folder):
    pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    plain, trained = output(model(base)), output(pipeline.transformer)
    print(f"what training changed: {apart(plain, trained):.1e}")
    report("hearth from diffusers", by_hearth(hearth, folder / "transformer", None, trained, None))


def main(hearth, base, run):
    base, run = Path(base), Path(run)
    if (run / "model").is_dir():
        return check_model(hearth, base, run / "model")
    check_adapter(hearth, base, run / "adapter")


main(*sys.argv[1:])
