//! Lines for a person at a terminal.

use std::io::Write as _;

/// Prints what is being done, to standard error.
pub fn status(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints a line of the result, to standard output.
pub fn print(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
