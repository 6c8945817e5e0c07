//! Finds policies that send everything to one worker: 64 calls over eight equal workers, of which only those
//! that were chosen have requests.

use std::collections::VecDeque;

use pointsman_policy_runtime::{LoadedPolicy, SampleCall};
use pointsman_routing::{
    Call, Decision, DecisionContext, Picker, Policy, Purpose, World,
    facts::{FactType, RequestFact, WorkerColumn, WorkerFact},
    pick::pick,
};

const ROWS: u32 = 8;
const CALLS: u64 = 64;
/// Requests that run at the same time. The oldest one ends when another begins.
const IN_FLIGHT: usize = 24;
/// Prompt tokens of a request, and its KV blocks.
const PROMPT: (u32, u32) = (1_000, 63);

/// Returns a warning for a selector or scorer that chooses one row in every call.
pub(crate) fn warning(policy: &LoadedPolicy) -> Option<String> {
    if !matches!(policy.info().world, World::Selector | World::Scorer) {
        return None;
    }
    let mut running: VecDeque<u32> = VecDeque::new();
    let mut only = None;
    for number in 0..CALLS {
        let row = choose(policy, number, &running)?;
        if only.is_some_and(|only| only != row) {
            return None;
        }
        only = Some(row);
        running.push_back(row);
        if running.len() > IN_FLIGHT {
            running.pop_front();
        }
    }
    let row = only?;
    Some(format!(
        "warning it chose row {row} of {ROWS} equal workers in all of {CALLS} calls, however many requests that one \
         had: every request would go to one worker. Read the load (`active-requests`), and break ties by the call's \
         seed (`least`)\n"
    ))
}

/// Returns the row of one call. `None` if the policy gave no row.
fn choose(policy: &LoadedPolicy, number: u64, running: &VecDeque<u32>) -> Option<u32> {
    let wants = &policy.info().wants;
    let sample = SampleCall::ordinary(wants, ROWS);
    let (rows, seed) = (ROWS, number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let call = Call { rows, seed, now_us: sample.call.now_us + number * 10_000, ..sample.call };
    let mut facts = Vec::new();
    let mut place = 0;
    for fact in &wants.request {
        let width = fact.ty().width();
        match fact {
            // Each request is of another session and tenant.
            RequestFact::SessionHash | RequestFact::TenantHash => facts.extend([low(seed), low(seed >> 32)]),
            _ => facts.extend(sample.request.iter().skip(place).take(width)),
        }
        place += width;
    }
    for column in &wants.worker {
        facts.extend(values(column, running));
    }
    let context = &mut DecisionContext::new(Purpose::Route);
    match policy.info().world {
        World::Selector => match policy.select(context, &call, &facts).ok()? {
            Decision::Choose { row, .. } => Some(row),
            Decision::Abstain | Decision::Shed(_) => None,
        },
        World::Scorer => {
            let mut costs = Vec::new();
            policy.score(context, &call, &facts, &mut costs).ok()?;
            pick(Picker::Min, &costs, 0.0, seed).and_then(|row| u32::try_from(row).ok())
        }
        World::Filter | World::DecodeOverride => None,
    }
}

/// Returns a column of the workers. They differ in their ids and in the requests that they run.
fn values(column: &WorkerColumn, running: &VecDeque<u32>) -> Vec<u32> {
    let requests = |row: u32| running.iter().map(|other| u32::from(*other == row)).sum::<u32>();
    let one = |row: u32| match column {
        WorkerColumn::Fact(WorkerFact::WorkerId) => row + 1,
        WorkerColumn::Fact(WorkerFact::ActiveRequests) => requests(row),
        WorkerColumn::Fact(WorkerFact::ActivePrefillTokens) => PROMPT.0 * requests(row),
        WorkerColumn::Fact(WorkerFact::DecodeBlocks) => PROMPT.1 * requests(row),
        WorkerColumn::Fact(WorkerFact::TotalBlocks) => 10_000,
        WorkerColumn::Fact(WorkerFact::TtftEwmaUs) => 50_000,
        WorkerColumn::Fact(WorkerFact::ItlEwmaUs) => 10_000,
        WorkerColumn::Fact(WorkerFact::PrefillUsPerKtoken) => 20_000,
        WorkerColumn::Fact(WorkerFact::LocalPrefill | WorkerFact::LoraLoaded)
        | WorkerColumn::LabelIs { .. }
        | WorkerColumn::TaintIs(_) => 1,
        WorkerColumn::Fact(_) | WorkerColumn::LabelNumber { .. } => 0,
    };
    let high = if column.ty() == FactType::U64 { ROWS } else { 0 };
    (0..ROWS).map(one).chain((0..high).map(|_| 0)).collect()
}

fn low(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).unwrap_or_default()
}
