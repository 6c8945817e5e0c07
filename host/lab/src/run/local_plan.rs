//! Requests whose decode worker is planned to prefill the prompt itself, as in the gateway (D4.9).

use pointsman_orchestration::{Event as LegEvent, Queued, pair_may_take_over};
use pointsman_workers::{Leg, PerLeg};

use super::Lab;

impl Lab<'_> {
    /// Continues without the planned worker, which cannot take the request now.
    pub(super) fn plan_refused(&mut self, number: usize, place: Option<Queued>) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        flight.attempts.leave_plan(place);
        let snapshot = &self.gateways.of(number).snapshot;
        flight.legs.note_pair(pair_may_take_over(snapshot, &self.model, None, &[]));
        self.report(number, LegEvent::PlanRefused);
    }

    /// Notes that the planned worker failed the request.
    pub(super) fn note_failed_plan(&mut self, number: usize, leg: Leg) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let Some((worker, _)) = flight.planned_for(leg) else { return };
        let (snapshot, tried) = (&self.gateways.of(number).snapshot, flight.attempts.tried());
        let takes_over = pair_may_take_over(snapshot, &self.model, None, tried);
        flight.legs.note_pair(takes_over);
        if takes_over {
            flight.attempts.suspect(PerLeg { prefill: None, answering: Some(worker) }, []);
        }
    }
}
