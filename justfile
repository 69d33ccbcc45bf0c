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

# A thousand kills and disk faults at file operations of runs; prints a table.
torture:
    cargo test --release --test hearth torture -- --ignored --nocapture

# Readers of settings, tokenizers, templates, images, jobs and adapters against made-up files, a minute each.
fuzz:
    fuzz/run.sh 60
