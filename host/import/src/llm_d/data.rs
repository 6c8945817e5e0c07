//! Where workers and tokens come from, and who asks the gateway.

use toml::{Table, Value};

use super::{Import, config::Plugin};
use crate::{
    draft::key_text,
    report::{Kind, Place, plain},
    yaml::Node,
};

impl Import<'_> {
    /// Translates `dataLayer`, the parsers and the producers of tokens.
    pub(super) fn data_layer(&mut self) -> anyhow::Result<()> {
        let config = self.config;
        for plugin in &config.plugins {
            if matches!(plugin.kind, "token-producer" | "tokenizer") {
                self.tokens(plugin);
            }
        }
        if let Some(section) = config.root.get("dataLayer") {
            for (key, node) in section.entries() {
                self.data_key(&key.text, Place::Line(key.line), node);
            }
        }
        Ok(())
    }

    fn data_key(&mut self, key: &str, place: Place, node: &Node) {
        let (kind, ours) = match key {
            // Each plugin of the list is reported by itself.
            "sources" => (Kind::Translated, "built in: see the plugins"),
            "injectDefaults" => (Kind::Translated, "engine figures are always read (probe.load_interval)"),
            "discovery" => {
                self.discovery(node);
                return;
            }
            "peerDiscovery" | "crossReplica" | "crossReplicaSyncerPluginRef" | "crossReplicaSyncInterval" => {
                (
                    Kind::Approximated,
                    "[replicas]: gateways send each other their bookings over NATS, set its url",
                )
            }
            _ => (Kind::Missing, "it is not known: leave it out"),
        };
        self.report.add(kind, place, format!("dataLayer.{}", plain(key)), ours);
    }

    /// The plugin that lists endpoints.
    fn discovery(&mut self, node: &Node) {
        let config = self.config;
        // In version v1 the sources of endpoints are one of several kinds.
        for (key, _) in
            node.entries().iter().filter(|(key, _)| !["pluginRef", "endpoints"].contains(&&*key.text))
        {
            let theirs = format!("dataLayer.discovery.{}", plain(&key.text));
            self.report.add(Kind::Missing, Place::Line(key.line), theirs, "it is not known: leave it out");
        }
        let node = node.get("endpoints").unwrap_or(node);
        let plugin = node.get("pluginRef").and_then(Node::text).and_then(|name| config.plugin(name));
        let Some(plugin) = plugin else {
            let ours = "its plugin is missing: add a source of workers ([discovery])";
            self.report.add(Kind::Missing, Place::Line(node.line), "dataLayer.discovery", ours);
            return;
        };
        if plugin.kind != "file-discovery" {
            plugin.read_all();
            self.note_translation(
                plugin,
                Kind::Missing,
                "it is not known: add a source of workers ([discovery])",
            );
            return;
        }
        let Some(path) = plugin.text("path") else {
            self.note_translation(plugin, Kind::Missing, "it has no path: add [[discovery.files]] with one");
            return;
        };
        let defaults = self.defaults();
        self.draft
            .element("discovery.files", format!("{}, {}", plain(plugin.name), plugin.place))
            .set("name", "llm-d", "")
            .set("path", path, "")
            .set("format", "llm-d", "")
            .set("defaults", defaults, "what the file does not give; the label llm-d.ai/role gives the role");
        let watched = plugin.text("watchFile") == Some("true");
        let ours =
            if watched { "[[discovery.files]]" } else { "[[discovery.files]]: it is read again on change" };
        let kind = if watched { Kind::Translated } else { Kind::Approximated };
        self.note_translation(plugin, kind, ours);
    }

    /// Writes the sources of workers that the command line asks for, and reports those that are missing.
    pub(super) fn workers(&mut self) {
        if self.target.ext_proc {
            self.draft.set("ext_proc", "listen", "0.0.0.0:9002", "--ext-proc: Envoy asks this port");
        } else {
            self.draft.hint(
                "Where Envoy asked llm-d's endpoint picker, let it ask this gateway, see docs/envoy.md:",
            );
            self.draft.hint("[ext_proc]");
            self.draft.hint("listen = \"0.0.0.0:9002\"");
        }
        if let Some(selector) = self.target.selector.clone() {
            let defaults = self.defaults();
            self.draft
                .element("discovery.kubernetes", "--selector")
                .set("name", "llm-d", "")
                .set("namespace", self.target.namespace.as_str(), "--namespace")
                .set("selector", selector, "--selector, as in the InferencePool")
                .set("port", self.target.port.as_str(), "--port: the engine's, not that of its sidecar")
                .set("defaults", defaults, "what labels and annotations do not give");
            return;
        }
        if self.config.root.get("dataLayer").and_then(|it| it.get("discovery")).is_some() {
            return;
        }
        let ours =
            "none: the file names no engines, the InferencePool does. Give --selector, or add [[workers]]";
        self.report.add(Kind::Approximated, Place::Default, "workers", ours);
        self.draft.hint("The workers are missing. For pods:");
        self.draft.hint("[[discovery.kubernetes]]");
        self.draft.hint("name = \"llm-d\"");
        self.draft.hint("selector = \"app=vllm\"");
        self.draft.hint("port = \"8000\"");
        let defaults = self.defaults();
        self.draft.hint(format!("defaults = {}", crate::draft::value_text(&defaults)));
    }

    /// Keys of workers that their source does not give.
    fn defaults(&self) -> Value {
        let splits = self.draft.has("routing", "order");
        let role = if splits { "decode" } else { "aggregated" };
        let mut defaults = Table::new();
        defaults.insert("engine".to_owned(), self.target.engine.as_str().into());
        defaults.insert("role".to_owned(), role.into());
        if let Some((limit, _)) = &self.max_concurrency {
            defaults.insert("max_concurrency".to_owned(), limit.to_string().into());
        }
        if let Some(address) = &self.kv_events {
            defaults.insert("kv_events".to_owned(), address.as_str().into());
        }
        Value::Table(defaults)
    }

    /// A producer of token ids.
    fn tokens(&mut self, plugin: &Plugin<'_>) {
        let model = plugin.text("modelName");
        plugin.read_all();
        let by_engine = plugin.param("vllm").is_some() || model.is_some();
        let Some(model) = model.filter(|_| by_engine) else {
            let ours = "prompts are measured by routing.bytes_per_token; images have no tokens of their own";
            self.note_translation(plugin, Kind::Approximated, ours);
            return;
        };
        if model.contains("${") || model.contains('<') {
            let ours = "models.NAME.tokenizer = \"engine\": the name is a variable; write the model's name";
            self.note_translation(plugin, Kind::Missing, ours);
            return;
        }
        let table = format!("models.{}", key_text(model));
        self.draft.set(&table, "tokenizer", "engine", format!("{}, {}", plain(plugin.name), plugin.place));
        let ours = "models.NAME.tokenizer = \"engine\": a vLLM engine of the model is asked (/tokenize), \
                    not the url; a directory with its tokenizer is faster";
        self.note_translation(plugin, Kind::Approximated, ours);
    }
}
