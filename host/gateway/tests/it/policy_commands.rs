//! The commands of policy authors, run as they run them: the real binary on compiled policies.

#![allow(clippy::expect_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// Result of one run of the binary.
struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

fn pointsman<const N: usize>(dir: &Path, arguments: [&str; N]) -> Ran {
    let mut command = Command::new(crate::programs::pointsman());
    let output = command.current_dir(dir).arg("policy").args(arguments).output().expect("the binary runs");
    Ran {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).expect("text"),
        err: String::from_utf8(output.stderr).expect("text"),
    }
}

fn embedded(dir: &Path, name: &str) {
    let bytes = pointsman_embedded_policies::by_name(name).expect("embedded");
    fs::write(dir.join("policy.wasm"), bytes).expect("written");
}

fn policies() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies")
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

#[test]
fn all_shipped_cases_pass_on_the_compiled_component() {
    let dir = folder();
    for (name, cases) in [
        ("least-loaded", 6),
        ("kv-aware", 7),
        ("predicted-latency", 25),
        ("queue-kv-prefix", 29),
        ("cache-aware", 17),
        ("longest-prefix", 10),
        ("conditional-disagg", 16),
        ("predicted-disagg", 24),
        ("formula", 7),
    ] {
        embedded(dir.path(), name);
        let file = policies().join(name).join("cases.toml");
        let ran = pointsman(dir.path(), ["test", "policy.wasm", "--cases", file.to_str().expect("text")]);
        assert_eq!(ran.code, Some(0), "{name}: {}{}", ran.out, ran.err);
        assert_eq!(ran.out.lines().filter(|line| line.starts_with("ok ")).count(), cases, "{}", ran.out);
        assert!(ran.out.ends_with(&format!("{cases} passed, 0 failed\n")), "{}", ran.out);
    }
}

#[test]
fn a_failed_case_reports_the_expected_and_the_actual_answer() {
    let dir = folder();
    embedded(dir.path(), "least-loaded");
    let cases = "[[case]]\nname = \"right\"\nrows = [{ active-requests = 3 }, {}]\nexpect = { row = 1 }\n\
                 [[case]]\nname = \"wrong row\"\nrows = [{ active-requests = 3 }, {}]\nexpect = { row = 0 }\n\
                 [[case]]\nname = \"wrong kind\"\nrows = [{}]\nexpect = { keep = [0] }\n\
                 [[case]]\nname = \"not refused\"\nsettings = { engine-queue = 1 }\nrows = [{}]\n\
                 expect = { refused = \"\" }\n\
                 [[case]]\nname = \"refused\"\nsettings = { engine-queue = -1 }\nrows = [{}]\n\
                 expect = { row = 0 }\n";
    fs::write(dir.path().join("cases.toml"), cases).expect("written");
    let ran = pointsman(dir.path(), ["test", "policy.wasm"]);
    assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
    let expected = "ok      right\n\
                    FAILED  wrong row: expected row 0, got row 1\n\
                    FAILED  wrong kind: expected keep [0], got row 0\n\
                    FAILED  not refused: expected settings refused with \"\", got row 0\n\
                    FAILED  refused: expected row 0, got settings refused: engine-queue: -1 is not a \
                    finite number of 0 or more\n1 passed, 4 failed\n";
    assert_eq!(ran.out, expected);
}

#[test]
fn a_fact_that_the_policy_does_not_ask_for_is_a_warning() {
    let dir = folder();
    embedded(dir.path(), "least-loaded");
    let cases = "[[case]]\nname = 'c'\nrequest = { n = 1 }\nrows = [{ kv-usage = 0.5 }, { engine-queue = 1 }]\nexpect = { row = 0 }\n";
    fs::write(dir.path().join("cases.toml"), cases).expect("written");
    let settings = r#"{"engine-queue":1.0}"#;
    let ran = pointsman(dir.path(), ["test", "policy.wasm", "--settings", settings]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    for fact in ["request fact \"n\"", "worker fact \"kv-usage\""] {
        let line = format!("warning c: the policy does not ask for the {fact}, so it has no effect\n");
        assert!(ran.out.contains(&line), "{}", ran.out);
    }
    assert!(!ran.out.contains("engine-queue"), "{}", ran.out);
}

#[test]
fn cases_are_looked_for_beside_the_component_before_it_is_compiled_and_a_newer_source_is_a_warning() {
    let dir = folder();
    let project = dir.path().join("mine");
    fs::create_dir(&project).expect("a folder");
    embedded(&project, "least-loaded");
    let test = || pointsman(dir.path(), ["test", "mine/policy.wasm"]);
    let ran = test();
    let missing = "cannot read the cases cases.toml: No such file or directory (os error 2); name them with --cases FILE";
    // O7.1
    assert!(ran.code == Some(2) && ran.err.contains(missing), "{}{}", ran.out, ran.err);
    fs::write(project.join("cases.toml"), "[[case]]\nname = 'c'\nrows = [{}]\nexpect = { row = 0 }\n")
        .expect("");
    let ran = test();
    // O7.1
    assert_eq!((ran.code, &*ran.out), (Some(0), "ok      c\n1 passed, 0 failed\n"), "{}", ran.err);
    let source = fs::File::create(project.join("policy.py")).expect("a file");
    source.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(60)).expect("set");
    // O7.2
    let warning = "warning: mine/policy.py is newer than mine/policy.wasm: build the policy again\n";
    assert!(test().out.starts_with(warning), "{}", test().out);
    let ran = pointsman(dir.path(), ["test", "nofile.wasm"]);
    // O7.1
    assert!(ran.code == Some(2) && ran.err.contains("nofile.wasm: no such file"), "{}", ran.err);
}

#[test]
fn inspect_and_test_refuse_what_live_would_refuse_and_tell_a_panic_with_its_place() {
    let dir = folder();
    fs::write(dir.path().join("policy.wasm"), pointsman_test_guests::HOSTILE).expect("written");
    let case = |mode: &str, expect: &str| {
        format!(
            "[[case]]\nname = '{mode}'\nsettings = {{ mode = '{mode}' }}\nrows = [{{}}]\nexpect = {{ {expect} }}\n"
        )
    };
    let odd = "a trial call with 1 made-up candidate failed: invalid answer: shed status 200 is not allowed: use \
               429, 503 or 529";
    let panic = "panicked at tests/guests/hostile/src/lib.rs:";
    for (mode, expect, reason) in [("shed", "shed = 200", odd), ("trap", "row = 0", panic)] {
        fs::write(dir.path().join("cases.toml"), case(mode, expect)).expect("written");
        let ran = pointsman(dir.path(), ["test", "policy.wasm"]);
        assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
        assert!(ran.out.contains(reason), "{}", ran.out);
        let settings = format!("{{\"mode\":\"{mode}\"}}");
        let ran = pointsman(dir.path(), ["inspect", "policy.wasm", "--settings", &settings]);
        assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
        assert!(ran.out.contains("admitted  no (probe)") && ran.out.contains(reason), "{}", ran.out);
        // T3.2
        assert!(!ran.out.contains("repeat"), "{}", ran.out);
    }
    let ran = pointsman(dir.path(), ["inspect", "policy.wasm", "--settings", r#"{"mode":"trap"}"#]);
    assert!(ran.out.contains(": as the test wants it"), "{}", ran.out);
}

#[test]
fn t3_a_refusal_names_the_types_that_differ_and_the_limit_that_stopped_the_policy() {
    let dir = folder();
    let hostile = pointsman_test_guests::HOSTILE;
    // The field `rows` of the record `call`, a `u32` in the contract, is an `s32` in this component.
    let (ours, theirs) = (b"\x04rows\x79", b"\x04rows\x7a");
    let mut other = hostile.to_vec();
    let places: Vec<usize> =
        (0..other.len() - ours.len()).filter(|at| other[*at..].starts_with(ours)).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|at| other[*at..*at + theirs.len()].copy_from_slice(theirs));
    fs::write(dir.path().join("other.wasm"), other).expect("written");
    let ran = pointsman(dir.path(), ["inspect", "other.wasm"]);
    let [begin, end] = [
        "admitted  no (contract): does not fit the contract pointsman:policy@0.1: the types of its exports differ: ",
        "; build it against the `wit/policy.wit` of this release\n",
    ];
    // T3.1
    assert!(
        ran.code == Some(1) && ran.out.contains(begin) && ran.out.ends_with(end),
        "{}{}",
        ran.out,
        ran.err
    );

    fs::write(dir.path().join("policy.wasm"), hostile).expect("written");
    for (mode, limit, expected) in [
        ("spin", "--deadline-ms=3", "failed: stopped after 3 ms of CPU time (policies.deadline)\n"),
        (
            "slow-configure",
            "--deadline-ms=3",
            "stopped after 50 ms of CPU time (policies.configure_deadline)\n",
        ),
        (
            "hog",
            "--memory-bytes=8388608",
            "failed: needs more than 8388608 bytes of memory (policies.memory_bytes)\n",
        ),
    ] {
        let settings = format!("{{\"mode\":\"{mode}\"}}");
        let ran = pointsman(dir.path(), ["inspect", "policy.wasm", "--settings", &settings, limit]);
        // T3.3
        assert!(ran.code == Some(1) && ran.out.ends_with(expected), "{}{}", ran.out, ran.err);
    }
    let case = "[[case]]\nname = 'c'\nrows = [{}]\nexpect = { row = 0 }\n";
    fs::write(dir.path().join("cases.toml"), case).expect("written");
    let ran = pointsman(dir.path(), ["test", "policy.wasm", "--memory-bytes", "1000"]);
    let expected = "bytes of declared memory; the limit is 1000; raise `policies.memory_bytes` (`--memory-bytes` of \
                    `pointsman policy`), or make the policy need less";
    // T3.4
    assert!(ran.code == Some(2) && ran.err.contains(expected), "{}", ran.err);
}

#[test]
fn t4_a_case_with_two_answers_and_a_negative_number_are_named() {
    let dir = folder();
    embedded(dir.path(), "least-loaded");
    let case = "[[case]]\nname = \"c\"\nrows = [{}]\nexpect = { row = 0, shed = 429 }\n";
    fs::write(dir.path().join("cases.toml"), case).expect("written");
    let ran = pointsman(dir.path(), ["test", "policy.wasm"]);
    let expected = "case \"c\": expect: has 2 answers (row, shed); leave one of them";
    // T4.2
    assert!(ran.code == Some(2) && ran.err.contains(expected), "{}", ran.err);
    let ran = pointsman(dir.path(), ["bench", "policy.wasm", "--seconds", "-1"]);
    // T4.1
    assert!(ran.code == Some(2) && ran.err.contains(": -1 is not within 0.001 to 3600"), "{}", ran.err);
    for (arguments, expected) in [
        (&["trace", "generate", "--burstiness", "-1"][..], ": -1 is not within 1e-6 to 1e9"),
        (&["decisions", "--last", "-1"], ": -1 is not in 1..=1000"),
    ] {
        let output = Command::new(crate::programs::pointsman()).args(arguments).output().expect("it runs");
        let text = String::from_utf8(output.stderr).expect("text");
        // T4.1
        assert!(output.status.code() == Some(2) && text.contains(expected), "{text}");
    }
}

#[test]
fn new_scripts_pass_their_unit_tests_without_a_component() {
    let dir = folder();
    let runs = [("python", &["python3", "test_policy.py"][..]), ("js", &["node", "--test"])];
    for (lang, run) in runs {
        if Command::new(run[0]).arg("--version").output().is_err() {
            println!("skipped: {} is not installed", run[0]);
            continue;
        }
        for world in WORLDS {
            let name = format!("{lang}-{world}");
            let ran = pointsman(dir.path(), ["new", &name, "--world", world, "--lang", lang]);
            assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
            let output = Command::new(run[0]).args(&run[1..]).current_dir(dir.path().join(&name)).output();
            let output = output.expect("it ran before");
            let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            assert!(output.status.success(), "{name}: {text}");
        }
    }
}

#[test]
fn settings_of_the_command_line_apply_to_cases_without_settings() {
    let dir = folder();
    embedded(dir.path(), "least-loaded");
    let cases = "[[case]]\nname = \"theirs\"\nrows = [{ engine-queue = 3 }, { active-requests = 1 }]\n\
                 expect = { row = 1 }\n\
                 [[case]]\nname = \"its own\"\nsettings = {}\nrows = [{ engine-queue = 3 }, { active-requests = 1 }]\n\
                 expect = { row = 0 }\n";
    fs::write(dir.path().join("cases.toml"), cases).expect("written");
    let ran = pointsman(dir.path(), ["test", "policy.wasm", "--settings", r#"{"engine-queue":1}"#]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    let ran = pointsman(dir.path(), ["test", "policy.wasm", "--settings", r#"{"queue":1}"#]);
    assert_eq!(ran.code, Some(2), "{}", ran.out);
    assert!(ran.err.contains("policy.wasm: refused (configure): "), "{}", ran.err);
}

#[test]
fn a_file_that_cannot_be_tested_exits_with_2_and_the_reason() {
    let dir = folder();
    fs::write(dir.path().join("policy.wasm"), "no wasm").expect("written");
    let cases = |row: &str| {
        let text = format!("[[case]]\nname = \"c\"\nrows = [{{ {row} }}]\nexpect = {{ row = 0 }}\n");
        fs::write(dir.path().join("cases.toml"), text).expect("written");
    };
    cases("active-requests = 1");
    for command in ["test", "bench"] {
        let ran = pointsman(dir.path(), [command, "policy.wasm"]);
        assert_eq!(ran.code, Some(2), "{}", ran.out);
        assert!(ran.err.contains("policy.wasm: refused (not_wasm): not WebAssembly"), "{}", ran.err);
    }
    cases("activ-requests = 1");
    let ran = pointsman(dir.path(), ["test", "policy.wasm"]);
    assert_eq!(ran.code, Some(2), "{}", ran.out);
    assert!(
        ran.err.contains(
            "cases.toml: case \"c\": rows[0].activ-requests: unknown worker fact; \
             did you mean \"active-requests\"?"
        ),
        "{}",
        ran.err
    );
    let ran = pointsman(dir.path(), ["test", "policy.wasm", "--cases", "none.toml"]);
    assert_eq!((ran.code, ran.err.contains("none.toml")), (Some(2), true), "{}", ran.err);
}

#[test]
fn bench_measures_every_row_count_and_judges_the_budget() {
    let dir = folder();
    for name in ["least-loaded", "kv-aware", "predicted-latency", "conditional-disagg", "predicted-disagg"] {
        embedded(dir.path(), name);
        let ran = pointsman(dir.path(), ["bench", "policy.wasm", "--rows", "1,64", "--seconds", "0.05"]);
        assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
        for part in [
            name,
            " bytes\n",
            " ms from bytes to ready",
            "p50 us",
            "\n     1 ",
            "\n    64 ",
            "budget  64 rows: p50 ",
        ] {
            assert!(ran.out.contains(part), "{part}: {}", ran.out);
        }
        assert!(ran.out.contains("budget  1024 rows: not measured"), "{}", ran.out);
    }
    let ran = pointsman(dir.path(), ["bench", "policy.wasm", "--rows", "0"]);
    assert_eq!(ran.code, Some(2), "{}", ran.out);
}

#[test]
fn test_and_bench_tell_a_policy_that_sends_everything_to_one_worker() {
    let dir = folder();
    let told = |cases: &Path| {
        let cases = cases.to_str().expect("text");
        let tested = pointsman(dir.path(), ["test", "policy.wasm", "--cases", cases]);
        let bench = pointsman(dir.path(), ["bench", "policy.wasm", "--rows", "8", "--seconds", "0.01"]);
        assert_eq!((tested.code, bench.code), (Some(0), Some(0)), "{cases}: {}{}", tested.err, bench.err);
        let warns =
            |ran: &Ran| ran.out.contains("warning it chose row 0 of 8 equal workers in all of 64 calls");
        [warns(&tested), warns(&bench)]
    };
    let one = dir.path().join("cases.toml");
    fs::write(&one, "[[case]]\nname = \"one\"\nrows = [{}]\nexpect = { row = 0 }\n").expect("written");
    fs::write(dir.path().join("policy.wasm"), pointsman_test_guests::HOSTILE).expect("written");
    // F10.2
    assert_eq!(told(&one), [true, true]);
    for name in
        ["least-loaded", "kv-aware", "predicted-latency", "queue-kv-prefix", "cache-aware", "longest-prefix"]
    {
        embedded(dir.path(), name);
        // F10.2
        assert_eq!(told(&policies().join(name).join("cases.toml")), [false, false], "{name}");
    }
}

#[test]
fn new_creates_a_project_and_refuses_a_directory_that_is_not_empty() {
    let dir = folder();
    let ran = pointsman(dir.path(), ["new", "my-rule", "--world", "scorer"]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    let files = ["Cargo.toml", ".cargo/config.toml", ".gitignore", "src/lib.rs", "cases.toml", "README.md"];
    for file in files.into_iter().chain(["sdk/Cargo.toml", "sdk/src/lib.rs", "sdk/wit/policy.wit"]) {
        assert!(dir.path().join("my-rule").join(file).is_file(), "{file}");
    }
    fs::write(dir.path().join("my-rule/src/lib.rs"), "mine").expect("written");
    let ran = pointsman(dir.path(), ["new", "my-rule", "--world", "scorer"]);
    assert_eq!(ran.code, Some(2), "{}", ran.out);
    assert!(ran.err.contains("my-rule: the directory is not empty"), "{}", ran.err);
    assert_eq!(fs::read_to_string(dir.path().join("my-rule/src/lib.rs")).expect("kept"), "mine");
    let ran = pointsman(dir.path(), ["new", "serde", "--world", "scorer"]);
    // O7.8
    let taken = "`serde` is a crate that the project depends on; take another name";
    assert!(ran.code == Some(2) && ran.err.contains(taken), "{}", ran.err);
    assert!(!dir.path().join("serde").exists());
    for wrong in [["new", "My_Rule", "--world", "scorer"], ["new", "other", "--world", "router"]] {
        assert_eq!(pointsman(dir.path(), wrong).code, Some(2));
    }
}

#[test]
fn facts_are_listed_with_type_unit_and_the_value_when_absent() {
    let dir = folder();
    let ran = pointsman(dir.path(), ["facts", "--world", "scorer"]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("Worker facts: one column each, a value for each candidate, in score\n"));
    let line = ran.out.lines().find(|line| line.starts_with("  engine-queue ")).expect("listed");
    assert!(line.ends_with(" u32  requests; when absent 0; check `engine-queue-known`"), "{line}");
    let ran = pointsman(dir.path(), ["facts", "kv-usage"]);
    assert!(ran.out.starts_with("Worker facts: ") && ran.out.contains("  kv-usage f32"), "{}", ran.out);
    assert!(!ran.out.contains("Request facts") && !ran.out.contains("active-requests"), "{}", ran.out);
    let ran = pointsman(dir.path(), ["facts", "kv-use"]);
    assert_eq!(ran.code, Some(2));
    assert!(
        ran.err.contains("unknown request or worker fact `kv-use`: did you mean `kv-usage`?"),
        "{}",
        ran.err
    );
    let ran = pointsman(dir.path(), ["facts", "--json"]);
    let list: Vec<serde_json::Value> = serde_json::from_str(&ran.out).expect("JSON");
    assert!(list.iter().any(|fact| fact["name"] == "label-is/<key>=<value>" && fact["scope"] == "worker"));
}

/// The README's commands, for each world, without a checkout. The lock file of the workspace keeps the
/// build off
/// the network.
#[test]
#[ignore = "builds four projects with cargo: a minute or more"]
fn new_rust_projects_build_and_pass_their_own_cases() {
    let dir = folder();
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("policy-new");
    for world in WORLDS {
        let name = format!("my-{world}");
        let ran = pointsman(dir.path(), ["new", &name, "--world", world]);
        assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
        let project = dir.path().join(&name);
        fs::copy(policies().join("../Cargo.lock"), project.join("Cargo.lock")).expect("copied");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(&project).args(["test", "--offline"]).env("CARGO_TARGET_DIR", &target);
        let output = cargo.output().expect("cargo runs");
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !words.contains("warning"), "{world}: {words}");
        build_and_test(&project, &name, &target);
        let ran = pointsman(&project, ["inspect", &format!("{name}.wasm")]);
        assert!(!ran.out.contains("wasi:"), "{}", ran.out);
    }
}

/// Runs the commands of the generated README. Installs the tools from PyPI and npm, once for all projects.
#[test]
#[ignore = "needs python3, npm and the network; minutes"]
fn new_scripts_build_and_pass_their_own_cases() {
    let dir = folder();
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tools");
    for language in ["python", "js", "ts"] {
        for world in WORLDS {
            let name = format!("{language}-{world}");
            let ran = pointsman(dir.path(), ["new", &name, "--world", world, "--lang", language]);
            assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
            build_and_test(&dir.path().join(&name), &name, &tools);
        }
    }
}

/// A wrong fact or answer is found before anything is built, with its place. Installs TypeScript from npm.
#[test]
#[ignore = "needs npm and the network"]
fn a_typescript_policy_is_refused_for_a_fact_that_it_did_not_ask_for() {
    let dir = folder();
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tools");
    let ran = pointsman(dir.path(), ["new", "typed", "--world", "selector", "--lang", "ts"]);
    assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    let file = dir.path().join("typed/policy.ts");
    let text = fs::read_to_string(&file).expect("written");
    for (right, wrong, reason) in [
        ("facts[\"active-requests\"]", "facts[\"engine-queue\"]", "'engine-queue' does not exist on type"),
        ("return null;", "return \"none\";", "not assignable to type"),
        ("settings[\"max-requests\"]", "settings[\"max-request\"]", "'max-request' does not exist on type"),
        ("workerFacts: [\"active", "workerFacts: [\"activ", "\"activ-requests\"' is not assignable to type"),
    ] {
        assert!(text.contains(right), "{text}");
        fs::write(&file, text.replace(right, wrong)).expect("written");
        let tools = tools.to_str().expect("text");
        let ran = pointsman(dir.path(), ["build", "typed", "--tools", tools]);
        assert_eq!(ran.code, Some(2), "{wrong}: {}", ran.out);
        assert!(ran.err.contains("policy.ts(") && ran.err.contains(reason), "{wrong}: {}", ran.err);
    }
}

const WORLDS: [&str; 4] = ["selector", "scorer", "filter", "decode-override"];

fn build_and_test(project: &Path, name: &str, target: &Path) {
    let mut build = Command::new(crate::programs::pointsman());
    build.current_dir(project).args(["policy", "build", "--tools"]).arg(target);
    let output = build.env("CARGO_TARGET_DIR", target).env("CARGO_NET_OFFLINE", "true").output();
    let output = output.expect("the binary runs");
    let words = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && words.contains("sha256"), "{name}: {words}");
    let ran = pointsman(
        project,
        ["test", &format!("{name}.wasm"), "--memory-bytes", "67108864", "--deadline-ms", "20"],
    );
    assert_eq!(ran.code, Some(0), "{name}: {}{}", ran.out, ran.err);
    assert!(ran.out.ends_with("3 passed, 0 failed\n"), "{}", ran.out);
}

#[test]
fn t4_a_folder_in_the_place_of_a_policy_is_answered_with_the_file_to_name() {
    let dir = folder();
    fs::create_dir(dir.path().join("shortest")).expect("a folder");
    for command in ["test", "inspect"] {
        let ran = pointsman(dir.path(), [command, "shortest"]);
        // T4.13
        let told = "shortest is a folder: name the .wasm file that `pointsman policy build shortest` makes";
        assert!(ran.code == Some(2) && ran.err.contains(told), "{}", ran.err);
    }
}

#[test]
fn build_reports_what_a_project_lacks() {
    let dir = folder();
    let ran = pointsman(dir.path(), ["build", "."]);
    assert_eq!(ran.code, Some(2), "{}", ran.out);
    assert!(ran.err.contains("has none of Cargo.toml, policy.py, policy.ts, policy.js"), "{}", ran.err);
    fs::write(dir.path().join("policy.py"), "").expect("written");
    let ran = pointsman(dir.path(), ["build", "."]);
    assert!(ran.err.contains("policy.toml: "), "{}", ran.err);
    fs::write(dir.path().join("policy.toml"), "language = \"python\"\n").expect("written");
    let ran = pointsman(dir.path(), ["build", "."]);
    let unknown = "policy.toml: unknown key `language`: expected `name`, `world` or `state`";
    // O7.8
    assert!(ran.code == Some(2) && ran.err.contains(unknown), "{}", ran.err);
    fs::write(dir.path().join("policy.toml"), "name = \"x\"\nworld = \"selector\"\n").expect("written");
    let mut build = Command::new(crate::programs::pointsman());
    let output = build.current_dir(dir.path()).args(["policy", "build"]).env("PYTHON", "no-such-python");
    let output = output.output().expect("the binary runs");
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(words.contains("`no-such-python` cannot be run") && words.contains("PyPI"), "{words}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn build_says_that_it_begins_and_shows_the_progress_of_cargo_on_a_terminal() {
    let dir = folder();
    let cargo = dir.path().join("cargo");
    let script = "#!/bin/sh\necho \"$*\" >> arguments\necho '   Compiling x v1.0.0' >&2\nexit 101\n";
    fs::write(&cargo, script).expect("written");
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).expect("an executable");
    fs::write(dir.path().join("Cargo.toml"), "[package]\nname = \"x\"\n[workspace]\n").expect("written");
    let build = |mut command: Command| {
        let output = command.current_dir(dir.path()).env("CARGO", &cargo).output().expect("the binary runs");
        let words = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).replace("\r\n", "\n");
        let arguments = fs::read_to_string(dir.path().join("arguments")).expect("cargo ran");
        (words.trim_end().to_owned(), arguments.lines().last().expect("a line").contains("--quiet"))
    };
    let mut piped = Command::new(crate::programs::pointsman());
    piped.args(["policy", "build"]);
    let begins = "building  ., from Rust; a first build takes a minute or more\n";
    let failed = "pointsman: building policy `x` failed:\n   Compiling x v1.0.0";
    // O6.1
    assert_eq!(build(piped), (format!("{begins}{failed}"), true));
    fs::create_dir(dir.path().join("target")).expect("a folder");
    let mut again = Command::new(crate::programs::pointsman());
    again.args(["policy", "build"]);
    // O6.1
    let begins = "building  ., from Rust\n";
    assert_eq!(build(again), (format!("{begins}{failed}"), true));
    if Command::new("script").arg("--version").output().is_err() {
        println!("skipped: `script` of util-linux is not installed");
        return;
    }
    let mut terminal = Command::new("script");
    let program = format!("{} policy build", crate::programs::pointsman());
    terminal.args(["--quiet", "--return", "--command", &program, "/dev/null"]);
    let (words, quiet) = build(terminal);
    // O6.1
    let expected = format!(
        "{begins}   Compiling x v1.0.0\npointsman: building policy `x` failed:\ncargo says above why"
    );
    assert_eq!((words, quiet), (expected, false));
}

#[test]
fn the_memory_limit_of_the_command_line_applies() {
    let dir = folder();
    embedded(dir.path(), "least-loaded");
    let ran = pointsman(dir.path(), ["inspect", "policy.wasm", "--memory-bytes", "65536"]);
    assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("admitted  no"), "{}", ran.out);
}

/// A decision of a native router, as a receipt has it.
fn recorded_decision(id: &str, chosen: u32) -> String {
    format!(
        concat!(
            r#"{{"id":"{id}","leg":"decode","attempt":0,"decider":{{"by":"native"}},"#,
            r#""call":{{"seed":1,"now_us":2,"temperature":0}},"candidates":[[11,0],[12,1]],"#,
            r#""stages":[{{"rows":2,"kept":null,"request":{{}},"workers":{{"active-requests":[5,2],"#,
            r#""active-prefill-tokens":[0,0],"engine-queue":[0,0]}}}}],"left":null,"#,
            r#""choice":{{"row":{chosen},"cost":1.5}},"inputs_dropped":false}}"#
        ),
        id = id,
        chosen = chosen,
    )
}

#[test]
fn run_replays_decisions_and_its_exit_code_reports_differences() {
    let dir = folder();
    embedded(dir.path(), "least-loaded");
    let line = recorded_decision;
    let write = |lines: &[String]| fs::write(dir.path().join("r.jsonl"), lines.join("\n")).expect("written");
    write(&[line("1a", 1)]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    assert_eq!((ran.code, ran.out.contains("agree   1 of 1\n")), (Some(0), true), "{}{}", ran.out, ran.err);
    write(&[line("1a", 1), line("2b", 0)]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
    let differs =
        "differs 2b decode: recorded 11/0 (recorded cost 1.5), now 12/1 (cost 2; 11/0 costs 3 more)\n";
    // O7.3
    assert!(ran.out.contains(differs), "{}", ran.out);
    assert!(ran.out.contains("agree   1 of 2\n        decode: 1 of 2\n"), "{}", ran.out);
    assert!(ran.out.contains("        11/0 | 12/1: active-requests 5 | 2\n"), "{}", ran.out);
    let known =
        |id: &str, costs: &str| line(id, 0).replace("\"choice\"", &format!("\"costs\":{costs},\"choice\""));
    write(&[known("3c", "[1.5,1.25]"), known("4d", "[1.5,4]"), line("5e", 0)]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl", "--as-recorded"]);
    let by_recorded = |cost, by| format!("        by the recorded costs 12/1 costs {cost}, {by} 11/0\n");
    let (first, second) = (by_recorded("4", "2.5 more than"), by_recorded("1.25", "0.25 less than"));
    let places = ["4d decode", &first, "3c decode", &second, "5e decode"];
    // O7.3
    let places = places.map(|text| ran.out.find(text).unwrap_or_else(|| panic!("{text}: {}", ran.out)));
    assert!(places.is_sorted(), "{}", ran.out);
    write(&[line("1a", 1), line("2b", 0)]);
    let allowed = ["run", "policy.wasm", "--receipts", "r.jsonl", "--allow-differences", "--json"];
    let ran = pointsman(dir.path(), allowed);
    assert!(ran.code == Some(0) && ran.out.contains(r#""agree":1,"#), "{}{}", ran.out, ran.err);
    write(&[line("1a", 1).replace("engine-queue", "n-queue")]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("\"least-loaded\" asks for: `engine-queue` (in 1 decision)"), "{}", ran.err);
    write(&[line("1a", 1), line("2b", 1).replace("engine-queue", "n-queue")]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    let skipped = "agree   1 of 1\n        decode: 1 of 1\nskipped 1: without facts that the policy asks for; record \
                   them with `[decisions] facts = [\"engine-queue\", \"engine-queue-known\"]`\n";
    // O7.7
    assert!(ran.code == Some(0) && ran.out.contains(skipped), "{}{}", ran.out, ran.err);
}

#[test]
fn run_replays_all_decisions_although_instances_trap_now_and_then() {
    let dir = folder();
    fs::write(dir.path().join("policy.wasm"), pointsman_test_guests::HOSTILE).expect("written");
    let line = |number| recorded_decision(&format!("{number:x}"), 0);
    let lines = (0..200).map(|number| line(number).replace(r#""request":{}"#, r#""request":{"queue-us":0}"#));
    let lines: Vec<_> = lines.collect();
    fs::write(dir.path().join("r.jsonl"), lines.join("\n")).expect("written");
    let settings = r#"{"mode":"trap","after":10}"#;
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl", "--settings", settings]);
    // The trial call of each new instance is one of the ten before its trap.
    // O7.5
    assert!(ran.code == Some(1) && ran.out.contains("agree   180 of 200\n"), "{}{}", ran.out, ran.err);
}

#[test]
fn run_refuses_what_is_no_recording() {
    let dir = folder();
    embedded(dir.path(), "least-loaded");
    let line = recorded_decision;
    let write = |lines: &[String]| fs::write(dir.path().join("r.jsonl"), lines.join("\n")).expect("written");
    write(&["no decision".to_owned()]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    assert!(ran.code == Some(2) && ran.err.contains("r.jsonl: line 1: "), "{}", ran.err);
    write(&[line("1a", 1), line("2b", 1)[..60].to_owned()]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    let cut =
        "r.jsonl: line 2: EOF while parsing a string at column 60; the line is cut off: record the decisions";
    // O7.4
    assert!(ran.code == Some(2) && ran.err.contains(cut), "{}", ran.err);
    write(&[format!("\u{feff}{}", line("1a", 1))]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    // T4.3
    assert!(ran.code == Some(0) && ran.out.contains("agree   1 of 1\n"), "{}{}", ran.out, ran.err);
    fs::write(dir.path().join("r.jsonl"), b"\x1f\x8b\x08\0").expect("written");
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    // O7.4
    assert!(ran.code == Some(2) && ran.err.contains("compressed (gzip); expand it first"), "{}", ran.err);
    write(&[r#"{"log":"pointsman-decisions","version":1,"block_tokens":16}"#.to_owned()]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    // O7.4
    assert!(
        ran.code == Some(2) && ran.err.contains("decision log, which has no facts to replay"),
        "{}",
        ran.err
    );
    write(&[format!("{{\"decisions\":[{}]}}", line("1a", 1))]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    assert!(ran.code == Some(2) && ran.err.contains("record them with GET /decisions/export"), "{}", ran.err);
    write(&[]);
    let ran = pointsman(dir.path(), ["run", "policy.wasm", "--receipts", "r.jsonl"]);
    assert!(ran.code == Some(2) && ran.err.contains("r.jsonl: no decision to replay"), "{}", ran.err);
}

#[test]
fn inspect_and_test_check_a_formula_file_as_the_gateway_does() {
    let dir = folder();
    let write = |text: &str| fs::write(dir.path().join("prefill.formula.toml"), text).expect("written");
    let run = |command: &str| pointsman(dir.path(), [command, "prefill.formula.toml"]);
    write("# mine\ncost = \"2 * engine_que\"\n");
    let mistake = "line 2, column 13: cost: unknown name `engine_que`; did you mean `engine_queue`?";
    let ran = run("inspect");
    // O5.10
    assert!(ran.code == Some(1) && ran.out.contains("bytes, formulas\n"), "{}{}", ran.out, ran.err);
    assert!(ran.out.ends_with(&format!("admitted  no (formula): {mistake}\n")), "{}", ran.out);
    let ran = run("test");
    // O5.10
    assert!(ran.code == Some(2) && ran.err.contains(&format!("refused (formula): {mistake}")), "{}", ran.err);
    write("cost = \"engine_queue\"\nkeep = \"!known(kv_usage) || kv_usage < 0.9\"\n");
    let ran = run("inspect");
    // O5.10
    assert!(ran.code == Some(0) && ran.out.ends_with("admitted  yes\n"), "{}{}", ran.out, ran.err);
    let workers = ran.out.lines().find(|line| line.starts_with("workers ")).unwrap_or_default();
    assert!(workers.contains("engine-queue") && workers.contains("kv-usage"), "{}", ran.out);
    let ran = run("test");
    // O5.10
    let expected = "prefill.formula.toml: accepted; no cases: cases.toml is missing\n";
    assert_eq!((ran.code, &*ran.out), (Some(0), expected), "{}", ran.err);
    let named = |name: &str| {
        fs::copy(dir.path().join("prefill.formula.toml"), dir.path().join(name)).expect("copied");
        pointsman(dir.path(), ["inspect", name])
    };
    // N7.7
    let ran = named("prefil.formula.toml");
    assert!(ran.code == Some(1) && ran.out.contains("admitted  no (no_slot): "), "{}", ran.out);
    let ran = named("decode-override.formula.toml");
    assert!(ran.code == Some(1) && ran.out.contains("admitted  no (wrong_slot): "), "{}", ran.out);
    let case = |usage: [f32; 2], expect: &str| {
        let row = |usage: f32, queue: u32| {
            format!("{{ kv-usage-known = 1, kv-usage = {usage:?}, engine-queue = {queue} }}")
        };
        let rows = [row(usage[0], 1), row(usage[1], 2)].join(", ");
        format!("[[case]]\nname = \"{expect}\"\nrows = [{rows}]\nexpect = {{ {expect} }}\n")
    };
    // O5.10: `keep` comes before `cost`
    let all = [case([0.1, 0.2], "row = 0"), case([0.95, 0.2], "row = 1"), case([0.95, 0.95], "keep = []")];
    fs::write(dir.path().join("cases.toml"), all.concat()).expect("written");
    let ran = run("test");
    assert!(ran.code == Some(0) && ran.out.ends_with("3 passed, 0 failed\n"), "{}{}", ran.out, ran.err);
    assert!(!ran.out.contains("warning"), "{}", ran.out);
    write(&format!("cost = \"1\"\n{}", "#".repeat(65_536)));
    let ran = run("inspect");
    assert!(
        ran.code == Some(1) && ran.out.contains("no (too_large): the file has 65547 bytes"),
        "{}",
        ran.out
    );
}

#[test]
fn t4_tenants_are_named_in_settings_and_cases() {
    let dir = folder();
    let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).expect("written");
    write("limit.wasm", pointsman_test_guests::TENANT_LIMIT);
    write(
        "only.formula.toml",
        b"cost = \"1\"\nkeep = \"tenant != 'acme' || session == 's' || label('pool') == 'a'\"\n",
    );
    let limited = |name: &str, expect: &str| {
        format!(
            "[[case]]\nname = \"{name}\"\nrequest = {{ tenant-hash = \"tenant:{name}\" }}\nrows = [{{}}]\n\
             expect = {{ {expect} }}\n"
        )
    };
    let cases = limited("acme", "shed = 429") + &limited("other", "row = 0");
    write("limit.toml", cases.as_bytes());
    // T4.4, T4.5
    let settings = r#"{"requests":5,"tenants":{"tenant:acme":0}}"#;
    for salt in ["0", "77"] {
        let arguments =
            ["test", "limit.wasm", "--cases", "limit.toml", "--settings", settings, "--hash-salt", salt];
        let ran = pointsman(dir.path(), arguments);
        assert!(ran.code == Some(0) && ran.out.contains("2 passed, 0 failed"), "{}{}", ran.out, ran.err);
    }
    // T4.4: settings of a case.
    let own = cases.replace("rows", "settings = { requests = 5, tenants = { \"tenant:acme\" = 0 } }\nrows");
    write("limit.toml", own.as_bytes());
    let ran = pointsman(dir.path(), ["test", "limit.wasm", "--cases", "limit.toml", "--hash-salt", "7"]);
    assert!(ran.code == Some(0) && ran.out.contains("2 passed, 0 failed"), "{}{}", ran.out, ran.err);
    // T4.4
    let ran = pointsman(dir.path(), ["inspect", "limit.wasm", "--settings", settings]);
    assert!(ran.code == Some(0) && ran.out.ends_with("admitted  yes\n"), "{}{}", ran.out, ran.err);
    let rows = "rows = [{}, { \"label-is/pool=a\" = 1 }]\nexpect = { row = 1 }\n";
    let any = "rows = [{}]\nexpect = { row = 0 }\n";
    let case =
        |request: &str, rest: &str| format!("[[case]]\nname = \"c\"\nrequest = {{ {request} }}\n{rest}");
    let cases = [
        case("tenant-hash = \"acme\"", rows),
        case("tenant-hash = \"other\"", any),
        case("tenant-hash = \"acme\", session-hash = \"s\"", any),
    ];
    write("cases.toml", cases.concat().as_bytes());
    // T4.5
    let ran = pointsman(dir.path(), ["test", "only.formula.toml", "--hash-salt", "77"]);
    assert!(ran.code == Some(0) && ran.out.contains("3 passed, 0 failed"), "{}{}", ran.out, ran.err);
}

#[test]
fn run_takes_formulas_from_a_file_or_from_settings_and_names_a_mistake() {
    let dir = folder();
    let line = concat!(
        r#"{"id":"1a","leg":"decode","attempt":0,"decider":{"by":"native"},"#,
        r#""call":{"seed":1,"now_us":2,"temperature":0},"candidates":[[11,0],[12,1]],"#,
        r#""stages":[{"rows":2,"kept":null,"request":{"tenant-hash":HASH},"#,
        r#""workers":{"active-requests":[5,2],"engine-queue":[0,3]}}],"left":null,"#,
        r#""choice":{"row":1,"cost":null},"inputs_dropped":false}"#
    );
    let hash = pointsman_workers::name_hash(b"a", 0).to_string();
    fs::write(dir.path().join("r.jsonl"), line.replace("HASH", &hash)).expect("written");
    let run = |file: &str| {
        fs::write(dir.path().join("my.formula.toml"), file).expect("written");
        pointsman(dir.path(), ["run", "my.formula.toml", "--receipts", "r.jsonl"])
    };
    let ran = run("cost = \"active_requests\"");
    assert!(ran.code == Some(0) && ran.out.contains("agree   1 of 1\n"), "{}{}", ran.out, ran.err);
    let ran = run("cost = \"active_requests\"\nkeep = \"engine_queue < 3\"");
    let differs = "differs 1a decode: recorded 12/1, now 11/0 (cost 5)";
    assert!(ran.code == Some(1) && ran.out.contains(differs), "{}{}", ran.out, ran.err);
    let ran = run("cost = \"active_requests + error_ppm\"");
    assert!(ran.code == Some(2) && ran.err.contains("`error-ppm` (in 1 decision)"), "{}", ran.err);
    let ran = run("cost = \"active_request\"");
    let refused = "refused (formula): line 1, column 9: cost: unknown name `active_request`; did you mean `active_requests`?";
    assert!(ran.code == Some(2) && ran.err.contains(refused), "{}", ran.err);
    let settings = r#"{"cost": "-active_requests", "shed": {"when": "min(engine_queue) > 3"}}"#;
    let ran = pointsman(dir.path(), ["run", "formula", "--settings", settings, "--receipts", "r.jsonl"]);
    let differs = "recorded 12/1, now 11/0 (cost -5; 12/1 costs 3 more)";
    assert!(ran.code == Some(1) && ran.out.contains(differs), "{}{}", ran.out, ran.err);
    // The hash of `a` with the salt 0.
    let settings = r#"{"cost": "tenant == 'a' ? active_requests : -active_requests"}"#;
    let run = |salt: &str| {
        let arguments =
            ["run", "formula", "--settings", settings, "--receipts", "r.jsonl", "--hash-salt", salt];
        pointsman(dir.path(), arguments).code
    };
    assert_eq!((run("0"), run("1")), (Some(0), Some(1)));
}

#[test]
fn a_layout_keeps_a_policy_with_its_signature_and_a_changed_blob_is_refused() {
    let dir = folder();
    embedded(dir.path(), "least-loaded");
    fs::write(dir.path().join("policy.wasm.minisig"), "untrusted comment: a signature\nabc\n")
        .expect("written");
    let pushed = pointsman(dir.path(), ["push", "policy.wasm", "oci:layout:1.0"]);
    assert_eq!(pushed.code, Some(0), "{}", pushed.err);
    let pulled = pointsman(dir.path(), ["pull", "oci:layout:1.0"]);
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    for end in ["", ".minisig"] {
        let file = |name: &str| fs::read(dir.path().join(format!("{name}.wasm{end}"))).expect("read");
        assert!(file("least-loaded") == file("policy"), "least-loaded.wasm{end}");
    }
    let line = |text: &str| text.lines().last().map(str::to_owned);
    assert_eq!(line(&pushed.out), line(&pulled.out), "both print the digest");

    let missing = pointsman(dir.path(), ["pull", "oci:layout:2.0"]);
    assert_eq!(missing.code, Some(2));
    assert!(
        missing.err.contains("has no tag \"2.0\"") && missing.err.contains("its tags: 1.0"),
        "{}",
        missing.err
    );
    for blob in fs::read_dir(dir.path().join("layout/blobs/sha256")).expect("blobs") {
        let path = blob.expect("a blob").path();
        let mut bytes = fs::read(&path).expect("read");
        if bytes.starts_with(b"\0asm") {
            bytes.reverse();
            fs::write(&path, bytes).expect("written");
        }
    }
    let changed = pointsman(dir.path(), ["pull", "oci:layout:1.0", "-o", "changed.wasm"]);
    assert_eq!(changed.code, Some(2));
    assert!(changed.err.contains("it was changed or cut"), "{}", changed.err);
    assert!(!dir.path().join("changed.wasm").exists());

    fs::create_dir(dir.path().join("policies.d")).expect("created");
    let copied = pointsman(dir.path(), ["push", "policy.wasm", "dir:policies.d"]);
    assert_eq!(copied.code, Some(0), "{}", copied.err);
    assert!(dir.path().join("policies.d/policy.wasm").exists());
}

#[test]
fn o9_a_copy_without_a_signature_leaves_none_of_another_policy() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    embedded(dir.path(), "least-loaded");
    fs::create_dir(path("policies.d")).expect("created");
    assert_eq!(pointsman(dir.path(), ["push", "policy.wasm", "oci:layout:unsigned"]).code, Some(0));
    for (command, target) in [
        (["push", "policy.wasm", "dir:policies.d"], "policies.d/policy.wasm"),
        (["pull", "oci:layout:unsigned", "-opulled.wasm"], "pulled.wasm"),
    ] {
        let signature = path(&format!("{target}.minisig"));
        fs::write(path(target), "another policy").expect("written");
        fs::write(&signature, "its signature").expect("written");
        let ran = pointsman(dir.path(), command);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        // O9.1
        assert!(!signature.exists() && path(target).exists(), "{target}");
        let removed = format!("\nremoved {target}.minisig: this policy comes without a signature\n");
        assert!(ran.out.contains(&removed), "{}", ran.out);
        let again = pointsman(dir.path(), command);
        assert!(again.code == Some(0) && !again.out.contains("removed"), "{}{}", again.out, again.err);
    }
}

#[test]
fn o9_a_signed_policy_and_its_signature_are_replaced_together_or_not_at_all() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let read = |name: &str| fs::read_to_string(path(name)).expect("read");
    embedded(dir.path(), "least-loaded");
    fs::write(path("policy.wasm.minisig"), "untrusted comment: new\nabc\n").expect("written");
    fs::create_dir(path("d")).expect("created");
    fs::write(path("d/policy.wasm"), "another policy").expect("written");
    fs::write(path("d/policy.wasm.minisig"), "its signature").expect("written");
    let program = crate::programs::pointsman();
    for command in ["push policy.wasm dir:d", "pull dir:policy.wasm -o d/policy.wasm"] {
        // The largest file may have 4 KiB.
        let script = format!("trap '' XFSZ; ulimit -f 8; exec {program} policy {command}");
        let ran = Command::new("sh").current_dir(dir.path()).args(["-c", &script]).output().expect("run");
        let error = String::from_utf8_lossy(&ran.stderr);
        // O9.4
        assert!(ran.status.code() == Some(2) && error.contains("File too large"), "{command}: {error}");
        let kept = (read("d/policy.wasm"), read("d/policy.wasm.minisig"));
        assert_eq!(kept, ("another policy".into(), "its signature".into()), "{command}");
        assert_eq!(fs::read_dir(path("d")).expect("listed").count(), 2, "{command}: nothing else is left");
    }
    fs::remove_file(path("d/policy.wasm")).expect("removed");
    fs::create_dir(path("d/policy.wasm")).expect("created");
    let refused = pointsman(dir.path(), ["push", "policy.wasm", "dir:d"]);
    assert!(
        refused.code == Some(2) && refused.err.contains("cannot replace d/policy.wasm"),
        "{}",
        refused.err
    );
    assert_eq!(read("d/policy.wasm.minisig"), "its signature");
    assert_eq!(fs::read_dir(path("d")).expect("listed").count(), 2);
    fs::remove_dir(path("d/policy.wasm")).expect("removed");
    let pushed = pointsman(dir.path(), ["push", "policy.wasm", "dir:d"]);
    assert_eq!(pushed.code, Some(0), "{}", pushed.err);
    assert_eq!(read("d/policy.wasm.minisig"), "untrusted comment: new\nabc\n");
}

#[test]
fn o9_a_policy_without_a_signature_and_the_removal_of_the_old_one_happen_together_or_not_at_all() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let read = |name: &str| fs::read_to_string(path(name)).expect("read");
    let push = || pointsman(dir.path(), ["push", "policy.wasm", "dir:d"]);
    let count = || fs::read_dir(path("d")).expect("listed").count();
    embedded(dir.path(), "least-loaded");
    // A signature that cannot be removed.
    fs::create_dir_all(path("d/policy.wasm.minisig")).expect("created");
    fs::write(path("d/policy.wasm"), "another policy").expect("written");
    let refused = push();
    // O9.4
    assert_eq!(
        (refused.code, read("d/policy.wasm").as_str()),
        (Some(2), "another policy"),
        "{}",
        refused.err
    );
    assert!(refused.err.contains("cannot remove d/policy.wasm.minisig"), "{}", refused.err);
    assert_eq!(count(), 2, "nothing else is left");
    // A policy that cannot be replaced.
    fs::remove_dir(path("d/policy.wasm.minisig")).expect("removed");
    fs::write(path("d/policy.wasm.minisig"), "its signature").expect("written");
    fs::remove_file(path("d/policy.wasm")).expect("removed");
    fs::create_dir(path("d/policy.wasm")).expect("created");
    let refused = push();
    assert_eq!((refused.code, read("d/policy.wasm.minisig").as_str()), (Some(2), "its signature"));
    assert!(refused.err.contains("cannot replace d/policy.wasm"), "{}", refused.err);
    assert_eq!(count(), 2, "nothing else is left");
}

#[test]
fn o9_a_formula_file_is_copied_to_a_directory_that_exists_and_to_no_registry() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let push = |target: &str| pointsman(dir.path(), ["push", "prefill.formula.toml", target]);
    let text = "cost = \"active_requests\"\n";
    fs::write(path("prefill.formula.toml"), text).expect("written");
    // O9.3
    let missing = push("dir:policies.d");
    assert_eq!(missing.code, Some(2), "{}", missing.out);
    let why = "policies.d: no such directory; check the path, or create it first";
    assert!(missing.err.contains(why) && !path("policies.d").exists(), "{}", missing.err);
    fs::create_dir(path("policies.d")).expect("created");
    let copied = push("dir:policies.d");
    // O9.2
    assert_eq!(copied.code, Some(0), "{}", copied.err);
    assert_eq!(fs::read_to_string(path("policies.d/prefill.formula.toml")).expect("read"), text);
    for target in ["oci:layout:1.0", "127.0.0.1:9/team/prefill:1.0"] {
        let refused = push(target);
        let why = "registries and image layouts take components only: copy a formula file with dir:DIR";
        assert!(refused.code == Some(2) && refused.err.contains(why), "{target}: {}", refused.err);
    }
    fs::write(path("prefill.formula.toml"), "cost = \"active_request\"\n").expect("written");
    let refused = push("dir:policies.d");
    assert!(refused.code == Some(2) && refused.err.contains("refused (formula)"), "{}", refused.err);
    assert_eq!(fs::read_to_string(path("policies.d/prefill.formula.toml")).expect("read"), text);
}
