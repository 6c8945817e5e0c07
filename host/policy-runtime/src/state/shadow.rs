//! State of a slot's shadow. It belongs to one generation: a trial of other content begins with an empty one.

use std::sync::Arc;

use arc_swap::ArcSwap;
use pointsman_routing::Generation;

use super::State;

/// State of the slot's shadow, made at the first call of each of its generations.
#[derive(Debug)]
pub(crate) struct ShadowState(ArcSwap<Latest>);

/// The latest generation that was called or ended.
#[derive(Clone, Debug)]
struct Latest {
    generation: Generation,
    /// `None` after its end.
    state: Option<Arc<State>>,
}

impl Default for ShadowState {
    fn default() -> Self {
        Self(ArcSwap::from_pointee(Latest { generation: Generation(0), state: None }))
    }
}

impl ShadowState {
    /// Returns the state of a generation. `None`: it ended, and a late call of it finds nothing.
    pub(crate) fn of(&self, generation: Generation) -> Option<Arc<State>> {
        let latest = self.0.load();
        if latest.generation < generation {
            drop(latest);
            self.advance(Latest { generation, state: Some(Arc::default()) });
            return self.of(generation);
        }
        latest.state.clone().filter(|_| latest.generation == generation)
    }

    /// Drops the state of a generation.
    pub(crate) fn end(&self, generation: Generation) {
        self.0.rcu(|latest| match latest.generation <= generation {
            true => Arc::new(Latest { generation, state: None }),
            false => latest.clone(),
        });
    }

    fn advance(&self, next: Latest) {
        let next = Arc::new(next);
        self.0.rcu(|latest| match latest.generation < next.generation {
            true => next.clone(),
            false => latest.clone(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_keeps_its_state_until_it_ends_or_another_is_called() {
        let shadow = ShadowState::default();
        let usage = |generation| shadow.of(Generation(generation)).map(|state| state.usage().0);
        shadow.of(Generation(3)).unwrap().set("key", b"value", 0, 0).unwrap();
        assert_eq!(usage(3), Some(1));
        assert_eq!((usage(5), usage(3)), (Some(0), None), "a late call of the one before");
        shadow.end(Generation(3));
        assert_eq!(usage(5), Some(0), "an earlier one ended");
        shadow.end(Generation(7));
        assert_eq!((usage(5), usage(7), usage(8)), (None, None, Some(0)));
    }
}
