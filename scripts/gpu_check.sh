#!/usr/bin/env bash
# Runs what needs a GPU, where there is one: builds in place with the Python at hand (which must have torch), runs the
# tests marked `gpu`, then a small benchmark of copies, and of saves, asynchronous saves and loads of CUDA states. Prints
# a report for docs/benchmarks.md.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

if ! "$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu_check: no CUDA device that torch can use: nothing to check" >&2
  exit 1
fi
"$PYTHON" -c 'import pybind11' 2>/dev/null || "$PYTHON" -m pip install -q pybind11
"$PYTHON" setup.py -q build_ext --inplace
"$PYTHON" - <<'PY'
import torch, vescale_ckpt._C as engine
print("device:", torch.cuda.get_device_name(0), "| torch", torch.__version__, "| engine", engine.capabilities())
print(engine.device_info())
PY
"$PYTHON" -m pytest -q -m gpu tests
"$PYTHON" -m benchmarks.gpu
