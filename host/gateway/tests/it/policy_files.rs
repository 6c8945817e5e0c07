//! A file dropped into the policy directory never ends or stalls the daemon: the real binary, with files that
//! are small and cost their reader much.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{fs, process::Command, thread, time::Duration};

use pointsman_embedded_policies::LEAST_LOADED;
use pointsman_test_bombs as bombs;
use tokio::time::Instant;

use crate::process::{self, LIMIT, POINTSMAN};

pub(crate) mod daemon;

use daemon::{Daemon, version_of};

#[test]
fn a_file_is_compiled_by_another_process_and_its_code_found_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&format!("compile_cache = '{}'", cache.path().join("c").display()));
    let count = |result: &str| {
        let metrics = daemon.request("GET", "/metrics");
        let line = metrics
            .lines()
            .find(|line| line.starts_with("pointsman_policy_compile_cache_total") && line.contains(result));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    let (hits, misses) = (count("hit"), count("miss"));
    let mut times = Vec::new();
    for version in 0..5 {
        let file = version_of(LEAST_LOADED, version);
        daemon.drop_file("prefill.wasm", &file);
        times.push(daemon.until_it_serves("prefill", &file));
    }
    println!("from the rename until the new file serves: {times:?}");
    // A second miss for a file would be a compile in the daemon.
    assert_eq!((count("hit") - hits, count("miss") - misses), (0.0, 5.0));
    assert_eq!(daemon.children(), 0);
    let core = version_of(pointsman_test_guests::HOSTILE_CORE, 1);
    daemon.drop_file("prefill.wasm", &core);
    daemon.until_it_serves("prefill", &core);
}

/// A file with as much code as an interpreter has, beside the policy.
fn with_interpreter() -> Vec<u8> {
    bombs::with_module(LEAST_LOADED, &bombs::large_function(600_000))
}

#[test]
fn the_code_that_two_files_share_is_compiled_once() {
    for cache in [None, Some(tempfile::tempdir().unwrap())] {
        let keys = cache.as_ref().map(|dir| format!("compile_cache = '{}'", dir.path().join("c").display()));
        let daemon = Daemon::start(&keys.unwrap_or_default());
        let mut times = Vec::new();
        for version in 0..4 {
            let file = version_of(&with_interpreter(), version);
            daemon.drop_file("prefill.wasm", &file);
            times.push(daemon.until_it_serves("prefill", &file));
        }
        println!("from the rename until the new file serves: {times:?}");
        assert!(times[1..].iter().min() < times.first(), "{times:?}");
        if let Some(cache) = cache {
            let code = cache.path().join("c/code/modules");
            let compilers = fs::read_dir(code).unwrap().map(|dir| dir.unwrap().path());
            let sizes =
                |dir| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
            let entries: Vec<u64> = compilers.flat_map(sizes).collect();
            let large = entries.iter().filter(|size| **size > 100_000).count();
            println!("entries of the cache, bytes: {entries:?}");
            assert!(large >= 1 && entries.len() >= 5, "{entries:?}");
        }
    }
}

#[test]
fn bombs_are_refused_with_the_bound_that_they_exceed_and_the_next_file_serves() {
    let daemon = Daemon::start("");
    let good = version_of(LEAST_LOADED, 1);
    daemon.drop_file("prefill.wasm", &good);
    daemon.until_it_serves("prefill", &good);
    let before = daemon.peak_mib();
    let with = |module: &[u8]| bombs::with_module(LEAST_LOADED, module);
    let cases = [
        (bombs::nested_instance_types(2_000), "exceeds_limit"),
        (bombs::claims_4_gib(), "malformed"),
        (bombs::with_component(LEAST_LOADED, &bombs::doubling_instances(130)), "exceeds_limit"),
        (bombs::with_component(LEAST_LOADED, &bombs::nested_components(20_000)), "exceeds_limit"),
        (with(&bombs::many_locals(40_000, 7 << 20)), "exceeds_limit"),
        (with(&bombs::nested_loops(100_000)), "exceeds_limit"),
        (bombs::with_instances(LEAST_LOADED, &bombs::memories(60, 256), 1), "exceeds_limit"),
        (bombs::with_instances(LEAST_LOADED, &bombs::memories(1, 1), 245), "exceeds_limit"),
        (bombs::with_instances(LEAST_LOADED, &bombs::many_tables(1, 1), 100), "exceeds_limit"),
    ];
    for (number, (bomb, kind)) in (2..).zip(cases) {
        let begun = Instant::now();
        daemon.drop_file("prefill.wasm", &bomb);
        let (seen, message) = daemon.until_it_refuses("prefill", &bomb);
        assert_eq!(seen, kind, "{message}");
        let refused = begun.elapsed();
        let next = version_of(LEAST_LOADED, number);
        daemon.drop_file("prefill.wasm", &next);
        let (served, peak) = (daemon.until_it_serves("prefill", &next), daemon.peak_mib());
        println!("{} bytes: {kind} in {refused:?}, next serves in {served:?}, peak {peak} MiB", bomb.len());
        assert!(peak < before + 100, "{message}: peak {peak} MiB, {before} MiB before");
    }
}

#[test]
fn a_file_that_ends_its_compiler_is_quarantined_also_after_a_restart() {
    let cache = tempfile::tempdir().unwrap();
    let keys = format!("compile_cache = '{}'\ncompile_cpu = '1s'", cache.path().display());
    let daemon = Daemon::start(&keys);
    // Within all bounds, and too much for the compiler.
    let bomb = bombs::with_module(LEAST_LOADED, &bombs::large_function(4_000_000));
    daemon.drop_file("prefill.wasm", &bomb);
    let (kind, message) = daemon.until_it_refuses("prefill", &bomb);
    assert_eq!(kind, "compiler_died", "{message}");
    assert!(message.contains("took more than 1s of CPU time"), "{message}");
    assert!(fs::read_to_string(cache.path().join("quarantine.json")).unwrap().contains("CPU time"));
    let begun = Instant::now();
    let daemon = Daemon::start_in(daemon.kill(), &keys);
    let started = begun.elapsed();
    let (kind, message) = daemon.until_it_refuses("prefill", &bomb);
    assert_eq!(kind, "quarantined", "{message}");
    let digest = pointsman_policy_runtime::digest(&bomb).to_string();
    let command =
        format!("pointsman policy quarantine clear --dir {} {}", cache.path().display(), &digest[..12]);
    let advice = format!(
        "; change it, raise `compile_cpu` or `compile_memory_bytes` in [policies], or run `{command}` and `pointsman \
         policy reload`"
    );
    // T3.5
    assert!(message.ends_with(&advice), "{message}");
    println!("with the file in place the daemon started in {started:?}");
    assert_eq!(daemon.children(), 0);
    // An operator clears it, and the running daemon tries the file again.
    let dir = cache.path().to_str().unwrap();
    let quarantine = |arguments: &[&str]| {
        let (code, out, err) =
            process::run(process::command(POINTSMAN, &["policy", "quarantine"]).args(arguments), "");
        (code, out + &err)
    };
    let (code, text) = quarantine(&["list", "--dir", dir]);
    assert!(code == Some(0) && text.contains(&digest) && text.contains("of CPU time"), "{text}");
    let (code, text) = quarantine(&["clear", "--dir", dir, "sha256:00"]);
    assert!(code == Some(2) && text.contains("`sha256:00` is not quarantined"), "{text}");
    let (code, text) = quarantine(&["clear", "--dir", dir, &digest[..12]]);
    // T3.5
    assert!(code == Some(0) && text.starts_with("cleared 1 file\n"), "{text}");
    assert_eq!(quarantine(&["list", "--dir", dir]), (Some(0), "no file is quarantined\n".to_owned()));
    let report: serde_json::Value =
        serde_json::from_str(&daemon.request("POST", "/policies/reload")).unwrap();
    assert_eq!(report["refused"][0]["kind"], "compiler_died", "it was tried again: {report}");
    let good = version_of(LEAST_LOADED, 1);
    daemon.drop_file("prefill.wasm", &good);
    daemon.until_it_serves("prefill", &good);
}

#[test]
fn t3_the_refusal_of_a_trial_call_names_the_command_that_repeats_it() {
    let daemon = Daemon::start("[policies.slots.prefill]\nsettings = { mode = 'trap' }");
    let hostile = pointsman_test_guests::HOSTILE;
    daemon.drop_file("prefill.wasm", hostile);
    let (kind, message) = daemon.until_it_refuses("prefill", hostile);
    let expected = "; to repeat it: `pointsman policy inspect FILE` with the slot's `--settings` and, as in \
                    [policies], `--deadline-ms` and `--memory-bytes`";
    // T3.2
    assert!(kind == "probe" && message.ends_with(expected), "{kind}: {message}");
}

#[test]
fn n7_a_policy_is_installed_when_the_compile_cache_can_be_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let daemon = Daemon::start(&format!("compile_cache = '{}'", cache.display()));
    // A file in its place: a test may run as a user who can write everywhere.
    let _ = fs::remove_dir_all(&cache);
    fs::write(&cache, "").unwrap();
    let policy = version_of(LEAST_LOADED, 1);
    daemon.drop_file("prefill.wasm", &policy);
    let (kind, message) = daemon.until_it_refuses("prefill", &policy);
    // N7.9
    assert!(kind == "not_compiled" && message.contains(cache.to_str().unwrap()), "{kind} {message}");
    fs::remove_file(&cache).unwrap();
    daemon.until_it_serves("prefill", &policy);
}

#[test]
fn while_a_file_compiles_other_slots_reload_and_a_change_and_the_end_do_not_wait() {
    let mut daemon = Daemon::start("");
    let slow =
        |version| version_of(&bombs::with_module(LEAST_LOADED, &bombs::large_function(4_000_000)), version);
    let compiling = |daemon: &Daemon| {
        let begun = Instant::now();
        while daemon.children() == 0 {
            assert!(begun.elapsed() < LIMIT, "no compiler: {}", daemon.log());
            thread::sleep(Duration::from_millis(5));
        }
    };
    daemon.drop_file("prefill.wasm", &slow(1));
    compiling(&daemon);
    let good = version_of(LEAST_LOADED, 1);
    daemon.drop_file("decode.wasm", &good);
    let other = daemon.until_it_serves("decode", &good);
    let good = version_of(LEAST_LOADED, 2);
    daemon.drop_file("prefill.wasm", &good);
    let replaced = daemon.until_it_serves("prefill", &good);
    daemon.drop_file("prefill.wasm", &slow(2));
    compiling(&daemon);
    let ended = daemon.terminate();
    println!("other slot {other:?}, replaced {replaced:?}, ended {ended:?}");
    assert!(ended < Duration::from_secs(10), "{ended:?}");
}

#[test]
fn the_newest_content_wins_after_a_storm_of_changes_in_two_slots() {
    let daemon = Daemon::start("");
    let good = version_of(LEAST_LOADED, 1);
    for slot in ["prefill", "decode"] {
        daemon.drop_file(&format!("{slot}.wasm"), &good);
        daemon.until_it_serves(slot, &good);
    }
    let (files, _) = (daemon.open_files(), daemon.peak_mib());
    for version in 0..300 {
        daemon.drop_file("prefill.wasm", &version_of(LEAST_LOADED, 1_000 + version));
        daemon.drop_file("decode.wasm", &version_of(LEAST_LOADED, 2_000 + version));
        thread::sleep(Duration::from_millis(20));
    }
    let newest = version_of(LEAST_LOADED, 9_999);
    daemon.drop_file("prefill.wasm", &newest);
    daemon.drop_file("decode.wasm", &newest);
    let took = [daemon.until_it_serves("prefill", &newest), daemon.until_it_serves("decode", &newest)];
    let peak = daemon.peak_mib();
    println!("newest content after {took:?}, peak {peak} MiB, files {files} -> {}", daemon.open_files());
    // Compiles have a low priority: how long they take depends on what else runs. `cargo xtask drill hostile`
    // judges that.
    assert!(daemon.open_files() < files + 20, "{} open files, {files} before", daemon.open_files());
}

#[test]
fn pipes_and_kernel_files_do_not_block_the_folder() {
    let daemon = Daemon::start("");
    for round in 0..20 {
        let _ = fs::remove_file(daemon.path("prefill.wasm"));
        if round % 2 == 0 {
            let path = daemon.path("prefill.wasm");
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        } else {
            daemon.drop_file("prefill.wasm", &version_of(LEAST_LOADED, round));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = fs::remove_file(daemon.path("prefill.wasm"));
    std::os::unix::fs::symlink("/proc/kmsg", daemon.path("prefill.wasm")).unwrap();
    let begun = Instant::now();
    while daemon.slot("prefill")["refusals"].as_array().unwrap().last().is_none_or(|last| {
        !matches!(last["kind"].as_str(), Some("unreadable" | "not_wasm"))
            || last["message"].as_str().is_some_and(|text| text.contains("regular"))
    }) {
        assert!(begun.elapsed() < LIMIT, "{}", daemon.slot("prefill"));
        thread::sleep(Duration::from_millis(20));
    }
    let good = version_of(LEAST_LOADED, 99);
    daemon.drop_file("decode.wasm", &good);
    daemon.until_it_serves("decode", &good);
}

/// A log line as JSON, with every key of its fields, repeated ones included.
#[derive(serde::Deserialize)]
struct Line {
    fields: Keys,
}

struct Keys(Vec<String>);

impl<'de> serde::Deserialize<'de> for Keys {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> serde::de::Visitor<'de> for Visit {
            type Value = Keys;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut keys = Vec::new();
                while let Some((key, _)) = map.next_entry::<String, serde::de::IgnoredAny>()? {
                    keys.push(key);
                }
                Ok(Keys(keys))
            }
        }
        deserializer.deserialize_map(Visit)
    }
}

/// No line repeats a key, and no value is the `Debug` text of a struct.
fn check_lines(log: &str) {
    for line in log.lines() {
        let mut names = serde_json::from_str::<Line>(line).unwrap().fields.0;
        names.sort();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all, "a key is repeated: {line}");
        // A value is not the Debug text of a struct.
        assert!(!line.contains(" { ") && !line.contains("Some("), "{line}");
    }
}

#[test]
fn n7_many_files_of_no_slot_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("policies")).unwrap();
    (0..150).for_each(|at| fs::write(dir.path().join(format!("policies/{at:03}.wasm")), "").unwrap());
    let daemon = Daemon::start_in(dir, "");
    let listed = |answer: &str| -> (usize, usize, serde_json::Value) {
        let answer: serde_json::Value = serde_json::from_str(answer).unwrap();
        let count = |key: &str| answer[key].as_array().unwrap().len();
        (count("strays"), count("stray_problems"), answer["more_strays"].clone())
    };
    let logged = || {
        let log = daemon.log();
        let count = |message: &str| log.lines().filter(|line| line.contains(message)).count();
        (count("policy refused"), count("further files in the policy directory name no slot"))
    };
    // N7.11
    assert_eq!(listed(&daemon.request("GET", "/policies")), (100, 100, 50.into()));
    assert_eq!(logged(), (100, 1));
    fs::remove_file(daemon.path("000.wasm")).unwrap();
    assert_eq!(listed(&daemon.request("POST", "/policies/reload")), (100, 100, 49.into()));
    // N7.11: file 100, which is listed now, is not a new one.
    assert_eq!(logged(), (100, 1));
}

#[test]
fn log_lines_name_what_was_installed_and_a_reload_tells_refusals_strays_and_slots() {
    let daemon = Daemon::start("");
    let good = version_of(LEAST_LOADED, 1);
    let digest = pointsman_policy_runtime::digest(&good).to_string();
    daemon.drop_file("prefill.wasm", &good);
    daemon.until_it_serves("prefill", &good);
    daemon.drop_file("decode.wasm", b"garbage");
    daemon.until_it_refuses("decode", b"garbage");
    daemon.drop_file("decode.shadow.wasm", b"more garbage");
    daemon.drop_file("prefil.wasm", &good);
    fs::write(daemon.dir.path().join("pointsman.toml"), {
        let text = fs::read_to_string(daemon.dir.path().join("pointsman.toml")).unwrap();
        text.replace("[policies]", "[queue]\nlimit = 3\n[[workers]]\nid = 7\nrole = 'decode'\nengine = 'vllm'\nurl = 'http://127.0.0.1:9'\n[policies]")
    })
    .unwrap();
    for path in ["/policies/reload", "/config/reload"] {
        let report: serde_json::Value = serde_json::from_str(&daemon.request("POST", path)).unwrap();
        let refused: Vec<&str> =
            report["refused"].as_array().unwrap().iter().map(|one| one["file"].as_str().unwrap()).collect();
        assert_eq!(refused, ["decode.wasm", "decode.shadow.wasm"], "{report}");
        assert_eq!(report["strays"], serde_json::json!(["prefil.wasm"]), "{report}");
        let prefill = &report["slots"][0];
        assert_eq!((&prefill["slot"], &prefill["state"]), (&"prefill".into(), &"active".into()), "{report}");
        assert_eq!(
            prefill["active"],
            serde_json::json!({"policy": "least-loaded", "generation": 2, "digest": digest})
        );
        assert_eq!(report["slots"].as_array().unwrap().len(), 4, "{report}");
    }
    let rolled = daemon.request("POST", "/policies/prefill/rollback");
    assert!(rolled.contains("rolled back by an operator"), "{rolled}");
    let log = daemon.log();
    check_lines(&log);
    let of = |message: &str| -> Vec<serde_json::Value> {
        let events = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        events.map(|event| event["fields"].clone()).filter(|fields| fields["message"] == message).collect()
    };
    let installed = &of("policy installed")[0];
    for (key, value) in [
        ("slot", "prefill".into()),
        ("lane", "active".into()),
        ("policy", "least-loaded".into()),
        ("generation", 2.into()),
        ("digest", serde_json::Value::from(digest)),
    ] {
        assert_eq!(installed[key], value, "{installed}");
    }
    let reloaded = &of("configuration reloaded")[0];
    assert_eq!(
        (&reloaded["applied"], &reloaded["workers_added"]),
        (&"queue.limit,workers".into(), &"7".into())
    );
    assert_eq!(of("policy refusal in force")[0]["file"], "decode.wasm");
    assert_eq!(of("file in the policy directory names no slot")[0]["file"], "prefil.wasm");
    // The watched file may have been read a second time.
    assert!(of("slot state").len() >= 4 && of("slot state").len() % 4 == 0);
    let back = &of("policy rolled back by command")[0];
    assert_eq!((&back["slot"], &back["generation"]), (&"prefill".into(), &2.into()));
}
