//! `pointsman policy facts`: lists the facts that a policy can ask for, or shows one.

use std::{fmt::Write as _, process::ExitCode};

use anyhow::ensure;
use clap::Args;
use pointsman_guest_build::contract::{Fact, Scope, facts};
use pointsman_routing::facts::UnknownFact;
use serde_json::json;

use crate::{new::ProjectWorld, output::print};

/// Arguments of `facts`.
#[derive(Debug, Args)]
#[command(after_help = "\
A policy names its facts in `configure`. Label facts are made from the labels that operators give to workers. \
Each line has name, type, unit and range, and the value that stands for \"not known\" or \"not given\".")]
pub struct FactsArgs {
    /// Show only the fact of this name.
    name: Option<String>,
    /// Show facts as policies of this world receive them.
    #[arg(long)]
    world: Option<ProjectWorld>,
    /// Print a JSON array.
    #[arg(long)]
    json: bool,
}

impl FactsArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        if let Some(name) = &self.name {
            let unknown = || UnknownFact { scope: "request or worker", name: name.clone() };
            ensure!(facts().any(|fact| fact.name == name), unknown());
        }
        print(&if self.json { self.json() } else { self.text() })?;
        Ok(ExitCode::SUCCESS)
    }

    /// Returns the facts to show.
    fn selected_facts(&self) -> impl Iterator<Item = Fact> {
        facts().filter(|fact| self.name.as_ref().is_none_or(|name| fact.name == name))
    }

    fn text(&self) -> String {
        let width = self.selected_facts().map(|fact| fact.name.len()).max().unwrap_or_default();
        let mut text = String::new();
        for scope in [Scope::Request, Scope::Worker] {
            let mut facts = self.selected_facts().filter(|fact| fact.scope == scope).peekable();
            if facts.peek().is_none() {
                continue;
            }
            text.push_str(&self.heading(scope));
            for Fact { name, ty, meaning, unit, absent, .. } in facts {
                let absent = absent.map(|absent| format!("; when absent {absent}")).unwrap_or_default();
                let _ = writeln!(text, "  {name:width$} {ty}  {unit}{absent}\n      {meaning}");
            }
            text.push('\n');
        }
        text.push_str(
            "A u64 fact takes two values or columns, low halves first; the SDK and the helpers join them.\n",
        );
        text
    }

    fn heading(&self, scope: Scope) -> String {
        let functions = match self.functions(scope) {
            [] => String::new(),
            functions => format!(", in {}", functions.join(" and ")),
        };
        match scope {
            Scope::Request => format!("Request facts: one value each{functions}\n"),
            Scope::Worker => {
                format!("Worker facts: one column each, a value for each candidate{functions}\n")
            }
        }
    }

    /// Functions of the world that receive facts of this scope.
    fn functions(&self, scope: Scope) -> &'static [&'static str] {
        match (self.world, scope) {
            (None, _) => &[],
            (Some(ProjectWorld::Selector), _) => &["select"],
            (Some(ProjectWorld::Scorer), _) => &["score"],
            (Some(ProjectWorld::Filter), _) => &["keep"],
            (Some(ProjectWorld::DecodeOverride), Scope::Request) => &["decide", "decode-config"],
            (Some(ProjectWorld::DecodeOverride), Scope::Worker) => &["decide"],
        }
    }

    fn json(&self) -> String {
        let entry = |fact: Fact| {
            let Fact { scope, name, ty, meaning, unit, absent } = fact;
            // Only a world has functions.
            json!({
                "scope": scope.as_str(), "name": name, "type": ty, "unit": unit, "when_absent": absent,
                "meaning": meaning, "functions": self.functions(scope),
            })
        };
        let entries: Vec<_> = self.selected_facts().map(entry).collect();
        format!("{:#}\n", serde_json::Value::from(entries))
    }
}

#[cfg(test)]
mod tests {
    use pointsman_routing::facts::{RequestFact, WorkerFact};

    use super::*;

    #[test]
    fn the_list_has_every_fact_of_the_host_once_with_its_unit() {
        let listed = |scope| -> Vec<&str> {
            let facts = facts().filter(|fact| fact.scope == scope && !fact.name.contains('/'));
            facts.map(|fact| fact.name).collect()
        };
        let mut request: Vec<&str> = RequestFact::ALL.iter().map(|fact| fact.name()).collect();
        let mut worker: Vec<&str> = WorkerFact::ALL.iter().map(|fact| fact.name()).collect();
        let (mut listed_request, mut listed_worker) = (listed(Scope::Request), listed(Scope::Worker));
        for list in [&mut request, &mut worker, &mut listed_request, &mut listed_worker] {
            list.sort_unstable();
        }
        assert_eq!((listed_request, listed_worker), (request, worker));
        let families: Vec<&str> =
            facts().filter_map(|fact| fact.name.split_once('/')).map(|name| name.0).collect();
        assert_eq!(families.len(), 3, "{families:?}");
        assert!(facts().all(|fact| !fact.unit.is_empty() && !fact.meaning.is_empty()));
    }

    #[test]
    fn the_world_says_which_function_receives_a_fact() {
        let all = FactsArgs { name: None, world: None, json: false };
        assert!(all.text().starts_with("Request facts: one value each\n"), "{}", all.text());
        assert!(all.text().contains("max-tokens"), "{}", all.text());
        assert!(all.text().contains("u32  tokens; when absent 0\n"), "{}", all.text());
        let world = FactsArgs { name: None, world: Some(ProjectWorld::DecodeOverride), json: true };
        let list: Vec<serde_json::Value> = serde_json::from_str(&world.json()).expect("JSON");
        let fact = |name: &str| list.iter().find(|fact| fact["name"] == name).expect(name).clone();
        assert_eq!(fact("prompt-tokens")["functions"], json!(["decide", "decode-config"]));
        assert_eq!(fact("kv-usage")["functions"], json!(["decide"]));
        assert_eq!(fact("kv-usage")["when_absent"], "0; check `kv-usage-known`");
        assert_eq!(fact("dp-rank")["when_absent"], serde_json::Value::Null);
    }
}
