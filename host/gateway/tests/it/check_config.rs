//! `pointsman check-config`: every problem of a configuration at once, with its place; what `serve` would
//! check is checked.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{fs, net::TcpListener, path::Path};

use pointsman_embedded_policies::{KV_AWARE, LEAST_LOADED};

use crate::process::{POINTSMAN, command, run};

mod authority_certificates;

/// Exit code, stdout and stderr of `pointsman` in a directory.
fn pointsman(dir: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    run(command(POINTSMAN, arguments).current_dir(dir), "")
}

/// A directory with a configuration in `p.toml`.
pub(crate) fn with_config(text: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("p.toml"), text).unwrap();
    dir
}

#[test]
fn n7_a_value_of_the_wrong_type_is_not_missing_too() {
    let dir = with_config("[auth.jwt]\nissuer = 'i'\naudience = 'gw'\njwks_url = 'http://127.0.0.1:1/'\n");
    let (code, out, err) = pointsman(dir.path(), &["check-config", "--config", "p.toml"]);
    let text = format!("{out}{err}");
    // N7.10
    assert!(code != Some(0) && text.matches("auth.jwt.audience").count() == 1, "{text}");
    assert!(text.contains("expected a sequence"), "{text}");
}

#[test]
fn one_run_tells_the_problems_of_keys_values_ports_tokenizers_slots_and_policy_files() {
    let dir = with_config(
        r#"[server]
listen = "192.0.2.7:80"
admin_listen = "127.0.0.1:0"
[timeouts]
connect = "soon"
[policies]
dir = "d"
[policies.slots.prefill]
scorers = [
  { policy = "missing-one" },
  { policy = "least-loaded", weight = 1.0 },
  { policy = "missing-two" },
]
[policies.slots.aggregated]
builtin = "least-loaded"
settings = { overlop = 1 }
[models.tiny]
tokenizer = "/no/such"
[models.other]
tokenizer = "/no/such/either"
"#,
    );
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/decode.wasm"), "garbage").unwrap();
    fs::write(dir.path().join("d/decode.canary.wasm"), "more garbage").unwrap();
    fs::write(dir.path().join("d/prefil.wasm"), KV_AWARE).unwrap();
    let (code, _, text) = pointsman(dir.path(), &["check-config", "p.toml"]);
    assert_eq!(code, Some(2), "{text}");
    for expected in [
        "p.toml:2:1: server.listen: cannot listen on `192.0.2.7:80`: ",
        "p.toml:5:1: timeouts.connect: `soon` is not a duration: expected a duration such as \"20ms\", \"5s\", \"2m\"",
        "p.toml:7:1: policies.dir: the policy `decode.wasm` is refused: not WebAssembly",
        "p.toml:7:1: policies.dir: the policy `decode.canary.wasm` is refused: not WebAssembly",
        "the policy `parts/missing-one.wasm` is refused: `missing-one` is neither built in nor a file of",
        "the policy `parts/missing-two.wasm` is refused: `missing-two` is neither built in nor a file of",
        "p.toml:14:17: policies.slots.aggregated: the policy `least-loaded` is refused: configure failed: ",
        "p.toml:18:1: models.tiny.tokenizer: cannot read tokenizer file /no/such/tokenizer.json: No such file",
        "p.toml:20:1: models.other.tokenizer: cannot read tokenizer file /no/such/either/tokenizer.json",
        "warning: p.toml:7:1: policies.dir: nothing runs `prefil.wasm`: the file name selects no slot; did you mean `prefill.wasm`?",
        "pointsman: 9 problems",
    ] {
        assert!(text.contains(expected), "{expected}\nis not in\n{text}");
    }
    // Each cause is printed once.
    assert_eq!(text.matches("No such file").count(), 2, "{text}");
}

#[test]
fn a_valid_file_passes_with_its_policies_and_no_log_lines() {
    let dir = with_config(
        "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n[policies]\ndir = 'd'\n\
         [[workers]]\nurl = 'http://127.0.0.1:9'\nrole = 'aggregated'\nengine = 'vllm'\n",
    );
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/prefill.wasm"), LEAST_LOADED).unwrap();
    for arguments in [&["check-config", "p.toml"][..], &["check-config", "--config", "p.toml"]] {
        let (code, out, text) = pointsman(dir.path(), arguments);
        assert_eq!((code, text.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(out.contains("policies d\n") && out.ends_with("\nok\n"), "{out}");
    }
}

#[test]
fn o1_a_line_end_in_a_file_name_begins_no_line() {
    let dir = with_config(
        "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n[policies]\ndir = 'd'\n",
    );
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/prefill\nok.wasm"), KV_AWARE).unwrap();
    let (_, _, text) = pointsman(dir.path(), &["check-config", "p.toml"]);
    // O1.6
    assert!(text.contains("prefill\\nok.wasm") && !text.contains("\nok.wasm"), "{text}");
}

#[test]
fn a_port_in_use_is_a_warning_and_equal_ports_are_a_problem() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let dir = with_config(&format!("[server]\nlisten = '{address}'\nadmin_listen = '127.0.0.1:0'\n"));
    let (code, _, text) = pointsman(dir.path(), &["check-config", "p.toml"]);
    let expected =
        format!("warning: p.toml:2:1: server.listen: cannot listen on `{address}`: Address already in use");
    assert!(code == Some(0) && text.contains(&expected), "{text}");
    let (code, _, text) = pointsman(dir.path(), &["serve", "--config", "p.toml"]);
    let expected = format!("p.toml:2:1: server.listen: cannot listen on `{address}`: Address already in use");
    assert!(code == Some(2) && text.contains(&expected), "{text}");
    assert!(text.contains("stop the process that uses it, or use another port"), "{text}");
    let equal = ["check-config", "p.toml", "--listen", "127.0.0.1:7999", "--admin-listen", "127.0.0.1:7999"];
    let (code, _, text) = pointsman(dir.path(), &equal);
    assert!(code == Some(2), "{text}");
    assert!(
        text.contains(
            "--admin-listen: `127.0.0.1:7999` is also the address of server.listen: use another port"
        ),
        "{text}"
    );
}

#[test]
fn a_problem_of_a_flag_names_the_flag_and_not_a_line_of_the_file() {
    let dir = with_config("[server]\nadmin_listen = '127.0.0.1:0'\n[policies]\ndir = '.'\n");
    let arguments = [
        "check-config",
        "p.toml",
        "--admin-listen",
        "0.0.0.0:0",
        "--policies",
        "./policies.d",
        "--worker",
        "role=cook,engine=vllm,url=http://127.0.0.1:9",
        "--worker",
        "role=decode,engine=vllm,url=http://127.0.0.1:9,colour=red,api_key=sk-SECRET",
    ];
    let (code, _, text) = pointsman(dir.path(), &arguments);
    assert_eq!(code, Some(2), "{text}");
    for expected in [
        "--admin-listen: `0.0.0.0:0` can be reached from the network",
        "--policies: `./policies.d` does not exist; create it",
        "--worker role=cook,engine=vllm,url=http://127.0.0.1:9: role: unknown role `cook`",
        "colour=red,api_key=[secret]: colour: unknown key `colour`",
    ] {
        assert!(text.contains(expected), "{expected}\nis not in\n{text}");
    }
    assert!(!text.contains("p.toml") && !text.contains("SECRET"), "{text}");
}

#[test]
fn columns_count_characters_and_a_value_in_a_long_list_has_its_own_line() {
    let dir = with_config(
        "server = { admin_names = [\"gäß\"], listen = 'here' }\n[decisions]\nfacts = [\n  \"kv-usage\",\n  \"kv-usge\",\n]\n",
    );
    let (code, _, text) = pointsman(dir.path(), &["check-config", "p.toml"]);
    assert_eq!(code, Some(2), "{text}");
    // `listen` begins at byte 37 and at character 35.
    let address = "p.toml:1:35: server.listen: the value is not an address: expected IP:PORT such as \"127.0.0.1:8080\"";
    assert!(text.contains(address), "{text}");
    assert!(
        text.contains("p.toml:5:3: decisions.facts[1]: unknown request or worker fact `kv-usge`: did you mean `kv-usage`?"),
        "{text}"
    );
}

const LISTEN: &str = "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n";

#[test]
fn a_policy_that_cannot_run_as_configured_is_a_problem_of_the_check_and_of_the_start() {
    let typo = "configure failed: settings: unknown field `active-requets`";
    for (text, expected) in [
        (
            "[policies.slots.decode]\nbuiltin = 'formula'\nsettings = { cost = '1', kep = 'true' }",
            "configure failed: settings: unknown field `kep`, expected one of `cost`, `keep`, `shed`".to_owned(),
        ),
        // Neither a file nor a directory: the built-in policy of that name gets the settings.
        (
            "[policies.slots.decode]\npolicy = 'least-loaded'\nsettings = { active-requets = 2 }",
            format!("policies.slots.decode: the policy `least-loaded` is refused: {typo}"),
        ),
        (
            "[policies.slots.decode]\nbuiltin = 'least-loaded'\nsettings = { active-requests = 'much' }",
            "policies.slots.decode: the policy `least-loaded` is refused: configure failed: ".to_owned(),
        ),
        (
            "[policies.slots.decode]\nscorers = [{ policy = 'kv-aware', settings = { a = 1 } }]",
            "policies.slots.decode: the policy `kv-aware` is refused: configure failed: settings: unknown field `a`"
                .to_owned(),
        ),
        (
            "[policies.slots.decode.canary]\nbuiltin = 'least-loaded'\nsettings = { active-requets = 2 }",
            format!("policies.slots.decode.canary: the policy `least-loaded` is refused: {typo}"),
        ),
        (
            "[policies.slots.decode.shadow]\nbuiltin = 'conditional-disagg'",
            "policies.slots.decode.shadow: the policy `conditional-disagg` is refused: ".to_owned(),
        ),
        (
            "[models.m.slots.decode]\npolicy = 'least-loaded'\nsettings = { active-requets = 2 }",
            format!("models.m.slots.decode: the policy `least-loaded` is refused: {typo}"),
        ),
        (
            "[policies.slots.decode]\nsettings = { active-requests = 2 }",
            "policies.slots.decode.settings: no policy gets them: name one with `builtin` or `policy`"
                .to_owned(),
        ),
        (
            "[policies]\ndir = 'd'\n[policies.slots.decode]\npolicy = 'absent'",
            "policies.slots.decode: the policy `parts/absent.wasm` is refused: `absent` is neither built in nor"
                .to_owned(),
        ),
        (
            "[policies]\ndir = 'd'\n[policies.slots.prefill]\nsettings = { active-requets = 2 }",
            format!("policies.dir: the policy `prefill.wasm` is refused: {typo}"),
        ),
    ] {
        let dir = with_config(&format!("{LISTEN}{text}\n"));
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/prefill.wasm"), LEAST_LOADED).unwrap();
        for arguments in [&["check-config", "p.toml"][..], &["serve", "--config", "p.toml"]] {
            let (code, _, told) = pointsman(dir.path(), arguments);
            // N7.1, N7.2, N7.4
            assert!(code == Some(2) && told.contains(&expected), "{arguments:?} {text}\n{expected}\n{told}");
        }
    }
}

#[test]
fn ranges_and_roles_are_told_beside_the_problems_of_keys_and_types() {
    let dir = with_config(
        "[server]\nlisten = 'here'\n[routing]\nretrys = 1\nblock_size = 0\n\
         [routing.cost]\ntemperature = -1\nhost_cache_credit = inf\noverlap = 1\n\
         [policies.slots.decode]\nscorers = [{ policy = 'kv-aware', wieght = 1.0 }]\n\
         picker = { softmax = { temperature = -1 } }\n\
         [policies.slots.prefill]\nbuiltin = 'least-loaded'\nsettings = { a = 1 }\n\
         [[workers]]\nrole = 'cook'\nengine = 'vlm'\nurl = 'nonsense'\ndp_size = 0\ncolour = 1\n",
    );
    let arguments = ["check-config", "p.toml", "--worker", "role=cook,engine=vlm,url=nonsense,dp_size=x"];
    let (code, _, text) = pointsman(dir.path(), &arguments);
    assert_eq!(code, Some(2), "{text}");
    for expected in [
        "server.listen: the value is not an address",
        "routing.retrys: unknown key",
        "routing.block_size: `0` is too small",
        "routing.cost.temperature: `-1` is out of range: expected a number from 0 to 1e15",
        "routing.cost.host_cache_credit: `inf` is out of range",
        "routing.cost.overlap: unknown key",
        "policies.slots.decode.scorers[0].wieght: unknown key",
        "policies.slots.decode.picker.softmax.temperature: `-1` is not a temperature",
        "policies.slots.prefill: the policy `least-loaded` is refused: configure failed: settings: unknown field `a`",
        "workers[0].role: unknown role `cook`",
        "workers[0].engine: unknown engine `vlm`",
        "workers[0].url: `nonsense` does not start with http://",
        "workers[0].dp_size: `0` is out of range",
        "workers[0].colour: unknown key",
        "dp_size=x: role: unknown role `cook`",
        "dp_size=x: engine: unknown engine `vlm`",
        "dp_size=x: url: `nonsense` does not start",
        "dp_size=x: dp_size: `x`: invalid digit",
    ] {
        // N7.1
        assert!(text.contains(expected), "{expected}\nis not in\n{text}");
    }
}

#[test]
fn what_serves_nothing_is_a_warning() {
    let dir = with_config(&format!(
        "{LISTEN}[policies]\ndir = 'd'\n[policies.slots.decode]\nsettings = {{ a = 1 }}\n"
    ));
    fs::create_dir(dir.path().join("d")).unwrap();
    let (code, out, text) = pointsman(dir.path(), &["check-config", "p.toml"]);
    assert!(code == Some(0) && out.ends_with("ok\n"), "{text}");
    // N7.5
    assert!(text.contains("workers: no worker and no source of [discovery] is configured"), "{text}");
    // N7.4
    assert!(
        text.contains("policies.slots.decode.settings: no policy gets them before `decode.wasm` is"),
        "{text}"
    );
}

#[test]
fn k1_a_key_dir_without_a_key_is_a_warning_and_a_file_without_one_a_problem() {
    let dir = with_config(&format!("{LISTEN}[auth]\nkey_dir = 'keys'\n"));
    fs::create_dir(dir.path().join("keys")).unwrap();
    let check = || pointsman(dir.path(), &["check-config", "p.toml"]);
    let (code, out, text) = check();
    assert!(code == Some(0) && out.ends_with("ok\n"), "{text}");
    // K1.9
    assert!(text.contains("auth.key_dir: `auth.key_dir` holds no key: every client is refused"), "{text}");
    fs::write(dir.path().join("keys/a.toml"), "").unwrap();
    let (code, _, text) = check();
    // K1.9: the warning would repeat the problem.
    assert!(code == Some(2) && text.contains("auth.key_dir(keys/a.toml): it holds no key"), "{text}");
    assert!(!text.contains("every client is refused"), "{text}");
}

#[test]
fn o1_text_of_policies_and_file_names_neither_moves_the_cursor_nor_changes_colours() {
    let dir = with_config(&format!(
        "{LISTEN}[policies]\ndir = 'd'\n[policies.slots.aggregated]\nbuiltin = 'least-loaded'\n\
         settings = {{ \"over\\u001b[2J\" = 1 }}\n"
    ));
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/prefil\u{1b}[2J.wasm"), "").unwrap();
    fs::write(dir.path().join("policy.wasm"), LEAST_LOADED).unwrap();
    let settings = r#"{"over\u001b[2J": 1}"#;
    for arguments in [
        &["check-config", "p.toml"][..],
        &["serve", "--config", "p.toml"],
        &["policy", "inspect", "policy.wasm", "--settings", settings],
    ] {
        let (code, out, text) = pointsman(dir.path(), arguments);
        let text = out + &text;
        // O1.6
        assert!(code != Some(0) && text.contains("over\\u{1b}[2J"), "{arguments:?}: {text:?}");
        assert!(!text.contains('\u{1b}'), "{arguments:?}: {text:?}");
        assert_eq!(text.contains("`prefil\\u{1b}[2J.wasm`"), arguments[0] == "check-config", "{text:?}");
    }
}

#[test]
fn contradictions_are_told() {
    let dir = with_config(
        "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n[routing]\nenforce_disagg = true\n\
         local_fallback = true\n[queue]\nlimit = 5\ntimeout = '0s'\n\
         [[workers]]\nrole = 'decode'\nengine = 'vllm'\nurl = 'http://127.0.0.1:9'\n\
         [[workers]]\nid = 7\nrole = 'decode'\nengine = 'vllm'\nurl = 'http://127.0.0.1:9'\n",
    );
    let (code, out, text) = pointsman(dir.path(), &["check-config", "p.toml"]);
    assert!(code == Some(0) && out.ends_with("ok\n"), "{text}");
    for expected in [
        "warning: p.toml:5:1: routing.enforce_disagg: `true` refuses every request: no worker has `role = \"prefill\"`",
        "warning: p.toml:6:1: routing.local_fallback: `true` has no effect with `enforce_disagg = true`",
        "warning: p.toml:9:1: queue.timeout: `0s` lets no request wait",
        "warning: p.toml:11:1: workers[0].role: `decode` workers cannot serve without a `prefill` worker: add one",
        "warning: p.toml:18:1: workers[1].url: `http://127.0.0.1:9` is also the URL of workers[0]",
    ] {
        assert!(text.contains(expected), "{expected}\nis not in\n{text}");
    }
}

#[test]
fn n7_decode_workers_alone_are_told_what_they_do() {
    let of = |engine: &str| {
        let dir = with_config(&format!(
            "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n\
             [[workers]]\nrole = 'decode'\nengine = '{engine}'\nurl = 'http://127.0.0.1:9'\n"
        ));
        pointsman(dir.path(), &["check-config", "p.toml"]).2
    };
    // N7.32
    assert!(
        of("vllm").contains("workers[0].role: no worker is configured for prefill: `decode` workers compute")
    );
    assert!(of("sglang").contains("`decode` workers cannot serve without a `prefill` worker: add one"));
}

#[test]
fn n7_the_default_port_is_not_checked_in_the_place_of_a_refused_one() {
    // Used by this test or by another process.
    let _default = std::net::TcpListener::bind("127.0.0.1:8080");
    let dir = with_config("[server]\nlisten = 'localhost:18080'\nadmin_listen = '127.0.0.1:0'\n");
    let (code, out, err) = pointsman(dir.path(), &["check-config", "p.toml"]);
    let text = format!("{out}{err}");
    assert!(code != Some(0) && text.contains("server.listen: the value is not an address"), "{text}");
    // N7.33
    assert!(!text.contains("cannot listen on"), "{text}");
}

#[test]
fn t4_an_address_that_cannot_be_read_is_answered_with_the_form_to_use() {
    let dir = with_config("");
    for (arguments, expected) in [
        (&["--listen", "8085"][..], "expected IP:PORT such as 127.0.0.1:8080"),
        (&["--admin-listen", "localhost:8085"], "expected IP:PORT such as 127.0.0.1:8080"),
    ] {
        let (code, out, err) = pointsman(dir.path(), &[&["serve"], arguments].concat());
        // T4.12
        assert!(code != Some(0) && err.contains(expected), "{arguments:?}: {out}{err}");
    }
}

#[test]
fn j3_every_problem_of_the_certificates_is_told() {
    let dir = with_config(
        "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n\
         [server.tls]\ncert_file = 'a.pem'\nkey_file = 'b.key'\nrequire_client_cert = true\nmin_version = '1.1'\n\
         [server.admin_tls]\ncert_file = 'expired.pem'\nkey_file = 'missing.key'\nclient_ca_file = 'a.key'\n",
    );
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let issued = |names: &[&str], expired: bool| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = rcgen::CertificateParams::new(names).unwrap();
        if expired {
            params.not_before = rcgen::date_time_ymd(2020, 1, 1);
            params.not_after = rcgen::date_time_ymd(2021, 1, 1);
        }
        let key = rcgen::KeyPair::generate().unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    };
    let (a, a_key) = issued(&["a.example"], false);
    let (nameless, nameless_key) = issued(&[], false);
    let (expired, expired_key) = issued(&["a.example"], true);
    write("a.pem", &a);
    write("a.key", &a_key);
    write("b.key", &nameless_key);
    write("expired.pem", &expired);
    let told = |expected: &[&str]| {
        let (code, _, text) = pointsman(dir.path(), &["check-config", "p.toml"]);
        assert_eq!(code, Some(2), "{text}");
        for expected in expected {
            assert!(text.contains(expected), "{expected}\nis not in\n{text}");
        }
    };
    // J3.4
    told(&[
        "p.toml:6:1: server.tls.key_file: `b.key` is not the key of the certificate in `a.pem`",
        "p.toml:7:1: server.tls.require_client_cert: `true` needs an authority",
        "p.toml:8:1: server.tls.min_version: `1.1` is not a supported version: expected \"1.2\" or \"1.3\"",
        "p.toml:11:1: server.admin_tls.key_file: cannot read `missing.key`: No such file",
    ]);
    write("missing.key", &expired_key);
    write("a.pem", &nameless);
    // J3.4
    told(&[
        "server.tls.cert_file: the certificate in `a.pem` has no subject alternative name",
        "server.admin_tls.cert_file: the certificate in `expired.pem` expired on 2021-01-01 00:00:00 UTC",
        "server.admin_tls.client_ca_file: `a.key` contains no certificate",
    ]);
    let serve = ["serve", "--config", "p.toml"];
    let (code, _, text) = pointsman(dir.path(), &serve);
    // J3.4: the daemon does not start
    assert!(code != Some(0) && text.contains("server.tls.min_version"), "{text}");
}
