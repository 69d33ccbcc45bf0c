"""What the program is made of, from `cargo tree` and `cargo metadata`: an SBOM in CycloneDX's JSON, and licences.

Both list what is in the program (`required`) and, apart from it, what only ran when it was built (`excluded`).
"""

import json
import re
import uuid
from pathlib import Path
from urllib.parse import quote

LICENCE_NAMES = ("licen", "copying", "notice", "unlicense")


class Inventory:
    """`inside` and `beside` are what `cargo tree` prints: only it leaves out what no feature of the program needs."""

    def __init__(self, metadata, lock, inside, beside):
        of = {(it["name"], it["version"]): it for it in metadata["packages"]}
        self.program = next(it for it in metadata["packages"] if it["name"] == "hearth" and not it["source"])
        self.edges = {it["id"]: it["deps"] for it in metadata["resolve"]["nodes"]}
        inside, beside = names(inside) - {("hearth", self.program["version"])}, names(beside)
        self.inside = [of[it] for it in sorted(inside)]
        self.only_built_with = [of[it] for it in sorted(beside - inside) if it[0] != "hearth"]
        pattern = r'name = "(.+)"\nversion = "(.+)"\nsource = .+\nchecksum = "(\w+)"'
        self.checksums = {(name, version): sum for name, version, sum in re.findall(pattern, lock)}

    def sbom(self, target, timestamp, program_sha256, rust):
        """CycloneDX 1.6. The same program gives the same text."""
        components = [self.component(it, "required") for it in self.inside]
        components += [self.component(it, "excluded") for it in self.only_built_with]
        components.append({
            "type": "library", "bom-ref": "rust-std", "name": "rust-std", "version": rust, "scope": "required",
            "licenses": [{"expression": "MIT OR Apache-2.0"}],
        })
        references = {it["id"]: self.reference(it) for it in [self.program, *self.inside, *self.only_built_with]}
        used = lambda id: sorted({references[it["pkg"]] for it in self.edges[id] if it["pkg"] in references
                                  and any(kind["kind"] != "dev" for kind in it["dep_kinds"])})
        main = self.component(self.program, "required") | {
            "type": "application",
            "hashes": [{"alg": "SHA-256", "content": program_sha256}],
            "properties": [{"name": "hearth:target", "value": target}],
        }
        return {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, target + program_sha256)}",
            "version": 1,
            "metadata": {"timestamp": timestamp, "component": main},
            "components": components,
            "dependencies": [{"ref": references[id], "dependsOn": used(id)} for id in sorted(references)],
        }

    def reference(self, package):
        kind = "cargo" if package["source"] else "generic/hearth"
        return f"pkg:{kind}/{package['name']}@{quote(package['version'])}"

    def component(self, package, scope):
        reference = self.reference(package)
        component = {
            "type": "library", "bom-ref": reference, "name": package["name"], "version": package["version"],
            "scope": scope, "purl": reference, "licenses": [{"expression": expression(package)}],
        }
        checksum = self.checksums.get((package["name"], package["version"]))
        if checksum:
            component["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        return component

    def licences(self):
        """Every text once, after the crates that have it."""
        owners, without = {}, []
        for package in (it for it in self.inside if it["source"]):
            folder = Path(package["manifest_path"]).parent
            files = [it for it in sorted(folder.iterdir()) if it.name.lower().startswith(LICENCE_NAMES) and it.is_file()]
            title = f"{package['name']} {package['version']} ({expression(package)})"
            if not files:
                without.append(title)
            for file in files:
                text = file.read_text(encoding="utf-8", errors="replace").strip()
                titles = owners.setdefault(" ".join(text.split()), (text, []))[1]
                titles += [title] if title not in titles else []
        ordered = sorted(owners.values(), key=lambda it: (it[1], it[0]))
        pages = [f"{chr(10).join(titles)}\n\n{text}\n" for text, titles in ordered]
        head = "hearth contains these works of others, and the Rust standard library (MIT OR Apache-2.0).\n"
        if without:
            head += "\nWithout a text of their own; LICENSE-MIT and LICENSE-APACHE have the terms:\n"
            head += "".join(f"{title}\n" for title in without)
        return f"\n{'=' * 80}\n\n".join([head, *pages])


def names(tree):
    """Lines such as `ring v0.17.14`; some go on after that."""
    return {tuple(line.replace(" v", " ").split()[:2]) for line in tree.splitlines() if line}


def expression(package):
    """An SPDX expression; `/` is how older crates write OR."""
    return " OR ".join(it.strip() for it in package["license"].split("/"))


def as_text(sbom):
    return json.dumps(sbom, indent=1, ensure_ascii=False) + "\n"
