//! Secrets that the configuration does not contain but names: `{ env = "NAME" }` and `{ file = "PATH" }`.

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
/// policies contain none. Returns the broken references, the last one first.
pub(crate) fn follow(root: &mut Value, secrets: &[&str]) -> Vec<Broken> {
    let mut broken = Vec::new();
    walk(root, &mut Vec::new(), false, secrets, &mut |value, at| {
        let Some((kind, name)) = reference(value) else { return };
        match read(kind, name) {
            Ok(text) => *value = Value::String(text),
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

/// Calls `visit` for each value that is a reference to a secret.
fn walk(
    value: &mut Value,
    at: &mut Vec<Path>,
    secret: bool,
    secrets: &[&str],
    visit: &mut impl FnMut(&mut Value, &[Path]),
) {
    if secret && reference(value).is_some() {
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

fn read(kind: Kind, name: &str) -> Result<String, String> {
    match kind {
        Kind::Variable => std::env::var(name).map_err(|error| {
            format!("cannot read the environment variable `{name}`: {error}; set it for the daemon")
        }),
        Kind::File => of_file(name),
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
