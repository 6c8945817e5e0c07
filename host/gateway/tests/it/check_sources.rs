//! `pointsman check-config`: workers and sources of workers that cannot serve, and files that are missing.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{fs, path::Path};

use crate::process::{POINTSMAN, command, run};

/// Exit code and stderr of `check-config` for a configuration in a directory.
fn check(dir: &Path, text: &str) -> (Option<i32>, String) {
    fs::write(dir.join("p.toml"), text).unwrap();
    let (code, _, told) = run(command(POINTSMAN, &["check-config", "p.toml"]).current_dir(dir), "");
    (code, told)
}

#[test]
fn k5_an_api_key_of_several_lines_is_named_in_files_and_in_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[[workers]]\nrole = 'decode'\nengine = 'vllm'\nurl = 'http://h:1'\napi_key = { file = 'key' }\n\
                [[discovery.dns]]\nname = 'a'\nrecord = 'a.b'\n\
                defaults = { engine = 'vllm', role = 'decode', api_key = { file = 'key' } }\n";
    fs::write(dir.path().join("key"), "sk-SECRET\nSECRET\n").unwrap();
    let (code, told) = check(dir.path(), text);
    for path in ["p.toml:5:1: workers[0].api_key", "p.toml:9:48: discovery.dns[0].defaults.api_key"] {
        // K5.5
        assert!(told.contains(&format!("{path}: the key has several lines: give one line\n")), "{told}");
    }
    assert!(code == Some(2) && !told.contains("SECRET"), "{told}");
    fs::write(dir.path().join("key"), "sk-SECRET\n").unwrap();
    let (code, told) = check(dir.path(), text);
    // K5.5
    assert_eq!(code, Some(0), "{told}");
}

#[test]
fn n7_a_source_whose_workers_can_never_serve_is_a_problem() {
    let dir = tempfile::tempdir().unwrap();
    let dns = |name: &str, record: &str, defaults: &str| {
        format!("[[discovery.dns]]\nname = '{name}'\nrecord = '{record}'\ndefaults = {{ {defaults} }}\n")
    };
    let good = "engine = 'vllm', role = 'decode'";
    let file = |name: &str, path: &str, more: &str| {
        format!("[[discovery.files]]\nname = '{name}'\npath = '{path}'\n{more}\n")
    };
    let pods = |name: &str, defaults: &str| {
        let selected = format!("[[discovery.kubernetes]]\nname = '{name}'\nselector = 'a=b'\n");
        format!("{selected}defaults = {{ {defaults} }}\ntoken_file = ''\nca_file = ''\n")
    };
    let long = "a".repeat(64);
    let (problems, texts): (Vec<String>, Vec<String>) = [
        ("dns[0].defaults.engine: unknown engine `vlm`", dns("a", "a.b", "engine = 'vlm', role = 'decode'")),
        ("dns[1].defaults.role: unknown role `cook`", dns("b", "a.b", "engine = 'vllm', role = 'cook'")),
        (
            "dns[2].defaults.role: is missing: expected prefill, decode or aggregated",
            dns("c", "a.b", "engine = 'vllm'"),
        ),
        ("dns[3].defaults.engine: is missing", dns("d", "a.b", "role = 'decode'")),
        ("dns[4].defaults.dp_size: `0` is out of range", dns("e", "a.b", &format!("{good}, dp_size = 0"))),
        ("dns[5].record: `a..b` is not a name", dns("f", "a..b", good)),
        (&format!("dns[6].record: `{long}` is not a name"), dns("g", &long, good)),
        ("files[0].path: `w.txt` has no known syntax", file("a", "w.txt", "")),
        ("files[1].defaults.engine: is missing", file("b", "w.yaml", "format = 'llm-d'")),
        ("kubernetes[0].defaults.engine: unknown engine `vlm`", pods("a", "engine = 'vlm'")),
    ]
    .map(|(problem, text)| (problem.to_owned(), text))
    .into_iter()
    .unzip();
    let (code, told) = check(dir.path(), &texts.concat());
    for problem in &problems {
        // N7.13
        assert!(told.contains(&format!(": discovery.{problem}")), "{problem}: {told}");
    }
    assert!(code == Some(2) && told.contains(": 10 problems\n"), "{told}");
    fs::write(dir.path().join("w.yaml"), "workers: []").unwrap();
    let texts = [
        dns("a", "a.b.", good),
        dns("b", &long[..63], "engine = 'sglang'"),
        file("a", "w.yaml", "format = 'llm-d'\ndefaults = { engine = 'vllm' }"),
        pods("a", "transport = 'p2p_nccl'"),
        pods("b", "kv_transfer = 'required:rack', role = 'prefill'"),
    ];
    // N7.13
    assert_eq!(check(dir.path(), &texts.concat()), (Some(0), String::new()));
}

#[test]
fn n7_an_address_without_a_port_for_the_last_rank_is_a_problem() {
    let dir = tempfile::tempdir().unwrap();
    let worker = |port: u32| {
        format!(
            "[[workers]]\nrole = 'aggregated'\nengine = 'vllm'\nurl = 'http://h:1'\ndp_size = 4\n\
             kv_events = 'tcp://h:{port}'\nkv_replay = 'tcp://h:{port}'\n"
        )
    };
    let (code, told) = check(dir.path(), &worker(65_533));
    for key in ["kv_events", "kv_replay"] {
        let problem = format!("workers[0].{key}: `tcp://h:65533`: the port of rank 3 would be above 65535");
        // N7.14
        assert!(code == Some(2) && told.contains(&problem), "{told}");
    }
    // N7.14
    assert_eq!(check(dir.path(), &worker(65_532)), (Some(0), String::new()));
}

#[test]
fn n7_files_that_are_missing_and_a_log_that_cannot_be_written_are_warnings() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let text = "[[discovery.files]]\nname = 'a'\npath = 'none.yaml'\n\
                [[discovery.etcd]]\nname = 'a'\nendpoints = ['https://h:1']\nca_file = 'none1'\nusername = 'u'\n\
                password_file = 'none2'\n\
                [replicas]\nservers = ['nats://h:1']\nusername = 'u'\npassword_file = 'none3'\n\
                tls = { ca_file = 'none4' }\n\
                [decisions]\nlog_dir = 'file/log'\n\
                [[discovery.kubernetes]]\nname = 'a'\nselector = 'a=b'\ntoken_file = 'none5'\nca_file = 'none6'\n";
    let (code, told) = check(dir.path(), text);
    for warning in [
        "warning: p.toml:3:1: discovery.files[0].path: cannot read `none.yaml`: No such file",
        "warning: p.toml:7:1: discovery.etcd[0].ca_file: cannot read `none1`: No such file",
        "warning: p.toml:9:1: discovery.etcd[0].password_file: cannot read `none2`: No such file",
        "warning: p.toml:13:1: replicas.password_file: cannot read `none3`: No such file",
        "replicas.tls.ca_file: cannot read `none4`: No such file",
        "warning: p.toml:16:1: decisions.log_dir: cannot write to `",
        "warning: p.toml:20:1: discovery.kubernetes[0].token_file: cannot read `none5`: No such file",
        "warning: p.toml:21:1: discovery.kubernetes[0].ca_file: cannot read `none6`: No such file",
    ] {
        // N7.15
        assert!(told.contains(warning), "{warning}\n{told}");
    }
    assert_eq!((code, told.lines().count()), (Some(0), 8), "{told}");
    for name in ["none.yaml", "none1", "none2", "none3", "none4", "none5", "none6"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let text = text.replace("file/log", "new/log");
    // N7.15
    assert_eq!(check(dir.path(), &text), (Some(0), String::new()));
}

#[test]
fn n7_more_threads_than_file_descriptors_are_a_problem() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\nthreads = 1000000000\n";
    let (code, told) = check(dir.path(), text);
    let problem = "p.toml:4:1: server.threads: `1000000000` threads need 6000000128 file descriptors";
    // N7.24
    assert!(code == Some(2) && told.contains(problem), "{told}");
    let serve = ["serve", "--config", "p.toml"];
    let (code, _, told) = run(command(POINTSMAN, &serve).current_dir(dir.path()), "");
    // N7.24
    assert!(code == Some(2) && told.contains(problem), "{told}");
}
