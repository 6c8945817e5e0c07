use std::{fs, path::Path};

use clap::Parser;
use pointsman_decision_log::{
    FileHeader, LOG_NAME, LOG_VERSION, LoggedBlocks, LoggedDecision, LoggedOutcome, LoggedRequest,
    LoggedShadow,
};
use prefix_index::{Prefix, Salt};
use serde::Serialize;

use super::{reader::ReadStats, *};
use crate::trace::Trace;

mod ran;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: ExportArgs,
}

fn header() -> FileHeader {
    FileHeader {
        log: LOG_NAME.to_owned(),
        version: LOG_VERSION,
        block_tokens: 16,
        started_at_ms: 0,
        gateway: "0".to_owned(),
    }
}

/// A request that arrived at `at_ms` with these blocks.
fn request(at_ms: u64, input_tokens: u32, ids: &[u64]) -> LoggedRequest {
    let shadow =
        LoggedShadow { policy: Some("mine".into()), digest: Some("ab".into()), ..Default::default() };
    let decision = LoggedDecision {
        slot: "aggregated".into(),
        lane: "active".into(),
        policy: Some("kv-aware".into()),
        digest: Some("cd".into()),
        decider: "policy".into(),
        worker: Some(1),
        rank: Some(0),
        shadow: Some(shadow),
        ..Default::default()
    };
    LoggedRequest {
        arrived_at_us: 1_700_000_000_000_000 + at_ms * 1_000,
        model: "m".into(),
        input_tokens,
        output_tokens: 5,
        blocks: LoggedBlocks { ids: ids.to_vec(), depths: Vec::new() },
        decisions: vec![decision],
        outcome: LoggedOutcome { status: 200, code: "ok".into(), e2e_ms: 100.0, ..Default::default() },
        ..Default::default()
    }
}

fn frame(lines: &[String]) -> Vec<u8> {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    zstd::bulk::compress(text.as_bytes(), 3).unwrap()
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap()
}

fn write(directory: &Path, name: &str, frames: &[Vec<u8>]) {
    fs::write(directory.join(name), frames.concat()).unwrap();
}

/// Runs `trace export` and returns what it printed and the trace.
fn export(directory: &Path, more: &[&str]) -> Result<(String, Trace), String> {
    let out = directory.join("t.jsonl");
    let (log, path) = (directory.to_str().unwrap(), out.to_str().unwrap());
    let args = [&["export", log, "-o", path], more].concat();
    let command = Command::try_parse_from(args).map_err(|error| error.to_string())?;
    let text = command.args.run().map_err(|error| format!("{error:#}"))?;
    let block = text.split("blocks of ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    Ok((text.clone(), Trace::read(&out, None, Some(block.parse().unwrap()), false).unwrap()))
}

#[test]
fn requests_become_a_trace_with_their_shared_prefixes_sessions_and_pauses() {
    let directory = tempfile::tempdir().unwrap();
    let first = LoggedRequest { session_hash: Some(7), ..request(1_000, 40, &[900, 901]) };
    let second = LoggedRequest {
        session_hash: Some(7),
        priority: 2.0,
        tenant_hash: Some(3),
        ..request(1_350, 48, &[900, 901, 902])
    };
    let third = request(2_000, 40, &[900, 777]);
    let early = LoggedRequest { session_hash: Some(7), ..request(1_400, 10, &[]) };
    let lines = [json(&header()), json(&second), json(&first), json(&third), json(&early)];
    write(directory.path(), "decisions-1.jsonl.zst", &[frame(&lines)]);
    let (text, trace) = export(directory.path(), &[]).unwrap();
    assert_eq!(trace.block_tokens, 16);
    let blocks: Vec<&[u64]> = trace.requests.iter().map(|request| &request.blocks[..]).collect();
    // Requests are in the order of arrival, with new ids. A partial block at the end has an id of its own.
    assert_eq!(blocks, [&[0, 1, 2][..], &[0, 1, 3], &[4], &[0, 5, 6]]);
    let at: Vec<u128> = trace.requests.iter().map(|request| request.at.as_millis()).collect();
    assert_eq!(at, [0, 350, 400, 1_000]);
    let delays: Vec<_> =
        trace.requests.iter().map(|request| request.delay.map(|delay| delay.as_millis())).collect();
    // The first request ended after 100 ms. The early request did not wait for the second one.
    assert_eq!(delays, [None, Some(250), None, None]);
    let second = &trace.requests[1];
    assert_eq!((second.priority, second.tenant_hash, second.model.as_deref()), (2.0, Some(3), Some("m")));
    assert_eq!((second.session.as_deref(), trace.requests[3].session.as_deref()), (Some("7"), None));
    let command = "--fleet fleet.toml --seeds 5 --jitter-ms 20 \\\n      --arm active=kv-aware \\\n      --arm shadow=./mine.wasm";
    assert!(text.contains(command) && text.contains("--trace-block 16"), "{text}");
    // I10.20
    assert!(text.contains("warning: the hashes of tenants are salted"), "{text}");
    assert!(text.contains("role = \"aggregated\"\n  count = 1"), "{text}");
    // Blocks of 32 tokens: the number of a longer block follows from its last id.
    let (_, coarse) = export(directory.path(), &["--trace-block", "32"]).unwrap();
    let blocks: Vec<&[u64]> = coarse.requests.iter().map(|request| &request.blocks[..]).collect();
    assert_eq!(blocks, [&[0, 1][..], &[0, 2], &[3], &[4, 5]]);
    let error = export(directory.path(), &["--trace-block", "24"]).unwrap_err();
    assert!(error.contains("blocks of 16 tokens, which cannot be joined to blocks of 24"), "{error}");
}

#[test]
fn i10_the_command_to_compare_formulas_names_their_files() {
    let directory = tempfile::tempdir().unwrap();
    let mut logged = request(1_000, 40, &[900]);
    let by_formula = |lane: &str| LoggedDecision {
        lane: lane.into(),
        policy: Some("formula".into()),
        digest: Some("ef".into()),
        shadow: None,
        ..logged.decisions[0].clone()
    };
    // The shadow beside the active lane runs a file as well.
    let active = LoggedDecision { shadow: logged.decisions[0].shadow.clone(), ..by_formula("active") };
    logged.decisions = vec![active, by_formula("canary")];
    write(directory.path(), "decisions-1.jsonl.zst", &[frame(&[json(&header()), json(&logged)])]);
    let (text, _) = export(directory.path(), &[]).unwrap();
    let command = "--jitter-ms 20 \\\n      --arm active=./aggregated.formula.toml \\\n      \
                   --arm canary=./aggregated.canary.formula.toml \\\n      --arm shadow=./mine.wasm\n\nThe log \
                   does not contain policies. Put them where you run this command, as they served: \
                   ./aggregated.canary.formula.toml, ./aggregated.formula.toml, ./mine.wasm. Formulas of the \
                   configuration go into such a file, too. If they read labels or taints, give the engines in \
                   fleet.toml `labels` and `taints`. The trace has no `max_tokens` and no adapters.";
    // I10.12, I10.20
    assert!(text.contains(command), "{text}");
    // I10.20
    assert!(!text.contains("the hashes of tenants are salted"), "{text}");
    let files = ["aggregated.formula.toml", "aggregated.canary.formula.toml"];
    for file in files.map(|file| directory.path().join(file)) {
        fs::write(&file, "cost = \"active_requests\"\n").unwrap();
        // `compare` takes such a file as an arm.
        crate::arm::Arm::parse(&format!("a={}", file.display())).unwrap();
    }
}

#[test]
fn i10_a_rule_that_changed_within_the_log_is_a_warning() {
    let ran = |settings: &str| {
        let mut logged = request(1_000, 40, &[900]);
        let decision = &mut logged.decisions[0];
        (decision.policy, decision.digest) = (Some("formula".into()), Some("ef".into()));
        (decision.settings_digest, decision.shadow) = (Some(settings.into()), None);
        logged
    };
    let (text, _) = exported(&[ran("aa"), ran("aa")]);
    assert!(!text.contains("warning"), "{text}");
    let (text, _) = exported(&[ran("aa"), ran("bb"), ran("bb")]);
    let slot = request(1_000, 40, &[900]).decisions[0].slot.clone();
    let warned = format!(
        "\nwarning: {slot} active ran formula with 2 contents or settings, and an arm has one: ef settings aa (1), ef \
         settings bb (2); export the time of one of them, with --since and --until\n"
    );
    // I10.19
    assert!(text.contains(&warned), "{text}");
}

/// Exports these requests.
fn exported(requests: &[LoggedRequest]) -> (String, Trace) {
    let directory = tempfile::tempdir().unwrap();
    let lines: Vec<String> = std::iter::once(json(&header())).chain(requests.iter().map(json)).collect();
    write(directory.path(), "decisions-1.jsonl.zst", &[frame(&lines)]);
    export(directory.path(), &[]).unwrap()
}

#[test]
fn i10_prompts_are_as_long_as_the_engines_reported() {
    let estimated = |at_ms: u64, tokens: u32, reported: Option<u32>, ids: &[u64]| {
        let mut logged = request(at_ms, tokens, ids);
        (logged.input_estimated, logged.outcome.prompt_reported) = (true, reported);
        logged
    };
    let first: Vec<u64> = (1..=10).collect();
    let second: Vec<u64> = (1..=5).chain(26..=32).collect();
    let third: Vec<u64> = (1..=5).chain([46]).collect();
    let (text, trace) = exported(&[
        estimated(0, 16_000, Some(300), &(1..=5).chain(900..1_800).collect::<Vec<_>>()),
        estimated(1, 160, Some(128), &first),
        estimated(2, 200, Some(150), &second),
        estimated(3, 100, None, &third),
    ]);
    let lengths: Vec<u32> = trace.requests.iter().map(|request| request.input_tokens).collect();
    // I10.15
    assert_eq!(lengths, [300, 128, 150, 100]);
    let [image, one, two, three] = &trace.requests[..] else { panic!("{trace:?}") };
    let shared = |other: &crate::trace::TraceRequest| {
        one.blocks.iter().zip(other.blocks.iter()).take_while(|(a, b)| a == b).count()
    };
    // I10.15: five blocks of 16 estimated tokens, of which engines counted four fifths, also in a prompt with
    // an image whose bytes are many more than its tokens
    assert_eq!([two, three, image].map(shared), [4; 3]);
    assert_eq!(one.blocks.len(), 8);
    let warning = "\nwarning: 1 prompts have a length that was estimated from their bytes; ";
    assert!(text.contains(warning), "{text}");
    // A tokenizer of the gateway counted the blocks. The engine knows the length.
    let mut counted = request(0, 48, &[1, 2, 3]);
    counted.outcome.prompt_reported = Some(50);
    let (text, trace) = exported(&[counted, request(1, 48, &[1, 2, 3])]);
    let [one, two] = &trace.requests[..] else { panic!("{trace:?}") };
    assert!(
        one.input_tokens == 50 && one.blocks[..3] == two.blocks[..] && !text.contains("warning"),
        "{text}"
    );
}

#[test]
fn i10_several_prompts_and_choices_are_not_one_long_prompt_or_answer() {
    let choices = LoggedRequest { choices: Some(4), output_tokens: 80, ..request(0, 40, &[1]) };
    let prompts = LoggedRequest { prompts: Some(2), ..request(1, 400, &[2]) };
    let embedding = LoggedRequest { output_tokens: 0, ..request(2, 40, &[3]) };
    let (text, trace) = exported(&[choices, prompts, embedding]);
    let answers: Vec<u32> = trace.requests.iter().map(|request| request.output_tokens).collect();
    // I10.16
    assert_eq!(answers, [20, 1]);
    for told in [
        "0 without a prompt, 1 with several prompts;",
        "\nwarning: 1 requests asked for several choices (`n`); the trace has one choice of each\n",
        "\nwarning: 1 answers have no output tokens, as those of embeddings; in the trace they have one\n",
    ] {
        assert!(text.contains(told), "{text}");
    }
}

#[test]
fn requests_that_say_nothing_of_an_answer_are_left_out_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let failed = LoggedOutcome { status: 502, code: "bad_upstream".into(), ..LoggedOutcome::default() };
    let gone =
        LoggedOutcome { status: 499, code: "client_closed".into(), e2e_ms: 5.0, ..LoggedOutcome::default() };
    let lines = [
        json(&header()),
        json(&request(0, 20, &[1])),
        json(&LoggedRequest { decisions: vec![], ..request(1, 20, &[1]) }),
        json(&LoggedRequest { output_tokens: 0, outcome: failed, ..request(2, 20, &[1]) }),
        json(&LoggedRequest { outcome: gone, ..request(3, 20, &[1]) }),
        json(&LoggedRequest { model: "other".into(), ..request(4, 20, &[1]) }),
        json(&request(5, 0, &[])),
        json(&request(60_000, 20, &[1])),
    ];
    write(directory.path(), "decisions-1.jsonl.zst", &[frame(&lines)]);
    let args = ["--model", "m", "--since", "2023-11-14T22:13:20Z", "--until", "2023-11-14T22:14:20Z"];
    let (text, trace) = export(directory.path(), &args).unwrap();
    assert_eq!(trace.requests.len(), 2, "one answered, one whose client left after its first token");
    let expected = "2 by --model, --since or --until, 1 that no worker served, 1 that failed before their first token, \
                    1 without a prompt, 0 with several prompts";
    assert!(text.contains(expected), "{text}");
    for (flag, value) in [("--since", "yesterday"), ("--until", "5y")] {
        let error = export(directory.path(), &[flag, value]).unwrap_err();
        assert!(error.contains("is neither a time such as"), "{error}");
    }
    let error = export(directory.path(), &["--until", "20000d"]).unwrap_err();
    assert!(error.contains("1 files contain no request to export (7 by"), "{error}");
}

#[test]
fn a_malformed_line_is_named_with_file_line_and_field_or_skipped_and_counted() {
    let good = json(&request(0, 20, &[1]));
    let table = [
        ("{\"arrived_at_us\": 5}".to_owned(), "line 3: missing field `endpoint`"),
        (
            good.replace("\"output_tokens\":5", "\"output_tokens\":-5"),
            "line 3: `output_tokens`: invalid value",
        ),
        (good.replace("\"status\":200", "\"status\":\"ok\""), "line 3: `outcome.status`: invalid type"),
        ("nothing".to_owned(), "line 3: "),
        (format!("\"{}\"", "x".repeat(5 << 20)), "line 3: is longer than 4194304 bytes"),
    ];
    for (bad, problem) in table {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "decisions-1.jsonl.zst", &[frame(&[json(&header()), good.clone(), bad])]);
        write(directory.path(), "decisions-2.jsonl.zst", &[frame(&[json(&header()), good.clone()])]);
        let error = export(directory.path(), &[]).unwrap_err();
        assert!(error.contains("decisions-1.jsonl.zst, ") && error.contains(problem), "{error}");
        let (text, trace) = export(directory.path(), &["--skip-bad"]).unwrap();
        assert_eq!(trace.requests.len(), 2, "{text}");
        assert!(!text.contains("; 0 malformed"), "{text}");
    }
    let other = FileHeader { version: 2, ..header() };
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), "decisions-1.jsonl.zst", &[frame(&[json(&other), good])]);
    let error = export(directory.path(), &[]).unwrap_err();
    assert!(error.contains("line 1: `version` is 2; this command reads version 1"), "{error}");
}

#[test]
fn a_file_that_ends_within_a_frame_is_read_up_to_it_and_a_broken_one_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let lines = |from: u64| (from..from + 50).map(|at| json(&request(at, 20, &[at]))).collect::<Vec<_>>();
    let whole = frame(&[vec![json(&header())], lines(0)].concat());
    let second = frame(&lines(100));
    for cut in [1, second.len() / 2, second.len() - 1] {
        write(directory.path(), "decisions-1.jsonl.zst", &[whole.clone(), second[..cut].to_vec()]);
        let (text, trace) = export(directory.path(), &[]).unwrap();
        // I10.5
        assert!((50..=100).contains(&trace.requests.len()), "{cut}: {}", trace.requests.len());
        assert!(text.contains("1 files end within a frame"), "{text}");
    }
    let mut broken = second;
    let half = broken.len() / 2;
    broken[half..].fill(0xff);
    write(directory.path(), "decisions-1.jsonl.zst", &[whole, broken, frame(&lines(200))]);
    let error = export(directory.path(), &[]).unwrap_err();
    assert!(
        error.contains("decisions-1.jsonl.zst, line ") && error.contains("cannot be decompressed"),
        "{error}"
    );
    let (text, _) = export(directory.path(), &["--skip-bad"]).unwrap();
    assert!(text.contains("; 0 malformed lines"), "{text}");
    let damaged = "decisions-1.jsonl.zst was read up to byte ";
    assert!(text.contains(damaged) && text.contains(" cannot be decompressed: "), "{text}");
}

#[test]
fn a_prompt_without_tokens_shares_what_the_router_saw_as_shared() {
    let directory = tempfile::tempdir().unwrap();
    let text: Vec<u8> = (0..60_000_u32).map(|place| (place % 251) as u8).collect();
    let mut other = text.clone();
    other[40_000] ^= 1;
    let of = |bytes: &[u8]| LoggedRequest {
        blocks: LoggedBlocks::of(&Prefix::of_bytes(bytes, 64, &Salt::default()), |id| id),
        ..request(0, 15_000, &[])
    };
    let lines = [json(&header()), json(&of(&text)), json(&of(&other))];
    write(directory.path(), "decisions-1.jsonl.zst", &[frame(&lines)]);
    let (_, trace) = export(directory.path(), &[]).unwrap();
    let [one, two] = &trace.requests[..] else { panic!("{trace:?}") };
    let same = one.blocks.iter().zip(two.blocks.iter()).take_while(|(a, b)| a == b).count();
    // 625 blocks are equal; beyond 256, one block in 32 has a hash.
    assert_eq!(same, 256 + (625 - 256) / 32 * 32);
    assert!(one.blocks[same..].iter().all(|block| !two.blocks.contains(block)));
}

#[test]
fn only_files_of_a_log_are_read_in_order() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["decisions-2.jsonl.zst", "salt", "decisions-1.jsonl.zst", "decisions-1.tmp"] {
        fs::write(directory.path().join(name), "").unwrap();
    }
    let found = reader::files(directory.path()).unwrap();
    let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["decisions-1.jsonl.zst", "decisions-2.jsonl.zst"]);
    let mut stats = ReadStats::default();
    reader::read(&found[0], false, &mut stats, |_, _| {}).unwrap();
    // The gateway was killed before it wrote the first frame.
    assert_eq!((stats.files, stats.skipped, stats.cut_files), (1, 0, 1));
    let error = reader::files(&directory.path().join("none")).unwrap_err().to_string();
    assert!(error.contains("none: No such file"), "{error}");
}
