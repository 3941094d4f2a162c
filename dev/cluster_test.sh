#!/usr/bin/env bash
# Runs the tests that need a Kubernetes cluster with KubeRay. With --all, also the long tests.
#
#   KUBECONFIG                           the cluster
#   LUDUS_IMAGE_LOADER                   command that loads an image archive onto the nodes; without it,
#                                        the nodes must have the images
#   LUDUS_NODE_KILL, LUDUS_NODE_START    commands that cut and restore a node's power (test_faults.py)
#   LUDUS_EDGE, LUDUS_PROMETHEUS         what the cluster offers (test_routes.py, prometheus.py)
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${KUBECONFIG:-}" ]; then
  echo "SKIPPED, NOT PASSED: no cluster; set KUBECONFIG to one that has KubeRay" >&2
  exit 0
fi
if [ -n "${LUDUS_IMAGE_LOADER:-}" ]; then
  .venv/bin/python dev/images.py --load --only gateway env-openspiel trainer store env-coding
fi
exec .venv/bin/python -m pytest -m cluster -rs -s tests/cluster "$@"
