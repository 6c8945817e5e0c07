//! Splits a command line into flags with their values, as argparse and clap do.

use std::cell::Cell;

use anyhow::bail;

use super::{
    flags::{self, Arity, Flag, is_variable},
    known_flag, production_flags, program, shell,
};
use crate::report::{Kind, Place, plain};

/// Limits of a command line: arguments, and bytes of all of them.
const MAX_ARGUMENTS: usize = 20_000;
const MAX_BYTES: usize = 1024 * 1024;

/// Translation of a flag whose value is not known.
const VARIABLE: (Kind, &str) =
    (Kind::Missing, "left out: the value is a variable of a shell or a template: give the value itself");

#[derive(Debug)]
pub(super) struct CommandLine {
    /// Flags in their order.
    pub(super) given: Vec<Given>,
    /// Models of workers by their URLs.
    pub(super) models: Vec<(String, String)>,
    /// Whether the router is production-stack's, so that its flags are to be translated.
    pub(super) is_production: bool,
}

/// A flag with its values.
#[derive(Debug)]
pub(super) struct Given {
    /// Name without dashes, as the translation knows it.
    pub(super) name: String,
    /// The flag as it was written, with dashes.
    pub(super) written: String,
    pub(super) values: Vec<String>,
    pub(super) place: Place,
    /// Whether the report lists it already.
    pub(super) is_told: Cell<bool>,
    /// The flag that was written, if this one stands for it.
    pub(super) original: Option<String>,
    /// Translation for every value.
    pub(super) note: Option<(Kind, &'static str)>,
    /// Whether its value is a variable, which is not known.
    pub(super) is_variable: bool,
}

impl CommandLine {
    /// Parses arguments, with or without the program before them, also within `sh -c '…'`. Without
    /// `of_production`, flags that only production-stack's router has tell that it is meant.
    ///
    /// # Errors
    /// There are too many, one is not a flag where one is expected, or a flag lacks its value.
    pub(super) fn parse(arguments: &[String], of_production: bool) -> anyhow::Result<Self> {
        let bytes: usize = arguments.iter().map(String::len).sum();
        if arguments.len() > MAX_ARGUMENTS || bytes > MAX_BYTES {
            bail!("a command line has at most {MAX_ARGUMENTS} arguments of {MAX_BYTES} bytes together");
        }
        let whole = whole_line(arguments);
        if let Some(line) = whole
            && let [words] = shell::commands(line)?.as_slice()
            && words.len() > 1
        {
            return Self::parse(words, of_production);
        }
        if let Some(script) = shell::script(program::without_launchers(arguments)).or(whole) {
            let commands = shell::commands(script)?;
            let routers: Vec<_> = commands.iter().filter(|words| program::starts_router(words)).collect();
            let named: Vec<_> = commands.iter().filter(|words| program::names_router(words)).collect();
            return match (routers.as_slice(), named.as_slice()) {
                // Of a command that only names a router, the error says why it starts none.
                ([one], _) | ([], [one]) => Self::parse_words(one, of_production),
                _ => bail!(
                    "`{}` starts {} routers: give the arguments of one after `--`",
                    plain(script),
                    routers.len()
                ),
            };
        }
        Self::parse_words(arguments, of_production)
    }

    fn parse_words(arguments: &[String], of_production: bool) -> anyhow::Result<Self> {
        let numbered = arguments.iter().enumerate().map(|(index, text)| (index + 1, text.as_str()));
        let mut rest = numbered.skip(program::length(arguments)?).peekable();
        let is_production = of_production || production_flags::is_meant(arguments.iter().map(String::as_str));
        let find = |name: &str| -> Option<Flag> {
            let of_production = is_production.then(|| production_flags::find(name)).flatten();
            of_production.or_else(|| known_flag(name))
        };
        let mut given = Vec::new();
        while let Some((number, text)) = rest.next() {
            let place = Place::Argument(number);
            let Some(flag) = text.strip_prefix("--").filter(|flag| !flag.is_empty()) else {
                bail!("{place}: `{}` is not a flag and belongs to none", plain(text));
            };
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (flag, None),
            };
            // Beside the flags of an engine, those of the router begin with `--router-`.
            let short = name.strip_prefix("router-").filter(|short| known_flag(short).is_some());
            let written = format!("--{name}");
            let name = flags::alias(if find(name).is_none() { short.unwrap_or(name) } else { name });
            let arity = find(name).map_or(Arity::Many, |flag| flag.arity);
            let mut values: Vec<String> = value.into_iter().collect();
            while values.len() < arity.most()
                && let Some((_, text)) = rest.next_if(|(_, text)| !text.starts_with("--"))
            {
                values.push(text.to_owned());
            }
            if values.len() < arity.least() {
                bail!("{place}: --{} needs a value", plain(name));
            }
            if values.len() > arity.most() {
                bail!("{place}: --{} takes no value", plain(name));
            }
            let (unknown, known): (Vec<String>, Vec<String>) =
                values.into_iter().partition(|value| is_variable(name, value));
            // One value of two, as of `--prefill URL PORT`, says nothing without the other. A selector
            // without one of its labels selects pods that were not meant.
            let is_list = arity == Arity::Many && !name.ends_with("selector");
            if unknown.is_empty() || is_list && !known.is_empty() {
                given.push(Given::new(name, &written, known.clone(), place));
            }
            if !unknown.is_empty() {
                let values = if is_list { unknown } else { known.into_iter().chain(unknown).collect() };
                let lost = Given::new(name, &written, values, place);
                given.push(Given { note: Some(VARIABLE), is_variable: true, ..lost });
            }
        }
        Ok(Self { given, models: Vec::new(), is_production })
    }

    /// Returns the last flag of this name, which counts.
    pub(super) fn last(&self, name: &str) -> Option<&Given> {
        self.given.iter().rev().find(|given| given.name == name && !given.is_variable)
    }

    /// Returns all flags of this name.
    pub(super) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Given> {
        self.given.iter().filter(move |given| given.name == name && !given.is_variable)
    }

    /// Returns whether a flag is there, whatever its value.
    pub(super) fn has(&self, name: &str) -> bool {
        self.given.iter().any(|given| given.name == name)
    }
}

impl Given {
    fn new(name: &str, written: &str, values: Vec<String>, place: Place) -> Self {
        let (name, written, is_told) = (name.to_owned(), plain(written), Cell::new(false));
        Self { name, written, values, place, is_told, original: None, note: None, is_variable: false }
    }

    /// Returns the flag as it was written, for comments.
    pub(super) fn flag(&self) -> &str {
        &self.written
    }

    /// Returns the position and the flag, for an error.
    pub(super) fn at(&self) -> String {
        format!("{}: {}", self.place, self.flag())
    }

    pub(super) fn value(&self) -> &str {
        self.values.first().map_or("", String::as_str)
    }

    /// Returns the same flag, without a report.
    pub(super) fn again(&self) -> Self {
        Self {
            name: self.name.clone(),
            written: self.written.clone(),
            values: self.values.clone(),
            place: self.place,
            is_told: Cell::new(false),
            original: self.original.clone(),
            note: self.note,
            is_variable: self.is_variable,
        }
    }

    /// Returns the flag for a report: no secret.
    pub(super) fn shown(&self) -> String {
        if let Some(original) = &self.original {
            return original.clone();
        }
        match self.values.as_slice() {
            [] => self.written.clone(),
            _ if flags::is_secret(&self.name) => format!("{} [secret]", self.written),
            values => format!("{} {}", self.written, without_passwords(&values.join(" "))),
        }
    }
}

/// A text without the credentials between `//` and `@` of a URL.
pub(super) fn without_passwords(text: &str) -> String {
    let shown = text.split(' ').map(|part| match part.split_once("://") {
        Some((scheme, rest)) if rest.contains('@') => {
            let host = rest.rsplit_once('@').map_or("", |(_, host)| host);
            format!("{scheme}://[secret]@{host}")
        }
        _ => part.to_owned(),
    });
    shown.collect::<Vec<_>>().join(" ")
}

/// Returns a command line that is one argument, as it is copied from a manifest. A flag with its value is
/// none.
fn whole_line(arguments: &[String]) -> Option<&str> {
    let [line] = arguments else { return None };
    let (first, _) = line.trim().split_once(char::is_whitespace)?;
    (!first.contains('=') || program::is_assignment(first)).then_some(line)
}
