//! Secrets that the configuration does not contain but names: `{ env = "NAME" }` and `{ file = "PATH" }`; and
//! texts that are no secrets, such as `${NAME}`, which other programs replace before they read a file.

use std::{collections::BTreeSet, fs, io::Read as _, path::PathBuf};

use serde_path_to_error::Segment;
use toml::Value;

/// Maximum size of a file with a secret, bytes.
const MAX_BYTES: u64 = 64 * 1024;

/// A reference that could not be followed: where it is, and why.
pub(crate) struct Broken {
    pub(crate) segments: Vec<Path>,
    pub(crate) message: String,
}

/// A step from a value to one in it.
#[derive(Clone)]
pub(crate) enum Path {
    Key(String),
    Index(usize),
}

impl From<&Path> for Segment {
    fn from(path: &Path) -> Self {
        match path {
            Path::Key(key) => Self::Map { key: key.clone() },
            Path::Index(index) => Self::Seq { index: *index },
        }
    }
}

/// Puts what references name in their place, wherever a key of `secrets` is around them. The settings of
/// policies contain none. Returns the broken references and the placeholders, the last one first.
pub(crate) fn follow(root: &mut Value, secrets: &[&str]) -> Vec<Broken> {
    let mut broken = Vec::new();
    walk(root, &mut Vec::new(), false, secrets, &mut |value, at| {
        let read = match reference(value) {
            Some((kind, name)) => read(kind, name).map(Some),
            None => value.as_str().and_then(Placeholder::of).map_or(Ok(None), |found| Err(found.advice())),
        };
        match read {
            Ok(Some(text)) => *value = Value::String(text),
            Ok(None) => {}
            Err(message) => broken.push(Broken { segments: at.to_vec(), message }),
        }
    });
    broken.reverse();
    broken
}

/// Returns the files that references name.
pub(crate) fn files(root: &mut Value, secrets: &[&str]) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    walk(root, &mut Vec::new(), false, secrets, &mut |value, _| {
        if let Some((Kind::File, path)) = reference(value) {
            files.insert(PathBuf::from(path));
        }
    });
    files
}

/// Calls `visit` for each value that is a secret or a reference to one.
fn walk(
    value: &mut Value,
    at: &mut Vec<Path>,
    secret: bool,
    secrets: &[&str],
    visit: &mut impl FnMut(&mut Value, &[Path]),
) {
    if secret && (value.is_str() || reference(value).is_some()) {
        visit(value, at);
        return;
    }
    match value {
        Value::Table(table) => {
            for (key, value) in table.iter_mut().filter(|(key, _)| *key != "settings") {
                at.push(Path::Key(key.clone()));
                walk(value, at, secret || is_secret(at, secrets), secrets, visit);
                at.pop();
            }
        }
        Value::Array(elements) => {
            for (index, value) in elements.iter_mut().enumerate() {
                at.push(Path::Index(index));
                walk(value, at, secret, secrets, visit);
                at.pop();
            }
        }
        _ => {}
    }
}

/// Returns whether the last key of a path, or the whole path, is a secret.
fn is_secret(at: &[Path], secrets: &[&str]) -> bool {
    let mut keys =
        at.iter().filter_map(|step| if let Path::Key(key) = step { Some(key.as_str()) } else { None });
    let path = keys.clone().collect::<Vec<_>>().join(".");
    keys.next_back().is_some_and(|key| secrets.contains(&key)) || secrets.contains(&path.as_str())
}

/// Where a secret is.
#[derive(Clone, Copy)]
enum Kind {
    Variable,
    File,
}

/// Returns where a value says that its secret is; `None` if the value is not a reference.
fn reference(value: &Value) -> Option<(Kind, &str)> {
    let table = value.as_table().filter(|table| table.len() == 1)?;
    let (kind, name) = table.iter().next()?;
    let kind = match kind.as_str() {
        "env" => Kind::Variable,
        "file" => Kind::File,
        _ => return None,
    };
    Some((kind, name.as_str()?))
}

/// A text in the place of a secret that a shell, a compose file or a template should have replaced. Anyone
/// can guess it.
struct Placeholder<'a> {
    /// The name of the variable; `None` in a template.
    variable: Option<&'a str>,
}

impl<'a> Placeholder<'a> {
    /// Returns the placeholder that a text is: `${NAME}`, also with a default, `$NAME` or `{{ … }}`.
    fn of(text: &'a str) -> Option<Self> {
        let text = text.trim();
        let is_name = |name: &str| {
            let may_be = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
                && name.bytes().all(may_be)
        };
        if let Some(inner) = text.strip_prefix("${").and_then(|rest| rest.strip_suffix('}')) {
            let end = inner.find([':', '-', '?', '+', '=']).unwrap_or(inner.len());
            let name = inner.get(..end).filter(|name| is_name(name))?;
            return Some(Self { variable: Some(name) });
        }
        if text.starts_with("{{") && text.ends_with("}}") {
            return Some(Self { variable: None });
        }
        let name = text.strip_prefix('$').filter(|name| is_name(name))?;
        // A password may begin with `$`; variables of an environment have capitals.
        let is_variable = !name.bytes().any(|byte| byte.is_ascii_lowercase());
        is_variable.then_some(Self { variable: Some(name) })
    }

    fn advice(&self) -> String {
        match self.variable {
            Some(name) => format!("is a variable that is not replaced here: write `{{ env = \"{name}\" }}`"),
            None => "is a place of a template that was not filled in: render the file before, or write \
                     `{ env = \"NAME\" }` or `{ file = \"PATH\" }`"
                .to_owned(),
        }
    }
}

fn read(kind: Kind, name: &str) -> Result<String, String> {
    let (what, text) = match kind {
        Kind::Variable => {
            let text = std::env::var(name).map_err(|error| {
                format!("cannot read the environment variable `{name}`: {error}; set it for the daemon")
            });
            ("the environment variable", text?)
        }
        Kind::File => ("the file", of_file(name)?),
    };
    match Placeholder::of(&text) {
        Some(_) => Err(format!("{what} `{name}` contains a placeholder: put the secret itself there")),
        None => Ok(text),
    }
}

fn of_file(path: &str) -> Result<String, String> {
    let failed = |error: std::io::Error| {
        format!("cannot read the file `{path}`: {error}; check the path and its permissions")
    };
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(format!("`{path}` is not a regular file"));
    }
    let mut text = String::new();
    fs::File::open(path).map_err(failed)?.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(format!("the file `{path}` has more than {MAX_BYTES} bytes"));
    }
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The problems of a text whose key `token` is a secret.
    fn problems(text: &str) -> Vec<String> {
        let mut root = Value::Table(text.parse().unwrap());
        follow(&mut root, &["token"]).into_iter().map(|broken| broken.message).collect()
    }

    #[test]
    fn k5_a_placeholder_is_no_secret_wherever_it_stands() {
        let variable = "is a variable that is not replaced here: write `{ env = \"TOKEN\" }`";
        // K5.7
        for text in ["${TOKEN}", " ${TOKEN}\n", "${TOKEN:-secret}", "${TOKEN?}", "$TOKEN"] {
            assert_eq!(problems(&format!("token = {text:?}")), [variable], "{text}");
        }
        assert!(problems("token = '{{ .Values.token }}'")[0].contains("template"));
        assert_eq!(problems("[[a]]\ntoken = ['$TOKEN', 'good', '$TOKEN']"), [variable; 2]);
        assert!(problems("name = '$TOKEN'\n[settings]\ntoken = '$TOKEN'").is_empty());
        for secret in ["$ecret", "$2b$10$abc", "a$TOKEN", "${", "${}", "${a b}", "$", "{token}", "TOKEN", ""]
        {
            assert!(problems(&format!("token = {secret:?}")).is_empty(), "{secret}");
        }
    }
}
