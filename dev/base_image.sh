#!/usr/bin/env bash
# Builds the base of all images from Debian packages, for a machine that can reach a Debian mirror but
# no image registry. Needs root, debootstrap and buildah:
#
#   dev/base_image.sh docker.io/library/python:3.11-slim-bookworm
#
# DEBIAN_MIRROR selects another mirror.
set -euo pipefail
name=${1:?"expected the image's name, for example docker.io/library/python:3.11-slim-bookworm"}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
debootstrap --variant=minbase --include=python3-venv,ca-certificates bookworm "$root" \
  "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" > "$root.log" 2>&1 || { tail -5 "$root.log" >&2; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* \
  "$root"/usr/share/{doc,man,info,locale}/*
ln -s python3 "$root/usr/bin/python"
container=$(buildah from scratch)
buildah add --quiet "$container" "$root" / > /dev/null
buildah config --cmd python3 "$container"
buildah commit --quiet --rm "$container" "$name" > /dev/null
echo "$name"
