//! Facts that the policies of an arm read and that nothing in the simulation has. The arm then runs another
//! rule than on a gateway where they are known.

use crate::{
    arm::Arm,
    fleet::{EngineGroup, Fleet},
    trace::{Trace, TraceRequest},
};

/// Digits of a hash, at least. Nearly all hashes have more.
const HASH_DIGITS: usize = 16;

/// Returns the warnings about an arm.
pub(super) fn of(arm: &Arm, trace: &Trace, fleet: &Fleet) -> Vec<String> {
    // An arm whose policies cannot be configured has ended the command before.
    let Ok((facts, settings)) = arm.reads() else { return Vec::new() };
    let (label, mut warnings) = (&arm.label, Vec::new());
    let absent: Vec<&str> =
        facts.iter().map(String::as_str).filter(|fact| !is_known(fact, trace, fleet)).collect();
    if !absent.is_empty() {
        let absent = absent.join(", ");
        warnings.push(format!(
            "\"{label}\": nothing in this simulation has a fact that its policies read: {absent}; where a gateway \
             knows it, they decide otherwise. Engines take `labels` and `taints`"
        ));
    }
    let has_tenant = |tenant: u64| trace.requests.iter().any(|request| request.tenant_hash == Some(tenant));
    let has_unknown = settings.into_iter().flat_map(hashes).any(|hash| !has_tenant(hash));
    if has_unknown && facts.contains("tenant-hash") && !absent.contains(&"tenant-hash") {
        // Hashes do not tell what they are of.
        let names = if ["session-hash", "lora-hash"].into_iter().any(|other| facts.contains(other)) {
            "have names of which the trace has no tenant, unless they are of sessions or adapters"
        } else {
            "name tenants of which the trace has no request"
        };
        warnings.push(format!(
            "\"{label}\": its settings {names}; hashes of tenants in an exported trace are salted, so that no name \
             stands for them"
        ));
    }
    warnings
}

/// Returns whether an engine or a request has the fact. Others are computed, or have a default.
fn is_known(fact: &str, trace: &Trace, fleet: &Fleet) -> bool {
    let engine = |has: &dyn Fn(&EngineGroup) -> bool| fleet.engines.iter().any(has);
    let request = |has: &dyn Fn(&TraceRequest) -> bool| trace.requests.iter().any(has);
    if let Some((key, value)) = fact.strip_prefix("label-is/").and_then(|label| label.split_once('=')) {
        return engine(&|group| group.labels.get(key).is_some_and(|own| own == value));
    }
    if let Some(key) = fact.strip_prefix("label-number/") {
        return engine(&|group| group.labels.contains_key(key));
    }
    if let Some(taint) = fact.strip_prefix("taint-is/") {
        return engine(&|group| group.taints.contains(taint));
    }
    match fact {
        "max-tokens" | "expected-output-tokens" | "lora-hash" => false,
        "tenant-hash" | "tenant-active-requests" => request(&|one| one.tenant_hash.is_some()),
        "session-hash" => request(&|one| one.session.is_some()),
        _ => true,
    }
}

/// Returns the hashes in a text of settings.
fn hashes(settings: &str) -> impl Iterator<Item = u64> {
    let numbers = settings.split(|letter: char| !letter.is_ascii_digit());
    numbers.filter(|digits| digits.len() >= HASH_DIGITS).filter_map(|digits| digits.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(arm: &str, fleet: &str, tenant: Option<u64>) -> Vec<String> {
        let fleet = toml::from_str(fleet).unwrap();
        let request = TraceRequest { tenant_hash: tenant, ..TraceRequest::default() };
        let trace = Trace { requests: vec![request], ..Trace::default() };
        of(&Arm::parse(arm).unwrap(), &trace, &fleet)
    }

    const PLAIN: &str = "[[engines]]\ncount = 2";

    #[test]
    fn o8_an_arm_that_reads_what_nothing_has_is_a_warning() {
        let arm = r#"lab=formula@{"cost":"label('zone') == 'a' ? 0 : label_number('price')","keep":"taint('t') || max_tokens > 0"}"#;
        let told = warnings(arm, PLAIN, None);
        let facts = "label-is/zone=a, label-number/price, max-tokens, taint-is/t";
        // O8.4
        assert!(matches!(&told[..], [one] if one.contains(facts)), "{told:?}");
        let known = "[[engines]]\ncount = 1\n[[engines]]\ncount = 1\nlabels = { zone = 'a', price = '2' }\ntaints = ['t']";
        let told = warnings(arm, known, None);
        assert!(matches!(&told[..], [one] if one.contains("read: max-tokens;")), "{told:?}");
        assert_eq!(warnings("least-loaded", PLAIN, None), [""; 0]);
        for builtin in ["default", "queue-kv-prefix", "longest-prefix", "cache-aware", "conditional-disagg"] {
            assert_eq!(warnings(builtin, PLAIN, None), [""; 0], "{builtin}");
        }
    }

    #[test]
    fn o8_an_arm_that_names_a_tenant_of_no_request_is_a_warning() {
        let arm = r#"a=formula@{"cost":"tenant == 'acme' ? active_requests : 0"}"#;
        let told = warnings(arm, PLAIN, None);
        // O8.4
        assert!(matches!(&told[..], [one] if one.contains("read: tenant-hash;")), "{told:?}");
        let told = warnings(arm, PLAIN, Some(7));
        let expected = "settings name tenants of which the trace has no request; hashes of";
        // O8.4
        assert!(matches!(&told[..], [one] if one.contains(expected)), "{told:?}");
        let twice =
            r#"a=formula@{"cost":"tenant == 'acme' ? 1 : 0","keep":"tenant == 'acme' || session != 's'"}"#;
        let told = warnings(twice, PLAIN, Some(7));
        let expected =
            "have names of which the trace has no tenant, unless they are of sessions or adapters;";
        // O8.4
        assert!(told.last().is_some_and(|one| one.contains(expected)), "{told:?}");
        let acme = pointsman_workers::name_hash(b"acme", 0);
        assert_eq!(warnings(arm, PLAIN, Some(acme)), [""; 0]);
    }
}
