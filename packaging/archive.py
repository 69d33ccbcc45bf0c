#!/usr/bin/env python3
"""Makes the archive of a release: builds the program, asks it for its manual pages and completions, packs all.

    python3 packaging/archive.py [--target aarch64-unknown-linux-gnu] [--out FOLDER] [--program FILE]

Leaves three files in FOLDER (target/archives):

    hearth-VERSION-TARGET.tar.gz    program, manual pages, completions, licences, docs, recipes, machines, SBOM
    hearth-VERSION-TARGET.cdx.json  the SBOM alone
    hearth-VERSION-TARGET.sha256    checksums of both, for `sha256sum -c`

The same sources, compiler and linker give the same bytes, wherever the sources lie: the time is that of the commit or
SOURCE_DATE_EPOCH, and paths of this machine are replaced. Needs Python 3.9, git and cargo. For another target cargo must
know its linker and runner (CARGO_TARGET_…_LINKER, …_RUNNER): docs/releasing.md.
"""

import argparse
import datetime
import gzip
import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True
from inventory import Inventory, as_text  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
DOCS = ["README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE-MIT", "LICENSE-APACHE"]
FOLDERS = ["docs", "recipes", "machines"]
COMPLETIONS = {"bash": "hearth.bash", "zsh": "_hearth", "fish": "hearth.fish"}


def main():
    parser = argparse.ArgumentParser(description="Makes the archive of a release.")
    parser.add_argument("--target", default=host())
    parser.add_argument("--out", type=Path, default=ROOT / "target/archives")
    parser.add_argument("--program", type=Path, help="one that is built already, for tests")
    arguments = parser.parse_args()
    metadata = json.loads(output("cargo", "metadata", "--locked", "--format-version=1",
                                 "--filter-platform", arguments.target))
    tree = ["cargo", "tree", "--locked", "--package=hearth", "--prefix=none", f"--target={arguments.target}", "--edges"]
    inside, beside = (output(*tree, edges) for edges in ["normal,no-proc-macro", "normal,build"])
    inventory = Inventory(metadata, (ROOT / "Cargo.lock").read_text(), inside, beside)
    seconds = commit_time()
    program = arguments.program or build(arguments.target, Path(metadata["target_directory"]))
    time = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    rust = output("rustc", "--version").split()[1]
    sbom = as_text(inventory.sbom(arguments.target, time, sha256(program.read_bytes()), rust)).encode()

    program = program.resolve()
    files = {"hearth": program.read_bytes(), "sbom.cdx.json": sbom, "THIRD-PARTY.txt": inventory.licences().encode()}
    files |= generated(program, arguments.target)
    tracked = output("git", "ls-files", *DOCS, *FOLDERS).splitlines()
    files |= {path: (ROOT / path).read_bytes() for path in tracked}
    assert set(DOCS) <= set(tracked), "a file of the archive is missing"
    name = f"hearth-{inventory.program['version']}-{arguments.target}"
    archive = packed(name, files, seconds)

    arguments.out.mkdir(parents=True, exist_ok=True)
    sums = ""
    for suffix, content in [(".tar.gz", archive), (".cdx.json", sbom)]:
        (arguments.out / (name + suffix)).write_bytes(content)
        sums += f"{sha256(content)}  {name + suffix}\n"
    (arguments.out / f"{name}.sha256").write_text(sums)
    print(sums, end="")


def build(target, folder):
    # Messages of panics have paths of sources: no machine's own, so that the program is the same from any folder.
    home = os.environ.get("CARGO_HOME", Path.home() / ".cargo")
    flags = f"--remap-path-prefix={ROOT}=hearth --remap-path-prefix={home}=cargo"
    environment = os.environ | {"RUSTFLAGS": f"{os.environ.get('RUSTFLAGS', '')} {flags}".strip()}
    command = ["cargo", "build", "--profile=dist", "--locked", "--bin=hearth", f"--target={target}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder / target / "dist" / "hearth"


def generated(program, target):
    """What the program prints about itself."""
    runner = os.environ.get(f"CARGO_TARGET_{target.upper().replace('-', '_')}_RUNNER", "")
    asked = lambda *arguments: output(*shlex.split(runner), str(program), *arguments).encode()
    files = {f"share/completions/{name}": asked("completions", shell) for shell, name in COMPLETIONS.items()}
    with tempfile.TemporaryDirectory() as pages:
        written = [Path(line) for line in asked("man", "--out", pages).decode().splitlines()]
        return files | {f"share/man/man1/{page.name}": page.read_bytes() for page in written}


def packed(name, files, seconds):
    """In order of names, owned by nobody in particular, as old as the commit."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, content in sorted(files.items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mtime, entry.mode = len(content), seconds, 0o755 if path == "hearth" else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(tar.getvalue(), compresslevel=9, mtime=0)


def commit_time():
    return int(os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct"))


def host():
    return next(line.split()[1] for line in output("rustc", "-vV").splitlines() if line.startswith("host:"))


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def sha256(content):
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    main()
