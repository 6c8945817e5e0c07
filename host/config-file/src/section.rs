//! Traits that the attribute [`section`](macro@crate::section) implements: checks of ranges, and what a
//! reload changes.

use std::{cmp::Ordering, collections::BTreeMap, fmt::Display, time::Duration};

use crate::{
    duration,
    problem::{Problem, join},
};

/// A table of the configuration whose values can be checked, or a collection of such tables.
pub trait Section {
    /// Reports values that are out of range or contradict each other. A value out of range becomes the
    /// default, so that a check can continue with the others.
    fn check(&mut self, report: &mut Report<'_>);
}

/// A table, or tables by name, that a reload compares key by key.
pub trait Compared {
    /// Reports the keys whose values differ in `new`. `path` is the path of the table.
    fn changes(&self, new: &Self, path: &str, changes: &mut Changes);

    /// Puts the values of the start in the place of those that a reload does not apply.
    fn keep_started(&mut self, started: &Self);
}

/// Dotted paths of the keys that differ between two configurations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Keys that a reload applies.
    pub applied: Vec<String>,
    /// Keys that only a restart applies.
    pub needs_restart: Vec<String>,
}

/// Problems of the table at one path.
#[derive(Debug)]
pub struct Report<'a> {
    path: String,
    problems: &'a mut Vec<Problem>,
}

/// Values that a key may have.
#[derive(Clone, Copy, Debug)]
pub struct Range<T> {
    min: Option<T>,
    max: Option<T>,
    /// Whether `min` itself is too small.
    above_min: bool,
    reason: Option<&'static str>,
}

/// A value that has an order.
pub trait Value: PartialOrd {
    /// Returns the value as the file has it, without quotation marks.
    fn shown(&self) -> String;

    /// Returns whether it is finite.
    fn is_finite(&self) -> bool {
        true
    }
}

impl Changes {
    /// Adds a key.
    pub fn add(&mut self, path: String, restart: bool) {
        let list = if restart { &mut self.needs_restart } else { &mut self.applied };
        list.push(path);
    }
}

impl<'a> Report<'a> {
    /// Starts at the root of a configuration.
    pub fn new(problems: &'a mut Vec<Problem>) -> Self {
        Self { path: String::new(), problems }
    }

    /// Returns the report of a table in this one.
    #[must_use]
    pub fn at(&mut self, key: &str) -> Report<'_> {
        Report { path: join(&self.path, key), problems: self.problems }
    }

    /// Adds the problem of a key of this table; of the table itself, if `key` is empty.
    pub fn add(&mut self, key: &str, message: impl Into<String>) {
        let path = if key.is_empty() { self.path.clone() } else { join(&self.path, key) };
        self.problems.push(Problem::new(path, message));
    }

    /// Adds a problem unless the value is within the range. Returns whether it is.
    pub fn range<T: Value>(&mut self, key: &str, value: &T, range: &Range<T>) -> bool {
        let problem = range.problem(value);
        let fits = problem.is_none();
        problem.into_iter().for_each(|problem| self.add(key, problem));
        fits
    }

    /// Reports that only one of two keys is given, each of which needs the other.
    pub fn pair(&mut self, (one, has_one): (&str, bool), (other, has_other): (&str, bool)) {
        if has_one != has_other {
            let (given, missing) = if has_one { (one, other) } else { (other, one) };
            let message = format!("needs `{}`, too: give both or none", join(&self.path, missing));
            self.add(given, message);
        }
    }
}

impl<T: Value> Range<T> {
    /// Values from `min` to `max`. `reason` says what is wrong with others.
    pub const fn new(min: Option<T>, max: Option<T>, reason: Option<&'static str>) -> Self {
        Self { min, max, above_min: false, reason }
    }

    /// Returns what is wrong with a value.
    #[must_use]
    pub fn problem(&self, value: &T) -> Option<String> {
        let order = |bound: &T| value.partial_cmp(bound);
        let low = self.min.as_ref().map(order).is_some_and(|order| match order {
            Some(Ordering::Equal) => self.above_min,
            order => order != Some(Ordering::Greater),
        });
        let high = self.max.as_ref().map(order).is_some_and(|order| order == Some(Ordering::Greater));
        let (reason, expected) = match (self.reason, &self.min, &self.max) {
            _ if !low && !high && value.is_finite() => return None,
            (Some(reason), ..) => (reason, self.text()),
            (None, Some(min), _) if low => ("is too small", format!("{} or more", min.shown())),
            (None, _, Some(max)) if high => ("is too large", format!("at most {}", max.shown())),
            (None, ..) => ("is out of range", self.text()),
        };
        Some(format!("`{}` {reason}: expected {expected}", value.shown()))
    }

    /// Returns the values in words.
    #[must_use]
    pub fn text(&self) -> String {
        match (&self.min, &self.max) {
            (Some(_), None) if self.above_min => "more than 0".to_owned(),
            (Some(min), Some(max)) => format!("{} to {}", min.shown(), max.shown()),
            (Some(min), None) => format!("{} or more", min.shown()),
            (None, Some(max)) => format!("at most {}", max.shown()),
            (None, None) => "any".to_owned(),
        }
    }
}

impl Range<Duration> {
    /// Returns the range of all durations above zero.
    #[must_use]
    pub const fn positive(reason: Option<&'static str>) -> Self {
        let reason = match reason {
            None => Some("would end everything at once"),
            given => given,
        };
        Self { min: Some(Duration::ZERO), max: None, above_min: true, reason }
    }
}

macro_rules! whole_numbers {
    ($($type:ty)*) => {
        $(impl Value for $type {
            fn shown(&self) -> String {
                self.to_string()
            }
        })*
    };
}

macro_rules! fractions {
    ($($type:ty)*) => {
        $(impl Value for $type {
            fn shown(&self) -> String {
                self.to_string()
            }

            fn is_finite(&self) -> bool {
                <$type>::is_finite(*self)
            }
        })*
    };
}

whole_numbers! { u16 u32 u64 usize }
fractions! { f32 f64 }

impl Value for Duration {
    fn shown(&self) -> String {
        duration::text(*self)
    }
}

impl<S: Section> Section for Option<S> {
    fn check(&mut self, report: &mut Report<'_>) {
        self.iter_mut().for_each(|section| section.check(report));
    }
}

impl<S: Section> Section for Vec<S> {
    fn check(&mut self, report: &mut Report<'_>) {
        for (index, section) in self.iter_mut().enumerate() {
            let path = format!("{}[{index}]", report.path);
            section.check(&mut Report { path, problems: report.problems });
        }
    }
}

impl<K: Display + Ord, S: Section> Section for BTreeMap<K, S> {
    fn check(&mut self, report: &mut Report<'_>) {
        for (name, section) in self {
            section.check(&mut report.at(&name.to_string()));
        }
    }
}

/// Compares tables by name; one that is missing has the defaults.
impl<K: Display + Ord, S: Compared + Default> Compared for BTreeMap<K, S> {
    fn changes(&self, new: &Self, path: &str, changes: &mut Changes) {
        let missing = S::default();
        let names = self.keys().chain(new.keys().filter(|name| !self.contains_key(name)));
        let mut names: Vec<&K> = names.collect();
        names.sort();
        for name in names {
            let (before, after) = (self.get(name).unwrap_or(&missing), new.get(name).unwrap_or(&missing));
            before.changes(after, &join(path, &name.to_string()), changes);
        }
    }

    fn keep_started(&mut self, _: &Self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_out_of_range_is_told_with_the_range() {
        let shares = Range::new(Some(0.0), Some(1.0), Some("is not a share"));
        assert_eq!(shares.problem(&0.5), None);
        for wrong in [-0.5, 1.5, f64::NAN, f64::INFINITY] {
            assert_eq!(shares.problem(&wrong), Some(format!("`{wrong}` is not a share: expected 0 to 1")));
        }
        let counts = Range::new(Some(1_u32), Some(9), None);
        assert_eq!(counts.problem(&1).or(counts.problem(&9)), None);
        assert_eq!(counts.problem(&0).as_deref(), Some("`0` is too small: expected 1 or more"));
        assert_eq!(counts.problem(&10).as_deref(), Some("`10` is too large: expected at most 9"));
        let factors = Range::new(Some(0.0), None, None);
        assert_eq!(
            factors.problem(&f32::INFINITY).as_deref(),
            Some("`inf` is out of range: expected 0 or more")
        );
        let times = Range::positive(None);
        assert_eq!(times.problem(&duration::millis(1)), None);
        assert_eq!(
            times.problem(&Duration::ZERO).as_deref(),
            Some("`0s` would end everything at once: expected more than 0")
        );
        let leases =
            Range::new(Some(duration::millis(200)), Some(duration::secs(300)), Some("is out of range"));
        assert_eq!(
            leases.problem(&duration::secs(1_000)).as_deref(),
            Some("`16m40s` is out of range: expected 200ms to 5m")
        );
    }
}
