//! Actions of the keys.

use pointsman_admin_cli::{Gateway, GatewayError, api::Decisions, query, segment};
use pointsman_policy_admin::Report;
use pointsman_routing::Lane;
use serde::Deserialize;
use tokio::time::Instant;

use super::{LIVE_POLL, Session};
use crate::dev::{
    lane_files::LaneFiles,
    live::{OwnPolicy, SlotName},
};

pub(super) const HELP: &str =
    "c canary, p promote, u undo, d explain a decision that differs, b build again, q quit";
/// Ctrl-C and Ctrl-D, which a terminal in raw mode passes on.
const INTERRUPTS: [char; 2] = ['\u{3}', '\u{4}'];
/// Decisions in which one that differs is searched.
const SEARCHED: &str = "200";

/// The answer of `GET /decisions/{id}`.
#[derive(Deserialize)]
struct Explained {
    sentences: Vec<String>,
}

impl Session {
    /// Performs the action of a key. Returns whether the key ends the command.
    pub(super) async fn key(&mut self, key: char) -> anyhow::Result<bool> {
        match self.confirms.take() {
            Some(generation) if key == 'y' => {
                self.promote(generation).await?;
                return Ok(false);
            }
            Some(_) => self.console.print_below("promote", "no")?,
            None => {}
        }
        match key {
            'q' => return Ok(true),
            key if INTERRUPTS.contains(&key) => return Ok(true),
            'b' => self.saved(Instant::now()),
            'c' => self.canary()?,
            'p' => self.ask_to_promote()?,
            'u' => self.undo().await?,
            'd' => {
                let text = self.difference().await;
                self.console.print_below("decision", &text)?;
            }
            'h' | '?' => self.console.print_below("keys", HELP)?,
            _ => {}
        }
        Ok(false)
    }

    /// Moves the trial's file to the canary lane.
    fn canary(&mut self) -> anyhow::Result<()> {
        self.move_trial("canary", Lane::Canary, LaneFiles::make_canary)
    }

    fn move_trial(
        &mut self,
        label: &'static str,
        to: Lane,
        rename: impl Fn(&mut LaneFiles) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (Some(files), Some(current)) = (&mut self.files, &mut self.current) else {
            return self.console.print_below(label, "nothing of this command runs in the gateway");
        };
        if current.policy.generation().is_none() || current.policy.lane == Lane::Active {
            return self.console.print_below(label, "the gateway has to run it as a trial first");
        }
        match rename(files) {
            Err(error) => self.console.print_below(label, &format!("{error:#}")),
            Ok(()) => {
                current.policy.moved(to);
                self.earlier = None;
                (self.look, self.next_look) = (None, Instant::now());
                self.console.clear_status()?;
                self.console.print_below(label, &format!("its file is {} now", files.path(to).display()))
            }
        }
    }

    fn ask_to_promote(&mut self) -> anyhow::Result<()> {
        let trial = self.current.as_ref().map(|current| &current.policy);
        let Some((lane, generation)) = trial.and_then(|own| Some((own.lane, own.generation()?))) else {
            return self.console.print_below("promote", "the gateway has to run it as a trial first");
        };
        if lane == Lane::Active {
            return self.console.print_below("promote", "it is active already");
        }
        let beside = trial.map(OwnPolicy::beside).unwrap_or_default();
        if let Some(ranks) = self.files.as_ref().and_then(|files| files.active_of(beside)) {
            let text = format!(
                "{} ranks behind this filter, and a promotion would replace it: name the filter in `filters` of the \
                 slot, or write it as `keep` of a formula file that ranks",
                ranks.display()
            );
            return self.console.print_below("promote", &text);
        }
        self.confirms = Some(generation);
        let text = format!(
            "serve all requests with generation {generation} of the {lane} lane? y, or another key for no"
        );
        self.console.print_below("promote", &text)
    }

    /// Promotes the trial, and makes its file the file of the active lane.
    async fn promote(&mut self, generation: u64) -> anyhow::Result<()> {
        let Some((gateway, slot)) = self.gateway.clone() else { return Ok(()) };
        let trial = self.current.as_ref().map(|current| &current.policy);
        let Some(lane) = trial.filter(|own| own.generation() == Some(generation)).map(|own| own.lane) else {
            let text = format!("generation {generation} is not the trial any more; try again");
            return self.console.print_below("promote", &text);
        };
        let query = query(&[("from", Some(lane.as_str())), ("model", slot.model.as_deref())]);
        let path = format!("/policies/{}/promote{query}", segment(&slot.slot));
        let report = match gateway.post(&path).await.and_then(|answer| answer.read::<Report>()) {
            Err(error) => return self.console.print_below("promote", &error.to_string()),
            Ok(report) => report,
        };
        self.console.clear_status()?;
        self.console.print_below("promote", &report.sentences())?;
        let (Some(files), Some(current)) = (&mut self.files, &mut self.current) else { return Ok(()) };
        current.policy.moved(Lane::Active);
        (self.look, self.next_look) = (None, Instant::now());
        let text = match files.promote(lane) {
            Ok(()) => format!("its file is {} now, and stays", files.path(Lane::Active).display()),
            Err(error) => format!("{error:#}; the promotion lasts until the gateway restarts"),
        };
        self.console.print_below("", &text)
    }

    /// Takes the last step back: a promotion, or a canary.
    async fn undo(&mut self) -> anyhow::Result<()> {
        let lane = self.current.as_ref().map(|current| current.policy.lane);
        if lane == Some(Lane::Canary) {
            return self.move_trial("undo", Lane::Shadow, LaneFiles::make_shadow);
        }
        if let Some(files) = self.files.as_mut().filter(|files| files.has_canary()) {
            let text = match files.make_shadow() {
                Ok(()) => format!("the canary ends: {} is removed", files.path(Lane::Canary).display()),
                Err(error) => format!("{error:#}"),
            };
            return self.console.print_below("undo", &text);
        }
        let promoted = self.files.as_ref().and_then(|files| files.promoted().map(str::to_owned));
        let (Some((gateway, slot)), Some(promoted)) = (self.gateway.clone(), promoted) else {
            return self
                .console
                .print_below("undo", "nothing to undo: neither a canary nor a promotion of this command");
        };
        if lane == Some(Lane::Active) {
            self.current = None;
        }
        match roll_back(&gateway, &slot, &promoted).await {
            Err(error) => return self.console.print_below("undo", &error.to_string()),
            Ok(Some(report)) => self.console.print_below("undo", &report.sentences())?,
            Ok(None) => self.console.print_below("undo", "the active lane runs another policy by now")?,
        }
        self.next_look = Instant::now() + LIVE_POLL;
        self.console.clear_status()?;
        match self.files.as_mut().map(LaneFiles::undo_promotion) {
            Some(Err(error)) => self.console.print_below("", &format!("{error:#}")),
            _ => {
                self.console.print_below("", "the active lane has the file that it had before the promotion")
            }
        }
    }

    /// Explains the newest decision in which the shadow differs.
    async fn difference(&self) -> String {
        let own = self.current.as_ref().map(|current| &current.policy);
        let generation = own.filter(|own| own.lane == Lane::Shadow).and_then(|own| own.generation());
        let (Some((gateway, slot)), Some(generation)) = (&self.gateway, generation) else {
            return "the gateway has to run it as the shadow first".to_owned();
        };
        match newest_difference(gateway, slot, generation).await {
            Ok(Some(sentences)) => sentences.join("\n"),
            Ok(None) => format!("the shadow agrees in the last {SEARCHED} decisions that it took part in"),
            Err(error) => error.to_string(),
        }
    }
}

/// Rolls the active lane back while it runs the promoted policy.
async fn roll_back(
    gateway: &Gateway,
    slot: &SlotName,
    promoted: &str,
) -> Result<Option<Report>, GatewayError> {
    let look = slot.clone().look(gateway.clone(), None).await?;
    if !look.slot.is_some_and(|slot| slot.parts.iter().any(|part| part.digest == promoted)) {
        return Ok(None);
    }
    let query = query(&[("model", slot.model.as_deref())]);
    let path = format!("/policies/{}/rollback{query}", segment(&slot.slot));
    gateway.post(&path).await?.read().map(Some)
}

async fn newest_difference(
    gateway: &Gateway,
    slot: &SlotName,
    generation: u64,
) -> Result<Option<Vec<String>>, GatewayError> {
    let slot_model = Some(slot.model.as_deref().unwrap_or_default());
    let pairs = [("limit", Some(SEARCHED)), ("slot", Some(&*slot.slot)), ("slot_model", slot_model)];
    let found: Decisions = gateway.get(&format!("/decisions{}", query(&pairs))).await?.read()?;
    let differs = found.decisions.into_iter().find(|decision| {
        decision.shadow.as_ref().is_some_and(|own| own.generation == generation && own.agrees == Some(false))
    });
    let Some(decision) = differs else { return Ok(None) };
    let explained: Explained = gateway.get(&format!("/decisions/{}", segment(&decision.id))).await?.read()?;
    Ok(Some(explained.sentences))
}
