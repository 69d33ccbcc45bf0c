"""llama.cpp itself loads the LoRA that hearth writes as a GGUF file, and gives the logits of PEFT.

    pip install torch transformers peft llama-cpp-python
    python tests/golden/gguf/check_lora.py target/release/hearth
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import llama_cpp
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

HEARTH, HERE = Path(sys.argv[1]).resolve(), Path(__file__).resolve().parent
IDS = [5, 9, 33, 17, 40, 8, 21]
# Relative, of the last token's logits. Chosen: llama.cpp's KV cache is f16, which alone gives 3e-4.
TOLERANCE = 5e-3


def hearth(*arguments):
    subprocess.run([HEARTH, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def logits(model):
    return model(torch.tensor([IDS])).logits[0, -1].detach()


def off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def check(name):
    base = HERE / name
    hearth("convert", base, "--out", f"{name}.gguf", "--dtype", "f32")
    hearth("train", "--text", "notes.jsonl", "--base", base, "--out", name, "--quiet", "--steps", 30, "--rank", 4,
           "--batch", 1, "--set", "text.length=32", "--set", "optimizer.learning_rate=0.02")
    hearth("export", name, "--base", base, "--out", f"{name}-lora.gguf")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = logits(model)
    adapted = logits(PeftModel.from_pretrained(model, f"{name}/adapter/peft"))
    for lora, expected in [(None, plain), (f"{name}-lora.gguf", adapted)]:
        llama = llama_cpp.Llama(f"{name}.gguf", n_ctx=64, logits_all=True, verbose=False, lora_path=lora)
        llama.eval(IDS)
        found = torch.tensor(llama.scores[len(IDS) - 1][: len(expected)])
        print(f"{name}, {'with' if lora else 'without'} LoRA: {off(found, expected):.1e}")
        assert off(found, expected) < TOLERANCE
    assert off(plain, adapted) > 0.1, "the LoRA changes nothing"


with tempfile.TemporaryDirectory() as place:
    os.chdir(place)
    Path("notes.jsonl").write_text('{"text": "a plan is a plan is a plan"}\n' * 20)
    for name in ["smollm", "llama", "llama3", "qwen2", "qwen3"]:
        check(name)
