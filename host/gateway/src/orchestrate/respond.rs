//! Answers the client with a body that is complete: an engine's whole answer, or an error.

use http::{HeaderMap, HeaderName, HeaderValue, Response};
use pointsman_orchestration::Action;

use super::{
    Drive,
    executor::{Ending, Reached},
    relay::{self, Answer},
};
use crate::{openai::request_id::set_request_id, telemetry::account::Account};

/// Header by which a client asks for the decisions about its request, and gets them.
pub(crate) const DECISION: HeaderName = HeaderName::from_static("x-pointsman-decision");

impl Drive {
    /// Performs an action. The action that answers the client returns the answer.
    pub(super) fn answer(&mut self, action: Action) -> Option<Ending> {
        match action {
            Action::Relay | Action::AnswerPrefill => {
                let whole = self.whole.take()?;
                self.account.ended(200, "ok");
                Some(Ending::Whole(whole))
            }
            Action::Fail(leg) => Some(Ending::Failed(self.cause(leg))),
            Action::FailDeadline => Some(Ending::Failed(self.out_of_time())),
            other => {
                self.perform(other);
                None
            }
        }
    }

    /// Answers with a whole body, after performing the remaining actions.
    pub(super) fn respond(mut self: Box<Self>, ending: Ending) -> Response<Answer> {
        while let Some(action) = self.next_action() {
            self.perform(action);
        }
        match ending {
            Ending::Whole(mut response) => {
                self.add_own_headers(response.headers_mut());
                self.account.relay_begins();
                self.state.metrics.relayed_bytes.inc_by(response.body().len() as u64);
                response.map(|body| Answer::served(body, self))
            }
            Ending::Failed(cause) => {
                let format = self.request.endpoint.format();
                self.account.ended(cause.status_as(format).as_u16(), cause.code());
                let mut response = cause.response_as(format, &self.account.request_id);
                self.add_own_headers(response.headers_mut());
                if !self.legs.is_finished() {
                    let tracker = self.state.tracker.clone();
                    tracker.spawn(self.go_on());
                }
                response.map(Answer::whole)
            }
        }
    }

    /// Does what engines still need, after the client has its answer.
    async fn go_on(mut self: Box<Self>) {
        loop {
            while let Some(action) = self.next_action() {
                self.perform(action);
            }
            if self.legs.is_finished() {
                return;
            }
            if let Some(Reached::Stream(head)) = self.step().await {
                Box::pin(relay::drain(self, head)).await;
                return;
            }
        }
    }

    /// Adds the gateway's own headers.
    pub(crate) fn add_own_headers(&self, headers: &mut HeaderMap) {
        set_request_id(headers, self.request.endpoint.format(), &self.account.request_id);
        self.account.add_limit_headers(headers);
        if let Some(warning) = &self.request.hints.warning {
            headers.insert("x-pointsman-warning", warning.clone());
        }
        if self.explain {
            tell_decisions(&self.account, headers);
        }
    }
}

/// Adds the header with the decisions about the request, if there are any.
pub(crate) fn tell_decisions(account: &Account, headers: &mut HeaderMap) {
    let decisions = account.decisions();
    if !decisions.is_empty()
        && let Ok(decisions) = HeaderValue::from_str(&decisions)
    {
        headers.insert(DECISION, decisions);
    }
}
