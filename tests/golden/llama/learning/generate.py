"""Trains a tiny language model in a plain PyTorch loop, and records what hearth is compared with.

    python generate.py          with torch 2.15 and transformers 5.22.2 from PyPI, on a CPU in f32

model/         config.json and model.safetensors: random weights to begin with, one token per byte
texts.jsonl    four documents that fill a sequence each, with the token that ends a text
full.txt       step and loss, all weights trained
"""
import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

HERE, STEPS, LENGTH, END = Path(__file__).parent, 50, 64, 256
TEXTS = [
    "the fire is warm and the room is quiet, and nobody counts hours",
    "a plan that fits is a promise, and a promise is kept by rehears",
    "seven small steps are taken before the kettle on the stove sing",
    "what was learnt by night is written down, and read again by day",
]


def losses(model):
    ids = torch.tensor([list(text.encode()) + [END] for text in TEXTS])
    assert ids.shape == (4, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step, loss.item()


def main():
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    (HERE / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = LlamaConfig(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float()
    shutil.rmtree(HERE / "model", ignore_errors=True)
    model.save_pretrained(HERE / "model")
    (HERE / "full.txt").write_text("".join(f"{step} {loss:.8f}\n" for step, loss in losses(model)))


main()
