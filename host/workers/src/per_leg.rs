//! Values of a request by its legs.

use std::ops::{Index, IndexMut};

use crate::id::Leg;

/// A value for the prefill leg of a request, and one for the leg that answers: decode, or the only one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerLeg<T> {
    /// The value of the prefill leg.
    pub prefill: T,
    /// The value of the decode or aggregated leg.
    pub answering: T,
}

impl<T> Index<Leg> for PerLeg<T> {
    type Output = T;

    fn index(&self, leg: Leg) -> &T {
        match leg {
            Leg::Prefill => &self.prefill,
            Leg::Decode | Leg::Aggregated => &self.answering,
        }
    }
}

impl<T> IndexMut<Leg> for PerLeg<T> {
    fn index_mut(&mut self, leg: Leg) -> &mut T {
        match leg {
            Leg::Prefill => &mut self.prefill,
            Leg::Decode | Leg::Aggregated => &mut self.answering,
        }
    }
}

impl Leg {
    /// Returns whether the worker of this leg computes the prompt. That of a decode leg gets its blocks.
    #[must_use]
    pub fn computes_prompt(self) -> bool {
        self != Self::Decode
    }

    /// Returns the other leg of a pair; `None` for a leg without one.
    #[must_use]
    pub fn partner(self) -> Option<Self> {
        match self {
            Self::Prefill => Some(Self::Decode),
            Self::Decode => Some(Self::Prefill),
            Self::Aggregated => None,
        }
    }
}
