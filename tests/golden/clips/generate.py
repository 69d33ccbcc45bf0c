"""Clips of every kind that training folders hold, and what Pillow sees in them.

Makes the files beside this one, and expected.json: the frames of animated images over white as Pillow composes them, with
their times; and the grey levels of the frames of videos, which ffmpeg encodes. Made with Python 3.11, Pillow 13.0, numpy
and ffmpeg 5.1. Run it in this folder.
"""

import base64
import json
import subprocess

import numpy as np
from PIL import Image

W, H = 80, 64
animations, videos = {}, {}


def frame(number, count):
    """A square that wanders over a gradient."""
    y, x = np.mgrid[0:H, 0:W]
    image = np.stack([x * 3, y * 3, np.full_like(x, 40 * number)], -1).astype(np.uint8)
    left = 4 + number * (W - 28) // max(count - 1, 1)
    image[20:40, left : left + 20] = [250, 250 - 30 * number, 20]
    return image


def over_white(image):
    rgba = np.asarray(image.convert("RGBA")).astype(np.int64)
    alpha = rgba[..., 3:]
    return ((rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def expect(name, tolerance, delays):
    """Samples every eighth pixel, which is enough to see a wrong frame, place or order."""
    image = Image.open(name)
    frames = []
    for number in range(image.n_frames):
        image.seek(number)
        frames.append(base64.b64encode(np.ascontiguousarray(over_white(image)[::8, ::8]).tobytes()).decode())
    assert len(frames) == len(delays)
    animations[name] = {"tolerance": tolerance, "delays_ms": delays, "frames": frames}


def animated():
    frames = [Image.fromarray(frame(number, 6)) for number in range(6)]
    delays = [100, 40, 200, 100, 0, 240]
    shown = [100, 40, 200, 100, 100, 240]
    # A palette for all, so that frames are stored as changes of the one before.
    indexed = [image.quantize(64, dither=Image.Dither.NONE) for image in frames]
    indexed[0].save("walk.gif", save_all=True, append_images=indexed[1:], duration=delays, disposal=1, loop=0)
    expect("walk.gif", 0, shown)
    frames[0].save("walk.webp", save_all=True, append_images=frames[1:], duration=delays, lossless=True)
    # Frames that are blended over the one before are rounded by another rule.
    expect("walk.webp", 1, shown)
    frames[0].save("walk.png", save_all=True, append_images=frames[1:], duration=delays)
    expect("walk.png", 0, shown)
    # Transparent, and each frame takes the place of the one before.
    clear = []
    for number in range(3):
        rgba = np.zeros((H, W, 4), np.uint8)
        rgba[10 : 30 + number, 10 * number + 4 : 10 * number + 30] = [200, 20 * number, 90, 255]
        clear.append(Image.fromarray(rgba))
    # Every frame is a part without transparency, so that the file says that it has none: all else is black.
    clear[0].save("black.webp", save_all=True, append_images=clear[1:], duration=500, lossless=True)
    expect("black.webp", 1, [500] * 3)
    for number, image in enumerate(clear):
        image.putpixel((8 * number + 8, 16), (90, 160, 30, 128))
    clear[0].save("clear.webp", save_all=True, append_images=clear[1:], duration=500, lossless=True)
    expect("clear.webp", 1, [500] * 3)
    clear[0].save("clear.png", save_all=True, append_images=clear[1:], duration=500, disposal=1, blend=0)
    expect("clear.png", 1, [500] * 3)


def encoded(name, levels, rate, *options):
    """Frames of one grey level each."""
    raw = b"".join(np.full((H, W, 3), level, np.uint8).tobytes() for level in levels)
    command = ["ffmpeg", "-v", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{W}x{H}"]
    command += ["-r", str(rate), "-i", "pipe:0", "-pix_fmt", "yuv420p", "-fflags", "+bitexact", *options, name]
    subprocess.run(command, input=raw, check=True)
    videos[name] = {"levels": levels, "rate": rate}


def filmed():
    levels = [16 + 8 * number for number in range(28)]
    encoded("walk.mp4", levels, 24, "-c:v", "libx264", "-crf", "10", "-g", "10")
    encoded("walk.webm", levels[:12], 12, "-c:v", "libvpx", "-crf", "10", "-b:v", "200k")
    encoded("walk.mkv", levels, 24, "-c:v", "libx264", "-crf", "10", "-g", "7")
    encoded("walk.mov", levels[:9], 24, "-c:v", "mpeg4", "-q:v", "2")
    # As a phone that is held upright writes it, and with pixels that are twice as wide as high.
    subprocess.run(["ffmpeg", "-v", "error", "-y", "-i", "walk.mov", "-c", "copy", "-metadata:s:v:0", "rotate=90",
                    "-fflags", "+bitexact", "turned.mov"], check=True)
    encoded("wide.mp4", levels[:9], 24, "-c:v", "libx264", "-crf", "10", "-vf", "setsar=2")


animated()
filmed()
json.dump({"animations": animations, "videos": videos}, open("expected.json", "w"), indent=1)
