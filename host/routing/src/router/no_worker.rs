//! The message of a leg for which no worker is eligible: how many there are, and what is wrong with them.

use pointsman_workers::{Candidate, Ineligible, Leg, ModelName, Snapshot, Worker, WorkerId};

/// Problem of a worker, as a phrase about one worker and about several.
pub(super) type Phrase = (&'static str, &'static str);

/// Returns the phrase for a worker's own state.
pub(super) fn phrase(reason: Ineligible) -> Phrase {
    match reason {
        Ineligible::NotReady => ("is not ready yet", "are not ready yet"),
        Ineligible::Misconfigured => {
            ("is another engine than configured", "are other engines than configured")
        }
        Ineligible::Unhealthy => ("fails its health checks", "fail their health checks"),
        Ineligible::Asleep => ("is asleep", "are asleep"),
        Ineligible::EnginePaused => ("has a paused engine", "have paused engines"),
        Ineligible::Draining => ("is draining", "are draining"),
        Ineligible::Failing => ("is failing", "are failing"),
        Ineligible::Paused => ("refuses more work for now", "refuse more work for now"),
        Ineligible::Stuck => ("makes no progress", "make no progress"),
        Ineligible::AtCapacity => ("is busy", "are busy"),
    }
}

/// Returns the phrase for the state of `worker`.
pub(super) fn phrase_of(worker: &Worker, reason: Ineligible) -> Phrase {
    match reason {
        Ineligible::NotReady | Ineligible::Unhealthy if worker.refuses_key() => (
            "refuses the gateway's key (set api_key of the worker)",
            "refuse the gateway's key (set api_key of the workers)",
        ),
        reason => phrase(reason),
    }
}

/// Returns why a worker that is down cannot serve a request which continues what that worker has.
#[must_use]
pub fn holder_text(holder: &Worker) -> String {
    let reason =
        holder.ineligible_although_draining().map_or(("was not chosen", ""), |why| phrase_of(holder, why));
    format!("worker {}, which has what the request continues, {}", holder.id(), reason.0)
}

/// Returns why no worker can serve a leg of `model` now, by the workers' own states.
#[must_use]
pub fn no_worker_text(snapshot: &Snapshot, model: &ModelName, leg: Leg) -> String {
    text(snapshot, model, leg, |candidate| {
        candidate.ineligible().map(|why| phrase_of(&candidate.worker, why))
    })
}

/// Returns why no worker can serve a leg: `why` returns the problem of a candidate.
pub(super) fn text(
    snapshot: &Snapshot,
    model: &ModelName,
    leg: Leg,
    why: impl Fn(&Candidate) -> Option<Phrase>,
) -> String {
    let pool = snapshot.pool(model, leg);
    if pool.is_empty() {
        return unread_text(snapshot, model, leg).unwrap_or_else(|| {
            format!(
                "no {leg} worker is registered for '{model}': GET /v1/models lists the models that are served"
            )
        });
    }
    let mut seen: Vec<WorkerId> = Vec::new();
    let workers = pool.iter().filter_map(|candidate| {
        let worker = &*candidate.worker;
        let is_new = !seen.contains(&worker.id());
        is_new.then(|| {
            seen.push(worker.id());
            (worker, why(candidate).unwrap_or(("was not chosen", "were not chosen")))
        })
    });
    let roles: Vec<String> = by_role(workers).iter().map(|(role, reasons)| of_role(role, reasons)).collect();
    format!("no worker can serve '{model}': {}", roles.join("; "))
}

/// Returns what is wrong with the workers of a leg whose models are unknown; `None` without such workers.
fn unread_text(snapshot: &Snapshot, model: &ModelName, leg: Leg) -> Option<String> {
    let unread = snapshot.workers().iter().filter(|worker| {
        worker.spec().role.serves(leg) && worker.spec().models.is_empty() && worker.models_were_never_read()
    });
    let workers = unread.map(|worker| {
        let reason = worker.ineligible().unwrap_or(Ineligible::NotReady);
        (&**worker, phrase_of(worker, reason))
    });
    let part = |role: &str, ((one, many), count): &(Phrase, usize)| match count {
        1 => format!("1 {role} worker, whose models are unknown, {one}"),
        count => format!("{count} {role} workers, whose models are unknown, {many}"),
    };
    let mut parts = Vec::new();
    for (role, reasons) in by_role(workers) {
        parts.extend(reasons.iter().map(|reason| part(role, reason)));
    }
    (!parts.is_empty())
        .then(|| format!("no {leg} worker is known to serve '{model}': {}", parts.join(" and ")))
}

/// Groups workers by role, in their order, and by problem.
fn by_role<'a>(
    workers: impl Iterator<Item = (&'a Worker, Phrase)>,
) -> Vec<(&'static str, Vec<(Phrase, usize)>)> {
    let mut roles: Vec<(&'static str, Vec<(Phrase, usize)>)> = Vec::new();
    for (worker, why) in workers {
        let role = worker.spec().role.as_str();
        let place = roles.iter().position(|(known, _)| *known == role).unwrap_or_else(|| {
            roles.push((role, Vec::new()));
            roles.len() - 1
        });
        let Some((_, reasons)) = roles.get_mut(place) else { continue };
        match reasons.iter_mut().find(|(known, _)| *known == why) {
            Some((_, count)) => *count += 1,
            None => reasons.push((why, 1)),
        }
    }
    roles
}

fn of_role(role: &str, reasons: &[(Phrase, usize)]) -> String {
    match reasons {
        [((one, _), 1)] => format!("the only {role} worker {one}"),
        [((_, many), 2)] => format!("both {role} workers {many}"),
        [((_, many), count)] => format!("all {count} {role} workers {many}"),
        _ => {
            let total: usize = reasons.iter().map(|(_, count)| count).sum();
            let part = |((one, many), count): &(Phrase, usize)| {
                format!("{count} {}", if *count == 1 { one } else { many })
            };
            let parts: Vec<String> = reasons.iter().map(part).collect();
            format!("of {total} {role} workers {}", parts.join(" and "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_two_and_more_workers_and_mixed_reasons_are_counted() {
        let (draining, failing) = (phrase(Ineligible::Draining), phrase(Ineligible::Unhealthy));
        let said = |reasons: &[(Phrase, usize)]| of_role("decode", reasons);
        assert_eq!(said(&[(draining, 1)]), "the only decode worker is draining");
        assert_eq!(said(&[(draining, 2)]), "both decode workers are draining");
        assert_eq!(said(&[(draining, 3)]), "all 3 decode workers are draining");
        let mixed = "of 3 decode workers 1 is draining and 2 fail their health checks";
        assert_eq!(said(&[(draining, 1), (failing, 2)]), mixed);
    }
}
