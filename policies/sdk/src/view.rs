//! Typed views of the flat facts: handles are given when a fact is asked for, and read without copying.

use std::marker::PhantomData;

use crate::facts::{FactValue, RequestFact, WorkerFact};

/// The facts a policy asks for, collected while it is configured.
#[derive(Debug, Default)]
pub struct Wants {
    request: Vec<String>,
    worker: Vec<String>,
    request_width: usize,
    worker_width: usize,
}

/// Where a request fact lies.
#[derive(Clone, Copy, Debug)]
pub struct Slot<T>(usize, PhantomData<T>);

/// Where a column of worker facts lies.
#[derive(Clone, Copy, Debug)]
pub struct Column<T>(usize, PhantomData<T>);

/// The facts of one call.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    request: &'a [u32],
    columns: &'a [u32],
    rows: usize,
}

impl Wants {
    /// Asks for a request fact.
    pub fn request<T: FactValue>(&mut self, fact: RequestFact<T>) -> Slot<T> {
        self.request.push(fact.name().to_owned());
        let slot = Slot(self.request_width, PhantomData);
        self.request_width += T::WIDTH;
        slot
    }

    /// Asks for a column of worker facts.
    pub fn worker<T: FactValue>(&mut self, fact: WorkerFact<T>) -> Column<T> {
        self.column(fact.name().to_owned())
    }

    /// Asks for `label-is/<key>=<value>`: 1 where the worker's label has that value, else 0.
    pub fn label_is(&mut self, key: &str, value: &str) -> Column<u32> {
        self.column(format!("label-is/{key}={value}"))
    }

    /// Asks for `label-number/<key>`: the label as a number, 0 where it is none.
    pub fn label_number(&mut self, key: &str) -> Column<f32> {
        self.column(format!("label-number/{key}"))
    }

    /// Names of the request facts, in order.
    #[must_use]
    pub fn request_names(&self) -> &[String] {
        &self.request
    }

    /// Names of the worker facts, in order.
    #[must_use]
    pub fn worker_names(&self) -> &[String] {
        &self.worker
    }

    /// Slots that the request facts take.
    #[must_use]
    pub fn request_width(&self) -> usize {
        self.request_width
    }

    fn column<T: FactValue>(&mut self, name: String) -> Column<T> {
        self.worker.push(name);
        let column = Column(self.worker_width, PhantomData);
        self.worker_width += T::WIDTH;
        column
    }
}

impl<'a> Facts<'a> {
    /// Facts as a call hands them over: request slots, then columns of `rows` slots each.
    #[must_use]
    pub fn new(request: &'a [u32], columns: &'a [u32], rows: usize) -> Self {
        Self { request, columns, rows }
    }

    /// Number of candidate rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn column(&self, place: usize) -> &'a [u32] {
        self.columns.get(place * self.rows..(place + 1) * self.rows).unwrap_or_default()
    }
}

impl<T: FactValue> Slot<T> {
    /// The value.
    #[must_use]
    pub fn get(&self, facts: &Facts<'_>) -> T {
        let word = |place: usize| facts.request.get(place).copied().unwrap_or(0);
        T::from_words(word(self.0), if T::WIDTH == 2 { word(self.0 + 1) } else { 0 })
    }
}

impl<T: FactValue> Column<T> {
    /// The value in a row; 0 past the end.
    #[must_use]
    pub fn at(&self, facts: &Facts<'_>, row: usize) -> T {
        let word = |place: usize| facts.column(place).get(row).copied().unwrap_or(0);
        T::from_words(word(self.0), if T::WIDTH == 2 { word(self.0 + 1) } else { 0 })
    }
}

impl Column<u32> {
    /// The whole column.
    #[must_use]
    pub fn slice<'a>(&self, facts: &Facts<'a>) -> &'a [u32] {
        facts.column(self.0)
    }
}

impl Column<f32> {
    /// The whole column.
    #[must_use]
    pub fn slice<'a>(&self, facts: &Facts<'a>) -> &'a [f32] {
        bytemuck::cast_slice(facts.column(self.0))
    }
}
