"""Archives by Python's tarfile in its three formats, a shard by WebDataset's own writer, and one with what does not belong
into an archive. Run with Pillow and webdataset; writes the archives and expected.json: where tarfile finds each file, how
long it is, and its CRC-32."""

import io
import json
import pathlib
import tarfile
import zlib

import webdataset
from PIL import Image

here = pathlib.Path(__file__).parent
deep = "/".join(["a" * 40, "b" * 40, "c" * 40])


def add(archive, name, data=b"", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, link
    archive.addfile(info, io.BytesIO(data))


formats = {
    "ustar.tar": (tarfile.USTAR_FORMAT, [f"{deep}/deep.txt"]),
    "gnu.tar": (tarfile.GNU_FORMAT, ["n" * 180 + ".txt", f"{deep}/deep.txt"]),
    "pax.tar": (tarfile.PAX_FORMAT, ["n" * 180 + ".txt", "grüße/größe.txt", "folder/one.txt", "folder/two/three.txt"]),
}
for name, (form, others) in formats.items():
    with tarfile.open(here / name, "w", format=form) as archive:
        add(archive, "a.txt", b"the first file\n")
        add(archive, "folder/", kind=tarfile.DIRTYPE)
        for index, other in enumerate(others):
            add(archive, other, f"file {index}".encode() * (index * 90 + 1))
        add(archive, "./dot.txt", b"beside")
        add(archive, "empty.txt")


def image(index):
    """A picture of its own, in all three formats."""
    made = Image.new("RGB", (64, 64))
    made.putdata([((x * 3 + 40 * index) % 256, (y * 4) % 256, (x + y + 90 * index) % 256) for y in range(64) for x in range(64)])
    return made


with webdataset.TarWriter(str(here / "shard-000.tar"), encoder=False) as shard:
    for index, ending in enumerate(["png", "jpg", "webp", "png"]):
        data = io.BytesIO()
        image(index).save(data, format={"jpg": "jpeg"}.get(ending, ending), **({"lossless": True} if ending == "webp" else {}))
        sample = {"__key__": f"{index:05d}", ending: data.getvalue()}
        caption = f"a pattern, number {index}"
        if index % 2 == 0:
            sample["txt"] = caption.encode()
        if index != 0:
            sample["json"] = json.dumps({"caption": caption, "width": 64, "height": 64}).encode()
        shard.write(sample)
    mask = io.BytesIO()
    Image.linear_gradient("L").resize((64, 64)).save(mask, format="png")
    shard.write({"__key__": "00002-masklabel", "png": mask.getvalue()})

with tarfile.open(here / "hostile.tar", "w", format=tarfile.GNU_FORMAT) as archive:
    add(archive, "good.txt", b"good")
    add(archive, "/etc/passwd", b"root")
    add(archive, "../out.png", b"out")
    add(archive, "soft.png", kind=tarfile.SYMTYPE, link="/etc/passwd")
    add(archive, "hard.png", kind=tarfile.LNKTYPE, link="good.txt")
    add(archive, "pipe.png", kind=tarfile.FIFOTYPE)
    add(archive, "sparse.png", b"s" * 600, kind=tarfile.GNUTYPE_SPARSE)

expected = {}
for name in [*formats, "shard-000.tar"]:
    with tarfile.open(here / name) as archive:
        expected[name] = {
            member.name.removeprefix("./"): (member.offset_data, member.size, zlib.crc32(archive.extractfile(member).read()))
            for member in archive.getmembers()
            if member.isfile()
        }
(here / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")
