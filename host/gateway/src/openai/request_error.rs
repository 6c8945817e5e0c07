//! Error of a request: the field or header, and the problem.

use json_splice::JsonBody;
use serde::de::DeserializeOwned;

use crate::openai::short_text::shortened;

/// An invalid request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub(crate) struct RequestError {
    /// The field or header at fault.
    pub field: String,
    /// The problem with it.
    pub problem: String,
}

impl RequestError {
    /// An error about a field.
    #[must_use]
    pub(crate) fn new(field: &str, problem: &str) -> Self {
        Self { field: field.to_owned(), problem: problem.to_owned() }
    }
}

/// Reads one field of a body; `None` when the body does not have it.
///
/// # Errors
/// [`RequestError`] names the field and shows the start of its value.
pub(crate) fn read<T: DeserializeOwned>(body: &JsonBody, key: &str) -> Result<Option<T>, RequestError> {
    body.read(key).map_err(|error| {
        let shown: String = body.get(key).unwrap_or_default().chars().take(60).collect();
        let problem = error.to_string();
        // The place is one within the value.
        let problem = problem.rsplit_once(" at line ").map_or(&*problem, |(problem, _)| problem);
        // serde quotes values and unknown names whole.
        RequestError::new(key, &format!("`{shown}`: {}", shortened(problem)))
    })
}
