use bytes::Bytes;

use super::*;

fn hints(headers: &[(&'static str, &str)], nvext: &str, trust: HintTrust) -> Result<Hints, RequestError> {
    let body = JsonBody::parse(Bytes::from(format!(r#"{{"nvext":{nvext}}}"#))).unwrap();
    let headers =
        headers.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
    Hints::parse(&headers.collect(), &body, trust)
}

#[test]
fn a3_a_header_beats_the_body_and_the_worker_header_sets_backend_and_decode() {
    let hints = hints(
        &[
            ("x-worker-instance-id", "7"),
            ("x-dynamo-prefill-instance-id", "8"),
            ("x-data-parallel-rank", "1"),
        ],
        r#"{"backend_instance_id":1,"prefill_worker_id":2,"decode_worker_id":3,"dp_rank":5,"unknown":{}}"#,
        HintTrust::Trusted,
    )
    .unwrap();
    // A3.3, A3.4
    assert_eq!(
        (hints.backend, hints.prefill, hints.decode),
        (Some(WorkerId(7)), Some(WorkerId(8)), Some(WorkerId(7)))
    );
    // A3.5
    assert_eq!(hints.dp_rank, Some(DpRank(1)));
}

#[test]
fn a3_what_does_not_parse_is_named() {
    let error = hints(&[("x-dp-rank", "one")], "{}", HintTrust::Trusted).unwrap_err();
    // A3.8
    assert_eq!(error.to_string(), "x-dp-rank: `one` does not parse");
    let doubled = |second| hints(&[("x-dp-rank", "1"), ("x-dp-rank", second)], "{}", HintTrust::Trusted);
    // A3.8: one header twice
    assert_eq!(
        doubled("2").unwrap_err().to_string(),
        "x-dp-rank: the header has several values, `1` and `2`; send one"
    );
    assert_eq!(doubled("1").unwrap().dp_rank, Some(DpRank(1)));
    let error = hints(&[], r#"{"dp_rank":-1}"#, HintTrust::Trusted).unwrap_err();
    assert!(error.to_string().starts_with("nvext: `{\"dp_rank\":-1}`"), "{error}");
    // A3.8: a list is not the values of an object in their order.
    for (list, field) in [("[1]", "nvext"), (r#"{"agent_hints":[1]}"#, "nvext.agent_hints")] {
        let error = hints(&[], list, HintTrust::Trusted).unwrap_err().to_string();
        assert_eq!(error, format!("{field}: a list is in the place of an object; send `{{…}}`"));
    }
    let over = r#"{"router_config_override":{"router_temperature":-2}}"#;
    let error = hints(&[], over, HintTrust::Trusted).unwrap_err();
    assert_eq!(
        error.to_string(),
        "nvext.router_config_override: temperature -2.0 is not a number from 0 to 1e15"
    );
}

#[test]
fn a3_the_unset_prefill_rank_and_untrusted_hints() {
    let unset = hints(&[("x-prefill-dp-rank", "4294967295")], r#"{"prefill_dp_rank":2}"#, HintTrust::Trusted);
    // A3.6
    assert_eq!(unset.unwrap().prefill_dp_rank, None);
    let ignored = hints(&[("x-dp-rank", "one")], r#"{"backend_instance_id":1}"#, HintTrust::Ignored);
    assert_eq!(ignored.unwrap(), Hints::default());
}

#[test]
fn a2_session_control_names_the_session_and_its_timeout() {
    let control = |nvext: &str| hints(&[], nvext, HintTrust::Trusted).unwrap();
    let open = control(r#"{"session_control":{"session_id":"s","action":"open"}}"#);
    assert_eq!(open.session.as_deref(), Some("s"));
    let expected = SessionControl { open: true, close: false, timeout: Duration::from_secs(300) };
    // A2.2
    assert_eq!(open.session_control, Some(expected));
    let close = control(r#"{"session_control":{"session_id":"s","action":"close","timeout":9}}"#);
    let expected = SessionControl { open: false, close: true, timeout: Duration::from_secs(9) };
    // A2.2
    assert_eq!(close.session_control, Some(expected));
    assert!(
        hints(&[], r#"{"session_control":{"session_id":"s","action":"shut"}}"#, HintTrust::Trusted).is_err()
    );
}

#[test]
fn a4_routing_tokens_take_the_place_of_token_ids_when_there_are_any() {
    let tokens = |nvext: &str| {
        let hints = hints(&[], nvext, HintTrust::Trusted).unwrap();
        hints.routing_token_ids.or(hints.token_ids)
    };
    let both = r#"{"token_data":[1,2],"mm_routing_info":{"routing_token_ids":[7,8,9]}}"#;
    // A4.1
    assert_eq!(tokens(both), Some(vec![7, 8, 9]));
    // A4.2
    assert_eq!(
        tokens(r#"{"token_data":[1,2],"mm_routing_info":{"routing_token_ids":[]}}"#),
        Some(vec![1, 2])
    );
    let objects = r#"{"mm_routing_info":{"routing_token_ids":[1],"block_mm_infos":[null,{"mm_objects":[{"mm_hash":5}]}]}}"#;
    assert_eq!(hints(&[], objects, HintTrust::Trusted).unwrap().block_objects, [vec![], vec![5]]);
    for ids in ["[]", "null"] {
        let without = objects.replace("[1]", ids).replace("\"routing_token_ids\":null,", "");
        // A4.3
        assert_eq!(hints(&[], &without, HintTrust::Trusted).unwrap().block_objects, [[0; 0]; 0], "{without}");
    }
}

#[test]
fn f2_an_annotation_that_begins_with_query_instance_id_only_asks() {
    let asks = |nvext: &str| hints(&[], nvext, HintTrust::Trusted).unwrap().query_only;
    // F2.1
    assert!(asks(r#"{"annotations":["x","query_instance_id:"]}"#));
    assert!(asks(r#"{"annotations":["query_instance_id:7"]}"#));
    assert!(!asks(r#"{"annotations":["token_ids"]}"#));
}

#[test]
fn f3_pins_by_leg() {
    let id = |id| Some(WorkerId(id));
    let all = Hints {
        backend: id(1),
        prefill: id(2),
        decode: id(3),
        dp_rank: Some(DpRank(4)),
        prefill_dp_rank: Some(DpRank(5)),
        ..Hints::default()
    };
    // F3.1, F3.4
    assert_eq!(all.pinned(Leg::Prefill), Some((WorkerId(2), Some(DpRank(5)))));
    // F3.2
    assert_eq!(all.pinned(Leg::Decode), Some((WorkerId(3), Some(DpRank(4)))));
    // F3.3
    assert_eq!(all.pinned(Leg::Aggregated), Some((WorkerId(1), Some(DpRank(4)))));
    let backend = Hints { backend: id(1), dp_rank: Some(DpRank(4)), ..Hints::default() };
    // F3.1
    assert_eq!(backend.pinned(Leg::Prefill), None);
    let own = Hints { prefill: id(2), dp_rank: Some(DpRank(4)), ..Hints::default() };
    // F3.4
    assert_eq!(own.pinned(Leg::Prefill), Some((WorkerId(2), Some(DpRank(4)))));
    let decode = Hints { decode: id(3), ..Hints::default() };
    // F3.3
    assert_eq!(decode.pinned(Leg::Aggregated), Some((WorkerId(3), None)));
    // F3.2
    assert_eq!(backend.pinned(Leg::Decode), Some((WorkerId(1), Some(DpRank(4)))));
    assert_eq!(Hints { prefill: id(2), ..Hints::default() }.pinned(Leg::Aggregated), None);
}

#[test]
fn a3_lists_texts_and_numbers_of_hints_are_limited() {
    let refused = |nvext: &str| hints(&[], nvext, HintTrust::Trusted).unwrap_err().to_string();
    let list = |count: usize| vec!["\"t\""; count].join(",");
    assert!(hints(&[], &format!(r#"{{"required_taints":[{}]}}"#, list(64)), HintTrust::Trusted).is_ok());
    assert_eq!(
        refused(&format!(r#"{{"required_taints":[{}]}}"#, list(65))),
        "nvext.required_taints: 65 elements are more than the limit of 64; send fewer"
    );
    let infos = vec!["null"; 65_537].join(",");
    assert_eq!(
        refused(&format!(r#"{{"mm_routing_info":{{"block_mm_infos":[{infos}]}}}}"#)),
        "nvext.mm_routing_info.block_mm_infos: 65537 elements are more than the limit of 65536; send fewer"
    );
    let objects = vec![r#"{"mm_hash":1}"#; 140_000].join(",");
    assert_eq!(
        refused(&format!(r#"{{"mm_routing_info":{{"block_mm_infos":[{{"mm_objects":[{objects}]}}]}}}}"#)),
        "nvext.mm_routing_info.block_mm_infos: 280003 JSON values are more than the limit of 262144; send fewer"
    );
    let long = "s".repeat(513);
    assert_eq!(
        refused(&format!(r#"{{"session_id":"{long}"}}"#)),
        "nvext.session_id: a text of 513 bytes is longer than the limit of 512; send a shorter one"
    );
    let header = hints(&[("x-session-id", long.as_str())], "{}", HintTrust::Trusted).unwrap_err();
    assert_eq!(
        header.to_string(),
        "x-session-id: a text of 513 bytes is longer than the limit of 512; send a shorter one"
    );
    for field in ["priority", "priority_jump", "ttft_target", "preferred_taints.a"] {
        let with = |number: &str| match field.split_once('.') {
            Some((outer, inner)) => format!(r#"{{"{outer}":{{"{inner}":{number}}}}}"#),
            None => format!(r#"{{"{field}":{number}}}"#),
        };
        for number in ["1e16", "-1e16", "1e39"] {
            let error = refused(&with(number));
            // A2.8
            assert!(error.contains("a number is larger than 1e15; send a smaller one"), "{field}: {error}");
        }
        // A2.8
        assert!(hints(&[], &with("1e15"), HintTrust::Trusted).is_ok(), "{field}");
    }
    // A2.8
    assert_eq!(
        refused(r#"{"router_config_override":{"prefill_load_scale":1e39}}"#),
        "nvext.router_config_override: prefill_load_scale 1e39 is not a number from 0 to 1e15"
    );
    assert!(refused(r#"{"ttft_target":1e400}"#).contains("number out of range"));
    let twice = refused(&format!(r#"{{"required_taints":[{}],"required_taints":[]}}"#, list(65)));
    assert_eq!(twice, "nvext: the key `required_taints` appears twice; send it once");
    // Of a client that is not trusted, nothing is read.
    let many = format!(r#"{{"required_taints":[{}]}}"#, list(65));
    assert_eq!(hints(&[], &many, HintTrust::Ignored).unwrap(), Hints::default());
}

#[test]
fn a2_a3_every_hint_is_read_from_the_body() {
    let all = r#"{"backend_instance_id":1,"prefill_worker_id":2,"decode_worker_id":18446744073709551615,"dp_rank":4,
        "prefill_dp_rank":5,"expected_output_tokens":6,"lora_name":"l","priority":7.5,"priority_jump":8.5,
        "allowed_worker_ids":[9,10],"required_taints":["r"],"preferred_taints":{"p":-1.5},"session_id":"s",
        "ttft_target":11.5,"itl_target":12.5,"router_config_override":{"router_temperature":0.5}}"#;
    let hints = hints(&[], all, HintTrust::Trusted).unwrap();
    let id = |id| Some(WorkerId(id));
    // A2.1, A3.1, A3.7: worker ids have 64 bits
    assert_eq!((hints.backend, hints.prefill, hints.decode), (id(1), id(2), id(u64::MAX)));
    // A2.1, A3.1
    assert_eq!((hints.dp_rank, hints.prefill_dp_rank), (Some(DpRank(4)), Some(DpRank(5))));
    // A2.1, A3.1
    assert_eq!((hints.expected_output_tokens, hints.lora.as_deref()), (Some(6), Some("l")));
    // A2.1, A3.1
    assert_eq!((hints.priority, hints.priority_jump), (7.5, 8.5));
    // A2.1, A3.1
    assert_eq!(hints.allowed_workers, Some(vec![WorkerId(9), WorkerId(10)]));
    let taints = (hints.required_taints.as_slice(), hints.preferred_taints.as_slice());
    // A2.1, A3.1
    assert_eq!(taints, (["r".to_owned()].as_slice(), [("p".to_owned(), -1.5)].as_slice()));
    let targets = (hints.ttft_target_ms, hints.itl_target_ms, hints.config.temperature);
    // A1.1: what routing reads
    assert_eq!((targets, hints.session.as_deref()), ((Some(11.5), Some(12.5), Some(0.5)), Some("s")));
}

#[test]
fn a2_older_names_of_an_override_are_read() {
    let over = r#"{"router_config_override":{"overlap_score_weight":0.5,"router_temperature":0.25}}"#;
    let config = hints(&[], over, HintTrust::Trusted).unwrap().config;
    // A2.7
    assert_eq!((config.prefill_load_scale, config.temperature), (Some(0.5), Some(0.25)));
    assert_eq!((config.overlap_score_credit, config.overlap_score_weight), (None, None));
    let more = r#"{"overlap_score_credit":0.75,"prefill_load_scale":3,"over"#;
    let read = |over: &str| hints(&[], over, HintTrust::Trusted).map(|hints| hints.config);
    let both = read(&over.replace("{\"over", more)).unwrap();
    // A2.7
    assert_eq!((both.prefill_load_scale, both.overlap_score_credit), (Some(0.5), Some(0.75)));
    let none = read(&over.replace("{\"over", more).replace(":0.5", ":0")).unwrap();
    // A2.7
    assert_eq!((none.prefill_load_scale, none.overlap_score_credit), (Some(0.0), Some(0.0)));
    let error = read(&over.replace(":0.5", ":-1")).unwrap_err().to_string();
    assert!(error.contains("overlap_score_weight -1"), "{error}");
}

#[test]
fn a3_every_header_of_a_hint_has_a_dynamo_form() {
    let read = |name: &'static str| hints(&[(name, "3")], "{}", HintTrust::Trusted).unwrap();
    let (id, rank) = (Some(WorkerId(3)), Some(DpRank(3)));
    for name in ["x-worker-instance-id", "x-dynamo-worker-instance-id"] {
        // A3.2, A3.4
        assert_eq!((read(name).backend, read(name).decode, read(name).prefill), (id, id, None), "{name}");
    }
    for name in ["x-prefill-instance-id", "x-dynamo-prefill-instance-id"] {
        // A3.2
        assert_eq!(read(name), Hints { prefill: id, ..Hints::default() }, "{name}");
    }
    // Without the worker there is a warning (A3.14).
    let unwarned = |name| Hints { warning: None, ..read(name) };
    for name in ["x-dp-rank", "x-dynamo-dp-rank", "x-data-parallel-rank"] {
        // A3.2, A3.5
        assert_eq!(unwarned(name), Hints { dp_rank: rank, ..Hints::default() }, "{name}");
    }
    for name in ["x-prefill-dp-rank", "x-dynamo-prefill-dp-rank"] {
        // A3.2
        assert_eq!(unwarned(name), Hints { prefill_dp_rank: rank, ..Hints::default() }, "{name}");
    }
    for name in ["x-session-id", "x-dynamo-session-id"] {
        let session = "3".to_owned();
        let lineage = Some(Lineage { session: session.clone(), parent: None, ends: false });
        // A3.2, F11.1
        assert_eq!(read(name), Hints { session: Some(session), lineage, ..Hints::default() }, "{name}");
    }
}

#[test]
fn f11_the_session_of_a_program_is_named_by_headers_or_the_agent_context() {
    let read = |headers: &[(&'static str, &str)], nvext: &str| {
        hints(headers, nvext, HintTrust::Trusted).unwrap().lineage.map(|it| (it.session, it.parent, it.ends))
    };
    let owned = |session: &str, parent: Option<&str>, ends| {
        Some((session.to_owned(), parent.map(str::to_owned), ends))
    };
    let context = r#"{"session_id":"plain","agent_context":{"session_id":"s","parent_session_id":"p",
        "session_final":true}}"#;
    let (parent, last) = ("x-dynamo-parent-session-id", "x-dynamo-session-final");
    let (agent, above) = (("x-claude-code-agent-id", "a"), ("x-claude-code-parent-agent-id", "b"));
    for (headers, nvext, expected) in [
        (&[][..], "{}", None),
        (&[], context, owned("s", Some("p"), true)),
        (
            &[("x-dynamo-session-id", "h"), (parent, "g"), (last, "false")],
            context,
            owned("h", Some("g"), false),
        ),
        (&[(parent, "g")], "{}", owned("g", Some("g"), false)),
        (&[], r#"{"session_id":"plain"}"#, owned("plain", None, false)),
        (&[], r#"{"session_control":{"session_id":"c"}}"#, owned("c", None, false)),
        (&[("x-session-id", "o"), ("x-parent-session-id", "g")], "{}", owned("o", Some("g"), false)),
        (&[("x-claude-code-session-id", "r")], "{}", owned("r", None, false)),
        (&[("x-claude-code-session-id", "r"), agent], "{}", owned("a", Some("r"), false)),
        (&[("x-claude-code-session-id", "r"), agent, above], "{}", owned("a", Some("b"), false)),
        (&[("session-id", "c"), (last, "true")], "{}", owned("c", None, true)),
        (&[("session_id", "c")], "{}", owned("c", None, false)),
        (
            &[("x-dynamo-session-id", "h"), ("x-claude-code-session-id", "r"), agent],
            "{}",
            owned("h", None, false),
        ),
    ] {
        // F11.1, F11.6
        assert_eq!(read(headers, nvext), expected, "{headers:?} {nvext}");
    }
    let of_cache = JsonBody::parse(Bytes::from_static(br#"{"prompt_cache_key":"k","nvext":{}}"#)).unwrap();
    // A3.15
    assert_eq!(Hints::parse(&HeaderMap::new(), &of_cache, HintTrust::Trusted).unwrap().session, None);
    assert!(hints(&[(last, "yes")], "{}", HintTrust::Trusted).is_err());
    assert!(hints(&[(parent, &"p".repeat(513))], "{}", HintTrust::Trusted).is_err());
    // A3.9
    assert_eq!(hints(&[(parent, "g")], context, HintTrust::Ignored).unwrap().lineage, None);
}

#[test]
fn a2_dynamo_s_objects_within_nvext_are_read_and_flat_fields_win() {
    let nvext = r#"{"agent_hints":{"priority":3,"strict_priority":2,"osl":40},
        "routing_constraints":{"required_taints":["a"],"preferred_taints":{"b":0.5,"c":1}},
        "required_taints":["d"],"preferred_taints":{"b":-1},"router":{"ttft_target":9.5,"itl_target":3},
        "agent_context":{"session_id":"s","parent_session_id":"p","session_final":true},
        "request_timestamp_ms":1.5,"mdc_sum":"abc"}"#;
    let read = hints(&[], nvext, HintTrust::Trusted).unwrap();
    assert_eq!((read.priority_jump, read.priority, read.expected_output_tokens), (3.0, 2.0, Some(40)));
    assert_eq!(read.required_taints, ["d", "a"]);
    assert_eq!(read.preferred_taints, [("b".to_owned(), -1.0), ("c".to_owned(), 1.0)]);
    assert_eq!((read.ttft_target_ms, read.itl_target_ms), (Some(9.5), Some(3.0)));
    let targets =
        hints(&[("x-slo-ttft-ms", "800"), ("x-slo-tpot-ms", "2.5")], nvext, HintTrust::Trusted).unwrap();
    // A3.13
    assert_eq!((targets.ttft_target_ms, targets.itl_target_ms), (Some(800.0), Some(2.5)));
    assert_eq!(read.agent.parent_session_id.as_deref(), Some("p"));
    // A2.6
    assert_eq!((read.request_timestamp_ms, read.mdc_sum.as_deref()), (Some(1.5), Some("abc")));
    let told = |read: &Hints| read.warning.as_ref().unwrap().to_str().unwrap().to_owned();
    // A3.10
    assert!(told(&read).starts_with("nvext.agent_hints.priority orders the gateway's queue only: send"));
    assert_eq!(read.session, None);
    let header = hints(&[("x-dynamo-request-priority", "7")], nvext, HintTrust::Trusted).unwrap();
    assert_eq!(header.priority_jump, 7.0);
    // A3.10
    assert!(told(&header).starts_with("nvext.agent_hints.priority and x-dynamo-request-priority order the"));
    let flat = r#"{"agent_hints":{"priority":3,"osl":4},"priority_jump":1,"expected_output_tokens":5}"#;
    let flat = hints(&[], flat, HintTrust::Trusted).unwrap();
    assert_eq!((flat.priority_jump, flat.expected_output_tokens), (1.0, Some(5)));
    for bad in [
        r#"{"agent_hints":{"priority":"high"}}"#,
        r#"{"router":{"ttft_target":"soon"}}"#,
        r#"{"routing_constraints":{"required_taints":7}}"#,
    ] {
        assert!(hints(&[], bad, HintTrust::Trusted).is_err(), "{bad}");
    }
    let many: Vec<String> = (0..65).map(|number| format!("\"{number}\"")).collect();
    let many = format!(r#"{{"routing_constraints":{{"required_taints":[{}]}}}}"#, many.join(","));
    let error = hints(&[], &many, HintTrust::Trusted).unwrap_err().to_string();
    assert!(error.starts_with("nvext.routing_constraints.required_taints: 65 elements"), "{error}");
}

#[test]
fn a2_keys_of_nvext_without_an_effect_are_named() {
    let warning = |nvext: &str| {
        let warning = hints(&[], nvext, HintTrust::Trusted).unwrap().warning;
        warning.map(|text| text.to_str().unwrap().to_owned())
    };
    assert_eq!(warning(r#"{"lora_name":"a"}"#), None);
    assert_eq!(
        warning(r#"{"use_raw_prompt":true,"agent_hints":{"speculative_prefill":true,"osl":1},"b\u00e4d":1}"#)
            .unwrap(),
        "ignored, not known or not supported: nvext.use_raw_prompt, nvext.b\\u{e4}d, nvext.agent_hints.speculative_prefill"
    );
    assert_eq!(
        warning(r#"{"annotations":["token_ids","query_instance_id:","llm_metrics"]}"#).unwrap(),
        "ignored, not known or not supported: nvext.annotations.token_ids, nvext.annotations.llm_metrics"
    );
    let priority = warning(r#"{"priority":2}"#).unwrap();
    assert!(priority.starts_with("nvext.priority orders the gateway's queue only"), "{priority}");
    let both = warning(r#"{"priority":2,"x":1}"#).unwrap();
    assert!(both.starts_with("ignored, not known or not supported: nvext.x; nvext.priority"), "{both}");
    assert_eq!(warning(r#"{"priority":null,"priority_jump":1}"#), None);
    let many: Vec<String> = (0..20).map(|number| format!("\"k{number}\":1")).collect();
    let told = warning(&format!("{{{}}}", many.join(","))).unwrap();
    assert!(told.ends_with("nvext.k7 and 12 more"), "{told}");
    let of_header = |nvext: &str| {
        let read = hints(&[("x-vllm-priority", "3")], nvext, HintTrust::Trusted).unwrap();
        read.warning.unwrap().to_str().unwrap().to_owned()
    };
    // A3.10
    assert_eq!(of_header("{}"), "x-vllm-priority is ignored: send `priority` in the body");
    assert!(
        of_header(r#"{"x":1}"#).ends_with("nvext.x; x-vllm-priority is ignored: send `priority` in the body")
    );
}

#[test]
fn a3_a_rank_without_its_worker_is_named() {
    let warning = |headers: &[(&'static str, &str)], nvext: &str| {
        let warning = hints(headers, nvext, HintTrust::Trusted).unwrap().warning;
        warning.map(|text| text.to_str().unwrap().to_owned())
    };
    let told =
        "a rank without a worker is ignored: send x-worker-instance-id or x-prefill-instance-id with it";
    // A3.14
    assert_eq!(warning(&[("x-data-parallel-rank", "3")], "{}").as_deref(), Some(told));
    assert_eq!(warning(&[], r#"{"dp_rank":0}"#).as_deref(), Some(told));
    let other_leg = [("x-worker-instance-id", "7"), ("x-dp-rank", "1"), ("x-prefill-dp-rank", "3")];
    assert_eq!(warning(&other_leg, "{}").as_deref(), Some(told));
    assert_eq!(warning(&[("x-dp-rank", "1")], r#"{"decode_worker_id":7}"#), None);
    assert_eq!(warning(&[("x-prefill-instance-id", "7"), ("x-dp-rank", "1")], "{}"), None);
    assert_eq!(warning(&[("x-prefill-dp-rank", "4294967295")], "{}"), None, "unset");
}
