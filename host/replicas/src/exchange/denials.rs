//! Subjects that the server refuses to the user of this gateway.
//!
//! The server keeps the connection, and refuses every message and subscription on them.

use std::{fmt, time::Duration};

use tokio::time::Instant;

/// Time between two attempts to subscribe to a subject that was refused.
pub(super) const SUBSCRIBE_AGAIN: Duration = Duration::from_secs(5);
/// Maximum number of subjects that are shown as refused.
const MAX_DENIALS: usize = 4;
/// Maximum number of a subject's characters that are shown.
const MAX_SUBJECT: usize = 200;

/// One refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Denial {
    /// What the user may not do there.
    pub(super) action: Action,
    pub(super) subject: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Publish,
    Subscribe,
}

/// The refusals that are in force.
#[derive(Debug)]
pub(super) struct Denials {
    /// Each with when the server said it last.
    known: Vec<(Denial, Instant)>,
    /// How long a refusal counts that the server does not repeat.
    lifetime: Duration,
    subscribed: Option<Instant>,
}

impl Denial {
    /// Reads what a server says: `Permissions Violation for Publish to "a.b"`.
    pub(super) fn of(error: &str) -> Option<Self> {
        let error = error.strip_prefix("Permissions Violation for ")?;
        let (action, rest) = error.split_once(" to \"")?;
        let action = match action {
            "Publish" => Action::Publish,
            "Subscription" => Action::Subscribe,
            _ => return None,
        };
        let subject = rest.split('"').next()?.chars().take(MAX_SUBJECT).collect();
        Some(Self { action, subject })
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = match self.action {
            Action::Publish => "publish",
            Action::Subscribe => "subscribe",
        };
        write!(f, "may not {action} to `{}`", self.subject)
    }
}

impl Denials {
    /// Creates an empty list. `repeated`: how often the gateway sends something at least.
    pub(super) fn new(repeated: Duration) -> Self {
        Self { known: Vec::new(), lifetime: repeated.max(SUBSCRIBE_AGAIN) * 2, subscribed: None }
    }

    /// Adds a refusal. Returns whether it is a new one.
    pub(super) fn add(&mut self, denial: Denial, now: Instant) -> bool {
        if let Some((_, seen)) = self.known.iter_mut().find(|(known, _)| *known == denial) {
            *seen = now;
            return false;
        }
        let is_shown = self.known.len() < MAX_DENIALS;
        if is_shown {
            self.known.push((denial, now));
        }
        is_shown
    }

    /// Forgets what the server did not repeat. Returns whether that was the last refusal.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let before = self.known.len();
        self.known.retain(|(_, seen)| now.saturating_duration_since(*seen) < self.lifetime);
        before > 0 && self.known.is_empty()
    }

    /// Returns whether to subscribe again now.
    pub(super) fn subscribe_due(&mut self, now: Instant) -> bool {
        let denied = self.known.iter().any(|(denial, _)| denial.action == Action::Subscribe);
        let recent = |at: Instant| now.saturating_duration_since(at) < SUBSCRIBE_AGAIN;
        if !denied || self.subscribed.is_some_and(recent) {
            return false;
        }
        // The first attempt waits, too.
        self.subscribed.replace(now).is_some()
    }

    /// Describes all refusals; `None`: nothing is refused.
    pub(super) fn problem(&self) -> Option<String> {
        let all: Vec<String> = self.known.iter().map(|(denial, _)| denial.to_string()).collect();
        let advice = "check the permissions of the gateway's user at the NATS server";
        (!all.is_empty()).then(|| format!("this gateway {}: {advice}", all.join(", and ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_counts_until_the_server_does_not_repeat_it() {
        let (mut denials, start) = (Denials::new(Duration::from_secs(1)), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let denial = Denial::of("Permissions Violation for Subscription to \"p.d.*\" (sid \"1\")").unwrap();
        assert_eq!(denial.to_string(), "may not subscribe to `p.d.*`");
        assert!(denials.add(denial.clone(), at(0)) && !denials.add(denial, at(6)));
        let publish = Denial::of("Permissions Violation for Publish to \"p.d.a\"").unwrap();
        assert!(denials.add(publish, at(6)));
        assert!(denials.problem().unwrap().contains("`p.d.*`, and may not publish to `p.d.a`"));
        assert!(!denials.expire(at(15)) && denials.expire(at(16)) && !denials.expire(at(17)));
        assert_eq!(denials.problem(), None);
        assert_eq!(Denial::of("Permissions Violation"), None);
        assert_eq!(Denial::of("User Authentication Expired"), None);
        for number in 0..9 {
            denials.add(Denial { action: Action::Publish, subject: number.to_string() }, at(20));
        }
        assert_eq!(denials.known.len(), MAX_DENIALS);
    }

    #[test]
    fn a_refused_subscription_is_tried_again_at_times() {
        let (mut denials, start) = (Denials::new(Duration::from_secs(1)), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!denials.subscribe_due(at(0)));
        let _ = denials.add(Denial { action: Action::Subscribe, subject: "a".to_owned() }, at(0));
        assert!(!denials.subscribe_due(at(0)) && !denials.subscribe_due(at(4)));
        assert!(
            denials.subscribe_due(at(5)) && !denials.subscribe_due(at(6)) && denials.subscribe_due(at(10))
        );
    }
}
