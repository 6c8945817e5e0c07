use super::*;
use crate::report::Place;

fn imported(flavor: Flavor, line: &str) -> (toml::Table, String) {
    let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let imported = import(flavor, &arguments).unwrap();
    (imported.draft.text("x").parse().unwrap(), imported.report.text())
}

fn refused(line: &str) -> String {
    let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    format!("{:#}", import(Flavor::Vllm, &arguments).unwrap_err())
}

#[test]
fn s3_policies_become_slots() {
    for (flavor, policy, key, value) in [
        (Flavor::Vllm, "random", "native", "random"),
        (Flavor::Vllm, "round_robin", "native", "round-robin"),
        (Flavor::Sglang, "power_of_two", "native", "power-of-two"),
        (Flavor::Sglang, "cache_aware", "builtin", "cache-aware"),
        (Flavor::Vllm, "kv_aware", "builtin", "kv-aware"),
        (Flavor::Vllm, "consistent_hash", "builtin", "least-loaded"),
        (Flavor::Vllm, "sticky_least_loaded", "builtin", "least-loaded"),
        (Flavor::Sglang, "manual", "native", "random"),
        (Flavor::Sglang, "prefix_hash", "builtin", "cache-aware"),
        (Flavor::Sglang, "least_load", "builtin", "least-loaded"),
    ] {
        let (table, report) = imported(flavor, &format!("--worker-urls http://a:1 --policy {policy}"));
        // S3.2
        assert_eq!(table["policies"]["slots"]["aggregated"][key].as_str(), Some(value), "{policy}");
        assert!(report.contains("0 without counterpart"), "{report}");
    }
    for policy in ["bucket", "passthrough", "of_tomorrow"] {
        let (_, report) = imported(Flavor::Sglang, &format!("--worker-urls http://a:1 --policy {policy}"));
        // S3.4
        assert!(report.contains("1 without counterpart"), "{report}");
    }
    let line = "--pd-disaggregation --prefill http://a:1 --decode http://b:1 --policy random \
                --decode-policy round_robin";
    let (table, _) = imported(Flavor::Sglang, line);
    // S3.2
    assert_eq!(table["policies"]["slots"]["prefill"]["native"].as_str(), Some("random"));
    assert_eq!(table["policies"]["slots"]["decode"]["native"].as_str(), Some("round-robin"));
    assert!(table["policies"]["slots"].get("aggregated").is_none());
}

#[test]
fn s3_a_router_of_prefill_and_decode_prefills_every_prompt_remotely() {
    for (flavor, line) in [
        (Flavor::Vllm, "--vllm-pd-disaggregation --prefill http://a:1 --decode http://b:1"),
        (Flavor::Sglang, "--pd-disaggregation --prefill http://a:1 --decode http://b:1"),
        (
            Flavor::Production,
            "--static-backends http://a:1,http://b:1 --static-models m,m --static-model-labels p,d \
             --routing-logic disaggregated_prefill_orchestrated --prefill-model-labels p \
             --decode-model-labels d",
        ),
    ] {
        let (table, _) = imported(flavor, line);
        let chosen = &table["policies"]["slots"]["decode-override"];
        // S3.2: not by the gateway's default.
        assert_eq!(chosen["builtin"].as_str(), Some("conditional-disagg"), "{line}");
        assert_eq!(chosen["settings"]["enabled"].as_bool(), Some(false), "{line}");
    }
    let (table, _) = imported(Flavor::Sglang, "--worker-urls http://a:1");
    assert!(table["policies"]["slots"].get("decode-override").is_none());
}

#[test]
fn s3_thresholds_are_those_of_the_flags_or_the_router_s_own() {
    let (table, _) = imported(Flavor::Vllm, "--worker-urls http://a:1 --cache-threshold 0.7");
    let settings = &table["policies"]["slots"]["aggregated"]["settings"];
    // S3.2
    assert_eq!(settings["cache-threshold"].as_float(), Some(0.7));
    assert_eq!(settings["balance-abs-threshold"].as_integer(), Some(64));
    assert_eq!(settings["balance-rel-threshold"].as_float(), Some(1.5));
}

#[test]
fn s3_workers_have_the_dialect_the_role_and_the_connector() {
    let line =
        "--vllm-pd-disaggregation --prefill http://a:1 9000 --prefill http://b:1/ none --decode http://c:1";
    let (table, _) = imported(Flavor::Vllm, &format!("{line} --kv-connector mooncake"));
    let workers = table["workers"].as_array().unwrap();
    let of = |key: &str| -> Vec<_> { workers.iter().map(|worker| worker.get(key).cloned()).collect() };
    // S3.1
    assert_eq!(of("role"), ["prefill", "prefill", "decode"].map(|role| Some(role.into())));
    assert_eq!(of("url"), ["http://a:1", "http://b:1", "http://c:1"].map(|url| Some(url.into())));
    assert_eq!(of("bootstrap_port"), [Some(9_000.into()), Some(8_998.into()), None]);
    assert!(of("transport").iter().all(|transport| *transport == Some("mooncake".into())));
    let (table, _) = imported(Flavor::Sglang, "--pd-disaggregation --prefill http://a:1 --decode http://b:1");
    // S3.1
    assert_eq!(table["workers"][0]["engine"].as_str(), Some("sglang"));
    assert!(table["workers"][0].get("transport").is_none());
    let (table, report) = imported(Flavor::Sglang, "--worker-urls grpc://a:1 http://b:1 http://b:1");
    // S3.4
    assert_eq!(table["workers"].as_array().unwrap().len(), 1);
    assert!(
        report.contains("grpc://a:1: engines are called over HTTP; http://b:1: given before"),
        "{report}"
    );
}

#[test]
fn s3_limits_and_times_are_those_of_the_router() {
    let (table, _) =
        imported(Flavor::Vllm, "--worker-urls http://a:1 --host localhost --port 8080 --queue-size 5");
    // S3.3
    assert_eq!(table["server"]["listen"].as_str(), Some("127.0.0.1:8080"));
    assert_eq!(table["timeouts"]["request"].as_str(), Some("1800s"));
    assert_eq!(table["routing"]["retries"].as_integer(), Some(4));
    assert_eq!(table["queue"]["max_inflight"].as_integer(), Some(32_768));
    assert_eq!(table["queue"]["limit"].as_integer(), Some(5));
    let (table, _) = imported(Flavor::Sglang, "--worker-urls http://a:1 --disable-retries");
    // S3.3
    assert!(table.get("queue").is_none(), "sglang-router has no limit by default");
    assert_eq!(table["routing"]["retries"].as_integer(), Some(0));
    assert_eq!(table["server"]["listen"].as_str(), Some("0.0.0.0:30000"));
}

#[test]
fn s3_every_known_flag_is_reported_and_an_unknown_one_is_named_with_its_position() {
    let mut arguments = Vec::new();
    for flag in flags::names() {
        arguments.push(format!("--{flag}"));
        let value = match flag {
            "prefill" | "decode" | "encode" => "http://a:1",
            "worker-urls" => "http://b:1",
            "pd-kv-events" | "kv-event-source" | "kv-event-replay-source" => "http://a:1=tcp://a:2",
            "control-plane-api-keys" => "id:name:admin:sk-admin-secret",
            "api-key" => "sk-worker-secret",
            "postgres-db-url" => "postgres://user:sk-db-secret@db/x",
            "selector" | "prefill-selector" | "decode-selector" => "app=x",
            "cache-threshold" => "0.5",
            _ => "1",
        };
        if known_flag(flag).unwrap().arity.least() > 0 || value != "1" {
            arguments.push(value.to_owned());
        }
    }
    arguments.extend(["--of-tomorrow", "a", "b", "--port=7"].map(str::to_owned));
    for flavor in [Flavor::Vllm, Flavor::Sglang] {
        let line = CommandLine::parse(&arguments, false).unwrap();
        let report = import(flavor, &arguments).unwrap().report.text();
        for given in &line.given {
            // S3.4
            assert!(
                report.contains(&format!("  {}: --{}", given.place, given.name)),
                "{}\n{report}",
                given.name
            );
        }
        let last = arguments.len() - 3;
        // S3.4
        assert!(
            report.contains(&format!("argument {last}: --of-tomorrow a b -> it is not a flag")),
            "{report}"
        );
        // S3.5
        assert!(!report.contains("secret@") && !report.contains("sk-"), "{report}");
    }
}

#[test]
fn s3_operators_keys_are_digests_and_texts_of_urls_have_no_password() {
    let line =
        "--worker-urls http://user:sk-1@a:1 --control-plane-api-keys k1:Ann:admin:sk-2:x k2:Bob:user:sk-3";
    let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let made = import(Flavor::Sglang, &arguments).unwrap();
    let (text, report) = (made.draft.text("x"), made.report.text());
    // S3.5
    assert!(!text.contains("sk-2") && !report.contains("sk-"), "{text}{report}");
    let table: toml::Table = text.parse().unwrap();
    assert_eq!(table["auth"]["operators"][0]["role"].as_str(), Some("operator"));
    assert_eq!(table["auth"]["operators"][1]["role"].as_str(), Some("viewer"));
    // printf %s sk-3 | sha256sum
    let digest = "sha256:";
    assert!(table["auth"]["operators"][1]["digest"].as_str().unwrap().starts_with(digest));
}

#[test]
fn s3_a_pasted_command_is_read_with_its_program() {
    for program in [
        "",
        "vllm-router",
        "/usr/bin/python3.11 -m vllm_router.launch_router",
        "uv run vllm-router",
        "smg launch",
        "python3 -u -m vllm_router.launch_router",
        "python3 -X dev -W ignore -u -m vllm_router.launch_router",
        "env A=1 B=2 tini -- vllm-router",
        "RUST_LOG=info nohup vllm-router",
    ] {
        let (table, _) =
            imported(Flavor::Vllm, &format!("{program} --router-policy=random --worker-urls http://a:1"));
        // S3.1
        assert_eq!(table["policies"]["slots"]["aggregated"]["native"].as_str(), Some("random"), "{program}");
    }
}

#[test]
fn s3_values_that_the_router_would_refuse_are_refused() {
    for (line, part) in [
        ("--port x", "argument 1: --port: `x` is not a whole number"),
        ("--port 70000", "argument 1: --port: `70000` is not a port"),
        ("--port", "argument 1: --port needs a value"),
        ("--mini-lb=1", "--mini-lb takes no value"),
        ("rm -rf /", "`rm` is not a flag"),
        ("--port 1 2", "argument 3: `2` is not a flag"),
        ("--cache-threshold 2 --worker-urls http://a:1", "`2` is not between 0 and 1"),
        ("--cache-threshold inf --worker-urls http://a:1", "`inf` is not a number"),
        ("--worker-urls a:1", "worker `a:1`: expected http://"),
        ("--prefill http://a:1 x", "`x` is not a bootstrap port"),
        ("--kv-event-source tcp://a", "expected WORKER_URL=ENDPOINT"),
        ("--control-plane-api-keys a:b", "expected ID:NAME:ROLE:KEY"),
        ("--retry-max-retries -1", "is not a number of attempts"),
    ] {
        let refused = refused(line);
        // S3.4
        assert!(refused.contains(part), "{line}: {refused}");
    }
    let many = vec!["--selector".to_owned(); 20_001];
    // S1.6
    assert!(import(Flavor::Vllm, &many).unwrap_err().to_string().contains("at most 20000 arguments"));
    let long = vec![format!("--selector={}", "x".repeat(1 << 20))];
    // S1.6
    assert!(import(Flavor::Vllm, &long).unwrap_err().to_string().contains("at most"));
    assert_eq!(Place::Argument(3).to_string(), "argument 3");
}

#[test]
fn s3_kubernetes_selectors_become_sources() {
    let line = "--service-discovery --selector app=a tier=b --service-discovery-port 8000";
    let (table, report) = imported(Flavor::Vllm, line);
    let source = &table["discovery"]["kubernetes"][0];
    // S3.1
    assert_eq!(source["selector"].as_str(), Some("app=a,tier=b"));
    assert_eq!((source["port"].as_str(), source["namespace"].as_str()), (Some("8000"), Some("default")));
    assert!(report.contains("All namespaces are not watched"), "{report}");
    let line = "--service-discovery --pd-disaggregation --prefill-selector r=p --decode-selector r=d";
    let (table, _) = imported(Flavor::Sglang, line);
    let roles: Vec<_> = table["discovery"]["kubernetes"].as_array().unwrap().iter().collect();
    // S3.1
    assert_eq!(roles[0]["defaults"]["role"].as_str(), Some("prefill"));
    assert_eq!(roles[1]["name"].as_str(), Some("decode"));
    let (_, report) = imported(Flavor::Vllm, "--service-discovery");
    // S3.4
    assert!(report.contains("--service-discovery -> no selector"), "{report}");
}

#[test]
fn s3_kv_events_join_their_workers() {
    let line = "--worker-urls http://a:1 http://b:1 --kv-event-source http://a:1=tcp://a:5,tcp://a:6 \
                --kv-event-source http://b:1=tcp://b:5,tcp://b:7 --kv-event-source http://c:1=tcp://c:5";
    let (table, report) = imported(Flavor::Vllm, line);
    // S3.1
    assert_eq!(table["workers"][0]["kv_events"].as_str(), Some("tcp://a:5"));
    assert!(table["workers"][1].get("kv_events").is_none());
    // S3.4
    assert!(
        report.contains("have to follow each other") && report.contains("no worker has the url `http://c:1`")
    );
}

fn words(line: &[&str]) -> Vec<String> {
    line.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn s3_a_script_of_a_shell_is_read() {
    let script = "set -e; cd /srv && exec python3 -u -m sglang_router.launch_router --policy 'power_of_two' \
                  --worker-urls http://a:1 > /var/log/router 2>&1";
    let pasted = "python3 -m sglang_router.launch_router --policy power_of_two --worker-urls http://a:1\n";
    for line in [
        vec!["sh", "-c", script],
        vec!["/usr/bin/tini", "--", "/bin/bash", "-ec", script],
        vec![script],
        vec![pasted],
        vec!["--policy power_of_two --worker-urls http://a:1"],
        vec!["sh -c 'smg launch --policy=power_of_two --worker-urls http://a:1'"],
    ] {
        let made = import(Flavor::Sglang, &words(&line)).unwrap();
        let table: toml::Table = made.draft.text("x").parse().unwrap();
        // S3.1
        assert_eq!(table["policies"]["slots"]["aggregated"]["native"].as_str(), Some("power-of-two"));
        assert_eq!(table["workers"][0]["url"].as_str(), Some("http://a:1"));
    }
    for (script, part) in [("echo hello", "starts 0 routers"), ("smg a; smg b", "starts 2 routers")] {
        let refused = import(Flavor::Sglang, &words(&["sh", "-c", script])).unwrap_err();
        // S3.4
        assert!(refused.to_string().contains(part), "{refused}");
    }
}

#[test]
fn s3_flags_of_production_stack_are_those_of_its_router() {
    let line = "--port 8000 --service-discovery static --static-backends http://a:9001,http://b:9002 \
                --static-models m1,m2 --routing-logic roundrobin --session-key x-user-id --enable-batch-api";
    let (table, report) = imported(Flavor::Vllm, line);
    let worker =
        |at: usize| (table["workers"][at]["url"].as_str(), table["workers"][at]["models"][0].as_str());
    // S3.6
    assert_eq!(
        (worker(0), worker(1)),
        ((Some("http://a:9001"), Some("m1")), (Some("http://b:9002"), Some("m2")))
    );
    assert_eq!(table["policies"]["slots"]["aggregated"]["native"].as_str(), Some("round-robin"));
    assert_eq!(table["server"]["listen"].as_str(), Some("0.0.0.0:8000"));
    // The limits of the other vllm-router are not its own.
    assert!(table.get("queue").is_none() && table.get("timeouts").is_none(), "{table}");
    for part in [
        "argument 9: --routing-logic roundrobin -> slot aggregated: round-robin",
        "--session-key x-user-id -> a session is named in x-session-id",
        "--enable-batch-api -> files and batches are not served",
        "1 without counterpart",
    ] {
        assert!(report.contains(part), "{part}\n{report}");
    }
    let (table, report) = imported(
        Flavor::Vllm,
        "--service-discovery k8s --k8s-namespace serving --k8s-label-selector app=vllm,tier=1 --routing-logic session",
    );
    let source = &table["discovery"]["kubernetes"][0];
    // S3.6
    assert_eq!(source["selector"].as_str(), Some("app=vllm,tier=1"), "{report}");
    assert_eq!((source["namespace"].as_str(), source["port"].as_str()), (Some("serving"), Some("8000")));
    assert_eq!(table["server"]["listen"].as_str(), Some("0.0.0.0:8001"));
    assert!(table["routing"].get("session_affinity").is_some());
    let (table, _) = imported(
        Flavor::Vllm,
        "--service-discovery static --static-backends http://a:1,http://b:2 --static-models m,m \
         --static-model-labels p,d --prefill-model-labels p --decode-model-labels d --routing-logic \
         disaggregated_prefill",
    );
    let roles: Vec<_> =
        table["workers"].as_array().unwrap().iter().map(|worker| worker["role"].as_str().unwrap()).collect();
    // S3.6
    assert_eq!(roles, ["prefill", "decode"]);
    assert_eq!(table["policies"]["slots"]["prefill"]["native"].as_str(), Some("round-robin"));
}

#[test]
fn s3_prefixaware_is_the_longest_prefix_and_a_misspelt_flag_of_the_rule_is_refused() {
    let line = "--static-backends http://a:1 --routing-logic prefixaware";
    let (table, report) = imported(Flavor::Production, line);
    // S3.6
    let slot = &table["policies"]["slots"]["aggregated"];
    assert_eq!(slot["builtin"].as_str(), Some("longest-prefix"), "{report}");
    assert!(slot.get("settings").is_none() && report.contains("without a limit of load"), "{report}");
    for (flavor, flag, near) in [
        (Flavor::Vllm, "--polcy", "--policy"),
        (Flavor::Sglang, "--prefil-policy", "--prefill-policy"),
        (Flavor::Production, "--routing-logics", "--routing-logic"),
    ] {
        let refused = import(flavor, &words(&[flag, "random"])).unwrap_err().to_string();
        // S3.4
        let told = format!("argument 1: {flag} is not a flag of {}; did you mean {near}?", flavor.name());
        assert_eq!(refused, told);
    }
}

#[test]
fn s3_every_flag_of_production_stack_is_reported() {
    let mut arguments = words(&["--routing-logic", "prefixaware"]);
    for (flag, arity) in production_flags::names().filter(|(flag, _)| *flag != "routing-logic") {
        arguments.push(format!("--{flag}"));
        if arity.least() > 0 {
            arguments.push(if flag == "static-backends" { "http://a:1" } else { "1" }.to_owned());
        }
    }
    arguments.push("--of-tomorrow".to_owned());
    let report = import(Flavor::Vllm, &arguments).unwrap().report.text();
    for (flag, _) in production_flags::names() {
        // S3.4, S3.6
        assert!(report.contains(&format!(": --{flag}")), "{flag}\n{report}");
    }
    assert!(report.contains("--of-tomorrow -> it is not a flag of production-stack"), "{report}");
}

#[test]
fn s3_a_value_that_is_a_variable_is_named_and_ends_nothing() {
    let line = "python3 app.py --port $1 --policy random --worker-urls http://a:1 http://$HOST:2 --api-key \
                ${KEY} --prometheus-port {{.metrics}}";
    let (table, report) = imported(Flavor::Sglang, line);
    let workers = table["workers"].as_array().unwrap();
    // S3.4
    assert_eq!(workers.len(), 1);
    assert!(workers[0].get("api_key").is_none());
    assert_eq!(table["server"]["listen"].as_str(), Some("0.0.0.0:30000"));
    for flag in ["argument 3: --port $1", "argument 7: --worker-urls http://$HOST:2", "--api-key [secret]"] {
        // S3.4
        assert!(report.contains(&format!("{flag} -> left out: the value is a variable")), "{flag}\n{report}");
    }
    assert!(report.contains("4 without counterpart"), "{report}");
    // A dollar sign makes no variable of a secret.
    let (table, _) = imported(Flavor::Sglang, "--worker-urls http://a:1 --api-key pa$sword");
    assert_eq!(table["workers"][0]["api_key"].as_str(), Some("pa$sword"));
    let line = "--pd-disaggregation --service-discovery --prefill-selector pool=$POOL role=prefill \
                --decode-selector role=decode --policy random";
    let (table, report) = imported(Flavor::Sglang, line);
    let sources = table["discovery"]["kubernetes"].as_array().unwrap();
    // S3.4: without one of its labels, a selector would select other pods, too.
    assert_eq!(sources.len(), 1);
    assert_eq!(sources[0]["selector"].as_str(), Some("role=decode"));
    assert!(report.contains("--prefill-selector role=prefill pool=$POOL -> left out: the value"), "{report}");
    let line = "--service-discovery static --static-backends http://$A:1 --static-models m --port $1 \
                --routing-logic roundrobin";
    let (_, report) = imported(Flavor::Vllm, line);
    // S3.4, S3.6
    assert!(
        report.contains("--static-backends http://$A:1 -> left out: the value is a variable"),
        "{report}"
    );
}

#[test]
fn s3_programs_of_public_manifests_are_known() {
    for program in [
        "cargo run --release --",
        "./target/release/vllm-router",
        "python -m vllm_router.router",
        "sgl-model-gateway",
    ] {
        let (table, _) =
            imported(Flavor::Vllm, &format!("{program} --policy random --worker-urls http://a:1"));
        // S3.1
        assert_eq!(table["policies"]["slots"]["aggregated"]["native"].as_str(), Some("random"), "{program}");
    }
}

#[test]
fn s3_the_import_of_production_stack_reads_its_flags_and_defaults_whatever_flags_are_there() {
    let (table, _) = imported(Flavor::Production, "--host 10.0.0.1 --port 8080");
    // S3.6
    assert_eq!(table["server"]["listen"].as_str(), Some("10.0.0.1:8080"));
    let (table, report) = imported(Flavor::Production, "--port 8080");
    assert_eq!(table["server"]["listen"].as_str(), Some("0.0.0.0:8080"));
    assert!(!table["server"].as_table().unwrap().contains_key("admin_listen"), "{report}");
    let (table, _) = imported(Flavor::Production, "--service-discovery static");
    assert_eq!(table["server"]["listen"].as_str(), Some("0.0.0.0:8001"));
}

#[test]
fn s3_comments_name_the_flags_as_they_were_written() {
    let text = |flavor, line: &str| {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        import(flavor, &arguments).unwrap().draft.text("x")
    };
    let production = "--service-discovery static --static-backends http://a:1/v1,http://b:1 --static-models m,n \
                      --routing-logic kvaware --otel-endpoint otel:4317";
    let static_ = text(Flavor::Vllm, production);
    let k8s = text(
        Flavor::Production,
        "--service-discovery k8s --k8s-namespace n --k8s-port 8000 --k8s-label-selector a=b \
         --routing-logic session --session-key x-user-id",
    );
    let sglang = text(
        Flavor::Sglang,
        "--router-worker-urls http://a:1 --router-policy random --router-host 127.0.0.1 --router-port 1",
    );
    for (text, comments) in [
        (
            &static_,
            &[
                "[[workers]]  # --static-backends, argument 3",
                "models = [\"m\"]  # --static-models",
                "builtin = \"kv-aware\"  # --routing-logic kvaware",
                "# --otel-endpoint, over HTTP",
                "# default of --port in production-stack",
                "temperature = 0.0  # no flag of production-stack sets it",
                "url = \"http://a:1\"  # without /v1: the gateway adds the path of each request",
            ][..],
        ),
        (
            &k8s,
            &[
                "[[discovery.kubernetes]]  # --service-discovery",
                "namespace = \"n\"  # --k8s-namespace",
                "port = \"8000\"  # --k8s-port",
                "selector = \"a=b\"  # --k8s-label-selector",
                "session_affinity = \"3600s\"  # --routing-logic session",
            ],
        ),
        (
            &sglang,
            &[
                "# --router-worker-urls, argument 1",
                "# --router-policy random",
                "# --router-host, --router-port",
            ],
        ),
    ] {
        for comment in comments {
            // S1.1
            assert!(text.contains(comment), "{comment}: {text}");
        }
        for other in ["--worker-urls,", "--policy ", "--service-discovery-", "--selector", "--host"] {
            let others = text.lines().filter(|line| line.contains(&format!("# {other}")));
            assert_eq!(others.count(), 0, "{other}: {text}");
        }
    }
}

#[test]
fn s3_workers_are_written_as_the_gateway_reads_them() {
    let line = "--worker-urls http://a:1/v1/ HTTP://b:1,http://c:1 http://u:geheim@d:1 grpc://e:1 http://a:1";
    let (table, report) = imported(Flavor::Sglang, line);
    let urls: Vec<_> =
        table["workers"].as_array().unwrap().iter().map(|worker| worker["url"].as_str()).collect();
    // S3.7
    assert_eq!(urls, [Some("http://a:1"), Some("http://b:1"), Some("http://c:1")]);
    let left = "left out: http://[secret]@d:1: a URL has no credentials: set api_key of the worker; \
                grpc://e:1: engines are called over HTTP; http://a:1: given before";
    assert!(report.contains(left) && !report.contains("geheim"), "{report}");
    let blank = ["--worker-urls".to_owned(), " http://a:1 ".to_owned()];
    let text = import(Flavor::Vllm, &blank).unwrap().draft.text("x");
    assert!(text.contains("url = \"http://a:1\"\n"), "{text}");
    let events = "--worker-urls http://a:1/v1 --kv-event-source http://a:1/v1=tcp://a:5557";
    let (table, _) = imported(Flavor::Vllm, events);
    assert_eq!(table["workers"][0]["kv_events"].as_str(), Some("tcp://a:5557"));
}

#[test]
fn s3_the_flags_of_smg_are_known_with_their_values() {
    let line = "smg launch --worker-urls http://a:1 --sticky-sessions --worker-wedge-secs 30 --kv-index chain \
                --enable-rl --tenant-api-key t:geheim --routing-key-headers x-a x-b --disable-audit-logging \
                --drain-settle-secs 5 --runtime-worker-threads 8 --webrtc-bind-addr 127.0.0.1 --kv-indexer-ttl-secs 9 \
                --stream-request-bodies-over 1000 --port 30001";
    let (table, report) = imported(Flavor::Sglang, line);
    // S3.4
    assert!(!report.contains("check its spelling") && !report.contains("geheim"), "{report}");
    assert!(report.contains("--sticky-sessions -> set routing.session_affinity"), "{report}");
    assert!(report.contains("--tenant-api-key [secret] -> "), "{report}");
    assert_eq!(table["server"]["listen"].as_str(), Some("0.0.0.0:30001"));
}

#[test]
fn s3_the_key_of_sglang_router_is_asked_of_clients_too() {
    let line = "--worker-urls http://a:1 --api-key sk-router";
    let (table, report) = imported(Flavor::Sglang, line);
    // printf %s sk-router | sha256sum
    let digest = "sha256:f87fb1f29d743c922066db25ea3c8bbc09533ae96c058f896b3e71ccbc245843";
    // S3.8
    assert_eq!(table["auth"]["keys"][0]["digest"].as_str(), Some(digest), "{table}");
    assert_eq!(table["workers"][0]["api_key"].as_str(), Some("sk-router"));
    assert!(report.contains("Clients have to send it, too") && !report.contains("sk-router"), "{report}");
    let discovered = "--service-discovery --selector app=a --api-key sk-router";
    // S3.8
    assert_eq!(imported(Flavor::Sglang, discovered).0["auth"]["keys"][0]["digest"].as_str(), Some(digest));
    let (table, report) = imported(Flavor::Vllm, line);
    // S3.8: vllm-router sends its key to engines only.
    assert!(!table.contains_key("auth") && report.contains("Clients need no key"), "{report}");
    let (table, report) = imported(Flavor::Sglang, "--worker-urls http://a:1 --api-key $KEY");
    assert!(!table.contains_key("auth") && !table.contains_key("upstream"), "{table}");
    // S3.8
    assert!(report.contains("give the value itself. Without it, clients need no key"), "{report}");
}

#[test]
fn s3_an_empty_key_is_left_out_and_nothing_takes_its_place() {
    let discovery = &["--service-discovery", "--selector", "app=a"][..];
    for (flavor, empty) in [(Flavor::Sglang, ""), (Flavor::Vllm, ""), (Flavor::Sglang, " \n")] {
        for source in [&["--worker-urls", "http://a:1"], discovery] {
            let arguments = words(&[source, &["--api-key", empty]].concat());
            let imported = import(flavor, &arguments).unwrap();
            let (text, report) = (imported.draft.text("x"), imported.report.text());
            let table: toml::Table = text.parse().unwrap();
            // S3.9
            assert_eq!(table["upstream"]["forward_authorization"].as_bool(), Some(true), "{text}");
            // K5.5: the gateway would refuse an empty `api_key`.
            assert!(!table.contains_key("auth") && !text.contains("api_key = "), "{text}");
            // S3.4
            assert!(report.contains("--api-key [secret] -> left out: the value is empty"), "{report}");
        }
    }
    // The last value counts.
    let (table, _) = imported(Flavor::Sglang, "--worker-urls http://a:1 --api-key= --api-key sk-1");
    assert_eq!(table["workers"][0]["api_key"].as_str(), Some("sk-1"));
    assert!(table.contains_key("auth") && !table.contains_key("upstream"), "{table}");
}

#[test]
fn s3_what_clients_send_as_their_key_reaches_engines_as_before() {
    for (flavor, line) in [
        (Flavor::Production, "--static-backends http://a:1 --static-models m --routing-logic roundrobin"),
        (Flavor::Sglang, "--worker-urls http://a:1"),
        (Flavor::Vllm, "--worker-urls http://a:1"),
    ] {
        let (table, report) = imported(flavor, line);
        // S3.9
        assert_eq!(table["upstream"]["forward_authorization"].as_bool(), Some(true), "{flavor:?}");
        assert!(report.contains("health checks have none: where engines ask for a key"), "{report}");
        let (table, _) = imported(flavor, &format!("{line} --api-key sk-1"));
        // S3.9
        assert!(!table.contains_key("upstream"), "{flavor:?}: {table}");
    }
}

#[test]
fn s3_a_pair_that_hands_over_by_lmcache_has_no_transport_and_says_what_to_do() {
    let line = "--service-discovery static --static-backends http://a:1,http://b:1 --static-models m,m \
                --static-model-labels p,d --prefill-model-labels p --decode-model-labels d --routing-logic";
    let pods = "--service-discovery k8s --k8s-label-selector app=a --prefill-model-labels p \
                --decode-model-labels d --routing-logic";
    for (logic, transport) in
        [("disaggregated_prefill", None), ("disaggregated_prefill_orchestrated", Some("nixl"))]
    {
        let (table, report) = imported(Flavor::Production, &format!("{line} {logic}"));
        // S3.6
        assert_eq!(table["workers"][0]["role"].as_str(), Some("prefill"));
        assert_eq!(table["workers"][0].get("transport").and_then(toml::Value::as_str), transport, "{logic}");
        let is_told = report.contains("without counterpart, and what to do:\n  argument 13: --routing-logic \
                                       disaggregated_prefill -> its engines hand the KV cache over by LMCache");
        assert_eq!(is_told, transport.is_none(), "{report}");
        let (table, _) = imported(Flavor::Production, &format!("{pods} {logic}"));
        let defaults = &table["discovery"]["kubernetes"][0]["defaults"];
        // S3.6
        assert_eq!(defaults.get("transport").and_then(toml::Value::as_str), transport, "{logic}");
    }
}

#[test]
fn s3_what_starts_engines_is_refused_with_what_to_import_instead() {
    for line in [
        "python3 -m sglang_router.launch_server --model-path m --dp-size 2 --router-policy random",
        "sglang_router.launch_server --port 1",
    ] {
        let refused = import(Flavor::Sglang, &words(&line.split(' ').collect::<Vec<_>>())).unwrap_err();
        // S3.4
        let told = "`sglang_router.launch_server` starts the engines, too: start them with `sglang.launch_server`, \
                    and import the arguments of `sglang_router.launch_router --worker-urls URL…`";
        assert_eq!(refused.to_string(), told);
    }
    for line in ["smg serve --backend vllm --model m --port 8080", "python3 -m smg serve --model m"] {
        let refused = import(Flavor::Sglang, &words(&line.split(' ').collect::<Vec<_>>())).unwrap_err();
        // S3.4
        assert!(
            refused.to_string().ends_with("import the arguments of `smg launch --worker-urls URL…`"),
            "{refused}"
        );
    }
}

#[test]
fn s3_the_share_of_requests_that_are_traced_is_that_of_the_router() {
    let line = "--worker-urls http://a:1 --enable-trace --otel-sampling-ratio";
    let (table, report) = imported(Flavor::Sglang, &format!("{line} 0.25 --otel-excluded-paths /x /y"));
    // S3.3
    assert_eq!(table["traces"]["sample_ratio"].as_float(), Some(0.25));
    // S3.4
    assert!(report.contains("--otel-excluded-paths /x /y -> spans are those of requests"), "{report}");
    assert!(!report.contains("set sample_ratio"), "{report}");
    let refused = refused(&format!("{line} 2"));
    assert!(refused.contains("--otel-sampling-ratio: `2` is not between 0 and 1"), "{refused}");
}

#[test]
fn s3_selectors_are_those_of_kubernetes_and_others_make_no_source() {
    let selected = |flavor, flag: &str, selector: &[&str]| {
        let discovery: &[&str] = if flavor == Flavor::Production {
            &["--service-discovery", "k8s"]
        } else {
            &["--service-discovery"]
        };
        let made = import(flavor, &words(&[discovery, &[flag], selector].concat())).unwrap();
        let table: toml::Table = made.draft.text("x").parse().unwrap();
        let source = table.get("discovery").map(|all| all["kubernetes"][0]["selector"].to_string());
        (source.unwrap_or_default().replace('"', ""), made.report.text())
    };
    let flag = "--k8s-label-selector";
    for (text, expected) in [
        ("environment=prod, tier in (gpu, big),!canary", "environment=prod,tier in (gpu,big),!canary"),
        ("vllm", "vllm"),
        ("environment=prod,tier!=canary", "environment=prod,tier!=canary"),
    ] {
        let (source, report) = selected(Flavor::Production, flag, &[text]);
        // S3.6
        assert_eq!(source, expected, "{report}");
        assert!(report.contains("-> selector of [[discovery.kubernetes]]\n"), "{report}");
    }
    let (source, report) = selected(Flavor::Vllm, "--selector", &["app=vllm,tier in (gpu, big)", "role"]);
    // S3.1: the router would compare these differently.
    assert_eq!(source, "app=vllm,tier in (gpu,big),role");
    assert!(report.contains("as Kubernetes reads it; the router reads KEY=VALUE only"), "{report}");
    for (flavor, flag) in [(Flavor::Production, flag), (Flavor::Sglang, "--selector")] {
        let (source, report) = selected(flavor, flag, &["app=vllm,tier in gpu"]);
        // S3.4: a part of it would select pods that were not meant.
        assert!(source.is_empty() && report.contains("it is not a selector of labels"), "{report}");
    }
}

#[test]
fn s3_traces_keep_the_scheme_of_their_endpoint() {
    for (flavor, line, endpoint) in [
        (Flavor::Sglang, "--enable-trace", "http://localhost:4318"),
        (Flavor::Sglang, "--enable-trace --otlp-traces-endpoint HTTPS://o:4317", "https://o:4318"),
        (Flavor::Sglang, "--enable-trace --otlp-traces-endpoint http://o:4317/", "http://o:4318"),
        (Flavor::Sglang, "--enable-trace --otlp-traces-endpoint o:4000", "http://o:4000"),
        (Flavor::Production, "--otel-endpoint o:4317", "http://o:4318"),
        (Flavor::Production, "--otel-endpoint http://o:4317 --otel-secure", "https://o:4318"),
    ] {
        let (table, report) = imported(flavor, line);
        // S3.3
        assert_eq!(table["traces"]["endpoint"].as_str(), Some(endpoint), "{line}: {report}");
    }
    for empty in ["", " ", "https://"] {
        let line = ["--enable-trace", "--otlp-traces-endpoint", empty];
        let made = import(Flavor::Sglang, &words(&line)).unwrap();
        let report = made.report.text();
        // S3.4
        assert!(!made.draft.text("x").contains("[traces]"), "{empty}");
        assert!(report.contains("left out: it is not the address of a collector"), "{report}");
    }
}

#[test]
fn s3_an_engine_with_several_models_is_one_worker_and_lists_have_one_length() {
    let line = "--static-backends http://a:1,http://b:1,http://a:1/ --static-models m,m,n";
    let (table, report) = imported(Flavor::Production, line);
    let workers = table["workers"].as_array().unwrap();
    let models: Vec<_> = workers.iter().map(|worker| worker["models"].to_string()).collect();
    // S3.6
    assert_eq!(models, [r#"["m", "n"]"#, r#"["m"]"#], "{report}");
    assert!(report.contains("-> 2 of [[workers]]") && !report.contains("given before"), "{report}");
    for (line, problem) in [
        ("--static-models m", "argument 3: --static-models: 1 entries for 2 of --static-backends"),
        ("--static-models m,m,m", "argument 3: --static-models: 3 entries for 2"),
        (
            "--static-models m,m --static-model-labels p",
            "argument 5: --static-model-labels: 1 entries for 2 of --static-backends: give one for each",
        ),
    ] {
        let line = format!("--static-backends http://a:1,http://b:1 {line}");
        let refused = import(Flavor::Production, &words(&line.split(' ').collect::<Vec<_>>())).unwrap_err();
        // S3.4
        assert!(refused.to_string().contains(problem), "{refused}");
    }
}

#[test]
fn s3_a_variable_in_the_place_of_python_or_a_starter_is_skipped() {
    for line in [
        vec!["sh", "-c", "exec \"$PYTHON\" -u -m sglang_router.launch_router --worker-urls http://a:1"],
        vec!["${PYTHON:-python3}", "-m", "sglang_router.launch_router", "--worker-urls", "http://a:1"],
        vec!["$WRAPPER smg launch --worker-urls http://a:1"],
    ] {
        let made = import(Flavor::Sglang, &words(&line)).unwrap();
        // S3.1
        assert!(made.draft.text("x").contains("url = \"http://a:1\""), "{line:?}");
    }
    for line in [
        vec!["$PYTHON", "app.py", "--worker-urls", "http://a:1"],
        vec!["smg", "$MODE", "--worker-urls", "http://a:1"],
    ] {
        let refused = import(Flavor::Sglang, &words(&line)).unwrap_err().to_string();
        // S3.4
        assert!(refused.contains("` is not a flag: give the arguments"), "{refused}");
    }
}

#[test]
fn s3_only_the_program_of_a_command_is_a_router() {
    const ROUTER: &str = "python3 -m sglang_router.launch_router --worker-urls http://a:1";
    for script in [
        format!("pip install -q sglang-router && {ROUTER}"),
        format!("echo starting sglang_router; exec {ROUTER}"),
        format!("mkdir -p /var/log/sglang-router && {ROUTER} --log-dir /var/log/sglang-router"),
        format!("{ROUTER} | tee /var/log/sglang-router"),
        format!("while true; do {ROUTER}; sleep 1; done"),
        "cd /opt/vllm-router && ./vllm-router --worker-urls http://a:1".to_owned(),
        "uv pip install vllm-router; numactl -N 0 vllm-router --worker-urls http://a:1".to_owned(),
    ] {
        let made = import(Flavor::Sglang, &words(&["sh", "-c", &script])).unwrap();
        // S3.1
        assert!(made.draft.text("x").contains("url = \"http://a:1\""), "{script}");
    }
}

#[test]
fn s3_programs_that_start_others_are_passed_over() {
    for start in [
        "numactl --cpunodebind=0 --membind 0 python3 -m sglang_router.launch_router",
        "timeout -k 5 3600 nice -n 5 sglang-router launch",
        "uvx --from vllm-router==0.1 vllm-router",
        "uv run --with sglang-router $PYTHON -m sglang_router.launch_router",
        "poetry run vllm-router",
        "conda run --no-capture-output -n router vllm-router",
        "env -u HTTP_PROXY A=1 taskset -c 0-3 vllm-router",
        "docker run --rm -it --name sglang-router -p 8000:8000 -v /opt/vllm-router:/x vllm/vllm-router:v0.1",
        "docker run -d --gpus=all --network host lmsysorg/sglang:latest python3 -m sglang_router.launch_router",
        "sudo -E docker run some/image",
    ] {
        let line = format!("{start} --worker-urls http://a:1");
        let (table, _) = imported(Flavor::Sglang, &line);
        // S3.1
        assert_eq!(table["workers"][0]["url"].as_str(), Some("http://a:1"), "{line}");
    }
    let script = "vllm-router --worker-urls http://a:1";
    let line = words(&["docker", "run", "--rm", "some/image", "bash", "-lc", script]);
    // S3.1
    assert!(import(Flavor::Vllm, &line).unwrap().draft.text("x").contains("http://a:1"));
    for line in ["srun -n 1 vllm-router --worker-urls http://a:1", "pip install vllm-router"] {
        let program = line.split(' ').next().unwrap();
        for line in [line.split(' ').collect(), vec!["sh", "-c", line]] {
            let refused = import(Flavor::Vllm, &words(&line)).unwrap_err().to_string();
            // S3.4
            assert!(refused.contains(&format!("`{program}` is not a program that")), "{refused}");
        }
    }
}
