#!/usr/bin/env bash
# Builds the fuzz targets, which takes ten minutes, and fuzzes every reader for so many seconds: fuzz/run.sh 60
set -euo pipefail
cd "$(dirname "$0")/.."
# Chat templates are run by the program itself.
cargo build --quiet --locked --package hearth
RUSTC_BOOTSTRAP=1 cargo fuzz build --features trainer
host=$(rustc --print host-tuple)
fuzz/readers.sh "${1:-60}" "fuzz/target/$host/release" target/debug/hearth
