"""Makes the reference data of this folder and checks it: captions by Qwen2.5-VL. Every model here is tiny and has random
weights. Made on a CPU in f32 with Python 3.11, torch 2.15, transformers 5.23.0, Pillow 13 and safetensors, all from PyPI.

    python generate.py            remake everything
    python generate.py --check    recompute everything from the stored files

SOURCE.md describes the layout of the files.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import unicodedata
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "qwen25vl"))
from generate import byte_alphabet, differences, make_tokenizer, randomise

vision = importlib.util.spec_from_file_location("vision", HERE.parent / "qwen25vl_vision/generate.py")
vision = importlib.util.module_from_spec(vision)
vision.__spec__.loader.exec_module(vision)

# chat_template.json of Qwen/Qwen2.5-VL-7B-Instruct.
TEMPLATE = (HERE / "chat_template.jinja").read_text()
SPECIAL = vision.SPECIAL
# Width and height. The published limits leave the first as it is, those of `folder` scale all of them.
IMAGES = dict(wide=[96, 64], tall=[64, 123], large=[150, 130])
PROMPTS = [
    "Describe this image.",
    "the fox begins here: \u00e9t\u00e9\nin the evening",
]
TOKENS = 16
MODELS = {
    # As transformers 5 saves it, with an output layer of its own.
    "folder": dict(
        text=dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                  max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=True,
                  rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[2, 1, 3])),
        vision=dict(depth=2, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=4, spatial_merge_size=2,
                    temporal_patch_size=2, window_size=16, fullatt_block_indexes=[1]),
        pixels=[256, 1600], penalty=1.0, seed=58,
    ),
    # In a pipeline as Qwen-Image is published: older settings and names, vocab.json and merges.txt, no processor.
    "pipeline": dict(
        text=dict(hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=False,
                  rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[1, 1, 2])),
        vision=dict(depth=2, hidden_size=8, intermediate_size=12, num_heads=1, patch_size=14, spatial_merge_size=2,
                    temporal_patch_size=2, window_size=112, fullatt_block_indexes=[1]),
        pixels=[56 * 56, 28 * 28 * 1280], penalty=1.3, seed=34,
    ),
}


def build(m, tokenizer):
    text = m["text"] | dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
                            bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in [
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end")]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=m["vision"] | dict(out_hidden_size=text["hidden_size"]),
                              **ids, tie_word_embeddings=text["tie_word_embeddings"])
    model = randomise(Qwen2_5_VLForConditionalGeneration(config), m["seed"])
    with torch.no_grad():
        # Logits as far apart as those of trained models. Tied weights would repeat the last token: what blocks add to it
        # is made larger than itself.
        if text["tie_word_embeddings"]:
            model.get_input_embeddings().weight.mul_(0.2)
            model.model.language_model.norm.weight.mul_(60)
        else:
            model.lm_head.weight.mul_(6)
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], bos_token_id=ends[1],
                                               repetition_penalty=m["penalty"])
    return model


def processor(tokenizer, m):
    """Without the part for videos, which needs torchvision."""
    made = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    made.image_processor = Qwen2VLImageProcessorPil(
        min_pixels=m["pixels"][0], max_pixels=m["pixels"][1], patch_size=m["vision"]["patch_size"],
        merge_size=m["vision"]["spatial_merge_size"], temporal_patch_size=m["vision"]["temporal_patch_size"])
    made.tokenizer, made.video_processor, made.chat_template = tokenizer, None, TEMPLATE
    return made


def save_folder(model, tokenizer, m, folder):
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor(tokenizer, m).image_processor.save_pretrained(folder)
    shutil.copy(HERE / "chat_template.jinja", folder)


def save_pipeline(model, tokenizer_files, m, folder):
    encoder = folder / "text_encoder"
    encoder.mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(dict(_class_name="QwenImagePipeline"), indent=2) + "\n")
    text = m["text"] | dict(vocab_size=model.config.text_config.vocab_size)
    rope = text.pop("rope_parameters")
    settings = text | dict(
        rope_theta=rope["rope_theta"], rope_scaling=dict(type="mrope", mrope_section=rope["mrope_section"]),
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl",
        vision_config=m["vision"] | dict(out_hidden_size=text["hidden_size"]))
    settings |= {name: getattr(model.config, name) for name in (
        "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")}
    settings["eos_token_id"] = model.config.text_config.eos_token_id
    (encoder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    model.generation_config.save_pretrained(encoder)
    names = lambda name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    tensors = {names(name): tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, encoder / "model.safetensors", metadata=dict(format="pt"))
    shutil.copytree(tokenizer_files, folder / "tokenizer")


@torch.no_grad()
def outputs(name, m):
    """Tokens, captions and the logits after the prompt."""
    folder = HERE / name
    tokenizer = Qwen2Tokenizer.from_pretrained(folder if name == "folder" else folder / "tokenizer")
    weights = folder if name == "folder" else folder / "text_encoder"
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(weights, dtype=torch.float32).eval()
    made, cases, found = processor(tokenizer, m), [], {}
    image_token = model.config.image_token_id
    for image in IMAGES:
        pixels = Image.open(HERE / f"images/{image}.png")
        seen = made.image_processor([pixels], return_tensors="pt")
        n_tokens = seen["image_grid_thw"].prod().item() // m["vision"]["spatial_merge_size"] ** 2
        for at, prompt in enumerate(PROMPTS):
            content = [dict(type="image"), dict(type="text", text=prompt)]
            text = made.apply_chat_template([dict(role="user", content=content)], add_generation_prompt=True,
                                            tokenize=False, chat_template=TEMPLATE)
            text = text.replace("<|image_pad|>", "<|image_pad|>" * n_tokens)
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids),
                          mm_token_type_ids=(ids == image_token).int(), **seen)
            logits = model(**inputs).logits[0, -1]
            out = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS, output_scores=True,
                                 return_dict_in_generate=True)
            added = out.sequences[0, ids.shape[1]:]
            best = torch.stack(out.scores)[:, 0].topk(2).values
            plain = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS, repetition_penalty=1.0)
            added, plain = added.tolist(), plain[0, ids.shape[1]:].tolist()
            ends = model.generation_config.eos_token_id
            added, plain = [[token for token in tokens if token not in ends] for tokens in (added, plain)]
            caption = tokenizer.decode(added, skip_special_tokens=True)
            caption = "".join(" " if unicodedata.category(char) == "Cc" else char for char in caption)
            caption = " ".join(caption.split())
            key = f"{image}.{at}"
            cases.append(dict(image=image, prompt=prompt, n_prompt=ids.shape[1], tokens=added, plain=plain,
                              caption=caption))
            found[f"logits.{key}"] = logits
            gap = (best[:, 0] - best[:, 1]).min().item()
            print(name, key, f"{ids.shape[1]} tokens, least distance of the second {gap:.4f}", repr(caption))
    return cases, {key: value.contiguous() for key, value in found.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    if not is_check:
        (HERE / "images").mkdir(exist_ok=True)
        for name, size in IMAGES.items():
            Image.fromarray(vision.image(name, size)).save(HERE / f"images/{name}.png", optimize=True)
    for name, m in MODELS.items():
        folder = HERE / name
        if not is_check:
            shutil.rmtree(folder, ignore_errors=True)
            files = HERE / "tokenizer"
            make_tokenizer(files, TEMPLATE, SPECIAL)
            tokenizer = Qwen2Tokenizer.from_pretrained(files)
            model = build(m, tokenizer)
            save_folder(model, tokenizer, m, folder) if name == "folder" else save_pipeline(model, files, m, folder)
            shutil.rmtree(files)
            cases, tensors = outputs(name, m)
            (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
            save_file(tensors, folder / "golden.safetensors")
        cases, tensors = outputs(name, m)
        stored = json.loads((folder / "cases.json").read_text())
        print(name, cases == stored, differences(tensors, load_file(folder / "golden.safetensors")))


if __name__ == "__main__":
    main()
