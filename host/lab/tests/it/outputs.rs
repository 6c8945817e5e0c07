//! The files that commands write: none replaces one that is read, or another one that is written.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::{fs, path::Path};

use clap::Parser;
use pointsman_lab::cli::{CompareArgs, TraceCommand};
use serde_json::Value;

/// The commands of the binary.
#[derive(Parser)]
enum Command {
    #[command(subcommand)]
    Trace(TraceCommand),
    Compare(Box<CompareArgs>),
}

/// Runs a command. `@` in an argument is the directory.
fn run(directory: &Path, args: &[&str]) -> Result<(), String> {
    let args = args.iter().map(|arg| arg.replace('@', directory.to_str().unwrap()));
    let args = std::iter::once("pointsman".to_owned()).chain(args);
    let ran = match Command::try_parse_from(args).map_err(|error| error.to_string())? {
        Command::Trace(command) => command.run(),
        Command::Compare(args) => args.run(),
    };
    ran.map(drop).map_err(|error| format!("{error:#}").replace(directory.to_str().unwrap(), "@"))
}

/// Arguments of a comparison on the files of [`directory`].
const COMPARE: [&str; 12] = [
    "compare",
    "--trace=@/t.jsonl",
    "--trace-block",
    "64",
    "--fleet=@/fleet.toml",
    "--seeds",
    "1",
    "--arm",
    "kv",
    "--arm",
    "mine=@/mine.formula.toml",
    "--threads=1",
];

/// Makes a directory with a trace, a fleet that does not give its blocks, and a formula.
fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let generate =
        ["trace", "generate", "system-prompts", "--requests", "50", "--count", "5", "-o", "@/t.jsonl"];
    run(directory.path(), &generate).unwrap();
    fs::write(file("fleet.toml"), "block_tokens = 64\n[[engines]]\ncount = 2\n").unwrap();
    fs::write(file("mine.formula.toml"), "cost = \"active_requests\"\n").unwrap();
    fs::create_dir(file("reports")).unwrap();
    std::os::unix::fs::symlink("t.jsonl", file("link.jsonl")).unwrap();
    directory
}

#[test]
fn o8_6_an_output_that_would_replace_an_input_or_another_output_is_refused() {
    let directory = directory();
    let inputs = ["t.jsonl", "fleet.toml", "mine.formula.toml"].map(|name| directory.path().join(name));
    let before = inputs.each_ref().map(|file| fs::read(file).unwrap());
    let compare = |more: &[&str]| run(directory.path(), &[&COMPARE[..], more].concat());
    let table: [(&[&str], &str); 8] = [
        (&["--json", "@/t.jsonl"], "@/t.jsonl: it is the trace that is read; name another file"),
        (&["--html", "@/link.jsonl"], "@/link.jsonl: it is the trace that is read; name another file"),
        (
            &["--html", "@/./fleet.toml"],
            "@/./fleet.toml: it is the fleet file that is read; name another file",
        ),
        (
            &["--json", "@/mine.formula.toml"],
            "@/mine.formula.toml: it is a file of an arm that is read; name another file",
        ),
        (&["--html", "@/x", "--json", "@/./x"], "@/./x: @/x is the same file; name two files"),
        (&["--json", "@/reports"], "@/reports: it is a directory; name a file"),
        (&["--json", "@/x/"], "@/x/: it ends with `/`; name a file"),
        (&["--json", "@/none/x"], "@/none/x: its directory does not exist"),
    ];
    for (args, message) in table {
        // O8.6
        assert_eq!(compare(args), Err(format!("cannot write {message}")));
    }
    let trace =
        ["trace", "run", "@/t.jsonl", "--trace-block", "64", "--fleet", "@/fleet.toml", "--arm", "kv"];
    // O8.6
    assert_eq!(
        run(directory.path(), &[&trace[..], &["-o", "@/fleet.toml"]].concat()),
        Err("cannot write @/fleet.toml: it is the fleet file that is read; name another file".to_owned())
    );
    assert_eq!(before, inputs.each_ref().map(|file| fs::read(file).unwrap()));
    // Several outputs may go to one device.
    compare(&["--json", "/dev/null", "--html", "/dev/null"]).unwrap();
}

#[test]
fn o8_5_a_report_says_what_is_assumed_for_engines_without_a_number_of_blocks() {
    let directory = directory();
    let report = |fleet: &str| {
        let more = ["--json", "@/r.json"];
        let args = [&COMPARE[..], &more].concat();
        let args: Vec<&str> =
            args.into_iter().map(|arg| if arg == "--fleet=@/fleet.toml" { fleet } else { arg }).collect();
        run(directory.path(), &args).unwrap();
        let report: Value =
            serde_json::from_slice(&fs::read(directory.path().join("r.json")).unwrap()).unwrap();
        report["comparisons"][0]["warnings"].to_string()
    };
    // O8.5
    assert!(report("--fleet=@/fleet.toml").contains(
        "`blocks` is not given for 2 engines of the fleet: 16384 blocks of 64 tokens, which hold 1048576 tokens of KV, \
         are assumed for each"
    ));
    assert!(!report("--engines=2").contains("`blocks`"));
}
