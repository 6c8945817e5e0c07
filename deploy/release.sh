# Names of a release: sourced by package.sh, image.sh and wheel.sh. They follow from the commit that is checked out.
export TZ=UTC LC_ALL=C.UTF-8
umask 022
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { echo "$(basename "$0"): $1" >&2; exit 1; }
at() { git -C "$root" log -1 --format=%cd --date="format-local:$1"; }

commit=$(git -C "$root" rev-parse HEAD)
release=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
version=$release+${commit:0:12}
# The time makes later commits of a release newer.
deb_version=$release+$(at %Y%m%d%H%M%S).${commit:0:12}-1
created=$(at %Y-%m-%dT%H:%M:%SZ)
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct)
export SOURCE_DATE_EPOCH
case $(uname -m) in x86_64) arch=amd64 ;; aarch64) arch=arm64 ;; *) arch=$(uname -m) ;; esac

# Prints the oldest glibc with which programs run: the highest version of the symbols that they need. Relative
# relocations have no versioned symbol; the first glibc with them is 2.36.
needed_glibc() {
  local needed
  needed=$(readelf --version-info --wide "$@" | sed -n 's/.*Name: GLIBC_\([^ ]*\).*/\1/p' \
    | sed 's/^ABI_DT_RELR$/2.36/' | sort --version-sort | tail -n 1)
  [[ $needed =~ ^([0-9]+\.[0-9]+)(\.[0-9]+)?$ ]] || fail "$*: needs the symbol GLIBC_$needed, which is no version"
  echo "${BASH_REMATCH[1]}"
}
