//! The script, and what every world's exports do by it.

use std::{
    hint::black_box,
    sync::atomic::{AtomicU32, Ordering},
};

/// `deed after`, padded with blanks: what it does, and after how many good calls of an instance. Replaced in
/// the built file.
static SCRIPT: [u8; 64] = *b"pointsman-rogue:good 0                                          ";

static CALLS: AtomicU32 = AtomicU32::new(0);

/// Returns the deed of the script, and the number of calls before it.
fn script() -> (&'static str, u32) {
    // The compiler must not know what it reads here.
    let script: &'static [u8; 64] = black_box(&SCRIPT);
    let text = std::str::from_utf8(script).unwrap_or_default();
    let words = text.trim_start_matches("pointsman-rogue:").trim_end();
    let (deed, after) = words.split_once(' ').unwrap_or((words, "0"));
    (deed, after.parse().unwrap_or(0))
}

/// The deed, at once: for exports that are called once.
pub(crate) fn deed() -> &'static str {
    script().0
}

/// The deed, once it is due: counts calls.
pub(crate) fn due() -> &'static str {
    let (deed, after) = script();
    if CALLS.fetch_add(1, Ordering::Relaxed) < after { "good" } else { deed }
}

/// Returns the deed for a batch of outcomes, once enough batches arrived.
#[cfg(feature = "learning")]
pub(crate) fn due_observing() -> &'static str {
    static BATCHES: AtomicU32 = AtomicU32::new(0);
    let (deed, after) = script();
    let is_due = BATCHES.fetch_add(1, Ordering::Relaxed) >= after;
    deed.strip_prefix("observe-").filter(|_| is_due).unwrap_or("good")
}

/// Calls so far.
#[cfg(feature = "selector")]
pub(crate) fn calls() -> u32 {
    CALLS.load(Ordering::Relaxed)
}

/// Deeds that are the same in every export. An `Err` is the guest's own error.
pub(crate) fn misbehave(deed: &str) -> Result<(), String> {
    match deed {
        #[expect(clippy::panic, reason = "that is its purpose")]
        "trap" => panic!("as the script wants it"),
        "loop" => spin(),
        "hoard" => drop(black_box(vec![1_u8; 64 << 20])),
        "leak" => std::mem::forget(black_box(vec![1_u8; 12 << 10])),
        "overflow" => drop(black_box(deeper(black_box(1)))),
        "error" => return Err("as the script wants it".into()),
        "long-error" => return Err("e".repeat(1 << 18)),
        // On WASI this polls a clock.
        "sleep" => std::thread::sleep(std::time::Duration::from_secs(1)),
        _ => {}
    }
    Ok(())
}

/// Name that the guest reports.
pub(crate) fn name() -> String {
    match deed() {
        "describe-trap" => drop(misbehave("trap")),
        "describe-loop" => spin(),
        "name-empty" => return String::new(),
        "name-long" => return "n".repeat(1 << 20),
        "name-odd" => return "two\nlines\"}".into(),
        _ => {}
    }
    "rogue".into()
}

/// The worker facts it asks for.
pub(crate) fn facts() -> Result<Vec<String>, String> {
    match deed() {
        "configure-trap" => drop(misbehave("trap")),
        "configure-loop" => spin(),
        "configure-hoard" => drop(misbehave("hoard")),
        "configure-error" => return Err("these settings make no sense".into()),
        "configure-long-error" => return Err("e".repeat(4 << 20)),
        "unknown-fact" => return Ok(vec!["shoe-size".into()]),
        "many-facts" => return Ok(vec!["active-requests".into(); 100_000]),
        _ => {}
    }
    Ok(vec!["active-requests".into()])
}

pub(crate) fn spin() {
    let mut turns = 0_u64;
    loop {
        turns = black_box(turns.wrapping_add(1));
    }
}

/// Never comes back from where it goes.
fn deeper(depth: u64) -> u64 {
    if depth == 0 {
        return 0;
    }
    let room = black_box([depth; 64]);
    deeper(black_box(depth + 1)) + room.iter().sum::<u64>()
}

/// Exports `policy` of a world, whose bindings are in `bindings`.
macro_rules! introduce {
    () => {
        impl bindings::exports::pointsman::policy::policy::Guest for Rogue {
            fn describe() -> bindings::exports::pointsman::policy::policy::About {
                let (name, version) = (crate::script::name(), "0.1.0".to_owned());
                bindings::exports::pointsman::policy::policy::About { name, version }
            }

            fn configure(_: String) -> Result<bindings::exports::pointsman::policy::policy::Wants, String> {
                let worker_facts = crate::script::facts()?;
                let request_facts = Vec::new();
                Ok(bindings::exports::pointsman::policy::policy::Wants { request_facts, worker_facts })
            }
        }
    };
}
pub(crate) use introduce;
