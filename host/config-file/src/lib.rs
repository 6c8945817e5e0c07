//! Configuration files in TOML: tables whose keys are written once, as fields of a struct, and every problem
//! of a file at once, each with its dotted path and its line.

pub use overrides::Override;
pub use parse::{Parsed, UnreadElements, parse, parse_with};
pub use pointsman_config_derive::section;
pub use problem::{ConfigErrors, Lines, Place, Problem, join};
pub use section::{Changes, Compared, Range, Report, Section, Value};

pub mod duration;
mod overrides;
mod parse;
mod problem;
pub mod reference;
mod references;
mod section;

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

/// Returns the files with secrets that a text names, with `overrides` in place of its values. Empty if the
/// text is not TOML.
#[must_use]
pub fn secret_files(
    text: &str,
    secrets: &[&str],
    overrides: &[Override],
) -> std::collections::BTreeSet<std::path::PathBuf> {
    let Ok(table) = toml::from_str(text) else { return Default::default() };
    let mut root = toml::Value::Table(table);
    // A value without a place in the table is a problem of `parse_with`.
    let _ = overrides::Overrides::new(overrides).apply(&mut root);
    references::files(&mut root, secrets)
}
