use super::*;

#[test]
fn a_flag_is_parsed_to_a_description() {
    let spec = WorkerSpec::parse_flag(
        "role=prefill,engine=sglang,url=http://10.0.0.1:30000/,bootstrap_port=8998,dp_size=2,label.zone=a,taint=x",
    )
    .unwrap();
    assert_eq!((&*spec.url, spec.host()), ("http://10.0.0.1:30000", "10.0.0.1"));
    assert_eq!((spec.dp_size, spec.bootstrap.port, spec.local_prefill), (2, Some(8998), false));
    // A3.7: not configured, so it is the URL's hash
    assert_eq!(spec.id, WorkerId::of_url("http://10.0.0.1:30000"));
    assert_eq!(spec.labels.get("zone").map(String::as_str), Some("a"));
}

#[test]
fn a_url_without_a_port_gets_the_port_of_its_scheme() {
    for (url, full, host) in [
        ("http://127.0.0.1", "http://127.0.0.1:80", "127.0.0.1"),
        ("http://h/", "http://h:80", "h"),
        ("http://h/base", "http://h:80/base", "h"),
        ("http://[::1]", "http://[::1]:80", "[::1]"),
        ("http://[::1]:9/x", "http://[::1]:9/x", "[::1]"),
        ("https://h/base", "https://h:443/base", "h"),
        ("HTTPS://h:8443", "https://h:8443", "h"),
    ] {
        let flag = format!("role=prefill,engine=vllm,transport=mooncake,bootstrap_port=7,url={url}");
        let spec = WorkerSpec::parse_flag(&flag).unwrap();
        assert_eq!((&*spec.url, spec.host()), (full, host));
        assert_eq!(spec.bootstrap_address(), format!("http://{host}:7"));
    }
}

#[test]
fn b1_decode_workers_of_sglang_and_with_p2p_nccl_cannot_prefill_locally_by_default() {
    let local = |flag: &str| WorkerSpec::parse_flag(flag).unwrap().local_prefill;
    // B1.3
    assert!(!local("role=decode,engine=sglang,url=http://a:1"));
    assert!(local("role=decode,engine=vllm,url=http://a:1"));
    let p2p_nccl = "role=decode,engine=vllm,url=http://a:1,transport=p2p_nccl,kv_addr=a:2";
    assert!(!local(p2p_nccl));
    assert!(local(&format!("{p2p_nccl},local_prefill=true")));
    assert!(local("role=decode,engine=sglang,url=http://a:1,local_prefill=true"));
}

/// Each flag is refused with the text beside it.
#[track_caller]
fn refused_with(cases: &[(&str, &str)]) {
    for (flag, expected) in cases {
        assert_eq!(WorkerSpec::parse_flag(flag).unwrap_err().to_string(), *expected);
    }
}

#[test]
fn errors_name_the_key_and_the_value() {
    let cases = [
        (
            "role=cook,engine=vllm,url=http://a:1",
            "role: unknown role `cook`: expected prefill, decode or aggregated",
        ),
        ("role=decode,engine=vllm", "url: is missing"),
        ("engine=vllm,url=http://a:1", "role: is missing: expected prefill, decode or aggregated"),
        (
            "role=decode,engine=vllm,url=http://a:1,dp_size=0",
            "dp_size: `0` is out of range: expected 1 to 4096",
        ),
        (
            "role=decode,engine=vllm,url=http://a:1,speed=9",
            "speed: unknown key `speed`: expected one of role, engine, url, id, model, dp_size, bootstrap_host, \
             bootstrap_port, transport, kv_compatibility, kv_transfer, kv_addr, kv_events, kv_replay, \
             label.NAME, topology.NAME, taint, lora, local_prefill, prefill_cancellable, handoff_lease_s, \
             max_concurrency, block_size, total_blocks, api_key, tls_server_name",
        ),
        (
            "role=decode,engine=openai,url=http://a:1",
            "role: `decode` is not supported by engine openai: use aggregated",
        ),
        ("role", "role: is not of the form key=value"),
    ];
    refused_with(&cases);
}

#[test]
fn errors_of_a_url_name_the_part_that_is_wrong() {
    let cases = [
        ("role=decode,engine=vllm,url=a:1", "url: `a:1` does not start with http:// or https://"),
        (
            "role=decode,engine=vllm,url=https://a:0/x",
            "url: `https://a:0/x`: the port is not a number from 1 to 65535",
        ),
        (
            "role=decode,engine=vllm,url=http://a:1,tls_server_name=b",
            "tls_server_name: `b` has no effect: the url has no https://",
        ),
        (
            "role=decode,engine=vllm,url=https://a:1,tls_server_name=b c",
            "tls_server_name: `b c` is neither a DNS name nor an address",
        ),
        (
            "role=decode,engine=vllm,url=http://user:pw@a:1",
            "url: `http://[secret]@a:1`: a URL has no user and no password; set api_key of the worker",
        ),
        (
            "role=decode,engine=vllm,url=http://a:1?key=geheim",
            "url: `http://a:1?[secret]`: the URL of a worker has no query",
        ),
        (
            "role=decode,engine=vllm,url=http://fd00::1:8000",
            "url: `http://fd00::1:8000`: write an IPv6 address in brackets and without a zone, such as \
             http://[fd00::1]:8000",
        ),
        (
            "role=decode,engine=vllm,url=http://[fd00::1%eth0]:8000",
            "url: `http://[fd00::1%eth0]:8000`: write an IPv6 address in brackets and without a zone, such as \
             http://[fd00::1]:8000",
        ),
        (
            "role=decode,engine=vllm,url=http://a:0",
            "url: `http://a:0`: the port is not a number from 1 to 65535",
        ),
        (
            "role=decode,engine=vllm,url=http://:80",
            "url: `http://:80` is not of the form http://host[:port][/path]",
        ),
        (
            "role=decode,engine=vllm,url=http://a:99999",
            "url: `http://a:99999`: the port is not a number from 1 to 65535",
        ),
        (
            "role=decode,engine=vllm,url=http://a:1/v1/",
            "url: `http://a:1/v1/`: leave /v1 and what follows it out; the gateway adds the path of each request",
        ),
        (
            "role=decode,engine=vllm,url=http://a:1/llm/v1/chat/completions",
            "url: `http://a:1/llm/v1/chat/completions`: leave /v1 and what follows it out; the gateway adds the \
             path of each request",
        ),
        (
            "role=decode,engine=vllm,url=http://a:1/b\tc",
            "url: `http://a:1/b\tc` is not of the form http://host[:port][/path]",
        ),
    ];
    refused_with(&cases);
}

#[test]
fn d3_topology_becomes_taints_and_contradicting_rules_are_refused() {
    let flag = "role=prefill,engine=vllm,url=http://a:1,topology.rack=r1,kv_transfer=";
    let spec = WorkerSpec::parse_flag(&format!("{flag}preferred:rack:2.5")).unwrap();
    // D3.1
    assert!(spec.taints.contains("dynamo.topology/rack=r1"));
    assert_eq!(spec.preferred_transfer(), Some(("dynamo.topology/rack=r1".to_owned(), 2.5)));
    let strict = WorkerSpec::parse_flag(&format!("{flag}required:rack")).unwrap();
    let decode = |rack: &str| {
        WorkerSpec::parse_flag(&format!("role=decode,engine=vllm,url=http://b:1{rack}")).unwrap()
    };
    assert!(!strict.forbids_transfer_to(&decode(",topology.rack=r1")));
    assert!(
        strict.forbids_transfer_to(&decode(",topology.rack=r2")) && strict.forbids_transfer_to(&decode(""))
    );
    assert!(!spec.forbids_transfer_to(&decode("")));
    for (rule, problem) in [
        ("required:zone", "`required:zone`: the domain is missing in the worker's topology"),
        ("always:rack", "`always:rack`: expected required:DOMAIN or preferred:DOMAIN:WEIGHT"),
        ("preferred:rack:inf", "`preferred:rack:inf`: the weight has to be finite"),
    ] {
        let error = WorkerSpec::parse_flag(&format!("{flag}{rule}")).unwrap_err();
        // D3.4: when the worker joins
        assert_eq!(error.to_string(), format!("kv_transfer: {problem}"));
    }
}

#[test]
fn h6_each_rank_has_its_own_endpoint() {
    assert_eq!(rank_endpoint("tcp://10.0.0.1:5557", 2).as_deref(), Some("tcp://10.0.0.1:5559"));
    for bad in ["10.0.0.1:5557", "tcp://10.0.0.1", "tcp://:5557", "tcp://a:99999", "ipc:///x"] {
        assert_eq!(rank_endpoint(bad, 0), None);
    }
    let flag = "role=decode,engine=vllm,url=http://a:1,kv_events=ipc:///x";
    let error = WorkerSpec::parse_flag(flag).unwrap_err();
    assert_eq!(error.to_string(), "kv_events: `ipc:///x` is not of the form tcp://host:port");
}

#[test]
fn p11_hosts_are_written_as_in_a_url_and_what_is_no_host_is_refused() {
    let flag = |more: &str| format!("role=prefill,engine=vllm,url=http://a:1,bootstrap_port=7,{more}");
    for (host, in_url) in [
        ("fd00::1", "[fd00::1]"),
        ("[fd00::1]", "[fd00::1]"),
        ("10.0.0.1", "10.0.0.1"),
        ("relay_1.example", "relay_1.example"),
        ("{host}", "a"),
    ] {
        let spec = WorkerSpec::parse_flag(&flag(&format!("bootstrap_host={host}"))).unwrap();
        // P11.5
        assert_eq!(spec.bootstrap_address(), format!("http://{in_url}:7"));
    }
    let spec = WorkerSpec::parse_flag(&flag("kv_addr=[fd00::1]:14579")).unwrap();
    assert_eq!(spec.kv_addr.as_deref(), Some("[fd00::1]:14579"));
    let no_host = "is not a host: write a name or an IP address, without a scheme, a port or a zone";
    let no_address =
        "is not of the form host:port, with an IPv6 address in brackets, such as [fd00::1]:14579";
    for (key, texts, problem) in [
        (
            "bootstrap_host",
            ["a:8998", "http://a", "[fd00::1", "[a]", "fd00::1%eth0", "[fd00::1]:8998", "", "a b"],
            no_host,
        ),
        (
            "kv_addr",
            ["fd00::1:14579", "fd00::1", "10.0.0.1", "a:0", "a:65536", ":14579", "[a]:1", "http://a:1"],
            no_address,
        ),
    ] {
        for text in texts {
            let refused = flag(&format!("{key}={text}"));
            // P11.5
            assert_eq!(
                WorkerSpec::parse_flag(&refused).unwrap_err().to_string(),
                format!("{key}: `{text}` {problem}")
            );
            // All problems are found at once.
            let all = WorkerSpec::flag_problems(&format!("{refused},handoff_lease_s=0"));
            let keys: Vec<&str> = all.iter().map(|problem| &*problem.key).collect();
            assert_eq!(keys, [key, "handoff_lease_s"], "{text}");
        }
    }
}

#[test]
fn keys_that_a_transport_requires_are_checked() {
    let error = |flag: &str| WorkerSpec::parse_flag(flag).unwrap_err().key;
    assert_eq!(error("role=decode,engine=vllm,url=http://a:1,transport=p2p_nccl"), "kv_addr");
    assert_eq!(error("role=prefill,engine=vllm,url=http://a:1,transport=mooncake"), "bootstrap_port");
}

#[test]
fn k5_an_api_key_that_no_request_can_have_is_refused_without_showing_it() {
    let worker = [("role", "decode"), ("engine", "vllm"), ("url", "http://a:1")];
    for (key, problem) in [
        ("", "the key is empty"),
        (" \n", "the key is empty"),
        ("sekret\nb", "the key has several lines"),
        ("sekret\n\n", "the key has several lines"),
        ("sekr\u{e9}t", "characters that an HTTP header must not have"),
        ("sekret\0", "characters that an HTTP header must not have"),
    ] {
        let by_flag = WorkerSpec::from_pairs(worker.into_iter().chain([("api_key", key)])).unwrap_err();
        let table: BTreeMap<&str, &str> = worker.into_iter().chain([("api_key", key)]).collect();
        let by_table = WorkerSpec::deserialize(serde_json::json!(table)).unwrap_err().to_string();
        for text in [by_flag.to_string(), by_table] {
            // K5.5
            assert!(text.contains("api_key: ") && text.contains(problem) && !text.contains("sekr"), "{text}");
        }
    }
    for key in ["sekret", "sekret\n", "sekret\r\n"] {
        let spec = WorkerSpec::from_pairs(worker.into_iter().chain([("api_key", key)])).unwrap();
        // K5.5
        assert_eq!(spec.api_key.as_deref(), Some("sekret"));
    }
}

#[test]
fn the_api_key_is_not_in_debug_output() {
    let spec = WorkerSpec::parse_flag("role=decode,engine=vllm,url=http://a:1,api_key=sekret").unwrap();
    assert!(!format!("{spec:?}").contains("sekret"));
}
