#!/usr/bin/env bash
# All that needs a GPU, in one call of under 9 minutes: builds in place with the Python at hand (which must have torch),
# runs the tests marked `gpu` in several environments, measures, and writes gpu.json and report.md under $OUT, else
# build/gpu_check. Installs nothing. Options: --only STEP,... --budget SECONDS --list.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
