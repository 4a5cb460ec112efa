#!/usr/bin/env bash
# compute-sanitizer over a part of the GPU tests: out-of-bounds and misaligned access, races in shared memory, reads of
# memory that nothing wrote. A tool slows a kernel 10 to 100 times, so this runs the memory-bound ops on small cases. The
# tools run side by side: of the 98 and 122 s that memcheck and racecheck took on an H200, 84 were each one's start.
#
#   tests/gpu/sanitize.sh [--tools "memcheck racecheck"] [pytest arguments that replace the default selection]
#
# PYTORCH_NO_CUDA_MEMORY_CACHING gives every tensor an allocation of its own: inside the caching allocator's blocks an
# access beyond a tensor hits its neighbor, and no tool sees it.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v compute-sanitizer >/dev/null || { echo "sanitize.sh: compute-sanitizer is not on PATH (CUDA toolkit)" >&2; exit 2; }
python="${PYTHON:-python}"
tools="memcheck racecheck initcheck synccheck"
if [ "${1:-}" = --tools ]; then
    tools="$2"
    shift 2
fi
selection=("$@")
if [ ${#selection[@]} -eq 0 ]; then
    selection=(tests/gpu -k "not beyond_2_to and not graph and not capture_without and not launches_it and not 4096")
fi
check() {
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 1 --target-processes all \
        "$python" -m pytest -q -p no:cacheprovider -m gpu -x "${selection[@]}" 2>&1 | sed -u "s/^/$1: /"
}
running=()
for tool in $tools; do
    check "$tool" &
    running+=($!)
done
failed=0
for process in "${running[@]}"; do
    wait "$process" || failed=1
done
exit $failed
