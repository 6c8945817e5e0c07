#!/usr/bin/env bash
# Builds the files of a release from the commit that is checked out: the programs, a Debian package, an image, a wheel,
# a list of the crates in each program (SBOM), and SHA256SUMS. It builds in a clone, so that changed files have no
# effect. Paths of the machine are mapped to fixed ones, and times are those of the commit: each build of a commit has
# the same bytes. zig (`ziglang` from PyPI) links the programs for glibc 2.28: RHEL 8, Debian 10 and later.
#
#     deploy/package.sh [--output DIR] [--verify] [--no-profile | --profile-data FILE] [--profile NAME]
#
# --output DIR         directory for the files [default: `package` in the target directory]; it is emptied
# --verify             builds again, in another directory and with another cargo home, and compares every byte
# --profile-data FILE  counts of an earlier run with the same sources, by which the compiler lays out the hot path
#                      (profile-guided optimisation); FILE.bolt has those by which BOLT orders the code of the linked
#                      gateway. The same bytes need the same files [default: counts now]
# --no-profile         builds without counts: half of the time, for a program that needs up to a third more CPU time
# --profile NAME       `dev` takes a third of the time, for a test of this script [default: dist]
set -euo pipefail
. "$(dirname "$0")/release.sh"
target=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")
output=$target/package verify= profile=dist counts=now
while (($#)); do
  case $1 in
    --output) output=$(realpath -m "$2") && shift ;;
    --verify) verify=yes ;;
    --profile-data) counts=$(realpath "$2") && shift ;;
    --no-profile) counts= ;;
    --profile) profile=$2 && shift ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 2 ;;
  esac
  shift
done
# BOLT finds its runtime library beside the program itself only.
bolt=/usr/lib/llvm-19/bin
[ -z "$counts" ] || [ -x $bolt/llvm-bolt ] || fail "llvm-bolt is missing: apt install bolt-19"
for needed in "cargo-deb:cargo install --locked cargo-deb" "cargo-cyclonedx:cargo install --locked cargo-cyclonedx" \
  "dpkg-shlibdeps:apt install dpkg-dev" "jq:apt install jq" "readelf:apt install binutils" "zip:apt install zip"; do
  command -v "${needed%%:*}" > /dev/null || fail "${needed%%:*} is missing: ${needed#*:}"
done
# Directory of a profile. This is the only one whose directory has another name.
built=$profile
[ "$profile" != dev ] || built=debug
# The first program starts the others, and writes the manual pages and completions of all.
programs=(pointsman pointsman-lab pointsman-policy pointsman-tools)
packages=(gateway lab-cli policy-tools tools)
# Both builds select these packages, the simulator as well: with fewer, some crates have fewer features, the functions
# of the gateway other names, and the counts no effect.
selected=("${packages[@]/#/--package=pointsman-}" --package=pointsman-sim)
mkdir -p "$target"
cd "$root"
for wasm in wasm32-unknown-unknown wasm32-wasip2; do
  [ -d "$(rustc --print target-libdir --target $wasm)" ] || rustup target add $wasm
done

# Prints git's hash of each source of the gateway, and the files that differ from the commit.
sources() {
  local of=(crates host policies wit Cargo.toml Cargo.lock)
  git rev-parse "${of[@]/#/HEAD:}"
  [ "${1:-}" = committed ] || git status --porcelain --untracked-files=no -- "${of[@]}"
}

llvm=$(dirname "$(rustc --print target-libdir)")/bin

# Prints how many functions of the gateway have counts.
counted() {
  comm -12 <("$llvm/llvm-nm" --format=just-symbols "$1"/deps/libpointsman_gateway-*.rlib 2> /dev/null | sort -u) \
    <("$llvm/llvm-profdata" show --all-functions "$counts" | sed -n 's/^  \(_[^:]*\):$/\1/p' | sort -u) | wc -l
}

# Builds the gateway with counters, which serves a scenario of each shape.
count() {
  local build=$target/profile-build
  [ -x "$llvm/llvm-profdata" ] || fail "llvm-profdata is missing: rustup component add llvm-tools"
  CARGO_TARGET_DIR=$build CARGO_ENCODED_RUSTFLAGS=-Cprofile-generate=$build/counts \
    cargo build --locked --profile "$profile" "${selected[@]}" --bin=pointsman --bin=pointsman-sim
  # Build scripts and macros also write counts.
  rm -rf "$build/counts"
  POINTSMAN_BIN=$build/$built cargo xtask bench gateway --train
  "$llvm/llvm-profdata" merge --sparse -o "$1" "$build/counts"/*
  sources > "$1.sources"
}
if [ "$counts" = now ]; then
  counts=$target/pointsman.profdata
  rm -f "$counts.bolt"
  count "$counts"
elif [ -n "$counts" ]; then
  [ -e "$counts.bolt" ] || fail "--profile-data: $counts.bolt is missing"
fi
if [ -n "$counts" ]; then
  [ -x "$llvm/llvm-nm" ] || fail "llvm-nm is missing: rustup component add llvm-tools"
  [[ $counts != "$output"/* ]] || fail "--profile-data: $counts is in the directory of --output, which is emptied"
  # The compiler ignores the counts of a function whose code has changed since.
  [ "$(cat "$counts.sources")" = "$(sources committed)" ] || fail "--profile-data: the counts in $counts are of other \
sources than those of this commit; leave the option out to count again, without changed files"
fi

# Another version of zig writes other bytes.
glibc=2.28 venv=$target/venv-zig zig=0.17.1 linker=$target/zig-glibc-2.28
if [ "$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("ziglang"))' 2> /dev/null)" != $zig ]
then
  python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --only-binary :all: ziglang==$zig
fi
# zig needs the target instead of `-m64`. BOLT needs relocations and symbols in the gateway, for which zig has no option:
# the gateway is linked once more, by zig's linker. BOLT's counts are written by `_fini`, which zig's libc lacks.
fini=$target/fini-$glibc.o
"$venv/bin/python" -m ziglang cc -target "$(uname -m)-linux-gnu.$glibc" -c -o "$fini" -x c - <<< 'void _fini(void) {}'
cat > "$linker" << END
#!/bin/bash
relocations=
for argument; do
  shift
  case \$argument in
    -m64) continue ;;
    */deps/pointsman-*) relocations=${counts:+yes} ;;
  esac
  set -- "\$@" "\$argument"
done
zig() { '$venv/bin/python' -m ziglang "\$@"; }
output=\$(ZIG_VERBOSE_LINK=1 zig cc -target $(uname -m)-linux-gnu.$glibc "\$@" 2>&1) || { echo "\$output" >&2; exit 1; }
[ -n "\$relocations" ] || exit 0
read -ra link <<< "\$(grep '^ld\.lld .*/deps/pointsman-' <<< "\$output" | tail -n 1)"
for place in "\${!link[@]}"; do [ "\${link[place]}" != -s ] || unset "link[place]"; done
zig "\${link[@]}" --emit-relocs '$fini'
END
chmod +x "$linker"

# Orders the code of the gateway by counts of its own runs: what requests need lies together.
lay_out() {
  local program=$1 dir=$2 counted=$2/counted names
  # BOLT takes `..warm` and `..cold` in the name of a type for the mark of a part of a split function.
  names='s/^(_Z.*\.\.)((warm|cold).*)$/& \1a_\2/p'
  rm -rf "$dir"
  mkdir -p "$counted"
  nm --format=just-symbols "$program" | sed -nE "$names" | sort -u > "$dir/names"
  objcopy --redefine-syms="$dir/names" "$program" "$dir/linked"
  if [ ! -e "$counts.bolt" ]; then
    $bolt/llvm-bolt "$dir/linked" -instrument -instrumentation-file="$counted/counts" \
      -instrumentation-file-append-pid -o "$counted/pointsman" > "$dir/log"
    cp "$target/profile-build/$built/pointsman-sim" "$counted"
    POINTSMAN_BIN=$counted "$target/debug/xtask" bench gateway --train
    $bolt/merge-fdata "$counted"/counts* > "$dir/counts"
    mv "$dir/counts" "$counts.bolt"
  fi
  # BOLT's note would have paths of this machine.
  $bolt/llvm-bolt "$dir/linked" -data="$counts.bolt" -reorder-blocks=ext-tsp -reorder-functions=cdsort \
    -split-functions -split-all-cold -split-eh -remove-symtab -bolt-info=0 -o "$dir/pointsman" > "$dir/log"
  mv "$dir/pointsman" "$program"
}

# Builds the commit in a directory, whose `files` then has what to publish.
build() {
  local dir=$1 home=$2 source=$1/source rust name manifest
  local out=$dir/target/$built generated=$dir/target/$built/package
  rm -rf "$source" "$dir/files"
  mkdir -p "$dir/files"
  git clone --quiet --shared --no-checkout "$root" "$source"
  git -C "$source" checkout --quiet --detach "$commit"
  cd "$source"
  unset RUSTUP_TOOLCHAIN RUSTFLAGS CARGO
  rust=$(rustc --version --verbose | sed -n 's/^commit-hash: //p')
  # rustc uses the last one that matches.
  mapped=("$source=/usr/src/pointsman" "$dir/target=/usr/src/target" "$home=/usr/src/cargo" \
    "$(rustc --print sysroot)/lib/rustlib/src/rust=/rustc/$rust")
  local flags=("${mapped[@]/#/--remap-path-prefix=}" ${counts:+"-Cprofile-use=$counts"})
  CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f' && echo "${flags[*]}")
  export CARGO_ENCODED_RUSTFLAGS CARGO_HOME=$home CARGO_TARGET_DIR=$dir/target CARGO_INCREMENTAL=0
  export CFLAGS="${mapped[*]/#/-ffile-prefix-map=}" POINTSMAN_VERSION=$version
  export "CARGO_TARGET_$(uname -m | tr a-z A-Z)_UNKNOWN_LINUX_GNU_LINKER=$linker"
  # Those of an earlier run might have the counts.
  rm -f "$out"/deps/libpointsman_gateway-*.rlib
  cargo build --locked --profile "$profile" "${selected[@]}" "${programs[@]/#/--bin=}"
  [ -z "$counts" ] || [ "$(counted "$out")" -gt 1000 ] || fail "the counts are not of the functions that were built"
  [ -z "$counts" ] || lay_out "$out/pointsman" "$dir/bolt"
  cp "${programs[@]/#/$out/}" "$dir/files"
  rm -rf "$generated"
  mkdir -p "$generated/completions"
  (cd "$generated" && "$out/pointsman" man man)
  "$out/pointsman" completions bash > "$generated/completions/pointsman"
  "$out/pointsman" completions zsh > "$generated/completions/_pointsman"
  "$out/pointsman" completions fish > "$generated/completions/pointsman.fish"
  "$out/pointsman" config example > "$generated/example.toml"
  cp CHANGELOG.md "$generated/changelog"
  # The manifest of the gateway repeats the maintainer.
  cat > "$generated/changelog.Debian" << END
pointsman ($deb_version) unstable; urgency=medium

  * /usr/share/doc/pointsman/changelog.gz tells what changed.

 -- The Pointsman maintainers <maintainers@pointsman.dev>  $(at '%a, %d %b %Y %H:%M:%S +0000')
END
  gzip --best --no-name --recursive "$generated"/{man,changelog,changelog.Debian}
  for name in "${!programs[@]}"; do
    manifest=host/${packages[name]}
    cargo cyclonedx --quiet --manifest-path "$manifest/Cargo.toml" --format json --spec-version 1.5 \
      --override-filename sbom
    sed "$(printf 's=%s=g;' "${mapped[@]}")" "$manifest/sbom.json" > "$generated/${programs[name]}.cdx.json"
  done
  cp "$generated"/*.cdx.json "$dir/files"
  rm -rf "$dir/target/debian"
  cargo deb --no-build --no-strip --locked --profile "$profile" --manifest-path host/gateway/Cargo.toml \
    --deb-version "$deb_version" --output "$dir/target/debian"
  mv "$dir"/target/debian/*.deb "$dir/files"
  cd "$dir/files"
  "$source/deploy/image.sh" "pointsman_${version}_$arch.oci.tar" pointsman{,-policy}{,.cdx.json}
  "$source/deploy/wheel.sh" . "${programs[@]}" "${programs[@]/%/.cdx.json}"
  sha256sum -- * > SHA256SUMS
}
home=${CARGO_HOME:-$HOME/.cargo} first=$target/package-build/first
(build "$first" "$home")

cd "$first/files"
for program in "${programs[@]}"; do
  [ "$("./$program" --version)" = "$program $version" ] || fail "$program has another version than $version"
  needs=$(needed_glibc "$program")
  echo "$program: glibc $needs"
  printf '%s\n%s\n' "$needs" "$glibc" | sort --version-sort --check || fail "$program needs glibc $needs"
  for path in "$first" "$home" "$(rustc --print sysroot)/lib/rustlib/src/rust"; do
    ! grep --quiet --fixed-strings "$path" "$program" || fail "$program contains $path, a directory of this machine"
  done
done
ls -l
if [ -n "$verify" ]; then
  # A second build that reused files of the first one would prove less. It shares the downloads.
  second=$target/package-build/a-second-one/in-a-directory-of-another-length
  rm -rf "$second"
  mkdir -p "$second/cargo-home"
  for name in registry git config.toml; do
    [ ! -e "$home/$name" ] || ln -s "$home/$name" "$second/cargo-home/$name"
  done
  (build "$second" "$second/cargo-home")
  diff "$first/files/SHA256SUMS" "$second/files/SHA256SUMS" || fail "the two builds differ"
fi
rm -rf "$output"
mkdir -p "$output"
cp "$first"/files/* ${counts:+"$counts" "$counts.sources" "$counts.bolt"} "$output"
if [ -n "$counts" ]; then (cd "$output" && sha256sum "$(basename "$counts")"{,.sources,.bolt} >> SHA256SUMS); fi
echo "$version is in $output"
