//! `pointsman policy dev`: after each save it builds a policy, runs its cases, replays recorded decisions,
//! and runs the policy as the shadow of a gateway.

use std::{ffi::OsString, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::Args;
use pointsman_admin_cli::{GatewayArgs, block_on};
use pointsman_routing::SlotKind;

use self::{
    lane_files::LaneFiles,
    live::SlotName,
    session::{Options, Session, scratch},
    source::Source,
    steps::Steps,
};
use crate::policy_file::{LimitArgs, SaltArgs};

mod child;
mod console;
mod lane_files;
mod live;
mod session;
mod source;
mod steps;
mod watch;

/// Arguments of `dev`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --slot it builds and runs the cases after each save. With --slot it also replays the last decisions of \
the gateway's slot. With --policies it also installs what passed as the slot's shadow, which is called and \
compared but never obeyed, and shows how often it agrees, how it fails and what it logs.

  pointsman policy dev shortest --slot prefill --policies policies.d

Keys in a terminal: c makes the shadow the canary, p promotes (and asks first), u takes that back, d explains \
a decision in which the shadow differs, b builds again, q quits. Elsewhere it takes no keys and ends with a \
signal. At the end it removes the files that it placed, except what was promoted.

Exit code: 0; with --once 1 when the build, the cases or the installation failed; 2 for wrong use.
The token comes from --token-file, POINTSMAN_ADMIN_TOKEN_FILE or POINTSMAN_ADMIN_TOKEN.")]
pub struct DevArgs {
    /// The project directory, a formula file (NAME.formula.toml), or a directory with one.
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Slot of the gateway: prefill, decode, aggregated or decode-override.
    #[arg(long, value_parser = slot)]
    slot: Option<String>,
    /// Model, for a slot of one model.
    #[arg(long, requires = "slot")]
    model: Option<String>,
    /// The gateway's policy directory, where the shadow is installed.
    #[arg(long, value_name = "DIR", requires = "slot")]
    policies: Option<PathBuf>,
    /// Replace a shadow file that is there already.
    #[arg(long, requires = "policies")]
    replace: bool,
    /// Leave the files in place at the end.
    #[arg(long, requires = "policies")]
    keep: bool,
    /// Number of decisions to replay.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1000))]
    last: u32,
    /// The cases [default: cases.toml of the project, or beside the formula file].
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Settings for cases and replay, as a JSON object. The gateway takes those of its slot.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    settings: String,
    #[command(flatten)]
    salt: SaltArgs,
    /// Directory of the tools for scripts [default: target/tools in the project].
    #[arg(long, value_name = "DIR")]
    tools: Option<PathBuf>,
    /// Longest time of a build, of the cases and of a replay.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Make one pass, wait until the gateway runs the policy, and end.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    gateway: GatewayArgs,
}

impl DevArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let options = self.options()?;
        block_on(Session::run(options))
    }

    fn options(&self) -> anyhow::Result<Options> {
        let source = Source::open(&self.dir)?;
        let gateway = match &self.slot {
            Some(slot) => {
                let slot = SlotName { slot: slot.clone(), model: self.model.clone() };
                Some((self.gateway.client()?, slot))
            }
            None => None,
        };
        let files = match (&self.policies, &self.slot) {
            (Some(dir), Some(slot)) => {
                let model = self.model.as_deref();
                Some(LaneFiles::open(dir, slot, model, source.is_formula(), self.replace)?)
            }
            _ => None,
        };
        let tools = self.tools.iter().flat_map(|dir| ["--tools".into(), dir.clone().into()]);
        let mut settings: Vec<OsString> = vec!["--settings".into(), self.settings.clone().into()];
        settings.extend(self.limits.arguments().into_iter().map(OsString::from));
        settings.extend(["--hash-salt".into(), self.salt.hash_salt.to_string().into()]);
        let steps = Steps {
            scratch: scratch().context("creating a temporary directory")?,
            cases: self.cases()?.unwrap_or_else(|| source.cases()),
            tools: tools.collect(),
            settings,
            limit: Duration::from_secs(self.timeout),
            source,
        };
        Ok(Options { steps, gateway, files, last: self.last, once: self.once, keep: self.keep })
    }

    /// The cases that are named, by an absolute path: that is how changes are reported.
    fn cases(&self) -> anyhow::Result<Option<PathBuf>> {
        let Some(cases) = &self.cases else { return Ok(None) };
        cases.canonicalize().map(Some).with_context(|| format!("--cases {}", cases.display()))
    }
}

fn slot(text: &str) -> Result<String, String> {
    let known = SlotKind::ALL.into_iter().find(|kind| kind.as_str() == text);
    let expected = || "expected prefill, decode, aggregated or decode-override".to_owned();
    known.map(|kind| kind.as_str().to_owned()).ok_or_else(expected)
}
