//! Reads values from the text of `/metrics`.

use std::collections::BTreeMap;

/// One sample line: labels and value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'a> {
    labels: &'a str,
    /// Its value.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// Value of a label.
    pub fn label(&self, name: &str) -> Option<&'a str> {
        let start = self.labels.match_indices(name).find_map(|(at, _)| {
            let starts = at == 0 || self.labels.get(..at)?.ends_with(',');
            let rest = self.labels.get(at + name.len()..)?.strip_prefix("=\"")?;
            starts.then_some(rest)
        })?;
        start.split('"').next()
    }

    /// Returns whether any label has this value.
    pub fn has_value(&self, value: &str) -> bool {
        self.labels.contains(&format!("=\"{value}\""))
    }

    /// Labels without quotation marks, for a table.
    pub fn shown(&self) -> String {
        self.labels.replace('"', "").replace(',', ", ")
    }
}

/// Samples of one metric.
pub fn samples<'a>(text: &'a str, name: &str) -> Vec<Sample<'a>> {
    let parse = |line: &'a str| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.split_once("} ")?,
            None => ("", rest.strip_prefix(' ')?),
        };
        Some(Sample { labels, value: value.split(' ').next()?.parse().ok()? })
    };
    text.lines().filter_map(parse).collect()
}

/// Sum of a metric over all its samples; 0 when it has none.
pub fn sum(text: &str, name: &str) -> f64 {
    // The sum of no floats is -0.0.
    samples(text, name).iter().map(|sample| sample.value).sum::<f64>() + 0.0
}

/// Sum over the samples that have every one of these labels.
pub fn sum_with(text: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let fits = |sample: &&Sample<'_>| labels.iter().all(|(name, value)| sample.label(name) == Some(value));
    samples(text, name).iter().filter(fits).map(|sample| sample.value).sum::<f64>() + 0.0
}

/// Sums by the value of one label.
pub fn by_label(text: &str, name: &str, label: &str) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for sample in samples(text, name) {
        *sums.entry(sample.label(label).unwrap_or_default().to_owned()).or_insert(0.0) += sample.value;
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::{by_label, samples, sum, sum_with};

    const TEXT: &str = "# TYPE retries counter\n\
        retries_total{leg=\"prefill\",reason=\"connect\"} 3\n\
        retries_total{leg=\"decode\",reason=\"connect\"} 4\n\
        retries_total{leg=\"decode\",reason=\"status\"} 5 # {trace=\"a b\"} 1\n\
        inflight 2\nretries_total_extra{leg=\"decode\"} 100\n";

    #[test]
    fn sums() {
        assert_eq!(sum(TEXT, "retries_total"), 12.0);
        assert_eq!(sum(TEXT, "inflight"), 2.0);
        assert_eq!(sum(TEXT, "absent"), 0.0);
        assert!(sum(TEXT, "absent").is_sign_positive(), "a table must not show -0");
        assert_eq!(sum_with(TEXT, "retries_total", &[("leg", "decode")]), 9.0);
        assert_eq!(sum_with(TEXT, "retries_total", &[("leg", "decode"), ("reason", "status")]), 5.0);
        assert_eq!(by_label(TEXT, "retries_total", "reason")["connect"], 7.0);
    }

    #[test]
    fn labels() {
        let text = "m{xleg=\"no\",leg=\"yes\"} 1\n";
        let found = samples(text, "m");
        assert_eq!(found[0].label("leg"), Some("yes"));
        assert_eq!(found[0].label("eg"), None);
        assert!(found[0].has_value("yes") && !found[0].has_value("ye"));
        assert_eq!(found[0].shown(), "xleg=no, leg=yes");
    }
}
