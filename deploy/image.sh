#!/usr/bin/env bash
# Writes an OCI image without a base image: programs, their libraries, root certificates and the configuration. It needs
# no container daemon. Equal programs give equal bytes while Debian's packages are the same.
#
#     deploy/image.sh FILE PROGRAM… [LIST.cdx.json…]
#
# User, command, port and health check are those of the Dockerfile. Needs Debian with ca-certificates, jq and git.
set -euo pipefail
. "$(dirname "$0")/release.sh"
output=$(realpath -m "$1")
shift
tree=$work/tree libraries=() packages=(ca-certificates)
add() { install -D --mode="$1" "$2" "$tree/$3"; }

for file; do
  case $file in
    *.cdx.json) add 644 "$file" "usr/share/doc/pointsman/$(basename "$file")" && continue ;;
    *) add 755 "$file" "usr/bin/$(basename "$file")" ;;
  esac
  linked=$(ldd "$file")
  ! grep 'not found' <<< "$linked" || fail "$file links a library that this machine lacks"
  mapfile -t -O ${#libraries[@]} libraries < <(grep --only-matching '/[^ ]*' <<< "$linked")
done
mapfile -t libraries < <(printf '%s\n' "${libraries[@]}" | sort --unique)
for library in "${libraries[@]}"; do
  add 755 "$library" "${library#/}"
  # If /lib is a link, the package names only one of the two paths.
  owner=$(dpkg-query --search "$library" 2> /dev/null || dpkg-query --search "$(realpath "$library")")
  [[ ${owner%%: *} != *[,\ ]* ]] || fail "$library is of several packages"
  packages+=("${owner%%: *}")
done
for package in $(printf '%s\n' "${packages[@]}" | sort --unique); do
  # Scanners read the versions of packages here, because the image has no package manager.
  dpkg-query --status "$package" > "$work/status"
  add 644 "$work/status" "var/lib/dpkg/status.d/${package%%:*}"
  add 644 "/usr/share/doc/${package%%:*}/copyright" "usr/share/doc/${package%%:*}/copyright"
done
# Certificates that an administrator added to this machine are in another directory, so the image does not trust them.
for file in /usr/share/ca-certificates/mozilla/*.crt; do printf '%s\n' "$(cat "$file")"; done > "$work/certificates"
[ -s "$work/certificates" ] || fail "no root certificates: apt install ca-certificates"
add 644 "$work/certificates" etc/ssl/certs/ca-certificates.crt
# Scanners use this file to choose the list of vulnerabilities.
add 644 /etc/os-release etc/os-release
add 644 "$root/deploy/debian/copyright" usr/share/doc/pointsman/copyright
add 644 "$root/deploy/etc/pointsman.toml" etc/pointsman/pointsman.toml
add 644 "$root/deploy/etc/policies.d/README" etc/pointsman/policies.d/README

dockerfile=$(sed -e ':a' -e '/\\$/{N;s/\\\n */ /;ba' -e '}' "$root/deploy/container/Dockerfile" \
  | awk '/^FROM / { stage = "" } { stage = stage $0 "\n" } END { printf "%s", stage }')
instruction() { sed -n "s/^$1 *//p" <<< "$dockerfile"; }
user=$(instruction USER)
id=${user%%:*}
printf '%s\n' 'root:x:0:0:root:/root:/usr/sbin/nologin' \
  "pointsman:x:$id:$id:Pointsman:/nonexistent:/usr/sbin/nologin" > "$tree/etc/passwd"
printf '%s\n' root:x:0: "pointsman:x:$id:" > "$tree/etc/group"
printf '%s\n' 'passwd: files' 'group: files' 'hosts: files dns' > "$tree/etc/nsswitch.conf"
# A runtime mounts at these directories, which it cannot create in a read-only root.
mkdir -p "$tree"/{dev,proc,sys}
mkdir -m 1777 "$tree/tmp"
# The process writes only compiled policies, in this directory.
cache=var/cache/pointsman
mkdir -p "$tree/var/cache" && mkdir -m 700 "$tree/$cache"

pack() { tar --format=ustar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --numeric-owner "$@"; }
(
  cd "$tree"
  pack --owner=0 --group=0 --exclude="$cache" --create --file="$work/layer.tar" -- *
  pack --owner="$id" --group="$id" --append --file="$work/layer.tar" -- "$cache"
)
diff_id=sha256:$(sha256sum "$work/layer.tar" | cut -d ' ' -f 1)
gzip --no-name --best "$work/layer.tar"

# Stores a file as a blob, and prints its descriptor.
blob() {
  local digest
  digest=$(sha256sum "$1" | cut -d ' ' -f 1)
  install -D --mode=644 "$1" "$work/layout/blobs/sha256/$digest"
  jq -cn --arg type "application/vnd.oci.image.$2" --arg digest "sha256:$digest" --argjson size "$(stat -c %s "$1")" \
    '{ mediaType: $type, digest: $digest, size: $size }'
}
labels=$(jq -cn --arg text "$(instruction LABEL)" --arg version "$version" --arg commit "$commit" --arg created "$created" '
  ([$text | scan("([a-z.]+)=\"([^\"]*)\"") | { (.[0]): .[1] }] | add) + ({
    # Of Pointsman, glibc, libgcc and the root certificates.
    licenses: "Apache-2.0 AND LGPL-2.1-or-later AND GPL-3.0-or-later WITH GCC-exception-3.1 AND MPL-2.0",
    version: $version, revision: $commit, created: $created,
  } | with_entries(.key = "org.opencontainers.image." + .key))')
jq -cSn --arg created "$created" --arg arch "$arch" --arg user "$user" --arg port "$(instruction EXPOSE)" \
  --argjson entrypoint "$(instruction ENTRYPOINT)" --argjson cmd "$(instruction CMD)" --argjson labels "$labels" \
  --arg signal "$(instruction STOPSIGNAL)" --arg check "$(instruction HEALTHCHECK)" --arg diff_id "$diff_id" '
  ($check | capture("--interval=(?<interval>\\d+)s --timeout=(?<timeout>\\d+)s --start-period=(?<start>\\d+)s +CMD (?<run>.+)")
  ) as $check | {
    created: $created, architecture: $arch, os: "linux",
    config: {
      User: $user, ExposedPorts: { ($port + "/tcp"): {} }, Entrypoint: $entrypoint, Cmd: $cmd, WorkingDir: "/",
      Env: ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"],
      Labels: $labels, StopSignal: $signal,
      # Docker uses this. Kubernetes has its own probes.
      Healthcheck: ({ Test: (["CMD"] + ($check.run | fromjson)) }
        + ({ Interval: $check.interval, Timeout: $check.timeout, StartPeriod: $check.start }
          | map_values(tonumber * 1000000000))),
    },
    rootfs: { type: "layers", diff_ids: [$diff_id] },
    history: [{ created: $created, created_by: "deploy/image.sh" }],
  }' > "$work/config.json"
layer=$(blob "$work/layer.tar.gz" layer.v1.tar+gzip)
config=$(blob "$work/config.json" config.v1+json)
jq -cSn --argjson config "$config" --argjson layer "$layer" --argjson labels "$labels" '{
  schemaVersion: 2, mediaType: "application/vnd.oci.image.manifest.v1+json", config: $config, layers: [$layer],
  annotations: $labels }' > "$work/manifest.json"
# A tag must not contain `+`.
jq -cSn --argjson manifest "$(blob "$work/manifest.json" manifest.v1+json)" --arg arch "$arch" --arg tag "${version/+/-}" '{
  schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json", manifests: [$manifest + {
    platform: { architecture: $arch, os: "linux" }, annotations: { "org.opencontainers.image.ref.name": $tag } }] }' \
  > "$work/layout/index.json"
printf '{"imageLayoutVersion":"1.0.0"}' > "$work/layout/oci-layout"
cd "$work/layout"
pack --owner=0 --group=0 --create --file="$output" -- *
