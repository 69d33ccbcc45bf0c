#!/usr/bin/env bash
# Ops by matrix units: on the software driver of Debian's unstable release, whose Mesa has such units, where that of the
# stable one has none.
#   tests/matrix_units.sh [TESTS…]
# Needs root and debootstrap, which puts the driver into target/unstable: a minute or two. Its kernels take long
# to compile.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
place=target/unstable
if [ ! -e $place/done ]; then
    rm -rf $place
    debootstrap --variant=minbase --include=mesa-vulkan-drivers,libvulkan1 unstable $place > target/unstable.log
    touch $place/done
fi
# The tests, as cargo built them; the last line names the program.
tests=$(realpath "$(cargo test --package compute --lib --no-run 2>&1 | sed -n 's/.*(\(.*\))$/\1/p' | tail -n 1)")
libraries=$(realpath $place/usr/lib/"$(uname -m)"-linux-gnu)
drivers=$(realpath $place/usr/share/vulkan/icd.d/lvp_icd*.json)
[ $# -gt 0 ] || set -- matrix_units ops::linear ops::attention
# Libraries of that release ask for its loader.
cd crates/compute
VK_DRIVER_FILES=$drivers HEARTH_TEST_DEVICE=gpu:software HEARTH_TEST_DTYPE=${HEARTH_TEST_DTYPE:-f16} \
    "$libraries"/ld-linux-*.so.* --library-path "$libraries" "$tests" "$@" --nocapture
