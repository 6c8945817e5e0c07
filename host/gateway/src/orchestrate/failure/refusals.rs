//! Errors for clients when the engines that a leg asked are overloaded.

use http::StatusCode;
use pointsman_workers::{Leg, Pause, Refusal, Worker};
use tokio::time::Duration;

use crate::{openai::error::ApiError, orchestrate::Drive};

/// Refusals of the engines that a leg asked, over all attempts of a request.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    /// When the first of them may be asked again.
    soonest: Option<Duration>,
    /// The last 503.
    overloaded: Option<ApiError>,
    /// The 429 of the engine that may be asked first.
    too_many: Option<(ApiError, Duration)>,
}

impl Refusals {
    /// Adds a failed call, if its engine has too much to do. `client_error` is the client's error. Returns
    /// when the engine may be asked again.
    pub(crate) fn note(
        &mut self,
        refusal: Option<Refusal>,
        client_error: &ApiError,
        worker: &Worker,
    ) -> Option<Duration> {
        let refusal = refusal?;
        let paused = || worker.pause().map(|pause| pause.left);
        let after = refusal.retry_after.or_else(paused).unwrap_or_default();
        self.add(client_error.clone(), after);
        Some(after)
    }

    /// Adds a refusal if only paused workers are left.
    pub(crate) fn note_pause(&mut self, pause: Option<Pause>, client_error: &ApiError) {
        if let Some(pause) = pause {
            self.add(client_error.clone(), pause.left);
        }
    }

    /// Adds a refusal, and when its engine may be asked again.
    fn add(&mut self, client_error: ApiError, after: Duration) {
        self.soonest = Some(self.soonest.map_or(after, |soonest| soonest.min(after)));
        if client_error.status() != StatusCode::TOO_MANY_REQUESTS {
            self.overloaded = Some(client_error);
        } else if self.too_many.as_ref().is_none_or(|(_, soonest)| after < *soonest) {
            self.too_many = Some((client_error, after));
        }
    }

    /// Returns the client's error of a leg that failed for good, last because of `cause`: an engine that only
    /// has too much to do may serve the request later. A refusal of the request itself stands.
    pub(crate) fn answer(&mut self, cause: ApiError) -> ApiError {
        let replaced = matches!(
            cause,
            ApiError::BadUpstream(_)
                | ApiError::LastingFailure(_)
                | ApiError::EngineTimeout(_)
                | ApiError::NoWorker(_)
                | ApiError::HandoffLost(_)
                | ApiError::Overloaded { .. }
                | ApiError::Pinned(..)
                | ApiError::Engine { status: StatusCode::TOO_MANY_REQUESTS, .. }
        );
        let Some(soonest) = self.soonest.filter(|_| replaced) else { return cause };
        let too_many = self.too_many.take().map(|(client_error, _)| client_error);
        let client_error =
            self.overloaded.take().map(|client_error| client_error.retried_after(soonest)).or(too_many);
        client_error.unwrap_or(cause)
    }
}

impl Drive {
    /// Why a leg failed.
    pub(crate) fn cause(&mut self, leg: Leg) -> ApiError {
        let run = &mut self.runs[leg];
        let cause = run.failure.take();
        let cause = cause.unwrap_or_else(|| ApiError::BadUpstream("the engine failed".to_owned()));
        let client_error = run.refusals.answer(cause);
        if leg == Leg::Prefill {
            self.log_failed_prefill(false);
        }
        client_error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overloaded() -> ApiError {
        let (status, retry_after) = (StatusCode::SERVICE_UNAVAILABLE, Duration::from_secs(1));
        ApiError::Overloaded { text: "busy".to_owned(), status, retry_after }
    }

    fn too_many(body: &'static str) -> ApiError {
        let status = StatusCode::TOO_MANY_REQUESTS;
        ApiError::Engine { status, content_type: None, retry: Default::default(), body: body.into() }
    }

    fn answer(refusals: &[(ApiError, u64)], cause: ApiError) -> ApiError {
        let mut all = Refusals::default();
        for (client_error, after) in refusals {
            all.add(client_error.clone(), Duration::from_secs(*after));
        }
        all.answer(cause)
    }

    #[test]
    fn the_answer_is_503_with_the_soonest_time_and_429_only_when_all_engines_said_so() {
        let broken = || ApiError::BadUpstream("it broke".to_owned());
        let soonest = overloaded().retried_after(Duration::from_secs(3));
        // I13.4
        assert_eq!(answer(&[(overloaded(), 7), (too_many("a"), 3)], overloaded()), soonest);
        assert_eq!(answer(&[(overloaded(), 3)], broken()), soonest);
        assert_eq!(answer(&[(too_many("a"), 3), (too_many("b"), 2)], too_many("a")), too_many("b"));
        assert_eq!(answer(&[], broken()), broken());
        let lost = ApiError::HandoffLost("it is lost".to_owned());
        // E6.9
        assert_eq!(answer(&[(overloaded(), 3)], lost), soonest);
        let wrong = ApiError::InvalidRequest("no".to_owned());
        assert_eq!(answer(&[(overloaded(), 3)], wrong.clone()), wrong, "the request itself is refused");
    }
}
