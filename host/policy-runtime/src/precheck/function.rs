//! Bounds of one function body: the compiler's time and memory grow faster than its size.

use wasmparser::{FunctionBody, Operator};

use super::{
    Stopped,
    bounds::{Bound, Counts},
};

pub(super) fn check(body: &FunctionBody<'_>, counts: &Counts) -> Result<(), Stopped> {
    let size = body.range().len() as u64;
    counts.check(Bound::FunctionBytes, size)?;
    let mut locals = 0_u64;
    for group in body.get_locals_reader()? {
        let (count, _) = group?;
        locals = locals.saturating_add(count.into());
        counts.check(Bound::Locals, locals)?;
    }
    counts.check(Bound::FunctionCost, size.saturating_mul(locals))?;
    check_nesting(body, counts)
}

/// Checks how deep blocks and loops are nested.
fn check_nesting(body: &FunctionBody<'_>, counts: &Counts) -> Result<(), Stopped> {
    let mut operators = body.get_operators_reader()?;
    // Whether each open block is a loop.
    let (mut open, mut loops) = (Vec::new(), 0_u64);
    while !operators.eof() {
        match operators.read()? {
            Operator::Loop { .. } => {
                open.push(true);
                loops += 1;
                counts.check(Bound::LoopDepth, loops)?;
            }
            Operator::Block { .. }
            | Operator::If { .. }
            | Operator::Try { .. }
            | Operator::TryTable { .. } => {
                open.push(false);
                counts.check(Bound::BlockDepth, open.len() as u64)?;
            }
            Operator::End | Operator::Delegate { .. } => loops -= u64::from(open.pop().unwrap_or(false)),
            _ => {}
        }
    }
    Ok(())
}
