//! `pointsman policy inspect`: describes a policy file and checks whether this host would load it.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;

use crate::{
    output::print,
    policy_file::{LimitArgs, read, refused},
};

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit code: 0 when the host would load the policy, 1 when the policy or its settings are refused, 2 when the
file cannot be read or is not a policy.")]
pub struct InspectArgs {
    /// The component, or core module with embedded WIT metadata.
    file: PathBuf,
    /// Settings, as a JSON object.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    settings: String,
    #[command(flatten)]
    limits: LimitArgs,
}

impl InspectArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let found =
            pointsman_policy_runtime::inspect(&read(&self.file)?, &self.settings, self.limits.limits())
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
        let code = match found.policy {
            Ok(policy) => {
                text.push_str(&format!(
                    "policy    {} {}\nrequest   {}\nworkers   {}\nadmitted  yes\n",
                    policy.name,
                    policy.version,
                    list(&policy.request_facts),
                    list(&policy.worker_facts),
                ));
                ExitCode::SUCCESS
            }
            Err(refusal) => {
                text.push_str(&format!("admitted  no ({}): {refusal}\n", refusal.kind()));
                ExitCode::FAILURE
            }
        };
        print(&text)?;
        Ok(code)
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(" ") }
}
