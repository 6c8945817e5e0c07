use super::*;
use crate::{
    generate::{Shape, Workload, generate},
    trace::{Trace, TraceError, TraceFormat},
};

fn parse(text: &str, skip_bad: bool) -> Result<Trace, TraceError> {
    Trace::parse(text.as_bytes(), "trace", "trace".to_owned(), None, None, skip_bad)
}

// The form of AIPerf's `docs/traces/inference-day-2026/dataset.jsonl`, with small numbers.
const DATASET: &str = r#"{"session_id":"sess-a","input_length":1100,"output_length":300,"hash_ids":[0,1,9],"timestamp":0.0,"group_id":46}
{"session_id":"sess-b","input_length":1024,"output_length":10,"hash_ids":[0,1],"timestamp":0.0,"group_id":46,"is_restart":true}
{"session_id":"sess-a","input_length":600,"output_length":30,"hash_ids":[10,11],"delay":12219.3}
{"session_id":"sess-b","input_length":1,"output_length":10,"hash_ids":[12],"delay":0.5}
{"session_id":"sess-a","input_length":2000,"output_length":0,"hash_ids":[13,14,15,16],"delay":7563.0}
"#;

#[test]
fn a_turn_s_prompt_is_all_before_it_with_the_answers_and_what_the_line_adds() {
    let trace = parse(DATASET, false).unwrap();
    assert_eq!(trace.block_tokens, 512);
    let of = |session: &str| -> Vec<&TraceRequest> {
        trace.requests.iter().filter(|request| request.session.as_deref() == Some(session)).collect()
    };
    let (a, b) = (of("sess-a"), of("sess-b"));
    let lengths: Vec<u32> = a.iter().map(|turn| turn.input_tokens).collect();
    assert_eq!(lengths, [1_100, 1_100 + 300 + 600, 2_000 + 30 + 2_000]);
    assert_eq!(a[0].blocks[..], [0, 1, 9]);
    assert_eq!((a[1].blocks.len(), a[2].blocks.len()), (4, 8));
    assert!(a[1].blocks.starts_with(&a[0].blocks) && a[2].blocks.starts_with(&a[1].blocks));
    assert_eq!(b[1].blocks[..2], [0, 1]);
    // Blocks after the first prompts are shared with no session, and get no id of the file.
    let own: Vec<u64> = a[2].blocks[3..].iter().chain(&b[1].blocks[2..]).copied().collect();
    let distinct: std::collections::HashSet<_> = own.iter().collect();
    assert_eq!((distinct.len(), own.iter().all(|id| *id > 16)), (own.len(), true));
    let delays: Vec<Option<Duration>> = a.iter().map(|turn| turn.delay).collect();
    assert_eq!(delays, [None, Some(Duration::from_micros(12_219_300)), Some(Duration::from_millis(7_563))]);
    // 1,100 prompt tokens at 20,000 a second, and 300 output tokens at 60 a second.
    assert_eq!(a[1].at, Duration::from_millis(55 + 5_000) + Duration::from_micros(12_219_300));
    assert_eq!(a[2].output_tokens, 1);
}

#[test]
fn a_turn_without_a_delay_waits_for_its_time_or_not_at_all() {
    let line =
        |rest: &str| format!(r#"{{"session_id":7,"input_length":100,"output_length":60{rest}}}"#) + "\n";
    let text = line(r#","timestamp":1000"#) + &line(r#","timestamp":5000"#) + &line("");
    let trace = Trace::parse(text.as_bytes(), "t", "t".into(), Some(TraceFormat::MooncakeDelta), None, false);
    let trace = trace.unwrap();
    let delays: Vec<Option<Duration>> = trace.requests.iter().map(|turn| turn.delay).collect();
    // The answer before it ends 5 + 1,000 ms after the first timestamp.
    assert_eq!(delays, [None, Some(Duration::from_millis(2_995)), Some(Duration::ZERO)]);
    assert_eq!(trace.requests[2].session.as_deref(), Some("7"));
    assert_eq!(trace.requests[2].blocks.len(), 1);
}

#[test]
fn the_fields_of_sessions_hold_as_in_mooncakes_format() {
    let line = |rest: &str| format!(r#"{{"output_length":60,{rest}}}"#) + "\n";
    let text = line(r#""session_id":"a","timestamp":0,"input_length":600,"hash_ids":[1,2]"#)
        + &line(r#""session_id":"a","delay":10000,"input_length":100,"hash_ids":[7]"#)
        + &line(
            r#""session_id":"b","parent_session_id":"a","delay":5000,"input_length":600,"hash_ids":[3,4]"#,
        )
        + &line(
            r#""session_id":"c","parent_session_id":"a","input_length":500,"hash_ids":[5],"tenant_hash":3"#,
        )
        + &line(r#""session_id":"b","delay":2000,"input_length":100,"hash_ids":[9]"#)
        + &line(
            r#""session_id":"a","delay":10,"join":true,"input_length":100,"hash_ids":[11],"priority":2,
            "ttft_target_ms":100"#,
        )
        .replace('\n', "")
        + "\n";
    let with_group = text.replace(r#""output_length":60"#, r#""output_length":60,"group_id":1"#);
    for (text, format) in [
        (&with_group, None),
        (&with_group.replacen(r#","group_id":1"#, "", 1), None),
        (&text, None),
        (&text, Some(TraceFormat::MooncakeDelta)),
    ] {
        let trace = Trace::parse(text.as_bytes(), "t", "t".into(), format, None, false).unwrap();
        assert_eq!(trace.format, Some(TraceFormat::MooncakeDelta));
        let of = |one: &TraceRequest| {
            let delay = one.delay.map(|delay| delay.as_millis());
            (one.session.clone().unwrap(), one.parent.clone(), delay, one.join, one.at.as_millis())
        };
        let found: Vec<_> = trace.requests.iter().map(of).collect();
        let parent = || Some("a".to_owned());
        // A prompt takes a millisecond for 20 tokens, an answer a second: the first ends at 1,030 ms, the
        // turn after it at 12,035 ms. Forks have its arrival. The newest answer before the join ends 5,000 +
        // 1,030 + 2,000 + 1,005 ms later.
        let expected = [
            ("a".to_owned(), None, None, false, 0),
            ("a".to_owned(), None, Some(10_000), false, 11_030),
            ("b".to_owned(), parent(), Some(5_000), false, 11_030),
            ("c".to_owned(), parent(), Some(0), false, 11_030),
            ("b".to_owned(), None, Some(2_000), false, 20_065),
            ("a".to_owned(), None, Some(10), true, 21_080),
        ];
        // O10.1
        assert_eq!(found, expected);
        let last = &trace.requests[5];
        assert_eq!((last.priority, last.targets.ttft), (2.0, Some(Duration::from_millis(100))));
        assert_eq!(trace.requests[3].tenant_hash, Some(3));
        // What is written says the same.
        let mut out = Vec::new();
        trace.write_mooncake(&mut out).unwrap();
        let written = Trace::parse(&out[..], "t", "t".into(), None, None, false).unwrap();
        assert_eq!((&written.requests, written.format), (&trace.requests, Some(TraceFormat::Mooncake)));
    }
}

#[test]
fn a_fork_of_a_skipped_session_begins_a_session() {
    let line = |rest: &str| format!(r#"{{"group_id":1,"output_length":5,{rest}}}"#) + "\n";
    let text = line(r#""session_id":"x","input_length":5,"hash_ids":[4611686018427387905],"timestamp":0"#)
        + &line(r#""session_id":"y","parent_session_id":"x","input_length":5,"delay":7"#);
    let trace = parse(&text, true).unwrap();
    let only = &trace.requests[0];
    assert_eq!((trace.skipped, &only.parent, only.delay), (1, &None, None));
}

#[test]
fn a_partial_last_block_of_a_first_prompt_is_no_block_of_the_answers_of_two_sessions() {
    let line = |session: &str, rest: &str| {
        format!(r#"{{"session_id":"{session}","group_id":1,"output_length":300,{rest}}}"#) + "\n"
    };
    let text = ["a", "b", "c"]
        .map(|name| line(name, r#""input_length":600,"hash_ids":[1,2]"#))
        .into_iter()
        .chain(["b", "a"].map(|name| line(name, r#""input_length":700,"hash_ids":[7,8],"delay":10"#)))
        .collect::<String>();
    let trace = parse(&text, false).unwrap();
    let (first, later) = trace.requests.split_at(3);
    assert!(first.iter().all(|one| one.blocks[..] == [1, 2]), "{first:?}");
    let [b, a] = later else { panic!("two later turns: {later:?}") };
    assert_eq!((a.blocks.len(), b.blocks.len()), (4, 4));
    assert_eq!((a.blocks[0], b.blocks[0]), (1, 1));
    let shared = a.blocks[1..].iter().filter(|id| b.blocks.contains(id)).count();
    // O10.3
    assert_eq!(shared, 0, "{a:?} {b:?}");
    // 600 + 300 + 700 tokens each, of which the second session finds one block, and its first prompt too.
    let cached = (512 + 512 + 512 + 512) as f64 / (3 * 600 + 2 * 1_600) as f64;
    assert!((trace.endless_cache_hit_rate() - cached).abs() < 1e-9, "{}", trace.endless_cache_hit_rate());
}

#[test]
fn the_turns_of_a_session_share_one_list_of_blocks() {
    let line = |tokens: u32| {
        format!(r#"{{"session_id":"a","input_length":{tokens},"output_length":1,"group_id":1}}"#) + "\n"
    };
    let text = line(1_000_000) + &line(512).repeat(2_000);
    let trace = parse(&text, false).unwrap();
    let (first, last) = (&trace.requests[0].blocks, &trace.requests[2_000].blocks);
    assert_eq!(last.len(), (1_000_000_usize + 2_000 * 513).div_ceil(512));
    assert_eq!(first.as_ptr(), last.as_ptr());
}

#[test]
fn additions_are_known_by_their_lengths_and_blocks_or_by_a_group_in_any_line() {
    let expected = parse(DATASET, false).unwrap();
    assert_eq!(expected.format, Some(TraceFormat::MooncakeDelta));
    let without = |text: &str| text.replace(r#","group_id":46"#, "");
    let (first, rest) = DATASET.split_once('\n').unwrap();
    for text in [without(DATASET), without(first) + "\n" + rest] {
        let trace = parse(&text, false).unwrap();
        assert_eq!(trace, expected, "{text}");
    }
    // Here most later turns begin like the turn before them.
    let whole = DATASET.replace("[10,11]", "[0,11]").replace("[13,14", "[0,14");
    let trace = parse(&without(&whole), false).unwrap();
    assert_eq!((trace.format, &trace.requests[2].blocks[..]), (Some(TraceFormat::Mooncake), &[0, 11][..]));
}

#[test]
fn requests_of_found_additions_that_make_no_prompt_are_refused_or_skipped_and_counted() {
    let text = DATASET.replace(r#","group_id":46"#, "");
    let long = text.replace(r#""input_length":1100"#, r#""input_length":16777000"#).replace("[0,1,9]", "[]");
    let error = parse(&long, false).unwrap_err().to_string();
    let start =
        "trace: read as mooncake-delta, in which the prompts of a session grow: `input_length` is 16777900;";
    let end = "; --skip-bad leaves such requests out, and --format mooncake reads whole prompts";
    assert!(error.starts_with(start) && error.ends_with(end), "{error}");
    let trace = parse(&long, true).unwrap();
    assert_eq!((trace.skipped, trace.format), (2, Some(TraceFormat::MooncakeDelta)));
    let mut lengths: Vec<u32> = trace.requests.iter().map(|one| one.input_tokens).collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [1_024, 1_024 + 10 + 1, 16_777_000]);
    let b = trace.requests.iter().filter(|one| one.session.as_deref() == Some("sess-b"));
    assert!(b.map(|one| &one.blocks[..2]).all(|blocks| blocks == [0, 1]), "{trace:?}");
    // A session of which all requests are skipped has no forks, and a trace of such requests is empty.
    let line = |rest: &str| format!(r#"{{"input_length":5,"output_length":5,{rest}}}"#) + "\n";
    let odd = line(r#""session_id":"x","hash_ids":[4611686018427387905],"timestamp":0"#);
    let fork = line(r#""session_id":"y","parent_session_id":"x","group_id":1"#);
    let trace = parse(&(odd.clone() + &fork), true).unwrap();
    assert_eq!((trace.skipped, trace.requests.len(), &trace.requests[0].parent), (1, 1, &None));
    let all = odd + &fork.replace(r#""group_id""#, r#""hash_ids":[4611686018427387905],"group_id""#);
    let error = parse(&all, true).unwrap_err().to_string();
    let start = "trace: contains no request: read as mooncake-delta, all requests are malformed, the first: \
                 `hash_ids` has 4611686018427387905;";
    assert!(error.starts_with(start), "{error}");
}

#[test]
fn sessions_that_may_have_whole_prompts_or_additions_are_read_as_whole_with_a_note() {
    let line = |rest: &str| format!(r#"{{"session_id":7,"output_length":60,{rest}}}"#) + "\n";
    let unclear = line(r#""input_length":900,"timestamp":0"#)
        + &line(r#""input_length":100,"delay":5"#)
        + &line(r#""input_length":1900,"delay":5"#)
        + &line(r#""input_length":100,"delay":5"#);
    // Unrelated prompts of one client, as `trace export` may write them, have times.
    let timed = line(r#""input_length":900,"timestamp":0,"hash_ids":[1,2]"#)
        + &line(r#""input_length":500,"timestamp":9000,"delay":5,"hash_ids":[3]"#);
    for text in [&unclear, &timed] {
        let trace = parse(text, false).unwrap();
        assert_eq!(trace.format, Some(TraceFormat::Mooncake));
        assert!(
            trace.notes[0].contains("--format mooncake-delta, else --format mooncake"),
            "{:?}",
            trace.notes
        );
        for format in [TraceFormat::Mooncake, TraceFormat::MooncakeDelta] {
            let named = Trace::parse(text.as_bytes(), "t", "t".into(), Some(format), None, false).unwrap();
            assert_eq!((named.format, named.notes), (Some(format), vec![]));
        }
    }
    let grows = unclear.replacen(r#":100,"#, ":1000,", 1).replace(":1900,", ":2900,");
    assert!(parse(&grows, false).unwrap().notes.is_empty(), "{grows}");
}

#[test]
fn generated_sessions_have_whole_prompts() {
    let shapes = [Shape::Chat { turns: 5 }, Shape::Agents { groups: 10 }];
    for shape in shapes {
        let trace = generate(&Workload { shape, requests: 300, rate: 1.0, burstiness: 1.0, seed: 3 });
        let mut out = Vec::new();
        trace.write_mooncake(&mut out).unwrap();
        let blocks = Some(trace.block_tokens);
        let read = Trace::parse(&out[..], "t", "t".into(), None, blocks, false).unwrap();
        assert_eq!((read.format, read.notes), (Some(TraceFormat::Mooncake), vec![]), "{shape:?}");
    }
}

#[test]
fn a_bad_line_is_named_with_its_field_or_skipped_and_counted() {
    let good = DATASET.lines().next().unwrap();
    let long = "x".repeat(257);
    let table = [
        (r#"{"input_length":5,"output_length":5}"#.to_owned(), "missing field `session_id`"),
        (r#"{"session_id":"a","output_length":5}"#.to_owned(), "missing field `input_length`"),
        (r#"{"session_id":"a","input_length":0,"output_length":5}"#.to_owned(), "`input_length` is 0"),
        (
            r#"{"session_id":"a","input_length":5,"output_length":-5}"#.to_owned(),
            "`output_length`: invalid value",
        ),
        (r#"{"session_id":"a","input_length":5,"output_length":5,"delay":-1}"#.to_owned(), "`delay` is -1"),
        (r#"{"session_id":"a","input_length":5,"output_length":5,"delay":1e300}"#.to_owned(), "`delay` is 1"),
        (
            r#"{"session_id":"a","input_length":5,"output_length":5,"timestamp":-1}"#.to_owned(),
            "`timestamp` is -1",
        ),
        (
            r#"{"session_id":"a","input_length":600,"output_length":5,"hash_ids":[1,2,3]}"#.to_owned(),
            "`hash_ids` has 3 ids",
        ),
        (
            r#"{"session_id":"a","input_length":5,"output_length":5,"hash_ids":[4611686018427387905]}"#
                .to_owned(),
            "`hash_ids` has 4611686018427387905; expected at most 4611686018427387904",
        ),
        (
            r#"{"session_id":"sess-a","input_length":16777000,"output_length":5}"#.to_owned(),
            "`input_length` is 16778400; expected 1 to 16777216 (with the turns before it)",
        ),
        (
            format!(r#"{{"session_id":"{long}","input_length":5,"output_length":5}}"#),
            "`session_id` has 257 bytes",
        ),
    ];
    for (line, problem) in table {
        let text = format!("{good}\n{line}\n{good}\n");
        let error = parse(&text, false).unwrap_err().to_string();
        assert!(error.starts_with("trace, line 2: ") && error.contains(problem), "{error}");
        let trace = parse(&text, true).unwrap();
        assert_eq!((trace.requests.len(), trace.skipped), (2, 1));
    }
}
