//! The body of SGLang's `/generate`.

use serde::Deserialize;

use super::{Body, OneOrMany};

/// Number of output tokens when a body sets no length (`srt/sampling/sampling_params.py`).
const DEFAULT_LENGTH: u32 = 128;

/// Parameters of one prompt. The model uses those of the first one for all.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Sampling {
    max_new_tokens: Option<u32>,
    min_new_tokens: u32,
    n: Option<u32>,
    ignore_eos: bool,
    temperature: Option<f64>,
}

impl Body {
    /// Turns the fields of `/generate` into those of a completion. A text counts before token ids.
    pub(super) fn convert_native(&mut self) {
        let given = [self.text.take(), self.input_ids.take()].into_iter().flatten();
        self.prompt = given.filter_map(|value| serde_json::from_value(value).ok()).next();
        let parameters = self.sampling_params.take().and_then(|value| serde_json::from_value(value).ok());
        let first = match parameters {
            Some(OneOrMany::One(one)) => Some(one),
            Some(OneOrMany::Many(each)) => each.first().copied(),
            None => None,
        };
        let Sampling { max_new_tokens, min_new_tokens, n, ignore_eos, temperature } =
            first.unwrap_or_default();
        self.max_tokens = Some(max_new_tokens.unwrap_or(DEFAULT_LENGTH));
        (self.max_completion_tokens, self.min_tokens, self.n) = (None, min_new_tokens, n);
        (self.ignore_eos, self.temperature) = (ignore_eos, temperature);
    }
}
