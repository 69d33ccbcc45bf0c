#!/usr/bin/env bash
# Fuzzes every reader of files from strangers, side by side on all cores, for so many seconds each, and prints a table:
#   fuzz/readers.sh 60 PROGRAMS HEARTH
# PROGRAMS is the folder of the built fuzz targets, HEARTH the program that runs chat templates. Neither cargo nor a
# network is needed, so that what was built here can run elsewhere. Corpora grow in fuzz/corpus; inputs that fail, and
# what was said about them, are in fuzz/failed. JOBS=4 runs so many at once, COPIES=5 so
# many of each reader of weights, which are the fastest. READERS="torch image" takes these alone, in so many copies.
set -euo pipefail
cd "$(dirname "$0")/.."
# A program that reads a template may end before all of it is written: an error like others, as in hearth itself.
trap "" PIPE
seconds=${1:-60} programs=$(realpath "$2") hearth=$(realpath "$3")
# The name of a reader, and its seeds.
readers='safetensors tests/golden/weights
torch tests/golden/weights
gguf tests/golden/weights
adapter tests/golden/sd3/adapters
chat_template fuzz/seeds/chat_template
checkpoint fuzz/seeds/checkpoint
clip tests/golden/clips
events tests/golden/run
image tests/golden/images
import tests/golden/import
job recipes
language_gguf tests/golden/text
metadata fuzz/seeds/metadata
settings fuzz/seeds/settings
texts fuzz/seeds/texts
tokenizer fuzz/seeds/tokenizer'
failed=$PWD/fuzz/failed
# Where memory was allocated is not kept, which makes readers of weights 1.7 times as fast.
export ASAN_OPTIONS=malloc_context_size=1:quarantine_size_mb=8
# Most readers take a path: in memory there is no disk to wait for.
place=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/hearth-fuzz.XXXXXX")
trap 'rm -rf "$place"' EXIT
mkdir -p "$failed"

# Leaks are not looked for: a thread whose work is done may still be ending when they are counted, and so counts as one.
fuzz() { # reader, seeds, copy: until the time is up, also after an input that fails
    local reader=$1 seeds=$2 log=$place/$1.$3.log end=$((SECONDS + seconds)) program=$programs/$1
    [ -x "$program" ] || program=$programs/readers
    mkdir -p "fuzz/corpus/$reader"
    while [ $SECONDS -lt "$end" ]; do
        HEARTH_READER=$reader HEARTH=$hearth TMPDIR=$place "$program" "fuzz/corpus/$reader" "$seeds" \
            -max_total_time=$((end - SECONDS)) -timeout=20 -rss_limit_mb=4096 -verbosity=0 -print_final_stats=1 \
            -detect_leaks=0 -reload=0 -artifact_prefix="$failed/$reader-" < /dev/null >> "$log" 2>&1 && continue
        tail -c 20000 "$log" > "$failed/$reader.log"
        sleep 1
    done
}

sum() { awk -v name="stat::$2:" '$1 == name { n += $2 } END { print n + 0 }' "$place/$1".*.log; }

wanted=" ${READERS:-$(cut -d' ' -f1 <<< "$readers" | tr '\n' ' ')} "
running=0
while read -r reader seeds; do
    [[ $wanted == *" $reader "* ]] || continue
    copies=1
    [[ $seeds != tests/golden/weights && -z ${READERS:-} ]] || copies=${COPIES:-1}
    for copy in $(seq "$copies"); do
        [ $running -lt "${JOBS:-$(nproc)}" ] || { wait -n && running=$((running - 1)); }
        fuzz "$reader" "$seeds" "$copy" &
        running=$((running + 1))
    done
done <<< "$readers"
wait

total=0 total_failed=0
echo "| reader | inputs | a second | corpus | failed |"
echo "|---|---|---|---|---|"
while read -r reader _; do
    [ -e "$place/$reader.1.log" ] || continue
    inputs=$(sum "$reader" number_of_executed_units)
    n_failed=$(find "$failed" -type f -name "$reader-*" | wc -l)
    corpus=$(find "fuzz/corpus/$reader" -type f | wc -l)
    echo "| $reader | $inputs | $((inputs / seconds)) | $corpus | $n_failed |"
    total=$((total + inputs)) total_failed=$((total_failed + n_failed))
done <<< "$readers"
echo "| all | $total | $((total / seconds)) | | $total_failed |"
[ $total_failed -eq 0 ]
