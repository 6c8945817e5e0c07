//! `import vllm-router`, `import sglang-router` and `import production-stack`: a command line becomes
//! workers, slots, limits and timeouts.
//!
//! The flags are those of vllm-router 0.1.17, sglang-router 0.3.2 and `smg` 1.13. These routers have a common
//! origin, so one table serves all. docs/import.md has it.

use anyhow::{Context as _, bail};

use crate::{
    Imported,
    draft::Draft,
    report::{Kind, Place, Report, plain},
};

mod arguments;
mod discovery;
mod flags;
mod keys;
mod launchers;
mod limits;
mod listen;
mod policies;
mod production;
mod production_flags;
mod program;
mod shell;
mod smg_flags;
mod urls;
mod workers;

use arguments::{CommandLine, Given};

/// Router that the command line belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavor {
    Vllm,
    Sglang,
    /// The router of production-stack, which is called vllm-router, too.
    Production,
}

impl Flavor {
    /// Returns the name of the program.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm-router",
            Self::Sglang => "sglang-router",
            Self::Production => "production-stack",
        }
    }

    /// Returns the dialect of its engines.
    fn engine(self) -> &'static str {
        match self {
            Self::Vllm | Self::Production => "vllm",
            Self::Sglang => "sglang",
        }
    }
}

/// An import in progress.
struct Import<'a> {
    flavor: Flavor,
    line: &'a CommandLine,
    /// Dialect of the engines.
    engine: &'static str,
    draft: Draft,
    report: Report,
}

/// Translates the arguments of a command line.
///
/// # Errors
/// A flag has a value that the router would refuse.
pub(crate) fn import(flavor: Flavor, arguments: &[String]) -> anyhow::Result<Imported> {
    let mut line = CommandLine::parse(arguments, flavor == Flavor::Production)?;
    let mut flavor = flavor;
    if line.is_production {
        production::translate(&mut line)?;
        flavor = Flavor::Production;
    }
    let draft = Draft::default();
    let mut import =
        Import { flavor, line: &line, engine: flavor.engine(), draft, report: Report::default() };
    import.all()?;
    Ok(Imported { draft: import.draft, report: import.report })
}

impl<'a> Import<'a> {
    fn all(&mut self) -> anyhow::Result<()> {
        self.backend();
        self.listeners()?;
        if self.flavor != Flavor::Production {
            // The router of production-stack has neither.
            self.limits()?;
            self.security()?;
        }
        self.policies()?;
        self.keys()?;
        self.workers()?;
        self.discovery()?;
        self.notes();
        Ok(())
    }

    /// The engines' dialect, where a flag names it.
    fn backend(&mut self) {
        let Some(given) = self.line.last("backend") else { return };
        let (kind, ours) = match given.value() {
            "sglang" => (Kind::Translated, "engine = \"sglang\""),
            "vllm" => (Kind::Translated, "engine = \"vllm\""),
            "trtllm" => (Kind::Translated, "engine = \"trtllm\""),
            "openai" => (Kind::Translated, "engine = \"openai\""),
            _ => (Kind::Missing, "the gateway does not speak this dialect: engines need an OpenAI server"),
        };
        self.engine = match given.value() {
            "vllm" => "vllm",
            "trtllm" => "trtllm",
            "openai" => "openai",
            _ => self.engine,
        };
        self.note_translation(given, kind, ours);
    }

    /// Reports the flags whose name alone decides their translation, unknown flags, and flags of which an
    /// earlier value does not count.
    fn notes(&mut self) {
        for given in &self.line.given {
            if given.is_told.get() {
                continue;
            }
            match given.note.or_else(|| known_flag(&given.name)?.note) {
                Some((kind, ours)) => self.note_translation(given, kind, ours),
                None if self.line.last(&given.name).is_some_and(|last| last.place != given.place) => {
                    self.note_translation(
                        given,
                        Kind::Translated,
                        "left out: a later one of the same name takes its place",
                    );
                }
                None if known_flag(&given.name).is_some() => {
                    self.note_translation(
                        given,
                        Kind::Translated,
                        "left out: it has no effect without its counterpart flag",
                    );
                }
                None => {
                    let ours = format!(
                        "it is not a flag of {} that is known: check its spelling",
                        self.flavor.name()
                    );
                    self.note_translation(given, Kind::Missing, ours);
                }
            }
        }
    }

    /// Reports the result for a flag.
    fn note_translation(&mut self, given: &Given, kind: Kind, ours: impl Into<String>) {
        given.is_told.set(true);
        self.report.add(kind, given.place, given.shown(), ours);
    }

    /// Returns the number of a flag, or its default, with its origin.
    fn number(&self, flag: &str, default: i64) -> anyhow::Result<(i64, String, Option<&'a Given>)> {
        let Some(given) = self.line.last(flag) else {
            return Ok((default, self.default_source(flag), None));
        };
        let number = given.value().parse().ok();
        let number = number.with_context(|| {
            format!("{}: {}: `{}` is not a whole number", given.place, given.flag(), plain(given.value()))
        })?;
        Ok((number, self.source(given), Some(given)))
    }

    /// Returns the port of a flag, or its default, with its origin.
    fn port(&self, flag: &str, default: i64) -> anyhow::Result<(u16, String, Option<&'a Given>)> {
        let (number, source, given) = self.number(flag, default)?;
        match u16::try_from(number) {
            Ok(port) if port > 0 => Ok((port, source, given)),
            _ => {
                let at = given.map_or_else(|| format!("--{flag}"), Given::at);
                bail!("{at}: `{number}` is not a port: expected 1 to 65535")
            }
        }
    }

    /// Returns the number of a flag whose value has a fraction.
    fn fraction(&self, flag: &str, default: f64) -> anyhow::Result<(f64, String, Option<&'a Given>)> {
        let Some(given) = self.line.last(flag) else {
            return Ok((default, self.default_source(flag), None));
        };
        match given.value().parse() {
            Ok(number) if f64::is_finite(number) => Ok((number, self.source(given), Some(given))),
            _ => bail!("{}: {}: `{}` is not a number", given.place, given.flag(), plain(given.value())),
        }
    }

    /// Returns what a comment says of a value whose flag was not given.
    fn default_source(&self, flag: &str) -> String {
        match self.flavor {
            // Its own defaults are in the place of flags; it has no flag for the rest.
            Flavor::Production => "no flag of production-stack sets it".to_owned(),
            _ => format!("default of --{flag} in {}", self.flavor.name()),
        }
    }

    /// Returns what a comment says of a flag: its name as it was written, or that it is a default.
    fn source(&self, given: &Given) -> String {
        match given.place {
            Place::Default => format!("default of {} in {}", given.flag(), self.flavor.name()),
            _ => given.flag().to_owned(),
        }
    }

    /// Reports a flag that became a key, when it was given, or else its default.
    fn tell_number(&mut self, flag: &str, given: Option<&Given>, ours: &str) {
        match given {
            Some(given) => self.note_translation(given, Kind::Translated, ours),
            None => self.report.add(Kind::Translated, Place::Default, format!("--{flag}"), ours),
        }
    }
}

/// Returns a flag of vllm-router, sglang-router or smg by its name.
fn known_flag(name: &str) -> Option<flags::Flag> {
    flags::find(name).or_else(|| smg_flags::find(name))
}

#[cfg(test)]
mod tests;
