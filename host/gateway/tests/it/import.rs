//! `pointsman import`: what it makes of each sample in tests/fixtures/import is a configuration that
//! `check-config` accepts, and its report names every part.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::process::{command, run};

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/import")
}

/// Exit code, stdout and stderr of `pointsman` with a text on stdin.
fn pointsman(arguments: &[&str], stdin: &str) -> (Option<i32>, String, String) {
    run(&mut command(crate::programs::pointsman(), arguments), stdin)
}

/// Arguments of the import of a sample: of a file, or of a command line with an argument on each line.
fn import_of(sample: &Path) -> Vec<String> {
    let name = sample.file_name().unwrap().to_str().unwrap();
    if name.starts_with("llm-d") {
        return ["import", "llm-d", sample.to_str().unwrap()].map(str::to_owned).to_vec();
    }
    let router = format!("{}-router", name.split('-').next().unwrap());
    let mut arguments = vec!["import".to_owned(), router, "--".to_owned()];
    arguments.extend(fs::read_to_string(sample).unwrap().lines().map(str::to_owned));
    arguments
}

fn samples() -> Vec<PathBuf> {
    let files = fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().path());
    let mut samples: Vec<_> =
        files.filter(|path| path.file_stem().is_none_or(|stem| stem != "parity")).collect();
    samples.sort();
    samples
}

fn import(sample: &Path) -> (String, String) {
    let arguments = import_of(sample);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (code, out, report) = pointsman(&arguments, "");
    assert_eq!(code, Some(0), "{}: {report}", sample.display());
    (out, report)
}

fn accepted(name: &str, config: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.toml");
    fs::write(&file, config).unwrap();
    let (code, out, error) = pointsman(&["check-config", file.to_str().unwrap()], "");
    assert!(code == Some(0) && out.ends_with("ok\n"), "{name}: {error}\n{config}");
}

#[test]
fn s1_check_config_accepts_what_each_sample_becomes() {
    let samples = samples();
    assert!(samples.len() >= 13, "{samples:?}");
    for sample in samples {
        let name = sample.file_name().unwrap().to_str().unwrap().to_owned();
        let (config, report) = import(&sample);
        // S1.1
        accepted(&name, &config);
        // S1.2
        assert!(report.lines().last().unwrap().starts_with("pointsman: "), "{name}: {report}");
        // S1.1: a comment tells what a part came from.
        assert!(config.lines().filter(|line| line.contains("  # ")).count() >= 2, "{name}: {config}");
    }
}

#[test]
fn s1_every_sample_with_a_prefill_slot_says_when_prefill_is_remote() {
    let mut count = 0;
    for sample in samples() {
        let (config, _) = import(&sample);
        let config: toml::Table = config.parse().unwrap();
        let slots = &config["policies"]["slots"];
        if slots.get("prefill").is_some() {
            // S2.3, S3.2: whatever the gateway's default is.
            assert!(slots["decode-override"]["settings"]["enabled"].is_bool(), "{}", sample.display());
            count += 1;
        }
    }
    assert!(count >= 3, "{count}");
}

#[test]
fn s2_every_plugin_and_entry_of_a_file_is_in_its_report() {
    for sample in samples() {
        let name = sample.file_name().unwrap().to_str().unwrap().to_owned();
        let text = fs::read_to_string(&sample).unwrap();
        if !name.starts_with("llm-d") {
            continue;
        }
        let (_, report) = import(&sample);
        for (number, line) in text.lines().enumerate() {
            let is_entry = line.trim_start().starts_with("- pluginRef: ");
            let in_profile = text.lines().take(number).any(|line| line.trim() == "schedulingProfiles:");
            let place = format!("line {}: ", number + 1);
            // S2.4
            assert!(!is_entry || !in_profile || report.contains(&place), "{name}: {place}{line}\n{report}");
            let line = line.trim_start_matches([' ', '-']);
            let kind = line.strip_prefix("type: ");
            if let Some(kind) = kind.filter(|_| !line.contains('{')) {
                // S2.4: by its type, or by the name that the line before gives.
                let before =
                    text.lines().nth(number.saturating_sub(1)).unwrap().trim_start_matches([' ', '-']);
                let named = before.strip_prefix("name: ").unwrap_or(kind);
                assert!(report.contains(&format!("`{named}`")), "{name}: {named}\n{report}");
            }
        }
    }
}

#[test]
fn s1_strict_tells_by_its_code_that_something_has_no_counterpart() {
    let everything = fixtures().join("llm-d-everything.yaml");
    let arguments = ["import", "llm-d", "--strict", everything.to_str().unwrap()];
    let (code, out, report) = pointsman(&arguments, "");
    // S1.3
    assert_eq!(code, Some(1), "{report}");
    accepted("strict", &out);
    let good = fixtures().join("llm-d-default.yaml");
    // S1.3
    assert_eq!(pointsman(&["import", "llm-d", "--strict", good.to_str().unwrap()], "").0, Some(0));
    let line = ["import", "vllm-router", "--strict", "--", "--worker-urls", "http://a:1", "--of-tomorrow"];
    // S1.3
    assert_eq!(pointsman(&line, "").0, Some(1));
}

#[test]
fn s1_a_router_without_an_import_gets_the_list_of_those_with_one() {
    let (code, out, told) = pointsman(&["import", "dynamo", "graph.yaml"], "");
    // S1.7
    assert!(code == Some(2) && out.is_empty(), "{out}{told}");
    for part in [
        "no import from `dynamo`",
        "llm-d, vllm-router, production-stack and sglang-router",
        "Without an import",
    ] {
        // S1.7
        assert!(told.contains(part), "{told}");
    }
}

#[test]
fn s1_a_file_is_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.toml");
    let path = file.to_str().unwrap();
    let line = |more: &[&'static str]| {
        let mut arguments = vec!["import", "sglang-router", "-o", path];
        arguments.extend(more);
        arguments.extend(["--", "--worker-urls", "http://a:1"]);
        pointsman(&arguments, "")
    };
    let (code, out, _) = line(&[]);
    assert_eq!((code, out.as_str()), (Some(0), ""));
    let first = fs::read_to_string(&file).unwrap();
    accepted("file", &first);
    fs::write(&file, "mine").unwrap();
    let (code, _, error) = line(&[]);
    // S1.4
    assert!(code == Some(2) && error.contains("exists"), "{error}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    // S1.4
    assert_eq!(line(&["--force"]).0, Some(0));
    assert_eq!(fs::read_to_string(&file).unwrap(), first);
}

#[test]
fn s1_hostile_files_end_with_an_error_and_no_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let large = dir.path().join("large.yaml");
    fs::write(&large, "#".repeat(1024 * 1024 + 1)).unwrap();
    let binary = dir.path().join("binary.yaml");
    fs::write(&binary, [0xff, 0xfe, 0x00]).unwrap();
    let missing = dir.path().join("none.yaml");
    for (file, part) in [
        (large.to_str().unwrap(), "is larger than 1048576 bytes"),
        ("/dev/zero", "is larger than 1048576 bytes"),
        (binary.to_str().unwrap(), "is not UTF-8"),
        (missing.to_str().unwrap(), "cannot open"),
        (dir.path().to_str().unwrap(), "cannot read"),
    ] {
        let (code, out, error) = pointsman(&["import", "llm-d", file], "");
        // S1.6
        assert!(code == Some(2) && out.is_empty() && error.contains(part), "{file}: {error}");
    }
    let bomb = "kind: EndpointPickerConfig\na: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b \
                [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d \
                [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\n";
    let (code, out, error) = pointsman(&["import", "llm-d", "-"], bomb);
    // S1.6
    assert!(code == Some(2) && out.is_empty() && error.contains("more than 50000 values"), "{error}");
}

#[test]
fn s3_certificates_of_the_command_line_are_those_of_the_gateway() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["gateway.example".to_owned()]).unwrap();
    let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    fs::write(&cert, made.cert.pem()).unwrap();
    fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let (cert, key) = (cert.to_str().unwrap(), key.to_str().unwrap());
    let (code, out, report) = pointsman(
        &[
            "import",
            "sglang-router",
            "--",
            "--worker-urls",
            "https://a:1",
            "--tls-cert-path",
            cert,
            "--tls-key-path",
            key,
            "--ca-cert-paths",
            cert,
            "--control-plane-api-keys",
            "ops:Operator:admin:sk-long-secret",
        ],
        "",
    );
    assert_eq!(code, Some(0), "{report}");
    accepted("tls", &out);
    // S3.3
    assert!(out.contains("[server.tls]") && out.contains("[upstream.tls]"), "{out}");
    // S3.5
    assert!(!out.contains("sk-long-secret") && !report.contains("sk-long-secret"));
    for alone in ["--tls-cert-path a.pem", "--client-key-path a.pem"] {
        let (code, _, problem) = pointsman(&of_line("sglang-router", alone), "");
        // S3.4
        assert!(
            code == Some(2) && problem.contains("a certificate and its key belong together"),
            "{problem}"
        );
    }
}

/// A command line without blanks in its arguments, as the arguments of `import`.
fn of_line<'a>(router: &'a str, line: &'a str) -> Vec<&'a str> {
    ["import", router, "--"].into_iter().chain(line.split_whitespace()).collect()
}

#[test]
fn s1_values_that_the_gateway_would_refuse_are_mended_or_end_the_import_with_their_place() {
    let workers = "--worker-urls http://a:1";
    for (router, line, part) in [
        (
            "sglang-router",
            "--cors-allowed-origins https://a.example/ http://localhost:3000",
            "cors_origins = [\"https://a.example\", \"http://localhost:3000\"]",
        ),
        (
            "sglang-router",
            "--control-plane-api-keys k:a:admin:k1-long-long k:b:user:k2-long-long :c:user:k3-long-long",
            "id = \"k-2\"",
        ),
        ("sglang-router", "--port 29000", "admin_listen = \"127.0.0.1:29001\""),
        (
            "sglang-router",
            "--enable-trace --otlp-traces-endpoint https://otel.example:4317/",
            "endpoint = \"https://otel.example:4318\"",
        ),
        ("sglang-router", "--worker-urls http://[fe80::1%eth0]:1", "url = \"http://a:1\""),
        ("sglang-router", "--tls-cert-path $CERT --tls-key-path a.pem", "[[workers]]"),
        ("production-stack", "--port 9090", "admin_listen = \"127.0.0.1:9091\""),
        (
            "production-stack",
            "--static-backends http://a:1,http://b:1,http://a:1/v1 --static-models m,m,n",
            "models = [\"m\", \"n\"]",
        ),
    ] {
        let more = if router == "production-stack" { "" } else { workers };
        let line = format!("{line} {more}");
        let (code, config, report) = pointsman(&of_line(router, &line), "");
        // S1.1
        assert!(code == Some(0) && config.contains(part), "{line}: {config}{report}");
        accepted(&line, &config);
    }
    for line in [
        "--service-discovery --selector app=a --service-discovery-port 0",
        "--service-discovery --selector app=a --service-discovery-namespace My_NS",
        "--cors-allowed-origins a.example",
        "--control-plane-api-keys a:n:admin:k1-long b:n:user:k1-long",
        "--intra-node-data-parallel-size 5000",
        "--prefill http://a:1 0",
        "--prometheus-port 30000",
        "--port 0",
        "--api-key schl\u{fc}ssel",
    ] {
        let (code, out, problem) = pointsman(&of_line("sglang-router", line), "");
        let last = line.split(' ').rfind(|word| word.starts_with("--")).unwrap();
        let place = line.split(' ').position(|word| word == last).unwrap() + 1;
        // S1.1
        assert!(code == Some(2) && out.is_empty(), "{line}: {out}");
        assert!(problem.contains(&format!("argument {place}: {last}: ")), "{line}: {problem}");
    }
    let file = fixtures().join("llm-d-default.yaml");
    for (flag, value) in [("--namespace", "My_NS"), ("--port", "0"), ("--selector", "app in a")] {
        let mut arguments = vec!["import", "llm-d", file.to_str().unwrap(), "--selector", "app=a"];
        if flag == "--selector" {
            arguments.truncate(3);
        }
        arguments.extend([flag, value]);
        let (code, out, problem) = pointsman(&arguments, "");
        // S1.1
        assert!(code == Some(2) && out.is_empty() && problem.contains(flag), "{flag}: {problem}");
    }
}
