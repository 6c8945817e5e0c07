//! Engines that failed within the stream of a request, and what followed (I14). Workers that it left (I15).

use pointsman_routing::{DecisionId, StreamFailed};
use pointsman_workers::Leg;
use tokio::time::Duration;

use super::Account;

/// An engine that failed within the stream.
#[derive(Debug)]
pub(super) struct StreamFailure {
    /// Number of decisions that came before.
    decisions: usize,
    /// Output tokens that the client had.
    delivered: u32,
    /// What followed: `continued`, `continued_exact`, `failed`, or why the stream was not continued.
    result: Option<&'static str>,
    /// Why it was continued from text and not from token ids, or the code of the error with which it failed.
    why: Option<&'static str>,
}

impl Account {
    /// Records that an engine failed within the stream, of which the client had this many tokens.
    pub(crate) fn stream_failed(&mut self, delivered: u32) {
        let decisions = self.receipts.len();
        self.stream_failures.push(StreamFailure { decisions, delivered, result: None, why: None });
    }

    /// Records what followed when an engine failed within the stream. `why`: its rest began from text and not
    /// from token ids, or failed with this code.
    pub(crate) fn stream_followed(&mut self, result: &'static str, why: Option<&'static str>) {
        if let Some(last) = self.stream_failures.last_mut() {
            (last.result, last.why) = (Some(result), why);
        }
    }

    /// Records why the stream was not continued when its engine failed.
    pub(crate) fn not_continued(&mut self, reason: &'static str) {
        self.not_continued = Some(reason);
    }

    /// Records that the stream leaves the worker of the leg that answers: it moves, or pauses.
    pub(crate) fn moved(&mut self, answering: Leg) {
        for leg in [Some(answering), answering.partner()].into_iter().flatten() {
            let newest = self.receipts.iter_mut().rev().find(|receipt| receipt.leg == leg);
            newest.into_iter().for_each(|receipt| {
                (receipt.moved, receipt.served_until_move) = (leg == answering, true);
            });
        }
    }

    /// Records that the stream pauses, and gives the request's admission back: its rest needs another one,
    /// which it does not get if its client leaves.
    pub(crate) fn pauses(&mut self, answering: Leg) {
        self.moved(answering);
        // The worker of the rest is not slow because the stream was paused.
        self.token_times.forget_block();
        self.give_back_admission();
    }

    /// Records that a pause ended.
    pub(crate) fn paused(&mut self, pause: Duration) {
        self.paused += pause;
        self.token_times.paused(pause);
    }

    /// Records why the stream did not leave a worker that drains.
    pub(crate) fn not_moved(&mut self, reason: &'static str) {
        self.not_moved = Some(reason);
    }

    /// An engine generates the tokens after the first `tokens` again.
    pub(crate) fn generates_again(&mut self, tokens: u32) {
        self.tokens = tokens;
        self.token_times.go_back(tokens);
    }

    /// How the engine of a decision failed within the stream, and the decision whose engine failed so
    /// before it: it generated the rest.
    pub(super) fn stream_failure(&self, place: usize) -> (Option<StreamFailed>, Option<DecisionId>) {
        // The leg that served of those before a failure, or at the end.
        let served = |from: usize, to: usize| {
            let receipts = self.receipts.get(from..to).unwrap_or_default();
            receipts.iter().rposition(|receipt| receipt.leg != Leg::Prefill).map(|at| from + at)
        };
        let id = |place: Option<usize>| place.and_then(|place| self.receipts.get(place)?.id);
        let (mut failed, mut continues, mut from) = (None, None, 0);
        let ends = self.stream_failures.iter().map(|failure| failure.decisions).skip(1);
        for (failure, next) in self.stream_failures.iter().zip(ends.chain([self.receipts.len()])) {
            let before = served(from, failure.decisions);
            // The first worker of the rest, if the stream left it.
            let left =
                (failure.decisions..next).find(|at| self.receipts.get(*at).is_some_and(|one| one.moved));
            let behind = left.or_else(|| served(failure.decisions, next));
            if before == Some(place) {
                failed = Some(StreamFailed {
                    result: failure.result.unwrap_or("failed"),
                    why: failure.why,
                    delivered: failure.delivered,
                    rest: id(behind),
                });
            }
            if behind == Some(place) {
                continues = id(before);
            }
            from = failure.decisions;
        }
        (failed, continues)
    }
}
