//! What the search asks of a replay.

use super::{Scene, World};
use crate::{engines, outcome::Place};

impl World {
    /// Returns the prompt tokens that an engine computes before a request has its first token there.
    pub(in crate::ceiling) fn tokens_ahead(&self, scene: &Scene<'_>, engine: u32, number: u32) -> u64 {
        let number = number as usize;
        let found =
            (self.engines.get(engine as usize), scene.prepared.get(number), scene.trace.requests.get(number));
        let (Some(Some(of)), Some(prepared), Some(request)) = found else { return u64::MAX };
        of.core.prompt_tokens_ahead(&prepared.chain, request.input_tokens)
    }

    /// Returns whether the engines at a place can hold a request.
    pub(in crate::ceiling) fn holds(&self, scene: &Scene<'_>, place: Place, number: u32) -> bool {
        let Some(request) = scene.trace.requests.get(number as usize) else { return false };
        [place.prefill, place.decode].into_iter().all(|engine| {
            let of = self.engines.get(engine as usize).and_then(Option::as_ref);
            of.is_some_and(|of| engines::holds(scene.role(engine), &of.core, request))
        })
    }

    /// Returns the number of simulated engines.
    pub(in crate::ceiling) fn simulated(&self) -> u64 {
        self.engines.iter().flatten().count() as u64
    }

    /// Returns the number of sequences on an engine.
    pub(in crate::ceiling) fn sequences(&self, engine: u32) -> u32 {
        let of = self.engines.get(engine as usize).and_then(Option::as_ref);
        of.map_or(u32::MAX, |of| of.core.sequences().0 + of.core.sequences().1)
    }
}
