//! Writes the table of costs with which CI compares ours to standard output; the README has the command.

use std::io::Write as _;

fn main() -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    let lines: Vec<String> =
        pointsman_oracle::cost::table(240)?.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    writeln!(out, "[\n{}\n]", lines.join(",\n"))?;
    Ok(())
}
