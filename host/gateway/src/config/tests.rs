use pointsman_config_file::reference;

use super::*;

/// Parses a text as a file is parsed, and returns the problems of all steps as they are shown.
fn problems(text: &str) -> Vec<String> {
    let (config, mut problems) = match parse(text, &Environment::default()) {
        Ok(parsed) => parsed,
        Err(problems) => (Config::default(), problems),
    };
    problems.extend(config.in_file(resolve::resolve(&config).1));
    config.errors(problems).to_string().lines().map(str::to_owned).collect()
}

fn check(text: &str, expected: &[&str]) {
    assert_eq!(problems(text), expected, "{text}");
}

#[test]
fn i19_a_worker_is_not_the_gateway_itself() {
    let check_url = |url: &str, listener: Option<&str>| {
        let worker = format!("[[workers]]\nrole = \"decode\"\nengine = \"vllm\"\nurl = \"{url}\"");
        let problem = listener.map(|listener| {
            format!(
                "line 6: workers[0].url: `{url}` is this gateway itself ({listener}): give the URL of an engine"
            )
        });
        let expected: Vec<&str> = problem.as_deref().into_iter().collect();
        check(&format!("[server]\nlisten = \"0.0.0.0:8000\"\n{worker}"), &expected);
    };
    // I19.5
    check_url("http://127.0.0.1:8000", Some("server.listen"));
    check_url("http://localhost:9090", Some("server.admin_listen"));
    check_url("http://127.0.0.1:8001", None);
}

#[test]
fn f7_requests_that_wait_for_workers_need_places_in_the_queue() {
    let text = "[models.a]\nwait_for_workers = \"5m\"\n";
    // F7.9
    check(text, &["line 2: models.a.wait_for_workers: no request may wait: set queue.limit to more than 0"]);
    check(&format!("{text}[queue]\nlimit = 1"), &[]);
    check("[models.a]\ntokenizer = \"engine\"", &[]);
}

#[test]
fn an_empty_file_is_valid_and_b1_enforcing_is_off() {
    check("", &[]);
    let default = Config::default();
    assert!(!default.routing.enforce_disagg);
    let shown = default.shown().unwrap();
    // B1.5: the configuration, as `config show` shows it
    assert!(shown.to_string().lines().any(|line| line.starts_with("enforce_disagg = false")), "{shown}");
    let example = reference::example(&Config::schema());
    // B1.5: the configuration, as `config example` prints it
    assert!(example.lines().any(|line| line.starts_with("enforce_disagg = false")));
}

/// `text` with `content` between the first `start` and the next `end`.
fn with_content(text: &str, start: &str, content: &str, end: &str) -> String {
    let (before, after) = text.split_once(start).unwrap();
    let (_, after) = after.split_once(end).unwrap();
    [before, start, content, end, after].concat()
}

#[test]
fn the_page_has_every_key_and_those_that_need_a_restart() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let schema = Config::schema();
    let written = with_content(&page, "```toml\n", &reference::example(&schema), "```");
    let rows = reference::restart_table(&schema);
    let written = with_content(&written, "| section | keys |\n| --- | --- |\n", rows.trim_end(), "\n\n");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &written).unwrap();
        return;
    }
    let advice = "docs/configuration.md differs from the sections; write it: UPDATE_DOCS=1 cargo test -p pointsman-gateway";
    assert!(page == written, "{advice} --lib the_page_has_every_key");
}

#[test]
fn all_problems_of_values_are_reported_at_once_with_path_and_line() {
    let text = r#"[routing]
block_size = 0
[policies]
dir = "/no/such"
deadline = "0s"
[policies.slots.prefill]
native = "kv"
builtin = "kv-awar"
[decisions]
bytes = 1000
facts = ["active-requests", "prompt-text"]
[[workers]]
url = "http://a:1"
role = "prefill"
engine = "vllm"
[[workers]]
url = "http://a:1/"
role = "decode"
engine = "vllm"
[[workers]]
id = 7
url = "http://a:2"
engine = "vllm"
role = "decode"
[[workers]]
id = 7
url = "http://a:3"
role = "decode"
engine = "vllm"
"#;
    check(
        text,
        &[
            "line 2: routing.block_size: `0` is too small: expected 1 or more",
            "line 4: policies.dir: `/no/such` does not exist; create it",
            "line 5: policies.deadline: `0s` would end everything at once: expected more than 0",
            "line 6: policies.slots.prefill: `native` and `builtin` exclude each other: keep one of them",
            "line 8: policies.slots.prefill.builtin: `kv-awar` is not a built-in policy: expected kv-aware, \
             predicted-latency, queue-kv-prefix, cache-aware, longest-prefix, least-loaded, formula, \
             conditional-disagg or predicted-disagg",
            "line 10: decisions.bytes: `1000` is too small: expected 65536 or more, or `keep = 0` to record \
             nothing",
            "line 11: decisions.facts[1]: unknown request or worker fact `prompt-text`: did you mean `prompt-tokens`?",
            "line 17: workers[1].url: `http://a:1` is also the URL of workers[0]: list each engine once",
            "line 26: workers[3].id: `7` is already the id of workers[2]: give each worker its own",
        ],
    );
}

#[test]
fn keys_and_types_that_are_wrong_are_reported_with_the_values_and_a_suggestion() {
    let text = r#"[server]
listen_adress = "127.0.0.1:1"
admin_listn = "127.0.0.1:1"
max_body_bytes = "big"

[timeouts]
connect = "soon"
request = 5
booking = "0s"

[policies.slots.prefil]
[policies.slots.decode]
scorers = [{ policy = "kv-aware", wieght = 1.0 }, { policy = 1 }, { policy = "kv-aware", weight = -1.0 }]

[routing]
order = "decode_first"

[[workers]]
role = "cook"
engine = "vllm"
url = "http://a:1"
[[workers]]
role = "decode"
engine = "vllm"
url = "http://a:2"
dp_size = 0
colour = 1

[servr]
"#;
    check(
        text,
        &[
            "line 2: server.listen_adress: unknown key `listen_adress`: did you mean `listen`?",
            "line 3: server.admin_listn: unknown key `admin_listn`: did you mean `admin_listen`?",
            "line 4: server.max_body_bytes: invalid type: string \"big\", expected a whole number of 0 or more",
            "line 7: timeouts.connect: `soon` is not a duration: expected a duration such as \"20ms\", \"5s\", \
             \"2m\"",
            "line 8: timeouts.request: `5` is not a duration: expected a duration such as \"20ms\", \"5s\", \"2m\"",
            "line 9: timeouts.booking: `0s` would end everything at once: expected more than 0",
            "line 11: policies.slots.prefil: unknown value `prefil`: did you mean `prefill`?",
            "line 13: policies.slots.decode.scorers[0].wieght: unknown key `wieght`: did you mean `weight`?",
            "line 13: policies.slots.decode.scorers[1].policy: invalid type: integer `1`, expected a string",
            "line 13: policies.slots.decode.scorers[2].weight: `-1` is not a weight: expected a finite number of \
             0 or more",
            "line 16: routing.order: unknown value `decode_first`: did you mean `decode-first`?",
            "line 19: workers[0].role: unknown role `cook`: expected prefill, decode or aggregated",
            "line 26: workers[1].dp_size: `0` is out of range: expected 1 to 4096",
            "line 27: workers[1].colour: unknown key `colour`: expected one of id, url, tls_server_name, \
             role, engine, models, dp_size, bootstrap_host, bootstrap_port, transport, kv_compatibility, labels, \
             taints, topology, kv_transfer, kv_addr, kv_events, kv_replay, local_prefill, prefill_cancellable, \
             handoff_lease_s, max_concurrency, block_size, total_blocks, loras, api_key",
            "line 29: servr: unknown key `servr`: did you mean `server`?",
        ],
    );
}

#[test]
fn a_scorer_without_a_policy_is_told_which_there_are() {
    let found = problems("[policies.slots.prefill]\nscorers = [{ weight = 1.0 }]\n");
    let expected =
        "policies.slots.prefill.scorers[0]: no policy is named: expected kv-aware, predicted-latency, ";
    assert!(found.iter().any(|problem| problem.contains(expected)), "{found:?}");
}

#[test]
fn syntax_errors_are_all_reported_with_their_lines() {
    let found = problems("[server]\nlisten = \n[routing\nretries = 1\nretries = 2\n");
    let lines: Vec<&str> = found.iter().filter_map(|problem| problem.split(": ").next()).collect();
    assert!(lines.contains(&"line 2") && lines.contains(&"line 3"), "{found:?}");
}

#[test]
fn a_token_of_operators_is_checked() {
    let empty = "the token is empty: give one, or remove the key to let every operator in";
    check("[server]\nadmin_token = \"\"", &[&format!("line 2: server.admin_token: {empty}")]);
    check(
        "[server]\nadmin_token_reads = true",
        &["line 2: server.admin_token_reads: `true` needs a token: add `admin_token`"],
    );
    let found = problems("[server]\nadmin_token = { file = \"/no/such\" }");
    assert!(
        found[0].starts_with("line 2: server.admin_token: cannot read the file `/no/such`: "),
        "{found:?}"
    );
}

#[test]
fn a_file_that_is_missing_is_named() {
    let error = Config::read(Path::new("/no/such.toml")).unwrap_err().to_string();
    assert!(error.starts_with("/no/such.toml: cannot read the configuration: No such file"), "{error}");
}

#[test]
fn flags_take_precedence_before_values_are_checked() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[routing]\nblock_size = 0\nretrys = 1\n").unwrap();
    let load = |block_size| {
        Config::load(Some(file.path()), &Environment::default(), |config| {
            config.routing.block_size = block_size
        })
    };
    let path = file.path().display();
    let unknown = format!("{path}:3:1: routing.retrys: unknown key `retrys`: did you mean `retries`?");
    assert_eq!(load(16).unwrap_err().to_string(), unknown);
    let zero = format!("{path}:2:1: routing.block_size: `0` is too small: expected 1 or more");
    assert_eq!(load(0).unwrap_err().to_string(), format!("{zero}\n{unknown}"));
}

#[test]
fn limits_of_requests_are_within_bounds() {
    check(
        "[limits]\nchoices = 0\nsequences = 4294967295",
        &[
            "line 2: limits.choices: `0` is too small: expected 1 or more",
            "line 3: limits.sequences: `4294967295` is too large: expected at most 1048576",
        ],
    );
}

#[test]
fn a_message_never_shows_a_secret() {
    let texts = [
        "[[auth.keys]]\ndigest = \"sk-SECRET\"",
        "[[auth.keys]]\ndigest = 7007",
        "[[auth.keys]]\ndigest = { k = \"sk-SECRET\" }",
        "[server]\nadmin_token = 7007",
        "[server]\nadmin_token = [\"sk-SECRET\"]",
        "[server]\nadmin_token = \"sk-SECRET",
        "[server]\nadmin_token = sk-SECRET",
        "[server]\nadmin_token = \"sk-SECRET\" x",
        "[server]\nadmin_token = \"sk-SECRET\"\nadmin_token = \"sk-SECRET\"",
        "[routing]\nhash_salt = \"sk-SECRET, expected x\"",
        "[[workers]]\nurl = \"http://a:1\"\nrole = \"prefill\"\nengine = \"vllm\"\napi_key = 7007",
    ];
    for text in texts {
        let problems = problems(text);
        assert!(!problems.is_empty(), "{text}");
        for problem in problems {
            assert!(!problem.contains("SECRET") && !problem.contains("7007"), "{problem}");
            assert!(problem.starts_with("line "), "{problem}");
        }
    }
    check(
        "[server]\nadmin_token = 7007",
        &[
            "line 2: server.admin_token: invalid type: integer, expected a string (the value is a secret and is not shown)",
        ],
    );
}

#[test]
fn the_settings_do_not_print_a_secret() {
    let text = "[server]\nadmin_token = \"sk-SECRET\"\n[[workers]]\nurl = \"http://a:1\"\n\
                role = \"prefill\"\nengine = \"vllm\"\napi_key = \"sk-SECRET\"";
    let (config, _) = parse(text, &Environment::default()).unwrap();
    let settings = config.resolve().unwrap();
    for shown in [format!("{config:?}"), format!("{settings:?}"), format!("{settings:#?}")] {
        assert!(!shown.contains("SECRET"), "{shown}");
    }
}

#[test]
fn n7_an_address_that_another_listener_covers_is_refused() {
    let listen = |clients: &str, operators: &str| {
        format!("[server]\nlisten = \"{clients}\"\nadmin_listen = \"{operators}\"\nadmin_insecure = true")
    };
    for (clients, operators) in [
        ("0.0.0.0:9090", "127.0.0.1:9090"),
        ("127.0.0.1:9090", "0.0.0.0:9090"),
        ("[::]:9090", "127.0.0.1:9090"),
        ("[::]:9090", "0.0.0.0:9090"),
    ] {
        let problem = format!(
            "line 3: server.admin_listen: `{operators}` and `{clients}` of server.listen take the same port: use \
             another port"
        );
        // N7.1
        check(&listen(clients, operators), &[&problem]);
    }
    check(&listen("0.0.0.0:9090", "[::1]:9090"), &[]);
    check(&listen("10.0.0.1:9090", "127.0.0.1:9090"), &[]);
    check(&listen("0.0.0.0:0", "127.0.0.1:0"), &[]);
}

#[test]
fn a_network_needs_an_admin_token_or_a_word_that_it_is_meant() {
    let problem = "line 2: server.admin_listen: `0.0.0.0:9090` can be reached from the network, and there is no admin \
                   token: add `admin_token`, listen on 127.0.0.1, or set `admin_insecure = true` to let everyone \
                   change this gateway";
    let listen = "[server]\nadmin_listen = \"0.0.0.0:9090\"";
    check(listen, &[problem]);
    check(&format!("{listen}\nadmin_token = \"t\""), &[]);
    check(&format!("{listen}\nadmin_insecure = true"), &[]);
    check("[server]\nadmin_listen = \"[::1]:9090\"", &[]);
    check(
        "[server]\nadmin_names = [\"gw\", \"gw:9\"]",
        &[
            "line 2: server.admin_names[1]: `gw:9` is not a host name: expected letters, digits, `-` and `.`, without a \
           port",
        ],
    );
}

#[test]
fn g_a_credit_for_shared_caches_is_not_offered() {
    let found = problems("[routing.cost]\nshared_cache_multiplier = 0.5\n");
    assert!(found[0].starts_with("line 2: routing.cost.shared_cache_multiplier: unknown key"), "{found:?}");
}

#[test]
fn k6_entries_of_certificates_need_an_authority_and_have_one_owner() {
    let tls = "[server.tls]\ncert_file = \"c\"\nkey_file = \"k\"\nclient_ca_file = \"a\"\n";
    let admin = "[server.admin_tls]\ncert_file = \"c\"\nkey_file = \"k\"\nclient_ca_file = \"a\"\n";
    let entry = |rest: &str| format!("[[auth.certificates]]\nname = \"A.example\"\n{rest}\n");
    check(&format!("{tls}{admin}{}{}", entry(""), entry("role = \"viewer\"")), &[]);
    // K6.5
    check(
        &format!("{}{}", entry("tenant = \"t\""), entry("role = \"viewer\"")),
        &[
            "line 2: auth.certificates[0].name: no certificate is asked for: name the authorities in \
             `server.tls.client_ca_file`",
            "line 5: auth.certificates[1].name: no certificate is asked for: name the authorities in \
             `server.admin_tls.client_ca_file`",
        ],
    );
    let twice = format!("{tls}{}{}", entry(""), entry("").replace("A.ex", "a.ex"));
    // K6.5
    check(
        &twice,
        &["line 9: auth.certificates[1].name: `a.example` is already the name of auth.certificates[0]: \
                     remove one of them"],
    );
    // K6.5
    check(
        &format!("{admin}{}", entry("role = \"operator\"\ntenant = \"t\"")),
        &[
            "line 8: auth.certificates[0].tenant: an operator has no tenant: give the client an entry of its own, \
           without `role`",
        ],
    );
}

#[test]
fn i3_a_stream_may_last_an_hour_and_silence_ends_it_earlier() {
    let timeouts = Config::default().timeouts;
    // I3.19
    assert_eq!(timeouts.request, std::time::Duration::from_secs(3_600));
    let waits = [timeouts.head, timeouts.prefill_head, timeouts.whole_head, timeouts.event_idle_max];
    assert!(waits.iter().all(|wait| *wait < timeouts.request / 6), "{waits:?}");
}
