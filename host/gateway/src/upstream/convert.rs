//! Errors of the HTTP client, as errors of a call.

use http1_client::WireError;

use super::CallError;

impl From<http1_client::CallError<Self>> for CallError {
    fn from(error: http1_client::CallError<Self>) -> Self {
        match error {
            http1_client::CallError::Connect(error) => error,
            http1_client::CallError::Unsent => {
                Self::Connect("the engine closed the connection before it took the request".to_owned())
            }
            // The engine is gone since it got the request, which may be the reason.
            http1_client::CallError::NotAgain { closed, connect } => match connect {
                Self::Connect(_) => closed.into(),
                other => other,
            },
            http1_client::CallError::Refused(problem) => Self::Connect(problem),
            http1_client::CallError::Closed(_) => {
                Self::Closed("the engine closed a kept connection when the request came".to_owned())
            }
            http1_client::CallError::Wire(error) => error.into(),
        }
    }
}

impl From<WireError> for CallError {
    /// The text contains no address, so a client may see it (A5).
    fn from(error: WireError) -> Self {
        match error {
            WireError::LongHead(limit) => {
                Self::Protocol(format!("the head of the engine's answer has more than {limit} bytes"))
            }
            WireError::Head(problem) => {
                Self::Protocol(format!("the head of the engine's answer is not HTTP/1.1: {problem}"))
            }
            WireError::Chunk => Self::Protocol("the engine's answer has an invalid chunk".to_owned()),
            WireError::Cut => Self::Broken("the engine closed the connection within its answer".to_owned()),
            WireError::Refused(_) | WireError::Transport(_) | WireError::Io(_) => {
                Self::Broken(error.to_string())
            }
        }
    }
}
