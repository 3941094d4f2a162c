#!/bin/sh
# Removes from a folder of installed packages the files that no server loads: tests, type stubs,
# sources and headers of compiled modules, and debugging symbols. The Dockerfiles use it. Needs
# binutils.
#
#   dev/trim_packages.sh FOLDER
set -eu
cd "$1"
find . \( -name tests -o -name '*_test.py' -o -name '*_test.*.pyc' -o -name '*.pyi' -o -name '*.pyx' \
  -o -name '*.pxd' -o -name '*.h' -o -name '*.hpp' -o -name '*.c' -o -name '*.cc' -o -name '*.cpp' \
  -o -path ./numpy/f2py -o -path ./numpy/distutils \
  -o -path './numpy/_core/_simd.*' -o -path './numpy/_core/_*_tests.*' \) -prune -exec rm -rf {} +
# Stripping may break libraries that were patched for their wheel, such as numpy's. These are safe.
for package in aiohttp httptools uvloop; do
  if [ -d "$package" ]; then find "$package" -name '*.so' -exec strip --strip-unneeded {} +; fi
done
