//! Values of the configuration in environment variables: `POINTSMAN__SECTION__KEY`.

use std::ffi::OsString;

use pointsman_config_file::Override;

use super::Problem;

/// Prefix of the variables' names.
const PREFIX: &str = "POINTSMAN__";
/// Separator of the keys of a path in a name.
const SEPARATOR: &str = "__";

/// The environment variables that take the place of values of the file.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    overrides: Vec<Override>,
    problems: Vec<Problem>,
}

impl Environment {
    /// Returns the variables of this process.
    #[must_use]
    pub(crate) fn of_process() -> Self {
        Self::from_variables(std::env::vars_os())
    }

    /// Returns those among `variables`, in the order of their names.
    #[must_use]
    pub(crate) fn from_variables(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let mut found = Self::default();
        for (name, text) in variables {
            let Some(keys) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
            let name = format!("{PREFIX}{keys}");
            let keys: Vec<String> = keys.split(SEPARATOR).map(str::to_ascii_lowercase).collect();
            let problem = |message: &str| Problem { flag: Some(name.clone()), ..Problem::new("", message) };
            if keys.iter().any(String::is_empty) {
                let message = "the name has an empty part: expected POINTSMAN__SECTION__KEY";
                found.problems.push(problem(message));
                continue;
            }
            match text.into_string() {
                Ok(text) => found.overrides.push(Override { name, keys, text }),
                Err(_) => found.problems.push(problem("the value is not UTF-8")),
            }
        }
        found.overrides.sort_by(|a, b| a.name.cmp(&b.name));
        found
    }

    /// Returns the values.
    pub(super) fn overrides(&self) -> &[Override] {
        &self.overrides
    }

    /// Returns what is wrong with variables that name no value.
    pub(super) fn problems(&self) -> &[Problem] {
        &self.problems
    }
}
