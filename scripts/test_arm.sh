#!/usr/bin/env bash
# Saves and loads in Python on emulated 64-bit Arm: Debian's Python 3.11, torch's wheel and the engine, cross-compiled, in
# build/arm64 (1 GB, of which 200 MB are downloaded once). This processor reads what that one saved, and the other way round.
#
# torch 2.10 is older than the oldest that is supported: on PyPI its wheel for aarch64 is the last of 146 MB. From 2.11 on they have
# 420 MB and more; what the one of 2.12.1 requires was read: CUDA's libraries, which are gigabytes.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$PWD/build/arm64
python=$PWD/${VENV:-.venv}/bin/python
skip() {
  echo "Python on 64-bit Arm skipped: $1"
  exit 0
}
for tool in aarch64-linux-gnu-g++ qemu-aarch64 apt-get dpkg-deb; do
  command -v $tool >/dev/null || skip "no $tool"
done
[ "$("$python" -c 'import sys; print(sys.version_info[:2])')" = "(3, 11)" ] || skip "Debian's Python is 3.11, this one is not"

if [ ! -e "$base/root/complete" ]; then
  rm -rf "$base/root" && mkdir -p "$base/apt/lists/partial" "$base/apt/archives/partial" "$base/root" && : > "$base/apt/status"
  # Apart from this system's own packages: another list, another status, nothing installed.
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root -o Dir::Cache="$base/apt"
    -o Dir::State::Lists="$base/apt/lists" -o Dir::State::status="$base/apt/status" -o Dir::Etc::sourceparts=/nonexistent
    -o Dir::Etc::sourcelist=/etc/apt/sources.list.d/debian.sources -o Acquire::Languages=none)
  timeout 300 "${apt[@]}" update && timeout 300 "${apt[@]}" -y -d --no-install-recommends install python3.11 libpython3.11-dev libstdc++6 ||
    skip "no packages of Debian's for arm64"
  for package in "$base"/apt/archives/*.deb; do dpkg-deb -x "$package" "$base/root"; done
  rm -rf "$base/apt" && touch "$base/root/complete"
fi
if [ ! -e "$base/site/complete" ]; then
  rm -rf "$base/site"
  # What torch needs beside numpy is the same on all processors: it comes from this one's packages.
  timeout 900 "$python" -m pip install -q --disable-pip-version-check --no-deps --no-compile --target "$base/site" --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --only-binary :all: torch==2.10.0 numpy==2.4.6 ||
    skip "no wheels of torch 2.10 and numpy for aarch64"
  touch "$base/site/complete"
fi

# The units of the last build. A folder's object is made anew if any source is newer.
mkdir -p "$base/objects"
for object in "$base"/objects/*.o; do  # of a folder that is no more
  [ -e "build/units/$(basename "$object" .o).cpp" ] || rm -f "$object"
done
for unit in build/units/*.cpp; do
  object=$base/objects/$(basename "$unit" .cpp).o
  [ -e "$object" ] && [ -z "$(find csrc "$unit" -newer "$object" -type f -print -quit)" ] || echo "$unit $object"
done | xargs -r -P 2 -n 2 sh -c 'timeout 1800 aarch64-linux-gnu-g++ -std=c++20 -O1 -fPIC -fvisibility=hidden -D_GNU_SOURCE -Icsrc \
  -I"$("$0" -c "import pybind11; print(pybind11.get_include())")" -I"$1/root/usr/include/python3.11" -I"$1/root/usr/include" \
  -c "$2" -o "$3"' "$python" "$base"
rm -rf "$base/package" && mkdir -p "$base/package" && cp -r vescale_ckpt "$base/package"
rm -f "$base"/package/vescale_ckpt/_engine/*.so
timeout 600 aarch64-linux-gnu-g++ -shared -pthread "$base"/objects/*.o -o "$base/package/vescale_ckpt/_engine/_C.cpython-311-aarch64-linux-gnu.so"

rm -rf "$base/data" && mkdir "$base/data"
export PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore
this=$(uname -m)
PYTHONPATH=$PWD timeout 600 "$python" tests/arm/save_and_load.py "$base/data" "$this"
PYTHONPATH=$base/package:$base/site:$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
  timeout 1800 qemu-aarch64 -L "$base/root" "$base/root/usr/bin/python3.11" tests/arm/save_and_load.py "$base/data" aarch64
mv "$base/data/$this" "$base/data/$this-before"  # its own is made again
PYTHONPATH=$PWD timeout 600 "$python" tests/arm/save_and_load.py "$base/data" "$this"
rm -rf "$base/data" "$base/package"
