//! The rows of the nightly run.

use std::process::Command;

use anyhow::ensure;

use crate::{e2e_image, e2e_wheel, fuzz, page, sh};

/// One row.
pub(super) struct Row {
    pub(super) name: &'static str,
    /// Time limit.
    pub(super) minutes: u64,
    pub(super) purpose: &'static str,
    /// Reason why the row cannot run on this machine.
    pub(super) missing: fn() -> Option<String>,
    /// Commands that have to succeed, in order.
    pub(super) commands: fn() -> Vec<Command>,
}

const ROWS: &[Row] = &[
    Row {
        name: "storm-faults",
        minutes: 30,
        purpose: "10,000 requests while 5 % of all legs meet a fault",
        missing: || None,
        commands: || vec![xtask(&["storm", "faults"])],
    },
    Row {
        name: "storm-disconnect",
        minutes: 30,
        purpose: "6,000 clients that disconnect at random times",
        missing: || None,
        commands: || vec![xtask(&["storm", "disconnect"])],
    },
    Row {
        name: "storm-engines",
        minutes: 20,
        purpose: "80 kinds of misbehaviour of engines on every leg, kills and stops",
        missing: || None,
        commands: || vec![xtask(&["storm", "engines"])],
    },
    Row {
        name: "fairness",
        minutes: 15,
        purpose: "two tenants, one sends 20 times as much: shares by weight, p99 TTFT of the light one",
        missing: || None,
        commands: || vec![xtask(&["fairness"])],
    },
    Row {
        name: "overload",
        minutes: 20,
        purpose: "ten times the capacity for five minutes: goodput, memory, refusals, recovery",
        missing: || None,
        commands: || vec![xtask(&["overload"])],
    },
    Row {
        name: "hostile",
        minutes: 60,
        purpose: "bad policies of every kind under load, three passes",
        missing: || None,
        commands: || vec![xtask(&["hostile"])],
    },
    Row {
        name: "reload-soak",
        minutes: 20,
        purpose: "1,000 policy reloads under load",
        missing: || None,
        commands: || vec![xtask(&["reload-soak"])],
    },
    Row {
        name: "shadow",
        minutes: 15,
        purpose: "a shadow policy agrees as often as the replay of its receipts",
        missing: || None,
        commands: || vec![xtask(&["shadow"])],
    },
    Row {
        name: "index-memory",
        minutes: 30,
        purpose: "ten million blocks within the memory budget, workers that join and leave",
        missing: || None,
        commands: || {
            MEMORY_TESTS.iter().map(|(package, file, name)| memory_test(package, file, name)).collect()
        },
    },
    Row {
        name: "models",
        minutes: 90,
        purpose: "lock-free code in every order of at most three preemptions",
        missing: || None,
        commands: || vec![xtask(&["models", "--preemptions", "3"])],
    },
    Row {
        name: "fuzz",
        minutes: 75,
        purpose: "every fuzz target for 10 minutes",
        missing: fuzz::missing,
        commands: || vec![xtask(&["fuzz", "--all", "--minutes", "10"])],
    },
    Row {
        name: "oracle",
        minutes: 30,
        purpose: "hashes, index and cost beside NVIDIA Dynamo's KV router",
        missing: || None,
        commands: || vec![xtask(&["oracle"])],
    },
    Row {
        name: "script-policies",
        minutes: 30,
        purpose: "policies in Python and JavaScript: build, test, measure",
        missing: || first_missing(&["python3", "npm"]),
        commands: || vec![xtask(&["policies", "--all", "--test"])],
    },
    Row {
        name: "e2e-sdk",
        minutes: 15,
        purpose: "the OpenAI Python SDK through the gateway",
        missing: || first_missing(&["python3"]),
        commands: || vec![xtask(&["e2e-sdk"])],
    },
    Row {
        name: "e2e-image",
        minutes: 30,
        purpose: "the image of a release under crun or runc: no root, read-only root",
        missing: e2e_image::missing,
        commands: || vec![xtask(&["e2e-image"])],
    },
    Row {
        name: "e2e-wheel",
        minutes: 30,
        purpose: "the wheel of a release, installed by path into a fresh environment",
        missing: e2e_wheel::missing,
        commands: || vec![xtask(&["e2e-wheel"])],
    },
    Row {
        name: "page",
        minutes: 15,
        purpose: "the admin page in Chromium",
        missing: || page::requirements().err().map(|error| format!("{error:#}")),
        commands: || vec![xtask(&["page"])],
    },
];

/// Tests of the index's memory: package, file and name. Each runs in a process of its own, so that none counts
/// another's memory.
const MEMORY_TESTS: [(&str, &str, &str); 6] = [
    ("pointsman-workers", "churn", "h4_workers_that_join_and_leave_leak_nothing"),
    ("pointsman-workers", "churn", "h4_five_thousand_workers_join_and_leave_at_once"),
    ("prefix-index", "memory", "h4_evicting_a_block_takes_the_same_time_for_shallow_and_deep_prompts"),
    ("prefix-index", "memory", "h4_ten_million_blocks_by_events_stay_within_the_budget"),
    ("prefix-index", "memory", "h4_ten_million_blocks_by_one_engine_s_events_stay_within_the_budget"),
    ("prefix-index", "memory", "h4_twenty_million_blocks_by_decisions_stay_within_the_budget"),
];

impl Row {
    /// Cells of `--list`.
    pub(super) fn describe(&self) -> Vec<String> {
        vec![self.name.to_owned(), format!("{} min", self.minutes), self.purpose.to_owned()]
    }
}

/// Rows by name, all when no name is given.
pub(super) fn choose(names: &[String]) -> anyhow::Result<Vec<&'static Row>> {
    for name in names {
        let all: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        ensure!(all.contains(&name.as_str()), "no row is called `{name}`: expected {}", all.join(", "));
    }
    let wanted = |row: &&Row| names.is_empty() || names.iter().any(|name| name == row.name);
    Ok(ROWS.iter().filter(wanted).collect())
}

/// This program with other arguments. A row is a process, so that its time limit can end it.
fn xtask(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()));
    command.args(args);
    command
}

fn memory_test(package: &str, file: &str, name: &str) -> Command {
    let mut test = sh::cargo();
    test.args(["test", "--release", "--locked", "--package", package, "--test", file, name]);
    test.args(["--", "--exact", "--include-ignored", "--nocapture"]);
    test
}

fn first_missing(programs: &[&str]) -> Option<String> {
    let missing = programs.iter().find(|program| !sh::succeeds(Command::new(program).arg("--version")))?;
    Some(format!("{missing} is not installed"))
}

#[cfg(test)]
mod tests {
    use super::{MEMORY_TESTS, choose, first_missing};
    use crate::sh;

    #[test]
    fn rows_are_chosen_by_name() {
        assert!(choose(&[]).unwrap().len() > 8);
        let one = choose(&["fuzz".to_owned()]).unwrap();
        assert_eq!(one.iter().map(|row| row.name).collect::<Vec<_>>(), ["fuzz"]);
        let error = choose(&["fuz".to_owned()]).err().unwrap().to_string();
        assert!(error.starts_with("no row is called `fuz`: expected storm-faults"), "{error}");
    }

    #[test]
    fn a_missing_program_is_named() {
        assert_eq!(
            first_missing(&["sh-no-such-program"]),
            Some("sh-no-such-program is not installed".into())
        );
    }

    #[test]
    fn the_memory_tests_exist() {
        for (package, file, name) in MEMORY_TESTS {
            let folder = if package == "prefix-index" { "crates/prefix-index" } else { "host/workers" };
            let path = sh::root().join(folder).join("tests").join(format!("{file}.rs"));
            let source = std::fs::read_to_string(path).unwrap();
            assert!(source.contains(&format!("fn {name}(")), "{file}.rs has no test {name}");
        }
    }
}
