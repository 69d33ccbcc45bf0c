"""A newcomer's first hour, by the real program and the real Python libraries; run by .ci/run after the README's
two commands.

    pip install torch diffusers transformers peft sentencepiece gguf
    python tests/newcomer.py target/release/hearth hearth-demo

1. Every Python snippet of a model card runs as it stands: of the demo, of an image model with T5, of one in a
   single file, of a language model in a folder and in a GGUF file.
2. A JPEG says what it was made from where Pillow reads it.
3. Adapters of FLUX.1, Qwen-Image, Kandinsky 5, Z-Image and FLUX.2 klein that hearth exports are loaded by diffusers and PEFT,
   and a merged model is diffusers' own.
4. The answers of a conversation are those of transformers, which reads all of it each time.
5. So are the perplexity of texts and the likeliest choices.
6. A run that Ctrl-C interrupted leaves an adapter, says how to go on, and goes on when told so.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

GOLDEN = Path(__file__).resolve().parent / "golden"
HEARTH = Path(sys.argv[1]).resolve()
DEMO = Path(sys.argv[2]).resolve()

# Tiny models, tiny jobs: what is looked at is whether things fit together.
IMAGE_JOB = ["--rank", "4", "--batch", "1", "--resolution", "64", "--set", "data.bucket_step=16",
             "--set", "sample.prompts=['zwx in a garden']", "--set", "sample.size=64", "--set", "sample.steps=2"]
# Of 255, in the mean. Chosen: rounding gives 0.4, a prompt filled up with zeros that the base never saw 37.
APART = 4

TEXT_JOB = ["--steps", "2", "--rank", "4", "--batch", "1", "--set", "text.length=32"]


def hearth(*arguments, cwd):
    subprocess.run([HEARTH, *map(str, arguments)], cwd=cwd, check=True)


def blocks(folder, language):
    """The code of a run's model card."""
    found = re.findall(rf"```{language}\n(.*?)```", (folder / "README.md").read_text(), re.S)
    assert found, f"the model card of {folder.name} has no {language} in it"
    return found


def run_python(folder, before=""):
    """Runs each Python snippet of a run's model card from the run's folder; returns what they printed."""
    said = ""
    for snippet in blocks(folder, "python"):
        done = subprocess.run([sys.executable, "-c", before + snippet], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"the model card of {folder.name} fails:\n{snippet}\n{done.stderr[-2000:]}"
        said += done.stdout
    return said


# Both programs begin with the same noise: diffusers draws it, and leaves it for hearth.
SAME_NOISE = """
import torch
from diffusers import FluxPipeline, QwenImagePipeline, StableDiffusion3Pipeline
from safetensors.torch import save_file

def prepare_latents(self, batch, channels, height, width, dtype, device, *others):
    sizes = [batch, channels, height // self.vae_scale_factor, width // self.vae_scale_factor]
    latents = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    save_file({"latents": latents}, "latents.safetensors")
    return latents.to(device, dtype)

def prepare_packed(self, batch, channels, height, width, dtype, device, *others):
    latents = prepare_latents(self, batch, channels, height, width, dtype, device)
    rows, columns = latents.shape[2] // 2, latents.shape[3] // 2
    ids = self._prepare_latent_image_ids(batch, rows, columns, device, dtype)
    return self._pack_latents(latents, batch, channels, 2 * rows, 2 * columns), ids

def prepare_qwen(self, batch, channels, height, width, dtype, device, *others):
    latents = prepare_latents(self, batch, channels, height, width, dtype, device)
    return self._pack_latents(latents[:, None], batch, channels, *latents.shape[2:])

StableDiffusion3Pipeline.prepare_latents = prepare_latents
FluxPipeline.prepare_latents = prepare_packed
QwenImagePipeline.prepare_latents = prepare_qwen
"""


def run_image_card(folder):
    """By its model card, diffusers and hearth draw the same image."""
    from PIL import Image, ImageChops, ImageStat

    run_python(folder, SAME_NOISE)
    command = blocks(folder, "sh")[0].split("#")[0].replace("\\\n", " ")
    hearth(*shlex.split(command)[1:], "--latents", "latents.safetensors", "--out", "hearth.png", cwd=folder)
    theirs, ours = (Image.open(folder / name).convert("RGB") for name in ("image.png", "hearth.png"))
    apart = max(ImageStat.Stat(ImageChops.difference(theirs, ours)).mean)
    print(f"{folder.name}: diffusers' image is {apart:.2f} of 255 from hearth's")
    assert apart < APART, f"by the model card of {folder.name} diffusers draws something else: {apart:.1f} of 255 apart"


def images(folder):
    """Images with captions."""
    from PIL import Image

    folder.mkdir()
    for index in range(3):
        Image.new("RGB", (64, 64), (80 * index, 120, 200)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text("a plain image")


def image_cards(place):
    images(place / "my-cat")
    for name, base, more in [
        ("folder", GOLDEN / "sd3/pipeline", []),
        ("single", GOLDEN / "sd3/single/pipeline.safetensors", ["--set", f"base.rest='{GOLDEN}/sd3/pipeline'"]),
        ("flux-dev", GOLDEN / "flux/dev/pipeline", ["--set", "sample.true_cfg_scale=2.5"]),
        ("flux-schnell", GOLDEN / "flux/schnell/pipeline", []),
        ("qwen-image", GOLDEN / "qwen_image/pipeline", []),
    ]:
        run = place / name
        hearth("train", "--images", "my-cat", "--base", base, "--out", run, "--quiet", "--steps", 2, *IMAGE_JOB,
               *more, cwd=place)
        # Where somebody who has the card has the base too.
        for name, needed in {"pipeline": GOLDEN / "sd3/pipeline", base.name: base}.items():
            (run / name).symlink_to(needed)
        run_image_card(run)


def jpeg(place):
    """A JPEG says what it was made from where other programs look."""
    from PIL import Image

    hearth("sample", "--base", GOLDEN / "sd3/pipeline", "--prompt", "a füchs", "--size", "64x64", "--steps", 2,
           "--out", "fox.jpg", cwd=place)
    exif_folder, user_comment = 0x8769, 0x9286
    comment = Image.open(place / "fox.jpg").getexif().get_ifd(exif_folder)[user_comment]
    said = comment.removeprefix(b"UNICODE\0").decode("utf-16-be")
    assert said.startswith("a füchs") and "Steps: 2" in said, said


def adapters(_place):
    """Written by hearth, read by diffusers and PEFT."""
    subprocess.run([sys.executable, GOLDEN / "flux/check_exports.py", HEARTH, "schnell"], check=True)
    subprocess.run([sys.executable, GOLDEN / "qwen_image/check_exports.py", HEARTH], check=True)
    subprocess.run([sys.executable, GOLDEN / "kandinsky5/check_exports.py", HEARTH], check=True)
    subprocess.run([sys.executable, GOLDEN / "check_exports.py", HEARTH], check=True)


def text_cards(place):
    (place / "notes.jsonl").write_text('{"text": "a plan is a plan is a plan"}\n' * 20)
    shutil.copytree(GOLDEN / "gguf/smollm", place / "smollm")
    hearth("convert", "smollm", "--out", "smollm-f32.gguf", "--dtype", "f32", cwd=place)
    for name, base in [("of-folder", "smollm"), ("of-gguf", "smollm-f32.gguf")]:
        run = place / name
        hearth("train", "--text", "notes.jsonl", "--base", base, "--out", run, "--quiet", *TEXT_JOB, cwd=place)
        (run / base).symlink_to(place / base)
        assert run_python(run).strip(), f"the model card of {name} prints nothing"


CHAT_ML = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
           "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def conversation(place):
    """Three questions, with an adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hearth("train", "--text", "notes.jsonl", "--base", "smollm", "--out", "talker", "--quiet", "--steps", 60, *TEXT_JOB[2:],
           "--set", "optimizer.learning_rate=0.02", cwd=place)
    tokenizer = AutoTokenizer.from_pretrained(place / "smollm")
    model = AutoModelForCausalLM.from_pretrained(place / "smollm", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(place / "talker/adapter/peft"))
    messages, expected = [], []
    questions = ["a plan?", "ünd?", "is a"]
    for question in questions:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, chat_template=CHAT_ML, add_generation_prompt=True,
                                            return_tensors="pt", return_dict=True)
        answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1]:]
        expected.append(tokenizer.decode(answer, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": expected[-1]})
    command = [HEARTH, "chat", "--base", "smollm", "--adapter", "talker", "--dtype", "f32", "--temperature", "0",
               "--max-tokens", "8", "--json"]
    done = subprocess.run(command, cwd=place, input="\n".join(questions), capture_output=True, text=True, check=True)
    answers = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert answers == expected, f"hearth: {answers}, transformers: {expected}"


QUIZ = [("a plan is", ["a plan", "fire", "a hearth and much more"], 0), ("is a plan", ["fire", "a"], 1)]


def evaluation(place):
    """Perplexity and the likeliest choices, with an adapter and without, are those of transformers and PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = ["a plan is a plan", "fire, ünd a hearth"]
    (place / "held-out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lines = [json.dumps({"prompt": prompt, "choices": choices, "answer": right}) for prompt, choices, right in QUIZ]
    (place / "quiz.jsonl").write_text("\n".join(lines))
    command = [HEARTH, "evaluate", "--base", "smollm", "--adapter", "talker", "--dtype", "f32", "--json", "--length", "64",
               "--text", "held-out.jsonl", "--questions", "quiz.jsonl"]
    ours = json.loads(subprocess.run(command, cwd=place, capture_output=True, check=True).stdout)
    tokenizer = AutoTokenizer.from_pretrained(place / "smollm")
    model = AutoModelForCausalLM.from_pretrained(place / "smollm", dtype=torch.float32)
    encode = lambda text: tokenizer(text).input_ids

    def log_probabilities(ids):
        """Of each token after the first."""
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    for name in ["base", "adapter"]:
        if name == "adapter":
            model = PeftModel.from_pretrained(model, str(place / "talker/adapter/peft"))
        of_texts = torch.cat([log_probabilities([*encode(text), tokenizer.eos_token_id]) for text in texts])
        assert ours[name]["texts"]["n_tokens"] == len(of_texts)
        assert abs(ours[name]["texts"]["loss"] + of_texts.mean().item()) < 1e-5, (ours[name], of_texts.mean())
        by_sum, by_length = [], []
        for prompt, choices, right in QUIZ:
            scores = [log_probabilities(encode(f"{prompt} {it}"))[len(encode(prompt)) - 1:].sum().item() for it in choices]
            by_sum.append(scores.index(max(scores)) == right)
            scores = [score / len(it) for score, it in zip(scores, choices)]
            by_length.append(scores.index(max(scores)) == right)
        accuracies = [ours[name]["choices"][it]["share"] for it in ("accuracy", "accuracy_by_length")]
        assert accuracies == [sum(by_sum) / 2, sum(by_length) / 2], (accuracies, by_sum, by_length)


def interrupted(place):
    """Ctrl-C in the middle of a run, then the very command that it names."""
    run = place / "interrupted"
    command = [HEARTH, "train", "--images", "my-cat", "--base", GOLDEN / "sd3/pipeline", "--out", run, *IMAGE_JOB,
               "--steps", "400"]
    process = subprocess.Popen([*map(str, command)], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if " 400 steps" in line or "step 0" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (process.returncode, out, err)
    again = next(line.strip() for line in out.splitlines() if line.strip().startswith("hearth train"))
    adapters = list(run.glob("checkpoints/step-*/pytorch_lora_weights.safetensors"))
    assert adapters, f"an interrupted run left no adapter: {out}"
    hearth(*shlex.split(again)[1:], "--quiet", cwd=place)
    assert list(run.glob("adapter/*.safetensors")), "the run that went on wrote no adapter"


def main():
    run_image_card(DEMO)
    checks = [image_cards, jpeg, adapters, text_cards, conversation, evaluation, interrupted]
    with tempfile.TemporaryDirectory() as place:
        for check in checks:
            check(Path(place))
    print(f"the first hour: {1 + len(checks)} passed, 0 failed")


main()
