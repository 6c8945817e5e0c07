//! Completes a worker's description by the engine's report (B5).
//!
//! A configuration may leave facts out; the engine's report then completes the description. Where both say
//! something and differ, the worker is refused.

use std::{fmt, sync::Arc};

use super::{KvTransport, WorkerSpec};
use crate::{
    facts::{Contradiction, EngineFacts, FactName},
    id::{Engine, ModelName, Role},
};

impl WorkerSpec {
    /// Returns the facts that `reported` lacks, although engines of this kind may report them.
    #[must_use]
    pub fn unknown_facts(&self, reported: &EngineFacts) -> Vec<FactName> {
        let sglang = self.engine == Engine::Sglang;
        let connected = self.engine == Engine::Vllm && self.role != Role::Aggregated;
        let bootstraps = sglang && self.role == Role::Prefill;
        let facts = [
            (FactName::Role, sglang && reported.role.is_none()),
            (FactName::DpSize, sglang && reported.dp_size.is_none()),
            (FactName::BootstrapPort, bootstraps && reported.bootstrap_port.is_none()),
            (FactName::Transport, connected && reported.connector.is_none()),
            (FactName::BlockSize, reported.block_size.is_none()),
            (FactName::TotalBlocks, reported.total_blocks.is_none()),
            (FactName::MaxRunningRequests, sglang && reported.max_running_requests.is_none()),
        ];
        facts.into_iter().filter(|(_, unknown)| *unknown).map(|(fact, _)| fact).collect()
    }

    /// Returns the contradiction between the models of the description and those that the engine lists: it
    /// serves none of them. An engine that lists nothing, one whose list was cut, which has `count` models,
    /// and a plain one behind a gateway of its own contradict nothing.
    pub(crate) fn models_contradicted(&self, listed: &[String], count: usize) -> Option<Contradiction> {
        let lists_all = matches!(self.engine, Engine::Vllm | Engine::Sglang) && listed.len() == count;
        let serves = |model: &ModelName| listed.iter().any(|name| name == model.as_str());
        if !lists_all || self.models.is_empty() || listed.is_empty() || self.models.iter().any(serves) {
            return None;
        }
        let configured = self.models.iter().map(ModelName::as_str).collect::<Vec<_>>().join(", ");
        let reporter = "GET /v1/models";
        Some(Contradiction { reporter, ..Contradiction::new(FactName::Model, configured, listed.join(", ")) })
    }

    /// Returns the description, completed with the engine's report where the configuration leaves values out.
    ///
    /// # Errors
    /// The first fact that is configured otherwise than the engine reports it.
    pub(crate) fn completed(&self, facts: &EngineFacts) -> Result<Self, Contradiction> {
        let mut spec = self.clone();
        let left_out = |fact| self.from_engine.contains(&fact);
        if let Some(role) = facts.role {
            settle(FactName::Role, left_out(FactName::Role), &mut spec.role, role)?;
        }
        // vLLM itself chooses the rank where the operator says that it has one.
        let engine_chooses = spec.engine == Engine::Vllm && spec.dp_size == 1 && !left_out(FactName::DpSize);
        if let Some(size) = facts.dp_size.filter(|_| !engine_chooses) {
            settle(FactName::DpSize, left_out(FactName::DpSize), &mut spec.dp_size, size)?;
        }
        if let Some(first) = facts.first_rank {
            spec.first_rank = if facts.takes_global_ranks { first } else { 0 };
        }
        if left_out(FactName::FirstRank) {
            spec.kv_events_offset = facts.first_rank.or(spec.kv_events_offset).or(Some(0));
        }
        if let Some(port) = facts.bootstrap_port {
            if left_out(FactName::BootstrapPort) {
                spec.bootstrap.port = Some(port);
            } else if spec.bootstrap.port != Some(port) {
                let configured = spec.bootstrap.port.map_or_else(String::new, |port| port.to_string());
                return Err(Contradiction::new(FactName::BootstrapPort, configured, port));
            }
        }
        // A report without a role was not read, which says nothing of events.
        if left_out(FactName::KvEvents) && facts.role.is_some() {
            let endpoint = |port: u16| format!("tcp://{}:{port}", self.host());
            spec.kv_events = facts.kv_events_port.map(endpoint);
            spec.kv_replay = facts.kv_replay_port.map(endpoint);
        }
        if spec.role != Role::Aggregated {
            if facts.connector.as_deref() == Some("none") {
                return Err(Contradiction::new(FactName::Transport, spec.transport, "none"));
            }
            if let Some(transport) = transport_of(facts) {
                settle(FactName::Transport, left_out(FactName::Transport), &mut spec.transport, transport)?;
            }
        }
        if left_out(FactName::LocalPrefill) {
            spec.local_prefill = spec.transport.prefills_locally(spec.engine, spec.role);
        }
        if left_out(FactName::KvCompatibility) {
            let hands_over = spec.role != Role::Aggregated && spec.transport == KvTransport::Nixl;
            let version = facts.version.as_deref().filter(|_| hands_over);
            spec.kv_compatibility = version.and_then(compatibility_of).map(Arc::from);
        }
        agree(FactName::BlockSize, spec.block_size, facts.block_size)?;
        agree(FactName::TotalBlocks, spec.total_blocks, facts.total_blocks)?;
        Ok(spec)
    }
}

/// Returns the first two numbers of an engine's version; 0 for a second one that is missing or no number.
pub(crate) fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(['.', '-', '+']).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next().flatten().unwrap_or_default()))
}

/// Returns what has to be equal in both ends of NIXL's handshake: from vLLM 0.13 on the whole version, of
/// which a hash is compared. Older versions compare nothing, and neither read the later handshake nor name
/// the prefill's request, without which a later decode engine never answers. `None`: not known, as for a
/// build from sources (0.1).
fn compatibility_of(version: &str) -> Option<&str> {
    match major_minor(version)? {
        (0, ..2) => None,
        (0, ..13) => Some("before 0.13"),
        _ => Some(version),
    }
}

impl EngineFacts {
    /// Returns the engine's connector if it stands for no transport of the gateway.
    pub(crate) fn unknown_connector(&self) -> Option<&str> {
        self.connector.as_deref().filter(|name| *name != "none" && transport_of(self).is_none())
    }
}

/// Returns the transport that an engine's connector stands for; `None` for one that is not known.
fn transport_of(facts: &EngineFacts) -> Option<KvTransport> {
    match facts.connector.as_deref()? {
        // From vLLM 0.26 on, the first is another name of the second.
        "NixlConnector" | "NixlPullConnector" | "NixlPushConnector" => Some(KvTransport::Nixl),
        "MooncakeConnector" => Some(KvTransport::Mooncake),
        "P2pNcclConnector" => Some(KvTransport::P2pNccl),
        _ => None,
    }
}

/// Takes a reported value if the configuration left it out, otherwise compares them.
fn settle<T: PartialEq + fmt::Display>(
    fact: FactName,
    left_out: bool,
    value: &mut T,
    reported: T,
) -> Result<(), Contradiction> {
    if !left_out && *value != reported {
        return Err(Contradiction::new(fact, &*value, &reported));
    }
    *value = reported;
    Ok(())
}

fn agree(fact: FactName, configured: Option<u32>, reported: Option<u32>) -> Result<(), Contradiction> {
    match (configured, reported) {
        (Some(configured), Some(reported)) if configured != reported => {
            Err(Contradiction::new(fact, configured, reported))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(flag: &str) -> WorkerSpec {
        WorkerSpec::parse_flag(&format!("{flag},url=http://a:1")).unwrap()
    }

    #[test]
    fn what_the_configuration_left_out_comes_from_the_engine_again_and_again() {
        let facts = EngineFacts { role: Some(Role::Decode), dp_size: Some(4), ..EngineFacts::default() };
        let decode = spec("engine=sglang").completed(&facts).unwrap();
        assert_eq!((decode.role, decode.dp_size, decode.local_prefill), (Role::Decode, 4, false));
        let facts = EngineFacts {
            role: Some(Role::Prefill),
            dp_size: Some(1),
            bootstrap_port: Some(9),
            ..EngineFacts::default()
        };
        let prefill = decode.completed(&facts).unwrap();
        assert_eq!((prefill.role, prefill.dp_size, prefill.bootstrap.port), (Role::Prefill, 1, Some(9)));
        let kept = spec("engine=sglang,local_prefill=true");
        let facts = EngineFacts { role: Some(Role::Decode), ..EngineFacts::default() };
        assert!(kept.completed(&facts).unwrap().local_prefill);
    }

    #[test]
    fn kv_events_come_from_the_engine_unless_they_are_configured() {
        let plain = EngineFacts { role: Some(Role::Aggregated), ..EngineFacts::default() };
        let facts = EngineFacts { kv_events_port: Some(5557), kv_replay_port: Some(5560), ..plain.clone() };
        let free = spec("engine=sglang").completed(&facts).unwrap();
        assert_eq!(free.kv_events.as_deref(), Some("tcp://a:5557"));
        assert_eq!(free.kv_replay.as_deref(), Some("tcp://a:5560"));
        let silent = free.completed(&EngineFacts::default()).unwrap();
        assert_eq!(silent, free, "an engine that did not answer");
        let gone = free.completed(&plain).unwrap();
        assert_eq!((gone.kv_events, gone.kv_replay), (None, None), "it was restarted without events");
        let fixed = spec("engine=sglang,kv_events=tcp://proxy:1").completed(&facts).unwrap();
        assert_eq!((fixed.kv_events.as_deref(), fixed.kv_replay), (Some("tcp://proxy:1"), None));
        let vllm = spec("engine=vllm,role=aggregated").completed(&facts).unwrap();
        assert_eq!(vllm.kv_events, None);
    }

    #[test]
    fn p11_a_port_of_the_engine_s_setting_counts_from_its_first_rank() {
        let facts = |first_rank| EngineFacts { first_rank, ..EngineFacts::default() };
        let shared = spec("engine=vllm,role=decode,kv_events=tcp://{host}:5557");
        assert_eq!(shared.kv_events_offset, None, "not followed before");
        let second = shared.completed(&facts(Some(2))).unwrap();
        // P11.4
        assert_eq!(second.kv_events_offset, Some(2));
        assert_eq!(second.completed(&facts(None)).unwrap(), second, "an engine that did not answer");
        assert_eq!(shared.completed(&facts(None)).unwrap().kv_events_offset, Some(0));
        let shown = serde_json::to_value(second.as_written()).unwrap();
        assert_eq!(shown["kv_events"], "tcp://{host}:5557");
        let written = spec("engine=vllm,role=decode,kv_events=tcp://10.0.0.1:5559");
        assert_eq!(written.completed(&facts(Some(2))).unwrap(), written);
    }

    #[test]
    fn an_engine_that_serves_none_of_the_configured_models_contradicts() {
        let listed = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let worker = spec("engine=vllm,role=decode,model=a,model=b");
        let refused = worker.models_contradicted(&listed(&["c"]), 1).unwrap();
        assert_eq!((&*refused.configured, &*refused.reported), ("a, b", "c"));
        assert_eq!(worker.models_contradicted(&listed(&["b", "c"]), 2), None);
        assert_eq!(worker.models_contradicted(&[], 0), None);
        // B3.11
        assert_eq!(worker.models_contradicted(&listed(&["c", "d"]), 3), None, "the third may be a or b");
        let plain = spec("engine=openai,role=aggregated,model=a");
        assert_eq!(plain.models_contradicted(&listed(&["c"]), 1), None);
    }

    #[test]
    fn b8_workers_of_versions_that_refuse_each_other_do_not_pair() {
        let worker = |role: &str, more: &str, version: Option<&str>| {
            let facts = EngineFacts { version: version.map(str::to_owned), ..EngineFacts::default() };
            spec(&format!("engine=vllm,role={role}{more}")).completed(&facts).unwrap()
        };
        let pair = |prefill: Option<&str>, decode: Option<&str>| {
            worker("prefill", "", prefill).pairs_with(&worker("decode", "", decode))
        };
        // B8.8
        assert!(pair(Some("0.33.0"), Some("0.33.0")) && !pair(Some("0.32.0"), Some("0.33.0")));
        assert!(!pair(Some("0.33.0"), Some("0.33.1")) && !pair(Some("1.0.0"), Some("0.33.0")));
        assert!(pair(Some("0.33.0"), None) && pair(None, None), "what is unknown excludes nothing");
        assert!(pair(Some("0.12.0"), Some("0.11.2")) && pair(Some("0.1.dev1+g1"), Some("0.33.0")));
        assert!(!pair(Some("0.12.0"), Some("0.33.0")) && !pair(Some("0.13.0"), Some("0.9.2")));
        let told = |more| worker("prefill", more, Some("0.32.0"));
        assert!(told(",kv_compatibility=a").pairs_with(&worker(
            "decode",
            ",kv_compatibility=a",
            Some("0.33.0")
        )));
        assert!(!told(",kv_compatibility=a").pairs_with(&worker("decode", "", Some("0.32.0"))));
        let mooncake = |role, version| worker(role, ",transport=mooncake,bootstrap_port=9", Some(version));
        assert!(mooncake("prefill", "0.32.0").pairs_with(&mooncake("decode", "0.33.0")));
    }

    #[test]
    fn a_connector_decides_the_transport_unless_it_is_not_known() {
        let named = |name: &str| EngineFacts { connector: Some(name.to_owned()), ..EngineFacts::default() };
        let free = spec("engine=vllm,role=decode");
        let mooncake = spec("engine=vllm,role=decode,transport=mooncake");
        for name in ["NixlConnector", "NixlPullConnector", "NixlPushConnector"] {
            // B5.24
            assert_eq!(named(name).unknown_connector(), None);
            assert_eq!(free.completed(&named(name)).unwrap().transport, KvTransport::Nixl);
            assert!(mooncake.completed(&named(name)).is_err(), "{name}");
        }
        assert_eq!(free.completed(&named("MooncakeConnector")).unwrap().transport, KvTransport::Mooncake);
        assert_eq!(free.completed(&named("OtherConnector")).unwrap(), free);
        let fixed = spec("engine=vllm,role=decode,transport=nixl");
        let refused = fixed.completed(&named("MooncakeConnector")).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "transport is configured as `nixl`, but the engine reports `mooncake`: correct the worker's \
             configuration or the engine's start arguments"
        );
        assert!(free.completed(&named("none")).is_err(), "a decode worker without a connector");
        assert!(spec("engine=vllm,role=aggregated").completed(&named("none")).is_ok());
    }
}
