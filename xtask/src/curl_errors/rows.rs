//! The rows: what is configured, what is sent, and what must come back.

/// One code of table I.
pub(super) struct Row {
    pub(super) code: &'static str,
    pub(super) condition: &'static str,
    /// The gateway's configuration.
    pub(super) config: &'static str,
    /// Role and flags of each engine; behind `; ` fields of its `--worker` flag.
    pub(super) engines: &'static [(&'static str, &'static str)],
    pub(super) script: &'static str,
    /// Texts of the output.
    pub(super) expects: &'static [&'static str],
}

const ONE: &[(&str, &str)] = &[("aggregated", "--overhead-ms 5 --itl-ms 5 --max-model-len 100000")];
/// Answers 50 tokens a second, one request at a time.
const ONE_PLACE: &[(&str, &str)] = &[("aggregated", "--overhead-ms 5 --itl-ms 20; max_concurrency=1")];
const HANGS: &[(&str, &str)] = &[("aggregated", "--fault {\"kind\":\"hang-before-headers\"}")];

pub(super) const ROWS: &[Row] = &[
    Row {
        code: "invalid_request",
        condition: "Bad JSON, and a bad field. A context that is too long is the engine's own answer.",
        config: "",
        engines: &[("aggregated", "--overhead-ms 5 --itl-ms 5 --max-model-len 64")],
        script: r#"
ask $CHAT -d '{'
ask $CHAT -d '{"model":"tiny","messages":[],"max_tokens":-1}'
words=$(printf 'word %.0s' {1..100})
ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"'"$words"'"}]}'"#,
        expects: &["400 Bad Request", "\"invalid_request\"", "max_tokens: `-1`", "maximum context length"],
    },
    Row {
        code: "unauthorized",
        condition: "No key, and an unknown one.",
        // The digest of a key that nobody has.
        config: "[auth]\nkeys = [{ id = \"client\", digest = \"sha256:adca3a88e49c601e08805ea350b4d9215c85b50846571e6a3b0199b6a23dd3a4\" }]",
        engines: ONE,
        script: r#"
ask $CHAT -d '{"model":"tiny","messages":[]}'
ask $CHAT -H 'authorization: Bearer sk-2' -d '{"model":"tiny","messages":[]}'"#,
        expects: &["401 Unauthorized", "\"unauthorized\"", "no API key", "unknown API key"],
    },
    Row {
        code: "forbidden",
        condition: "Somebody who may not: here a page of another site that changes the gateway.",
        config: "",
        engines: ONE,
        script: r#"ask -X POST $ADMIN/policies/reload -H 'origin: http://other.example'"#,
        expects: &["403 Forbidden", "\"forbidden\""],
    },
    Row {
        code: "model_not_found",
        condition: "A model that no worker serves.",
        config: "",
        engines: ONE,
        script: r#"ask $CHAT -d '{"model":"nope","messages":[]}'"#,
        expects: &["404 Not Found", "\"model_not_found\""],
    },
    Row {
        code: "worker_not_found",
        condition: "A pinned worker that is unknown.",
        config: "",
        engines: ONE,
        script: r#"ask $CHAT -H 'x-worker-instance-id: 77' -d '{"model":"tiny","messages":[]}'"#,
        expects: &["404 Not Found", "\"worker_not_found\""],
    },
    Row {
        code: "response_not_found",
        condition: "A stored response whose worker has left.",
        config: "",
        engines: ONE,
        script: r#"
id=$(curl -s -H 'content-type: application/json' $GATEWAY/v1/responses -d '{"model":"tiny","input":"hi","max_output_tokens":1}' | grep -o 'resp_[0-9a-f]*' | head -1)
curl -s -o removed.json -X DELETE $ADMIN/workers/1
curl -si $GATEWAY/v1/responses/$id"#,
        expects: &["404 Not Found", "\"response_not_found\""],
    },
    Row {
        code: "worker_not_eligible",
        condition: "A pinned worker that drains.",
        config: "",
        engines: ONE,
        script: r#"
curl -s -o drained.json -H 'content-type: application/json' -X POST $ADMIN/workers/1/drain
ask $CHAT -H 'x-worker-instance-id: 1' -d '{"model":"tiny","messages":[]}'"#,
        expects: &["409 Conflict", "\"worker_not_eligible\"", "draining"],
    },
    Row {
        code: "payload_too_large",
        condition: "A body above `server.max_body_bytes`.",
        config: "[server]\nmax_body_bytes = 1000",
        engines: ONE,
        script: r#"head -c 2000 /dev/zero | ask $CHAT --data-binary @-"#,
        expects: &["413 Payload Too Large", "\"payload_too_large\""],
    },
    Row {
        code: "unsupported_content_coding",
        condition: "A body with a content coding other than `gzip`, `zstd` and `br`.",
        config: "",
        engines: ONE,
        script: r#"ask $CHAT -H 'content-encoding: deflate' -d '{"model":"tiny","messages":[]}'"#,
        expects: &["415 Unsupported Media Type", "\"unsupported_content_coding\"", "`deflate`"],
    },
    Row {
        code: "shed",
        condition: "A policy refuses: `tenant-limit`, with one request in an hour for all without a tenant.",
        config: "[policies.slots.aggregated]\npolicy = \"tenant-limit\"\ngrants = [\"state\"]\n\
                 settings = { requests = 1, window-ms = 3600000, anonymous = true }",
        engines: ONE,
        script: r#"
curl -s -o /dev/null $CHAT -d '{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'
ask $CHAT -d '{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'"#,
        expects: &["429 Too Many Requests", "\"shed\"", "retry-after:"],
    },
    Row {
        code: "rate_limited",
        condition: "More requests than `server.requests_per_second`. `[tenants]` has limits a minute.",
        config: "[server]\nrequests_per_second = 1",
        engines: ONE,
        script: r#"
for i in 1 2 3; do curl -s -o /dev/null $CHAT -d '{"model":"tiny","messages":[]}'; done
ask $CHAT -d '{"model":"tiny","messages":[]}'"#,
        expects: &["429 Too Many Requests", "\"rate_limited\"", "retry-after:"],
    },
    Row {
        code: "request_timeout",
        condition: "An upload that pauses for longer than `timeouts.body_idle`.",
        config: "[timeouts]\nbody_idle = \"1s\"\n[limits]\nmin_body_rate = 0",
        engines: ONE,
        script: r#"(echo '{'; sleep 3) | ask -X POST -T - -H 'expect:' $CHAT"#,
        expects: &["408 Request Timeout", "\"request_timeout\""],
    },
    Row {
        code: "body_too_slow",
        condition: "An upload below `limits.min_body_rate`, after `timeouts.body_idle`.",
        config: "[timeouts]\nbody_idle = \"1s\"\n[limits]\nmin_body_rate = 1000",
        engines: ONE,
        script: r#"(for i in {1..40}; do echo '{'; sleep 0.1; done) | ask -X POST -T - -H 'expect:' $CHAT"#,
        expects: &["408 Request Timeout", "\"body_too_slow\""],
    },
    Row {
        code: "client_closed",
        condition: "A client that leaves before its answer. It sees no status; metrics and logs have 499.",
        config: "",
        engines: &[("aggregated", "--overhead-ms 2000 --itl-ms 5")],
        script: r#"
curl -s -m 0.3 $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
sleep 3
curl -s $ADMIN/metrics | grep '^pointsman_requests_total.*status="499"'"#,
        expects: &["status=\"499\"", "code=\"client_closed\""],
    },
    Row {
        code: "client_too_slow",
        condition: "A client that does not read its answer for `timeouts.client_write`.",
        config: "[timeouts]\nclient_write = \"1s\"",
        engines: &[("aggregated", "--overhead-ms 5 --itl-ms 0.01 --max-model-len 1000000 --blocks 1000000")],
        script: r#"
long='{"model":"tiny","stream":true,"ignore_eos":true,"max_tokens":100000'
curl -sN $CHAT -d "$long,"'"messages":[{"role":"user","content":"hi"}]}' | sleep 6
curl -s $ADMIN/metrics | grep '^pointsman_requests_total.*status="499"'"#,
        expects: &["status=\"499\"", "code=\"client_too_slow\""],
    },
    Row {
        code: "bad_upstream",
        condition: "An engine that breaks its protocol, or stops.",
        config: "[routing]\nretries = 0",
        engines: &[("aggregated", "--fault {\"kind\":\"status\",\"status\":500}")],
        script: r#"ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'"#,
        expects: &["502 Bad Gateway", "\"bad_upstream\""],
    },
    Row {
        code: "poison_request",
        condition: "Two workers broke on the request. An equal one is then refused for `routing.quarantine`.",
        config: "",
        engines: &[
            ("aggregated", "--overhead-ms 5 --itl-ms 5 --fault {\"kind\":\"refuse\",\"prompt\":\"poison\"}"),
            ("aggregated", "--overhead-ms 5 --itl-ms 5 --fault {\"kind\":\"refuse\",\"prompt\":\"poison\"}"),
        ],
        script: r#"
curl -s -o /dev/null $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"poison"}]}'
ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"poison"}]}'"#,
        expects: &["502 Bad Gateway", "\"poison_request\""],
    },
    Row {
        code: "no_worker",
        condition: "No worker is eligible: the only one drains.",
        config: "",
        engines: ONE,
        script: r#"
curl -s -o drained.json -H 'content-type: application/json' -X POST $ADMIN/workers/1/drain
ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'"#,
        expects: &["503 Service Unavailable", "\"no_worker\"", "retry-after:"],
    },
    Row {
        code: "prefill_unavailable",
        condition: "`routing.enforce_disagg`, and no prefill worker.",
        config: "[routing]\nenforce_disagg = true",
        engines: &[("decode", "--overhead-ms 5 --itl-ms 5")],
        script: r#"ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'"#,
        expects: &["503 Service Unavailable", "\"prefill_unavailable\"", "retry-after:"],
    },
    Row {
        code: "handoff_lost",
        condition: "The prefill ran, and no decode worker takes its result: the only one has too much to do.",
        config: "",
        engines: &[
            ("prefill", "--overhead-ms 5; handoff_lease_s=1"),
            ("decode", "--fault {\"kind\":\"status\",\"status\":503}"),
        ],
        script: r#"ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'"#,
        expects: &["503 Service Unavailable", "\"handoff_lost\"", "retry-after:"],
    },
    Row {
        code: "draining",
        condition: "The gateway shuts down, while a stream still runs.",
        config: "",
        engines: &[("aggregated", "--overhead-ms 5 --itl-ms 20")],
        script: r#"
long='{"model":"tiny","stream":true,"ignore_eos":true,"max_tokens":200'
curl -sN -o /dev/null $CHAT -d "$long,"'"messages":[{"role":"user","content":"hi"}]}' &
sleep 0.5; kill -TERM $PID; sleep 0.2
ask $CHAT -d '{"model":"tiny","messages":[]}'"#,
        expects: &["503 Service Unavailable", "\"draining\"", "retry-after:"],
    },
    Row {
        code: "unknown_url",
        condition: "An unknown path.",
        config: "",
        engines: ONE,
        script: "ask $GATEWAY/v1/nothing -d '{}'",
        expects: &["404 Not Found", "\"unknown_url\""],
    },
    Row {
        code: "method_not_allowed",
        condition: "Another method.",
        config: "",
        engines: ONE,
        script: "ask -X DELETE $CHAT",
        expects: &["405 Method Not Allowed", "\"method_not_allowed\"", "allow: POST"],
    },
    Row {
        code: "upgrade_required",
        condition: "`/v1/realtime` without a WebSocket handshake.",
        config: "",
        engines: ONE,
        script: "ask \"$GATEWAY/v1/realtime?model=tiny\"",
        expects: &["426 Upgrade Required", "\"upgrade_required\""],
    },
    Row {
        code: "too_many_connections",
        condition: "More connections than `limits.connections`.",
        config: "[limits]\nconnections = 1",
        engines: ONE_PLACE,
        script: r#"
long='{"model":"tiny","stream":true,"ignore_eos":true,"max_tokens":200'
curl -sN -o /dev/null $CHAT -d "$long,"'"messages":[{"role":"user","content":"hi"}]}' &
sleep 0.5
ask $CHAT -d '{"model":"tiny","messages":[]}'"#,
        expects: &["503 Service Unavailable", "\"too_many_connections\"", "retry-after:"],
    },
    Row {
        code: "too_many_streams",
        condition: "More requests over HTTP/2, in all connections, than `limits.http2_requests`. `$DIR` has a certificate.",
        config: "[server.tls]\ncert_file = \"$DIR/certificate.pem\"\nkey_file = \"$DIR/key.pem\"\n\
                 [limits]\nhttp2_requests = 1",
        engines: ONE_PLACE,
        script: r#"
long='{"model":"tiny","stream":true,"ignore_eos":true,"max_tokens":200'
curl -skN --http2 -o /dev/null ${CHAT/http:/https:} -d "$long,"'"messages":[{"role":"user","content":"hi"}]}' &
sleep 2
ask -k --http2 ${CHAT/http:/https:} -d '{"model":"tiny","messages":[]}'"#,
        expects: &["HTTP/2 503", "\"too_many_streams\"", "retry-after:"],
    },
    Row {
        code: "body_bytes_in_flight",
        condition: "The bodies of all requests in flight are above `limits.body_bytes_in_flight`.",
        config: "[server]\nmax_body_bytes = 1000000\n[limits]\nbody_bytes_in_flight = 1200000\n\
                 [timeouts]\nwhole_head = \"3s\"",
        engines: HANGS,
        script: r#"
text=$(head -c 900000 /dev/zero | tr '\0' x)
printf '{"model":"tiny","messages":[{"role":"user","content":"%s"}]}' "$text" > body.json
curl -s -o /dev/null $CHAT --data-binary @body.json &
sleep 2
ask $CHAT -H 'expect:' --data-binary @body.json"#,
        expects: &["503 Service Unavailable", "\"body_bytes_in_flight\"", "retry-after:"],
    },
    Row {
        code: "keys_busy",
        condition: "Too many keys with argon2id digests wait to be verified at the same time.",
        config: "[[auth.keys]]\nid = \"slow\"\ndigest = \"$DIGEST\"",
        engines: ONE,
        script: r#"
all() { seq 40 | xargs -P 40 -I{} curl -si $CHAT -H 'authorization: Bearer slow.{}' -d "$1"; }
all '{"model":"tiny","messages":[]}' > all.txt
grep -B8 keys_busy all.txt | tail -9"#,
        expects: &["503 Service Unavailable", "\"keys_busy\"", "retry-after:"],
    },
    Row {
        code: "key_set_unavailable",
        condition: "The public keys of the identity server were never fetched.",
        config: "[auth.jwt]\nissuer = \"https://identity.example\"\naudience = [\"pointsman\"]\n\
                 jwks_url = \"http://127.0.0.1:9/jwks\"\nalgorithms = [\"ES256\"]",
        engines: ONE,
        script: r#"
head=$(printf '{"alg":"ES256","kid":"a"}' | base64 -w0 | tr -d =)
claims='{"iss":"https://identity.example","aud":"pointsman","exp":4000000000}'
claims=$(printf "$claims" | base64 -w0 | tr -d =)
token=$head.$claims.$(head -c 64 /dev/zero | base64 -w0 | tr -d =)
ask $CHAT -H "authorization: Bearer $token" -d '{"model":"tiny","messages":[]}'"#,
        expects: &["503 Service Unavailable", "\"key_set_unavailable\"", "retry-after:"],
    },
    Row {
        code: "engine_timeout",
        condition: "An engine is silent for longer than `timeouts.whole_head`.",
        config: "[routing]\nretries = 0\n[timeouts]\nwhole_head = \"1s\"",
        engines: HANGS,
        script: r#"ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'"#,
        expects: &["504 Gateway Timeout", "\"engine_timeout\""],
    },
    Row {
        code: "deadline",
        condition: "The request takes longer than `timeouts.request`.",
        config: "[timeouts]\nrequest = \"1s\"",
        engines: HANGS,
        script: r#"ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'"#,
        expects: &["504 Gateway Timeout", "\"deadline\""],
    },
    Row {
        code: "overloaded",
        condition: "Every worker is at its limit. `routing.busy_status` sets another status.",
        config: "",
        engines: ONE_PLACE,
        script: r#"
long='{"model":"tiny","stream":true,"ignore_eos":true,"max_tokens":100'
curl -sN -o /dev/null $CHAT -d "$long,"'"messages":[{"role":"user","content":"hi"}]}' &
sleep 0.5
ask $CHAT -d '{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'"#,
        expects: &["529", "\"overloaded\"", "retry-after:"],
    },
];
