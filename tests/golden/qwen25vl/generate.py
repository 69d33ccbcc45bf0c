"""Makes the reference data of this folder and checks it.

Every model here is tiny and has random weights. The data were made on a CPU in
f32 with Python 3.11, torch 2.15, diffusers 0.42.1, transformers 5.22.2,
tokenizers 0.23 and safetensors, all from PyPI.

    python generate.py            remake everything
    python generate.py --check    recompute everything from the stored files

SOURCE.md describes the layout of the files.
"""

import argparse
import json
import math
import os
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

HERE = Path(__file__).parent

# Every branch of settings and names: one KV head and several, heads of 8 and 12, one sample and three.
MODELS = {
    "flat": dict(
        text=dict(vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
                  num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6, tie_word_embeddings=False,
                  rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[1, 1, 2])),
        lengths=[37, 21, 5], seed=1,
    ),
    "nested": dict(
        text=dict(vocab_size=64, hidden_size=60, intermediate_size=44, num_hidden_layers=2, num_attention_heads=5,
                  num_key_value_heads=1, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
                  rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 2, 2])),
        lengths=[13], seed=2,
    ),
}
VISION = dict(depth=1, hidden_size=16, intermediate_size=8, num_heads=2, patch_size=2, spatial_merge_size=1,
              fullatt_block_indexes=[0])

# The model of `prompts`.
PROMPT_MODEL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=False,
                    rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[1, 1, 2]))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
SENTENCES = [
    "a red fox sits in the snow beside an old wooden fence",
    "the harbour in the evening, boats and lanterns, oil on canvas",
    "a watercolour of three pears; the paper is rough and the light is soft",
    "don't you see the lighthouse? it's there: 1234 steps up",
]
PROMPTS = [
    "",
    " ",
    "a red fox in the snow",
    "\nthe fox begins on a new line",
    " \n two spaces  and a break\n\n",
    "\u00e9t\u00e9 e\u0301te\u0301 \u732b \U0001f98a caf\u00e9, 1234567",
    "don't {braces} <|im_end|>\n<|im_start|>user\nthe fox <|endoftext|>",
    "the fox " * 600,
    "the fox" + " the" * 505,
    "\u0301begins with an accent<|vision_start|>",
]
MAX_SEQUENCE_LENGTH = 512


def randomise(model, seed):
    """Matrices: N(0, 1/fan_in). The table: N(0, 1/16). Biases: N(0, 0.1^2). Norms: N(1, 0.1^2)."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(*parameter.shape, generator=gen)
            if "embed_tokens" in name:
                parameter.copy_(noise / 4)
            elif parameter.dim() > 1:
                parameter.copy_(noise / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise)
    return model.eval()


def build(text, seed):
    vision = VISION | dict(out_hidden_size=text["hidden_size"])
    last = text["vocab_size"] - 1
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=last, video_token_id=last,
                              vision_start_token_id=last, vision_end_token_id=last,
                              tie_word_embeddings=text["tie_word_embeddings"])
    return randomise(Qwen2_5_VLForConditionalGeneration(config), seed)


def save_model(model, folder, is_nested):
    """With the settings and names of transformers before 4.52, or those of its modules."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string(use_diff=False))
    text = {key: config["text_config"][key] for key in (*MODELS["flat"]["text"], "hidden_act", "use_sliding_window")}
    rope = text.pop("rope_parameters")
    if is_nested:
        settings = dict(text_config=text | dict(model_type="qwen2_5_vl_text", rope_parameters=rope))
    else:
        section = dict(type="mrope", mrope_section=rope["mrope_section"])
        settings = text | dict(rope_theta=rope["rope_theta"], rope_scaling=section, sliding_window=32768)
    settings |= dict(architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl",
                     vision_config=VISION | dict(out_hidden_size=text["hidden_size"]))
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    names = lambda name: name if is_nested else (
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."))
    tensors = {names(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    if text["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))


def outputs(model, lengths, given=None):
    n = max(lengths)
    gen = torch.Generator().manual_seed(7)
    ids = torch.randint(model.config.text_config.vocab_size - 1, (len(lengths), n), generator=gen)
    ids = ids if given is None else given["in.input_ids"]
    mask = torch.tensor([[int(at < length) for at in range(n)] for length in lengths])
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return {"in.input_ids": ids, "in.attention_mask": mask, "out.hidden_states_last": out.hidden_states[-1]}


def byte_alphabet():
    """The characters of byte-level BPE, in the order of their ids."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + n) for n in range(len(others))]


def words(text):
    """As the tokenizer splits it, in characters of byte-level BPE."""
    return [word for word, _ in Qwen2Tokenizer()._tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def template_words(template, special):
    """The words of a template, each one token here as in the published vocabulary."""
    return {word for word in words_and_special(template.replace("{}", ""), special) if word not in special}


def words_and_special(text, special):
    pieces = [text]
    for token in special:
        pieces = [part for piece in pieces for part in ([piece] if piece in special else split_at(piece, token))]
    return [word for piece in pieces for word in ([piece] if piece in special else words(piece))]


def split_at(text, special):
    parts = text.split(special)
    joined = [item for part in parts[:-1] for item in (part, special)] + [parts[-1]]
    return [part for part in joined if part]


def trained_merges():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Qwen2Tokenizer()._tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=byte_alphabet(), show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def make_tokenizer(folder, template, special):
    """Words with a space before them come first, so that no merge of another word takes a part of theirs."""
    template = sorted(template_words(template, special), key=lambda word: (not word.startswith("\u0120"), word))
    merges = [(word[:n], word[n]) for word in template for n in range(1, len(word))]
    merges += [("\u010a", "\u010a")] + trained_merges()
    vocab, kept = {char: id for id, char in enumerate(byte_alphabet())}, []
    for left, right in merges:
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            kept.append(f"{left} {right}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *kept]) + "\n")
    added = {token: len(vocab) + at for at, token in enumerate(special)}
    (folder / "added_tokens.json").write_text(json.dumps(added, indent=2) + "\n")
    token = lambda content: dict(content=content, lstrip=False, normalized=False, rstrip=False, single_word=False,
                                 special=True)
    settings = dict(
        add_bos_token=False, add_prefix_space=False,
        added_tokens_decoder={str(id): token(content) for content, id in added.items()},
        additional_special_tokens=special[1:], bos_token=None, clean_up_tokenization_spaces=False,
        eos_token="<|im_end|>", errors="replace", model_max_length=131072, pad_token="<|endoftext|>",
        split_special_tokens=False, tokenizer_class="Qwen2Tokenizer", unk_token=None,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def prompt_embeds(folder):
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    pipeline = QwenImagePipeline(None, None, model, tokenizer, None)
    found = {}
    for at, prompt in enumerate(PROMPTS):
        embeds, _ = pipeline.encode_prompt(prompt, device="cpu", max_sequence_length=MAX_SEQUENCE_LENGTH)
        found[f"out.{at}"] = embeds[0].detach().contiguous()
        text = pipeline.prompt_template_encode.format(prompt)
        limit = pipeline.tokenizer_max_length + pipeline.prompt_template_encode_start_idx
        found[f"ids.{at}"] = tokenizer(text, max_length=limit, truncation=True, return_tensors="pt").input_ids[0]
    return found


def make_prompts():
    folder = HERE / "prompts"
    shutil.rmtree(folder, ignore_errors=True)
    template = QwenImagePipeline(None, None, None, None, None).prompt_template_encode
    make_tokenizer(folder / "tokenizer", template, SPECIAL)
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.save_pretrained(folder / "tokenizer_json")
    save_model(build(PROMPT_MODEL | dict(vocab_size=len(tokenizer)), 3), folder, is_nested=False)
    save_file(prompt_embeds(folder), folder / "golden.safetensors")
    (folder / "prompts.json").write_text(json.dumps(PROMPTS) + "\n")


def differences(found, stored):
    return max(((found[name].double() - stored[name].double()).abs().max()
                / stored[name].double().abs().max().clamp(min=1e-9)).item() for name in stored)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    for name, made in MODELS.items():
        folder = HERE / name
        model = build(made["text"], made["seed"])
        if not is_check:
            save_model(model, folder, is_nested=name == "nested")
            save_file(outputs(model, made["lengths"]), folder / "golden.safetensors",
                      metadata={"class": "Qwen2_5_VLForConditionalGeneration"})
        stored = load_file(folder / "golden.safetensors")
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
        print(name, differences(outputs(model, made["lengths"], stored), stored))
    if not is_check:
        make_prompts()
    stored = load_file(HERE / "prompts/golden.safetensors")
    print("prompts", differences(prompt_embeds(HERE / "prompts"), stored))


if __name__ == "__main__":
    main()
