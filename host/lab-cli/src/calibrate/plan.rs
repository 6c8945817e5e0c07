//! Plans the requests to each engine.

use std::fmt::Write as _;

use anyhow::{Context as _, bail};
use pointsman_lab::calibrate::{Capacity, Design};
use pointsman_workers::Role;
use serde::Deserialize;

use super::target::Target;

/// Number of requests before the first measurement of a phase. They fill caches and pools.
pub(super) const WARM_UP: u32 = 2;
/// Share of the requests that check the result.
const MIX_SHARE: f64 = 0.4;
/// Maximum number of requests that check the result.
const MAX_MIX: u32 = 100;
/// Share of the requests that measure the link of a pair.
const PAIR_SHARE: f64 = 0.1;
/// Share of the requests to each engine of a pair while the other engine is idle, if both are also measured
/// together.
const ALONE_SHARE: f64 = 0.06;

/// Requests to one server.
#[derive(Debug)]
pub(super) struct Phase {
    pub(super) kind: Kind,
    pub(super) target: Target,
    pub(super) design: Design,
}

/// Purpose of a phase.
#[derive(Debug)]
pub(super) enum Kind {
    /// Bursts for the step time of an engine.
    Engine(Role, Capacity),
    /// Lone requests to an engine of a pair while the other engine is idle, to measure the link.
    Alone(Role),
    /// Bursts for the step time of an engine of a pair, while the other engine gets bursts too.
    Together(Role, Capacity),
    /// Lone requests through a pair. The decode engine counts the transferred bytes.
    Pair(Box<Target>),
    /// The requests that check the result.
    Mix,
}

/// Numbers of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Budget {
    /// Number of requests in each engine's bursts.
    pub(super) engine: u32,
    /// Number of lone requests to each engine while the other is idle.
    pub(super) alone: u32,
    /// Number of lone requests through a pair.
    pub(super) pair: u32,
    /// Number of requests that check the result.
    pub(super) mix: u32,
}

/// The model to measure.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) model: String,
    /// Maximum length of a request, prompt and output tokens.
    pub(super) max_length: Option<u32>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<u32>,
}

impl Budget {
    /// Divides `requests` among the phases of one engine or of a pair, whose engines may be measured
    /// together.
    pub(super) fn of(requests: u32, engines: usize, together: bool) -> Self {
        let share = |share: f64| (f64::from(requests) * share) as u32;
        let mix = share(MIX_SHARE).min(MAX_MIX);
        let pair = if engines > 1 { share(PAIR_SHARE) } else { 0 };
        let alone = if together { share(ALONE_SHARE) } else { 0 };
        let engines = u32::try_from(engines).unwrap_or(u32::MAX).max(1);
        Self { engine: (requests - mix - pair - alone * engines) / engines, alone, pair, mix }
    }
}

impl Kind {
    /// Returns the number of requests before the first measurement. The engines of a pair that is measured
    /// together were warmed up by the phase before.
    pub(super) fn warm_up(&self) -> u32 {
        if matches!(self, Self::Mix | Self::Together(..)) { 0 } else { WARM_UP }
    }
}

impl Server {
    /// Asks the server for its models.
    pub(super) async fn find(target: &Target, wanted: Option<&str>) -> anyhow::Result<Self> {
        let url = target.url();
        let body = target.get("/v1/models").await?;
        let body =
            body.with_context(|| format!("{url}: has no /v1/models; expected a server of the OpenAI API"))?;
        let models: Models = serde_json::from_slice(&body)
            .with_context(|| format!("{url}: GET /v1/models: the answer is not a list of models"))?;
        let names: Vec<&str> = models.data.iter().map(|model| model.id.as_str()).collect();
        let names = names.join(", ");
        let found = match (wanted, models.data.as_slice()) {
            (Some(wanted), all) => all.iter().find(|model| model.id == wanted),
            (None, [one]) => Some(one),
            (None, _) => bail!("{url}: has the models {names}; choose one with --model"),
        };
        let wanted = wanted.unwrap_or_default();
        let found = found.with_context(|| format!("--model {wanted}: {url} has {names}"))?;
        Ok(Self { model: found.id.clone(), max_length: found.max_model_len })
    }
}

/// Returns the plan as text for the user.
pub(super) fn text(phases: &[Phase], model: &str, max_seconds: u64) -> String {
    let mut text = format!("plan for model {model}:\n");
    let (mut all, mut most, mut together) = ((0, 0, 0), 1, 0);
    for phase in phases {
        let (requests, prompt, output) = phase.design.totals();
        all = (all.0 + requests, all.1 + prompt, all.2 + output);
        let concurrent = phase.design.bursts.iter().map(|burst| burst.requests).max().unwrap_or(1);
        let concurrent = if phase.design.mix.is_empty() { concurrent } else { phase.design.users };
        together += if matches!(phase.kind, Kind::Together(..)) { concurrent } else { 0 };
        most = most.max(concurrent).max(together);
        let what = match &phase.kind {
            Kind::Alone(role) => {
                format!("lone requests to the {} engine while the other is idle", role.as_str())
            }
            Kind::Engine(role, capacity) | Kind::Together(role, capacity) => format!(
                "{} engine{} ({} blocks of {} tokens, {} sequences, {} tokens a step)",
                role.as_str(),
                if matches!(phase.kind, Kind::Together(..)) { " under the load of the other" } else { "" },
                capacity.blocks,
                capacity.block_tokens,
                capacity.max_num_seqs,
                capacity.max_batched_tokens,
            ),
            Kind::Pair(_) => "lone requests through the pair".to_owned(),
            Kind::Mix => "mix for the check".to_owned(),
        };
        let _ = writeln!(
            text,
            "  {}: {what}: {requests} requests, at most {concurrent} at the same time, {prompt} prompt and {output} \
             output tokens",
            phase.target.url(),
        );
    }
    let warm_up: u32 = phases.iter().map(|phase| phase.kind.warm_up()).sum();
    let _ = writeln!(
        text,
        "in all: {} requests ({warm_up} of them to warm up), {} prompt and {} output tokens, at most {most} requests \
         at the same time and {max_seconds} s",
        all.0 + warm_up,
        all.1,
        all.2,
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_budget_do_not_exceed_it() {
        for requests in [0, 1, 4, 50, 196, 5_000] {
            for (engines, together) in [(1, false), (2, false), (2, true)] {
                let budget = Budget::of(requests, engines, together);
                let sum = (budget.engine + budget.alone) * engines as u32 + budget.pair + budget.mix;
                assert!(sum <= requests, "{requests} {budget:?}");
            }
        }
        assert_eq!(Budget::of(200, 1, false), Budget { engine: 120, alone: 0, pair: 0, mix: 80 });
        assert_eq!(Budget::of(200, 2, false), Budget { engine: 50, alone: 0, pair: 20, mix: 80 });
        assert_eq!(Budget::of(200, 2, true), Budget { engine: 38, alone: 12, pair: 20, mix: 80 });
    }
}
