//! Selectors, namespaces and ports of Kubernetes, as the gateway reads them.

use anyhow::ensure;

use crate::report::plain;

/// Reads a selector of labels as Kubernetes does, and writes it without needless blanks. Labels of the form
/// `KEY=VALUE` may also have blanks between them. `None`: it is not one.
pub(crate) fn selector(text: &str) -> Option<String> {
    let parts = parts(text).into_iter().map(|part| requirement(part).or_else(|| equalities(part)));
    let parts: Vec<String> = parts.collect::<Option<_>>()?;
    Some(parts.join(","))
}

/// Returns whether a selector compares labels with values only.
pub(crate) fn is_of_equalities(selector: &str) -> bool {
    parts(selector).iter().all(|part| equality(part).is_some())
}

/// Splits a selector at the commas that are not between parentheses.
fn parts(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    let parts = text.split(|letter| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    });
    parts.collect()
}

/// Reads one requirement: `KEY`, `!KEY`, `KEY=VALUE`, `KEY!=VALUE`, `KEY>NUMBER`, `KEY in (VALUE,…)`.
fn requirement(text: &str) -> Option<String> {
    let text = text.trim();
    if let Some((head, values)) = text.split_once('(') {
        let words: Vec<&str> = head.split_whitespace().collect();
        let [key, operator @ ("in" | "notin")] = words.as_slice() else { return None };
        let values: Vec<&str> = values.strip_suffix(')')?.split(',').map(str::trim).collect();
        let fits = is_key(key) && values.iter().all(|value| is_value(value));
        return fits.then(|| format!("{key} {operator} ({})", values.join(",")));
    }
    if let Some(key) = text.strip_prefix('!').map(str::trim).filter(|key| is_key(key)) {
        return Some(format!("!{key}"));
    }
    let compared = compared(text, &["!=", "==", "=", ">", "<"]);
    compared.or_else(|| is_key(text).then(|| text.to_owned()))
}

/// Reads labels with blanks between them.
fn equalities(text: &str) -> Option<String> {
    let labels: Option<Vec<String>> = text.split_whitespace().map(equality).collect();
    labels.filter(|labels| !labels.is_empty()).map(|labels| labels.join(","))
}

fn equality(text: &str) -> Option<String> {
    compared(text, &["==", "="])
}

/// Reads a comparison with the first of the operators that the text has.
fn compared(text: &str, operators: &[&str]) -> Option<String> {
    let mut found = operators.iter().filter_map(|operator| Some((text.split_once(operator)?, operator)));
    let ((key, value), operator) = found.next()?;
    let (key, value) = (key.trim(), value.trim());
    (is_key(key) && is_value(value)).then(|| format!("{key}{operator}{value}"))
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| is_of_label(byte) || byte == b'/')
}

fn is_value(text: &str) -> bool {
    text.bytes().all(is_of_label)
}

fn is_of_label(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

/// # Errors
/// The text is not the name of a namespace.
pub(crate) fn check_namespace(text: &str) -> anyhow::Result<()> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    ensure!(
        !text.is_empty() && text.bytes().all(fits),
        "`{}` is not a namespace: expected letters, digits and `-`",
        plain(text)
    );
    Ok(())
}

/// # Errors
/// The text is neither the number nor the name of a port, nor a list of these.
pub(crate) fn check_ports(text: &str) -> anyhow::Result<()> {
    for port in text.split(',').map(str::trim) {
        let is_name = port.bytes().any(|byte| byte.is_ascii_alphabetic())
            && port.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let is_number = port.parse::<u16>().is_ok_and(|port| port > 0);
        ensure!(
            is_name || is_number,
            "`{}` is not a port: expected 1 to 65535, or the name of a port",
            plain(port)
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s3_selectors_are_read_as_kubernetes_reads_them() {
        for (text, expected) in [
            ("app=vllm", "app=vllm"),
            (" app = vllm , tier==big ", "app=vllm,tier==big"),
            ("app=a tier=b", "app=a,tier=b"),
            ("environment=prod,tier in (gpu, big),!canary", "environment=prod,tier in (gpu,big),!canary"),
            ("environment=prod, app notin (canary)", "environment=prod,app notin (canary)"),
            ("tier!=canary,llm-d.ai/role,gpus>1", "tier!=canary,llm-d.ai/role,gpus>1"),
            ("app=", "app="),
        ] {
            // S3.1
            assert_eq!(selector(text).as_deref(), Some(expected), "{text}");
        }
        for text in
            ["", "app=a b", "app in a", "app in (a", "app within (a)", "a b", "=a", "a=b=c", "a=(b)", "a,,b"]
        {
            assert_eq!(selector(text), None, "{text}");
        }
        assert!(is_of_equalities("app=a,b==c") && !is_of_equalities("app=a,b!=c") && !is_of_equalities("a"));
    }

    #[test]
    fn s1_namespaces_and_ports_are_those_that_the_gateway_reads() {
        for (text, fits) in [("a-1", true), ("My_NS", false), ("", false)] {
            // S1.1
            assert_eq!(check_namespace(text).is_ok(), fits, "{text}");
        }
        for (text, fits) in
            [("8000", true), ("http,8001", true), ("0", false), ("70000", false), ("a_b", false), ("", false)]
        {
            // S1.1
            assert_eq!(check_ports(text).is_ok(), fits, "{text}");
        }
    }
}
