//! As a selector: the first row until it is due.

#[cfg(not(feature = "state"))]
#[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({ path: "../../../wit", world: "selector" });
}
#[cfg(feature = "state")]
#[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({ path: "../../../wit", world: "stateful-selector" });
}

use bindings::{
    exports::pointsman::policy::selecting::{Call, Choice, Decision, Error, Guest, ShedReason},
    pointsman::policy::log::{Level, log},
};

use crate::script::{calls, due, introduce, misbehave};

struct Rogue;

introduce!();

impl Guest for Rogue {
    fn select(call: Call, _: Vec<u32>) -> Result<Decision, Error> {
        let deed = due();
        misbehave(deed).map_err(Error::Internal)?;
        let choice = |row, costs| Choice { row, costs, reason: told() };
        Ok(Decision::Choose(match deed {
            "beyond" => choice(call.rows, Vec::new()),
            "nan" => choice(0, vec![f32::NAN; call.rows as usize]),
            "short" => choice(0, vec![0.0; call.rows as usize + 1]),
            "huge" => choice(0, vec![0.0; 1 << 18]),
            "long-reason" => Choice { reason: Some("r".repeat(1 << 20)), ..choice(0, Vec::new()) },
            "long-shed" => {
                return Ok(Decision::Shed(ShedReason { status: 429, reason: "s".repeat(8 << 20) }));
            }
            "long-log" => {
                log(Level::Error, &"l".repeat(8 << 20));
                choice(0, Vec::new())
            }
            "shed-200" => {
                return Ok(Decision::Shed(ShedReason { status: 200, reason: String::new() }));
            }
            "memory" => choice(calls() % call.rows, Vec::new()),
            "clock" => choice(clock(call.rows), Vec::new()),
            "dice" => choice(dice(call.rows), Vec::new()),
            "log-flood" => {
                for line in 0..200 {
                    log(Level::Error, &format!("line {line} of a flood"));
                }
                choice(0, Vec::new())
            }
            "pry" => choice(pry(), Vec::new()),
            "state-flood" => choice(flood(call.seed), Vec::new()),
            _ => choice(0, Vec::new()),
        }))
    }
}

/// Counts of the learner, by name.
#[cfg(feature = "learning")]
fn told() -> Option<String> {
    let names =
        ["outcomes", "by-policy", "retried", "odd", "status/200", "status/499", "worker/1", "worker/2"];
    Some(names.map(|name| format!("{name}={}", crate::learner::number(name))).join(" "))
}

#[cfg(not(feature = "learning"))]
fn told() -> Option<String> {
    None
}

/// A row by the time of day.
fn clock(rows: u32) -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.subsec_micros() % rows
}

/// A row by the randomness of std's hash maps.
fn dice(rows: u32) -> u32 {
    use std::hash::BuildHasher;
    let hash = std::hash::RandomState::new().hash_one(1_u8);
    u32::try_from(hash % u64::from(rows)).unwrap_or(0)
}

/// Reads what a policy has no business with, and connects to where it must not; row 0 when nothing came of
/// it.
fn pry() -> u32 {
    let read = std::fs::read("/etc/passwd").is_ok() || std::env::vars().next().is_some();
    #[cfg(feature = "sockets")]
    let read = read || std::net::TcpStream::connect("127.0.0.1:9090").is_ok();
    u32::from(read) * 1_000_000
}

#[cfg(feature = "state")]
fn flood(seed: u64) -> u32 {
    for key in 0..16 {
        let _ = bindings::pointsman::policy::state::set(&format!("{seed}-{key}"), &[1; 4_096], 0);
    }
    0
}

#[cfg(not(feature = "state"))]
fn flood(_: u64) -> u32 {
    0
}

#[allow(unsafe_code, reason = "generated")]
mod export {
    use super::{Rogue, bindings};

    bindings::export!(Rogue with_types_in bindings);
}
