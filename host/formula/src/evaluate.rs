//! Evaluates a formula over the facts of a call.

use crate::{
    MAX_WORK,
    columns::{Other, count, select, single},
    compile::{Formula, Id, Operation, Place},
};

/// The facts of a call, as the formulas asked for them.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The request facts.
    pub request: &'a [u32],
    /// The worker facts, column by column.
    pub columns: &'a [u32],
    /// Number of candidates.
    pub rows: usize,
}

/// A value on the stack.
enum Value {
    /// One value for all candidates.
    One(f32),
    Column(Vec<f32>),
}

struct Machine<'a> {
    inputs: Inputs<'a>,
    stack: Vec<Value>,
    /// Columns to use again.
    free: Vec<Vec<f32>>,
}

impl Formula {
    /// Returns whether the formula may be evaluated over this number of candidates.
    ///
    /// # Errors
    /// It would take more than [`MAX_WORK`] operations times candidates.
    pub fn check_work(&self, rows: usize) -> Result<(), String> {
        let work = self.work.saturating_mul(rows);
        if work <= MAX_WORK {
            return Ok(());
        }
        Err(format!(
            "{} operations for {rows} candidates are more than {MAX_WORK}; simplify the formula, or set `max_rows`",
            self.work
        ))
    }

    /// Returns a number for each candidate.
    #[must_use]
    pub fn numbers(&self, inputs: Inputs<'_>) -> Vec<f32> {
        match self.evaluate(inputs) {
            Value::One(value) => vec![value; inputs.rows],
            Value::Column(values) => values,
        }
    }

    /// Returns the candidates for which the condition holds, by row.
    #[must_use]
    pub fn rows(&self, inputs: Inputs<'_>) -> Vec<u32> {
        let rows = 0_u32..;
        match self.evaluate(inputs) {
            Value::One(0.0) => Vec::new(),
            Value::One(_) => rows.take(inputs.rows).collect(),
            Value::Column(values) => {
                rows.zip(values).filter(|(_, value)| *value != 0.0).map(|(row, _)| row).collect()
            }
        }
    }

    /// Returns whether the condition holds for the request.
    #[must_use]
    pub fn holds(&self, inputs: Inputs<'_>) -> bool {
        match self.evaluate(inputs) {
            Value::One(value) => value != 0.0,
            // Unreachable: such a formula has one value.
            Value::Column(_) => false,
        }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Value {
        let mut machine = Machine { inputs, stack: Vec::with_capacity(8), free: Vec::new() };
        for operation in &self.operations {
            machine.run(*operation);
        }
        machine.pop()
    }
}

impl<'a> Machine<'a> {
    fn run(&mut self, operation: Operation) {
        let value = match operation {
            Operation::Number(number) => Value::One(number),
            Operation::Load(Place::Request(at), is_single) => {
                let word = self.word(at);
                Value::One(if is_single { single(word) } else { count(word) })
            }
            Operation::Load(Place::Worker(at), is_single) => {
                let (column, mut values) = (self.column(at), self.buffer());
                if is_single {
                    values.extend(column.iter().map(|word| single(*word)));
                } else {
                    values.extend(column.iter().map(|word| count(*word)));
                }
                Value::Column(values)
            }
            Operation::Same(a, b) => self.same(a, b),
            Operation::Unary(unary) => match self.pop() {
                Value::One(value) => Value::One(unary.one(value)),
                Value::Column(mut values) => {
                    unary.column(&mut values);
                    Value::Column(values)
                }
            },
            Operation::Binary(binary) => {
                let (right, left) = (self.pop(), self.pop());
                match (left, right) {
                    (Value::One(a), Value::One(b)) => Value::One(binary.one(a, b)),
                    (Value::Column(mut a), Value::One(b)) => {
                        binary.column(&mut a, Other::Right(b));
                        Value::Column(a)
                    }
                    (Value::One(a), Value::Column(mut b)) => {
                        binary.column(&mut b, Other::Left(a));
                        Value::Column(b)
                    }
                    (Value::Column(mut a), Value::Column(b)) => {
                        binary.column(&mut a, Other::Column(&b));
                        self.free.push(b);
                        Value::Column(a)
                    }
                }
            }
            Operation::Select => self.select(),
            Operation::Fold(fold) => match self.pop() {
                Value::One(value) => Value::One(fold.one(value, self.inputs.rows)),
                Value::Column(values) => {
                    let folded = fold.column(&values);
                    self.free.push(values);
                    Value::One(folded)
                }
            },
        };
        self.stack.push(value);
    }

    fn select(&mut self) -> Value {
        let (no, yes, condition) = (self.pop(), self.pop(), self.pop());
        let mut condition = match condition {
            Value::One(condition) => return if condition == 0.0 { no } else { yes },
            Value::Column(condition) => condition,
        };
        let (yes, no) = (self.spread(yes), self.spread(no));
        for (condition, (yes, no)) in condition.iter_mut().zip(yes.iter().zip(&no)) {
            *condition = select(*condition, *yes, *no);
        }
        self.free.extend([yes, no]);
        Value::Column(condition)
    }

    fn spread(&mut self, value: Value) -> Vec<f32> {
        match value {
            Value::Column(values) => values,
            Value::One(value) => {
                let mut values = self.buffer();
                values.resize(self.inputs.rows, value);
                values
            }
        }
    }

    fn same(&mut self, a: Id, b: Id) -> Value {
        let is_column = |id| matches!(id, Id::Fact(Place::Worker(_)));
        if !is_column(a) && !is_column(b) {
            return Value::One(f32::from(u8::from(self.id(a, 0) == self.id(b, 0))));
        }
        let mut values = self.buffer();
        values
            .extend((0..self.inputs.rows).map(|row| f32::from(u8::from(self.id(a, row) == self.id(b, row)))));
        Value::Column(values)
    }

    /// Returns an id as the candidate in `row` has it: low and high half.
    fn id(&self, id: Id, row: usize) -> (u32, u32) {
        match id {
            #[expect(clippy::cast_possible_truncation, reason = "the halves of the number")]
            Id::Value(value) => (value as u32, (value >> 32) as u32),
            Id::Fact(Place::Request(at)) => (self.word(at), self.word(at + 1)),
            Id::Fact(Place::Worker(at)) => {
                let word = |at| self.column(at).get(row).copied().unwrap_or(0);
                (word(at), word(at + 1))
            }
        }
    }

    fn word(&self, at: usize) -> u32 {
        self.inputs.request.get(at).copied().unwrap_or(0)
    }

    fn column(&self, at: usize) -> &'a [u32] {
        let rows = self.inputs.rows;
        self.inputs.columns.get(at * rows..(at + 1) * rows).unwrap_or_default()
    }

    fn buffer(&mut self) -> Vec<f32> {
        let mut values = self.free.pop().unwrap_or_default();
        values.clear();
        values.reserve(self.inputs.rows);
        values
    }

    fn pop(&mut self) -> Value {
        // Never empty: the compiler emits an operand for each that an operation takes.
        self.stack.pop().unwrap_or(Value::One(0.0))
    }
}
