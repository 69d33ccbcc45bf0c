#!/usr/bin/env bash
# Two machines made of network namespaces, with a cable of 1 Gbit/s between them. Needs root, iproute2, control groups with
# quotas of CPU time, and Open MPI.
#   tests/cluster/two-nodes.sh target/release/hearth pull [TIMES] [SEED]    pulls the cable at a random moment: half a minute each
#   tests/cluster/two-nodes.sh target/release/hearth rejoin                 and puts it back: the node is taken in again
#   tests/cluster/two-nodes.sh target/release/hearth scale                  speed together, the second node at 100, 50 and 25 %
#   tests/cluster/two-nodes.sh target/release/hearth sums                   and of a full fine-tune, whose sums take as long
set -euo pipefail
hearth=$(realpath "$1")
source "$(dirname "$(realpath "$0")")/job.sh"
mode=$2
times=${3:-3}
seed=${4:-$RANDOM}
RANDOM=$seed
limit=300 # Seconds after which a run hangs.
here=$(mktemp -d)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NO_COLOR=1
# What reaches the other node in the place of ssh, if the cable is there: with a name and shared memory of its own.
cat > "$here/reach" <<'REACH'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
ip -n hearth-b link show to-a | grep -q LOWER_UP || exit 255
exec taskset -c 1 ip netns exec hearth-b unshare -u -i -m sh -c 'hostname node-b; mount -t tmpfs none /dev/shm; exec sh -c "$*"' sh "$@"
REACH
chmod +x "$here/reach"
export OMPI_MCA_plm_rsh_agent=$here/reach
group=/sys/fs/cgroup/cpu/hearth-b
mkdir -p "$group"

cable_up() {
    ip -n hearth-a link set to-b up
    ip -n hearth-b link set to-a up
}

remove() {
    ip netns del hearth-a 2> /dev/null || true
    ip netns del hearth-b 2> /dev/null || true
    rmdir "$group" 2> /dev/null || true
    rm -rf "$here"
}
trap remove EXIT
ip netns add hearth-a
ip netns add hearth-b
ip link add to-b netns hearth-a type veth peer name to-a netns hearth-b
ip -n hearth-a addr add 10.77.0.1/24 dev to-b
ip -n hearth-b addr add 10.77.0.2/24 dev to-a
for node in a b; do ip -n hearth-$node link set lo up; done
cable_up
tc -n hearth-a qdisc add dev to-b root tbf rate 1gbit burst 256kb latency 50ms
tc -n hearth-b qdisc add dev to-a root tbf rate 1gbit burst 256kb latency 50ms

cd "$here"
write_job '"off"'

failed() {
    echo "FAILED: $1"
    cat out.txt
    exit 1
}

# Starts a run of both nodes, whose output is in out.txt.
start() {
    rm -rf run
    cable_up
    taskset -c 0 ip netns exec hearth-a timeout -k 5 $limit "$hearth" train job.toml --device cpu --threads 1 --quiet \
        --nodes 10.77.0.1,10.77.0.2 --link 10.77.0.0/24 > out.txt 2>&1 &
    run=$!
}

# Until a command succeeds; fails if the run ends before.
until_true() {
    until "$@"; do
        kill -0 $run 2> /dev/null || failed "it has ended"
        sleep 0.02
    done
}

has_steps() { [ "$(steps run)" -ge "$1" ]; }
is_said() { grep -q "$1" out.txt; }

# Every loss is that of one process, but for the order of sums.
check_losses() {
    paste -d, <(losses alone) <(losses run) | tr -d '"' | sed 's/loss://g' | awk -F, -v n="$1" \
        '{ d = ($2 - $4) / $2; if (d < 0) d = -d; if ($1 != $3 || d > 1e-4) { print "step " $1 ": " $2 " " $4; bad = 1 } }
         END { exit bad || NR != n }' || failed "losses"
}

pull() {
    echo "seed $seed"
    "$hearth" train job.toml --device cpu --threads 1 --out alone --quiet
    for n in $(seq "$times"); do
        start
        until_true has_steps $((RANDOM % 36 + 1))
        sleep "0.$((RANDOM % 4))$((RANDOM % 10))"
        ip -n hearth-b link set to-a down
        pulled=$(date +%s.%N)
        taken=$(steps run)
        until_true is_said 'is gone'
        noticed=$(date +%s.%N)
        until_true is_said 'the run goes on'
        until_true has_steps $((taken + 2))
        again=$(date +%s.%N)
        wait $run || failed "ended with $?"
        from=$(grep -o '"from_step":[0-9]*' run/events.jsonl | tail -1 | cut -d: -f2)
        awk -v n="$n" -v a="$pulled" -v b="$noticed" -v c="$again" -v t="$taken" -v f="$from" 'BEGIN {
            printf "%2d cable pulled after step %d: noticed in %.1f s, went on from step %d, next step after %.1f s\n", n, t, b - a, f, c - a
            exit !(b - a < 10 && f >= t) }' || failed "too late, or a step is lost"
        check_losses 40
    done
    echo "$times of $times as promised"
}

rejoin() {
    sed -i -e 's/^steps = .*/steps = 400/' -e 's/^save_every = .*/save_every = 10/' job.toml
    "$hearth" train job.toml --device cpu --threads 1 --out alone --quiet
    start
    until_true has_steps 5
    ip -n hearth-b link set to-a down
    until_true is_said 'the run goes on with 10.77.0.1$'
    cable_up
    up=$(date +%s.%N)
    until_true is_said '10.77.0.2 is back'
    until_true is_said 'the run goes on with 10.77.0.1, 10.77.0.2'
    awk -v a="$up" -v b="$(date +%s.%N)" 'BEGIN { printf "taken in %.1f s after the cable was put back\n", b - a }'
    wait $run || failed "ended with $?"
    [ "$(grep -c '"event":"begin"' run/events.jsonl)" = 3 ] || failed "not started three times"
    check_losses 400
}

scale() {
    sed -e 's/length = 32/length = 256/' -e 's/batch_size = 6/batch_size = 24/' -e 's/kind = "full"/kind = "lora"/' \
        -e 's/random_init = true//' -e 's/"tiny"/"alone\/model"/' job.toml > lora.toml
    "$hearth" train job.toml --device cpu --out alone --quiet --steps 1
    # Control groups are not seen from inside of a network namespace.
    while sleep 0.2; do
        for process in $(ip netns pids hearth-b); do echo "$process" > "$group/cgroup.procs"; done
    done 2> /dev/null &
    mover=$!
    for quota in 100 50 25; do
        echo "the second node at $quota % of a core:"
        echo $((1000 * quota)) > "$group/cpu.cfs_quota_us"
        taskset -c 0 ip netns exec hearth-a "$hearth" bench cluster lora.toml --device cpu --threads 1 \
            --nodes 10.77.0.1,10.77.0.2 --link 10.77.0.0/24
    done
    kill $mover
}

# Few sequences: steps short enough that the cable shows.
sums() {
    sed -e 's/length = 32/length = 256/' -e 's/batch_size = 6/batch_size = 4/' job.toml > full.toml
    taskset -c 0 ip netns exec hearth-a "$hearth" bench cluster full.toml --device cpu --threads 1 \
        --nodes 10.77.0.1,10.77.0.2 --link 10.77.0.0/24
}

"$mode"
