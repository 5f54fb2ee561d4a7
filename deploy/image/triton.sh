#!/usr/bin/env bash
# Compiles beforehand what Triton would compile at its first use, so that the image needs no compiler: one file, its driver for CUDA.
#
#   triton.sh ENVIRONMENT
#
# writes ENVIRONMENT/lib/triton: that file, what comes of it, and `cc` (cc.sh), for the variable CC.
set -euo pipefail

environment=$1
out=$environment/lib/triton
triton=$("$environment/bin/python" -c 'import importlib.util as u; print(u.find_spec("triton").submodule_search_locations[0])')
python=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
mkdir -p "$out"
cp "$triton/backends/nvidia/driver.c" "$out/driver.c"

# The driver's own library comes with the host; to name it here it needs a name only.
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
gcc -shared -nostdlib -Wl,-soname,libcuda.so.1 -x c -o "$stub/libcuda.so.1" /dev/null
# As triton/runtime/build.py calls it.
gcc "$out/driver.c" -O3 -shared -fPIC -Wno-psabi -o "$out/driver.so" \
  -Wl,--no-as-needed -L"$stub" -l:libcuda.so.1 -I"$triton/backends/nvidia/include" -I"$python"
install -m 755 "$(dirname "$0")/cc.sh" "$out/cc"
