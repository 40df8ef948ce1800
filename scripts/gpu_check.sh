#!/usr/bin/env bash
# All that needs a GPU, in three calls of under nine minutes each (`--plan` shows them): builds in place with the Python at
# hand (which must have torch), runs the tests marked `gpu`, measures, and checks ranks and kernels. What calls B and C find
# is added to what call A left in build/gpu_check. Leaves gpu.json, report.md and logs.txt there, and in $OUT if it is set,
# and prints the report last. Installs nothing. Options: --call A|B|C --only STEP,... --budget SECONDS --list --plan.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
