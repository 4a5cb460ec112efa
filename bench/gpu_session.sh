#!/usr/bin/env bash
# A quarter of an hour on a GPU in one command, without network or an installed package: builds or loads the library,
# then tests and measures in order of value. docs/benchmarking.md says how to use it; `gpu_session.sh --help` lists the options.
#
#   bench/gpu_session.sh --pack            at home: puts the built library where it can be carried along
#   bench/gpu_session.sh --out RESULTS     on the GPU; the same command again resumes where the last call stopped
#   bench/gpu_session.sh --collect RESULTS at home: into bench/results/ and the tuned tables
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-$(command -v python3 || command -v python)}" -m bench.gpu.session "$@"
