//! The router configuration of one decision: the operator's values with the overrides of a request and of a
//! policy.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Parameters of the native cost (G). Every field is also a request fact.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// Credit for a block cached on the device.
    pub overlap_score_credit: f64,
    /// Credit for a block cached in host memory.
    pub host_cache_credit: f64,
    /// Credit for a block cached on disk.
    pub disk_cache_credit: f64,
    /// Weight of the prefill term.
    pub prefill_load_scale: f64,
    /// Weight of the count of active requests.
    pub active_request_weight: f64,
    /// The picker's softmax temperature; 0 takes the minimum.
    pub temperature: f64,
    /// Whether equal blocks booked on a worker count once.
    pub assume_kv_reuse: bool,
    /// Whether prefill tokens count as load.
    pub track_prefill_tokens: bool,
    /// Credit multiplier for caches shared between workers. The gateway does not know the contents of such a
    /// cache, so there is no setting and the native cost has no such term: a client's override is only a
    /// fact.
    #[serde(skip)]
    pub shared_cache_multiplier: f64,
}

/// Fields of the router config that a decode override, or a client's `nvext`, may replace for one leg. `None`
/// keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfigOverride {
    /// Credit for a block cached on the device; 0 ignores the cache.
    pub overlap_score_credit: Option<f64>,
    /// Weight of the prefill term.
    pub prefill_load_scale: Option<f64>,
    /// Softmax temperature of the picker; 0 takes the minimum.
    #[serde(alias = "router_temperature")]
    pub temperature: Option<f64>,
    /// Whether blocks of this request count as shared with equal blocks already booked.
    pub assume_kv_reuse: Option<bool>,
    /// Whether prefill tokens count as load.
    pub track_prefill_tokens: Option<bool>,
    /// Credit multiplier for caches shared between workers.
    pub shared_cache_multiplier: Option<f64>,
    /// Dynamo's former weight of the prefill term; see [`Self::without_weight`].
    #[serde(skip_serializing)]
    pub overlap_score_weight: Option<f64>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            overlap_score_credit: 1.0,
            host_cache_credit: 0.75,
            disk_cache_credit: 0.25,
            prefill_load_scale: 1.0,
            active_request_weight: 0.0,
            temperature: 0.0,
            assume_kv_reuse: true,
            track_prefill_tokens: true,
            shared_cache_multiplier: 0.0,
        }
    }
}

/// Largest number that a configuration or a client may give to policies. They read single precision, and
/// multiply: with 1e39, their costs would be infinite, which counts as their failure.
pub const MAX_NUMBER: f64 = 1e15;

fn is_in_range(value: f64) -> bool {
    (0.0..=MAX_NUMBER).contains(&value)
}

impl RouterConfig {
    /// Returns the fields that are out of range, each with what is wrong.
    #[must_use]
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let fields = [
            ("overlap_score_credit", self.overlap_score_credit),
            ("host_cache_credit", self.host_cache_credit),
            ("disk_cache_credit", self.disk_cache_credit),
            ("prefill_load_scale", self.prefill_load_scale),
            ("active_request_weight", self.active_request_weight),
            ("temperature", self.temperature),
        ];
        let bad = fields.into_iter().filter(|(_, value)| !is_in_range(*value));
        bad.map(|(key, value)| {
            (key, format!("`{value}` is out of range: expected a number from 0 to {MAX_NUMBER:e}"))
        })
        .collect()
    }

    /// These values with the fields that `over` gives.
    #[must_use]
    pub fn with(mut self, over: &RouterConfigOverride) -> Self {
        self.overlap_score_credit = over.overlap_score_credit.unwrap_or(self.overlap_score_credit);
        self.prefill_load_scale = over.prefill_load_scale.unwrap_or(self.prefill_load_scale);
        self.temperature = over.temperature.unwrap_or(self.temperature);
        self.assume_kv_reuse = over.assume_kv_reuse.unwrap_or(self.assume_kv_reuse);
        self.track_prefill_tokens = over.track_prefill_tokens.unwrap_or(self.track_prefill_tokens);
        self.shared_cache_multiplier = over.shared_cache_multiplier.unwrap_or(self.shared_cache_multiplier);
        self
    }
}

impl RouterConfigOverride {
    /// The override of the decode leg without a policy (D2). The prompt's blocks are transferred to the
    /// decode worker, so neither its cache nor its prefill load matters.
    pub(crate) const DECODE_DEFAULT: Self = Self {
        overlap_score_credit: Some(0.0),
        prefill_load_scale: None,
        temperature: None,
        assume_kv_reuse: Some(false),
        track_prefill_tokens: Some(false),
        shared_cache_multiplier: None,
        overlap_score_weight: None,
    };

    /// Returns the override with the former weight in the fields that took its place: it multiplied the
    /// prefill term, and 0 ignored the cache, too. It replaces what these fields have, as in Dynamo.
    #[must_use]
    pub fn without_weight(mut self) -> Self {
        if let Some(weight) = self.overlap_score_weight.take() {
            self.prefill_load_scale = Some(weight);
            if weight == 0.0 {
                self.overlap_score_credit = Some(0.0);
            }
        }
        self
    }

    /// Checks that every number is in range.
    ///
    /// # Errors
    /// Names the first field that is not, with its value.
    pub fn check(&self) -> Result<(), String> {
        let fields = [
            ("overlap_score_credit", self.overlap_score_credit),
            ("prefill_load_scale", self.prefill_load_scale),
            ("temperature", self.temperature),
            ("shared_cache_multiplier", self.shared_cache_multiplier),
            ("overlap_score_weight", self.overlap_score_weight),
        ];
        for (name, value) in fields {
            if let Some(value) = value.filter(|value| !is_in_range(*value)) {
                return Err(format!("{name} {value:?} is not a number from 0 to {MAX_NUMBER:e}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d2_the_default_override_replaces_three_fields_and_every_other_survives() {
        let client = RouterConfigOverride {
            overlap_score_credit: Some(0.9),
            prefill_load_scale: Some(2.5),
            temperature: Some(0.4),
            assume_kv_reuse: Some(true),
            track_prefill_tokens: Some(true),
            shared_cache_multiplier: Some(0.7),
            overlap_score_weight: None,
        };
        let config = RouterConfig::default().with(&client).with(&RouterConfigOverride::DECODE_DEFAULT);
        let expected = RouterConfig {
            overlap_score_credit: 0.0,
            assume_kv_reuse: false,
            track_prefill_tokens: false,
            prefill_load_scale: 2.5,
            temperature: 0.4,
            shared_cache_multiplier: 0.7,
            ..RouterConfig::default()
        };
        // D2.1, D2.2
        assert_eq!(config, expected);
    }

    #[test]
    fn an_override_with_a_bad_number_is_named() {
        let over = RouterConfigOverride { temperature: Some(f64::NAN), ..Default::default() };
        assert_eq!(over.check(), Err("temperature NaN is not a number from 0 to 1e15".to_owned()));
        let over = RouterConfigOverride { prefill_load_scale: Some(-1.0), ..Default::default() };
        assert_eq!(over.check(), Err("prefill_load_scale -1.0 is not a number from 0 to 1e15".to_owned()));
        let over = RouterConfigOverride { prefill_load_scale: Some(MAX_NUMBER), ..Default::default() };
        assert_eq!(over.check(), Ok(()));
    }
}
