"""Images of every kind that training folders hold, and what Pillow sees in them.

Makes the pictures beside this file, and expected.json with their pixels over white, the right way
up. Made with Python 3.11, Pillow 13.0, numpy; all from PyPI. Run it in this folder.
"""

import base64
import json
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

W, H = 26, 18
expected = {}
resized = {}


def gradient(w=W, h=H):
    """Smooth, and without any symmetry, so that every turn of it is another image."""
    y, x = np.mgrid[0:h, 0:w]
    red = x * 255 / (w - 1)
    green = y * 255 / (h - 1)
    blue = 255 * (0.5 + 0.5 * np.sin(x / 7 + y / 5))
    return np.stack([red, green, blue], -1).round().astype(np.uint8)


def noise(w, h):
    """Far from black and white: Pillow rounds and clamps between its two passes, image after both,
    so that they differ where Lanczos rings beyond what a byte holds."""
    return np.random.default_rng(7).integers(80, 176, (h, w, 3), dtype=np.uint8)


def over_white(rgba):
    """Rounded to the nearest; Pillow's own arithmetic differs from it by one level at most."""
    rgba = np.asarray(rgba).astype(np.int64)
    alpha = rgba[..., 3:]
    exact = ((rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    white = Image.new("RGBA", rgba.shape[1::-1], (255, 255, 255, 255))
    pillow = np.asarray(Image.alpha_composite(white, Image.fromarray(rgba.astype(np.uint8))))
    assert np.abs(pillow[..., :3].astype(int) - exact).max() <= 1
    return exact


def expect(name, tolerance, rgb=None):
    if rgb is None:
        picture = Image.open(name)
        picture.seek(0)
        turned = ImageOps.exif_transpose(picture)
        rgb = over_white(turned.convert("RGBA")) if turned.mode != "CMYK" else np.asarray(turned.convert("RGB"))
    rgb = np.ascontiguousarray(rgb, dtype=np.uint8)
    expected[name] = {
        "size": [rgb.shape[1], rgb.shape[0]],
        "tolerance": tolerance,
        "rgb": base64.b64encode(rgb.tobytes()).decode(),
    }


def save(name, picture, tolerance=0, rgb=None, **options):
    picture.save(name, **options)
    expect(name, tolerance, rgb)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png16(name, array, colour, rgb):
    """Pillow writes no 16-bit colour, so this does."""
    h, w = array.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 16, colour, 0, 0, 0))
    data += chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    open(name, "wb").write(data)
    expect(name, 0, rgb)


def pngs():
    colour = gradient()
    rgba = np.dstack([colour, np.linspace(0, 255, W).round().astype(np.uint8)[None].repeat(H, 0)])
    gray = colour[..., 0]
    save("rgb.png", Image.fromarray(colour))
    save("rgba.png", Image.fromarray(rgba))
    save("gray.png", Image.fromarray(gray))
    save("gray_alpha.png", Image.fromarray(np.dstack([gray, rgba[..., 3].T.reshape(H, W)]), "LA"))
    save("bits.png", Image.fromarray(gray).convert("1"))
    palette = Image.fromarray(colour).quantize(16)
    save("palette.png", palette)
    save("palette_transparent.png", palette, transparency=bytes([0, 64, 128, 200] + [255] * 12))
    deep = np.random.default_rng(3).integers(0, 65536, (H, W, 4))
    eight = lambda wide: (wide * 255 + 32767) // 65535
    png16("rgb16.png", deep[..., :3], 2, eight(deep[..., :3]))
    png16("gray16.png", deep[..., 0], 0, eight(deep[..., :1]).repeat(3, -1))
    png16("rgba16.png", deep, 6, over_white(eight(deep)))
    frames = [Image.fromarray(np.roll(colour, 8 * at, 1)) for at in range(3)]
    save("animated.png", frames[0], save_all=True, append_images=frames[1:])


def jpegs():
    colour = Image.fromarray(gradient())
    save("plain.jpg", colour, 2, quality=90, subsampling=0)
    save("progressive.jpg", colour, 2, quality=90, subsampling=0, progressive=True)
    # Colours between two stored ones are rounded differently, which three levels show once.
    save("subsampled.jpg", Image.fromarray(gradient(32, 16)), 3, quality=90, subsampling=2)
    # In the last column decoders differ: libjpeg repeats the last colour, zune-jpeg goes on into
    # what fills up the block.
    save("subsampled_odd.jpg", colour, 8, quality=90, subsampling=2)
    save("gray.jpg", colour.convert("L"), 2, quality=90)
    save("restarts.jpg", colour, 2, quality=90, subsampling=0, restart_marker_blocks=3)
    save("progressive_subsampled.jpg", Image.fromarray(gradient(32, 16)), 3, quality=90, subsampling=2, progressive=True)
    inks = np.dstack([255 - gradient(), np.linspace(0, 120, H).astype(np.uint8)[:, None].repeat(W, 1)])
    # Pillow marks it as Adobe's, with inverted inks.
    save("cmyk.jpg", Image.fromarray(inks, "CMYK"), 2, quality=95)
    plain = open("cmyk.jpg", "rb").read()
    at = plain.index(b"\xff\xee")
    length = struct.unpack(">H", plain[at + 2 : at + 4])[0]
    # The same numbers as luma and colour differences, which the transform byte of that mark says.
    ycck = bytearray(plain)
    ycck[at + 4 + 11] = 2
    open("ycck.jpg", "wb").write(ycck)
    expect("ycck.jpg", 2)
    open("cmyk_unmarked.jpg", "wb").write(plain[:at] + plain[at + 2 + length :])
    expect("cmyk_unmarked.jpg", 2)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        save(f"turned_{orientation}.jpg", colour, 2, quality=90, subsampling=0, exif=exif)


def others():
    colour = gradient()
    rgba = np.dstack([colour, np.linspace(0, 255, W).round().astype(np.uint8)[None].repeat(H, 0)])
    frames = [Image.fromarray(np.roll(colour, 8 * at, 1)) for at in range(3)]
    save("lossless.webp", frames[0], lossless=True)
    save("lossless_alpha.webp", Image.fromarray(rgba), lossless=True, exact=True)
    save("lossy.webp", frames[0], 2, quality=90)
    save("lossy_alpha.webp", Image.fromarray(rgba), 2, quality=90)
    save("animated.webp", frames[0], save_all=True, append_images=frames[1:], lossless=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    save("turned.webp", frames[0], lossless=True, exif=exif)
    save("turned.png", frames[0], exif=exif)
    small = [frame.quantize(32) for frame in frames]
    save("plain.gif", small[0])
    save("transparent.gif", small[0], transparency=3)
    save("animated.gif", small[0], save_all=True, append_images=small[1:], duration=100)


def broken():
    """None of these can be decoded."""
    for name in ["plain.jpg", "progressive.jpg", "rgb16.png", "lossless.webp", "plain.gif"]:
        data = open(name, "rb").read()
        open("truncated_" + name, "wb").write(data[: len(data) * 6 // 10])
    # A download that stopped after its place on the disk was taken.
    data = open("plain.jpg", "rb").read()
    half = len(data) * 6 // 10
    open("zeros_plain.jpg", "wb").write(data[:half] + bytes(len(data) - half))
    Image.fromarray(gradient()).save("other.bmp")


def sizes():
    """What Pillow's Lanczos makes of noise and of a gradient, larger and smaller."""
    for kind, (w, h), (to_w, to_h) in [
        ("noise", (45, 33), (24, 18)),
        ("noise", (21, 13), (40, 26)),
        ("gradient", (60, 40), (24, 16)),
        ("gradient", (26, 18), (16, 32)),
    ]:
        array = (noise if kind == "noise" else gradient)(w, h)
        made = np.asarray(Image.fromarray(array).resize((to_w, to_h), Image.LANCZOS))
        resized[f"{kind} {w}x{h} to {to_w}x{to_h}"] = {
            "size": [w, h],
            "rgb": base64.b64encode(array.tobytes()).decode(),
            "to": [to_w, to_h],
            "expected": base64.b64encode(made.tobytes()).decode(),
        }


pngs()
jpegs()
others()
broken()
sizes()
json.dump({"decoded": expected, "resized": resized}, open("expected.json", "w"), indent=1)
