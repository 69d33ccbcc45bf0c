"""Makes the reference data of this folder and checks it: embeddings and cosines by CLIP. Every model here is tiny and has
random weights. Made on a CPU in f32 with Python 3.11, torch 2.15, transformers 5.23.0, Pillow 13 and safetensors, all from
PyPI.

    python generate.py            remake everything
    python generate.py --check    recompute everything from the stored files

SOURCE.md describes the layout of the files.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "qwen25vl"))
from generate import differences

TOKENIZER = HERE.parent / "tokenizers/clip"
IMAGES = HERE.parent / "caption/images"
RUN = HERE.parent / "run"
NAMES = ["wide", "tall", "large"]
PROMPTS = ["a red fox", "", "The fox, at night: a photo of a fox in the snow, " * 12]
MODELS = {
    # As transformers 5 saves it.
    "folder": dict(
        text=dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                  max_position_embeddings=77, hidden_act="quick_gelu"),
        vision=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=32,
                    patch_size=8, hidden_act="quick_gelu"),
        projection=20, size=dict(shortest_edge=32), seed=7,
    ),
    # As older versions saved it: plain numbers for sizes, buffers among weights, an end of text with id 2. Patches do not
    # fill the image, which is scaled to more than is cut out.
    "older": dict(
        text=dict(hidden_size=32, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
                  max_position_embeddings=40, hidden_act="gelu", eos_token_id=2),
        vision=dict(hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=30,
                    patch_size=7, hidden_act="gelu"),
        projection=12, size=dict(shortest_edge=37), seed=11,
    ),
}


def randomise(model, seed):
    """Weights that are far from those of a model before training: norms and biases count."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=gen)
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.3 * noise)
    return model.eval()


def build(m, tokenizer):
    ids = dict(vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
               pad_token_id=tokenizer.pad_token_id)
    config = CLIPConfig(text_config=ids | m["text"], vision_config=m["vision"], projection_dim=m["projection"])
    model = randomise(CLIPModel(config), m["seed"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def processor(m):
    side = m["vision"]["image_size"]
    return CLIPImageProcessorPil(size=m["size"], crop_size=dict(height=side, width=side))


def save(name, model, tokenizer, m, folder):
    model.to(torch.bfloat16).save_pretrained(folder)
    processor(m).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name == "folder":
        return
    tensors = load_file(folder / "model.safetensors")
    for part, n in [("text", m["text"]["max_position_embeddings"]), ("vision", 17)]:
        tensors[f"{part}_model.embeddings.position_ids"] = torch.arange(n)[None]
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings = {key: settings[key] for key in ("do_resize", "do_center_crop", "do_normalize", "image_mean", "image_std")}
    settings |= dict(size=m["size"]["shortest_edge"], crop_size=m["vision"]["image_size"], resample=3,
                     feature_extractor_type="CLIPFeatureExtractor")
    path.write_text(json.dumps(settings, indent=1) + "\n")
    for spare in ("tokenizer.json", "special_tokens_map.json"):
        (folder / spare).unlink(missing_ok=True)
    for wanted in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / wanted, folder)


def as_patches(pixels, patch):
    """[channels, side, side] to [patches, channels · patch · patch], along rows."""
    n = pixels.shape[-1] // patch
    pixels = pixels[:, : n * patch, : n * patch].reshape(3, n, patch, n, patch)
    return pixels.permute(1, 3, 0, 2, 4).reshape(n * n, -1)


@torch.no_grad()
def outputs(name, m):
    folder = HERE / name
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, found = CLIPTokenizer.from_pretrained(TOKENIZER), {}
    unit = lambda x: (x if isinstance(x, torch.Tensor) else x.pooler_output)[0]
    unit_of = lambda x: unit(x) / unit(x).norm()
    for at, prompt in enumerate(PROMPTS):
        inputs = tokenizer(prompt, padding="max_length", truncation=True, return_tensors="pt",
                           max_length=m["text"]["max_position_embeddings"])
        found[f"text.{at}"] = unit_of(model.get_text_features(**inputs))
    for image in NAMES:
        pixels = processor(m)([Image.open(IMAGES / f"{image}.png").convert("RGB")], return_tensors="pt")["pixel_values"]
        found[f"image.{image}"] = unit_of(model.get_image_features(pixel_values=pixels))
        found[f"patches.{image}"] = as_patches(pixels[0], m["vision"]["patch_size"])
    texts = torch.stack([found[f"text.{at}"] for at in range(len(PROMPTS))])
    images = torch.stack([found[f"image.{image}"] for image in NAMES])
    found["text_cosines"] = images @ texts.T
    found["image_cosines"] = images @ images.T
    print(name, found["text_cosines"].tolist(), found["image_cosines"].tolist())
    return {key: value.contiguous() for key, value in found.items()}


@torch.no_grad()
def scores_of_run():
    """The cosines of the samples of ../run, by the first model: with their prompts, and the mean with the three images."""
    name, m = next(iter(MODELS.items()))
    model = CLIPModel.from_pretrained(HERE / name, dtype=torch.float32).eval()
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    unit = lambda x: (lambda x: x / x.norm(dim=-1, keepdim=True))(x if isinstance(x, torch.Tensor) else x.pooler_output)
    see = lambda paths: unit(model.get_image_features(**processor(m)(
        [Image.open(path).convert("RGB") for path in paths], return_tensors="pt")))
    images, scores = see([IMAGES / f"{image}.png" for image in NAMES]), []
    # The history has a broken line and lines of a part that was lost; samples are not among them.
    lines = [line for line in (RUN / "events.jsonl").read_text().splitlines() if line.startswith('{"event": "sample"')]
    for event in map(json.loads, lines):
        ids = tokenizer(event["prompt"], truncation=True, max_length=77, return_tensors="pt")
        prompt, sample = unit(model.get_text_features(**ids))[0], see([RUN / event["path"]])[0]
        scores.append(dict(path=event["path"], step=event["step"], to_prompt=(sample @ prompt).item(),
                           to_images=(images @ sample).mean().item()))
    return sorted(scores, key=lambda score: (score["step"], score["path"]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    for name, m in MODELS.items():
        folder = HERE / name
        if not is_check:
            shutil.rmtree(folder, ignore_errors=True)
            tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
            save(name, build(m, tokenizer), tokenizer, m, folder)
            save_file(outputs(name, m), folder / "golden.safetensors")
        print(name, differences(outputs(name, m), load_file(folder / "golden.safetensors")))
    if not is_check:
        (HERE / "run.json").write_text(json.dumps(scores_of_run(), indent=1) + "\n")
    print("run", scores_of_run() == json.loads((HERE / "run.json").read_text()))


if __name__ == "__main__":
    main()
