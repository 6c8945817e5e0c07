//! Workers that the command line names.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::bail;

use super::{
    Flavor, Import,
    arguments::Given,
    urls::{EngineUrl, addresses, engine_url},
};
use crate::{
    draft::Section,
    report::{Kind, plain},
};

/// Most ranks of a worker.
const MAX_RANKS: i64 = 4_096;
/// Port of the bootstrap server of vLLM's Mooncake connector.
const MOONCAKE_PORT: u16 = 8_998;

/// One worker.
struct Worker<'a> {
    /// As it is written.
    url: &'a str,
    role: &'static str,
    bootstrap_port: Option<u16>,
}

/// Keys that all workers have in common.
struct Common {
    engine: &'static str,
    transport: Option<&'static str>,
    /// Ranks of a worker, and the flag that says so.
    ranks: (i64, String),
    /// The model, and the flag that names it.
    model: Option<(String, String)>,
    block_size: Option<i64>,
    /// The key, and the flag that has it.
    api_key: Option<(String, String)>,
}

impl<'a> Import<'a> {
    /// Writes all workers.
    pub(super) fn workers(&mut self) -> anyhow::Result<()> {
        let common = self.common()?;
        let mut known = BTreeSet::new();
        for given in self.line.all("worker-urls") {
            let urls = given.values.iter().flat_map(|value| addresses(value));
            let workers = urls.map(|url| Worker { url, role: "aggregated", bootstrap_port: None });
            self.add(given, workers.collect(), &common, &mut known)?;
        }
        for given in self.line.all("prefill") {
            let bootstrap_port = self.bootstrap_port(given, &common)?;
            let worker = Worker { url: given.value(), role: "prefill", bootstrap_port };
            self.add(given, vec![worker], &common, &mut known)?;
        }
        for given in self.line.all("decode") {
            let worker = Worker { url: given.value(), role: "decode", bootstrap_port: None };
            self.add(given, vec![worker], &common, &mut known)?;
        }
        self.events(&known)?;
        for (url, models) in self.models() {
            if let Some(worker) = self.draft.worker_at(&url) {
                worker.set("models", models, "--static-models");
            }
        }
        for given in
            ["vllm-pd-disaggregation", "pd-disaggregation"].iter().filter_map(|flag| self.line.last(flag))
        {
            self.note_translation(given, Kind::Translated, "the roles prefill and decode of the workers");
        }
        Ok(())
    }

    /// The models of each worker, which a command line may name once for each model.
    fn models(&self) -> BTreeMap<String, Vec<String>> {
        let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (url, model) in &self.line.models {
            let Ok(EngineUrl { url, .. }) = engine_url(url) else { continue };
            let models = all.entry(url).or_default();
            if !models.contains(model) {
                models.push(model.clone());
            }
        }
        all
    }

    /// Returns the ranks of each worker, with their origin.
    pub(super) fn ranks(&self) -> anyhow::Result<(i64, String, Option<&'a Given>)> {
        let (ranks, source, given) = self.number("intra-node-data-parallel-size", 1)?;
        if !(1..=MAX_RANKS).contains(&ranks) {
            let at = given.map(Given::at).unwrap_or_default();
            bail!("{at}: `{ranks}` is not a number of ranks: expected 1 to {MAX_RANKS}");
        }
        Ok((ranks, source, given))
    }

    fn common(&mut self) -> anyhow::Result<Common> {
        let transport = self.line.last("kv-connector");
        let transport = match transport.map(|given| (given, given.value())) {
            None => self.default_transport(),
            Some((given, "nixl")) => {
                self.note_translation(given, Kind::Translated, "transport = \"nixl\"");
                Some("nixl")
            }
            Some((given, "mooncake")) => {
                self.note_translation(given, Kind::Translated, "transport = \"mooncake\"");
                Some("mooncake")
            }
            Some((given, _)) => {
                let ours = "this connector is not supported: use nixl, mooncake or p2p_nccl";
                self.note_translation(given, Kind::Missing, ours);
                None
            }
        };
        let (ranks, source, given) = self.ranks()?;
        if let Some(given) = given {
            self.note_translation(given, Kind::Translated, "dp_size of each worker");
        }
        let model = self.line.last("kv-event-model");
        if let Some(given) = model {
            self.note_translation(given, Kind::Translated, "models of each worker");
        }
        let size = self.line.last("kv-event-block-size").or_else(|| self.line.last("block-size"));
        let mut block_size = None;
        if let Some(given) = size {
            let tokens = self.number(&given.name, 16)?.0;
            self.draft.set("routing", "block_size", tokens, given.flag());
            self.note_translation(
                given,
                Kind::Translated,
                "block_size of each worker, and routing.block_size",
            );
            block_size = Some(tokens);
        }
        let key = self.key();
        if let Some(given) = key {
            let of_clients = match self.flavor {
                Flavor::Sglang => "Clients have to send it, too: its digest is in [[auth.keys]]",
                _ => "Clients need no key: see [[auth.keys]]",
            };
            let ours =
                "api_key of each worker, in plain text: better { file = \"PATH\" } or { env = \"NAME\" }";
            self.note_translation(given, Kind::Approximated, format!("{ours}. {of_clients}"));
        }
        Ok(Common {
            engine: self.engine,
            transport,
            ranks: (ranks, source),
            model: model.map(|given| (given.value().to_owned(), given.flag().to_owned())),
            block_size,
            api_key: key.map(|given| (given.value().to_owned(), given.flag().to_owned())),
        })
    }

    /// Returns the connector of a pair whose flags name none.
    pub(super) fn default_transport(&self) -> Option<&'static str> {
        let is_unknown = self.line.last("routing-logic").is_some_and(|given| given.note.is_some());
        (self.engine == "vllm" && self.splits() && !is_unknown).then_some("nixl")
    }

    fn add(
        &mut self,
        given: &Given,
        workers: Vec<Worker<'_>>,
        common: &Common,
        known: &mut BTreeSet<String>,
    ) -> anyhow::Result<()> {
        let (mut refused, mut written) = (Vec::new(), 0);
        for worker in &workers {
            match engine_url(worker.url) {
                Err(_) if !worker.url.contains("://") => {
                    bail!("{}: worker `{}`: expected http://HOST:PORT", given.place, plain(worker.url));
                }
                Err(problem) => refused.push(problem),
                Ok(EngineUrl { url, .. }) if !known.insert(url.clone()) => {
                    // With a model for each URL, the worker has the models of all.
                    if self.line.models.is_empty() || worker.role != "aggregated" {
                        refused.push(format!("{}: given before", plain(&url)));
                    }
                }
                Ok(url) => {
                    written += 1;
                    let source = format!("{}, {}", given.flag(), given.place);
                    worker.write(&url, common, self.draft.element("workers", source));
                }
            }
        }
        if refused.is_empty() {
            self.note_translation(given, Kind::Translated, format!("{written} of [[workers]]"));
        } else {
            self.note_translation(given, Kind::Missing, format!("left out: {}", refused.join("; ")));
        }
        Ok(())
    }

    fn bootstrap_port(&mut self, given: &Given, common: &Common) -> anyhow::Result<Option<u16>> {
        let given_port = match given.values.get(1).map(String::as_str) {
            None => None,
            Some(port) if port.eq_ignore_ascii_case("none") => None,
            Some(port) => match port.parse() {
                Ok(port) if port > 0 => Some(port),
                _ => bail!("{}: --prefill: `{}` is not a bootstrap port", given.place, plain(port)),
            },
        };
        Ok(match common.transport {
            Some("mooncake") => given_port.or(Some(MOONCAKE_PORT)),
            // vLLM's other connectors have no bootstrap server.
            Some(_) => None,
            None => given_port,
        })
    }

    /// Adds the addresses of KV events to the workers.
    fn events(&mut self, known: &BTreeSet<String>) -> anyhow::Result<()> {
        for (flag, key) in [
            ("pd-kv-events", "kv_events"),
            ("kv-event-source", "kv_events"),
            ("kv-event-replay-source", "kv_replay"),
        ] {
            for given in self.line.all(flag) {
                let Some((url, endpoints)) = given.value().split_once('=') else {
                    bail!("{}: --{flag}: expected WORKER_URL=ENDPOINT", given.place)
                };
                let url = engine_url(url.trim()).map_or_else(|_| url.to_owned(), |read| read.url);
                let first = endpoints.split(',').next().unwrap_or_default();
                if !known.contains(&url) {
                    self.note_translation(
                        given,
                        Kind::Missing,
                        format!("no worker has the url `{}`", plain(&url)),
                    );
                } else if !are_consecutive(endpoints) {
                    let ours = format!("{key} of a worker: the ports of its ranks have to follow each other");
                    self.note_translation(given, Kind::Missing, ours);
                } else {
                    let source = format!("{}, {}", given.flag(), given.place);
                    if let Some(worker) = self.draft.worker_at(&url) {
                        worker.set(key, first, source);
                    }
                    self.note_translation(given, Kind::Translated, format!("{key} of the worker"));
                }
            }
        }
        Ok(())
    }
}

impl Worker<'_> {
    fn write(&self, url: &EngineUrl, common: &Common, section: &mut Section) {
        section.set("role", self.role, "").set("engine", common.engine, "");
        section.set("url", url.url.as_str(), &url.comment);
        if let Some(port) = self.bootstrap_port {
            section.set("bootstrap_port", i64::from(port), "");
        }
        if let Some(transport) = common.transport {
            section.set("transport", transport, "");
        }
        if common.ranks.0 > 1 {
            section.set("dp_size", common.ranks.0, &common.ranks.1);
        }
        if let Some((model, flag)) = &common.model {
            section.set("models", vec![model.as_str()], flag);
        }
        if let Some(tokens) = common.block_size {
            section.set("block_size", tokens, "");
        }
        if let Some((key, flag)) = &common.api_key {
            section.set("api_key", key.as_str(), flag);
        }
    }
}

/// Returns whether the ports of `tcp://HOST:PORT,…` rise by one from rank to rank, on one host.
fn are_consecutive(endpoints: &str) -> bool {
    let parts = endpoints.split(',').map(|endpoint| {
        let (host, port) = endpoint.rsplit_once(':')?;
        Some((host, port.parse::<u16>().ok()?))
    });
    let parts: Option<Vec<_>> = parts.collect();
    parts.is_some_and(|parts| {
        let follows = |(host, port): &(&str, u16), (next_host, next): &(&str, u16)| {
            host == next_host && port.checked_add(1) == Some(*next)
        };
        parts.iter().zip(parts.iter().skip(1)).all(|(one, next)| follows(one, next))
    })
}
