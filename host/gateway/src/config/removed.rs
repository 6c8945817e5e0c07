//! Keys that the gateway no longer has, and their replacements.

use super::Problem;

/// Dotted paths, `[]` for an element of an array, and what to do.
const REMOVED: [(&str, &str); 10] = [
    ("server.api_keys", KEYS),
    ("server.tenants", KEYS),
    ("auth.plain_api_keys", KEYS),
    ("server.admin_token_file", "write `admin_token = { file = \"PATH\" }`"),
    ("auth.keys[].file", DIGEST),
    ("auth.operators[].file", DIGEST),
    ("policies.trusted_key_files", "write `trusted_keys = [{ file = \"PATH\" }]`"),
    ("policies.compile_timeout", "remove it: the limit is twice `compile_cpu`, at least 2 min"),
    ("traces.batch_spans", "remove it: an export is sent at once when 512 spans wait"),
    (
        "decisions.log_file_bytes",
        "remove it: a file of the log ends at 64 MiB, or at half of `log_total_bytes`",
    ),
];
const KEYS: &str = "run `pointsman key hash --id NAME --tenant TENANT`, give it the key on stdin, and add the entry of \
                    [[auth.keys]] that it prints";
const DIGEST: &str = "write `digest = { file = \"PATH\" }`";

/// Names the replacement of a removed key in the problem about an unknown key.
pub(super) fn explain(problem: &mut Problem) {
    let path = without_indexes(&problem.path);
    let known = REMOVED.iter().find(|(key, _)| *key == path);
    if let Some((_, advice)) = known.filter(|_| problem.message.starts_with("unknown key")) {
        problem.message = format!("this key was removed: {advice}");
    }
}

fn without_indexes(path: &str) -> String {
    let mut parts = path.split('[');
    let first = parts.next().unwrap_or_default().to_owned();
    parts
        .fold(first, |path, part| format!("{path}[{}", part.trim_start_matches(|c: char| c.is_ascii_digit())))
}
