//! A calibrated fleet as the file that `pointsman compare --fleet` reads.

use std::fmt::Write as _;

use crate::fleet::{EngineGroup, Fleet, StepTimeSpec};

/// Returns the TOML of a fleet. `notes` become comments at its start.
#[must_use]
pub fn fleet_text(fleet: &Fleet, notes: &[String]) -> String {
    let mut text = String::new();
    for line in notes.iter().flat_map(|note| note.lines()) {
        let _ = writeln!(text, "# {line}");
    }
    let _ = writeln!(text, "block_tokens = {}", fleet.block_tokens);
    for group in &fleet.engines {
        engines(&mut text, group, fleet.block_tokens);
    }
    let links = &fleet.links;
    let _ = write!(
        text,
        "\n[links]\nbytes_per_token = {}\ngigabytes_per_second = {}\nlatency_ms = {}\n",
        links.bytes_per_token,
        rounded(links.gigabytes_per_second),
        rounded(links.latency_ms),
    );
    text
}

fn engines(text: &mut String, group: &EngineGroup, block_tokens: u32) {
    let _ = write!(
        text,
        "\n[[engines]]\nrole = \"{}\"\ncount = {}\nblocks = {}\nmax_num_seqs = {}\nmax_batched_tokens = {}\n\
         request_overhead_ms = {}\n",
        group.role.as_str(),
        group.count,
        group.kv_blocks(block_tokens),
        group.max_num_seqs,
        group.max_batched_tokens,
        rounded(group.request_overhead_ms),
    );
    if let StepTimeSpec::Linear { c0, c1, c2, c3, c4 } = group.step_time {
        let [c0, c1, c2, c3, c4] = [c0, c1, c2, c3, c4].map(rounded);
        let _ = writeln!(
            text,
            "step_time = {{ linear = {{ c0 = {c0}, c1 = {c1}, c2 = {c2}, c3 = {c3}, c4 = {c4} }} }}"
        );
    }
}

/// Rounds to five significant digits, which are more than a measurement has.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pointsman_workers::Role;

    #[test]
    fn what_is_written_is_read_back() {
        let step_time = StepTimeSpec::Linear { c0: 25.1, c1: 0.0, c2: 1.25e-5, c3: 0.71, c4: 0.0 };
        let group = |role| EngineGroup {
            step_time,
            request_overhead_ms: 3.5,
            blocks: Some(77),
            ..EngineGroup::new(role, 2)
        };
        let engines = vec![group(Role::Prefill), group(Role::Decode)];
        let fleet = Fleet { block_tokens: 32, engines, ..Fleet::default() };
        let text = fleet_text(&fleet, &["calibrated\non a test".to_owned()]);
        assert!(text.starts_with("# calibrated\n# on a test\nblock_tokens = 32\n"), "{text}");
        assert_eq!(toml::from_str::<Fleet>(&text).unwrap(), fleet, "{text}");
    }
}
