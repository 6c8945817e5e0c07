//! A request's place in the queue and its share of the tenant's limits, from admission to its end.

use http::HeaderMap;
use pointsman_orchestration::{Admission, MAX_OUTPUT_ESTIMATE, estimated_output};
use pointsman_routing::RoutingRequest;
use pointsman_workers::{ModelName, Snapshot};

use super::Account;
use crate::{
    budget::Share,
    openai::error::ApiError,
    openai::rate_limit::Exceeded,
    openai::request::Endpoint,
    tenant_limits::{Reservation, TenantLimits},
};

/// Prompt tokens that a request may have beyond what the gateway expected, at least: an image is a short
/// address.
const MORE_INPUT: u64 = 32_768;

/// The parts of a request in the queue and in its tenant's limits.
#[derive(Debug, Default)]
pub(super) struct Quota {
    /// Admission by the queue.
    admission: Option<Admission>,
    /// Input and output tokens for which earlier admissions of the request charged its tenant.
    charged: (u64, u64),
    /// Reservation of a part of the tenant's limits.
    reservation: Option<Reservation>,
    /// Whether an engine ran the request, as far as is known, so that its tenant pays for the prompt.
    pub(super) model_ran: bool,
    /// Estimated output tokens of a whole answer that was given up.
    pub(super) given_up_output: u32,
}

impl Account {
    /// Returns the size of the request's body.
    #[must_use]
    pub(crate) fn body_bytes(&self) -> usize {
        self.body.as_ref().map_or(0, Share::amount)
    }

    /// Keeps the queue's admission until the request ends.
    pub(crate) fn admitted(&mut self, admission: Admission) {
        self.quota.admission = Some(admission);
    }

    /// Reserves a part of the tenant's limits until the request ends. If the request's model became another
    /// one, the limits of that one count, too.
    ///
    /// # Errors
    /// [`ApiError::TenantLimit`]: a limit does not allow the request.
    pub(crate) fn reserve(
        &mut self,
        limits: &TenantLimits,
        tenant: Option<u64>,
        model: &ModelName,
        workers: &Snapshot,
    ) -> Result<(), ApiError> {
        let reserved = limits.reserve(&mut self.quota.reservation, tenant, model, workers);
        reserved.map_err(ApiError::TenantLimit)
    }

    /// Reserves the tokens that the request may need.
    ///
    /// # Errors
    /// [`Exceeded`] names the exceeded limit, and the time of the next try.
    pub(crate) fn reserve_tokens(
        &mut self,
        request: &RoutingRequest,
        endpoint: Endpoint,
    ) -> Result<(), Box<Exceeded>> {
        let Some(reservation) = &mut self.quota.reservation else { return Ok(()) };
        if endpoint.needs_no_model_run() {
            return Ok(());
        }
        let has_tokens = endpoint.streams() && !endpoint.streams_bytes();
        let output = if has_tokens { estimated_output(request) } else { 0 };
        reservation.tokens(u64::from(request.prompt_tokens), output)
    }

    /// Returns whether the request's tenant has a limit of tokens.
    #[must_use]
    pub(crate) fn has_token_limit(&self) -> bool {
        self.quota.reservation.as_ref().is_some_and(Reservation::counts_tokens)
    }

    /// Adds the headers with the client's limits.
    pub(crate) fn add_limit_headers(&self, headers: &mut HeaderMap) {
        if let Some(reservation) = &self.quota.reservation {
            reservation.headers().write(headers);
        }
    }

    /// Gives the request's admission back. Its tenant is charged for the tokens that were used since the
    /// admission before.
    pub(super) fn give_back_admission(&mut self) {
        let Some(mut admission) = self.quota.admission.take() else { return };
        let (used, most) = (self.used_tokens(), self.most_tokens());
        let (input, output) = (used.0.min(most.0), used.1.min(most.1));
        let (input_before, output_before) = self.quota.charged;
        admission.used(input.saturating_sub(input_before), output.saturating_sub(output_before));
        self.quota.charged = (input, output);
        self.first_token.into_iter().for_each(|at| admission.first_token(at));
    }

    /// Returns the largest numbers of input and output tokens for which the queue charges the request's
    /// tenant. A wrong number of an engine would take all turns of the tenant otherwise.
    fn most_tokens(&self) -> (u64, u64) {
        let Some(request) = &self.origin else { return (u64::MAX, u64::MAX) };
        let of_one = request.max_tokens.unwrap_or(MAX_OUTPUT_ESTIMATE);
        let input = u64::from(self.prompt_tokens) * 4 + MORE_INPUT * u64::from(request.prompts);
        (input, u64::from(of_one) * u64::from(request.items()))
    }

    /// Replaces the request's reserved estimate of tokens with the tokens that it used.
    pub(super) fn settle(&mut self) {
        self.give_back_admission();
        let (input, output) = self.used_tokens();
        if let Some(mut reservation) = self.quota.reservation.take() {
            reservation.used(input, output);
        }
    }

    /// Records that the answer of an engine began, and was not an error.
    pub(crate) fn answer_began(&mut self) {
        self.quota.model_ran = true;
    }

    /// Returns the tokens of the prompt and the output, as the engine reported them or else as the gateway
    /// counted or estimated them. A request that no engine ran used none (L1.5).
    pub(super) fn used_tokens(&self) -> (u64, u64) {
        if !self.quota.model_ran || self.endpoint.needs_no_model_run() {
            return (0, 0);
        }
        let reported = self.usage.map(|usage| usage.prompt_tokens).filter(|tokens| *tokens > 0);
        let output = if self.tokens > 0 { self.tokens } else { self.quota.given_up_output };
        (u64::from(reported.unwrap_or(self.prompt_tokens)), u64::from(output))
    }
}
