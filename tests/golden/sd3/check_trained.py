"""Loads an adapter that hearth trained on `pipeline` with diffusers and with PEFT, runs the transformer on fixed
inputs, and has hearth compute the same (`hearth verify`), with the file for each program.

    pip install torch diffusers transformers peft safetensors
    python check_trained.py path/to/hearth path/to/run

The run must have been told to write for diffusers, peft, kohya and comfyui. Its checkpoints are loaded too: the last
must give the result, earlier ones must not.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import PeftModel
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5


def inputs():
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    return {
        "hidden_states": randn(2, 16, 8, 12), "timestep": torch.tensor([400.0, 951.5]),
        "encoder_hidden_states": randn(2, 20, 96), "pooled_projections": randn(2, 40),
    }


@torch.no_grad()
def output(transformer):
    return transformer.eval()(**inputs()).sample


def model():
    return SD3Transformer2DModel.from_pretrained(HERE / "pipeline/transformer", torch_dtype=torch.float32)


def by_diffusers(adapter):
    """Of a folder, which may hold files for others too."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(HERE / "pipeline", torch_dtype=torch.float32)
    pipeline.load_lora_weights(adapter)
    return output(pipeline.transformer)


def by_hearth(hearth, path, plain, expected, folder):
    """How far hearth's output with the file at `path` is from the one expected."""
    golden = folder / "golden.safetensors"
    tensors = {f"in.{name}": tensor for name, tensor in inputs().items()}
    save_file(tensors | {"out.sample": plain, "lora_out.sample": expected}, golden)
    command = [hearth, "verify", HERE / "pipeline/transformer", "--golden", golden, "--adapter", path]
    found = subprocess.run([*command, "--dtype", "f32", "--json"], check=False, capture_output=True, text=True)
    assert found.stdout, found.stderr
    tensors = {tensor["name"]: tensor["difference"] for tensor in json.loads(found.stdout)["tensors"]}
    return tensors["lora_out.sample"]


def main(hearth, run):
    adapter = Path(run) / "adapter"
    plain, expected = output(model()), by_diffusers(adapter)
    print(f"what the adapter changes: {apart(plain, expected):.1e}")
    difference = apart(output(PeftModel.from_pretrained(model(), adapter / "peft")), expected)
    print(f"PEFT from diffusers: {difference:.1e}")
    assert difference < TOLERANCE
    *earlier, last = sorted((Path(run) / "checkpoints").iterdir())
    difference = apart(by_diffusers(last), expected)
    print(f"diffusers with {last.name} from the result: {difference:.1e}")
    assert difference == 0
    for checkpoint in earlier:
        difference = apart(by_diffusers(checkpoint), expected)
        print(f"diffusers with {checkpoint.name} from the result: {difference:.1e}")
        assert difference > TOLERANCE, "it should have learnt since"
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(adapter.glob("*.safetensors")) + [adapter / "peft"]
        for path in files:
            difference = by_hearth(hearth, path, plain, expected, Path(folder))
            print(f"hearth with {path.name} from diffusers: {difference:.1e}")
            assert difference < TOLERANCE


def apart(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


main(*sys.argv[1:])
