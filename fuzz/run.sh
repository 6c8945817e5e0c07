#!/usr/bin/env bash
# Fuzzes the parsers of untrusted bytes until the first finding; cargo-fuzz prints the path of its input.
#
#     fuzz/run.sh [MINUTES [TARGET…]]      # 10 minutes for each target; all of `cargo fuzz list`
#
# Needs cargo-fuzz (`cargo install cargo-fuzz`). The host has no unsafe code for a sanitizer to check, and overflow checks
# are on. cargo-fuzz passes flags that a stable compiler accepts only with RUSTC_BOOTSTRAP.
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-10}
shift || true
for target in "${@:-$(cargo fuzz list)}"; do
  for one in $target; do
    RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none "$one" -- "-max_total_time=$((minutes * 60))" \
      -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 -verbosity=1
  done
done
