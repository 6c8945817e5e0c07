//! Workers that Kubernetes knows.

use anyhow::Context as _;
use toml::{Table, Value};

use super::{Flavor, Import, arguments::Given};
use crate::{
    kubernetes::{check_namespace, is_of_equalities, selector},
    report::Kind,
};

/// Translations of a selector.
const SELECTOR: &str = "selector of [[discovery.kubernetes]]";
const SELECTOR_OF_SETS: (Kind, &str) = (
    Kind::Approximated,
    "selector of [[discovery.kubernetes]], as Kubernetes reads it; the router reads KEY=VALUE only",
);

impl Import<'_> {
    /// Translates service discovery.
    pub(super) fn discovery(&mut self) -> anyhow::Result<()> {
        let Some(on) = self.line.last("service-discovery").filter(|given| given.note.is_none()) else {
            return Ok(());
        };
        let namespace = self.line.last("service-discovery-namespace");
        if let Some(given) = namespace {
            check_namespace(given.value()).with_context(|| given.at())?;
        }
        let (port, port_source, given_port) = self.port("service-discovery-port", 80)?;
        let sources: &[(&str, Option<&str>)] = if self.splits() {
            &[("prefill-selector", Some("prefill")), ("decode-selector", Some("decode"))]
        } else {
            &[("selector", Some("aggregated"))]
        };
        let of_namespace = namespace.map_or("not given: all namespaces", Given::flag);
        let mut written = 0;
        for (flag, role) in sources {
            let Some(given) = self.line.last(flag).filter(|given| !given.values.is_empty()) else { continue };
            let Some(selector) = selector(&given.values.join(",")) else {
                let ours = "left out: it is not a selector of labels: give it as KEY=VALUE or KEY in \
                            (VALUE, …)";
                self.note_translation(given, Kind::Missing, ours);
                continue;
            };
            let is_same = self.flavor == Flavor::Production || is_of_equalities(&selector);
            written += 1;
            let defaults = self.defaults(*role)?;
            self.draft
                .element("discovery.kubernetes", on.flag())
                .set("name", flag.strip_suffix("-selector").unwrap_or("pods"), "")
                .set("namespace", namespace.map_or("default", Given::value), of_namespace)
                .set("selector", selector, given.flag())
                .set("port", port.to_string(), &port_source)
                .set("defaults", defaults, "what labels and annotations do not give");
            let (kind, ours) = if is_same { (Kind::Translated, SELECTOR) } else { SELECTOR_OF_SETS };
            self.note_translation(given, kind, ours);
        }
        let ours = "[[discovery.kubernetes]]: a source has one namespace; bootstrap ports come from the \
                    engine or the annotation pointsman.dev/bootstrap_port";
        match (written, namespace) {
            (0, _) => {
                let ours = "no selector: add [[discovery.kubernetes]] with the labels of the pods";
                self.note_translation(on, Kind::Missing, ours);
            }
            (_, Some(given)) => {
                self.note_translation(on, Kind::Approximated, ours);
                self.note_translation(given, Kind::Translated, "namespace of [[discovery.kubernetes]]");
            }
            (_, None) => {
                let ours = format!("{ours}. All namespaces are not watched: `default` is, set namespace");
                self.note_translation(on, Kind::Approximated, ours);
            }
        }
        if let Some(given) = given_port {
            self.note_translation(given, Kind::Translated, "port of [[discovery.kubernetes]]");
        }
        Ok(())
    }

    /// Keys of workers that Kubernetes does not give.
    fn defaults(&self, role: Option<&str>) -> anyhow::Result<Value> {
        let mut defaults = Table::new();
        defaults.insert("engine".to_owned(), self.engine.into());
        if let Some(role) = role {
            defaults.insert("role".to_owned(), role.into());
        }
        if self.splits() {
            let transport = self.line.last("kv-connector").map(Given::value).or(self.default_transport());
            let transport = transport.filter(|transport| matches!(*transport, "nixl" | "mooncake"));
            if let Some(transport) = transport {
                defaults.insert("transport".to_owned(), transport.into());
            }
            if transport == Some("mooncake") && role == Some("prefill") {
                defaults.insert("bootstrap_port".to_owned(), "8998".into());
            }
        }
        let ranks = self.ranks()?.0;
        if ranks > 1 {
            defaults.insert("dp_size".to_owned(), ranks.to_string().into());
        }
        if let Some(key) = self.key() {
            defaults.insert("api_key".to_owned(), key.value().into());
        }
        Ok(Value::Table(defaults))
    }
}
