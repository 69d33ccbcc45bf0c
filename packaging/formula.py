#!/usr/bin/env python3
"""Fills in the Homebrew formula from the checksums of a release, and prints it.

    python3 packaging/formula.py OWNER/NAME FOLDER > hearth.rb

FOLDER holds the .sha256 files that packaging/archive.py left, one per target of the formula.
"""

import re
import sys
from pathlib import Path

repository, folder = sys.argv[1], Path(sys.argv[2])
archives = {}
for file in sorted(folder.glob("*.sha256")):
    for line in file.read_text().splitlines():
        checksum, name = line.split()
        found = re.fullmatch(r"hearth-(\d+\.\d+\.\d+)-(.+)\.tar\.gz", name)
        if found:
            archives[found[2]] = (found[1], name, checksum)
versions = {version for version, _, _ in archives.values()}
if len(versions) != 1:
    sys.exit(f"error: the archives in {folder} are of {len(versions)} versions: {sorted(versions)}")


def filled(mark):
    what, _, target = mark[1].partition(" ")
    if target and target not in archives:
        sys.exit(f"error: no archive for {target} in {folder}")
    return {
        "REPOSITORY": repository,
        "VERSION": versions.copy().pop(),
        "FILE": archives[target][1] if target else None,
        "SHA256": archives[target][2] if target else None,
    }[what]


template = (Path(__file__).parent / "hearth.rb.in").read_text()
print(re.sub(r"@([A-Z0-9]+(?: [\w-]+)?)@", filled, template), end="")
