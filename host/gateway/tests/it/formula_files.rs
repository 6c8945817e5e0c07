//! Formula files in the policy directory of the real binary.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use serde_json::Value;

use crate::policy_files::daemon::Daemon;

fn policies(daemon: &Daemon) -> Value {
    serde_json::from_str(&daemon.request("GET", "/policies")).unwrap()
}

/// Returns what a command prints.
fn pointsman(daemon: &Daemon, arguments: &[&str]) -> String {
    let url = format!("http://{}", daemon.admin);
    let mut command = std::process::Command::new(crate::programs::pointsman());
    let ran = command.args(arguments).args(["--gateway", &url]).output().unwrap();
    String::from_utf8(ran.stdout).unwrap()
}

#[test]
fn a_formula_file_is_shown_by_its_own_name_while_it_compiles_and_when_it_is_refused() {
    let daemon = Daemon::start("");
    let wrong = b"cost = \"active_requestz\"\n";
    daemon.drop_file("prefill.formula.toml", wrong);
    daemon.until_it_refuses("prefill", wrong);
    let slot = daemon.slot("prefill");
    // O1.20
    assert_eq!(
        (&slot["file"], &slot["refusals"][0]["file"]),
        (&"prefill.formula.toml".into(), &"prefill.formula.toml".into()),
        "{slot}"
    );
    let good = b"cost = \"active_requests\"\n";
    daemon.drop_file("prefill.formula.toml", good);
    let compiling = loop {
        let status = policies(&daemon);
        if let Some(file) = status["compiling"].as_array().unwrap().first() {
            break file.clone();
        }
        assert!(daemon.slot("prefill")["refusals"].as_array().unwrap().len() == 1, "{status}");
    };
    // O1.20
    assert_eq!(compiling["file"], "prefill.formula.toml");
    daemon.until_it_serves("prefill", good);
    let rolled_back: Value =
        serde_json::from_str(&daemon.request("POST", "/policies/prefill/rollback")).unwrap();
    // O1.20
    assert_eq!(rolled_back["refused"][0]["file"], "prefill.formula.toml", "{rolled_back}");
    let shown = pointsman(&daemon, &["policies"]);
    // O1.10
    assert!(shown.contains("; to let it run again: pointsman policy rollback prefill --undo\n"), "{shown}");
    let undone = pointsman(&daemon, &["policy", "rollback", "prefill", "--undo"]);
    // O1.12
    let expected = "prefill: the rollback of `formula` is undone\n\
                    prefill: the active lane runs `formula` (generation 4)\n";
    assert_eq!(undone, expected);
    assert!(!pointsman(&daemon, &["policies"]).contains("--undo"));
}

#[test]
fn a_formula_file_with_a_misspelled_slot_is_told_with_the_name_that_is_near() {
    let daemon = Daemon::start("");
    daemon.drop_file("prefil.formula.toml", b"cost = \"active_requests\"\n");
    let report: Value = serde_json::from_str(&daemon.request("POST", "/policies/reload")).unwrap();
    let problem = "the file name selects no slot; did you mean `prefill.formula.toml`?";
    // O1.10
    assert_eq!(
        (&report["strays"][0], &report["stray_problems"][0]),
        (&"prefil.formula.toml".into(), &problem.into()),
        "{report}"
    );
    let line = format!("prefil.formula.toml: {problem}\n");
    // O1.10, O1.11
    for arguments in [&["policies"][..], &["policy", "reload"]] {
        let out = pointsman(&daemon, arguments);
        assert!(out.contains(&line), "{arguments:?}: {out}");
    }
}

#[test]
fn the_code_of_a_formula_is_compiled_once_and_each_edit_configures_it() {
    let cache = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&format!("compile_cache = '{}'", cache.path().join("c").display()));
    // Looks into the cache, whether they found the code or compiled it.
    let looks = || -> f64 {
        let metrics = daemon.request("GET", "/metrics");
        let lines = metrics.lines().filter(|line| line.starts_with("pointsman_policy_compile_cache_total"));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    let edit = |number: u32| {
        let text = format!("cost = \"active_requests * {number}\"\n");
        daemon.drop_file("prefill.formula.toml", text.as_bytes());
        daemon.until_it_serves("prefill", text.as_bytes())
    };
    let before = looks();
    let mut times = vec![edit(1)];
    let first = looks();
    assert!(first > before, "{before}, then {first}");
    times.extend((2..6).map(edit));
    println!("from the rename until the new formula serves: {times:?}");
    // O1.21
    assert_eq!(looks(), first, "{times:?}");
    assert_eq!(daemon.children(), 0);
}

#[test]
fn an_edited_formula_serves_soon_without_a_compile_cache() {
    let daemon = Daemon::start("");
    let times: Vec<_> = (1..5)
        .map(|number: u32| {
            let text =
                format!("cost = \"active_requests * {number}\"\nkeep = \"error_ppm < {number}0000\"\n");
            daemon.drop_file("prefill.formula.toml", text.as_bytes());
            daemon.until_it_serves("prefill", text.as_bytes())
        })
        .collect();
    println!("from the rename until the new formula serves: {times:?}");
    // O1.21: the first one is compiled
    assert!(times[1..].iter().all(|time| *time < times[0] / 3), "{times:?}");
}
