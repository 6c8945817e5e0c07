//! Typed views of the flat facts. Asking for a fact returns a handle, and the handle reads the value of a
//! call without copying.

use std::marker::PhantomData;

use crate::facts::{ALL, FactValue, RequestFact, WorkerFact};

/// The facts that a policy asks for. Filled in [`crate::Policy::configure`].
#[derive(Debug, Default)]
pub struct Wants {
    request: Vec<String>,
    worker: Vec<String>,
    request_width: usize,
    worker_width: usize,
}

/// Handle of a request fact.
#[derive(Clone, Copy, Debug)]
pub struct Slot<T>(usize, PhantomData<T>);

/// Handle of a worker fact, which has one value for each candidate.
#[derive(Clone, Copy, Debug)]
pub struct Column<T>(usize, PhantomData<T>);

/// The facts of one call. Handles from [`Wants`] read them.
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

    /// Asks for a worker fact.
    pub fn worker<T: FactValue>(&mut self, fact: WorkerFact<T>) -> Column<T> {
        self.column(fact.name().to_owned())
    }

    /// Asks for `label-is/<key>=<value>`: 1 for a worker whose label `key` is `value`, else 0.
    pub fn label_is(&mut self, key: &str, value: &str) -> Column<u32> {
        self.column(format!("label-is/{key}={value}"))
    }

    /// Asks for `label-number/<key>`: the label `key` as a number, 0 for a worker without one.
    pub fn label_number(&mut self, key: &str) -> Column<f32> {
        self.column(format!("label-number/{key}"))
    }

    /// Asks for `taint-is/<name>`: 1 for a worker that has the taint, else 0.
    pub fn taint_is(&mut self, name: &str) -> Column<u32> {
        self.column(format!("taint-is/{name}"))
    }

    /// Asks for facts by name, for a policy whose facts depend on its settings. [`Facts::flat`] has their
    /// values, in this order. Use it instead of the other functions, not beside them.
    pub fn by_name(&mut self, request: Vec<String>, worker: Vec<String>) {
        let width = |scope: &str, names: &[String]| -> usize {
            let is_wide = |name: &&String| ALL.contains(&(scope, name.as_str(), "u64"));
            names.len() + names.iter().filter(is_wide).count()
        };
        (self.request_width, self.worker_width) = (width("request", &request), width("worker", &worker));
        (self.request, self.worker) = (request, worker);
    }

    /// Returns the names of the request facts, in the order they were asked for.
    #[must_use]
    pub fn request_names(&self) -> &[String] {
        &self.request
    }

    /// Returns the names of the worker facts, in the order they were asked for.
    #[must_use]
    pub fn worker_names(&self) -> &[String] {
        &self.worker
    }

    /// Returns the number of 32-bit values that the request facts take: 2 for a `u64`, else 1.
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
    /// Makes facts from the flat values of a call: those of the request, and columns of `rows` values each.
    #[must_use]
    pub fn new(request: &'a [u32], columns: &'a [u32], rows: usize) -> Self {
        Self { request, columns, rows }
    }

    /// Returns the flat values: those of the request, and the columns one after another. A `u64` takes two
    /// values or columns.
    #[must_use]
    pub fn flat(&self) -> (&'a [u32], &'a [u32]) {
        (self.request, self.columns)
    }

    /// Returns the number of candidates.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn column(&self, place: usize) -> &'a [u32] {
        self.columns.get(place * self.rows..(place + 1) * self.rows).unwrap_or_default()
    }
}

impl<T: FactValue> Slot<T> {
    /// Returns the value in this call.
    #[must_use]
    pub fn get(&self, facts: &Facts<'_>) -> T {
        let word = |place: usize| facts.request.get(place).copied().unwrap_or(0);
        T::from_words(word(self.0), if T::WIDTH == 2 { word(self.0 + 1) } else { 0 })
    }
}

impl<T: FactValue> Column<T> {
    /// Returns the value of a candidate; 0 for a row that does not exist.
    #[must_use]
    pub fn at(&self, facts: &Facts<'_>, row: usize) -> T {
        let word = |place: usize| facts.column(place).get(row).copied().unwrap_or(0);
        T::from_words(word(self.0), if T::WIDTH == 2 { word(self.0 + 1) } else { 0 })
    }
}

impl Column<u32> {
    /// Returns the values of all candidates.
    #[must_use]
    pub fn slice<'a>(&self, facts: &Facts<'a>) -> &'a [u32] {
        facts.column(self.0)
    }
}

impl Column<f32> {
    /// Returns the values of all candidates.
    #[must_use]
    pub fn slice<'a>(&self, facts: &Facts<'a>) -> &'a [f32] {
        bytemuck::cast_slice(facts.column(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_labels_and_taints_have_the_names_of_the_contract() {
        let mut wants = Wants::default();
        wants.label_is("zone", "a");
        wants.label_number("gpus");
        wants.taint_is("spot");
        assert_eq!(wants.worker_names(), ["label-is/zone=a", "label-number/gpus", "taint-is/spot"]);
    }
}
