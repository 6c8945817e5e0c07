//! The answer of a policy to a case, and whether it is the expected one.

use std::fmt;

use crate::{Expect, Plan};

/// The answer of a policy to a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// A selector chose this row.
    Row(u32),
    /// A selector abstained.
    Abstain,
    /// A selector or a decode override rejected the request.
    Shed {
        /// HTTP status for the client.
        status: u16,
        /// The policy's reason.
        reason: String,
    },
    /// A scorer's costs, one per row.
    Costs(Vec<f32>),
    /// The rows that a filter kept.
    Keep(Vec<u32>),
    /// A decode override's decision.
    Plan(Plan),
    /// The policy refused its settings with this message.
    Refused(String),
    /// The call failed.
    Failed(String),
}

/// Statuses a policy may shed with.
const SHED_STATUSES: [u16; 3] = [429, 503, 529];

impl Answer {
    /// Returns the answer, or a failure when the host would not use it: answers to a call with `rows`
    /// candidates are checked as the host checks them.
    #[must_use]
    pub fn checked(self, rows: u32) -> Self {
        let rows = rows as usize;
        let problem = match &self {
            Self::Row(row) if *row as usize >= rows => format!("row {row} of {rows}"),
            Self::Shed { status, .. } if !SHED_STATUSES.contains(status) => {
                format!("shed status {status} is not allowed: use 429, 503 or 529")
            }
            Self::Costs(costs) if costs.len() != rows => format!("{} costs for {rows} rows", costs.len()),
            Self::Costs(costs) => match costs.iter().position(|cost| !cost.is_finite()) {
                Some(row) => format!("the cost in row {row} is not finite"),
                None => return self,
            },
            Self::Keep(kept) => match kept.windows(2).all(|pair| pair.first() < pair.last()) {
                true if kept.iter().all(|row| (*row as usize) < rows) => return self,
                _ => format!("kept rows {kept:?} of {rows} do not rise in range"),
            },
            _ => return self,
        };
        Self::Failed(format!("invalid answer: {problem}"))
    }

    /// Returns whether this is the expected answer.
    #[must_use]
    pub fn meets(&self, expect: &Expect) -> bool {
        match (expect, self) {
            (Expect::Row(expected), Self::Row(row)) => expected == row,
            (Expect::Abstain, Self::Abstain) => true,
            (Expect::Costs(expected), Self::Costs(costs)) => {
                expected.len() == costs.len() && expected.iter().zip(costs).all(|(a, b)| near(*a, *b))
            }
            (Expect::Keep(expected), Self::Keep(rows)) => expected == rows,
            (Expect::Plan(expected), Self::Plan(plan)) => expected == plan,
            (Expect::Shed(expected), Self::Shed { status, .. }) => expected == status,
            (Expect::Refused(part), Self::Refused(message)) => message.contains(part.as_str()),
            _ => false,
        }
    }
}

/// Compares costs up to rounding: within 1e-3, or within a millionth of a larger expected cost.
fn near(expected: f32, cost: f32) -> bool {
    (cost - expected).abs() <= 1e-3_f32.max(expected.abs() * 1e-6)
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row(row) => Expect::Row(*row).fmt(f),
            Self::Abstain => Expect::Abstain.fmt(f),
            Self::Shed { status, reason } => write!(f, "shed {status}: {reason}"),
            Self::Costs(costs) => write!(f, "costs {costs:?}"),
            Self::Keep(rows) => write!(f, "keep {rows:?}"),
            Self::Plan(plan) => Expect::Plan(*plan).fmt(f),
            Self::Refused(message) => write!(f, "settings refused: {message}"),
            Self::Failed(message) => write!(f, "call failed: {message}"),
        }
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row(row) => write!(f, "row {row}"),
            Self::Abstain => f.write_str("abstain"),
            Self::Costs(costs) => write!(f, "costs {costs:?}"),
            Self::Keep(rows) => write!(f, "keep {rows:?}"),
            Self::Plan(Plan::Remote) => f.write_str("plan remote"),
            Self::Plan(Plan::Local) => f.write_str("plan local"),
            Self::Shed(status) => write!(f, "shed {status}"),
            Self::Refused(part) => write!(f, "settings refused with {part:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_may_differ_by_rounding_only() {
        let costs = |costs: &[f32]| Answer::Costs(costs.to_vec());
        let expect = Expect::Costs(vec![1.0, 2_000_000.0]);
        assert!(costs(&[1.0009, 2_000_001.0]).meets(&expect));
        assert!(!costs(&[1.002, 2_000_000.0]).meets(&expect));
        assert!(!costs(&[1.0, f32::NAN]).meets(&expect));
        assert!(!costs(&[1.0]).meets(&expect));
    }

    #[test]
    fn an_answer_that_the_host_would_not_use_is_a_failure() {
        let failed = |answer: Answer| matches!(answer.checked(2), Answer::Failed(_));
        assert!(failed(Answer::Row(2)) && !failed(Answer::Row(1)));
        assert!(failed(Answer::Shed { status: 418, reason: String::new() }));
        assert!(!failed(Answer::Shed { status: 529, reason: String::new() }));
        assert!(failed(Answer::Costs(vec![1.0])) && failed(Answer::Costs(vec![1.0, f32::NAN])));
        assert!(failed(Answer::Keep(vec![1, 0])) && failed(Answer::Keep(vec![2])));
        assert!(!failed(Answer::Keep(vec![0, 1])) && !failed(Answer::Abstain));
    }

    #[test]
    fn an_answer_of_another_kind_is_never_the_expected_one() {
        let refused = Answer::Refused("x: 1 is too many".to_owned());
        assert!(refused.meets(&Expect::Refused("too many".to_owned())));
        assert!(!refused.meets(&Expect::Refused("too few".to_owned())));
        assert!(!Answer::Row(0).meets(&Expect::Refused(String::new())));
        assert!(!Answer::Abstain.meets(&Expect::Row(0)));
        assert!(!Answer::Failed("timeout".to_owned()).meets(&Expect::Abstain));
        let shed = Answer::Shed { status: 429, reason: "full".to_owned() };
        assert!(shed.meets(&Expect::Shed(429)) && !shed.meets(&Expect::Shed(503)));
    }
}
