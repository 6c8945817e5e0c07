//! Finds the prompts that continue other prompts: the turns of a conversation, whether or not the trace names
//! the session.

use std::collections::HashMap;

use crate::prepared::Prepared;

/// Maximum number of requests returned for one request.
const MAX_AFTER: usize = 256;

/// For each request, the requests whose prompts begin with its whole prompt.
#[derive(Debug, Default)]
pub(super) struct Continued(HashMap<u32, Vec<u32>>);

impl Continued {
    pub(super) fn of(prepared: &[Prepared]) -> Self {
        let mut continued = Self::default();
        // The newest request whose prompt ends with each block.
        let mut ends: HashMap<u64, u32> = HashMap::new();
        for (number, prepared) in (0..).zip(prepared) {
            let before = prepared.chain.iter().rev().find_map(|hash| ends.get(hash).copied());
            before.into_iter().for_each(|before| continued.0.entry(before).or_default().push(number));
            if let Some(last) = prepared.chain.last() {
                ends.insert(*last, number);
            }
        }
        continued
    }

    /// Returns the requests that continue a request's prompt, and those that continue their prompts in turn.
    pub(super) fn after(&self, number: u32) -> Vec<u32> {
        let (mut found, mut place) = (vec![number], 0);
        while let Some(next) = found.get(place).copied().filter(|_| found.len() <= MAX_AFTER) {
            found.extend(self.0.get(&next).into_iter().flatten());
            place += 1;
        }
        found.split_off(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        prepared::prepare,
        trace::{Trace, TraceRequest},
    };

    #[test]
    fn a_prompt_continues_the_last_one_that_it_begins_with() {
        let prompt = |blocks: &[u64]| TraceRequest {
            input_tokens: 16 * blocks.len() as u32,
            blocks: blocks.to_vec().into(),
            ..TraceRequest::default()
        };
        let requests = [&[1, 2][..], &[1, 3], &[1, 2, 4], &[1, 2, 4, 5], &[1, 2, 6], &[7]];
        let requests = requests.map(prompt).to_vec();
        let trace = Trace { block_tokens: 16, requests, ..Trace::default() };
        let continued = Continued::of(&prepare(&trace, 16));
        assert_eq!(continued.after(0), [2, 4, 3]);
        assert_eq!((continued.after(2), continued.after(1)), (vec![3], vec![]));
    }
}
