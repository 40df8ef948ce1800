#!/usr/bin/env bash
# Installs the optional system packages of development where that is possible; says so where it is not.
set -u
missing=()
[ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
command -v ip >/dev/null || missing+=(iproute2)
command -v bindfs >/dev/null || missing+=(bindfs)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null && exit 0
fi
echo "optional packages not installed: ${missing[*]} (C++ tests need GoogleTest, tests of the network iproute2, tests of FUSE mounts bindfs)"
