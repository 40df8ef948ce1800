#!/usr/bin/env bash
# Builds one wheel, and runs the Python tests with it beside each supported torch, in an environment of its own for each. By
# hand: only some versions have small CPU builds, the others download gigabytes. The wheel links no torch, so one serves all.
# Then each torch loads what every one of them has saved, with this package and with stock DCP (cross_versions.py).
# Usage: scripts/test_matrix.sh [VERSION ...]; PYTEST_ARGS: arguments for pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.11.0 2.12.1 2.13.0 2.14.0 2.15.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { "$1/bin/python" -m pip "${@:2}" -q --disable-pip-version-check; }

# What the tests need of the sources, without the package: Python must import the installed one.
git archive HEAD | tar -x -C "$work"
rm -rf "$work/vescale_ckpt" "$work/tests/project"

failed=() pythons=()
for version in "${versions[@]}"; do
  venv=".venv-torch-$version"
  echo "== torch $version"
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  pip "$venv" install "torch==$version"
  pip "$venv" install -r requirements-dev.txt
  if ! compgen -G "$work/wheel/*.whl" > /dev/null; then
    pip "$venv" wheel --no-build-isolation --no-deps --wheel-dir "$work/wheel" .
  fi
  pip "$venv" install --no-deps --force-reinstall "$work"/wheel/*.whl
  python=$PWD/$venv/bin/python
  pythons+=("$python")
  # shellcheck disable=SC2086
  (cd "$work" && "$python" -m pytest -q ${PYTEST_ARGS:-}) || failed+=("$version")
done
(cd "$work" && python3 scripts/cross_versions.py "${pythons[@]}") || failed+=("across versions")
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
