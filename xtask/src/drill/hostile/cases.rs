//! The bad policies, and the required end of each: those of `xtask/drill/hostile.toml`, and files that need
//! code.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use pointsman_guest_build::{GuestBuild, Target};
use serde::Deserialize;

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
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Expected {
    /// The policy is refused with this kind, and the last good policy continues to serve.
    Refused(String),
    /// The policy is admitted. Then its calls fail in one of these ways, and the fallback serves. The policy
    /// is rolled back and quarantined.
    RolledBack(Vec<String>),
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
    pub(super) file: String,
    pub(super) content: Content,
    pub(super) expected: Expected,
}

/// Content of `hostile.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    world: Vec<World>,
    deed: Vec<Deed>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct World {
    export: String,
    guest: String,
    #[serde(default = "prefill")]
    file: String,
    deeds: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Deed {
    name: String,
    #[serde(default = "selector")]
    guest: String,
    #[serde(default = "prefill")]
    file: String,
    #[serde(default)]
    after: u32,
    expected: Expected,
}

const SCRIPT: &str = "pointsman-rogue:good 0";
/// Number of good calls of an instance before a misbehaviour that has to pass admission. It is larger than
/// the number of calls in a probe, and so small that one failure exceeds the share that a probation allows.
const LATER: u32 = 14;
pub(super) const PREFILL: &str = "prefill.wasm";
const OVERRIDE: &str = "decode-override.wasm";

fn prefill() -> String {
    PREFILL.to_owned()
}

fn selector() -> String {
    "selector".to_owned()
}

/// Builds of tests/guests/rogue: name in the table, features, and target. `core` is a core module.
const ROGUES: [(&str, &str, Target); 10] = [
    ("selector", "selector", Target::Unknown),
    ("core", "selector", Target::Unknown),
    ("scorer", "scorer", Target::Unknown),
    ("filter", "filter", Target::Unknown),
    ("planner", "decode-override", Target::Unknown),
    ("stateful", "selector,state", Target::Unknown),
    ("learner", "selector,state,learning", Target::Unknown),
    ("wasi-learner", "selector,state,learning", Target::Wasip2),
    ("wasi", "selector", Target::Wasip2),
    ("sockets", "selector,sockets", Target::Wasip2),
];

/// The guests from which the cases are made.
pub(super) struct Guests {
    table: Table,
    rogues: BTreeMap<&'static str, Vec<u8>>,
    /// The built-in policies `least-loaded` and `conditional-disagg`.
    pub(super) good: [Vec<u8>; 2],
}

impl Guests {
    pub(super) fn build() -> anyhow::Result<Self> {
        let table: Table = toml::from_str(include_str!("../../../drill/hostile.toml"))?;
        let rogues = ROGUES.into_iter().map(|(name, features, target)| {
            let rogue = GuestBuild::new(&sh::root(), "guest-rogue").features(features).target(target);
            let rogue = if name == "core" { rogue.core_module() } else { rogue };
            Ok((name, rogue.build()?))
        });
        let rogues = rogues.collect::<anyhow::Result<_>>()?;
        let policy = |name| GuestBuild::new(&sh::root(), name).build();
        let good = [policy("policy-least-loaded")?, policy("policy-conditional-disagg")?];
        Ok(Self { table, rogues, good })
    }

    fn rogue(&self, name: &str) -> anyhow::Result<&[u8]> {
        self.rogues.get(name).map(Vec::as_slice).with_context(|| format!("no guest is called `{name}`"))
    }

    /// Returns a policy that fills the state of its slot.
    pub(super) fn flood(&self) -> anyhow::Result<Vec<u8>> {
        scripted(self.rogue("stateful")?, "state-flood", LATER)
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

/// Returns all cases. Content that was rolled back is never admitted again, so each round has different
/// content.
pub(super) fn all(guests: &Guests, round: u32) -> anyhow::Result<Vec<Case>> {
    let mut cases = files(guests)?;
    for World { export, guest, file, deeds } in &guests.table.world {
        let guest = guests.rogue(guest)?;
        for (deed, failures) in deeds {
            let at_once = Expected::Refused("probe".to_owned());
            cases.push(case(&format!("{export}: {deed}, at once"), file, scripted(guest, deed, 0)?, at_once));
            let (name, later) =
                (format!("{export}: {deed}, after {LATER} calls"), scripted(guest, deed, LATER)?);
            cases.push(case(&name, file, later, Expected::RolledBack(failures.clone())));
        }
    }
    for Deed { name, guest, file, after, expected } in &guests.table.deed {
        let bytes = scripted(guests.rogue(guest)?, name, *after)?;
        cases.push(case(&format!("{guest}: {name}, after {after} calls"), file, bytes, expected.clone()));
    }
    for case in &mut cases {
        if let (Content::Bytes(bytes), Expected::RolledBack(_)) = (&mut case.content, &case.expected) {
            bytes.extend([0, 6, 1, b'r']);
            bytes.extend(round.to_le_bytes());
        }
    }
    Ok(cases)
}

/// Returns files that are not a policy, or not a policy for their slot.
fn files(guests: &Guests) -> anyhow::Result<Vec<Case>> {
    let [selector, stateful, sockets] =
        [guests.rogue("selector")?, guests.rogue("stateful")?, guests.rogue("sockets")?];
    let half = |bytes: &[u8]| bytes.get(..bytes.len() / 2).unwrap_or_default().to_vec();
    let mut scrambled = selector.to_vec();
    let middle = scrambled.len() / 2;
    scrambled.iter_mut().skip(middle).take(64).for_each(|byte| *byte = 0xff);
    let needy = b"\0asm\x01\0\0\0\x01\x04\x01\x60\0\0\x02\x0d\x01\x03env\x05clock\0\0";
    let refused: Vec<(&str, &str, Vec<u8>, &str)> = vec![
        ("empty file", PREFILL, Vec::new(), "not_wasm"),
        ("garbage", PREFILL, b"this is not a policy".repeat(400), "not_wasm"),
        ("truncated component", PREFILL, half(selector), "malformed"),
        ("64 bytes overwritten", PREFILL, scrambled, "malformed"),
        ("33 MiB", PREFILL, vec![0; 33 << 20], "too_large"),
        ("core module without metadata", PREFILL, b"\0asm\x01\0\0\0".to_vec(), "wrong_world"),
        ("core module with an import of its own", PREFILL, needy.to_vec(), "not_a_component"),
        ("truncated core module", PREFILL, half(guests.rogue("core")?), "not_a_component"),
        ("empty component", PREFILL, b"\0asm\x0d\0\x01\0".to_vec(), "wrong_world"),
        ("contract 0.2", PREFILL, replaced(selector, "@0.1.1", "@0.2.0"), "wrong_version"),
        (
            "interface of another package",
            PREFILL,
            replaced(selector, "policy/log@", "policy/lag@"),
            "forbidden_import",
        ),
        ("imports wasi:sockets", PREFILL, sockets.to_vec(), "forbidden_import"),
        ("imports state, not granted", PREFILL, stateful.to_vec(), "not_granted"),
        ("decode override in a leg's slot", PREFILL, guests.rogue("planner")?.to_vec(), "wrong_slot"),
        ("selector as decode override", OVERRIDE, selector.to_vec(), "wrong_slot"),
        ("filter as decode override", OVERRIDE, guests.rogue("filter")?.to_vec(), "wrong_slot"),
    ];
    let refuse = |kind: &str| Expected::Refused(kind.to_owned());
    let refused = refused.into_iter().map(|(name, file, bytes, kind)| case(name, file, bytes, refuse(kind)));
    let mut cases: Vec<Case> = refused.collect();
    for (name, content, kind) in
        [("named pipe", Content::Pipe, "unreadable"), ("link to /proc/kmsg", Content::KernelFile, "not_wasm")]
    {
        cases.push(Case { content, ..case(name, PREFILL, Vec::new(), refuse(kind)) });
    }
    cases.push(case("name of no slot", "prefil.wasm", selector.to_vec(), Expected::Stray));
    Ok(cases)
}

pub(super) fn case(name: &str, file: &str, bytes: Vec<u8>, expected: Expected) -> Case {
    Case { name: name.to_owned(), file: file.to_owned(), content: Content::Bytes(bytes), expected }
}
