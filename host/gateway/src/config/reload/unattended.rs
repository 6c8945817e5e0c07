//! Changes of the configuration file that are not applied unless an operator asks for them.
//!
//! The beginning of a TOML file is often a valid file. One that is half written, because a disk is full or a
//! copy stalled, may lack the keys of clients, TLS or most workers.

use std::collections::BTreeSet;

use crate::config::{Policies, TenantEntry, Tls, settings::Settings};

/// Returns what a file that changed by itself would take away, if it has to wait for an operator; `None` if
/// it may be applied. `is_emptied`: the file is empty, and was not.
pub(super) fn loss(before: &Settings, after: &Settings, is_emptied: bool) -> Option<String> {
    if is_emptied && !before.changes(after).applied.is_empty() {
        return Some("is empty".to_owned());
    }
    if before.clients_are_known() && !after.clients_are_known() {
        return Some("would serve clients that do not authenticate".to_owned());
    }
    let reads_are_guarded = |settings: &Settings| settings.server.admin_token_reads;
    if before.operators_are_known()
        && (!after.operators_are_known() || reads_are_guarded(before) && !reads_are_guarded(after))
    {
        return Some("would let in operators that do not authenticate".to_owned());
    }
    let listeners = [
        ("clients", &before.server.tls, &after.server.tls),
        ("operators", &before.server.admin_tls, &after.server.admin_tls),
    ];
    let tls = listeners.into_iter().find_map(|(who, before, after)| lost_tls(who, before.as_ref()?, after));
    tls.or_else(|| lost_trust(&before.policies, &after.policies).map(str::to_owned))
        .or_else(|| lost_limits(before, after))
        .or_else(|| lost_workers(before, after))
}

/// Returns what a listener would no longer demand of those who connect to it.
fn lost_tls(who: &str, before: &Tls, after: &Option<Tls>) -> Option<String> {
    let Some(after) = after else { return Some(format!("would serve {who} without TLS")) };
    let admits_more = before.client_ca_file.is_some() && after.client_ca_file.is_none()
        || before.require_client_cert && !after.require_client_cert
        || !before.client_names.is_empty() && after.client_names.is_empty();
    if admits_more {
        return Some(format!("would let in {who} without the certificates that they need now"));
    }
    (before.only_tls13() && !after.only_tls13()).then(|| format!("would accept TLS 1.2 from {who}"))
}

/// Returns which policies would run that are refused now.
fn lost_trust(before: &Policies, after: &Policies) -> Option<&'static str> {
    if before.require_signed && !after.require_signed {
        Some("would run policies without a signature")
    } else if before.signatures_bind && !after.signatures_bind {
        Some("would run policies whose signature is for another file or version")
    } else if before.min_versions.keys().any(|name| !after.min_versions.contains_key(name)) {
        Some("would run policies older than their smallest version")
    } else if before.pins.keys().any(|name| !after.pins.contains_key(name)) {
        Some("would run policies other than the pinned ones")
    } else {
        None
    }
}

/// Tenants pay for each other's load without limits, and seldom lose all of them on purpose. One tenant's
/// limits may end: its table may be removed with the tenant.
fn lost_limits(before: &Settings, after: &Settings) -> Option<String> {
    let are_limited = |settings: &Settings| settings.tenants.values().any(TenantEntry::has_limits);
    (are_limited(before) && !are_limited(after)).then(|| "would end the limits of all tenants".to_owned())
}

fn lost_workers(before: &Settings, after: &Settings) -> Option<String> {
    let stays: BTreeSet<_> = after.workers.iter().map(|worker| worker.id).collect();
    let all = before.workers.len();
    let gone = before.workers.iter().filter(|worker| !stays.contains(&worker.id)).count();
    let is_last = stays.is_empty() && !before.discovery.has_sources();
    let is_many = before.discovery.fleet_rules().guard.is_many(gone, all);
    (gone > 0 && (is_last || is_many)).then(|| format!("would remove {gone} of {all} workers"))
}

#[cfg(test)]
mod tests {
    use pointsman_workers::WorkerSpec;

    use super::*;
    use crate::config::Config;

    fn settings(workers: u16, edit: impl FnOnce(&mut Config)) -> Settings {
        let spec =
            |id| WorkerSpec::parse_flag(&format!("id={id},role=aggregated,engine=vllm,url=http://a:{id}"));
        let mut config =
            Config { workers: (1..=workers).map(|id| spec(id).unwrap()).collect(), ..Config::default() };
        edit(&mut config);
        config.resolve().unwrap()
    }

    #[test]
    fn n1_few_workers_leave_at_once_and_many_wait_for_an_operator() {
        let workers = |before, after, edit: fn(&mut Config)| {
            loss(&settings(before, edit), &settings(after, edit), false)
        };
        let with_source = |config: &mut Config| {
            let file = toml::from_str("name = 'a'\npath = 'a.toml'").unwrap();
            config.discovery.files = vec![file];
        };
        let removes = |gone, all| Some(format!("would remove {gone} of {all} workers"));
        // N1.4: more than half of the workers, and at least 4.
        assert_eq!([workers(8, 4, |_| {}), workers(4, 1, |_| {}), workers(0, 0, |_| {})], [None, None, None]);
        assert_eq!(workers(9, 4, |_| {}), removes(5, 9));
        // N1.4: the last worker, unless there is a source of others.
        assert_eq!([workers(1, 0, |_| {}), workers(1, 0, with_source)], [removes(1, 1), None]);
        assert_eq!(workers(4, 0, with_source), removes(4, 4));
        assert_eq!(workers(9, 4, |config| config.discovery.removal_share = 0.6), None);
    }

    #[test]
    fn n1_signatures_are_not_given_up_by_themselves() {
        const KEY: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
        let signed = settings(1, |config| {
            (config.policies.require_signed, config.policies.trusted_keys) = (true, vec![KEY.to_owned()]);
        });
        let open = settings(1, |_| {});
        let bound = |version: Option<u64>| {
            settings(1, |config| {
                let policies = &mut config.policies;
                (policies.require_signed, policies.trusted_keys) = (true, vec![KEY.to_owned()]);
                policies.signatures_bind = true;
                policies.min_versions =
                    version.map(|version| ("prefill".to_owned(), version)).into_iter().collect();
            })
        };
        // N1.4
        for (before, after, expected) in [
            (&signed, &open, "would run policies without a signature"),
            (&bound(None), &signed, "would run policies whose signature is for another file or version"),
            (&bound(Some(7)), &bound(None), "would run policies older than their smallest version"),
        ] {
            let expected = Some(expected.to_owned());
            assert_eq!([loss(before, after, false), loss(after, before, false)], [expected, None]);
        }
        assert_eq!(loss(&bound(Some(7)), &bound(Some(6)), false), None);
    }

    #[test]
    fn n1_tls_does_not_end_or_weaken_by_itself() {
        let full: Tls = toml::from_str(
            "cert_file = 'c'\nkey_file = 'k'\nclient_ca_file = 'a'\nrequire_client_cert = true\n\
             client_names = ['a', 'b']\nmin_version = '1.3'",
        )
        .unwrap();
        let changed = |edit: fn(&mut Tls)| {
            let mut tls = full.clone();
            edit(&mut tls);
            Some(tls)
        };
        let certificates = "would let in WHO without the certificates that they need now";
        // N1.4
        for (after, expected) in [
            (None, Some("would serve WHO without TLS")),
            (
                changed(|tls| {
                    (tls.client_ca_file, tls.require_client_cert) = (None, false);
                    tls.client_names.clear();
                }),
                Some(certificates),
            ),
            (changed(|tls| tls.require_client_cert = false), Some(certificates)),
            (changed(|tls| tls.client_names.clear()), Some(certificates)),
            (changed(|tls| tls.min_version = "1.2".to_owned()), Some("would accept TLS 1.2 from WHO")),
            (changed(|tls| tls.client_names.truncate(1)), None),
        ] {
            for (who, is_admin) in [("clients", false), ("operators", true)] {
                let with = |tls: &Option<Tls>| {
                    settings(1, |Config { server, .. }| {
                        let listener = if is_admin { &mut server.admin_tls } else { &mut server.tls };
                        listener.clone_from(tls);
                    })
                };
                let (before, after) = (with(&Some(full.clone())), with(&after));
                let told = expected.map(|expected| expected.replace("WHO", who));
                assert_eq!([loss(&before, &after, false), loss(&after, &before, false)], [told, None]);
            }
        }
    }

    #[test]
    fn n1_pins_and_limits_of_tenants_do_not_end_by_themselves() {
        let pinned = |names: &[&str]| {
            let pins = names.iter().map(|name| ((*name).to_owned(), format!("sha256:{}", "0".repeat(64))));
            settings(1, |config| config.policies.pins = pins.collect())
        };
        let limited = |tenants: &[&str], limit: &str| {
            let entry: TenantEntry = toml::from_str(limit).unwrap();
            let tenants = tenants.iter().map(|name| ((*name).to_owned(), entry.clone()));
            settings(1, |config| config.tenants = tenants.collect())
        };
        let runs_others = Some("would run policies other than the pinned ones".to_owned());
        let no_limits = Some("would end the limits of all tenants".to_owned());
        let of_model = "models.tiny.concurrency = 1";
        // N1.4
        for (before, after, expected) in [
            (pinned(&["prefill", "decode"]), pinned(&["decode"]), runs_others),
            (limited(&["a", "*"], of_model), limited(&["a", "*"], "weight = 2.0"), no_limits),
            (limited(&["a", "*"], "requests_per_minute = 1"), limited(&["a"], of_model), None),
            (limited(&["a"], "requests_per_minute = 0"), limited(&[], ""), None),
        ] {
            assert_eq!([loss(&before, &after, false), loss(&after, &before, false)], [expected, None]);
        }
    }

    #[test]
    fn n1_authentication_does_not_end_by_itself() {
        let token = |config: &mut Config| config.server.admin_token = Some("t".into());
        let reads = |config: &mut Config| {
            token(config);
            config.server.admin_token_reads = true;
        };
        let (open, guarded, closed) = (settings(1, |_| {}), settings(1, token), settings(1, reads));
        let lets_in = Some("would let in operators that do not authenticate".to_owned());
        // N1.4
        for (before, after) in [(&guarded, &open), (&closed, &open), (&closed, &guarded)] {
            assert_eq!(loss(before, after, false), lets_in);
            assert_eq!(loss(after, before, false), None);
        }
        assert_eq!(loss(&closed, &closed, true), None, "an empty file that changes nothing");
        assert_eq!(loss(&open, &closed, true), Some("is empty".to_owned()));
    }
}
