"""Reads `cargo metadata` and fails where a dependency has a licence that deny.toml does not allow.

    cargo metadata --locked --format-version 1 | python3 tests/licences.py
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ALLOWED = set(tomllib.loads((Path(__file__).parent.parent / "deny.toml").read_text())["licenses"]["allow"])


def is_allowed(expression):
    """An SPDX expression; `/` is how older crates write OR. AND binds closer, and an exception only allows more."""
    words = re.findall(r"[()]|[\w.+-]+", expression.replace("/", " OR "))

    def take(word):
        is_next = words[:1] == [word]
        del words[:is_next]
        return is_next

    def either():
        found = both()
        while take("OR"):
            found = both() or found
        return found

    def both():
        found = one()
        while take("AND"):
            found = one() and found
        return found

    def one():
        if take("("):
            found = either()
            return take(")") and found
        found = bool(words) and words.pop(0) in ALLOWED
        if take("WITH"):
            del words[:1]
        return found

    # What is left over was not understood.
    return either() and not words


for expression, expected in {
    "MIT OR GPL-3.0": True, "MIT AND GPL-3.0": False, "MIT/Apache-2.0": True, "GPL-3.0 OR MIT AND ISC": True,
    "(GPL-3.0 OR MIT) AND ISC": True, "(MIT OR ISC) AND GPL-3.0": False, "Apache-2.0 WITH LLVM-exception": True,
    "none": False, "": False, "MIT MIT": False, "(MIT": False,
}.items():
    assert is_allowed(expression) is expected, expression

packages = json.load(sys.stdin)["packages"]
wrong = [it for it in packages if not is_allowed(it["license"] or "none")]
for package in wrong:
    print(f"{package['name']} {package['version']}: licence {package['license']}", file=sys.stderr)
sys.exit(1 if wrong else 0)
