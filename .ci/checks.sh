# What the checks that are scripts share: programs, processes that end with the script, and a table of checks.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")
work=$(mktemp -d) failed=0 started=() workers=()
cd "$root"

ended() {
  [ "$(type -t cleanup)" != function ] || cleanup
  [ ${#started[@]} = 0 ] || kill "${started[@]}" 2> /dev/null || true
  rm -rf "$work"
}
trap ended EXIT

# Ends a check that cannot run on this machine.
skip() { echo "skipped: $1" && exit 77; }

# Builds programs with a profile, `dev` or `release`, and sets `bin` to their directory. With POINTSMAN_BIN=DIR nothing
# is built. A build with `dev` uses the features of the whole workspace, so that the tests reuse its results.
programs() {
  local profile=$1 built=$1 whole=
  shift
  [ "$profile" != dev ] || { built=debug whole=--workspace; }
  bin=$target/$built
  if [ -n "${POINTSMAN_BIN:-}" ]; then bin=$(realpath "$POINTSMAN_BIN") && return; fi
  cargo build --profile "$profile" --locked $whole "${@/#/--bin=}"
}

# Installs packages of PyPI into an environment below the target directory, unless it has the program, and prints the
# program's path.
venv_program() {
  local venv=$target/$1 program=$2
  shift 2
  if [ ! -x "$venv/bin/$program" ]; then
    python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --only-binary :all: "$@"
  fi
  echo "$venv/bin/$program"
}

# Starts a program that prints one line of JSON once it listens, and waits for that line.
start() {
  local name=$1
  shift
  "$@" > "$work/$name.out" 2> "$work/$name.log" < /dev/null &
  pid=$!
  started+=("$pid")
  until announced "$name" listening > /dev/null 2>&1; do
    kill -0 "$pid" 2> /dev/null || { tail "$work/$name.log" >&2 && echo "$name did not start" >&2 && exit 1; }
    sleep 0.1
  done
}

# Prints a field of the line that a program printed. jq 1.6 succeeds without any input.
announced() { head -n 1 "$work/$1.out" | jq --exit-status --raw-output ".$2" | grep .; }

# Waits until a command succeeds, at most a minute. The check that follows says whether it did.
await() {
  local until=$((SECONDS + 60))
  until "$@" > /dev/null 2>&1 || [ $SECONDS -ge $until ]; do sleep 0.2; done
}

# Starts a simulated engine: ROLE FLAG…
engine() {
  local role=$1 name=$1-${#workers[@]}
  start "$name" "$bin/pointsman-sim" --listen 127.0.0.1:0 --engine vllm --role "$@"
  workers+=(--worker "role=$role,engine=vllm,url=http://$(announced "$name" listening)")
}

# Starts a gateway with flags in front of the engines, and waits until all are eligible. Sets `clients` and `admin` to
# its addresses.
gateway() {
  start gateway "$bin/pointsman" serve --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 "${workers[@]}" "$@"
  clients=$(announced gateway listening) admin=$(announced gateway admin)
  await eligible
  eligible
}
eligible() {
  curl --silent --fail "http://$admin/workers" "${token[@]}" \
    | jq --exit-status '(.workers | length > 0) and all(.workers[]; .ineligible == null)' > /dev/null
}
# Header with the token of the admin listener.
token=()

# Prints a row of the table: what is checked, its value, and whether a command succeeds.
check() {
  local what=$1 value=$2 verdict=ok
  shift 2
  "$@" > /dev/null || { verdict=FAILED failed=$((failed + 1)); }
  printf '| %-60s | %24s | %s |\n' "$what" "$value" "$verdict"
}

# Ends a check: fails when a row did.
verdict() { [ $failed = 0 ] || { echo "$failed checks failed; see the rows marked FAILED" >&2 && exit 1; }; }
