#!/usr/bin/env bash
# Every reader of files from strangers but those of weights, so many seconds each: fuzz/run.sh 60
set -euo pipefail
cd "$(dirname "$0")/.."
# Chat templates are run by the program itself.
cargo build --quiet --locked --package hearth
while read -r reader seeds; do
    mkdir -p "fuzz/corpus/$reader"
    RUSTC_BOOTSTRAP=1 HEARTH=$PWD/target/debug/hearth \
        cargo fuzz run --features trainer "$reader" "fuzz/corpus/$reader" "$seeds" -- \
        -max_total_time="${1:-60}" -timeout=20 -rss_limit_mb=4096 -verbosity=0 -print_final_stats=1 < /dev/null
done << 'READERS'
image tests/golden/images
metadata fuzz/seeds/metadata
job recipes
records tests/golden/run
settings fuzz/seeds/settings
tokenizer fuzz/seeds/tokenizer
language_gguf tests/golden/text
adapter tests/golden/sd3/adapters
chat_template fuzz/seeds/chat_template
READERS
