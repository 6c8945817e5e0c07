//! An attempt: a save, and the steps that it goes through.

use tokio::time::Instant;

use super::{Installed, Session};
use crate::dev::{
    live::{OwnPolicy, SlotName},
    steps::{Component, Outcome, Recorded, Steps},
};

/// An attempt: one save and its steps.
pub(super) struct Attempt {
    saved: Instant,
    /// Start of the present step.
    began: Instant,
    /// Times of the steps that ended.
    times: Vec<String>,
    component: Option<Component>,
    failed: bool,
}

impl Session {
    pub(super) fn start(&mut self, saved: Instant) -> anyhow::Result<()> {
        // A replay for a policy that is installed already ends without a word.
        let label = match (self.attempt.times.as_slice(), &self.attempt.component) {
            ([], _) => Some("build"),
            ([_], Some(_)) => Some("cases"),
            _ => None,
        };
        if let (Some(_), Some(label)) = (self.step.take(), label) {
            self.console.print_below(label, "ended: there is a newer save")?;
        }
        (self.attempt, self.step) = (Attempt::of(saved), Some(self.steps.build()));
        Ok(())
    }

    /// Shows the result of a step, and starts the next one.
    pub(super) fn done(&mut self, outcome: Outcome) -> anyhow::Result<()> {
        let took = self.attempt.began.elapsed().as_secs_f64();
        self.attempt.began = Instant::now();
        match outcome {
            Outcome::Built(built) => self.built(built, took),
            Outcome::Tested(Err(text)) => {
                self.console.print_below("cases", &text)?;
                self.fail()
            }
            Outcome::Tested(Ok((summary, lines))) => {
                self.attempt.times.push(format!("cases {took:.2}"));
                self.console.print_below("cases", &summary)?;
                lines.iter().try_for_each(|line| self.console.print_below("log", line))?;
                self.install()
            }
            Outcome::Asked(Ok(refused_before)) => self.place(refused_before),
            Outcome::Asked(Err(error)) if self.once => {
                self.console.print_below("gateway", &error.to_string())?;
                self.fail()
            }
            Outcome::Asked(Err(_)) => self.place(0),
            Outcome::Replayed(text) => self.console.print_below("replay", &text),
        }
    }

    fn built(&mut self, built: Result<Component, String>, took: f64) -> anyhow::Result<()> {
        self.has_built = true;
        if let Some(saved) = self.queued.take() {
            return self.start(saved);
        }
        match built {
            Err(text) => {
                let label = if self.steps.source.is_formula() { "refused" } else { "build" };
                self.console.print_below(label, &text)?;
                self.fail()
            }
            Ok(component) => {
                let size = pointsman_admin_cli::text::bytes(component.bytes.len() as u64);
                self.attempt.times.push(format!("build {took:.2}"));
                self.attempt.component = Some(component);
                self.console.print_below("build", &format!("{size} in {took:.2} s"))?;
                if self.steps.cases.is_file() {
                    self.step = Some(self.steps.test());
                    return Ok(());
                }
                self.console
                    .print_below("cases", &format!("none: {} is missing", self.steps.cases.display()))?;
                self.install()
            }
        }
    }

    /// Marks the attempt as failed and says which policy still runs.
    pub(super) fn fail(&mut self) -> anyhow::Result<()> {
        self.attempt.failed = true;
        let running =
            self.current.as_ref().and_then(|current| Some((&current.policy, current.policy.generation()?)));
        match running {
            Some((policy, generation)) => {
                let lane = policy.lane;
                self.console.print_below("", &format!("generation {generation} stays in the {lane} lane"))
            }
            None => Ok(()),
        }
    }

    /// Starts the installation of a policy that passed its cases, or the replay where nothing is installed.
    fn install(&mut self) -> anyhow::Result<()> {
        let Some((gateway, _)) = &self.gateway else { return Ok(()) };
        if self.files.is_none() {
            self.replay();
            return Ok(());
        }
        let digest = self.attempt.component.as_ref().map(|component| component.digest.as_str());
        let running = self.current.as_ref().filter(|current| Some(&*current.policy.digest) == digest);
        if let Some(generation) = running.and_then(|current| current.policy.generation()) {
            return self
                .console
                .print_below("install", &format!("no change: generation {generation} has the same bytes"));
        }
        self.step = Some(Steps::ask(gateway.clone()));
        Ok(())
    }

    /// Puts the policy into the shadow lane. Replays decisions while the gateway compiles it.
    fn place(&mut self, refused_before: u64) -> anyhow::Result<()> {
        let (Some(files), Some(component)) = (&mut self.files, self.attempt.component.take()) else {
            return Ok(());
        };
        if let Err(error) = files.place(&component.bytes) {
            self.console.print_below("install", &format!("{error:#}"))?;
            return self.fail();
        }
        // The gateway refuses the same content only once.
        let same = self.current.as_ref().filter(|current| current.policy.digest == component.digest);
        let refused_before = same.map_or(refused_before, |current| current.policy.refused_before);
        let (saved, times) = (self.attempt.saved, self.attempt.times.join(", "));
        let policy = OwnPolicy::placed(&component.digest, saved, times, refused_before);
        let new = Installed { policy, bytes: component.bytes };
        match self.current.replace(new) {
            Some(old) if old.policy.generation().is_some() => self.earlier = Some(old),
            _ => {}
        }
        (self.look, self.next_look) = (None, Instant::now());
        self.replay();
        Ok(())
    }

    fn replay(&mut self) {
        let Some((gateway, slot)) = &self.gateway else { return };
        let SlotName { slot, model } = slot.clone();
        self.step =
            Some(self.steps.replay(Recorded { gateway: gateway.clone(), slot, model, last: self.last }));
    }

    /// Returns whether `--once` is over, and with success.
    pub(super) fn verdict(&self) -> Option<bool> {
        if self.attempt.failed {
            return Some(false);
        }
        if self.step.is_some() {
            return None;
        }
        match (&self.files, &self.current) {
            (None, _) => Some(true),
            (Some(_), None) => Some(false),
            (Some(_), Some(current)) if current.policy.generation().is_some() => Some(true),
            (Some(_), Some(_)) if self.away || self.attempt.began.elapsed() > self.steps.limit => Some(false),
            _ => None,
        }
    }
}

impl Attempt {
    pub(super) fn of(saved: Instant) -> Self {
        Self { saved, began: Instant::now(), times: Vec::new(), component: None, failed: false }
    }
}
