#!/usr/bin/env bash
# Installs the optional system packages of development where that is possible; says so where it is not. With "arm": those
# that compile the engine's tests for 64-bit Arm, and run them.
set -u
missing=()
if [ "${1:-}" = arm ]; then
  for_what="tests of 64-bit Arm"
  command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
  command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
  [ -e /usr/src/googletest/googletest ] || missing+=(googletest)
else
  for_what="C++ tests need GoogleTest, tests of the network iproute2, tests of FUSE mounts bindfs"
  [ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
  command -v ip >/dev/null || missing+=(iproute2)
  command -v bindfs >/dev/null || missing+=(bindfs)
fi
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null && exit 0
fi
echo "optional packages not installed: ${missing[*]} ($for_what)"
