//! `pointsman NAME` runs the program that has the command: only one beside itself, with its exit code and its
//! signals.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::{
        fs::{PermissionsExt as _, symlink},
        process::ExitStatusExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use crate::programs::pointsman;

/// A directory with `pointsman` alone, on the file system of the build so that it is a link.
struct Alone {
    dir: tempfile::TempDir,
}

impl Alone {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::hard_link(env!("CARGO_BIN_EXE_pointsman"), dir.path().join("pointsman")).unwrap();
        Self { dir }
    }

    fn program(&self) -> PathBuf {
        self.dir.path().join("pointsman")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(self.program()).args(arguments).output().unwrap()
    }
}

/// Writes a program that stands for one of ours.
fn script(dir: &Path, name: &str, text: &str) {
    let file = dir.join(name);
    fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn arguments_exit_code_and_signals_are_those_of_the_program() {
    let alone = Alone::new();
    script(alone.dir.path(), "pointsman-lab", "printf '<%s>' \"$@\"; exit 7");
    let output = alone.run(&["--log-json", "compare", "--trace", "a b", "--", "--help", ""]);
    let expected = "<--log-json><compare><--trace><a b><--><--help><>";
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), (expected, Some(7)));
    let output = alone.run(&["help", "trace", "export"]);
    assert_eq!(text(&output.stdout), "<trace><export><--help>");
    // It ends by itself, should an assertion fail.
    script(alone.dir.path(), "pointsman-policy", "echo $$; exec sleep 20");
    let mut child =
        Command::new(alone.program()).args(["policy", "bench"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), child.id().to_string(), "it is a process of its own");
    Command::new("kill").args(["-TERM", line.trim()]).status().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(15));
}

#[test]
fn only_the_directory_of_pointsman_itself_counts_also_behind_a_link() {
    let alone = Alone::new();
    let path = tempfile::tempdir().unwrap();
    for name in ["pointsman-lab", "pointsman-policy", "pointsman-tools"] {
        script(path.path(), name, "echo wrong");
    }
    symlink(alone.program(), path.path().join("pointsman")).unwrap();
    let run = |command: &[&str]| {
        let mut process = Command::new("pointsman");
        process.env("PATH", path.path()).current_dir(path.path()).args(command).output().unwrap()
    };
    for (command, package) in [
        (&["compare", "--help"][..], "pointsman-lab-cli"),
        (&["sim"], "pointsman-lab-cli"),
        (&["top", "--once"], "pointsman-tools"),
        (&["policy", "new", "x"], "pointsman-policy-tools"),
        (&["policy", "new", "--help"], "pointsman-policy-tools"),
    ] {
        let output = run(command);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        let dir = alone.dir.path().canonicalize().unwrap().display().to_string();
        for part in [&dir, "install the package `pointsman`", &format!("--package {package}`")] {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert!(output.stdout.is_empty());
    }
    script(alone.dir.path(), "pointsman-lab", "echo right");
    assert_eq!(text(&run(&["compare"]).stdout), "right\n");
}

#[test]
fn help_lists_what_is_installed_and_names_the_rest() {
    let alone = Alone::new();
    let help = text(&alone.run(&["--help"]).stdout);
    let absent = "Not installed: policy inspect, test, run, bench, new, build, push and pull (pointsman-policy), \
                  demo (pointsman-lab), compare (pointsman-lab)";
    let in_one_line = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(in_one_line.contains(absent), "{help}");
    // Examples of missing programs would fail.
    for (example, shown) in [("policy promote", true), ("policy bench", false), ("top", false)] {
        assert_eq!(help.contains(&format!("\n  pointsman {example}")), shown, "{example}: {help}");
    }
    let is_listed = |help: &str, name: &str| help.lines().any(|line| line.starts_with(&format!("  {name} ")));
    for (name, listed) in [("serve", true), ("policy", true), ("compare", false), ("top", false)] {
        assert_eq!(is_listed(&help, name), listed, "{name}: {help}");
    }
    // The daemon has the commands of `policy` that an operator needs.
    let output = alone.run(&["policy", "--help"]);
    assert!(output.status.success() && text(&output.stdout).contains("promote"), "{output:?}");
    assert_eq!(alone.run(&["policy"]).status.code(), Some(2));
    // O1.1
    assert_eq!(alone.run(&["policy", "reload", "--gateway", "http://127.0.0.1:1"]).status.code(), Some(1));
    let output = alone.run(&["compar"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    script(alone.dir.path(), "pointsman-lab", "");
    let help = text(&alone.run(&["--help"]).stdout);
    assert!(is_listed(&help, "compare") && !help.contains("compare (pointsman-lab)"), "{help}");
}

#[test]
fn the_programs_themselves_show_the_names_that_they_were_called_by() {
    for (command, usage) in [
        (&["compare", "--help"][..], "Usage: pointsman compare "),
        (&["calibrate", "--help"], "Usage: pointsman calibrate "),
        (&["trace", "export", "--help"], "Usage: pointsman trace export "),
        (&["sim", "--help"], "Usage: pointsman sim "),
        (&["import", "llm-d", "--help"], "Usage: pointsman import llm-d "),
        (&["top", "--help"], "Usage: pointsman top "),
        (&["policy", "--help"], "Usage: pointsman policy "),
        (&["policy", "new", "--help"], "Usage: pointsman policy new "),
        (&["policy", "promote", "--help"], "Usage: pointsman policy promote "),
        (&["help", "policy", "new"], "Usage: pointsman policy new "),
    ] {
        let output = Command::new(pointsman()).args(command).output().unwrap();
        assert!(text(&output.stdout).contains(usage), "{command:?}: {}", text(&output.stdout));
    }
    // The help of `pointsman` alone names the commands of this program.
    let help = text(&Command::new(pointsman()).args(["policy", "--help"]).output().unwrap().stdout);
    for name in ["inspect", "test", "run", "bench", "new", "build", "push", "pull"] {
        assert!(help.contains(&format!("\n  {name} ")), "{name}: {help}");
    }
    let help = text(&Command::new(pointsman()).arg("--help").output().unwrap().stdout);
    assert!(help.contains("\n  pointsman policy bench "), "{help}");
    assert!(!help.contains("Not installed") && help.contains("\n  calibrate "), "{help}");
}

/// Width at which the help is wrapped where it is not for a terminal.
const HELP_WIDTH: usize = 100;

#[test]
fn o1_no_example_of_a_help_page_is_wrapped_and_no_paragraph_is_broken_by_hand() {
    let commands = "|serve|workers|observe|compare|calibrate|policy build|policy dev|policy test|policy facts|\
                    policy inspect|policy run|policy bench|policy push|policy pull";
    let mut examples = 0;
    for command in commands.split('|') {
        let arguments = command.split_whitespace().chain(["--help"]);
        let help = text(&Command::new(pointsman()).args(arguments).output().unwrap().stdout);
        // The text behind the last option.
        let (_, end) = help.rsplit_once("Print help").unwrap();
        let lines: Vec<&str> = end.lines().skip(1).collect();
        examples += lines.iter().filter(|line| line.starts_with("  pointsman ")).count();
        let pairs = lines.windows(2).map(|pair| (pair[0], pair[1]));
        for (line, next) in pairs.filter(|(line, next)| !line.is_empty() && !next.is_empty()) {
            let begins =
                line.ends_with(':') || ["Exit", "The token"].iter().any(|word| next.starts_with(word));
            let word = next.split_whitespace().next().unwrap();
            let is_full = line.chars().count() + 1 + word.chars().count() > HELP_WIDTH;
            let is_example = line.starts_with("  ");
            let good = if is_example { next.starts_with("  ") } else { begins || is_full };
            // O1.28
            assert!(good, "{command}:\n{line}\n{next}");
        }
    }
    assert!(examples > 25, "{examples}");
}

#[test]
fn a_program_of_another_version_is_refused() {
    let bin = Path::new(pointsman()).parent().unwrap();
    for program in ["pointsman-lab", "pointsman-tools", "pointsman-policy"] {
        let run = |caller: &str| {
            let mut process = Command::new(bin.join(program));
            process.env("POINTSMAN_CALLER_VERSION", caller).arg("command-tree").output().unwrap()
        };
        let output = run("0.0.1");
        let problem = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{program}: {problem}");
        assert!(problem.contains("has the version 0.0.1") && output.stdout.is_empty(), "{problem}");
        assert!(run(env!("CARGO_PKG_VERSION")).status.success(), "{program}");
    }
}

#[test]
fn completions_and_manual_pages_have_the_commands_of_all_programs() {
    let run = |arguments: &[&str]| {
        let output = Command::new(pointsman()).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completions", shell]);
        for part in ["calibrate", "trace-block", "max-load", "llm-d", "promote", "once", "lang"] {
            assert!(script.contains(part), "{shell}: {part}");
        }
        assert!(!script.contains("command-tree"), "{shell}");
    }
    let dir = tempfile::tempdir().unwrap();
    run(&["man", dir.path().to_str().unwrap()]);
    let page = |name: &str| fs::read_to_string(dir.path().join(format!("{name}.1"))).unwrap_or_default();
    for (name, part) in [
        ("pointsman", "serve"),
        ("pointsman-compare", "\\-\\-max\\-load"),
        ("pointsman-trace-export", "SYNOPSIS"),
        ("pointsman-import-llm-d", "SYNOPSIS"),
        ("pointsman-top", "\\-\\-once"),
        ("pointsman-policy", "pointsman\\-policy\\-new(1)"),
        ("pointsman-policy-new", "\\fBpointsman policy new\\fR"),
        ("pointsman-policy-promote", "SYNOPSIS"),
        ("pointsman-lab", "pointsman\\-lab \\- "),
        ("pointsman-tools", "pointsman\\-top(1)"),
    ] {
        assert!(page(name).contains(part), "{name}: {part}\n{}", page(name));
    }
}
