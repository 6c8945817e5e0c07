//! Changes of the configuration file that are not applied unless an operator asks for them.
//!
//! The beginning of a TOML file is often a valid file. One that is half written, because a disk is full or a
//! copy stalled, may lack the keys of clients or most workers.

use std::collections::BTreeSet;

use crate::config::settings::Settings;

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
    if before.policies.require_signed && !after.policies.require_signed {
        return Some("would run policies without a signature".to_owned());
    }
    lost_workers(before, after)
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
        // N1.4
        let runs_others = Some("would run policies without a signature".to_owned());
        assert_eq!([loss(&signed, &open, false), loss(&open, &signed, false)], [runs_others, None]);
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
