//! Reads the text format of Prometheus and OpenMetrics: samples with their names, labels and values. No I/O.
//!
//! A line that is not a sample is skipped, so that one bad line does not hide the others.

/// One sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample<'a> {
    /// Name of the metric.
    pub(super) name: &'a str,
    /// Labels between the braces.
    labels: &'a str,
    /// The value. It may be infinite or NaN.
    pub(super) value: f64,
}

impl<'a> Sample<'a> {
    /// Returns the value of a label, with its escapes as they were sent.
    pub(super) fn label(&self, name: &str) -> Option<&'a str> {
        Labels(self.labels).find(|(label, _)| *label == name).map(|(_, value)| value)
    }
}

/// Returns the samples of a response, in its order.
pub(super) fn samples(body: &[u8]) -> impl Iterator<Item = Sample<'_>> {
    body.split(|byte| *byte == b'\n').filter_map(|line| sample(std::str::from_utf8(line).ok()?))
}

/// Parses `name{label="value"} value [time stamp] [# exemplar]`. The name may also be the first item between
/// the braces, in quotes.
fn sample(line: &str) -> Option<Sample<'_>> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(|c: char| c == '{' || c.is_ascii_whitespace())?;
    let (name, rest) = line.split_at_checked(end)?;
    let (mut name, mut labels, mut rest) = (name, "", rest.trim_start());
    if let Some(inner) = rest.strip_prefix('{') {
        (labels, rest) = inner.split_at_checked(end_of_labels(inner)?)?;
        rest = rest.strip_prefix('}')?;
    }
    if name.is_empty() {
        (name, labels) = quoted(labels.trim_start())?;
    }
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Sample { name, labels, value })
}

/// Returns where the labels end: the first closing brace outside of quotes.
fn end_of_labels(text: &str) -> Option<usize> {
    let (mut quotes, mut escaped) = (false, false);
    text.bytes().position(|byte| {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quotes,
            b'"' => quotes = !quotes,
            b'}' => return !quotes,
            _ => {}
        }
        false
    })
}

/// Splits a quoted text from the rest of the line.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let inner = text.strip_prefix('"')?;
    let mut escaped = false;
    let end = inner.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })?;
    Some((inner.get(..end)?, inner.get(end + 1..)?))
}

/// Names and values of labels.
struct Labels<'a>(&'a str);

impl<'a> Iterator for Labels<'a> {
    type Item = (&'a str, &'a str);

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.0.trim_start_matches(|c: char| c == ',' || c.is_ascii_whitespace());
        let (name, rest) = quoted(text).or_else(|| text.split_at_checked(text.find('=')?))?;
        let value = rest.trim_start().strip_prefix('=')?.trim_start();
        let (value, rest) = quoted(value)?;
        self.0 = rest;
        Some((name.trim_end(), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<(&str, f64)> {
        samples(text.as_bytes()).map(|sample| (sample.name, sample.value)).collect()
    }

    #[test]
    fn samples_are_read_as_prometheus_defines_them() {
        let text = "# HELP a Text with {braces} 7\n# TYPE a gauge\na 1\n a{} 2 1700000000000\r\n\
                    a{x=\"y\"}3\na\t{x=\"} 9\", y = \"\\\"}\" ,} \t 4e1 # {trace=\"t\"} 5\n\
                    a 1.5E+02\na +Inf\na -0.5\n{\"a.b\",x=\"y\"} 6\n# EOF\n";
        let want = [
            ("a", 1.0),
            ("a", 2.0),
            ("a", 3.0),
            ("a", 40.0),
            ("a", 150.0),
            ("a", f64::INFINITY),
            ("a", -0.5),
            ("a.b", 6.0),
        ];
        assert_eq!(all(text), want);
        assert!(all("a NaN")[0].1.is_nan());
    }

    #[test]
    fn a_line_that_is_no_sample_hides_no_other() {
        let text = b"a\na{x=\"y\" 1\na{x=\"y} 1\n}\n{} 1\na one\n\xff 1\n\nb 2";
        let read: Vec<_> = samples(text).map(|sample| (sample.name, sample.value)).collect();
        assert_eq!(read, [("b", 2.0)]);
    }

    #[test]
    fn labels_are_found_by_their_whole_name() {
        let line = b"a{my_rank=\"1\", rank = \"2,rank=\\\"9\\\"\",\"other.rank\"=\"3\",last=\"4\"} 1";
        let sample = samples(line).next().unwrap();
        let found = ["rank", "my_rank", "other.rank", "last", "x"].map(|name| sample.label(name));
        assert_eq!(found, [Some("2,rank=\\\"9\\\""), Some("1"), Some("3"), Some("4"), None]);
    }
}
