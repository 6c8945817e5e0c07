//! A selector as a naive author writes it: hash maps with random state, prints, clocks. Built for
//! wasm32-wasip2 it imports WASI, and must still be deterministic.

use std::{collections::HashMap, io::Write, time::SystemTime};

use pointsman_policy_sdk::{
    Call, Column, Decision, Error, Facts, NoSettings, Policy, Selector, Wants, facts,
};

/// The policy.
#[derive(Debug)]
pub struct Chatty {
    requests: Column<u32>,
}

impl Policy for Chatty {
    const NAME: &'static str = "chatty";
    type Settings = NoSettings;

    fn configure(_: NoSettings, wants: &mut Wants) -> Result<Self, String> {
        Ok(Self { requests: wants.worker(facts::ACTIVE_REQUESTS) })
    }
}

impl Selector for Chatty {
    fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, Error> {
        let by_row: HashMap<usize, u32> = self.requests.slice(facts).iter().copied().enumerate().collect();
        let _ = writeln!(std::io::stderr(), "choosing among {} rows", call.rows);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_micros());
        if now != u128::from(call.now_us) {
            return Err(Error::Internal(format!("the clock says {now}, the call {}", call.now_us)));
        }
        let least = by_row.iter().min_by_key(|(row, requests)| (**requests, **row));
        Ok(least.map_or(Decision::Abstain, |(row, _)| Decision::row(*row)))
    }
}

pointsman_policy_sdk::export!(selector Chatty);
