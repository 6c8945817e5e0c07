//! A selector that behaves for `after` calls and then does what its `mode` says. For tests of the host only.

use std::sync::atomic::{AtomicU32, Ordering};

use pointsman_policy_sdk::{Call, Decision, Error, Facts, Policy, Selector, Shed, Slot, Wants, facts};
use serde::Deserialize;

/// Kind of its misbehaviour.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Behaves well, and always chooses row 0.
    #[default]
    Good,
    /// Panics, which is a trap.
    Trap,
    /// Never returns.
    Spin,
    /// Allocates memory until it reaches its limit.
    Hog,
    /// Takes a little memory in every call and never gives it back.
    Leak,
    /// Chooses a row that does not exist.
    Row,
    /// Answers with a cost that is not a number.
    Nan,
    /// Returns an answer that depends on earlier calls.
    Memory,
    /// Returns an error of its own.
    Error,
    /// Sheds with a status no policy may use.
    Shed,
    /// Sheds in the way that a policy may.
    Refuse,
    /// Chooses row 0, with a reason that would do harm if a page showed it as HTML.
    Markup,
    /// Refuses a request that waited in the queue, and says for how long.
    TellQueue,
    /// Never returns from `configure`.
    SlowConfigure,
    /// Asks for a fact that does not exist.
    UnknownFact,
}

/// Settings, which the test gives.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Kind of its misbehaviour.
    pub mode: Mode,
    /// Number of good calls of an instance before it misbehaves.
    pub after: u32,
}

/// The policy.
#[derive(Debug)]
pub struct Hostile {
    settings: Settings,
    queue_us: Slot<u32>,
    calls: AtomicU32,
}

impl Policy for Hostile {
    const NAME: &'static str = "hostile";
    type Settings = Settings;

    fn configure(settings: Settings, wants: &mut Wants) -> Result<Self, String> {
        wants.worker(facts::ACTIVE_REQUESTS);
        match settings.mode {
            Mode::SlowConfigure => spin(),
            Mode::UnknownFact => drop(wants.label_is("", "")),
            _ => {}
        }
        Ok(Self { settings, queue_us: wants.request(facts::QUEUE_US), calls: AtomicU32::new(0) })
    }
}

impl Selector for Hostile {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let calls = self.calls.fetch_add(1, Ordering::Relaxed);
        if calls < self.settings.after {
            return Ok(Decision::row(0));
        }
        match self.settings.mode {
            Mode::Good | Mode::SlowConfigure | Mode::UnknownFact => Ok(Decision::row(0)),
            #[expect(clippy::panic, reason = "that is its purpose")]
            Mode::Trap => panic!("as the test wants it"),
            Mode::Spin => {
                spin();
                Ok(Decision::row(0))
            }
            Mode::Hog => {
                let hoard = vec![1_u8; 64 << 20];
                Ok(Decision::row(usize::from(std::hint::black_box(&hoard).is_empty())))
            }
            Mode::Leak => {
                std::mem::forget(std::hint::black_box(vec![1_u8; 12 << 10]));
                Ok(Decision::row(0))
            }
            Mode::Row => Ok(Decision::row(call.rows as usize)),
            Mode::Nan => {
                Ok(Decision::Choose { row: 0, costs: vec![f32::NAN; call.rows as usize], reason: None })
            }
            Mode::Markup => {
                let reason = Some("<img src=x onerror=alert(1)>".to_owned());
                Ok(Decision::Choose { row: 0, costs: Vec::new(), reason })
            }
            Mode::TellQueue => Ok(match self.queue_us.get(facts) {
                0 => Decision::row(0),
                waited => Decision::Shed(Shed { status: 429, reason: format!("it waited {waited} us") }),
            }),
            Mode::Memory => Ok(Decision::row(calls as usize % call.rows.max(1) as usize)),
            Mode::Error => Err(Error::Internal("as the test wants it".into())),
            Mode::Refuse => Ok(Decision::Shed(Shed { status: 429, reason: "the quota is used up".into() })),
            Mode::Shed => Ok(Decision::Shed(Shed { status: 200, reason: String::new() })),
        }
    }
}

fn spin() {
    let mut turns = 0_u64;
    loop {
        turns = std::hint::black_box(turns.wrapping_add(1));
    }
}

pointsman_policy_sdk::export!(selector Hostile);
