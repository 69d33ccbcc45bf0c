# Plain cargo lines with short names; nothing here that cargo alone could not do.

test:
    cargo test

lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings

docs:
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items

snapshots:
    UPDATE_EXPECT=1 cargo test

size:
    cargo run --quiet --example size

# What takes too long for the default suite.
sweep:
    cargo test --release --test hearth -- --ignored
    cargo test --release --workspace --lib planted -- --ignored

# A thousand kills and a thousand disk faults at file operations of runs and commands; prints a table.
torture:
    cargo test --release --test hearth torture -- --ignored --nocapture

# Ranks that are killed or stopped and cables that are pulled, at 30 random moments each, and a cable that is put back: as root
# (network namespaces); three quarters of an hour.
cluster:
    cargo build --release
    tests/cluster/kills.sh target/release/hearth 30
    tests/cluster/two-nodes.sh target/release/hearth pull 30
    tests/cluster/two-nodes.sh target/release/hearth rejoin

# Every reader of files from strangers against made-up files, a minute each, side by side; prints a table.
fuzz:
    fuzz/run.sh 60

# Every op on a software driver for Vulkan, in every dtype, wide heads too: long, for kernels are compiled.
software-gpu:
    HEARTH_TEST_DEVICE=gpu:software cargo test --workspace --lib -- ops:: quantised::

# What watching costs the steps of a live run, by pairs of windows: open streams, the dashboard; a quarter of an hour of a
# quiet machine.
watching-costs:
    cargo build --release
    python3 tests/watching_costs.py target/release/hearth streams
    python3 tests/watching_costs.py target/release/hearth dashboard

# The dashboard in a real terminal: tmux presses keys and reads the screen.
terminal:
    cargo build --release
    python3 tests/tmux.py target/release/hearth
