#!/usr/bin/env bash
# Kills a random rank of a run at a random moment, or stops it as a machine that is suspended, with Open MPI and MPICH in turn,
# and looks whether the run goes on or, with --strict, stops as promised. A rank that was stopped and goes on ends by itself.
# Prints a line for each and its seed.
#   tests/cluster/kills.sh target/release/hearth [TIMES] [SEED]
set -euo pipefail
hearth=$(realpath "$1")
source "$(dirname "$(realpath "$0")")/job.sh"
times=${2:-30}
seed=${3:-$RANDOM}
RANDOM=$seed
echo "seed $seed"
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NO_COLOR=1
secs=()
limit=180 # Seconds after which a run hangs.
cd "$here"
write_job 10
now() { date +%s.%N; }

# The process of a rank: with MPICH the child of the one that its launcher knows.
process_of() {
    for process in /proc/[0-9]*; do
        { tr '\0' ' ' < "$process/cmdline"; } 2> /dev/null | grep -q -- "--out $here/run " || continue
        { tr '\0' '\n' < "$process/environ" > environ; } 2> /dev/null || continue
        grep -qx "OMPI_COMM_WORLD_RANK=$1" environ || { grep -qx "PMI_RANK=$1" environ && grep -q '^HEARTH_SHIELDED' environ; } || continue
        echo "${process#/proc/}"
        return
    done
}

# Every step has the loss of one process, but for the order of sums. The last step of a first rank that was killed may have
# no line in its log; the others took it, and go on behind it.
check_losses() {
    awk -F, -v first="$1" '{ gsub(/"|loss:/, "") } NR == FNR { alone[$1] = $2; next } { run[$1] = $2 }
        END {
            for (step in alone) {
                if (!(step in run)) { missing++; continue }
                d = (alone[step] - run[step]) / alone[step]
                if (d < 0) d = -d
                if (d > 1e-4) { print "step " step ": " alone[step] " " run[step]; bad = 1 }
            }
            if (missing > first) { print missing " steps are not in the log"; bad = 1 }
            exit bad || length(alone) != 40 }' <(losses alone) <(losses run)
}

failed() {
    echo "FAILED: $1"
    cat out.txt
    exit 1
}

# Whether a process that was stopped ends when it goes on: nobody waits for it any more.
ends_by_itself() {
    kill -CONT "$1" 2> /dev/null || return 0
    for _ in $(seq 200); do
        [ -d "/proc/$1" ] && ! grep -q '^State:.Z' "/proc/$1/status" || return 0
        sleep 0.1
    done
    kill -9 "$1"
    return 1
}

train() {
    timeout -k 5 $limit "$hearth" train job.toml --device cpu --threads 1 --quiet --out "$here/run" "$@"
}

"$hearth" train job.toml --device cpu --threads 1 --out alone --quiet
for launcher in mpirun.openmpi mpirun.mpich; do
    rm -rf run
    begun=$(now)
    train --nodes localhost:2 --mpirun $launcher > out.txt 2>&1 || failed "not killed"
    secs[${#secs[@]}]=$(awk -v a="$begun" -v b="$(now)" 'BEGIN { printf "%d", 1000 * (b - a) }')
done
n=1
while [ $n -le "$times" ]; do
    which=$((n % 2))
    launcher=$([ $which = 0 ] && echo mpirun.openmpi || echo mpirun.mpich)
    size=$((RANDOM % 2 + 2)) rank=$((RANDOM % size)) strict=$([ $((RANDOM % 4)) = 0 ] && echo --strict || true)
    signal=$([ $((RANDOM % 3)) = 0 ] && echo STOP || echo KILL)
    rm -rf run
    begun=$(now)
    train --nodes localhost:$size --mpirun $launcher $strict > out.txt 2>&1 &
    run=$!
    sleep "$(awk -v r=$RANDOM -v t="${secs[which]}" 'BEGIN { print 0.9 * r / 32768 * t / 1000 }')"
    until process=$(process_of $rank) && [ -n "$process" ]; do
        kill -0 $run 2> /dev/null || break
        sleep 0.02
    done
    taken=$(steps run)
    [ -z "$process" ] || kill -$signal "$process" 2> /dev/null || process=
    at=$(now)
    [ -z "$strict" ] && [ -n "$process" ] && while kill -0 $run 2> /dev/null && [ "$(steps run)" -le $((taken + 1)) ]; do sleep 0.02; done
    again=$(now)
    code=0
    wait $run || code=$?
    [ $code -lt 124 ] || failed "hangs"
    [ $signal = KILL ] || [ -z "$process" ] || ends_by_itself "$process" || failed "the rank that was stopped is still there"
    end="goes on"
    if [ $code != 0 ]; then
        # A strict run stops; so does one whose ranks had not joined yet.
        [ -n "$strict" ] || [ "$taken" = 0 ] || failed "ended with $code"
        grep -q '^error: ' out.txt || failed "no error"
        end="stops"
        # By the first rank, or by another when that one is gone.
        saved=$({ ls -d run/checkpoints/* run/ranks/*/checkpoints/* 2> /dev/null || true; } | grep -o 'step-[0-9]*$' | sort | tail -1 | tr -dc 0-9 || true)
        resume=${saved:+--resume}
        [ "$((10#${saved:-0}))" -ge "$taken" ] || failed "$taken steps taken, $saved saved"
        [ -n "$resume" ] || rm -rf run
        train $resume >> out.txt 2>&1 || failed "cannot be resumed"
    fi
    check_losses $((rank == 0)) || failed "losses"
    [ -n "$process" ] || continue # It had ended: another try.
    from=$(grep -o '"from_step":[0-9]*' run/events.jsonl | tail -1 | cut -d: -f2)
    [ -z "$process" ] || [ "$from" -ge "$taken" ] || [ "$taken" = 40 ] || failed "$taken taken, went on from $from"
    awk -v n="$n" -v l="$launcher" -v s="$size" -v r="$rank" -v t="$taken" -v e="$end" -v f="$from" -v o="$strict" \
        -v b="$begun" -v a="$at" -v g="$again" -v k="$signal" 'BEGIN {
            printf "%2d %-14s %d ranks, SIG%s to rank %d after %.1f s, %d steps taken: %s%s from step %d", n, l, s, k, r, a - b, t, o ? "strict, " : "", e, f
            printf e == "stops" ? "\n" : ", next step after %.1f s\n", g - a }'
    n=$((n + 1))
done
echo "$times of $times as promised"
