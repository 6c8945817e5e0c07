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

    /// Returns the cost of each row.
    #[expect(clippy::cast_precision_loss, reason = "loads are far below 2^24")]
    pub fn costs(&self, requests: &[u32], prefill_tokens: &[u32], queue: &[u32]) -> Vec<f32> {
        let rows = requests.iter().zip(prefill_tokens).zip(queue);
        rows.map(|((requests, tokens), queue)| {
            self.active_requests * *requests as f32
                + self.prefill_kilotokens * 0.001 * *tokens as f32
                + self.engine_queue * *queue as f32
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
        assert_eq!(weights.costs(&[4, 0], &[500, 0], &[2, 0]), [11.0, 0.0]);
    }
}
