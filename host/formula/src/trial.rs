//! Tries formulas on made-up fleets when they are loaded: what would reject every request, or give an
//! invalid answer, is refused before it serves.

use crate::{
    compile::{Asked, Formula, Role},
    evaluate::Inputs,
    vocabulary::{ABSENT, FLAGS, Type},
};

/// A made-up fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fleet {
    /// Nothing runs anywhere, and everything is known.
    Idle,
    /// One worker with some load.
    One,
    /// No fact is known.
    Absent,
    /// Facts at the ends of their ranges and beyond.
    Extreme,
}

const FLEETS: [(Fleet, usize); 4] =
    [(Fleet::Idle, 4), (Fleet::One, 1), (Fleet::Absent, 3), (Fleet::Extreme, EXTREMES.len())];

/// Bits of facts. As singles they are NaN, infinities, the largest and lowest number, tiny numbers.
const EXTREMES: [u32; 9] =
    [0, 1, u32::MAX, 0x7f80_0000, 0xff80_0000, 0x7f7f_ffff, 0xff7f_ffff, 0x8000_0001, 0x7fc0_0000];

/// Evaluates formulas that share `asked` on made-up fleets: idle, with one worker, with all facts absent, and
/// with extreme values.
///
/// # Errors
/// Names the formula that rejects every request of an idle fleet.
pub fn try_out(formulas: &[&Formula], asked: &Asked) -> Result<(), String> {
    for (fleet, rows) in FLEETS {
        let request = fact_values(&asked.request, 1, fleet);
        let columns = fact_values(&asked.worker, rows, fleet);
        let inputs = Inputs { request: &request, columns: &columns, rows };
        for formula in formulas {
            formula.try_on(fleet, inputs)?;
        }
    }
    Ok(())
}

impl Formula {
    fn try_on(&self, fleet: Fleet, inputs: Inputs<'_>) -> Result<(), String> {
        let judges = fleet == Fleet::Idle && self.is_load;
        match self.role {
            Role::Cost => {
                let costs = self.numbers(inputs);
                if costs.len() != inputs.rows || costs.iter().any(|cost| !cost.is_finite()) {
                    return Err(format!("cost: no finite number for each candidate: {costs:?}"));
                }
            }
            Role::Keep => {
                if self.rows(inputs).is_empty() && judges {
                    let why = "it keeps no worker of an idle fleet, so no request could be served";
                    return Err(format!("keep: {why}; turn the comparison around"));
                }
            }
            Role::Shed => {
                if self.holds(inputs) && judges {
                    return Err("shed.when: it holds for an idle fleet, so every request would be \
                                rejected; turn the comparison around"
                        .to_owned());
                }
            }
        }
        Ok(())
    }
}

/// Returns the values of facts, one after another, each for `rows` candidates.
fn fact_values(facts: &[(String, Type)], rows: usize, fleet: Fleet) -> Vec<u32> {
    let mut words = Vec::new();
    for (place, (name, ty)) in facts.iter().enumerate() {
        for half in 0..ty.width() {
            let value = |row: usize| match fleet {
                Fleet::Extreme => EXTREMES.get((row + place + half) % EXTREMES.len()).copied().unwrap_or(0),
                Fleet::Absent => absent(name, *ty, half),
                Fleet::Idle | Fleet::One => usual_value(name, *ty, half, fleet == Fleet::One),
            };
            words.extend((0..rows).map(value));
        }
    }
    words
}

fn absent(name: &str, ty: Type, half: usize) -> u32 {
    let listed = ABSENT.iter().find(|(absent, _)| *absent == name);
    match (listed, half) {
        (Some((_, value)), 0) if ty == Type::F32 => crate::columns::count(*value).to_bits(),
        (Some((_, value)), 0) => *value,
        _ => 0,
    }
}

fn usual_value(name: &str, ty: Type, half: usize, is_busy: bool) -> u32 {
    let value = match name {
        "block-size" => 16,
        "prompt-tokens" => 1_000,
        "request-blocks" => 63,
        "total-blocks" => 10_000,
        "max-concurrency" => 64,
        "load-age-ms" => 100,
        "n" | "overlap-score-credit" | "prefill-load-scale" | "local-prefill" => 1,
        _ if FLAGS.contains(&name) && name.ends_with("-known") => 1,
        _ if is_busy => 3,
        _ => 0,
    };
    match (ty, half) {
        (Type::F32, _) => crate::columns::count(value).to_bits(),
        (_, 0) => value,
        _ => 0,
    }
}
