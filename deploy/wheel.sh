#!/usr/bin/env bash
# Writes a wheel with programs, which pip and uv install without a compiler, and prints its path. Equal programs give
# equal bytes. Its tag names the oldest glibc with which all programs run.
#
#     deploy/wheel.sh DIR PROGRAM… [LIST.cdx.json…]
#
# maturin accepts existing programs, but always builds one itself, and its tag ignores the needs of the other programs
# (version 1.16 gave the tag `manylinux_2_28` to a wheel with a program for 2.34). Needs binutils, openssl and zip.
set -euo pipefail
. "$(dirname "$0")/release.sh"
dir=$(realpath "$1")
shift
data=pointsman-$version.data info=pointsman-$version.dist-info stage=$work/wheel programs=()
for file; do
  case $file in
    *.cdx.json) install -D --mode=644 --target-directory="$stage/$info/sboms" "$file" ;;
    *) install -D --mode=755 --target-directory="$stage/$data/scripts" "$file" && programs+=("$file") ;;
  esac
done
glibc=$(needed_glibc "${programs[@]}")
tag=py3-none-manylinux_${glibc/./_}_$(uname -m)
install -D --mode=644 --target-directory="$stage/$info/licenses" "$root/LICENSE"
cat - "$root/deploy/wheel/README.md" > "$stage/$info/METADATA" << END
Metadata-Version: 2.4
Name: pointsman
Version: $version
Summary: Gateway for disaggregated LLM serving
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.8
Description-Content-Type: text/markdown

END
printf '%s\n' 'Wheel-Version: 1.0' 'Generator: deploy/wheel.sh' 'Root-Is-Purelib: false' "Tag: $tag" > "$stage/$info/WHEEL"
cd "$stage"
# The list of files with their digests is the last file; its own entry has no digest.
mapfile -t files < <(find "$data" "$info" -type f | sort)
for file in "${files[@]}"; do
  digest=$(openssl dgst -sha256 -binary "$file" | base64 | tr '+/' '-_' | tr -d '=')
  echo "$file,sha256=$digest,$(stat -c %s "$file")"
done > RECORD
echo "$info/RECORD,," >> RECORD
mv RECORD "$info/RECORD"
find . -exec touch --date="@$SOURCE_DATE_EPOCH" {} +
wheel=$dir/pointsman-$version-$tag.whl
rm -f "$wheel"
printf '%s\n' "${files[@]}" "$info/RECORD" | zip -X -9 --quiet --names-stdin "$wheel"
echo "$wheel"
