//! Answers of etcd that are not a success.

use std::time::Duration;

use reqwest::Response;

use super::http::{self, Failure};

/// Returns whether etcd refused to issue a token because it has no users, and warns when that begins.
/// `lacked`: whether it had none before.
pub(super) fn lacks_users<T>(answer: &Result<T, Failure>, lacked: &mut bool, endpoint: &str) -> bool {
    let lacks =
        answer.as_ref().is_err_and(|failure| failure.problem.contains("authentication is not enabled"));
    if !std::mem::replace(lacked, lacks) && lacks {
        tracing::warn!(endpoint, "etcd has no users: it is read without `username` and `password_file`");
    }
    lacks
}

/// Describes an answer that is not a success, and what to do about refusals whose status says nothing.
pub(super) async fn refusal(response: Response, limit: Duration) -> Failure {
    let Failure { problem: text, retry_after } = http::refusal(response, limit).await;
    let advice = if text.contains("CommonName") {
        "; the JSON gateway of etcd refuses client certificates with a common name: use one without it"
    } else if text.contains("user name is empty") {
        "; this etcd has users: set `username` and `password_file`"
    } else if text.contains("permission denied") {
        "; give the role of this user the right to read the keys of `prefix`"
    } else if text.contains("authentication failed") {
        "; check `username` and `password_file`"
    } else {
        ""
    };
    Failure { problem: format!("{}{advice}", text.trim_end()), retry_after }
}
