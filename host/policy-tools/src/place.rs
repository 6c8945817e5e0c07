//! A place where policies are stored, as written on the command line.

use std::{path::PathBuf, str::FromStr};

/// A place where policies are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// An OCI image layout and a tag in it.
    Layout(PathBuf, String),
    /// A directory, or a file in one.
    Directory(PathBuf),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("oci://") {
            return Err(
                "registries are not supported: push to a layout, oci:DIR:TAG, and copy it with an OCI tool"
                    .into(),
            );
        }
        if let Some(path) = text.strip_prefix("dir:").filter(|path| !path.is_empty()) {
            return Ok(Self::Directory(path.into()));
        }
        let layout = text.strip_prefix("oci:").filter(|path| !path.is_empty());
        let layout = layout.ok_or_else(|| format!("\"{text}\" is not oci:DIR[:TAG] or dir:PATH"))?;
        match layout.rsplit_once(':') {
            Some((directory, tag)) if !tag.contains('/') => {
                let first = tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
                let rest = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
                if directory.is_empty() || !first || tag.len() > 128 || !tag.chars().all(rest) {
                    return Err(format!(
                        "\"{tag}\" is not a valid tag: use up to 128 letters, digits, `_`, `.` and `-`"
                    ));
                }
                Ok(Self::Layout(directory.into(), tag.to_owned()))
            }
            _ => Ok(Self::Layout(layout.into(), "latest".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_parsed_and_malformed_ones_reported() {
        let layout = |directory: &str, tag: &str| Ok(Place::Layout(directory.into(), tag.into()));
        assert_eq!("oci:a/b:1.0".parse(), layout("a/b", "1.0"));
        assert_eq!("oci:/a:b/c".parse(), layout("/a:b/c", "latest"));
        assert_eq!("dir:x".parse(), Ok(Place::Directory("x".into())));
        for (text, part) in [
            ("oci://h/n:1", "registries are not supported"),
            ("file.wasm", "is not oci:DIR"),
            ("oci:a:", "not a valid tag"),
            ("oci:a:-x", "not a valid tag"),
        ] {
            let error = text.parse::<Place>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
