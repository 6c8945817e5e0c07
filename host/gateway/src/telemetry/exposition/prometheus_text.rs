//! Rewrites OpenMetrics into the Prometheus text format: the names of counters include their suffix, and
//! there are no units, exemplars or end mark.

/// Returns the same metrics in the Prometheus text format.
pub(super) fn of(open_metrics: &str) -> String {
    let (mut out, mut help) = (String::with_capacity(open_metrics.len()), "");
    for line in open_metrics.lines() {
        if let Some(text) = line.strip_prefix("# HELP ") {
            help = text;
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            let text = help.strip_prefix(name).unwrap_or_default();
            out.push_str(&format!("# HELP {name}{suffix}{text}\n# TYPE {name}{suffix} {kind}\n"));
        } else if !line.starts_with('#') {
            out.push_str(without_exemplar(line));
            out.push('\n');
        }
    }
    out
}

/// Returns a sample without its exemplar. Label values may contain the mark of an exemplar.
fn without_exemplar(line: &str) -> &str {
    let (mut quoted, mut escaped) = (false, false);
    for (place, byte) in line.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'#' if !quoted => return line.get(..place).unwrap_or(line).trim_end(),
            _ => {}
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_get_their_suffix_and_exemplars_go() {
        let open = "# HELP a Number of \"# {x\".\n# TYPE a counter\n# UNIT a x\na_total{m=\"q\\\" # {y\"} 1 # {trace_id=\"7\"} 1.0\n\
                    # HELP b B.\n# TYPE b gauge\nb 2\n# EOF\n";
        let expected = "# HELP a_total Number of \"# {x\".\n# TYPE a_total counter\na_total{m=\"q\\\" # {y\"} 1\n\
                        # HELP b B.\n# TYPE b gauge\nb 2\n";
        assert_eq!(of(open), expected);
    }
}
