//! Finds the row of the lowest cost: the last step of most selectors. The passes have no branches, so that
//! the compiler uses SIMD.

use crate::Rng;

/// Number of costs that one step compares.
const LANES: usize = 16;

/// Returns the row of the lowest cost. Among equal costs `rng` draws one, uniformly. `None`: there is no row,
/// or every cost is NaN.
///
/// ```
/// # use pointsman_policy_sdk::{Rng, least};
/// assert_eq!(least(&[3.0, 1.5, f32::NAN], &mut Rng::new(7)), Some(1));
/// ```
#[must_use]
pub fn least(costs: &[f32], rng: &mut Rng) -> Option<usize> {
    let least = minimum(costs);
    let ties: usize = costs.chunks(LANES).map(|chunk| equal(chunk, least)).sum();
    let mut wanted = match ties {
        0 => return None,
        1 => 0,
        _ => rng.below(ties),
    };
    for (place, chunk) in costs.chunks(LANES).enumerate() {
        let here = equal(chunk, least);
        if wanted >= here {
            wanted -= here;
            continue;
        }
        let within = chunk.iter().enumerate().filter(|(_, cost)| **cost == least).nth(wanted);
        return within.map(|(row, _)| place * LANES + row);
    }
    None
}

fn minimum(costs: &[f32]) -> f32 {
    let mut lanes = [f32::INFINITY; LANES];
    let chunks = costs.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, cost) in lanes.iter_mut().zip(chunk) {
            *lane = if *cost < *lane { *cost } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::INFINITY, |least, cost| if *cost < least { *cost } else { least })
}

fn equal(chunk: &[f32], least: f32) -> usize {
    let count: u32 = chunk.iter().map(|cost| u32::from(*cost == least)).sum();
    count as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(costs: &[f32], seed: u64) -> Option<usize> {
        let least = costs.iter().copied().filter(|cost| !cost.is_nan()).reduce(f32::min)?;
        let rows: Vec<usize> = (0..costs.len()).filter(|row| costs[*row] == least).collect();
        let wanted = if rows.len() > 1 { Rng::new(seed).below(rows.len()) } else { 0 };
        rows.get(wanted).copied()
    }

    #[test]
    fn it_is_the_naive_answer_for_every_length_and_draw() {
        let mut rng = Rng::new(1);
        for length in 0..100 {
            for seed in 0..20 {
                let costs: Vec<f32> = (0..length).map(|_| rng.below(7) as f32).collect();
                assert_eq!(least(&costs, &mut Rng::new(seed)), naive(&costs, seed), "{costs:?}");
            }
        }
    }

    #[test]
    fn what_is_no_number_is_never_chosen_and_infinity_is_when_there_is_nothing_else() {
        assert_eq!(least(&[f32::NAN, 2.0, f32::NAN], &mut Rng::new(0)), Some(1));
        assert_eq!(least(&[f32::NAN], &mut Rng::new(0)), None);
        assert_eq!(least(&[f32::INFINITY], &mut Rng::new(0)), Some(0));
    }
}
