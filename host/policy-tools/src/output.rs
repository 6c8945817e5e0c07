//! Output of the commands.

use std::io::Write as _;

/// Writes text to standard output. Unlike `print!`, it reports a closed pipe as an error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}
