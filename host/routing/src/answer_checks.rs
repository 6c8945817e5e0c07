//! Checks that a policy's answer passes before it is used: answers are advice. The tools for authors make the
//! same checks.

use crate::policy::{Failure, Plan, ShedReason};

/// Statuses a policy may shed with.
const SHED_STATUSES: [u16; 3] = [429, 503, 529];

/// Checks that a selector's row lies in range, and that it gave no costs or one finite cost per row.
///
/// # Errors
/// [`Failure::Invalid`] names what is wrong.
pub fn choice(row: u32, given: &[f32], rows: usize) -> Result<(), Failure> {
    if row as usize >= rows {
        return Err(Failure::Invalid(format!("it chose row {row}, and {}", numbered(rows))));
    }
    if given.is_empty() { Ok(()) } else { costs(given, rows) }
}

/// Checks that a scorer gave one finite cost per row.
///
/// # Errors
/// [`Failure::Invalid`] names what is wrong.
pub fn costs(given: &[f32], rows: usize) -> Result<(), Failure> {
    if given.len() != rows {
        return Err(Failure::Invalid(format!(
            "it gave {} for {}; give one for each row",
            counted(given.len(), "cost"),
            counted(rows, "row")
        )));
    }
    // Looks at all of them without a branch: almost always all are finite.
    if given.iter().fold(true, |finite, cost| finite & cost.is_finite()) {
        return Ok(());
    }
    match given.iter().position(|cost| !cost.is_finite()) {
        Some(row) => {
            let cost = given.get(row).unwrap_or(&f32::NAN);
            Err(Failure::Invalid(format!(
                "the cost of row {row} is {cost}; a cost has to be a finite number"
            )))
        }
        None => Ok(()),
    }
}

/// Kept rows lie in range and rise, so that none is kept twice.
///
/// # Errors
/// [`Failure::Invalid`] names what is wrong.
pub fn kept(given: &[u32], rows: usize) -> Result<(), Failure> {
    if let Some(row) = given.iter().find(|row| **row as usize >= rows) {
        return Err(Failure::Invalid(format!("it kept row {row}, and {}", numbered(rows))));
    }
    match given.windows(2).find(|pair| pair.first() >= pair.last()) {
        Some(pair) => Err(Failure::Invalid(format!(
            "it kept rows {pair:?} in this order; name each row once, from the lowest to the highest"
        ))),
        None => Ok(()),
    }
}

/// The status is one a policy may shed with.
///
/// # Errors
/// [`Failure::Invalid`] names what is wrong.
pub fn shed(shed: ShedReason) -> Result<ShedReason, Failure> {
    if SHED_STATUSES.contains(&shed.status) {
        Ok(shed)
    } else {
        Err(Failure::Invalid(format!("shed status {} is not allowed: use 429, 503 or 529", shed.status)))
    }
}

/// A plan's shed is checked as a selector's is.
///
/// # Errors
/// [`Failure::Invalid`] names what is wrong.
pub fn plan(plan: Plan) -> Result<Plan, Failure> {
    match plan {
        Plan::Shed(reason) => shed(reason).map(Plan::Shed),
        Plan::Remote | Plan::Local => Ok(plan),
    }
}

/// Says which numbers rows have.
fn numbered(rows: usize) -> String {
    match rows {
        0 => "there is no row".to_owned(),
        1 => "the only row is 0".to_owned(),
        rows => format!("the rows are 0 to {}", rows - 1),
    }
}

fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn invalid(result: Result<(), Failure>, expected: &str) {
        assert_eq!(result, Err(Failure::Invalid(expected.to_owned())));
    }

    #[test]
    fn an_answer_that_breaks_the_contract_is_named() {
        invalid(choice(3, &[], 3), "it chose row 3, and the rows are 0 to 2");
        invalid(choice(1, &[], 1), "it chose row 1, and the only row is 0");
        invalid(choice(0, &[1.0], 2), "it gave 1 cost for 2 rows; give one for each row");
        invalid(costs(&[0.0, f32::NAN], 2), "the cost of row 1 is NaN; a cost has to be a finite number");
        invalid(costs(&[f32::INFINITY], 1), "the cost of row 0 is inf; a cost has to be a finite number");
        invalid(kept(&[0, 5], 3), "it kept row 5, and the rows are 0 to 2");
        let order = "it kept rows [1, 1] in this order; name each row once, from the lowest to the highest";
        invalid(kept(&[1, 1], 3), order);
        let teapot = ShedReason { status: 418, reason: String::new() };
        assert_eq!(
            plan(Plan::Shed(teapot)),
            Err(Failure::Invalid("shed status 418 is not allowed: use 429, 503 or 529".into()))
        );
    }

    #[test]
    fn a_sound_answer_passes() {
        assert_eq!(choice(1, &[0.5, 0.25], 2), Ok(()));
        assert_eq!(kept(&[], 3), Ok(()));
        assert_eq!(kept(&[0, 2], 3), Ok(()));
        let shed = ShedReason { status: 429, reason: "later".into() };
        assert_eq!(plan(Plan::Shed(shed.clone())), Ok(Plan::Shed(shed)));
    }
}
