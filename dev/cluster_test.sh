#!/usr/bin/env bash
# The tests that need a Kubernetes with KubeRay: KUBECONFIG says which, LUDUS_IMAGE_LOADER how an
# archive of an image comes to its nodes (without it, the images are taken for being there).
# LUDUS_NODE_KILL and LUDUS_NODE_START let a node's power fail and come back (test_faults.py),
# LUDUS_EDGE and LUDUS_PROMETHEUS say what the cluster has (test_routes.py, prometheus.py).
# With --all the long forms, too.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${KUBECONFIG:-}" ]; then
  echo "SKIPPED, NOT PASSED: no cluster; set KUBECONFIG to one that has KubeRay" >&2
  exit 0
fi
if [ -n "${LUDUS_IMAGE_LOADER:-}" ]; then
  .venv/bin/python dev/images.py --load --only gateway env-openspiel trainer store
fi
exec .venv/bin/python -m pytest -m cluster -rs -s tests/cluster "$@"
