//! Follows the policy of this command on a running gateway: whether it runs, what it decided, how it
//! failed.

use std::time::Duration;

use pointsman_admin_cli::{
    Gateway, GatewayError,
    api::{LastFailure, Part, Policies, Slot, Trial},
    query, segment,
    text::{counted, percent, quoted},
};
use pointsman_routing::Lane;
use serde::Deserialize;
use tokio::time::Instant;

/// Log lines of one answer that are shown.
const MAX_LOG_LINES: usize = 10;
/// Time after which a file that the gateway does not mention is a surprise.
const UNREAD: Duration = Duration::from_secs(10);
/// Time in which a file is expected to be compiled and to decide for the first time.
const AWAITED: Duration = Duration::from_secs(30);
/// Number of consecutive answers without the policy after which its lane counts as lost.
const MAX_ABSENT: u32 = 5;

/// A slot of the gateway.
#[derive(Clone, Debug)]
pub(super) struct SlotName {
    pub(super) slot: String,
    pub(super) model: Option<String>,
}

/// One look at the slot.
pub(super) struct Look {
    /// `None`: the gateway has no such slot.
    pub(super) slot: Option<Slot>,
    /// Files that are being compiled.
    compiling: Vec<String>,
    lines: Lines,
}

/// `GET /policies/{slot}/log`.
#[derive(Debug, Default, Deserialize)]
struct Lines {
    lines: Vec<Line>,
    last: u64,
}

#[derive(Debug, Deserialize)]
struct Line {
    level: String,
    generation: Option<u64>,
    text: String,
}

impl SlotName {
    /// Looks at the slot, and at the lines that its policies logged after line `after`.
    pub(super) async fn look(self, gateway: Gateway, after: Option<u64>) -> Result<Look, GatewayError> {
        let policies: Policies = gateway.get("/policies").await?.read()?;
        let mut slots = policies.slots.into_iter();
        let slot = slots.find(|slot| slot.slot == self.slot && slot.model == self.model);
        let compiling = policies.compiling.into_iter().map(|one| one.file).collect();
        let mut lines = Lines::default();
        if let Some(after) = after {
            let query = query(&[("after", Some(&after.to_string())), ("model", self.model.as_deref())]);
            let path = format!("/policies/{}/log{query}", segment(&self.slot));
            lines = match gateway.get(&path).await?.read() {
                // A gateway of an earlier release has no log.
                Err(GatewayError::Refused { status: 404, .. }) => Lines::default(),
                other => other?,
            };
        }
        Ok(Look { slot, compiling, lines })
    }
}

/// Whether the policy is still of interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// The policy runs, or the gateway has not decided yet.
    Open,
    /// The gateway refused it before it ran.
    Refused,
    /// The policy ran, and does not run any more.
    Over,
}

/// Lines and status to show after a look at the gateway.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// Labels and texts.
    pub(super) lines: Vec<(&'static str, String)>,
    pub(super) status: Option<String>,
    pub(super) fate: Fate,
}

/// A policy of this command in a lane of the gateway.
pub(super) struct OwnPolicy {
    pub(super) lane: Lane,
    pub(super) digest: String,
    /// Time of the save, of its file in the directory, and how long the steps took.
    saved: Instant,
    placed: Instant,
    steps: String,
    /// Refusals up to this time are of other content, milliseconds since the Unix epoch.
    pub(super) refused_before: u64,
    generation: Option<u64>,
    /// Digests of the policies that the generation runs beside it.
    beside: Vec<String>,
    decided: bool,
    failed_at: u64,
    absent: u32,
    last_line: u64,
    told_unread: bool,
    told_refusal: bool,
}

/// Generation that a lane runs.
struct Running<'a> {
    generation: u64,
    parts: &'a [Part],
    calls: u64,
    failures: u64,
    breaker_open: bool,
    last_failure: Option<&'a LastFailure>,
    only: Option<u64>,
    trial: Option<&'a Trial>,
}

impl OwnPolicy {
    /// A policy whose file has just been placed in the shadow lane.
    pub(super) fn placed(digest: &str, saved: Instant, steps: String, refused_before: u64) -> Self {
        Self {
            lane: Lane::Shadow,
            digest: digest.to_owned(),
            saved,
            placed: Instant::now(),
            steps,
            refused_before,
            generation: None,
            beside: Vec::new(),
            decided: false,
            failed_at: 0,
            absent: 0,
            last_line: 0,
            told_unread: false,
            told_refusal: false,
        }
    }

    /// The same policy, whose file moved to another lane.
    pub(super) fn moved(&mut self, lane: Lane) {
        (self.lane, self.generation, self.decided, self.absent) = (lane, None, false, 0);
        (self.saved, self.placed, self.steps) = (Instant::now(), Instant::now(), String::new());
    }

    /// Shows a refusal once: the file stays, and a later look may find that it runs.
    pub(super) fn note_refusal(&mut self) {
        self.told_refusal = true;
    }

    /// Returns whether the gateway is expected to decide about it soon.
    pub(super) fn is_awaited(&self) -> bool {
        !self.decided && !self.told_refusal && self.placed.elapsed() < AWAITED
    }

    /// The generation that runs it.
    pub(super) fn generation(&self) -> Option<u64> {
        self.generation
    }

    /// Digests of the policies that its generation runs beside it.
    pub(super) fn beside(&self) -> &[String] {
        &self.beside
    }

    /// The line of the log after which lines are new; `None` while it does not run.
    pub(super) fn after(&self) -> Option<u64> {
        self.generation.map(|_| self.last_line)
    }

    /// Takes in a look at the slot.
    pub(super) fn see(&mut self, look: &Look) -> Seen {
        let mut seen = Seen { lines: Vec::new(), status: None, fate: Fate::Open };
        // First what it logged: the reason why it does not run any more may be there.
        self.see_lines(&look.lines, &mut seen);
        let Some(slot) = &look.slot else {
            self.see_absent(None, look, &mut seen);
            return seen;
        };
        // The digest of the lane is that of the policy that ranks, and the file may be a filter.
        let is_own = |running: &Running<'_>| running.parts.iter().any(|part| part.digest == self.digest);
        match Running::of(slot, self.lane).filter(is_own) {
            Some(running) => self.see_running(&running, &mut seen),
            None => self.see_absent(Some(slot), look, &mut seen),
        }
        seen
    }

    fn see_running(&mut self, running: &Running<'_>, seen: &mut Seen) {
        self.absent = 0;
        let others = running.parts.iter().filter(|part| part.digest != self.digest);
        self.beside = others.map(|part| part.digest.clone()).collect();
        let (lane, generation) = (self.lane, running.generation);
        if self.generation != Some(generation) {
            self.last_line = 0;
            let times = if self.generation.is_none() && !self.steps.is_empty() {
                let gateway = self.placed.elapsed().as_secs_f64();
                let saved = self.saved.elapsed().as_secs_f64();
                format!(", {saved:.2} s after the save ({}, gateway {gateway:.2})", self.steps)
            } else {
                String::new()
            };
            seen.lines.push(("live", format!("{lane}, generation {generation}{times}")));
            self.generation = Some(generation);
        }
        let compared = running.trial.map_or(0, Trial::compared);
        let has_decided = running.calls + compared > 0;
        if has_decided && !std::mem::replace(&mut self.decided, true) {
            let saved = self.saved.elapsed().as_secs_f64();
            let text =
                format!("the first decision of generation {generation} is {saved:.2} s after the save");
            if !self.steps.is_empty() {
                seen.lines.push(("decided", text));
            }
        }
        if let Some(failure) = running.last_failure.filter(|failure| failure.at_ms > self.failed_at) {
            self.failed_at = failure.at_ms;
            let (count, calls) = (running.failures, counted(running.calls, "call"));
            let (message, kind) = (&failure.message, &failure.kind);
            let request = failure.request_id.as_deref().map(quoted);
            let request = request.map(|id| format!(", request {id}")).unwrap_or_default();
            let text = format!("{count} of {calls} failed; the last{request}: {message} ({kind})");
            seen.lines.push(("failure", text));
        }
        seen.status = has_decided.then(|| running.status(lane));
    }

    fn see_absent(&mut self, slot: Option<&Slot>, look: &Look, seen: &mut Seen) {
        let refusals = slot.map(|slot| slot.refusals.as_slice()).unwrap_or_default();
        let file = format!("{}.{}.", slot.map(|slot| &*slot.slot).unwrap_or_default(), self.lane);
        let refusal = refusals.iter().rev().find(|refusal| {
            // A part that the slot's configuration names may be refused, too.
            let of_this = refusal.digest.as_ref() == Some(&self.digest) || !refusal.file.contains(&file);
            refusal.lane == self.lane.as_str() && refusal.at_ms > self.refused_before && of_this
        });
        if refusal.is_some() && self.told_refusal {
            return;
        }
        if let Some(refusal) = refusal {
            let text = format!("{} ({}): {}", refusal.file, refusal.kind, refusal.message);
            let was = self.generation.is_some();
            seen.lines.push((if was { "withdrawn" } else { "refused" }, text));
            seen.fate = if was { Fate::Over } else { Fate::Refused };
            return;
        }
        if look.compiling.iter().any(|compiling| compiling.contains(&file)) {
            seen.status = Some(format!("the gateway compiles it, {} s", self.placed.elapsed().as_secs()));
            return;
        }
        if self.generation.is_some() {
            self.absent += 1;
            if self.absent >= MAX_ABSENT {
                let lane = self.lane;
                seen.lines.push(("gateway", format!("the {lane} lane does not run it any more")));
                seen.fate = Fate::Over;
            }
        } else if slot.is_none() {
            seen.lines.push(("gateway", "it has no such slot; `pointsman policies` lists slots".to_owned()));
            seen.fate = Fate::Refused;
        } else if !self.told_unread && self.placed.elapsed() > UNREAD {
            self.told_unread = true;
            let text =
                "it has not read the file for 10 s: is --policies the directory `policies.dir` of --gateway?";
            seen.lines.push(("gateway", text.to_owned()));
        }
    }

    fn see_lines(&mut self, lines: &Lines, seen: &mut Seen) {
        if self.generation.is_none() {
            return;
        }
        // The number is smaller after a restart of the gateway.
        let is_later = lines.last >= self.last_line;
        self.last_line = lines.last;
        if !is_later {
            return;
        }
        let own: Vec<&Line> = lines.lines.iter().filter(|line| line.generation == self.generation).collect();
        let text = |line: &&Line| ("log", format!("{}: {}", line.level, line.text));
        seen.lines.extend(own.iter().take(MAX_LOG_LINES).map(text));
        if own.len() > MAX_LOG_LINES {
            seen.lines.push(("log", format!("and {} lines more", own.len() - MAX_LOG_LINES)));
        }
    }
}

impl<'a> Running<'a> {
    fn of(slot: &'a Slot, lane: Lane) -> Option<Self> {
        let trial = match lane {
            Lane::Canary => slot.canary.as_ref()?,
            Lane::Shadow => slot.shadow.as_ref()?,
            Lane::Active => {
                return Some(Self {
                    generation: slot.generation,
                    parts: &slot.parts,
                    calls: slot.calls,
                    failures: slot.failures,
                    breaker_open: slot.breaker_open,
                    last_failure: slot.last_failure.as_ref(),
                    only: slot.only_choice.map(|only| only.worker),
                    trial: None,
                });
            }
        };
        Some(Self {
            generation: trial.generation,
            parts: &trial.parts,
            calls: trial.calls,
            failures: trial.failures,
            breaker_open: trial.breaker_open,
            last_failure: trial.last_failure.as_ref(),
            only: trial.only_choice.map(|only| only.worker),
            trial: Some(trial),
        })
    }

    fn status(&self, lane: Lane) -> String {
        let generation = self.generation;
        let mut text = match (lane, self.trial) {
            (Lane::Shadow, Some(trial)) => {
                let Trial { agree, failed, shed, .. } = trial;
                let all = trial.compared();
                let share = percent((all > 0).then(|| ratio(*agree, all)));
                let refused = if *shed > 0 { format!(", {shed} refused") } else { String::new() };
                format!(
                    "shadow, generation {generation}: agrees in {agree} of {all} ({share}){refused}, {failed} failed"
                )
            }
            _ => format!(
                "{lane}, generation {generation}: {}, {} failed",
                counted(self.calls, "call"),
                self.failures
            ),
        };
        if self.breaker_open {
            text.push_str("; its breaker is open, so it is not called");
        }
        if let Some(worker) = self.only {
            text.push_str(&format!("; it chooses worker {worker} only"));
        }
        text
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share for people")]
fn ratio(part: u64, all: u64) -> f64 {
    part as f64 / all as f64
}

#[cfg(test)]
mod tests;
