use super::*;

fn parse(text: &str, skip_bad: bool) -> Result<Trace, TraceError> {
    Trace::parse(text.as_bytes(), "trace", "trace".to_owned(), None, None, skip_bad)
}

const LINE: &str = r#"{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}"#;

#[test]
fn a_mooncake_trace_begins_with_its_first_request() {
    let text = format!("{LINE}\n{}\n", LINE.replace("3000", "1000"));
    let trace = parse(&text, false).unwrap();
    let at: Vec<Duration> = trace.requests.iter().map(|request| request.at).collect();
    assert_eq!(at, [Duration::ZERO, Duration::from_secs(2)]);
    let first = trace.requests.first().unwrap();
    assert_eq!((first.input_tokens, first.output_tokens, &first.blocks[..]), (600, 5, &[0, 7][..]));
}

#[test]
fn an_exported_trace_reads_as_it_was() {
    let request = TraceRequest {
        at: Duration::ZERO,
        input_tokens: 512,
        output_tokens: 3,
        blocks: vec![u64::MAX].into(),
        session: Some("a".to_owned()),
        delay: Some(Duration::from_millis(1_500)),
        parent: None,
        join: false,
        model: Some("m".to_owned()),
        tenant_hash: Some(u64::MAX),
        priority: 2.0,
        targets: Targets { ttft: Some(Duration::from_millis(800)), itl: Some(Duration::from_millis(20)) },
    };
    let trace = Trace { name: "trace".into(), block_tokens: 512, requests: vec![request], skipped: 0 };
    let mut out = Vec::new();
    trace.write_mooncake(&mut out).unwrap();
    assert_eq!(parse(&String::from_utf8(out).unwrap(), false).unwrap(), trace);
}

#[test]
fn a_bad_line_is_named_with_its_field_or_skipped_and_counted() {
    let table = [
        ("{\"input_length\": 5}", "output_length"),
        (r#"{"timestamp": -1, "input_length": 5, "output_length": 5}"#, "timestamp"),
        (r#"{"timestamp": 0, "input_length": 0, "output_length": 5}"#, "input_length"),
        (r#"{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}"#, "hash_ids"),
        (r#"{"timestamp": 0, "input_length": 99999999999, "output_length": 5}"#, "input_length"),
        ("{\"input_length\":", "EOF"),
        (r#"{"input_length": 5, "output_length": "many"}"#, "`output_length`: invalid type"),
        (r#"{"input_length": 5, "output_length": 5, "hash_ids": [1, -2]}"#, "`hash_ids[1]`: invalid value"),
        (r#"{"input_length": 5, "output_length": 5, "session_id": []}"#, "`session_id`: expected a text"),
        (r#"{"input_length": 5, "output_length": 5} {}"#, "continues after"),
        ("[5]", "expected a JSON object"),
    ];
    for (line, field) in table {
        let text = format!("{LINE}\n{line}\n{LINE}\n");
        let error = parse(&text, false).unwrap_err().to_string();
        assert!(error.starts_with("trace, line 2: ") && error.contains(field), "{error}");
        let trace = parse(&text, true).unwrap();
        assert_eq!((trace.requests.len(), trace.skipped), (2, 1));
    }
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n";
    let burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n";
    let table = [
        (azure, "2023-11-16 18:15:46.68,many,44", "`ContextTokens` is \"many\""),
        (azure, "2023-11-16 18:15:46.68,374", "`GeneratedTokens` is missing"),
        (burst, "5,ChatGPT,-4,18,490,API log", "`Request tokens` is \"-4\""),
        (burst, "5,ChatGPT,4", "`Response tokens` is missing"),
    ];
    for (good, line, problem) in table {
        let text = format!("{good}{line}\n");
        let error = parse(&text, false).unwrap_err().to_string();
        assert!(error.starts_with("trace, line 3: ") && error.contains(problem), "{error}");
        let trace = parse(&text, true).unwrap();
        assert_eq!((trace.requests.len(), trace.skipped), (1, 1));
    }
    assert!(parse("\n\n", false).unwrap_err().to_string().contains("no request"));
    let junk = parse("a,b\n1,2\n", false).unwrap_err().to_string();
    assert!(junk.starts_with("trace, line 1: no known format: ") && junk.ends_with("--format"), "{junk}");
    assert_eq!(parse(&format!("\n{LINE}\n"), false).unwrap().requests.len(), 1);
}

#[test]
fn azure_and_burst_gpt_are_recognised_by_their_header() {
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n\
                 2023-11-16 18:15:50.9951690,396,109\n";
    let trace = parse(azure, false).unwrap();
    assert_eq!(trace.requests.get(1).map(|last| last.at), Some(Duration::from_micros(4_314_579)));
    let burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n";
    let trace = parse(burst, false).unwrap();
    let first = trace.requests.first().unwrap();
    assert_eq!((first.input_tokens, first.output_tokens, first.model.as_deref()), (472, 18, Some("ChatGPT")));
    for odd in ["1e19", "-1", "NaN", "soon"] {
        let error = parse(&burst.replace("\n5,", &format!("\n{odd},")), false).unwrap_err().to_string();
        assert!(error.contains(&format!("line 2: `Timestamp` is \"{odd}\"")), "{error}");
    }
    let error = parse("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", false).unwrap_err();
    assert!(error.to_string().contains("line 2: `TIMESTAMP` is \"yesterday\""), "{error}");
}

#[test]
fn the_ceiling_of_the_hit_rate_counts_full_blocks_after_an_equal_prefix() {
    let line = |ids: &str, tokens: u32| {
        format!(r#"{{"timestamp":0,"input_length":{tokens},"output_length":1,"hash_ids":{ids}}}"#) + "\n"
    };
    let text =
        line("[1,2,3]", 1_536) + &line("[1,2,4]", 1_536) + &line("[9,2,3]", 1_536) + &line("[1,2]", 600);
    let rate = parse(&text, false).unwrap().endless_cache_hit_rate();
    assert!((rate - 3.0 / 10.0).abs() < 1e-9, "{rate}");
}

#[test]
fn a_line_that_is_too_long_is_not_read_into_memory() {
    let text = "x".repeat(usize::try_from(MAX_LINE).unwrap() + 10);
    let error = parse(&text, false).unwrap_err().to_string();
    assert!(error.contains("line 1: is longer than 16777216 bytes"), "{error}");
}
