//! The load of a worker: a weighted sum.

use serde::Deserialize;

/// Weights of the sum.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Weights {
    /// Weight of an active request.
    pub active_requests: f32,
    /// Weight of 1,000 prompt tokens whose prefill has not ended.
    pub prefill_kilotokens: f32,
    /// Weight of a waiting request in the engine.
    pub engine_queue: f32,
}

impl Default for Weights {
    fn default() -> Self {
        Self { active_requests: 1.0, prefill_kilotokens: 0.0, engine_queue: 0.0 }
    }
}

impl Weights {
    /// Checks that weights are finite and not negative.
    ///
    /// # Errors
    /// Names the first one that is not.
    pub fn check(&self) -> Result<(), String> {
        let all = [
            ("active-requests", self.active_requests),
            ("prefill-kilotokens", self.prefill_kilotokens),
            ("engine-queue", self.engine_queue),
        ];
        match all.iter().find(|(_, weight)| !weight.is_finite() || *weight < 0.0) {
            Some((name, weight)) => Err(format!("{name}: {weight} is not a finite number of 0 or more")),
            None => Ok(()),
        }
    }

    /// Returns the cost of each row. A queue that the engine does not tell (`known` is 0) counts as the mean
    /// of the others.
    #[expect(clippy::cast_precision_loss, reason = "loads are far below 2^24")]
    pub fn costs(&self, requests: &[u32], prefill_tokens: &[u32], queue: &[u32], known: &[u32]) -> Vec<f32> {
        let queues = || queue.iter().zip(known);
        let (sum, count) = queues()
            .filter(|(_, known)| **known == 1)
            .fold((0.0, 0.0), |(sum, count), (queue, _)| (sum + *queue as f32, count + 1.0));
        let mean = if count > 0.0 { sum / count } else { 0.0 };
        let rows = requests.iter().zip(prefill_tokens).zip(queues());
        rows.map(|((requests, tokens), (queue, known))| {
            let queue = if *known == 1 { *queue as f32 } else { mean };
            self.active_requests * *requests as f32
                + self.prefill_kilotokens * 0.001 * *tokens as f32
                + self.engine_queue * queue
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_is_the_weighed_sum_of_what_is_there() {
        let weights = Weights { active_requests: 1.0, prefill_kilotokens: 2.0, engine_queue: 3.0 };
        assert_eq!(weights.costs(&[4, 0], &[500, 0], &[2, 0], &[1, 1]), [11.0, 0.0]);
    }

    #[test]
    fn b8_a_queue_that_is_not_known_counts_as_the_mean_of_the_others() {
        let weights = Weights { active_requests: 0.0, prefill_kilotokens: 0.0, engine_queue: 1.0 };
        let costs = |known| weights.costs(&[0; 3], &[0; 3], &[2, 0, 6], known);
        // B8.5
        assert_eq!(costs(&[1, 0, 1]), [2.0, 4.0, 6.0]);
        assert_eq!(costs(&[0, 0, 0]), [0.0, 0.0, 0.0]);
    }
}
