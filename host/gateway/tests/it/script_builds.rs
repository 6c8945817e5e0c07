//! Builds of scripts that start from earlier builds, as authors run them. Each test installs tools from PyPI
//! and npm.

#![allow(clippy::expect_used, reason = "helpers of tests")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tokio::time::Instant;

/// A script that an author works on.
struct Project {
    _dir: tempfile::TempDir,
    dir: PathBuf,
    cache: PathBuf,
    /// File with the rule.
    rule: PathBuf,
}

impl Project {
    fn new(language: &str, world: &str) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (project, cache) = (dir.path().join("edited"), dir.path().join("builds"));
        let new = ["policy", "new", "edited", "--world", world, "--lang", language];
        let made = Command::new(crate::programs::pointsman()).current_dir(dir.path()).args(new).output();
        assert!(made.expect("the binary runs").status.success());
        let extension = if language == "python" { "py" } else { language };
        let rule = project.join("policy").with_extension(extension);
        Self { _dir: dir, dir: project, cache, rule }
    }

    fn run(&self, command: &str, arguments: &[&str]) -> Output {
        let mut run = Command::new(crate::programs::pointsman());
        run.current_dir(&self.dir).args(["policy", command]).args(arguments);
        if command == "build" {
            run.arg("--tools").arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("tools"));
            if !arguments.contains(&"--no-cache") {
                run.arg("--cache").arg(&self.cache);
            }
        }
        run.output().expect("the binary runs")
    }

    /// Builds, and returns the component and the seconds.
    fn build(&self, arguments: &[&str]) -> (Vec<u8>, f64) {
        let begun = Instant::now();
        let built = self.run("build", arguments);
        let seconds = begun.elapsed().as_secs_f64();
        assert!(built.status.success(), "{}", text(&built));
        (fs::read(self.dir.join("edited.wasm")).expect("a component"), seconds)
    }

    /// Builds what cannot be built, and returns what the command says.
    fn refused(&self, arguments: &[&str]) -> String {
        let built = self.run("build", arguments);
        assert_eq!(built.status.code(), Some(2), "{}", text(&built));
        text(&built)
    }

    /// Runs the three cases, and returns what the command writes.
    fn test(&self) -> String {
        let limits = ["edited.wasm", "--memory-bytes", "67108864", "--deadline-ms", "20"];
        let tested = self.run("test", &limits);
        assert!(tested.status.success(), "{}", text(&tested));
        assert!(text(&tested).contains("3 passed, 0 failed\n"), "{}", text(&tested));
        text(&tested)
    }

    fn edit(&self, old: &str, new: &str) {
        let rule = fs::read_to_string(&self.rule).expect("a rule");
        assert!(rule.contains(old), "{rule}");
        fs::write(&self.rule, rule.replacen(old, new, 1)).expect("written");
    }

    fn entries(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.cache).into_iter().flatten();
        entries.map(|entry| entry.expect("readable").path()).collect()
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
#[ignore = "needs python3, npm and the network; minutes"]
fn an_edited_script_passes_its_cases_in_a_fraction_of_the_time() {
    let worlds = ["selector", "scorer", "filter", "decode-override"].map(|world| ("python", world));
    for (language, world) in worlds.into_iter().chain([("js", "selector"), ("ts", "decode-override")]) {
        let project = Project::new(language, world);
        let (first, whole) = project.build(&[]);
        assert_eq!(project.entries().len(), 1);
        let rule = fs::read_to_string(&project.rule).expect("a rule");
        let comment = if language == "python" { "# edited\n" } else { "// edited\n" };
        fs::write(&project.rule, comment.to_owned() + &rule).expect("written");
        // The first one may compile the interpreter, to try the component.
        project.build(&[]);
        let (second, fast) = project.build(&[]);
        project.test();
        assert!(fast * 2.0 < whole, "{language}, {world}: {fast:.2} s and {whole:.2} s");
        assert!(first != second && project.entries().len() == 1);
        eprintln!("{language}, {world}: {fast:.2} s after {whole:.2} s");
    }
}

#[test]
#[ignore = "needs python3, npm and the network; minutes"]
fn a_script_that_cannot_start_is_refused_in_the_words_of_the_whole_build() {
    let js = [
        ("let weight;", "let weight = ;", "policy.js:5:14: SyntaxError: Unexpected token ';'"),
        ("policy, scoring", "policy, scoring: other", "scoring"),
        ("let weight;", "let weight = missing;", "missing is not defined"),
    ];
    let python = [
        ("import math", "import math)", "unmatched ')'"),
        ("class Rule", "missing\n\n\nclass Rule", "NameError: name 'missing' is not defined"),
        ("def score(", "def select(", "cannot import name 'selecting'"),
        ("import math", "import math\nimport nothere", "No module named 'nothere'"),
        ("import math", "import math, time\ntime.sleep(0.01)\nmissing", "name 'missing' is not defined"),
    ];
    for (language, wrong) in [("js", &js[..]), ("python", &python)] {
        let project = Project::new(language, "scorer");
        project.build(&[]);
        for (old, new, reason) in wrong {
            project.edit(old, new);
            let (whole, fast) = (project.refused(&["--no-cache"]), project.refused(&[]));
            assert!(fast.contains(reason), "{new}: {fast}");
            if language == "python" {
                assert_eq!(fast, whole, "{new}");
            }
            project.edit(new, old);
        }
        project.build(&[]);
        project.test();
    }
}

/// A policy's code that runs at load time may need the clock, or more time than an instance has to start.
#[test]
#[ignore = "needs python3 and the network"]
fn a_python_policy_that_starts_only_in_the_whole_build_gets_it() {
    for source in ["import time\nSTARTED = time.time()\n", "TABLE = [n * n for n in range(3_000_000)][:9]\n"]
    {
        let project = Project::new("python", "scorer");
        let rule = fs::read_to_string(&project.rule).expect("a rule");
        fs::write(&project.rule, format!("{source}{rule}")).expect("written");
        project.build(&[]);
        project.test();
    }
    // A file of its own, which a template does not have.
    let project = Project::new("python", "scorer");
    fs::write(project.dir.join("weights.py"), "FACTOR = 1\n").expect("written");
    project.edit("import math\n", "import math\n\nfrom weights import FACTOR\n");
    project.edit("return [requests", "return [FACTOR * requests");
    project.build(&[]);
    project.test();
    assert!(project.entries().is_empty());
}

#[test]
#[ignore = "needs python3, npm and the network; minutes"]
fn a_damaged_entry_is_replaced_and_builds_at_the_same_time_do_not_disturb_each_other() {
    for language in ["python", "js"] {
        let project = Project::new(language, "scorer");
        project.build(&[]);
        let [entry] = project.entries().try_into().expect("one entry");
        let mut bytes = fs::read(&entry).expect("an entry");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&entry, &bytes).expect("written");
        project.build(&[]);
        project.test();
        assert!(fs::read(&entry).expect("an entry") != bytes);
        fs::remove_file(&entry).expect("removed");
        std::thread::scope(|scope| {
            for number in 0..3 {
                let out = format!("edited-{number}.wasm");
                let project = &project;
                scope.spawn(move || {
                    let built = project.run("build", &["--out", &out]);
                    assert!(built.status.success(), "{}", text(&built));
                });
            }
        });
        for number in 0..3 {
            fs::copy(project.dir.join(format!("edited-{number}.wasm")), project.dir.join("edited.wasm"))
                .expect("a component");
            project.test();
        }
        assert_eq!(project.entries(), [entry]);
    }
}

/// Rules that print, and use what a component lacks when their setting says so.
const PYTHON: &str = r#"
import time
import pointsman_policy as pp

class Rule(pp.Policy):
    name = "edited"
    settings = {"ask": ""}

    def configure(self, settings):
        {"": int, "clock": time.time, "wait": lambda: time.sleep(0)}[settings["ask"]]()

    def score(self, call, facts):
        print("rows", call.rows)
        return [0] * call.rows

pp.export(Rule, globals())
"#;
const JAVASCRIPT: &str = r#"
import { scorer } from "./pointsman-policy.js";

export const { policy, scoring } = scorer({
  name: "edited",
  settings: { ask: "" },
  configure: ({ ask }) => ({ "": () => {}, clock: () => Date.now(), wait: () => setTimeout(() => {}, 0) })[ask](),
  score(call) {
    console.log("rows", call.rows);
    return new Float32Array(call.rows);
  },
});
"#;
const CASES: &str = r#"
case = [
  { name = "clock", settings = { ask = "clock" }, expect = { refused = "a policy has no clock: use call.now" } },
  { name = "wait", settings = { ask = "wait" }, expect = { refused = "a policy cannot wait: answer at once" } },
  { name = "log", rows = [{}, {}, {}], expect = { costs = [0, 0, 0] } },
]
"#;

#[test]
#[ignore = "needs python3, npm and the network; minutes"]
fn a_script_logs_what_it_prints_and_says_what_to_use_instead_of_a_system() {
    for (language, rule) in [("python", PYTHON), ("js", JAVASCRIPT)] {
        let project = Project::new(language, "scorer");
        fs::write(&project.rule, rule).expect("written");
        fs::write(project.dir.join("cases.toml"), CASES).expect("written");
        // The second one starts from the first.
        for _ in 0..2 {
            project.build(&[]);
            assert!(project.test().contains(" pointsman::guest: rows 3 policy=\"edited\""), "{language}");
        }
    }
}
