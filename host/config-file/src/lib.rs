//! Configuration files in TOML: parsed with every problem at once, each with its dotted path and its line.

pub use overrides::Override;
pub use parse::{Parsed, UnreadElements, parse, parse_with};
pub use problem::{ConfigErrors, Lines, Place, Problem};

mod overrides;
mod parse;
mod problem;
mod references;

/// Reads the text of a configuration file.
///
/// # Errors
/// The file cannot be read, or is not UTF-8.
pub fn read(path: &std::path::Path) -> Result<String, ConfigErrors> {
    std::fs::read_to_string(path).map_err(|error| {
        let message = format!("cannot read the configuration: {error}; check the path and its permissions");
        ConfigErrors { file: Some(path.to_owned()), problems: vec![Problem::new("", message)] }
    })
}
