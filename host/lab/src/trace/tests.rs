use super::*;

mod fields;

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
    let mut trace =
        Trace { name: "trace".into(), block_tokens: 512, requests: vec![request], ..Trace::default() };
    trace.format = Some(TraceFormat::Mooncake);
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
        (r#"{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2, 3]}"#, "hash_ids"),
        (r#"{"timestamp": 0, "input_length": 99999999999, "output_length": 5}"#, "input_length"),
        ("{\"input_length\":", "EOF"),
        (r#"{"input_length": 5, "output_length": "many"}"#, "`output_length`: invalid type"),
        (r#"{"input_length": 5, "output_length": 5, "hash_ids": [1, -2]}"#, "`hash_ids[1]`: invalid value"),
        (r#"{"input_length": 5, "output_length": 5, "session_id": []}"#, "`session_id`: expected a text"),
        (r#"{"input_length": 5, "output_length": 5} {}"#, "continues after"),
        (r#"{"input_length": 5, "output_length": 5}"#, "`timestamp` is missing"),
        ("[5]", "expected a JSON object"),
    ];
    for (line, field) in table {
        let text = format!("{LINE}\n{line}\n{LINE}\n");
        let error = parse(&text, false).unwrap_err().to_string();
        assert!(error.starts_with("trace, line 2: ") && error.contains(field), "{error}");
        // With a wrong size of blocks, few lines would be left.
        let advises = error.ends_with("; --skip-bad leaves such lines out");
        assert_eq!(advises, field != "hash_ids", "{error}");
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
        (burst, "5,ChatGPT,4,1,5,API log,7", "has 7 fields; the header has 6"),
        (burst, "5,\"ChatGPT,4,1,5,API log", "a quote is not closed"),
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
fn json_of_another_form_than_lines_is_named_with_the_way_to_lines() {
    for skip_bad in [false, true] {
        for (text, form, way) in [
            ("[\n  {\"id\": \"a\", \"conversations\": []}\n]\n", "a JSON array", "`jq -c '.[]'`"),
            ("[{\"id\": \"a\"}]", "a JSON array", "`jq -c '.[]'`"),
            ("\n{\n  \"timestamp\": 0\n}\n", "an indented JSON object", "`jq -c .`"),
        ] {
            let error = parse(text, skip_bad).unwrap_err().to_string();
            for part in [form, way, "`input_length`", "tokenizer"] {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }
}

#[test]
fn numbers_and_missing_values_are_read_as_pandas_writes_them() {
    let line = r#"{"timestamp": 3000.0, "input_length": 600.0, "output_length": 5.0, "hash_ids": null, "join": null,
                   "session_id": 7.0, "delay": null, "priority": null, "whole_prompt": null, "model": null}"#;
    let trace = parse(&line.replace('\n', ""), false).unwrap();
    let first = &trace.requests[0];
    assert_eq!((first.input_tokens, first.output_tokens, first.session.as_deref()), (600, 5, Some("7")));
    let delta = r#"{"group_id": 3.0, "session_id": 7.0, "timestamp": 1.0, "input_length": 600.0, "output_length": 5.0,
                    "hash_ids": null, "delay": null, "model": null}"#;
    assert_eq!(parse(&delta.replace('\n', ""), false).unwrap().requests[0].input_tokens, 600);
    let qwen = |chat: &str, more: &str| {
        format!(
            r#"{{"chat_id": {chat}, "timestamp": 1.5, "input_length": 16.0, "output_length": 2.0, "hash_ids": null,
                "parent_chat_id": {more}}}"#
        )
        .replace('\n', "")
    };
    let lines = [
        qwen("1.0", r#"null, "turn": null"#),
        qwen("2.0", r#"-1.0, "turn": 1.0"#),
        qwen("3", r#"1.0, "turn": 2.0"#),
    ];
    let trace = parse(&lines.join("\n"), false).unwrap();
    let sessions = trace.requests.iter().map(|request| request.session.as_deref());
    assert_eq!(sessions.collect::<Vec<_>>(), [Some("1"), Some("2"), Some("1")]);
    assert_eq!(trace.requests[0].input_tokens, 16);
    for (odd, field) in [("1.5", "parent_chat_id"), (r#"-1, "turn": -1.0"#, "turn")] {
        let error = parse(&qwen("1", odd), false).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`: invalid")), "{error}");
    }
    for odd in ["600.5", "-600.0", "1e300", "-600", "true"] {
        let error = parse(&LINE.replace("600", odd), false).unwrap_err().to_string();
        assert!(error.contains("`input_length`: invalid") && error.contains("a whole number"), "{error}");
    }
}

#[test]
fn a_written_trace_of_short_later_turns_reads_without_a_doubt_about_its_format() {
    let line = |tokens: u32, more: &str| {
        format!(
            r#"{{"timestamp": 0, "session_id": "a", "input_length": {tokens}, "output_length": 5{more}}}"#
        ) + "\n"
    };
    let text = line(900, "") + &line(100, r#", "delay": 10"#);
    let read = parse(&text, false).unwrap();
    assert!(read.notes.len() == 1 && read.notes[0].contains("--format mooncake-delta"), "{:?}", read.notes);
    let mut out = Vec::new();
    read.write_mooncake(&mut out).unwrap();
    let written = parse(&String::from_utf8(out).unwrap(), false).unwrap();
    assert_eq!((written.notes.as_slice(), &written.requests), ([].as_slice(), &read.requests));
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

/// Returns the arrivals in milliseconds, and the lengths of prompts and answers.
fn requests(trace: &Trace) -> Vec<(u128, u32, u32)> {
    let of = |one: &TraceRequest| (one.at.as_millis(), one.input_tokens, one.output_tokens);
    trace.requests.iter().map(of).collect()
}

#[test]
fn columns_are_found_by_their_names_in_any_order() {
    let multimodal = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n\
                      2024-10-15 00:00:00.1,1,2000,100\n2024-10-15 00:00:01.1,2,3000,50\n";
    assert_eq!(requests(&parse(multimodal, false).unwrap()), [(0, 2_000, 100), (1_000, 3_000, 50)]);
    let quoted = "\u{feff}\"GeneratedTokens\";\"TIMESTAMP\";\"ContextTokens\"\r\n6;\"2023-11-16 18:15:01.1\";\"5\"\r\n";
    assert_eq!(requests(&parse(quoted, false).unwrap()), [(0, 5, 6)]);
    let swapped = "Log Type,Timestamp,Response tokens,Request tokens,Total tokens,Model\n\
                   \"API log, old\",5,10,100,110,ChatGPT\n";
    let trace = parse(swapped, false).unwrap();
    assert_eq!(requests(&trace), [(0, 100, 10)]);
    assert_eq!(trace.requests[0].model.as_deref(), Some("ChatGPT"));
    let second = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                  19440110.0,1722ac82,43,GPT-4,906,446.0,1352,Conversation log\n19440111.0,,,GPT-4,9,4,13,API log\n";
    let trace = parse(second, false).unwrap();
    assert_eq!(requests(&trace), [(0, 906, 446), (1_000, 9, 4)]);
    let sessions: Vec<Option<&str>> = trace.requests.iter().map(|one| one.session.as_deref()).collect();
    assert_eq!(sessions, [Some("1722ac82"), None]);
    // A file without a needed column is refused, also with --skip-bad.
    for (header, missing) in [
        ("TIMESTAMP,ContextTokens,Output", "GeneratedTokens"),
        ("Timestamp,Model,Request tokens,Total tokens", "Response tokens"),
    ] {
        let error = parse(&format!("{header}\n1,2,3\n"), true).unwrap_err().to_string();
        let columns = header.replace(',', "`, `");
        let expected =
            format!("trace, line 1: the header has no column `{missing}`; its columns are `{columns}`");
        assert_eq!(error, expected);
    }
}

#[test]
fn a_trace_without_requests_says_how_many_lines_were_malformed_and_the_first() {
    let error = |text: &str| parse(text, true).unwrap_err().to_string();
    let line = LINE.replace("600", "0");
    let malformed = error(&format!("{line}\n{line}\n"));
    let start =
        "trace: contains no request: 2 lines are malformed, the first is line 1: `input_length` is 0;";
    assert!(malformed.starts_with(start), "{malformed}");
    let failed = error("Timestamp,Request tokens,Response tokens\n5,10,0\n");
    assert_eq!(failed, "trace: contains no request: 1 requests failed");
}

#[test]
fn failed_requests_are_left_out_and_empty_answers_count_as_one_token_and_both_are_told() {
    let burst = "Timestamp,Request tokens,Response tokens\n5,10,0\n6,20,7\n9,30,0\n";
    let trace = parse(burst, false).unwrap();
    assert_eq!(requests(&trace), [(0, 20, 7)]);
    assert_eq!(trace.notes, ["2 failed requests of the trace (no response tokens) were left out"]);
    let empty = LINE.replace("\"output_length\": 5", "\"output_length\": 0");
    let trace = parse(&format!("{LINE}\n{empty}\n"), false).unwrap();
    assert_eq!(requests(&trace), [(0, 600, 5), (0, 600, 1)]);
    assert_eq!(
        trace.notes,
        ["1 requests of the trace have an answer of 0 tokens, which counts as one token"]
    );
}

#[test]
fn times_may_count_from_the_epoch_and_the_time_between_requests_is_limited() {
    let at = |times: &[&str]| {
        let lines = times.iter().map(|time| LINE.replace("3000", time) + "\n").collect::<String>();
        parse(&lines, false).map(|trace| requests(&trace).iter().map(|one| one.0).collect::<Vec<_>>())
    };
    assert_eq!(at(&["1700000001000", "1700000000000"]).unwrap(), [0, 1_000]);
    let span = at(&["0", "1700000000000"]).unwrap_err().to_string();
    assert_eq!(
        span,
        "trace: the last request is 19676 days after the first; expected at most 366: check that its times are in milliseconds"
    );
    let micros = at(&["1700000000000000"]).unwrap_err().to_string();
    assert!(micros.contains("`timestamp` is 1700000000000000; expected milliseconds"), "{micros}");
    // Zones are honoured: 00:00:01+02:00 is two hours before 00:00:01Z.
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10T00:00:01Z,5,5\n2024-05-10T00:00:01+02:00,6,5\n\
                 2024-05-09 19:00:02.5-05:00,7,5\n";
    let zones = requests(&parse(azure, false).unwrap());
    assert_eq!(zones, [(0, 6, 5), (7_200_000, 5, 5), (7_201_500, 7, 5)]);
}

#[test]
fn seconds_in_place_of_milliseconds_are_suspected_by_the_rate() {
    let notes = |step: u32| {
        let lines = (0..20).map(|number| LINE.replace("3000", &(number * step).to_string()) + "\n");
        parse(&lines.collect::<String>(), false).unwrap().notes
    };
    assert!(notes(1)[0].starts_with("1000 requests of the trace arrive in a second: "), "{:?}", notes(1));
    assert!(notes(1_000).is_empty() && notes(0).is_empty());
    // O10.4
    let low = notes(5_000_000);
    assert!(low[0].starts_with("0.00020 requests of the trace arrive in a second: "), "{low:?}");
    assert!(low[0].ends_with("if the file has microseconds, divide them by 1000"), "{low:?}");
    let sessions = |step: f64| {
        let line = |number: u32| {
            let at = step * f64::from(number);
            let turn =
                format!(r#"{{"session_id":{number},"group_id":1,"input_length":600,"output_length":5"#);
            format!("{turn},\"timestamp\":{at}}}\n{turn},\"delay\":5000}}\n")
        };
        parse(&(0..20).map(line).collect::<String>(), false).unwrap().notes
    };
    // O10.4: starts of sessions in seconds. AIPerf's sessions all start at 0.
    assert!(sessions(0.5)[0].starts_with("2000 requests of the trace arrive in a second: "));
    assert!(sessions(500.0).is_empty() && sessions(0.0).is_empty());
}

#[test]
fn ids_of_whole_blocks_are_enough_and_the_rest_is_shared_with_no_request() {
    let of = |ids: &str| parse(&(LINE.replace("[0, 7]", ids) + "\n"), false);
    assert_eq!(&of("[3]").unwrap().requests[0].blocks[..], &[3]);
    assert!(of("[3, 4, 5]").is_err());
    let two = parse(&format!("{0}\n{0}\n", LINE.replace("[0, 7]", "[3]")), false).unwrap();
    let [first, second] = [0, 1].map(|number| two.prompt_token_ids(number));
    assert_eq!((first.len(), &first[..512]), (600, &second[..512]));
    assert!(first[512..].iter().all(|token| *token != second[512]) && first[512] != first[0], "{first:?}");
}

#[test]
fn an_unknown_line_of_json_says_what_it_was_read_as() {
    let error = parse("{\"text\": \"hi\"}\n", false).unwrap_err().to_string();
    assert!(
        error.contains("it was read as Mooncake's JSON lines, which need `timestamp`, `input_length`"),
        "{error}"
    );
    // O10.5
    for (line, key) in [
        (r#"{"session_id": "s", "timestamp": 1.0, "model": "m", "input": [], "output_length": 9}"#, "input"),
        (r#"{"timestamp": 0, "text_input": "hi", "output_length": 5}"#, "text_input"),
        (r#"{"session_id": "a", "turns": [{"text": "x"}]}"#, "turns"),
        (r#"{"prompt": "What is the capital?"}"#, "prompt"),
        (r#"{"custom_id": "request-1", "method": "POST", "url": "/v1/x", "body": {}}"#, "body"),
        (r#"{"conversation_hash": "x", "conversation": []}"#, "conversation"),
        (r#"{"instance_id": "x", "trajectory": []}"#, "trajectory"),
    ] {
        let error = parse(line, false).unwrap_err().to_string();
        let texts = format!(". Its lines have texts (`{key}`) and no lengths: count their tokens");
        assert!(error.contains(&texts), "{error}");
    }
    // O10.5
    for (line, names) in [
        (r#"{"timestamp": 0, "isl": 5, "osl": 9}"#, ["isl", "osl"]),
        (r#"{"timestamp": 0, "input_tokens": 5, "output_tokens": 9}"#, ["input_tokens", "output_tokens"]),
    ] {
        let error = parse(line, false).unwrap_err().to_string();
        let [input, output] = names;
        let advice = format!(". Write its `{input}` as `input_length` and its `{output}` as `output_length`");
        assert!(error.contains(&advice), "{error}");
    }
    // O10.5
    let bench = parse(r#"{"date": "x", "input_lens": [1], "output_lens": [1]}"#, false).unwrap_err();
    assert!(bench.to_string().contains("This is a result of `vllm bench serve`"), "{bench}");
    let later = parse(&format!("{LINE}\n{{\"text\": \"hi\"}}\n"), false).unwrap_err().to_string();
    assert!(!later.contains("was read as"), "{later}");
}

#[test]
fn a_table_with_other_columns_is_read_after_the_change_that_the_error_names() {
    let splitwise = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n\
                     0,2,0,0.0,1,374,44\n1,2,0,0.5,1,396,109\n";
    let vidur = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n0.5,396,109\n";
    for text in [splitwise, vidur] {
        let error = parse(text, false).unwrap_err().to_string();
        let (_, script) = error.split_once("after `sed '").unwrap();
        let mut changed = text.to_owned();
        for change in script.strip_suffix("'`").unwrap().split(';') {
            let parts: Vec<&str> = change.split('/').collect();
            changed = changed.replacen(parts[1], parts[2], 1);
        }
        // O10.5
        assert_eq!(requests(&parse(&changed, false).unwrap()), [(0, 374, 44), (500, 396, 109)]);
    }
}

#[test]
fn compressed_files_and_files_with_a_byte_order_mark_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("\u{feff}{LINE}\n{LINE}\n");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut gzip, text.as_bytes()).unwrap();
    let files = [
        ("plain.jsonl", text.clone().into_bytes()),
        ("a.jsonl.gz", gzip.finish().unwrap()),
        ("a.jsonl.zst", zstd::encode_all(text.as_bytes(), 1).unwrap()),
    ];
    for (name, bytes) in files {
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(Trace::read(&path, None, None, false).unwrap().requests.len(), 2, "{name}");
        if name != "plain.jsonl" {
            // A download that broke off.
            std::fs::write(&path, &bytes[..bytes.len() - 6]).unwrap();
            assert!(matches!(Trace::read(&path, None, None, false), Err(TraceError::Io { .. })), "{name}");
        }
    }
}

#[test]
fn a_line_that_is_too_long_is_not_read_into_memory() {
    let text = "x".repeat(usize::try_from(MAX_LINE).unwrap() + 10);
    let error = parse(&text, false).unwrap_err().to_string();
    assert!(error.contains("line 1: is longer than 16777216 bytes"), "{error}");
}
