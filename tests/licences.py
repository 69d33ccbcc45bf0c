"""Reads `cargo metadata` and fails where a dependency has a licence that our own two do not allow.

    cargo metadata --locked --format-version 1 | python3 tests/licences.py
"""

import json
import re
import sys

ALLOWED = {"MIT", "Apache-2.0", "Zlib", "ISC", "Unicode-3.0"}


def is_allowed(expression):
    """An SPDX expression; `/` is how older crates write OR."""
    words = re.findall(r"[()]|[\w.+-]+", expression.replace("/", " OR "))
    words = re.sub(r" WITH \S+", "", " ".join(words)).split()
    names = {"OR": "or", "AND": "and", "(": "(", ")": ")"}
    return eval(" ".join(names.get(word, str(word in ALLOWED)) for word in words))


packages = json.load(sys.stdin)["packages"]
wrong = [it for it in packages if not is_allowed(it["license"] or "none")]
for package in wrong:
    print(f"{package['name']} {package['version']}: licence {package['license']}", file=sys.stderr)
sys.exit(1 if wrong else 0)
