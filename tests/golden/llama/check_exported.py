"""Loads with transformers and PEFT what hearth has exported, and compares outputs; run by hand.

    hearth export tests/golden/llama/qwen2/peft --base tests/golden/llama/qwen2 --out /tmp/out
    hearth export tests/golden/llama/qwen2/peft --base tests/golden/llama/qwen2 --merge --out /tmp/merged
    python check_exported.py qwen2 --adapter /tmp/out/peft --merged /tmp/merged
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def compare(what, expected, got):
    print(f"{what:8} {float((expected - got).abs().max() / expected.abs().max()):.1e}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--merged", type=Path)
    arguments = parser.parse_args()
    golden = load_file(HERE / arguments.name / "golden.safetensors")
    ids, expected = golden["in.input_ids"], golden["lora_out.logits"]
    if arguments.adapter:
        model = AutoModelForCausalLM.from_pretrained(HERE / arguments.name, dtype=torch.float32)
        compare("adapter", expected, logits(PeftModel.from_pretrained(model, arguments.adapter), ids))
    if arguments.merged:
        model = AutoModelForCausalLM.from_pretrained(arguments.merged, dtype=torch.float32)
        compare("merged", expected, logits(model, ids))


if __name__ == "__main__":
    main()
