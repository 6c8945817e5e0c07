//! The configuration: a file, as it is written, and the same after validation.
//!
//! ```text
//! text -> parse -> Config -> resolve -> Settings { Config, Credentials of the files that it names }
//! ```
//! A key is written once, as a field of its section: the attribute `section` makes the rest of it. Every step
//! reports all problems at once, each with its dotted path and, for a file, its line. The other modules of
//! the gateway use the values from here; this module uses none of theirs.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use pointsman_config_file::section;
use pointsman_workers::WorkerSpec;

mod auth;
mod credentials;
mod decisions;
mod discovery;
mod environment;
mod ext_proc;
mod http2;
mod key_digest;
mod models;
mod policies;
mod queue;
pub mod reload;
mod replicas;
mod resolve;
mod salt;
mod secret;
mod sections;
mod server;
pub mod settings;
mod show;
mod slots;
mod tenants;
#[cfg(test)]
mod tests;
mod tls;
mod traces;
mod upstream;

pub use auth::{Auth, CertificateEntry, Jwt, KeyEntry, OperatorEntry, Role};
pub(crate) use auth::{JwtAlgorithm, NameKind};
pub(crate) use credentials::{Credentials, JwtSettings, KeySettings, KeySource};
pub use decisions::{DecisionLogSettings, Decisions};
pub use discovery::{
    Discovery, DiscoveryDns, DiscoveryEtcd, DiscoveryFile, DiscoveryFileFormat, DiscoveryKubernetes,
    DiscoveryResource, DiscoveryScheme,
};
pub use environment::Environment;
pub use ext_proc::ExtProc;
pub use http2::Http2;
pub use key_digest::KeyDigest;
pub(crate) use key_digest::{is_key_of, sha256};
pub use models::{ContinuationForm, Model, TokenSource};
pub use pointsman_config_file::{ConfigErrors, Problem};
pub use pointsman_orchestration::LegOrder;
pub use policies::Policies;
pub use queue::{Queue, QueueOfModel};
pub use replicas::{Replicas, ReplicasTls};
pub use salt::HashSalt;
pub use secret::Secret;
pub use sections::{Index, Limits, Probe, Routing, Timeouts};
pub use server::Server;
pub use slots::{PartEntry, ScorerEntry, SlotEntry, TrialEntry};
pub(crate) use tenants::ALL_TENANTS;
pub use tenants::{TenantEntry, TenantModelEntry};
pub use tls::Tls;
pub use traces::{SemconvVersion, Traces};
pub use upstream::{Upstream, UpstreamTls};

use pointsman_config_file::{Lines, Parsed, UnreadElements};
use settings::Settings;

/// The configuration as it is written. Every key has a default; the sections define them.
#[section]
pub struct Config {
    /// Listeners, and what clients and operators may do.
    #[key(nested, by_key)]
    pub server: Server,
    /// Who may call, and as whom. See "Who may call".
    #[key(nested, by_key)]
    pub auth: Auth,
    /// Routing of requests.
    #[key(nested, by_key)]
    pub routing: Routing,
    /// Requests that wait while every eligible worker is busy, or while max_inflight requests are in flight.
    #[key(nested, by_key)]
    pub queue: Queue,
    /// Share and limits of a tenant. A key that is left out takes its value from [tenants."*"], which applies
    /// to each tenant without a section, and to all requests without a tenant together.
    #[key(example = "\"*\"", nested, by_key)]
    pub tenants: BTreeMap<String, TenantEntry>,
    /// Where policies come from, which files are trusted, and what a policy may use.
    #[key(nested, by_key)]
    pub policies: Policies,
    /// Prefix index: which worker holds which prefix.
    #[key(nested, by_key)]
    pub index: Index,
    /// Limits for clients; limits.md lists these and all other bounds.
    #[key(nested, by_key)]
    pub limits: Limits,
    /// Record of decisions, see receipts.md.
    #[key(nested, by_key)]
    pub decisions: Decisions,
    /// Time limits. See "Timeouts of engines".
    #[key(nested, by_key)]
    pub timeouts: Timeouts,
    /// OpenTelemetry traces of requests. See "Traces".
    #[key(nested, by_key)]
    pub traces: Traces,
    /// Calls to workers.
    #[key(nested, by_key)]
    pub upstream: Upstream,
    /// Probes of workers.
    #[key(nested, by_key)]
    pub probe: Probe,
    /// Workers that are not in this file, see discovery.md.
    #[key(nested, by_key)]
    pub discovery: Discovery,
    /// Endpoint picker for Envoy, see envoy.md.
    #[key(nested, by_key)]
    pub ext_proc: ExtProc,
    /// Exchange of load between the gateways of one fleet, see replicas.md.
    #[key(nested, by_key)]
    pub replicas: Replicas,
    /// Properties of a model, and of its adapters, that engines do not report.
    #[key(example = "my-model", nested, by_key)]
    pub models: BTreeMap<String, Model>,
    /// A worker. Leave out what its engine reports; see "Facts of an engine".
    #[serde(serialize_with = "show::workers")]
    pub workers: Vec<WorkerSpec>,
    /// Lines of the keys.
    #[serde(skip)]
    origin: Origin,
}

/// The file that a configuration came from.
#[derive(Clone, Debug, Default, PartialEq)]
struct Origin {
    file: Option<PathBuf>,
    lines: Lines,
    /// Elements of arrays that could not be read and are missing from the configuration.
    unread: UnreadElements,
    flags: Flags,
}

/// Values from the command line and from the environment.
#[derive(Clone, Debug, Default, PartialEq)]
struct Flags {
    /// Flags and environment variables by the dotted path of the value that they give.
    by_path: BTreeMap<String, String>,
    /// Problems of flags that could not be read.
    problems: Vec<Problem>,
}

/// Keys with secret values: messages do not show them, and they may be in a file or in the environment.
const SECRET_KEYS: [&str; 7] =
    ["admin_token", "api_key", "hash_salt", "log_salt", "digest", "headers", "trusted_keys"];

/// Reads a file and parses it. Variables of the environment take the place of its values.
///
/// # Errors
/// The file cannot be read, or is not TOML.
fn read(path: Option<&Path>, environment: &Environment) -> Result<(Config, Vec<Problem>), ConfigErrors> {
    let text = path.map(pointsman_config_file::read).transpose()?.unwrap_or_default();
    let file = path.map(Path::to_owned);
    let mut parsed = parse(&text, environment)
        .map_err(|problems| ConfigErrors::new(file.clone(), problems, &Lines::default()))?;
    parsed.0.origin.file = file;
    Ok(parsed)
}

/// Parses the text of a file. Variables of the environment take the place of its values.
///
/// # Errors
/// The text is not TOML: all syntax errors.
fn parse(text: &str, environment: &Environment) -> Result<(Config, Vec<Problem>), Vec<Problem>> {
    let Parsed { value, mut problems, lines, unread } =
        pointsman_config_file::parse_with::<Config>(text, &SECRET_KEYS, environment.overrides())?;
    problems.extend(environment.problems().iter().cloned());
    problems.iter_mut().for_each(slots::list_policies);
    let mut config = value;
    (config.origin.lines, config.origin.unread) = (lines, unread);
    for given in environment.overrides() {
        config.given_by(given.path(), given.name.clone());
    }
    Ok((config, problems))
}

impl Config {
    /// Returns the JSON Schema of the file, with the additional parts that the reference needs.
    #[must_use]
    pub(crate) fn schema() -> serde_json::Value {
        let mut schema = schemars::schema_for!(Self);
        schema.insert("title".to_owned(), "Configuration of pointsman".into());
        schema.into()
    }

    /// Reads a file without validating the values.
    ///
    /// # Errors
    /// The file cannot be read or is not TOML, or keys or types are wrong: all problems with their lines.
    pub fn read(path: &Path) -> Result<Self, ConfigErrors> {
        let (config, problems) = read(Some(path), &Environment::default())?;
        if problems.is_empty() { Ok(config) } else { Err(config.errors(problems)) }
    }

    /// Reads a file, applies the environment, then `overrides`, and validates the result. Each takes
    /// precedence over what was before it.
    ///
    /// # Errors
    /// Problems of [`Config::read`] and of [`Config::resolve`] together.
    pub fn load(
        path: Option<&Path>,
        environment: &Environment,
        overrides: impl FnOnce(&mut Self),
    ) -> Result<Self, ConfigErrors> {
        let (config, problems) = Self::load_with_problems(path, environment, overrides)?;
        if problems.is_empty() { Ok(config) } else { Err(config.errors(problems)) }
    }

    /// Like [`Config::load`], but returns the readable values together with all problems.
    ///
    /// # Errors
    /// The file cannot be read or is not TOML.
    pub(crate) fn load_with_problems(
        path: Option<&Path>,
        environment: &Environment,
        overrides: impl FnOnce(&mut Self),
    ) -> Result<(Self, Vec<Problem>), ConfigErrors> {
        let (mut config, mut problems) = read(path, environment)?;
        overrides(&mut config);
        problems.extend(config.origin.flags.problems.clone());
        let unread: Vec<String> = problems.iter().map(|problem| problem.path.clone()).collect();
        let found = config.in_file(resolve::resolve(&config).1).into_iter();
        // A value that cannot be read is not missing, too.
        problems.extend(found.filter(|problem| problem.path.is_empty() || !unread.contains(&problem.path)));
        Ok((config, problems))
    }

    /// Notes that the value at `path` came from a flag, so that its problems name the flag.
    pub(crate) fn given_by(&mut self, path: impl Into<String>, flag: impl Into<String>) {
        self.origin.flags.by_path.insert(path.into(), flag.into());
    }

    /// Notes a flag that could not be read.
    pub(crate) fn refuse_flag(&mut self, flag: String, message: String) {
        self.origin.flags.problems.push(Problem { flag: Some(flag), ..Problem::new("", message) });
    }

    /// Validates the values.
    ///
    /// # Errors
    /// All problems.
    pub fn resolve(&self) -> Result<Settings, ConfigErrors> {
        let (settings, problems) = resolve::resolve(self);
        if problems.is_empty() { Ok(settings) } else { Err(self.errors(self.in_file(problems))) }
    }

    /// Returns the settings as far as the values are valid: for a check that looks for further problems.
    pub(crate) fn settings_to_check(&self) -> Settings {
        resolve::resolve(self).0
    }

    /// Validates the values, for callers that do not need the settings.
    ///
    /// # Errors
    /// Same as [`Config::resolve`].
    pub fn check(&self) -> Result<(), ConfigErrors> {
        self.resolve().map(drop)
    }

    /// Gives problems of values the flags that the values came from, or their paths in the file.
    pub(crate) fn in_file(&self, mut problems: Vec<Problem>) -> Vec<Problem> {
        for problem in &mut problems {
            problem.flag = problem.flag.take().or_else(|| self.origin.flags.of(&problem.path));
            if problem.flag.is_none() {
                problem.path = self.origin.unread.path_in_file(&problem.path);
            }
        }
        problems
    }

    /// Returns the problems with their places in the file.
    pub(crate) fn errors(&self, problems: Vec<Problem>) -> ConfigErrors {
        ConfigErrors::new(self.origin.file.clone(), problems, &self.origin.lines)
    }
}

impl Flags {
    /// Returns the flag that gave the value at `path`, or a value around it.
    fn of(&self, path: &str) -> Option<String> {
        let gave = |given: &str| {
            path.strip_prefix(given).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        self.by_path.iter().find(|(given, _)| gave(given)).map(|(_, flag)| flag.clone())
    }
}
