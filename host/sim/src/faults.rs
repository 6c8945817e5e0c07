//! Injected faults, which can be changed at run time. This module decides which faults affect a request; the
//! HTTP side carries them out.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use serde::{Deserialize, Serialize};

use crate::leg::Leg;

/// An active fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// Kind of the fault.
    #[serde(flatten)]
    pub kind: FaultKind,
    /// Fraction of the requests that it affects, 0 to 1.
    #[serde(default = "always")]
    pub share: f64,
    /// Requests that the fault may affect; by default all generations, but no probes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leg: Option<FaultLeg>,
    /// Text in the body of the requests that it affects; default: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// Number of affected requests after which the fault ends; default: unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
}

/// Kind of a fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum FaultKind {
    /// Resets the connection before the first byte of the response.
    Refuse,
    /// Stops the engine for good and resets the connection, as if the request had crashed it.
    Die,
    /// Responds with this status and the engine's error body.
    Status {
        /// 400 to 599.
        status: u16,
        /// Value of `Retry-After`, seconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_after: Option<u32>,
    },
    /// Never responds.
    HangBeforeHeaders,
    /// Sends status 200 and headers, and nothing after them.
    HangAfterHeaders,
    /// Sends nothing more after this many tokens.
    Stall {
        /// Number of tokens before the fault.
        after_tokens: u32,
    },
    /// Closes the connection after this many tokens, within an event or the body.
    Cut {
        /// Number of tokens before the fault.
        after_tokens: u32,
    },
    /// Sends bytes that are not events after this many tokens, and ends the stream without `[DONE]`.
    Garbage {
        /// Number of tokens before the fault.
        after_tokens: u32,
    },
    /// Responds with status 200 and an HTML page.
    WrongContentType,
    /// Delays the response of `/health` and `/ready` in wall-clock time.
    SlowHealth {
        /// Delay in milliseconds.
        ms: u64,
    },
    /// Generates EOS as the first token: `finish_reason` is `stop`, and there is nothing to hand off.
    FirstTokenEos,
    /// Omits a field of the handoff parameters.
    PartialParams {
        /// Name of the field; default: `remote_block_ids`.
        #[serde(default = "remote_block_ids")]
        field: String,
    },
    /// Fails the KV transfer after the handoff was pulled.
    TransferFail,
}

/// Requests that a fault may affect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FaultLeg {
    /// Prefill legs.
    Prefill,
    /// Decode legs.
    Decode,
    /// Complete requests.
    Aggregated,
    /// `GET /health`, and `/ready` of SGLang.
    Health,
    /// `POST /tokenize`.
    Tokenize,
    /// `GET /server_info` and `/get_server_info`.
    Facts,
    /// All other probes: metrics, models, version, loads.
    Probe,
}

/// Faults of an engine.
#[derive(Debug)]
pub(crate) struct FaultBoard {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    faults: Vec<Fault>,
    rng: SmallRng,
    fired: BTreeMap<String, u64>,
}

/// Faults that affect one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Picked(Vec<FaultKind>);

/// Position in a stream at which a fault occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    Stall,
    Cut,
    Garbage,
}

impl Fault {
    /// Creates a fault that affects every generation.
    #[must_use]
    pub fn always(kind: FaultKind) -> Self {
        Self { kind, share: 1.0, leg: None, prompt: None, times: None }
    }

    /// Returns the problem with its settings, if any.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if !(0.0..=1.0).contains(&self.share) {
            return Some(format!("fault share `{}` is not within 0 and 1", self.share));
        }
        match self.kind {
            FaultKind::Status { status, .. } if !(400..=599).contains(&status) => {
                Some(format!("fault status `{status}` is not within 400 and 599"))
            }
            _ => None,
        }
    }
}

impl FaultKind {
    /// Returns the name in JSON. For a status fault it contains the status: `status-503`.
    fn label(&self) -> String {
        match self {
            Self::Refuse => "refuse".to_owned(),
            Self::Die => "die".to_owned(),
            Self::Status { status, .. } => format!("status-{status}"),
            Self::HangBeforeHeaders => "hang-before-headers".to_owned(),
            Self::HangAfterHeaders => "hang-after-headers".to_owned(),
            Self::Stall { .. } => "stall".to_owned(),
            Self::Cut { .. } => "cut".to_owned(),
            Self::Garbage { .. } => "garbage".to_owned(),
            Self::WrongContentType => "wrong-content-type".to_owned(),
            Self::SlowHealth { .. } => "slow-health".to_owned(),
            Self::FirstTokenEos => "first-token-eos".to_owned(),
            Self::PartialParams { .. } => "partial-params".to_owned(),
            Self::TransferFail => "transfer-fail".to_owned(),
        }
    }
}

impl FaultBoard {
    pub(crate) fn new(faults: Vec<Fault>, seed: u64) -> Self {
        // Uses other random numbers than the jitter, so that a fault does not change durations.
        let rng = SmallRng::seed_from_u64(seed ^ 0x5eed_fa17);
        Self { inner: Mutex::new(Inner { faults, rng, fired: BTreeMap::new() }) }
    }

    pub(crate) fn replace(&self, faults: Vec<Fault>) {
        self.inner.lock().faults = faults;
    }

    pub(crate) fn list(&self) -> Vec<Fault> {
        self.inner.lock().faults.clone()
    }

    /// Returns how many requests each kind of fault has affected since the start.
    pub(crate) fn fired(&self) -> BTreeMap<String, u64> {
        self.inner.lock().fired.clone()
    }

    /// Draws the faults of one request with this body and counts them.
    pub(crate) fn pick(&self, leg: FaultLeg, body: &[u8]) -> Picked {
        let mut inner = self.inner.lock();
        let Inner { faults, rng, fired } = &mut *inner;
        let mut picked = Vec::new();
        for fault in faults.iter_mut() {
            let fits = match fault.leg {
                Some(only) => only == leg,
                None if matches!(fault.kind, FaultKind::SlowHealth { .. }) => leg == FaultLeg::Health,
                None => {
                    !matches!(leg, FaultLeg::Health | FaultLeg::Probe | FaultLeg::Facts | FaultLeg::Tokenize)
                }
            };
            let wanted = |text: &String| body.windows(text.len().max(1)).any(|part| part == text.as_bytes());
            let fits = fits && fault.prompt.as_ref().is_none_or(wanted);
            if !fits || fault.times == Some(0) || (fault.share < 1.0 && rng.random::<f64>() >= fault.share) {
                continue;
            }
            if let Some(times) = &mut fault.times {
                *times -= 1;
            }
            *fired.entry(fault.kind.label()).or_default() += 1;
            picked.push(fault.kind.clone());
        }
        Picked(picked)
    }
}

impl Picked {
    pub(crate) fn has(&self, kind: &FaultKind) -> bool {
        self.0.contains(kind)
    }

    pub(crate) fn status(&self) -> Option<(u16, Option<u32>)> {
        self.0.iter().find_map(|kind| match kind {
            FaultKind::Status { status, retry_after } => Some((*status, *retry_after)),
            _ => None,
        })
    }

    pub(crate) fn slow_ms(&self) -> Option<u64> {
        self.0.iter().find_map(|kind| match kind {
            FaultKind::SlowHealth { ms } => Some(*ms),
            _ => None,
        })
    }

    pub(crate) fn missing_field(&self) -> Option<&str> {
        self.0.iter().find_map(|kind| match kind {
            FaultKind::PartialParams { field } => Some(field.as_str()),
            _ => None,
        })
    }

    /// Returns the first fault in the response body, with the number of tokens before it.
    pub(crate) fn body_break(&self) -> Option<(Break, u32)> {
        let breaks = self.0.iter().filter_map(|kind| match kind {
            FaultKind::Stall { after_tokens } => Some((Break::Stall, *after_tokens)),
            FaultKind::Cut { after_tokens } => Some((Break::Cut, *after_tokens)),
            FaultKind::Garbage { after_tokens } => Some((Break::Garbage, *after_tokens)),
            _ => None,
        });
        breaks.min_by_key(|(_, after)| *after)
    }
}

impl From<Leg> for FaultLeg {
    fn from(leg: Leg) -> Self {
        match leg {
            Leg::Prefill => Self::Prefill,
            Leg::Decode => Self::Decode,
            Leg::Aggregated => Self::Aggregated,
        }
    }
}

fn always() -> f64 {
    1.0
}

fn remote_block_ids() -> String {
    "remote_block_ids".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Fault {
        serde_json::from_str(json).expect("a fault")
    }

    #[test]
    fn a_fault_reads_as_one_flat_object() {
        let fault = parse(r#"{"kind":"status","status":503,"share":0.5,"leg":"prefill","times":3}"#);
        assert_eq!(fault.kind, FaultKind::Status { status: 503, retry_after: None });
        assert_eq!((fault.share, fault.leg, fault.times), (0.5, Some(FaultLeg::Prefill), Some(3)));
        let written = serde_json::to_string(&fault).expect("writes");
        assert_eq!(parse(&written), fault);
        assert_eq!(parse(r#"{"kind":"refuse"}"#), Fault::always(FaultKind::Refuse));
        assert!(serde_json::from_str::<Fault>(r#"{"kind":"melt"}"#).is_err());
        assert!(parse(r#"{"kind":"status","status":200}"#).problem().is_some());
        assert!(parse(r#"{"kind":"refuse","share":1.5}"#).problem().is_some());
    }

    #[test]
    fn share_leg_and_times_bound_the_hits() {
        let hits = |json: &str, leg: FaultLeg, seed| {
            let board = FaultBoard::new(vec![parse(json)], seed);
            (0..1000).filter(|_| board.pick(leg, b"").has(&FaultKind::Refuse)).count()
        };
        assert_eq!(hits(r#"{"kind":"refuse"}"#, FaultLeg::Decode, 1), 1000);
        assert_eq!(hits(r#"{"kind":"refuse"}"#, FaultLeg::Health, 1), 0);
        assert_eq!(hits(r#"{"kind":"refuse","leg":"health"}"#, FaultLeg::Health, 1), 1000);
        assert_eq!(hits(r#"{"kind":"refuse","leg":"prefill"}"#, FaultLeg::Decode, 1), 0);
        assert_eq!(hits(r#"{"kind":"refuse","times":2}"#, FaultLeg::Decode, 1), 2);
        assert_eq!(hits(r#"{"kind":"refuse","prompt":"x"}"#, FaultLeg::Decode, 1), 0);
        let some = hits(r#"{"kind":"refuse","share":0.3}"#, FaultLeg::Decode, 1);
        assert!((250..350).contains(&some), "{some}");
        assert_eq!(some, hits(r#"{"kind":"refuse","share":0.3}"#, FaultLeg::Decode, 1), "seeded");
    }
}
