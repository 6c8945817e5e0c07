//! Programs that start another one: `timeout 3600 vllm-router …`, `docker run IMAGE …`.

use super::shell::file_name;

/// A program that starts another one.
struct Launcher {
    names: &'static [&'static str],
    /// The word that has to follow, among its options.
    command: Option<&'static str>,
    options: Options,
    /// Number of its own words after its options.
    words: usize,
}

/// Which options have a value of their own. Any has one after `=`.
enum Options {
    /// These.
    WithValue(&'static [&'static str]),
    /// All but these.
    Switches(&'static [&'static str]),
}

const fn plain(names: &'static [&'static str], with_value: &'static [&'static str]) -> Launcher {
    Launcher { names, command: None, options: Options::WithValue(with_value), words: 0 }
}

const fn run(names: &'static [&'static str], with_value: &'static [&'static str]) -> Launcher {
    Launcher { command: Some("run"), ..plain(names, with_value) }
}

const LAUNCHERS: [Launcher; 18] = [
    // Words of a shell before a command.
    plain(&["do", "then", "else", "{", "(", "!", "time"], &[]),
    plain(&["nohup", "setsid", "dumb-init", "catatonit"], &["-r", "--rewrite"]),
    plain(&["exec"], &["-a"]),
    plain(&["env"], &["-u", "--unset", "-C", "--chdir"]),
    plain(&["tini"], &["-p", "-e"]),
    plain(&["nice"], &["-n", "--adjustment"]),
    plain(&["ionice"], &["-c", "--class", "-n", "--classdata"]),
    plain(&["stdbuf"], &["-i", "--input", "-o", "--output", "-e", "--error"]),
    plain(&["sudo"], &["-u", "--user", "-g", "--group", "-D", "--chdir"]),
    plain(
        &["numactl"],
        &[
            "-N",
            "--cpunodebind",
            "-m",
            "--membind",
            "-C",
            "--physcpubind",
            "-i",
            "--interleave",
            "-p",
            "--preferred",
            "-P",
            "--preferred-many",
            "-w",
            "--weighted-interleave",
        ],
    ),
    Launcher { words: 1, ..plain(&["timeout"], &["-k", "--kill-after", "-s", "--signal"]) },
    Launcher { words: 1, ..plain(&["taskset", "gosu", "su-exec"], &[]) },
    plain(
        &["uvx"],
        &["--from", "--with", "-p", "--python", "--index", "--default-index", "--index-url", "--env-file"],
    ),
    run(
        &["uv"],
        &[
            "--with",
            "--with-requirements",
            "--with-editable",
            "-p",
            "--python",
            "--extra",
            "--group",
            "--package",
            "--directory",
            "--project",
            "--index",
            "--default-index",
            "--index-url",
            "--env-file",
        ],
    ),
    run(&["poetry", "pdm", "pixi"], &["-C", "--directory", "-P", "--project", "-p", "-e", "--environment"]),
    run(&["conda", "mamba", "micromamba"], &["-n", "--name", "-p", "--prefix", "--cwd"]),
    run(&["pipx"], &["--spec", "--python", "--index-url", "-i", "--pip-args"]),
    Launcher {
        command: Some("run"),
        options: Options::Switches(&[
            "-d",
            "--detach",
            "-i",
            "--interactive",
            "-t",
            "--tty",
            "-P",
            "--publish-all",
            "-q",
            "--quiet",
            "--rm",
            "--init",
            "--privileged",
            "--read-only",
            "--no-healthcheck",
            "--oom-kill-disable",
        ]),
        // The image.
        words: 1,
        ..plain(&["docker", "podman", "nerdctl"], &[])
    },
];

/// What belongs to a program that starts another one.
pub(super) struct Own<'a> {
    /// Number of its words, without its name.
    pub(super) length: usize,
    /// The image of a container.
    pub(super) image: Option<&'a str>,
}

/// Returns what of the words `rest` belongs to the program `text`, if it starts another one.
pub(super) fn own_words<'a>(text: &str, rest: &'a [String]) -> Option<Own<'a>> {
    let name = file_name(text);
    let launcher = LAUNCHERS.iter().find(|launcher| launcher.names.contains(&name))?;
    let (mut at, mut command) = (0, launcher.command);
    while let Some(word) = rest.get(at) {
        if word == "--" {
            at += 1;
            break;
        } else if word.starts_with('-') && word.len() > 1 {
            at += 1 + usize::from(launcher.options.takes_next(word));
        } else if let Some(expected) = command.take() {
            if word != expected {
                return None;
            }
            at += 1;
        } else {
            break;
        }
    }
    if command.is_some() {
        return None;
    }
    let length = at + launcher.words;
    let last = rest.get(..length)?.last().map(String::as_str);
    Some(Own { length, image: last.filter(|_| matches!(launcher.options, Options::Switches(_))) })
}

impl Options {
    /// Returns whether the value of an option is the next word.
    fn takes_next(&self, option: &str) -> bool {
        if option.contains('=') {
            return false;
        }
        match self {
            Self::WithValue(names) => names.contains(&option),
            Self::Switches(names) => {
                // `-it` is `-i -t`.
                let short = option.strip_prefix('-').filter(|letters| !letters.starts_with('-'));
                let is_switch = |letter: char| {
                    names.iter().any(|name| name.strip_prefix('-') == Some(&*letter.to_string()))
                };
                !(names.contains(&option) || short.is_some_and(|letters| letters.chars().all(is_switch)))
            }
        }
    }
}
