//! One operation over the values of all candidates. No result is NaN or infinite:
//!
//! - A result above the largest finite single becomes that number; one below the lowest becomes the lowest.
//! - `a / 0` is the largest number for a positive `a`, the lowest for a negative one, and 0 for 0.
//! - `ratio(a, 0)` is 0.
//! - `log` of 0 or less is the lowest number.
//! - A fact that is NaN counts as 0.
//!
//! The passes have no branches, so that the compiler uses SIMD.

/// Number of values that one step of a fold handles.
const LANES: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    Not,
    Negate,
    Exp,
    Log,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Ratio,
    Min,
    Max,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    Equal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fold {
    Min,
    Max,
    Sum,
    Mean,
}

/// Returns the nearest finite number. NaN does not occur: operands are finite.
#[inline]
pub(crate) fn finite(x: f32) -> f32 {
    let x = if x < f32::MAX { x } else { f32::MAX };
    if x > f32::MIN { x } else { f32::MIN }
}

/// Returns a fact's number: 0 for NaN.
#[inline]
pub(crate) fn single(bits: u32) -> f32 {
    let x = f32::from_bits(bits);
    finite(if x.is_nan() { 0.0 } else { x })
}

#[inline]
#[expect(clippy::cast_precision_loss, reason = "documented: counts above 2^24 are rounded")]
pub(crate) fn count(value: u32) -> f32 {
    value as f32
}

#[inline]
fn flag(holds: bool) -> f32 {
    if holds { 1.0 } else { 0.0 }
}

#[inline]
fn min(a: f32, b: f32) -> f32 {
    if b < a { b } else { a }
}

#[inline]
fn max(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline]
fn divide(a: f32, b: f32) -> f32 {
    let above = if a > 0.0 { f32::MAX } else { f32::MIN };
    let by_zero = if a == 0.0 { 0.0 } else { above };
    // Infinite or NaN where `b` is 0: the other value is taken then.
    let quotient = finite(a / b);
    if b == 0.0 { by_zero } else { quotient }
}

#[inline]
fn ratio(a: f32, b: f32) -> f32 {
    let quotient = finite(a / b);
    if b == 0.0 { 0.0 } else { quotient }
}

#[inline]
pub(crate) fn select(condition: f32, yes: f32, no: f32) -> f32 {
    if condition == 0.0 { no } else { yes }
}

fn log(x: f32) -> f32 {
    if x > 0.0 { x.ln() } else { f32::MIN }
}

impl Unary {
    pub(crate) fn one(self, x: f32) -> f32 {
        match self {
            Self::Not => 1.0 - x,
            Self::Negate => -x,
            Self::Exp => finite(x.exp()),
            Self::Log => log(x),
        }
    }

    pub(crate) fn column(self, values: &mut [f32]) {
        match self {
            Self::Not => each(values, |x| 1.0 - x),
            Self::Negate => each(values, |x| -x),
            Self::Exp => each(values, |x| finite(x.exp())),
            Self::Log => each(values, log),
        }
    }
}

/// The right or left operand of a pass over a column.
#[derive(Clone, Copy)]
pub(crate) enum Other<'a> {
    Column(&'a [f32]),
    /// One value for all candidates, on the right.
    Right(f32),
    /// One value for all candidates, on the left.
    Left(f32),
}

impl Binary {
    pub(crate) fn one(self, a: f32, b: f32) -> f32 {
        let mut value = [a];
        self.column(&mut value, Other::Right(b));
        let [value] = value;
        value
    }

    /// Replaces each value by the result with the other operand.
    pub(crate) fn column(self, values: &mut [f32], other: Other<'_>) {
        match self {
            Self::Add => both(values, other, |a, b| finite(a + b)),
            Self::Subtract => both(values, other, |a, b| finite(a - b)),
            Self::Multiply => both(values, other, |a, b| finite(a * b)),
            Self::Divide => both(values, other, divide),
            Self::Ratio => both(values, other, ratio),
            Self::Min => both(values, other, min),
            Self::Max => both(values, other, max),
            Self::Less => both(values, other, |a, b| flag(a < b)),
            Self::LessOrEqual => both(values, other, |a, b| flag(a <= b)),
            Self::Greater => both(values, other, |a, b| flag(a > b)),
            Self::GreaterOrEqual => both(values, other, |a, b| flag(a >= b)),
            Self::Equal => both(values, other, |a, b| flag(a == b)),
        }
    }
}

#[inline]
fn each(values: &mut [f32], operation: impl Fn(f32) -> f32) {
    values.iter_mut().for_each(|value| *value = operation(*value));
}

#[inline]
fn both(values: &mut [f32], other: Other<'_>, operation: impl Fn(f32, f32) -> f32) {
    match other {
        Other::Column(column) => {
            values.iter_mut().zip(column).for_each(|(value, other)| *value = operation(*value, *other));
        }
        Other::Right(other) => each(values, |value| operation(value, other)),
        Other::Left(other) => each(values, |value| operation(other, value)),
    }
}

impl Fold {
    /// Reduces a column to one value.
    pub(crate) fn column(self, values: &[f32]) -> f32 {
        match self {
            Self::Min => lanes(values, f32::MAX, min),
            Self::Max => lanes(values, f32::MIN, max),
            Self::Sum => narrow(sum(values)),
            Self::Mean => narrow(sum(values) / f64::from(count_of(values.len())).max(1.0)),
        }
    }

    /// Folds a value that all `rows` candidates have.
    pub(crate) fn one(self, value: f32, rows: usize) -> f32 {
        match self {
            Self::Min | Self::Max | Self::Mean => value,
            Self::Sum => narrow(f64::from(value) * f64::from(count_of(rows))),
        }
    }
}

#[inline]
fn lanes(values: &[f32], start: f32, operation: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane = operation(*lane, *value));
    }
    lanes.iter().chain(rest).fold(start, |found, value| operation(found, *value))
}

/// Adds up in doubles, which singles cannot overflow.
fn sum(values: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += f64::from(*value));
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|value| f64::from(*value)).sum::<f64>()
}

#[expect(clippy::cast_possible_truncation, reason = "what is too large becomes infinite, and then finite")]
fn narrow(sum: f64) -> f32 {
    finite(sum as f32)
}

fn count_of(rows: usize) -> u32 {
    u32::try_from(rows).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
