//! `pointsman key`: what it prints is an entry of a configuration that `check-config` accepts.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::fs;

use crate::process::{POINTSMAN, command, run};

/// Exit code, stdout and stderr of `pointsman` with a text on stdin.
fn pointsman(arguments: &[&str], stdin: &str) -> (Option<i32>, String, String) {
    run(&mut command(POINTSMAN, arguments), stdin)
}

fn accepted(entry: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.toml");
    fs::write(&file, format!("[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n{entry}"))
        .unwrap();
    let (code, out, error) = pointsman(&["check-config", file.to_str().unwrap()], "");
    assert_eq!(code, Some(0), "{entry}\n{out}{error}");
}

#[test]
fn k1_the_command_prints_an_entry_that_the_gateway_accepts_and_no_key() {
    for more in [&["--tenant", "team-a"][..], &["--argon2"], &["--role", "viewer"]] {
        let (code, entry, error) = pointsman(&[&["key", "new", "--id", "a-1"], more].concat(), "");
        assert_eq!(code, Some(0), "{error}");
        let key = error.trim().rsplit(' ').next().unwrap();
        // K1.3
        assert!(key.starts_with("a-1.") && key.len() > 40 && !entry.contains(key), "{entry}{error}");
        accepted(&entry);
        let (code, hashed, error) =
            pointsman(&[&["key", "hash", "--id", "a-1"], more].concat(), &format!("{key}\n"));
        assert_eq!(code, Some(0), "{error}");
        // K1.3: a salt makes argon2id digests differ.
        assert_eq!(hashed == entry, !more.contains(&"--argon2"), "{hashed}{entry}");
        accepted(&hashed);
    }
}

#[test]
fn k1_a_key_that_cannot_be_used_is_refused() {
    for (arguments, stdin) in [
        (&["key", "hash", "--id", "a"][..], "\n"),
        (&["key", "hash", "--id", "a"], "two words"),
        (&["key", "hash", "--id", "a.b"], "k"),
        (&["key", "hash", "--id", "a", "--argon2"], "b.secret"),
        (&["key", "new", "--id", ""], ""),
    ] {
        let (code, out, error) = pointsman(arguments, stdin);
        assert!(code != Some(0) && out.is_empty() && !error.is_empty(), "{arguments:?}: {out}{error}");
        assert!(!error.contains("secret") && !error.contains("two words"), "{error}");
    }
}
