//! A worker's description in the form of the configuration file, and the schema of that form.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;

use super::{RawSpec, TOPOLOGY_TAINT, TransferRule, WorkerSpec, template::PortText};
use crate::{facts::FactName, id::WorkerId};

impl WorkerSpec {
    /// Returns the description with the keys of the configuration file. The API key is hidden. An id that is
    /// the hash of the URL is missing.
    #[must_use]
    pub fn as_written(&self) -> impl Serialize + use<> {
        let given = |fact| !self.from_engine.contains(&fact);
        let kv_events = self.kv_events.clone().filter(|_| given(FactName::KvEvents));
        // With the host written out, it would be the address of the first rank (P11.4).
        let kv_events = match kv_events {
            Some(address) if !given(FactName::FirstRank) => {
                Some(address.replacen(&format!("//{}:", self.host()), "//{host}:", 1))
            }
            other => other,
        };
        RawSpec {
            id: Some(self.id.0).filter(|_| self.id != WorkerId::of_url(&self.url)),
            url: Some(self.url.to_string()),
            tls_server_name: self.tls_server_name.as_ref().map(ToString::to_string),
            role: given(FactName::Role).then(|| self.role.to_string()),
            engine: Some(self.engine.to_string()),
            models: self.models.iter().map(ToString::to_string).collect(),
            dp_size: given(FactName::DpSize).then_some(self.dp_size),
            bootstrap_host: self.bootstrap.host.clone(),
            bootstrap_port: self.bootstrap.port.map(PortText::Number),
            transport: given(FactName::Transport).then_some(self.transport),
            kv_compatibility: self
                .kv_compatibility
                .as_ref()
                .filter(|_| given(FactName::KvCompatibility))
                .map(ToString::to_string),
            labels: self.labels.clone(),
            taints: self.taints.iter().filter(|taint| !taint.starts_with(TOPOLOGY_TAINT)).cloned().collect(),
            topology: self.topology.clone(),
            kv_transfer: self.kv_transfer.as_ref().map(written),
            kv_addr: self.kv_addr.clone(),
            kv_events,
            kv_replay: self.kv_replay.clone().filter(|_| given(FactName::KvEvents)),
            local_prefill: given(FactName::LocalPrefill).then_some(self.local_prefill),
            prefill_cancellable: self.prefill_cancellable,
            handoff_lease_s: self.handoff_lease_s,
            max_concurrency: self.max_concurrency,
            block_size: self.block_size,
            total_blocks: self.total_blocks,
            loras: self.loras.clone(),
            api_key: self.api_key.as_ref().map(|_| "[secret]".to_owned()),
            rank: 0,
            has_engine_port: false,
        }
    }
}

fn written(rule: &TransferRule) -> String {
    match rule.weight {
        Some(weight) => format!("preferred:{}:{weight}", rule.domain),
        None => format!("required:{}", rule.domain),
    }
}

impl JsonSchema for WorkerSpec {
    fn schema_name() -> Cow<'static, str> {
        RawSpec::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        RawSpec::json_schema(generator)
    }
}
