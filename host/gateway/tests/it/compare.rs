//! `pointsman trace` and `pointsman compare` as a user runs them.

#![allow(clippy::expect_used, clippy::indexing_slicing, reason = "helpers of tests")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::{Command, Output, Stdio},
};

use pointsman_test_guests::HOSTILE;
use serde_json::Value;

fn pointsman(directory: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(crate::programs::pointsman());
    command.current_dir(directory).args(args).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Generates a trace of system prompts in the directory.
fn generate(directory: &Path) {
    let args = ["trace", "generate", "system-prompts", "--requests", "200", "--count", "40", "-o", "t.jsonl"];
    let output = pointsman(directory, &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("t.jsonl: 200 requests in"), "{}", text(&output.stdout));
}

#[test]
fn arms_are_compared_in_a_table_a_page_and_json_and_equal_runs_give_equal_bytes() {
    let directory = tempfile::tempdir().expect("a directory");
    generate(directory.path());
    let run = |json: &str| {
        let mut args = vec!["compare", "--trace", "t.jsonl", "--trace-block", "64", "--engines", "4"];
        args.extend(["--arm", "kv-aware", "--arm", "rr=round-robin", "--seeds", "2", "--jitter-ms", "50"]);
        args.extend(["--html", "r.html", "--json", json]);
        let output = pointsman(directory.path(), &args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let table = run("a.json");
    let row = |label: &str| table.lines().find(|line| line.starts_with(label)).expect("a row").to_owned();
    assert!(row("kv-aware").contains("p90 ±"), "{table}");
    assert!(row("rr:").contains("of requests went elsewhere than with kv-aware"), "{table}");
    run("b.json");
    let read = |name: &str| fs::read(directory.path().join(name)).expect("written");
    assert_eq!(read("a.json"), read("b.json"));
    let report: Value = serde_json::from_slice(&read("a.json")).expect("JSON");
    let hits = |arm: usize| {
        report["comparisons"][0]["arms"][arm]["figures"]["hit_rate"]["mean"].as_f64().expect("a number")
    };
    assert!(hits(0) > hits(1), "{} {}", hits(0), hits(1));
    let comparison = &report["comparisons"][0];
    let share =
        |arm: usize| comparison["arms"][arm]["percent_of_relaxation"]["mean"].as_f64().expect("a number");
    assert!(share(0) > share(1) && share(0) <= 100.0, "{} {}", share(0), share(1));
    assert!(row("kv-aware").contains(&format!(" {:.1} ", share(0))), "{table}");
    let page = text(&read("r.html"));
    assert!(page.starts_with("<!doctype html>") && page.matches("<svg").count() == 6, "{page}");
    assert!(!page.contains("http") && !page.contains("src="), "the page needs no other file");
}

/// Browsers that the report is looked at in; the first that exists is used.
const BROWSERS: [&str; 3] = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

/// Shows the report at 1,280 pixels in both colour schemes, and writes down what the browser made of it. A
/// frame has the scheme of the element that embeds it.
const MEASURE: &str = r#"<!doctype html><body>
<iframe id="light" style="color-scheme:light" width="1280" height="900" src="r.html"></iframe>
<iframe id="dark" style="color-scheme:dark" width="1280" height="900" src="r.html"></iframe>
<script>addEventListener("load", () => {
  document.body.textContent = JSON.stringify(["light", "dark"].map((id) => {
    const view = document.getElementById(id).contentWindow, page = view.document;
    const colour = (of, name) => view.getComputedStyle(of)[name];
    const all = (selector) => [...page.querySelectorAll(selector)];
    return {
      width: page.documentElement.scrollWidth,
      right: Math.max(...all(".ranking, .figures").map((table) => table.getBoundingClientRect().right)),
      scrolls: all(".wide").filter((part) => part.scrollWidth > part.clientWidth).length,
      arms: new Set(all(".ranking .arm").map((square) => colour(square, "color"))).size,
      strokes: new Set(all("svg path[fill=none]").map((line) => colour(line, "stroke"))).size,
      page: colour(page.body, "backgroundColor"), text: colour(page.querySelector("svg text"), "fill"),
    };
  }));
});</script>"#;

#[test]
fn a_report_of_ten_arms_fits_1280_pixels_with_ten_colours_in_both_schemes() {
    let directory = tempfile::tempdir().expect("a directory");
    generate(directory.path());
    let mut args =
        vec!["compare", "--trace", "t.jsonl", "--trace-block", "64", "--engines", "4", "--speed", "1,2"];
    let arms: Vec<String> = (0..10).map(|arm| format!("an-arm-with-a-long-name-{arm}=random")).collect();
    args.extend(arms.iter().flat_map(|arm| ["--arm", arm]));
    args.extend(["--seeds", "2", "--jitter-ms", "50", "--html", "r.html"]);
    let output = pointsman(directory.path(), &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told = text(&output.stdout);
    assert!(told.contains("No difference found by p90 TTFT among an-arm-with-a-long-name-0 ("), "{told}");
    assert!(told.contains("share, %") && told.contains("4 aggregated"), "{told}");
    let Some(browser) = BROWSERS.iter().find(|browser| Path::new(browser).exists()) else {
        eprintln!("the report was not looked at: Chromium is not installed");
        return;
    };
    let measure = directory.path().join("measure.html");
    fs::write(&measure, MEASURE).expect("");
    let shown = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"])
        .args(["--virtual-time-budget=20000", "--dump-dom"])
        .arg(format!("file://{}", measure.display()))
        .arg(format!("--user-data-dir={}", directory.path().join("profile").display()))
        .output()
        .expect("the browser runs");
    let shown = text(&shown.stdout);
    let json = shown.split_once("<body>").and_then(|(_, rest)| rest.split_once("</body>"));
    let seen: Value = serde_json::from_str(json.expect("a body").0.trim()).expect("JSON");
    let page = |scheme: usize| (seen[scheme]["page"].as_str(), seen[scheme]["text"].as_str());
    for scheme in [0, 1] {
        let of = |name: &str| seen[scheme][name].as_f64().expect("a number");
        assert!(of("width") <= 1_280.0 && of("right") <= 1_280.0 && of("scrolls") < 0.5, "{seen}");
        assert!((of("arms") - 10.0).abs() < 0.5 && (of("strokes") - 10.0).abs() < 0.5, "{seen}");
    }
    assert!(
        page(0).0 == Some("rgb(255, 255, 255)") && page(0).0 != page(1).0 && page(0).1 != page(1).1,
        "{seen}"
    );
}

#[test]
fn what_is_not_usable_is_named_and_ends_with_code_2() {
    let directory = tempfile::tempdir().expect("a directory");
    generate(directory.path());
    fs::write(
        directory.path().join("bad.jsonl"),
        "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1}\nhello\n",
    )
    .expect("");
    fs::write(directory.path().join("fleet.toml"), "block_tokens = 64\n[[engines]]\ncount = 0\n").expect("");
    fs::write(directory.path().join("no.wasm"), "hello").expect("");
    let table: [(&[&str], &str); 9] = [
        (&["--trace", "t.jsonl", "--speed", "1e-300", "--arm", "kv"], "1e-300 is not within 1e-6 to 1e9"),
        (
            &["--trace", "t.jsonl", "--trace-block", "64", "--arm", "fastest"],
            "\"fastest\" is neither a native mode",
        ),
        (
            &["--trace", "t.jsonl", "--trace-block", "64", "--arm", "./no.wasm"],
            "./no.wasm: refused (not_wasm)",
        ),
        (&["--trace", "t.jsonl", "--arm", "kv"], "t.jsonl, line 1: `hash_ids` has"),
        (&["--trace", "bad.jsonl", "--arm", "kv"], "bad.jsonl, line 2: "),
        (&["--trace", "none.jsonl", "--arm", "kv"], "none.jsonl: No such file"),
        (&["--trace", "t.jsonl", "--arm", "kv", "--html", "none/r.html"], "its directory does not exist"),
        (&["--trace", "t.jsonl", "--arm", "kv", "--step-time", "fast"], "expected one of dynamo, "),
        (
            &["--trace", "bad.jsonl", "--skip-bad", "--fleet", "fleet.toml", "--arm", "kv"],
            "fleet.toml:3:1: engines[0].count: 0",
        ),
    ];
    for (args, message) in table {
        let output = pointsman(directory.path(), &[&["compare"], args].concat());
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {told}");
        assert!(told.contains(message), "{args:?}: {told}");
    }
    // Each way to get measurements is named.
    let output = pointsman(directory.path(), &["calibrate"]);
    let told = text(&output.stderr);
    assert!(["--url", "--from", "--log"].iter().all(|flag| told.contains(flag)), "{told}");
    let args = ["compare", "--trace", "bad.jsonl", "--skip-bad", "--arm", "kv", "--seeds", "1"];
    let output = pointsman(directory.path(), &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("1 malformed lines of the trace were left out"));
}

#[test]
fn an_import_names_its_format_and_models_and_does_not_write_over_what_it_reads() {
    let directory = tempfile::tempdir().expect("a directory");
    let line =
        |session: &str, rest: &str| format!("{{\"session_id\":\"{session}\",\"output_length\":9,{rest}}}\n");
    let first = "\"model\":\"a\",\"input_length\":900,\"hash_ids\":[1,2]";
    let later = "\"model\":\"a\",\"input_length\":100,\"hash_ids\":[3],\"delay\":5";
    let sessions = line("s", first) + &line("s", later) + &line("t", &first.replace("\"a\"", "\"b\""));
    fs::write(directory.path().join("s.jsonl"), &sessions).expect("written");
    let import = |args: &[&str]| {
        let output = pointsman(directory.path(), &[&["trace", "import", "s.jsonl", "-o"], args].concat());
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, told, _) = import(&["out.jsonl"]);
    let models = "the trace has the models a (2 requests), b (1 requests); they are simulated as one model";
    assert!(told.starts_with(&format!("warning: {models} on all engines: --model selects one\n")), "{told}");
    assert!(code == Some(0) && told.contains("3 requests in 0 s, read as mooncake-delta, blocks"), "{told}");
    let (_, told, _) = import(&["a.jsonl", "--model", "a", "--format", "mooncake"]);
    assert!(told.starts_with("a.jsonl: 2 requests in 0 s, read as mooncake, "), "{told}");
    for (args, message) in [
        (&["./s.jsonl"][..], "cannot write ./s.jsonl: it is the trace that is read"),
        (&["/dev/full"][..], "cannot write /dev/full: No space left"),
        (&["c.jsonl", "--model", "c"][..], "--model c: s has the models a (2 requests), b (1 requests)"),
    ] {
        let (code, _, told) = import(args);
        assert!(code == Some(2) && told.contains(message), "{told}");
    }
    assert_eq!(fs::read_to_string(directory.path().join("s.jsonl")).expect("it stays"), sessions);
    // A device is not replaced by a file.
    let link = directory.path().join("full");
    std::os::unix::fs::symlink("/dev/full", &link).expect("a link");
    let args = ["compare", "--trace", "s.jsonl", "--arm", "kv", "--seeds", "1", "--json", "full"];
    let output = pointsman(directory.path(), &args);
    let (table, told) = (text(&output.stdout), text(&output.stderr));
    assert!(table.contains(models) && told.contains("cannot write full: No space left"), "{table}{told}");
    assert!(link.is_symlink());
}

#[test]
fn loads_and_step_times_are_repeated_and_the_highest_load_is_found() {
    let directory = tempfile::tempdir().expect("a directory");
    generate(directory.path());
    let mut args =
        vec!["compare", "--trace", "t.jsonl", "--trace-block", "64", "--engines", "2", "--limit", "60"];
    args.extend([
        "--arm",
        "kv",
        "--arm",
        "round-robin",
        "--seeds",
        "2",
        "--jitter-ms",
        "50",
        "--speed",
        "1,4",
    ]);
    args.extend([
        "--step-time",
        "distserve-opt-13b-a100",
        "--max-load",
        "--json",
        "r.json",
        "--html",
        "r.html",
    ]);
    let output = pointsman(directory.path(), &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    // Two seeds of 60 requests show no difference, and the report says so.
    assert!(table.contains("No arm is measurably the best in any of the 4 comparisons."), "{table}");
    let slo = "Highest load within the SLO (TTFT of at most 2000 ms and ITL of at most 50 ms for 95 % of the";
    assert!(table.contains(&format!("{slo} requests) on 2 engines")), "{table}");
    let report: Value =
        serde_json::from_slice(&fs::read(directory.path().join("r.json")).expect("written")).expect("JSON");
    let comparisons = report["comparisons"].as_array().expect("an array");
    let settings: Vec<(&str, f64)> = comparisons
        .iter()
        .map(|one| (one["step_time"].as_str().unwrap_or_default(), one["speed"].as_f64().unwrap_or_default()))
        .collect();
    let distserve = "distserve-opt-13b-a100";
    assert_eq!(settings, [("dynamo", 1.0), ("dynamo", 4.0), (distserve, 1.0), (distserve, 4.0)]);
    let highest =
        |place: usize| report["max_load"][place]["arms"][0]["per_s"]["mean"].as_f64().expect("a number");
    // An A100 with OPT-13B is slower than the engine of Dynamo's mocker.
    assert!(highest(0) > highest(1) && highest(1) > 0.0, "{} {}", highest(0), highest(1));
    let page = fs::read_to_string(directory.path().join("r.html")).expect("written");
    assert!(page.contains("Goodput over load") && page.contains("Highest load within the SLO"), "{page}");
}

#[test]
fn a_policy_that_traps_or_loops_is_an_outcome_of_the_report() {
    let directory = tempfile::tempdir().expect("a directory");
    generate(directory.path());
    fs::write(directory.path().join("hostile.wasm"), HOSTILE).expect("written");
    let mut args =
        vec!["compare", "--trace", "t.jsonl", "--trace-block", "64", "--engines", "2", "--limit", "30"];
    args.extend([
        "--arm",
        "traps=./hostile.wasm@{\"mode\":\"trap\",\"after\":20}",
        "--arm",
        "kv",
        "--seeds",
        "1",
    ]);
    args.extend(["--arm", "answers=./hostile.wasm@{\"mode\":\"error\",\"after\":20}"]);
    let output = pointsman(directory.path(), &args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for arm in ["traps", "answers"] {
        let told = format!("warning: \"{arm}\": its policy abstained or failed for ");
        assert!(table.contains(&told), "{arm}: {table}");
    }
}

#[test]
fn ctrl_c_ends_with_the_seeds_that_are_over_and_code_130() {
    let directory = tempfile::tempdir().expect("a directory");
    generate(directory.path());
    let mut command = Command::new(crate::programs::pointsman());
    command.current_dir(directory.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.args(["compare", "--trace", "t.jsonl", "--trace-block", "64", "--limit", "20", "--engines", "2"]);
    command.args(["--arm", "kv", "--seeds", "1000", "--json", "r.json"]);
    let mut child = command.spawn().expect("the binary runs");
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    let mut told = String::new();
    // Some of the runs are over.
    let is_progress = |line: &str| line.contains(" requests in all runs") && !line.contains(": 0 % ");
    while !told.lines().any(is_progress) {
        assert!(stderr.read_line(&mut told).expect("read") > 0, "the runs ended before: {told}");
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    assert!(killed.success(), "the runs ended before");
    let output = child.wait_with_output().expect("it ends");
    stderr.read_to_string(&mut told).expect("read");
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(130), "{told}");
    assert!(told.contains("interrupted: the runs end"), "{told}");
    assert!(
        table.contains("warning: interrupted: ") && table.contains("of 1000 seeds were completed"),
        "{table}"
    );
    let names: Vec<_> =
        fs::read_dir(directory.path()).expect("read").flatten().map(|e| e.file_name()).collect();
    assert!(names.len() == 2 && names.iter().any(|name| name == "r.json"), "{names:?}");
}
