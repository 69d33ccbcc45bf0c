"""What a release is made of: the archive, its SBOM, the Homebrew formula, workflows and compose.yaml.

    python tests/release_files.py target/release/hearth

Needs cyclonedx-python-lib[json-validation], check-jsonschema and zizmor of PyPI beside this Python; ruby is asked where
it is.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(sys.argv[1]).resolve()
TOOLS = Path(sys.executable).parent
TARGETS = ["aarch64-apple-darwin", "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"]
n_passed = 0


def passed(what):
    global n_passed
    n_passed += 1
    print(f"ok: {what}")


def run(*command, **more):
    done = subprocess.run([str(it) for it in command], cwd=ROOT, text=True, capture_output=True, **more)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def archive(folder, **environment):
    command = [sys.executable, "packaging/archive.py", "--program", PROGRAM, "--out", folder]
    run(*command, env=os.environ | environment)
    return next(folder.glob("*.tar.gz"))


def check_archive(place):
    one = archive(place / "one", PYTHONHASHSEED="1", TZ="Asia/Tokyo")
    two = archive(place / "two", PYTHONHASHSEED="2", LC_ALL="C")
    assert one.read_bytes() == two.read_bytes()
    passed("an archive is the same twice, to the byte")
    sums = dict(reversed(line.split()) for line in next(one.parent.glob("*.sha256")).read_text().splitlines())
    assert sums == {name: hashlib.sha256((one.parent / name).read_bytes()).hexdigest() for name in sums}
    assert len(sums) == 2
    passed("its checksums are true")
    with tarfile.open(one) as tar:
        members = tar.getmembers()
        assert [it.name for it in members] == sorted(it.name for it in members)
        assert {(it.uid, it.gid, it.uname) for it in members} == {(0, 0, "")} and len({it.mtime for it in members}) == 1
        tar.extractall(place)
    return place / one.name.replace(".tar.gz", "")


def check_content(folder):
    version = run(folder / "hearth", "--version").split()[1]
    assert f"hearth-{version}-" in folder.name, version
    recipe, machine = folder / "recipes/sd3.5-medium-lora-16gb.toml", folder / "machines/rtx-4090.toml"
    run(folder / "hearth", "plan", recipe, "--machine", machine)
    passed("the program in it runs, with the recipes and machines beside it")
    run("bash", "-n", folder / "share/completions/hearth.bash")
    for name in ["_hearth", "hearth.fish"]:
        assert "doctor" in (folder / "share/completions" / name).read_text()
    verbs = {it.name for it in (folder / "share/man/man1").iterdir()}
    assert {"hearth.1", "hearth-train.1", "hearth-fetch.1"} <= verbs
    passed(f"it has completions for three shells and {len(verbs)} manual pages")
    texts = (folder / "THIRD-PARTY.txt").read_text()
    assert "wgpu 30" in texts and "Permission is hereby granted" in texts and "syn " not in texts.split("=" * 80)[0]
    passed("it has the licences of dependencies")


def check_sbom(folder):
    text = (folder / "sbom.cdx.json").read_text()
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert error is None, error
    sbom = json.loads(text)
    inside = {it["name"] for it in sbom["components"] if it["scope"] == "required"}
    built_with = {it["name"] for it in sbom["components"] if it["scope"] == "excluded"}
    assert {"wgpu", "ring", "clap", "trainer", "rust-std"} <= inside, inside
    assert {"cc", "syn", "serde_derive"} <= built_with, built_with
    # For tests, for another system, and of a feature that is not turned on.
    assert not {"expect-test", "objc2-metal", "zlib-rs"} & (inside | built_with)
    assert sbom["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(PROGRAM.read_bytes()).hexdigest()
    passed(f"its SBOM is CycloneDX, with {len(inside)} crates in the program and {len(built_with)} beside")


def check_formula(place):
    folder = place / "sums"
    folder.mkdir()
    for at, target in enumerate(TARGETS):
        name = f"hearth-1.2.3-{target}"
        (folder / f"{name}.sha256").write_text(f"{at:064}  {name}.tar.gz\n{9:064}  {name}.cdx.json\n")
    formula = run(sys.executable, "packaging/formula.py", "owner/name", folder)
    assert "@" not in formula.replace("@@", "") and f"{2:064}" in formula and f"{9:064}" not in formula
    (place / "hearth.rb").write_text(formula)
    if shutil.which("ruby"):
        run("ruby", "-c", place / "hearth.rb")
    passed("the formula names every archive")
    (folder / f"hearth-1.2.3-{TARGETS[0]}.sha256").unlink()
    command = [sys.executable, "packaging/formula.py", "owner/name", str(folder)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode != 0
    passed("and is refused where one is missing")


def check_workflows():
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    run(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    run(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml")
    passed("workflows and compose.yaml follow their schemas")
    # `./` is how every runner finds a workflow of the same repository.
    run(TOOLS / "zizmor", "--offline", "--min-severity", "medium", *workflows)
    passed("zizmor finds nothing in the workflows")


with tempfile.TemporaryDirectory() as place:
    place = Path(place)
    folder = check_archive(place)
    check_content(folder)
    check_sbom(folder)
    check_formula(place)
    check_workflows()
print(f"packaging: {n_passed} passed, 0 failed")
