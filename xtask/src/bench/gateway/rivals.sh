#!/usr/bin/env bash
# Runs a rival of `cargo xtask bench gateway` until it is ended: rivals.sh NAME. Variables: PYTHON of the environment
# with the rival; PORT and METRICS_PORT to listen on; DIR for its files; the engines' URLs in PREFILL (empty when they
# serve whole requests) and SERVING; BOOTSTRAP with the ports of prefill engines; EVENTS with a URL=ADDRESS of KV events
# for each engine; TOKENIZER, a directory.
set -euo pipefail

# Sets `engines` to the flags that name the engines.
routed() {
  local ports=($BOOTSTRAP) place=0 url
  engines=(--worker-urls $SERVING)
  [ -n "$PREFILL" ] || return 0
  engines=("$@")
  for url in $PREFILL; do
    engines+=(--prefill "$url")
    [ "$1" != --pd-disaggregation ] || engines+=("${ports[place]}")
    place=$((place + 1))
  done
  for url in $SERVING; do engines+=(--decode "$url"); done
}
listen=(--host 127.0.0.1 --log-level error --port "$PORT" --prometheus-port "$METRICS_PORT")

case $1 in
  # These two as their documentation recommends: round robin, without an index.
  vllm-router)
    routed --vllm-pd-disaggregation --kv-connector nixl
    exec "$PYTHON" -m vllm_router.launch_router "${listen[@]}" --policy round_robin "${engines[@]}"
    ;;
  sglang-router)
    routed --pd-disaggregation
    exec "$PYTHON" -m sglang_router.launch_router "${listen[@]}" --policy round_robin "${engines[@]}"
    ;;
  smg)
    routed
    exec "$PYTHON" -m smg launch "${listen[@]}" --policy round_robin "${engines[@]}"
    ;;
  # With one worker thread, no retries and no limit of time, as nginx has it. Clients make both calls of a pair.
  envoy)
    endpoints=
    for url in $PREFILL $SERVING; do
      address=${url#http://}
      socket="{address: ${address%:*}, port_value: ${address##*:}}"
      endpoints+="{endpoint: {address: {socket_address: $socket}}}, "
    done
    router='{name: envoy.filters.http.router,
      typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}'
    cat > "$DIR/envoy.yaml" << END
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: $PORT}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          http_filters: [$router]
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: engines, timeout: 0s}}]}
  clusters:
  - name: engines
    circuit_breakers: {thresholds: [{max_connections: 4096, max_pending_requests: 4096, max_requests: 4096}]}
    load_assignment: {cluster_name: engines, endpoints: [{lb_endpoints: [$endpoints]}]}
END
    exec "$PYTHON" -m envoy._main --concurrency 1 --log-level error --use-dynamic-base-id -c "$DIR/envoy.yaml"
    ;;
  # vLLM's router with its index. In front of HTTP workers it has no tokenizer: it sends each prompt to
  # /v1/chat/completions/render of every engine.
  vllm-kv-aware)
    events=()
    for source in $EVENTS; do events+=(--kv-event-source "$source"); done
    exec "$PYTHON" -m vllm_router.launch_router "${listen[@]}" --policy kv_aware --kv-event-block-size 16 \
      --kv-event-model tiny "${events[@]}" --worker-urls $SERVING
    ;;
  # NVIDIA Dynamo's frontend in KV mode, with its fastest settings: the faster of its tokenizers, a cache of encoded
  # prefixes, and no log line for a request. It uses its own protocol to its engines. These are its mockers, which
  # compute nothing: as many as a scenario has engines, so fast that every prefill takes less than a millisecond. (With
  # the ratio 0, which means infinite in the help text, version 1.6.0 runs in real time.)
  dynamo+mocker)
    mkdir -p "$DIR/model"
    ln -s "$(realpath "$TOKENIZER")"/* "$DIR/model"
    # Dynamo reads from this file the token that ends an answer and the longest prompt.
    [ -e "$DIR/model/config.json" ] || cat > "$DIR/model/config.json" << 'END'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 0, "eos_token_id": 1,
 "max_position_embeddings": 1048576, "vocab_size": 152064, "hidden_size": 64, "intermediate_size": 128,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
END
    # It keeps its files in `DIR` and listens only on loopback.
    export HOME=$DIR TMPDIR=$DIR DYN_FILE_KV=$DIR
    export DYN_TCP_RPC_HOST=127.0.0.1 DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1 DYN_EVENT_PLANE_HOST=127.0.0.1
    export DYN_TOKENIZER=${DYN_TOKENIZER:-fastokens} DYN_TOKENIZER_CACHE=${DYN_TOKENIZER_CACHE:-1}
    export DYN_LOG=${DYN_LOG:-error} HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
    planes=(--discovery-backend file --request-plane tcp --event-plane zmq)
    "$PYTHON" -m dynamo.mocker "${planes[@]}" --model-path "$DIR/model" --model-name tiny --num-workers 4 \
      --block-size 16 --speedup-ratio 1000000 --num-gpu-blocks-override 200000 --max-num-seqs 1024 \
      --max-num-batched-tokens 1000000 &
    exec "$PYTHON" -m dynamo.frontend "${planes[@]}" --http-host 127.0.0.1 --http-port "$PORT" --router-mode kv \
      --kv-cache-block-size 16
    ;;
esac
