//! How much output a request asks for: choices, and the cap on their tokens.

use json_splice::JsonBody;
use serde::Deserialize;

use crate::{
    config::Limits,
    openai::{
        endpoint::Endpoint,
        lax::WholeNumber,
        limits::{at_most, choices},
        request_error::{RequestError, read},
    },
};

/// The field of `/generate`, and of vLLM's endpoint for token ids, that has the parameters.
const PARAMETERS: &str = "sampling_params";

/// The value of an output limit that means "no limit" to llama.cpp and Ollama (A5.19).
const NO_LIMIT: &str = "-1";

/// The output that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sampling {
    /// Choices asked for, of each prompt.
    pub n: u32,
    /// Sequences that the engine runs for each prompt.
    pub sequences: u32,
    /// Cap on output tokens, by whichever key.
    pub max_tokens: Option<u32>,
    /// Number of prompts for which `sampling_params` is a list.
    listed: Option<usize>,
}

/// Parameters of a prompt of `/generate`.
#[derive(Deserialize)]
struct OfPrompt {
    n: Option<WholeNumber>,
    max_new_tokens: Option<WholeNumber>,
}

impl Sampling {
    /// Reads it from a body.
    ///
    /// # Errors
    /// [`RequestError`] names the field.
    pub(super) fn of(endpoint: Endpoint, body: &JsonBody, limits: &Limits) -> Result<Self, RequestError> {
        match endpoint {
            Endpoint::Generate => return Self::of_parameters(body, "max_new_tokens", limits),
            Endpoint::GenerateTokens => return Self::of_parameters(body, "max_tokens", limits),
            _ => {}
        }
        let n = choices(body, "n", limits.choices)?.unwrap_or(1);
        let best_of = choices(body, "best_of", limits.choices)?.unwrap_or(1);
        let [older, newer] = limit_keys(endpoint).map(|key| match body.get(key) {
            Some(NO_LIMIT) => Ok(None),
            _ => number(body, key),
        });
        let (older, newer) = (older?, newer?);
        Ok(Self { n, sequences: n.max(best_of), max_tokens: newer.or(older), listed: None })
    }

    /// Reads it from the parameters of `/generate`: an object, or a list with one for each prompt.
    fn of_parameters(body: &JsonBody, cap: &str, limits: &Limits) -> Result<Self, RequestError> {
        if let Some(parameters) = body.object(PARAMETERS) {
            let parameters = parameters.map_err(|error| RequestError::new(PARAMETERS, &error.to_string()))?;
            let n = choices(&parameters, "n", limits.choices)?.unwrap_or(1);
            let max_tokens = number(&parameters, cap)?;
            return Ok(Self { n, sequences: n, max_tokens, listed: None });
        }
        at_most(PARAMETERS, "elements", body.counts(PARAMETERS).items, limits.prompts as usize)?;
        let listed: Option<Vec<OfPrompt>> = read(body, PARAMETERS)?;
        let each = || listed.iter().flatten();
        // The engine refuses a list with different numbers of choices.
        let n = each().filter_map(|one| Some(one.n?.0)).max().unwrap_or(1);
        if !(1..=limits.choices).contains(&n) {
            let most = limits.choices;
            let problem =
                format!("n: `{n}` is not a whole number from 1 to {most}, the limit of limits.choices");
            return Err(RequestError::new(PARAMETERS, &problem));
        }
        let caps: Option<Vec<u32>> = each().map(|one| Some(one.max_new_tokens?.0)).collect();
        let max_tokens = caps.and_then(|caps| caps.into_iter().max());
        Ok(Self { n, sequences: n, max_tokens, listed: listed.map(|listed| listed.len()) })
    }

    /// Checks that a list of parameters fits the prompts: the engine would fail on another one.
    ///
    /// # Errors
    /// [`RequestError`] has both lengths.
    pub(super) fn check_prompts(self, prompts: usize) -> Result<(), RequestError> {
        match self.listed.filter(|listed| *listed != prompts) {
            Some(listed) => {
                let problem = format!("{listed} elements for {prompts} prompts; send one for each prompt");
                Err(RequestError::new(PARAMETERS, &problem))
            }
            None => Ok(()),
        }
    }
}

/// The fields that limit output tokens on the top level of a body. The second one precedes the first.
fn limit_keys(endpoint: Endpoint) -> [&'static str; 2] {
    let key = if endpoint == Endpoint::Responses { "max_output_tokens" } else { "max_tokens" };
    [key, "max_completion_tokens"]
}

/// Checks that no limit of output tokens is -1, for engines that do not take it.
///
/// # Errors
/// [`RequestError`] names the field.
pub(crate) fn check_limits(endpoint: Endpoint, body: &JsonBody) -> Result<(), RequestError> {
    let is_parameter = matches!(endpoint, Endpoint::Generate | Endpoint::GenerateTokens);
    // Other values were read before.
    let is_no_limit = |key: &&str| !is_parameter && body.get(key) == Some(NO_LIMIT);
    limit_keys(endpoint).into_iter().filter(is_no_limit).try_for_each(|key| number(body, key).map(drop))
}

fn number(body: &JsonBody, key: &str) -> Result<Option<u32>, RequestError> {
    Ok(read(body, key)?.map(|WholeNumber(number)| number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(parameters: &str) -> Result<Sampling, String> {
        let body = JsonBody::parse(format!(r#"{{"sampling_params":{parameters}}}"#).into()).unwrap();
        Sampling::of(Endpoint::Generate, &body, &Limits::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn a1_choices_and_length_of_generate_are_those_of_its_parameters() {
        let read = |parameters: &str| of(parameters).map(|sampling| (sampling.n, sampling.max_tokens));
        // A1.11
        assert_eq!(read(r#"{"max_new_tokens":7,"n":2,"temperature":0}"#), Ok((2, Some(7))));
        assert_eq!(read(r#"{"max_new_tokens":"7"}"#), Ok((1, Some(7))));
        assert_eq!(read(r#"[{"max_new_tokens":7},{"max_new_tokens":9,"n":1}]"#), Ok((1, Some(9))));
        for unlimited in ["null", "{}", r#"{"max_new_tokens":null}"#, r#"[{"max_new_tokens":7},{}]"#] {
            assert_eq!(read(unlimited), Ok((1, None)), "{unlimited}");
        }
    }

    #[test]
    fn a1_parameters_that_no_engine_takes_are_refused_by_their_name() {
        let error = |parameters: &str| of(parameters).unwrap_err();
        // A1.11
        assert!(error(r#"{"max_new_tokens":-1}"#).contains("negative"));
        assert!(error(r#"{"n":0}"#).starts_with("n: `0` is not a whole number from 1 to 128"));
        assert!(error(r#"[{"n":1},{"n":129}]"#).starts_with("sampling_params: n: `129` is not"));
        assert!(error("7").starts_with("sampling_params: `7`: invalid type"), "{}", error("7"));
        let long = format!("[{}]", vec!["{}"; 3_000].join(","));
        assert!(error(&long).contains("3000 elements are more than the limit of 2048"), "{}", error(&long));
        let two = of("[{},{}]").unwrap();
        assert_eq!(two.check_prompts(2), Ok(()));
        let error = two.check_prompts(3).unwrap_err().to_string();
        assert_eq!(error, "sampling_params: 2 elements for 3 prompts; send one for each prompt");
    }
}
