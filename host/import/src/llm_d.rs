//! `import llm-d`: an `EndpointPickerConfig` becomes slots, an override, a queue and sources of workers.
//!
//! The rules follow `llm-d/llm-d-router` at ebab687. docs/import.md has the table.

use anyhow::{Context as _, anyhow};

use crate::{
    Imported,
    draft::Draft,
    kubernetes,
    report::{Kind, Place, Report, plain},
    yaml::Node,
};

mod config;
mod data;
mod document;
mod filters;
mod flow;
mod handler;
mod notes;
mod prefix;
mod profile;
mod scorers;
mod slot;

use config::{Config, Plugin};

/// Values that the file does not contain.
#[derive(Debug)]
pub(crate) struct Target {
    /// Label selector of the pods.
    pub(crate) selector: Option<String>,
    pub(crate) namespace: String,
    pub(crate) port: String,
    /// Dialect of the engines.
    pub(crate) engine: String,
    /// Whether Envoy asks the gateway.
    pub(crate) ext_proc: bool,
}

impl Target {
    /// Refuses values that the gateway would refuse.
    fn check(&self) -> anyhow::Result<()> {
        if let Some(text) = &self.selector {
            let problem = || anyhow!("--selector: `{}` is not a selector of labels", plain(text));
            kubernetes::selector(text).ok_or_else(problem)?;
            kubernetes::check_namespace(&self.namespace).context("--namespace")?;
            kubernetes::check_ports(&self.port).context("--port")?;
        }
        Ok(())
    }
}

/// An import in progress.
struct Import<'a> {
    config: &'a Config<'a>,
    target: &'a Target,
    draft: Draft,
    report: Report,
    /// Maximum number of requests of a worker, with its origin.
    max_concurrency: Option<(u32, String)>,
    /// Address of the KV events of a worker.
    kv_events: Option<String>,
}

/// Translates the text of a file.
///
/// # Errors
/// The text has no configuration, or one that llm-d would refuse.
pub(crate) fn import(text: &str, target: &Target) -> anyhow::Result<Imported> {
    target.check()?;
    let root = document::find(text).map_err(|problem| anyhow!(problem))?;
    let config = Config::read(&root)?;
    let mut import = Import {
        config: &config,
        target,
        draft: Draft::default(),
        report: Report::default(),
        max_concurrency: None,
        kv_events: None,
    };
    import.all()?;
    Ok(Imported { draft: import.draft, report: import.report })
}

/// Keys of the document, apart from those that Kubernetes objects have.
const KEYS: [&str; 9] = [
    "apiVersion",
    "kind",
    "plugins",
    "schedulingProfiles",
    "featureGates",
    "dataLayer",
    "flowControl",
    "requestHandler",
    "saturationDetector",
];

impl Import<'_> {
    fn all(&mut self) -> anyhow::Result<()> {
        self.profiles()?;
        self.flow_control()?;
        self.data_layer()?;
        self.workers();
        self.remaining_plugins();
        self.remaining_keys();
        Ok(())
    }

    /// Reports plugins that no profile and no section used.
    fn remaining_plugins(&mut self) {
        let config = self.config;
        for plugin in &config.plugins {
            self.describe(plugin);
            if let Some(place) = plugin.odd_parameters() {
                let theirs = format!("parameters of the plugin `{}`", plain(plugin.name));
                self.report.add(Kind::Missing, place, theirs, "they are not a map: its defaults are taken");
            }
            for (key, place) in plugin.unread() {
                let theirs = format!("parameter `{key}` of the plugin `{}`", plain(plugin.name));
                self.report.add(Kind::Missing, place, theirs, "it has no counterpart: leave it out");
            }
        }
    }

    /// Reports a plugin that nothing was said of, by its type.
    fn describe(&mut self, plugin: &Plugin<'_>) {
        if self.is_used(plugin) {
            return;
        }
        plugin.read_all();
        if let Some((kind, ours)) = notes::of(plugin.kind) {
            self.note_translation(plugin, kind, ours);
        } else if profile::is_part(plugin.kind) {
            self.note_translation(plugin, Kind::Translated, "left out: no profile refers to it");
        } else {
            let ours =
                format!("its type `{}` is not known: write a policy, or leave it out", plain(plugin.kind));
            self.note_translation(plugin, Kind::Missing, ours);
        }
    }

    /// Returns whether a profile refers to the plugin, or an entry of the report is about it.
    fn is_used(&self, plugin: &Plugin<'_>) -> bool {
        let mut entries = self.config.profiles.iter().flat_map(|profile| &profile.entries);
        plugin.is_told.get() || entries.any(|entry| entry.plugin == plugin.name)
    }

    /// Reports the result for a plugin.
    fn note_translation(&mut self, plugin: &Plugin<'_>, kind: Kind, ours: impl Into<String>) {
        plugin.is_told.set(true);
        self.report.add(kind, plugin.place, format!("plugin `{}`", plain(plugin.name)), ours);
    }

    /// Reports parsers that the list of plugins does not have: llm-d adds them.
    fn parsers(&mut self, section: &Node) {
        let list = section.get("parsers").map(Node::list).unwrap_or_default();
        for node in list.iter().chain([section]).filter_map(|parser| parser.get("pluginRef")) {
            let name = node.text().unwrap_or_default();
            if self.config.plugin(name).is_none() {
                let (kind, ours) =
                    notes::of(name).unwrap_or((Kind::Missing, "it is not known: leave it out"));
                let theirs = format!("parser `{}`", plain(name));
                self.report.add(kind, Place::Line(node.line), theirs, ours);
            }
        }
    }

    fn remaining_keys(&mut self) {
        for (key, node) in self.config.root.entries() {
            if !KEYS.contains(&key.text.as_str()) && key.text != "parser" && key.text != "metadata" {
                let theirs = format!("key `{}`", key.text);
                let ours = "it is not known: leave it out";
                self.report.add(Kind::Missing, Place::Line(key.line), theirs, ours);
            }
            if matches!(key.text.as_str(), "requestHandler" | "parser") {
                self.parsers(node);
            }
            if key.text == "featureGates" {
                for gate in node.list() {
                    let (kind, ours) = notes::gate(gate.text().unwrap_or_default());
                    let theirs = format!("feature gate `{}`", gate.text().unwrap_or_default());
                    self.report.add(kind, Place::Line(gate.line), theirs, ours);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
