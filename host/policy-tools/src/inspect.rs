//! `pointsman policy inspect`: describes a policy file and checks whether this host would load it.

use std::{collections::BTreeSet, path::PathBuf, process::ExitCode};

use clap::Args;
use pointsman_policy_runtime::{Refusal, check_file_name, digest, with_hashed_tenants};
use pointsman_routing::{Policy as _, World};

use crate::{
    output::{conclude, escaped},
    policy_file::{LimitArgs, PolicyFile, formulas, is_formula, read, refused},
};

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
A name like that of a slot's file is checked, too: `prefil.wasm` runs in no slot.
Exit code: 0 when the host would load the policy, 1 when the policy, its settings or the file's name are \
refused, 2 when the file cannot be read or is not a policy.")]
pub struct InspectArgs {
    /// The component, core module with embedded WIT metadata, or formula file (`NAME.formula.toml`).
    file: PathBuf,
    /// Settings, as a JSON object.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    settings: String,
    #[command(flatten)]
    limits: LimitArgs,
}

impl InspectArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        if is_formula(&self.file) {
            return self.formula();
        }
        let found = pointsman_policy_runtime::inspect(
            &read(&self.file)?,
            &with_hashed_tenants(&self.settings, 0),
            self.limits.limits(),
        )
        .map_err(|refusal| refused(&self.file, &refusal))?;
        let form = if found.core_module { "core module with WIT metadata" } else { "component" };
        let mut text = format!(
            "file      {}\nsha256    {}\nsize      {} bytes, {form}\nworld     {}\ncontract  {}\n\
             imports   {}\ngrants    {}\nexports   {}\n",
            self.file.display(),
            found.digest,
            found.size,
            found.world,
            found.contract,
            list(&found.imports),
            list(&found.needs.iter().map(|grant| grant.as_str().to_owned()).collect::<Vec<_>>()),
            list(&found.exports),
        );
        let facts = found.policy.map(|policy| {
            text.push_str(&format!("policy    {} {}\n", policy.name, policy.version));
            (policy.request_facts, policy.worker_facts)
        });
        admission(text, facts.and_then(|facts| self.check_name(found.world).map(|()| facts)))
    }

    fn check_name(&self, world: World) -> Result<(), Refusal> {
        let name = self.file.file_name().unwrap_or_default().to_string_lossy();
        check_file_name(&name, world)
    }

    /// Checks a formula file, and tries it as the gateway does.
    fn formula(&self) -> anyhow::Result<ExitCode> {
        let bytes = read(&self.file)?;
        let text = format!(
            "file      {}\nsha256    {}\nsize      {} bytes, formulas\n",
            self.file.display(),
            digest(&bytes),
            bytes.len(),
        );
        let outcome = match formulas(&bytes, 0) {
            Err(refusal) => Err(refusal),
            Ok(_) => {
                let file = PolicyFile::read(&self.file, &self.limits)?;
                file.load("{}")
                    .and_then(|policy| self.check_name(policy.info().world).map(|()| file.facts(&policy)))
            }
        };
        let sorted = |facts: BTreeSet<String>| facts.into_iter().collect();
        admission(text, outcome.map(|(request, worker)| (sorted(request), sorted(worker))))
    }
}

/// Adds the facts that a policy asks for, of the request and of the workers, or why it is refused, and prints
/// the description.
fn admission(
    mut text: String,
    facts: Result<(Vec<String>, Vec<String>), Refusal>,
) -> anyhow::Result<ExitCode> {
    let code = match facts {
        Ok((request, worker)) => {
            let (request, worker) = (list(&request), list(&worker));
            text.push_str(&format!("request   {request}\nworkers   {worker}\nadmitted  yes\n"));
            ExitCode::SUCCESS
        }
        Err(refusal) => {
            text.push_str(&format!("admitted  no ({}): {refusal}\n", refusal.kind()));
            ExitCode::FAILURE
        }
    };
    conclude(&escaped(&text), code)
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(" ") }
}
