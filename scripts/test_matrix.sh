#!/usr/bin/env bash
# Runs the Python tests under other supported torch versions, each in an environment of its own. By hand: only some versions
# have small CPU builds, the others download gigabytes. Usage: scripts/test_matrix.sh [VERSION ...]
set -euo pipefail
cd "$(dirname "$0")/.."
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.11.0 2.12.1 2.13.0 2.14.0 2.15.0)
failed=()
for version in "${versions[@]}"; do
  venv=".venv-torch-$version"
  echo "== torch $version"
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "torch==$version"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -r requirements-dev.txt
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
  "$venv/bin/python" -m pytest -q || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
