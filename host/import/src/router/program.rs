//! The program of a command line: the words before its flags, and whether they start a router.

use anyhow::anyhow;

use super::{flags::is_variable, launchers, shell::file_name};
use crate::report::plain;

/// Words that may stand before the first flag.
const PROGRAMS: [&str; 13] = [
    "sgl-model-gateway",
    "vllm-router",
    "sglang-router",
    "sglang_router",
    "smg",
    "amg",
    "launch",
    "start",
    "launch_router",
    "vllm_router.launch_router",
    "sglang_router.launch_router",
    "smg.launch_router",
    "vllm_router.app",
];
/// Beginnings of the modules of routers.
const MODULES: [&str; 3] = ["vllm_router", "sglang_router", "smg."];
/// Options of Python that have a value.
const PYTHON_OPTIONS: [&str; 2] = ["-X", "-W"];

/// What the words before the flags say.
pub(super) struct Program {
    /// Number of these words.
    end: usize,
    /// Whether one of them is a router.
    names_router: bool,
    /// Why they cannot all be passed over.
    problem: Option<anyhow::Error>,
}

/// Returns the number of words before the first flag of a router.
///
/// # Errors
/// A word is neither a program nor a part of its start.
pub(super) fn length(words: &[String]) -> anyhow::Result<usize> {
    let program = Program::of(words);
    program.problem.map_or(Ok(program.end), Err)
}

/// Returns whether a command starts a router. A router that is an argument of another program is not
/// started.
pub(super) fn starts_router(words: &[String]) -> bool {
    Program::of(words).names_router
}

/// Returns a command line without the programs at its beginning that start others.
pub(super) fn without_launchers(mut words: &[String]) -> &[String] {
    while let Some((first, rest)) = words.split_first() {
        let own = launchers::own_words(first, rest).map(|own| own.length);
        let Some(own) = own.or_else(|| is_assignment(first).then_some(0)) else { break };
        words = rest.get(own..).unwrap_or_default();
    }
    words
}

/// Returns whether a word of a command is the program or the module of a router.
pub(super) fn names_router(words: &[String]) -> bool {
    words.iter().any(|word| is_router(word))
}

impl Program {
    fn of(words: &[String]) -> Self {
        let mut program = Self { end: 0, names_router: false, problem: None };
        // `cargo run --release -- …` has flags of its own.
        if words.first().is_some_and(|text| text == "cargo") {
            program.end = words.iter().position(|text| text == "--").map_or(words.len(), |at| at + 1);
        }
        let mut in_python = false;
        while let Some(text) = words.get(program.end).filter(|text| !is_flag(text)) {
            program.end += 1;
            let rest = words.get(program.end..).unwrap_or_default();
            if let Some(own) = launchers::own_words(text, rest) {
                program.end += own.length;
                program.names_router |= own.image.is_some_and(|image| is_router(without_tag(image)));
                in_python = false;
                continue;
            }
            let is_unknown = is_variable("", text) && names_router_before_flags(rest);
            in_python |= is_unknown || file_name(text).starts_with("python");
            let of_python = in_python && (text.starts_with('-') || text.ends_with(".py"));
            program.names_router |= is_router(text);
            if in_python && PYTHON_OPTIONS.contains(&text.as_str()) {
                program.end += 1;
            } else if let Some(problem) = starts_engines(text, before(words, program.end)) {
                program.problem = Some(problem);
                break;
            } else if !(is_program(text) || is_unknown || of_python || is_assignment(text)) {
                program.problem = Some(unknown(text, rest));
                break;
            }
        }
        program
    }
}

/// Returns the word before the one that ends at `end`.
fn before(words: &[String], end: usize) -> Option<&String> {
    words.get(end.checked_sub(2)?)
}

/// Returns the error of a word that has a router start the engines, too. `before`: the word before it.
fn starts_engines(text: &str, before: Option<&String>) -> Option<anyhow::Error> {
    if is_module(text) && text.ends_with(".launch_server") {
        return Some(anyhow!(
            "`{}` starts the engines, too: start them with `sglang.launch_server`, and import the arguments of \
             `sglang_router.launch_router --worker-urls URL…`",
            plain(text)
        ));
    }
    let is_smg = before.is_some_and(|program| ["smg", "amg"].contains(&file_name(program)));
    (text == "serve" && is_smg).then(|| {
        anyhow!(
            "`smg serve` starts the engines, too: start them by themselves (`vllm serve`, `sglang.launch_server`), and \
             import the arguments of `smg launch --worker-urls URL…`"
        )
    })
}

/// Returns the error of a word that is not passed over. `rest`: the words after it.
fn unknown(text: &str, rest: &[String]) -> anyhow::Error {
    let text = plain(text);
    if names_router(rest) {
        anyhow!(
            "`{text}` is not a program that `import` knows as one that starts others: give the arguments of the router after `--`"
        )
    } else {
        anyhow!("`{text}` is not a flag: give the arguments of the router after `--`")
    }
}

fn is_flag(text: &str) -> bool {
    text.starts_with("--") && text != "--"
}

fn names_router_before_flags(words: &[String]) -> bool {
    words.iter().take_while(|text| !is_flag(text)).any(|text| is_router(text))
}

fn is_program(text: &str) -> bool {
    let name = file_name(text);
    name == "-m" || name == "--" || name.starts_with("python") || PROGRAMS.contains(&name) || is_module(name)
}

fn is_module(name: &str) -> bool {
    MODULES.iter().any(|module| name.starts_with(module))
}

/// Returns whether a word is the program or the module of a router.
fn is_router(text: &str) -> bool {
    let name = file_name(text);
    let routers = ["smg", "amg", "sgl-model-gateway"];
    routers.contains(&name) || is_module(name) || PROGRAMS.contains(&name) && name.contains("router")
}

/// Returns the image of a container without its tag and its digest.
fn without_tag(image: &str) -> &str {
    let name = image.split('@').next().unwrap_or(image);
    name.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')).map_or(name, |(name, _)| name)
}

/// Returns whether a word sets a variable of the program's environment.
pub(super) fn is_assignment(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.split_once('=').is_some_and(|(name, _)| !name.is_empty() && name.bytes().all(fits))
}
