//! The bad policies, and the required end of each.

use anyhow::{Context as _, ensure};
use pointsman_guest_build::{GuestBuild, Target};

use crate::sh;

/// Content to install in the policy directory.
pub(super) enum Content {
    Bytes(Vec<u8>),
    /// A named pipe without a writer.
    Pipe,
    /// A link to a kernel file that blocks its reader.
    KernelFile,
    /// Content that changes this number of times, in two slots at once, before it stays.
    Changing {
        times: u32,
        pause: std::time::Duration,
    },
}

/// Required end of a case.
pub(super) enum Expected {
    /// The policy is refused with this kind, and the last good policy continues to serve.
    Refused(&'static str),
    /// The policy is admitted. Then its calls fail in one of these ways, and the fallback serves. The policy
    /// is rolled back and quarantined.
    RolledBack(Vec<&'static str>),
    /// The file is listed as one that belongs to no slot.
    Stray,
    /// The policy serves, and limits make it harmless.
    Serves,
    /// The policy is refused for any reason, serves, or is rolled back. For generated files the end is not
    /// known.
    Any,
}

/// One bad policy.
pub(super) struct Case {
    pub(super) name: String,
    /// Name of the file in the policy directory.
    pub(super) file: &'static str,
    pub(super) content: Content,
    pub(super) expected: Expected,
}

use Expected::{Refused, RolledBack, Serves, Stray};

/// An export, its guest, the file of its slot, and the misbehaviours that only it has, each with the failure
/// that it causes.
type World<'a> = (&'a str, &'a [u8], &'static str, &'a [(&'a str, &'static str)]);

const SCRIPT: &str = "pointsman-rogue:good 0";
/// Number of good calls of an instance before a misbehaviour that has to pass admission. It is larger than
/// the number of calls in a probe, and so small that one failure exceeds the share that a probation allows.
const LATER: u32 = 14;
pub(super) const PREFILL: &str = "prefill.wasm";
/// The slot of this file grants `state`.
const DECODE: &str = "decode.wasm";
const OVERRIDE: &str = "decode-override.wasm";

/// The guests from which the cases are made.
pub(super) struct Guests {
    selector: Vec<u8>,
    scorer: Vec<u8>,
    filter: Vec<u8>,
    planner: Vec<u8>,
    stateful: Vec<u8>,
    learner: Vec<u8>,
    wasi_learner: Vec<u8>,
    wasi: Vec<u8>,
    sockets: Vec<u8>,
    core: Vec<u8>,
    /// The built-in policies `least-loaded` and `conditional-disagg`.
    pub(super) good: [Vec<u8>; 2],
}

impl Guests {
    pub(super) fn build() -> anyhow::Result<Self> {
        let rogue = |features| GuestBuild::new(&sh::root(), "guest-rogue").features(features);
        Ok(Self {
            selector: rogue("selector").build()?,
            core: rogue("selector").core_module().build()?,
            scorer: rogue("scorer").build()?,
            filter: rogue("filter").build()?,
            planner: rogue("decode-override").build()?,
            stateful: rogue("selector,state").build()?,
            learner: rogue("selector,state,learning").build()?,
            wasi_learner: rogue("selector,state,learning").target(Target::Wasip2).build()?,
            wasi: rogue("selector").target(Target::Wasip2).build()?,
            sockets: rogue("selector,sockets").target(Target::Wasip2).build()?,
            good: [
                GuestBuild::new(&sh::root(), "policy-least-loaded").build()?,
                GuestBuild::new(&sh::root(), "policy-conditional-disagg").build()?,
            ],
        })
    }

    /// Returns a policy that fills the state of its slot.
    pub(super) fn flood(&self) -> anyhow::Result<Vec<u8>> {
        scripted(&self.stateful, "state-flood", LATER)
    }
}

/// Replaces the script in a guest, which changes its behaviour and its digest.
fn scripted(guest: &[u8], deed: &str, after: u32) -> anyhow::Result<Vec<u8>> {
    let at = guest.windows(SCRIPT.len()).position(|part| part == SCRIPT.as_bytes());
    let at = at.context("the guest contains no script")?;
    let script = format!("{deed} {after}");
    ensure!(script.len() <= 64, "the script has {} bytes, more than 64", script.len());
    let mut bytes = guest.to_vec();
    let place = bytes.get_mut(at..at + 64).context("the script is cut off")?;
    place.fill(b' ');
    place.iter_mut().zip(script.bytes()).for_each(|(to, from)| *to = from);
    Ok(bytes)
}

fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let mut out = bytes.to_vec();
    let places: Vec<usize> = (0..bytes.len())
        .filter(|at| bytes.get(*at..).is_some_and(|b| b.starts_with(from.as_bytes())))
        .collect();
    for at in places {
        out.iter_mut().skip(at).zip(to.bytes()).for_each(|(place, byte)| *place = byte);
    }
    out
}

/// Returns all cases, grouped by slot. Content that was rolled back is never admitted again, so each round
/// has different content.
pub(super) fn all(guests: &Guests, round: u32) -> anyhow::Result<Vec<Case>> {
    let mut cases = files(guests);
    cases.extend(introductions(guests)?);
    cases.extend(answers(guests)?);
    cases.extend(learners(guests)?);
    cases.extend(harmless(guests)?);
    for case in &mut cases {
        if let (Content::Bytes(bytes), RolledBack(_)) = (&mut case.content, &case.expected) {
            bytes.extend([0, 6, 1, b'r']);
            bytes.extend(round.to_le_bytes());
        }
    }
    Ok(cases)
}

/// Returns files that are not a policy, or not a policy for their slot.
fn files(guests: &Guests) -> Vec<Case> {
    let Guests { selector, stateful, sockets, planner, filter, core, .. } = guests;
    let half = |bytes: &[u8]| bytes.get(..bytes.len() / 2).unwrap_or_default().to_vec();
    let mut scrambled = selector.clone();
    let middle = scrambled.len() / 2;
    scrambled.iter_mut().skip(middle).take(64).for_each(|byte| *byte = 0xff);
    let needy = b"\0asm\x01\0\0\0\x01\x04\x01\x60\0\0\x02\x0d\x01\x03env\x05clock\0\0";
    let prefill: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty file", Vec::new(), "not_wasm"),
        ("garbage", b"this is not a policy".repeat(400), "not_wasm"),
        ("truncated component", half(selector), "malformed"),
        ("64 bytes overwritten", scrambled, "malformed"),
        ("33 MiB", vec![0; 33 << 20], "too_large"),
        ("core module without metadata", b"\0asm\x01\0\0\0".to_vec(), "wrong_world"),
        ("core module with an import of its own", needy.to_vec(), "not_a_component"),
        ("truncated core module", half(core), "not_a_component"),
        ("empty component", b"\0asm\x0d\0\x01\0".to_vec(), "wrong_world"),
        ("contract 0.2", replaced(selector, "@0.1.1", "@0.2.0"), "wrong_version"),
        (
            "interface of another package",
            replaced(selector, "policy/log@", "policy/lag@"),
            "forbidden_import",
        ),
        ("imports wasi:sockets", sockets.clone(), "forbidden_import"),
        ("imports state, not granted", stateful.clone(), "not_granted"),
        ("decode override in a leg's slot", planner.clone(), "wrong_slot"),
    ];
    let mut cases: Vec<Case> =
        prefill.into_iter().map(|(name, bytes, kind)| case(name, PREFILL, bytes, Refused(kind))).collect();
    cases.push(Case {
        content: Content::Pipe,
        ..case("named pipe", PREFILL, Vec::new(), Refused("unreadable"))
    });
    cases.push(Case {
        content: Content::KernelFile,
        ..case("link to /proc/kmsg", PREFILL, Vec::new(), Refused("not_wasm"))
    });
    cases.push(case("name of no slot", "prefil.wasm", selector.clone(), Stray));
    cases.push(case("selector as decode override", OVERRIDE, selector.clone(), Refused("wrong_slot")));
    cases.push(case("filter as decode override", OVERRIDE, filter.clone(), Refused("wrong_slot")));
    cases
}

/// Returns policies that fail in `describe` or `configure`.
fn introductions(guests: &Guests) -> anyhow::Result<Vec<Case>> {
    let table = [
        ("describe-trap", "configure"),
        ("describe-loop", "configure"),
        ("configure-trap", "configure"),
        ("configure-loop", "configure"),
        ("configure-hoard", "configure"),
        ("configure-error", "configure"),
        ("configure-long-error", "configure"),
        ("name-empty", "bad_name"),
        ("name-long", "bad_name"),
        ("name-odd", "bad_name"),
        ("unknown-fact", "unknown_fact"),
        ("many-facts", "too_many_facts"),
    ];
    table
        .into_iter()
        .map(|(deed, kind)| Ok(case(deed, PREFILL, scripted(&guests.selector, deed, 0)?, Refused(kind))))
        .collect()
}

/// Returns policies that fail in calls. Each fails in one case at once, in the probe, and in another case
/// later, in a request.
fn answers(guests: &Guests) -> anyhow::Result<Vec<Case>> {
    let common = [
        ("trap", "trap"),
        ("loop", "timeout"),
        ("hoard", "memory"),
        ("overflow", "trap"),
        ("error", "error"),
    ];
    let selector = [
        ("long-error", "error"),
        ("beyond", "invalid"),
        ("nan", "invalid"),
        ("short", "invalid"),
        ("huge", "invalid"),
        ("long-reason", "invalid"),
        ("long-shed", "invalid"),
        ("long-log", "invalid"),
    ];
    let scorer = [("nan", "invalid"), ("infinite", "invalid"), ("short", "invalid"), ("huge", "invalid")];
    let filter = [("unsorted", "invalid"), ("twice", "invalid"), ("beyond", "invalid"), ("huge", "invalid")];
    // `decide` only answers yes or no. The other cases are failures of `decode-config`.
    let planner =
        [("config-loop", "timeout"), ("config-trap", "trap"), ("nan", "invalid"), ("negative", "invalid")];
    let worlds: [World<'_>; 4] = [
        ("select", &guests.selector, PREFILL, &selector),
        ("score", &guests.scorer, PREFILL, &scorer),
        ("keep", &guests.filter, PREFILL, &filter),
        ("decide", &guests.planner, OVERRIDE, &planner),
    ];
    let mut cases = Vec::new();
    for (export, guest, file, own) in worlds {
        for (deed, failure) in common.iter().chain(own) {
            let name = format!("{export}: {deed}");
            cases.push(case(&format!("{name}, at once"), file, scripted(guest, deed, 0)?, Refused("probe")));
            let later = scripted(guest, deed, LATER)?;
            let expected = RolledBack(ends(deed, failure));
            cases.push(case(&format!("{name}, after {LATER} calls"), file, later, expected));
        }
    }
    let shed = |guest, file| {
        Ok::<_, anyhow::Error>(case(
            "sheds with status 200",
            file,
            scripted(guest, "shed-200", LATER)?,
            RolledBack(vec!["invalid"]),
        ))
    };
    cases.push(shed(&guests.selector, PREFILL)?);
    cases.push(shed(&guests.planner, OVERRIDE)?);
    let memory = scripted(&guests.selector, "memory", 0)?;
    cases.push(case("select: answers by its own memory", PREFILL, memory, Refused("not_deterministic")));
    let panics = scripted(&guests.wasi, "trap", LATER)?;
    cases.push(case("panics with a message on WASI's stderr", PREFILL, panics, RolledBack(vec!["trap"])));
    Ok(cases)
}

/// Returns policies that fail while they learn. The probe refuses a policy that fails at once; a later
/// failure must not affect a request.
fn learners(guests: &Guests) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    for deed in ["observe-trap", "observe-loop", "observe-hoard"] {
        let at_once = scripted(&guests.learner, deed, 0)?;
        cases.push(case(&format!("{deed}, at once"), DECODE, at_once, Refused("observe")));
        cases.push(case(&format!("{deed}, later"), DECODE, scripted(&guests.learner, deed, 1)?, Serves));
    }
    let waits = |after| scripted(&guests.wasi_learner, "observe-sleep", after);
    cases.push(case("waits for a clock in observe, at once", DECODE, waits(0)?, Refused("observe")));
    cases.push(case("waits for a clock in observe, later", DECODE, waits(1)?, Serves));
    Ok(cases)
}

/// Returns the possible failures of a misbehaviour. On a slow core, the deadline stops long work before it
/// fails by itself.
fn ends(deed: &str, failure: &'static str) -> Vec<&'static str> {
    match deed {
        "long-error" | "huge" => vec![failure, "invalid", "timeout"],
        "overflow" | "long-reason" | "long-shed" | "long-log" => vec![failure, "timeout"],
        _ => vec![failure],
    }
}

/// Returns policies that limits make harmless.
fn harmless(guests: &Guests) -> anyhow::Result<Vec<Case>> {
    let table = [
        ("select: leaks 12 KiB a call", PREFILL, &guests.selector, "leak"),
        ("logs 200 lines a call", PREFILL, &guests.selector, "log-flood"),
        ("by WASI's clock", PREFILL, &guests.wasi, "clock"),
        ("by WASI's random numbers", PREFILL, &guests.wasi, "dice"),
        ("reads files and the environment", PREFILL, &guests.wasi, "pry"),
        ("writes 64 KiB of state a call", DECODE, &guests.stateful, "state-flood"),
    ];
    table
        .into_iter()
        .map(|(name, file, guest, deed)| Ok(case(name, file, scripted(guest, deed, LATER)?, Serves)))
        .collect()
}

pub(super) fn case(name: &str, file: &'static str, bytes: Vec<u8>, expected: Expected) -> Case {
    Case { name: name.to_owned(), file, content: Content::Bytes(bytes), expected }
}
