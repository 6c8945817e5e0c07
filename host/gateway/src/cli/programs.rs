//! Commands of other programs: `pointsman NAME` runs the program that has the command.
//!
//! The names are fixed, and a program is looked for in the directory of this one only: what PATH has is never
//! run.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command as Process,
};

use anyhow::{Context as _, anyhow, ensure};
use clap::{Command, Subcommand as _};
use pointsman_cli::{
    tree::CommandTree,
    version::{CALLER_VERSION, VERSION},
};
use pointsman_policy_admin::PolicyAdminCommand;

/// The flag of every program that may stand before a command.
const LOG_JSON: &str = "--log-json";

/// A command of another program.
#[derive(Debug)]
struct Tool {
    name: &'static str,
    about: &'static str,
    program: &'static str,
    /// Subcommands that need the program, for a command of which this program has a part.
    needs: &'static str,
    /// The package of the workspace that builds the program.
    package: &'static str,
}

/// The command whose program has nothing else. The daemon has some of its commands itself.
const POLICY: Tool = Tool {
    name: "policy",
    about: "Write, test, measure and inspect policies, and replay recorded decisions with them",
    program: "pointsman-policy",
    needs: "policy inspect, test, run, bench, new, build, push and pull",
    package: "pointsman-policy-tools",
};

static TOOLS: [Tool; 9] = [
    POLICY,
    lab(
        "demo",
        "See the gateway at work: engines, a recorded trace, a policy swap, a bad policy, a killed worker",
    ),
    lab("compare", "Compare policies on a request trace, in a simulation with the gateway's own router"),
    lab("calibrate", "Fit the engine model of `compare` to your engines: step time, transfer, capacity"),
    lab(
        "observe",
        "Watch the router in place through copies of its traffic, and say what each policy would have done",
    ),
    lab("trace", "Convert and generate request traces"),
    lab(
        "sim",
        "Simulate an inference engine with the HTTP interface of vLLM, SGLang or a plain OpenAI server",
    ),
    other(
        "import",
        "Turn the configuration of another router into one of Pointsman, with a report of what differs",
    ),
    other("top", "Watch a running gateway in the terminal: load, latencies, workers, slots"),
];

const fn lab(name: &'static str, about: &'static str) -> Tool {
    Tool { name, about, program: "pointsman-lab", needs: name, package: "pointsman-lab-cli" }
}

const fn other(name: &'static str, about: &'static str) -> Tool {
    Tool { name, about, program: "pointsman-tools", needs: name, package: "pointsman-tools" }
}

/// A run of another program.
#[derive(Debug, PartialEq)]
struct Call {
    tool: &'static Tool,
    arguments: Vec<OsString>,
}

impl PartialEq for Tool {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// Replaces this process with the program that has the command of these arguments. Returns `None` when this
/// program has the command, and an error when the other one cannot be run.
pub(super) fn dispatch(arguments: &[OsString]) -> Option<anyhow::Error> {
    let Call { tool, arguments } = call(arguments)?;
    let dir = match own_dir() {
        Ok(dir) => dir,
        Err(error) => return Some(error),
    };
    let program = dir.join(tool.program);
    if !program.is_file() {
        let first = arguments.iter().find(|word| *word != LOG_JSON);
        let asks_for_help = first.is_none_or(|word| is_help(word));
        return if *tool == POLICY && asks_for_help { None } else { Some(absent(tool, &dir)) };
    }
    // The name for help and usage, which the program takes from here.
    let shown = if *tool == POLICY { "pointsman policy" } else { "pointsman" };
    let error = process(&program).arg0(shown).args(arguments).exec();
    Some(anyhow!(error).context(format!("cannot run {}", program.display())))
}

/// Returns a run of another program, which refuses to be of another version than this one.
fn process(program: &Path) -> Process {
    let mut process = Process::new(program);
    process.env(CALLER_VERSION, VERSION);
    process
}

/// Finds the program for these arguments; `None` if this one.
fn call(arguments: &[OsString]) -> Option<Call> {
    let flags = arguments.iter().take_while(|word| *word == LOG_JSON).count();
    let (flags, words) = arguments.split_at(flags);
    let (help, words) = match words {
        [first, rest @ ..] if first == "help" => (Some(OsString::from("--help")), rest),
        words => (None, words),
    };
    let (name, rest) = words.split_first()?;
    let tool = TOOLS.iter().find(|tool| name == tool.name)?;
    if *tool == POLICY {
        let first = rest.iter().find(|word| *word != LOG_JSON).and_then(|word| word.to_str());
        if first.is_some_and(PolicyAdminCommand::has_subcommand) {
            return None;
        }
    }
    let own = (*tool != POLICY).then_some(name);
    let arguments = flags.iter().chain(own).chain(rest).cloned().chain(help).collect();
    Some(Call { tool, arguments })
}

fn is_help(word: &OsStr) -> bool {
    word == "--help" || word == "-h" || word == "help"
}

/// Says what to do about a program that is not installed.
fn absent(tool: &Tool, dir: &Path) -> anyhow::Error {
    let Tool { name, program, package, .. } = tool;
    anyhow!(
        "`pointsman {name}` needs the program {program}, which is not in {}: install the package `pointsman`, which has \
         all programs, or build it with `cargo build --release --package {package}`",
        dir.display()
    )
}

/// Returns the directory of this program, behind links.
fn own_dir() -> anyhow::Result<PathBuf> {
    let own = env::current_exe().and_then(fs::canonicalize).context("cannot find this program's own file")?;
    Ok(own.parent().context("this program's own file is in no directory")?.to_owned())
}

/// Returns the command line with the commands of the programs that are installed. Its help names the others.
pub(super) fn listed(mut command: Command) -> Command {
    let Ok(dir) = own_dir() else { return command };
    let mut absent: Vec<&Tool> = Vec::new();
    for tool in &TOOLS {
        if !dir.join(tool.program).is_file() {
            absent.push(tool);
        } else if *tool == POLICY {
            command = command.mut_subcommand(tool.name, |policy| policy.about(tool.about));
        } else {
            command = command.subcommand(Command::new(tool.name).about(tool.about));
        }
    }
    if absent.is_empty() {
        return command;
    }
    let names: Vec<String> = absent.iter().map(|tool| format!("{} ({})", tool.needs, tool.program)).collect();
    let before = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let needs_absent = |line: &&str| example(line).is_some_and(|tool| absent.contains(&tool));
    let before = before.lines().filter(|line| !needs_absent(line)).collect::<Vec<_>>().join("\n");
    command.after_help(format!(
        "{before}\n\nNot installed: {}.\nThe package `pointsman` has all programs.",
        names.join(", ")
    ))
}

/// Returns the tool that a line of the help is an example of; `None` if this program runs it.
fn example(line: &str) -> Option<&'static Tool> {
    let words = line.strip_prefix("  pointsman ")?.split_whitespace();
    call(&words.map(OsString::from).collect::<Vec<_>>()).map(|call| call.tool)
}

/// Returns the command line with the commands of the programs that are installed and their arguments.
///
/// # Errors A program does not list its commands.
pub(super) fn with_their_commands(mut command: Command) -> anyhow::Result<Command> {
    for program in installed()? {
        let output = output_of(process(&program).arg("command-tree"))?;
        let tree: CommandTree = serde_json::from_slice(&output)
            .with_context(|| format!("{}: its commands are not those of this release", program.display()))?;
        if program.ends_with(POLICY.program) {
            let theirs = tree.into_commands();
            command = command.mut_subcommand(POLICY.name, |_| {
                Command::new(POLICY.name).about(POLICY.about).subcommands(theirs)
            });
        } else {
            let is_listed = |own: &Command| TOOLS.iter().any(|tool| tool.name == own.get_name());
            command = command.subcommands(tree.into_commands().into_iter().filter(is_listed));
        }
    }
    Ok(command)
}

/// Writes the manual pages of the programs that are installed.
///
/// # Errors
/// One of them cannot write its pages.
pub(super) fn manual_pages(dir: &Path) -> anyhow::Result<()> {
    for program in installed()? {
        output_of(process(&program).arg("man").arg(dir))?;
    }
    Ok(())
}

fn installed() -> anyhow::Result<Vec<PathBuf>> {
    let dir = own_dir()?;
    let mut programs: Vec<PathBuf> = TOOLS.iter().map(|tool| dir.join(tool.program)).collect();
    programs.dedup();
    programs.retain(|program| program.is_file());
    Ok(programs)
}

/// Returns what a program writes to standard output.
fn output_of(process: &mut Process) -> anyhow::Result<Vec<u8>> {
    let output =
        process.output().with_context(|| format!("cannot run {}", process.get_program().display()))?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", process.get_program().display(), problem.trim());
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn commands_of_other_programs_are_found_and_all_others_are_ours() {
        for (line, program, arguments) in [
            ("compare --trace t --help", "pointsman-lab", "compare --trace t --help"),
            ("--log-json trace export -- x", "pointsman-lab", "--log-json trace export -- x"),
            ("help sim", "pointsman-lab", "sim --help"),
            ("top --once", "pointsman-tools", "top --once"),
            ("policy new a --world scorer", "pointsman-policy", "new a --world scorer"),
            ("policy", "pointsman-policy", ""),
            ("help policy new", "pointsman-policy", "new --help"),
        ] {
            let found = call(&words(line)).unwrap();
            assert_eq!((found.tool.program, found.arguments), (program, words(arguments)), "{line}");
        }
        for line in [
            "",
            "serve",
            "policy promote prefill",
            "policy --log-json promote prefill",
            "policy quarantine list",
            "help",
            "--help",
            "lab",
            "-V",
        ] {
            assert_eq!(call(&words(line)), None, "{line}");
        }
        assert_eq!(call(&words("serve compare")), None);
    }
}
