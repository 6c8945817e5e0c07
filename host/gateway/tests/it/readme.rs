//! The commands of the README and of the two pages for newcomers work as written: simulated engines, a
//! gateway, a request, and a policy.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "helpers of tests may fail as tests do"
)]

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use pointsman_embedded_policies::LEAST_LOADED;
use pointsman_rig::fleet::free_port;
use serde_json::Value;

use crate::programs;

/// The commands of a page below the repository's root, one text for each block. Blocks with a language are
/// not commands.
fn commands(page: &str) -> Vec<String> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page)).unwrap();
    let fenced = format!("\n{page}").split("\n```").skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    fenced.iter().filter_map(|block| block.strip_prefix('\n')).map(|block| format!("{block}\n")).collect()
}

/// The commands of a section of the README.
fn blocks(title: &str) -> Vec<String> {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    let section = readme.split("\n## ").find(|section| section.lines().next() == Some(title)).unwrap();
    section.split("```\n").skip(1).step_by(2).map(str::to_owned).collect()
}

/// Ends what a shell started.
struct Shell(Child);

impl Drop for Shell {
    fn drop(&mut self) {
        // The shell leads a process group: engines and gateway are in it.
        let group = format!("-{}", self.0.id());
        let _ = Command::new("kill").args(["-TERM", "--", &group]).status();
        let _ = self.0.wait();
    }
}

/// Ports of the pages.
const WRITTEN: [&str; 5] = ["8001", "8002", "8003", "8080", "9090"];

/// A folder in which the README's commands run, and the ports that take the place of its own: those may be
/// taken on this machine, and are the only thing that differs from the text.
struct Terminal {
    dir: tempfile::TempDir,
    ports: Vec<String>,
}

impl Terminal {
    fn open() -> Self {
        let free = std::iter::repeat_with(|| free_port().unwrap().to_string());
        // Within a port that contains one of the pages, that one would be replaced too.
        let ports =
            free.filter(|free| !WRITTEN.iter().any(|written| free.contains(written))).take(5).collect();
        Self { dir: tempfile::tempdir().unwrap(), ports }
    }

    fn bash(&self, script: &str) -> Command {
        use std::os::unix::process::CommandExt as _;
        let script = WRITTEN
            .iter()
            .zip(&self.ports)
            .fold(script.to_owned(), |text, (port, free)| text.replace(port, free));
        // Without flags, these are the defaults.
        let [.., clients, admin] = &self.ports[..] else { panic!("{:?}", self.ports) };
        let listen =
            format!("pointsman serve --listen 127.0.0.1:{clients} --admin-listen 127.0.0.1:{admin} ");
        let bin = Path::new(programs::pointsman()).parent().unwrap();
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("bash");
        command.args(["-euc", &script.replace("pointsman serve ", &listen)]);
        command.current_dir(self.dir.path()).env("PATH", path).process_group(0);
        command.env("POINTSMAN_ADMIN_URL", format!("http://127.0.0.1:{admin}"));
        command
    }

    /// Runs a line of commands for policy authors.
    ///
    /// A build needs crates, and the cases are of its policy: the ignored tests of `policy new` run both.
    /// Here a built-in policy takes the place of the file.
    fn follow(&self, line: &str) {
        let command = line.split('#').next().unwrap().trim();
        let words: Vec<&str> = command.split(' ').collect();
        if words[0] == "pointsman" {
            assert!(programs::parses(&words), "{command}");
        }
        match words[..] {
            ["pointsman", "policy", "build", ..] => {
                fs::write(self.dir.path().join("shortest/shortest.wasm"), LEAST_LOADED).unwrap();
            }
            ["pointsman", "policy", "test", .., last] => {
                assert!(self.dir.path().join(last).is_file(), "{command}")
            }
            _ => assert!(self.bash(command).status().unwrap().success(), "{command}"),
        }
    }

    /// Starts a script that serves, and waits until its gateway listens.
    fn serve(&self, script: &str) -> (Shell, impl BufRead) {
        let mut serving =
            self.bash(script).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().map(Shell).unwrap();
        let mut out = BufReader::new(serving.0.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("\"admin\"") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "serve ended");
        }
        // The caller keeps `out`, since the server may still write to it.
        (serving, out)
    }

    /// Runs a command again until its output has the wanted text, and returns the output.
    fn until(&self, script: &str, wanted: &str) -> String {
        for _ in 0..400 {
            let output = self.bash(script).stderr(Stdio::null()).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            if text.contains(wanted) {
                return text;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        panic!("{script} never prints {wanted}");
    }
}

#[test]
fn the_commands_of_the_readme_work_as_written_with_simulated_engines() {
    let terminal = Terminal::open();
    let (install, engines, policy) = (blocks("Install"), blocks("Your engines"), blocks("Your policy"));
    assert!(
        install[0].contains("cargo build --release")
            && install[0].contains("export PATH=\"$PWD/target/release:$PATH\"")
    );
    let _serving = terminal.serve(&engines[0]);
    // The gateway learns the model from the engines.
    let answer: Value = serde_json::from_str(&terminal.until(&engines[1], "choices")).unwrap();
    assert_eq!(answer["object"], "chat.completion", "{answer}");
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() > 0, "{answer}");

    policy[0].lines().for_each(|line| terminal.follow(line));
    let ask = engines[1].replace("curl -s ", "curl -si -H 'x-pointsman-decision: 1' ");
    terminal.until(&ask, "least-loaded@");
}

#[test]
fn the_two_pages_for_newcomers_work_as_written_with_simulated_engines() {
    let terminal = Terminal::open();
    let [start, request, state, decisions, lose, again] = &commands("docs/first-gateway.md")[..] else {
        panic!("the page has other blocks: {:#?}", commands("docs/first-gateway.md"))
    };
    let _serving = terminal.serve(start);
    // A request that comes before the prefill workers are known has no decision of that leg.
    terminal.until("curl -s http://127.0.0.1:9090/readyz", "\"remote_prefill\":{\"tiny\":\"active\"}");
    terminal.until(request, "choices");
    let slots = terminal.until(state, "eligible");
    assert!(slots.contains("decode-override") && slots.contains("kv-aware"), "{slots}");
    let three = terminal.until(decisions, "prefill");
    let id =
        three.lines().find(|line| line.contains(" prefill ")).unwrap().split_whitespace().next().unwrap();
    terminal.until(&format!("pointsman decisions {id}"), "was chosen at cost");
    let lost = terminal.until(lose, "");
    assert_eq!(lost.lines().take(4).collect::<Vec<_>>(), ["200"; 4], "{lost}");
    terminal.until("pointsman workers", "unhealthy");
    let _engine = terminal.bash(again).stdout(Stdio::null()).spawn().map(Shell).unwrap();
    terminal.until("pointsman workers | grep -c eligible", "3");

    let [new, build, install, ask, broken, repair, rollback, undo, remove] =
        &commands("docs/first-policy.md")[..]
    else {
        panic!("the page has other blocks: {:#?}", commands("docs/first-policy.md"))
    };
    [new, build].iter().flat_map(|block| block.lines()).for_each(|line| terminal.follow(line));
    terminal.follow(install);
    // The page waits for its policy, in whose place a built-in one runs here.
    let (wait, ask) = ask.split_once("curl").unwrap();
    let ask = &format!("curl{ask}");
    terminal.until(&wait.replace(" shortest ", " least-loaded "), "least-loaded");
    terminal.until(ask, "least-loaded@2");
    // The file is refused, and the policy before it serves.
    terminal.until(broken, "least-loaded");
    terminal.until("curl -s http://127.0.0.1:9090/policies", "not WebAssembly: the file is 9 bytes");
    terminal.until(ask, "least-loaded@2");
    terminal.follow(repair);
    // The gateway reads the file again before it accepts the undo.
    terminal.follow(rollback);
    terminal.until(ask, "prefill=");
    let answer = terminal.until(ask, "prefill=");
    assert!(answer.contains(" kv-aware@3 policy, decode="), "{answer}");
    terminal.follow(undo);
    terminal.until(ask, "least-loaded@4");
    terminal.follow(remove);
}
