"""TensorBoard itself reads what a run wrote for it: numbers, images and texts, each step once, also after a break.

usage: tensorboard_files.py HEARTH        with tensorboard from PyPI
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.image import metadata as image_metadata

ROOT = pathlib.Path(__file__).resolve().parent.parent


def events(run):
    """Whole lines: the last one may be half written."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().split("\n")[:-1]]


def read(run):
    """What TensorBoard keeps of a run's folder."""
    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    reader.Reload()
    return reader


def texts(reader):
    return [tag for tag in reader.Tags()["tensors"] if reader.SummaryMetadata(tag).plugin_data.plugin_name == "text"]


def main():
    hearth = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        image_run(hearth, place)
        text_run(hearth, place)
    print("tensorboard: 2 passed, 0 failed")


def image_run(hearth, place):
    run = place / "neon"
    job = [hearth, "train", ROOT / "recipes/demo.toml", "--quiet", f"--out={run}", f"--set=data.images={place / 'images'}",
           "--set=output.tensorboard=true", "--set=output.save_every=4", "--set=data.validation=2", "--set=train.validate_every=3",
           "--set=sample.prompts=['neon style, a red star']", "--set=sample.every=5", "--set=sample.steps=2"]
    # A run that is killed after a checkpoint takes some steps twice; the later ones count.
    broken = subprocess.Popen([*job, "--steps=1000000"])
    while not run.exists() or not (run / "events.jsonl").exists() or sum(it["event"] == "step" for it in events(run)) < 7:
        assert broken.poll() is None
    broken.kill()
    broken.wait()
    lost = max(it["step"] for it in events(run) if it["event"] == "step")
    saved = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert int(saved.name.split("-")[1]) <= lost, (saved, lost)
    going = subprocess.Popen([*job, "--steps=1000000", "--resume"])
    begins = lambda: [it for it in events(run) if it["event"] == "begin"]
    while len(begins()) < 2 or events(run)[-1].get("step", 0) < lost + 3:
        assert going.poll() is None
    going.terminate()
    going.wait()
    reader = read(run)
    later = events(run)[events(run).index(begins()[-1]):]
    expected = {it["step"]: it["loss"] for it in later if it["event"] == "step"}
    loss = reader.Scalars("loss/train")
    steps = [it.step for it in loss]
    assert steps == sorted(set(steps)) and steps[0] == 1, "each step once, in order"
    for it in loss:
        if it.step in expected:
            assert abs(it.value - expected[it.step]) < 1e-6, it
    tags = set(reader.Tags()["scalars"])
    wanted = {"loss/train", "loss/smoothed", "loss/held_out", "optimizer/learning_rate", "optimizer/gradient_norm",
              "speed/seconds_per_step", "memory/peak_gib"}
    assert wanted <= tags, wanted - tags
    [tag] = [tag for tag in reader.Tags()["tensors"] + reader.Tags()["images"] if "red star" in tag]
    if tag in reader.Tags()["images"]:
        image = reader.Images(tag)[-1]
        assert (image.width, image.height) == (96, 96), image
    else:
        assert reader.SummaryMetadata(tag).plugin_data.plugin_name == image_metadata.PLUGIN_NAME
    assert texts(reader) == ["run/settings"], texts(reader)
    print(f"ok: {len(steps)} steps, {lost} before the break, from {begins()[-1]['from_step']} on again")


def text_run(hearth, place):
    run = place / "tiny"
    job = [hearth, "train", ROOT / "recipes/lm-tiny.toml", "--quiet", f"--out={run}", "--steps=3", "--set=output.tensorboard=true"]
    subprocess.run(job, check=True)
    reader = read(run)
    samples = [tag for tag in texts(reader) if tag.startswith("samples/")]
    assert samples, reader.Tags()
    print(f"ok: texts {samples}")


if __name__ == "__main__":
    main()
