#!/usr/bin/env bash
# Builds the Dockerfile without CUDA and runs what comes out as docs/containers.md says: as another user, with a file system
# that cannot be written to, within a memory limit, without a network.
#   tests/containers.sh target/release/hearth
# Needs root, podman, buildah, runc and debootstrap, which makes a base: no registry is asked.
set -euo pipefail
program=$(realpath "$1")
cd "$(dirname "$(realpath "$0")")/.."
place=$(mktemp -d)
trap 'podman rm -f hearth-run > /dev/null 2>&1 || true; rm -rf "$place"' EXIT
skipped() {
    echo "containers: skipped, $1"
    tail -n 3 "$place/log" 2> /dev/null || true
    exit 0
}
for tool in podman buildah runc debootstrap; do
    command -v $tool > /dev/null || skipped "no $tool"
done
[ "$(id -u)" = 0 ] || skipped "not root"
n_passed=0
passed() { n_passed=$((n_passed + 1)); echo "ok: $1"; }
failed() { echo "FAILED: $1"; exit 1; }

base=${CONTAINER_BASE:-}
if [ -z "$base" ]; then
    debootstrap --variant=minbase bookworm "$place/root" > "$place/log" 2>&1 || skipped "no base could be made"
    tar -C "$place/root" -cf - . | podman import - localhost/hearth-base > /dev/null 2>&1
    rm -rf "$place/root"
    base=localhost/hearth-base
fi
mkdir "$place/program"
cp "$program" "$place/program/hearth"
printf 'FROM scratch\nCOPY hearth /hearth\n' > "$place/program/Dockerfile"
build() { buildah build --isolation=chroot --format docker --pull=never "$@" > "$place/log" 2>&1 || { tail "$place/log"; failed "build"; }; }
build -t localhost/hearth-program "$place/program"
build -t localhost/hearth:cpu --build-arg VARIANT=cpu --build-arg CPU_BASE="$base" --build-arg PROGRAM=localhost/hearth-program .
passed "the image is built"
bytes() { podman image inspect --format '{{.Size}}' "$1"; }
own=$((($(bytes localhost/hearth:cpu) - $(bytes "$base")) / 1000000))
[ $own -lt 40 ] || failed "hearth adds $own MB to its base, 40 at most"
passed "hearth adds $own MB to its base"

# Limits of open files and processes, since who runs this may not be allowed to raise them.
container() {
    podman --runtime runc run --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 --read-only --cap-drop=all \
        --security-opt=no-new-privileges --tmpfs /tmp --network none --memory 2g -v "$place/data:/data" "$@"
}
mkdir "$place/data"
chown 1000:1000 "$place/data"
container --rm --no-healthcheck "$base" true > "$place/log" 2>&1 || skipped "containers cannot run here"
container --rm --no-healthcheck localhost/hearth:cpu doctor --json > "$place/doctor.json"
python3 - "$place/doctor.json" <<'PY' || failed "the memory limit is not seen"
import json, sys
limit = json.load(open(sys.argv[1]))["budget"]["memory"]["limit"]
assert limit and limit < 2 << 30, limit
PY
passed "doctor sees the memory limit"
container --rm --no-healthcheck localhost/hearth:cpu demo --quiet || failed "the demo"
[ -s "$place/data/hearth-demo/before-after.png" ] || failed "the demo left no image"
[ "$(stat -c %u "$place/data/hearth-demo/before-after.png")" = 1000 ] || failed "the demo ran as another user"
passed "the demo trains as user 1000, and leaves its images"

# The same job for longer, stopped by the signal of the image.
cp recipes/demo.toml "$place/data/"
container -d --name hearth-run localhost/hearth:cpu train demo.toml --quiet --out run --steps 100000 \
    --set base.path=hearth-demo/base --set data.images=hearth-demo/images > "$place/log" 2>&1 # No systemd here: nobody checks its health by the clock.
for _ in $(seq 600); do
    grep -q '"event":"step"' "$place/data/run/events.jsonl" 2> /dev/null && break
    sleep 0.2
done
podman --runtime runc healthcheck run hearth-run > "$place/health" || { cat "$place/health"; podman logs hearth-run; failed "the health check"; }
passed "the health check passes while it trains"
podman --runtime runc stop -t 120 hearth-run > /dev/null
ls "$place/data/run/checkpoints" | grep -q step- || failed "a stopped container left no checkpoint"
grep -q '"reason":"interrupted"' "$place/data/run/events.jsonl" || failed "the run did not end in order"
passed "a stopped container leaves a checkpoint"
echo "containers: $n_passed passed, 0 failed"
