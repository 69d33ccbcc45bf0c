# The job that the scripts here run, and what they read of its runs. Sourced, not run.

# Writes it and its text into this folder, with a checkpoint every so many steps.
write_job() {
    seq 1 20000 > text.txt
    cat > job.toml <<JOB
[base]
path = "tiny"
random_init = true
dtype = "f32"
[text]
path = "text.txt"
length = 32
[adapter]
kind = "full"
[train]
steps = 40
batch_size = 6
[optimizer]
learning_rate = 1e-3
[output]
folder = "run"
save_every = $1
JOB
}

# Steps that a run in a folder has taken, and their losses.
steps() {
    cat "$1/events.jsonl" 2> /dev/null | grep -c '"event":"step"' || true
}
losses() {
    grep -o '"event":"step","step":[0-9]*,"loss":[0-9.]*' "$1/events.jsonl" | cut -d: -f3- | sort -t, -k1,1n -u
}
