//! Addresses of handoffs that two workers have: KV blocks for one of them would go to the other, or never
//! come. They were most likely written for one worker in what all workers of a source have.

use std::collections::{HashMap, hash_map::Entry};

use super::Member;
use crate::{
    id::{Engine, Role, WorkerId},
    spec::{KvTransport, WorkerSpec},
};

/// Maximum number of shared addresses that are reported.
const MAX_TOLD: usize = 32;
/// Default port of SGLang's bootstrap server.
const SGLANG_PORT: u16 = 8998;

/// The shared addresses of one snapshot.
#[derive(Debug, Default)]
pub(super) struct SharedAddresses(Vec<SharedAddress>);

#[derive(Debug, PartialEq, Eq)]
struct SharedAddress {
    key: &'static str,
    address: String,
    first: WorkerId,
    other: WorkerId,
}

impl SharedAddresses {
    pub(super) fn among(members: &[Member]) -> Self {
        let mut owners: HashMap<(&str, String), WorkerId> = HashMap::new();
        let mut shared = Vec::new();
        // One that drains will be gone.
        let staying = members.iter().filter(|member| !member.worker.draining() && !member.worker.leaving());
        for member in staying {
            let Some((key, address)) = of_handoffs(member.worker.spec()) else { continue };
            let other = member.worker.id();
            match owners.entry((key, address)) {
                Entry::Vacant(free) => _ = free.insert(other),
                Entry::Occupied(owner) if shared.len() < MAX_TOLD => {
                    let (address, first) = (owner.key().1.clone(), *owner.get());
                    shared.push(SharedAddress { key, address, first, other });
                }
                Entry::Occupied(_) => {}
            }
        }
        Self(shared)
    }

    /// Warns of those that were not shared in the snapshot before.
    pub(super) fn warn_of_new(&self, before: &Self) {
        for shared in self.0.iter().filter(|shared| !before.0.contains(shared)) {
            let SharedAddress { key, address, first, other } = shared;
            tracing::warn!(
                worker = %other, other = %first, key, address,
                "two workers have one address for handoffs: write it with {{host}} or give each its own"
            );
        }
    }
}

/// Returns the key and the value of the address that handoffs of a worker name. A bootstrap server of vLLM
/// may serve several workers.
fn of_handoffs(spec: &WorkerSpec) -> Option<(&'static str, String)> {
    match spec.engine {
        Engine::Sglang if spec.role == Role::Prefill => {
            let bootstrap = &spec.bootstrap;
            let is_given = bootstrap.host.is_some() || bootstrap.port.is_some();
            let host = bootstrap.host.as_deref().unwrap_or_else(|| spec.host());
            is_given.then(|| ("bootstrap_host", format!("{host}:{}", bootstrap.port.unwrap_or(SGLANG_PORT))))
        }
        Engine::Vllm if spec.transport == KvTransport::P2pNccl => Some(("kv_addr", spec.kv_addr.clone()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Registry;

    fn shared(flags: &[&str]) -> Vec<(u64, u64, &'static str, String)> {
        let registry = Registry::default();
        for (id, flag) in (1..).zip(flags) {
            registry.upsert(WorkerSpec::parse_flag(&format!("id={id},url=http://a:{id},{flag}")).unwrap());
        }
        let shared = SharedAddresses::among(&registry.members.lock());
        shared.0.into_iter().map(|one| (one.first.0, one.other.0, one.key, one.address)).collect()
    }

    #[test]
    fn p11_an_address_of_handoffs_belongs_to_one_worker() {
        let sglang = |role: &str, more: &str| format!("role={role},engine=sglang{more}");
        let [prefill, decode] = ["prefill", "decode"].map(|role| sglang(role, ",bootstrap_host=b"));
        let with_port = sglang("prefill", ",bootstrap_host=b,bootstrap_port=8998");
        let other_port = sglang("prefill", ",bootstrap_host=b,bootstrap_port=8999");
        // P11.3
        let told = vec![(1, 3, "bootstrap_host", "b:8998".to_owned())];
        assert_eq!(shared(&[&prefill, &decode, &with_port, &other_port]), told);
        let port_alone = sglang("prefill", ",bootstrap_port=8998");
        assert_eq!(shared(&[&port_alone, &port_alone])[0].3, "a:8998");
        let plain = sglang("prefill", "");
        assert_eq!(shared(&[&plain, &plain, &decode, &decode]), []);
        let p2p = |role| format!("role={role},engine=vllm,transport=p2p_nccl,kv_addr=k:1");
        // P11.3
        assert_eq!(shared(&[&p2p("prefill"), &p2p("decode")]), [(1, 2, "kv_addr", "k:1".to_owned())]);
        let mooncake = "role=prefill,engine=vllm,transport=mooncake,bootstrap_host=b,bootstrap_port=1";
        assert_eq!(shared(&[mooncake, mooncake]), []);
    }
}
